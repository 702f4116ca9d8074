"""Attempts in processes of their own: killed when they must end, and gone alone when they crash.

The parent's side. A process runs one attempt at a time and is used again after an attempt that
ended well; a killed or crashed one is replaced when the next is needed. The other side is
`isolated.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from onward.job import Job
from onward.policy import Crashed, Outcome
from onward.running import CancelToken
from onward.worker.body import plain_error


class Run(Struct, frozen=True, tag=True):
    """Run this attempt."""

    job: Job


class Cancel(Struct, frozen=True, tag=True):
    """The attempt under way has been asked to stop; `harder`: raise an exception into it."""

    harder: bool = False


Order = Run | Cancel

LENGTH = 4
"""Bytes before each message that say how long it is."""


def frame(message: Any) -> bytes:
    """A message with its length before it."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH, "big") + body


class Isolated:
    """One attempt under way in a process of its own."""

    def __init__(self) -> None:
        self._then: Callable[[Outcome], None] | None = None
        self._outcome: Outcome | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.killed = False

    def then(self, callback: Callable[[Outcome], None]) -> None:
        """Have the outcome handed to `callback`."""
        self._then = callback
        if self._outcome is not None:
            callback(self._outcome)

    def end(self, outcome: Outcome) -> None:
        self._outcome = outcome
        if self._then is not None:
            self._then(outcome)

    def kill(self) -> None:
        """End the process, whatever it does."""
        self.killed = True
        if self.process is not None:
            self.process.kill()


class _Child:
    """A process that waits for attempts."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.process = process
        self.reader = reader
        self.writer = writer

    async def send(self, order: Order) -> None:
        self.writer.write(frame(order))
        await self.writer.drain()

    async def receive(self) -> Outcome:
        size = int.from_bytes(await self.reader.readexactly(LENGTH), "big")
        return msgspec.msgpack.decode(await self.reader.readexactly(size), type=Outcome)

    async def end(self) -> int:
        """End the process and learn how it ended."""
        self.writer.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        return await asyncio.to_thread(self.process.wait)


class Isolation:
    """Starts processes for attempts.

    Args:
        target: where a new process finds the app; None: nowhere, then isolation is not possible.
        options: the database's URL and the app's options, as JSON; a process of its own may enqueue
            too.
        modules: what to import besides, for the tasks that are written elsewhere than the app.
    """

    def __init__(
        self, target: str | None, options: str = "{}", modules: Sequence[str] = ()
    ) -> None:
        self._target = target
        self._environment = {
            "ONWARD_TARGET": target or "",
            "ONWARD_OPTIONS": options,
            "ONWARD_MODULES": " ".join(modules),
            # Where this process found the app: the folder of a script is in no other's path.
            "ONWARD_PATH": os.pathsep.join(place or os.getcwd() for place in sys.path),
        }
        self._free: list[_Child] = []
        self._running: set[asyncio.Task[None]] = set()

    @property
    def possible(self) -> bool:
        return self._target is not None

    def run(self, job: Job, token: CancelToken) -> Isolated:
        """Run an attempt in a process of its own."""
        attempt = Isolated()
        task = asyncio.create_task(self._run(attempt, job, token))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return attempt

    async def close(self) -> None:
        """End all processes."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        while self._free:
            await self._free.pop().end()

    async def _run(self, attempt: Isolated, job: Job, token: CancelToken) -> None:
        child: _Child | None = None
        try:
            child = await self._free_child() or await self._start()
            attempt.process = child.process
            if attempt.killed:
                child.process.kill()
            await child.send(Run(job))
            outcome = await self._outcome(child, token)
        except Exception as error:  # Whatever went wrong, the attempt has an end.
            outcome = Crashed(plain_error("Crashed", await _how_it_ended(child, error)))
        except asyncio.CancelledError:
            if child is not None:
                await child.end()
            raise
        else:
            if isinstance(outcome, Crashed):  # It could not load the app, and ends.
                await child.end()
            else:
                self._free.append(child)
        attempt.end(outcome)

    async def _free_child(self) -> _Child | None:
        """A process that waits for an attempt. One that died or was killed meanwhile is no good."""
        while self._free:
            child = self._free.pop()
            if child.process.poll() is None and not child.writer.is_closing():
                return child
            await child.end()
        return None

    async def _outcome(self, child: _Child, token: CancelToken) -> Outcome:
        """Wait for the outcome, and pass a request to stop on."""
        receiving = asyncio.create_task(child.receive())
        told = 0
        try:
            while True:
                done, _ = await asyncio.wait({receiving}, timeout=0.25)
                if done:
                    return receiving.result()
                if token.requested and told in {0, 8}:
                    await child.send(Cancel(harder=told > 0))
                told += token.requested
        finally:
            receiving.cancel()

    async def _start(self) -> _Child:
        ours, theirs = socket.socketpair()
        try:
            process = self._spawn(theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        return _Child(process, reader, writer)

    def _spawn(self, fd: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            # -P: no file of the app's folder can stand for a module of the standard library here.
            [sys.executable, "-P", "-m", "onward.worker.isolated", str(fd), str(os.getpid())],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            env=os.environ | self._environment,
            start_new_session=True,
        )


async def _how_it_ended(child: _Child | None, error: Exception) -> str:
    """What to write into history about a process that died under its attempt."""
    if child is None:
        return f"no process could be started: {error}"
    return f"the attempt's process died: {exit_text(await child.end())}"


def exit_text(code: int) -> str:
    """An exit status in words: `signal SIGSEGV`, `exit code 3`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
