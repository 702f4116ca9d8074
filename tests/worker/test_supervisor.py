"""The supervisor: a process that dies is seen, named and replaced, and its neighbours go on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from onward import Onward
from tests.support import tasks
from tests.support.ledger import Ledger
from tests.support.workers import ROOT, alive, cpu_seconds, running, wait_until
from tests.worker.history import ends, last_error, starts, wait_for, wait_over


def threads_of(pid: int) -> int:
    """How many threads a process still has; 0 where the system does not show that."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(0.2, id="scaled"),
        pytest.param(1.0, id="as written", marks=pytest.mark.soak),
    ],
)
def test_the_crash_of_one_process_spares_the_others(shop: Onward, length: float) -> None:
    """A segmentation fault among twenty jobs on four processes: the others succeed with one
    attempt, the process is replaced within seconds, the job is dead and its reason has the signal.
    """
    with running(shop.url, processes=4, concurrency=1) as worker:
        before = set(worker.pids())
        good = shop.enqueue_many(tasks.nap.call(length) for _ in range(20))
        # What has just ended in the same process is written meanwhile.
        bad = tasks.segfault.using(max_attempts=1, priority=1).enqueue(0.5)
        wait_for(bad, "dead")
        wait_until(lambda: len(worker.pids()) == 4, what="the crashed process replaced")
        assert len(set(worker.pids()) - before) == 1
        wait_over([*good, bad])
        assert worker.running
    assert {tuple(ends(job)) for job in good} == {("succeeded",)}
    assert ends(bad) == ["lost"]
    assert "signal SIGSEGV" in last_error(bad).message


def test_an_exit_without_a_word_is_named(shop: Onward) -> None:
    """`os._exit(3)` in a body: the attempt is lost, and its reason has the exit code."""
    with running(shop.url, concurrency=1):
        job = tasks.exit_hard.using(max_attempts=1).enqueue(3)
        wait_for(job, "dead")
    assert ends(job) == ["lost"]
    assert "exit code 3" in last_error(job).message


def test_an_exit_with_status_0_is_no_orderly_end(shop: Onward) -> None:
    """A body that leaves with `os._exit(0)` looks like success and is none: lost, and the process
    replaced.
    """
    with running(shop.url, concurrency=1):
        job = tasks.exit_hard.using(max_attempts=1).enqueue(0)
        wait_for(job, "dead")
        assert tasks.echo.enqueue(1).wait(15) == 1
    assert ends(job) == ["lost"]
    assert "exit code 0" in last_error(job).message


def test_a_crash_in_a_process_of_its_own_is_a_failure(shop: Onward) -> None:
    """It takes nobody along: the worker lives, the attempt failed and says how."""
    with running(shop.url, concurrency=4) as worker:
        pids = worker.pids()
        neighbour = tasks.nap.enqueue(1.0)
        job = tasks.isolated_exit.using(max_attempts=2).enqueue(7)
        wait_for(job, "dead", seconds=30)
        assert worker.pids() == pids
        assert neighbour.wait(10) == "rested"
    assert ends(job) == ["failed: crashed"] * 2
    assert "exit code 7" in last_error(job).message


def test_a_crash_in_a_process_of_its_own_spares_all_neighbours(shop: Onward) -> None:
    """A segmentation fault among twenty jobs that share the slots of four processes: in a process
    of its own it costs none of them an attempt, and no process is replaced.
    """
    with running(shop.url, processes=4, concurrency=10) as worker:
        pids = worker.pids()
        good = shop.enqueue_many(tasks.nap.call(1.0) for _ in range(20))
        bad = tasks.isolated_segfault.using(max_attempts=1, priority=1).enqueue()
        wait_over([*good, bad])
        assert worker.pids() == pids
    assert {tuple(ends(job)) for job in good} == {("succeeded",)}
    assert (bad.state, ends(bad)) == ("dead", ["failed: crashed"])
    assert "signal SIGSEGV" in last_error(bad).message


def test_an_isolated_process_that_died_while_idle_harms_nobody(
    shop: Onward, ledger: Ledger
) -> None:
    """It is replaced when the next attempt needs one, which is not charged for it."""
    with running(shop.url, concurrency=1) as worker:
        assert tasks.isolated_nap.enqueue(0).wait(20) == "rested"
        (pid,) = worker.isolated_pids()
        os.kill(pid, signal.SIGKILL)
        # A killed process may be waited for once its last thread has ended, not only its first.
        wait_until(lambda: not alive(pid) and threads_of(pid) <= 1)
        job = tasks.isolated_nap.enqueue(0)
        assert job.wait(20) == "rested"
    assert ends(job) == ["succeeded"]


def test_isolated_processes_end_with_their_worker(shop: Onward, ledger: Ledger) -> None:
    """The worker process is killed: the process of its own that it had is gone at once, even while
    it computes.
    """
    with running(shop.url, concurrency=1) as worker:
        job = tasks.isolated_spin.using(max_attempts=1).enqueue(60)
        line = wait_until(lambda: starts(ledger, job), 20)[0]
        os.kill(worker.pids()[0], signal.SIGKILL)
        wait_until(lambda: not alive(line["pid"]), 5)
        wait_for(job, "dead")


def test_a_job_that_was_not_begun_is_given_back_free_of_charge(shop: Onward) -> None:
    """Claimed ahead by a worker that dies: released, not lost, even if one attempt is allowed."""
    short = shop.enqueue_many(tasks.aecho.call(i) for i in range(400))
    with running(shop.url, concurrency=1) as worker:
        wait_over(short)
        killer = tasks.kill_worker.using(priority=5, max_attempts=1).enqueue(seconds=0.5)
        behind = shop.enqueue_many(tasks.aecho.using(max_attempts=1).call(i) for i in range(50))
        wait_over([killer, *behind])
        assert worker.running
    assert ends(killer) == ["lost"]
    assert {job.state for job in behind} == {"succeeded"}
    assert {job.losses for job in behind} == {0}


def start(target: str, *, cwd: Path = ROOT, url: str = "") -> subprocess.CompletedProcess[str]:
    """Run a supervisor that is expected to end by itself."""
    program = (
        "import sys; from onward.worker import supervisor;"
        " sys.exit(supervisor.run(target=sys.argv[1]))"
    )
    return subprocess.run(
        [sys.executable, "-c", program, target],
        cwd=cwd,
        env=os.environ | {"ONWARD_URL": url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_an_app_that_is_not_there_ends_the_supervisor(tmp_path: Path) -> None:
    """No module, no app in it, a file that is not there: a message and status 2, not a loop."""
    (tmp_path / "empty.py").write_text("app = 5\n")
    for target, said in [
        ("nowhere:app", "no module 'nowhere'"),
        ("empty:app", "is no Onward app"),
        ("empty", "does not say which app"),
        ("lost.py:app", "no file lost.py"),
    ]:
        done = start(target, cwd=tmp_path)
        assert done.returncode == 2
        assert said in done.stderr


def test_an_app_that_cannot_be_imported_ends_the_supervisor(tmp_path: Path) -> None:
    """Where it fails is shown, and the status is 2."""
    (tmp_path / "broken.py").write_text("raise RuntimeError('no configuration')\n")
    done = start("broken:app", cwd=tmp_path)
    assert done.returncode == 2
    assert 'broken.py", line 1' in done.stderr
    assert "RuntimeError: no configuration" in done.stderr
    assert "importlib" not in done.stderr


def test_a_file_beside_the_app_stands_for_no_standard_module(tmp_path: Path) -> None:
    """`queue.py` is a likely name there, and our own code imports the standard one."""
    (tmp_path / "queue.py").write_text("raise RuntimeError('not the one you want')\n")
    (tmp_path / "beside.py").write_text(
        f"from onward import Onward\napp = Onward('sqlite:///{tmp_path}/x.db')\n"
        "@app.task\ndef work() -> None: ...\n"
    )
    done = subprocess.run(
        [Path(sys.executable).with_name("onward"), "worker", "beside:app", "--until-empty"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_database_without_tables_ends_the_supervisor(postgres_database: str) -> None:
    """It says what to do, and the status is 5. (An SQLite file gets its tables on first use.)"""
    done = start("tests.support.tasks:app", url=postgres_database)
    assert done.returncode == 5
    assert "onward db init" in done.stderr


@pytest.mark.parametrize("wrong", ["name", "user"])
def test_a_server_that_turns_the_url_away_ends_the_supervisor(
    postgres_url: str, wrong: str
) -> None:
    """No such database, no such user: waiting mends neither, so the whole error and status 5."""
    parts = urlsplit(postgres_url)
    if wrong == "name":
        url = parts._replace(path="/nowhere_at_all").geturl()
    else:
        url = parts._replace(netloc=f"nobody_at_all@{parts.netloc.rpartition('@')[2]}").geturl()
    done = start("tests.support.tasks:app", url=url)
    assert done.returncode == 5
    assert "why: the server answers, and " in done.stderr
    assert "fix: " in done.stderr


def test_a_server_that_does_not_answer_is_waited_for() -> None:
    """The one line in the log says what to look at, and that it goes on by itself."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # Bound and not listening: the port is closed.
        url = f"postgresql://app@127.0.0.1:{nobody.getsockname()[1]}/shop"
        worker = subprocess.Popen(
            [sys.executable, "-m", "onward.cli", "worker", "tests.support.tasks:app"],
            cwd=ROOT,
            env=os.environ | {"ONWARD_URL": url},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert worker.stderr is not None
        try:
            line = next(line for line in worker.stderr if "supervisor.waits" in line)
            assert "tries again until it answers" in line
            assert worker.poll() is None
        finally:
            worker.terminate()
            worker.communicate(timeout=30)


def test_an_app_may_be_a_file(shop: Onward, tmp_path: Path) -> None:
    """`path/to/jobs.py:app`, with tasks that run in processes of their own, too."""
    file = tmp_path / "jobs.py"
    file.write_text(
        "from onward import Onward\n"
        "from tests.support.tasks import noted\n"
        "app = Onward()\n"
        "@app.task(name='here')\n"
        "def here() -> str:\n"
        "    with noted(): return __name__\n"
        "@app.task(name='apart', isolation='process')\n"
        "def apart() -> str:\n"
        "    with noted(): return __name__\n"
    )
    stubs = [shop.task(name=name)(_stub) for name in ("here", "apart")]
    try:
        with running(shop.url, target=f"{file}:app", concurrency=2):
            jobs = shop.enqueue_many(stub.call() for stub in stubs)
            assert [job.wait(20) for job in jobs] == ["jobs", "jobs"]
    finally:
        for name in ("here", "apart"):
            shop.tasks.pop(name, None)


def _stub() -> str:
    return ""


def test_processes_that_die_at_once_are_not_started_in_a_tight_loop(shop: Onward) -> None:
    """The pause between two starts grows; the supervisor lives on and stops when told."""
    with running(shop.url, concurrency=1, name="loop") as worker:
        killed: set[int] = set()
        for _ in range(3):
            fresh = wait_until(lambda: set(worker.pids()) - killed, 20)
            killed.update(fresh)
            os.kill(fresh.pop(), signal.SIGKILL)
        time.sleep(1.5)
        assert len(worker.workers()) <= 6
        worker.terminate()
        assert worker.wait(20) == 0


def test_a_job_that_cannot_run_leaves_the_worker_at_rest(shop: Onward, ledger: Ledger) -> None:
    """Twenty arguments for a function of one: dead at once, and nobody goes on trying. What the
    worker, its supervisor and their polling then need is a small part of a core.
    """
    with closing(Onward(shop.url)) as older, running(shop.url) as worker:

        @older.task(name=tasks.echo.name, max_attempts=3)
        def echo(*values: int) -> None: ...

        job = echo.enqueue(*range(20))
        wait_for(job, "dead")
        pids = [worker.supervisor_pid, *worker.pids(), *worker.isolated_pids()]
        before, began = cpu_seconds(pids), time.monotonic()
        time.sleep(1.5)
        share = (cpu_seconds(pids) - before) / (time.monotonic() - began)
        assert share < 0.2  # It is 0.06 where nothing else runs; a tight loop takes all it can get.
        assert len(ends(job)) <= 3
        assert last_error(job).type == "onward.errors.PayloadUnreadable"
    assert starts(ledger) == []


def test_the_workers_table_tells_who_runs(shop: Onward) -> None:
    """Each process start is a worker of its own, with its pid, active, and stopped afterwards."""
    with running(shop.url, processes=2, name="web-1") as worker:
        lines = worker.workers()
        assert [line.name for line in lines] == ["web-1", "web-1"]
        assert {line.state for line in lines} == {"active"}
        assert len({line.pid for line in lines}) == 2
        worker.terminate()
        assert worker.wait(20) == 0
        assert {line.state for line in worker.workers()} == {"stopped"}
        assert not any(alive(line.pid) for line in lines)


def test_a_worker_process_that_is_told_to_stop_alone_is_replaced(shop: Onward) -> None:
    """SIGTERM to one of two worker processes, not to the supervisor: it ends in order, nobody is
    lost, and soon there are two again.
    """
    with running(shop.url, processes=2, concurrency=1) as worker:
        jobs = [tasks.nap.enqueue(0.7), tasks.nap.enqueue(0.7)]
        wait_for(jobs[1], "running")
        before = worker.pids()
        os.kill(before[0], signal.SIGTERM)
        wait_over(jobs)
        wait_until(lambda: not alive(before[0]), 20)
        wait_until(lambda: len(worker.pids()) == 2, 20)
        assert before[1] in worker.pids()
        worker.terminate()
        assert worker.wait(20) == 0
    assert {tuple(ends(job)) for job in jobs} == {("succeeded",)}


def test_a_worker_whose_supervisor_is_gone_says_so(shop: Onward) -> None:
    with running(shop.url) as worker:
        worker.process.send_signal(signal.SIGKILL)
        wait_until(lambda: "worker.orphaned" in worker.log())
        assert "the supervisor is gone" in worker.log()
