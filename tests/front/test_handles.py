"""A job as its caller holds it: what can be seen, and what can be done with it."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from onward import (
    Handle,
    IllegalTransition,
    InvalidOption,
    JobFailed,
    JobNotFound,
    JobState,
    Onward,
    WaitRefused,
    WaitTimeout,
)
from onward.running import Current, set_current
from onward.task import SyncTask
from tests.support import by_hand


def test_a_handle_is_its_job(app: Onward, send: SyncTask[..., int]) -> None:
    job, other = send.enqueue("x"), send.enqueue("y")
    assert job == app.get(job.id)
    assert job != other
    assert job != job.id
    assert len({job, app.get(job.id), other}) == 2
    assert repr(job) == f"<Job {job.id} of shop.send: queued>"
    assert (job.state, job.attempt, job.queue, job.task) == ("queued", 1, "default", "shop.send")
    assert (job.failures, job.losses, job.worker, job.reason) == (0, 0, None, None)
    assert abs(job.created_at - datetime.now(UTC)) < timedelta(seconds=60)


def test_states_compare_with_plain_strings(app: Onward, send: SyncTask[..., int]) -> None:
    job = send.enqueue()
    assert job.state == "queued"
    assert job.state is JobState.QUEUED
    assert job.state in {"queued", "running"}
    assert f"{job.state}" == "queued"
    assert app.counts() == {state.value: int(state == "queued") for state in JobState}


def test_a_handle_keeps_what_it_saw_until_it_is_refreshed(
    app: Onward, send: SyncTask[..., int]
) -> None:
    job = send.enqueue()
    by_hand.claim(app, job.id)
    assert job.state == "queued"
    assert job.refresh().state == "running"
    assert asyncio.run(_arefreshed(app, job)) == "running"


REASONS = {
    "nul": "bo\x00om",
    "surrogate": "bo\ud800om",
    "escape": "bo\x1b[31mom",
    "huge": "bo" + "x" * 50_000_000 + "om",
    "address": "bo postgresql://bob:hunter2@db/shop om",
    "empty": "",
}


@pytest.mark.parametrize("kind", REASONS)
@pytest.mark.parametrize("way", ["plain", "async"])
def test_any_reason_can_be_given(
    app: Onward, send: SyncTask[..., int], kind: str, way: str
) -> None:
    job = send.enqueue()
    by_hand.bury(app, job.id)
    if way == "plain":
        app.discard(job.id, reason=REASONS[kind])
    else:
        asyncio.run(_discarded(app, job.id, REASONS[kind]))
    said = job.refresh().reason
    assert said is not None
    assert len(said) <= 1_000
    assert said.isprintable()
    assert "hunter2" not in said
    assert (said[:2], said[-2:]) == (("bo", "om") if kind != "empty" else ("", ""))


async def _discarded(app: Onward, id: str, reason: str) -> None:
    await app.adiscard(id, reason=reason)
    await app.database.close_loop()


def test_a_reason_is_a_text(app: Onward, send: SyncTask[..., int]) -> None:
    reason: Any = 5
    with pytest.raises(InvalidOption, match="reason=5"):
        app.discard(send.enqueue().id, reason=reason)


async def _arefreshed(app: Onward, job: Handle[int]) -> str:
    state = (await job.arefresh()).state
    assert (await app.aget(job.id)) == job
    await app.aclose()
    return state


def test_an_unknown_id_is_not_found(app: Onward) -> None:
    for look in (app.get, app.cancel, app.requeue, app.discard):
        with pytest.raises(LookupError) as missing:
            look(uuid.uuid4())
        assert isinstance(missing.value, JobNotFound)
        with pytest.raises(InvalidOption, match="is not a job id"):
            look("5")


def test_a_handle_knows_what_became_of_it_when_it_was_moved(
    app: Onward, send: SyncTask[..., int]
) -> None:
    """Whether it is fresh or was read; a later look counts for more."""
    fresh, read = send.enqueue(), app.get(send.enqueue().id)
    assert (fresh.cancel(), fresh.state) == ("cancelled", "cancelled")
    assert (asyncio.run(_acancelled(app, read)), read.state) == ("cancelled", "cancelled")
    running = send.enqueue()
    by_hand.claim(app, running.id)
    assert (running.cancel(), running.state) == ("cancelling", "cancelling")
    dead = send.enqueue()
    by_hand.bury(app, dead.id)
    app.requeue(dead)
    by_hand.succeed(app, dead.id)
    assert dead.state == "queued"
    assert dead.refresh().state == "succeeded"


async def _acancelled(app: Onward, job: Handle[int]) -> str:
    try:
        return await job.acancel()
    finally:
        await app.aclose()


def test_whoever_holds_a_job_can_name_it_by_that(app: Onward, send: SyncTask[..., int]) -> None:
    job, gone = send.enqueue(), send.enqueue()
    assert app.get(job) == job
    for one in (job, gone):
        by_hand.bury(app, one.id)
    assert (app.requeue(job), job.state) == ("queued", "queued")
    assert (app.discard(gone), gone.state) == ("cancelled", "cancelled")
    assert (app.cancel(job), job.state) == ("cancelled", "cancelled")


def test_a_queued_job_is_cancelled_at_once_and_again_changes_nothing(
    app: Onward, send: SyncTask[..., int]
) -> None:
    job = send.enqueue()
    assert job.cancel() == "cancelled"
    assert job.cancel() == "cancelled"
    assert job.refresh().reason == "cancelled on request"
    with pytest.raises(JobFailed, match="cancelled"):
        job.wait(1)


def test_a_running_job_is_asked_to_stop(app: Onward, send: SyncTask[..., int]) -> None:
    job = send.enqueue()
    by_hand.claim(app, job.id)
    assert [app.cancel(job.id), app.cancel(job.id)] == ["cancelling", "cancelling"]


def test_only_a_dead_job_is_requeued_or_discarded(app: Onward, send: SyncTask[..., int]) -> None:
    queued, running, done, dead, gone = (send.enqueue(n) for n in range(5))
    for job in (dead, gone):
        by_hand.bury(app, job.id)
    by_hand.succeed(app, done.id)
    by_hand.claim(app, running.id) if running.refresh().state == "queued" else None
    for job in (queued, running, done):
        for move in (app.requeue, app.discard):
            with pytest.raises(IllegalTransition, match=job.id):
                move(job.id)
    for job in (done, dead):
        with pytest.raises(IllegalTransition):
            app.cancel(job.id)
    assert app.requeue(dead.id) == "queued"
    assert (dead.refresh().attempt, dead.failures, len(dead.attempts())) == (2, 0, 1)
    assert app.discard(gone.id, reason="stale") == "cancelled"
    assert gone.refresh().reason == "stale"


def test_every_move_has_its_async_twin(app: Onward, send: SyncTask[..., int]) -> None:
    dead, gone, queued = send.enqueue(), send.enqueue(), send.using(run_after=60).enqueue()
    for job in (dead, gone):
        by_hand.bury(app, job.id)

    async def scene() -> None:
        assert await app.arequeue(dead.id) == "queued"
        assert await app.adiscard(gone.id) == "cancelled"
        assert await queued.acancel() == "cancelled"
        assert [each.event for each in await dead.aattempts()] == ["bury"]
        with pytest.raises(IllegalTransition):
            await app.arequeue(gone.id)
        await app.aclose()

    asyncio.run(scene())


@pytest.mark.parametrize("result", [None, False, 0, "", []], ids=repr)
def test_a_wait_returns_any_result_none_among_them(app: Onward, result: Any) -> None:
    @app.task(name="shop.any")
    def anything() -> Any: ...

    job = anything.enqueue()
    text = anything.signature.encode_result(result)
    later = threading.Timer(0.1, by_hand.succeed, [app, job.id, text])
    later.start()
    started = time.monotonic()
    assert job.wait(timeout=10) == result
    assert time.monotonic() - started < 1.1
    later.join()
    assert app.get(job.id).wait(timeout=0) == result

    async def scene() -> Any:
        found = await job.await_result(timeout=0)
        await app.aclose()
        return found

    assert asyncio.run(scene()) == result


def test_a_wait_that_is_too_short_says_what_the_job_is_doing(
    app: Onward, send: SyncTask[..., int]
) -> None:
    job = send.enqueue()
    started = time.monotonic()
    with pytest.raises(TimeoutError) as late:
        job.wait(timeout=0.2)
    assert isinstance(late.value, WaitTimeout)
    assert "it is queued" in late.value.what
    assert f"onward status --database {app.database.shown_url};" in late.value.fix
    assert 0.2 <= time.monotonic() - started < 1


@pytest.mark.parametrize("timeout", [timedelta(seconds=0.01), 0, -1, 0.01])
def test_a_wait_takes_any_duration(
    app: Onward, send: SyncTask[..., int], timeout: timedelta | float
) -> None:
    job = send.enqueue()
    with pytest.raises(WaitTimeout, match=r"within (0\.01|0|-1) s: it is queued"):
        job.wait(timeout)

    async def on_loop() -> None:
        try:
            await job.await_result(timeout)
        finally:
            await app.database.close_loop()

    with pytest.raises(WaitTimeout):
        asyncio.run(on_loop())


@pytest.mark.parametrize("timeout", ["5", math.nan, True, [1]])
def test_a_wait_for_no_duration_is_refused_at_the_call(
    app: Onward, send: SyncTask[..., int], timeout: Any
) -> None:
    job = send.enqueue()
    with pytest.raises(InvalidOption, match="timeout="):
        job.wait(timeout)
    with pytest.raises(InvalidOption, match="timeout="):
        asyncio.run(job.await_result(timeout))


def test_a_wait_for_a_job_that_runs_says_so(app: Onward, send: SyncTask[..., int]) -> None:
    """Nobody is sent to look for a worker that there is."""
    job = send.enqueue()
    by_hand.claim(app, job.id)
    with pytest.raises(WaitTimeout, match="it is running") as late:
        job.wait(timeout=0)
    assert late.value.why == "it goes on"


def test_a_body_in_a_thread_waits_and_one_on_the_loop_is_refused(
    app: Onward, send: SyncTask[..., int]
) -> None:
    """Of a sync task nothing else needs its thread, although there is a loop elsewhere."""
    job, other = send.enqueue(), send.enqueue()
    by_hand.succeed(app, other.id, "5")
    attempt = Current(by_hand.claim(app, job.id), app)

    def body() -> int:
        set_current(attempt)
        return other.wait(timeout=0)

    async def scene() -> None:
        assert await asyncio.to_thread(body) == 5
        with pytest.raises(WaitRefused, match="cannot wait for job"):
            body()

    asyncio.run(scene())


def test_a_wait_for_a_job_that_failed_tells_its_error(
    app: Onward, send: SyncTask[..., int]
) -> None:
    job = send.enqueue()
    by_hand.bury(app, job.id, '{"type":"ValueError","message":"too blue","traceback":""}')
    with pytest.raises(JobFailed, match="dead after attempt 1") as failed:
        job.wait(1)
    assert failed.value.why == "ValueError: too blue"
    place = f"--database {app.database.shown_url}"
    assert failed.value.fix == (
        f"to see it: onward job show {job.id} {place};"
        f" to try it again: onward dead requeue {job.id} {place}"
    )

    async def scene() -> None:
        with pytest.raises(JobFailed, match="too blue"):
            await job.await_result(1)
        await app.aclose()

    asyncio.run(scene())


def test_a_command_is_told_the_database_only_where_it_needs_to_be(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line finds `ONWARD_URL` by itself."""
    monkeypatch.setenv("ONWARD_URL", url)
    app = Onward()
    job = app.task(name="shop.send")(lambda: None).enqueue()
    with pytest.raises(WaitTimeout) as late:
        job.wait(timeout=0)
    assert "onward status;" in late.value.fix
    app.close()
