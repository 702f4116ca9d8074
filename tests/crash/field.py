"""Short ways to do what these tests do over and over: enqueue, wait, kill, freeze, thaw."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import apsw

from onward.app import Onward
from onward.errors import DatabaseError
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

LIVE = ("queued", "running", "cancelling", "waiting")


def enqueue(app: Onward, calls: Iterable[Call[Any]]) -> list[str]:
    """Enqueue all at once; returns the ids."""
    return [job.id for job in app.enqueue_many(calls)]


def live(app: Onward) -> int:
    """How many jobs are neither over nor dead."""
    counts = app.counts()
    return sum(counts[state] for state in LIVE)


def wait_until_over(app: Onward, seconds: float = 30.0) -> None:
    """Wait until nothing is left to do."""
    end = time.monotonic() + seconds
    while live(app):
        assert time.monotonic() < end, f"not over within {seconds:g} s: {app.counts()}"
        time.sleep(0.05)


def wait_for_state(app: Onward, id_: str, state: str, seconds: float = 15.0) -> None:
    """Wait until a job is in this state."""
    wait_until(lambda: app.get(id_).state == state, seconds, what=f"{id_} {state}")


def wait_until_recovered(app: Onward, id_: str, seconds: float) -> None:
    """Wait until a job whose attempt was lost is runnable again: that is the time that is promised,
    and how soon the next attempt then starts is the machine's matter.
    """
    wait_until(lambda: app.get(id_).attempt > 1, seconds, what=f"{id_} recovered")


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
