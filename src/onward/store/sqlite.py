"""SQLite: one thread owns the one writing connection; whatever was asked meanwhile shares its next
commit.

In:  operations from any thread or loop.
Out: their answers, after the commit (WAL, `synchronous=FULL`).

Each operation runs in a savepoint of its own, so that a bad one fails alone. Reads go through a
connection of their own. Other processes are noticed by `PRAGMA data_version`. Nothing of this
crosses a fork: every connection is closed before one, and parent and child open their own when they
next need them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from onward.errors import DatabaseUnavailable
from onward.job import NewJob
from onward.store import store
from onward.store.database import Again, Duplicate, Refused
from onward.store.migrate import check_version, missing, newest
from onward.store.sqlite_driver import BUSY, SAME_KEY, Connection, Driver, kind, meaning
from onward.store.sqlite_place import check_mode, check_place
from onward.store.sqlite_wakeup import SqliteWakeup
from onward.store.statements import Op, Rows, Statement, sqlite_text

T = TypeVar("T")
P = ParamSpec("P")

BUSY_SECONDS = 10.0
"""How long a write waits for another process's transaction before the database counts as
unavailable.
"""

MOST_PER_COMMIT = 256

MOST_JOINED = 1_000
"""How many jobs of different callers are written by one statement."""

REPEATS = 50
"""How often an operation is repeated that meets a world which has just moved on."""


class Work(NamedTuple):
    """An operation for the writer. `jobs`: it enqueues these and does nothing else, so it can be
    joined with others of its kind.
    """

    make: Callable[[], Op[Any]]
    future: Future[Any]
    jobs: Sequence[NewJob] | None = None


class SqliteDatabase:
    """One SQLite file.

    Args:
        path: the file; it is created on first use, readable by its owner only.
        driver: how to open it.
        synchronous: `FULL` (a commit survives a power cut) or `NORMAL`.
    """

    dialect = "sqlite"
    notifies = False
    local = True

    def __init__(self, path: Path, driver: Driver, *, synchronous: str = "FULL") -> None:
        self.path = path.expanduser().absolute()
        self.driver = driver
        self.shown_url = f"sqlite:///{path}"
        self.clock: Callable[[], float] = time.time
        self._synchronous = synchronous
        self._moment: float | None = None
        self._lock = threading.Lock()
        self._todo: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._reading = threading.Lock()
        self._reader: Connection | None = None
        self._wakeups: weakref.WeakSet[SqliteWakeup] = weakref.WeakSet()
        self._asleep: list[SqliteWakeup] = []
        _living.add(self)

    # --- the port ---------------------------------------------------------------------------------

    def run(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        for repeat in range(REPEATS):
            with contextlib.suppress(Again):
                return self._submit(lambda: op(*args, **kwargs)).result()
            time.sleep(0.001 * repeat)
        raise self._restless()

    async def arun(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        for repeat in range(REPEATS):
            future = self._submit(lambda: op(*args, **kwargs))
            with contextlib.suppress(Again):
                return await asyncio.shield(asyncio.wrap_future(future))
            await asyncio.sleep(0.001 * repeat)
        raise self._restless()

    def read(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        with self._reading:
            if self._reader is None:
                self._reader = self.open_ready()
            try:
                return _carry_out(self._reader, op(*args, **kwargs))
            except self.driver.errors as error:
                self._stop_reader()
                raise self.translate(error) from error

    async def aread(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(lambda: self.read(op, *args, **kwargs))

    def enqueue(self, jobs: Sequence[NewJob]) -> None:
        self._submit(lambda: store.enqueue_ours(jobs), jobs).result()

    async def aenqueue(self, jobs: Sequence[NewJob]) -> None:
        future = self._submit(lambda: store.enqueue_ours(jobs), jobs)
        await asyncio.shield(asyncio.wrap_future(future))

    async def wakeup(self) -> SqliteWakeup:
        wakeup = SqliteWakeup(self)
        with self._lock:
            self._wakeups.add(wakeup)
        return wakeup

    def lock_folder(self) -> Path | None:
        return self.path.parent

    def migrate(self) -> list[str]:
        with self._reading, self._opened(self._open()) as connection:
            return self._migrate(connection)

    def schema_version(self) -> int:
        if not self.path.exists():
            return 0
        with self._reading, self._opened(self._open()) as connection:
            return _version(connection)

    def facts(self) -> dict[str, Any]:
        with self._reading, self._opened(self.open_ready()) as connection:
            return {
                "library": self.driver.library,
                "sqlite": self.driver.version,
                "journal_mode": connection.rows("PRAGMA journal_mode")[0][0],
                "synchronous": self._synchronous,
                "quick_check": connection.rows("PRAGMA quick_check(1)")[0][0],
            }

    def destroy(self) -> None:
        self.close()
        for end in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + end).unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            self._stop_writer()
        with self._reading:
            self._stop_reader()

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    async def close_loop(self) -> None:
        """Connections here belong to no loop."""

    # --- the writer -------------------------------------------------------------------------------

    def _submit(self, make: Callable[[], Op[T]], jobs: Sequence[NewJob] | None = None) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._write, args=(self._todo,), name="onward-sqlite", daemon=True
                )
                self._thread.start()
            self._todo.put(Work(make, future, jobs))
        return future

    def _stop_writer(self) -> None:
        """Under the lock, so that nobody starts the next writer while this one does what it has
        been given.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            self._todo.put(None)
            thread.join()

    def _stop_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _write(self, todo: queue.SimpleQueue[Work | None]) -> None:
        """The writer thread: take what there is, write it in one transaction, answer."""
        connection: Connection | None = None
        ended = False
        while not ended:
            batch, ended = _take(todo)
            try:
                connection = connection or self.open_ready(self._writing_now)
                self._commit(connection, batch)
            except BaseException as error:
                connection = self._give_up(connection, batch, error)
        if connection is not None:
            connection.close()

    def _commit(self, connection: Connection, batch: list[Work]) -> None:
        self._moment = None
        connection.rows("BEGIN IMMEDIATE")
        self._moment = self.clock()
        among = len(batch) > 1
        joined = self._join(connection, [work for work in batch if work.jobs is not None])
        answers = [
            False
            if joined and work.jobs is not None
            else self._attempt(connection, work.make, among)
            for work in batch
        ]
        if not among and isinstance(answers[0], BaseException):
            connection.rows("ROLLBACK")
        else:
            connection.rows("COMMIT")
        for work, answer in zip(batch, answers, strict=True):
            _answer(work.future, answer)

    def _join(self, connection: Connection, works: list[Work]) -> bool:
        """Write several enqueues as one; returns whether they are written: not if one is bad."""
        jobs = [job for work in works for job in work.jobs or ()]
        if len(works) < 2 or len(jobs) > MOST_JOINED:
            return False
        answer = self._attempt(connection, lambda: store.enqueue(jobs), among=True)
        return not isinstance(answer, BaseException)

    def _attempt(self, connection: Connection, make: Callable[[], Op[T]], among: bool) -> Any:
        """Run one operation; its error is its answer, unless the database itself is in trouble."""
        if among:
            connection.rows("SAVEPOINT op")
        try:
            answer: Any = _carry_out(connection, make())
        except Exception as error:
            if self._in_trouble(error):
                raise
            answer = self.translate(error)
            if among:
                connection.rows("ROLLBACK TO op")
        if among:
            connection.rows("RELEASE op")
        return answer

    def _in_trouble(self, error: Exception) -> bool:
        """Whether an error is about the database, and not about one operation."""
        return isinstance(error, self.driver.errors) and not isinstance(
            error, self.driver.constraint
        )

    def _give_up(
        self, connection: Connection | None, batch: list[Work], error: BaseException
    ) -> Connection | None:
        """The transaction failed as a whole: nothing of it took. Everyone is told, and the
        connection is opened anew.
        """
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.rows("ROLLBACK")
            with contextlib.suppress(Exception):
                connection.close()
        for work in batch:
            _answer(work.future, self.translate(error))
        return None

    # --- a fork -----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Close every connection, and let none be opened before `resume`."""
        self._lock.acquire()
        self._stop_writer()
        self._reading.acquire()
        self._stop_reader()
        self._asleep = list(self._wakeups)
        for wakeup in self._asleep:
            wakeup.pause()

    def resume(self) -> None:
        """Connections are opened again when they are next needed."""
        while self._asleep:
            self._asleep.pop().resume()
        self._reading.release()
        self._lock.release()

    # --- opening ----------------------------------------------------------------------------------

    def open_ready(self, clock: Callable[[], float] | None = None) -> Connection:
        """A connection to a file that has today's schema: created and migrated on first use."""
        connection = self._open(clock)
        with self._kept(connection):
            if _version(connection) < newest("sqlite"):
                self._migrate(connection)
            check_version(self.shown_url, "sqlite", _version(connection))
        return connection

    def _open(self, clock: Callable[[], float] | None = None) -> Connection:
        check_place(self.path)
        try:
            connection = self.driver.open(self.path, clock or self._now)
        except self.driver.errors as error:
            raise self.translate(error) from error
        with self._kept(connection):
            connection.busy_timeout(BUSY_SECONDS)
            self._into_wal(connection)
            connection.rows(f"PRAGMA synchronous={self._synchronous}")
            connection.rows("PRAGMA journal_size_limit=16777216")
        return connection

    @contextlib.contextmanager
    def _opened(self, connection: Connection) -> Generator[Connection]:
        """A connection for the time of a block."""
        with self._kept(connection):
            yield connection
        connection.close()

    @contextlib.contextmanager
    def _kept(self, connection: Connection) -> Generator[None]:
        """A connection on its way to be used: closed if it cannot be."""
        try:
            yield
        except self.driver.errors as error:
            connection.close()
            raise self.translate(error) from error
        except BaseException:
            connection.close()
            raise

    def _into_wal(self, connection: Connection) -> None:
        """Set the journal mode, which is stored in the file. SQLite does not wait here for another
        process that does so too.
        """
        end = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                check_mode(connection.rows("PRAGMA journal_mode=WAL")[0][0])
                return
            except self.driver.errors as error:
                if kind(self.driver.code(error)) != BUSY or time.monotonic() > end:
                    raise
            time.sleep(0.002)

    def _now(self) -> float:
        return self.clock()

    def _writing_now(self) -> float:
        """The writer's time stands still while a transaction lasts, as PostgreSQL's does: what it
        writes is one moment.
        """
        return self.clock() if self._moment is None else self._moment

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

    def _restless(self) -> DatabaseUnavailable:
        return DatabaseUnavailable(
            f"{self.shown_url} asked {REPEATS} times to repeat a write",
            why="the same rows change all the time",
        )

    def translate(self, error: BaseException) -> BaseException:
        """A driver's error as one of the port's."""
        if isinstance(error, self.driver.constraint):
            refusal = Duplicate if self.driver.code(error) in SAME_KEY else Refused
            return refusal(f"{self.shown_url} refuses the write: {error}")
        if isinstance(error, self.driver.errors):
            return DatabaseUnavailable(
                f"{self.shown_url} cannot be used: {error}",
                why=meaning(self.driver.code(error)),
                fix="check the file, its directory's permissions and the space on its disk",
            )
        return error


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


_living: weakref.WeakSet[SqliteDatabase] = weakref.WeakSet()
_forking = threading.Lock()
_paused: list[SqliteDatabase] = []


def _before_fork() -> None:
    """SQLite keeps a process's locks in that process's memory, and the kernel gives none of them to
    a child. A child that was forked beside an open connection would take locks for its own that it
    does not hold, and what it commits could be lost. So no connection is open while a process
    forks.
    """
    _forking.acquire()
    for database in list(_living):
        database.pause()
        _paused.append(database)


def _after_fork() -> None:
    """In the parent, and in the child, which has a copy of the same locks."""
    while _paused:
        _paused.pop().resume()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )
