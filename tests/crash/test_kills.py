"""kill -9 at any moment, of worker processes, of supervisors and of both at once: no job is lost,
none succeeds twice, and what ran under a dead worker runs again soon.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from onward.app import Onward
from onward.config import Settings
from onward.task import Call, Task
from tests.crash import jobs
from tests.crash.conftest import Open
from tests.crash.field import (
    SHORT,
    enqueue,
    kill,
    wait_for_state,
    wait_until_begun,
    wait_until_over,
)
from tests.support import history, tasks
from tests.support.ledger import Ledger
from tests.support.workers import RECOVERED_IN, RunningWorker, alive, opened, running, wait_until

AS_SHIPPED = {name: getattr(Settings(), name) for name in Settings.__struct_fields__}

# --- at random ------------------------------------------------------------------------------------


class Fleet:
    """One supervisor after another: when it has been killed, the next one starts."""

    def __init__(self, url: str, ledger: Ledger, stack: ExitStack) -> None:
        self._url = url
        self._ledger = ledger
        self._stack = stack
        self.worker = self._start()

    def kill_process(self, chance: random.Random) -> None:
        """A worker process dies; its supervisor lives."""
        if pids := self.worker.pids():
            kill(chance.choice(pids))

    def kill_supervisor(self, _: random.Random) -> None:
        """The supervisor dies; its worker processes are on their own."""
        kill(self.worker.supervisor_pid)
        self.worker = self._start()

    def kill_all(self, _: random.Random) -> None:
        """As if the machine went down."""
        self.worker.kill()
        self.worker = self._start()

    def _start(self) -> RunningWorker:
        worker = running(
            self._url, processes=2, ledger=self._ledger, grace=1.0, target=jobs.TARGET, ready=False
        )
        return self._stack.enter_context(worker)


@contextmanager
def fleet(url: str, ledger: Ledger) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(url, ledger, stack)


def mixture(chance: random.Random) -> list[Call[Any]]:
    """Jobs of all lengths, some of which fail, some in processes of their own."""
    return [
        *(tasks.nap.call(chance.uniform(0, 1.2)) for _ in range(8)),
        *(tasks.block.call(chance.uniform(0, 0.8)) for _ in range(3)),
        tasks.isolated_nap.call(chance.uniform(0, 0.5)),
        jobs.by_attempt.call([(0.1, "raise"), (0.2, "return")]),
        tasks.nap_then_fail.using(max_attempts=2).call(0.1),
    ]


@pytest.mark.parametrize(
    ("kills", "seed"),
    [
        pytest.param(6, 1, id="scaled"),
        pytest.param(150, 2, id="as written", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_kills_at_random_moments_lose_nothing(
    open_app: Open, database_url: str, ledger: Ledger, kills: int, seed: int
) -> None:
    """Worker processes, supervisors and both together are killed while jobs of all lengths run:
    each job ends succeeded or dead, with a whole history that the bodies' own record confirms.
    """
    app = open_app(**SHORT)
    chance = random.Random(seed)
    ids: list[str] = []
    before = history.read(app.database, ledger)
    with fleet(database_url, ledger) as workers:
        for number in range(kills):
            workers.worker.wait_ready()
            ids += enqueue(app, mixture(chance))
            time.sleep(chance.uniform(0.1, 0.9))
            (workers.kill_process, workers.kill_supervisor, workers.kill_all)[number % 3](chance)
            now = history.read(app.database, ledger)
            assert history.changed_finals(before, now) == []
            before = now
        wait_until_over(app, 60)
    found = history.check(app.database, ledger, ids)
    assert set(history.states(found)) <= {"succeeded", "dead"}
    assert any(row.state == "lost" for row in found.attempts.values()), "too tame: nothing was lost"


# --- with the settings as shipped -----------------------------------------------------------------


def test_jobs_of_a_killed_process_run_again_within_3_seconds(
    open_app: Open, database_url: str, ledger: Ledger
) -> None:
    """Settings as shipped: the supervisor sees the death, takes the job back, and another process
    runs it; a successor is there within 5 s.
    """
    app = open_app(**AS_SHIPPED)
    with running(database_url, processes=2, ledger=ledger) as worker:
        (id_,) = enqueue(app, [tasks.nap_once.call(60)])
        wait_until(ledger.read)
        died = time.monotonic()
        kill(ledger.read()[0]["pid"])
        wait_for_state(app, id_, "succeeded")
        wait_until(lambda: len(worker.pids()) == 2, 10, what="a successor")
        assert time.monotonic() - died < 5.0
    found = history.check(app.database, ledger, [id_])
    assert found.bodies_of(id_)[1].start - died < 3.0
    assert history.outcomes(found, id_) == ["lost (lost)", "succeeded"]
    assert "signal SIGKILL" in str(found.attempts[id_, 1].error)


def test_jobs_of_a_lost_machine_run_again_within_20_seconds(
    open_app: Open, database_url: str, ledger: Ledger
) -> None:
    """Settings as shipped: a supervisor dies together with all its processes, and nobody is left
    who knows; the workers of another one take over. On SQLite a free lock tells them at once.
    """
    app = open_app(**AS_SHIPPED)
    with running(database_url, ledger=ledger) as doomed:
        (id_,) = enqueue(app, [tasks.nap_once.call(60)])
        wait_until(ledger.read)
        with running(database_url, ledger=ledger):
            died = time.monotonic()
            doomed.kill()
            wait_for_state(app, id_, "succeeded", 40)
    found = history.check(app.database, ledger, [id_])
    recovered = found.bodies_of(id_)[1].start - died
    assert recovered < (20.0 if app.database.dialect == "postgres" else 5.0)
    assert history.outcomes(found, id_) == ["lost (lost)", "succeeded"]


# --- the supervisor alone -------------------------------------------------------------------------


def test_processes_of_a_killed_supervisor_finish_their_work_and_end(
    app: Onward, database_url: str, ledger: Ledger
) -> None:
    """They notice, beat for themselves, claim no more, and end in order: what ran is not lost."""
    with running(database_url, processes=2, ledger=ledger) as worker:
        ids = enqueue(app, (tasks.nap.call(5.0) for _ in range(4)))
        wait_until_begun(app, ids)
        pids = worker.pids()
        kill(worker.supervisor_pid)
        (late,) = enqueue(app, [tasks.nap.call(0.0)])
        wait_until(lambda: not any(map(alive, pids)), 20, what="the processes' end")
        assert {line.state for line in worker.workers()} == {"stopped"}
    found = history.check(app.database, ledger, [*ids, late])
    assert all(history.outcomes(found, id_) == ["succeeded"] for id_ in ids)


def test_a_restart_on_sqlite_recovers_at_once(tmp_path: Path, ledger: Ledger) -> None:
    """A free lock is proof of death: nobody waits for the lease, however long it is."""
    url = f"sqlite:///{tmp_path}/onward.db"
    app = opened(url, lease=600.0, beat=5.0, sweep=0.5)
    with running(url, ledger=ledger) as worker:
        (id_,) = enqueue(app, [tasks.nap_once.call(60)])
        wait_until(ledger.read)
        worker.kill()
    died = time.monotonic()
    with running(url, ledger=ledger):
        wait_for_state(app, id_, "succeeded")
    assert ledger.read()[-1]["at"] - died < 5.0
    history.check(app.database, ledger, [id_])
    app.close()


# --- who it was -----------------------------------------------------------------------------------


def test_a_restart_under_the_same_name_does_not_keep_the_dead_ones_jobs_alive(
    app: Onward, database_url: str, ledger: Ledger
) -> None:
    """Each process start has an identity of its own: a namesake's beat means nothing for the job
    that died with its predecessor.
    """
    with running(database_url, name="pod-0", ledger=ledger) as first:
        (id_,) = enqueue(app, [tasks.nap_once.call(60)])
        wait_until(ledger.read)
        first.kill()
        died = time.monotonic()
        with running(database_url, name="pod-0", ledger=ledger):
            wait_for_state(app, id_, "succeeded")
    found = history.check(app.database, ledger, [id_])
    assert found.bodies_of(id_)[1].start - died < RECOVERED_IN
    assert history.outcomes(found, id_) == ["lost (lost)", "succeeded"]


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_the_last_attempt_is_lost_while_nobody_watches(
    open_app: Open, database_url: str, ledger: Ledger, max_attempts: int
) -> None:
    """The only worker dies with the job. Whoever starts next, though it serves another queue, finds
    it: dead if one attempt was all there was, else due again.
    """
    app = open_app(**SHORT)
    with running(database_url, ledger=ledger) as worker:
        (id_,) = enqueue(app, [tasks.nap.using(max_attempts=max_attempts).call(60)])
        wait_until(ledger.read)
        worker.kill()
    time.sleep(SHORT["lease"] * 1.5)
    assert app.get(id_).state == "running"
    with running(database_url, queues=[("elsewhere", None)], ledger=ledger):
        wait_for_state(app, id_, "dead" if max_attempts == 1 else "queued", 6)
    found = history.check(app.database, ledger, [id_])
    assert history.outcomes(found, id_) == ["lost (lost)"]
    assert len(found.bodies) == 1


@pytest.mark.parametrize("whom", ["process", "machine"])
def test_a_job_that_is_asked_to_stop_when_its_worker_dies_is_cancelled(
    open_app: Open, database_url: str, ledger: Ledger, whom: str
) -> None:
    """Neither tried again nor dead: somebody asked for its end, and it has ended."""
    app = open_app(**SHORT, cancel_poll=60.0)
    with running(database_url, ledger=ledger) as worker:
        (id_,) = enqueue(app, [tasks.nap.call(60)])
        wait_until(ledger.read)
        assert app.cancel(id_) == "cancelling"
        if whom == "process":
            kill(worker.pids()[0])
        else:
            worker.kill()
        with running(database_url, ledger=ledger):
            wait_for_state(app, id_, "cancelled", 8)
    found = history.check(app.database, ledger, [id_])
    assert history.outcomes(found, id_) == ["lost (lost)"]
    assert len(found.bodies) == 1


def test_time_limits_play_no_part_in_recovery(
    app: Onward, database_url: str, ledger: Ledger
) -> None:
    """A job that may run for hours is taken back as soon as any other."""
    with running(database_url, ledger=ledger) as worker:
        (id_,) = enqueue(app, [tasks.nap_once.using(timeout=4 * 3600).call(60)])
        wait_until(ledger.read)
        worker.kill()
        died = time.monotonic()
        with running(database_url, ledger=ledger):
            wait_for_state(app, id_, "succeeded")
    found = history.check(app.database, ledger, [id_])
    assert found.bodies_of(id_)[1].start - died < RECOVERED_IN


def test_a_platform_that_does_not_wait_for_the_grace_loses_nothing(
    app: Onward, database_url: str, ledger: Ledger
) -> None:
    """SIGTERM with a long grace, and SIGKILL two seconds later: another worker runs all five."""
    with running(database_url, concurrency=5, grace=25.0, ledger=ledger) as worker:
        ids = enqueue(app, (tasks.nap_once.call(60) for _ in range(5)))
        wait_until(lambda: len(ledger.read()) == 5)
        worker.terminate()
        time.sleep(2)
        worker.kill()
        died = time.monotonic()
        with running(database_url, ledger=ledger):
            wait_until_over(app)
    found = history.check(app.database, ledger, ids)
    assert history.states(found) == {"succeeded": 5}
    assert max(found.bodies_of(id_)[1].start for id_ in ids) - died < RECOVERED_IN + 1


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
