"""An attempt that this worker holds: what the stages hand to each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Any

from msgspec.structs import replace

from onward.current import Current
from onward.job import Job
from onward.lifecycle import JobState
from onward.task import Task


class Why(Enum):
    """Why a body was asked to stop before its end. An outcome says only how it ended."""

    TIMEOUT = "timeout"
    CANCEL = "cancel"
    SHUTDOWN = "shutdown"
    LOST = "lost"


class Held:
    """One attempt from its claim to its outcome.

    `stopping` is why its body was asked to stop; the first reason stays, except that a cancel gives
    way to the others. `settled` says that its outcome has been handed on, so whatever the body
    still does no longer counts.
    """

    __slots__ = (
        "asyncio_task",
        "cancelled_at",
        "current",
        "doubted",
        "job",
        "kill",
        "place",
        "settled",
        "spared_until",
        "started",
        "still",
        "stopping",
        "task",
        "timer",
    )

    def __init__(self, job: Job, task: Task[Any, Any]) -> None:
        self.job = job
        self.task = task
        self.current = Current(job)
        self.place: int | None = None
        self.started = 0.0
        self.still = 0.0
        self.doubted = False
        self.timer: asyncio.TimerHandle | None = None
        self.asyncio_task: asyncio.Task[None] | None = None
        self.kill: Callable[[], None] | None = None
        self.stopping: Why | None = None
        self.cancelled_at: float | None = None
        self.spared_until = 0.0
        self.settled = False

    @property
    def key(self) -> tuple[str, int]:
        return self.job.id, self.job.attempt

    def ask_cancel(self, now: float) -> None:
        """The database says that the job is cancelling."""
        if self.cancelled_at is None:
            self.cancelled_at = now
            self.stopping = self.stopping or Why.CANCEL
            self.job = replace(self.job, state=JobState.CANCELLING)
        self.current.cancel_token.request()

    def interrupt(self) -> bool:
        """Raise an exception into the body, where that is possible; returns whether it is."""
        if self.asyncio_task is None:
            return False
        self.asyncio_task.cancel()
        return True
