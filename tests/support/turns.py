"""A PostgreSQL database with Onward's tables that tests take turns with: emptying it is ten times
quicker than making another.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg

from onward.store.url import open_database
from tests.support import postgres

# A superuser's session is past the triggers, which let no live job be deleted.
WIPE = """
SET session_replication_role = replica;
DELETE FROM onward.job;
DELETE FROM onward.finished;
DELETE FROM onward.attempt;
DELETE FROM onward.refusal;
DELETE FROM onward.worker;
"""

# What many deleted rows leave behind would slow whoever comes next.
LARGE = """
SELECT sum(pg_relation_size(oid)) > 2e6 FROM pg_class WHERE relnamespace = 'onward'::regnamespace
"""
EMPTY_FILES = "TRUNCATE onward.job, onward.finished, onward.attempt, onward.refusal, onward.worker"

OTHERS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""

# Everything but rows: schemas, tables and indexes, columns, constraints, triggers, functions,
# migrations, and settings of the database.
SHAPE = """
SELECT
    (SELECT array_agg(m::text ORDER BY m::text) FROM onward.migration m),
    (SELECT array_agg(nspname::text ORDER BY oid) FROM pg_namespace WHERE nspname !~ '^pg_'),
    (SELECT array_agg((c.oid, c.relnatts, c.reloptions)::text ORDER BY c.oid)
     FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'),
    (SELECT array_agg((oid, conname)::text ORDER BY oid) FROM pg_constraint),
    (SELECT array_agg((oid, tgenabled)::text ORDER BY oid) FROM pg_trigger),
    (SELECT array_agg((oid, prosrc)::text ORDER BY oid) FROM pg_proc WHERE oid >= 16384),
    (SELECT array_agg(setconfig::text ORDER BY setrole) FROM pg_db_role_setting
     WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database()))
"""


class TurnDatabase:
    """One database for many tests, each of which finds it as if it had just been made.

    A test that changes more in it than rows costs the next one a new database.

    Args:
        server_url: where to make it.
        extra: a table that its tests make for themselves, dropped between them.
    """

    def __init__(self, server_url: str, extra: str | None = None) -> None:
        self._server_url = server_url
        self._drop_extra = f"DROP TABLE IF EXISTS {extra}" if extra else "SELECT"
        self._make()

    def emptied(self) -> str:
        """Its URL, once nobody is connected to it any more and no row is in it."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute("SET lock_timeout = '10s'")
            connection.execute(OTHERS)
            connection.execute(self._drop_extra.encode())
            same = _shape(connection) == self._shape
            if same:
                connection.execute(WIPE)
                if _one_row(connection, LARGE)[0]:
                    connection.execute(EMPTY_FILES)
        if not same:
            self.drop()
            self._make()
        return self._url

    def drop(self) -> None:
        """Remove it, with whoever is still connected to it."""
        postgres.drop_database(self._server_url, self._url)

    def _make(self) -> None:
        self._url = postgres.create_database(self._server_url)
        with closing(open_database(self._url)) as database:
            database.migrate()
        with psycopg.connect(self._url, autocommit=True) as connection:
            self._shape = _shape(connection)


def _shape(connection: psycopg.Connection[Any]) -> Any:
    try:
        return _one_row(connection, SHAPE)
    except psycopg.errors.UndefinedTable:
        return "without our tables"


def _one_row(connection: psycopg.Connection[Any], query: str) -> Any:
    return connection.execute(query.encode()).fetchone()
