"""A job as its caller holds it: what was known when it was read, and what can be done with it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

import msgspec

from onward.codec import decode_plain
from onward.config import default_url, seconds
from onward.errors import JobFailed, JobNotFound, WaitRefused, WaitTimeout
from onward.failure import ErrorText
from onward.job import Attempt, Job, NewJob
from onward.lifecycle import JobState
from onward.policy import MAX_DELAY
from onward.store import store
from onward.store.connections import in_transaction
from onward.store.options import options_of, schema_option
from onward.store.store import Record
from onward.store.ways import unscoped

if TYPE_CHECKING:
    from onward.app import Onward

R_co = TypeVar("R_co", covariant=True)

FIRST_LOOK = 0.005
LONGEST_PAUSE = 0.25


class Handle(Generic[R_co]):
    """One job. Its fields are as they were when it was read; `refresh()` reads again.

    A fresh handle knows what was enqueued. A field that only the database knows (`created_at`,
    `result`, …) is read when it is first asked for; in async code, `await job.arefresh()` before.
    After `cancel()`, `state` is what that led to; the rest is as it was.
    """

    def __init__(
        self,
        app: Onward,
        new: NewJob | None = None,
        record: Record | None = None,
        connection: Any = None,
    ) -> None:
        self._app = app
        self._new = new
        self._record = record
        self._connection = None if connection is None else unscoped(connection)
        self._moved_to: JobState | None = None

    def __repr__(self) -> str:
        return f"<Job {self.id} of {self.task}: {self.state}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    # --- what is known ----------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The job's id, a UUID as text."""
        return self._call.id

    @property
    def task(self) -> str:
        """The task's name."""
        return self._call.task

    @property
    def queue(self) -> str:
        """The name of its queue."""
        return self._call.queue

    @property
    def priority(self) -> int:
        """−100 to 100; a higher one runs first."""
        return self._call.priority

    @property
    def state(self) -> JobState:
        """The state when it was read: `job.state == "succeeded"`."""
        if self._moved_to is not None:
            return self._moved_to
        return self._record.job.state if self._record else JobState.QUEUED

    @property
    def attempt(self) -> int:
        """The number of the latest attempt."""
        return self._record.job.attempt if self._record else 1

    @property
    def worker(self) -> str | None:
        """Who owns it, while it runs."""
        return self._known.job.worker

    @property
    def created_at(self) -> datetime:
        """When it was enqueued, on the database's clock."""
        return _moment(self._known.created_at)

    @property
    def run_at(self) -> datetime:
        """Not before this moment."""
        return _moment(self._known.run_at)

    @property
    def started_at(self) -> datetime | None:
        """When the latest attempt started."""
        return _maybe(self._known.started_at)

    @property
    def finished_at(self) -> datetime | None:
        """When it succeeded, was cancelled or died."""
        return _maybe(self._known.finished_at)

    @property
    def failures(self) -> int:
        """Failed attempts since it was enqueued or last requeued."""
        return self._record.job.failures if self._record else 0

    @property
    def losses(self) -> int:
        """Lost attempts since it was enqueued or last requeued."""
        return self._record.job.losses if self._record else 0

    @property
    def reason(self) -> str | None:
        """Why it was cancelled, if it was."""
        return self._known.reason

    @property
    def args(self) -> dict[str, Any]:
        """The arguments by name, as plain JSON values.

        Raises:
            PayloadUnreadable: they are no JSON: somebody else has written there.
        """
        found: dict[str, Any] = decode_plain(self._call.args, self.task)
        return found

    @property
    def result(self) -> Any:
        """The result of a succeeded job, else None.

        It is of the task's return type if this app knows the task, otherwise plain JSON values.

        Raises:
            PayloadUnreadable: it does not fit the task's return annotation as it is today.
        """
        text = self._known.result
        return None if text is None else self._app._decode_result(self.task, text)  # pyright: ignore[reportPrivateUsage]

    @property
    def _call(self) -> Job | NewJob:
        """What was enqueued."""
        known = self._record.job if self._record else self._new
        assert known is not None
        return known

    @property
    def _known(self) -> Record:
        if self._record is None:
            self._seen(self._app.database.read(store.record, self.id))
        assert self._record is not None
        return self._record

    # --- what can be done -------------------------------------------------------------------------

    def refresh(self) -> Self:
        """Read it again.

        Raises:
            JobNotFound: it was pruned, or its transaction was rolled back or is still open.
        """
        return self._seen(self._app.database.read(store.record, self.id))

    async def arefresh(self) -> Self:
        """The same as `refresh`, for async code."""
        return self._seen(await self._app.database.aread(store.record, self.id))

    def _seen(self, record: Record) -> Self:
        self._record = record
        self._moved_to = None
        self._connection = None  # Committed: the caller's connection is of no more interest.
        return self

    def _learn(self, state: JobState) -> None:
        """Remember what the app made of it; the rest is as it was when it was read."""
        self._moved_to = state

    def attempts(self) -> list[Attempt]:
        """Every closed attempt, in order."""
        return self._app.database.read(store.attempts, self.id)

    async def aattempts(self) -> list[Attempt]:
        """The same as `attempts`, for async code."""
        return await self._app.database.aread(store.attempts, self.id)

    def cancel(self) -> JobState:
        """Ask for it to stop.

        A queued job is cancelled at once, a running one is `cancelling` until it has stopped.

        Returns:
            The state it is in now.

        Raises:
            IllegalTransition: it has succeeded, or is dead.
        """
        return self._app.cancel(self)

    async def acancel(self) -> JobState:
        """The same as `cancel`, for async code."""
        return await self._app.acancel(self)

    def wait(self, timeout: timedelta | float | None = None) -> R_co:
        """Wait for its end.

        Args:
            timeout: how long at most (timedelta, or seconds); None: as long as it takes.

        Returns:
            Its result.

        Raises:
            JobFailed: it ended dead or cancelled.
            JobNotFound: it was pruned, or its transaction was rolled back.
            WaitTimeout: it had not ended in time; it goes on.
            WaitRefused: it is enqueued in a transaction that is still open here; or an async task
                asks, whose worker could do nothing else meanwhile.
            PayloadUnreadable: its result does not fit the task's return annotation as it is today.
            InvalidOption: `timeout` is no duration.
        """
        self._check_loop()
        most = _most(timeout)
        for pause in _pauses(most):
            try:
                self.refresh()
            except JobNotFound:
                self._check_visible()
                raise
            if self.state in _OVER:
                return self._result() if self._succeeded else self._fail(self.attempts())
            time.sleep(pause)
        raise self._too_late(most)

    async def await_result(self, timeout: timedelta | float | None = None) -> R_co:
        """The same as `wait`, for async code."""
        import asyncio  # Slow to import, and there by now.

        most = _most(timeout)
        for pause in _pauses(most):
            try:
                await self.arefresh()
            except JobNotFound:
                self._check_visible()
                raise
            if self.state in _OVER:
                return self._result() if self._succeeded else self._fail(await self.aattempts())
            await asyncio.sleep(pause)
        raise self._too_late(most)

    def _check_loop(self) -> None:
        # One is slow to import, the other stands above this module: both are there in a task.
        loops, running = sys.modules.get("asyncio"), sys.modules.get("onward.running")
        if loops is None or running is None or not running.in_job():
            return
        try:
            loops.get_running_loop()
        except RuntimeError:
            return
        raise WaitRefused(
            f"cannot wait for job {self.id} here",
            why="an async task runs on its worker's loop, and nothing else could run there"
            " meanwhile, perhaps not even the job that it waits for",
            fix="await job.await_result()",
        )

    def _check_visible(self) -> None:
        if self._connection is not None and in_transaction(self._connection):
            raise WaitRefused(
                f"cannot wait for job {self.id} here",
                why="it is not committed, and a transaction is open on the connection that it was"
                " enqueued through, so no worker can see it yet",
                fix="commit first, then wait",
            )

    @property
    def _succeeded(self) -> bool:
        return self.state is JobState.SUCCEEDED

    def _result(self) -> R_co:
        result: R_co = self.result
        return result

    def _fail(self, past: list[Attempt]) -> NoReturn:
        last = past[-1] if past else None
        error = read_error(last.error) if last and last.error else None
        look = f"to see it: onward job show {self.id}{self._place}"
        again = f"; to try it again: onward dead requeue {self.id}{self._place}"
        when = f"after attempt {self.attempt}" if last and last.started_at else "before it ran"
        raise JobFailed(
            f"job {self.id} of {self.task} ended {self.state} {when}",
            why=f"{error.type}: {error.message}" if error else (self.reason or ""),
            fix=f"{look}{again if self.state is JobState.DEAD else ''}",
        )

    def _too_late(self, most: float) -> WaitTimeout:
        why = "it goes on"
        if self.state is JobState.QUEUED:
            due_in = self._known.run_at - time.time()
            why = f"it is due in {due_in:.0f} s" if due_in > 1 else "no worker runs it yet"
        return WaitTimeout(
            f"job {self.id} of {self.task} has not ended within {most:g} s: it is {self.state}",
            why=why,
            fix=f"to see workers and queues: onward status{self._place};"
            " to start a worker: onward worker module:app",
        )

    @property
    def _place(self) -> str:
        """What a command must be told to find the database; nothing where it does so by itself."""
        database = self._app.database
        if self._app.url == default_url() and not schema_option(database):
            return ""
        return f" {options_of(database)}"


_OVER = {JobState.SUCCEEDED, JobState.CANCELLED, JobState.DEAD}


def _most(timeout: timedelta | float | None) -> float:
    """How long to wait at most, in seconds; what is longer than a lifetime is for ever."""
    if timeout is None or (isinstance(timeout, (int, float)) and timeout > MAX_DELAY):
        return math.inf
    return seconds(timeout, "timeout")


def _pauses(most: float) -> Iterator[float]:
    """How long to sleep between two looks: longer and longer, with a last look at the very end."""
    end = time.monotonic() + most
    pause = FIRST_LOOK
    while (left := end - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(pause * 1.4, LONGEST_PAUSE)
    yield 0.0


def read_error(text: str) -> ErrorText:
    """A stored error as a value, whatever is stored there."""
    try:
        return msgspec.json.decode(text, type=ErrorText)
    except msgspec.MsgspecError:
        return ErrorText(type="error", message=text[:4000], traceback="")


def _moment(value: float) -> datetime:
    return datetime.fromtimestamp(value, UTC)


def _maybe(value: float | None) -> datetime | None:
    return None if value is None else _moment(value)
