"""An attempt that this worker holds: what the stages hand to each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from onward.job import Job
from onward.lifecycle import JobState
from onward.running import Current
from onward.task import Task


class Why(Enum):
    """Why a body was asked to stop before its end. An outcome says only how it ended."""

    TIMEOUT = "timeout"
    CANCEL = "cancel"
    SHUTDOWN = "shutdown"
    LOST = "lost"


class Held(Struct, eq=False):
    """One attempt from its claim to its outcome.

    `waits` says that it waits for a process of its own and has not begun; `begun`, that its body
    has taken its first step on the loop. `stopping` is why it was asked to stop; the first reason
    stays, except that a cancel gives way to the others. `settled` says that its outcome has been
    handed on, so whatever the body still does no longer counts. `doubted` and `postponed`: its
    limit, or its end beyond it, was seen so late that everything may have stood still.
    """

    job: Job
    task: Task[Any, Any]
    current: Current
    place: int | None = None
    started: float = 0.0
    still: float = 0.0
    doubted: bool = False
    postponed: bool = False
    waits: bool = False
    begun: bool = False
    timer: asyncio.TimerHandle | None = None
    asyncio_task: asyncio.Task[None] | None = None
    kill: Callable[[], None] | None = None
    stopping: Why | None = None
    cancelled_at: float | None = None
    spared_until: float = 0.0
    settled: bool = False

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
