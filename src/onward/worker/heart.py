"""Heart: renews leases, and says when one is lost. It runs where no user code can hinder it.

In:  the workers that it beats for.    Out: their boards know when the lease was last renewed, or
    that it is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping

from onward.errors import DatabaseError
from onward.events import Happened, emit
from onward.store import store
from onward.store.database import Database, Duplicate
from onward.store.store import Registration
from onward.worker.board import Board
from onward.worker.stage import Complaint


async def register(database: Database, worker: Registration) -> None:
    """Make a worker known, with a first lease. A repeat of a lost answer meets itself."""
    with contextlib.suppress(Duplicate):
        await database.arun(store.register, worker)


class Heart:
    """Beats for workers.

    Args:
        database: where their leases are.
        lease: how long a renewal lasts, in seconds.
        beat: how often to renew, in seconds.
    """

    def __init__(self, database: Database, lease: float, beat: float) -> None:
        self._database = database
        self._lease = lease
        self._beat = beat
        self._complaint = Complaint()
        self.boards: dict[str, Board] = {}

    async def run(self) -> None:
        """Beat for ever; while the database is away, try again sooner."""
        while True:
            began = time.monotonic()
            ok = await self.beat_once(self.boards)
            pause = self._beat if ok else self._beat / 5
            await asyncio.sleep(max(0.05, pause - (time.monotonic() - began)))

    async def beat_once(self, boards: Mapping[str, Board]) -> bool:
        """Renew all leases; returns whether the database answered."""
        if not boards:
            return True
        began = time.monotonic()
        asked = dict(boards)
        try:
            async with asyncio.timeout(self._lease / 2):
                alive = await self._database.arun(store.beat, list(asked), self._lease)
        except (DatabaseError, TimeoutError) as error:
            self._complaint.make(_missed(error))
            return False
        self._complaint.over()
        for worker, board in asked.items():
            if worker in alive:
                board.beat(began)
            elif worker in self.boards:
                board.declare_lost()
                emit(Happened(name="worker.lost", level=logging.ERROR, worker=worker))
        return True


def _missed(error: Exception) -> Happened:
    text = str(error).splitlines()[0] if str(error) else "no answer in time"
    return Happened(name="beat.missed", level=logging.WARNING, fields={"error": text})
