"""The ways through a caller's connection: how each driver is recognised, and how it is spoken to.

A connection is recognised by where its class comes from, so no driver is imported here that the
caller has not imported. A cursor of our own, with plain rows and nothing prepared, keeps clear of
what the caller has set. SQLAlchemy is given the texts itself, so that it begins the transaction as
it does for its own, and with any driver.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from onward.errors import DriverConflict, SchemaMissing
from onward.store.database import Database
from onward.store.options import options_of
from onward.store.statements import Rows, Statement, numbered_text, psycopg_text, sqlite_text

if TYPE_CHECKING:
    from onward.store.postgres import PostgresDatabase
    from onward.store.sqlite import SqliteDatabase

Spelt = tuple[str, Any]
"""One SQL text as the driver wants it, with its parameters."""

Spell = Callable[[Statement], list[Spelt]]


class Way(NamedTuple):
    """How SQL goes through one connection.

    `spell` writes a statement for the driver; `run` carries a text out and gives its rows (or is to
    be awaited for them); `raw` is the driver's own connection; `implicit` says what opens the
    transaction that the driver opens before a write, None where there is none; `begin` opens one of
    our own; `isolation` asks for the isolation level, where there are several.
    """

    spell: Spell
    run: Callable[[str, Any], Any]
    raw: Any
    implicit: Callable[[], str | None]
    begin: str
    isolation: str = ""
    is_async: bool = False


def way_through(database: Database, connection: Any) -> Way:
    """How to speak to the caller's connection.

    Raises:
        DriverConflict: it is of a kind that cannot be used, or leads elsewhere.
    """
    match kind_of(connection):
        case "psycopg":
            return _postgres_way(database, connection, connection, partial(_psycopg, connection))
        case "psycopg-async":
            return _postgres_way(
                database, connection, connection, partial(_psycopg_async, connection), is_async=True
            )
        case "psycopg2":
            return _postgres_way(database, connection, connection, partial(_psycopg2, connection))
        case "asyncpg":
            way = _postgres_way(
                database, connection, connection, partial(_asyncpg, connection), is_async=True
            )
            return way._replace(spell=partial(_numbered, _schema(database)))
        case "sqlite3" | "apsw" as driver:
            return _sqlite_way(
                database, connection, driver, connection, partial(_sqlite, connection)
            )
        case "sqlalchemy":
            return _sqlalchemy_way(database, connection)
        case _:
            raise unfit(connection, "its kind is not known", _KNOWN)


def kind_of(connection: Any) -> str:
    """The library that a connection belongs to; a subclass of the user's counts as its base."""
    for cls in type(connection).__mro__:
        package = cls.__module__.partition(".")[0]
        if package == "sqlalchemy":
            return package
        if package in _DRIVERS and "connection" in cls.__name__.lower():
            is_async = package == "psycopg" and hasattr(connection, "__aenter__")
            return "psycopg-async" if is_async else package
    return "unknown"


def unscoped(connection: Any) -> Any:
    """The session that a scoped one stands for just now; anything else as it is."""
    if kind_of(connection) == "sqlalchemy" and hasattr(connection, "session_factory"):
        return connection()
    return connection


def is_async_sqlalchemy(connection: Any) -> bool:
    """Whether it is an AsyncSession or AsyncConnection, which hand out a synchronous twin."""
    return hasattr(connection, "run_sync") and kind_of(connection) == "sqlalchemy"


def unfit(connection: Any, why: str, fix: str) -> DriverConflict:
    """The refusal of a connection."""
    kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
    return DriverConflict(f"cannot enqueue through this {kind}", why=why, fix=fix)


_DRIVERS = {"psycopg", "psycopg2", "asyncpg", "sqlite3", "apsw"}
_KNOWN = (
    "connections of psycopg, psycopg2, asyncpg, sqlite3 and apsw work, and sessions and connections"
    " of SQLAlchemy"
)


# --- PostgreSQL -----------------------------------------------------------------------------------


def _postgres_way(
    database: Database,
    connection: Any,
    raw: Any,
    run: Callable[[str, Any], Any],
    *,
    is_async: bool = False,
) -> Way:
    if database.dialect != "postgres":
        raise unfit(
            connection,
            f"it leads to PostgreSQL, and the app's database is {database.shown_url}",
            "open the app on the same PostgreSQL database",
        )
    return Way(
        spell=partial(_named, _schema(database)),
        run=run,
        raw=raw,
        implicit=lambda: "SELECT 1",  # Any statement will do.
        begin="BEGIN ISOLATION LEVEL READ COMMITTED",
        isolation="SHOW transaction_isolation",
        is_async=is_async,
    )


def _schema(database: Database) -> str:
    return cast("PostgresDatabase", database).schema


def _named(schema: str, statement: Statement) -> list[Spelt]:
    return [(psycopg_text(statement.name, schema).decode(), statement.params)]


def _numbered(schema: str, statement: Statement) -> list[Spelt]:
    """Our parameters are texts and go as texts: the caller may have set codecs for json or uuid."""
    text, names = numbered_text(statement.name, schema)
    text = re.sub(r"\$\d+", r"CAST(\g<0> AS text)", text)
    return [(text, tuple(statement.params[name] for name in names))]


def _psycopg(raw: Any, text: str, params: Any) -> Rows:
    import psycopg
    from psycopg.rows import tuple_row

    with psycopg.Cursor(raw, row_factory=tuple_row) as cursor:
        cursor.execute(text.encode(), params, prepare=False)
        return cursor.fetchall() if cursor.description else []


async def _psycopg_async(raw: Any, text: str, params: Any) -> Rows:
    import psycopg
    from psycopg.rows import tuple_row

    async with psycopg.AsyncCursor(raw, row_factory=tuple_row) as cursor:
        await cursor.execute(text.encode(), params, prepare=False)
        return await cursor.fetchall() if cursor.description else []


def _psycopg2(raw: Any, text: str, params: Any) -> Rows:
    plain = sys.modules["psycopg2.extensions"].cursor
    with raw.cursor(cursor_factory=plain) as cursor:
        cursor.execute(text, params)
        rows: Rows = cursor.fetchall() if cursor.description else []
        return rows


async def _asyncpg(raw: Any, text: str, params: Any) -> Rows:
    return [tuple(record) for record in await raw.fetch(text, *(params or ()))]


# --- SQLite ---------------------------------------------------------------------------------------

_LOOK = """
SELECT (SELECT file FROM pragma_database_list WHERE name = 'main'),
       EXISTS (SELECT 1 FROM pragma_function_list WHERE name = 'onward_clock'),
       EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'onward_migration')
"""


def _sqlite_way(
    database: Database,
    connection: Any,
    driver: str,
    raw: Any,
    run: Callable[[str, Any], Rows],
    functions: Any = None,
) -> Way:
    if database.dialect != "sqlite":
        raise unfit(
            connection,
            f"it leads to SQLite, and the app's database is {database.shown_url}",
            "open the app on the same file: Onward('sqlite:///…')",
        )
    ours = cast("SqliteDatabase", database)
    if ours.driver.name != driver:
        raise DriverConflict(
            f"a {driver} connection cannot be used: the app opens its file with {ours.driver.name}",
            why="two SQLite libraries in one process on one file cancel each other's locks,"
            " which damages the file",
            fix=f'Onward(…, sqlite_driver="{driver}")',
        )
    ((file, has_clock, has_schema),) = run(_LOOK, None)
    _check_file(connection, ours.path, file)
    if not has_schema:
        _make_schema(ours, raw)
    if not has_clock:
        _give_clock(ours, functions or raw)
    return Way(spell=_steps_of, run=run, raw=raw, implicit=partial(_implicit, raw), begin="BEGIN")


def _steps_of(statement: Statement) -> list[Spelt]:
    return [(step, dict(statement.params)) for step in sqlite_text(statement.name)]


def _sqlite(raw: Any, text: str, params: Mapping[str, Any] | None) -> Rows:
    cursor = raw.cursor()
    # Rows as the caller shapes them are not for us. (The names of sqlite3 and of apsw.)
    for shape in ("row_factory", "row_trace"):
        with suppress(AttributeError):
            setattr(cursor, shape, None)
    cursor.execute(text, params or {})
    return [tuple(map(_as_text, row)) for row in cursor.fetchall()]


def _as_text(value: Any) -> Any:
    """Texts as texts, whatever the caller's `text_factory` makes of them; we store no bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _check_file(connection: Any, wanted: Path, file: str | None) -> None:
    if not file or not Path(file).exists():
        raise unfit(connection, "it has no file", f"connect to {wanted}")
    if not wanted.exists() or not wanted.samefile(file):
        raise unfit(connection, f"its file is {file}, the app's is {wanted}", "use the same file")


def _make_schema(database: SqliteDatabase, raw: Any) -> None:
    """The app's tables are made on first use, but not while the caller holds the file's lock."""
    if raw.in_transaction:
        raise SchemaMissing(
            f"{database.shown_url} has no Onward schema",
            why="in a transaction of yours no tables are made",
            fix="before it begins: app.database.migrate(), or in a shell:"
            f" onward db init {options_of(database)}",
        )
    database.migrate()


def _give_clock(database: SqliteDatabase, raw: Any) -> None:
    """The statements ask for the database's clock, which is a function of the connection."""

    def clock() -> float:
        return database.clock()

    if hasattr(raw, "create_scalar_function"):
        raw.create_scalar_function("onward_clock", clock, 0)
    else:
        raw.create_function("onward_clock", 0, clock)


def _implicit(raw: Any) -> str | None:
    """What Python's sqlite3 says before a write, unless it is told to leave that to the caller."""
    level = getattr(raw, "isolation_level", None)
    is_legacy = getattr(raw, "autocommit", -1) == -1
    return None if level is None or not is_legacy else f"BEGIN {level}"


# --- SQLAlchemy -----------------------------------------------------------------------------------


def _sqlalchemy_way(database: Database, connection: Any) -> Way:
    """Through a Session or a Connection, with whichever driver is under it."""
    inner = _sqlalchemy_connection(connection)
    pooled: Any = inner.connection
    driver: str = inner.dialect.driver
    raw, run = pooled.driver_connection, partial(_sqlalchemy, inner)
    match driver:
        case "psycopg" | "psycopg_async" | "psycopg2":
            return _postgres_way(database, connection, raw, run)
        case "asyncpg":
            way = _postgres_way(database, connection, raw, run)
            return way._replace(spell=partial(_numbered, _schema(database)))
        case "pysqlite" | "aiosqlite":
            dbapi = pooled.dbapi_connection
            return _sqlite_way(database, connection, "sqlite3", raw, run, dbapi)
        case _:
            raise unfit(connection, f"it works through {driver}", _KNOWN)


def _sqlalchemy_connection(connection: Any) -> Any:
    """The Connection itself, or that of a Session's transaction."""
    inner = getattr(connection, "connection", None)
    if inner is None:
        raise unfit(connection, "it is no session and no connection", _KNOWN)
    return inner() if callable(inner) else connection


def _sqlalchemy(connection: Any, text: str, params: Any) -> Rows:
    result = connection.exec_driver_sql(text, params)
    return [tuple(map(_as_text, row)) for row in result] if result.returns_rows else []
