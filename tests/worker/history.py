"""Short ways to read how jobs went."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from onward import Handle, Onward
from onward.failure import ErrorText
from onward.handle import read_error
from onward.store import store
from tests.support.ledger import Ledger
from tests.support.workers import wait_until

OVER = {"succeeded", "cancelled", "dead"}


def ends(job: Handle[Any]) -> list[str]:
    """How each closed attempt ended: `failed: timeout`, `lost`, `succeeded` …"""
    return [
        f"{attempt.state}: {attempt.reason}"
        if attempt.reason and attempt.reason != attempt.state
        else str(attempt.state)
        for attempt in job.attempts()
    ]


def last_error(job: Handle[Any]) -> ErrorText:
    """The error of the latest attempt that has one."""
    return next(read_error(attempt.error) for attempt in reversed(job.attempts()) if attempt.error)


def pauses(job: Handle[Any]) -> list[float]:
    """Seconds from the end of each attempt to the start of the next, on the database's clock."""
    past = job.attempts()
    starts = [attempt.started_at for attempt in past[1:]]
    return [
        start - attempt.ended_at
        for attempt, start in zip(past, starts, strict=False)
        if start is not None
    ]


def wait_for(job: Handle[Any], *states: str, seconds: float = 15.0) -> Handle[Any]:
    """Wait until a job is in one of these states."""
    wait_until(
        lambda: job.refresh().state in states, seconds, what=f"{job!r} to be {' or '.join(states)}"
    )
    return job


def wait_over(jobs: Iterable[Handle[Any]], seconds: float = 30.0) -> None:
    """Wait until all of these jobs are over or dead."""
    for job in jobs:
        wait_for(job, *OVER, seconds=seconds)


def refusals(app: Onward, job: Handle[Any] | None = None) -> list[store.Refusal]:
    """Writes that were refused."""
    return app.database.read(store.refusals, job.id if job else None)


def starts(ledger: Ledger, job: Handle[Any] | None = None) -> list[dict[str, Any]]:
    """The ledger's start lines."""
    return [line for line in _lines(ledger, job) if line["event"] == "start"]


def finishes(ledger: Ledger, job: Handle[Any] | None = None) -> list[dict[str, Any]]:
    """The ledger's end lines."""
    return [line for line in _lines(ledger, job) if line["event"] == "end"]


def _lines(ledger: Ledger, job: Handle[Any] | None) -> list[dict[str, Any]]:
    return [line for line in ledger.read() if job is None or line["job"] == job.id]


def most_at_once(lines: Sequence[dict[str, Any]]) -> int:
    """The largest number of bodies that were under way at one moment, by start and end lines."""
    steps = sorted((line["at"], 1 if line["event"] == "start" else -1) for line in lines)
    most = now = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most
