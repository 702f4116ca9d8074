"""Heart and keeper on a clock of the tests: leases are renewed, what vanished is taken back, what
is old goes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from onward import Event, JobState, Onward, Settings
from onward.errors import DatabaseError, DatabaseUnavailable, JobNotFound
from onward.ids import new_id
from onward.job import Change, Job
from onward.store import store
from onward.store.database import Database
from onward.store.store import Lease, Registration
from onward.worker import clocks, heart, keeper
from onward.worker.board import Board
from onward.worker.clocks import Clocks, Reading, Step, went_back
from onward.worker.heart import Heart
from onward.worker.keeper import PRUNE_PAUSE, Keeper, decide_loss, hold_lock, is_free
from tests.store.builders import (
    apply,
    claim,
    enqueue,
    get,
    hand,
    register,
    retry,
    running,
    shift_clock,
    state_of,
    succeed,
)

SLOW = Settings(lease=10, beat=3, sweep=2)


class Clock:
    """The machine's clock, as a stage sees it; pauses take their time on it, and are noted."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []
        self.most = 1_000
        self.extra = 0.0
        self.off = 0.0
        self.patience: list[float] = []
        self.impatient = False
        self._sleep = asyncio.sleep

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return time.time() + self.off

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds + self.extra
        if len(self.pauses) >= self.most:
            raise asyncio.CancelledError
        await self._sleep(0)

    async def wait(self, tasks: set[asyncio.Future[Any]], timeout: float) -> Any:
        """With patience for the real database, unless a test has none."""
        self.patience.append(timeout)
        return await asyncio.wait(tasks, timeout=0.0 if self.impatient else 60)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    plain = SimpleNamespace(
        sleep=clock.sleep,
        wait=clock.wait,
        ensure_future=asyncio.ensure_future,
        gather=asyncio.gather,
    )
    for module in (heart, keeper, clocks):
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "asyncio", plain)
    return clock


@pytest.fixture(autouse=True)
def _everything_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "onward")


@pytest.fixture
def board() -> Iterator[Board]:
    with closing(Board(4)) as board:
        yield board


class Slow:
    """The app's database, which takes its time to answer, or does not."""

    def __init__(self, app: Onward, clock: Clock, seconds: float = 0.0) -> None:
        self.app = app
        self.clock = clock
        self.seconds = seconds
        self.error: Exception | None = None
        self.errors: list[Exception | None] = []
        self.hangs: asyncio.Event | None = None
        self.local = app.database.local
        self.first: Callable[[], object] | None = None
        self.asked = 0

    async def aread(self, *asked: Any) -> Any:
        return await self._answer(self.app.database.aread, asked)

    async def arun(self, *asked: Any) -> Any:
        if asked[0] is store.lose and self.first is not None:
            self.first()
        return await self._answer(self.app.database.arun, asked)

    async def _answer(self, ask: Callable[..., Awaitable[Any]], asked: tuple[Any, ...]) -> Any:
        self.asked += 1
        if self.hangs is not None:
            await self.hangs.wait()
        self.clock.now += self.seconds
        error = self.errors.pop(0) if self.errors else self.error
        if error is not None:
            raise error
        return await ask(*asked)


def on_loop(app: Onward, stage: Coroutine[Any, Any, Any]) -> Any:
    """Run a stage on a loop of its own, and close what the database holds for that loop. A stage
    for ever ends with the clock's last pause.
    """

    async def run() -> Any:
        try:
            return await stage
        except asyncio.CancelledError:
            return None
        finally:
            await app.database.close_loop()

    return asyncio.run(run())


def told(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    """The events of this name, as they are logged."""
    return [text for text in caplog.messages if text.startswith(name)]


# --- heart ----------------------------------------------------------------------------------------


def until(app: Onward, worker: str) -> float:
    return next(lease.until for lease in app.database.read(store.leases) if lease.worker == worker)


def test_a_beat_renews_the_lease_and_says_so_on_the_board(
    app: Onward, clock: Clock, board: Board
) -> None:
    """The board holds the time at which the renewal was asked for: an answer may take long."""
    worker = register(app.database, lease=10.0)
    before = until(app, worker)
    shift_clock(app.database, 5.0)
    mine = Heart(cast(Database, Slow(app, clock, 0.5)), lease=10.0, beat=3.0)
    mine.boards[worker] = board
    assert on_loop(app, mine.beat_once())
    assert board.last_beat == 100.0
    assert not board.lost
    assert until(app, worker) == pytest.approx(before + 5.0, abs=2.0)
    assert clock.patience == [2.5]  # A quarter of a lease: the next try must come in time.


def test_a_renewal_that_hangs_is_not_waited_for_and_counts_if_it_comes(
    app: Onward, clock: Clock, board: Board, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connection may be dead: the next goes over another. An answer that comes late says
    nothing newer than one that came before it.
    """
    worker = register(app.database)
    slow = Slow(app, clock)
    mine = Heart(cast(Database, slow), lease=10.0, beat=3.0)
    mine.boards[worker] = board

    async def beats() -> None:
        hangs = slow.hangs = asyncio.Event()
        clock.impatient = True
        assert not await mine.beat_once()
        assert told(caplog, "beat.missed") == ['beat.missed error="no answer in time"']
        slow.hangs, clock.impatient, clock.now = None, False, 102.5
        assert await mine.beat_once()
        assert board.last_beat == 102.5
        hangs.set()
        await asyncio.wait(others())
        assert board.last_beat == 102.5
        hangs = slow.hangs = asyncio.Event()
        clock.impatient, clock.now = True, 105.0
        assert not await mine.beat_once()
        hangs.set()
        await asyncio.wait(others())
        assert board.last_beat == 105.0

    on_loop(app, beats())
    assert not board.lost


def test_a_heart_that_ends_leaves_nothing_under_way(
    app: Onward, clock: Clock, board: Board
) -> None:
    slow = Slow(app, clock)
    mine = Heart(cast(Database, slow), lease=10.0, beat=3.0)
    mine.boards[register(app.database)] = board
    clock.most = 2
    clock.impatient = True

    async def run() -> set[asyncio.Task[Any]]:
        slow.hangs = asyncio.Event()
        with pytest.raises(asyncio.CancelledError):
            await mine.run()
        return others()

    assert on_loop(app, run()) == set()
    assert slow.asked == 2


def others() -> set[asyncio.Task[Any]]:
    """What runs on the loop beside the caller."""
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}


def test_a_registration_whose_answer_was_lost_may_be_repeated(app: Onward, clock: Clock) -> None:
    """The same process start again is the same worker, with the lease that it has."""
    mine = Registration(
        id=new_id(),
        name="tests",
        host="here",
        pid=1,
        version="0",
        queues=("default",),
        tasks=(),
        concurrency=1,
        lease=10.0,
    )
    on_loop(app, heart.register(app.database, mine))
    (lease,) = app.database.read(store.leases)
    assert lease.worker == mine.id
    on_loop(app, heart.register(app.database, mine))
    assert app.database.read(store.leases) == [lease]


def test_a_worker_that_was_given_up_learns_it_by_its_board(
    app: Onward, clock: Clock, board: Board, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, by name; one that has left the boards meanwhile has ended by itself."""
    lost, left = register(app.database), register(app.database)
    for worker in (lost, left):
        app.database.run(store.lose, worker, "a sweeper was sure")
    with closing(Board(4)) as other:

        class Leaving:
            async def arun(self, *asked: Any) -> Any:
                answer = await app.database.arun(*asked)
                del mine.boards[left]
                return answer

        mine = Heart(cast(Database, Leaving()), lease=10.0, beat=3.0)
        mine.boards |= {lost: board, left: other}
        assert on_loop(app, mine.beat_once())
        assert not other.lost
    assert board.lost
    assert board.last_beat == 0.0
    (text,) = told(caplog, "worker.lost")
    assert f"worker={lost}" in text
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_heart_without_workers_asks_nothing(app: Onward, clock: Clock) -> None:
    slow = Slow(app, clock)
    assert on_loop(app, Heart(cast(Database, slow), 10.0, 3.0).beat_once()) is True
    assert slow.asked == 0


@pytest.mark.parametrize(
    ("error", "text"),
    [
        pytest.param(DatabaseUnavailable("nobody is there"), "[OW301] nobody is there", id="away"),
        pytest.param(TimeoutError(), "no answer in time", id="silent"),
    ],
)
def test_a_missed_beat_is_told_once_in_an_outage(
    app: Onward,
    clock: Clock,
    board: Board,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    text: str,
) -> None:
    """It is no loss: the board keeps the last beat. The next outage is told again."""
    worker = register(app.database)
    slow = Slow(app, clock)
    mine = Heart(cast(Database, slow), lease=10.0, beat=3.0)
    mine.boards[worker] = board

    async def two_outages() -> list[bool]:
        answers = []
        for problem in (error, error, None, error):
            slow.error = problem
            answers.append(await mine.beat_once())
        return answers

    assert on_loop(app, two_outages()) == [False, False, True, False]
    assert caplog.messages == [f'beat.missed error="{text}"'] * 2
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert board.last_beat == 100.0
    assert not board.lost


@pytest.mark.parametrize(
    ("seconds", "away", "pause"),
    [
        pytest.param(0.0, False, 3.0, id="in time"),
        pytest.param(1.0, False, 2.0, id="after a slow answer"),
        pytest.param(0.0, True, 0.6, id="sooner while it is away"),
        pytest.param(9.0, False, 0.05, id="never without a pause"),
    ],
)
def test_a_heart_beats_evenly(
    app: Onward, clock: Clock, board: Board, seconds: float, away: bool, pause: float
) -> None:
    slow = Slow(app, clock, seconds)
    slow.error = DatabaseUnavailable("nobody is there") if away else None
    mine = Heart(cast(Database, slow), lease=30.0, beat=3.0)
    mine.boards[register(app.database)] = board
    clock.most = 3
    on_loop(app, mine.run())
    assert clock.pauses == pytest.approx([pause] * 3)
    assert slow.asked == 3


# --- keeper: what vanished ------------------------------------------------------------------------


def owned(app: Onward, lock_path: Path | None = None) -> Job:
    """A job that runs on a worker with a lease of ten seconds."""
    path = None if lock_path is None else str(lock_path)
    return running(app.database, register(app.database, lease=10.0, lock_path=path))


def test_a_lease_that_ran_out_gives_its_jobs_back(
    app: Onward, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Once it was seen unchanged for the patience of a sweeper; the worker and each job are told,
    and the attempt keeps the reason.
    """
    job = owned(app)
    (lease,) = app.database.read(store.leases)
    shift_clock(app.database, 11.0)
    mine = Keeper(app.database, SLOW, list)

    async def sweeps() -> list[list[Change]]:
        found = []
        for clock.now in (100.0, 107.9, 108.0):
            found.append(await mine.sweep())
        return found

    first, second, (change,) = on_loop(app, sweeps())
    assert first == second == []
    assert (change.id, change.event, change.before) == (job.id, Event.RECOVER, JobState.RUNNING)
    heard = datetime.fromtimestamp(lease.beat, UTC).isoformat(timespec="seconds")
    reason = f"its lease ran out: no sign of life since {heard}"
    assert msgspec.json.decode(change.error or "") == {
        "type": "WorkerLost",
        "message": f"worker {job.worker} vanished: {reason}",
        "traceback": "",
    }
    assert (get(app.database, job.id).attempt, get(app.database, job.id).losses) == (2, 1)
    assert told(caplog, "worker.lost") == [f'worker.lost worker={job.worker} reason="{reason}"']
    (back,) = told(caplog, "job.recover")
    assert job.id in back
    levels = {record.getMessage().split()[0]: record.levelname for record in caplog.records}
    assert levels == {"worker.lost": "ERROR", "job.recover": "WARNING"}


def test_a_free_lock_gives_its_jobs_back_at_once(
    app: Onward, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that is dead needs no patience, though its lease runs for long yet."""
    free = tmp_path / "lock"
    free.touch()
    job = owned(app, free)
    (change,) = on_loop(app, Keeper(app.database, SLOW, list).sweep())
    assert (change.id, change.event) == (job.id, Event.RECOVER)
    assert told(caplog, "worker.lost") == [
        f'worker.lost worker={job.worker} reason="its process is gone: its lock is free"'
    ]
    assert not free.exists()


@pytest.mark.parametrize("what", ["renewed", "late"])
def test_a_worker_that_may_have_beaten_meanwhile_is_not_lost(
    app: Onward, clock: Clock, what: str
) -> None:
    """Between the look and the write it renewed its lease; or the write had to wait, and whoever
    waits for the database may go before a renewal that waits too.
    """
    job = owned(app)
    assert job.worker is not None
    worker = job.worker
    shift_clock(app.database, 11.0)
    slow = Slow(app, clock)

    def renew() -> None:
        app.database.run(store.beat, [worker], 10.0)
        shift_clock(app.database, 31.0)

    def wait() -> None:
        clock.now += 1.0

    slow.first = renew if what == "renewed" else wait
    mine = Keeper(cast(Database, slow), SLOW, list)

    async def sweeps() -> None:
        for clock.now in (100.0, 108.0):
            await mine.sweep()

    on_loop(app, sweeps())
    assert state_of(app.database, job.id) is JobState.RUNNING


@pytest.mark.parametrize("slept", [True, False])
def test_a_keeper_that_stood_still_trusts_no_earlier_look(
    app: Onward, clock: Clock, slept: bool
) -> None:
    """After a suspension everybody's lease is over: who lives gets the time to renew it."""
    job = owned(app)
    shift_clock(app.database, 11.0)
    clock.extra = 60.0 if slept else 0.0
    clock.most = 7
    on_loop(app, Keeper(app.database, SLOW, list).run())
    assert state_of(app.database, job.id) is (JobState.RUNNING if slept else JobState.QUEUED)
    assert set(clock.pauses) == {2.0}


@pytest.mark.parametrize(
    ("seconds", "state"), [(1.5, JobState.RUNNING), (0.9, JobState.QUEUED)], ids=["slow", "prompt"]
)
def test_a_keeper_that_waits_for_its_look_trusts_no_earlier_one(
    app: Onward, clock: Clock, seconds: float, state: JobState
) -> None:
    """Whoever could not ask for a while may not have seen a renewal."""
    job = owned(app)
    shift_clock(app.database, 11.0)
    mine = Keeper(cast(Database, Slow(app, clock, seconds)), SLOW, list)
    clock.most = 7
    on_loop(app, mine.run())
    assert state_of(app.database, job.id) is state


def test_one_job_that_cannot_be_taken_back_holds_up_no_other(
    app: Onward, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """It is found by halves, told with all its names, and left behind; the others go on."""
    worker = register(app.database)
    ids = enqueue(app.database, 7)
    jobs = claim(app.database, worker)
    bad = next(job for job in jobs if job.id == ids[3])
    app.database.run(store.lose, worker, "killed")
    reasons: set[str] = set()

    def decide(job: Job, reason: str) -> Change:
        reasons.add(reason)
        change = decide_loss(job, reason)
        return msgspec.structs.replace(change, losses=-1) if job.id == bad.id else change

    changes = on_loop(app, Keeper(app.database, SLOW, list, decide).take_back())
    assert {change.id for change in changes} == set(ids) - {bad.id}
    assert reasons == {"killed"}
    assert state_of(app.database, bad.id) is JobState.RUNNING
    (text,) = told(caplog, "job.unrecoverable")
    for part in (f"job={bad.id}", "attempt=1", f"task={bad.task}", f"worker={worker}", " error="):
        assert part in text
    assert text.endswith('hint="onward doctor shows what is wrong with its rows"')
    assert len(told(caplog, "job.recover")) == 6
    on_loop(app, Keeper(app.database, SLOW, list).take_back())  # What holds it up is mended.


# --- keeper: the clock ----------------------------------------------------------------------------


def test_what_was_due_is_due_again_after_a_step_back(
    app: Onward, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Moved by the step, in order, on every lane. What is due later stays, and so does what was
    enqueued or given back since. A keeper that sees the step later finds nothing to move.
    """
    database = app.database
    worker = register(database)
    (again, stuck) = (running(database, worker) for _ in range(2))
    apply(database, retry(stuck, abandoned=True))
    due = [*enqueue(database, 3), *enqueue(database, 2, queue="mail", priority=7)]
    due += enqueue(database, 1, delay=1.0)  # Due by the old time when the step is seen.
    others = enqueue(database, 1, delay=1800.0)
    before = due_times(app)

    async def steps() -> None:
        first, second = Clocks(database), Clocks(database)
        await first.look()
        await second.look()
        shift_clock(database, -3600.0)
        clock.now += 2.0
        others.extend(enqueue(database, 1, delay=1800.0))
        apply(database, retry(again, delay=60.0))
        since = due_times(app)
        await first.look()
        after = due_times(app)
        assert {id_: after[id_] - before[id_] for id_ in due} == dict.fromkeys(
            due, pytest.approx(-3600.0, abs=4.0)
        )
        assert sorted(due, key=after.__getitem__) == sorted(due, key=before.__getitem__)
        assert {after[id_] - since[id_] for id_ in (*others, again.id, stuck.id)} == {0.0}
        clock.now += 1.0
        await second.look()
        assert due_times(app) == after

    on_loop(app, steps())
    assert [text.rpartition(" ")[2] for text in told(caplog, "clock.stepped")] == [
        "due_again=6",
        "due_again=0",
    ]


STEPS_BACK = {
    "back": (0.0, -3600.0),
    "a day back": (0.0, -86_400.0),
    "back by less than a lease": (0.0, -8.0),
    "forward, and put right": (3600.0, 0.0),
}


@pytest.mark.parametrize("beaten", [False, True], ids=["before its beat", "after its beat"])
@pytest.mark.parametrize("step", STEPS_BACK)
def test_a_dead_workers_lease_does_not_last_as_long_as_the_clock_went_back(
    app: Onward, clock: Clock, step: str, beaten: bool
) -> None:
    """It was written by a clock that has gone back since. It begins anew: nobody loses a moment of
    it, and the jobs of a worker that is dead come back after a lease.
    """
    before, after = STEPS_BACK[step]
    shift_clock(app.database, before)
    job = owned(app)
    assert job.worker is not None
    shift_clock(app.database, after)
    if beaten:
        app.database.run(store.beat, [job.worker], 10.0)
    later = 10.0 if beaten and step == "back by less than a lease" else 0.0
    assert 10.0 <= back_after(app, clock, job, shift=after) <= 10.0 + later + 2 * SLOW.sweep


def test_a_lease_begins_anew_once_however_many_sweep(app: Onward, clock: Clock) -> None:
    """A worker that lives has at least what it had, and its beats go on from there."""
    job = owned(app)
    assert job.worker is not None
    shift_clock(app.database, -3600.0)
    on_loop(app, Keeper(app.database, SLOW, list).sweep())
    (first,) = app.database.read(store.leases)
    assert not first.ahead
    assert first.until - first.beat == pytest.approx(10.0)
    assert first.beat == pytest.approx(time.time() - 3600.0, abs=5.0)
    shift_clock(app.database, -3598.0)
    for _ in range(2):
        on_loop(app, Keeper(app.database, SLOW, list).sweep())
    assert until(app, job.worker) == first.until
    app.database.run(store.beat, [job.worker], 10.0)
    assert until(app, job.worker) == pytest.approx(first.until + 2.0, abs=1.9)


def test_a_sweep_writes_no_lease_while_the_clock_goes_on(
    app: Onward, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor by what it saw before it stood still."""
    owned(app)
    written: list[str] = []
    write = app.database.arun  # Reads go through it, too.

    async def noted(op: Any, *args: Any) -> Any:
        if op is not store.leases:
            written.append(op.__name__)
        return await write(op, *args)

    monkeypatch.setattr(app.database, "arun", noted)
    for step in (0.0, 5.0, 3600.0, 3599.0):
        shift_clock(app.database, step)
        on_loop(app, Keeper(app.database, SLOW, list).sweep())
    shift_clock(app.database, -3600.0)
    on_loop(app, Keeper(cast(Database, Slow(app, clock, 1.5)), SLOW, list).sweep())
    assert set(written) == {"sweep"}
    on_loop(app, Keeper(app.database, SLOW, list).sweep())
    assert written[-2:] == ["redate", "sweep"]


def back_after(app: Onward, clock: Clock, job: Job, *, shift: float = 0.0) -> float:
    """After how many seconds, on all clocks, a keeper takes this job back; much later: not soon."""
    mine = Keeper(app.database, SLOW, list)
    began = clock.now

    async def sweeps() -> float:
        while (passed := clock.now - began) <= 60.0:
            shift_clock(app.database, shift + passed)
            if job.id in {change.id for change in await mine.sweep()}:
                return passed
            clock.now += SLOW.sweep
        return 1e9

    return cast(float, on_loop(app, sweeps()))


AGES = {"sqlite": ("-1e15", "1e15"), "postgres": ("'4000-01-01 BC'", "'250000-01-01'")}
"""Before and after all times that Python knows."""


@pytest.mark.parametrize(
    ("until", "beat", "own"),
    [
        pytest.param(None, 1, True, id="heard of in ages"),
        pytest.param(None, 0, True, id="heard of ages ago"),
        pytest.param(1, None, False, id="a lease for ages"),
        pytest.param(0, None, True, id="a lease over for ages"),
        pytest.param(1, 1, True, id="both in ages"),
        pytest.param(0, 1, True, id="the wrong way round"),
        pytest.param(0, 0, True, id="both ages ago"),
    ],
)
def test_a_workers_row_that_makes_no_sense_holds_up_no_recovery(
    app: Onward, clock: Clock, until: int | None, beat: int | None, own: bool
) -> None:
    """Of a foreign hand's. Where its lease can end, the jobs of that worker come back too."""
    odd, job = owned(app), owned(app)
    with hand(app.database) as dba:
        for column, age in (("lease_until", until), ("beat_at", beat)):
            if age is not None:
                value = AGES[dba.dialect][age]
                dba.sql(
                    f"UPDATE onward.worker SET {column} = {value} WHERE id = :id", id=odd.worker
                )
    assert 10.0 <= back_after(app, clock, job) <= 10.0 + 2 * SLOW.sweep
    assert (state_of(app.database, odd.id) is JobState.QUEUED) == own
    assert odd.worker is not None
    app.database.run(store.lose, odd.worker, "for the doctor")
    on_loop(app, Keeper(app.database, SLOW, list).sweep())


@pytest.mark.parametrize(
    "odd", ["2026-01-01 12:00:00", b"\0", None, 1e300, float("inf"), float("-inf"), float("nan")]
)
def test_a_lease_of_no_kind_that_there_is_harms_nobody(
    app: Onward, odd: Any, tmp_path: Path
) -> None:
    """A guard may be gone, and a file's columns take anything then."""
    mine = Keeper(app.database, SLOW, list)
    leases = [
        Lease("odd", odd, True, None, odd),
        Lease("nowhere", 5.0, True, f"{tmp_path}/\0", 0.0),
        Lease("path", 5.0, True, odd, 0.0),
        Lease("gone", 5.0, True, None, 0.0),
    ]
    mine.vanished(leases, 100.0)
    found = mine.vanished(leases, 110.0)
    assert {lease.worker for lease, _, _ in found} >= {"nowhere", "path", "gone"}
    assert all(reason.startswith("its lease ran out: no sign of life") for _, reason, _ in found)


def due_times(app: Onward) -> dict[str, float]:
    """When each job that waits is due."""
    kind = "run_at" if app.database.dialect == "sqlite" else "extract(epoch FROM run_at)::float8"
    with hand(app.database) as dba:
        rows = dba.sql(f"SELECT id, {kind} FROM onward.job WHERE state = 'queued'")
    return {str(row[0]): row[1] for row in rows}


def test_a_step_that_could_not_be_mended_is_seen_again(app: Onward, clock: Clock) -> None:
    """The database goes away in the middle of it: what was due is still known when it is back."""
    (id_,) = enqueue(app.database)
    slow = Slow(app, clock)
    mine = Clocks(cast(Database, slow))

    async def steps() -> None:
        await mine.look()
        shift_clock(app.database, -3600.0)
        clock.now += 2.0
        slow.errors = [None, None, None, DatabaseUnavailable("just now")]
        with pytest.raises(DatabaseUnavailable):
            await mine.look()
        clock.now += 2.0
        await mine.look()

    before = due_times(app)
    on_loop(app, steps())
    assert due_times(app)[id_] == pytest.approx(before[id_] - 3600.0, abs=6.0)


def test_many_frozen_jobs_are_moved_in_steps(
    app: Onward, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a pause after each, so that others get their turn."""
    monkeypatch.setattr(clocks, "DUE_AGAIN_STEP", 2)
    enqueue(app.database, 5)
    before = due_times(app)
    mine = Clocks(app.database)

    async def steps() -> None:
        await mine.look()
        shift_clock(app.database, -60.0)
        clock.now += 2.0
        await mine.look()

    on_loop(app, steps())
    assert len(clock.pauses) == 2
    assert all(after < before[id_] - 50 for id_, after in due_times(app).items())


@pytest.mark.parametrize(
    ("last", "this", "step"),
    [
        pytest.param((0, 0, 50), (10, 10, 60), None, id="as it should be"),
        pytest.param((0, 0, 50), (10, 10, 3660), None, id="forward"),
        pytest.param((0, 0, 50), (10, 10, 58.1), None, id="a little"),
        pytest.param((0, 0, 50), (10, 10, 57.9), Step(2.1, 60, 47.9), id="enough"),
        pytest.param((0, 1, 50), (10, 12, 40), Step(22, 62, 28), id="slow answers"),
        pytest.param((0, 8, 50), (10, 10, 53), None, id="perhaps only a slow answer"),
        pytest.param((0, 0, 0), (86_400, 86_400, 86_350), None, id="slower for a day"),
    ],
)
def test_when_a_clock_has_gone_back(
    last: tuple[float, float, float], this: tuple[float, float, float], step: Step | None
) -> None:
    """By at least two seconds, whatever the answers' delay and what clocks drift apart."""
    found = went_back(Reading(*last), Reading(*this))
    assert found == (None if step is None else pytest.approx(step))


def test_a_keeper_looks_at_the_clock(app: Onward, clock: Clock) -> None:
    (id_,) = enqueue(app.database)
    before = due_times(app)[id_]
    mine = Keeper(app.database, SLOW, list)
    clock.most = 1
    on_loop(app, mine.run())
    shift_clock(app.database, -3600.0)
    clock.most = 2
    on_loop(app, mine.run())
    assert due_times(app)[id_] < before - 3500.0


def test_a_clock_that_is_off_the_databases_is_told_once_an_hour(
    app: Onward, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """By more than two seconds, and more than the answer took. A file's clock is the machine's."""
    slow = Slow(app, clock)
    slow.local = False
    mine = Clocks(cast(Database, slow))

    async def looks() -> list[int]:
        found: list[int] = []
        for clock.now, clock.off, slow.seconds in (
            (0.0, 1.5, 0.0),
            (10.0, 600.0, 0.0),
            (3_600.0, 600.0, 0.0),
            (3_611.0, -600.0, 0.0),
            (9_000.0, 4.0, 3.0),
        ):
            await mine.look()
            found.append(len(told(caplog, "clock.skewed")))
        slow.local, clock.now = True, 20_000.0
        await mine.look()
        return [*found, len(told(caplog, "clock.skewed"))]

    assert on_loop(app, looks()) == [0, 1, 1, 2, 2, 2]
    first, second = told(caplog, "clock.skewed")
    assert first.startswith("clock.skewed seconds=600 hint=")
    assert second.startswith("clock.skewed seconds=-600 hint=")


# --- keeper: what is old --------------------------------------------------------------------------


def ended(app: Onward, count: int) -> list[str]:
    worker = register(app.database, concurrency=10)
    ids = enqueue(app.database, count)
    apply(app.database, *(succeed(job) for job in claim(app.database, worker)))
    app.database.run(store.stop, worker, "stopped")
    return ids


def gone(app: Onward, ids: list[str]) -> int:
    found = 0
    for id_ in ids:
        try:
            get(app.database, id_)
        except JobNotFound:
            found += 1
    return found


@pytest.mark.parametrize(("every", "keep"), [(10.0, 60.0), (1_000.0, 20.0)])
def test_old_jobs_go_in_small_steps_with_pauses(
    app: Onward, clock: Clock, every: float, keep: float
) -> None:
    """Beside claims that want their turn, and not again before it is due: after `prune_every`, or
    half of the time for which jobs are kept.
    """
    settings = Settings(sweep=2, keep_succeeded=keep, prune_every=every, prune_step=1)
    ids = ended(app, 5)
    shift_clock(app.database, 61.0)
    clock.most = 4
    mine = Keeper(app.database, settings, list)
    on_loop(app, mine.run())
    assert gone(app, ids) == 5
    assert clock.pauses == [PRUNE_PAUSE, PRUNE_PAUSE, 2.0, 2.0]
    later = ended(app, 1)
    shift_clock(app.database, 130.0)
    clock.now, clock.most = 109.9, 5
    on_loop(app, mine.run())
    assert gone(app, later) == 0
    clock.now, clock.most = 110.2, 6
    on_loop(app, mine.run())
    assert gone(app, later) == 1


class Endless:
    """A database in which there is always more that is old; it takes its time."""

    local = True

    def __init__(self, clock: Clock, seconds: list[float]) -> None:
        self.clock = clock
        self.seconds = seconds
        self.steps: list[int] = []

    async def aread(self, op: object) -> Any:
        return self.clock.now if op is store.now else []

    async def arun(self, op: object, *asked: Any) -> Any:
        if op is not store.prune:
            return []
        self.steps.append(asked[2])
        self.clock.now += self.seconds.pop(0)
        return asked[2]


def test_steps_of_pruning_grow_while_they_are_quick(clock: Clock) -> None:
    """And shrink when they are not; after each, others have as long as it took."""
    endless = Endless(clock, [0.1, 0.3, 0.3, 0.5, 0.01, 0.5, 0.5])
    clock.most = 7
    mine = Keeper(cast(Database, endless), Settings(sweep=100, prune_step=4_000), list)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(mine.run())
    assert endless.steps == [4_000, 8_000, 8_000, 8_000, 4_000, 8_000, 4_000]
    assert clock.pauses == pytest.approx([0.1, 0.3, 0.3, 0.5, PRUNE_PAUSE, 0.5, 0.5])


@pytest.mark.parametrize(("first", "steps"), [(6_000, [6_000, 10_000]), (20_000, [20_000] * 2)])
def test_steps_of_pruning_grow_to_a_limit(clock: Clock, first: int, steps: list[int]) -> None:
    endless = Endless(clock, [0.1, 0.1])
    clock.most = 2
    mine = Keeper(cast(Database, endless), Settings(sweep=100, prune_step=first), list)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(mine.run())
    assert endless.steps == steps


def test_workers_that_ended_long_ago_are_forgotten(app: Onward, clock: Clock) -> None:
    """A week after their end, with the old jobs."""
    ended(app, 1)
    clock.most = 1
    for days, left in ((6.9, 1), (7.1, 0)):
        shift_clock(app.database, days * 86_400)
        clock.pauses.clear()
        on_loop(app, Keeper(app.database, SLOW, list).run())
        assert len(app.database.read(store.read, "workers", limit=10)) == left


def test_pruning_gives_way_to_the_next_sweep(app: Onward, clock: Clock) -> None:
    """A large clean-up takes no longer than a sweep's pause at once. The sweep comes without a
    pause then, and the clean-up goes on after it.
    """
    settings = Settings(sweep=2, keep_succeeded=60, prune_every=10, prune_step=1)
    ids = ended(app, 5)
    shift_clock(app.database, 61.0)
    clock.most = 3
    mine = Keeper(cast(Database, Slow(app, clock, 0.9)), settings, list)
    on_loop(app, mine.run())
    assert clock.pauses == pytest.approx([0.9, 0.9, 0.0])
    assert gone(app, ids) == 2
    clock.most = 8
    on_loop(app, mine.run())
    assert clock.pauses[3:] == pytest.approx([0.9, 0.9, 0.0, 0.9, 2.0])
    assert gone(app, ids) == 5


# --- locks ----------------------------------------------------------------------------------------


def test_a_lock_is_private_and_does_not_outlive_its_process(tmp_path: Path) -> None:
    """Nobody else may read it, and a program that is started by a job does not inherit it."""
    path = tmp_path / "lock"
    fd = hold_lock(str(path))
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert not os.get_inheritable(fd)
        assert not is_free(str(path))
    finally:
        os.close(fd)
    assert is_free(str(path))


def test_a_lock_that_cannot_be_made_says_what_it_is_for(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError) as caught:
        hold_lock(str(tmp_path / "nowhere" / "lock"))
    assert "nowhere/lock cannot be made: No such file" in caught.value.what
    assert caught.value.why == (
        "each worker holds one beside the database, so that others see when it has died"
    )
    assert caught.value.fix == (
        "let the worker's user write to that directory, and see that its disk has space"
    )
