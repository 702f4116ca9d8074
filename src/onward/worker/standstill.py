"""Standstill: notices that this whole process stood still. The machine was suspended, or had no
time.

Whoever sleeps for `WATCH` and comes much later did not sleep. But a thread beside user code is also
late when some code holds the interpreter, and that is the time of a body that works. Who waits for
the interpreter wakes up at every switch interval, and the system counts how often.
"""

from __future__ import annotations

import resource
import sys
import time

WATCH = 0.2
"""How often to look, in seconds."""

STOOD_STILL = 1.0
"""A look that comes later than this, in seconds, was not only slow."""

LATE_WAKING = 4.0
"""How many switch intervals pass at most between two times that a waiting thread wakes up: more
than one on a busy machine.
"""

_OURS: int = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
"""Where a thread's count is not to be had, that of all: too little is found then, never too
much.
"""


class Standstill:
    """The watch of one thread, which looks every `WATCH` seconds."""

    def __init__(self) -> None:
        self._looked, self._wakings = time.monotonic(), _wakings()

    def look(self, now: float) -> float:
        """For how many seconds all stood still since the last look; 0: it did not."""
        late, woken = now - self._looked - WATCH, _wakings() - self._wakings
        self._looked, self._wakings = now, self._wakings + woken
        still = late - woken * LATE_WAKING * sys.getswitchinterval()
        return still if still > STOOD_STILL else 0.0


def _wakings() -> int:
    """How often this thread has waited for anything, in all."""
    return resource.getrusage(_OURS).ru_nvcsw
