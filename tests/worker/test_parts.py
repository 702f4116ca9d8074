"""The small parts of a worker by themselves: lanes, the board, aftermath, threads, loading."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from onward import AttemptState, Event, JobState, Onward, Settings
from onward.errors import AppNotFound, DatabaseUnavailable
from onward.ids import new_id
from onward.job import Change, Job
from onward.policy import Backoff, Outcome, Returned, TimedOut
from onward.store import store
from onward.store.database import Database
from onward.store.store import Claimed, Lane, Lease
from onward.worker import executor, standstill
from onward.worker.aftermath import MOST_REMEMBERED, Aftermath, Deaths
from onward.worker.board import FOREVER, Begun, Board
from onward.worker.changes import told
from onward.worker.isolation import Isolation, exit_text
from onward.worker.keeper import Keeper, hold_lock, is_free, kept, remove_lock
from onward.worker.lanes import EDGE, START, Lanes
from onward.worker.loading import import_modules, load_app
from onward.worker.stage import keep_going
from onward.worker.threads import Threads
from tests.store.builders import enqueue, hand, register
from tests.support import tasks
from tests.support.workers import wait_until

ME = "00000000-0000-7000-8000-000000000001"


def job(**fields: object) -> Job:
    """A running job of this worker."""
    values: dict[str, object] = {
        "id": new_id(),
        "task": "shop.report",
        "queue": "default",
        "priority": 0,
        "state": JobState.RUNNING,
        "attempt": 1,
        "worker": ME,
        "args": "{}",
        "max_attempts": 3,
        "max_losses": 3,
        "failures": 0,
        "losses": 0,
        "budget_from": 1,
        "timeout": 5.0,
    }
    return Job(**(values | fields))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# --- Lanes --------------------------------------------------------------------------------------


def claimed(run_at: float) -> Claimed:
    return Claimed(job(), run_at)


def test_lanes_are_claimed_from_the_highest_priority_down() -> None:
    """Only those that are due; the first of the others says when to look again."""
    lanes = Lanes()
    lanes.looked([Lane("a", 0, -1), Lane("a", 9, -1), Lane("b", 5, 0), Lane("b", 9, 3.5)], 100.0)
    assert [lane for lane, _ in lanes.order()] == [("a", 9), ("b", 5), ("a", 0)]
    assert lanes.next_due == 3.5


def test_a_claim_begins_before_the_first_job_that_is_known() -> None:
    """Lanes with nothing but jobs of other tasks are not claimed from; where there are such jobs, a
    claim from the start would have to pass over them.
    """
    lanes = Lanes()
    lanes.looked(
        [Lane("a", 0, -1, 7.5), Lane("a", 0, -9, 2.0, False), Lane("b", 0, -1, 3.0, False)], 0
    )
    assert lanes.order() == [(("a", 0), (7.5 - EDGE, START[1]))]
    assert lanes.crowded == {("a", 0), ("b", 0)}


def test_queues_of_one_priority_take_turns() -> None:
    """Each full look begins with another one."""
    lanes = Lanes()
    first: set[str] = set()
    for look in range(3):
        lanes.looked([Lane(queue, 0, -1) for queue in "abc"], float(look))
        first.add(lanes.order()[0][0][0])
    assert first == {"a", "b", "c"}


def test_a_claim_goes_on_where_the_last_one_ended() -> None:
    """A full claim moves the place; a short one leaves the lane, and asks for a new look."""
    lanes = Lanes()
    lanes.looked([Lane("a", 0, -1)], 100.0)
    assert lanes.order() == [(("a", 0), START)]
    assert not lanes.want_look(100.03)
    last = claimed(7.0)
    lanes.claimed(("a", 0), [claimed(6.0), last], 2)
    assert lanes.order() == [(("a", 0), (7.0, last.job.id))]
    lanes.claimed(("a", 0), [claimed(8.0)], 2)
    assert lanes.empty
    assert lanes.want_look(100.03)


def test_a_full_look_comes_at_least_every_second() -> None:
    """And at once after something may have landed behind the place."""
    lanes = Lanes()
    assert lanes.want_look(0.0)
    lanes.looked([Lane("a", 0, -1)], 100.0)
    lanes.claimed(("a", 0), [claimed(6.0)] * 50, 50)
    assert not lanes.want_look(100.9)
    assert lanes.want_look(101.0)
    lanes.spoil()
    assert lanes.want_look(100.1)


def test_a_worker_of_slow_jobs_looks_more_often() -> None:
    """So that a recovered job does not wait for a second behind lower priorities; but an expensive
    look is still a small share of the time.
    """
    lanes = Lanes()
    lanes.looked([Lane("a", 0, -1)], 100.0)
    lanes.claimed(("a", 0), [claimed(6.0)], 1)
    assert not lanes.want_look(100.03)
    assert lanes.want_look(100.05)
    lanes.cost(0.01)
    lanes.cost(0.01)
    assert not lanes.want_look(100.15)
    assert lanes.want_look(100.25)


def test_expensive_looks_take_a_small_share_of_the_time() -> None:
    """A look of 50 ms is made once a second; one slow look alone changes nothing."""
    lanes = Lanes()
    lanes.looked([], 100.0)
    lanes.cost(5.0)
    assert lanes.may_look(100.0)
    lanes.cost(0.05)
    assert not lanes.may_look(100.9)
    assert lanes.may_look(101.1)
    lanes.cost(0.001)
    assert lanes.may_look(100.0)


@pytest.mark.parametrize(
    ("claims", "found", "gap"),
    [
        pytest.param(0.020, True, 1.0, id="an ordinary claim is no part of the look"),
        pytest.param(0.100, True, 2.04, id="one that passes over what is not ours is"),
        pytest.param(0.060, False, 1.24, id="one that finds nothing is"),
    ],
)
def test_claims_from_the_start_may_make_a_look_expensive(
    claims: float, found: bool, gap: float
) -> None:
    """A hundred thousand due jobs of another app are not walked over at every turn."""
    lanes = Lanes()
    lanes.looked([], 100.0)
    lanes.claimed(("a", 0), [claimed(6.0)] * 30, 30)
    for _ in range(2):
        lanes.cost(0.002, claims, found=found)
    assert lanes.gap == pytest.approx(gap)


def test_a_hint_is_worth_an_expensive_look() -> None:
    """Where a look costs 50 ms, somebody's word that there is something is followed within 100."""
    lanes = Lanes()
    lanes.looked([], 100.0)
    lanes.cost(0.05)
    lanes.cost(0.05)
    assert not lanes.may_look(100.2)
    assert lanes.may_look(100.2, hinted=True)
    assert not lanes.may_look(100.05, hinted=True)


def test_a_change_is_told_with_the_name_of_its_task() -> None:
    """Two ids in a log line say little."""
    change = job().move(Event.SUCCEED, ended=AttemptState.SUCCEEDED, result="1")
    assert told(change, 20).task == "shop.report"


# --- Board --------------------------------------------------------------------------------------


@pytest.fixture
def board() -> Iterator[Board]:
    with closing(Board(3)) as found:
        yield found


def test_both_sides_of_a_board_see_the_same(board: Board) -> None:
    """Ticks, beats, and what has begun, through another mapping of the same bytes."""
    with closing(Board(3, os.dup(board.fd))) as other:
        board.tick(1.5)
        other.beat(3.5)
        other.stand_still(2.0)
        other.stand_still(0.5)
        place = board.begin(ME, 2, 10.0, 15.0)
        assert other.last_tick == 1.5
        assert (board.last_beat, board.stood_still) == (3.5, 2.5)
        assert list(other.begun()) == [Begun(ME, 2, 10.0, 15.0)]
        assert [other.overdue(now) for now in (15.0, 15.1)] == [False, True]
        board.extend(place, 20.0)
        assert not other.overdue(19.0)
        assert (board.lost, other.stopped) == (False, False)
        other.declare_lost()
        board.say_stopped()
        assert (board.lost, other.stopped) == (True, True)


def test_an_ended_attempt_stays_on_the_board_until_its_outcome_is_written(board: Board) -> None:
    """So a process that dies before it has written the outcome is not taken for an innocent one,
    and as long as it may be asked for, its place is not given to another.
    """
    ids = [new_id() for _ in range(4)]
    places = [board.begin(id, 1, 0.0, 1.0) for id in ids[:3]]
    board.relax(places[1])
    assert next(b for b in board.begun() if b.job == ids[1]).deadline == FOREVER
    assert board.free == 0
    board.end(places[1])
    assert {begun.job for begun in board.begun()} == {ids[0], ids[2]}
    board.begin(ids[3], 1, 0.0, FOREVER)
    assert {begun.job for begun in board.begun()} == {ids[0], ids[2], ids[3]}


# --- Standstill ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("passed", "wakings", "still"),
    [
        pytest.param(0.2, 1, 0.0, id="it slept"),
        pytest.param(1.1, 1, 0.0, id="a slow machine"),
        pytest.param(6.2, 0, 6.0, id="a pause of the machine"),
        pytest.param(6.2, 100, 4.0, id="a pause after some work"),
        pytest.param(6.2, 1_000, 0.0, id="somebody held the interpreter"),
        pytest.param(6.2, 300, 0.0, id="the same on a busy machine"),
    ],
)
def test_a_standstill_is_no_time_of_a_body_that_works(
    monkeypatch: pytest.MonkeyPatch, passed: float, wakings: int, still: float
) -> None:
    """A thread that waits for the interpreter wakes up all the time; one that stands still does
    not.
    """
    now, woken = [50.0], [7_000]
    monkeypatch.setattr(standstill, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(standstill, "_wakings", lambda: woken[0])
    monkeypatch.setattr(standstill, "sys", SimpleNamespace(getswitchinterval=lambda: 0.005))
    watch = standstill.Standstill()
    now[0] += passed
    woken[0] += wakings
    assert watch.look(now[0]) == pytest.approx(still)
    assert watch.look(now[0] + standstill.WATCH) == 0.0


# --- Executor -----------------------------------------------------------------------------------


@pytest.mark.parametrize("told", ["before", "after", "never"])
def test_time_in_which_everything_stood_still_is_not_the_bodys(board: Board, told: str) -> None:
    """The body ends as soon as the machine goes on; whoever watches may tell only then for how long
    all stood still.
    """
    app = Onward("sqlite:///unused.db")

    @app.task
    async def nap() -> None:
        time.sleep(executor.LATE + 0.2)  # noqa: ASYNC251
        if told == "before":
            board.stand_still(executor.LATE + 0.2)

    async def run() -> list[Outcome]:
        outcomes: list[Outcome] = []
        ended = asyncio.Event()

        def settle(_: Job, outcome: Outcome) -> None:
            outcomes.append(outcome)
            ended.set()

        works = executor.Executor(app.tasks, 1, Settings(), board, Isolation(None), settle)
        works.start([job(task=nap.name, args=nap.call().job.args, timeout=0.1)])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if told == "after":
            board.stand_still(executor.LATE + 0.2)
        await ended.wait()
        return outcomes

    (outcome,) = asyncio.run(run())
    assert isinstance(outcome, TimedOut if told == "never" else Returned)


def test_a_body_that_outlasts_its_limit_and_the_worker_is_told_as_abandoned(board: Board) -> None:
    """Nothing ends it in an embedded worker, or before the process is gone: it may overlap with the
    next attempt.
    """
    app = Onward("sqlite:///unused.db")

    over = False

    @app.task
    async def nap() -> None:
        while not over:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    async def run() -> Outcome:
        nonlocal over
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        works = executor.Executor(
            app.tasks, 1, Settings(), board, Isolation(None), lambda _, how: ended.set_result(how)
        )
        works.start([job(task=nap.name, args=nap.call().job.args, timeout=0.02)])
        await asyncio.sleep(0.1)
        works.release_rest("shutdown")
        over = True
        return await ended

    outcome = asyncio.run(run())
    assert isinstance(outcome, TimedOut)
    assert outcome.abandoned


# --- Aftermath ----------------------------------------------------------------------------------


def aftermath(*begun: Begun, in_order: bool = False) -> Aftermath:
    backoffs = {"shop.report": Backoff(base=7, factor=1, jitter=0)}
    return Aftermath(ME, begun, in_order, backoffs)


def test_of_a_dead_process_each_job_is_settled_as_what_it_is() -> None:
    """Not begun: given back. Past its limit: timed out. Under way: lost, or given back if the
    process was killed as part of a stop.
    """
    now = time.monotonic()
    waiting, late, under_way = job(), job(), job()
    begun = (
        Begun(late.id, 1, now - 9, now - 4),
        Begun(under_way.id, 1, now - 9, FOREVER),
    )
    decide = aftermath(*begun).decide
    assert [decide(each, "killed").event for each in (waiting, late, under_way)] == [
        Event.RELEASE,
        Event.RETRY,
        Event.RECOVER,
    ]
    assert decide(late, "killed").reason == "timeout"
    assert decide(late, "killed").delay == pytest.approx(7)
    assert decide(under_way, "killed").ended is AttemptState.LOST
    in_order = aftermath(*begun, in_order=True).decide
    assert [in_order(each, "killed").event for each in (waiting, late, under_way)] == [
        Event.RELEASE,
        Event.RETRY,
        Event.RELEASE,
    ]


def test_another_attempt_of_the_job_on_the_board_says_nothing_of_this_one() -> None:
    """The board may still have the attempt before; this one had not begun."""
    retried = job(attempt=2)
    begun = Begun(retried.id, 1, 0.0, FOREVER)
    assert aftermath(begun).decide(retried, "killed").event is Event.RELEASE


def test_an_orphan_of_another_worker_is_recovered_as_usual() -> None:
    """Whatever the board of this one says."""
    other = job(worker=new_id())
    deaths = Deaths()
    deaths.remember(aftermath(in_order=True))
    change = deaths.decide(other, "gone")
    assert (change.event, change.ended) == (Event.RECOVER, AttemptState.LOST)
    assert "gone" in (change.error or "")


def test_a_claim_that_commits_after_its_workers_burial_is_no_loss(app: Onward) -> None:
    """It never began, so it is given back, even where one loss would be the end."""
    database = app.database
    worker = register(database)
    deaths = Deaths()
    deaths.remember(Aftermath(worker, (), False, {}))
    database.run(store.bury_worker, worker, "killed", deaths.decide)
    (id_,) = enqueue(database, max_attempts=1, max_losses=0)
    with hand(database) as dba:
        dba.sql(
            "UPDATE onward.job SET state = 'running', started_at = created_at,"
            f" worker = '{worker}' WHERE id = '{id_}'"
        )

    async def take_back() -> list[Change]:
        try:
            return await Keeper(database, Settings(), list, deaths.decide).take_back()
        finally:
            await database.close_loop()

    (change,) = asyncio.run(take_back())
    assert (change.event, change.reason) == (Event.RELEASE, "its worker died before it began")
    assert database.read(store.get, id_).state is JobState.QUEUED


def test_only_so_many_deaths_are_remembered() -> None:
    """A supervisor whose app dies at every start does not grow."""
    deaths = Deaths()
    for _ in range(MOST_REMEMBERED + 1):
        deaths.remember(aftermath() if not deaths.known else Aftermath(new_id(), (), False, {}))
    assert len(deaths.known) == MOST_REMEMBERED
    assert deaths.decide(job(), "killed").event is Event.RECOVER


def test_a_cancelling_job_of_a_dead_process_is_cancelled() -> None:
    """Not tried again, however it ended."""
    now = time.monotonic()
    asked = job(state=JobState.CANCELLING)
    for begun in ((), (Begun(asked.id, 1, now, FOREVER),), (Begun(asked.id, 1, now - 9, now - 4),)):
        for in_order in (False, True):
            change = aftermath(*begun, in_order=in_order).decide(asked, "killed")
            assert (change.event, change.after) == (Event.CANCEL, JobState.CANCELLED)
            assert (change.failures, change.losses) == (0, 0)


# --- Keeper -------------------------------------------------------------------------------------


def test_a_lock_file_tells_who_lives(tmp_path: Path) -> None:
    """Held: alive. Free: dead. Not there: nobody knows."""
    path = str(tmp_path / "lock")
    assert not is_free(path)
    held = hold_lock(path)
    assert not is_free(path)
    os.close(held)
    assert is_free(path)
    remove_lock(path)
    remove_lock(path)
    remove_lock(None)
    assert not is_free(path)


def test_nobody_is_declared_lost_at_first_sight(app: Onward, tmp_path: Path) -> None:
    """A lease that is over counts only when it was seen unchanged for long; a free lock at once."""
    keeper = Keeper(app.database, Settings(lease=10, beat=3, sweep=2), lambda: ["own"])
    free = tmp_path / "free"
    free.touch()

    def gone(now: float, until: float = 5.0) -> set[str]:
        leases = [
            Lease("own", until, True, None, 0.0),
            Lease("silent", until, True, None, 0.0),
            Lease("live", until, False, None, 0.0),
            Lease("dead", until, False, str(free), 0.0),
        ]
        return {lease.worker for lease, _, _ in keeper.vanished(leases, now)}

    assert gone(100) == {"dead"}
    assert gone(107.9) == {"dead"}
    assert gone(108) == {"dead", "silent"}
    assert gone(109, until=6.0) == {"dead"}


def test_an_outage_is_told_once_and_the_next_one_again(
    app: Onward, caplog: pytest.LogCaptureFixture
) -> None:
    """A keeper that sweeps five times a second fills no log while the database is away."""

    class Away:
        local = True
        looks = 0

        async def aread(self, *asked: Any) -> Any:
            self.looks += 1
            if self.looks == 60:
                raise asyncio.CancelledError
            if self.looks not in {30, 31}:  # One sweep: leases, and the clock.
                raise DatabaseUnavailable("nobody is there")
            return await app.database.aread(*asked)

        async def arun(self, *asked: Any) -> Any:
            return await app.database.arun(*asked)

    keeper = Keeper(cast("Database", Away()), Settings(lease=0.01, beat=0.003, sweep=0.001), list)

    async def keep() -> None:
        try:
            await keeper.run()
        finally:
            await app.database.close_loop()

    with caplog.at_level(logging.WARNING, "onward"), pytest.raises(asyncio.CancelledError):
        asyncio.run(keep())
    assert caplog.messages == ['keeper.stumbled error="[OW301] nobody is there"'] * 2


def test_what_is_kept_for_ever_is_not_pruned() -> None:
    """Dead jobs never are."""
    assert kept(Settings(keep_succeeded=5, keep_cancelled=None)) == [(JobState.SUCCEEDED, 5)]


# --- Threads and stages -------------------------------------------------------------------------


def test_threads_are_reused_and_grow_only_when_all_are_busy() -> None:
    """Twenty functions one after another need one thread, three at once need three."""

    async def main() -> tuple[int, int]:
        threads = Threads(asyncio.get_running_loop())
        done: asyncio.Queue[object] = asyncio.Queue()
        for number in range(20):
            threads.run(lambda number=number: number, done.put_nowait)  # type: ignore[misc]
            assert await done.get() == number
        alone = threads.count
        gate = threading.Barrier(3, timeout=10)
        for _ in range(3):
            threads.run(gate.wait, done.put_nowait)
        assert sorted([await done.get() for _ in range(3)]) == [0, 1, 2]  # type: ignore[type-var]
        threads.close()
        return alone, threads.count

    assert asyncio.run(main()) == (1, 3)


def test_an_answer_that_comes_after_the_loop_was_closed_is_dropped() -> None:
    """A body that nobody waits for any more does not disturb the program that goes on."""
    go_on, ended = threading.Event(), threading.Event()

    def body() -> None:
        go_on.wait(10)
        ended.set()

    async def main() -> None:
        Threads(asyncio.get_running_loop()).run(body, lambda answer: None)

    asyncio.run(main())
    go_on.set()
    assert ended.wait(10)
    wait_until(lambda: threading.active_count() < 50)


def test_a_stage_ends_when_it_says_so_and_not_when_it_raises() -> None:
    """Errors are shown and it is called again, after a pause."""
    calls: list[float] = []

    async def step() -> None:
        calls.append(time.monotonic())
        if len(calls) < 3:
            raise ZeroDivisionError

    asyncio.run(keep_going("test", step))
    assert len(calls) == 3
    assert calls[2] - calls[1] > 0.1


@pytest.mark.parametrize(
    ("code", "text"), [(3, "exit code 3"), (-11, "signal SIGSEGV"), (-64, "signal SIGRTMAX")]
)
def test_an_exit_status_in_words(code: int, text: str) -> None:
    """As it stands in history."""
    assert exit_text(code) == text


# --- Loading ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules that nobody else has; Python's path is restored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_an_app_is_found_by_its_module(folder: Path) -> None:
    """With its name, or without one where there is only one; in a package; as an attribute."""
    (folder / "lonely_jobs.py").write_text("from onward import Onward\nmine = Onward()\n")
    (folder / "twin_jobs.py").write_text(
        "from onward import Onward\na = Onward()\nb = Onward()\nclass box: inside = a\n"
    )
    assert isinstance(load_app("lonely_jobs"), Onward)
    assert load_app("lonely_jobs:mine") is load_app("lonely_jobs")
    assert load_app("twin_jobs:box.inside") is load_app("twin_jobs:a")
    assert load_app(f"{folder}/lonely_jobs.py:mine") is load_app("lonely_jobs")
    assert load_app("tests.support.tasks:app") is tasks.app


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere_jobs:app", "there is no module 'nowhere_jobs'"),
        ("pair_jobs", "does not say which app"),
        ("pair_jobs:c", "missing"),
        ("pair_jobs:number", "int"),
        ("gone.py:app", "there is no file gone.py"),
    ],
)
def test_a_target_that_leads_nowhere_says_what_is_wrong(
    folder: Path, target: str, said: str
) -> None:
    """And names what there is."""
    (folder / "pair_jobs.py").write_text(
        "from onward import Onward\na = Onward()\nb = Onward()\nnumber = 5\n"
    )
    with pytest.raises(AppNotFound) as caught:
        load_app(target)
    assert said in str(caught.value)
    if "pair" in target:
        assert "pair_jobs:a" in str(caught.value)


def test_a_file_of_a_package_is_imported_as_part_of_it(folder: Path) -> None:
    """So its tasks have the names under which the rest of the program enqueues them."""
    package = folder / "parcel"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "near.py").write_text("FOUND = 1\n")
    (package / "jobs.py").write_text(
        "from onward import Onward\nfrom .near import FOUND\napp = Onward()\n"
        "@app.task\ndef work() -> None: ...\n"
    )
    app = load_app("parcel/jobs.py:app")
    assert list(app.tasks) == ["parcel.jobs.work"]


def test_a_file_that_is_hidden_behind_another_module_is_refused(folder: Path) -> None:
    (folder / "calendar.py").write_text("from onward import Onward\napp = Onward()\n")
    with pytest.raises(AppNotFound, match="hidden behind another module"):
        load_app("./calendar.py:app")


def test_an_import_that_fails_inside_the_app_is_shown_where_it_fails(folder: Path) -> None:
    """The missing module is not mistaken for the app's own, and no frame of the import is shown."""
    (folder / "needy_jobs.py").write_text("import not_installed_here\n")
    with pytest.raises(AppNotFound, match="needy_jobs cannot be imported") as caught:
        load_app("needy_jobs:app")
    assert "No module named 'not_installed_here'" in caught.value.why
    assert 'needy_jobs.py", line 1' in caught.value.why
    assert "importlib" not in caught.value.why


def test_a_module_that_ends_the_program_is_named(folder: Path) -> None:
    """The app's, and one of its tasks' where another process imports them."""
    (folder / "quitting_jobs.py").write_text("import sys\nsys.exit(3)\n")
    loads = (lambda: load_app("quitting_jobs:app"), lambda: import_modules(["quitting_jobs"]))
    for load in loads:
        with pytest.raises(AppNotFound, match="quitting_jobs cannot be imported") as caught:
            load()
        assert "SystemExit: 3" in caught.value.why
        assert "__main__" in caught.value.fix
