"""Finisher: takes outcomes, has policy decide, writes in batches, and learns which of them counted.

In:  (job, outcome), from the executor.    Out: rows in the store, events to listeners.
It writes at once when the writer is free; batches come from what piles up meanwhile, never from a
timer. It never runs user code and never decides how a job ends. A change that did not take is
looked at again: still ours but now cancelling, it is decided again; no longer ours, it is reported
and kept as a refusal.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

from onward.errors import DatabaseUnavailable
from onward.events import Happened, emit, wanted
from onward.job import Change, Job
from onward.lifecycle import OWNED
from onward.policy import Backoff, Outcome, Raised, settle
from onward.store import store
from onward.store.database import Database, Refused, halves
from onward.task import Task
from onward.worker.body import plain_error
from onward.worker.changes import LEVELS, told
from onward.worker.stage import Complaint

MOST_PER_WRITE = 1_000
MOST_TEXT = 8_000_000
"""What one write carries at most: outcomes, and characters of their results and follow-ups. One
outcome may be larger than that.
"""


class Finisher:
    """Writes how attempts ended.

    Args:
        database: where to.
        tasks: for their backoff.
        alive: whether this worker may still write; when its lease is over, unwritten outcomes are
            given up.
        applied: called with the changes that took.
        written: called with the changes that are written or refused.
    """

    def __init__(
        self,
        database: Database,
        tasks: dict[str, Task[Any, Any]],
        alive: Callable[[], bool],
        applied: Callable[[Sequence[Change]], None],
        written: Callable[[Sequence[Change]], None],
    ) -> None:
        self._database = database
        self._tasks = tasks
        self._alive = alive
        self._applied = applied
        self._written = written
        self._waiting: list[tuple[Job, Outcome]] = []
        self._writing: dict[str, tuple[Job, Outcome]] = {}
        self._problems: dict[str, str] = {}
        self._complaint = Complaint()
        self._wake = asyncio.Event()
        self._quiet = asyncio.Event()
        self._quiet.set()

    def put(self, job: Job, outcome: Outcome) -> None:
        """Take an outcome; it will be written as soon as the writer is free."""
        self._waiting.append((job, outcome))
        self._quiet.clear()
        self._wake.set()

    def ids(self) -> set[str]:
        """The jobs whose outcome is not written yet."""
        return {*self._writing, *(job.id for job, _ in self._waiting)}

    @property
    def backlog(self) -> int:
        return len(self._waiting) + len(self._writing)

    async def run(self) -> None:
        """Write, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                batch = self._waiting[:MOST_PER_WRITE]
                del self._waiting[:MOST_PER_WRITE]
                self._writing = {job.id: (job, outcome) for job, outcome in batch}
                try:
                    await self._finish(batch)
                finally:
                    self._keep_unwritten()
            self._quiet.set()

    def _keep_unwritten(self) -> None:
        """After an error that nobody expected: what is not written yet will be tried again."""
        if self._writing:
            self._waiting[:0] = self._writing.values()
            self._writing = {}
            self._wake.set()

    async def flush(self, seconds: float) -> bool:
        """Wait until everything is written, at most so long; returns whether it is."""
        try:
            async with asyncio.timeout(seconds):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    # --- one batch --------------------------------------------------------------------------------

    async def _finish(self, batch: Sequence[tuple[Job, Outcome]]) -> None:
        changes = [self._decide(job, outcome) for job, outcome in batch]
        for first, end in _parts(changes):
            await self._finish_part(batch[first:end], changes[first:end])

    async def _finish_part(
        self, batch: Sequence[tuple[Job, Outcome]], changes: list[Change]
    ) -> None:
        taken = await self._write(changes)
        self._report([change for change in changes if change.id in taken])
        if len(taken) < len(changes):
            for (job, outcome), change in zip(batch, changes, strict=True):
                if change.id not in taken:
                    await self._look_again(job, outcome, change)

    def _decide(self, job: Job, outcome: Outcome) -> Change:
        task = self._tasks.get(job.task)
        return settle(job, outcome, task.backoff if task else Backoff(), chance=random.random())

    async def _write(self, changes: list[Change]) -> set[str]:
        """Write a batch. While the database is away, wait for it as long as the lease lives."""
        pause = 0.05
        while True:
            try:
                taken = await self._database.arun(store.apply, changes)
            except (Refused, ValueError, TypeError) as error:  # Or it cannot even be encoded.
                return await self._bisect(changes, error)
            except DatabaseUnavailable as error:
                if not self._alive():
                    return self._give_up(changes, error)
                self._complaint.make(_trouble("finish.waits", error, len(changes)))
                await asyncio.sleep(pause)
                pause = min(pause * 2, 1.0)
            else:
                self._complaint.over()
                return taken

    async def _bisect(self, changes: list[Change], error: Exception) -> set[str]:
        """The database refuses the batch: find the one bad change, and let it fail alone."""
        if len(changes) == 1:
            self._problems[changes[0].id] = _first_line(error)
            emit(_trouble("finish.refused", error, 1, changes[0]))
            return set()
        taken: set[str] = set()
        for half in halves(changes):
            taken |= await self._write(list(half))
        return taken

    def _give_up(self, changes: list[Change], error: DatabaseUnavailable) -> set[str]:
        """The lease is over and the database away: others will run these jobs again."""
        emit(_trouble("finish.given_up", error, len(changes), changes[0]))
        return set()

    # --- what did not take ------------------------------------------------------------------------

    async def _look_again(self, job: Job, outcome: Outcome, change: Change) -> None:
        for _ in range(10):
            answer = await self._find(change)
            if answer is None:
                return self._unknown(change)
            found, ours = answer
            if ours:
                return self._report([change])
            if found is None or not _still_ours(found, job):
                return await self._refused(change, found)
            if change.id in self._problems:
                outcome = Raised(self._unwritable(change))
            job = found
            change = self._decide(job, outcome)
            if await self._write([change]):
                return self._report([change])
        return await self._refused(change, None)

    def _unwritable(self, change: Change) -> str:
        problem = self._problems.pop(change.id)
        text = f"the database refused how this attempt ended ({change.event}): {problem}"
        return plain_error("Unwritable", text)

    async def _find(self, change: Change) -> tuple[Job | None, bool] | None:
        """The job as it is now, and whether the change took after all; None: nobody answers."""
        while True:
            try:
                return await self._database.arun(store.look, change)
            except DatabaseUnavailable:
                if not self._alive():
                    return None
                await asyncio.sleep(0.2)

    def _unknown(self, change: Change) -> None:
        """Our lease is over and nobody can say what became of the job. Its place on the board stays
        taken: it must not pass for one that had not begun.
        """
        self._writing.pop(change.id, None)
        self._problems.pop(change.id, None)

    async def _refused(self, change: Change, found: Job | None) -> None:
        """We have lost this job: say so, and keep what we would have written."""
        self._dealt_with([change])
        refusal = store.refusal_of(change, found)
        emit(
            Happened(
                name="job.refused",
                level=logging.WARNING,
                job=change.id,
                attempt=change.attempt,
                worker=change.worker,
                fields={
                    "event": change.event,
                    "expected": refusal.expected,
                    "found": refusal.found,
                    "found_attempt": refusal.found_attempt,
                },
            )
        )
        while True:
            try:
                await self._database.arun(store.refuse, [refusal])
            except DatabaseUnavailable:
                if not self._alive():
                    return
                await asyncio.sleep(0.2)
            else:
                return

    def _report(self, changes: Sequence[Change]) -> None:
        self._dealt_with(changes)
        self._applied(changes)
        least = logging.DEBUG if wanted(logging.DEBUG) else logging.INFO
        for change in changes:
            level = LEVELS.get(change.event, logging.INFO)
            if level >= least and wanted(level):
                emit(told(change, level))

    def _dealt_with(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._writing.pop(change.id, None)
            self._problems.pop(change.id, None)
        self._written(changes)


def _parts(changes: Sequence[Change]) -> list[tuple[int, int]]:
    """The changes cut into what one write carries, as places in the list. Nearly always one part,
    and looked at for each job: one quick pass.
    """
    parts: list[tuple[int, int]] = []
    first = text = 0
    for place, change in enumerate(changes):
        size = len(change.result or change.error or "")
        if change.follow_ups:
            size += sum(len(job.args) for job in change.follow_ups)
        text += size
        if text > MOST_TEXT and place > first:
            parts.append((first, place))
            first, text = place, size
    parts.append((first, len(changes)))
    return parts


def _still_ours(found: Job, job: Job) -> bool:
    """Whether this attempt is still under way with the same owner. What has ended keeps the name of
    the owner that it had, a sweep's doing too.
    """
    return found.state in OWNED and (found.attempt, found.worker) == (job.attempt, job.worker)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _trouble(name: str, error: Exception, count: int, change: Change | None = None) -> Happened:
    return Happened(
        name=name,
        level=logging.ERROR if change else logging.WARNING,
        job=change.id if change else None,
        attempt=change.attempt if change else None,
        fields={"jobs": count, "error": _first_line(error)},
    )
