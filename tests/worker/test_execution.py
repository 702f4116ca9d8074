"""Bodies run where they should, as many at once as they may, and their results come back."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from typing import Any

import pytest

from onward import Onward, current
from onward.errors import OutsideJob
from onward.worker.embedded import EmbeddedWorker
from tests.support import tasks
from tests.support.ledger import Ledger
from tests.support.workers import running, wait_until
from tests.worker.history import ends, last_error, most_at_once, starts, wait_for, wait_over


def test_async_bodies_share_the_loop_and_plain_ones_get_threads(app: Onward) -> None:
    """An `async` body runs on the worker's own thread, a plain one on another."""

    @app.task
    async def on_loop() -> str:
        asyncio.get_running_loop()
        return threading.current_thread().name

    @app.task
    def in_thread() -> str:
        return threading.current_thread().name

    with app.worker():
        assert on_loop.enqueue().wait(10) == "onward-worker"
        assert in_thread.enqueue().wait(10) == "onward-job"


def test_an_isolated_body_has_a_process_of_its_own(shop: Onward, ledger: Ledger) -> None:
    """It runs in neither the caller's process nor the worker's; a second attempt uses it again."""
    with shop.worker():
        jobs = [tasks.isolated_nap.enqueue(0), tasks.isolated_nap.enqueue(0)]
        for job in jobs:
            assert job.wait(20) == "rested"
    assert os.getpid() not in {line["pid"] for line in starts(ledger)}


@pytest.mark.parametrize("kind", ["loop", "threads"])
def test_a_worker_runs_as_many_at_once_as_it_has_slots(app: Onward, kind: str) -> None:
    """Six bodies on three slots: three at once at some moment, never four."""
    lock = threading.Lock()
    seen: list[int] = []
    busy = 0

    def step(by: int) -> None:
        nonlocal busy
        with lock:
            busy += by
            seen.append(busy)

    @app.task(name="body")
    async def on_loop() -> None:
        step(1)
        await asyncio.sleep(0.2)
        step(-1)

    def in_thread() -> None:
        step(1)
        time.sleep(0.2)
        step(-1)

    if kind == "threads":
        app.tasks.clear()
        app.task(name="body")(in_thread)
    jobs = app.enqueue_many(app.tasks["body"].call() for _ in range(6))
    with app.worker(concurrency=3):
        wait_over(jobs)
    assert max(seen) == 3


def test_a_queue_has_no_more_at_once_than_its_own_limit(shop: Onward, ledger: Ledger) -> None:
    """With `mail:1` and four slots, mails run one by one while other jobs run beside them."""
    mails = [tasks.nap.using(queue="mail").enqueue(0.1) for _ in range(4)]
    others = [tasks.nap.using(queue="other").enqueue(0.1) for _ in range(6)]
    queues = [("mail", 1), ("other", None)]
    with running(shop.url, concurrency=4, queues=queues):
        wait_over([*mails, *others])
    ids = {mail.id for mail in mails}
    assert most_at_once([line for line in ledger.read() if line["job"] in ids]) == 1
    assert most_at_once(ledger.read()) > 1


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, 0.0])
def test_an_empty_result_is_a_result(app: Onward, value: Any) -> None:
    """A caller who waits gets it, and gets it again when the job was over before the wait."""

    @app.task
    def give() -> Any:
        return value

    job = give.enqueue()
    with app.worker():
        assert job.wait(10) == value
    assert app.get(job.id).wait(0) == value
    assert type(app.get(job.id).result) is type(value)


def test_functions_without_annotations_work(app: Onward) -> None:
    """Arguments arrive as the JSON values that they are."""

    def plain(x, y=2, *, z=3):  # type: ignore[no-untyped-def]
        return [x, y, z]  # pyright: ignore[reportUnknownVariableType]

    add: Any = app.task(plain)  # type: ignore[no-untyped-call,unused-ignore]
    with app.worker():
        assert add.enqueue(1).wait(10) == [1, 2, 3]
        assert add.enqueue("a", {"b": None}, z=[]).wait(10) == ["a", {"b": None}, []]


def test_the_body_knows_its_attempt(app: Onward, caplog: pytest.LogCaptureFixture) -> None:
    """`current()` has the id, the number, the queue, and a log whose records carry them."""

    @app.task(name="know", queue="mail")
    def know() -> list[Any]:
        me = current()
        me.log.info("here", extra={"mine": 1})
        return [me.id, me.attempt, me.task, me.queue, me.cancel_requested]

    with caplog.at_level(logging.INFO, "onward.task"), app.worker():
        job = know.enqueue()
        assert job.wait(10) == [job.id, 1, "know", "mail", False]
    record = next(r for r in caplog.records if r.name == "onward.task")
    assert record.__dict__["onward_job"] == job.id
    assert record.__dict__["onward_attempt"] == 1
    assert record.__dict__["mine"] == 1


def test_the_attempt_is_known_in_what_the_body_starts_and_nowhere_else(app: Onward) -> None:
    """Subtasks and `asyncio.to_thread` see it; a later body in the same thread sees its own."""

    @app.task
    async def subtask() -> list[str]:
        async def inner() -> str:
            return current().id

        return [await asyncio.create_task(inner()), await asyncio.to_thread(lambda: current().id)]

    @app.task
    def plain() -> str:
        return current().id

    with app.worker(concurrency=1):
        job = subtask.enqueue()
        assert job.wait(10) == [job.id, job.id]
        for later in [plain.enqueue(), plain.enqueue()]:
            assert later.wait(10) == later.id
    with pytest.raises(OutsideJob):
        current()


def test_follow_ups_come_with_success_only(app: Onward) -> None:
    """What an attempt enqueues through `current()` exists if it succeeds, not if it fails."""

    @app.task
    def after(attempt: int) -> int:
        return attempt

    @app.task(backoff=tasks.SOON)
    def first() -> str:
        child = current().enqueue(after.call(current().attempt))
        if current().attempt == 1:
            raise RuntimeError("not yet")
        return child

    with app.worker():
        job = first.enqueue()
        child = app.get(job.wait(10))
        assert child.wait(10) == 2
    assert ends(job) == ["failed: error", "succeeded"]
    assert app.counts()["succeeded"] == 2
    assert sum(app.counts().values()) == 2


def test_many_follow_ups_are_written_together(app: Onward) -> None:
    """A body may enqueue hundreds, of several tasks and queues."""

    @app.task
    async def child(number: int) -> int:
        return number

    @app.task
    async def parent(count: int) -> list[str]:
        return [current().enqueue(child.using(priority=i % 3).call(i)) for i in range(count)]

    with app.worker():
        ids = parent.enqueue(300).wait(10)
        assert [app.get(id).wait(10) for id in ids] == list(range(300))


def test_a_follow_up_of_an_isolated_body_is_written_too(shop: Onward, ledger: Ledger) -> None:
    """The process of its own hands it over together with its outcome."""
    with shop.worker():
        job = tasks.isolated_parent.enqueue()
        assert shop.get(job.wait(20)).wait(10) == "child"


def test_a_thread_may_enqueue_by_itself(app: Onward) -> None:
    """A plain `enqueue` in a body is on its own: it is there even if the body fails."""

    @app.task
    def after() -> str:
        return "here"

    @app.task(max_attempts=1)
    def first() -> None:
        after.enqueue()
        raise RuntimeError

    with app.worker(concurrency=1):
        job = first.enqueue()
        wait_for(job, "dead")
        wait_until(lambda: app.counts()["succeeded"] == 1)


def test_an_async_body_may_enqueue_and_wait(app: Onward) -> None:
    """On the loop of its worker, with another slot free for the job that it waits for."""

    @app.task
    async def inner(x: int) -> int:
        return x + 1

    @app.task
    async def outer(x: int) -> int:
        job = await inner.aenqueue(x)
        return await job.await_result(10)

    with app.worker(concurrency=2):
        assert outer.enqueue(1).wait(10) == 2


def test_a_worker_that_runs_until_empty_ends(app: Onward) -> None:
    """`run_worker(until_empty=True)` returns when no due job is left; later ones stay queued."""

    @app.task
    def note(x: int) -> int:
        return x

    jobs = app.enqueue_many(note.call(i) for i in range(20))
    later = note.using(run_after=3600).enqueue(1)
    app.run_worker(until_empty=True)
    assert [job.refresh().state for job in jobs] == ["succeeded"] * 20
    assert later.refresh().state == "queued"


def test_until_empty_waits_for_what_runs_and_what_that_enqueues(app: Onward) -> None:
    """A chain is followed to its end although nothing is queued while a link runs."""

    @app.task
    async def link(n: int) -> int:
        await asyncio.sleep(0.15)
        if n:
            current().enqueue(link.call(n - 1))
        return n

    link.enqueue(3)
    EmbeddedWorker(app, until_empty=True).run()
    assert app.counts()["succeeded"] == 4


def test_until_empty_does_not_wait_for_tasks_that_it_does_not_know(app: Onward) -> None:
    """Due jobs that this worker cannot run are left to others."""

    @app.task(name="known")
    def known() -> None: ...

    @app.task(name="unknown")
    def unknown() -> None: ...

    mine, other = known.enqueue(), unknown.enqueue()
    del app.tasks["unknown"]
    app.run_worker(until_empty=True)
    assert (mine.refresh().state, other.refresh().state) == ("succeeded", "queued")


def test_a_supervisor_that_runs_until_empty_ends_with_status_0(shop: Onward) -> None:
    """All its processes end when nothing is left, and none is started again."""
    jobs = shop.enqueue_many(tasks.echo.call(i) for i in range(10))
    with running(shop.url, processes=2, until_empty=True, ready=False) as worker:
        assert worker.wait(30) == 0
        assert [job.wait(0) for job in jobs] == list(range(10))
        assert {line.state for line in worker.workers()} == {"stopped"}


def test_workers_in_one_process_share_the_work(app: Onward) -> None:
    """Three embedded workers at once: every job runs once."""
    ran: list[int] = []

    @app.task
    def note(x: int) -> None:
        ran.append(x)

    with app.worker(concurrency=2), app.worker(concurrency=2), app.worker(concurrency=2):
        jobs = app.enqueue_many(note.call(i) for i in range(300))
        wait_over(jobs)
    assert sorted(ran) == list(range(300))
    assert {job.refresh().attempt for job in jobs} == {1}


def test_an_async_task_that_waits_as_if_it_were_none_is_told_so(app: Onward) -> None:
    """It would hold its worker's loop, and perhaps wait for a job that only this worker runs."""

    @app.task
    async def child() -> int:
        return 1

    @app.task(max_attempts=1)
    async def asks(rightly: bool) -> int:
        job = await child.aenqueue()
        return await job.await_result(20) if rightly else job.wait(20)

    wrong, right = asks.enqueue(False), asks.enqueue(True)
    with app.worker(concurrency=4):
        assert right.wait(20) == 1
        wait_over([wrong])
    assert "await job.await_result()" in str(last_error(wrong))
