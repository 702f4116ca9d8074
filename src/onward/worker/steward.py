"""Heart, keeper and watch on a thread and a loop of their own: for a worker without supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

from onward.config import Settings
from onward.store.database import Database
from onward.worker.board import Board
from onward.worker.heart import Heart
from onward.worker.keeper import Keeper
from onward.worker.stage import keep_going
from onward.worker.standstill import WATCH, Standstill


class Steward:
    """Beats for one worker, and keeps the database in order meanwhile.

    Args:
        database: where its lease is.
        settings: lease, beat, sweep, retention.
        worker: whose lease.
        board: told of each renewal, and of time in which everything stood still.
    """

    def __init__(self, database: Database, settings: Settings, worker: str, board: Board) -> None:
        self._database = database
        self._board = board
        self._heart = Heart(database, settings.lease, settings.beat)
        self._heart.boards[worker] = board
        self._keeper = Keeper(database, settings, lambda: [worker])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="onward-steward", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Stop beating; returns when the thread has ended."""
        if not self._thread.is_alive():
            self._loop.close()
            return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join(10)

    def _end(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._live())
        with contextlib.suppress(Exception):
            self._loop.run_until_complete(self._database.close_loop())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _live(self) -> None:
        # When it is cancelled it waits for all: psycopg ends a statement that is under way first.
        await asyncio.gather(
            keep_going("heart", self._heart.run),
            keep_going("keeper", self._keeper.run),
            keep_going("watch", self._watch),
            return_exceptions=True,
        )

    async def _watch(self) -> None:
        """Say for how long the process stood still: no attempt worked in that time."""
        standstill = Standstill()
        while True:
            await asyncio.sleep(WATCH)
            if still := standstill.look(time.monotonic()):
                self._board.stand_still(still)
