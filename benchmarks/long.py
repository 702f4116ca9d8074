"""What takes long or much: ten thousand sleepers, memory over a million jobs, idle workers, and
starting up (S10, S11, S13, S14).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial

from benchmarks.drains import LEFT
from benchmarks.jobs import nothing, pause
from benchmarks.measure import Line, in_turn, line
from benchmarks.stage import (
    Place,
    children,
    fresh,
    onward,
    resident,
    running,
    worker_words,
)
from benchmarks.tally import counted

SLEEPERS = 10_000
MILLION = 1_000_000
FIRST = 100_000
IDLE_PROCESSES = 16
IDLE_SECONDS = 60


def sleepers(dialect: str, _: int) -> Iterable[Line]:
    """S10: jobs that each wait a second, all at once in one process."""
    with fresh(dialect) as place, onward(place) as app:
        app.enqueue_many(nothing.call(number) for number in range(1_000))
        words = worker_words("--concurrency", str(SLEEPERS))
        with running(place, words) as process:
            _until(place, 1_000)
            time.sleep(1.0)
            worker = children(process.pid)[1]
            before = resident(worker)
            app.enqueue_many(pause.call(1.0) for _ in range(SLEEPERS))
            began = time.time()
            most = before
            while (done := counted(place.tally)[0]) < SLEEPERS + 1_000:
                most = max(most, resident(worker))
                time.sleep(0.02)
                if time.time() - began > 120:
                    raise TimeoutError(f"only {done:,} jobs ran")
            while place.query(LEFT[place.dialect])[0][0]:
                time.sleep(0.005)
            took = time.time() - began
    name = f"{SLEEPERS:,} jobs that wait 1 s, {dialect}"
    yield Line("S10", f"{name}: beyond the ideal 1 s", took - 1.0, "s", most=3.0)
    grown = (most - before) * 1024 / SLEEPERS
    yield Line("S10", f"{name}: growth a running job", grown, "KB", most=10.0)


def million(dialect: str, _: int) -> Iterable[Line]:
    """S11: what a worker holds after a million jobs, against after the first hundred thousand."""
    words = worker_words("--concurrency", "500")
    held: list[float] = []
    with fresh(dialect) as place, onward(place) as app, running(place, words) as process:
        for number in range(MILLION // FIRST):
            app.enqueue_many(nothing.call(each) for each in range(FIRST))
            _until(place, FIRST * (number + 1))
            time.sleep(0.5)
            held.append(resident(children(process.pid)[1]))
    name = f"{MILLION:,} jobs through one worker, {dialect}"
    yield Line("S11", f"{name}: held at {FIRST:,}", held[0], "MB")
    yield Line("S11", f"{name}: more at the end", held[-1] - held[0], "MB", most=5.0)


def _until(place: Place, jobs: int) -> None:
    end = time.monotonic() + 300
    while counted(place.tally)[0] < jobs:
        if time.monotonic() > end:
            raise TimeoutError(f"only {counted(place.tally)[0]:,} of {jobs:,} jobs ran")
        time.sleep(0.01)


def idle(_: int) -> Iterable[Line]:
    """S14: what idle workers ask of PostgreSQL. Nearly every statement of an idle worker is a
    transaction of its own, and those the server counts.
    """
    asked = (
        "SELECT xact_commit + xact_rollback FROM pg_stat_database"
        " WHERE datname = current_database()"
    )
    with fresh("postgresql") as place, onward(place):
        words = worker_words("--processes", str(IDLE_PROCESSES))
        with running(place, words):
            ready = "SELECT count(*) FROM onward.worker WHERE state = 'active'"
            while place.query(ready)[0][0] < IDLE_PROCESSES:
                time.sleep(0.2)
            time.sleep(10)
            before = place.query(asked)[0][0]
            time.sleep(IDLE_SECONDS)
            grown = place.query(asked)[0][0] - before
    each = grown / IDLE_SECONDS / IDLE_PROCESSES
    yield Line("S14", f"{IDLE_PROCESSES} idle workers: statements of each", each, "/s", most=5.0)


def start_up(_: int) -> Iterable[Line]:
    """S13: what an import and a first look at the command line cost, beyond Python itself."""
    programs = {
        "python": ["-c", "pass"],
        "import": ["-c", "import onward"],
        "help": ["-m", "onward.cli", "--help"],
    }
    figures = in_turn({name: partial(_ran, words) for name, words in programs.items()}, 21)
    floor = line("S13", "python -c pass", figures["python"], "ms")
    yield floor
    for name, what, most in (("import", "import onward", 80), ("help", "onward --help", 150)):
        found = line("S13", what, figures[name], "ms")
        yield found._replace(
            what=f"{what}: more than that", value=found.value - floor.value, most=most
        )


def _ran(words: list[str]) -> float:
    """Milliseconds. Bytecode is kept, as it is wherever somebody has installed a package."""
    kept = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, env=kept)
    return (time.perf_counter() - began) * 1000
