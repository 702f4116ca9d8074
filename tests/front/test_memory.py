"""Producers do not grow: neither by what they enqueue nor by what they once waited for.

The full figures, 100,000 enqueues and 10,000 waits, are `make soak`; `make test` has a fifth.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from onward import Handle, Onward, WaitTimeout
from onward.task import SyncTask

MOST_GROWTH = 30_000_000
"""Bytes of resident memory."""

PRODUCER = """
import gc, os, subprocess, sys
from threading import Thread
from onward import Onward

app = Onward(sys.argv[1])
count = int(sys.argv[2])

@app.task(name="shop.send")
def send(n: int, text: str = "") -> None: ...

def resident() -> int:
    gc.collect()
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True)
    return int(shown.stdout) * 1024

def one_by_one(count: int) -> None:
    for n in range(count):
        send.enqueue(n, "x" * 50)

def enqueue(count: int) -> None:
    singles = count // 5
    threads = [Thread(target=one_by_one, args=[singles // 10]) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for start in range(0, count - singles, 2_000):
        app.enqueue_many(send.call(start + n, "x" * 50) for n in range(2_000))

enqueue(5_000)  # What is loaded once, and what the allocator keeps.
before = resident()
enqueue(count)
print(resident() - before, sum(app.counts().values()))
app.close()
"""


def grown_by(url: str, count: int) -> int:
    """Bytes that a process grows by while it enqueues so many jobs, singly and in bulk."""
    done = subprocess.run(
        [sys.executable, "-c", PRODUCER, url, str(count)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    growth, jobs = map(int, done.stdout.split())
    assert jobs == count + 5_000
    return growth


def test_a_producer_does_not_grow(url: str) -> None:
    assert grown_by(url, 10_000) < MOST_GROWTH / 10


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_producer_of_a_hundred_thousand_jobs_does_not_grow(url: str) -> None:
    assert grown_by(url, 100_000) < MOST_GROWTH


def abandon_waits(app: Onward, jobs: list[Handle[Any]], times: int) -> list[weakref.ref[Any]]:
    """Wait for jobs that nobody runs, and give up: by cancelling, and by a time-out."""

    async def scene() -> list[weakref.ref[Any]]:
        handles = [await app.aget(jobs[n % len(jobs)].id) for n in range(times)]
        waits = [asyncio.create_task(handle.await_result()) for handle in handles]
        await asyncio.sleep(0.3)
        for wait in waits:
            wait.cancel()
        ended = await asyncio.gather(*waits, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended)
        late = [asyncio.create_task(handle.await_result(0.01)) for handle in handles[:50]]
        ended = await asyncio.gather(*late, return_exceptions=True)
        assert all(isinstance(each, WaitTimeout) for each in ended)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert (await app.acounts())["queued"] == len(jobs)
        await app.database.close_loop()
        return [weakref.ref(handle) for handle in handles]

    return asyncio.run(scene())


def wait_in_vain(job: Handle[Any]) -> None:
    with pytest.raises(WaitTimeout):
        job.wait(timeout=0.02)


def left_over(before: set[threading.Thread]) -> set[str]:
    """Names of threads that are there now and were not; those that are just ending have time."""
    deadline = time.monotonic() + 5
    while (found := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return {thread.name for thread in found}


async def first_look(app: Onward, job: Handle[Any]) -> None:
    """The thread that reads a file for loops is there from the first read on."""
    await job.arefresh()
    await app.database.close_loop()


def check_abandoned_waits(app: Onward, jobs: list[Handle[Any]], times: int) -> None:
    app.counts()
    asyncio.run(first_look(app, jobs[0]))
    before = set(threading.enumerate())
    refs = abandon_waits(app, jobs, times)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(wait_in_vain, jobs))
    assert left_over(before) == set()
    gc.collect()
    assert sum(ref() is not None for ref in refs) == 0


def test_abandoned_waits_leave_nothing_behind(app: Onward, send: SyncTask[..., int]) -> None:
    check_abandoned_waits(app, [send.enqueue(n) for n in range(50)], 1_000)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_ten_thousand_waits_leave_nothing_behind(app: Onward, send: SyncTask[..., int]) -> None:
    jobs = app.enqueue_many(send.call(n) for n in range(1_000))
    for _ in range(10):
        check_abandoned_waits(app, jobs, 1_000)
