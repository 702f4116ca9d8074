"""Stop: what runs may end, what cannot is given back free of charge, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from onward import Handle, Onward, current
from onward.store import store
from onward.worker.child import Orders
from onward.worker.executor import LAST_BREATH
from onward.worker.process import WorkerProcess
from onward.worker.supervisor import Supervisor
from tests.support import tasks
from tests.support.ledger import Ledger
from tests.support.workers import ROOT, TARGET, RunningWorker, alive, running, wait_until, workers
from tests.worker.history import ends, finishes, starts, wait_for, wait_over

BUSY = 1.5
"""Seconds that a busy machine may add to a stop."""


@pytest.mark.parametrize(
    ("shortest", "longest", "times"),
    [
        pytest.param(0.2, 0.9, 1, id="scaled"),
        pytest.param(
            0.5, 3.0, 50, id="as written", marks=[pytest.mark.soak, pytest.mark.timeout(900)]
        ),
    ],
)
def test_success_during_a_warm_stop_stays_success(
    shop: Onward, ledger: Ledger, shortest: float, longest: float, times: int
) -> None:
    """SIGTERM with eight jobs under way: eight successes at the first attempt, exit status 0."""
    for _ in range(times):
        ledger.path.unlink(missing_ok=True)
        step = (longest - shortest) / 7
        jobs = shop.enqueue_many(tasks.nap.call(shortest + step * i) for i in range(8))
        with running(shop.url, concurrency=8, grace=30) as worker:
            wait_until(lambda: len(starts(ledger)) >= 8)
            worker.terminate()
            assert worker.wait(30) == 0
            assert {line.state for line in worker.workers()} == {"stopped"}
            assert "Traceback" not in worker.log()
        assert [job.wait(0) for job in jobs] == ["rested"] * 8
        assert {tuple(ends(job)) for job in jobs} == {("succeeded",)}


def test_nothing_is_claimed_after_the_signal(shop: Onward, ledger: Ledger) -> None:
    """While one job runs on, those that wait and those that come later stay queued."""
    with running(shop.url, concurrency=2, grace=30) as worker:
        long = tasks.nap.enqueue(1.5)
        wait_for(long, "running")
        worker.terminate()
        wait_until(lambda: {line.state for line in worker.workers()} == {"draining"})
        later = shop.enqueue_many(tasks.echo.call(i) for i in range(5))
        assert worker.wait(20) == 0
    assert long.wait(0) == "rested"
    assert {job.refresh().state for job in later} == {"queued"}
    assert {line["job"] for line in starts(ledger)} == {long.id}


@pytest.mark.parametrize(
    "count",
    [pytest.param(900, id="scaled"), pytest.param(2_000, id="as written", marks=pytest.mark.soak)],
)
def test_a_full_queue_is_given_back_at_the_signal(shop: Onward, ledger: Ledger, count: int) -> None:
    """What was claimed ahead and had not begun is queued again, free of charge; nothing is lost."""
    jobs = shop.enqueue_many(tasks.nap.call(0.01) for _ in range(count))
    with running(shop.url, concurrency=4, grace=30) as worker:
        wait_until(lambda: len(starts(ledger)) > 100)
        worker.terminate()
        assert worker.wait(20) == 0
    counts = shop.counts()
    assert counts["succeeded"] + counts["queued"] == len(jobs)
    assert counts["succeeded"] == len(starts(ledger))
    with running(shop.url, concurrency=50, until_empty=True) as worker:
        assert worker.wait(60) == 0
    assert shop.counts()["succeeded"] == len(jobs)
    assert {job.refresh().losses for job in jobs[:50]} == {0}


@pytest.mark.parametrize("body", ["nap_once", "block_once"])
def test_after_the_grace_a_job_is_given_back_and_runnable_at_once(
    shop: Onward, ledger: Ledger, body: str
) -> None:
    """On the loop or in a thread: the process is gone soon after the grace, the attempt is released
    free of charge, and another worker runs the job without waiting for a lease.
    """
    task = tasks.nap_once if body == "nap_once" else tasks.block_once
    with running(shop.url, grace=0.5) as worker:
        job = task.using(max_attempts=1).enqueue(60)
        wait_until(lambda: starts(ledger, job))
        began = time.monotonic()
        worker.terminate()
        assert worker.wait(10) == 0
        assert 0.4 < time.monotonic() - began < 0.5 + 4
    assert ends(job) == ["released: shutdown"]
    assert job.refresh().state == "queued"
    with running(shop.url):
        assert job.wait(LAST_BREATH + 2) == "rested"
    assert ends(job) == ["released: shutdown", "succeeded"]
    assert (job.failures, job.losses) == (0, 0)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a stuck executor"])
def test_a_thread_that_is_given_back_has_ended_before_its_job_runs_again(
    shop: Onward, ledger: Ledger, beside: bool
) -> None:
    """Another worker waits for work while the first one stops."""
    with running(shop.url, ledger=ledger, grace=0.3, name="first") as first:
        job = tasks.tick_once.enqueue(30)
        if beside:
            tasks.nap_in_default_executor.enqueue(30)
        wait_until(lambda: starts(ledger, job))
        with running(shop.url, ledger=ledger, name="second"):
            first.terminate()
            assert job.wait(15) == "rested"
            assert first.wait(15) == 0
    ticks = [line["at"] for line in ledger.read() if line["event"] == "tick"]
    assert ends(job) == ["released: shutdown", "succeeded"]
    assert ticks[-1] < starts(ledger, job)[-1]["at"]


def test_a_second_signal_stops_at_once(shop: Onward, ledger: Ledger) -> None:
    """SIGINT, and again while the worker still waits for its grace: gone within a second, and both
    kinds of jobs can run again at once.
    """
    with running(shop.url, grace=60) as worker:
        jobs = [tasks.nap_once.enqueue(60), tasks.block_once.enqueue(60)]
        wait_until(lambda: len(starts(ledger)) == 2)
        worker.interrupt()
        time.sleep(0.3)
        assert worker.running
        began = time.monotonic()
        worker.interrupt()
        worker.wait(10)
        assert time.monotonic() - began < 1 + BUSY
    assert {job.refresh().state for job in jobs} == {"queued"}
    assert {tuple(ends(job)) for job in jobs} == {("released: shutdown",)}


@pytest.mark.parametrize(
    ("grace", "length"),
    [
        pytest.param(1, 30, id="scaled"),
        pytest.param(5, 60, id="as written", marks=pytest.mark.soak),
    ],
)
def test_jobs_that_will_not_stop_do_not_hold_the_worker(
    shop: Onward, ledger: Ledger, grace: float, length: float
) -> None:
    """A blocked loop and a blocked thread: the process is gone within the grace and 3 s, and both
    jobs run again elsewhere, not counted as failed.
    """
    with running(shop.url, concurrency=2, grace=grace, name="first") as worker:
        pids = worker.pids()
        jobs = [tasks.block_once.enqueue(length)]
        wait_until(lambda: starts(ledger, jobs[0]))
        jobs.append(tasks.block_loop_once.enqueue(length))
        wait_until(lambda: starts(ledger, jobs[1]))
        began = time.monotonic()
        worker.terminate()
        assert worker.wait(20) == 0
        assert time.monotonic() - began < grace + 3 + BUSY
        assert not any(alive(pid) for pid in pids)
        assert {line.state for line in worker.workers()} <= {"stopped", "lost"}
    with running(shop.url, name="second"):
        wait_over(jobs)
    assert {tuple(ends(job)) for job in jobs} == {("released: shutdown", "succeeded")}
    assert {(job.failures, job.losses) for job in jobs} == {(0, 0)}


def test_who_holds_the_interpreter_does_not_hold_the_worker(shop: Onward, ledger: Ledger) -> None:
    """C code that never lets go hears no signal: its process is killed after the grace, in order,
    so the job is given back and not lost.
    """
    with running(shop.url, concurrency=2, grace=0.5) as worker:
        job = tasks.hold_gil.enqueue(60)
        wait_until(lambda: starts(ledger, job))
        worker.terminate()
        assert worker.wait(10) == 0
    assert ends(job) == ["released: shutdown"]
    assert job.refresh().losses == 0


def stop_at_random(url: str, ledger: Ledger, chance: random.Random, count: int) -> None:
    """SIGINT at a random moment among short jobs on many slots: what returned is stored."""
    jobs = tasks.app.enqueue_many(tasks.nap.call(0.1) for _ in range(count))
    with running(url, concurrency=50, grace=10) as worker:
        time.sleep(chance.uniform(0, 0.4))
        worker.interrupt()
        assert worker.wait(20) == 0
        assert "Traceback" not in worker.log()
        assert {line.state for line in worker.workers()} == {"stopped"}
    returned = {line["job"] for line in finishes(ledger) if "raised" not in line}
    for job in jobs:
        job.refresh()
        if job.id in returned:
            assert ends(job) == ["succeeded"]
        else:
            assert job.state == "queued"
            assert set(ends(job)) <= {"released: shutdown"}
            assert tasks.app.cancel(job.id) == "cancelled"


@pytest.mark.parametrize(
    ("count", "times"),
    [
        pytest.param(100, 2, id="scaled"),
        pytest.param(200, 100, id="as written", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_outcomes_in_the_buffer_are_stored(
    shop: Onward, ledger: Ledger, count: int, times: int
) -> None:
    """Every job whose function returned has succeeded with one attempt; no traceback; status 0."""
    chance = random.Random(os.getpid())
    for _ in range(times):
        stop_at_random(shop.url, ledger, chance, count)


@pytest.mark.parametrize(
    "times",
    [pytest.param(3, id="scaled"), pytest.param(30, id="as written", marks=pytest.mark.soak)],
)
def test_a_signal_at_any_moment_of_the_start_ends_the_worker(shop: Onward, times: int) -> None:
    """Before the app is loaded, before the worker is registered, just after: it ends soon, with
    status 0, and leaves no process and no live worker behind.
    """
    chance = random.Random(os.getpid())
    for _ in range(times):
        with running(shop.url, processes=2, grace=30, ready=False) as worker:
            wait_until(lambda: started(worker))
            time.sleep(chance.uniform(0, 0.5))
            worker.terminate()
            assert worker.wait(10) == 0
            assert not worker.pids()


def test_a_signal_while_a_process_is_being_started_reaches_it_too(
    shop: Onward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor is told to stop before it knows of the process: it does not wait for it."""
    monkeypatch.setenv("ONWARD_URL", shop.url)
    supervisor = Supervisor(
        Orders(target=TARGET, concurrency=1, board_fd=-1, link_fd=-1, grace=60), 1
    )
    start = WorkerProcess.start

    async def start_and_stop(orders: Orders) -> WorkerProcess:
        child = await start(orders)
        supervisor.stop()
        return child

    monkeypatch.setattr(WorkerProcess, "start", start_and_stop)
    assert asyncio.run(asyncio.wait_for(supervisor.run(), 20)) == 0


def started(worker: RunningWorker) -> bool:
    """Whether the supervisor handles signals: the kernel says which ones a process catches."""
    try:
        with open(f"/proc/{worker.supervisor_pid}/status") as file:
            caught = next(line for line in file if line.startswith("SigCgt"))
    except FileNotFoundError:
        time.sleep(1.0)  # Not Linux.
        return True
    return bool(int(caught.split()[1], 16) & 1 << (signal.SIGTERM - 1))


def test_a_slow_cleanup_gets_its_last_words(shop: Onward, ledger: Ledger) -> None:
    """After the grace an `async` body gets CancelledError, and the time to await something."""
    with running(shop.url, grace=0.3) as worker:
        job = tasks.nap_with_cleanup.enqueue(60, 0.3)
        wait_until(lambda: starts(ledger, job))
        worker.terminate()
        assert worker.wait(10) == 0
    assert [line for line in ledger.read() if line["event"] == "clean"]
    assert ends(job) == ["released: shutdown"]


def test_a_body_that_fails_when_it_is_interrupted_is_not_charged(
    shop: Onward, ledger: Ledger
) -> None:
    """What a body raises because it was told to stop is no failure of its own."""
    with running(shop.url, grace=0.2) as worker:
        job = tasks.fail_when_interrupted.enqueue(60)
        wait_until(lambda: starts(ledger, job))
        worker.terminate()
        assert worker.wait(10) == 0
    assert ends(job) == ["released: shutdown"]
    assert job.refresh().failures == 0


def test_a_thread_of_the_default_executor_does_not_hold_the_process(
    shop: Onward, ledger: Ledger
) -> None:
    """A body that awaits something endless in `asyncio.to_thread` does not keep its process."""
    with running(shop.url, grace=0.3) as worker:
        job = tasks.nap_in_default_executor.enqueue(60)
        wait_until(lambda: starts(ledger, job))
        began = time.monotonic()
        worker.terminate()
        assert worker.wait(10) == 0
        assert time.monotonic() - began < 5
    assert ends(job) == ["released: shutdown"]


def test_an_isolated_body_is_ended_with_its_worker(shop: Onward, ledger: Ledger) -> None:
    """Its process is killed after the grace and leaves nothing; the attempt is given back."""
    with running(shop.url, grace=0.3) as worker:
        job = tasks.isolated_spin.enqueue(60)
        line = wait_until(lambda: starts(ledger, job), 20)[0]
        worker.terminate()
        assert worker.wait(10) == 0
    assert not alive(line["pid"])
    assert ends(job) == ["released: shutdown"]


def test_an_embedded_worker_lets_its_jobs_end(app: Onward) -> None:
    """Leaving the block waits for what runs, within the grace of the settings."""

    begun = threading.Event()

    @app.task
    async def nap() -> str:
        begun.set()
        await asyncio.sleep(0.5)
        return "rested"

    with app.worker():
        job = nap.enqueue()
        assert begun.wait(10)  # One that is claimed and has not begun goes back instead.
    assert job.wait(0) == "rested"


def test_an_embedded_worker_gives_back_what_does_not_end(app: Onward) -> None:
    """`stop(grace=0)`: interrupted, released, and run by the next worker."""

    @app.task(max_attempts=1)
    async def nap() -> int:
        if current().attempt == 1:
            await asyncio.sleep(60)
        return current().attempt

    worker = app.worker()
    with worker:
        job = nap.enqueue()
        wait_for(job, "running")
        worker.stop(grace=0)
    assert ends(job) == ["released: shutdown"]
    with app.worker():
        assert job.wait(10) == 2


def test_a_worker_that_is_stopped_while_it_starts_again_ends(
    app: Onward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was declared lost, and is stopped just as it registers under a new identity."""

    @app.task
    def work() -> str:
        return "done"

    worker = app.worker()
    registered: list[str] = []
    write = app.database.arun

    async def register_and_stop(op: Any, *args: Any, **kwargs: Any) -> Any:
        if op is store.register:
            registered.append(args[0].id)
            if len(registered) == 2:
                worker.stop()
                await asyncio.sleep(0.1)
        return await write(op, *args, **kwargs)

    monkeypatch.setattr(app.database, "arun", register_and_stop)
    with worker:
        assert work.enqueue().wait(10) == "done"
        app.database.run(store.lose, worker.id, "a test said so")
        wait_until(lambda: len(registered) == 2)
        worker.join(20)
        assert [line.state for line in workers(app.database)] == ["lost", "stopped"]


PROGRAM = """
import sys
from tests.support import tasks
tasks.app.run_worker(concurrency=4)
print("ended in order")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_program_that_runs_a_worker_stops_at_a_signal(
    shop: Onward, ledger: Ledger, number: signal.Signals
) -> None:
    """`app.run_worker()` in the main thread: the running job ends, then the program goes on."""
    job: Handle[str] = tasks.nap.enqueue(0.5)
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"ONWARD_URL": shop.url},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: starts(ledger, job))
        program.send_signal(number)
        out, _ = program.communicate(timeout=20)
    finally:
        program.kill()
        program.communicate()
    assert (program.returncode, out) == (0, "ended in order\n")
    assert job.wait(0) == "rested"


@pytest.mark.soak
def test_the_grace_is_honoured_in_full(shop: Onward, ledger: Ledger) -> None:
    """A job of 60 s: SIGTERM with a grace of 3 s ends at 3 to 5 s; a second SIGINT within 1 s."""
    for again in (False, True):
        with running(shop.url, grace=60 if again else 3) as worker:
            job = tasks.nap.enqueue(60)
            wait_until(lambda job=job: starts(ledger, job))  # type: ignore[misc]
            began = time.monotonic()
            worker.interrupt()
            if again:
                time.sleep(1)
                began = time.monotonic()
                worker.interrupt()
            worker.wait(10)
            took = time.monotonic() - began
        assert took < 1 if again else 3 <= took <= 5
        assert job.refresh().state == "queued"
        job.cancel()
