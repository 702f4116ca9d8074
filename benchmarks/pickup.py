"""Idle pick-up: from the call of an enqueue to the first line of the task in another process (S7).

The floor beside it is what the databases themselves need: on PostgreSQL two commits (the enqueue,
the claim) and a wake-up by NOTIFY between two processes; on SQLite two commits, and 3 ms because
SQLite wakes nobody.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import IO

import psycopg

from benchmarks import bare
from benchmarks.jobs import note_arrival, nothing
from benchmarks.measure import Line, percentile
from benchmarks.stage import ROOT, Place, fresh, onward, running, worker_words
from onward.ids import new_id

TIMES = 200
EVERY = 0.05
SQLITE_LOOK = 0.003

WAKER = """
import sys, time, psycopg
link = psycopg.connect(sys.argv[1], autocommit=True, prepare_threshold=None)
claims = psycopg.connect(sys.argv[1], autocommit=True, prepare_threshold=None)
link.execute("LISTEN bench")
print("ready", flush=True)
for note in link.notifies():
    claim = "UPDATE job SET state = 'running' WHERE id = %s AND state = 'queued'"
    claims.execute(claim, [note.payload[:36]])
    print(time.time() - float(note.payload[36:]), flush=True)
"""


def onward_arrivals(dialect: str) -> list[float]:
    """Milliseconds from the call to the first line of the task, in the worker's process."""
    with fresh(dialect) as place, onward(place):
        with running(place, worker_words()):
            nothing.enqueue(0).wait(30)
            time.sleep(1.0)
            due = time.perf_counter()
            for _ in range(TIMES):
                due += EVERY
                time.sleep(max(0.0, due - time.perf_counter()))
                note_arrival.enqueue(time.time())
            _until_arrived(place)
        return [float(text) * 1000 for text in place.arrivals.read_text().split()]


def _until_arrived(place: Place) -> None:
    end = time.monotonic() + 30
    while len(place.arrivals.read_text().split()) < TIMES:
        if time.monotonic() > end:
            raise TimeoutError("some jobs did not arrive")
        time.sleep(0.05)


def floor(dialect: str) -> list[float]:
    """The same in milliseconds with nothing but the database."""
    return _floor_sqlite() if dialect == "sqlite" else _floor_postgres()


def _floor_sqlite() -> list[float]:
    with fresh("sqlite") as place:
        bare.make_sqlite(place.url)
        connection = bare.open_sqlite(place.url)
        took: list[float] = []
        for number in range(TIMES):
            time.sleep(EVERY)
            began = time.perf_counter()
            with bare.transaction(connection):
                connection.execute(bare.SQLITE_INSERT, (str(number), "{}"))
            with bare.transaction(connection):
                connection.execute(bare.SQLITE_CLAIM, ("w", 1)).fetchall()
            took.append((time.perf_counter() - began + SQLITE_LOOK) * 1000)
        return took


def _floor_postgres() -> list[float]:
    """Insert and notify in one commit; a process that listens claims, in another."""
    with fresh("postgresql") as place:
        bare.make_postgres(place.url)
        waker = subprocess.Popen(
            [sys.executable, "-c", WAKER, place.url], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        try:
            assert waker.stdout is not None
            waker.stdout.readline()
            with psycopg.connect(place.url, autocommit=True, prepare_threshold=None) as link:
                return [_woken(link, waker.stdout) for _ in range(TIMES)]
        finally:
            waker.kill()
            waker.wait()


def _woken(link: psycopg.Connection, answers: IO[str]) -> float:
    time.sleep(EVERY)
    id = new_id()
    began = time.time()
    link.execute(
        "WITH born AS (INSERT INTO job (id, task, state, attempt, run_at, args)"
        " VALUES (%s, 'nothing', 'queued', 1, now(), '{}')) SELECT pg_notify('bench', %s)",
        [id, f"{id}{began!r}"],
    )
    return float(answers.readline()) * 1000


def pick_up(dialect: str, _: int) -> list[Line]:
    """S7."""
    lowest = floor(dialect)
    found = onward_arrivals(dialect)
    what = f"idle pick-up, {dialect}"
    lines: list[Line] = []
    for percent, most in ((50, 1.5), (99, 4.0)):
        base = percentile(lowest, percent)
        value = percentile(found, percent)
        name = f"{what}, p{percent}"
        ratio = value / base
        lines += [
            Line("S7", f"{name}: the floor", base, "ms"),
            Line("S7", f"{name}: Onward", value, "ms", ratio=ratio, to="the floor", most=most),
        ]
    return lines
