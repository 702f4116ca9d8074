"""Threads for plain functions. They are daemons: a body that never ends must not keep the process
from ending.

A thread cannot be stopped from outside. So the pool counts what it has, and opens another thread
where one is stuck.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

Work = tuple[Callable[[], Any], Callable[[Any], None]]


class Threads:
    """Runs functions in threads and calls back on the loop, several answers a wake-up.

    Args:
        loop: where the answers are delivered.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._todo: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._done: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._woken = False
        self._lock = threading.Lock()
        self._busy = 0
        self.count = 0

    def run(self, function: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Run `function` in a thread, and `then` with its answer on the loop. It must not raise.

        Raises:
            RuntimeError: the system has no thread left.
        """
        if self._busy >= self.count:
            threading.Thread(target=self._serve, name="onward-job", daemon=True).start()
            self.count += 1
        self._busy += 1
        self._todo.put((function, then))

    def close(self) -> None:
        """Let idle threads end; those at work end with their work, or with the process."""
        for _ in range(self.count):
            self._todo.put(None)

    def _serve(self) -> None:
        while (work := self._todo.get()) is not None:
            function, then = work
            self._done.append((then, function()))
            del work, function, then
            with self._lock:
                wake, self._woken = not self._woken, True
            if wake:
                self._wake()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            return  # the loop is closed: the worker has gone on without this answer

    def _deliver(self) -> None:
        with self._lock:
            self._woken = False
        while self._done:
            then, answer = self._done.popleft()
            self._busy -= 1
            then(answer)
