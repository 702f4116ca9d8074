"""A worker that has run very many jobs, of all endings, holds no more than after the first few."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from onward.app import Onward
from onward.errors import IllegalTransition
from tests.crash.conftest import Open
from tests.crash.field import enqueue, wait_until_over
from tests.support import history, tasks
from tests.support.ledger import Ledger
from tests.support.workers import running

MEGABYTE = 1_000_000


def rss(pid: int) -> int:
    """The resident memory of a process, in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def holds(pid: int) -> tuple[int, int]:
    """How many threads and open files a process has."""
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("warm", "jobs", "megabytes"),
    [
        pytest.param(1_000, 1_500, 5, id="scaled"),
        pytest.param(
            10_000, 90_000, 10, id="as written", marks=[pytest.mark.soak, pytest.mark.timeout(1800)]
        ),
    ],
)
def test_a_worker_does_not_grow(
    open_app: Open, database_url: str, ledger: Ledger, warm: int, jobs: int, megabytes: int
) -> None:
    """Jobs that succeed, fail, time out and are cancelled, in one process: memory, threads and open
    files stay what they were after the first few.
    """
    app = open_app(lease=12.0, beat=2.0)
    with running(database_url, concurrency=20, log_level="ERROR") as worker:
        (pid,) = worker.pids()
        _run(app, warm)
        before, held = rss(pid), holds(pid)
        _run(app, jobs)
        time.sleep(0.5)
        assert worker.pids() == [pid]
        assert rss(pid) - before < megabytes * MEGABYTE
        threads, files = holds(pid)
        assert threads <= held[0] + 4
        assert files <= held[1] + 4
    assert history.broken_rules(app.database) == []


def _run(app: Onward, count: int) -> None:
    """So many jobs, in the proportions in which they end well and otherwise."""
    for _ in range(count // 500):
        enqueue(app, (tasks.aecho.call(number) for number in range(400)))
        enqueue(app, (tasks.fail.using(max_attempts=1).call() for _ in range(50)))
        enqueue(app, (tasks.nap.using(timeout=0.05, max_attempts=1).call(5) for _ in range(25)))
        for id_ in enqueue(app, (tasks.nap.call(0.05) for _ in range(25))):
            try:
                app.cancel(id_)
            except IllegalTransition:
                continue
        wait_until_over(app, 60)
