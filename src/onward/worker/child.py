"""A worker process under a supervisor. Started as `python -m onward.worker.child`, with its orders
in the environment.

It loads the app, says hello with all that the supervisor needs to know (which imports no user
code), waits for "go", and runs. When the supervisor is gone (the link ends), it beats for itself
and drains.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from typing import Any

import msgspec
from msgspec import Struct

from onward.app import Onward
from onward.config import Settings
from onward.errors import InvalidOption, OnwardError
from onward.events import Happened, emit
from onward.ids import new_id
from onward.policy import Backoff
from onward.store.store import Registration
from onward.version import version
from onward.worker.board import Board, slots_for
from onward.worker.isolation import Isolation
from onward.worker.keeper import hold_lock
from onward.worker.loading import app_options, load_app
from onward.worker.steward import Steward
from onward.worker.worker import Plan, Worker, doubt_queues, doubt_tasks, queues_of

TICK = 0.25

EXIT = {"stopped": 0, "empty": 0, "full": 75, "lost": 76}
"""Exit statuses by why a worker ended; the last two ask for a successor."""

BAD_APP = 78

SWITCH_SECONDS = 0.0005
"""How long a thread holds the interpreter while another waits for it. SQLite's writer needs it back
after each statement: with Python's own 5 ms, a transaction of six statements lost up to 30 ms
beside a busy loop, and a drain a fifth of its speed.
"""

STOP, NOW = b"s", b"n"
"""What a supervisor says over the link: stop in order, stop at once."""


class Orders(Struct, frozen=True, kw_only=True):
    """What a supervisor wants of a worker process."""

    target: str
    concurrency: int
    board_fd: int
    link_fd: int
    queues: list[tuple[str, int | None]] | None = None
    grace: float | None = None
    name: str | None = None
    database: str | None = None
    schema: str | None = None
    until_empty: bool = False
    log_level: str = "INFO"

    @property
    def slots(self) -> int:
        """Places on the board."""
        return slots_for(self.concurrency)


class Hello(Struct, frozen=True, kw_only=True):
    """What a worker process tells its supervisor."""

    registration: Registration
    options: str
    settings: Settings
    backoffs: dict[str, Backoff]


def main() -> None:
    orders = msgspec.json.decode(os.environ.pop("ONWARD_ORDERS"), type=Orders)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_SECONDS)
    link = socket.socket(fileno=orders.link_fd)
    try:
        app = _load(orders)
        hello, lock = _introduce(app, orders)
    except OnwardError as error:
        print(f"onward: {error}", file=sys.stderr)
        sys.exit(BAD_APP)
    link.sendall(msgspec.json.encode(hello) + b"\n")
    if link.recv(3) != b"go\n":
        sys.exit(0)
    board = Board(orders.slots, orders.board_fd)
    threading.Thread(target=_tick, args=(board,), name="onward-tick", daemon=True).start()
    _run(_to_the_end(_Child(app, orders, hello, board, link, lock)))


def _load(orders: Orders) -> Onward:
    app = load_app(orders.target)
    _lead(app, orders)
    if not logging.getLogger().handlers:
        logging.basicConfig(
            level=orders.log_level, format="%(asctime)s %(levelname)-7s %(message)s"
        )
    return app


def _lead(app: Onward, orders: Orders) -> None:
    """Point the app at the database and the schema that the operator has named."""
    if orders.database is None and orders.schema is None:
        return
    schema = app.options["schema"] if orders.schema is None else orders.schema
    app.use(orders.database or app.url, **app.options | {"schema": schema})
    if orders.schema is not None and not app.database.schema:
        raise InvalidOption(
            f"--schema {orders.schema} cannot be used with {app.database.shown_url}",
            why="only PostgreSQL has schemas",
            fix="leave --schema out, or name a PostgreSQL database with --database",
        )


def _introduce(app: Onward, orders: Orders) -> tuple[Hello, int | None]:
    """Who this worker is. Its lock is taken first, so that whoever sees the worker can see that it
    lives.
    """
    id = new_id()
    folder = app.database.lock_folder()
    lock_path = None if folder is None else str(folder / f".onward-{id}.lock")
    lock = None if lock_path is None else hold_lock(lock_path)
    registration = Registration(
        id=id,
        name=orders.name or f"{socket.gethostname()}:{os.getpid()}",
        host=socket.gethostname(),
        pid=os.getpid(),
        version=version(),
        queues=tuple(queues_of(app, orders.queues)),
        tasks=tuple(sorted(app.tasks)),
        concurrency=orders.concurrency,
        lease=app.settings.lease,
        lock_path=lock_path,
    )
    hello = Hello(
        registration=registration,
        options=app_options(app),
        settings=app.settings,
        backoffs={name: task.backoff for name, task in app.tasks.items()},
    )
    return hello, lock


def _tick(board: Board) -> None:
    """Show that the process is not frozen: a thread of its own, which C code that holds the
    interpreter stops too.
    """
    while True:
        board.tick(time.monotonic())
        time.sleep(TICK)


def _run(work: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


async def _to_the_end(child: _Child) -> None:
    """Run, and end the process there and then. Bodies in threads that never end must not keep it,
    not even while the loop is closed, which waits for them: they have been given back.
    """
    try:
        status = EXIT[await child.run()]
    except BaseException:
        traceback.print_exc()
        status = 1
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


class _Child:
    """The worker of this process, its signals and its link to the supervisor."""

    def __init__(
        self,
        app: Onward,
        orders: Orders,
        hello: Hello,
        board: Board,
        link: socket.socket,
        lock: int | None,
    ) -> None:
        self._app = app
        self._orders = orders
        self._id = hello.registration.id
        self._isolation = Isolation(orders.target, hello.options)
        self._board = board
        self._link = link
        self._lock = lock  # Held until the process ends.
        self._steward: Steward | None = None

    async def run(self) -> str:
        queues = queues_of(self._app, self._orders.queues)
        doubt_tasks(self._app)
        doubt_queues(self._app, queues)
        plan = Plan(
            id=self._id,
            queues=queues,
            concurrency=self._orders.concurrency,
            until_empty=self._orders.until_empty,
        )
        worker = Worker(self._app, plan, self._board, self._isolation)
        loop = asyncio.get_running_loop()
        # A service manager may signal the whole group and the supervisor as well: no second word.
        loop.add_signal_handler(signal.SIGTERM, worker.stop_once, self._orders.grace)
        self._link.setblocking(False)
        loop.add_reader(self._link.fileno(), self._heard, loop, worker)
        try:
            return await worker.run()
        finally:
            if self._steward is not None:
                await asyncio.to_thread(self._steward.stop)
            with contextlib.suppress(Exception):
                await self._app.aclose()

    def _heard(self, loop: asyncio.AbstractEventLoop, worker: Worker) -> None:
        """The supervisor says to stop, or to stop at once; or the link has ended, as it is gone:
        drain, and beat for ourselves meanwhile.
        """
        try:
            data: Any = self._link.recv(64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if NOW in data:
            worker.stop_now()
        elif STOP in data:
            worker.stop_once(self._orders.grace)
        if data:
            return
        loop.remove_reader(self._link.fileno())
        emit(_orphaned(self._id))
        self._steward = Steward(self._app.database, self._app.settings, self._id, self._board)
        self._steward.start()
        worker.stop_once(self._orders.grace)


def _orphaned(worker: str) -> Happened:
    hint = "it beats for itself and stops in order; nobody starts a successor"
    return Happened(
        name="worker.orphaned",
        level=logging.WARNING,
        worker=worker,
        fields={"reason": "the supervisor is gone", "hint": hint},
    )


if __name__ == "__main__":
    main()
