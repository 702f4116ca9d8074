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
from onward.task import Call
from tests.crash import jobs
from tests.crash.conftest import Open
from tests.crash.field import (
    BUSY,
    SHORT,
    enqueue,
    kill,
    wait_for_state,
    wait_until_begun,
    wait_until_over,
)
from tests.support import history, tasks
from tests.support.ledger import Ledger
from tests.support.workers import RunningWorker, alive, opened, running, wait_until

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
        self._replace()

    def kill_all(self, _: random.Random) -> None:
        """As if the machine went down."""
        self.worker.kill()
        self._replace()

    def _replace(self) -> None:
        self.worker.database.close()  # A connection of each would be more than a server has.
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
        pytest.param(3, 1, id="scaled"),
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
        wait_until_over(app, 60 + kills)  # More is enqueued than the survivors can do meanwhile.
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
        assert time.monotonic() - died < 5.0 + BUSY
    found = history.check(app.database, ledger, [id_])
    assert found.bodies_of(id_)[1].start - died < 3.0 + BUSY
    assert history.outcomes(found, id_) == ["lost (lost)", "succeeded"]
    assert "signal SIGKILL" in str(found.attempts[id_, 1].error)


@pytest.mark.parametrize(
    "ready_database_url",
    ["sqlite", pytest.param("postgres", marks=pytest.mark.soak)],
    indirect=True,
)
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
    assert recovered < (20.0 if app.database.dialect == "postgres" else 5.0) + BUSY
    assert history.outcomes(found, id_) == ["lost (lost)", "succeeded"]


# --- the supervisor alone -------------------------------------------------------------------------


def test_processes_of_a_killed_supervisor_finish_their_work_and_end(
    app: Onward, database_url: str, ledger: Ledger
) -> None:
    """They notice, beat for themselves, claim no more, and end in order: what ran is not lost."""
    with running(database_url, processes=2, ledger=ledger) as worker:
        ids = enqueue(app, (tasks.nap.call(4.0) for _ in range(4)))
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
    assert ledger.read()[-1]["at"] - died < 5.0 + BUSY
    history.check(app.database, ledger, [id_])
    app.close()
