"""Enqueues: one at a time, from a hundred producers at once, and in bulk (S4, S5, S6, S15)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import psycopg

from benchmarks import bare
from benchmarks.jobs import nothing
from benchmarks.measure import Line, compared, in_turn, line
from benchmarks.stage import ROOT, Place, fresh, onward, running, worker_words
from onward import Onward
from onward.ids import new_id

ONE_BY_ONE = 2_000
PRODUCERS = 100
EACH = 200
BULK = 100_000
WARM = 20

POSTGRES_ONE = """
INSERT INTO job (id, task, state, attempt, run_at, args)
VALUES (%s, 'nothing', 'queued', 1, now(), %s)
"""


def _row(number: int) -> tuple[str, str]:
    return str(new_id()), json.dumps({"number": number})


def _timed(once: Callable[[int], object], times: int) -> float:
    """Calls a second."""
    for number in range(WARM):
        once(number)
    began = time.perf_counter()
    for number in range(times):
        once(number)
    return times / (time.perf_counter() - began)


async def _atimed(once: Callable[[int], Awaitable[object]], times: int) -> float:
    for number in range(WARM):
        await once(number)
    began = time.perf_counter()
    for number in range(times):
        await once(number)
    return times / (time.perf_counter() - began)


# --- the bare insert ------------------------------------------------------------------------------


def bare_sync(dialect: str) -> float:
    """One INSERT and its COMMIT at a time."""
    with fresh(dialect) as place:
        if dialect == "sqlite":
            bare.make_sqlite(place.url)
            connection = bare.open_sqlite(place.url)

            def insert(number: int) -> None:
                with bare.transaction(connection):
                    connection.execute(bare.SQLITE_INSERT, _row(number))

            return _timed(insert, ONE_BY_ONE)
        bare.make_postgres(place.url)
        with psycopg.connect(place.url, autocommit=True, prepare_threshold=None) as link:
            return _timed(lambda number: link.execute(POSTGRES_ONE, _row(number)), ONE_BY_ONE)


def bare_thread() -> float:
    """The same on SQLite from a loop that does not stand still meanwhile: a thread has the
    connection, and the loop awaits it.
    """

    async def run(place: Place) -> float:
        bare.make_sqlite(place.url)
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as thread:
            connection = await loop.run_in_executor(thread, bare.open_sqlite, place.url)

            def insert(number: int) -> None:
                with bare.transaction(connection):
                    connection.execute(bare.SQLITE_INSERT, _row(number))

            return await _atimed(
                lambda number: loop.run_in_executor(thread, insert, number), ONE_BY_ONE
            )

    with fresh("sqlite") as place:
        return asyncio.run(run(place))


def bare_async(dialect: str) -> float:
    """The same on a loop. With SQLite it stands still for each commit, which no program that also
    serves others can let it do; it is the strictest measure.
    """
    if dialect == "sqlite":
        return bare_sync(dialect)

    async def run(place: Place) -> float:
        link = await psycopg.AsyncConnection.connect(
            place.url, autocommit=True, prepare_threshold=None
        )
        async with link:
            return await _atimed(
                lambda number: link.execute(POSTGRES_ONE, _row(number)), ONE_BY_ONE
            )

    with fresh(dialect) as place:
        bare.make_postgres(place.url)
        return asyncio.run(run(place))


def bare_bulk(dialect: str) -> float:
    """All rows in one commit."""
    with fresh(dialect) as place:
        make, fill = (
            (bare.make_sqlite, bare.fill_sqlite)
            if dialect == "sqlite"
            else (bare.make_postgres, bare.fill_postgres)
        )
        make(place.url)
        began = time.perf_counter()
        fill(place.url, BULK)
        return BULK / (time.perf_counter() - began)


# --- Onward ---------------------------------------------------------------------------------------


def _on(app: Onward, run: Callable[[], Awaitable[float]]) -> float:
    """Run on a loop of its own, whose connections end with it."""

    async def whole() -> float:
        try:
            return await run()
        finally:
            await app.database.close_loop()

    return asyncio.run(whole())


def onward_sync(dialect: str) -> float:
    with fresh(dialect) as place, onward(place):
        return _timed(lambda number: nothing.enqueue(number), ONE_BY_ONE)


def onward_async(dialect: str) -> float:
    with fresh(dialect) as place, onward(place) as app:
        return _on(app, lambda: _atimed(lambda number: nothing.aenqueue(number), ONE_BY_ONE))


def onward_producers(dialect: str) -> float:
    """Many producers on one loop; each awaits each of its enqueues."""
    with fresh(dialect) as place, onward(place) as app:

        async def run() -> float:
            numbers = count()

            async def produce(times: int) -> None:
                for _ in range(times):
                    await nothing.aenqueue(next(numbers))

            await produce(WARM)
            began = time.perf_counter()
            await asyncio.gather(*(produce(EACH) for _ in range(PRODUCERS)))
            return PRODUCERS * EACH / (time.perf_counter() - began)

        return _on(app, run)


def onward_bulk(dialect: str) -> float:
    with fresh(dialect) as place, onward(place) as app:
        app.enqueue_many([nothing.call(0)])
        began = time.perf_counter()
        app.enqueue_many(nothing.call(number) for number in range(BULK))
        return BULK / (time.perf_counter() - began)


# --- the tables -----------------------------------------------------------------------------------


def one_by_one(dialect: str, rounds: int) -> list[Line]:
    """S4 and S5."""
    runs: dict[str, Callable[[], float]] = {
        "bare": lambda: bare_sync(dialect),
        "sync": lambda: onward_sync(dialect),
        "bare async": lambda: bare_async(dialect),
        "async": lambda: onward_async(dialect),
        "many": lambda: onward_producers(dialect),
    }
    if dialect == "sqlite":
        runs["bare thread"] = bare_thread
    found = in_turn(runs, rounds)
    base = "bare INSERT + COMMIT"
    what = f"enqueue one at a time, {dialect}"
    least = 4 if dialect == "sqlite" else 8
    in_thread: list[Line] = []
    if dialect == "sqlite":
        what_else = f"{what}, async: the same in a thread"
        in_thread = [line("S4", what_else, found["bare thread"], "/s")]
    return [
        line("S4", f"{what}, sync: {base}", found["bare"], "/s"),
        compared("S4", f"{what}, sync: Onward", found["sync"], found["bare"], base, target=0.8),
        line("S4", f"{what}, async: {base}", found["bare async"], "/s"),
        *in_thread,
        compared(
            "S4", f"{what}, async: Onward", found["async"], found["bare async"], base, target=0.8
        ),
        compared(
            "S5",
            f"enqueue from {PRODUCERS} producers at once, {dialect}",
            found["many"],
            found["async"],
            "one producer",
            target=least,
        ),
    ]


def in_bulk(dialect: str, rounds: int) -> list[Line]:
    """S6."""
    found = in_turn(
        {"bare": lambda: bare_bulk(dialect), "onward": lambda: onward_bulk(dialect)}, rounds
    )
    what = f"enqueue {BULK:,} in bulk, {dialect}"
    return [
        line("S6", f"{what}: bare", found["bare"]),
        compared("S6", f"{what}: Onward", found["onward"], found["bare"], "bare", target=0.5),
    ]


# --- S15: many clients ----------------------------------------------------------------------------

CLIENTS = 32
CLIENT_SECONDS = 5.0
STARTING = 12.0
"""Seconds until all of them have imported what they need and are connected."""

CLIENT = """
import sys, time
from benchmarks.jobs import app, nothing
from onward.store import postgres
app.use(sys.argv[1])
if sys.argv[3] == "silent":
    postgres.NOTIFY_GAP = float("inf")
nothing.enqueue(0)
while time.time() < float(sys.argv[2]):
    time.sleep(0.001)
end, done = time.time() + float(sys.argv[4]), 0
while time.time() < end:
    nothing.enqueue(done)
    done += 1
print(done)
"""


def clients(rounds: int) -> list[Line]:
    """S15: client processes that each enqueue one at a time while workers run; and the same without
    wake-ups.
    """
    found = in_turn(
        {"silent": lambda: _clients("silent"), "woken": lambda: _clients("woken")}, rounds
    )
    what = f"enqueue from {CLIENTS} processes, postgresql, workers running"
    none = "no wake-ups"
    return [
        line("S15", f"{what}: {none}", found["silent"]),
        compared(
            "S15", f"{what}: with wake-ups", found["woken"], found["silent"], none, target=0.9
        ),
    ]


def _clients(kind: str) -> float:
    with fresh("postgresql") as place, onward(place), running(place, worker_words()):
        start = time.time() + STARTING
        words = [sys.executable, "-c", CLIENT, place.url, repr(start), kind, repr(CLIENT_SECONDS)]
        processes = [
            subprocess.Popen(words, cwd=ROOT, env=place.environment(), stdout=subprocess.PIPE)
            for _ in range(CLIENTS)
        ]
        said = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise RuntimeError("a client failed: what it wrote is above")
        return sum(map(int, said)) / CLIENT_SECONDS
