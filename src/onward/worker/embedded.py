"""A worker inside another program: in a test, in a web process, in a script.

Its heart and its keeper run on a thread of their own, so a blocked loop does not stop the beat.
What can stop it is C code that holds the interpreter for longer than a lease: then other workers
take the jobs over, and this one learns of it when it comes back. `onward worker` beats from another
process and has no such limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, cast

from onward.app import Onward
from onward.config import MOST_CONCURRENCY, check_range, seconds
from onward.errors import InvalidOption
from onward.ids import new_id
from onward.store.store import Registration
from onward.text import safe_repr
from onward.version import version
from onward.worker.board import Board, slots_for
from onward.worker.heart import register
from onward.worker.isolation import Isolation
from onward.worker.keeper import hold_lock, remove_lock
from onward.worker.loading import app_options, modules_of, target_of
from onward.worker.steward import Steward
from onward.worker.threads import Daemons
from onward.worker.worker import LAST_WORDS, Plan, Worker, doubt_queues, doubt_tasks, queues_of


class EmbeddedWorker:
    """A worker in this process. `run()` blocks; as a context manager it works in a thread until the
    block ends.

    Args:
        app: whose tasks.
        concurrency: how many jobs at once.
        queues: which queues; by default those of the app's tasks.
        until_empty: end when no due job is left.

    Raises:
        InvalidOption: a concurrency that cannot work, no queue, or a name that no queue can have.
    """

    def __init__(
        self,
        app: Onward,
        *,
        concurrency: int = 10,
        queues: Sequence[str] | None = None,
        until_empty: bool = False,
    ) -> None:
        check_range("concurrency", concurrency, 1, MOST_CONCURRENCY)
        self._app = app
        self._queues = queues_of(app, None if queues is None else _unlimited(queues))
        self._concurrency = concurrency
        self._until_empty = until_empty
        self._worker: Worker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._stopped = False
        self._told = False
        self.id = ""

    # --- as a context manager ---------------------------------------------------------------------

    def __enter__(self) -> EmbeddedWorker:
        self._thread = threading.Thread(
            target=self._run_in_thread, name="onward-worker", daemon=True
        )
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._told or kind is not None:
            self.stop()
        self.join()

    def stop(self, grace: timedelta | float | None = None) -> None:
        """Stop in order; a second call stops at once. From any thread.

        The end of the block calls it where nobody has, and waits; an exception that leaves the
        block is a call too.

        Args:
            grace: how long running jobs may go on (timedelta, or seconds); by default as the
                settings say.

        Raises:
            InvalidOption: no duration, or a negative one.
        """
        given = None if grace is None else _grace(grace)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop, given)
                self._told = True

    def _stop(self, grace: float | None) -> None:
        """On the loop. A worker that is just about to start again as another does not."""
        self._stopped = True
        if self._worker is not None:
            self._worker.stop(grace)

    def join(self, timeout: timedelta | float | None = None) -> None:
        """Wait until the thread has ended.

        Args:
            timeout: how long at most (timedelta, or seconds); None: as long as it takes.

        Raises:
            InvalidOption: no duration.
        """
        limit = None if timeout is None else seconds(timeout, "timeout")
        if self._thread is not None:
            self._thread.join(limit)
        if self._error is not None:
            raise self._error

    # --- run --------------------------------------------------------------------------------------

    def run(self) -> str:
        """Run in this thread until stopped by a signal, or until empty; returns why it ended.

        What nothing can stop has been given back and is left behind: a thread goes on until it, or
        the program, ends, and is waited for neither here nor there.
        """
        loop = asyncio.new_event_loop()
        try:
            # The runner is not closed: it would wait for the last task, however long that goes on.
            return asyncio.Runner(loop_factory=lambda: loop).run(self._run_on_own_loop())
        finally:
            loop.close()

    async def _run_on_own_loop(self) -> str:
        asyncio.get_running_loop().set_default_executor(Daemons())
        try:
            return await self.arun()
        finally:
            await _end_the_rest()
            await self._app.database.close_loop()

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    async def arun(self) -> str:
        """The same on the running loop. A worker that was lost starts again as another.

        The loop is the caller's, and so is what bodies have left on it: `asyncio.run`, for one,
        waits for the threads of `asyncio.to_thread`.
        """
        self._loop = asyncio.get_running_loop()
        doubt_tasks(self._app)
        doubt_queues(self._app, self._queues)
        handled = self._handle_signals()
        try:
            while True:
                why = await self._live()
                if self._stopped or why not in {"lost", "full"}:
                    return why
        finally:
            for number, before in handled.items():
                self._loop.remove_signal_handler(number)
                # None: what was there was not set from Python.
                signal.signal(number, signal.SIG_DFL if before is None else before)

    async def _live(self) -> str:
        """One worker's life, from its registration to its end."""
        app = self._app
        self.id = new_id()
        folder = app.database.lock_folder()
        lock_path = None if folder is None else str(folder / f".onward-{self.id}.lock")
        lock = None if lock_path is None else hold_lock(lock_path)
        board = Board(slots_for(self._concurrency))
        steward = Steward(app.database, app.settings, self.id, board)
        try:
            board.beat(time.monotonic())
            await register(app.database, self._registration(lock_path))
            isolation = Isolation(target_of(app), app_options(app), modules_of(app))
            plan = Plan(
                id=self.id,
                queues=self._queues,
                concurrency=self._concurrency,
                until_empty=self._until_empty,
            )
            self._worker = Worker(app, plan, board, isolation)
            if self._stopped:
                self._worker.stop()
            steward.start()
            self._started.set()
            return await self._worker.run()
        finally:
            await _in_own_thread(steward.stop)
            board.close()
            if lock is not None:
                remove_lock(lock_path)
                os.close(lock)

    def _registration(self, lock_path: str | None) -> Registration:
        return Registration(
            id=self.id,
            name=f"{socket.gethostname()}:{os.getpid()}",
            host=socket.gethostname(),
            pid=os.getpid(),
            version=version(),
            queues=tuple(self._queues),
            tasks=tuple(sorted(self._app.tasks)),
            concurrency=self._concurrency,
            lease=self._app.settings.lease,
            lock_path=lock_path,
        )

    def _handle_signals(self) -> dict[signal.Signals, Any]:
        """SIGTERM and SIGINT stop in order, a second one at once. Only where signals can be
        handled: the main thread. Returns what was there before.
        """
        if threading.current_thread() is not threading.main_thread():
            return {}
        before: dict[signal.Signals, Any] = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.getsignal(number)
            asyncio.get_running_loop().add_signal_handler(number, self.stop)
        return before


async def _end_the_rest() -> None:
    """Cancel what bodies have left on the loop, and give it a moment to clean up."""
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    rest = {task for task in asyncio.all_tasks(loop) if task is not me}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=LAST_WORDS)
    await asyncio.wait({loop.create_task(loop.shutdown_asyncgens())}, timeout=LAST_WORDS)


async def _in_own_thread(function: Callable[[], None]) -> None:
    """Bodies may have taken all threads of the loop's executor."""
    own = Daemons(1)
    try:
        await asyncio.get_running_loop().run_in_executor(own, function)
    finally:
        own.shutdown()


def _grace(value: timedelta | float) -> float:
    """How long running jobs may go on, in seconds."""
    grace = seconds(value, "grace")
    if grace < 0:
        raise InvalidOption(
            f"grace={safe_repr(value)} cannot work",
            why="jobs cannot be given less time than none",
            fix="grace=0 interrupts them at once",
        )
    return grace


def _unlimited(queues: Any) -> list[tuple[str, None]]:
    """Names of queues as a worker takes them: with no limit for each."""
    if isinstance(queues, str) or not isinstance(queues, Iterable):
        raise InvalidOption(
            f"queues={safe_repr(queues)} is no list of names",
            why="each letter of a text would be taken for a queue",
            fix=f"queues=[{safe_repr(queues)}]",
        )
    return [(queue, None) for queue in cast("Iterable[str]", queues)]
