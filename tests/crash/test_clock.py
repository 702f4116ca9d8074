"""Clocks that step: leases and due times stand on one clock, the database's, which may be wrong."""

from __future__ import annotations

import time

import psycopg
import pytest

from onward.store import store
from tests.crash.conftest import Open
from tests.crash.field import BUSY, beats, enqueue, sampled, wait_for_state, wait_until_over
from tests.support import history, tasks
from tests.support.ledger import Ledger
from tests.support.workers import running, wait_until, workers

HOUR = 3600.0


@pytest.fixture
def database_url(postgres_database: str) -> str:
    """PostgreSQL, whose clock is a function in the schema that a test can replace."""
    return postgres_database


def step_clock(url: str, seconds: float) -> None:
    """Set the database's clock so many seconds from the server's."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "CREATE OR REPLACE FUNCTION onward.clock() RETURNS timestamptz LANGUAGE sql STABLE"
            f" AS $$ SELECT now() + interval '{seconds:f} seconds' $$".encode()
        )


@pytest.mark.parametrize("step", [HOUR, -HOUR], ids=["forward", "back"])
def test_a_step_of_the_databases_clock_declares_nobody_lost(
    database_url: str, open_app: Open, ledger: Ledger, step: float
) -> None:
    """Two supervisors watch each other while the clock steps by an hour: workers stay who they are,
    running jobs go on, new ones start, and what was due stays due.
    """
    app = open_app(lease=2.0, beat=0.5, sweep=0.3)
    with (
        running(database_url, name="A", ledger=ledger) as first,
        running(database_url, name="B", ledger=ledger) as second,
        sampled(lambda: beats(app.database)),
    ):
        pids = {*first.pids(), *second.pids()}
        ids = enqueue(app, (tasks.nap.call(4.0) for _ in range(4)))
        ids += enqueue(app, [tasks.echo.using(run_after=1.0).call("soon")])
        wait_until(lambda: len(ledger.read()) >= 4)
        step_clock(database_url, step)
        ids += enqueue(app, [tasks.echo.call("after the step")])
        wait_for_state(app, ids[-1], "succeeded", 3.0)
        if step > 0:
            wait_for_state(app, ids[-2], "succeeded", 3.0)
        time.sleep(2.5)
        step_clock(database_url, 0.0)
        wait_until_over(app, 20)
        time.sleep(1.0)
        assert {*first.pids(), *second.pids()} == pids
        assert {line.state for line in workers(app.database)} == {"active"}
    found = history.check(app.database, ledger, ids)
    assert all(history.outcomes(found, id_) == ["succeeded"] for id_ in ids)


def test_what_is_due_stays_due_when_the_clock_goes_back(
    database_url: str, open_app: Open, ledger: Ledger
) -> None:
    """Due jobs that nobody has claimed yet when the clock goes back an hour are claimed when it is
    right again, at the latest; they are not lost and not moved.
    """
    app = open_app()
    ids = enqueue(app, (tasks.echo.call(number) for number in range(20)))
    due = {id_: app.database.read(store.record, id_).run_at for id_ in ids}
    step_clock(database_url, -HOUR)
    with running(database_url, ledger=ledger):
        time.sleep(0.5)
        assert {id_: app.database.read(store.record, id_).run_at for id_ in ids} == due
        step_clock(database_url, 0.0)
        wait_until_over(app, 10)
        # Its lease began an hour ago; the next beat puts that right.
        wait_until(lambda: not any(lease.over for lease in app.database.read(store.leases)))
    found = history.check(app.database, ledger, ids)
    assert history.states(found) == {"succeeded": 20}


@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param(200, id="scaled"),
        pytest.param(1_000, id="as written", marks=pytest.mark.soak),
    ],
)
def test_hosts_that_disagree_about_the_time_agree_about_jobs(
    database_url: str, open_app: Open, ledger: Ledger, jobs: int
) -> None:
    """The clocks of three workers are ten minutes apart. Nobody is declared lost, every job runs
    once, and delays go by the database's clock: not too early, and hardly later.
    """
    app = open_app(lease=4.0, beat=1.0, sweep=0.5)
    with (
        running(database_url, ledger=ledger, target=SKEWED, environment=skew(-600)) as behind,
        running(database_url, ledger=ledger, target=SKEWED, environment=skew(0)) as right,
        running(database_url, ledger=ledger, target=SKEWED, environment=skew(600)) as ahead,
    ):
        ids = enqueue(app, (tasks.aecho.call(number) for number in range(jobs)))
        asked = time.monotonic()
        delayed = enqueue(app, (tasks.aecho.using(run_after=1.5).call(n) for n in range(20)))
        wait_until_over(app, 30)
        time.sleep(2.0)
        pids = {pid for worker in (behind, right, ahead) for pid in worker.pids()}
        assert {line.state for line in workers(app.database)} == {"active"}
    found = history.check(app.database, ledger, [*ids, *delayed])
    assert all(history.outcomes(found, id_) == ["succeeded"] for id_ in found.jobs)
    waits = [found.bodies_of(id_)[0].start - asked for id_ in delayed]
    assert min(waits) >= 1.5
    assert max(waits) < 1.5 + 2.0 + BUSY
    assert {body.pid for body in found.bodies} <= pids
    assert len({body.pid for body in found.bodies}) > 1, "too tame"


SKEWED = "tests.crash.skewed:app"


def skew(seconds: float) -> dict[str, str]:
    return {"ONWARD_TEST_SKEW": str(seconds)}
