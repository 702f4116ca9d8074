"""The attempt that the running code belongs to."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from onward.batch import enqueued_already
from onward.errors import InvalidOption, OutsideJob
from onward.signals import Cancelled
from onward.task import Call, as_call, check_app

if TYPE_CHECKING:
    from onward.app import Onward
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
    _app: Onward
    _log: JobLog | None = None
    cancel_token: CancelToken = msgspec.field(default_factory=CancelToken)
    follow_ups: list[NewJob] = []
    ended_at: float | None = None  # By the monotonic clock.

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
            InvalidArguments: it is no call, or one of another app.
            InvalidOption: it is a call to be written through a connection.
            IdConflict: it has been enqueued already.
            OutsideJob: the body has ended.
        """
        checked = as_call(call, "current().enqueue")
        _refuse_connection(checked)
        check_app(checked, self._app)
        if self.ended_at is not None:
            raise OutsideJob(
                f"current().enqueue was called after attempt {self.attempt} of {self.id} had ended",
                why="a follow-up is written with the attempt's success, which is settled by now",
                fix="call it before the body returns, and await or join what the body has started",
            )
        if checked.used and checked.task.options.id is None:
            raise enqueued_already()
        checked.used = True
        self.follow_ups.append(checked.job)
        return checked.job.id

    def end(self) -> None:
        """The body has ended; for executors."""
        self.ended_at = time.monotonic()


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
