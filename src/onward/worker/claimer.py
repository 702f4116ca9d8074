"""Claimer: claims due jobs as long as there are free slots, and sleeps when there is nothing to
claim.

In:  wake-ups, and free slots.    Out: jobs that this worker owns, to the executor.
It takes only tasks that the worker knows, and leaves alone what the database lets nobody claim, so
that it holds up nothing else. Beneath every wake-up is a poll, quick after a hint and slower while
nothing comes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from onward.errors import DatabaseError, DatabaseUnavailable
from onward.events import Happened, emit, wanted
from onward.job import Job
from onward.store import store
from onward.store.database import Database, Refused, halves
from onward.store.store import Claimed
from onward.worker.lanes import START, Lanes
from onward.worker.refusing import Refusing
from onward.worker.stage import Complaint

FIRST_PAUSE = 0.01
MOST_PER_CLAIM = 500

PACE = 0.005
"""Seconds between two rounds, if the first took all that there was and had room for more: what
comes in the meantime is claimed together. Of jobs that come one by one each would else cost the
database a claim and a commit of its own. Where a queue's limit left some there is nothing to wait
for.
"""

BUSY_AFTER = 0.5
TELL_UNKNOWN_EVERY = 30.0

REFUSED = (Refused, UnicodeError)
"""What a claim raises because of one of its jobs: a rule of the database's, or bytes that are no
text.
"""


class Claimer:
    """Claims for one worker.

    Args:
        database: where from.
        worker: who claims.
        tasks: the names of the tasks it knows.
        queues: which queues, each with its own limit of slots or None.
        poll: the longest pause between two looks, in seconds.
        room: how many more jobs there is room for.
        running: how many jobs of a queue are held.
        start: takes the claimed jobs.
    """

    def __init__(
        self,
        database: Database,
        worker: str,
        tasks: Sequence[str],
        queues: Mapping[str, int | None],
        poll: float,
        *,
        room: Callable[[], int],
        running: Callable[[str], int],
        start: Callable[[list[Job]], None],
    ) -> None:
        self._database = database
        self._worker = worker
        self._known = frozenset(tasks)
        self._tasks = store.dumps(sorted(tasks))
        self._queues = queues
        self._poll = poll
        self._room = room
        self._running = running
        self._start = start
        self._lanes = Lanes()
        self._refusing = Refusing()
        self._complaint = Complaint()
        self._wake = asyncio.Event()
        self._hinted = False
        self._hint: tuple[str, int] | None = None
        self._pause = FIRST_PAUSE
        self._busy_since: float | None = None
        self._said_idle = True
        self._told_unknown = float("-inf")
        self._found_due = False
        self._searched = False
        self.idle = asyncio.Event()
        self.in_flight = False
        self.stopping = asyncio.Event()
        self.empty_looks = 0

    def hear(self, lane: tuple[str, int] | None = None) -> None:
        """Somebody says that something was enqueued, and perhaps where. That is believed by a
        worker that has found nothing anywhere else; any other looks for what comes first.
        """
        self._hinted = True
        if self.idle.is_set() and self._lanes.empty:
            self._hint = lane
        self.wake()

    def wake(self) -> None:
        """Something may be due again, or a slot is free."""
        self._pause = FIRST_PAUSE
        self._lanes.spoil()
        self.poke()

    def poke(self) -> None:
        """A slot is free, and the job that had it may have enqueued another."""
        self.empty_looks = 0
        self._wake.set()

    def stop(self) -> None:
        """Claim no more."""
        self.stopping.set()
        self._wake.set()

    async def run(self) -> None:
        """Claim until stopped."""
        while not self.stopping.is_set():
            self._wake.clear()
            room = min(self._room(), MOST_PER_CLAIM)
            if room <= 0:
                await self._rest(self._poll)  # Not every slot that gets free is told.
                continue
            asked_full = await self._claim(room)
            if self.stopping.is_set():
                return
            if not asked_full:
                await self._sleep()

    async def _claim(self, room: int) -> bool:
        """One round; returns whether there may be more at once."""
        self.in_flight = True
        began = time.monotonic()
        try:
            got = await self._round(room)
        except DatabaseUnavailable as error:
            self._complaint.make(
                Happened(
                    name="claim.waits",
                    level=logging.WARNING,
                    worker=self._worker,
                    fields={"error": str(error).splitlines()[0]},
                )
            )
            await self._rest(min(max(self._pause * 2, 0.2), 2.0))
            return True
        finally:
            self.in_flight = False
        self._complaint.over()
        await self._note_load(got >= room)
        if 0 < got < room:
            # At least one turn: what was claimed begins before the next look is made.
            left = began + PACE - time.monotonic() if self._lanes.empty else 0.0
            await asyncio.sleep(max(0.0, left))
        return got > 0

    async def _round(self, room: int) -> int:
        """Look where there is something, if that is due, and claim from the lanes in order."""
        if got := await self._claim_hinted(room):
            return got
        began = time.monotonic()
        full = self._lanes.want_look(began) and self._lanes.may_look(began, hinted=self._hinted)
        if full:
            self._hinted = False
            lanes = await self._database.aread(store.lanes, list(self._queues), self._known)
            self._lanes.looked(lanes, began)
            self._found_due |= any(lane.due_in <= 0 and not lane.known for lane in lanes)
        looked = time.monotonic()
        got = 0
        for lane, after in self._lanes.order():
            asked = min(room - got, self._limit(lane[0]))
            if asked > 0 and not self.stopping.is_set():
                got += await self._claim_lane(lane, after, asked)
            if got >= room:
                break
        if full:
            claims = 0.0 if self._searched else time.monotonic() - looked
            self._lanes.cost(looked - began, claims, found=got > 0)
        self._searched = False
        if got:
            self.empty_looks = 0
        elif full:
            self.empty_looks += 1
            await self._tell_unknown()
        return got

    async def _claim_hinted(self, room: int) -> int:
        """Claim from the lane of the last hint without a look; the look follows if it was right."""
        lane, self._hint = self._hint, None
        if lane is None or lane[0] not in self._queues or lane in self._lanes.crowded:
            return 0
        asked = min(room, self._limit(lane[0]))
        return await self._claim_lane(lane, START, asked) if asked > 0 else 0

    async def _claim_lane(self, lane: tuple[str, int], after: tuple[float, str], asked: int) -> int:
        if lane in self._refusing:
            claimed = await self._claim_around(lane, after, asked)
        else:
            try:
                claimed = self._taken(
                    await self._database.arun(
                        store.claim, self._worker, self._tasks, lane, after, asked
                    )
                )
            except REFUSED:
                claimed = await self._claim_apart(lane, after, asked)
        self._found_due = True
        self._lanes.claimed(lane, claimed, asked)
        return len(claimed)

    def _taken(self, claimed: list[Claimed]) -> list[Claimed]:
        """These jobs are ours: they begin."""
        if claimed:
            self._start([claim.job for claim in claimed])
            if wanted(logging.DEBUG):
                self._tell_claimed(claimed)
        return claimed

    # --- where jobs refuse to be claimed ----------------------------------------------------------

    async def _claim_around(
        self, lane: tuple[str, int], after: tuple[float, str], asked: int
    ) -> list[Claimed]:
        """Claim from a lane in which some jobs are left alone; now and then those are tried again,
        each by itself.
        """
        again: list[Claimed] = []
        if ids := self._refusing.again(lane, time.monotonic(), asked):
            again = await self._claim_these(lane, ids)
            self._refusing.tried(lane, ids, len(again))
        left = self._refusing.of(lane)
        try:
            return again + self._taken(
                await self._database.arun(
                    store.claim_around,
                    self._worker,
                    self._tasks,
                    lane,
                    after,
                    asked - len(again),
                    left,
                )
            )
        except REFUSED:
            if self._refusing.full(lane):
                return again
            return again + await self._claim_apart(lane, after, asked - len(again))

    async def _claim_apart(
        self, lane: tuple[str, int], after: tuple[float, str], asked: int
    ) -> list[Claimed]:
        """One of the jobs refuses, so none was claimed: find it, and claim its neighbours."""
        left = self._refusing.of(lane)
        ids = await self._database.arun(store.due, self._tasks, lane, after, asked, left)
        claimed = await self._claim_these(lane, ids)
        self._searched = True  # That took long, and will not the next time.
        if ids:
            self.wake()  # What stands behind those that refuse is next.
        return claimed

    async def _claim_these(self, lane: tuple[str, int], ids: Sequence[str]) -> list[Claimed]:
        """Claim these jobs, by halves where one of them refuses."""
        if not ids or self.stopping.is_set():
            return []
        try:
            return self._taken(await self._database.arun(store.claim_these, self._worker, ids))
        except REFUSED as error:
            if len(ids) == 1:
                self._leave(lane, ids[0], error)
                return []
        first, second = halves(ids)
        return [*await self._claim_these(lane, first), *await self._claim_these(lane, second)]

    def _leave(self, lane: tuple[str, int], id: str, error: Exception) -> None:
        """Leave a job alone that the database lets nobody claim, and say so."""
        if self._refusing.note(lane, id, time.monotonic()):
            emit(
                Happened(
                    name="claim.refused",
                    level=logging.ERROR,
                    job=id,
                    worker=self._worker,
                    fields={
                        "queue": lane[0],
                        "error": error.what if isinstance(error, DatabaseError) else str(error),
                        "hint": "the others go on; mend its row or the rule that it breaks"
                        " (onward doctor, onward job show), or cancel the job",
                    },
                )
            )

    def _tell_claimed(self, claimed: Sequence[Claimed]) -> None:
        for claim in claimed:
            emit(
                Happened(
                    name="job.claim",
                    level=logging.DEBUG,
                    job=claim.job.id,
                    attempt=claim.job.attempt,
                    task=claim.job.task,
                    worker=self._worker,
                )
            )

    def _limit(self, queue: str) -> int:
        limit = self._queues[queue]
        return MOST_PER_CLAIM if limit is None else limit - self._running(queue)

    async def _tell_unknown(self) -> None:
        """Due jobs that cannot be claimed are of tasks that this worker does not know: say so, now
        and then.
        """
        now = time.monotonic()
        found, self._found_due = self._found_due, False
        if not found or now - self._told_unknown < TELL_UNKNOWN_EVERY:
            return
        self._told_unknown = now
        for queue, task, count in await self._database.aread(store.read, "waiting_tasks"):
            if queue in self._queues and task not in self._known:
                emit(
                    Happened(
                        name="task.unknown",
                        level=logging.WARNING,
                        task=task,
                        worker=self._worker,
                        fields={
                            "queue": queue,
                            "due": count,
                            "hint": "import the module that declares it where the app is made,"
                            " deploy it, or start a worker that has it",
                        },
                    )
                )

    async def _note_load(self, full: bool) -> None:
        """A worker that has been busy for a while does not want to be woken by each enqueue."""
        now = time.monotonic()
        if not full:
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = now
        elif self._said_idle and now - self._busy_since > BUSY_AFTER:
            await self._say_idle(False)

    async def _say_idle(self, idle: bool) -> None:
        if self._database.notifies:
            await self._database.arun(store.set_idle, self._worker, idle)
        self._said_idle = idle

    async def _sleep(self) -> None:
        """Nothing to claim: sleep until a hint, until the next job is due, or until the poll."""
        if not self._said_idle:
            await self._say_idle(True)
            self._lanes.spoil()
            return
        self.idle.set()
        pause = min(self._pause, max(0.001, self._lanes.next_due))
        await self._rest(pause)
        self.idle.clear()
        if self._pause < self._poll:
            self._pause = min(self._pause * 2, self._poll)
        self._lanes.spoil()

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return
