"""Torture: two supervisors with real processes and clients that enqueue, cancel and requeue, while
processes are killed and frozen and connections cut at random moments.

In:  a seed and a budget.
Out: a report of acknowledged, lost, doubled, recovered and unexplained jobs.

The ledger that the bodies write into and the client's own list of what was acknowledged are the
witnesses; the database's rows are held against both when everything has come to rest.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from onward.app import Onward
from onward.errors import DatabaseError, IllegalTransition
from onward.task import Call
from tests.crash import jobs
from tests.crash.field import SHORT, enqueue, freeze, kill, live, thaw
from tests.proof.report import Budget, Report, Technique
from tests.support import history, postgres, tasks
from tests.support.ledger import VARIABLE, Ledger
from tests.support.workers import RunningWorker, opened, running

REST = 60.0
"""Within so many seconds after the last fault everything must be over."""


class Field:
    """Two supervisors on one database, and what can be done to them."""

    def __init__(self, app: Onward, ledger: Ledger, stack: ExitStack, report: Report) -> None:
        self.app = app
        self._ledger = ledger
        self._stack = stack
        self._report = report
        self.workers = [self._start("A"), self._start("B")]
        self._frozen: list[list[int]] = []

    def _start(self, name: str) -> RunningWorker:
        worker = running(
            self.app.url,
            name=name,
            processes=1,
            ledger=self._ledger,
            grace=1.0,
            target=jobs.TARGET,
            ready=False,
        )
        return self._stack.enter_context(worker)

    def _replace(self, place: int) -> None:
        self.workers[place].kill()
        self.workers[place] = self._start("AB"[place])

    # --- faults -----------------------------------------------------------------------------------

    def kill_process(self, chance: random.Random) -> None:
        """A worker process dies; its supervisor lives."""
        if pids := chance.choice(self.workers).pids():
            kill(chance.choice(pids))

    def kill_supervisor(self, chance: random.Random) -> None:
        """The supervisor dies first; its process is on its own for a moment."""
        place = chance.randrange(2)
        kill(self.workers[place].supervisor_pid)
        time.sleep(chance.uniform(0, 0.3))
        self._replace(place)

    def kill_all(self, chance: random.Random) -> None:
        """As if the machine went down."""
        self._replace(chance.randrange(2))

    def freeze_process(self, chance: random.Random) -> None:
        """A process stands still for less than it may be silent."""
        worker = chance.choice(self.workers)
        if worker.running and worker.pids():
            pids = freeze(worker, self.app.database)
            time.sleep(chance.uniform(0.1, 0.6))
            thaw(pids)

    def freeze_past_lease(self, chance: random.Random) -> None:
        """A supervisor and its processes stand still past their lease, and go on later."""
        worker = chance.choice(self.workers)
        if worker.running and not self._frozen:
            self._frozen.append(freeze(worker, self.app.database))
            time.sleep(SHORT["lease"] + 2 * SHORT["sweep"])

    def stop_in_order(self, chance: random.Random) -> None:
        """A deploy."""
        place = chance.randrange(2)
        if self.workers[place].running:
            self.workers[place].terminate()
            with suppress(AssertionError):
                self.workers[place].wait(8)
        self._replace(place)

    def cut_connections(self, chance: random.Random) -> None:
        """PostgreSQL ends sessions; a SQLite file is held by a foreign writer for a while."""
        url = self.app.url
        if url.startswith("sqlite"):
            self.freeze_process(chance)
            return
        with suppress(psycopg.Error), psycopg.connect(url, autocommit=True) as dba:
            dba.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                " AND random() < 0.5"
            )

    def thaw(self) -> None:
        while self._frozen:
            thaw(self._frozen.pop())

    def restore(self) -> None:
        """The end of all faults: two healthy supervisors."""
        self.thaw()
        for place, worker in enumerate(self.workers):
            if not worker.running:
                self._replace(place)
        for worker in self.workers:
            worker.wait_ready()


def mixture(chance: random.Random) -> list[Call[Any]]:
    """Jobs of all kinds and endings."""
    return [
        *(tasks.nap.call(chance.uniform(0, 0.8)) for _ in range(6)),
        *(tasks.block.call(chance.uniform(0, 0.5)) for _ in range(3)),
        *(tasks.aecho.call(number) for number in range(6)),
        tasks.isolated_nap.call(chance.uniform(0, 0.4)),
        jobs.by_attempt.call([(0.1, "raise"), (0.2, "return")]),
        tasks.nap_then_fail.using(max_attempts=2).call(0.1),
        tasks.nap.using(timeout=0.3).call(chance.choice([0.1, 5.0])),
        tasks.nap.using(run_after=chance.uniform(0, 2)).call(0.1),
        tasks.block_loop.call(chance.uniform(0, 0.4)),
    ]


class Clients:
    """Who enqueues, cancels, requeues and discards, and notes what was acknowledged."""

    def __init__(self, app: Onward, report: Report) -> None:
        self._app = app
        self._report = report
        self.acknowledged: list[str] = []
        self.cancelled: set[str] = set()

    def enqueue(self, chance: random.Random) -> None:
        try:
            self.acknowledged += enqueue(self._app, mixture(chance))
        except DatabaseError:
            self._report.sometimes["enqueue not acknowledged"] += 1

    def change_minds(self, chance: random.Random) -> None:
        for id_ in chance.sample(self.acknowledged, min(3, len(self.acknowledged))):
            with suppress(DatabaseError, IllegalTransition):  # It may move between two calls.
                self._change_mind(id_)

    def _change_mind(self, id_: str) -> None:
        state = self._app.get(id_).state
        if state in {"queued", "running"}:
            if self._app.cancel(id_) == "cancelled":
                self.cancelled.add(id_)
            self._report.sometimes[f"cancel of a {state} job"] += 1
        elif state == "dead":
            self._app.requeue(id_)
            self._report.sometimes["requeue"] += 1


FAULTS: list[Callable[[Field, random.Random], None]] = [
    Field.kill_process,
    Field.kill_process,
    Field.kill_supervisor,
    Field.kill_all,
    Field.freeze_process,
    Field.freeze_past_lease,
    Field.stop_in_order,
    Field.cut_connections,
]


def torture(url: str, folder: Path, seed: int, budget: Budget) -> Report:
    """Torture one database until the budget is used up, and check what is left."""
    report = Report("torture", url.partition(":")[0], seed)
    chance = random.Random(seed)
    ledger = Ledger(folder / "ledger")
    os.environ[VARIABLE] = str(ledger.path)
    app = opened(url, **SHORT)
    try:
        with ExitStack() as stack:
            field = Field(app, ledger, stack, report)
            clients = Clients(app, report)
            before = history.read(app.database, ledger)
            while True:
                clients.enqueue(chance)
                time.sleep(chance.uniform(0.1, 0.8))
                fault = chance.choice(FAULTS)
                fault(field, chance)
                report.did[fault.__name__.replace("_", " ")] += 1
                clients.change_minds(chance)
                before = _look(app, ledger, before, report)
                field.thaw()
                if not budget.left():
                    break
            field.restore()
            _wait(app, report)
        _judge(app, ledger, clients, report)
    finally:
        app.close()
    return report


def _look(app: Onward, ledger: Ledger, before: history.History, report: Report) -> history.History:
    """What was over stays as it was, whatever is done to the rest. Who requeues a dead job moves
    it, and that is no fault.
    """
    with suppress(DatabaseError, psycopg.Error):
        now = history.read(app.database, ledger)
        for text in history.changed_finals(before, now):
            report.violate(text)
        return now
    return before


def _wait(app: Onward, report: Report) -> None:
    end = time.monotonic() + REST
    while live(app):
        if time.monotonic() > end:
            report.violate(f"D4: not over {REST:g} s after the last fault: {app.counts()}")
            return
        time.sleep(0.1)


def _judge(app: Onward, ledger: Ledger, clients: Clients, report: Report) -> None:
    found = history.read(app.database, ledger)
    asked = set(clients.acknowledged)
    # What was not acknowledged may be there all the same: its commit's answer was lost.
    unsure = report.sometimes["enqueue not acknowledged"] > 0
    for text in history.problems(found, enqueued=asked, born_inside=unsure):
        report.violate(text)
    for text in history.broken_rules(app.database):
        report.violate(text)
    for id_ in clients.cancelled:
        if found.jobs[id_].state != "cancelled":
            report.violate(f"X1: {id_} was cancelled and is {found.jobs[id_].state}")
    report.did["jobs acknowledged"] += len(asked)
    report.did["bodies run"] += len(found.bodies)
    for row in found.attempts.values():
        report.sometimes[f"attempt {row.state}"] += 1
        report.sometimes["body abandoned"] += row.abandoned
    overlaps = {b.job for b in found.bodies if b.attempt > 1}
    report.sometimes["job run again"] += len(overlaps)


@contextmanager
def fresh(dialect: str, folder: Path) -> Generator[str]:
    """The URL of a database of its own."""
    if dialect == "sqlite":
        yield f"sqlite:///{folder}/onward.db"
        return
    server = postgres.find_server()
    url = postgres.create_database(server)
    try:
        yield url
    finally:
        postgres.drop_database(server, url)


def on(dialect: str) -> Callable[[int, Budget], Report]:
    """The search on one kind of database."""

    def run(seed: int, budget: Budget) -> Report:
        with tempfile.TemporaryDirectory(prefix="onward-torture-") as name:
            folder = Path(name)
            with fresh(dialect, folder) as url:
                return torture(url, folder, seed, budget)

    return run


TECHNIQUES = [
    Technique("torture sqlite", on("sqlite")),
    Technique("torture postgres", on("postgres")),
]
