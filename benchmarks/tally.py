"""Counts what ran, across processes, at the price of a few bytes written to shared memory.

Each process that runs jobs keeps one file of three numbers in the folder `BENCH_TALLY`: when its
first job began, when its last one did, and how many there were. All systems are counted so.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from pathlib import Path

VARIABLE = "BENCH_TALLY"
SLOT = struct.Struct("<ddq")


class Tally:
    """What this process ran. Safe in threads."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._first = 0.0
        self._count = 0
        self._lock = threading.Lock()

    def hit(self) -> None:
        """One more job has run."""
        now = time.time()
        with self._lock:
            if self._map is None:
                self._map = self._open()
                self._first = now
            self._count += 1
            SLOT.pack_into(self._map, 0, self._first, now, self._count)

    def _open(self) -> mmap.mmap:
        path = Path(os.environ[VARIABLE]) / str(os.getpid())
        path.write_bytes(bytes(SLOT.size))
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), SLOT.size)


tally = Tally()


def counted(folder: Path) -> tuple[int, float]:
    """How many jobs ran, and when the first began."""
    slots = [SLOT.unpack(data) for path in folder.iterdir() if (data := path.read_bytes())]
    begun = [first for first, _, count in slots if count]
    return sum(count for _, _, count in slots), min(begun, default=0.0)
