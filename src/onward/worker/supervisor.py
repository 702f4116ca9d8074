"""The supervisor: a small process without user code that keeps worker processes alive and honest.

It beats for them, so no blocked loop and no C code that holds the interpreter can stop a beat. It
sees a death at once, with the exit status, takes the jobs back as what they are, and starts a
successor. It is the watchdog: a process that is stuck past an attempt's deadline, gives no sign at
all, or does not stop when told, is killed.

Signals: the first SIGTERM or SIGINT stops in order, the second at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from onward.config import Settings
from onward.errors import DatabaseError, DatabaseUnavailable, OnwardError, SchemaMissing
from onward.events import Happened, emit
from onward.job import Change
from onward.names import MOST_NAME
from onward.store import store
from onward.store.database import Database, Refused, TurnedAway
from onward.store.migrate import check_version, newest
from onward.store.url import open_database
from onward.text import clean_text
from onward.worker.aftermath import Aftermath, Deaths
from onward.worker.changes import told
from onward.worker.child import BAD_APP, Hello, Orders
from onward.worker.heart import Heart, register
from onward.worker.keeper import Keeper, remove_lock
from onward.worker.process import WorkerProcess
from onward.worker.stage import Complaint, keep_going
from onward.worker.standstill import WATCH, Standstill

QUICK_DEATH = 10.0
LONGEST_PAUSE = 5.0
SLACK = 1.0
"""Seconds beyond each limit before the supervisor acts in a worker's stead: it should have acted
itself.
"""


def run(
    *,
    target: str,
    processes: int = 1,
    concurrency: int = 10,
    queues: Sequence[tuple[str, int | None]] | None = None,
    grace: float | None = None,
    name: str | None = None,
    database: str | None = None,
    schema: str | None = None,
    until_empty: bool = False,
    log_level: str = "INFO",
) -> int:
    """Run worker processes until told to stop; returns the exit status.

    Args:
        target: where the app is, `module:app`.
        processes: how many worker processes.
        concurrency: how many jobs at once, each.
        queues: which queues, each with a limit of slots or None; by default those of the app's
            tasks.
        grace: how long running jobs may go on after a signal, in seconds.
        name: shown in lists; by default host and process id.
        database: instead of the app's own.
        schema: PostgreSQL only: instead of the app's own.
        until_empty: end when no due job is left.
        log_level: of the log on standard error.
    """
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)-7s %(message)s")
    orders = Orders(
        target=target,
        concurrency=concurrency,
        board_fd=-1,
        link_fd=-1,
        queues=None if queues is None else list(queues),
        grace=grace,
        name=None if name is None else clean_text(name, MOST_NAME),
        database=database,
        schema=schema,
        until_empty=until_empty,
        log_level=log_level,
    )
    return asyncio.run(Supervisor(orders, processes).run())


class Supervisor:
    """Keeps `processes` worker processes running under the same orders."""

    def __init__(self, orders: Orders, processes: int) -> None:
        self._orders = orders
        self._wanted = processes
        self._children: set[WorkerProcess] = set()
        self._deaths = Deaths()
        self._database: Database | None = None
        self._heart: Heart | None = None
        self._settings = Settings()
        self._services: list[asyncio.Task[None]] = []
        self._complaint = Complaint()
        self._stopping = asyncio.Event()
        self._stop_at = 0.0
        self._status = 0
        self._resumed = time.monotonic()

    async def run(self) -> int:
        """Run until every worker process has ended for good; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        watch = asyncio.create_task(keep_going("watch", self._watch))
        try:
            await asyncio.gather(*(self._keep_one() for _ in range(self._wanted)))
        finally:
            for task in (watch, *self._services):
                task.cancel()
            await asyncio.gather(watch, *self._services, return_exceptions=True)
            if self._database is not None:
                await self._database.aclose()
        if self._status == 0:
            emit(Happened(name="supervisor.stopped", fields={"pid": os.getpid()}))
        return self._status

    def stop(self) -> None:
        """Stop in order; a second call at once."""
        now = time.monotonic()
        grace = self._settings.grace if self._orders.grace is None else self._orders.grace
        again = self._stopping.is_set()
        self._stop_at = now if again else now + grace
        self._stopping.set()
        for child in self._children:
            child.terminate()
        hint = None if again else "running jobs may end; the same signal again stops at once"
        fields = {"grace": 0 if again else grace, "hint": hint}
        emit(Happened(name="supervisor.stopping", fields=fields))

    # --- one place for a process ------------------------------------------------------------------

    async def _keep_one(self) -> None:
        """Run one worker process after another, until there is no need of a successor."""
        pause = 0.0
        while not self._stopping.is_set():
            try:
                child = await WorkerProcess.start(self._orders)
            except OSError as error:  # No memory, no process left: it may be better soon.
                self._complaint.make(_waiting(error))
                pause = await self._pause_between(pause)
                continue
            self._children.add(child)
            if self._stopping.is_set():
                child.terminate()
            try:
                needed = await self._accompany(child)
            finally:
                self._children.discard(child)
                child.close()
            if not needed:
                return
            lived = time.monotonic() - child.started
            pause = 0.0 if lived > QUICK_DEATH else await self._pause_between(pause)

    async def _pause_between(self, last: float) -> float:
        """Wait before the next process, longer each time that one ends quickly."""
        pause = min(max(0.2, last * 2), LONGEST_PAUSE)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), pause)
        return pause

    async def _accompany(self, child: WorkerProcess) -> bool:
        """From hello to exit; returns whether a successor is needed."""
        hello = await child.hello()
        if hello is not None:
            child.lock_path = hello.registration.lock_path
        if hello is not None and not self._stopping.is_set():
            try:
                await self._admit(child, hello)
            except OnwardError as error:
                if not self._stopping.is_set():  # Said once, however many processes there are.
                    print(f"onward: {error}", file=sys.stderr)
                self._fail(5)
                child.kill("it cannot be registered")
        status = await child.exited()
        if child.worker is None:
            remove_lock(child.lock_path)
            return self._stillborn(child, status)
        if self._heart is not None:
            self._heart.boards.pop(child.worker, None)
        if child.board.stopped:
            remove_lock(child.lock_path)
            empty = status == 0 and self._orders.until_empty
            return not empty and not self._stopping.is_set()
        await self._take_back(child, status)
        return True

    def _stillborn(self, child: WorkerProcess, status: int) -> bool:
        """A process that ended before it said hello. If none ever could, the app is to blame, and
        there is no use in trying again.
        """
        if self._database is not None or self._stopping.is_set():
            return not self._stopping.is_set()
        if status != BAD_APP:  # Else it has said why.
            emit(_unborn(child.epitaph(status)))
        self._fail(2 if status == BAD_APP else 1)
        return False

    def _fail(self, status: int) -> None:
        self._status = status
        self._stopping.set()
        self._stop_at = time.monotonic()
        for child in self._children:
            child.terminate()

    # --- admission --------------------------------------------------------------------------------

    async def _admit(self, child: WorkerProcess, hello: Hello) -> None:
        """Make the worker known, beat for it, and let it go."""
        database = self._open(hello)
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                await self._check_schema(database)
                await register(database, hello.registration)
            except SchemaMissing:
                raise
            except DatabaseUnavailable as error:
                if isinstance(error, TurnedAway) and not self._services:
                    raise  # A mistake in the URL. Later it may be one of the server's, and pass.
                self._complaint.make(_waiting(error))
                await asyncio.sleep(1.0)
            else:
                child.board.beat(began)
                self._serve(database, hello.settings)
                assert self._heart is not None
                self._heart.boards[hello.registration.id] = child.board
                child.go(hello)
                emit(_started(hello, child.pid, database.shown_url))
                return

    async def _check_schema(self, database: Database) -> None:
        """A newer version may have migrated it since we looked: a process that starts now would
        claim nothing.
        """
        version = await asyncio.to_thread(database.schema_version)
        if version > newest(database.dialect):
            check_version(database, version)

    def _open(self, hello: Hello) -> Database:
        """The database of the first worker that says hello is the one of all."""
        if self._database is None:
            options: dict[str, Any] = msgspec.json.decode(hello.options)
            self._database = open_database(options.pop("url"), **options)
            self._settings = hello.settings
        return self._database

    def _serve(self, database: Database, settings: Settings) -> None:
        if self._services:
            return
        self._heart = Heart(database, settings.lease, settings.beat)
        keeper = Keeper(database, settings, self._own, self._deaths.decide)
        self._services = [
            asyncio.create_task(keep_going("heart", self._heart.run)),
            asyncio.create_task(keep_going("keeper", keeper.run)),
        ]

    def _own(self) -> list[str]:
        return [child.worker for child in self._children if child.worker is not None]

    # --- the end of a process ---------------------------------------------------------------------

    async def _take_back(self, child: WorkerProcess, status: int) -> None:
        """The process died: its worker is lost, and each of its jobs is settled as what it is."""
        assert self._database is not None
        assert child.worker is not None
        reason = child.epitaph(status)
        emit(
            Happened(
                name="worker.died",
                level=logging.ERROR,
                worker=child.worker,
                fields={"reason": reason},
            )
        )
        aftermath = Aftermath(
            child.worker, child.last_sight(), child.killed_in_order, child.backoffs
        )
        self._deaths.remember(aftermath)
        refused = False
        while True:
            try:
                if refused:  # About one of its jobs: the keeper finds out which.
                    await self._database.arun(store.lose, child.worker, reason)
                    changes: list[Change] = []
                else:
                    changes = await self._database.arun(
                        store.bury_worker, child.worker, reason, self._deaths.decide
                    )
                for change in changes:
                    emit(told(change, logging.WARNING))
            except Refused as error:
                self._complaint.make(_waiting(error))
                refused = True
            except DatabaseError as error:
                self._complaint.make(_waiting(error))
                await asyncio.sleep(0.5)
                if self._stopping.is_set() and time.monotonic() > self._stop_at + 5:
                    return
            else:
                remove_lock(child.lock_path)
                return

    # --- watch ------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        standstill = Standstill()
        while True:
            await asyncio.sleep(WATCH)
            now = time.monotonic()
            if still := standstill.look(now):
                self._resume(now, still)
            for child in list(self._children):
                if why := self._fault(child, now):
                    child.kill(why, in_order=self._stopping.is_set() and now >= self._stop_at)

    def _resume(self, now: float, still: float) -> None:
        """We stood still ourselves, and so did the workers if it was the whole machine: nobody is
        judged by that time, and they get a moment to show that they live.
        """
        self._resumed = now
        for child in self._children:
            child.board.stand_still(still)

    def _fault(self, child: WorkerProcess, now: float) -> str | None:
        """Why this process must be killed, if it must."""
        settings = self._settings
        if self._stopping.is_set() and now > self._stop_at + self._last_words():
            return "it did not stop when told"
        if child.worker is None:
            return None
        seen = max(child.board.last_tick, self._resumed, child.started)
        if now - seen > settings.stall_after:
            return f"it gave no sign of life for {settings.stall_after:g} s"
        patience = settings.timeout_grace + SLACK
        if now - self._resumed > patience and child.board.overdue(now - patience):
            return "it was stuck past an attempt's time limit"
        if child.board.lost or (self._cut_off and now - child.board.last_beat > settings.lease):
            child.lost_since = child.lost_since or now
            if now - child.lost_since > 8.0:
                return "it did not stop after its lease was lost"
        return None

    @property
    def _cut_off(self) -> bool:
        """Whether others may be able to declare our workers lost while we cannot renew a lease."""
        return self._database is not None and not self._database.local

    def _last_words(self) -> float:
        """How long after the grace a process may take: for bodies to clean up and for the last
        write.
        """
        return 0.5 if self._stop_at <= time.monotonic() and self._again else 2.0

    @property
    def _again(self) -> bool:
        return any(child.terminations > 1 for child in self._children)


def _started(hello: Hello, pid: int, database: str) -> Happened:
    worker = hello.registration
    return Happened(
        name="worker.started",
        worker=worker.id,
        fields={
            "pid": pid,
            "queues": ",".join(worker.queues),
            "tasks": len(worker.tasks),
            "slots": worker.concurrency,
            "database": database,
        },
    )


def _unborn(reason: str) -> Happened:
    hint = "it ended while it imported the app"
    return Happened(
        name="worker.died", level=logging.ERROR, fields={"reason": reason, "hint": hint}
    )


def _waiting(error: Exception) -> Happened:
    fix = {"fix": error.fix} if isinstance(error, OnwardError) and error.fix else {}
    return Happened(
        name="supervisor.waits",
        level=logging.WARNING,
        fields={"error": str(error).splitlines()[0], **fix, "pid": os.getpid()},
    )
