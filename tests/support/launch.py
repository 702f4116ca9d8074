"""Starts supervisors for the tests, each in a process of its own.

They are forked from a process that has done nothing but import what a supervisor needs, since that
takes longer than most of what tests then do with it. Worker processes are started by the supervisor
as ever.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from onward.worker import supervisor
from tests.support.skew import shift_time

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


class Launched:
    """A supervisor's process, held like a `subprocess.Popen`. It ends when the test run ends.

    Args:
        orders: the arguments of `supervisor.run`.
        environment: all its variables.
        folder: where it runs.
        log: the file that gets its output.
    """

    def __init__(
        self, orders: Mapping[str, Any], environment: Mapping[str, str], folder: Path, log: Path
    ) -> None:
        theirs, self._ours = _context.Pipe(duplex=False)
        self._process = _context.Process(
            target=_supervise,
            args=(dict(orders), dict(environment), str(folder), str(log), theirs),
            daemon=True,
        )
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it lives."""
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        """Wait for its end; returns the exit status."""
        self._process.join(seconds)
        if (status := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("supervisor", seconds)
        return status

    def send_signal(self, number: int) -> None:
        """Nothing if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def let_go(self) -> None:
        """End it, if it still lives: nobody holds it any more."""
        self._ours.close()


def _supervise(
    orders: dict[str, Any], environment: dict[str, str], folder: str, log: str, held: Connection
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    shift_time()
    with open(log, "ab") as sink, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with, args=[held], daemon=True).start()
    sys.exit(supervisor.run(**orders))


def _end_with(held: Connection) -> None:
    held.poll(None)
    os._exit(99)  # The test run is gone, or has let go.
