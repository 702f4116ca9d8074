"""The demo's workers: `onward worker` with its worker processes, one of which gets killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from onward.overview import WorkerLine, read_workers
from onward.store.database import Database

SLOTS = 8
"""How many jobs each worker process runs at once."""

TARGET = "onward.demo.tasks:app"

STOP_SECONDS = 40.0


class Victim(Struct, frozen=True):
    """A worker process that was killed: its worker, its process, and how many jobs it owned."""

    worker: str
    pid: int
    running: int


class Crew:
    """A supervisor and its worker processes.

    Args:
        queue: the only queue that they serve.
        processes: how many worker processes.
        environment: which database, for `onward worker`.
        log: the file that takes what they log.
    """

    def __init__(
        self, queue: str, processes: int, environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = f"{queue}@{os.getpid()}"
        self.log = log
        self._queue = queue
        self._processes = processes
        self._environment = environment
        self._supervisor: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the supervisor, as the command line does."""
        with self.log.open("wb") as log:
            self._supervisor = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment},
            )

    def _command(self) -> list[str]:
        options = {
            "--queues": self._queue,
            "--name": self.name,
            "--processes": self._processes,
            "--concurrency": SLOTS,
            "--log-level": "error",
        }
        pairs = [str(part) for option in options.items() for part in option]
        return [sys.executable, "-m", "onward.cli", "worker", TARGET, *pairs]

    @property
    def shown(self) -> str:
        """The command, as one would type it."""
        return f"onward worker {TARGET} --processes {self._processes} --concurrency {SLOTS}"

    @property
    def has_ended(self) -> bool:
        """Whether the supervisor is gone, which it never should be by itself."""
        return self._supervisor is None or self._supervisor.poll() is not None

    def workers(self, database: Database) -> list[WorkerLine]:
        """Every worker that this crew has had, newest first."""
        return [worker for worker in read_workers(database) if worker.name == self.name]

    def kill_one(self, database: Database) -> Victim | None:
        """SIGKILL the worker process that runs the most jobs; None: none runs any."""
        busy = [worker for worker in self.workers(database) if worker.alive and worker.running]
        if not busy:
            return None
        most = max(busy, key=lambda worker: worker.running)
        with contextlib.suppress(ProcessLookupError):
            os.kill(most.pid, signal.SIGKILL)
        return Victim(most.id, most.pid, most.running)

    def stop(self) -> int:
        """Stop in order; returns the supervisor's exit status, negative for a signal."""
        if self._supervisor is None:
            return 0
        self._supervisor.terminate()
        try:
            return self._supervisor.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            return self._supervisor.wait()

    def last_words(self, lines: int = 12) -> list[str]:
        """The end of the log, for when something has gone wrong."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return text.splitlines()[-lines:]
