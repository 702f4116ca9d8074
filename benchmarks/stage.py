"""What a run stands on: fresh databases, worker processes, and the wait for the last outcome.

Databases are made anew for each run and are as durable as in production: PostgreSQL with its own
settings, SQLite with `synchronous=FULL`. `BENCH_POSTGRES` names the server; else it is the one of
the tests, which is started if none runs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import apsw
import psycopg
from psycopg import sql

from benchmarks.jobs import app
from benchmarks.tally import VARIABLE, counted
from onward import Onward
from tests.support.postgres import find_server

ROOT = Path(__file__).parents[1]
LONGEST = 300.0
_numbers = itertools.count(1)
_server: list[str] = []


class Place:
    """One fresh database, and a folder for what its run writes beside it.

    Args:
        url: of the database; `sqlite:///…` or `postgresql://…`.
        folder: exists as long as the place does.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.tally = folder / "tally"
        self.tally.mkdir(exist_ok=True)
        self.arrivals = folder / "arrivals"

    @property
    def dialect(self) -> str:
        return urlsplit(self.url).scheme.partition("+")[0]

    @property
    def path(self) -> Path:
        """The SQLite file."""
        return Path(self.url.removeprefix("sqlite:///"))

    def query(self, text: str) -> list[tuple[Any, ...]]:
        """Ask the database by a connection that is no worker's."""
        if self.dialect == "sqlite":
            connection: Any = apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READWRITE)
            with contextlib.closing(connection):
                connection.set_busy_timeout(10_000)
                return list(connection.execute(text).fetchall())
        with psycopg.connect(self.url, autocommit=True) as link:
            cursor = link.execute(text.encode())
            return cursor.fetchall() if cursor.description else []

    def settle(self) -> None:
        """Before a drain: fresh statistics, and nothing left to be written by an earlier load."""
        if self.dialect == "sqlite":
            self.query("PRAGMA wal_checkpoint(TRUNCATE)")
        else:
            self.query("VACUUM ANALYZE")
            self.query("CHECKPOINT")

    def environment(self) -> dict[str, str]:
        """For processes that run jobs here."""
        return os.environ | {
            "ONWARD_URL": self.url,
            VARIABLE: str(self.tally),
            "BENCH_ARRIVALS": str(self.arrivals),
            "PYTHONPATH": str(ROOT),
        }


@contextlib.contextmanager
def fresh(dialect: str) -> Iterator[Place]:
    """A new, empty database of `postgresql` or `sqlite`."""
    folder = Path(tempfile.mkdtemp(prefix="onward-bench-"))
    try:
        if dialect == "sqlite":
            yield Place(f"sqlite:///{folder}/bench.db", folder)
            return
        name = f"onward_bench_{os.getpid()}_{next(_numbers)}"
        with psycopg.connect(server(), autocommit=True) as link:
            link.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield Place(urlsplit(server())._replace(path=f"/{name}").geturl(), folder)
        finally:
            with psycopg.connect(server(), autocommit=True) as link:
                link.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def server() -> str:
    """The PostgreSQL server to make databases on. One that was started for tests does not sync: it
    is told to.
    """
    if not _server:
        url = os.environ.get("BENCH_POSTGRES") or find_server()
        with psycopg.connect(url, autocommit=True) as link:
            if link.execute("SHOW fsync").fetchone() == ("off",):
                link.execute("ALTER SYSTEM SET fsync = on")
                link.execute("ALTER SYSTEM SET full_page_writes = on")
                link.execute("SELECT pg_reload_conf()")
        _server.append(url)
    return _server[0]


@contextlib.contextmanager
def onward(place: Place) -> Iterator[Onward]:
    """The app of the measured tasks on this place, with its tables made."""
    app.use(place.url)
    try:
        app.database.migrate()
        yield app
    finally:
        app.close()


@contextlib.contextmanager
def running(place: Place, words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs jobs, ended at the end of the block. What it says is kept, and shown if
    it ends by itself.
    """
    log = place.folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, cwd=ROOT, env=place.environment(), stdout=output, stderr=output
        )
    try:
        yield process
        if process.poll() is not None:
            raise RuntimeError(f"{words} ended by itself:\n{log.read_text()[-2_000:]}")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def worker_words(*options: str, target: str = "benchmarks.jobs:app") -> list[str]:
    """The command of a user's worker, in its own process."""
    return [sys.executable, "-m", "onward.cli", "worker", target, *options]


def drained(place: Place, jobs: int, left: str) -> float:
    """Wait until `jobs` have run and the database has recorded the last; returns seconds since the
    first began.

    Args:
        place: where they run.
        jobs: how many.
        left: a query whose first value is how many are not recorded yet.
    """
    end = time.monotonic() + LONGEST
    while counted(place.tally)[0] < jobs:
        if time.monotonic() > end:
            raise TimeoutError(f"only {counted(place.tally)[0]:,} of {jobs:,} jobs ran")
        time.sleep(0.01)
    while place.query(left)[0][0]:
        if time.monotonic() > end:
            raise TimeoutError("the last jobs ran and were not recorded")
        time.sleep(0.005)
    return time.time() - counted(place.tally)[1]


def children(pid: int) -> list[int]:
    """A process and all that it started, itself first."""
    found = [pid]
    for parent in found:
        listed = Path(f"/proc/{parent}/task/{parent}/children")
        found += [int(word) for word in listed.read_text().split()] if listed.exists() else []
    return found


def resident(pid: int) -> float:
    """Megabytes that a process holds now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(each.split()[1]) for each in lines if each.startswith("VmRSS:")) / 1024
