"""The app that real workers run in tests. Its database and its settings come from the environment.

Each task that does something for a while appends to the ledger, if there is one, a line when its
body starts and another when it ends: `{"event": "start", "task": …, "job": …, "attempt": …}`.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from onward import Backoff, Onward, Settings, current
from tests.support.ledger import VARIABLE, Ledger

SETTINGS_VARIABLE = "ONWARD_TEST_SETTINGS"

SOON = Backoff(base=0.05, factor=1, jitter=0)

app = Onward(settings=Settings(**json.loads(os.environ.get(SETTINGS_VARIABLE, "{}"))))


def note(event: str, **fields: Any) -> None:
    """Append a line about the running attempt to the ledger."""
    if ledger := _ledger():
        _append(ledger, event, fields)


@contextmanager
def noted(**fields: Any) -> Generator[None, None, None]:
    """A line when the body starts, another when it ends, however it does: in the ledger that was
    there when it began, for an abandoned body may outlive its test.
    """
    ledger = _ledger()
    _append(ledger, "start", fields)
    try:
        yield
    except BaseException as error:
        _append(ledger, "end", {"raised": type(error).__name__, **fields})
        raise
    _append(ledger, "end", fields)


def _ledger() -> Ledger | None:
    return Ledger.at() if os.environ.get(VARIABLE) else None


def _append(ledger: Ledger | None, event: str, fields: Mapping[str, Any]) -> None:
    if ledger is not None:
        me = current()
        ledger.append(event=event, task=me.task, job=me.id, attempt=me.attempt, **fields)


# --- Bodies that end ---------------------------------------------------------------------------


@app.task(backoff=SOON)
def echo(value: Any = None) -> Any:
    """Returns what it is given; in a thread."""
    with noted(value=value):
        return value


@app.task(backoff=SOON)
async def aecho(value: Any = None) -> Any:
    """Returns what it is given; on the loop."""
    with noted(value=value):
        return value


@app.task(backoff=SOON)
def spread(count: int) -> None:
    """Enqueues so many jobs one by one, from a thread."""
    for _ in range(count):
        aecho.enqueue()


@app.task(backoff=SOON)
async def nap(seconds: float) -> str:
    """Waits on the loop."""
    with noted():
        await asyncio.sleep(seconds)
    return "rested"


@app.task(backoff=SOON)
def block(seconds: float) -> str:
    """Waits in a thread, in one blocking call that nothing can interrupt."""
    with noted():
        time.sleep(seconds)
    return "rested"


@app.task(backoff=SOON)
def watch(seconds: float) -> str:
    """Waits in a thread, and stops when asked to."""
    with noted():
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            current().cancel_token.wait(min(left, 1.0))
            current().check()
    return "rested"


@app.task(backoff=SOON)
async def block_loop(seconds: float) -> str:
    """An `async` body that blocks the loop of its worker."""
    with noted():
        time.sleep(seconds)  # noqa: ASYNC251
    return "rested"


@app.task(backoff=SOON)
async def nap_then_block_loop(seconds: float) -> None:
    """Waits on the loop; when it is interrupted, its cleanup blocks the loop."""
    with noted():
        try:
            await asyncio.sleep(seconds)
        finally:
            time.sleep(seconds)  # noqa: ASYNC251


@app.task(backoff=SOON)
def hold_gil(seconds: float) -> str:
    """C code that holds the interpreter, so that no thread of this process does anything."""
    with noted():
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "rested"


@app.task(backoff=SOON, isolation="process")
def isolated_echo(value: Any = None) -> Any:
    """Returns what it is given; in a process of its own."""
    with noted():
        return value


@app.task(backoff=SOON, isolation="process")
def isolated_nap(seconds: float) -> str:
    """Waits in a process of its own."""
    with noted():
        time.sleep(seconds)
    return "rested"


@app.task(backoff=SOON, isolation="process")
async def isolated_leave(what: str, seconds: float) -> int:
    """Returns, and leaves something behind: a thread at work, a task that will not end, or one that
    ends when it is told to. Returns the number of its process.
    """

    async def stubborn() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(seconds)

    with noted():
        if what == "a thread":
            asyncio.get_running_loop().run_in_executor(None, time.sleep, seconds)
        else:
            left = stubborn() if what == "a stubborn task" else asyncio.sleep(seconds)
            _left.append(asyncio.create_task(left))
            await asyncio.sleep(0)
        return os.getpid()


_left: list[asyncio.Task[None]] = []


@app.task(backoff=SOON, isolation="process")
def isolated_spin(seconds: float) -> str:
    """Computes in a process of its own, and looks at nothing meanwhile."""
    with noted():
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
    return "tired"


@app.task(backoff=SOON, isolation="process")
def isolated_watch(seconds: float) -> str:
    """Waits in a process of its own, and stops when asked to."""
    with noted():
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            current().cancel_token.wait(min(left, 1.0))
            current().check()
    return "rested"


@app.task(backoff=SOON)
async def nap_once(seconds: float) -> str:
    """Waits in its first attempt, which is to be lost or given back; later ones return at once."""
    with noted():
        if current().attempt == 1:
            await asyncio.sleep(seconds)
    return "rested"


@app.task(backoff=SOON)
def block_once(seconds: float) -> str:
    """The same in a thread."""
    with noted():
        if current().attempt == 1:
            time.sleep(seconds)
    return "rested"


@app.task(backoff=SOON)
def tick_once(seconds: float) -> str:
    """The same, and says all the time that it is still there: nothing stops it."""
    with noted():
        end = time.monotonic() + seconds
        while current().attempt == 1 and time.monotonic() < end:
            note("tick")
            time.sleep(0.002)
    return "rested"


@app.task(backoff=SOON)
async def block_loop_once(seconds: float) -> str:
    """The same on a blocked loop."""
    with noted():
        if current().attempt == 1:
            time.sleep(seconds)  # noqa: ASYNC251
    return "rested"


@app.task(backoff=SOON)
async def nap_with_cleanup(seconds: float, cleanup: float) -> None:
    """Waits on the loop; when it is interrupted, it awaits something before it ends."""
    with noted():
        try:
            await asyncio.sleep(seconds)
        finally:
            await asyncio.sleep(cleanup)
            note("clean")


@app.task(backoff=SOON)
async def fail_when_interrupted(seconds: float) -> None:
    """Makes an error of its own of an interruption."""
    with noted():
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            raise RuntimeError("I was interrupted") from None


@app.task(backoff=SOON)
async def nap_in_default_executor(seconds: float) -> None:
    """Has a thread of the loop's own executor wait, which nobody can interrupt."""
    with noted():
        await asyncio.to_thread(time.sleep, seconds)


@app.task(backoff=SOON)
async def nap_then_fail(seconds: float, message: str = "as asked") -> None:
    """Waits and raises."""
    with noted():
        await asyncio.sleep(seconds)
        raise RuntimeError(message)


@app.task(backoff=SOON)
def fail(message: str = "as asked") -> None:
    """Raises at once."""
    with noted():
        raise RuntimeError(message)


# --- Bodies that take their process with them --------------------------------------------------


@app.task(backoff=SOON)
def segfault(after: float = 0) -> None:
    """Reads address 0."""
    note("start")
    time.sleep(after)
    ctypes.string_at(0)


@app.task(backoff=SOON, isolation="process")
def isolated_segfault() -> None:
    """Reads address 0, in a process of its own."""
    note("start")
    ctypes.string_at(0)


def _fork(seconds: float) -> None:
    """A fork that comes out of the body after so many seconds."""
    if os.fork() == 0:
        time.sleep(seconds)
        sys.exit(0)


@app.task(backoff=SOON)
def fork(value: Any) -> Any:
    """Forks a process that comes back at once; in a thread."""
    _fork(0)
    with noted():
        time.sleep(0.3)
    return value


@app.task(backoff=SOON)
async def afork(value: Any) -> Any:
    """The same on the loop."""
    _fork(0)
    with noted():
        await asyncio.sleep(0.3)
    return value


@app.task(backoff=SOON, isolation="process")
def isolated_fork(value: Any) -> Any:
    """The same in a process of its own."""
    _fork(0)
    with noted():
        time.sleep(0.3)
    return value


@app.task(backoff=SOON, isolation="process")
def isolated_fork_and_exit(seconds: float) -> None:
    """Ends its process while one that it has forked lives on."""
    note("start")
    _fork(seconds)
    os._exit(3)


@app.task(backoff=SOON, isolation="process")
def isolated_shell(path: str) -> None:
    """Has a shell write lines to a file, and waits for it."""
    note("start")
    loop = f"while true; do echo on >> {shlex.quote(path)}; sleep 0.05; done"
    subprocess.run(["sh", "-c", loop], check=True)


@app.task(backoff=SOON)
def exit_hard(status: int) -> None:
    """Ends the process without a word."""
    note("start")
    os._exit(status)


@app.task(backoff=SOON, isolation="process")
def isolated_exit(status: int) -> None:
    """The same in a process of its own."""
    note("start")
    os._exit(status)


@app.task(backoff=SOON)
def kill_worker(number: int = signal.SIGKILL, seconds: float = 0) -> None:
    """Sends a signal to the process that it runs in, after a while."""
    note("start")
    time.sleep(seconds)
    os.kill(os.getpid(), number)
    time.sleep(30)


# --- Follow-ups --------------------------------------------------------------------------------


@app.task(backoff=SOON)
async def link(number: int, last: int, seconds: float = 0.05) -> int:
    """A chain: each link enqueues the next one together with its own success."""
    with noted(number=number):
        await asyncio.sleep(seconds)
        if number < last:
            current().enqueue(link.call(number + 1, last, seconds))
    return number


@app.task(backoff=SOON, isolation="process")
def isolated_parent() -> str:
    """Enqueues a job together with its own success, from a process of its own."""
    with noted():
        return current().enqueue(echo.call("child"))
