"""Attempts in processes of their own: killed when they must end, and gone alone when they crash.

The parent's side. A process runs one attempt at a time and is used again after an attempt that
ended well; a killed or crashed one is replaced when the next is needed, and one that nobody needs
for a while ends. The other side is `isolated.py`.

A process takes its time to start and to load the app, and few do so at once. An attempt begins when
its process is ready: only then does its time limit run, and only then can it be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from onward.job import Job
from onward.policy import Crashed, Outcome, Released
from onward.running import CancelToken
from onward.worker.body import plain_error

START_SECONDS = 60.0
"""How long a process may take until it is ready for an attempt."""

MOST_STARTING = max(2, os.cpu_count() or 2)
"""How many processes start at once."""

MOST_RECOVERED = 16
"""How many attempts after a loss run at once, each in a process of its own: a crash under hundreds
of slots must not become as many interpreters. The others wait, with their slots, and have not
begun.
"""

SHORTAGE = 1.0
"""Seconds before an attempt that could not begin is tried again: what lacks may be there then."""

SHORT = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})

IDLE_SECONDS = 30.0
"""How long a process waits for its next attempt before it ends."""


class Ready(Struct, frozen=True, tag=True):
    """The process has loaded the app."""


class Run(Struct, frozen=True, tag=True):
    """Run this attempt."""

    job: Job


class Cancel(Struct, frozen=True, tag=True):
    """The attempt under way has been asked to stop; `harder`: raise an exception into it."""

    harder: bool = False


class Last(Struct, frozen=True, tag=True):
    """How the attempt ended, from a process that runs no other: the body has left something behind
    that goes on in it.
    """

    outcome: Outcome


Order = Run | Cancel

LENGTH = 4
"""Bytes before each message that say how long it is."""


def frame(message: Any) -> bytes:
    """A message with its length before it."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH, "big") + body


Answer = Ready | Last | Outcome


class Isolated:
    """One attempt in a process of its own, or on its way there.

    Args:
        begins: called when its body is about to begin.
    """

    def __init__(self, begins: Callable[[], None]) -> None:
        self.begins = begins
        self.abort: Callable[[], object] = lambda: None
        self.process: subprocess.Popen[bytes] | None = None
        self.killed = False
        self._then: Callable[[Outcome], None] | None = None
        self._outcome: Outcome | None = None

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
        """End the process, whatever it does; an attempt that waits for one does not begin."""
        self.killed = True
        if self.process is not None:
            _kill(self.process)
        else:
            self.abort()


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
        self.idle_since = 0.0

    async def send(self, order: Order) -> None:
        self.writer.write(frame(order))
        await self.writer.drain()

    async def receive(self) -> Answer:
        size = int.from_bytes(await self.reader.readexactly(LENGTH), "big")
        return msgspec.msgpack.decode(await self.reader.readexactly(size), type=Answer)

    async def end(self) -> int:
        """End the process and learn how it ended."""
        self.writer.close()
        _kill(self.process)
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
        self._starting = asyncio.Semaphore(MOST_STARTING)
        self._recovered = asyncio.Semaphore(MOST_RECOVERED)

    @property
    def possible(self) -> bool:
        return self._target is not None

    def run(self, job: Job, token: CancelToken, begins: Callable[[], None]) -> Isolated:
        """Run an attempt in a process of its own; `begins` is called when its body is about to."""
        attempt = Isolated(begins)
        attempt.abort = self._go_on(self._run(attempt, job, token)).cancel
        return attempt

    async def close(self) -> None:
        """End all processes."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        while self._free:
            await self._free.pop().end()

    def _go_on(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    # --- one attempt ------------------------------------------------------------------------------

    async def _run(self, attempt: Isolated, job: Job, token: CancelToken) -> None:
        try:
            async with self._recovered if job.losses else contextlib.nullcontext():
                outcome = await self._in_process(attempt, job, token)
        except asyncio.CancelledError:
            if not attempt.killed:
                raise
            outcome = _crashed("it was stopped before it began")
        attempt.end(outcome)

    async def _in_process(self, attempt: Isolated, job: Job, token: CancelToken) -> Outcome:
        try:
            found = await self._free_child() or await self._start()
        except Exception as error:
            text = f"no process could be started: {error}"
            # Too little memory, or too many processes, is no fault of the job's.
            is_short = isinstance(error, OSError) and error.errno in SHORT
            return Released(text, delay=SHORTAGE) if is_short else _crashed(text)
        if not isinstance(found, _Child):
            return found
        try:
            attempt.process = found.process
            attempt.begins()
            await found.send(Run(job))
            answer = await self._answer(found, token)
            outcome = _outcome_in(answer)
        except Exception:  # Whatever went wrong, the attempt has an end.
            return _crashed(f"the attempt's process died: {exit_text(await found.end())}")
        except asyncio.CancelledError:
            await found.end()
            raise
        if attempt.killed or isinstance(answer, Last):
            await found.end()
        else:
            self._keep(found)
        return outcome

    async def _answer(self, child: _Child, token: CancelToken) -> Answer:
        """Wait for the outcome, and pass a request to stop on."""
        told = 0

        async def pass_on() -> None:
            nonlocal told
            if token.requested and told in {0, 8}:
                await child.send(Cancel(harder=told > 0))
            told += token.requested

        return await _answer(child, pass_on)

    # --- processes --------------------------------------------------------------------------------

    def _keep(self, child: _Child) -> None:
        """It can run another attempt."""
        child.idle_since = time.monotonic()
        self._free.append(child)
        # uvloop's timers may come a millisecond too early.
        asyncio.get_running_loop().call_later(IDLE_SECONDS + 0.01, self._trim)

    def _trim(self) -> None:
        """End what nobody has needed for a while; the one used last is the first to be used."""
        while self._free and time.monotonic() - self._free[0].idle_since >= IDLE_SECONDS:
            self._go_on(_end(self._free.pop(0)))

    async def _free_child(self) -> _Child | None:
        """A process that waits for an attempt. One that died or was killed meanwhile is no good."""
        while self._free:
            child = self._free.pop()
            if child.process.poll() is None and not child.writer.is_closing():
                return child
            await child.end()
        return None

    async def _start(self) -> _Child | Outcome:
        """A new process that is ready, or what it says in its stead: it cannot load the app. Or one
        that has become free while others started.
        """
        async with self._starting:
            if free := await self._free_child():
                return free
            child = await self._spawned()
            try:
                async with asyncio.timeout(START_SECONDS):
                    answer = await _answer(child, _nothing)
            except TimeoutError:
                await child.end()
                raise TimeoutError(f"it was not ready within {START_SECONDS:g} s") from None
            except EOFError:
                raise ChildProcessError(exit_text(await child.end())) from None
            except BaseException:
                await child.end()
                raise
        if isinstance(answer, Ready):
            return child
        await child.end()
        return _outcome_in(answer)

    async def _spawned(self) -> _Child:
        ours, theirs = socket.socketpair()
        try:
            process = self._spawn(theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            process.kill()
            await asyncio.to_thread(process.wait)
            raise
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


async def _answer(child: _Child, meanwhile: Callable[[], Coroutine[Any, Any, None]]) -> Answer:
    """Wait for an answer as long as the process lives. Its end is looked for: the link stays open
    where the body has forked and the fork lives on.

    Raises:
        EOFError: it ended without an answer.
    """
    receiving = asyncio.create_task(child.receive())
    is_over = False
    try:
        while True:
            done, _ = await asyncio.wait({receiving}, timeout=0.25)
            if done:
                return receiving.result()
            if is_over:
                raise EOFError
            is_over = _is_over(child.process)
            await meanwhile()
    finally:
        receiving.cancel()


async def _nothing() -> None:
    """Nothing is to be done while a process starts."""


def _is_over(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended. It stays unreaped, so that nobody else gets its number."""
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return found is not None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started: they are a group."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


async def _end(child: _Child) -> None:
    await child.end()


def _outcome_in(answer: Answer) -> Outcome:
    if isinstance(answer, Ready):
        raise ValueError("a process that ran an attempt says that it is ready")
    return answer.outcome if isinstance(answer, Last) else answer


def _crashed(text: str) -> Crashed:
    return Crashed(plain_error("Crashed", text))


def exit_text(code: int) -> str:
    """An exit status in words: `signal SIGSEGV`, `exit code 3`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
