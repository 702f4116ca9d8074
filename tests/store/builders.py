"""What the tests of the store are made of: jobs, workers, short ways to move them, and a DBA's
hand.
"""

from __future__ import annotations

import itertools
import re
import sqlite3
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, cast

import apsw
import psycopg

from onward.job import Change, Job, NewJob
from onward.lifecycle import AttemptState, Event, JobState
from onward.store import store
from onward.store.database import Database
from onward.store.postgres import PostgresDatabase
from onward.store.sqlite import SqliteDatabase
from onward.store.store import FIRST_ID, Claimed, Registration
from onward.store.url import open_database

TASK = "shop.report"
LANE = ("default", 0)
START = (0.0, FIRST_ID)

_numbers = itertools.count(1)
_started = int(time.time() * 1000)


def new_id() -> str:
    """A version 7 UUID; each is larger than those before it."""
    number = next(_numbers)
    stamp = _started + (number >> 12)
    random = uuid.uuid4().int & ((1 << 62) - 1)
    return str(uuid.UUID(int=stamp << 80 | 7 << 76 | (number & 0xFFF) << 64 | 2 << 62 | random))


def new_job(**fields: Any) -> NewJob:
    """A job with three tries and two losses to spend, due at once."""
    values: dict[str, Any] = {
        "id": new_id(),
        "task": TASK,
        "queue": LANE[0],
        "priority": LANE[1],
        "args": "{}",
        "max_attempts": 3,
        "max_losses": 2,
    }
    return NewJob(**(values | fields))


def enqueue(database: Database, count: int = 1, **fields: Any) -> list[str]:
    """Enqueue so many jobs at once; returns their ids, in order."""
    jobs = [new_job(**fields) for _ in range(count)]
    database.run(store.enqueue, jobs)
    return [job.id for job in jobs]


def register(database: Database, **fields: Any) -> str:
    """A new worker with a lease of a minute; returns its id."""
    values: dict[str, Any] = {
        "id": new_id(),
        "name": "tests",
        "host": "here",
        "pid": 1,
        "version": "0",
        "queues": (LANE[0],),
        "tasks": (TASK,),
        "concurrency": 4,
        "lease": 60.0,
    }
    worker = Registration(**(values | fields))
    database.run(store.register, worker)
    return worker.id


def claimed(
    database: Database,
    worker: str,
    limit: int = 10,
    *,
    tasks: Sequence[str] = (TASK,),
    lane: tuple[str, int] = LANE,
    after: tuple[float, str] = START,
) -> list[Claimed]:
    return database.run(store.claim, worker, store.dumps(tasks), lane, after, limit)


def claim(database: Database, worker: str, limit: int = 10, **where: Any) -> list[Job]:
    """What this worker owns after one claim."""
    return [taken.job for taken in claimed(database, worker, limit, **where)]


def running(database: Database, worker: str | None = None, **fields: Any) -> Job:
    """A job of its own that runs on this worker, or on a new one."""
    (id_,) = enqueue(database, **fields)
    lane = (fields.get("queue", LANE[0]), fields.get("priority", LANE[1]))
    found = claim(database, worker or register(database), 500, lane=lane)
    (job,) = [job for job in found if job.id == id_]
    return job


def apply(database: Database, *changes: Change) -> set[str]:
    return database.run(store.apply, changes)


def get(database: Database, id_: str) -> Job:
    return database.read(store.get, id_)


def state_of(database: Database, id_: str) -> JobState:
    return get(database, id_).state


# --- legal moves with whatever they need ----------------------------------------------------------


def succeed(job: Job, result: str = "null", **values: Any) -> Change:
    return job.move(Event.SUCCEED, ended=AttemptState.SUCCEEDED, result=result, **values)


def retry(job: Job, **values: Any) -> Change:
    given: dict[str, Any] = {"failures": job.failures + 1, "reason": "error", "error": "boom"}
    return job.move(Event.RETRY, ended=AttemptState.FAILED, **(given | values))


def bury(job: Job, **values: Any) -> Change:
    given: dict[str, Any] = {"failures": job.failures + 1, "reason": "error", "error": "boom"}
    return job.move(Event.BURY, ended=AttemptState.FAILED, **(given | values))


def release(job: Job, **values: Any) -> Change:
    return job.move(Event.RELEASE, ended=AttemptState.RELEASED, **values)


def cancel(job: Job, **values: Any) -> Change:
    return job.move(Event.CANCEL, **({"ended": AttemptState.CANCELLED} | values))


def in_state(database: Database, state: JobState, job: Job | None = None, **fields: Any) -> Job:
    """A job of its own, or this one that runs, brought to a state by legal moves only."""
    job = job or running(database, **fields)
    path: dict[JobState, list[Change]] = {
        JobState.WAITING: [job.move(Event.SUSPEND, ended=AttemptState.RELEASED)],
        JobState.QUEUED: [release(job)],
        JobState.RUNNING: [],
        JobState.CANCELLING: [job.move(Event.ASK_CANCEL)],
        JobState.SUCCEEDED: [succeed(job)],
        JobState.CANCELLED: [
            job.move(Event.DROP, ended=AttemptState.CANCELLED, reason="not wanted")
        ],
        JobState.DEAD: [bury(job)],
    }
    for change in path[state]:
        assert apply(database, change) == {job.id}
    found = get(database, job.id)
    assert found.state is state
    return found


# --- the database itself --------------------------------------------------------------------------


def another(database: Database) -> Database:
    """A second Database object on the same place, as another process would have it."""
    if isinstance(database, SqliteDatabase):
        return open_database(f"sqlite:///{database.path}", sqlite_driver=database.driver.name)
    assert isinstance(database, PostgresDatabase)
    return open_database(database.url, schema=database.schema)


@contextmanager
def opened(database: Database) -> Iterator[Database]:
    """Another Database object on the same place, closed afterwards."""
    with closing(another(database)) as second:
        yield second


def shift_clock(database: Database, seconds: float) -> None:
    """Set the database's clock so many seconds forward from the machine's."""
    if isinstance(database, SqliteDatabase):
        database.clock = lambda: time.time() + seconds
        return
    with hand(database) as dba:
        dba.sql(
            "CREATE OR REPLACE FUNCTION onward.clock() RETURNS timestamptz LANGUAGE sql STABLE"
            f" AS $$ SELECT now() + interval '{seconds:f} seconds' $$"
        )


class Hand:
    """Bare SQL past the store, as a DBA would type it: `onward.` before a table, `:name` for
    values.
    """

    def __init__(self, database: Database) -> None:
        self.dialect = database.dialect
        self.clock = "unixepoch('now')" if self.dialect == "sqlite" else "now()"
        self.connection: Any
        if isinstance(database, PostgresDatabase):
            self.connection = psycopg.connect(database.url, autocommit=True)
        else:
            assert isinstance(database, SqliteDatabase)
            self.connection = _sqlite(database)

    def sql(self, text: str, **values: Any) -> list[tuple[Any, ...]]:
        """Run one statement; returns its rows, if it has any."""
        if self.dialect == "sqlite":
            cursor = self.connection.execute(text.replace("onward.", "onward_"), values)
            return cast(list[tuple[Any, ...]], cursor.fetchall())
        cursor = self.connection.execute(
            re.sub(r"(?<![:\w]):([a-z_]+)", r"%(\1)s", text.replace("%", "%%")), values
        )
        return cursor.fetchall() if cursor.description else []

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Whatever happens inside is rolled back, refused or not."""
        self.sql("BEGIN")
        try:
            yield
        finally:
            self.sql("ROLLBACK")

    def close(self) -> None:
        self.connection.close()


def _sqlite(database: SqliteDatabase) -> Any:
    """A connection of the library that the database uses: two libraries on one file break each
    other's locks.
    """
    if database.driver.name == "sqlite3":
        return sqlite3.connect(database.path, isolation_level=None, timeout=10)
    connection = apsw.Connection(str(database.path))
    connection.set_busy_timeout(10_000)
    return connection


@contextmanager
def hand(database: Database) -> Iterator[Hand]:
    """A DBA's connection, for the time of a block."""
    with closing(Hand(database)) as dba:
        yield dba


def loosen(dba: Hand) -> None:
    """Have the columns of SQLite's tables take values of any type, as a hand can that knows how."""
    dba.sql("PRAGMA writable_schema = ON")
    dba.sql("UPDATE sqlite_schema SET sql = replace(sql, ') STRICT', ')')")
    ((version,),) = dba.sql("PRAGMA schema_version")
    dba.sql(f"PRAGMA schema_version = {version + 1}")
    dba.sql("PRAGMA writable_schema = RESET")


DATABASE_ERRORS: tuple[type[Exception], ...] = (apsw.Error, sqlite3.Error, psycopg.Error)
"""What a bare connection raises when the database refuses."""
