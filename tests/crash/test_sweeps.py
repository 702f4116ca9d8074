"""Sweepers beside each other, beside claims, and behind lost answers: each loss is counted once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest

from onward.app import Onward
from onward.config import Settings
from onward.errors import DatabaseUnavailable
from onward.events import Happened, listen
from onward.job import Change, Job
from onward.lifecycle import JobState
from onward.store import store
from onward.store.database import Database
from onward.store.postgres import PostgresDatabase
from onward.store.statements import psycopg_text
from onward.store.store import FIRST_ID, Lease
from onward.store.url import open_database
from onward.worker.keeper import Keeper, decide_loss
from tests.crash.field import BUSY, enqueue, wait_for_state
from tests.store.builders import hand
from tests.support import by_hand, history, tasks
from tests.support.ledger import Ledger
from tests.support.workers import wait_until, workers


@pytest.fixture
def lost(app: Onward) -> tuple[str, Job]:
    """A worker that was declared lost, and its job, which nobody has taken back yet."""
    (id_,) = enqueue(app, [tasks.nap.call(1.0)])
    worker = by_hand.register(app)
    job = by_hand.claim(app, id_, worker=worker)
    assert app.database.run(store.lose, worker, "for the test")
    return worker, job


@pytest.fixture
def second(database_url: str) -> Iterator[Database]:
    """The same database, as another process has it."""
    with closing(open_database(database_url)) as database:
        yield database


def test_two_sweeps_at_once_take_a_job_back_once(
    app: Onward, second: Database, lost: tuple[str, Job], ledger: Ledger
) -> None:
    """Both look while neither has written: one takes the job and tells of it, the other finds
    nothing to do and has nothing to tell.
    """
    _, job = lost
    reading = threading.Barrier(2, timeout=10)

    def decide_slowly(found: Job, reason: str) -> Change:
        reading.wait()
        time.sleep(0.3)
        return decide_loss(found, reason)

    def sweep_beside() -> list[Change]:
        reading.wait()
        return taken_back(second)

    with ThreadPoolExecutor(2) as pool, heard("job.recover") as told:
        first = pool.submit(taken_back, app.database, decide_slowly)
        beside = pool.submit(sweep_beside)
        took = [*first.result(30), *beside.result(30)]
    assert [change.id for change in took] == [job.id]
    assert [(event.job, event.attempt) for event in told] == [(job.id, 1)]
    found = history.check(app.database, ledger, [job.id])
    assert history.outcomes(found, job.id) == ["lost (lost)"]
    assert (found.jobs[job.id].state, found.jobs[job.id].attempt) == ("queued", 2)


def taken_back(
    database: Database, decide: Callable[[Job, str], Change] | None = None
) -> list[Change]:
    """What a keeper takes back in one sweep."""

    async def take_back() -> list[Change]:
        changes = await Keeper(database, Settings(), list, decide).take_back()
        await database.close_loop()
        return changes

    return asyncio.run(take_back())


@contextmanager
def heard(name: str) -> Generator[list[Happened], None, None]:
    """The events of this name that this process tells of while the block runs."""
    told: list[Happened] = []
    end = listen(lambda event: told.append(event) if event.name == name else None)
    try:
        yield told
    finally:
        end()


def test_a_sweep_that_acts_late_on_what_it_saw_changes_nothing(
    app: Onward, second: Database, lost: tuple[str, Job], ledger: Ledger
) -> None:
    """Two sweepers have seen the same; one has acted, and the next attempt runs. What the other had
    decided is no longer true of the job, so it is not written, and that attempt runs once.
    """
    _, job = lost
    stale = decide_loss(job, "seen before the others acted")
    assert len(app.database.run(store.sweep, decide_loss)) == 1
    with app.worker(concurrency=1):
        wait_until(ledger.read, 20)
        again = app.database.read(store.get, job.id)
        assert (again.state, again.attempt) == (JobState.RUNNING, 2)
        assert second.run(store.apply, [stale]) == set()
        assert app.database.read(store.get, job.id) == again
        wait_for_state(app, job.id, "succeeded")
    found = history.check(app.database, ledger, [job.id])
    assert history.outcomes(found, job.id) == ["lost (lost)", "succeeded"]
    assert [body.attempt for body in found.bodies] == [2]


def test_a_worker_is_declared_lost_once(app: Onward, second: Database) -> None:
    """Of two sweepers that have seen the same lease run out, one declares its worker lost."""
    worker = by_hand.register(app)
    (lease,) = [lease for lease in app.database.read(store.leases) if lease.worker == worker]
    assert not app.database.run(store.lose, worker, "not yet over", lease.until)
    app.database.run(store.beat, [worker], 1.0)  # A renewal never shortens a lease.
    assert [found.until for found in app.database.read(store.leases)] == [lease.until]
    answers = [database.run(store.lose, worker, "proven") for database in (app.database, second)]
    assert answers == [True, False]
    assert app.database.run(store.beat, [worker], 60.0) == set()
    assert [line.state for line in workers(app.database)] == ["lost"]


def test_a_renewal_between_look_and_act_saves_the_worker(app: Onward) -> None:
    """A sweeper judges by the lease that it saw: one that was renewed meanwhile is another."""
    worker = by_hand.register(app)
    (seen,) = app.database.read(store.leases)
    app.database.run(store.beat, [worker], 7200.0)
    assert not app.database.run(store.lose, worker, "its lease ran out", seen.until)
    assert [line.state for line in workers(app.database)] == ["active"]


def test_a_keeper_is_patient_on_its_own_clock(app: Onward) -> None:
    """The database's clock says that a lease is over; the keeper wants to have seen it unchanged
    for as long as a lease lasts, so that a step of that clock declares nobody lost.
    """
    keeper = Keeper(app.database, Settings(lease=15.0, beat=5.0, sweep=2.0), lambda: ["mine"])
    lease = Lease("w", 100.0, True, None)
    assert keeper.vanished([lease], now=50.0) == []
    assert keeper.vanished([lease], now=60.0) == []
    (gone,) = keeper.vanished([lease], now=64.0)
    assert gone[0] is lease
    renewed = Lease("w", 105.0, True, None)
    assert keeper.vanished([renewed], now=80.0) == []
    assert keeper.vanished([Lease("mine", 1.0, True, None)], now=90.0) == []
    assert keeper.vanished([Lease("mine", 1.0, True, None)], now=900.0) == []


def test_a_long_pruning_does_not_hold_up_a_sweep(
    app: Onward, lost: tuple[str, Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper with very much to prune looks for vanished workers in between, as often as ever."""
    monkeypatch.setattr("onward.worker.keeper.PRUNE_QUICK", 0.0)  # Its steps stay small.
    _, job = lost
    slow = Keeper(
        app.database,
        Settings(sweep=0.2, prune_every=0.1, prune_step=1, keep_succeeded=0.0),
        lambda: (),
    )
    assert app.database.run(store.sweep, decide_loss)
    for id_ in enqueue(app, (tasks.aecho.call(number) for number in range(150))):
        by_hand.succeed(app, id_)
    again = by_hand.claim(app, job.id)

    async def keep() -> tuple[float, int]:
        running = asyncio.create_task(slow.run())
        await asyncio.sleep(0.3)
        await app.database.arun(store.lose, again.worker or "", "for the test")
        began = time.monotonic()
        while (await app.database.aread(store.get, job.id)).state == JobState.RUNNING:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        took, left = time.monotonic() - began, (await app.acounts())["succeeded"]
        running.cancel()
        await app.database.close_loop()
        return took, left

    took, left = asyncio.run(keep())
    assert took < 1.5
    assert left > 50, "too tame: pruning was over before the sweep"


def test_a_claim_that_committed_under_a_lost_worker_is_found_by_the_next_sweep(
    app: Onward, ledger: Ledger
) -> None:
    """On PostgreSQL a claim can be under way while its worker is declared lost and a sweep passes:
    it commits, and the sweep after that finds it. On SQLite the claim comes before or after, and a
    lost worker claims nothing.
    """
    (id_,) = enqueue(app, [tasks.aecho.call(1)])
    worker = by_hand.register(app)
    claim = {
        "worker": worker,
        "tasks": store.dumps(list(app.tasks)),
        "queue": "default",
        "priority": 0,
        "after_time": 0.0,
        "after_id": FIRST_ID,
        "limit": 10,
    }
    if isinstance(app.database, PostgresDatabase):
        text = psycopg_text("claim", "onward")
        with psycopg.connect(app.database.url) as connection:
            assert len(connection.execute(text, claim).fetchall()) == 1
            assert app.database.run(store.lose, worker, "for the test")
            assert app.database.run(store.sweep, decide_loss) == []
            connection.commit()
        (change,) = app.database.run(store.sweep, decide_loss)
        assert (change.id, change.after) == (id_, JobState.QUEUED)
    else:
        assert app.database.run(store.lose, worker, "for the test")
        lane = ("default", 0)
        assert (
            app.database.run(store.claim, worker, claim["tasks"], lane, (0.0, FIRST_ID), 10) == []
        )
    history.check(app.database, ledger, [id_])


def test_one_job_that_cannot_be_taken_back_does_not_hold_up_the_others(
    app: Onward, caplog: pytest.LogCaptureFixture
) -> None:
    """Five jobs of a lost worker, the third with a row in its history that must not be there: the
    four others are taken back, and the log names the one.
    """
    ids = sorted(enqueue(app, (tasks.aecho.call(number) for number in range(5))))
    worker = by_hand.register(app)
    by_hand.claim(app, ids[0], worker=worker)
    with hand(app.database) as dba:
        dba.sql(
            "INSERT INTO onward.attempt (job, number, state, event, worker, started_at, ended_at)"
            " SELECT id, attempt, 'lost', 'recover', worker, started_at, started_at"
            " FROM onward.job WHERE id = :id",
            id=ids[2],
        )
    assert app.database.run(store.lose, worker, "for the test")

    changes = taken_back(app.database)
    assert sorted(change.id for change in changes) == [ids[0], ids[1], ids[3], ids[4]]
    assert app.get(ids[2]).state == "running"
    (told,) = [line.getMessage() for line in caplog.records if "unrecoverable" in line.getMessage()]
    assert ids[2] in told


def test_a_claim_whose_answer_was_lost_is_adopted(
    app: Onward, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim took and its answer never came: under a live lease the job would wait for ever. The
    worker sees within two beats that it owns what it does not hold, and runs it, once.
    """
    lose_answer(app.database, store.claim, monkeypatch)
    with app.worker(concurrency=2):
        began = time.monotonic()
        (id_,) = enqueue(app, [tasks.aecho.call(1)])
        wait_for_state(app, id_, "succeeded", 10)
        took = time.monotonic() - began
    assert took < 2 * app.settings.beat + app.settings.cancel_poll + BUSY
    found = history.check(app.database, ledger, [id_])
    assert history.outcomes(found, id_) == ["succeeded"]
    assert len(found.bodies) == 1


def test_an_outcome_whose_answer_was_lost_counts_once(
    app: Onward, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outcome was written and its answer never came: the worker reads the job again, sees its
    own hand, and neither refuses it nor runs the job again.
    """
    lose_answer(app.database, store.apply, monkeypatch)
    with app.worker(concurrency=2):
        first, second = enqueue(app, [tasks.link.call(1, 2, 0.0), tasks.fail.call()])
        wait_for_state(app, first, "succeeded", 10)
        wait_for_state(app, second, "dead", 10)
    found = history.check(app.database, ledger, [first, second], born_inside=True)
    assert history.states(found) == {"succeeded": 2, "dead": 1}
    assert app.database.read(store.refusals) == []


def lose_answer(
    database: Database, op: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer of an operation that has something to say does not come."""
    carry_out = database.arun
    lost: list[Any] = []

    async def arun(asked: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        answer = await carry_out(asked, *args, **kwargs)
        if asked is op and answer and not lost:
            lost.append(answer)
            raise DatabaseUnavailable("the answer was lost, says the test")
        return answer

    monkeypatch.setattr(database, "arun", arun)
