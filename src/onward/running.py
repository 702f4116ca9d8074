"""The attempt that the running code belongs to."""

from __future__ import annotations

import logging
import threading
from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from onward.errors import InvalidOption, OutsideJob
from onward.signals import Cancelled
from onward.task import Call, as_call

if TYPE_CHECKING:
    from onward.job import Job, NewJob

    Adapter = logging.LoggerAdapter[logging.Logger]
else:
    Adapter = logging.LoggerAdapter


class CancelToken:
    """Says whether the job was asked to stop. Safe to look at from any thread."""

    __slots__ = ("_event", "requested")

    # Most jobs never wait for their token, so the event is made by the first one that does.
    _making = threading.Lock()

    def __init__(self) -> None:
        self.requested = False
        self._event: threading.Event | None = None

    def request(self) -> None:
        """Ask the job to stop; for executors."""
        self.requested = True
        if self._event is not None:
            self._event.set()

    def wait(self, timeout: float) -> bool:
        """Sleep, in a thread, up to `timeout` seconds or until the job is asked to stop.

        Returns:
            Whether it was asked.
        """
        with self._making:
            self._event = self._event or threading.Event()
        # Looked at after the event is there: whoever asks either sees the event or is seen here.
        return self.requested or self._event.wait(timeout)


class JobLog(Adapter):
    """A logger whose records carry the job's id, attempt and task, beside what the caller adds."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(kwargs.get("extra") or {}), **(self.extra or {})}
        return msg, kwargs


class Current(Struct, eq=False):
    """One running attempt, as its body sees it."""

    _job: Job
    _log: JobLog | None = None
    cancel_token: CancelToken = msgspec.field(default_factory=CancelToken)
    follow_ups: list[NewJob] = []

    def __repr__(self) -> str:
        return f"<Current {self.task} {self.id}, attempt {self.attempt}>"

    @property
    def id(self) -> str:
        """The job's id."""
        return self._job.id

    @property
    def attempt(self) -> int:
        """The attempt's number, from 1."""
        return self._job.attempt

    @property
    def task(self) -> str:
        """The task's name."""
        return self._job.task

    @property
    def queue(self) -> str:
        """The queue that the job came from."""
        return self._job.queue

    @property
    def cancel_requested(self) -> bool:
        """Whether the job was asked to stop."""
        return self.cancel_token.requested

    def check(self) -> None:
        """Stop here if the job was asked to stop.

        Raises:
            Cancelled: it was; let it pass.
        """
        if self.cancel_token.requested:
            raise Cancelled("the job was asked to stop")

    @property
    def log(self) -> JobLog:
        """A logger, `onward.task`, whose records carry the job's id, attempt and task."""
        if self._log is None:
            extra = {
                "onward_job": self.id,
                "onward_attempt": self.attempt,
                "onward_task": self.task,
            }
            self._log = JobLog(logging.getLogger("onward.task"), extra)
        return self._log

    def enqueue(self, call: Call[Any]) -> str:
        """Enqueue a call together with this attempt's success: both are written, or neither.

        A worker that has lost the job enqueues nothing, and an attempt that fails enqueues nothing.

        Args:
            call: made by `task.call(...)`.

        Returns:
            The id that the job will have.

        Raises:
            InvalidArguments: it is no call.
            InvalidOption: it is a call to be written through a connection.
        """
        checked = as_call(call, "current().enqueue")
        _refuse_connection(checked)
        self.follow_ups.append(checked.job)
        return checked.job.id


def _refuse_connection(call: Call[Any]) -> None:
    if call.connection is not None:
        raise InvalidOption(
            f"current().enqueue was given a call of {call.task.name} with a connection",
            why="it is written together with this attempt's success, which the worker writes",
            fix="leave the connection out; or task.using(connection=…).enqueue(…)",
        )


_current: ContextVar[Current | None] = ContextVar("onward_current", default=None)


def current() -> Current:
    """The attempt that the running code belongs to.

    Raises:
        OutsideJob: the code is not run by a worker.
    """
    found = _current.get()
    if found is None:
        raise OutsideJob(
            "onward.current() was called outside a running job",
            why="this code runs in the caller, or in a thread or callback that the job's context"
            " did not reach",
            fix="call it in the task's own body; copy_context().run(…) carries it into threads",
        )
    return found


def in_job() -> bool:
    """Whether the running code belongs to an attempt."""
    return _current.get() is not None


def set_current(value: Current | None) -> None:
    """Make an attempt the current one of this context. For executors."""
    _current.set(value)
