"""The other side of `isolation.py`: a process that runs one attempt at a time and ends with its
parent.

Started as `python -m onward.worker.isolated FD PARENT`, with the app's target in the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

import msgspec

from onward.app import Onward
from onward.errors import UnknownTask
from onward.job import Job
from onward.policy import Crashed, Outcome, Rejected
from onward.running import Current
from onward.worker.body import error_text, run_async_body, run_body
from onward.worker.isolation import LENGTH, Cancel, Last, Order, Ready, Run, frame
from onward.worker.loading import import_modules, load_app, point_at

LEFT_SECONDS = 0.1
"""How long what a body has left on its loop may take to end, once it is cancelled."""


def main() -> None:
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _leave_stops_to_the_parent()
    link = socket.socket(fileno=fd)
    sys.path[:0] = [
        place for place in os.environ["ONWARD_PATH"].split(os.pathsep) if place not in sys.path
    ]
    try:
        app = load_app(os.environ["ONWARD_TARGET"])
        import_modules(os.environ["ONWARD_MODULES"].split())
        point_at(app, os.environ["ONWARD_OPTIONS"])
    except BaseException as error:
        _refuse(link, error)
        sys.exit(1)  # Not with a traceback: what was said is clean, and holds no password.
    link.sendall(frame(Ready()))
    _Server(link, app).serve()


def die_with(parent: int) -> None:
    """End when the parent ends, even while code holds the interpreter: the kernel sees to it where
    it can.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _leave_stops_to_the_parent() -> None:
    """A stop that is sent to every process of a service (systemd does that by default) is for the
    worker to obey: it lets the attempt end within its grace. What the body starts or forks is to
    be stopped as usual, so the signal has a handler here, which no other program inherits.
    """
    signal.signal(signal.SIGTERM, _nothing)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _nothing(_: int, __: object) -> None:
    """What a process for one attempt does about SIGTERM."""


def _refuse(link: socket.socket, error: BaseException) -> None:
    """The app cannot be loaded here: say so as the attempt's outcome. Where the job was
    claimed it could, so the next try may do better.
    """
    link.sendall(frame(Crashed(error_text(error))))


class _Server:
    """Runs what it is sent, on the main thread; another thread listens for requests to stop."""

    def __init__(self, link: socket.socket, app: Onward) -> None:
        self._link = link
        self._app = app
        self._current: Current | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._body: asyncio.Task[Outcome] | None = None
        self._orders: list[tuple[Job, Current]] = []
        self._ready = threading.Semaphore(0)

    def serve(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            self._ready.acquire()
            self._link.sendall(frame(self._run(*self._orders.pop(0))))

    def _run(self, job: Job, current: Current) -> Outcome:
        try:
            task = self._app.find_task(job.task)
        except UnknownTask as error:
            return Rejected(error_text(error))
        if not task.is_async:
            return run_body(task, job, current)
        return asyncio.run(self._run_async(task, job, current))

    async def _run_async(self, task: Any, job: Job, current: Current) -> Outcome:
        self._loop = asyncio.get_running_loop()
        threads = _CountedThreads()
        self._loop.set_default_executor(threads)
        self._body = asyncio.create_task(run_async_body(task, job, current))
        try:
            outcome = await self._body
            if await _goes_on() or threads.at_work:
                self._end_with(outcome)
            return outcome
        finally:
            with contextlib.suppress(Exception):
                await self._app.database.close_loop()

    def _end_with(self, outcome: Outcome) -> NoReturn:
        """The end of the loop would wait for what the body has left, and the attempt with it."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self._link.sendall(frame(Last(outcome)))
        os._exit(0)

    def _listen(self) -> None:
        """Take orders. One that cannot be read ends the process: else its sender would wait for
        ever, and the attempt be running for ever.
        """
        try:
            while True:
                self._obey(self._receive())
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _obey(self, order: Order) -> None:
        match order:
            case Run(job=job):
                # Known before the body begins: a request to stop may come before that.
                self._current = Current(job, self._app)
                self._orders.append((job, self._current))
                self._ready.release()
            case Cancel(harder=harder):
                self._cancel(harder)

    def _cancel(self, harder: bool) -> None:
        if self._current is not None:
            self._current.cancel_token.request()
        if harder and self._body is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._body.cancel)

    def _receive(self) -> Order:
        size = int.from_bytes(self._exactly(LENGTH), "big")
        return msgspec.msgpack.decode(self._exactly(size), type=Order)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._link.recv(size - len(data))
            if not piece:
                os._exit(0)  # the parent is gone
            data += piece
        return data


async def _goes_on() -> bool:
    """Whether something that the body has begun on the loop goes on, although it was cancelled."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for each in left:
        each.cancel()
    return bool(left and (await asyncio.wait(left, timeout=LEFT_SECONDS))[1])


class _CountedThreads(ThreadPoolExecutor):
    """The loop's own executor, which says whether somebody is at work in it."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="asyncio")
        self._given: set[Future[Any]] = set()

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = super().submit(*args, **kwargs)
        self._given.add(future)
        future.add_done_callback(self._given.discard)
        return future

    @property
    def at_work(self) -> bool:
        return bool(self._given)


if __name__ == "__main__":
    main()
