"""PostgreSQL through psycopg 3: few connections, autocommitted statements, no session state for
correctness.

In:  operations from any thread or loop.    Out: their answers, after the commit.
A move is one statement where possible; else an explicit READ COMMITTED transaction, which the
server ends if we vanish. What only asks to be repeated (serialization, deadlock, a pooled
connection that had died) is repeated here. Nothing is prepared, because prepared statements turn to
generic plans (and PgBouncer does not keep them); the enqueue of one job, the claim and the end are
functions of the schema, whose plans a session keeps whatever stands between.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, LiteralString, ParamSpec, TypeVar

import psycopg
from psycopg import sql

from onward.errors import DatabaseUnavailable, InvalidOption
from onward.job import NewJob
from onward.store import store
from onward.store.address import shown
from onward.store.coalesce import Coalescer
from onward.store.database import Again, Refused
from onward.store.migrate import check_version, missing
from onward.store.postgres_link import (
    AGAIN,
    ANSWER_SECONDS,
    ISOLATION,
    LIMIT,
    MOST_CONNECTIONS,
    AsyncSide,
    Permits,
    Watch,
    Watched,
    commit_watched,
    deadline,
    first_line,
    options,
    pause,
    popped,
    translated,
)
from onward.store.postgres_wakeup import PostgresWakeup, write_hint
from onward.store.statements import Op, Rows, Statement, in_schema, psycopg_text
from onward.store.store import Wake

T = TypeVar("T")
P = ParamSpec("P")

REPEATS = 50
"""How often a statement that met a serialization failure or a deadlock is repeated."""

QUICK = frozenset(
    {"enqueue", "enqueue_alike", "enqueue_one", "enqueue_again", "job", "record", "records"}
)
"""What a program waits for in the middle of something else. If it takes long, the answer is lost;
all else may take its time in a large database.
"""

NOTIFY_GAP = 0.005
"""Wake-ups of one process are at least this many seconds apart; a woken worker looks again by
itself meanwhile.
"""

APART_GAP = 0.05
"""The same for one that would be a transaction of its own, because somebody else notifies with his
commit at this very moment: mostly that wakes the worker for both.
"""


class PostgresDatabase:
    """One PostgreSQL database.

    Args:
        url: where it is, `postgresql://…`.
        schema: the schema of Onward's tables.
        listen_url: a direct address for LISTEN, where `url` leads through a pooler that does not
            keep sessions.
    """

    dialect = "postgres"
    notifies = True
    local = False

    def __init__(self, url: str, *, schema: str = "onward", listen_url: str | None = None) -> None:
        # PostgreSQL's names are of 63 bytes, and the channel of the wake-ups is `onward_` and this.
        if not schema.isidentifier() or len(schema.encode()) > 56:
            raise InvalidOption(
                f"schema {schema!r} cannot be used",
                why="a schema's name here is letters, digits and underscores, at most 56 bytes",
                fix='Onward("postgresql://…", schema="onward")',
            )
        self.url = url
        self.shown_url = shown(url)
        self.schema = schema
        self.channel = f"onward_{schema}"
        self.listen_url = listen_url or url
        self._notified = float("-inf")
        self._reset()
        _living.add(self)

    def _reset(self) -> None:
        """Forget every connection: at the start and in a forked child, which must not speak on its
        parent's.
        """
        self._known: bool = False
        self._strict: bool = False
        self._idle: list[psycopg.Connection] = []
        self._watch = Watch()
        self._slots = Permits(MOST_CONNECTIONS)
        self._coalescer: Coalescer[NewJob] = Coalescer(self._enqueue_now)
        self._sides: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncSide] = (
            weakref.WeakKeyDictionary()
        )

    # --- the port, sync ---------------------------------------------------------------------------

    def run(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._repeated(lambda: self._run_once(lambda: op(*args, **kwargs)))

    def read(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(op, *args, **kwargs)

    def enqueue(self, jobs: Sequence[NewJob]) -> None:
        self._coalescer.write(jobs)

    def lock_folder(self) -> None:
        return None

    def migrate(self) -> list[str]:
        with translated(self), self._connect(self.url) as connection, connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_lock_key(self.schema)])
            todo = missing("postgres", self._version(connection))
            for migration in todo:
                text = in_schema(migration.text, self.schema)
                connection.execute(text.encode())
                connection.execute(
                    self._sql("INSERT INTO {}.migration (version, name) VALUES (%s, %s)"),
                    [migration.version, migration.name],
                )
        return [f"{migration.version:04}_{migration.name}" for migration in todo]

    def schema_version(self) -> int:
        with translated(self), self._connect(self.url) as connection:
            return self._version(connection)

    def destroy(self) -> None:
        with translated(self), self._connect(self.url) as connection:
            connection.execute(self._sql("DROP SCHEMA IF EXISTS {} CASCADE"))

    def compact(self) -> bool:
        with translated(self), self._connect(self.url) as connection:
            connection.execute(
                self._sql(
                    "VACUUM (ANALYZE) {0}.job, {0}.finished, {0}.attempt, {0}.refusal, {0}.worker"
                )
            )
        return True

    def facts(self) -> dict[str, Any]:
        with translated(self), self._connect(self.url) as connection:
            names = (
                "server_version",
                "fsync",
                "synchronous_commit",
                "default_transaction_isolation",
            )
            rows = connection.execute(
                "SELECT name, setting FROM pg_settings WHERE name = ANY(%s)",
                [[*names, "max_connections"]],
            )
            return dict(rows.fetchall()) | {"driver": f"psycopg {psycopg.__version__}"}

    def close(self) -> None:
        while connection := popped(self._idle):
            connection.close()

    # --- the port, async --------------------------------------------------------------------------

    async def arun(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._arepeated(lambda: self._arun_once(lambda: op(*args, **kwargs)))

    async def aread(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.arun(op, *args, **kwargs)

    async def aenqueue(self, jobs: Sequence[NewJob]) -> None:
        await self._side().coalescer.write(jobs)

    async def wakeup(self) -> PostgresWakeup:
        return PostgresWakeup(self)

    async def aclose(self) -> None:
        await self.close_loop()
        self.close()

    async def close_loop(self) -> None:
        side = self._sides.pop(asyncio.get_running_loop(), None)
        if side is not None:
            await side.close()

    # --- one try, sync ----------------------------------------------------------------------------

    def _repeated(self, once: Callable[[], T]) -> T:
        """Try until nothing asks to be repeated."""
        last: Exception = Again()
        for repeat in range(REPEATS):
            try:
                return once()
            except AGAIN as error:
                last = error
            time.sleep(pause(repeat))
        raise self._restless(last)

    def _run_once(self, make: Callable[[], Op[T]]) -> T:
        """Carry the operation out on a connection; if a pooled one turns out to be dead, once more
        on a fresh one.
        """
        with self._slots, translated(self):
            if pooled := popped(self._idle):
                try:
                    return self._on(pooled, make)
                except (psycopg.OperationalError, psycopg.InterfaceError):
                    if not pooled.closed:
                        raise
            return self._on(self._connect_ready(), make)

    def _on(self, connection: psycopg.Connection, make: Callable[[], Op[T]]) -> T:
        try:
            answer = self._carry_out(connection, make())
        except BaseException:
            if connection.closed or connection.info.transaction_status:
                connection.close()
            else:
                self._idle.append(connection)
            raise
        self._idle.append(connection)
        return answer

    def _carry_out(self, connection: psycopg.Connection, op: Op[T]) -> T:
        try:
            first = next(op)
        except StopIteration as end:  # There was nothing to do.
            nothing: T = end.value
            return nothing
        if first.name in QUICK:
            with self._watch.over(connection, ANSWER_SECONDS) as watched:
                return self._carry_on(connection, op, first, watched)
        return self._carry_on(connection, op, first)

    def _carry_on(
        self,
        connection: psycopg.Connection,
        op: Op[T],
        first: Statement,
        watched: Watched | None = None,
    ) -> T:
        if first.alone and not self._strict:
            return _end(op, self._rows(connection, first))
        with commit_watched(self.shown_url) as commit, connection.transaction():
            connection.execute(LIMIT)
            rows = self._rows(connection, first)
            while True:
                if watched is not None:
                    watched.again()
                try:
                    statement = op.send(rows)
                except StopIteration as end:
                    commit.is_next = True
                    answer: T = end.value
                    return answer
                rows = self._rows(connection, statement)

    def _rows(self, connection: psycopg.Connection, statement: Statement) -> Rows:
        text = psycopg_text(statement.name, self.schema)
        cursor = connection.cursor(binary=True)
        cursor.execute(text, statement.params)
        return cursor.fetchall() if cursor.description else []

    def _connect(self, url: str) -> psycopg.Connection:
        connection = psycopg.connect(url, autocommit=True, prepare_threshold=None, **options(url))
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        return connection

    def _connect_ready(self) -> psycopg.Connection:
        connection = self._connect(self.url)
        if not self._known:
            try:
                self._learn(self._version(connection), connection.execute(ISOLATION).fetchone())
            except BaseException:
                connection.close()
                raise
        return connection

    # --- one try, async ---------------------------------------------------------------------------

    async def _arepeated(self, once: Callable[[], Awaitable[T]]) -> T:
        last: Exception = Again()
        for repeat in range(REPEATS):
            try:
                return await once()
            except AGAIN as error:
                last = error
            await asyncio.sleep(pause(repeat))
        raise self._restless(last)

    async def _arun_once(self, make: Callable[[], Op[T]]) -> T:
        side = self._side()
        async with side.slots:
            with translated(self):
                if pooled := await side.take():
                    try:
                        return await self._aon(side, pooled, make)
                    except (psycopg.OperationalError, psycopg.InterfaceError):
                        if not pooled.closed:
                            raise
                return await self._aon(side, await self._aconnect_ready(), make)

    async def _aon(
        self, side: AsyncSide, connection: psycopg.AsyncConnection, make: Callable[[], Op[T]]
    ) -> T:
        try:
            with deadline(connection, ANSWER_SECONDS):
                answer = await self._acarry_out(connection, make())
        except BaseException:
            if connection.closed or connection.info.transaction_status:
                await connection.close()
            else:
                side.give(connection)
            raise
        side.give(connection)
        return answer

    async def _acarry_out(self, connection: psycopg.AsyncConnection, op: Op[T]) -> T:
        try:
            first = next(op)
        except StopIteration as end:  # There was nothing to do.
            nothing: T = end.value
            return nothing
        if first.alone and not self._strict:
            return _end(op, await self._arows(connection, first))
        with commit_watched(self.shown_url) as commit:
            async with connection.transaction():
                await connection.execute(LIMIT)
                rows = await self._arows(connection, first)
                while True:
                    try:
                        statement = op.send(rows)
                    except StopIteration as end:
                        commit.is_next = True
                        answer: T = end.value
                        return answer
                    rows = await self._arows(connection, statement)

    async def _arows(self, connection: psycopg.AsyncConnection, statement: Statement) -> Rows:
        text = psycopg_text(statement.name, self.schema)
        cursor = connection.cursor(binary=True)
        await cursor.execute(text, statement.params)
        return await cursor.fetchall() if cursor.description else []

    async def _aconnect(self, url: str) -> psycopg.AsyncConnection:
        connection = await psycopg.AsyncConnection.connect(
            url, autocommit=True, prepare_threshold=None, **options(url)
        )
        try:
            await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _aconnect_ready(self) -> psycopg.AsyncConnection:
        connection = await self._aconnect(self.url)
        if not self._known:
            try:
                version = await asyncio.to_thread(self.schema_version)
                row = await (await connection.execute(ISOLATION)).fetchone()
                self._learn(version, row)
            except BaseException:
                await connection.close()
                raise
        return connection

    def _side(self) -> AsyncSide:
        loop = asyncio.get_running_loop()
        side = self._sides.get(loop)
        if side is None:
            side = self._sides[loop] = AsyncSide(self._aenqueue_now)
        return side

    # --- enqueue and wake -------------------------------------------------------------------------

    def _enqueue_now(self, jobs: Sequence[NewJob]) -> None:
        """The first try is a plain INSERT. If its answer was lost, only the repeat may meet its own
        rows.
        """
        try:
            wake = self._write_new(jobs)
        except DatabaseUnavailable:
            self.run(store.enqueue_again, jobs)
            wake = Wake.WANTED
        if self._has_to_tell(wake, jobs):
            self.notify(jobs)

    def _write_new(self, jobs: Sequence[NewJob]) -> Wake:
        """Write, and tell an idle worker with the commit. If that is refused, once more without: it
        may be the wake-up that the server has no room for.
        """
        if len(jobs) == 1 and not self._told_within(NOTIFY_GAP):
            try:
                return self._repeated(lambda: self._first_try(jobs, wake=True))
            except Refused:  # No `suppress`: this is the way of every enqueue.
                pass
        return self._repeated(lambda: self._first_try(jobs, wake=False))

    def _first_try(self, jobs: Sequence[NewJob], *, wake: bool) -> Wake:
        with self._slots, translated(self):
            connection = popped(self._idle) or self._connect_ready()
            return self._on(connection, lambda: store.enqueue_ours(jobs, wake=wake))

    async def _aenqueue_now(self, jobs: Sequence[NewJob]) -> None:
        try:
            wake = await self._awrite_new(jobs)
        except DatabaseUnavailable:
            await self.arun(store.enqueue_again, jobs)
            wake = Wake.WANTED
        if self._has_to_tell(wake, jobs):
            await self.anotify(jobs)

    async def _awrite_new(self, jobs: Sequence[NewJob]) -> Wake:
        if len(jobs) == 1 and not self._told_within(NOTIFY_GAP):
            try:
                return await self._arepeated(lambda: self._afirst_try(jobs, wake=True))
            except Refused:
                pass
        return await self._arepeated(lambda: self._afirst_try(jobs, wake=False))

    async def _afirst_try(self, jobs: Sequence[NewJob], *, wake: bool) -> Wake:
        side = self._side()
        async with side.slots:
            with translated(self):
                connection = await side.take() or await self._aconnect_ready()
                return await self._aon(
                    side, connection, lambda: store.enqueue_ours(jobs, wake=wake)
                )

    def _has_to_tell(self, wake: Wake, jobs: Sequence[NewJob]) -> bool:
        """Note that a worker is told, now or with the commit; returns whether it has yet to be."""
        gap = APART_GAP if len(jobs) == 1 else NOTIFY_GAP
        if wake is Wake.NOBODY or (wake is Wake.WANTED and self._told_within(gap)):
            return False
        self._notified = time.monotonic()
        return wake is Wake.WANTED

    def _told_within(self, seconds: float) -> bool:
        return time.monotonic() - self._notified < seconds

    def notify(self, jobs: Sequence[NewJob] = ()) -> None:
        """Wake idle workers, apart from any write: a NOTIFY serialises the commits of those who do
        it together.
        """
        with contextlib.suppress(psycopg.Error), self._slots:
            connection = popped(self._idle) or self._connect(self.url)
            try:
                connection.execute(self._notification(jobs))
            except BaseException:
                connection.close()
                raise
            self._idle.append(connection)

    async def anotify(self, jobs: Sequence[NewJob] = ()) -> None:
        side = self._side()
        with contextlib.suppress(psycopg.Error):
            async with side.slots:
                connection = await side.take() or await self._aconnect(self.url)
                try:
                    with deadline(connection, ANSWER_SECONDS):
                        await connection.execute(self._notification(jobs))
                except BaseException:
                    await connection.close()
                    raise
                side.give(connection)

    def _notification(self, jobs: Sequence[NewJob]) -> sql.Composed:
        return sql.SQL("BEGIN; SET LOCAL synchronous_commit TO off; NOTIFY {}, {}; COMMIT").format(
            sql.Identifier(self.channel), sql.Literal(write_hint(jobs))
        )

    # --- schema and errors ------------------------------------------------------------------------

    def _sql(self, text: LiteralString) -> sql.Composed:
        return sql.SQL(text).format(sql.Identifier(self.schema))

    def _version(self, connection: psycopg.Connection) -> int:
        known = connection.execute(
            "SELECT to_regclass(%s)", [f'"{self.schema}".migration']
        ).fetchone()
        if not known or known[0] is None:
            return 0
        row = connection.execute(
            self._sql("SELECT coalesce(max(version), 0) FROM {}.migration")
        ).fetchone()
        return int(row[0]) if row else 0

    def _learn(self, version: int, isolation: tuple[Any, ...] | None) -> None:
        """Once a process: is the schema ours, and must each statement ask for READ COMMITTED by
        itself?
        """
        check_version(self, version)
        self._strict = bool(isolation and isolation[0] != "read committed")
        self._known = True

    def forget_schema(self) -> None:
        """Look again whether the schema is there, the next time."""
        self._known = False

    def _restless(self, error: Exception) -> DatabaseUnavailable:
        return DatabaseUnavailable(
            f"{self.shown_url} asked {REPEATS} times to repeat a write: {first_line(error)}",
            why="other transactions change the same rows all the time",
            fix="look for long transactions on Onward's tables: pg_stat_activity, pg_locks",
        )


def _end(op: Op[T], rows: Rows) -> T:
    """Hand the last rows to an operation that consists of one statement."""
    try:
        statement = op.send(rows)
    except StopIteration as end:
        answer: T = end.value
        return answer
    raise AssertionError(f"{statement.name} follows a statement that was to be alone")


def _lock_key(schema: str) -> int:
    """A number of our own for the lock that keeps two migrations of one schema apart."""
    return int.from_bytes(b"onw" + schema.encode()[:4].ljust(4, b"_"), "big")


_living: weakref.WeakSet[PostgresDatabase] = weakref.WeakSet()
_left_behind: list[object] = []


def _after_fork() -> None:
    """In a forked child: leave the parent's connections alone, neither used nor closed."""
    for database in list(_living):
        _left_behind.append(database.__dict__.copy())
        database._reset()  # pyright: ignore[reportPrivateUsage]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
