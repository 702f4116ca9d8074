"""The bare loop: the least that a durable queue on this database has to do, and nothing else.

One table with a partial index, claims in batches, finishes in batches, each batch committed. In two
forms: `cold`, where a finished row moves to a cold table together with its attempt, each row only
if it is as it was seen, as Onward does it; and `plain`, where it is updated in place. No process is
watched, nothing is retried, no trigger guards, nobody can ask how a job is. The best settings that
were found: batches of 1,000; on PostgreSQL two loops that overlap on two connections, on SQLite one
transaction that finishes a batch and claims the next.

    python -m benchmarks.bare URL cold|plain
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, LiteralString
from uuid import UUID

import apsw
import psycopg
import uvloop

from benchmarks.tally import tally
from onward.ids import new_id

BATCH = 1_000
WORKER = UUID("00000000-0000-0000-0000-000000000001")

POSTGRES_TABLES: LiteralString = """
CREATE TABLE job (id uuid PRIMARY KEY, task text NOT NULL, state text NOT NULL, attempt integer NOT NULL,
    run_at timestamptz NOT NULL, worker uuid, started_at timestamptz, finished_at timestamptz, args text NOT NULL);
CREATE INDEX job_due ON job (run_at, id) WHERE state = 'queued';
CREATE TABLE finished (id uuid PRIMARY KEY, task text NOT NULL, state text NOT NULL, attempt integer NOT NULL,
    run_at timestamptz NOT NULL, worker uuid, started_at timestamptz, finished_at timestamptz, args text NOT NULL,
    result text)
"""

POSTGRES_INSERT: LiteralString = """
INSERT INTO job (id, task, state, attempt, run_at, args)
SELECT id, 'nothing', 'queued', 1, now(), args
FROM unnest(CAST(%s AS uuid[]), CAST(%s AS text[])) AS n (id, args)
"""

POSTGRES_CLAIM: LiteralString = """
UPDATE job SET state = 'running', worker = %s, started_at = now()
WHERE id = ANY(ARRAY(SELECT id FROM job WHERE state = 'queued' AND run_at <= now()
                     ORDER BY run_at, id LIMIT %s FOR UPDATE SKIP LOCKED))
RETURNING id, attempt, args
"""

POSTGRES_COLD: LiteralString = """
WITH c AS MATERIALIZED (
    SELECT id, attempt, result, CAST(%s AS uuid) AS worker, 'running' AS state
    FROM unnest(CAST(%s AS uuid[]), CAST(%s AS integer[]), CAST(%s AS text[])) AS n (id, attempt, result)
), leaving AS (
    DELETE FROM job USING c
    WHERE job.id = c.id AND job.state = c.state AND job.attempt = c.attempt AND job.worker = c.worker
    RETURNING job.*, c.result
)
INSERT INTO finished (id, task, state, attempt, run_at, worker, started_at, finished_at, args, result)
SELECT id, task, 'succeeded', attempt, run_at, worker, started_at, now(), args, result FROM leaving
RETURNING id
"""

POSTGRES_PLAIN: LiteralString = """
UPDATE job SET state = 'succeeded', finished_at = now() WHERE id = ANY(CAST(%s AS uuid[]))
"""

SQLITE_TABLES = """
CREATE TABLE job (id TEXT NOT NULL PRIMARY KEY, task TEXT NOT NULL, state TEXT NOT NULL, attempt INTEGER NOT NULL,
    run_at REAL NOT NULL, worker TEXT, started_at REAL, finished_at REAL, args TEXT NOT NULL);
CREATE INDEX job_due ON job (run_at, id) WHERE state = 'queued';
CREATE TABLE finished (id TEXT NOT NULL PRIMARY KEY, task TEXT NOT NULL, state TEXT NOT NULL, attempt INTEGER NOT NULL,
    run_at REAL NOT NULL, worker TEXT, started_at REAL, finished_at REAL, args TEXT NOT NULL, result TEXT);
"""

SQLITE_INSERT = """
INSERT INTO job (id, task, state, attempt, run_at, args) VALUES (?, 'nothing', 'queued', 1, unixepoch('subsec'), ?)
"""

SQLITE_CLAIM = """
UPDATE job SET state = 'running', worker = ?, started_at = unixepoch('subsec')
WHERE id IN (SELECT id FROM job WHERE state = 'queued' AND run_at <= unixepoch('subsec') ORDER BY run_at, id LIMIT ?)
RETURNING id, attempt, args
"""

SQLITE_COLD_INSERT = """
INSERT INTO finished
SELECT id, task, 'succeeded', attempt, run_at, worker, started_at, unixepoch('subsec'), args, ?
FROM job WHERE id = ? AND state = 'running' AND attempt = ? AND worker = ?
"""

SQLITE_COLD_DELETE = (
    "DELETE FROM job WHERE id = ? AND state = 'running' AND attempt = ? AND worker = ?"
)

SQLITE_PLAIN = "UPDATE job SET state = 'succeeded', finished_at = unixepoch('subsec') WHERE id = ?"

LEFT = "SELECT count(*) FROM job WHERE state IN ('queued', 'running')"


async def nothing(number: int) -> None:
    tally.hit()


# --- PostgreSQL -----------------------------------------------------------------------------------


def make_postgres(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as link:
        link.execute(POSTGRES_TABLES)


def fill_postgres(url: str, jobs: int) -> None:
    """The bare bulk insert: one statement, one commit."""
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as link:
        rows = [(new_id(), json.dumps({"number": number})) for number in range(jobs)]
        link.execute(POSTGRES_INSERT, [[id for id, _ in rows], [args for _, args in rows]])


async def drain_postgres(url: str, form: str) -> None:
    await asyncio.gather(_loop_postgres(url, form), _loop_postgres(url, form))


async def _loop_postgres(url: str, form: str) -> None:
    link = await psycopg.AsyncConnection.connect(url, autocommit=True, prepare_threshold=None)
    async with link:
        cursor = link.cursor(binary=True)
        while True:
            await cursor.execute(POSTGRES_CLAIM, [WORKER, BATCH])
            rows = await cursor.fetchall()
            if not rows:
                await asyncio.sleep(0.02)
                continue
            for _, _, args in rows:
                await nothing(**json.loads(args))
            ids = [row[0] for row in rows]
            if form == "plain":
                await cursor.execute(POSTGRES_PLAIN, [ids])
            else:
                seen = [row[1] for row in rows]
                many = len(rows)
                await cursor.execute(POSTGRES_COLD, [WORKER, ids, seen, ["null"] * many])
                if len(await cursor.fetchall()) != many:
                    raise RuntimeError("a finish did not take")


# --- SQLite ---------------------------------------------------------------------------------------


def open_sqlite(url: str) -> Any:
    connection: Any = apsw.Connection(url.removeprefix("sqlite:///"))
    connection.set_busy_timeout(10_000)
    connection.execute("PRAGMA journal_mode=WAL").fetchall()
    connection.execute("PRAGMA synchronous=FULL")
    return connection


@contextmanager
def transaction(connection: Any) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.execute("COMMIT")


def make_sqlite(url: str) -> None:
    open_sqlite(url).execute(SQLITE_TABLES)


def fill_sqlite(url: str, jobs: int) -> None:
    """The bare bulk insert: one row a statement, one commit."""
    connection = open_sqlite(url)
    rows = [(new_id(), json.dumps({"number": number})) for number in range(jobs)]
    with transaction(connection):
        connection.executemany(SQLITE_INSERT, rows)


async def drain_sqlite(url: str, form: str) -> None:
    connection = open_sqlite(url)
    worker = str(WORKER)
    rows: list[tuple[Any, ...]] = []
    while True:
        with transaction(connection):
            if form == "plain":
                connection.executemany(SQLITE_PLAIN, [(id,) for id, _, _ in rows])
            else:
                seen = [(id, attempt, worker) for id, attempt, _ in rows]
                connection.executemany(SQLITE_COLD_INSERT, [("null", *each) for each in seen])
                connection.executemany(SQLITE_COLD_DELETE, seen)
            rows = connection.execute(SQLITE_CLAIM, (worker, BATCH)).fetchall()
        for _, _, args in rows:
            await nothing(**json.loads(args))
        if not rows:
            await asyncio.sleep(0.02)


def main() -> None:
    url, form = sys.argv[1:]
    drain = drain_sqlite if url.startswith("sqlite") else drain_postgres
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(drain(url, form))


if __name__ == "__main__":
    main()
