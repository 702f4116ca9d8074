"""Cancel: queued jobs never run, running ones stop as they can, and each ends in one way only."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace

from onward import (
    Backoff,
    Discard,
    Handle,
    IllegalTransition,
    Onward,
    Retry,
    Snooze,
    current,
)
from onward.lifecycle import Event, JobState
from tests.support import tasks
from tests.support.ledger import Ledger
from tests.support.workers import AS_SHIPPED, QUICK, alive, running, wait_until
from tests.worker.history import ends, finishes, refusals, starts, wait_for, wait_over

ALONE = [pytest.mark.soak, pytest.mark.alone, pytest.mark.timeout(180)]


def test_a_queued_job_that_is_cancelled_never_runs(app: Onward) -> None:
    """Whether it is due, scheduled for later, or waits for its retry."""
    ran: list[str] = []

    @app.task(backoff=Backoff(base=3600))
    def work(name: str) -> None:
        ran.append(name)
        if name == "retried":
            raise RuntimeError

    due, later = work.enqueue("due"), work.using(run_after=0.5).enqueue("later")
    assert due.cancel() == later.cancel() == "cancelled"
    last = work.using(run_after=0.8).enqueue("last")
    with app.worker():
        retried = work.enqueue("retried")
        wait_until(retried.attempts)
        assert retried.cancel() == "cancelled"
        wait_over([last])
    assert sorted(ran) == ["last", "retried"]
    assert ends(due) == ends(later) == ["cancelled: cancelled on request"]
    assert ends(retried) == ["failed: error", "cancelled: cancelled on request"]


def test_a_thread_that_looks_stops(app: Onward) -> None:
    """`check()` raises, `wait()` wakes at once: cancelled, and no budget charged."""

    @app.task(max_attempts=1)
    def watch() -> None:
        while True:
            current().cancel_token.wait(30)
            current().check()

    with app.worker():
        job = watch.enqueue()
        wait_for(job, "running")
        assert job.cancel() == "cancelling"
        assert job.cancel() == "cancelling"
        wait_for(job, "cancelled")
    assert ends(job) == ["cancelled"]
    assert job.failures == 0


def test_an_async_body_that_does_not_look_gets_an_exception(app: Onward) -> None:
    """CancelledError, but not before `cancel_raise_after`; its cleanup may await something."""
    seen: list[tuple[str, float]] = []

    @app.task
    async def nap() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append(("interrupted", time.monotonic()))
            raise
        finally:
            await asyncio.sleep(0.05)
            seen.append(("clean", time.monotonic()))

    with app.worker():
        job = nap.enqueue()
        wait_for(job, "running")
        asked = time.monotonic()
        job.cancel()
        wait_for(job, "cancelled")
    assert [what for what, _ in seen] == ["interrupted", "clean"]
    assert seen[0][1] - asked >= app.settings.cancel_raise_after
    assert ends(job) == ["cancelled"]


def test_a_cleanup_longer_than_a_look_is_not_interrupted_again_and_again(app: Onward) -> None:
    """The worker looks for cancels every 0.1 s; a cleanup of 0.3 s is left to end."""
    cleaned: list[bool] = []

    @app.task
    async def nap() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.5)
            cleaned.append(True)

    with app.worker():
        job = nap.enqueue()
        wait_for(job, "running")
        job.cancel()
        wait_for(job, "cancelled")
    assert cleaned == [True]


def test_an_async_body_that_swallows_the_exception_gets_another(app: Onward) -> None:
    """It goes on after the first; a later one ends it."""
    swallowed: list[float] = []

    @app.task
    async def stubborn() -> None:
        while len(swallowed) < 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed.append(time.monotonic())
        await asyncio.sleep(60)

    with app.worker():
        job = stubborn.enqueue()
        wait_for(job, "running")
        job.cancel()
        wait_for(job, "cancelled")
    assert len(swallowed) == 2


def test_a_body_that_cannot_be_stopped_is_cancelling_until_it_ends(app: Onward) -> None:
    """A thread in one blocking call: never `cancelled` before its last act, and its slot is not
    given to another meanwhile.
    """
    go_on = threading.Event()
    last_act: list[str] = []

    @app.task
    def block() -> None:
        go_on.wait(60)
        last_act.append(app.get(current().id).state)
        raise RuntimeError("it does not matter any more")

    @app.task
    def other() -> None: ...

    with app.worker(concurrency=1):
        job = block.enqueue()
        wait_for(job, "running")
        job.cancel()
        second = other.enqueue()
        time.sleep(1.0)
        assert job.refresh().state == "cancelling"
        assert second.refresh().state == "queued"
        go_on.set()
        wait_for(job, "cancelled")
        wait_over([second])
    assert last_act == ["cancelling"]
    assert (ends(job), job.failures) == (["failed: error"], 0)


ENDINGS: dict[str, tuple[Any, str, list[str]]] = {
    "returns": (None, "succeeded", ["succeeded"]),
    "fails": (RuntimeError(), "cancelled", ["failed: error"]),
    "retries": (Retry(after=0), "cancelled", ["failed: error"]),
    "snoozes": (Snooze(0), "cancelled", ["released: cancelled"]),
    "discards": (Discard(), "cancelled", ["cancelled"]),
    "exits": (SystemExit(), "cancelled", ["failed: error"]),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_however_a_cancelled_body_ends_it_is_not_tried_again(app: Onward, ending: str) -> None:
    """It succeeded, or it is cancelled with the attempt's own outcome; nothing is charged."""
    error, state, history = ENDINGS[ending]

    @app.task(max_attempts=5, backoff=tasks.SOON)
    def body() -> None:
        current().cancel_token.wait(30)
        if error is not None:
            raise error

    with app.worker():
        job = body.enqueue()
        wait_for(job, "running")
        assert job.cancel() == "cancelling"
        wait_for(job, "succeeded", "cancelled")
    assert (job.state, ends(job)) == (state, history)
    assert (job.failures, job.losses) == (0, 0)


def test_a_cancelled_job_that_times_out_is_cancelled(app: Onward) -> None:
    """The limit comes before the exception would: cancelled, its attempt timed out, no retry."""
    app.settings = replace(app.settings, cancel_raise_after=30.0)

    @app.task(max_attempts=5, timeout=0.6)
    async def nap() -> None:
        await asyncio.sleep(60)

    with app.worker():
        job = nap.enqueue()
        wait_for(job, "running")
        job.cancel()
        wait_for(job, "cancelled")
    assert ends(job) == ["failed: timeout"]


def test_a_body_is_asked_only_about_its_own_attempt(app: Onward) -> None:
    """A neighbour of a cancelled job goes on undisturbed."""

    @app.task
    async def nap(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "rested"

    with app.worker():
        mine, other = nap.enqueue(60), nap.enqueue(1.0)
        wait_for(mine, "running")
        mine.cancel()
        assert other.wait(10) == "rested"
        wait_for(mine, "cancelled")


def test_what_is_over_cannot_be_cancelled(app: Onward) -> None:
    """Succeeded: refused, and it stays so. Cancelled: nothing to do. Dead: discard it instead."""

    @app.task(max_attempts=1)
    def work(fail: bool = False) -> None:
        if fail:
            raise RuntimeError

    with app.worker():
        done, dead = work.enqueue(), work.enqueue(fail=True)
        wait_over([done, dead])
    with pytest.raises(IllegalTransition, match="it is succeeded"):
        done.cancel()
    with pytest.raises(IllegalTransition, match="it is dead"):
        dead.cancel()
    assert app.discard(dead.id) == "cancelled"
    assert dead.cancel() == "cancelled"


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(80, id="scaled"),
        pytest.param(1_000, id="as written", marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
    ],
)
@pytest.mark.parametrize("where", ["loop", "thread"])
def test_cancel_races_with_the_end(app: Onward, ledger: Ledger, count: int, where: str) -> None:
    """Jobs of 50 ms, each cancelled at a random moment from 0 to 100 ms after its start, or after
    its enqueue, half of them raise: each is either succeeded or cancelled, one event each, and none
    whose cancel was accepted is tried again.
    """
    chance = random.Random(45)
    begun: set[str] = set()

    def end(fail: bool) -> None:
        if fail:
            raise RuntimeError

    @app.task(name="nap", max_attempts=5, backoff=tasks.SOON)
    async def on_loop(fail: bool) -> None:
        begun.add(current().id)
        for _ in range(5):
            current().check()
            await asyncio.sleep(0.01)
        end(fail)

    def in_thread(fail: bool) -> None:
        begun.add(current().id)
        for _ in range(5):
            current().check()
            time.sleep(0.01)
        end(fail)

    if where == "thread":
        app.tasks.clear()
        app.task(name="nap", max_attempts=5, backoff=tasks.SOON)(in_thread)
    nap = app.tasks["nap"]
    answers: dict[str, tuple[JobState, int]] = {}

    async def one(number: int) -> Handle[None]:
        job: Handle[None] = await nap.aenqueue(number % 2 == 1)
        while number % 4 < 2 and job.id not in begun:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(chance.uniform(0, 0.1))
        with suppress(IllegalTransition):
            answer = await job.acancel()
            answers[job.id] = answer, (await job.arefresh()).attempt
        return job

    async def all_of_them() -> list[Handle[None]]:
        jobs: list[Handle[None]] = []
        for start in range(0, count, 40):
            numbers = range(start, min(start + 40, count))
            jobs += await asyncio.gather(*(one(number) for number in numbers))
        await app.database.close_loop()
        return jobs

    with app.worker(concurrency=20):
        jobs = asyncio.run(all_of_them())
        wait_over(jobs, 60)
    for job in jobs:
        assert job.state in {"succeeded", "cancelled"}
        answer, attempt = answers.get(job.id, (None, None))
        assert answer is not None or job.state == "succeeded"
        past = job.attempts()
        assert attempt is None or len(past) == attempt, "tried again after an accepted cancel"
        assert [a.event for a in past[:-1]] == [Event.RETRY] * (len(past) - 1)
        assert past[-1].event in {Event.SUCCEED, Event.CANCEL}
        if answer == JobState.CANCELLED:  # It was queued: its last attempt never began.
            assert past[-1].started_at is None
            assert len(starts(ledger, job)) == len(past) - 1
    counts = app.counts()
    assert counts["succeeded"] + counts["cancelled"] == sum(counts.values()) == count
    assert {answer for answer, _ in answers.values()} == {JobState.CANCELLING, JobState.CANCELLED}
    assert refusals(app) == []


@pytest.mark.parametrize(
    ("settings", "grace", "after", "cancelled_in", "gone_in"),
    [
        pytest.param(QUICK, 60.0, 0.0, 5.0, 5.0, id="scaled"),
        pytest.param(AS_SHIPPED, 120.0, 1.0, 3.0, 2.0, id="as written", marks=ALONE),
    ],
)
def test_cancel_while_the_worker_drains(
    shop: Onward,
    settings: dict[str, Any],
    grace: float,
    after: float,
    cancelled_in: float,
    gone_in: float,
) -> None:
    """After SIGTERM it still looks: a job of 60 s is cancelled soon, and the worker exits with
    status 0.
    """
    with running(shop.url, grace=grace, settings=settings) as worker:
        job = tasks.watch.enqueue(60)
        wait_for(job, "running")
        worker.terminate()
        wait_until(lambda: {line.state for line in worker.workers()} == {"draining"})
        time.sleep(after)
        job.cancel()
        wait_for(job, "cancelled", seconds=cancelled_in)
        assert worker.wait(gone_in) == 0
    assert ends(job) == ["cancelled"]


def test_a_process_of_its_own_is_killed_and_the_worker_can_stop(
    shop: Onward, ledger: Ledger
) -> None:
    """It computes without looking: its process ends within the escalation time, its slot is usable
    again, the worker stops within its grace, and no process is left.
    """
    with running(shop.url, concurrency=1, grace=2) as worker:
        job = tasks.isolated_spin.enqueue(60)
        line = wait_until(lambda: starts(ledger, job), 20)[0]
        job.cancel()
        wait_for(job, "cancelled", seconds=10)
        assert not alive(line["pid"])
        assert tasks.isolated_nap.enqueue(0).wait(20) == "rested"
        left = worker.isolated_pids()
        assert left
        worker.terminate()
        assert worker.wait(4) == 0
        assert not any(alive(pid) for pid in left)
    assert ends(job) == ["cancelled"]


@pytest.mark.parametrize(
    ("settings", "grace"),
    [
        pytest.param(QUICK, 20.0, id="scaled"),
        pytest.param(AS_SHIPPED, 30.0, id="as written", marks=ALONE),
    ],
)
def test_a_process_of_its_own_is_killed_while_the_worker_drains(
    shop: Onward, ledger: Ledger, settings: dict[str, Any], grace: float
) -> None:
    """SIGTERM comes while the job is being cancelled: its process is killed at the end of the
    escalation, not of the grace, and the worker goes with it.
    """
    with running(shop.url, concurrency=1, grace=grace, settings=settings) as worker:
        job = tasks.isolated_spin.enqueue(60)
        line = wait_until(lambda: starts(ledger, job), 20)[0]
        assert job.cancel() == "cancelling"
        asked = time.monotonic()
        worker.terminate()
        wait_for(job, "cancelled", seconds=10)
        assert time.monotonic() - asked < 10
        assert not alive(line["pid"])
        assert worker.wait(10) == 0
    assert ends(job) == ["cancelled"]


def test_an_isolated_body_that_looks_stops_by_itself(shop: Onward, ledger: Ledger) -> None:
    """The token reaches its process: it ends before it would be killed, and the process is kept."""
    with running(shop.url, concurrency=1, settings={"cancel_kill_after": 30}) as worker:
        job = tasks.isolated_watch.enqueue(60)
        wait_until(lambda: starts(ledger, job), 20)
        job.cancel()
        wait_for(job, "cancelled", seconds=10)
        assert worker.isolated_pids()
    assert finishes(ledger, job)[0]["raised"] == "Cancelled"


def test_a_claimed_job_that_has_not_begun_is_cancelled_too(shop: Onward, ledger: Ledger) -> None:
    """Claimed ahead and still in the worker's hands: it never begins."""
    short = shop.enqueue_many(tasks.aecho.call(i) for i in range(400))
    with running(shop.url, concurrency=1):
        wait_over(short)
        blocker = tasks.block.using(priority=5).enqueue(1.5)
        behind = shop.enqueue_many(tasks.aecho.call(i) for i in range(20))
        wait_for(blocker, "running")
        answers = [job.cancel() for job in behind]
        wait_over([blocker, *behind])
    assert set(answers) <= {JobState.CANCELLING, JobState.CANCELLED}
    assert {job.state for job in behind} <= {"cancelled", "succeeded"}
    ran = {line["job"] for line in starts(ledger)}
    for job in behind:
        assert (job.state == "cancelled") == (job.id not in ran)


@pytest.mark.soak
def test_a_thread_that_sleeps_is_cancelling_to_its_end(shop: Onward, ledger: Ledger) -> None:
    """20 s in one blocking call, then its last line: never `cancelled` before that."""
    with running(shop.url, concurrency=1):
        job = tasks.block.enqueue(20)
        wait_until(lambda: starts(ledger, job))
        job.cancel()
        second = tasks.echo.enqueue(1)
        while not finishes(ledger, job):
            if job.refresh().state == "cancelled":
                assert finishes(ledger, job)
            assert second.refresh().state == "queued" or finishes(ledger, job)
            time.sleep(0.1)
        wait_for(job, "cancelled", "succeeded")
