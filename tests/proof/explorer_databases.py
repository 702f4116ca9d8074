"""SQLite in memory, and PostgreSQL, in the explorer's hands.

Rows are put in through one connection, past the triggers. Another one works, with every guard in
place, in transactions that are rolled back.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from typing import Any, TypeVar

import apsw
import psycopg

from onward.store.migrate import migrations
from onward.store.statements import Op, psycopg_text, sqlite_text
from onward.store.store import dumps
from tests.proof.explorer_place import NOW, TABLES, Dump, Spoil, dump_of, unspoilt

T = TypeVar("T")

_files = itertools.count()


class SqlitePlace:
    """SQLite in memory."""

    dialect = "sqlite"

    def __init__(self, spoil: Spoil = unspoilt) -> None:
        self.runs = 0
        self._time = NOW
        self._texts: dict[str, list[str]] = {}
        self._spoil = spoil
        self._filled: list[str] = []
        self._written = 0
        name = f"file:/explorer{next(_files)}?vfs=memdb"
        self._works, self._puts = _opened(name), _opened(name)
        self._works.create_scalar_function("onward_clock", self._now, 0, deterministic=True)
        for migration in migrations("sqlite"):
            self._puts.execute(migration.text).fetchall()
        self._puts.config(apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, 0)

    def _now(self) -> float:
        return self._time

    def put(self, dump: Dump) -> None:
        self._puts.execute("BEGIN IMMEDIATE")
        for table in self._filled:
            self._puts.execute(f"DELETE FROM onward_{table}")
        self._filled = [table for table, rows in dump.tables() if rows]
        for table, rows in dump.tables():
            for row in rows:
                self._puts.execute(_INSERTS[table], [_lite(row[name]) for name in TABLES[table]])
        self._puts.execute("COMMIT")

    @contextmanager
    def passing(self) -> Generator[None]:
        self._works.execute("BEGIN IMMEDIATE")
        self._written = self._works.total_changes()
        try:
            yield
        finally:
            self._works.execute("ROLLBACK")
            self._time = NOW

    def run(self, op: Op[T]) -> T:
        self.runs += 1
        rows: list[tuple[Any, ...]] | None = None
        while True:
            try:
                statement = next(op) if rows is None else op.send(rows)
            except StopIteration as end:
                answer: T = end.value
                return answer
            for text in self._texts.get(statement.name) or self._learn(statement.name):
                rows = self._works.execute(text, dict(statement.params)).fetchall()

    def ask(self, names: Sequence[str], params: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        return self._works.execute(_united_sqlite(tuple(names)), dict(params)).fetchall()

    def _learn(self, name: str) -> list[str]:
        found = self._texts[name] = [self._spoil(name, text) for text in sqlite_text(name)]
        return found

    def dump(self) -> Dump | None:
        if self._works.total_changes() == self._written:
            return None
        return dump_of(
            {
                table: [
                    dict(zip(columns, row, strict=True))
                    for row in self._works.execute(_SELECTS[table])
                ]
                for table, columns in TABLES.items()
            }
        )

    def clock(self, time: float) -> None:
        self._time = time

    def close(self) -> None:
        self._works.close()
        self._puts.close()


def _opened(name: str) -> Any:
    flags = apsw.SQLITE_OPEN_URI | apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    connection: Any = apsw.Connection(name, flags=flags)
    # On so few rows, to make files for what a statement sorts takes ten times as long as to run it,
    # and so does to prepare it anew because other values are bound to it.
    connection.execute("PRAGMA temp_store=MEMORY").fetchall()
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    return connection


@cache
def _united_sqlite(names: tuple[str, ...]) -> str:
    return _united((name, sqlite_text(name)[0]) for name in names)


def _united(texts: Iterable[tuple[str, str]]) -> str:
    return " UNION ALL ".join(f"SELECT '{name}', * FROM ({text}) AS {name}" for name, text in texts)


def _lite(value: Any) -> Any:
    return '["q"]' if isinstance(value, list) else value


_INSERTS = {
    table: f"INSERT INTO onward_{table} ({', '.join(columns)})"
    f" VALUES ({', '.join('?' * len(columns))})"
    for table, columns in TABLES.items()
}
_SELECTS = {
    table: f"SELECT {', '.join(columns)} FROM onward_{table}" for table, columns in TABLES.items()
}


# --- PostgreSQL -----------------------------------------------------------------------------------

CLOCK = """
CREATE OR REPLACE FUNCTION onward.clock() RETURNS timestamptz LANGUAGE sql STABLE AS
'SELECT to_timestamp(CAST(current_setting(''explorer.now'') AS float8))'
"""
TIMES = {"run_at", "started_at", "finished_at", "created_at", "ended_at", "lease_until", "beat_at"}
_SWEEP_OUT = f"TRUNCATE {', '.join(f'onward.{table}' for table in TABLES)}"
MANY_PUTS = 300
"""After so many rows put in, what is left of those deleted is swept out."""


def _read(column: str) -> str:
    if column in TIMES:
        return f"CAST(extract(epoch FROM {column}) AS float8)"
    return column


def _json_of(table: str, columns: Sequence[str]) -> str:
    fields = ", ".join(_read(column) for column in columns)
    return f"(SELECT json_agg(json_build_array({fields})) FROM onward.{table})"


_DUMP = f"SELECT {', '.join(_json_of(table, columns) for table, columns in TABLES.items())}"


class PostgresPlace:
    """A database of PostgreSQL that nobody else uses; Onward's tables are in it.

    Args:
        url: of the database; its user may switch triggers off.
        spoil: makes another text of a statement's.
    """

    dialect = "postgres"

    def __init__(self, url: str, spoil: Spoil = unspoilt) -> None:
        self.runs = 0
        self._spoil = spoil
        self._texts: dict[str, bytes] = {}
        self._puts_made = 0
        self._works = psycopg.connect(url, autocommit=True, prepare_threshold=0)
        self._puts = psycopg.connect(url, autocommit=True, prepare_threshold=0)
        self._puts.execute(CLOCK)
        self._puts.execute("SET session_replication_role = replica")
        self._puts.execute("SET synchronous_commit = off")
        # To plan a statement, and to compile its plan, takes longer than to run it on so few rows.
        self._works.execute("SET jit = off")
        self._works.execute("SET plan_cache_mode = force_generic_plan")
        self._works.execute(f"SET explorer.now = '{NOW}'".encode())

    def put(self, dump: Dump) -> None:
        self._puts_made += 1
        if self._puts_made % MANY_PUTS == 0:
            self._puts.execute(_SWEEP_OUT.encode())
        with self._puts.pipeline(), self._puts.transaction():
            for table in TABLES:
                self._puts.execute(f"DELETE FROM onward.{table}".encode())
            for table, rows in dump.tables():
                if rows:
                    self._puts.execute(_PUT[table], [dumps([_timed(row) for row in rows])])

    @contextmanager
    def passing(self) -> Generator[None]:
        self._works.execute("BEGIN")
        try:
            yield
        finally:
            self._works.execute("ROLLBACK")

    def run(self, op: Op[T]) -> T:
        self.runs += 1
        rows: list[tuple[Any, ...]] | None = None
        while True:
            try:
                statement = next(op) if rows is None else op.send(rows)
            except StopIteration as end:
                answer: T = end.value
                return answer
            text = self._texts.get(statement.name) or self._learn(statement.name)
            cursor = self._works.cursor(binary=True)
            cursor.execute(text, statement.params)
            rows = cursor.fetchall() if cursor.description else []

    def _learn(self, name: str) -> bytes:
        text = self._spoil(name, psycopg_text(name, "onward").decode()).encode()
        self._texts[name] = text
        return text

    def ask(self, names: Sequence[str], params: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        return self._works.execute(_united_postgres(tuple(names)), params).fetchall()

    def dump(self) -> Dump | None:
        row = self._works.execute(_DUMP.encode()).fetchone()
        assert row is not None
        return dump_of(
            {
                table: [dict(zip(columns, values, strict=True)) for values in rows or ()]
                for (table, columns), rows in zip(TABLES.items(), row, strict=True)
            }
        )

    def clock(self, time: float) -> None:
        self._works.execute(f"SET LOCAL explorer.now = '{time}'".encode())

    def close(self) -> None:
        self._works.close()
        self._puts.close()


def _timed(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its times as PostgreSQL reads them in JSON."""
    return {
        name: datetime.fromtimestamp(value, UTC).isoformat()
        if name in TIMES and value is not None
        else value
        for name, value in row.items()
    }


@cache
def _united_postgres(names: tuple[str, ...]) -> bytes:
    return _united((name, psycopg_text(name, "onward").decode()) for name in names).encode()


_PUT = {
    table: f"INSERT INTO onward.{table} ({', '.join(columns)}) SELECT {', '.join(columns)}"
    f" FROM json_populate_recordset(CAST(NULL AS onward.{table}), %s)".encode()
    for table, columns in TABLES.items()
}
