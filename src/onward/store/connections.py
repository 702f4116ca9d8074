"""Enqueue through a connection that the caller has open: the job exists if the caller's transaction commits.

The kind of connection is recognised by where its class comes from, so no driver is imported for it. Nothing is notified:
a wake-up in the caller's transaction would serialise its commits; a worker's poll finds the job.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onward.errors import DriverConflict
from onward.store.database import Database
from onward.store.statements import Statement, numbered_text, psycopg_text, sqlite_text


def write(database: Database, connection: Any, statement: Statement) -> None:
    """Carry a statement out on the caller's connection.

    Raises:
        DriverConflict: a connection of a kind that cannot be used here.
    """
    raw = _unwrapped(connection)
    match _kind(raw):
        case "psycopg" | "psycopg2":
            raw.cursor().execute(psycopg_text(statement.name, _schema(database, raw)), statement.params)
        case "sqlite3" | "apsw" as driver:
            _sqlite(database, raw, driver, statement)
        case "psycopg-async" | "asyncpg" | "sqlalchemy-async":
            raise _unfit(raw, "it is asynchronous", "await task.aenqueue(…) with it")
        case _:
            raise _unfit(raw, "its kind is not known", _KNOWN)


async def awrite(database: Database, connection: Any, statement: Statement) -> None:
    """The same as `write`, for async code; a synchronous connection is used as it is."""
    raw = await _aunwrapped(connection)
    match _kind(raw):
        case "psycopg-async":
            text = psycopg_text(statement.name, _schema(database, raw))
            await raw.cursor().execute(text, statement.params)
        case "asyncpg":
            text, names = numbered_text(statement.name, _schema(database, raw))
            await raw.execute(text, *(statement.params[name] for name in names))
        case _:
            write(database, raw, statement)


def in_transaction(connection: Any) -> bool:
    """Whether a transaction is open on the caller's connection."""
    if hasattr(connection, "info") and hasattr(connection.info, "transaction_status"):
        return bool(connection.info.transaction_status)
    for name in ("in_transaction", "is_in_transaction"):
        found = getattr(connection, name, None)
        if found is not None:
            return bool(found() if callable(found) else found)
    return False


def _kind(raw: Any) -> str:
    """Which library a connection belongs to. Subclasses and wrappers of the user's count as what they extend."""
    for cls in type(raw).__mro__:
        package = cls.__module__.partition(".")[0]
        if package == "psycopg":
            return "psycopg-async" if "Async" in cls.__name__ else "psycopg"
        if package in {"psycopg2", "sqlite3", "apsw", "asyncpg"}:
            return package
        if package == "sqlalchemy":
            return "sqlalchemy-async" if "Async" in cls.__name__ else "sqlalchemy"
    return "unknown"


def _unwrapped(connection: Any) -> Any:
    """The driver's connection inside a SQLAlchemy Session or Connection, with its transaction begun."""
    if _kind(connection) != "sqlalchemy":
        return connection
    inner = connection.connection
    if callable(inner):  # a Session: its Connection for this transaction
        inner = inner().connection
    return inner.driver_connection


async def _aunwrapped(connection: Any) -> Any:
    """The driver's connection inside an AsyncSession or AsyncConnection, with its transaction begun."""
    if _kind(connection) != "sqlalchemy-async":
        return _unwrapped(connection)
    if callable(connection.connection):
        connection = await connection.connection()
    # SQLAlchemy begins asyncpg's transaction with its own first statement, so there has to be one.
    await connection.exec_driver_sql("SELECT 1")
    return (await connection.get_raw_connection()).driver_connection


def _schema(database: Database, raw: Any) -> str:
    if database.dialect != "postgres":
        raise _unfit(
            raw,
            f"it leads to PostgreSQL, and the app's database is {database.shown_url}",
            "open the app on the same PostgreSQL database",
        )
    schema: str = getattr(database, "schema")  # noqa: B009
    return schema


def _sqlite(database: Database, raw: Any, driver: str, statement: Statement) -> None:
    if database.dialect != "sqlite":
        raise _unfit(
            raw,
            f"it leads to SQLite, and the app's database is {database.shown_url}",
            "open the app on the same file: Onward('sqlite:///…')",
        )
    used: str = database.driver.name  # type: ignore[attr-defined]  # pyright: ignore
    if used != driver:
        raise DriverConflict(
            f"a {driver} connection cannot be used: the app opens its file with {used}",
            why="two SQLite libraries in one process on one file cancel each other's locks, which damages the file",
            fix=f'Onward(…, sqlite_driver="{driver}")',
        )
    _check_file(database, raw)
    _give_clock(database, raw, driver)
    for step in sqlite_text(statement.name):
        raw.execute(step, dict(statement.params))


def _check_file(database: Database, raw: Any) -> None:
    wanted: Path = database.path  # type: ignore[attr-defined]  # pyright: ignore
    files = [row[2] for row in raw.execute("PRAGMA database_list") if row[1] == "main"]
    if not files or not files[0] or not Path(files[0]).exists():
        raise _unfit(raw, "it has no file", f"connect to {wanted}")
    if not wanted.exists() or not wanted.samefile(files[0]):
        raise _unfit(raw, f"its file is {files[0]}, the app's is {wanted}", "use the same file")


def _give_clock(database: Database, raw: Any, driver: str) -> None:
    """The statement asks for the database's clock, which on SQLite is a function of the connection."""
    clock: Any = database.clock  # type: ignore[attr-defined]  # pyright: ignore
    if driver == "apsw":
        raw.create_scalar_function("onward_clock", clock, 0)
    else:
        raw.create_function("onward_clock", 0, clock)


_KNOWN = "psycopg, asyncpg, sqlite3, apsw connections and SQLAlchemy sessions or connections can be used"


def _unfit(raw: Any, why: str, fix: str) -> DriverConflict:
    kind = f"{type(raw).__module__}.{type(raw).__qualname__}"
    return DriverConflict(f"cannot enqueue through this {kind}", why=why, fix=fix)
