"""What can be done to the rows in one transaction: the store's operations, with whoever does them.

A deed is a value, so what it does to given rows is found out once, however many states hold these
rows. Workers and jobs in it are numbers; so are they in what it answers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from onward.app import cancel_change, discard_change, requeue_change
from onward.errors import IllegalTransition
from onward.job import Change, Job, NewJob
from onward.lifecycle import OWNED, JobState
from onward.policy import (
    Backoff,
    Discarded,
    Outcome,
    Raised,
    Rejected,
    Released,
    Returned,
    Snoozed,
    Stopped,
    TimedOut,
    recover,
    settle,
)
from onward.store import store
from onward.store.statements import Op
from onward.store.store import FIRST_ID, Registration
from tests.proof.explorer_place import NOW, QUEUE, TASK, Bounds, Names
from tests.proof.explorer_state import NOBODY, Held, Rows

BACKOFF = Backoff(base=1, factor=1, jitter=0)
LANE = (QUEUE, 0)
TASKS = store.dumps([TASK])
ALL = 500

OUTCOMES: dict[str, Outcome] = {
    "succeed": Returned("null"),
    "follow": Returned("null"),
    "raise": Raised("boom"),
    "final": Raised("boom", final=True),
    "reject": Rejected("boom"),
    "timeout": TimedOut("late", abandoned=True, hold=1.0),
    "snooze": Snoozed(1.0),
    "discard": Discarded("not wanted"),
    "release": Released(),
    "stop": Stopped(),
}
"""How an attempt can end. `follow` is a success that brings every job that is not there yet."""


class Write(NamedTuple):
    """One attempt's outcome on its way into the database."""

    worker: int
    held: Held
    outcome: str


class Deed(NamedTuple):
    """One operation: what, by or to which worker, on which job, with what else."""

    kind: str
    worker: int = NOBODY
    job: int = NOBODY
    limit: int = ALL
    writes: tuple[Write, ...] = ()
    how: str = ""


class Actor:
    """Makes the store's operations of deeds.

    Args:
        rows: the database's.
        bounds: how long a lease is, and what a job may spend.
        ids: which number has which id.
    """

    def __init__(self, rows: Rows, bounds: Bounds, ids: Names) -> None:
        self._rows = rows
        self._bounds = bounds
        self._ids = ids

    def op(self, deed: Deed) -> Op[Any]:
        """The operation; it returns what its caller learns."""
        make: Op[Any] = getattr(self, deed.kind)(deed)
        return make

    # --- workers ----------------------------------------------------------------------------------

    def register(self, deed: Deed) -> Op[Any]:
        yield from store.register(registration(self._ids.workers[deed.worker], self._bounds.lease))

    def beat(self, deed: Deed) -> Op[Any]:
        """Whether it lives. `short`: by somebody who was told of a shorter lease."""
        lease = self._bounds.lease / 2 if deed.how == "short" else self._bounds.lease
        alive = yield from store.beat([self._ids.workers[deed.worker]], lease)
        return bool(alive)

    def drain(self, deed: Deed) -> Op[Any]:
        return (yield from store.drain(self._ids.workers[deed.worker]))

    def stop(self, deed: Deed) -> Op[Any]:
        return (yield from store.stop(self._ids.workers[deed.worker], "done"))

    def lose(self, deed: Deed) -> Op[Any]:
        """`proven`, or by a keeper who saw the lease as it is (`seen`) or as it was (`stale`)."""
        seen = None
        if deed.how != "proven":
            seen = NOW + self._rows.workers[deed.worker].lease
            seen -= 0.25 if deed.how == "stale" else 0.0
        return (yield from store.lose(self._ids.workers[deed.worker], "gone", seen))

    def bury(self, deed: Deed) -> Op[Any]:
        worker = self._ids.workers[deed.worker]
        return self._told((yield from store.bury_worker(worker, "killed", recover)))

    def sweep(self, deed: Deed) -> Op[Any]:
        leave = [] if deed.job == NOBODY else [self._ids.jobs[deed.job]]
        return self._told((yield from store.sweep(recover, deed.limit, leave)))

    def _told(self, changes: list[Change]) -> tuple[int, ...]:
        return tuple(sorted(self._ids.jobs.index(change.id) for change in changes))

    # --- jobs -------------------------------------------------------------------------------------

    def enqueue(self, deed: Deed) -> Op[Any]:
        return (yield from store.enqueue_ours([self._new(deed.job)]))

    def again(self, deed: Deed) -> Op[Any]:
        """The repeat of an enqueue whose answer was lost."""
        return bool((yield from store.enqueue_again([self._new(deed.job)])))

    def claim(self, deed: Deed) -> Op[Any]:
        """What was claimed, by a worker that looks from the start, or behind the place of a job.
        `strange`: it knows no task of ours.
        """
        after = (0.0, FIRST_ID)
        if deed.job != NOBODY:
            after = (NOW + self._rows.jobs[deed.job].due, self._ids.jobs[deed.job])
        worker = self._ids.workers[deed.worker]
        tasks = '["another"]' if deed.how == "strange" else TASKS
        claimed = yield from store.claim(worker, tasks, LANE, after, deed.limit)
        return self.jobs([one.job for one in claimed])

    def owned(self, deed: Deed) -> Op[Any]:
        return self.jobs((yield from store.owned(self._ids.workers[deed.worker])))

    def cancelling(self, deed: Deed) -> Op[Any]:
        found = yield from store.cancelling(self._ids.workers[deed.worker])
        return tuple((self._ids.jobs.index(id_), attempt) for id_, attempt in found)

    def jobs(self, jobs: list[Job]) -> tuple[Held, ...]:
        """Jobs that a worker was told it owns."""
        number = self._ids.jobs.index
        return tuple(
            Held(
                number(job.id),
                job.attempt,
                job.state.value,
                job.failures,
                job.losses,
                job.budget_from,
            )
            for job in jobs
        )

    def hold(self, deed: Deed) -> Op[Any]:
        attempt = self._rows.jobs[deed.job].attempt - (deed.how == "stale")
        return (yield from store.hold(self._ids.jobs[deed.job], attempt, 1.0))

    def cancel(self, deed: Deed) -> Op[Any]:
        return (yield from self._move(deed, cancel_change))

    def requeue(self, deed: Deed) -> Op[Any]:
        return (yield from self._move(deed, requeue_change))

    def discard(self, deed: Deed) -> Op[Any]:
        return (yield from self._move(deed, discard_change("nobody wants it")))

    def _move(self, deed: Deed, decide: Any) -> Op[Any]:
        try:
            state = yield from store.move(self._ids.jobs[deed.job], decide)
        except IllegalTransition:
            return "illegal"
        return state.value

    # --- outcomes ---------------------------------------------------------------------------------

    def apply(self, deed: Deed) -> Op[Any]:
        """Which of the writes took."""
        taken = yield from store.apply([self.change(write) for write in deed.writes])
        return tuple(sorted(self._ids.jobs.index(id_) for id_ in taken))

    def look(self, deed: Deed) -> Op[Any]:
        """What a worker sees of a job whose change did not take: whether it took after all, and its
        state where it is still this worker's. Where it is not, the write is kept as refused.
        """
        (write,) = deed.writes
        change = self.change(write)
        found, ours = yield from store.look(change)
        if ours:
            return True, None
        own = found is not None and found.state in OWNED
        if found and own and (found.attempt, found.worker) == (change.attempt, change.worker):
            return False, found.state.value
        yield from store.refuse([store.refusal_of(change, found)])
        return False, None

    def change(self, write: Write) -> Change:
        """What policy makes of the outcome, of the job as its worker has it in mind."""
        held = write.held
        job = Job(
            id=self._ids.jobs[held.job],
            task=TASK,
            queue=QUEUE,
            priority=0,
            state=JobState(held.seen),
            attempt=held.attempt,
            worker=self._ids.workers[write.worker],
            args="{}",
            max_attempts=self._bounds.max_attempts,
            max_losses=self._bounds.max_losses,
            failures=held.failures,
            losses=held.losses,
            budget_from=held.budget_from,
            timeout=None,
        )
        outcome = OUTCOMES[write.outcome]
        if write.outcome == "follow":
            new = [number for number, row in enumerate(self._rows.jobs) if not row.state]
            outcome = Returned("null", tuple(self._new(number) for number in new))
        return settle(job, outcome, BACKOFF, chance=0.0)

    def _new(self, job: int) -> NewJob:
        return NewJob(
            id=self._ids.jobs[job],
            task=TASK,
            queue=QUEUE,
            priority=0,
            args="{}",
            max_attempts=self._bounds.max_attempts,
            max_losses=self._bounds.max_losses,
        )


def registration(id_: str, lease: float) -> Registration:
    """A worker that serves the one queue there is."""
    return Registration(
        id=id_,
        name="w",
        host="h",
        pid=1,
        version="0",
        queues=(QUEUE,),
        tasks=(TASK,),
        concurrency=4,
        lease=lease,
    )
