"""The board: what a worker process and its supervisor can see of each other without the other's
help.

A few shared bytes. The worker writes when it last ticked and which attempts have begun, with their
deadlines; the supervisor writes when it last renewed the lease. Reading needs nobody to answer, so
a process that is frozen, or whose interpreter is held by one job, is seen as it is, and so is an
attempt that is past its limit on a blocked loop. All times are `time.monotonic()`, which the
processes of a machine share.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

_HEAD = struct.Struct("<ddBBBxxxxxd")
_SLOT = struct.Struct("<dd36sIBxxx")
_TIME = struct.Struct("<d")
_EMPTY = bytes(_SLOT.size)
_BEAT, _TICK, _LOST, _STOPPED, _LEAVING, _STILL = 0, 8, 16, 17, 18, 24

FOREVER = 1e300

MOST_UNWRITTEN = 2_000
"""Bodies that may have ended while their outcomes are not written yet."""


def slots_for(concurrency: int) -> int:
    """How many places a worker needs: for what runs, what was abandoned, what is not written."""
    return 2 * concurrency + 64 + MOST_UNWRITTEN


class Begun(Struct, frozen=True):
    """An attempt whose body has begun. `deadline` is when its worker must have ended it (FOREVER:
    no time limit).
    """

    job: str
    attempt: int
    started: float
    deadline: float


class Board:
    """Shared bytes with room for `slots` attempts.

    Args:
        slots: how many attempts at most are under way at once.
        fd: an open file to share; None: a new one without a name.
    """

    def __init__(self, slots: int, fd: int | None = None) -> None:
        self.slots = slots
        size = _HEAD.size + slots * _SLOT.size
        if fd is None:
            fd = _nameless_file()
            os.ftruncate(fd, size)
        self.fd = fd
        self._map = mmap.mmap(fd, size)
        self._free = list(range(slots - 1, -1, -1))

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)

    # --- the worker's side ------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """The process lives: written by a thread of its own."""
        _TIME.pack_into(self._map, _TICK, now)

    def begin(self, job: str, attempt: int, started: float, deadline: float) -> int:
        """Write down that a body begins; returns its place."""
        place = self._free.pop()
        _SLOT.pack_into(
            self._map, _HEAD.size + place * _SLOT.size, started, deadline, job.encode(), attempt, 1
        )
        return place

    def extend(self, place: int, deadline: float) -> None:
        """This attempt has longer than was said."""
        _TIME.pack_into(self._map, _HEAD.size + place * _SLOT.size + 8, deadline)

    def relax(self, place: int) -> None:
        """The body has ended, its outcome is not written yet. It stays written down: if the process
        dies now, this attempt is no innocent one that had not begun.
        """
        self.extend(place, FOREVER)

    def end(self, place: int) -> None:
        """The outcome is written, or was refused."""
        start = _HEAD.size + place * _SLOT.size
        self._map[start : start + _SLOT.size] = _EMPTY
        self._free.append(place)

    @property
    def free(self) -> int:
        """How many places are free."""
        return len(self._free)

    def say_leaving(self) -> None:
        """The worker is about to give up its lease itself: that it has none is no loss."""
        self._map[_LEAVING] = 1

    def say_stopped(self) -> None:
        """The worker has stopped in order: its exit is no accident."""
        self._map[_STOPPED] = 1

    # --- the supervisor's side --------------------------------------------------------------------

    def beat(self, now: float) -> None:
        """The lease was renewed by a request made at `now`."""
        _TIME.pack_into(self._map, _BEAT, now)

    def declare_lost(self) -> None:
        """The database has given this worker up: whatever it holds is no longer its own."""
        self._map[_LOST] = 1

    def stand_still(self, seconds: float) -> None:
        """Everything here stood still for so long: the machine was suspended, or had no time."""
        _TIME.pack_into(self._map, _STILL, self.stood_still + seconds)

    # --- both -------------------------------------------------------------------------------------

    @property
    def last_beat(self) -> float:
        return float(_TIME.unpack_from(self._map, _BEAT)[0])

    @property
    def last_tick(self) -> float:
        return float(_TIME.unpack_from(self._map, _TICK)[0])

    @property
    def stood_still(self) -> float:
        """For how long in all everything stood still: no attempt worked in that time."""
        return float(_TIME.unpack_from(self._map, _STILL)[0])

    @property
    def lost(self) -> bool:
        return self._map[_LOST] == 1

    @property
    def leaving(self) -> bool:
        return self._map[_LEAVING] == 1

    @property
    def stopped(self) -> bool:
        return self._map[_STOPPED] == 1

    def begun(self) -> Iterator[Begun]:
        """The attempts whose bodies have begun, and whose outcomes are not written."""
        for started, deadline, job, attempt, taken in self._slots():
            if taken:
                yield Begun(job.decode(), attempt, started, deadline)

    def overdue(self, now: float) -> bool:
        """Whether some attempt is past its deadline."""
        return any(slot[4] and slot[1] < now for slot in self._slots())

    def _slots(self) -> Iterator[tuple[Any, ...]]:
        return _SLOT.iter_unpack(self._map[_HEAD.size :])


def _nameless_file() -> int:
    """A file that only its open descriptors lead to; in memory where the system can."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("onward-board")
    fd, path = tempfile.mkstemp(prefix="onward-board-")
    os.unlink(path)
    return fd
