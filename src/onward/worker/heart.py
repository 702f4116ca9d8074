"""Heart: renews leases, and says when one is lost. It runs where no user code can hinder it.

In:  the workers that it beats for.    Out: their boards know when the lease was last renewed, or
    that it is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from onward.errors import DatabaseError
from onward.events import Happened, emit
from onward.store import store
from onward.store.database import Database, Duplicate, Refused, halves
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
        self._refusal = Complaint()
        self._under_way: set[asyncio.Future[bool]] = set()
        self.boards: dict[str, Board] = {}

    async def run(self) -> None:
        """Beat for ever; while the database is away, try again sooner."""
        try:
            while True:
                began = time.monotonic()
                ok = await self.beat_once()
                pause = self._beat if ok else self._beat / 5
                await asyncio.sleep(max(0.05, pause - (time.monotonic() - began)))
        finally:
            for renewal in self._under_way:
                renewal.cancel()
            await asyncio.gather(*self._under_way, return_exceptions=True)

    async def beat_once(self) -> bool:
        """Renew all leases; returns whether the database answered in time.

        A renewal that takes longer than a quarter of a lease is waited for no more, because its
        connection may be dead: the next goes over another, while the lease lasts. If its answer
        comes after all, it counts.
        """
        if not self.boards:
            return True
        renewal = asyncio.ensure_future(self._renew_all())
        self._under_way.add(renewal)
        renewal.add_done_callback(self._under_way.discard)
        done, _ = await asyncio.wait({renewal}, timeout=self._lease / 4)
        if not done:
            self._complaint.make(_missed(TimeoutError()))
        return bool(done) and renewal.result()

    async def _renew_all(self) -> bool:
        began = time.monotonic()
        try:
            known = await self._renew(list(self.boards))
        except (DatabaseError, TimeoutError) as error:
            self._complaint.make(_missed(error))
            return False
        self._complaint.over()
        for worker, lives in known.items():
            board = self.boards.get(worker)
            if board is None:
                continue  # It has ended meanwhile.
            if lives:
                board.beat(max(began, board.last_beat))
            elif not board.lost and not board.leaving:
                board.declare_lost()
                emit(Happened(name="worker.lost", level=logging.ERROR, worker=worker))
        return True

    async def _renew(self, workers: Sequence[str]) -> dict[str, bool]:
        """Renew these leases; returns which of the workers live. One whose row refuses is left out,
        and costs no other its lease.
        """
        try:
            alive = await self._database.arun(store.beat, workers, self._lease)
        except Refused as error:
            if len(workers) == 1:
                self._refusal.make(_missed(error, workers[0]))
                return {}
            first, second = halves(workers)
            return await self._renew(first) | await self._renew(second)
        return {worker: worker in alive for worker in workers}


def _missed(error: Exception, worker: str | None = None) -> Happened:
    text = str(error).splitlines()[0] if str(error) else "no answer in time"
    return Happened(
        name="beat.missed", level=logging.WARNING, worker=worker, fields={"error": text}
    )
