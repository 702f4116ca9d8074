"""The worker: the stages joined together, on one loop of one process.

listener → claimer → executor → finisher: a hint wakes the claimer, the claimer fills free slots,
the executor runs bodies, the finisher writes how they ended. Heart and keeper run elsewhere (in the
supervisor, or in a thread of an embedded worker), where no user code can hinder them; the board is
what both sides see of each other.

A worker that has lost its lease stops, whatever runs: what it holds is no longer its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from onward.app import Onward
from onward.config import Settings
from onward.errors import DatabaseError, InvalidOption
from onward.events import Happened, emit
from onward.job import Change
from onward.lifecycle import Event
from onward.names import check_name
from onward.store import store
from onward.store.database import Database, Refused
from onward.worker.board import Board
from onward.worker.claimer import Claimer
from onward.worker.executor import HOLD, Executor
from onward.worker.finisher import Finisher
from onward.worker.held import Why
from onward.worker.isolation import Isolation
from onward.worker.listener import listen
from onward.worker.stage import keep_going

LAST_WORDS = 1.0
"""Seconds that interrupted bodies get to clean up before the process ends."""

CLAIM_SECONDS = 3.0
"""How long the end waits for the answer to a claim."""

CLOSE_SECONDS = 3.0
"""How long the end waits for processes that were killed: it takes a thread of the loop's executor
each, and bodies may have taken them all.
"""

STALE_BACKLOG = 1.0
"""A claimed job that has not begun after so many seconds is given back: its neighbours turned out
to be long.
"""


BACK = frozenset({Event.RELEASE, Event.SNOOZE, Event.RETRY})
"""Moves after which a job may be due again at once."""


class Plan(Struct, frozen=True, kw_only=True):
    """What a worker is to do."""

    id: str
    queues: Mapping[str, int | None]
    concurrency: int
    until_empty: bool = False


class Worker:
    """Runs jobs of one app until it is stopped.

    Args:
        app: whose tasks.
        plan: which queues, how many slots.
        board: shared with whoever beats for this worker.
        isolation: runs attempts in processes of their own.
    """

    def __init__(self, app: Onward, plan: Plan, board: Board, isolation: Isolation) -> None:
        self._plan = plan
        self._tasks = app.tasks
        self._settings: Settings = app.settings
        self._database: Database = app.database
        self._board = board
        self._stop = asyncio.Event()
        self._now = asyncio.Event()
        self._unknown: set[tuple[str, int]] = set()
        self._grace: float | None = None
        self._claiming: asyncio.Task[None] | None = None
        self.finisher = Finisher(
            self._database,
            app.tasks,
            self._alive,
            self._applied,
            lambda changes: self.executor.written(changes),
        )
        self.executor = Executor(
            app.tasks,
            plan.concurrency,
            self._settings,
            board,
            isolation,
            self.finisher.put,
        )
        self.claimer = Claimer(
            self._database,
            plan.id,
            list(app.tasks),
            plan.queues,
            self._settings.poll,
            room=self._room,
            running=lambda queue: self.executor.by_queue[queue],
            start=self.executor.start,
        )

    # --- from outside -----------------------------------------------------------------------------

    def stop(self, grace: float | None = None) -> None:
        """Stop in order: claim no more, let running jobs end within the grace. A second call stops
        at once.
        """
        if self._stop.is_set():
            self._now.set()
        self._grace = grace
        self._stop.set()
        self.claimer.stop()

    def stop_once(self, grace: float | None = None) -> None:
        """Stop in order, however often it is said."""
        if not self._stop.is_set():
            self.stop(grace)

    def stop_now(self) -> None:
        """Give everything back and stop."""
        self.stop()
        self._now.set()

    async def run(self) -> str:
        """Run until stopped; returns why it ended: `stopped`, `empty`, `lost` or `full` (of bodies
        that never end).
        """
        self._claiming = asyncio.create_task(keep_going("claimer", self.claimer.run))
        stages = [
            self._claiming,
            asyncio.create_task(keep_going("finisher", self.finisher.run)),
            asyncio.create_task(keep_going("listener", self._listen)),
            asyncio.create_task(keep_going("custodian", self._look_after)),
        ]
        try:
            why = await self._until_end()
            if why == "lost":
                await self._leave_as_lost()
            else:
                await self._leave_in_order(why)
            return why
        finally:
            for stage in stages:
                stage.cancel()
            await asyncio.gather(*stages, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.executor.close()

    # --- wiring -----------------------------------------------------------------------------------

    async def _listen(self) -> None:
        await listen(self._database, self.claimer.hear, self.claimer.idle)

    def _room(self) -> int:
        """Free slots, as long as what has ended finds a place until it is written."""
        return self.executor.room()

    def _alive(self) -> bool:
        """Whether this worker may still write. While nobody can write to the database, nobody can
        take its jobs either; elsewhere others may be able to when we are not.
        """
        return not self._board.lost and (self._database.local or self._silent < 0)

    @property
    def _silent(self) -> float:
        """For how many seconds the lease has been over, on this machine's monotonic clock; negative
        while it lasts.
        """
        return time.monotonic() - self._board.last_beat - self._settings.lease

    async def _lost(self) -> bool:
        """Whether this worker has lost its lease, or will have before its bodies could end."""
        if self._board.lost:
            return True
        if not self._database.local:
            return self._silent > -min(2 * LAST_WORDS, self._settings.lease / 6)
        return self._silent > 0 and await self._declared_lost()

    async def _declared_lost(self) -> bool:
        """Nobody has renewed the lease for long; whoever should may be frozen. Ask the database."""
        try:
            leases = await self._database.aread(store.leases)
        except DatabaseError:
            return False
        return self._plan.id not in {lease.worker for lease in leases}

    def _applied(self, changes: Sequence[Change]) -> None:
        """Changes took: jobs that went back to the queue may be due again behind the claimer's
        place.
        """
        if any(change.event in BACK for change in changes):
            self.claimer.wake()
        else:
            self.claimer.poke()

    # --- look after what is held ------------------------------------------------------------------

    async def _look_after(self) -> None:
        """Every `cancel_poll` seconds: cancels, held retries, backlog; with every beat, what the
        database says we own.
        """
        compared = time.monotonic()
        while True:
            await asyncio.sleep(self._settings.cancel_poll)
            if self.executor.held:
                self.executor.ask_cancel(
                    await self._database.aread(store.cancelling, self._plan.id)
                )
            self.executor.release_backlog("its neighbours are long", STALE_BACKLOG)
            await self._hold_retries()
            if time.monotonic() - compared >= self._settings.beat:
                compared = time.monotonic()
                await self._compare()

    async def _hold_retries(self) -> None:
        for job, attempt in list(self.executor.abandoned):
            with contextlib.suppress(Refused):  # Then nobody can claim it either.
                await self._database.arun(store.hold, job, attempt + 1, HOLD)

    async def _compare(self) -> None:
        """A job that the database says we own and that we do not hold, twice in a row, is one whose
        claim's answer was lost: it is run. One that we hold and do not own any more will be refused
        when it ends.
        """
        owned = await self._database.aread(store.owned, self._plan.id, self._held())
        held = self._held()  # Some may have come meanwhile.
        strange = {(job.id, job.attempt): job for job in owned if job.id not in held}
        adopted = [job for key, job in strange.items() if key in self._unknown]
        self._unknown = set(strange)
        if adopted and not self.claimer.in_flight and not self._stop.is_set():
            self._unknown = set()
            for job in adopted:
                emit(
                    Happened(
                        name="job.adopted",
                        level=logging.WARNING,
                        job=job.id,
                        attempt=job.attempt,
                        worker=self._plan.id,
                    )
                )
            self.executor.start(adopted)

    def _held(self) -> set[str]:
        return self.executor.ids() | self.finisher.ids()

    # --- the end ----------------------------------------------------------------------------------

    async def _until_end(self) -> str:
        """Wait for a reason to end."""
        while True:
            try:
                async with asyncio.timeout(min(0.2, self._settings.beat / 4)):
                    await self._stop.wait()
            except TimeoutError:
                pass
            else:
                return "stopped"
            if await self._lost():
                return "lost"
            if self.executor.full:
                return "full"
            if self._plan.until_empty and await self._nothing_left():
                return "empty"

    async def _nothing_left(self) -> bool:
        if not self.executor.idle or self.finisher.backlog or self.claimer.empty_looks < 2:
            return False
        try:
            lanes = await self._database.aread(store.lanes, list(self._plan.queues), self._tasks)
        except DatabaseError:
            return False
        if any(lane.known and lane.due_in <= 0 for lane in lanes) and self.claimer.empty_looks <= 5:
            return False
        return self.executor.idle

    async def _leave_in_order(self, why: str) -> None:
        """Let running jobs end within the grace, give back the rest in the last write, and say that
        we have stopped.
        """
        self.claimer.stop()
        self.executor.begin_no_more(Why.SHUTDOWN)
        await self._quietly(store.drain, self._plan.id)
        await self._drain(self._settings.grace if self._grace is None else self._grace)
        if not self.executor.idle:
            self.executor.interrupt_all(Why.SHUTDOWN)
            await self.executor.empty(0.2 if self._now.is_set() else LAST_WORDS)
        if self._claiming is not None:  # A claim under way may have taken jobs: they go back too.
            await asyncio.wait({self._claiming}, timeout=CLAIM_SECONDS)
        self.executor.release_rest("shutdown")
        written = await self.finisher.flush(self._settings.lease)
        self._board.say_leaving()
        if await self._quietly(store.stop, self._plan.id, why) and written:
            self._board.say_stopped()

    async def _drain(self, grace: float) -> None:
        end = time.monotonic() + grace
        while time.monotonic() < end and not self._now.is_set() and not self.executor.hopeless:
            if await self.executor.empty(min(0.1, max(0.0, end - time.monotonic()))):
                if not self.claimer.in_flight:
                    return
                await asyncio.sleep(0.01)

    async def _leave_as_lost(self) -> None:
        """Our jobs belong to others now. Bodies that end within a moment still report, and what
        they report is refused and kept; the others are interrupted.
        """
        emit(Happened(name="worker.lost", level=logging.ERROR, worker=self._plan.id))
        self.claimer.stop()
        self.executor.begin_no_more(Why.LOST)
        await self.executor.empty(LAST_WORDS)
        self.executor.interrupt_all(Why.LOST)
        await self.executor.empty(LAST_WORDS)
        self.executor.release_rest("lost")
        await self.finisher.flush(5.0)

    async def _quietly(self, op: Callable[..., Any], *args: Any) -> bool:
        """Tell the database, if it listens: when it does not, the lease will say the same. Returns
        whether it did.
        """
        try:
            async with asyncio.timeout(5.0):
                await self._database.arun(op, *args)
        except (DatabaseError, TimeoutError) as error:
            emit(_unheard(self._plan.id, error))
            return False
        return True


def _unheard(worker: str, error: Exception) -> Happened:
    text = str(error).splitlines()[0] if str(error) else "no answer in time"
    return Happened(
        name="worker.unheard", level=logging.WARNING, worker=worker, fields={"error": text}
    )


def queues_of(
    app: Onward, queues: Sequence[tuple[str, int | None]] | None
) -> dict[str, int | None]:
    """The queues to serve: those given, else those of the app's tasks and `default`.

    Raises:
        InvalidOption: none is named, or one has no name that a queue can have.
    """
    if queues is None:
        return dict.fromkeys(known_queues(app))
    if not queues:
        raise InvalidOption(
            "queues=[] names no queue to serve",
            why="a worker of no queue would run nothing, and one of all queues was not asked for",
            fix='queues=["mail"], or leave it out: the queues of the app\'s tasks',
        )
    return {check_name(queue, "queue"): limit for queue, limit in queues}


def doubt_queues(app: Onward, queues: Iterable[str]) -> None:
    """A queue that no task of the app uses may be meant, or misspelt: say so."""
    known = known_queues(app)
    for queue in queues:
        if queue not in known:
            fields = {"queue": queue, "known": ",".join(known)}
            emit(Happened(name="queue.unknown", level=logging.WARNING, fields=fields))


def doubt_tasks(app: Onward) -> None:
    """An app without tasks can run nothing: most likely nobody has imported them."""
    if not app.tasks:
        hint = "import the modules with the tasks in the module of the app, below it"
        emit(Happened(name="tasks.none", level=logging.WARNING, fields={"hint": hint}))


def known_queues(app: Onward) -> list[str]:
    """The queues that calls of the app's tasks go to, unless they say otherwise; and `default`."""
    return sorted({"default", *(task.options.queue for task in app.tasks.values())})
