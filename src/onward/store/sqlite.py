"""SQLite: one thread owns the one writing connection; whatever was asked meanwhile shares its next commit.

In:  operations from any thread or loop.    Out: their answers, after the commit (WAL, `synchronous=FULL`).
Each operation runs in a savepoint of its own, so that a bad one fails alone. Reads go through a connection of their own.
Other processes are noticed by `PRAGMA data_version`. Nothing of this crosses a fork: a child opens its own connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from onward.errors import DatabaseError, DatabaseUnavailable, OnwardError
from onward.job import NewJob
from onward.store import store
from onward.store.database import Again, Refused
from onward.store.migrate import check_version, missing, newest
from onward.store.sqlite_driver import Connection, Driver
from onward.store.statements import Op, Rows, Statement, sqlite_text

T = TypeVar("T")
P = ParamSpec("P")

BUSY_SECONDS = 10.0
"""How long a write waits for another process's transaction before the database counts as unavailable."""

WATCH_SECONDS = 0.002
"""How often an idle listener looks whether another process has committed."""

MOST_PER_COMMIT = 256

_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ncpfs"}

Work = tuple[Callable[[], Op[Any]], "Future[Any]"]


class SqliteDatabase:
    """One SQLite file.

    Args:
        path: the file; it is created on first use, readable by its owner only.
        driver: how to open it.
        synchronous: `FULL` (a commit survives a power cut) or `NORMAL`.
    """

    dialect = "sqlite"

    def __init__(self, path: Path, driver: Driver, *, synchronous: str = "FULL") -> None:
        self.path = path.expanduser().absolute()
        self.driver = driver
        self.shown_url = f"sqlite:///{path}"
        self.clock: Callable[[], float] = time.time
        self._synchronous = synchronous
        self._lock = threading.Lock()
        self._reset()
        _living.add(self)

    def _reset(self) -> None:
        """Forget every connection: at the start, after closing, and in a forked child (where closing would be wrong)."""
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._reader: Connection | None = None
        self._todo: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # --- the port ---------------------------------------------------------------------------------------------------

    def run(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        while True:
            with contextlib.suppress(Again):
                return self._submit(lambda: op(*args, **kwargs)).result()

    async def arun(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        while True:
            future = self._submit(lambda: op(*args, **kwargs))
            with contextlib.suppress(Again):
                return await asyncio.shield(asyncio.wrap_future(future))

    def read(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        with self._reading:
            if self._reader is None:
                self._reader = self._open_ready()
            try:
                return _carry_out(self._reader, op(*args, **kwargs))
            except self.driver.errors as error:
                raise self._translate(error) from error

    async def aread(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(self.read, op, *args, **kwargs)

    def enqueue(self, jobs: Sequence[NewJob]) -> None:
        self.run(store.enqueue, jobs)

    async def aenqueue(self, jobs: Sequence[NewJob]) -> None:
        await self.arun(store.enqueue, jobs)

    async def wakeup(self) -> SqliteWakeup:
        return SqliteWakeup(self._open_ready)

    def migrate(self) -> list[str]:
        connection = self._open()
        try:
            return self._migrate(connection)
        finally:
            connection.close()

    def schema_version(self) -> int:
        if not self.path.exists():
            return 0
        connection = self._open()
        try:
            return _version(connection)
        finally:
            connection.close()

    def facts(self) -> dict[str, Any]:
        connection = self._open_ready()
        try:
            return {
                "library": self.driver.library,
                "sqlite": self.driver.version,
                "journal_mode": connection.rows("PRAGMA journal_mode")[0][0],
                "synchronous": self._synchronous,
                "quick_check": connection.rows("PRAGMA quick_check(1)")[0][0],
            }
        finally:
            connection.close()

    def close(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._todo.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._reading:
            if self._reader is not None:
                self._reader.close()
                self._reader = None

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    # --- the writer -------------------------------------------------------------------------------------------------

    def _submit(self, make: Callable[[], Op[T]]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._write, args=(self._todo,), name="onward-sqlite", daemon=True
                )
                self._thread.start()
            self._todo.put((make, future))
        return future

    def _write(self, todo: queue.SimpleQueue[Work | None]) -> None:
        """The writer thread: take what there is, write it in one transaction, answer."""
        connection: Connection | None = None
        ended = False
        while not ended:
            batch, ended = _take(todo)
            try:
                connection = connection or self._open_ready()
                self._commit(connection, batch)
            except BaseException as error:
                connection = self._give_up(connection, batch, error)
        if connection is not None:
            connection.close()

    def _commit(self, connection: Connection, batch: list[Work]) -> None:
        connection.rows("BEGIN IMMEDIATE")
        answers = [self._attempt(connection, make, len(batch) > 1) for make, _ in batch]
        if len(batch) == 1 and isinstance(answers[0], BaseException):
            connection.rows("ROLLBACK")
        else:
            connection.rows("COMMIT")
        for (_, future), answer in zip(batch, answers, strict=True):
            _answer(future, answer)

    def _attempt(self, connection: Connection, make: Callable[[], Op[T]], among: bool) -> Any:
        """Run one operation; its error is its answer, unless the whole transaction is in danger."""
        if among:
            connection.rows("SAVEPOINT op")
        try:
            answer: Any = _carry_out(connection, make())
        except (OnwardError, Again, *self.driver.constraint) as error:
            answer = self._translate(error)
            if among:
                connection.rows("ROLLBACK TO op")
        if among:
            connection.rows("RELEASE op")
        return answer

    def _give_up(
        self, connection: Connection | None, batch: list[Work], error: BaseException
    ) -> Connection | None:
        """The transaction failed as a whole: nothing of it took. Everyone is told, and the connection is opened anew."""
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.rows("ROLLBACK")
            with contextlib.suppress(Exception):
                connection.close()
        for _, future in batch:
            _answer(future, self._translate(error))
        return None

    # --- opening ----------------------------------------------------------------------------------------------------

    def _open_ready(self) -> Connection:
        """A connection to a file that has today's schema: created and migrated on first use."""
        connection = self._open()
        try:
            if _version(connection) < newest("sqlite"):
                self._migrate(connection)
            check_version(self.shown_url, "sqlite", _version(connection))
        except BaseException:
            connection.close()
            raise
        return connection

    def _open(self) -> Connection:
        _check_place(self.path)
        try:
            connection = self.driver.open(self.path, self._now)
            connection.busy_timeout(BUSY_SECONDS)
            _into_wal(connection)
            connection.rows(f"PRAGMA synchronous={self._synchronous}")
            connection.rows("PRAGMA journal_size_limit=16777216")
            return connection
        except self.driver.errors as error:
            raise self._translate(error) from error

    def _now(self) -> float:
        return self.clock()

    def _migrate(self, connection: Connection) -> list[str]:
        connection.rows("BEGIN IMMEDIATE")
        try:
            todo = missing("sqlite", _version(connection))
            for migration in todo:
                connection.script(migration.text)
                connection.rows(
                    "INSERT INTO onward_migration VALUES (:version, :name, onward_clock())",
                    {"version": migration.version, "name": migration.name},
                )
            connection.rows("COMMIT")
        except BaseException:
            with contextlib.suppress(Exception):
                connection.rows("ROLLBACK")
            raise
        return [f"{migration.version:04}_{migration.name}" for migration in todo]

    def _translate(self, error: BaseException) -> BaseException:
        """A driver's error as one of the port's."""
        if isinstance(error, self.driver.constraint):
            return Refused(f"{self.shown_url} refuses the write: {error}", why=_chain(error))
        if isinstance(error, self.driver.errors):
            return DatabaseUnavailable(
                f"{self.shown_url} cannot be used: {error}",
                why=self.driver.explain(error),
                fix="check the file, its directory's permissions and the space on its disk",
            )
        return error


class SqliteWakeup:
    """Notices commits of any process: the database's data version changes."""

    def __init__(self, open: Callable[[], Connection]) -> None:
        self._open = open
        self._connection: Connection | None = None
        self._seen: Any = None

    async def wait(self, timeout: float) -> bool:
        end = time.monotonic() + timeout
        while True:
            if self._changed():
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            await asyncio.sleep(min(WATCH_SECONDS, left))

    def _changed(self) -> bool:
        if self._connection is None:
            self._connection = self._open()
        seen, self._seen = self._seen, self._connection.rows("PRAGMA data_version")[0][0]
        return bool(seen is not None and seen != self._seen)

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _carry_out(connection: Connection, op: Op[T]) -> T:
    """Drive an operation: run each statement that it yields and send it the rows."""
    rows: Rows | None = None
    while True:
        try:
            statement = next(op) if rows is None else op.send(rows)
        except StopIteration as end:
            result: T = end.value
            return result
        rows = _rows(connection, statement)


def _rows(connection: Connection, statement: Statement) -> Rows:
    rows: Rows = []
    for step in sqlite_text(statement.name):
        rows = connection.rows(step, statement.params)
    return rows


def _take(todo: queue.SimpleQueue[Work | None]) -> tuple[list[Work], bool]:
    """All work that is there, at least one piece; and whether the end was among it."""
    batch: list[Work] = []
    item = todo.get()
    while item is not None:
        batch.append(item)
        if len(batch) == MOST_PER_COMMIT:
            return batch, False
        try:
            item = todo.get_nowait()
        except queue.Empty:
            return batch, False
    return batch, True


def _answer(future: Future[Any], answer: Any) -> None:
    if future.cancelled():
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _version(connection: Connection) -> int:
    known = connection.rows("SELECT 1 FROM sqlite_schema WHERE name = 'onward_migration'")
    if not known:
        return 0
    return int(connection.rows("SELECT coalesce(max(version), 0) FROM onward_migration")[0][0])


def _into_wal(connection: Connection) -> None:
    """Set the journal mode, which is stored in the file; another process may be doing the same just now."""
    mode = connection.rows("PRAGMA journal_mode=WAL")[0][0]
    if mode != "wal":
        raise DatabaseError(
            f"SQLite refuses the write-ahead log here (journal mode stays {mode})",
            why="the file system lacks shared memory for several processes, or the database is not a file",
            fix="put the file on a local disk",
        )


def _check_place(path: Path) -> None:
    """Refuse places where a queue cannot work, with the reason."""
    if path.is_dir():
        raise DatabaseError(f"{path} is a directory", fix="name a file, e.g. sqlite:///onward.db")
    if not path.parent.is_dir():
        raise DatabaseError(
            f"the directory {path.parent} does not exist",
            fix="create it, or name a file elsewhere: sqlite:///relative.db, sqlite:////absolute.db",
        )
    kind = _file_system(path.parent)
    if kind in _NETWORK:
        raise DatabaseError(
            f"{path} is on a network file system ({kind})",
            why="SQLite's locks do not work there, so two machines would claim the same job",
            fix='use a local disk, or PostgreSQL for several machines: Onward("postgresql://…")',
        )
    if not path.exists():
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def _file_system(folder: Path) -> str | None:
    """The kind of file system that a folder is on, where the system tells."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    best, kind = "", None
    target = str(folder.resolve())
    for line in mounts.splitlines():
        _, mount, fs, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fs
    return kind


def _chain(error: BaseException) -> str:
    return f"{type(error).__name__}"


_living: weakref.WeakSet[SqliteDatabase] = weakref.WeakSet()
_left_behind: list[object] = []


def _after_fork() -> None:
    """In a forked child: leave the parent's connections alone. Closing one would drop the parent's file locks."""
    for database in list(_living):
        _left_behind.append(database.__dict__.copy())
        database._reset()  # pyright: ignore[reportPrivateUsage]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
