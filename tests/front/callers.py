"""Callers with a connection of their own: the same few steps through every driver that is taken.

Each is opened on the app's database, has a table `note` and runs each step as its users would.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import apsw
import asyncpg
import psycopg
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    create_async_engine,
)
from sqlalchemy.orm import Session

from onward import Call, Handle, Onward, Task
from onward.store.sqlite import SqliteDatabase

TABLE = "CREATE TABLE IF NOT EXISTS note (body TEXT)"


@dataclass(kw_only=True)
class Caller:
    """What a test may do with somebody's connection; sync or async makes no difference to it."""

    app: Onward
    connection: Any
    run: Callable[[str], Any]
    commit: Callable[[], Any]
    rollback: Callable[[], Any]
    begin: Callable[[], Any] = lambda: None
    is_async: bool = False

    async def execute(self, sql: str) -> None:
        await _done(self.run(sql))

    async def start(self) -> None:
        """Begin a transaction, where the driver does not do so by itself."""
        await _done(self.begin())

    async def finish(self, how: str) -> None:
        """Commit or roll back."""
        await _done(self.commit() if how == "commit" else self.rollback())

    async def enqueue(self, task: Task[..., Any], *args: Any, **options: Any) -> Handle[Any]:
        """Enqueue through the connection."""
        ready = task.using(connection=self.connection, **options)
        return await ready.aenqueue(*args) if self.is_async else ready.enqueue(*args)

    async def enqueue_many(self, calls: list[Call[Any]]) -> list[Handle[Any]]:
        if self.is_async:
            return await self.app.aenqueue_many(calls)
        return self.app.enqueue_many(calls)

    async def wait(self, job: Handle[Any], timeout: float = 5) -> Any:
        return await job.await_result(timeout) if self.is_async else job.wait(timeout)

    async def notes(self) -> int:
        """How many rows the caller's own table has, as others see it."""
        return _count_notes(self.app)


Opened = Callable[[Onward], AbstractAsyncContextManager[Caller]]


async def _done(step: Any) -> Any:
    return await step if inspect.isawaitable(step) else step


def _path(app: Onward) -> str:
    database = app.database
    assert isinstance(database, SqliteDatabase)
    return str(database.path)


def _count_notes(app: Onward) -> int:
    if app.database.dialect == "postgres":
        with psycopg.connect(app.url) as connection:
            row = connection.execute("SELECT count(*) FROM note").fetchone()
            return int(row[0]) if row else 0
    if app.options["sqlite_driver"] == "apsw":
        return int(apsw.Connection(_path(app)).execute("SELECT count(*) FROM note").get)
    connection = sqlite3.connect(_path(app))
    try:
        return int(connection.execute("SELECT count(*) FROM note").fetchone()[0])
    finally:
        connection.close()


# --- drivers --------------------------------------------------------------------------------------


@asynccontextmanager
async def _psycopg(app: Onward) -> AsyncIterator[Caller]:
    with psycopg.connect(app.url) as raw:
        raw.execute(TABLE)
        raw.commit()
        yield Caller(
            app=app,
            connection=raw,
            run=lambda sql: raw.execute(sql.encode()),
            commit=raw.commit,
            rollback=raw.rollback,
        )


@asynccontextmanager
async def _psycopg_async(app: Onward) -> AsyncIterator[Caller]:
    async with await psycopg.AsyncConnection.connect(app.url) as raw:
        await raw.execute(TABLE)
        await raw.commit()
        yield Caller(
            app=app,
            connection=raw,
            run=lambda sql: raw.execute(sql.encode()),
            commit=raw.commit,
            rollback=raw.rollback,
            is_async=True,
        )


@asynccontextmanager
async def _psycopg2(app: Onward) -> AsyncIterator[Caller]:
    raw: Any = importlib.import_module("psycopg2").connect(app.url)
    try:
        raw.cursor().execute(TABLE)
        raw.commit()
        yield Caller(
            app=app,
            connection=raw,
            run=lambda sql: raw.cursor().execute(sql),
            commit=raw.commit,
            rollback=raw.rollback,
        )
    finally:
        raw.close()


@asynccontextmanager
async def _asyncpg(app: Onward) -> AsyncIterator[Caller]:
    raw: Any = await asyncpg.connect(app.url)
    try:
        await raw.execute(TABLE)
        # As many applications do: values for json columns are given as Python objects.
        await raw.set_type_codec(
            "json", encoder=json.dumps, decoder=json.loads, schema="pg_catalog"
        )
        yield Caller(
            app=app,
            connection=raw,
            run=raw.execute,
            begin=lambda: raw.execute("BEGIN"),
            commit=lambda: raw.execute("COMMIT"),
            rollback=lambda: raw.execute("ROLLBACK"),
            is_async=True,
        )
    finally:
        await raw.close()


@asynccontextmanager
async def _sqlite3(app: Onward) -> AsyncIterator[Caller]:
    raw = sqlite3.connect(_path(app))
    try:
        raw.execute(TABLE)
        yield Caller(
            app=app, connection=raw, run=raw.execute, commit=raw.commit, rollback=raw.rollback
        )
    finally:
        raw.close()


@asynccontextmanager
async def _apsw(app: Onward) -> AsyncIterator[Caller]:
    raw = apsw.Connection(_path(app))
    try:
        raw.set_busy_timeout(10_000)  # As sqlite3 does by itself: a worker may be writing.
        raw.execute(TABLE)
        yield Caller(
            app=app,
            connection=raw,
            run=raw.execute,
            begin=lambda: raw.execute("BEGIN"),
            commit=lambda: raw.execute("COMMIT"),
            rollback=lambda: raw.execute("ROLLBACK"),
        )
    finally:
        raw.close()


# --- SQLAlchemy -----------------------------------------------------------------------------------


def _sqlalchemy_url(app: Onward, driver: str) -> str:
    return app.url.replace("postgresql:", f"postgresql+{driver}:", 1)


@contextmanager
def _engine(app: Onward, driver: str) -> Iterator[Engine]:
    engine = create_engine(_sqlalchemy_url(app, driver))
    try:
        with engine.begin() as connection:
            connection.execute(text(TABLE))
        yield engine
    finally:
        engine.dispose()


@asynccontextmanager
async def _async_engine(app: Onward, driver: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(_sqlalchemy_url(app, driver))
    try:
        async with engine.begin() as connection:
            await connection.execute(text(TABLE))
        yield engine
    finally:
        await engine.dispose()


def _sqlalchemy(driver: str, kind: type[Session] | type[Connection]) -> Opened:
    @asynccontextmanager
    async def opened(app: Onward) -> AsyncIterator[Caller]:
        with _engine(app, driver) as engine:
            inner: Any = engine.connect() if kind is Connection else Session(engine)
            with inner as used:
                yield Caller(
                    app=app,
                    connection=used,
                    run=lambda sql: used.execute(text(sql)),
                    commit=used.commit,
                    rollback=used.rollback,
                )

    return opened


def _async_sqlalchemy(driver: str, kind: type[AsyncSession] | type[AsyncConnection]) -> Opened:
    @asynccontextmanager
    async def opened(app: Onward) -> AsyncIterator[Caller]:
        async with _async_engine(app, driver) as engine:
            inner: Any = engine.connect() if kind is AsyncConnection else AsyncSession(engine)
            async with inner as used:
                yield Caller(
                    app=app,
                    connection=used,
                    run=lambda sql: used.execute(text(sql)),
                    commit=used.commit,
                    rollback=used.rollback,
                    is_async=True,
                )

    return opened


POSTGRES: dict[str, Opened] = {
    "psycopg": _psycopg,
    "psycopg async": _psycopg_async,
    "asyncpg": _asyncpg,
    "Session on psycopg": _sqlalchemy("psycopg", Session),
    "Connection on psycopg": _sqlalchemy("psycopg", Connection),
    "AsyncSession on psycopg": _async_sqlalchemy("psycopg", AsyncSession),
    "AsyncConnection on psycopg": _async_sqlalchemy("psycopg", AsyncConnection),
    "AsyncSession on asyncpg": _async_sqlalchemy("asyncpg", AsyncSession),
    "AsyncConnection on asyncpg": _async_sqlalchemy("asyncpg", AsyncConnection),
}

if find_spec("psycopg2"):
    POSTGRES["psycopg2"] = _psycopg2
    POSTGRES["Session on psycopg2"] = _sqlalchemy("psycopg2", Session)
    POSTGRES["Connection on psycopg2"] = _sqlalchemy("psycopg2", Connection)
STDLIB: dict[str, Opened] = {
    "sqlite3": _sqlite3,
    "Session on sqlite3": _sqlalchemy("", Session),
    "Connection on sqlite3": _sqlalchemy("", Connection),
}
APSW: dict[str, Opened] = {"apsw": _apsw}
ALL = POSTGRES | STDLIB | APSW
