"""Decisions: how an attempt ended, and what becomes of its job. Pure: no clock, no chance of its
own, no I/O.

In:  a Job as it was seen, an Outcome, the task's Backoff, and a number between 0 and 1 as chance.
Out: a Change, which the store writes if the job is still as it was seen; otherwise it is decided
    again.
"""

from __future__ import annotations

import math
from typing import assert_never

from msgspec import Struct

from onward.errors import InvalidOption
from onward.job import Change, Job, NewJob
from onward.lifecycle import AttemptState, Event, JobState
from onward.text import safe_repr

MAX_DELAY = 10 * 365 * 86_400.0
"""The longest delay of all, in seconds: ten years is a date that every database can store."""


class Backoff(Struct, frozen=True, kw_only=True):
    """How long to wait before the next try: `base * factor ** failures` seconds, at most `cap`,
    spread by `jitter`.

    Jitter takes away up to its share of the delay (Marc Brooker, "Exponential Backoff And Jitter",
    AWS Architecture Blog, 2015), so that jobs which failed together do not come back together.

    Raises:
        InvalidOption: a value that cannot work.
    """

    base: float = 2.0
    factor: float = 3.0
    cap: float | None = 3600.0
    jitter: float = 0.2

    def __post_init__(self) -> None:
        if not (_is_number(self.base) and 0 < self.base < math.inf):
            raise _bad("base", self.base, "must be a number of seconds, more than 0")
        if not (_is_number(self.factor) and 1 <= self.factor < math.inf):
            raise _bad("factor", self.factor, "must be a number, at least 1")
        if self.cap is not None and not (_is_number(self.cap) and self.cap > 0):
            raise _bad("cap", self.cap, "must be a number of seconds, more than 0, or None")
        if not (_is_number(self.jitter) and 0 <= self.jitter <= 1):
            raise _bad("jitter", self.jitter, "must be a number between 0 and 1")

    def delay(self, failures: int, chance: float) -> float:
        """Seconds until the next try.

        Args:
            failures: failed attempts before this one, 0 or more; any number is safe.
            chance: a number between 0 and 1 that picks the place within the jitter.
        """
        limit = min(self.cap or MAX_DELAY, MAX_DELAY)
        exponent = math.log(self.base) + failures * math.log(self.factor)
        grown = limit if exponent >= math.log(limit) else math.exp(exponent)
        return grown * (1 - self.jitter * chance)


def _is_number(value: object) -> bool:
    """Whether it is a plain one: no delay can be added to a Decimal, nor to a timedelta."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _bad(name: str, value: object, rule: str) -> InvalidOption:
    return InvalidOption(
        f"Backoff({name}={safe_repr(value)}) cannot work: {name} {rule}",
        why="the delay between tries grows from these numbers",
        fix="Backoff(base=2, factor=3, cap=3600) waits 2, 6, 18, 54 seconds … up to an hour",
    )


class Returned(Struct, frozen=True, tag=True):
    """The body returned. `result` is its JSON text; follow-ups are jobs enqueued together with this
    outcome.
    """

    result: str
    follow_ups: tuple[NewJob, ...] = ()


class Raised(Struct, frozen=True, tag=True):
    """The body raised. `after` (seconds) or `backoff` stand in for the task's; a `final` error is
    not tried again.
    """

    error: str
    after: float | None = None
    backoff: Backoff | None = None
    final: bool = False


class TimedOut(Struct, frozen=True, tag=True):
    """The attempt passed its time limit. `abandoned`: its body could not be stopped and may still
    run; then the next attempt waits at least `hold` seconds, and longer while the body lives.
    """

    error: str
    abandoned: bool = False
    hold: float = 0.0


class Crashed(Struct, frozen=True, tag=True):
    """The process that ran this attempt alone died under it."""

    error: str


class Rejected(Struct, frozen=True, tag=True):
    """Stored arguments or the result do not fit the code: another try would meet the same, so there
    is none.
    """

    error: str


class Snoozed(Struct, frozen=True, tag=True):
    """The body asked to be called again after `delay` seconds; free of charge."""

    delay: float


class Discarded(Struct, frozen=True, tag=True):
    """The body said that the job is not worth doing any more. `by_rule`: it raised, and the task
    says so of that exception.
    """

    why: str
    by_rule: bool = False


class Released(Struct, frozen=True, tag=True):
    """The worker gave the attempt back unfinished, free of charge; the next waits `delay` s."""

    why: str = "shutdown"
    delay: float = 0.0


class Stopped(Struct, frozen=True, tag=True):
    """The body ended because it was asked to cancel."""


Outcome = (
    Returned | Raised | TimedOut | Crashed | Rejected | Snoozed | Discarded | Released | Stopped
)
"""Every way in which a worker that is alive can see an attempt end. A lost worker sees nothing: see
`recover`.
"""


def settle(job: Job, outcome: Outcome, backoff: Backoff, *, chance: float) -> Change:
    """Decide how this attempt ends and what becomes of the job.

    Args:
        job: as the writer saw it, running or cancelling.
        outcome: what the attempt came to.
        backoff: the task's delays between tries.
        chance: a number between 0 and 1, for the jitter.
    """
    if isinstance(outcome, Returned):
        return job.move(
            Event.SUCCEED,
            ended=AttemptState.SUCCEEDED,
            result=outcome.result,
            follow_ups=outcome.follow_ups,
        )
    if job.state is JobState.CANCELLING:
        return _cancelled(job, outcome)
    return _unfinished(job, outcome, backoff, chance)


def recover(job: Job, error: str) -> Change:
    """Decide what becomes of a job whose worker vanished. Losses have a budget of their own.

    Args:
        job: as the sweeper saw it, running or cancelling under a worker that is gone.
        error: what is known about the worker's end.
    """
    if job.state is JobState.CANCELLING:
        return job.move(Event.CANCEL, ended=AttemptState.LOST, reason="lost", error=error)
    event = Event.BURY if job.losses >= job.max_losses else Event.RECOVER
    return job.move(
        event, ended=AttemptState.LOST, reason="lost", error=error, losses=job.losses + 1
    )


def _cancelled(job: Job, outcome: Outcome) -> Change:
    """From cancelling every end but success is cancelled. The attempt keeps its own outcome;
    nothing is charged.
    """
    match outcome:
        case Raised(error=error):
            return job.move(Event.CANCEL, ended=AttemptState.FAILED, reason="error", error=error)
        case TimedOut(error=error, abandoned=abandoned):
            return job.move(
                Event.CANCEL,
                ended=AttemptState.FAILED,
                reason="timeout",
                error=error,
                abandoned=abandoned,
            )
        case Crashed(error=error):
            return job.move(Event.CANCEL, ended=AttemptState.FAILED, reason="crashed", error=error)
        case Rejected(error=error):
            return job.move(Event.CANCEL, ended=AttemptState.FAILED, reason="rejected", error=error)
        case Released() | Snoozed():
            return job.move(Event.CANCEL, ended=AttemptState.RELEASED, reason="cancelled")
        case Stopped() | Discarded() | Returned():
            return job.move(Event.CANCEL, ended=AttemptState.CANCELLED, reason="cancelled")
        case _:
            assert_never(outcome)


def _unfinished(job: Job, outcome: Outcome, backoff: Backoff, chance: float) -> Change:
    """A running attempt that ended without success."""
    match outcome:
        case Raised(error=error, after=after, final=final):
            own = (outcome.backoff or backoff).delay(job.failures, chance)
            return _failed(job, "error", error, delay=own if after is None else after, final=final)
        case TimedOut(error=error, abandoned=abandoned, hold=hold):
            delay = max(hold, backoff.delay(job.failures, chance))
            return _failed(job, "timeout", error, delay=delay, abandoned=abandoned)
        case Crashed(error=error):
            return _failed(job, "crashed", error, delay=backoff.delay(job.failures, chance))
        case Rejected(error=error):
            return _failed(job, "rejected", error, final=True)
        case Snoozed(delay=delay):
            return job.move(
                Event.SNOOZE, ended=AttemptState.RELEASED, reason="snoozed", delay=delay
            )
        case Discarded(why=why):
            return job.move(Event.DROP, ended=AttemptState.CANCELLED, reason=why)
        case Released(why=why, delay=delay):
            return job.move(Event.RELEASE, ended=AttemptState.RELEASED, reason=why, delay=delay)
        case Stopped() | Returned():
            return job.move(Event.RELEASE, ended=AttemptState.RELEASED, reason="stopped")
        case _:
            assert_never(outcome)


def _failed(
    job: Job,
    reason: str,
    error: str,
    *,
    delay: float = 0.0,
    final: bool = False,
    abandoned: bool = False,
) -> Change:
    """A failure is charged to the budget of failures; without another try the job is dead."""
    event = Event.BURY if final or job.failures + 1 >= job.max_attempts else Event.RETRY
    return job.move(
        event,
        ended=AttemptState.FAILED,
        reason=reason,
        error=error,
        delay=0.0 if event is Event.BURY else delay,
        failures=job.failures + 1,
        abandoned=abandoned,
    )
