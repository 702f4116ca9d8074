"""One SQLite file and everything that can happen to it: many writers, a foreign one that does not
let go, a disk that is full, a file that may not be written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from subprocess import PIPE

import apsw
import pytest

from onward.errors import DatabaseUnavailable
from tests.crash.conftest import Open
from tests.crash.field import enqueue, kill, wait_for_state, wait_until_over
from tests.support import history, tasks
from tests.support.ledger import Ledger
from tests.support.workers import ROOT, TARGET, opened, running, wait_until


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/onward.db"


ENQUEUER = """
import json, sys, time
from tests.support import tasks
took = []
ids = []
for number in range(int(sys.argv[1])):
    began = time.monotonic()
    ids.append(tasks.aecho.enqueue(number).id)
    took.append(time.monotonic() - began)
print(json.dumps({"ids": ids, "took": took}))
"""


@pytest.mark.parametrize(
    ("processes", "enqueuers", "each"),
    [
        pytest.param(4, 3, 150, id="scaled"),
        pytest.param(
            8, 4, 5_000, id="as written", marks=[pytest.mark.soak, pytest.mark.timeout(900)]
        ),
    ],
)
def test_many_processes_share_one_file(
    open_app: Open,
    database_url: str,
    ledger: Ledger,
    processes: int,
    enqueuers: int,
    each: int,
) -> None:
    """Worker processes and enqueuers all write to one file: nobody is told that it is locked, each
    job runs once, and an enqueue is quick for all but one in a hundred.
    """
    app = open_app(lease=12.0, beat=2.0)
    with running(database_url, processes=processes, ledger=ledger) as worker:
        callers = [
            subprocess.Popen(
                [sys.executable, "-c", ENQUEUER, str(each)],
                env=os.environ | {"ONWARD_URL": database_url},
                cwd=ROOT,
                stdout=PIPE,
                text=True,
            )
            for _ in range(enqueuers)
        ]
        answers = [json.loads(caller.communicate()[0]) for caller in callers]
        wait_until_over(app, 120)
        assert "locked" not in worker.log()
        assert "WARNING" not in worker.log()
    ids = [id_ for answer in answers for id_ in answer["ids"]]
    took = sorted(seconds for answer in answers for seconds in answer["took"])
    assert took[int(len(took) * 0.99)] < 1.0
    found = history.check(app.database, ledger, ids)
    assert history.states(found) == {"succeeded": enqueuers * each}
    assert len(found.bodies) == enqueuers * each


@pytest.mark.parametrize(
    ("held", "lease"),
    [
        pytest.param(5.0, 1.5, id="scaled"),
        pytest.param(20.0, 3.0, id="as written", marks=pytest.mark.soak),
    ],
)
def test_a_long_foreign_transaction_costs_nobody_a_lease(
    open_app: Open, database_url: str, ledger: Ledger, held: float, lease: float
) -> None:
    """Somebody holds the file's write lock for several leases. No lease can be renewed, and nobody
    may take that for a death: whoever wanted to could not write either. Two supervisors watch each
    other meanwhile; both jobs run once, and workers stay who they are.
    """
    app = open_app(lease=lease, beat=lease / 4, sweep=lease / 6)
    with (
        running(database_url, name="A", ledger=ledger, concurrency=1) as first,
        running(database_url, name="B", ledger=ledger, concurrency=1) as second,
    ):
        pids = first.pids() + second.pids()
        ids = enqueue(app, [tasks.nap.call(held + 1.0), tasks.nap.call(1.0)])
        wait_until(lambda: len(ledger.read()) == 2)
        with held_lock(app.database.path):
            time.sleep(held)
        wait_until_over(app, 30)
        ids += enqueue(app, [tasks.echo.call("after")])
        wait_for_state(app, ids[-1], "succeeded", 5)
        assert first.pids() + second.pids() == pids
        assert "Traceback" not in first.log() + second.log()
    found = history.check(app.database, ledger, ids)
    assert all(history.outcomes(found, id_) == ["succeeded"] for id_ in ids)
    assert len(found.bodies) == 3


def test_a_supervisor_frozen_alone_loses_its_jobs_on_sqlite_too(
    open_app: Open, database_url: str, ledger: Ledger
) -> None:
    """The process works and nobody renews its lease: others may write, and take its job over. It
    learns of it from the database, ends, and what it had to say is refused.
    """
    app = open_app(lease=1.5, beat=0.4, sweep=0.3)
    with running(database_url, name="A", ledger=ledger) as first:
        (id_,) = enqueue(app, [tasks.nap_once.call(60)])
        wait_until(ledger.read)
        (process,) = first.pids()
        kill(first.supervisor_pid, 19)
        with running(database_url, name="B", ledger=ledger):
            wait_for_state(app, id_, "succeeded", 10)
            wait_until(lambda: len(ledger.read()) == 4, 10, what="the end of the first body")
        kill(first.supervisor_pid, 18)
        wait_until(lambda: process not in first.pids(), 10)
    found = history.check(app.database, ledger, [id_])
    assert history.outcomes(found, id_) == ["lost (lost)", "succeeded"]
    assert found.bodies_of(id_)[0].raised == "CancelledError"


@contextmanager
def held_lock(path: Path) -> Iterator[None]:
    """A write transaction of somebody else's."""
    with closing(apsw.Connection(str(path))) as connection:
        connection.set_busy_timeout(5_000)
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


# --- a disk that takes nothing --------------------------------------------------------------------


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing in a folder can be written, not even by root or through files that are open."""
    paths = [folder, *folder.iterdir()]
    run = subprocess.run(["chattr", "+i", *paths], capture_output=True, text=True, check=False)
    try:
        if run.returncode:
            pytest.skip(f"needs root and a file system with immutable files: {run.stderr.strip()}")
        yield
    finally:
        undo = subprocess.run(["chattr", "-R", "-i", folder], capture_output=True, check=False)
    assert not undo.returncode, undo.stderr


def test_a_file_that_becomes_read_only_stops_claims_and_keeps_results(
    open_app: Open, tmp_path: Path, ledger: Ledger
) -> None:
    """While nothing can be written no job starts, since no claim takes; what ran keeps its result,
    for longer than a lease. When the file can be written again all go on, without a restart.
    """
    folder = tmp_path / "file"
    folder.mkdir()
    app = opened(f"sqlite:///{folder}/onward.db", lease=1.5, beat=0.4, sweep=0.3)
    with running(app.url, ledger=ledger) as worker:
        pids = worker.pids()
        ran, waiting = enqueue(app, [tasks.nap.call(1.0), tasks.nap.using(run_after=1.5).call(0.1)])
        wait_until(ledger.read)
        with read_only(folder):
            with pytest.raises(DatabaseUnavailable, match=r"read-only|input/output|cannot"):
                tasks.echo.enqueue(1)
            time.sleep(4.0)
            assert len(ledger.read()) == 2, "the first began and ended; the second has not begun"
            assert app.get(ran).state == "running"
        wait_for_state(app, ran, "succeeded", 5)
        wait_for_state(app, waiting, "succeeded", 5)
        assert worker.pids() == pids
        assert "Traceback" not in worker.log()
        assert len(worker.log().splitlines()) < 20, "the log is flooded"
    found = history.check(app.database, ledger, [ran, waiting])
    assert all(history.outcomes(found, id_) == ["succeeded"] for id_ in (ran, waiting))
    app.close()


SUPERVISOR = """
import sys
from onward.worker import supervisor
sys.exit(supervisor.run(target=sys.argv[1]))
"""


def test_a_worker_does_not_start_on_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """It says what is the matter and ends with a status of its own."""
    folder = tmp_path / "file"
    folder.mkdir()
    app = opened(f"sqlite:///{folder}/onward.db")
    app.close()
    with read_only(folder):
        run = subprocess.run(
            [sys.executable, "-c", SUPERVISOR, TARGET],
            env=os.environ | {"ONWARD_URL": app.url},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert run.returncode != 0
    assert str(folder) in run.stderr
    assert "Traceback" not in run.stderr


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """A file system of this size."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    run = subprocess.run(mount, capture_output=True, text=True, check=False)
    if run.returncode:
        pytest.skip(f"needs root to mount a small disk: {run.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def fill(folder: Path) -> Path:
    """Use up whatever space there is; returns the file to remove."""
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(b"\0" * 4096):
            pass
    return ballast


def test_a_full_disk_keeps_results_and_recovers(tmp_path: Path, ledger: Ledger) -> None:
    """The disk fills up while jobs run. Results are kept for longer than a lease, callers are told,
    and when there is space again everything is written and goes on.
    """
    folder = tmp_path / "disk"
    with small_disk(folder, 4):
        app = opened(f"sqlite:///{folder}/onward.db", lease=1.5, beat=0.4, sweep=0.3)
        with running(app.url, ledger=ledger) as worker:
            pids = worker.pids()
            ids = enqueue(app, (tasks.nap.call(1.0) for _ in range(3)))
            wait_until(lambda: len(ledger.read()) == 3)
            ballast = fill(folder)
            big = [tasks.echo.call("x" * 50_000) for _ in range(100)]
            with pytest.raises(DatabaseUnavailable, match=r"full|input/output"):
                app.enqueue_many(big)
            time.sleep(4.0)
            assert len([line for line in ledger.read() if line["event"] == "end"]) >= 3
            ballast.unlink()
            wait_until_over(app, 10)
            ids += enqueue(app, [tasks.echo.call("after")])
            wait_for_state(app, ids[-1], "succeeded", 5)
            assert worker.pids() == pids
            assert "Traceback" not in worker.log()
        found = history.check(app.database, ledger, history.read(app.database, ledger).jobs)
        assert all(history.outcomes(found, id_) == ["succeeded"] for id_ in ids)
        app.close()


# --- a file that goes away ------------------------------------------------------------------------


def test_a_worker_whose_file_is_removed_serves_the_next_one(
    open_app: Open, database_url: str, ledger: Ledger
) -> None:
    """It waits while there is none, and says so; it makes none itself, and when somebody else does
    it runs what is in it. What was in the old one is lost with it.
    """
    app = open_app(lease=1.5, beat=0.4, sweep=0.3)
    path: Path = app.database.path
    with running(database_url, ledger=ledger) as worker:
        (id_,) = enqueue(app, [tasks.echo.call("before")])
        wait_for_state(app, id_, "succeeded", 10)
        app.close()
        for file in path.parent.glob(path.name + "*"):
            file.unlink()
        wait_until(lambda: f"{app.database.shown_url} is gone" in worker.log(), 20)
        assert not path.exists()
        (id_,) = enqueue(app, [tasks.echo.call("after")])
        wait_for_state(app, id_, "succeeded", 30)
        assert "Traceback" not in worker.log()
        assert len(worker.log().splitlines()) < 40, "the log is flooded"
    assert [line["event"] for line in ledger.read()] == ["start", "end"] * 2
