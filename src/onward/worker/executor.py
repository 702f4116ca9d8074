"""Executor: runs claimed attempts, each to exactly one outcome.

In:  jobs that this worker owns.    Out: (job, outcome), to whoever settles.
`async` bodies run on the loop, plain functions in threads, and in a process of their own those that
ask for it or whose last attempt was lost. It never writes to the store and never decides what
becomes of a job.

What Python cannot stop is called by its name: a body that goes on after its time limit is
*abandoned*. Its attempt has failed on time; its slot is given back after a while; its retry is held
until the body ends.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from onward.config import Settings
from onward.job import Change, Job
from onward.policy import (
    Crashed,
    Discarded,
    Outcome,
    Raised,
    Released,
    Returned,
    Stopped,
    TimedOut,
)
from onward.running import Current
from onward.task import Task
from onward.worker.board import FOREVER, Board
from onward.worker.body import plain_error, run_async_body, run_body
from onward.worker.held import Held, Why
from onward.worker.isolation import SHORTAGE, Isolation
from onward.worker.threads import Threads

SLICE = 256
"""Bodies begun in one go before the loop gets a turn."""

AHEAD = 0.05
"""Jobs are claimed ahead of free slots if, as quickly as they end now, they begin within so many
seconds: where they are so short that slots would idle between two claims.
"""

MOST_AHEAD = 1_000

SAMPLE = 0.1
"""How long endings are counted to know how quickly jobs end now, in seconds."""

LATE = 0.5
"""A time limit is noticed so many seconds late only if something kept this process from running."""

LAST_BREATH = 2.0
"""Seconds until a job that had to be given back is due again: by then its process is gone, and with
it a body that nothing else could stop.
"""

HOLD = 10.0
"""How long the retry of an abandoned body waits at least, renewed while the body lives."""


class Executor:
    """Runs up to `concurrency` attempts at once.

    Args:
        tasks: the tasks by name.
        concurrency: how many slots.
        settings: the app's.
        board: where begun attempts and deadlines are written down.
        isolation: runs attempts in processes of their own.
        settle: takes each attempt's outcome.
    """

    def __init__(
        self,
        tasks: dict[str, Task[Any, Any]],
        concurrency: int,
        settings: Settings,
        board: Board,
        isolation: Isolation,
        settle: Callable[[Job, Outcome], None],
    ) -> None:
        self._tasks = tasks
        self.concurrency = concurrency
        self._settings = settings
        self._board = board
        self._isolation = isolation
        self._settle = settle
        self._loop = asyncio.get_running_loop()
        self._threads = Threads(self._loop)
        self._backlog: deque[tuple[float, Job]] = deque()
        self._filling = False
        self._waiting = 0  # For a process of their own: they will need a place on the board.
        self._closing: str | None = None
        self._ended_count = 0
        self._rate = 0.0
        self._sampled = time.monotonic()
        self.held: dict[str, Held] = {}
        self.abandoned: dict[tuple[str, int], Held] = {}
        self.stuck: set[tuple[str, int]] = set()
        self._given_back: set[tuple[str, int]] = set()
        self._unwritten: dict[tuple[str, int], int] = {}
        self.by_queue: Counter[str] = Counter()
        self.changed = asyncio.Event()

    # --- what the claimer asks --------------------------------------------------------------------

    def room(self) -> int:
        """How many more jobs to claim: free slots, and a little more where jobs are very short."""
        ahead = min(MOST_AHEAD, int(AHEAD * self._ending_rate()))
        slots = self.concurrency + ahead - self._occupied
        return min(slots, self._places) - len(self._backlog)

    def _ending_rate(self) -> float:
        """How many jobs end in a second now."""
        passed = time.monotonic() - self._sampled
        if passed >= SAMPLE:
            self._rate = self._ended_count / passed
            self._ended_count = 0
            self._sampled += passed
        return self._rate

    @property
    def idle(self) -> bool:
        return not self.held and not self._backlog

    @property
    def full(self) -> bool:
        """Whether bodies that never end leave too little room, or none."""
        return len(self.abandoned) > self.concurrency or len(self.stuck) >= self.concurrency

    @property
    def hopeless(self) -> bool:
        """Whether nothing is held but bodies that never end."""
        return bool(self.stuck) and len(self.stuck) == len(self.held) and not self._backlog

    def ids(self) -> set[str]:
        """The jobs that are held here, begun or not."""
        return {*self.held, *(job.id for _, job in self._backlog)}

    # --- start ------------------------------------------------------------------------------------

    def start(self, jobs: Iterable[Job]) -> None:
        """Take over jobs that this worker now owns. Those that come after the end has begun go
        straight back.
        """
        now = time.monotonic()
        for job in jobs:
            self.by_queue[job.queue] += 1
            self._backlog.append((now, job))
        if self._closing is None:
            self._fill()
        else:
            self.release_backlog(self._closing)

    def _fill(self) -> None:
        """Begin what waits, as long as there are slots; a long row of short bodies lets the loop
        turn in between.
        """
        if self._filling:
            return
        self._filling = True
        try:
            for _ in range(min(SLICE, len(self._backlog), self._slots)):
                self._begin(self._backlog.popleft()[1])
            if self._backlog and self._slots > 0:
                self._loop.call_soon(self._fill)
        finally:
            self._filling = False

    @property
    def _slots(self) -> int:
        """How many more bodies may begin now."""
        return min(self.concurrency - self._occupied, self._places)

    @property
    def _places(self) -> int:
        return self._board.free - self._waiting

    @property
    def _occupied(self) -> int:
        """Slots that are taken: by what runs, and for a while by bodies that were abandoned."""
        return len(self.held) + len(self.abandoned) - len(self._given_back)

    def _begin(self, job: Job) -> None:
        task = self._tasks[job.task]
        held = Held(job, task, Current(job, task.app))
        self.held[job.id] = held
        try:
            self._dispatch(held)
        except Exception as error:  # No thread or no memory left: it has not begun.
            why = f"it could not begin: {type(error).__name__}: {error}"
            self._ended(held, Released(why, delay=SHORTAGE))

    def _dispatch(self, held: Held) -> None:
        """Hand the body to where it runs."""
        task, job = held.task, held.job
        if (task.isolation == "process" or job.losses) and self._isolation.possible:
            self._begin_isolated(held)
            return
        self._body_begins(held)
        if task.is_async:
            self._begin_on_loop(held)
        else:
            body = partial(run_body, task, job, held.current)
            self._threads.run(body, partial(self._ended, held))

    def _body_begins(self, held: Held) -> None:
        """From now on its time limit runs, and whoever watches knows that it has begun."""
        held.started = limit = time.monotonic()
        if held.job.timeout is None:
            limit = FOREVER
        else:
            held.still = self._board.stood_still
            held.timer = self._loop.call_later(held.job.timeout, self._time_out, held)
            limit += held.job.timeout
        held.place = self._board.begin(held.job.id, held.job.attempt, held.started, limit)

    def _begin_on_loop(self, held: Held) -> None:
        body = self._run_on_loop(held)
        if sys.version_info >= (3, 12):
            # A body that ends without waiting needs no turn of the loop.
            held.asyncio_task = asyncio.Task(body, loop=self._loop, eager_start=True)
        else:
            held.asyncio_task = asyncio.Task(body, loop=self._loop)

    async def _run_on_loop(self, held: Held) -> None:
        held.begun = True
        self._ended(held, await run_async_body(held.task, held.job, held.current))

    def _interrupt(self, held: Held) -> None:
        """Raise an exception into the body, where that is possible. One that is interrupted before
        its first step has nobody to say how it ended.
        """
        body = held.asyncio_task
        if body is None:
            return
        body.cancel()
        if not held.begun:
            body.add_done_callback(lambda _: self._ended(held, Stopped()))

    def _begin_isolated(self, held: Held) -> None:
        held.waits = True
        self._waiting += 1
        attempt = self._isolation.run(
            held.job, held.current.cancel_token, partial(self._isolated_begins, held)
        )
        held.kill = attempt.kill
        attempt.then(partial(self._ended, held))

    def _isolated_begins(self, held: Held) -> None:
        self._waits_no_more(held)
        self._body_begins(held)

    def _waits_no_more(self, held: Held) -> None:
        if held.waits:
            held.waits = False
            self._waiting -= 1

    # --- end --------------------------------------------------------------------------------------

    def _ended(self, held: Held, outcome: Outcome) -> None:
        """The body has ended; its outcome counts if nobody has spoken for it meanwhile."""
        if held.settled:
            self._free_abandoned(held)
            return
        if held.timer is not None and held.stopping is None and (late := self._late(held)) > 0:
            if late > LATE and not held.postponed:
                held.postponed = True
                held.timer.cancel()
                self._loop.call_later(LATE, self._ended, held, outcome)
                return
            held.stopping = Why.TIMEOUT
        self._ended_count += 1
        self._let_go(held)
        self._count_down(held.job.queue)
        self._settle(held.job, outcome if held.stopping is None else self._as_asked(held, outcome))
        if self._backlog:
            self._fill()
        self.changed.set()

    def _late(self, held: Held) -> float:
        """How many seconds after its limit the body ended, unseen: it blocked the loop, or held the
        interpreter. Not counted is the time in which everything stood still; whoever watches may
        need a moment to tell us of that.
        """
        if held.job.timeout is None or held.current.ended_at is None:
            return 0.0
        still = self._board.stood_still - held.still
        return held.current.ended_at - held.started - held.job.timeout - still

    def _as_asked(self, held: Held, outcome: Outcome) -> Outcome:
        """What the outcome means in the light of why the body was asked to stop."""
        if held.stopping is Why.TIMEOUT:
            return TimedOut(self._limit_text(held))
        if isinstance(outcome, Returned) or held.stopping is None:
            return outcome
        if held.stopping is Why.CANCEL:
            return Stopped() if isinstance(outcome, Crashed) and held.kill else outcome
        interrupted = isinstance(outcome, Raised | Crashed | Stopped)
        dropped = isinstance(outcome, Discarded) and outcome.by_rule
        return Released(held.stopping.value) if interrupted or dropped else outcome

    def _let_go(self, held: Held) -> None:
        held.settled = True
        self._waits_no_more(held)
        if held.timer is not None:
            held.timer.cancel()
            held.timer = None
        if held.place is not None:
            if held.job.timeout is not None:
                self._board.relax(held.place)
            self._unwritten[held.key] = held.place
            held.place = None
        self.stuck.discard(held.key)
        self.held.pop(held.job.id, None)

    def written(self, changes: Sequence[Change]) -> None:
        """The outcomes of these attempts are written, or were refused."""
        for change in changes:
            place = self._unwritten.pop((change.id, change.attempt), None)
            if place is not None:
                self._board.end(place)
        if self._backlog:
            self._fill()

    def _count_down(self, queue: str) -> None:
        self.by_queue[queue] -= 1
        if not self.by_queue[queue]:
            del self.by_queue[queue]

    # --- time limit -------------------------------------------------------------------------------

    def _time_out(self, held: Held) -> None:
        """The limit has passed: ask the body to stop, and give it a moment to do so."""
        if (more := self._more_time(held)) is not None:
            held.timer = self._loop.call_later(more, self._time_out, held)
            return
        held.stopping = Why.TIMEOUT
        held.current.cancel_token.request()
        if held.place is not None:
            # A body that blocks the loop while it cleans up must still be seen by who watches.
            left = FOREVER if held.kill else time.monotonic() + self._settings.timeout_grace
            self._board.extend(held.place, left)
        if held.kill is not None:
            held.kill()
            return
        self._interrupt(held)
        held.timer = self._loop.call_later(self._settings.timeout_grace, self._abandon, held)

    def _more_time(self, held: Held) -> float | None:
        """How much longer the body may go on, if everything stood still meanwhile: it did not work
        in that time. We come late then, and whoever watches may need a moment to tell us.
        """
        assert held.job.timeout is not None
        still = self._board.stood_still - held.still
        late = time.monotonic() - held.started - held.job.timeout
        if still > 0 and late < still:
            if held.place is not None:
                self._board.extend(held.place, held.started + held.job.timeout + still)
            return still - late
        if late - still > LATE and not held.doubted:
            held.doubted = True
            return LATE
        return None

    def _abandon(self, held: Held) -> None:
        """The body goes on: its attempt has failed all the same, and the body is on its own. Not so
        if its job was asked to stop: that is `cancelling` until the body has ended, and a worker
        whose slots are full of such bodies ends.
        """
        if held.cancelled_at is not None:
            if held.place is not None:
                self._board.relax(held.place)
            wait = self._settings.abandon_after
            held.timer = self._loop.call_later(wait, self.stuck.add, held.key)
            return
        self._let_go(held)
        self.abandoned[held.key] = held
        self._interrupt(held)
        self._loop.call_later(self._settings.abandon_after, self._give_slot_back, held)
        self._settle(held.job, TimedOut(self._limit_text(held), abandoned=True, hold=HOLD))
        self.changed.set()

    def _give_slot_back(self, held: Held) -> None:
        if held.key in self.abandoned:
            self._given_back.add(held.key)
            self._count_down(held.job.queue)
            self._fill()
            self.changed.set()

    def _free_abandoned(self, held: Held) -> None:
        if self.abandoned.pop(held.key, None) and held.key not in self._given_back:
            self._count_down(held.job.queue)
        self._given_back.discard(held.key)
        self._fill()
        self.changed.set()

    def _limit_text(self, held: Held) -> str:
        return plain_error(
            "TimeLimit", f"the attempt passed its time limit of {held.job.timeout:g} s"
        )

    # --- cancel and stop --------------------------------------------------------------------------

    def ask_cancel(self, asked: Iterable[tuple[str, int]]) -> None:
        """The database says that these attempts have been asked to stop. Each look goes one step
        further.
        """
        now = time.monotonic()
        for job, attempt in asked:
            held = self.held.get(job)
            if held is None or held.job.attempt != attempt:
                self._cancel_backlog(job, attempt)
                continue
            held.ask_cancel(now)
            self._press(held, now)

    def _press(self, held: Held, now: float) -> None:
        """A token first, then an exception on the loop, then a kill. A body that goes on after the
        exception gets another, but not before it had the time to clean up.
        """
        waited = now - (held.cancelled_at or now)
        if held.kill is not None and (held.waits or waited >= self._settings.cancel_kill_after):
            held.kill()
        elif waited >= self._settings.cancel_raise_after and now >= held.spared_until:
            held.spared_until = now + self._settings.cancel_kill_after
            self._interrupt(held)

    def _cancel_backlog(self, job: str, attempt: int) -> None:
        """A job that has not begun simply does not begin."""
        for entry in list(self._backlog):
            if (entry[1].id, entry[1].attempt) == (job, attempt):
                self._backlog.remove(entry)
                self._count_down(entry[1].queue)
                self._settle(entry[1], Released("cancelled"))

    def begin_no_more(self, why: Why) -> None:
        """From now on only what has begun goes on; everything else is given back."""
        self._closing = why.value
        self.release_backlog(why.value)
        for held in list(self.held.values()):
            if held.waits and held.kill is not None:
                held.stopping = held.stopping or why
                held.kill()

    def release_backlog(self, why: str, older_than: float = 0.0) -> None:
        """Give back what has not begun, free of charge."""
        limit = time.monotonic() - older_than
        while self._backlog and self._backlog[0][0] <= limit:
            _, job = self._backlog.popleft()
            self._count_down(job.queue)
            self._settle(job, Released(why))
        self.changed.set()

    def interrupt_all(self, why: Why) -> None:
        """Ask every body to stop now."""
        for held in list(self.held.values()):
            held.stopping = held.stopping if held.stopping is Why.TIMEOUT else why
            held.current.cancel_token.request()
            if held.kill is not None:
                held.kill()
            else:
                self._interrupt(held)

    def release_rest(self, why: str) -> None:
        """Speak for every body that has not stopped: the process is about to end, and the bodies
        with it.
        """
        self.release_backlog(why)
        for held in list(self.held.values()):
            self._let_go(held)
            self._count_down(held.job.queue)
            if held.stopping is Why.TIMEOUT:
                limit = self._limit_text(held)
                self._settle(held.job, TimedOut(limit, abandoned=True, hold=LAST_BREATH))
            else:
                self._settle(held.job, Released(why, delay=LAST_BREATH))

    async def empty(self, seconds: float) -> bool:
        """Wait until nothing is held, at most so long; returns whether nothing is."""
        end = time.monotonic() + seconds
        while not self.idle and (left := end - time.monotonic()) > 0:
            self.changed.clear()
            try:
                async with asyncio.timeout(min(left, 1.0)):
                    await self.changed.wait()
            except TimeoutError:
                continue
        return self.idle

    async def close(self) -> None:
        self._threads.close()
        await self._isolation.close()
