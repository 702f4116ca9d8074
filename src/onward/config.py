"""Settings: how long things take, and how long they are kept. All durations are in seconds."""

from __future__ import annotations

import os
from datetime import timedelta

from msgspec import Struct

from onward.errors import InvalidOption

DEFAULT_URL = "sqlite:///onward.db"

DAY = 86_400.0


class Settings(Struct, frozen=True, kw_only=True):
    """What an app and its workers go by; the defaults suit most.

    Args:
        lease: how long a worker's claim on its jobs outlives its last sign of life.
        beat: how often the lease is renewed.
        sweep: how often vanished workers are looked for.
        poll: the longest pause between two looks for due jobs; wake-ups make most looks unnecessary.
        grace: how long a stopping worker lets running jobs go on.
        stall_after: a worker process that gives no sign for so long is killed.
        timeout_grace: how long after its time limit an attempt may still end by itself.
        cancel_poll: how often a worker looks for jobs that it is asked to cancel.
        cancel_raise_after: when a cancelled body that went on gets an exception (on the loop).
        cancel_kill_after: when a cancelled body that went on is killed (in a process of its own).
        abandon_after: when a body that cannot be stopped gives its slot back.
        keep_succeeded: how long succeeded jobs are kept; None: for ever.
        keep_cancelled: how long cancelled jobs are kept; None: for ever.
        prune_every: how often old jobs are looked for.
        prune_step: how many jobs go in one step.
    """

    lease: float = 15.0
    beat: float = 5.0
    sweep: float = 2.0
    poll: float = 0.5
    grace: float = 30.0
    stall_after: float = 60.0
    timeout_grace: float = 1.0
    cancel_poll: float = 1.0
    cancel_raise_after: float = 2.0
    cancel_kill_after: float = 5.0
    abandon_after: float = 10.0
    keep_succeeded: float | None = 7 * DAY
    keep_cancelled: float | None = 7 * DAY
    prune_every: float = 60.0
    prune_step: int = 500

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise InvalidOption(f"{name}={value} cannot work: it must be 0 or more seconds")
        if self.lease <= 0:
            raise InvalidOption(f"lease={self.lease} cannot work: it must be more than 0 seconds")
        if self.beat * 2 > self.lease:
            raise InvalidOption(
                f"beat={self.beat} and lease={self.lease} contradict each other",
                why="a lease must survive one renewal that comes late",
                fix=f"set beat to at most {self.lease / 2:g}, or lease to at least {self.beat * 2:g}",
            )

    def with_lease(self, lease: float) -> Settings:
        """The same with another lease; the beat follows."""
        return Settings(**{**_fields(self), "lease": lease, "beat": lease / 3})


def _fields(settings: Settings) -> dict[str, float]:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


def default_url() -> str:
    """The database when none is named: `ONWARD_URL`, or a file beside you."""
    return os.environ.get("ONWARD_URL") or DEFAULT_URL


def seconds(value: timedelta | float, name: str) -> float:
    """A duration as a number.

    Raises:
        InvalidOption: it is no duration.
    """
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value:
        return float(value)
    raise InvalidOption(
        f"{name}={value!r} is not a duration",
        why="durations are timedelta values, or numbers of seconds",
        fix=f"{name}=timedelta(minutes=5), or {name}=300",
    )
