"""What is over leaves: under steady load the database stays as small as what is kept."""

from __future__ import annotations

import time

import pytest

from onward.app import Onward
from onward.store import store
from onward.store.database import Database
from onward.store.sqlite import SqliteDatabase
from tests.cli.shell import Shell
from tests.crash.conftest import Open
from tests.crash.field import live, wait_until_over
from tests.support import tasks
from tests.support.workers import running

MOST_LOG = 64_000_000


@pytest.mark.parametrize(
    ("jobs", "keep", "sweep", "most"),
    [
        pytest.param(60_000, 0.5, 0.2, 3, id="scaled"),
        pytest.param(
            1_000_000,
            10.0,
            2.0,
            2,
            id="as written",
            marks=[pytest.mark.soak, pytest.mark.timeout(1_800)],
        ),
    ],
)
def test_a_database_under_steady_load_stays_small(
    database_url: str, open_app: Open, jobs: int, keep: float, sweep: float, most: int
) -> None:
    """Jobs that do nothing, as quickly as one worker can: five times as many take less than twice
    the space (three times in a run of seconds, where a look may come late). `prune_every` is as it
    is by default. A command gives the space back: on PostgreSQL to new rows, so there it is run
    again and again, in place of an autovacuum that comes once a minute.
    """
    app = open_app(keep_succeeded=keep, lease=15.0, beat=5.0, sweep=sweep)
    with running(database_url, concurrency=200, log_level="WARNING"):
        run_all(app, jobs // 5)
        first = size(app.database)
        log = run_all(app, jobs - jobs // 5)
        assert size(app.database) < most * first
        assert log < MOST_LOG
        time.sleep(1.5 * keep + 3.0)
        assert app.counts()["succeeded"] < jobs / 5
    if app.database.dialect == "sqlite":
        Shell(database_url)("db", "compact")
        assert size(app.database) < first / 2


def run_all(app: Onward, jobs: int) -> int:
    """Have so many jobs run, never many at once; returns the most that SQLite's log took."""
    log, left = 0, jobs
    while left:
        while live(app) > 5_000:
            time.sleep(0.05)
        app.enqueue_many(tasks.aecho.call() for _ in range(min(2_500, left)))
        left -= min(2_500, left)
        if app.database.dialect == "postgres":
            app.database.compact()
        log = max(log, log_size(app.database))
    wait_until_over(app, 120)
    return log


def size(database: Database) -> int:
    """The bytes of the file with its log, or of the tables."""
    size: int = database.read(store.read, "size")[0][0]
    return size + log_size(database)


def log_size(database: Database) -> int:
    if not isinstance(database, SqliteDatabase):
        return 0
    return database.path.with_name(database.path.name + "-wal").stat().st_size
