"""Workers that stand still (SIGSTOP) past their lease and go on later, believing that nothing has
happened: others take over, and whatever the late ones have to say is refused and kept.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import asdict

from onward import Handle
from onward.app import Onward
from onward.store import store
from onward.task import Call, Task
from tests.crash import jobs
from tests.crash.conftest import Open
from tests.crash.field import (
    AS_WRITTEN,
    BUSY,
    PACES,
    SCALED,
    SHORT,
    Pace,
    enqueue,
    freeze,
    kill,
    live,
    sampled,
    thaw,
    wait_for_state,
    wait_until_over,
)
from tests.support import history, tasks
from tests.support.ledger import Ledger
from tests.support.workers import ROOT, RunningWorker, running, wait_until


@pytest.mark.parametrize(
    ("pace", "where", "length", "frozen_for"),
    [
        pytest.param(SCALED, "loop", 1.5, 0.0, id="scaled"),
        pytest.param(AS_WRITTEN, "loop", 2.0, 6.0, id="as written", marks=pytest.mark.soak),
        pytest.param(
            AS_WRITTEN, "thread", 2.0, 6.0, id="as written, in a thread", marks=pytest.mark.soak
        ),
    ],
)
def test_what_a_frozen_worker_says_late_is_refused_and_kept(
    open_app: Open,
    database_url: str,
    ledger: Ledger,
    pace: Pace,
    where: str,
    length: float,
    frozen_for: float,
) -> None:
    """A worker is frozen with its supervisor, another runs its job; thawed, it has a result to
    tell. The job has one outcome, the first attempt was lost, and the late result is on record and
    in the log.
    """
    app = open_app(**pace.settings)
    calls: dict[str, Call[str]] = {
        "loop": jobs.by_attempt.call([(length, "return"), (0.1, "return")]),
        "thread": jobs.block_by_attempt.call([length, 0.1]),
    }
    with running(database_url, name="A", ledger=ledger, target=jobs.TARGET) as first:
        (id_,) = enqueue(app, [calls[where]])
        wait_until(ledger.read)
        frozen = freeze(first, app.database)
        thaw_at = time.monotonic() + frozen_for
        with running(database_url, name="B", ledger=ledger, target=jobs.TARGET):
            wait_for_state(app, id_, "succeeded", 10)
            before = history.read(app.database, ledger)
            time.sleep(max(0.0, thaw_at - time.monotonic()))
            thaw(frozen)
            (refusal,) = wait_until(lambda: app.database.read(store.refusals, id_))
            (line,) = wait_until(lambda: lines_of(first, "job.refused"))
    found = history.check(app.database, ledger, [id_])
    assert history.outcomes(found, id_) == ["lost (lost)", "succeeded"]
    assert history.changed_finals(before, found) == []
    assert (refusal.event, refusal.attempt, refusal.expected) == ("succeed", 1, "running")
    assert (refusal.found, refusal.detail) == ("succeeded", '"attempt 1"')
    assert f"job={id_} attempt=1 " in line
    assert app.get(id_).result == "attempt 2"
    assert app.counts()["succeeded"] == 1


def lines_of(worker: RunningWorker, event: str) -> list[str]:
    """What the log says of one kind of event."""
    return [line for line in worker.log().splitlines() if f" {event} " in line]


def test_a_frozen_process_is_ended_by_its_supervisor(
    open_app: Open, database_url: str, ledger: Ledger
) -> None:
    """A process that gives no sign of life is no owner: it is killed, however well its supervisor
    beats for it, and its jobs run again.
    """
    app = open_app(stall_after=2.0)
    with running(database_url, processes=2, ledger=ledger) as worker:
        (id_,) = enqueue(app, [tasks.nap_once.call(60)])
        wait_until(ledger.read)
        stopped = time.monotonic()
        victim = int(ledger.read()[0]["pid"])
        kill(victim, signal.SIGSTOP)
        wait_for_state(app, id_, "succeeded", 15)
        wait_until(lambda: len(worker.pids()) == 2, 10, what="a successor")
        assert victim not in worker.pids()
    found = history.check(app.database, ledger, [id_])
    assert 2.0 < found.bodies_of(id_)[1].start - stopped < 5.0 + BUSY
    assert history.outcomes(found, id_) == ["lost (lost)", "succeeded"]
    assert "no sign of life" in str(found.attempts[id_, 1].error)


def test_a_pause_of_the_whole_machine_is_nobodys_fault(
    open_app: Open, database_url: str, ledger: Ledger
) -> None:
    """Supervisor and processes stand still for longer than a process may be silent, and nobody else
    is there: they go on as if nothing had been.
    """
    app = open_app(lease=30.0, beat=1.0, stall_after=1.5)
    with running(database_url, ledger=ledger) as worker:
        (id_,) = enqueue(app, [tasks.nap.call(1.0)])
        wait_until(ledger.read)
        pids = worker.pids()
        frozen = freeze(worker, app.database)
        time.sleep(2.5)
        thaw(frozen)
        wait_for_state(app, id_, "succeeded")
        time.sleep(0.5)
        assert worker.pids() == pids
    found = history.check(app.database, ledger, [id_])
    assert history.outcomes(found, id_) == ["succeeded"]


@pytest.mark.parametrize(
    ("pause", "limit"),
    [
        pytest.param(4.0, 1.5, id="scaled"),
        pytest.param(
            600.0, 60.0, id="as written", marks=[pytest.mark.soak, pytest.mark.timeout(900)]
        ),
    ],
)
@pytest.mark.parametrize("others", [False, True], ids=["alone", "with others"])
def test_a_suspended_machine_is_not_blamed_on_the_jobs_time_limit(
    open_app: Open, database_url: str, ledger: Ledger, pause: float, limit: float, others: bool
) -> None:
    """The machine stands still past the job's time limit and past the lease. Nobody may say that
    the job worked for so long: it was lost, or it is well.
    """
    app = open_app(**SHORT)
    with running(database_url, name="A", ledger=ledger) as worker:
        (id_,) = enqueue(app, [tasks.nap_once.using(timeout=limit).call(limit * 0.6)])
        wait_until(ledger.read)
        frozen = freeze(worker, app.database)
        if others:
            with running(database_url, name="B", ledger=ledger):
                wait_for_state(app, id_, "succeeded")
                thaw(frozen)
                wait_until(lambda: app.database.read(store.refusals, id_))
        else:
            time.sleep(pause)
            thaw(frozen)
        wait_until_over(app)
    found = history.check(app.database, ledger, [id_])
    assert found.jobs[id_].state == "succeeded"
    first = found.attempts[id_, 1]
    assert first.state in {"succeeded", "lost", "released"}
    assert first.reason != "timeout"
    assert others or not app.database.read(store.refusals, id_)


EMBEDDED = """
from tests.support import tasks
tasks.app.run_worker(concurrency=1)
"""


@pytest.mark.parametrize("task", [tasks.nap, tasks.block], ids=["loop", "thread"])
def test_a_suspended_program_is_not_blamed_on_the_time_limit_of_its_jobs(
    open_app: Open, ledger: Ledger, task: Task[[float], str]
) -> None:
    """A worker inside a program has no supervisor to see that all stood still, and sees it
    itself. The body is at work for another moment when it goes on.
    """
    app = open_app(lease=30.0, beat=1.0)
    program = subprocess.Popen(
        [sys.executable, "-c", EMBEDDED],
        env=os.environ | {"ONWARD_URL": app.url, tasks.SETTINGS_VARIABLE: settings_of(app)},
        cwd=ROOT,
    )
    try:
        (id_,) = enqueue(app, [task.using(timeout=1.5, max_attempts=1).call(3.5)])
        wait_until(ledger.read)
        time.sleep(0.3)
        kill(program.pid, signal.SIGSTOP)
        time.sleep(2.5)
        kill(program.pid, signal.SIGCONT)
        wait_until_over(app)
    finally:
        program.kill()
        program.wait()
    found = history.check(app.database, ledger, [id_])
    assert history.outcomes(found, id_) == ["succeeded"]


def settings_of(app: Onward) -> str:
    """As `tests.support.tasks` reads them."""
    return json.dumps(asdict(app.settings))


def test_a_late_failure_does_not_revive_a_dead_job(
    open_app: Open, database_url: str, ledger: Ledger
) -> None:
    """Attempt 2 is frozen and lost, the attempts after it fail for good; then attempt 2 goes on and
    raises. The job stays dead, and claims go on as ever.
    """
    app = open_app(**SHORT)
    plan = [(0.0, "raise"), (1.0, "raise"), (0.0, "raise")]
    with running(database_url, name="A", ledger=ledger, target=jobs.TARGET) as first:
        (id_,) = enqueue(app, [jobs.by_attempt.using(max_attempts=3).call(plan)])
        wait_until(lambda: any(line["attempt"] == 2 for line in ledger.read()))
        frozen = freeze(first, app.database)
        with running(database_url, name="B", ledger=ledger, target=jobs.TARGET):
            wait_for_state(app, id_, "dead", 15)
            before = history.read(app.database, ledger)
            thaw(frozen)
            (refusal,) = wait_until(lambda: app.database.read(store.refusals, id_))
            more = enqueue(app, (tasks.aecho.call(number) for number in range(50)))
            wait_until_over(app)
    found = history.check(app.database, ledger, [id_, *more])
    assert history.states(found) == {"dead": 1, "succeeded": 50}
    assert history.outcomes(found, id_) == [
        "failed (error)",
        "lost (lost)",
        "failed (error)",
        "failed (error)",
    ]
    assert history.changed_finals(before, found) == []
    assert (refusal.attempt, refusal.event, refusal.found) == (2, "retry", "dead")


@pytest.mark.parametrize(
    ("links", "every"),
    [
        pytest.param(6, 3, id="scaled"),
        pytest.param(30, 3, id="as written", marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
    ],
)
def test_a_chain_that_continues_itself_has_one_live_member(
    open_app: Open, database_url: str, ledger: Ledger, links: int, every: int
) -> None:
    """Each link enqueues the next together with its own success. The worker that holds one is
    frozen again and again, until another has taken the link over: no copy of it has a successor.
    """
    app = open_app(**SHORT)
    with (
        running(database_url, name="A", ledger=ledger) as first,
        running(database_url, name="B", ledger=ledger) as second,
        sampled(lambda: live(app)) as seen,
    ):
        (start,) = enqueue(app, [tasks.link.call(1, links, 0.6)])
        for number in range(every, links + 1, every):
            holder = _holder(app, ledger, number, [first, second])
            frozen = freeze(holder, app.database)
            # Run again, unless its success had been written just before the freeze.
            wait_until(
                lambda n=number: _attempts(ledger, n) >= 2 or _attempts(ledger, n + 1) >= 1,
                40,
                what=f"{number} again",
            )
            thaw(frozen)
        wait_until_over(app, 30)
        time.sleep(1.0)
    found = history.check(app.database, ledger, [start], born_inside=True)
    assert history.states(found) == {"succeeded": links}
    assert {count for _, count in seen} <= {0, 1}
    assert any(row.state == "lost" for row in found.attempts.values())


def _attempts(ledger: Ledger, number: int) -> int:
    lines = [line for line in ledger.read() if line["number"] == number]
    return sum(line["event"] == "start" for line in lines)


def _holder(
    app: Onward, ledger: Ledger, number: int, workers: list[RunningWorker]
) -> RunningWorker:
    """Whose process runs this link."""
    wait_until(lambda: _attempts(ledger, number), 30, what=f"link {number}")
    (pid,) = {
        line["pid"]
        for line in ledger.read()
        if line["number"] == number and line["event"] == "start"
    }
    for worker in workers:
        if pid in worker.pids():
            return worker
    raise AssertionError(f"{pid} belongs to nobody")


@pytest.mark.parametrize("pace", PACES)
def test_a_frozen_worker_does_not_freeze_callers(
    open_app: Open, database_url: str, ledger: Ledger, pace: Pace
) -> None:
    """One of three workers stands still with jobs in its hands, some of them claimed ahead. 31
    callers wait for results: those whose job was elsewhere have it as soon as ever, the others when
    the worker has been declared lost.
    """
    app = open_app(**pace.settings)
    with (
        running(database_url, name="A", ledger=ledger) as first,
        running(database_url, name="B", ledger=ledger) as second,
        running(database_url, name="C", ledger=ledger) as third,
        ThreadPoolExecutor(31) as callers,
    ):
        warm = enqueue(app, (tasks.aecho.call(number) for number in range(200)))
        wait_until_over(app)
        held = tasks.nap_once.enqueue(60)
        (line,) = wait_until(lambda: [line for line in ledger.read() if line["job"] == held.id])
        (holder,) = [w for w in (first, second, third) if line["pid"] in w.pids()]
        waits = [held, *app.enqueue_many(tasks.nap.call(0.2) for _ in range(30))]
        answers = [callers.submit(_waited_for, job) for job in waits]
        wait_until(lambda: len(ledger.read()) > len(warm) * 2 + 6, what="some of the 30 begun")
        frozen = freeze(holder, app.database)
        stood_still = time.monotonic()
        ends = [answer.result(60) - stood_still for answer in answers]
        thaw(frozen)
        wait_until_over(app)
    found = history.check(app.database, ledger, [*warm, *(job.id for job in waits)])
    frozen_out = {job.id for job in waits if len(found.attempts_of(job.id)) > 1}
    assert held.id in frozen_out
    for job, end in zip(waits, ends, strict=True):
        late = pace.recovered_in + 3.0 if job.id in frozen_out else 5.0 + pace.busy
        assert end < late, f"{job.id}: {history.outcomes(found, job.id)}"


def _waited_for(job: Handle[str]) -> float:
    """When a caller has its result, on the monotonic clock."""
    assert job.wait(timeout=30) == "rested"
    return time.monotonic()
