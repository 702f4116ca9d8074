"""One worker process as its supervisor holds it: started by exec, never forked; linked by a socket
and a board.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time

import msgspec
from msgspec.structs import replace

from onward.policy import Backoff
from onward.worker.board import Begun, Board
from onward.worker.child import NOW, STOP, Hello, Orders
from onward.worker.isolation import exit_text

HELLO_SECONDS = 120.0


class WorkerProcess:
    """A child process from its start to its end."""

    def __init__(
        self, process: asyncio.subprocess.Process, link: socket.socket, board: Board
    ) -> None:
        self._process = process
        self._link = link
        self.board = board
        self.started = time.monotonic()
        self.worker: str | None = None
        self.lock_path: str | None = None
        self.backoffs: dict[str, Backoff] = {}
        self.killed_for: str | None = None
        self.killed_in_order = False
        self.lost_since: float | None = None
        self.terminations = 0

    @classmethod
    async def start(cls, orders: Orders) -> WorkerProcess:
        """Start a process; it has said nothing yet."""
        ours, theirs = socket.socketpair()
        board = Board(orders.slots)
        full = replace(orders, board_fd=board.fd, link_fd=theirs.fileno())
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # No file of the app's folder can stand for a standard module in our code.
                "-m",
                "onward.worker.child",
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(board.fd, theirs.fileno()),
                env=os.environ | {"ONWARD_ORDERS": msgspec.json.encode(full).decode()},
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            board.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return cls(process, ours, board)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def hello(self) -> Hello | None:
        """What the process says of itself; None: it ended, or took too long to load the app."""
        data = b""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                while not data.endswith(b"\n"):
                    piece = await loop.sock_recv(self._link, 65_536)
                    if not piece:
                        return None
                    data += piece
        except (OSError, TimeoutError):
            self.kill("it did not load the app in time")
            return None
        return msgspec.json.decode(data, type=Hello)

    def go(self, hello: Hello) -> None:
        """Let it run: it is registered, and its heart beats."""
        self.worker = hello.registration.id
        self.lock_path = hello.registration.lock_path
        self.backoffs = hello.backoffs
        self.started = time.monotonic()
        with contextlib.suppress(OSError):
            self._link.send(b"go\n")

    async def exited(self) -> int:
        """Wait for its end; returns the exit status, negative for a signal."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask it to stop; a second time: at once. One that does not run yet simply ends."""
        self.terminations += 1
        with contextlib.suppress(OSError):
            if self.worker is None:
                self._process.terminate()
            else:
                self._link.send(STOP if self.terminations == 1 else NOW)

    def kill(self, why: str, *, in_order: bool = False) -> None:
        """End it. `in_order`: as part of a stop, so that its jobs are given back free of charge."""
        if self.killed_for is None:
            self.killed_for, self.killed_in_order = why, in_order
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def epitaph(self, status: int) -> str:
        """How it ended, for logs and history."""
        text = f"worker process {self.pid} ended: {exit_text(status)}"
        return f"{text} ({self.killed_for})" if self.killed_for else text

    def last_sight(self) -> list[Begun]:
        """The attempts that were under way when it ended."""
        return list(self.board.begun())

    def close(self) -> None:
        self._link.close()
        self.board.close()
