"""An event loop whose time is a number and whose chances come from a seed.

No thread, no file and no clock of the machine: when nothing is ready, time jumps to the next timer.
What is ready runs in a seeded random order, as if many processes shared the machine. Each callback
belongs to a `Process` (its context says to which), so a process can be killed or stopped as a whole
at any await: the callbacks of a dead one never run, those of a stopped one run when it goes on.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import sys
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any
from unittest.mock import patch

from onward import ids

STEP = 0.000_02
"""Seconds that each callback takes, so that no two things happen at the same moment."""

EPOCH = 1_800_000_000.0
"""What the wall clock shows when a run begins."""

_process: ContextVar[Process] = ContextVar("process")


class Process:
    """What lives, stands still and dies as one."""

    def __init__(self, name: str, number: int = 0, *, mortal: bool = False) -> None:
        self.name = name
        self.number = number
        self.mortal = mortal
        self.alive = True
        self.died_at: float | None = None
        self.stands_until = 0.0
        self.last_write = 0.0
        """When the last of its writes reaches the database, where they go there in order."""
        self.context = Context()
        """For callbacks that need to know nothing but whose they are; all may share it."""
        self.context.run(_process.set, self)

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def die(self, now: float) -> None:
        """At once, and nothing is cleaned up."""
        if self.alive:
            self.alive, self.died_at = False, now


NOBODY = Process("nobody")


def here() -> Process:
    """The process that the running code belongs to."""
    return _process.get(NOBODY)


def inside(process: Process) -> Context:
    """A context of this process."""
    context = copy_context()
    context.run(_process.set, process)
    return context


class Call:
    """A callback that waits for its turn, or for its time."""

    __slots__ = ("_when", "args", "callback", "context", "gone", "process")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context, when: float
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self._when = when
        self.process = context.get(_process, NOBODY)
        self.gone = False

    def cancel(self) -> None:
        self.gone = True

    def cancelled(self) -> bool:
        return self.gone

    def when(self) -> float:
        return self._when


class SimulatedLoop(asyncio.AbstractEventLoop):
    """The loop.

    Args:
        chance: picks who is next.
        in_order: callbacks of one process run in the order in which they became ready, as asyncio
            promises; else in any.
    """

    def __init__(self, chance: Random, *, in_order: bool = True) -> None:
        self._chance = chance
        self._in_order = in_order
        self._now = 1_000.0
        self._ready: list[Call] = []
        self._timers: list[tuple[float, int, Call]] = []
        self._count = 0
        self._dropped: list[Call] = []
        self._ending = False
        self.turns = 0
        self.errors: list[str] = []

    # --- what tasks ask of a loop -----------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        if context is None:
            context = copy_context()
        call = Call(callback, args, context, self._now)
        self._ready.append(call)
        return call

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Any:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Any:
        if context is None:
            context = copy_context()
        call = Call(callback, args, context, when)
        self._wait(call, when)
        return call

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Threads do not exist here: the answer is there at once."""
        future = self.create_future()
        future.set_result(func(*args))
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.errors.append(f"{context.get('message')}: {type(error).__name__}: {error}")

    # --- turns ------------------------------------------------------------------------------------

    def run(self, main: Coroutine[Any, Any, Any], process: Process) -> Any:
        """Run until this coroutine of `process` has ended; what else there is stays as it is."""
        with self._running():
            task: asyncio.Task[Any] = self.create_task(main, context=inside(process))
            done, turn = task.done, self._turn
            while not done():
                turn()
        return task.result()

    def end(self) -> None:
        """Cancel whatever is left, that of the dead too, so that no coroutine stays half done."""
        with self._running():
            self._ending = True
            self._ready += self._dropped
            left: list[Any] = []
            for _ in range(100):
                left = [task for task in asyncio.all_tasks(self) if not task.done()]
                if not left:
                    return
                for task in left:
                    task.cancel()
                # Those of a stopped process wait for it to go on.
                self._ready += [call for _, _, call in self._timers]
                self._timers.clear()
                for _ in range(max(20, len(self._ready))):
                    if self._ready:
                        # The history is over: what timers of the dead meet is of no interest.
                        with suppress(Exception):
                            self._turn()
        self.errors.append(f"{len(left)} tasks could not be cancelled: {left[0]}")

    @contextmanager
    def _running(self) -> Generator[None]:
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    def _turn(self) -> None:
        """Run one callback."""
        timers, ready, now = self._timers, self._ready, self._now
        while timers and (not ready or timers[0][0] <= now):
            when, _, call = heapq.heappop(timers)
            if not call.gone:
                if when > now:
                    self._now = now = when
                ready.append(call)
        if not ready:
            raise RuntimeError("nothing is left that could ever happen")
        call = ready.pop(self._next() if len(ready) > 1 else 0)
        if call.gone:
            return
        process = call.process
        if not self._ending:
            if not process.alive:
                self._dropped.append(call)  # Kept: a task that nobody knows would be closed.
                return
            if process.stands_until > now:
                self._wait(call, process.stands_until)
                return
            self._now = now + STEP
            self.turns += 1
        call.context.run(call.callback, *call.args)

    def _next(self) -> int:
        """Who of those that are ready is next."""
        picked = int(self._chance.random() * len(self._ready))
        if not self._in_order:
            return picked
        process = self._ready[picked].process
        for place, call in enumerate(self._ready):
            if call.process is process:
                return place
        return picked

    def _wait(self, call: Call, when: float) -> None:
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, call))


class Clock:
    """Stands in for the module `time`, in every module that asks it."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.monotonic = loop.time

    def time(self) -> float:
        return EPOCH + self.monotonic()

    def time_ns(self) -> int:
        return int(self.time() * 1_000_000_000)

    def sleep(self, seconds: float) -> None:
        raise AssertionError(f"somebody blocks the loop for {seconds} s")


class System:
    """Stands in for the module `os` where ids are made."""

    def __init__(self, chance: Random) -> None:
        self.urandom = chance.randbytes


@contextmanager
def in_place_of_the_machine(loop: SimulatedLoop, chance: Random) -> Generator[None]:
    """Every clock and every chance of Onward comes from this loop and this seed."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if not name.startswith("onward."):
                continue
            if getattr(module, "time", None) is time:
                stack.enter_context(patch.object(module, "time", Clock(loop)))
            if getattr(module, "random", None) is random:
                stack.enter_context(patch.object(module, "random", chance))
        stack.enter_context(patch.object(ids, "os", System(chance)))
        stack.enter_context(patch.object(ids, "_last", 0))
        yield
