"""The running attempt, as its body sees it, and how a body says that it ends."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from datetime import timedelta
from typing import Any, cast

import pytest

from onward import (
    Cancelled,
    Current,
    Discard,
    InvalidArguments,
    InvalidOption,
    Onward,
    Retry,
    Snooze,
    current,
)
from onward.errors import IdConflict, OutsideJob
from onward.ids import new_id
from onward.running import CancelToken, set_current
from onward.store import store
from tests.support import by_hand


def work(n: int = 0) -> None:
    """What the task here is made of."""


@pytest.fixture
def attempt(app: Onward) -> Current:
    """An attempt that is running."""
    task = app.task(name="shop.work", queue="mail")(work)
    return Current(by_hand.claim(app, task.enqueue().id), app)


def test_outside_of_a_job_there_is_no_current_attempt() -> None:
    with pytest.raises(OutsideJob, match="outside a running job") as outside:
        current()
    assert isinstance(outside.value, RuntimeError)


def test_inside_it_is_the_same_for_the_thread_and_for_contexts_copied_from_it(
    attempt: Current,
) -> None:
    set_current(attempt)
    try:
        assert current() is attempt
        assert (current().task, current().queue, current().attempt) == ("shop.work", "mail", 1)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(copy_context().run, current).result() is attempt
            with pytest.raises(OutsideJob):
                pool.submit(current).result()
    finally:
        set_current(None)


def test_it_is_shown_by_its_job_and_without_arguments(app: Onward) -> None:
    task = app.task(name="shop.login")(login)
    shown = Current(by_hand.claim(app, task.enqueue("hunter2").id), app)
    assert repr(shown) == f"<Current shop.login {shown.id}, attempt 1>"


def login(password: str) -> None:
    """A task with something to hide."""


def test_a_body_that_asks_stops_when_it_was_asked_to(attempt: Current) -> None:
    attempt.check()
    assert not attempt.cancel_requested
    attempt.cancel_token.request()
    assert attempt.cancel_requested
    with pytest.raises(Cancelled):
        attempt.check()


def test_every_thread_that_waits_for_a_cancel_is_woken() -> None:
    token = CancelToken()
    assert token.wait(0.01) is False
    with ThreadPoolExecutor(8) as pool:
        waits = [pool.submit(token.wait, 10) for _ in range(8)]
        time.sleep(0.05)
        started = time.monotonic()
        token.request()
        assert all(wait.result() for wait in waits)
    assert time.monotonic() - started < 5
    assert token.wait(10) is True


def test_no_wait_misses_a_request_that_comes_at_the_same_moment() -> None:
    for _ in range(300):
        token = CancelToken()
        barrier = threading.Barrier(4)

        def wait(token: CancelToken = token, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            return token.wait(5)

        with ThreadPoolExecutor(3) as pool:
            waits = [pool.submit(wait) for _ in range(3)]
            barrier.wait()
            token.request()
            assert all(each.result() for each in waits)


def test_a_follow_up_is_of_the_app_whose_worker_writes_it(attempt: Current) -> None:
    """In this database nobody knows the other app's task."""
    other = Onward("sqlite:///other.db")
    call = other.task(work).call(1)
    with pytest.raises(InvalidArguments, match="belongs to another app"):
        attempt.enqueue(call)
    assert attempt.follow_ups == []


def test_a_call_is_one_follow_up(app: Onward, attempt: Current) -> None:
    """One that was made once, for all who run this code, would be one job for all of them. With an
    id of the caller's own it may be repeated.
    """
    call = app.tasks["shop.work"].call(1)
    attempt.enqueue(call)
    with pytest.raises(IdConflict, match="enqueued already"):
        attempt.enqueue(call)
    mine = app.tasks["shop.work"].using(id=new_id()).call(1)
    assert attempt.enqueue(mine) == attempt.enqueue(mine)


def test_after_its_body_an_attempt_takes_no_follow_ups(app: Onward) -> None:
    """What a body has started and not waited for is told, and loses nothing without a word."""
    told: list[BaseException] = []
    done = threading.Event()

    @app.task
    def parent() -> None:
        me = current()

        def later() -> None:
            while me.ended_at is None:
                time.sleep(0.01)
            try:
                me.enqueue(app.tasks["shop.work"].call(1))
            except OutsideJob as error:
                told.append(error)
            done.set()

        threading.Thread(target=later).start()

    app.task(name="shop.work")(work)
    with app.worker():
        parent.enqueue().wait(10)
        assert done.wait(10)
    assert "had ended" in str(told[0])


def test_follow_ups_are_kept_until_the_attempt_succeeds(app: Onward, attempt: Current) -> None:
    task = app.tasks["shop.work"]
    id = attempt.enqueue(task.using(priority=5).call(7))
    assert [(job.id, job.priority) for job in attempt.follow_ups] == [(id, 5)]
    assert app.counts()["queued"] == 0
    job = app.database.read(store.get, attempt.id)
    change = job.move(
        by_hand.Event.SUCCEED,
        ended=by_hand.AttemptState.SUCCEEDED,
        result="null",
        follow_ups=tuple(attempt.follow_ups),
    )
    app.database.run(store.apply, [change])
    assert app.get(id).args == {"n": 7}


@pytest.mark.parametrize("way", ["plain", "async"])
def test_a_follow_up_that_was_written_is_not_enqueued_once_more(
    app: Onward, attempt: Current, way: str
) -> None:
    """The call is one job, whoever writes it: the error is of ours and says so."""
    call = app.tasks["shop.work"].call(7)
    attempt.enqueue(call)
    app.database.run(store.enqueue, attempt.follow_ups)

    async def on_loop() -> None:
        try:
            await app.aenqueue_many([call])
        finally:
            await app.aclose()

    again = {"plain": lambda: app.enqueue_many([call]), "async": lambda: asyncio.run(on_loop())}
    with pytest.raises(IdConflict, match="enqueued already"):
        again[way]()
    assert app.counts()["queued"] == 1


async def never() -> None:
    """A coroutine that nobody should have to await."""


def test_a_follow_up_must_be_a_call_and_without_a_connection(app: Onward, attempt: Current) -> None:
    coroutine = never()
    for thing in (None, "shop.work", app.tasks["shop.work"], coroutine):
        with pytest.raises(InvalidArguments, match="no call"):
            attempt.enqueue(cast(Any, thing))
    assert coroutine.cr_frame is None
    with pytest.raises(InvalidOption, match="with a connection"):
        attempt.enqueue(app.tasks["shop.work"].using(connection=object()).call())
    assert attempt.follow_ups == []


@pytest.mark.parametrize("delay", [5, 5.0, timedelta(seconds=5)])
def test_a_snooze_and_a_retry_take_any_duration(delay: Any) -> None:
    assert Snooze(delay).delay == Retry(after=delay).after == 5.0
    assert str(Snooze(delay)) == "snoozed for 5 s"
    assert Snooze(-5).delay == Retry(after=-5).after == 0.0


@pytest.mark.parametrize("delay", ["soon", None, float("nan"), float("inf"), timedelta.max, True])
def test_what_is_no_duration_is_refused_in_the_body(delay: Any) -> None:
    with pytest.raises(InvalidOption, match="delay"):
        Snooze(delay)
    if delay is not None:
        with pytest.raises(InvalidOption, match="after"):
            Retry(after=delay)


@pytest.mark.parametrize(
    "signal", [Snooze(timedelta(seconds=5)), Retry("later", after=3), Discard("stale")], ids=repr
)
def test_a_signal_survives_pickling(signal: Exception) -> None:
    copy = pickle.loads(pickle.dumps(signal))
    assert (type(copy), str(copy), vars(copy)) == (type(signal), str(signal), vars(signal))
