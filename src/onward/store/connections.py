"""Enqueue through a connection that the caller has open: the job exists if its transaction commits.

In:  the caller's connection, and an operation of the store.    Out: rows in its transaction.
Nothing is notified: a wake-up in the caller's transaction would serialise commits; a worker's poll
finds the job. The caller's transaction is never ended here, and still usable if we refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, TypeVar

from onward.errors import InvalidOption, SchemaMissing
from onward.store.database import Again, Database
from onward.store.migrate import named
from onward.store.options import schema_option
from onward.store.statements import Op, Rows, Statement
from onward.store.ways import Spelt, Way, is_async_sqlalchemy, unfit, unscoped, way_through

T = TypeVar("T")

Steps = Generator[Spelt, Rows, T]
"""An operation spelt for one driver: it yields texts, is sent their rows, returns what it found."""


def write(
    database: Database,
    connection: Any,
    op: Callable[[], Op[T]],
    *,
    several: bool = False,
    repeats: bool = False,
) -> T:
    """Carry an operation out on the caller's connection.

    Args:
        database: the app's.
        connection: the caller's, or a SQLAlchemy Session or Connection.
        op: makes the operation.
        several: it has several statements; all of them take, or none.
        repeats: it may meet jobs that are there already.

    Raises:
        DriverConflict: a connection of a kind that cannot be used here.
        SchemaMissing: the database that it leads to has no Onward schema.
        InvalidOption: a repeat in a transaction that cannot see what others have committed.
    """
    connection = unscoped(connection)
    if is_async_sqlalchemy(connection):
        raise unfit(connection, "it is asynchronous", "await task.aenqueue(…) with it")
    way = way_through(database, connection)
    if way.is_async:
        raise unfit(connection, "it is asynchronous", "await task.aenqueue(…) with it")
    steps = _steps(database, way, op, several, repeats)
    try:
        step = next(steps)
        while True:
            try:
                rows = way.run(*step)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(rows)
    except StopIteration as end:
        answer: T = end.value
        return answer


async def awrite(
    database: Database,
    connection: Any,
    op: Callable[[], Op[T]],
    *,
    several: bool = False,
    repeats: bool = False,
) -> T:
    """The same as `write`, for async code; a synchronous connection is used as it is."""

    def directly(inner: Any) -> T:
        return write(database, inner, op, several=several, repeats=repeats)

    connection = unscoped(connection)
    if is_async_sqlalchemy(connection):
        inside: T = await connection.run_sync(directly)
        return inside
    way = way_through(database, connection)
    if not way.is_async:
        return directly(connection)
    steps = _steps(database, way, op, several, repeats)
    try:
        step = next(steps)
        while True:
            try:
                rows = await way.run(*step)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(rows)
    except StopIteration as end:
        answer: T = end.value
        return answer


def in_transaction(connection: Any) -> bool:
    """Whether a transaction is open on the caller's connection; not so on one that is closed."""
    with suppress(Exception):
        status = getattr(getattr(connection, "info", None), "transaction_status", None)
        if status is not None:
            return int(status) in _OPEN
        for name in ("in_transaction", "is_in_transaction"):
            found = getattr(connection, name, None)
            if found is not None:
                return bool(found() if callable(found) else found)
    return False


_OPEN = {1, 2, 3}
"""libpq's PQTRANS_ACTIVE, PQTRANS_INTRANS and PQTRANS_INERROR."""

_RELEASE = "RELEASE SAVEPOINT onward"
_INSIDE = ("SAVEPOINT onward", _RELEASE, "ROLLBACK TO SAVEPOINT onward", _RELEASE)

_MISSING = {"42P01", "3F000", "42883"}
"""PostgreSQL's undefined_table, invalid_schema_name and undefined_function."""


def _steps(
    database: Database, way: Way, op: Callable[[], Op[T]], several: bool, repeats: bool
) -> Steps[T]:
    try:
        if not several:
            return (yield from _spelt(way, op()))
        _check_pipeline(way.raw)
        yield from _begin_as_the_driver_would(way)
        if repeats and way.isolation:
            yield from _check_isolation(way)
        return (yield from _whole(way, op))
    except Exception as error:
        if _sqlstate(error) in _MISSING:
            raise _schema_missing_there(database) from error
        if database.dialect == "sqlite" and "locked" in str(error) and in_transaction(way.raw):
            error.add_note(_STALE)
        raise


_STALE = (
    "onward: if this transaction has read before, and somebody else has written since, it can only"
    " be begun again; with BEGIN IMMEDIATE (sqlite3: isolation_level='IMMEDIATE') it had waited"
)
"""What no driver says of SQLite's refusal, which comes at once, whatever the busy timeout."""


def _schema_missing_there(database: Database) -> SchemaMissing:
    """The caller's connection may lead elsewhere than the app's URL: that one is not to blame."""
    return SchemaMissing(
        f"the database that this connection leads to has no Onward schema{named(database)}",
        why="the job is written where the connection leads, whatever the app's URL is",
        fix=f"connect to the app's database, {database.shown_url}, or make the tables in that one:"
        f" onward db init --database URL{schema_option(database)}",
    )


def _spelt(way: Way, op: Op[T]) -> Steps[T]:
    """Each statement of an operation in the driver's words."""
    try:
        statement = next(op)
        while True:
            rows = yield from _texts(way, statement)
            statement = op.send(rows)
    except StopIteration as end:
        answer: T = end.value
        return answer


def _texts(way: Way, statement: Statement) -> Steps[Rows]:
    rows: Rows = []
    for text, params in way.spell(statement):
        rows = yield text, params
    return rows


def _whole(way: Way, op: Callable[[], Op[T]]) -> Steps[T]:
    """All statements or none: in a savepoint of the caller's transaction, or in one of our own."""
    from asyncio import CancelledError  # Slow to import with this module; few come here.

    enter, leave, *undo = _INSIDE if in_transaction(way.raw) else (way.begin, "COMMIT", "ROLLBACK")
    while True:
        yield enter, None
        try:
            answer = yield from _spelt(way, op())
        except (Exception, CancelledError) as error:
            for text in undo:
                with suppress(Exception):
                    yield text, None
            if not isinstance(error, Again):
                raise
        else:
            yield leave, None
            return answer


def _begin_as_the_driver_would(way: Way) -> Steps[None]:
    """Open the transaction that the driver opens before a write, if the caller has not yet."""
    if not in_transaction(way.raw) and (text := way.implicit()):
        yield text, None


def _check_pipeline(raw: Any) -> None:
    """In psycopg's pipeline answers come when the caller asks for them, and here one is needed."""
    status = getattr(getattr(raw, "pgconn", None), "pipeline_status", 0)
    if status:
        raise InvalidOption(
            "this connection is in pipeline mode: only a call without an id can go through it",
            why="with an id of yours, or many calls, an answer is needed before the next statement",
            fix="leave the block of connection.pipeline() first, or leave the id out",
        )


def _check_isolation(way: Way) -> Steps[None]:
    """A snapshot from before a job's end shows no such job, and it would be enqueued once more."""
    rows = yield way.isolation, None
    if in_transaction(way.raw) and rows[0][0] != "read committed":
        raise InvalidOption(
            "a call that may be there already (it has an explicit id, or was enqueued before)"
            f" cannot be made in a transaction that is {rows[0][0]}",
            why="it does not see what ended meanwhile, so the same call could be made twice",
            fix="use READ COMMITTED for this transaction, leave the id out, or make a new call",
        )


def _sqlstate(error: BaseException) -> str | None:
    """PostgreSQL's code of an error, whichever library wraps it."""
    for layer in (error, getattr(error, "orig", None)):
        found = getattr(layer, "sqlstate", None) or getattr(layer, "pgcode", None)
        if found:
            return str(found)
    return None
