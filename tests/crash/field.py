"""Short ways to do what these tests do over and over: enqueue, wait, kill, freeze, thaw."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import apsw
import pytest

from onward.app import Onward
from onward.errors import DatabaseError
from onward.store import store
from onward.store.database import Database
from onward.store.sqlite import SqliteDatabase
from onward.task import Call
from tests.support.history import rows
from tests.support.workers import RunningWorker, wait_until

SHORT: dict[str, Any] = {"lease": 1.5, "beat": 0.4, "sweep": 0.3}
"""Leases that tests can wait for."""

BUSY = 4.0 if "PYTEST_XDIST_WORKER" in os.environ else 0.5
"""Seconds that a busy machine may add to what is said to take so long: a test that runs beside
others gets more than one that has the machine to itself.
"""


class Pace(NamedTuple):
    """How soon vanished workers are looked for, and what is promised of it.

    Args:
        settings: lease, beat and sweep.
        busy: seconds that a busy machine may add; none where the test has the machine to itself.
    """

    settings: dict[str, Any]
    busy: float

    @property
    def lease(self) -> float:
        return float(self.settings["lease"])

    @property
    def recovered_in(self) -> float:
        """Within so many seconds of a worker's death its jobs are runnable again, or dead:
        L + 2S + 2.
        """
        return self.lease + 2 * float(self.settings["sweep"]) + 2.0 + self.busy


SCALED = Pace(SHORT, 1.5 * BUSY)
"""Half as much again for the start of a process, which is within the time that is measured."""

AS_WRITTEN = Pace({"lease": 3.0, "beat": 1.0, "sweep": 1.0}, 0.0)

PACES = [
    pytest.param(SCALED, id="scaled"),
    pytest.param(AS_WRITTEN, id="as written", marks=[pytest.mark.soak, pytest.mark.alone]),
]
"""For tests of what is promised in seconds: quickly among others, and to the letter alone."""

LIVE = ("queued", "running", "cancelling", "waiting")
OWNED = ("running", "cancelling")


def enqueue(app: Onward, calls: Iterable[Call[Any]]) -> list[str]:
    """Enqueue all at once; returns the ids."""
    return [job.id for job in app.enqueue_many(calls)]


def live(app: Onward) -> int:
    """How many jobs are neither over nor dead."""
    counts = app.counts()
    return sum(counts[state] for state in LIVE)


def listed(app: Onward) -> list[str]:
    """The ids that `onward job list` shows."""
    none = dict.fromkeys(("before", "state", "queue", "task"))
    return [row[0] for row in app.database.read(store.read, "list", limit=1000, **none)]


def wait_until_over(app: Onward, seconds: float = 30.0) -> None:
    """Wait until nothing is left to do."""
    end = time.monotonic() + seconds
    while live(app):
        assert time.monotonic() < end, f"not over within {seconds:g} s: {app.counts()}"
        time.sleep(0.05)


def wait_for_state(app: Onward, id_: str, state: str, seconds: float = 15.0) -> None:
    """Wait until a job is in this state."""
    wait_until(lambda: app.get(id_).state == state, seconds, what=f"{id_} {state}")


def wait_until_recovered(app: Onward, ids: Iterable[str], since: float, pace: Pace) -> None:
    """Wait until jobs whose attempts were lost are runnable again, or over: that is the time that
    is promised, and how soon the next attempts then start is the machine's matter.

    Args:
        since: when their worker died, on the monotonic clock.
    """

    def left() -> list[str]:
        now = {id_: app.get(id_) for id_ in ids}
        return [id_ for id_, job in now.items() if job.attempt == 1 and job.state in OWNED]

    end = since + pace.recovered_in
    wait_until(lambda: not left(), max(0.0, end - time.monotonic()), what="all recovered in time")


def wait_until_begun(app: Onward, ids: Iterable[str], seconds: float = 15.0) -> None:
    """Wait until all these jobs run."""
    for id_ in ids:
        wait_for_state(app, id_, "running", seconds)


# --- processes ------------------------------------------------------------------------------------


def kill(pid: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal; returns whether somebody was there."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def freeze(worker: RunningWorker, database: Database) -> list[int]:
    """SIGSTOP a supervisor and all its processes; returns whom. Not inside a write to SQLite: that
    would hold the file for everybody, which is another test's matter.
    """
    while True:
        pids = [worker.supervisor_pid, *worker.pids(), *worker.isolated_pids()]
        for pid in pids:
            kill(pid, signal.SIGSTOP)
        if _writable(database):
            return pids
        thaw(pids)
        time.sleep(0.05)


def thaw(pids: Iterable[int]) -> None:
    """SIGCONT."""
    for pid in pids:
        kill(pid, signal.SIGCONT)


def _writable(database: Database) -> bool:
    """Whether nobody holds the write lock, give or take a moment."""
    if not isinstance(database, SqliteDatabase):
        return True
    connection = apsw.Connection(str(database.path))
    connection.set_busy_timeout(300)
    try:
        connection.execute("BEGIN IMMEDIATE; ROLLBACK")
    except apsw.BusyError:
        return False
    finally:
        connection.close()
    return True


# --- watch ----------------------------------------------------------------------------------------


@contextmanager
def sampled(look: Callable[[], Any], every: float = 0.02) -> Iterator[list[tuple[float, Any]]]:
    """Look again and again in a thread while the block runs; the list gets (monotonic time, what
    was seen). While the database is away nothing is seen.
    """
    seen: list[tuple[float, Any]] = []
    over = threading.Event()

    def run() -> None:
        while not over.wait(every):
            with suppress(DatabaseError):
                seen.append((time.monotonic(), look()))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join(30)


def beats(database: Database) -> dict[str, float]:
    """When each live worker's lease was last renewed, on the database's clock."""
    when = "beat_at" if database.dialect == "sqlite" else "extract(epoch FROM beat_at)::float8"
    found = rows(
        database, f"SELECT id, {when} FROM onward.worker WHERE state IN ('active', 'draining')"
    )
    return {str(row[0]): row[1] for row in found}


def longest_gap(seen: Iterable[tuple[float, dict[str, float]]]) -> float:
    """The longest time between two renewals of one worker, as the database tells it."""
    times: dict[str, list[float]] = {}
    for _, sample in seen:
        for worker, at in sample.items():
            known = times.setdefault(worker, [])
            if not known or known[-1] != at:
                known.append(at)
    gaps = [b - a for known in times.values() for a, b in itertools.pairwise(known)]
    return max(gaps, default=0.0)
