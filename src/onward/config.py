"""Settings: how long things take, and how long they are kept. All durations are in seconds."""

from __future__ import annotations

import os
from datetime import timedelta

from msgspec import Struct
from msgspec.structs import replace

from onward.errors import InvalidOption
from onward.policy import MAX_DELAY
from onward.text import safe_repr

DEFAULT_URL = "sqlite:///onward.db"

DAY = 86_400.0

_PAUSES = ("lease", "beat", "sweep", "poll", "stall_after", "cancel_poll", "prune_every")
_KEPT = ("keep_succeeded", "keep_cancelled")
_GRACES = (
    "grace",
    "timeout_grace",
    "cancel_raise_after",
    "cancel_kill_after",
    "abandon_after",
)


class Settings(Struct, frozen=True, kw_only=True):
    """What an app and its workers go by; the defaults suit most.

    Args:
        lease: how long a worker's claim on its jobs outlives its last sign of life.
        beat: how often the lease is renewed.
        sweep: how often vanished workers are looked for.
        poll: the longest pause between two looks for due jobs; wake-ups make most looks needless.
        grace: how long a stopping worker lets running jobs go on.
        stall_after: a worker process that gives no sign for so long is killed.
        timeout_grace: how long after its time limit an attempt may still end by itself.
        cancel_poll: how often a worker looks for jobs that it is asked to cancel.
        cancel_raise_after: when a cancelled body that went on gets an exception (on the loop).
        cancel_kill_after: when a cancelled body that went on is killed (in a process of its own).
        abandon_after: when a body that cannot be stopped gives its slot back.
        keep_succeeded: how long succeeded jobs are kept; None: for ever.
        keep_cancelled: how long cancelled jobs are kept; None: for ever.
        prune_every: how often old jobs are looked for; at least twice within the time for which
            they are kept.
        prune_step: how many jobs go in the first step; it doubles while steps are quick.

    Raises:
        InvalidOption: a value that cannot work, or two that contradict each other.
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
        for name in _PAUSES:
            _check(name, getattr(self, name), least="more than 0")
        for name in _GRACES:
            _check(name, getattr(self, name), least="0 or more")
        for name in _KEPT:
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), least="0 or more")
        check_range("prune_step", self.prune_step, 1, 100_000)
        if self.beat * 2 > self.lease:
            raise InvalidOption(
                f"beat={self.beat} and lease={self.lease} contradict each other",
                why="a lease must survive one renewal that comes late",
                fix=f"beat of at most {self.lease / 2:g}, or lease of at least {self.beat * 2:g}",
            )

    def with_lease(self, lease: float) -> Settings:
        """The same with another lease; the beat follows."""
        return replace(self, lease=lease, beat=lease / 3)


def _check(name: str, value: object, *, least: str) -> None:
    """A number of seconds from 0, or from just above it. NaN is on no side of a limit."""
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else -1
    if 0 <= number <= MAX_DELAY and (number or least == "0 or more"):
        return
    default = Settings.__struct_defaults__[Settings.__struct_fields__.index(name)]
    raise InvalidOption(
        f"{name}={safe_repr(value)} cannot work",
        why=f"it is a number of seconds, {least} and at most ten years",
        fix=f"Settings({name}={default}) is the default",
    )


def default_url() -> str:
    """The database when none is named: `ONWARD_URL`, or a file beside you."""
    return os.environ.get("ONWARD_URL") or DEFAULT_URL


def seconds(value: object, name: str) -> float:
    """A duration, a timedelta or a number of seconds, as a number; it may be negative.

    Raises:
        InvalidOption: it is no duration, or longer than ten years.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_DELAY:
        return float(value)
    raise InvalidOption(
        f"{name}={safe_repr(value)} cannot work",
        why="a duration is a timedelta, or a number of seconds, and at most ten years",
        fix=f"{name}=timedelta(minutes=5), or {name}=300",
    )


MOST_CONCURRENCY = 100_000


def check_range(name: str, value: object, low: int, high: int) -> int:
    """A whole number from `low` to `high`, as a plain one.

    Raises:
        InvalidOption: it is none.
    """
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return int.__index__(value)
    raise InvalidOption(
        f"{name}={safe_repr(value)} cannot work",
        why=f"{name} is a whole number from {low} to {high}",
        fix=f"{name}={max(low, min(high, 5))}",
    )
