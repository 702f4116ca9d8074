"""How a task says how it ends, beside returning or raising: `Retry`, `Snooze`, `Discard`."""

from __future__ import annotations

from datetime import timedelta
from enum import Enum

from onward.config import seconds


class Signal(Exception):
    """Base of what a task raises to say how its attempt ends."""


class Retry(Signal):
    """Try again: a failed attempt, charged to the budget of failures.

    Args:
        why: for people who read the history.
        after: how long to wait, a timedelta or seconds; by default as the task's backoff says.

    Raises:
        InvalidOption: `after` is no duration.
    """

    def __init__(self, why: str = "", *, after: timedelta | float | None = None) -> None:
        super().__init__(why or "the task asked for another try")
        self.after = None if after is None else max(0.0, seconds(after, "after"))


class Snooze(Signal):
    """Not yet: give the attempt back, free of charge, and come back later.

    Args:
        delay: how long to wait, a timedelta or seconds.

    Raises:
        InvalidOption: `delay` is no duration.
    """

    def __init__(self, delay: timedelta | float) -> None:
        super().__init__(delay)  # As it was given: exceptions are pickled by their arguments.
        self.delay = max(0.0, seconds(delay, "delay"))

    def __str__(self) -> str:
        return f"snoozed for {self.delay:g} s"


class Discard(Signal):
    """Not worth doing any more: the job ends cancelled, with this reason.

    Args:
        why: for people who read the history.
    """

    def __init__(self, why: str = "discarded by the task") -> None:
        super().__init__(why)
        self.why = why


class Cancelled(Signal):
    """The job was asked to stop. Raised by `current().check()`; let it pass.

    An `async` body that goes on without looking gets `asyncio.CancelledError` instead.
    """


class Verdict(Enum):
    """What an exception means for a task, where it is not "try again after the backoff"."""

    BURY = "bury"
    DROP = "drop"


BURY = Verdict.BURY
"""No other try: the job is dead at once."""

DROP = Verdict.DROP
"""Not worth doing any more: the job ends cancelled."""
