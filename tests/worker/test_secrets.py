"""A password in an exception: in no row, no line of a log, no page and no list of processes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from onward import Onward
from onward.store.database import Database
from tests.cli.shell import Shell
from tests.store.builders import hand
from tests.support import leaky, postgres
from tests.support.leaky import LEAK_VARIABLE, SECRET
from tests.support.workers import QUICK, running, wait_until
from tests.worker.history import wait_over

TARGET = "tests.support.leaky:app"


@pytest.fixture
def secret_url(quick_database_url: str) -> Iterator[str]:
    """A database whose address has a password, where addresses have one."""
    if quick_database_url.startswith("sqlite"):
        yield quick_database_url
        return
    role = f"hush_{postgres.database_name(quick_database_url)}"
    with psycopg.connect(quick_database_url, autocommit=True) as dba:
        dba.execute(f"CREATE ROLE {role} LOGIN SUPERUSER PASSWORD '{SECRET}'".encode())
        try:
            yield _as(role, quick_database_url)
        finally:
            dba.execute(f"DROP OWNED BY {role}".encode())
            dba.execute(f"DROP ROLE {role}".encode())


def _as(role: str, url: str) -> str:
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{role}:{SECRET}@{place}"))


@pytest.fixture
def app(secret_url: str) -> Iterator[Onward]:
    """The app of `tests/support/leaky.py` on this database, with its tables made."""
    leaky.app.use(secret_url)
    with closing(leaky.app):
        leaky.app.database.migrate()
        yield leaky.app


def test_an_address_in_an_exception_is_shown_nowhere(app: Onward, secret_url: str) -> None:
    jobs = [task.enqueue() for task in (leaky.plain, leaky.on_loop, leaky.isolated, leaky.unwanted)]
    with running(
        secret_url, target=TARGET, name="hush", log_level="DEBUG", settings=QUICK
    ) as worker:
        wait_over(jobs)
        processes = subprocess.run(
            ["ps", "-Aww", "-o", "args="], capture_output=True, text=True, check=True
        ).stdout
        pages = _pages(Shell(secret_url), [job.id for job in jobs])
        worker.terminate()
        worker.wait()
        log = worker.log()
    assert [job.state for job in jobs] == ["dead"] * 3 + ["cancelled"]
    texts = {"log": log, "ps": processes, "rows": _rows(app.database), **pages}
    for told in ("log", "rows", "dead list", "job show"):
        assert "***" in texts[told], told
    assert "bob:***@db.example/shop" in texts["job show"]
    assert [name for name, text in texts.items() if SECRET in text] == []


def _pages(shell: Shell, ids: list[str]) -> dict[str, str]:
    """All that the command line shows, for people and for scripts."""
    pages: dict[str, str] = {}
    commands = [("job", "show", id) for id in ids]
    commands += [("dead", "list"), ("job", "list"), ("workers",), ("status",), ("db", "status")]
    for words in commands:
        name = " ".join(words[:2])
        text = shell(*words).output + shell(*words, "--json").output
        pages[name] = pages.get(name, "") + text
    return pages


def _rows(database: Database) -> str:
    """Every text that the database keeps."""
    with hand(database) as dba:
        tables = ("job", "finished", "attempt", "worker", "refusal")
        return repr([dba.sql(f"SELECT * FROM onward.{table}") for table in tables])


def test_an_app_that_cannot_be_loaded_shows_no_address(app: Onward, secret_url: str) -> None:
    environment = {LEAK_VARIABLE: "everywhere"}
    with running(
        secret_url, target=TARGET, log_level="DEBUG", ready=False, environment=environment
    ) as worker:
        assert worker.wait(60)
        log = worker.log()
    assert "cannot be imported" in log
    assert "bob:***@db.example/shop" in log
    assert SECRET not in log


def test_a_process_of_its_own_that_cannot_load_the_app_shows_no_address(
    app: Onward, secret_url: str
) -> None:
    job = leaky.isolated.enqueue()
    environment = {LEAK_VARIABLE: "isolated"}
    with running(
        secret_url, target=TARGET, log_level="DEBUG", environment=environment, settings=QUICK
    ) as worker:
        wait_until(lambda: job.refresh().state == "dead", 30)
        log, rows = worker.log(), _rows(app.database)
    assert "cannot be imported" in rows
    assert "***" in log + rows
    assert SECRET not in log + rows
