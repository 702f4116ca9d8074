"""Keeper: finds vanished workers, takes their jobs back, watches the clock, and prunes what is old.
Safe on every worker at once, no leader.

A worker is declared lost when its lease is over on the database's clock *and* this keeper has seen
that same lease unchanged for a lease's length on its own monotonic clock, so that a step of the
database's clock declares nobody lost. A lease that was renewed before that clock went back begins
anew, so that it does not hold a dead worker's jobs for as long as the step. Time in which the
keeper itself stood still, or could not write, counts for nothing: workers could not renew their
leases then either. A free lock file is proof of death by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from onward.config import Settings
from onward.errors import DatabaseError
from onward.events import Happened, emit
from onward.job import Change, Job
from onward.lifecycle import JobState
from onward.policy import recover
from onward.store import store
from onward.store.database import Database, Refused
from onward.store.store import Lease
from onward.worker.body import plain_error
from onward.worker.changes import told
from onward.worker.clocks import Clocks
from onward.worker.stage import Complaint

SWEEP_STEP = 500
KEEP_WORKERS = 7 * 86_400.0
PRUNE_PAUSE = 0.02
PRUNE_MOST = 10_000

PRUNE_QUICK, PRUNE_SLOW = 0.2, 0.4
"""Seconds. After a quicker step of pruning the next one is twice as large, after a slower one half:
on SQLite nobody else writes meanwhile.
"""

LEAVE_FOR = 60.0
"""Seconds for which a job that cannot be taken back is left behind, before it is tried, and told,
again.
"""

PROMPT = 1.0
"""Seconds by which a sweep may come late, or a write may wait for its turn; a keeper that is slower
judges nobody by what it saw before.
"""


class Keeper:
    """Keeps one database in order.

    Args:
        database: which.
        settings: lease, sweep, retention.
        own: the workers whose life is known better here than in the database.
        decide: what becomes of a job whose worker is gone; by default it is lost.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        own: Callable[[], Iterable[str]],
        decide: Callable[[Job, str], Change] | None = None,
    ) -> None:
        self._database = database
        self._settings = settings
        self._own = own
        self._decide = decide or decide_loss
        self._seen: dict[str, tuple[tuple[float, float], float]] = {}
        self._pruned = float("-inf")
        self._prune_step = settings.prune_step
        self._clocks = Clocks(database)
        self._left: dict[str, float] = {}
        self._undeclared = Complaint()
        self._undated = Complaint()

    async def run(self) -> None:
        """Sweep and prune for ever."""
        complaint = Complaint()
        while True:
            more = False
            try:
                await self.sweep()
                await self._clocks.look()
                more = not await self._prune()
            except DatabaseError as error:
                self._seen.clear()
                complaint.make(_stumbled(error))
            else:
                complaint.over()
            await self._rest(0.0 if more else self._settings.sweep)

    async def _rest(self, seconds: float) -> None:
        began = time.monotonic()
        await asyncio.sleep(seconds)
        if time.monotonic() - began > seconds + PROMPT:
            self._seen.clear()

    # --- sweep ------------------------------------------------------------------------------------

    async def sweep(self) -> list[Change]:
        """Declare vanished workers lost and take back every job whose worker is gone; returns the
        changes.
        """
        now = time.monotonic()
        leases = await self._database.aread(store.leases)
        prompt = time.monotonic() - now <= PROMPT
        if not prompt:
            self._seen.clear()  # We stood still ourselves, or could not ask.
        for lease, reason, proven in self.vanished(leases, now):
            try:
                await self._lose(lease, reason, proven)
            except Refused as error:
                self._undeclared.make(_undeclarable(lease, error))
        if prompt:
            await self._redate([lease for lease in leases if lease.ahead])
        return await self.take_back()

    def vanished(self, leases: list[Lease], now: float) -> list[tuple[Lease, str, bool]]:
        """Which workers are gone, why we think so, and whether that is proven."""
        self._seen = {lease.worker: self._first_seen(lease, now) for lease in leases}
        gone: list[tuple[Lease, str, bool]] = []
        own = set(self._own())
        for lease in leases:
            if lease.worker in own:
                continue
            if lease.lock_path is not None and is_free(lease.lock_path):
                gone.append((lease, "its process is gone: its lock is free", True))
            elif lease.over and now - self._seen[lease.worker][1] >= self._patience:
                gone.append((lease, _silence(lease), False))
        return gone

    @property
    def _patience(self) -> float:
        """How long a lease must have been seen unchanged. A sweep's length less than a lease,
        because it may have been renewed that long before it was first seen.
        """
        return max(self._settings.lease - self._settings.sweep, self._settings.lease / 2)

    def _first_seen(self, lease: Lease, now: float) -> tuple[tuple[float, float], float]:
        sign = (lease.until, lease.beat)
        known = self._seen.get(lease.worker)
        return known if known is not None and known[0] == sign else (sign, now)

    async def _redate(self, leases: list[Lease]) -> None:
        """The clock has gone back since these were renewed: they begin anew."""
        for lease in leases:
            try:
                length = self._settings.lease
                await self._database.arun(store.redate, lease.worker, lease.beat, length)
            except Refused as error:
                self._undated.make(_stumbled(error))

    async def _lose(self, lease: Lease, reason: str, proven: bool) -> None:
        seen = None if proven else lease.until
        asked = time.monotonic()

        def prompt() -> bool:
            """Whoever waited for others to write must not come before a renewal that waited too."""
            return proven or time.monotonic() - asked < PROMPT

        if await self._database.arun(store.lose, lease.worker, reason, seen, prompt):
            emit(
                Happened(
                    name="worker.lost",
                    level=logging.ERROR,
                    worker=lease.worker,
                    fields={"reason": reason},
                )
            )
            remove_lock(lease.lock_path)

    async def take_back(self) -> list[Change]:
        """Recover every job whose worker is neither active nor draining. One that cannot be taken
        back is left behind for a while, and holds up no other.
        """
        done: list[Change] = []
        limit, now = SWEEP_STEP, time.monotonic()
        left = self._left = {id: at for id, at in self._left.items() if now - at < LEAVE_FOR}
        while True:
            looked = _Looked(self._decide)
            try:
                changes = await self._database.arun(store.sweep, looked.decide, limit, left)
            except Refused as error:
                # One of them cannot be taken back: find it by halves, and leave it behind.
                if limit > 1:
                    limit //= 2
                else:
                    emit(_left_behind(looked.last, error))
                    left[looked.last.id] = now
                    limit = SWEEP_STEP
                continue
            for change in changes:
                emit(told(change, logging.WARNING))
            done += changes
            if not changes:
                return done

    # --- prune ------------------------------------------------------------------------------------

    async def _prune(self) -> bool:
        """Prune if it is time, for no longer than a sweep's pause; returns whether all is gone."""
        now = time.monotonic()
        if now - self._pruned < self._prune_every:
            return True
        end = now + self._settings.sweep
        for state, keep in kept(self._settings):
            if not await self._prune_state(state, keep, end):
                return False  # The next sweep is due; then it goes on from here.
        await self._database.arun(store.prune_workers, KEEP_WORKERS)
        self._pruned = now
        return True

    @property
    def _prune_every(self) -> float:
        """Often enough that no job is kept for half as long again as the settings say."""
        return min([self._settings.prune_every, *(keep / 2 for _, keep in kept(self._settings))])

    async def _prune_state(self, state: JobState, keep: float, end: float) -> bool:
        """Step by step and not beyond `end`, with a pause as long as each step, so that claims get
        their turn; returns whether all is gone.
        """
        while True:
            step, began = self._prune_step, time.monotonic()
            if await self._database.arun(store.prune, state, keep, step) < step:
                return True
            took = time.monotonic() - began
            self._prune_step = self._next_step(took)
            await asyncio.sleep(max(PRUNE_PAUSE, took))
            if time.monotonic() >= end:
                return False

    def _next_step(self, took: float) -> int:
        """How many jobs go next, after a full step that took so many seconds."""
        if took > PRUNE_SLOW:
            return max(1, self._prune_step // 2)
        if took > PRUNE_QUICK:
            return self._prune_step
        return max(self._prune_step, min(self._prune_step * 2, PRUNE_MOST))


def kept(settings: Settings) -> list[tuple[JobState, float]]:
    """For how long finished jobs are kept, in seconds; those kept for ever are left out. Dead jobs
    are never pruned.
    """
    wanted = {
        JobState.SUCCEEDED: settings.keep_succeeded,
        JobState.CANCELLED: settings.keep_cancelled,
    }
    return [(state, keep) for state, keep in wanted.items() if keep is not None]


def decide_loss(job: Job, reason: str) -> Change:
    """What becomes of a job whose worker is gone."""
    return recover(job, plain_error("WorkerLost", f"worker {job.worker} vanished: {reason}"))


def _silence(lease: Lease) -> str:
    """That a lease ran out, and when its worker was last heard of: the end of its attempts is only
    when that was noticed.
    """
    with contextlib.suppress(ValueError, OverflowError, TypeError):  # Such a row is damaged.
        heard = datetime.fromtimestamp(lease.beat, UTC).isoformat(timespec="seconds")
        return f"its lease ran out: no sign of life since {heard}"
    return "its lease ran out: no sign of life"


class _Looked:
    """Decides about lost jobs, and remembers the last one."""

    def __init__(self, decide: Callable[[Job, str], Change]) -> None:
        self._decide = decide
        self._last: Job | None = None

    @property
    def last(self) -> Job:
        assert self._last is not None
        return self._last

    def decide(self, job: Job, reason: str) -> Change:
        self._last = job
        return self._decide(job, reason)


def _left_behind(job: Job, error: Refused) -> Happened:
    return Happened(
        name="job.unrecoverable",
        level=logging.ERROR,
        job=job.id,
        attempt=job.attempt,
        task=job.task,
        worker=job.worker,
        fields={"error": error.what, "hint": "onward doctor shows what is wrong with its rows"},
    )


def _undeclarable(lease: Lease, error: Refused) -> Happened:
    return Happened(
        name="worker.undeclarable",
        level=logging.ERROR,
        worker=lease.worker,
        fields={"error": error.what, "hint": "it is gone: mend its row, so that its jobs go on"},
    )


def _stumbled(error: DatabaseError) -> Happened:
    fields = {"error": str(error).splitlines()[0]}
    return Happened(name="keeper.stumbled", level=logging.WARNING, fields=fields)


def hold_lock(path: str) -> int:
    """Take a lock that lasts as long as this process; children started by exec do not have it.
    Returns its descriptor.

    Raises:
        DatabaseError: there can be no such file.
    """
    try:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise DatabaseError(
            f"the lock file {path} cannot be made: {error.strerror}",
            why="each worker holds one beside the database, so that others see when it has died",
            fix="let the worker's user write to that directory, and see that its disk has space",
        ) from error
    return fd


def is_free(path: str) -> bool:
    """Whether a lock file is there and nobody holds it: its process is dead."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (OSError, ValueError, TypeError):  # None there, or no path at all.
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def remove_lock(path: str | None) -> None:
    if path is not None:
        with contextlib.suppress(OSError):
            os.unlink(path)
