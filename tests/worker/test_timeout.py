"""Time limits: an attempt ends on time whatever its body does; what cannot be stopped is named."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from onward import Backoff, Handle, Onward, Settings, current
from onward.worker import executor, standstill, worker
from tests.support import tasks
from tests.support.ledger import Ledger
from tests.support.workers import QUICK, alive, running, wait_until
from tests.worker.history import (
    ends,
    finishes,
    last_error,
    most_at_once,
    pauses,
    starts,
    wait_for,
    wait_over,
)


@pytest.fixture
def short_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The retry of an abandoned body is held for half a second at a time instead of ten."""
    monkeypatch.setattr(executor, "HOLD", 0.5)
    monkeypatch.setattr(worker, "HOLD", 0.5)


def took(job: Handle[Any], attempt: int = 0) -> float:
    """How long an attempt took, on the database's clock."""
    past = job.attempts()[attempt]
    assert past.started_at is not None
    return past.ended_at - past.started_at


def test_an_async_body_fails_on_time(app: Onward) -> None:
    """It is interrupted at its limit, long before its end; the error names the limit."""

    @app.task(max_attempts=1, timeout=0.3)
    async def nap() -> None:
        await asyncio.sleep(60)

    with app.worker():
        job = nap.enqueue()
        wait_for(job, "dead")
    assert ends(job) == ["failed: timeout"]
    assert 0.25 < took(job) < 5
    assert "0.3 s" in last_error(job).message
    assert not job.attempts()[0].abandoned


def test_a_body_in_a_thread_fails_on_time_and_is_abandoned(app: Onward) -> None:
    """Nothing can stop a thread: its attempt fails all the same, and history says `abandoned`."""
    go_on = threading.Event()

    @app.task(max_attempts=1, timeout=0.3)
    def block() -> None:
        go_on.wait(60)

    with app.worker():
        job = block.enqueue()
        wait_for(job, "dead")
        go_on.set()
    assert ends(job) == ["failed: timeout"]
    assert 0.25 < took(job) < 5
    assert job.attempts()[0].abandoned


def hog_loop() -> None:
    end = time.monotonic() + 0.4
    while time.monotonic() < end:
        time.sleep(0.02)


def hog_loop_for_long() -> None:
    time.sleep(executor.LATE + 0.4)


def hog_interpreter() -> None:
    ctypes.PyDLL(None).usleep(400_000)


@pytest.mark.parametrize("hog", [hog_loop, hog_loop_for_long, hog_interpreter])
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_a_body_that_lets_nobody_see_that_its_limit_passes_has_failed_when_it_ends(
    app: Onward, hog: Callable[[], None], is_async: bool, raises: bool
) -> None:
    """It blocks the loop, or holds the interpreter, until it is over: no timer could fire."""

    def go() -> str:
        hog()
        if raises:
            raise ValueError
        return "ok"

    async def go_on_loop() -> str:
        return go()

    task = app.task(go_on_loop if is_async else go, max_attempts=1, timeout=0.2)
    with app.worker():
        job = task.enqueue()
        wait_for(job, "dead")
    assert ends(job) == ["failed: timeout"]
    assert "0.2 s" in last_error(job).message


def test_who_holds_the_interpreter_for_long_is_no_machine_that_stands_still(app: Onward) -> None:
    """The watch beside the body comes late in both cases."""

    @app.task(max_attempts=1, timeout=0.3)
    async def hog() -> None:
        ctypes.PyDLL(None).usleep(int((standstill.STOOD_STILL + 1.0) * 1e6))

    with app.worker():
        job = hog.enqueue()
        wait_for(job, "dead")
    assert ends(job) == ["failed: timeout"]


@pytest.mark.parametrize("first", ["the cancel", "the limit"])
def test_a_job_that_was_asked_to_stop_is_cancelling_until_its_thread_ends(
    app: Onward, first: str
) -> None:
    """Its time limit passes meanwhile: the slot stays taken, and `cancelled` comes after the last
    thing that the body does.
    """
    go_on = threading.Event()
    last_act: list[str] = []
    app.settings = Settings(**QUICK | {"timeout_grace": 1.0, "abandon_after": 60.0})

    @app.task(timeout=0.3)
    def block() -> None:
        go_on.wait(60)
        last_act.append(app.get(current().id).state)

    @app.task
    async def other() -> None:
        pass

    with app.worker(concurrency=1):
        job = block.enqueue()
        wait_for(job, "running")
        if first == "the limit":
            time.sleep(0.6)
        job.cancel()
        second = other.enqueue()
        time.sleep(2.0)
        assert (job.refresh().state, second.refresh().state) == ("cancelling", "queued")
        go_on.set()
        wait_for(job, "cancelled")
        wait_for(second, "succeeded")
    assert last_act == ["cancelling"]
    assert ends(job) == ["failed: timeout"]


def test_a_worker_full_of_bodies_that_were_asked_to_stop_is_replaced(
    shop: Onward, ledger: Ledger
) -> None:
    """They hold all its slots and never end: so the process ends, and its successor works."""
    with running(shop.url, ledger=ledger, concurrency=2, grace=0.2) as worker:
        jobs = [tasks.block.using(timeout=0.3, max_attempts=1).enqueue(60) for _ in range(2)]
        wait_until(lambda: len(starts(ledger)) == 2)
        (first,) = worker.pids()
        for job in jobs:
            job.cancel()
        assert tasks.echo.enqueue("next").wait(30) == "next"
        assert not alive(first)
    assert {job.refresh().state for job in jobs} == {"cancelled"}


def test_a_body_in_a_thread_that_looks_is_not_abandoned(app: Onward) -> None:
    """A thread that watches its token ends by itself, and may clean up before that."""
    cleaned: list[int] = []

    @app.task(max_attempts=2, timeout=0.2, backoff=tasks.SOON)
    def watch() -> None:
        try:
            while True:
                current().cancel_token.wait(10)
                current().check()
        finally:
            cleaned.append(current().attempt)

    with app.worker():
        job = watch.enqueue()
        wait_for(job, "dead")
    assert ends(job) == ["failed: timeout"] * 2
    assert [attempt.abandoned for attempt in job.attempts()] == [False, False]
    assert cleaned == [1, 2]


def test_a_process_of_its_own_is_killed_on_time(shop: Onward, ledger: Ledger) -> None:
    """It computes and looks at nothing; it is gone, and its retry gets another process."""
    with shop.worker():
        job = tasks.isolated_spin.using(timeout=3.0, max_attempts=2).enqueue(60)
        wait_for(job, "dead", seconds=20)
    assert ends(job) == ["failed: timeout"] * 2
    assert [attempt.abandoned for attempt in job.attempts()] == [False, False]
    first, second = starts(ledger)
    assert first["pid"] != second["pid"]
    assert not alive(first["pid"])
    assert not alive(second["pid"])


SWALLOWS: dict[str, type[BaseException]] = {"Exception": Exception, "BaseException": BaseException}


@pytest.mark.parametrize("where", ["loop", "thread"])
@pytest.mark.parametrize("kind", SWALLOWS)
def test_a_swallowed_time_out_is_a_time_out_all_the_same(
    app: Onward, kind: str, where: str
) -> None:
    """The body catches what it can, goes on in small steps, and returns: never a success."""
    returned: list[int] = []

    async def on_loop() -> str:
        for _ in range(24):
            try:
                await asyncio.sleep(0.05)
            except SWALLOWS[kind]:
                pass
        returned.append(1)
        return "ok"

    def in_thread() -> str:
        for _ in range(24):
            try:
                time.sleep(0.05)
                current().check()
            except SWALLOWS[kind]:
                pass
        returned.append(1)
        return "ok"

    body = on_loop if where == "loop" else in_thread
    task = app.task(name="body", max_attempts=1, timeout=0.4)(body)
    with app.worker():
        job: Handle[Any] = task.enqueue()
        wait_for(job, "dead")
        if (where, kind) != ("loop", "Exception"):  # CancelledError is no Exception.
            wait_until(lambda: returned)
    assert ends(job) == ["failed: timeout"]
    assert took(job) < 5
    assert "0.4 s" in last_error(job).message
    assert job.refresh().state == "dead"


def test_a_body_can_see_its_time_out_and_clean_up(app: Onward) -> None:
    """An `async` body gets CancelledError and the time to await something; it is not abandoned."""
    seen: list[str] = []

    @app.task(max_attempts=1, timeout=0.2)
    async def nap() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append(f"asked: {current().cancel_requested}")
            raise
        finally:
            await asyncio.sleep(0.1)
            seen.append("clean")

    with app.worker():
        job = nap.enqueue()
        wait_for(job, "dead")
    assert seen == ["asked: True", "clean"]
    assert not job.attempts()[0].abandoned


def test_timed_out_attempts_keep_their_backoff(app: Onward) -> None:
    """Three attempts, each an outcome of its own, at least the backoff apart; then dead."""

    @app.task(max_attempts=3, timeout=0.2, backoff=Backoff(base=0.4, factor=1, jitter=0))
    async def nap() -> None:
        await asyncio.sleep(60)

    with app.worker():
        job = nap.enqueue()
        wait_for(job, "dead")
    assert ends(job) == ["failed: timeout"] * 3
    assert min(pauses(job)) >= 0.399
    assert job.failures == 3


def test_a_single_attempt_that_times_out_is_dead_and_stays_so(shop: Onward, ledger: Ledger) -> None:
    """`max_attempts=1`, a real worker: one start in the ledger, also after the thread has ended."""
    with running(shop.url, concurrency=2):
        job = tasks.block.using(max_attempts=1, timeout=0.5).enqueue(2)
        wait_for(job, "dead")
        assert 0.45 < took(job) < 4
        wait_until(lambda: finishes(ledger, job))
        time.sleep(0.5)
    assert ends(job) == ["failed: timeout"]
    assert len(starts(ledger, job)) == 1
    assert job.refresh().state == "dead"


@pytest.mark.usefixtures("short_hold")
def test_the_retry_of_an_abandoned_body_waits_until_that_body_ends(app: Onward) -> None:
    """Two bodies of one job never overlap unawares; the retry comes soon after the first ends."""
    spans: list[tuple[str, float]] = []

    @app.task(max_attempts=2, timeout=0.2, backoff=tasks.SOON)
    def block() -> None:
        spans.append(("start", time.monotonic()))
        if current().attempt == 1:
            time.sleep(2)
        spans.append(("end", time.monotonic()))

    with app.worker(concurrency=4):
        job = block.enqueue()
        wait_for(job, "succeeded")
    assert ends(job) == ["failed: timeout", "succeeded"]
    assert job.attempts()[0].abandoned
    assert [kind for kind, _ in spans] == ["start", "end", "start", "end"]
    assert spans[2][1] - spans[1][1] < 5


@pytest.mark.usefixtures("short_hold")
def test_the_slot_of_an_abandoned_body_is_given_back_within_the_bound(app: Onward) -> None:
    """One slot: while the abandoned body still blocks, another job gets it, but not at once."""
    go_on = threading.Event()

    @app.task(max_attempts=2, timeout=0.2, backoff=tasks.SOON)
    def block() -> None:
        if current().attempt == 1:
            go_on.wait(60)

    @app.task
    def other() -> bool:
        return go_on.is_set()

    with app.worker(concurrency=1):
        job = block.enqueue()
        wait_until(job.attempts)
        began = time.monotonic()
        assert other.enqueue().wait(10) is False
        assert time.monotonic() - began >= QUICK["abandon_after"] * 0.8
        assert job.refresh().state == "queued"
        go_on.set()
        wait_for(job, "succeeded")


@pytest.mark.usefixtures("short_hold")
def test_an_abandoned_body_counts_for_its_queue_until_its_slot_is_given_back(
    shop: Onward, ledger: Ledger
) -> None:
    """A queue with a limit of one does not run a second body beside it at once."""
    with running(shop.url, concurrency=4, queues=[("mail", 1)], settings={"abandon_after": 60}):
        stuck = tasks.block.using(queue="mail", timeout=0.3, max_attempts=1).enqueue(2)
        wait_for(stuck, "dead")
        wait_over([tasks.block.using(queue="mail").enqueue(0.1)])
    assert most_at_once(ledger.read()) == 1


def test_a_worker_full_of_abandoned_bodies_is_replaced(shop: Onward, ledger: Ledger) -> None:
    """Its process ends, which ends them, and a successor goes on."""
    with running(shop.url, concurrency=1, grace=1, settings={"abandon_after": 0.1}) as first:
        (pid,) = first.pids()
        stuck = [tasks.block.using(timeout=0.2, max_attempts=1).enqueue(60) for _ in range(3)]
        wait_over(stuck)
        wait_until(lambda: first.pids() not in ([], [pid]), 20)
        assert tasks.echo.enqueue("fine").wait(10) == "fine"
        assert not alive(pid)
    assert [ends(job) for job in stuck] == [["failed: timeout"]] * 3


def test_a_blocked_loop_with_a_time_limit_is_killed_by_the_supervisor(
    shop: Onward, ledger: Ledger
) -> None:
    """An `async` body that blocks: its process cannot help itself. The attempt timed out, and a
    neighbour that had not failed runs again.
    """
    with running(shop.url, concurrency=2) as worker:
        (pid,) = worker.pids()
        neighbour = tasks.nap_once.enqueue(60)
        wait_until(lambda: starts(ledger, neighbour))
        job = tasks.block_loop.using(max_attempts=1, timeout=0.5).enqueue(60)
        wait_over([job, neighbour])
        assert not alive(pid)
        assert "stuck past an attempt's time limit" in worker.log()
    assert ends(job) == ["failed: timeout"]
    assert took(job) < 8
    assert "0.5 s" in last_error(job).message
    assert ends(neighbour) == ["lost", "succeeded"]


def test_who_holds_the_interpreter_past_its_limit_is_killed_by_the_supervisor(
    shop: Onward, ledger: Ledger
) -> None:
    """C code that never lets go: no thread of its process runs, so the supervisor acts. The retry
    comes after the backoff, and is a failure like any time-out.
    """
    with running(shop.url, concurrency=2):
        job = tasks.hold_gil.using(max_attempts=2, timeout=0.5).enqueue(60)
        wait_for(job, "dead", seconds=40)
    assert ends(job) == ["failed: timeout"] * 2
    assert len(starts(ledger, job)) == 2


def test_a_limit_that_is_over_before_the_body_can_start_is_a_time_out(shop: Onward) -> None:
    """A millisecond on a busy loop: every job ends, none is held for ever."""
    with running(shop.url, concurrency=50):
        jobs = shop.enqueue_many(
            tasks.nap.using(timeout=0.001, max_attempts=1).call(30) for _ in range(100)
        )
        wait_over(jobs)
        assert tasks.nap.enqueue(0).wait(10) == "rested"
    assert {tuple(ends(job)) for job in jobs} == {("failed: timeout",)}
    assert not any(job.attempts()[0].abandoned for job in jobs)


def test_a_body_that_ends_in_time_is_not_disturbed(app: Onward) -> None:
    """Many short bodies under a limit that is never reached."""

    @app.task(timeout=30)
    async def quick(x: int) -> int:
        await asyncio.sleep(0)
        return x

    jobs = app.enqueue_many(quick.call(i) for i in range(300))
    with app.worker(concurrency=50):
        wait_over(jobs)
    assert {tuple(ends(job)) for job in jobs} == {("succeeded",)}


def test_a_cleanup_that_blocks_the_loop_is_killed_too(shop: Onward) -> None:
    """The time-out was delivered, then the body blocks: the worker is not stuck for ever."""
    with running(shop.url, concurrency=2):
        job = tasks.nap_then_block_loop.using(max_attempts=1, timeout=0.5).enqueue(60)
        wait_for(job, "dead", seconds=15)
        assert tasks.echo.enqueue(1).wait(15) == 1
    assert ends(job) == ["failed: timeout"]


@pytest.mark.parametrize(
    ("length", "limit", "processes"),
    [
        pytest.param(6, 3, 2, id="scaled"),
        pytest.param(20, 10, 4, id="as written", marks=pytest.mark.soak),
    ],
)
def test_a_lease_shorter_than_the_job_and_its_limit(
    shop: Onward, ledger: Ledger, length: float, limit: float, processes: int
) -> None:
    """Lease 2 s: a job without a limit runs once although it takes longer; one with a limit times
    out at it and is tried again only then.
    """
    settings = {"lease": 2.0, "beat": 0.7, "sweep": 0.5}
    with running(shop.url, processes=processes, settings=settings):
        long = tasks.nap.enqueue(length)
        limited = tasks.nap.using(timeout=limit, max_attempts=2).enqueue(length)
        wait_over([long, limited], 100)
    assert ends(long) == ["succeeded"]
    assert len(starts(ledger, long)) == 1
    assert ends(limited) == ["failed: timeout"] * 2
    assert took(limited) >= limit * 0.95
    assert most_at_once([line for line in ledger.read() if line["job"] == limited.id]) == 1


@pytest.mark.soak
def test_a_single_attempt_that_times_out_stays_dead_for_a_minute(
    shop: Onward, ledger: Ledger
) -> None:
    """Limit 2 s, 22 s in a thread: dead with reason timeout at 2 to 4 s, unchanged after 60 s."""
    with running(shop.url, concurrency=2):
        job = tasks.block.using(max_attempts=1, timeout=2).enqueue(22)
        wait_for(job, "dead")
        assert 1.9 < took(job) < 4
        time.sleep(60)
    assert ends(job) == ["failed: timeout"]
    assert len(starts(ledger, job)) == 1


@pytest.mark.soak
def test_a_swallowed_time_out_in_full(app: Onward) -> None:
    """Limit 1 s, 3 s in small steps inside `except BaseException`: recorded at 1 to 2 s."""
    app.settings = Settings()

    @app.task(max_attempts=1, timeout=1)
    async def body() -> str:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            try:
                await asyncio.sleep(0.05)
            except BaseException:
                logging.getLogger("tests").debug("swallowed")
        return "ok"

    with app.worker():
        job = body.enqueue()
        wait_for(job, "dead")
    assert ends(job) == ["failed: timeout"]
    assert 1 <= took(job) <= 2.5


@pytest.mark.soak
def test_a_time_out_is_an_outcome_of_its_own_in_full(app: Onward) -> None:
    """Limit 1 s, backoff 5 s, three attempts: each timed out, at least 5 s apart, then dead."""

    @app.task(max_attempts=3, timeout=1, backoff=Backoff(base=5, factor=1, jitter=0))
    async def nap() -> None:
        await asyncio.sleep(10)

    with app.worker():
        job = nap.enqueue()
        wait_for(job, "dead", seconds=60)
    assert ends(job) == ["failed: timeout"] * 3
    assert min(pauses(job)) >= 4.99
