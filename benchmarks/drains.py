"""Drains: how fast queued jobs are run and recorded (S1, S2, S3, S8, S9, S12).

All jobs are enqueued first; then a worker is started. The time is from the start of the first job
to the moment at which the database has recorded the last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import psycopg

from benchmarks import bare
from benchmarks.jobs import nothing, nothing_in_a_thread
from benchmarks.measure import Line, compared, in_turn, line
from benchmarks.stage import ROOT, Place, drained, fresh, onward, running, worker_words
from onward import Task

JOBS = 100_000

LEFT = {
    "postgresql": "SELECT count(*) FROM onward.job WHERE state IN ('queued', 'running')"
    " AND run_at <= now() AND task <> 'unknown'",
    "sqlite": "SELECT count(*) FROM onward_job WHERE state IN ('queued', 'running')"
    " AND run_at <= unixepoch('subsec') AND task <> 'unknown'",
}


def drain_onward(
    dialect: str,
    jobs: int = JOBS,
    *,
    processes: int = 1,
    concurrency: int = 500,
    task: Task[[int], None] = nothing,
) -> float:
    """Jobs a second on a fresh database."""
    with fresh(dialect) as place:
        return drain_here(place, jobs, processes=processes, concurrency=concurrency, task=task)


def drain_here(
    place: Place,
    jobs: int,
    *,
    processes: int = 1,
    concurrency: int = 500,
    task: Task[[int], None] = nothing,
) -> float:
    """Jobs a second on a database that may hold others already."""
    with onward(place) as app:
        app.enqueue_many(task.call(number) for number in range(jobs))
    place.settle()
    words = worker_words("--processes", str(processes), "--concurrency", str(concurrency))
    with running(place, words):
        return jobs / drained(place, jobs, LEFT[place.dialect])


def drain_bare(dialect: str, form: str, jobs: int = JOBS, *, processes: int = 1) -> float:
    """The same by the bare loop."""
    with fresh(dialect) as place, ExitStack() as stack:
        if dialect == "sqlite":
            bare.make_sqlite(place.url)
            bare.fill_sqlite(place.url, jobs)
        else:
            bare.make_postgres(place.url)
            bare.fill_postgres(place.url, jobs)
        place.settle()
        words = [sys.executable, "-m", "benchmarks.bare", place.url, form]
        for _ in range(processes):
            stack.enter_context(running(place, words))
        return jobs / drained(place, jobs, bare.LEFT)


# --- S1, S2, S3, S12 ------------------------------------------------------------------------------


def plain(dialect: str, rounds: int) -> list[Line]:
    """One process and two, on the loop and in threads, beside the bare loop in both forms."""
    mark = "S3" if dialect == "sqlite" else "S1"
    runs: dict[str, Callable[[], float]] = {
        "cold": lambda: drain_bare(dialect, "cold"),
        "plain": lambda: drain_bare(dialect, "plain"),
        "one": lambda: drain_onward(dialect),
        "two": lambda: drain_onward(dialect, processes=2),
        "threads": lambda: drain_onward(dialect, task=nothing_in_a_thread),
    }
    found = in_turn(runs, rounds)
    what = f"drain {JOBS:,}, {dialect}"
    base = "the bare loop (cold)"
    two = ("S3", 1.0) if dialect == "sqlite" else ("S2", None)
    return [
        line(mark, f"{what}: the bare loop, cold table and attempt", found["cold"]),
        line(mark, f"{what}: the bare loop, nothing else", found["plain"]),
        compared(
            mark,
            f"{what}: Onward, one process",
            found["one"],
            found["cold"],
            base,
            target=0.4 if dialect == "sqlite" else 0.5,
        ),
        compared(
            two[0],
            f"{what}: Onward, two processes",
            found["two"],
            found["one"],
            "one process",
            target=two[1],
        ),
        compared(
            "S12",
            f"{what}: Onward, plain functions in threads",
            found["threads"],
            found["one"],
            "on the loop",
            target=0.3,
        ),
    ]


# --- S8: full tables ------------------------------------------------------------------------------

KEPT = 1_000_000
UNKNOWN = 100_000


def fill(place: Place, *, unknown: bool) -> None:
    """A million finished jobs, a million for next month; due ones of a task that nobody knows."""
    with onward(place):
        pass
    text = (ROOT / "benchmarks" / "fill" / f"{place.dialect}.sql").read_text()
    text = text.replace(":kept", str(KEPT)).replace(":unknown", str(UNKNOWN))
    for statement in text.split(";\n\n")[: 3 if unknown else 2]:
        place.query(statement)


def full_tables(dialect: str, rounds: int) -> list[Line]:
    """S8, on two databases in turn that stay as they are between the rounds."""
    with ExitStack() as stack:
        empty, full, strange = (stack.enter_context(fresh(dialect)) for _ in range(3))
        fill(full, unknown=False)
        fill(strange, unknown=True)
        places = {"empty": empty, "full": full, "strange": strange}
        found = in_turn({name: partial(_again, place) for name, place in places.items()}, rounds)
    what = f"drain {JOBS:,}, {dialect}"
    names = {
        "full": f"beside {KEPT:,} finished and {KEPT:,} for next month",
        "strange": f"the same, behind {UNKNOWN:,} due jobs of an unknown task",
    }
    return [
        line("S8", f"{what}: empty tables", found["empty"]),
        *(
            compared("S8", f"{what}: {text}", found[name], found["empty"], "empty", target=0.9)
            for name, text in names.items()
        ),
    ]


def _again(place: Place) -> float:
    for path in place.tally.iterdir():
        path.unlink()
    return drain_here(place, JOBS)


# --- S9: a snapshot held open ---------------------------------------------------------------------

STEP = 50_000
STEPS = 10


def held_snapshot(_: int) -> list[Line]:
    """S9: the same number of jobs again and again while another session holds a snapshot, so that
    nothing that dies can be cleaned up; and the same without.
    """
    without = _steps(hold=False)
    held = _steps(hold=True)
    what = f"{STEPS} rounds of {STEP:,} jobs, postgresql, a snapshot held"
    return [
        line("S9", f"{STEPS} rounds of {STEP:,} jobs, postgresql: the last three", without[-3:]),
        compared(
            "S9", f"{what}: the last three", held[-3:], without[-3:], "no snapshot", target=0.6
        ),
        compared(
            "S9", f"{what}: the last three", held[-3:], held[3:6], "its rounds 4 to 6", target=0.9
        ),
    ]


def _steps(*, hold: bool) -> list[float]:
    with fresh("postgresql") as place, ExitStack() as stack:
        with onward(place):
            pass
        if hold:
            link = stack.enter_context(psycopg.connect(place.url))
            link.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            link.execute("SELECT count(*) FROM pg_class")
        rates: list[float] = []
        for _ in range(STEPS):
            for path in place.tally.iterdir():
                path.unlink()
            rates.append(drain_here(place, STEP))
        return rates
