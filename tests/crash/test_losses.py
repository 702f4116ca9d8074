"""What becomes of the jobs of a worker that has died: never nothing, and soon."""

from __future__ import annotations

import time
from typing import Any

import pytest

from onward.app import Onward
from onward.task import Task
from tests.cli.shell import Shell
from tests.crash import jobs
from tests.crash.conftest import Open
from tests.crash.field import (
    AS_WRITTEN,
    PACES,
    SCALED,
    SHORT,
    Pace,
    enqueue,
    kill,
    listed,
    sampled,
    wait_for_state,
    wait_until_begun,
    wait_until_over,
    wait_until_recovered,
)
from tests.support import history, tasks
from tests.support.ledger import Ledger
from tests.support.workers import running, wait_until, workers

# --- who it was -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pace", PACES)
def test_a_restart_under_the_same_name_does_not_keep_the_dead_ones_jobs_alive(
    open_app: Open, database_url: str, ledger: Ledger, pace: Pace
) -> None:
    """Each process start has an identity of its own: a namesake's beat means nothing for the job
    that died with its predecessor.
    """
    app = open_app(**pace.settings)
    with running(database_url, name="pod-0", ledger=ledger) as first:
        (id_,) = enqueue(app, [tasks.nap_once.call(60)])
        wait_until(ledger.read)
        first.kill()
        died = time.monotonic()
        with running(database_url, name="pod-0", ledger=ledger, ready=False):
            wait_until_recovered(app, [id_], died, pace)
            wait_for_state(app, id_, "succeeded")
        starts = workers(app.database)
    found = history.check(app.database, ledger, [id_])
    assert history.outcomes(found, id_) == ["lost (lost)", "succeeded"]
    assert [line.name for line in starts] == ["pod-0", "pod-0"]
    assert len({line.id for line in starts}) == 2


@pytest.mark.parametrize(
    ("pace", "leases"),
    [
        pytest.param(SCALED, 2, id="scaled"),
        pytest.param(AS_WRITTEN, 10, id="as written", marks=[pytest.mark.soak, pytest.mark.alone]),
    ],
)
@pytest.mark.parametrize("max_attempts", [1, 3])
def test_the_last_attempt_is_lost_while_nobody_watches(
    open_app: Open,
    database_url: str,
    ledger: Ledger,
    max_attempts: int,
    pace: Pace,
    leases: int,
) -> None:
    """The only worker dies with the job, and its lease is long over when another one starts. Though
    that serves another queue, it finds the job: dead if one attempt was all there was, else due
    again. At no moment is it in no list.
    """
    app = open_app(**pace.settings)
    with running(database_url, ledger=ledger) as worker:
        (id_,) = enqueue(app, [tasks.nap.using(max_attempts=max_attempts).call(60)])
        wait_until(ledger.read)
        worker.kill()
    state = "dead" if max_attempts == 1 else "queued"
    with sampled(lambda: listed(app)) as seen:
        time.sleep(leases * pace.lease)
        assert app.get(id_).state == "running"
        began = time.monotonic()
        with running(database_url, queues=[("elsewhere", None)], ledger=ledger, ready=False):
            wait_until_recovered(app, [id_], began, pace)
    assert seen
    assert [ids for _, ids in seen] == [[id_]] * len(seen)
    shell = Shell(database_url)
    assert [item["id"] for item in shell.json("job", "list", "--state", state)["items"]] == [id_]
    dead = [item["id"] for item in shell.json("dead", "list")["items"]]
    assert dead == ([id_] if state == "dead" else [])
    found = history.check(app.database, ledger, [id_])
    assert history.outcomes(found, id_) == ["lost (lost)"]
    assert len(found.bodies) == 1


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("whom", ["process", "machine"])
def test_a_job_that_is_asked_to_stop_when_its_worker_dies_is_cancelled(
    open_app: Open, database_url: str, ledger: Ledger, whom: str, pace: Pace
) -> None:
    """Neither tried again nor dead: somebody asked for its end, and it has ended."""
    app = open_app(**pace.settings, cancel_poll=60.0)
    with running(database_url, ledger=ledger) as worker:
        (id_,) = enqueue(app, [tasks.nap.call(60)])
        wait_until(ledger.read)
        assert app.cancel(id_) == "cancelling"
        if whom == "process":
            kill(worker.pids()[0])
        else:
            worker.kill()
        died = time.monotonic()
        with running(database_url, ledger=ledger, ready=False):
            wait_until_recovered(app, [id_], died, pace)
    found = history.check(app.database, ledger, [id_])
    assert found.jobs[id_].state == "cancelled"
    assert history.outcomes(found, id_) == ["lost (lost)"]
    assert len(found.bodies) == 1


BEFORE_IT = """
SELECT count(*) FROM onward.attempts AS other
WHERE other.job <> '{id}'
  AND other.started_at > (SELECT ended_at FROM onward.attempts WHERE job = '{id}' AND number = 1)
  AND other.started_at < (SELECT started_at FROM onward.attempts WHERE job = '{id}' AND number = 2)
"""
"""How many others started between the sweep that took the job back and its next attempt."""


@pytest.mark.parametrize(
    "others",
    [pytest.param(100, id="scaled"), pytest.param(500, id="as written", marks=pytest.mark.soak)],
)
def test_a_recovered_job_keeps_its_place(
    open_app: Open, database_url: str, ledger: Ledger, others: int
) -> None:
    """A job of high priority loses its worker, and many of low priority are enqueued behind it.
    When it is taken back it does not go behind them: at most one of them starts before it.
    """
    app = open_app(**SHORT)
    with running(database_url, ledger=ledger) as worker:
        (id_,) = enqueue(app, [tasks.nap_once.using(priority=10).call(60)])
        wait_until(ledger.read)
        worker.kill()
    ids = enqueue(app, (tasks.nap.call(0.05) for _ in range(others)))
    with running(database_url, concurrency=1, ledger=ledger):
        wait_until_over(app, 60)
    found = history.check(app.database, ledger, [id_, *ids])
    ((before,),) = history.rows(app.database, BEFORE_IT.format(id=id_))
    assert before <= 1
    assert history.outcomes(found, id_) == ["lost (lost)", "succeeded"]


@pytest.mark.parametrize("pace", PACES)
def test_time_limits_play_no_part_in_recovery(
    open_app: Open, database_url: str, ledger: Ledger, pace: Pace
) -> None:
    """A job that may run for hours is taken back as soon as any other."""
    app = open_app(**pace.settings)
    with running(database_url, ledger=ledger) as worker:
        (id_,) = enqueue(app, [tasks.nap_once.using(timeout=4 * 3600).call(60)])
        wait_until(ledger.read)
        worker.kill()
        died = time.monotonic()
        with running(database_url, ledger=ledger, ready=False):
            wait_until_recovered(app, [id_], died, pace)
            wait_for_state(app, id_, "succeeded")
    found = history.check(app.database, ledger, [id_])
    assert history.outcomes(found, id_) == ["lost (lost)", "succeeded"]


@pytest.mark.parametrize("pace", PACES)
def test_a_platform_that_does_not_wait_for_the_grace_loses_nothing(
    open_app: Open, database_url: str, ledger: Ledger, pace: Pace
) -> None:
    """SIGTERM with a long grace, and SIGKILL two seconds later: another worker runs all five."""
    app = open_app(**pace.settings)
    with running(database_url, concurrency=5, grace=25.0, ledger=ledger) as worker:
        ids = enqueue(app, (tasks.nap_once.call(60) for _ in range(5)))
        wait_until(lambda: len(ledger.read()) == 5)
        worker.terminate()
        time.sleep(2)
        worker.kill()
        died = time.monotonic()
        with running(database_url, ledger=ledger, ready=False):
            wait_until_recovered(app, ids, died, pace)
            wait_until_over(app)
    found = history.check(app.database, ledger, ids)
    assert history.states(found) == {"succeeded": 5}


# --- jobs that kill -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("killer", "args", "max_attempts", "trace"),
    [
        pytest.param(tasks.segfault, (), 1, "signal SIGSEGV", id="segfault"),
        pytest.param(tasks.exit_hard, (3,), 2, "exit code 3", id="exit"),
    ],
)
def test_a_job_that_kills_its_process_ends_dead_and_the_good_ones_succeed(
    app: Onward,
    database_url: str,
    ledger: Ledger,
    killer: Task[Any, Any],
    args: tuple[Any, ...],
    max_attempts: int,
    trace: str,
) -> None:
    """Among 20 good jobs one reads address 0, or ends its process: its neighbours lose an attempt
    at most, it ends dead with the signal or the status on record, and a successor is there within
    5 s.
    """
    with running(database_url, processes=4, concurrency=6, ledger=ledger) as worker:
        good = enqueue(app, (tasks.nap.call(1.0) for _ in range(20)))
        wait_until_begun(app, good)
        (id_,) = enqueue(app, [killer.using(max_attempts=max_attempts).call(*args)])
        wait_until(lambda: any(line.state == "lost" for line in worker.workers()), 10)
        died = time.monotonic()
        wait_until(lambda: len(worker.pids()) == 4, 10, what="a successor")
        assert time.monotonic() - died < 5.0
        wait_until_over(app, 30)
        assert worker.running
    found = history.check(app.database, ledger, [*good, id_])
    assert all(found.jobs[each].state == "succeeded" for each in good)
    assert max(history.outcomes(found, each).count("lost (lost)") for each in good) <= 1
    assert not any(row.state == "failed" for each in good for row in found.attempts_of(each))
    assert found.jobs[id_].state == "dead"
    assert all(trace in str(row.error) for row in found.attempts_of(id_))


@pytest.mark.parametrize("status", [0, 3])
def test_a_job_that_returns_and_takes_its_process_along_spends_its_budget(
    app: Onward, database_url: str, ledger: Ledger, status: int
) -> None:
    """Its outcome was never written, so its worker vanished under it: a loss, not a release free of
    charge, or it would go round for ever.
    """
    with running(database_url, ledger=ledger, target=jobs.TARGET) as worker:
        (id_,) = enqueue(
            app, [jobs.die_after_return.using(max_losses=1, max_attempts=2).call(status)]
        )
        wait_until_over(app, 20)
        assert worker.running
    found = history.check(app.database, ledger, [id_])
    assert found.jobs[id_].state == "dead"
    assert history.outcomes(found, id_)[0] == "lost (lost)"
