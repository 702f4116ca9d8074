"""Clocks that step: leases and due times stand on one clock, the database's, which may be wrong."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from onward.store import store
from onward.store.database import Database
from onward.store.sqlite import SqliteDatabase
from tests.crash.conftest import Open
from tests.crash.field import (
    BUSY,
    SCALED,
    SHORT,
    beats,
    enqueue,
    freeze,
    sampled,
    wait_for_state,
    wait_until_begun,
    wait_until_over,
)
from tests.store.builders import shift_clock
from tests.support import history, tasks
from tests.support.ledger import Ledger
from tests.support.skew import VARIABLE, set_offset
from tests.support.workers import running, wait_until, workers

HOUR = 3600.0
DAY = 24 * HOUR

SKEWED = "tests.crash.skewed:app"


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A database whose clock a test can step: that of the machine, in all processes; or a function
    in PostgreSQL.
    """
    if request.param == "postgres":
        url: str = request.getfixturevalue("postgres_database")
        return url
    offset = tmp_path / "offset"
    set_offset(offset, 0.0)
    monkeypatch.setenv(VARIABLE, str(offset))
    return f"sqlite:///{tmp_path}/onward.db"


def step_clock(database: Database, seconds: float) -> None:
    """Set the database's clock so many seconds from the right time."""
    if isinstance(database, SqliteDatabase):
        set_offset(Path(os.environ[VARIABLE]), seconds)
    shift_clock(database, seconds)


def wait_until_renewed(database: Database) -> None:
    """After a step forward all leases are over; the next beat puts that right."""
    wait_until(lambda: not any(lease.over for lease in database.read(store.leases)))


@pytest.mark.parametrize("step", [HOUR, -HOUR, -DAY], ids=["forward", "back", "a day back"])
def test_a_step_of_the_databases_clock_declares_nobody_lost(
    database_url: str, open_app: Open, ledger: Ledger, step: float
) -> None:
    """Two supervisors watch each other while the clock steps, and is put right later: workers stay
    who they are, running jobs go on, new ones start, and what was due stays due.
    """
    app = open_app(lease=2.0, beat=0.5, sweep=0.3)
    with (
        running(database_url, name="A", ledger=ledger, target=SKEWED) as first,
        running(database_url, name="B", ledger=ledger, target=SKEWED) as second,
        sampled(lambda: beats(app.database)),
    ):
        pids = {*first.pids(), *second.pids()}
        ids = enqueue(app, (tasks.nap.call(4.0) for _ in range(4)))
        ids += enqueue(app, [tasks.echo.using(run_after=1.0).call("soon")])
        wait_until(lambda: len(ledger.read()) >= 4)
        step_clock(app.database, step)
        ids += enqueue(app, [tasks.echo.call("after the step")])
        wait_for_state(app, ids[-1], "succeeded", 3.0)
        if step > 0:
            wait_for_state(app, ids[-2], "succeeded", 3.0)
        time.sleep(2.5)
        step_clock(app.database, 0.0)
        wait_until_over(app, 20)
        time.sleep(1.0)
        assert {*first.pids(), *second.pids()} == pids
        assert {line.state for line in workers(app.database)} == {"active"}
    found = history.check(app.database, ledger, ids)
    assert all(history.outcomes(found, id_) == ["succeeded"] for id_ in ids)


def test_what_was_due_is_not_frozen_when_the_clock_goes_back(
    database_url: str, open_app: Open, ledger: Ledger
) -> None:
    """Jobs wait for slots while the clock goes back an hour, and then a day: they start when there
    are slots, in their order. What was enqueued since waits for its time, and no longer. Two
    supervisors see the step, and each job is moved by one of them.
    """
    app = open_app(lease=2.0, beat=0.5, sweep=0.3)
    with (
        running(database_url, name="A", ledger=ledger, target=SKEWED, concurrency=1) as first,
        running(database_url, name="B", ledger=ledger, target=SKEWED, concurrency=1) as second,
    ):
        ids: list[str] = []
        waiting: list[str] = []
        for step in (-HOUR, -HOUR - DAY):
            busy = enqueue(app, (tasks.nap.call(2.5) for _ in range(2)))
            wait_until_begun(app, busy)
            due = enqueue(app, (tasks.aecho.call(number) for number in range(10)))
            due += enqueue(app, (tasks.aecho.call(number) for number in range(10)))
            time.sleep(0.5)
            step_clock(app.database, step)
            asked = time.monotonic()
            (soon,) = enqueue(app, [tasks.aecho.using(run_after=3.0).call("soon")])
            (later,) = enqueue(app, [tasks.aecho.using(run_after=HOUR / 2).call("later")])
            for id_ in (*due, soon):
                wait_for_state(app, id_, "succeeded", 15)
            assert time.monotonic() - asked < 3.0 + 3.0 + BUSY
            starts = [line for line in ledger.read() if line["event"] == "start"]
            order = {line["job"]: line["at"] for line in starts}
            assert order[soon] - asked >= 3.0
            began = sorted(due, key=order.__getitem__)
            assert began[0] in due[:10]
            assert began[-1] in due[10:]
            ids += [*busy, *due, soon]
            assert app.get(later).state == "queued"
            waiting.append(later)
        step_clock(app.database, 0.0)
        wait_until_renewed(app.database)
        log = first.log() + second.log()
        assert {line.state for line in workers(app.database)} == {"active"}
    assert sum(map(int, re.findall(r"clock\.stepped .*due_again=(\d+)", log))) == 40
    found = history.check(app.database, ledger, [*ids, *waiting])
    assert all(history.outcomes(found, id_) == ["succeeded"] for id_ in ids)


@pytest.mark.parametrize(
    ("before", "after"), [(0.0, -HOUR), (HOUR, 0.0)], ids=["back", "forward, and put right"]
)
def test_the_jobs_of_a_dead_machine_wait_for_its_lease_and_not_for_the_clock(
    database_url: str, open_app: Open, ledger: Ledger, before: float, after: float
) -> None:
    """It was last heard of by a clock that has gone back since, and its lease would last as long as
    that step. Whoever is there then takes its jobs over as soon as ever.
    """
    app = open_app(**SHORT)
    step_clock(app.database, before)
    with running(database_url, name="A", ledger=ledger, target=SKEWED) as first:
        (id_,) = enqueue(app, [tasks.nap_once.call(60)])
        wait_until_begun(app, [id_])
        freeze(first, app.database)
        step_clock(app.database, after)
        with running(database_url, name="B", ledger=ledger, target=SKEWED):
            wait_for_state(app, id_, "succeeded", SCALED.recovered_in)
    found = history.check(app.database, ledger, [id_])
    assert history.outcomes(found, id_) == ["lost (lost)", "succeeded"]


def test_a_step_back_that_nobody_saw_freezes_jobs_and_loses_none(
    database_url: str, open_app: Open, ledger: Ledger
) -> None:
    """No worker lived while the clock went back an hour: what was due is not moved. It is claimed
    when the clock is right again, at the latest.
    """
    app = open_app()
    ids = enqueue(app, (tasks.echo.call(number) for number in range(20)))
    due = {id_: app.database.read(store.record, id_).run_at for id_ in ids}
    step_clock(app.database, -HOUR)
    with running(database_url, ledger=ledger, target=SKEWED):
        time.sleep(0.5)
        assert {id_: app.database.read(store.record, id_).run_at for id_ in ids} == due
        step_clock(app.database, 0.0)
        wait_until_over(app, 10)
        wait_until_renewed(app.database)
    found = history.check(app.database, ledger, ids)
    assert history.states(found) == {"succeeded": 20}


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
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
    """The clocks of three machines are ten minutes apart. Nobody is declared lost, every job runs
    once, and delays go by the database's clock: not too early, and hardly later. Those that are off
    say so.
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
        assert "clock.skewed seconds=-600" in behind.log()
        assert "clock.skewed seconds=600" in ahead.log()
        assert "clock.skewed" not in right.log()
    found = history.check(app.database, ledger, [*ids, *delayed])
    assert all(history.outcomes(found, id_) == ["succeeded"] for id_ in found.jobs)
    waits = [found.bodies_of(id_)[0].start - asked for id_ in delayed]
    assert min(waits) >= 1.5
    assert max(waits) < 1.5 + 2.0 + BUSY
    assert {body.pid for body in found.bodies} <= pids
    assert len({body.pid for body in found.bodies}) > 1, "too tame"


def skew(seconds: float) -> dict[str, str]:
    return {VARIABLE: str(seconds)}
