"""Outcomes on their way into the database: a refused one fails alone, none is ever dropped."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

import pytest
from msgspec.structs import replace

from onward import Onward, current, listen
from onward.app import cancel_change
from onward.policy import Outcome, Released, Returned, Stopped
from onward.store import store
from onward.worker.finisher import MOST_TEXT, Finisher
from onward.worker.keeper import decide_loss
from tests.store.builders import hand, register, running
from tests.support import tasks
from tests.support.workers import wait_until
from tests.worker.history import ends, last_error, refusals, wait_for, wait_over


def test_a_follow_up_that_is_refused_fails_its_parent_alone(app: Onward) -> None:
    """Its id belongs to another call: the attempt failed with that reason, its neighbours in the
    same write succeed, and no follow-up is written.
    """

    @app.task
    async def child(x: int) -> int:
        return x

    @app.task(max_attempts=2, backoff=tasks.SOON)
    async def parent(id: str | None) -> None:
        task = child.using(id=id) if id else child
        current().enqueue(task.call(2))

    taken = child.using(run_after=3600).enqueue(1)
    jobs = app.enqueue_many(parent.call(taken.id if i == 3 else None) for i in range(6))
    with app.worker():
        wait_over(jobs)
        wait_until(lambda: app.counts()["succeeded"] == 10)
    assert [job.state for job in jobs] == ["succeeded"] * 3 + ["dead"] + ["succeeded"] * 2
    assert ends(jobs[3]) == ["failed: error"] * 2
    assert last_error(jobs[3]).type == "Unwritable"
    assert "belongs to another call" in last_error(jobs[3]).message
    assert taken.refresh().state == "queued"


REFUSE = {
    "sqlite": (
        "CREATE TRIGGER refuse_one BEFORE INSERT ON onward.finished WHEN new.id = '{id}'"
        " BEGIN SELECT RAISE(ABORT, 'not this one'); END",
    ),
    "postgres": (
        "CREATE FUNCTION refuse_one() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'not this one' USING ERRCODE = 'check_violation'; END $$",
        "CREATE TRIGGER refuse_one BEFORE INSERT ON onward.finished FOR EACH ROW"
        " WHEN (new.id = '{id}') EXECUTE FUNCTION refuse_one()",
    ),
}
"""A hand's own rule: one job can never be finished."""


def test_an_outcome_that_the_database_refuses_fails_alone(
    app: Onward, caplog: pytest.LogCaptureFixture
) -> None:
    """It becomes a failed attempt that says why; 20 others of the same batch succeed."""

    @app.task(max_attempts=2, backoff=tasks.SOON)
    async def work() -> None: ...

    jobs = app.enqueue_many(work.call() for _ in range(21))
    bad = jobs.pop(11)
    with hand(app.database) as dba:
        for statement in REFUSE[dba.dialect]:
            dba.sql(statement.format(id=bad.id))
    with caplog.at_level(logging.ERROR, "onward"), app.worker(concurrency=30):
        wait_over([bad, *jobs])
    assert {job.state for job in jobs} == {"succeeded"}
    assert (bad.state, ends(bad)) == ("dead", ["failed: error"] * 2)
    assert "not this one" in last_error(bad).message
    assert "finish.refused" in caplog.text


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, KeyError, UnicodeError])
def test_an_error_that_nobody_expected_drops_no_outcome(
    app: Onward, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """Whatever a write raises once, every outcome is written afterwards, and the attempt counts as
    what it was.
    """

    @app.task(max_attempts=5)
    async def work() -> str:
        return "done"

    write = app.database.arun
    raised: list[int] = []

    async def fail_once(op: Any, *args: Any, **kwargs: Any) -> Any:
        if op is store.apply and not raised:
            raised.append(len(args[0]))
            raise kind("a surprise")
        return await write(op, *args, **kwargs)

    monkeypatch.setattr(app.database, "arun", fail_once)
    jobs = app.enqueue_many(work.call() for _ in range(20))
    with app.worker(concurrency=20):
        wait_over(jobs)
    assert raised
    states = [ends(job) for job in jobs]
    # A batch of one that raises something that looks like its own fault is taken for that.
    assert [s for s in states if s != ["succeeded"]] in ([], [["failed: error", "succeeded"]])


def test_a_late_outcome_is_refused_and_kept(app: Onward) -> None:
    """The worker was declared lost under its job: what it says afterwards changes nothing, and
    stands among the refusals.
    """

    @app.task(max_losses=3)
    async def work() -> int:
        if current().attempt == 1:
            app.database.run(store.lose, worker.id, "a test said so")
            app.database.run(store.sweep, decide_loss)  # What the next sweep does.
        return current().attempt

    worker = app.worker(concurrency=1)
    with worker:
        job = work.enqueue()
        assert job.wait(20) == 2
        wait_until(lambda: refusals(app, job))
    assert ends(job) == ["lost", "succeeded"]
    (kept,) = refusals(app, job)
    assert (kept.attempt, kept.event, kept.expected) == (1, "succeed", "running")
    assert kept.found_attempt == 2


def test_a_claim_whose_answer_was_lost_is_run(app: Onward, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database says that the worker owns a job of which it does not know: it is run."""
    app.settings = replace(app.settings, beat=0.3)

    @app.task
    async def work() -> str:
        return "done"

    write = app.database.arun
    lost: list[str] = []

    async def lose_an_answer(op: Any, *args: Any, **kwargs: Any) -> Any:
        answer = await write(op, *args, **kwargs)
        if op is store.claim and answer and not lost:
            lost.extend(claimed.job.id for claimed in answer)
            return []
        return answer

    monkeypatch.setattr(app.database, "arun", lose_an_answer)
    with app.worker():
        job = work.enqueue()
        assert job.wait(20) == "done"
    assert lost == [job.id]
    assert ends(job) == ["succeeded"]


def test_a_stage_that_stumbles_goes_on(
    app: Onward, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors that nobody expected in the claim and in the look for cancels are shown, and work goes
    on: never a silent stall.
    """

    @app.task
    async def work() -> str:
        return "done"

    read, calls = app.database.aread, {store.lanes: 0, store.cancelling: 0}

    async def stumble(op: Any, *args: Any, **kwargs: Any) -> Any:
        if op in calls:
            calls[op] += 1
            if calls[op] in {1, 3}:
                raise ZeroDivisionError("a surprise")
        return await read(op, *args, **kwargs)

    monkeypatch.setattr(app.database, "aread", stumble)
    with caplog.at_level(logging.ERROR, "onward"), app.worker():
        for _ in range(5):
            assert work.enqueue().wait(20) == "done"
    assert "stage.stumbled" in caplog.text
    assert "a surprise" in caplog.text


def test_a_worker_outlives_a_listener_that_raises(app: Onward) -> None:
    """A function of the user's that hears of events may fail: jobs go on."""

    @app.task(max_attempts=2, backoff=tasks.SOON)
    def fail() -> None:
        raise RuntimeError

    def deaf(happened: object) -> None:
        raise ZeroDivisionError

    end = listen(deaf)
    try:
        with app.worker():
            job = fail.enqueue()
            wait_for(job, "dead")
    finally:
        end()
    assert ends(job) == ["failed: error"] * 2


@pytest.mark.parametrize("outcome", [Returned("1"), Released("lost"), Stopped()])
def test_a_late_outcome_of_a_job_that_a_sweep_has_cancelled_is_refused_and_kept(
    app: Onward, outcome: Outcome
) -> None:
    """What is over keeps the name of its last owner, and is not that owner's to end again."""
    database = app.database
    worker = register(database)
    job = running(database, worker)
    database.run(store.move, job.id, cancel_change)
    database.run(store.lose, worker, "its lease ran out")
    (change,) = database.run(store.sweep, decide_loss)
    assert change.arrow == "cancelling > cancelled"

    async def finish() -> None:
        finisher = Finisher(database, {}, lambda: True, lambda _: None, lambda _: None)
        finisher.put(job, outcome)
        writing = asyncio.create_task(finisher.run())
        assert await finisher.flush(10)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await database.close_loop()

    asyncio.run(finish())
    (refusal,) = database.read(store.refusals, job.id)
    assert (refusal.found, refusal.attempt, refusal.worker) == ("cancelled", 1, worker)


def test_two_follow_ups_of_one_id_that_are_different_calls_are_refused(app: Onward) -> None:
    """The second would vanish without a word."""

    @app.task
    async def child(value: int) -> None: ...

    @app.task(max_attempts=1)
    async def parent(second: int) -> None:
        for value in (1, second):
            current().enqueue(child.using(id=uuid.UUID(int=second)).call(value))

    same, other = parent.enqueue(1), parent.enqueue(2)
    with app.worker(concurrency=2):
        wait_over([same, other])
        wait_until(lambda: app.counts()["succeeded"] == 2)
    assert ends(same) == ["succeeded"]
    assert ends(other) == ["failed: error"]
    assert "belongs to another call" in str(last_error(other))


def test_large_results_are_written_in_several_writes(
    app: Onward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and follow-ups of 3 MB at one moment, and a result of 9 MB: no write carries more
    than 8 MB, or else one outcome that is larger by itself.
    """

    @app.task
    async def child(text: str) -> None: ...

    @app.task
    async def large(size: int, follow_up: int) -> str:
        if follow_up:
            current().enqueue(child.using(run_after=3600).call("y" * follow_up))
        return "x" * size

    calls = [large.call(3_000_000, 0) for _ in range(8)]
    calls += [large.call(9_000_000, 0), large.call(1, 0)]
    calls += [large.call(1, 3_000_000) for _ in range(4)]
    write = app.database.arun
    writes: list[list[int]] = []

    async def weighed(op: Any, *args: Any, **kwargs: Any) -> Any:
        if op is store.apply:
            writes.append(
                [
                    len(change.result or "") + sum(len(job.args) for job in change.follow_ups)
                    for change in args[0]
                ]
            )
        return await write(op, *args, **kwargs)

    monkeypatch.setattr(app.database, "arun", weighed)
    jobs = app.enqueue_many(calls)
    with app.worker(concurrency=20):
        wait_over(jobs)
    assert {job.state for job in jobs} == {"succeeded"}
    assert max(len(each) for each in writes) > 1
    assert all(sum(each) <= MOST_TEXT or len(each) == 1 for each in writes)


def test_a_beat_asks_for_no_job_that_is_held(app: Onward, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker compares what it owns with what it holds; arguments can be large."""
    app.settings = replace(app.settings, beat=0.2, cancel_poll=0.1)
    seen: list[list[Any]] = []
    thrice = asyncio.Event()
    read = app.database.aread

    async def watched(op: Any, *args: Any, **kwargs: Any) -> Any:
        answer = await read(op, *args, **kwargs)
        if op is store.owned:
            seen.append(answer)
        if len(seen) == 3:
            thrice.set()
        return answer

    monkeypatch.setattr(app.database, "aread", watched)

    @app.task
    async def work(text: str) -> None:
        await thrice.wait()

    with app.worker(concurrency=4):
        wait_over(app.enqueue_many(work.call("x" * 1_000) for _ in range(4)))
    assert seen[:3] == [[]] * 3
