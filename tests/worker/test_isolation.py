"""Processes of their own: an attempt begins when its process is ready, and few processes do."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from onward import Onward
from onward.job import Job
from onward.lifecycle import JobState
from onward.policy import Crashed, Outcome, Released, Returned
from onward.running import CancelToken
from onward.worker import isolation
from onward.worker.isolation import Answer, Isolated, Isolation
from onward.worker.loading import app_options
from tests.support import tasks
from tests.support.ledger import Ledger
from tests.support.workers import alive, running, wait_until
from tests.worker.history import ends, last_error, starts, wait_for, wait_over

SLOW = "tests.worker.slow:app"
LOADS = {"ONWARD_TEST_LOADS": "1.5"}


def test_a_time_limit_does_not_run_while_its_process_starts(shop: Onward, ledger: Ledger) -> None:
    """The app takes longer to load than the attempt may take."""
    with running(shop.url, ledger=ledger, target=SLOW, environment=LOADS):
        job = tasks.isolated_echo.using(timeout=1.0, max_attempts=1).enqueue("x")
        wait_for(job, "succeeded", "dead")
    assert ends(job) == ["succeeded"]


def test_a_time_limit_does_not_run_while_the_process_after_a_loss_starts(
    shop: Onward, ledger: Ledger
) -> None:
    """What somebody else's crash took with it is tried again, and not dead for want of time."""
    with running(shop.url, ledger=ledger, target=SLOW, environment=LOADS) as worker:
        job = tasks.nap_once.using(timeout=1.0, max_attempts=1, max_losses=3).enqueue(60)
        wait_until(lambda: starts(ledger, job))
        os.kill(worker.pids()[0], signal.SIGKILL)
        wait_for(job, "succeeded", "dead")
    assert ends(job) == ["lost", "succeeded"]


def test_an_attempt_whose_process_starts_when_its_worker_dies_has_not_begun(
    shop: Onward, ledger: Ledger
) -> None:
    """It is given back free of charge."""
    slowly = {"ONWARD_TEST_LOADS": "30"}
    with running(shop.url, ledger=ledger, target=SLOW, environment=slowly) as worker:
        job = tasks.isolated_echo.using(max_attempts=1).enqueue("x")
        wait_for(job, "running")
        wait_until(worker.isolated_pids)
        os.kill(worker.pids()[0], signal.SIGKILL)
        wait_until(lambda: ends(job))
    assert ends(job) == ["released: its worker died before it began"]
    assert starts(ledger, job) == []


def test_an_attempt_that_waits_for_its_process_can_be_cancelled(
    shop: Onward, ledger: Ledger
) -> None:
    """At once: it has not begun, so it needs no time to clean up."""
    slowly = {"ONWARD_TEST_LOADS": "30"}
    patient = {"cancel_kill_after": 60.0}
    with running(
        shop.url, ledger=ledger, target=SLOW, environment=slowly, settings=patient
    ) as worker:
        job = tasks.isolated_echo.enqueue("x")
        wait_for(job, "running")
        job.cancel()
        wait_for(job, "cancelled")
        worker.terminate()
        assert worker.wait(15) == 0
    assert ends(job) == ["cancelled"]
    assert starts(ledger, job) == []


def test_a_crash_under_many_slots_starts_few_processes(shop: Onward, ledger: Ledger) -> None:
    """Every job that it took with it runs again in a process of its own, a few at a time."""
    count = isolation.MOST_RECOVERED + 14
    with running(shop.url, ledger=ledger, concurrency=count) as worker:
        jobs = shop.enqueue_many(tasks.nap_once.call(60) for _ in range(count))
        wait_until(lambda: len(starts(ledger)) == count)
        os.kill(worker.pids()[0], signal.SIGKILL)
        seen: list[int] = []

        def over() -> bool:
            seen.append(len(worker.isolated_pids()))
            return shop.counts()["succeeded"] == count

        wait_until(over, 60)
    assert {tuple(ends(job)) for job in jobs} == {("lost", "succeeded")}
    assert 1 < max(seen) <= isolation.MOST_RECOVERED


def test_a_process_that_nobody_needs_ends(
    shop: Onward, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "IDLE_SECONDS", 0.3)
    with shop.worker():
        assert tasks.isolated_nap.enqueue(0).wait(20) == "rested"
        (line,) = starts(ledger)
        wait_until(lambda: not alive(line["pid"]))
        assert tasks.isolated_nap.enqueue(0).wait(20) == "rested"


# --- what a body starts ---------------------------------------------------------------------------


@pytest.mark.parametrize("task", [tasks.fork, tasks.afork, tasks.isolated_fork])
def test_a_fork_that_comes_out_of_a_body_is_not_the_attempt(
    shop: Onward, ledger: Ledger, task: Any
) -> None:
    """It speaks for nobody and runs nothing: every job has its own result, and ran once."""
    with running(shop.url, ledger=ledger, concurrency=2) as worker:
        jobs = [task.enqueue("forks")]
        jobs += [tasks.isolated_echo.enqueue(number) for number in range(3)]
        jobs += [tasks.echo.enqueue(number) for number in range(20)]
        wait_over(jobs)
        worker.terminate()
        assert worker.wait(15) == 0
    results = [job.wait(0) for job in jobs]
    assert results == ["forks", *range(3), *range(20)]
    assert {tuple(ends(job)) for job in jobs} == {("succeeded",)}
    assert len(starts(ledger)) == len(jobs)


def test_a_process_that_ends_is_seen_although_a_fork_of_it_lives(
    shop: Onward, ledger: Ledger
) -> None:
    with running(shop.url, ledger=ledger):
        job = tasks.isolated_fork_and_exit.using(max_attempts=1).enqueue(60)
        wait_for(job, "dead")
    assert ends(job) == ["failed: crashed"]
    assert "exit code 3" in last_error(job).message


def test_what_a_body_started_ends_with_it(shop: Onward, ledger: Ledger, tmp_path: Path) -> None:
    """The limit ends the shell, too: it must not run beside the next attempt."""
    lines = tmp_path / "lines"
    with running(shop.url, ledger=ledger):
        job = tasks.isolated_shell.using(timeout=0.5, max_attempts=1).enqueue(str(lines))
        wait_for(job, "dead")
        written = lines.read_text()
        time.sleep(0.3)
        assert lines.read_text() == written
    assert ends(job) == ["failed: timeout"]


@pytest.mark.parametrize("what", ["a thread", "a stubborn task", "a task"])
def test_what_an_async_body_leaves_behind_does_not_hold_its_outcome(
    shop: Onward, ledger: Ledger, what: str
) -> None:
    """It has returned in time. What goes on ends with the process; where nothing does, the process
    runs the next attempt.
    """
    with running(shop.url, ledger=ledger, concurrency=1):
        task = tasks.isolated_leave.using(timeout=2.0, max_attempts=1)
        first, second = (task.enqueue(what, 60).wait(20) for _ in range(2))
        assert alive(second) == (what == "a task")
    assert (first == second) == (what == "a task")


def test_a_stop_of_the_whole_service_leaves_the_attempts_their_grace(
    shop: Onward, ledger: Ledger
) -> None:
    """systemd signals every process of a service: the attempt's own process leaves that to its
    worker.
    """
    with running(shop.url, ledger=ledger, grace=20) as worker:
        job = tasks.isolated_nap.using(max_attempts=1).enqueue(1.0)
        (line,) = wait_until(lambda: starts(ledger, job), 20)
        os.kill(line["pid"], signal.SIGTERM)
        worker.terminate()
        assert worker.wait(20) == 0
    assert ends(job) == ["succeeded"]


# --- a process that does not get ready ------------------------------------------------------------


class Stuck(Isolation):
    """Its processes sleep, and never say that they are ready."""

    def __init__(self) -> None:
        super().__init__("nowhere:app")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.spawned = asyncio.Event()

    def _spawn(self, fd: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sleep", "60"], pass_fds=[fd], start_new_session=True)
        self.processes.append(process)
        self.spawned.set()
        return process


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    made = Stuck()
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


def a_job(losses: int = 0) -> Job:
    return Job(
        id="01890000-0000-7000-8000-000000000000",
        task="nothing",
        queue="default",
        priority=0,
        state=JobState.RUNNING,
        attempt=1,
        worker="01890000-0000-7000-8000-000000000001",
        args="{}",
        max_attempts=5,
        max_losses=3,
        failures=0,
        losses=losses,
        budget_from=1,
        timeout=None,
    )


async def outcome_of(attempt: Isolated) -> Outcome:
    ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    attempt.then(ended.set_result)
    return await ended


def begun_too_early() -> None:
    raise AssertionError("nothing has begun")


def test_a_process_that_is_never_ready_is_given_up(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "START_SECONDS", 0.2)

    async def scene() -> Outcome:
        return await outcome_of(stuck.run(a_job(), CancelToken(), begun_too_early))

    outcome = asyncio.run(scene())
    assert isinstance(outcome, Crashed)
    assert "no process could be started: it was not ready within 0.2 s" in outcome.error
    assert stuck.processes[0].poll() == -signal.SIGKILL


def test_a_process_that_ends_before_it_is_ready_says_how(stuck: Stuck) -> None:
    async def scene() -> Outcome:
        attempt = stuck.run(a_job(), CancelToken(), begun_too_early)
        await stuck.spawned.wait()
        stuck.processes[0].terminate()
        return await outcome_of(attempt)

    outcome = asyncio.run(scene())
    assert isinstance(outcome, Crashed)
    assert "no process could be started: signal SIGTERM" in outcome.error


@pytest.mark.parametrize("ahead", [0, isolation.MOST_RECOVERED], ids=["starting", "in the row"])
def test_an_attempt_that_has_not_begun_ends_when_it_is_killed(stuck: Stuck, ahead: int) -> None:
    """One whose process starts, and one that waits for its turn."""

    async def scene() -> Outcome:
        for _ in range(ahead):
            stuck.run(a_job(losses=1), CancelToken(), begun_too_early)
        attempt = stuck.run(a_job(losses=1), CancelToken(), begun_too_early)
        await stuck.spawned.wait()
        attempt.kill()
        async with asyncio.timeout(5):
            outcome = await outcome_of(attempt)
        await stuck.close()
        return outcome

    outcome = asyncio.run(scene())
    assert isinstance(outcome, Crashed)
    assert "it was stopped before it began" in outcome.error
    assert len(stuck.processes) <= isolation.MOST_STARTING
    assert all(process.poll() is not None for process in stuck.processes)


# --- a process that is used again -----------------------------------------------------------------


class Counted(Isolation):
    """Real processes, counted."""

    def __init__(self, url: str) -> None:
        super().__init__("tests.support.tasks:app", app_options(Onward(url)))
        self.processes: list[subprocess.Popen[bytes]] = []

    def _spawn(self, fd: int) -> subprocess.Popen[bytes]:
        self.processes.append(super()._spawn(fd))
        return self.processes[-1]


def echoing() -> Job:
    return replace(a_job(), task=tasks.isolated_echo.name, args='{"value":"x"}')


def test_who_waits_for_a_start_takes_a_process_that_has_become_free(tmp_path: Path) -> None:
    made = Counted(f"sqlite:///{tmp_path}/never-opened.db")
    made._starting = asyncio.Semaphore(1)

    async def scene() -> list[Outcome]:
        attempts = [made.run(echoing(), CancelToken(), lambda: None) for _ in range(6)]
        outcomes = await asyncio.gather(*(outcome_of(attempt) for attempt in attempts))
        await made.close()
        return outcomes

    assert asyncio.run(scene()) == [Returned('"x"')] * 6
    assert len(made.processes) < 6


def test_a_process_that_was_killed_as_its_attempt_ended_is_not_used_again(tmp_path: Path) -> None:
    class KilledLate(Counted):
        attempt: Isolated

        async def _answer(self, child: Any, token: CancelToken) -> Answer:
            answer = await super()._answer(child, token)
            self.attempt.kill()
            return answer

    made = KilledLate(f"sqlite:///{tmp_path}/never-opened.db")

    async def scene() -> list[Outcome]:
        outcomes: list[Outcome] = []
        for _ in range(2):
            made.attempt = made.run(echoing(), CancelToken(), lambda: None)
            outcomes.append(await outcome_of(made.attempt))
            assert made._free == []
        await made.close()
        return outcomes

    assert asyncio.run(scene()) == [Returned('"x"')] * 2
    assert len(made.processes) == 2


@pytest.mark.parametrize(
    ("loads", "said"),
    [("soon", "could not convert string to float"), ("never", "SystemExit: 3")],
)
def test_an_app_that_cannot_be_loaded_is_told_as_the_attempts_end(
    shop: Onward, loads: str, said: str
) -> None:
    """It is an ordinary failure, with the app's own error."""
    with running(shop.url, target=SLOW, environment={"ONWARD_TEST_LOADS": loads}):
        job = tasks.isolated_echo.using(max_attempts=2).enqueue("x")
        wait_over([job])
    assert ends(job) == ["failed: crashed"] * 2
    assert said in last_error(job).message


def test_a_system_without_room_charges_nobody(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process can be started for want of memory: the attempt is given back."""

    def spawn(_: Stuck, fd: int) -> subprocess.Popen[bytes]:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(Stuck, "_spawn", spawn)

    async def scene() -> Outcome:
        return await outcome_of(stuck.run(a_job(), CancelToken(), begun_too_early))

    outcome = asyncio.run(scene())
    assert isinstance(outcome, Released)
    assert "no process could be started" in outcome.why
    assert outcome.delay == isolation.SHORTAGE


def test_a_stop_begins_nothing_that_waits_for_its_process(shop: Onward, ledger: Ledger) -> None:
    """Its process gets ready within the grace; the attempt is given back all the same."""
    slowly = {"ONWARD_TEST_LOADS": "2"}
    with running(shop.url, ledger=ledger, target=SLOW, environment=slowly, grace=20) as worker:
        job = tasks.isolated_echo.using(max_attempts=1).enqueue("x")
        wait_for(job, "running")
        worker.terminate()
        assert worker.wait(15) == 0
    assert ends(job) == ["released: shutdown"]
    assert starts(ledger, job) == []


def test_few_attempts_after_a_loss_have_a_process_at_once(stuck: Stuck) -> None:
    """However many could start."""
    stuck._starting = asyncio.Semaphore(1_000)

    async def scene() -> None:
        for _ in range(isolation.MOST_RECOVERED + 5):
            stuck.run(a_job(losses=1), CancelToken(), begun_too_early)
        await stuck.spawned.wait()
        for _ in range(500):
            await asyncio.sleep(0)
        await stuck.close()

    asyncio.run(scene())
    assert len(stuck.processes) == isolation.MOST_RECOVERED


def test_few_processes_start_at_once(stuck: Stuck) -> None:
    async def scene() -> None:
        for _ in range(isolation.MOST_STARTING + 5):
            stuck.run(a_job(), CancelToken(), begun_too_early)
        await stuck.spawned.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        await stuck.close()

    asyncio.run(scene())
    assert len(stuck.processes) == isolation.MOST_STARTING
