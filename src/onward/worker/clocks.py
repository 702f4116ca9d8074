"""Clocks: holds the database's clock against our own, and mends what a step back would freeze.

In:  the time by the database, at every sweep.
Out: jobs that were due are due again; a word about a clock that steps, or that is off.

Due times stand on the database's clock. When that is set back by an hour, what was due would stand
still for an hour; who was there to see it moves it. Jobs that were to be due later are left alone:
their times are moments. A step forward needs nothing. Leases show by themselves that the clock has
gone back since they were renewed: they are the keeper's and the heart's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NamedTuple

from onward.events import Happened, emit
from onward.store import store
from onward.store.database import Database
from onward.store.store import LEAST_STEP

DRIFT = 0.001
"""By what share two clocks may differ in speed; it counts where nobody looked for long."""

DUE_AGAIN_STEP = 1_000
DUE_AGAIN_PAUSE = 0.01

SKEW = 2.0
"""Seconds that our clock may be off the database's without a word."""

TELL_SKEW_EVERY = 3600.0


class Reading(NamedTuple):
    """What the database's clock showed, some time between two moments of our monotonic clock."""

    asked: float
    answered: float
    at: float


class Step(NamedTuple):
    """The clock went back by so many `seconds`. `before` is the old time when it was noticed, and
    `since` a moment of the new time that is no later than the step.
    """

    seconds: float
    before: float
    since: float


def went_back(last: Reading, this: Reading) -> Step | None:
    """Whether the database's clock was set back between two looks."""
    least, most = this.asked - last.answered, this.answered - last.asked
    if least - (this.at - last.at) < LEAST_STEP + DRIFT * most:
        return None
    before = last.at + most
    return Step(before - this.at, before, this.at - most)


class Clocks:
    """Watches the clock of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._last: Reading | None = None
        self._told_skew = float("-inf")

    async def look(self) -> None:
        """Look once. If the clock has gone back, what was due is due again."""
        this = await self._read()
        step = None if self._last is None else went_back(self._last, this)
        if step is not None:
            await self._make_due(step)
        self._last = this  # Only now: a step that could not be mended is seen again.

    async def _read(self) -> Reading:
        asked = time.monotonic()
        at = await self._database.aread(store.now)
        reading = Reading(asked, time.monotonic(), at)
        if not self._database.local:  # Where it is, its clock is this machine's.
            self._compare(reading, time.time())
        return reading

    async def _make_due(self, step: Step) -> None:
        moved = 0
        queues = [row[0] for row in await self._database.aread(store.read, "waiting_queues")]
        for lane in await self._database.aread(store.lanes, queues):
            moved += await self._make_lane_due((lane.queue, lane.priority), step)
        fields = {"seconds": round(-step.seconds, 1), "due_again": moved}
        emit(Happened(name="clock.stepped", level=logging.WARNING, fields=fields))

    async def _make_lane_due(self, lane: tuple[str, int], step: Step) -> int:
        moved = 0
        while True:
            due = await self._database.arun(store.due_again, lane, *step, DUE_AGAIN_STEP)
            moved += len(due)
            if len(due) < DUE_AGAIN_STEP:
                return moved
            await asyncio.sleep(DUE_AGAIN_PAUSE)

    def _compare(self, reading: Reading, ours: float) -> None:
        """Say it, now and then, if our clock is off by more than the question took."""
        off = ours - reading.at
        doubt = reading.answered - reading.asked
        if abs(off) <= SKEW + doubt or reading.answered - self._told_skew < TELL_SKEW_EVERY:
            return
        self._told_skew = reading.answered
        fields = {
            "seconds": round(off, 1),
            "hint": "jobs and leases go by the database's clock, but this machine's log does not:"
            " let both keep time by NTP",
        }
        emit(Happened(name="clock.skewed", level=logging.WARNING, fields=fields))
