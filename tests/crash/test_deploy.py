"""A newer Onward migrates the database under workers of this one: they go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

import psycopg
import pytest

from onward.app import Onward
from tests.crash.conftest import Open
from tests.crash.field import enqueue, kill, wait_until_over
from tests.support import history, tasks
from tests.support.ledger import Ledger
from tests.support.workers import running


@pytest.fixture
def database_url(postgres_database: str) -> str:
    """PostgreSQL: there a migration is made by somebody, beside workers that run."""
    return postgres_database


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(2.0, id="scaled"),
        pytest.param(60.0, id="as written", marks=pytest.mark.soak),
    ],
)
def test_a_worker_goes_on_under_a_newer_schema(
    database_url: str, open_app: Open, ledger: Ledger, seconds: float
) -> None:
    """Columns are added and changed, and views made anew, while jobs are enqueued and run: each of
    them runs once. A process that starts afterwards does not trust what it does not know, and its
    supervisor ends with a message; what has been enqueued waits for the newer version.
    """
    app = open_app()
    with running(database_url, processes=2, ledger=ledger) as worker:
        with steadily(app) as ids:
            time.sleep(1.0)
            migrate(database_url)
            time.sleep(seconds)
        wait_until_over(app)
        assert "cached plan" not in worker.log()
        assert "Traceback" not in worker.log()
        assert "stumbled" not in worker.log()
        kill(worker.pids()[0])
        assert worker.wait() == 5
        assert "upgrade the onward package" in worker.log()
    found = history.check(app.database, ledger, ids)
    assert history.states(found) == {"succeeded": len(ids)}
    assert len(found.bodies) == len(ids) > 100


@contextmanager
def steadily(app: Onward) -> Generator[list[str]]:
    """Enqueue a few jobs again and again while the block runs."""
    ids: list[str] = []
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.02):
            ids.extend(enqueue(app, (tasks.aecho.call(number) for number in range(3))))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ids
    finally:
        over.set()
        thread.join(30)


def migrate(url: str) -> None:
    """What a newer version might do, in one transaction."""
    with psycopg.connect(url) as connection:
        views = connection.execute(
            "SELECT viewname, definition FROM pg_views WHERE schemaname = 'onward'"
        ).fetchall()
        assert len(views) == 2
        for name, _ in views:
            connection.execute(f"DROP VIEW onward.{name}".encode())
        for statement in NEWER:
            connection.execute(statement)
        for name, text in views:
            connection.execute(f"CREATE VIEW onward.{name} AS {text}".encode())


NEWER = (
    b"ALTER TABLE onward.job ADD COLUMN tenant text NOT NULL DEFAULT ''",
    b"ALTER TABLE onward.finished ADD COLUMN tenant text NOT NULL DEFAULT ''",
    b"ALTER TABLE onward.attempt ALTER COLUMN number TYPE bigint",
    b"ALTER TABLE onward.worker ALTER COLUMN pid TYPE bigint",
    b"INSERT INTO onward.migration (version, name) VALUES (1000, 'newer')",
)
