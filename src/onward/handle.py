"""A job as its caller holds it: what was known of it when it was read, and what can be done with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from onward.errors import JobFailed, JobNotFound, WaitRefused, WaitTimeout
from onward.failure import ErrorText
from onward.job import Attempt, NewJob
from onward.lifecycle import JobState
from onward.store import store
from onward.store.connections import in_transaction
from onward.store.store import Record

if TYPE_CHECKING:
    from onward.app import Onward

R_co = TypeVar("R_co", covariant=True)

FIRST_LOOK = 0.005
LONGEST_PAUSE = 0.25


class Handle(Generic[R_co]):
    """One job. `state` and the other fields are as they were when it was read; `refresh()` reads again."""

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
        self._connection = connection

    def __repr__(self) -> str:
        return f"<Job {self.id} of {self.task}: {self.state}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    # --- what is known ----------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The job's id, a UUID as text."""
        return self._record.job.id if self._record else self._fresh.id

    @property
    def task(self) -> str:
        """The task's name."""
        return self._record.job.task if self._record else self._fresh.task

    @property
    def queue(self) -> str:
        return self._record.job.queue if self._record else self._fresh.queue

    @property
    def priority(self) -> int:
        return self._record.job.priority if self._record else self._fresh.priority

    @property
    def state(self) -> JobState:
        """The state when it was read: `job.state == "succeeded"`."""
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
        """The arguments by name, as plain JSON values."""
        text = self._record.job.args if self._record else self._fresh.args
        found: dict[str, Any] = msgspec.json.decode(text)
        return found

    @property
    def result(self) -> Any:
        """The result of a succeeded job, decoded to the task's return type if this app knows the task; else None."""
        text = self._known.result
        return None if text is None else self._app._decode_result(self.task, text)  # pyright: ignore[reportPrivateUsage]

    @property
    def _fresh(self) -> NewJob:
        assert self._new is not None
        return self._new

    @property
    def _known(self) -> Record:
        if self._record is None:
            self._record = self._app.database.read(store.record, self.id)
        return self._record

    # --- what can be done -------------------------------------------------------------------------------------------

    def refresh(self) -> Handle[R_co]:
        """Read it again.

        Raises:
            JobNotFound: it was pruned, or its transaction was rolled back.
        """
        self._record = self._app.database.read(store.record, self.id)
        return self

    async def arefresh(self) -> Handle[R_co]:
        self._record = await self._app.database.aread(store.record, self.id)
        return self

    def attempts(self) -> list[Attempt]:
        """Every closed attempt, in order."""
        return self._app.database.read(store.attempts, self.id)

    async def aattempts(self) -> list[Attempt]:
        return await self._app.database.aread(store.attempts, self.id)

    def cancel(self) -> JobState:
        """Ask for it to stop. A queued job is cancelled at once, a running one is `cancelling` until it has stopped.

        Returns:
            The state it is in now.

        Raises:
            IllegalTransition: it is already over.
        """
        return self._app.cancel(self.id)

    async def acancel(self) -> JobState:
        return await self._app.acancel(self.id)

    def wait(self, timeout: float | None = None) -> R_co:
        """Wait for its end.

        Args:
            timeout: how long at most, in seconds; None: as long as it takes.

        Returns:
            Its result.

        Raises:
            JobFailed: it ended dead or cancelled.
            WaitTimeout: it had not ended in time; it goes on.
            WaitRefused: it is enqueued in a transaction that is still open here.
        """
        for pause in self._pauses(timeout):
            if self._look_sync():
                return self._outcome()
            time.sleep(pause)
        raise self._too_late(timeout)

    async def await_result(self, timeout: float | None = None) -> R_co:
        """The same as `wait`, for async code."""
        for pause in self._pauses(timeout):
            if await self._look_async():
                return self._outcome()
            await asyncio.sleep(pause)
        raise self._too_late(timeout)

    def _pauses(self, timeout: float | None) -> Iterator[float]:
        """How long to sleep between two looks: longer and longer, with a last look at the very end."""
        end = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_LOOK
        while end is None or (left := end - time.monotonic()) > 0:
            yield pause if end is None else min(pause, max(0.0, end - time.monotonic()))
            pause = min(pause * 1.4, LONGEST_PAUSE)
        yield 0.0

    def _look_sync(self) -> bool:
        try:
            self.refresh()
        except JobNotFound:
            self._check_visible()
            raise
        return self._over()

    async def _look_async(self) -> bool:
        try:
            await self.arefresh()
        except JobNotFound:
            self._check_visible()
            raise
        return self._over()

    def _check_visible(self) -> None:
        if self._connection is not None and in_transaction(self._connection):
            raise WaitRefused(
                f"cannot wait for job {self.id} here",
                why="it is enqueued in a transaction that is still open, so no worker can see it yet",
                fix="commit first, then wait",
            )

    def _over(self) -> bool:
        return self.state in {JobState.SUCCEEDED, JobState.CANCELLED, JobState.DEAD}

    def _outcome(self) -> R_co:
        if self.state is JobState.SUCCEEDED:
            result: R_co = self.result
            return result
        raise self._failed()

    def _failed(self) -> JobFailed:
        past = self._app.database.read(store.attempts, self.id)
        last = past[-1] if past else None
        error = read_error(last.error) if last and last.error else None
        why = f"{error.type}: {error.message}" if error else (self.reason or "")
        return JobFailed(
            f"job {self.id} of {self.task} ended {self.state} after attempt {self.attempt}",
            why=why,
            fix=f"onward job show {self.id}"
            + ("; onward dead requeue tries it again" if self.state is JobState.DEAD else ""),
        )

    def _too_late(self, timeout: float | None) -> WaitTimeout:
        return WaitTimeout(
            f"job {self.id} of {self.task} has not ended within {timeout} s: it is {self.state}",
            why="no worker runs it yet" if self.state is JobState.QUEUED else "it goes on",
            fix="onward status shows workers and queues; onward worker module:app starts one",
        )


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
