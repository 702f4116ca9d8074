"""The end of a worker inside another program: in order, within its grace, and held by nothing."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from onward import InvalidOption, Onward
from onward.store import store
from onward.task import AsyncTask
from onward.worker.threads import Daemons
from tests.support import tasks
from tests.support.ledger import Ledger
from tests.support.workers import ROOT, wait_until, workers
from tests.worker.history import ends, starts, wait_for

LONG = 60.0

SOON = 8.0
"""Seconds within which a stop without grace has ended, on a busy machine too."""

MANY = 40
"""More than a loop's executor has threads."""


BEGUN = threading.Event()
"""A nap has begun: a job that runs by its row, and has not begun, is given back at once."""


@pytest.fixture
def nap(app: Onward) -> AsyncTask[[float], str]:
    BEGUN.clear()

    @app.task(max_attempts=1)
    async def nap(seconds: float) -> str:
        BEGUN.set()
        await asyncio.sleep(seconds)
        return "rested"

    return nap


# --- leaving the block ----------------------------------------------------------------------------


def test_leaving_the_block_waits_for_the_grace_of_a_stop_in_it(
    app: Onward, nap: AsyncTask[[float], str]
) -> None:
    with app.worker() as worker:
        job = nap.enqueue(0.4)
        assert BEGUN.wait(10)
        worker.stop(grace=LONG)
    assert job.wait(0) == "rested"
    assert ends(job) == ["succeeded"]


def test_a_second_stop_in_the_block_stops_at_once(
    app: Onward, nap: AsyncTask[[float], str]
) -> None:
    with app.worker() as worker:
        job = nap.enqueue(LONG)
        assert BEGUN.wait(10)
        began = time.monotonic()
        worker.stop(grace=LONG)
        worker.stop(grace=LONG)
    assert time.monotonic() - began < SOON
    assert ends(job) == ["released: shutdown"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ZeroDivisionError])
def test_an_exception_that_leaves_the_block_after_a_stop_stops_at_once(
    app: Onward, nap: AsyncTask[[float], str], kind: type[BaseException]
) -> None:
    """Ctrl-C while the program waits for its worker."""
    job = nap.enqueue(LONG)

    def leave() -> None:
        with app.worker() as worker:
            assert BEGUN.wait(10)
            worker.stop(grace=LONG)
            raise kind

    began = time.monotonic()
    with pytest.raises(kind):
        leave()
    assert time.monotonic() - began < SOON
    assert ends(job) == ["released: shutdown"]


def test_an_exception_that_leaves_the_block_stops_in_order(
    app: Onward, nap: AsyncTask[[float], str]
) -> None:
    job = nap.enqueue(0.4)

    def leave() -> None:
        with app.worker():
            assert BEGUN.wait(10)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave()
    assert job.wait(0) == "rested"


# --- durations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("grace", [0, 0.2, timedelta(), timedelta(milliseconds=200)])
def test_a_grace_is_a_timedelta_or_seconds(
    app: Onward, nap: AsyncTask[[float], str], grace: Any
) -> None:
    with app.worker() as worker:
        job = nap.enqueue(LONG)
        assert BEGUN.wait(10)
        began = time.monotonic()
        worker.stop(grace)
    least = grace.total_seconds() if isinstance(grace, timedelta) else grace
    assert least <= time.monotonic() - began < SOON
    assert ends(job) == ["released: shutdown"]


@pytest.mark.parametrize(
    "wrong",
    [
        *("1", float("nan"), float("inf"), True, -1, [1]),
        pytest.param(10**400, id="huge"),
        pytest.param(timedelta(seconds=-1), id="a negative timedelta"),
    ],
)
def test_what_is_no_grace_is_refused_where_it_is_said(
    app: Onward, nap: AsyncTask[[float], str], wrong: Any
) -> None:
    """The worker has not heard of it and goes on."""
    with app.worker() as worker:
        with pytest.raises(InvalidOption, match=r"grace=.* cannot work"):
            worker.stop(grace=wrong)
        assert nap.enqueue(0).wait(10) == "rested"
    with pytest.raises(InvalidOption, match=r"grace=.* cannot work"):
        app.worker().stop(grace=wrong)


@pytest.mark.parametrize("timeout", [0.05, timedelta(milliseconds=50), 0, -1])
def test_a_join_waits_as_long_as_it_is_told(app: Onward, timeout: Any) -> None:
    with app.worker() as worker:
        began = time.monotonic()
        worker.join(timeout)
        assert time.monotonic() - began < SOON
        assert {line.state for line in workers(app.database)} == {"active"}


@pytest.mark.parametrize("wrong", ["1", float("nan"), True, [1]])
def test_what_is_no_time_to_wait_is_refused(app: Onward, wrong: Any) -> None:
    with app.worker() as worker, pytest.raises(InvalidOption, match=r"timeout=.* cannot work"):
        worker.join(wrong)
    with pytest.raises(InvalidOption, match=r"timeout=.* cannot work"):
        app.worker().join(wrong)


# --- what nothing can stop ------------------------------------------------------------------------


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Set at the end of the test, for what waits in its threads."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("count", [1, MANY])
def test_the_end_does_not_wait_for_threads_of_the_loops_executor(
    app: Onward, release: threading.Event, count: int
) -> None:
    """Nor when they are all taken: then nothing of the worker's own may stand in line for one."""

    @app.task(max_attempts=1)
    async def wait() -> None:
        await asyncio.to_thread(release.wait, LONG)

    with app.worker(concurrency=MANY) as worker:
        jobs = app.enqueue_many(wait.call() for _ in range(count))
        for job in jobs:
            wait_for(job, "running")
        began = time.monotonic()
        worker.stop(grace=0.2)
    assert time.monotonic() - began < SOON
    assert {tuple(ends(job)) for job in jobs} == {("released: shutdown",)}
    assert {line.state for line in workers(app.database)} == {"stopped"}


def test_the_end_does_not_wait_for_a_body_that_goes_on_when_it_is_interrupted(app: Onward) -> None:
    """It has been given back, and ends where it is: its loop turns no more."""
    steps: list[float] = []

    @app.task(max_attempts=1)
    async def go_on() -> None:
        while True:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                steps.append(0.0)
            else:
                steps.append(time.monotonic())

    with app.worker() as worker:
        job = go_on.enqueue()
        wait_until(lambda: steps)
        began = time.monotonic()
        worker.stop(grace=0)
    assert time.monotonic() - began < SOON
    assert ends(job) == ["released: shutdown"]
    taken = len(steps)
    time.sleep(0.2)
    gc.collect()  # asyncio says now that a task was pending, and in no other test.
    assert len(steps) == taken


def test_what_a_body_has_left_on_the_loop_may_clean_up(app: Onward) -> None:
    """A task that nobody waits for, and a generator that was not read to its end."""
    cleaned: list[str] = []

    async def linger() -> None:
        try:
            await asyncio.sleep(LONG)
        finally:
            await asyncio.sleep(0.05)
            cleaned.append("task")

    async def count() -> Any:
        try:
            while True:
                yield 1
        finally:
            cleaned.append("generator")

    kept: list[Any] = []

    @app.task
    async def leave() -> None:
        kept.append(asyncio.create_task(linger()))
        kept.append(count())
        await anext(kept[1])

    with app.worker():
        leave.enqueue().wait(10)
    assert cleaned == ["task", "generator"]


PROGRAM = """
from tests.support import tasks
tasks.app.run_worker(concurrency=40)
print("ended in order", flush=True)
"""


def test_a_second_signal_ends_a_program_whose_threads_are_stuck(
    shop: Onward, ledger: Ledger
) -> None:
    """`app.run_worker()` returns, and the interpreter does not wait for those threads either. A
    process that waits for its next attempt ends too.
    """
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"ONWARD_URL": shop.url},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        tasks.isolated_echo.enqueue(1).wait(30)
        jobs = shop.enqueue_many(tasks.nap_in_default_executor.call(LONG) for _ in range(MANY))
        wait_until(lambda: len(starts(ledger)) > MANY)
        began = time.monotonic()
        program.send_signal(signal.SIGINT)
        time.sleep(0.2)
        program.send_signal(signal.SIGINT)
        out, _ = program.communicate(timeout=30)
        took = time.monotonic() - began
    finally:
        program.kill()
        program.communicate()
    assert (program.returncode, out) == (0, "ended in order\n")
    assert took < SOON
    assert {tuple(ends(job)) for job in jobs} == {("released: shutdown",)}


# --- the threads of its loop ----------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[Daemons]:
    pool = Daemons(2)
    yield pool
    pool.shutdown()


def test_there_are_no_more_daemons_than_allowed_and_what_waits_may_be_cancelled(
    pool: Daemons, release: threading.Event
) -> None:
    seen: list[threading.Thread] = []

    def work() -> bool:
        seen.append(threading.current_thread())
        return release.wait(LONG)

    calls = [pool.submit(work) for _ in range(5)]
    wait_until(lambda: len(seen) == 2)
    assert [call.running() for call in calls] == [True, True, False, False, False]
    assert calls[4].cancel()
    release.set()
    assert [call.result(10) for call in calls[:4]] == [True] * 4
    assert len(seen) == 4
    assert len(set(seen)) == 2
    assert all(thread.daemon for thread in seen)


def test_a_daemon_that_is_idle_is_used_again(pool: Daemons) -> None:
    """The second call comes when the first one's thread has gone back to wait."""
    first = pool.submit(threading.current_thread).result(10)
    again: set[threading.Thread] = set()
    for _ in range(20):
        again.add(pool.submit(threading.current_thread).result(10))
        time.sleep(0.002)
    assert len(again | {first}) <= 2
    pool.shutdown()
    wait_until(lambda: not any(thread.is_alive() for thread in again | {first}))


def test_what_a_function_raises_in_a_daemon_comes_back(pool: Daemons) -> None:
    future: Future[Any] = pool.submit(int, "x", base=16)
    with pytest.raises(ValueError, match="invalid literal"):
        future.result(10)
    assert pool.submit(int, "f", base=16).result(10) == 15


# --- the lease ------------------------------------------------------------------------------------


def test_a_beat_beside_the_last_write_is_no_loss(
    app: Onward,
    nap: AsyncTask[[float], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The worker is `stopped` then, so a renewal finds no lease: it has given that up itself."""
    app.settings = replace(app.settings, beat=0.05)
    stopped, seen = threading.Event(), threading.Event()
    write = app.database.arun

    async def slow_answer(op: Any, *args: Any, **kwargs: Any) -> Any:
        written = stopped.is_set()
        answer = await write(op, *args, **kwargs)
        if op is store.stop:
            stopped.set()
            await asyncio.to_thread(seen.wait, 4)
        elif op is store.beat and written:
            asyncio.get_running_loop().call_later(0.02, seen.set)
        return answer

    monkeypatch.setattr(app.database, "arun", slow_answer)
    with caplog.at_level(logging.WARNING, "onward"), app.worker():
        assert nap.enqueue(0).wait(10) == "rested"
    assert seen.is_set()
    assert [line for line in caplog.records if line.name.startswith("onward")] == []
    assert {line.state for line in workers(app.database)} == {"stopped"}
