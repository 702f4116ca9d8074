"""Threads for plain functions. They are daemons: a body that never ends must not keep the process
from ending.

A thread cannot be stopped from outside. So the pool of bodies counts what it has, and opens another
thread where one is stuck; and nobody waits for the threads of a loop's executor.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

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


class Daemons(ThreadPoolExecutor):
    """An executor for a loop, `asyncio.to_thread` among others, that keeps nobody from ending. The
    standard one is waited for when its loop is closed, and again when the interpreter ends.

    Args:
        most: how many threads at most; None: as many as a loop has by itself.
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__(most)  # A loop asks for its class, and nobody for its threads.
        self._most = self._max_workers
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._guard = threading.Lock()
        self._count = 0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in a thread, in its turn.

        Raises:
            RuntimeError: the system has no thread left.
        """
        future: Future[T] = Future()
        self._calls.put(partial(_answer, future, partial(fn, *args, **kwargs)))
        with self._guard:
            if self._count < self._most and not self._idle.acquire(blocking=False):
                threading.Thread(target=self._serve, name="onward-thread", daemon=True).start()
                self._count += 1
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let idle threads end. Whatever is asked: those at work are not waited for, they end with
        their work or with the process.
        """
        for _ in range(self._count):
            self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call
            self._idle.release()


def _answer(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        answer = function()
    except BaseException as error:
        future.set_exception(error)
        del future  # Or the error, its frames and the future would hold each other.
    else:
        future.set_result(answer)
