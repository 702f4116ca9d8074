"""A job as a decision sees it, and the change that a decision makes of it.

`Job.move` is the only maker of a `Change`, so no code can ask the store for a move that the table
does not have. A Change says what the writer saw (state, attempt, owner); the store writes it only
where the row is still so. It carries durations, never times: the database's clock turns them into
times.
"""

from __future__ import annotations

from typing import TypedDict, Unpack

from msgspec import Struct

from onward.errors import IllegalTransition
from onward.lifecycle import (
    ATTEMPT_ENDS,
    JOB_MOVES,
    AttemptState,
    Event,
    JobState,
    allowed_events,
    mints_attempt,
)


class NewJob(Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A job on its way into the store, as an array whose order `enqueue` in SQL goes by.

    `run_at` is in seconds since the epoch, `delay` and `timeout` are in seconds. With neither
    `run_at` nor `delay` the job is due at once.
    """

    id: str
    task: str
    queue: str
    priority: int
    args: str
    max_attempts: int
    max_losses: int
    timeout: float | None = None
    run_at: float | None = None
    delay: float | None = None


class Values(TypedDict, total=False):
    """What an event brings along: see the fields of `Change`."""

    ended: AttemptState
    delay: float
    reason: str
    error: str
    result: str
    abandoned: bool
    failures: int
    losses: int
    follow_ups: tuple[NewJob, ...]


class Change(Struct, frozen=True, kw_only=True):
    """One move of one job: what must still be true, and what becomes of it."""

    id: str
    task: str
    event: Event
    before: JobState
    after: JobState
    attempt: int
    worker: str | None
    next_attempt: int
    budget_from: int
    failures: int
    losses: int
    ended: AttemptState | None = None
    delay: float = 0.0
    reason: str | None = None
    error: str | None = None
    result: str | None = None
    abandoned: bool = False
    follow_ups: tuple[NewJob, ...] = ()

    @property
    def arrow(self) -> str:
        """The move as it is spelt everywhere: `running > queued`."""
        return f"{self.before} > {self.after}"


class Job(Struct, frozen=True, kw_only=True):
    """A job as one reader saw it. `failures` and `losses` count since `budget_from`; `timeout` is
    in seconds.
    """

    id: str
    task: str
    queue: str
    priority: int
    state: JobState
    attempt: int
    worker: str | None
    args: str
    max_attempts: int
    max_losses: int
    failures: int
    losses: int
    budget_from: int
    timeout: float | None

    def move(self, event: Event, **values: Unpack[Values]) -> Change:
        """Make the change that `event` makes of this job.

        Args:
            event: the name of the move.
            values: what the event brings along.

        Raises:
            IllegalTransition: the table has no such move from this state.
        """
        move = (self.state, event)
        after = JOB_MOVES.get(move)
        if after is None:
            raise self._illegal(event)
        if values.get("ended") not in _ENDS[move]:
            raise self._bad_end(event, values.get("ended"))
        fresh = move in _FRESH
        number = self.attempt + 1 if move in _MINTING else self.attempt
        values.setdefault("failures", 0 if fresh else self.failures)
        values.setdefault("losses", 0 if fresh else self.losses)
        return Change(
            id=self.id,
            task=self.task,
            event=event,
            before=self.state,
            after=after,
            attempt=self.attempt,
            worker=self.worker,
            next_attempt=number,
            budget_from=number if fresh else self.budget_from,
            **values,
        )

    def _bad_end(self, event: Event, ended: AttemptState | None) -> IllegalTransition:
        """A change whose attempt would end in a way that the table does not have."""
        ends = ATTEMPT_ENDS.get((self.state, event))
        possible = ", ".join(sorted(ends)) if ends else "no end of the attempt"
        return IllegalTransition(
            f"cannot {event} job {self.id}: an attempt cannot end as {ended} there",
            why=f"{event} from {self.state} goes with {possible}",
            fix="onward lifecycle shows every legal move",
        )

    def _illegal(self, event: Event) -> IllegalTransition:
        allowed = ", ".join(allowed_events(self.state))
        why = f"from {self.state} the legal events are: {allowed}"
        return IllegalTransition(
            f"cannot {event} job {self.id}: it is {self.state}",
            why=why if allowed else f"{self.state} is final: no move leads out of it",
            fix="onward lifecycle shows every legal move",
        )


# The table, ready for a look on each move of each job.
_ENDS = {move: ATTEMPT_ENDS.get(move, frozenset({None})) for move in JOB_MOVES}
_MINTING = {move for move, after in JOB_MOVES.items() if mints_attempt(move[0], after)}
_FRESH = {move for move in JOB_MOVES if move[1] is Event.REQUEUE}


class Attempt(Struct, frozen=True, kw_only=True):
    """One closed try at a job: history, never changed. Times are in seconds since the epoch."""

    job: str
    number: int
    state: AttemptState
    event: Event
    worker: str | None
    started_at: float | None
    ended_at: float
    reason: str | None
    error: str | None
    abandoned: bool
