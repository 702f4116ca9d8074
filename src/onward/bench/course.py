"""What is measured, in this order: enqueues, a drain, the pick-up by an idle worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import count
from statistics import median

from msgspec import Struct

from onward.bench.scratch import Scratch
from onward.bench.tasks import app, arrive, nothing
from onward.errors import OnwardError
from onward.handle import Handle

TARGET = "onward.bench.tasks:app"
SLOTS = 500
PRODUCERS = 100
ARRIVALS = 60
BETWEEN = 0.05
MOST_SECONDS = 60.0
"""How long a database may take for one figure before the bench gives up."""


class Figure(Struct, frozen=True):
    """One measured figure, and what it says about a system that is built on this database."""

    name: str
    value: float
    unit: str
    meaning: str


def figures(place: Scratch, *, seconds: float, jobs: int) -> Iterator[Figure]:
    """Measure, one figure after the other.

    Args:
        place: where.
        seconds: how long each kind of enqueue goes on.
        jobs: how many are drained.

    Raises:
        OnwardError: the database did not do in a minute what should take a second.
    """
    each = _one_by_one(seconds)
    yield Figure("enqueue", len(each) / sum(each), "/s", "one producer that waits for each commit")
    yield Figure("one commit", median(each) * 1000, "ms", "what a caller waits for")
    rate = asyncio.run(_many_producers(seconds))
    yield Figure("enqueue together", rate, "/s", f"{PRODUCERS} producers that share commits")
    began = time.perf_counter()
    handles = app.enqueue_many(nothing.call(number) for number in range(jobs))
    took = time.perf_counter() - began
    yield Figure("enqueue in bulk", jobs / took, "/s", f"enqueue_many of {jobs:,} jobs")
    with _worker(place):
        _until(lambda: app.counts()["queued"] + app.counts()["running"] == 0)
        drained = "claimed, run and recorded by one process"
        yield Figure("drain", _rate(handles), "/s", drained)
        time.sleep(1.0)
        arrivals = sorted(_arrivals())
    yield Figure("pick-up", median(arrivals) * 1000, "ms", "enqueue to first line, idle worker")
    slow = arrivals[int(len(arrivals) * 0.95)] * 1000
    yield Figure("pick-up, slow", slow, "ms", "the slowest of twenty")


def _one_by_one(seconds: float) -> list[float]:
    nothing.enqueue(0)
    took: list[float] = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        nothing.enqueue(1)
        took.append(time.perf_counter() - began)
    return took


async def _many_producers(seconds: float) -> float:
    numbers = count()
    end = time.perf_counter() + seconds

    async def produce() -> None:
        while time.perf_counter() < end:
            await nothing.aenqueue(next(numbers))

    try:
        await nothing.aenqueue(0)
        began = time.perf_counter()
        await asyncio.gather(*(produce() for _ in range(PRODUCERS)))
        return next(numbers) / (time.perf_counter() - began)
    finally:
        await app.database.close_loop()


def _rate(handles: list[Handle[None]]) -> float:
    """Jobs a second, on the database's clock: from the first claim to the last record. The bulk was
    enqueued last, so it ends last.
    """
    begun = app.get(handles[0].id).started_at
    ended = [app.get(handle.id).finished_at for handle in handles[-SLOTS:]]
    assert begun is not None
    span = max(moment for moment in ended if moment is not None) - begun
    return len(handles) / span.total_seconds()


def _arrivals() -> Iterator[float]:
    """Seconds from the call to the first line of the body, in another process of this machine."""
    sent: list[tuple[float, Handle[float]]] = []
    for _ in range(ARRIVALS):
        began = time.time()
        sent.append((began, arrive.enqueue()))
        time.sleep(max(0.0, BETWEEN - (time.time() - began)))
    for began, handle in sent:
        yield handle.wait(timeout=MOST_SECONDS) - began


@contextmanager
def _worker(place: Scratch) -> Generator[None]:
    """One worker process, as `onward worker` starts it."""
    words = ["worker", TARGET, "--concurrency", str(SLOTS), "--log-level", "error"]
    process = subprocess.Popen(
        [sys.executable, "-m", "onward.cli", *words],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **place.environment},
    )
    try:
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + MOST_SECONDS
    while not done():
        if time.monotonic() > end:
            raise OnwardError(
                f"the jobs were not done after {MOST_SECONDS:g} s",
                why="no worker ran them, or this database is very slow",
                fix="onward doctor shows what a worker meets; --jobs takes fewer",
            )
        time.sleep(0.05)
