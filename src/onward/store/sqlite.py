"""SQLite: one connection that writes, one that reads, and what others hear of it.

In:  operations from any thread or loop.
Out: their answers, after the commit (WAL, `synchronous=FULL`).

Of the operations that share a commit each has a savepoint of its own, so that a bad one fails
alone. Reads go through a connection of their own. Other processes are noticed by `PRAGMA
data_version`. Nothing of this crosses a fork: every connection is closed before one, and parent and
child open their own when they next need them. Nor does it outlive the file's place: once its path
leads elsewhere, whoever calls is told, and every connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from onward.errors import DatabaseUnavailable
from onward.job import NewJob
from onward.store import store
from onward.store.database import Again, Duplicate, Refused
from onward.store.migrate import check_version, missing, newest
from onward.store.options import options_of
from onward.store.sqlite_driver import BUSY, SAME_KEY, Connection, Driver, kind, meaning, remedy
from onward.store.sqlite_place import FileId, another_file, check_mode, check_place, file_at, url_of
from onward.store.sqlite_wakeup import SqliteWakeup
from onward.store.sqlite_writer import SqliteWriter, Work, carry_out
from onward.store.statements import Op

T = TypeVar("T")
P = ParamSpec("P")

BUSY_SECONDS = 10.0
"""How long a write waits for another process's transaction before the database counts as
unavailable.
"""

LAST_READER_SECONDS = 0.3
"""How long the end of a compaction waits for a reader: nobody can write meanwhile."""

REPEATS = 50
"""How often an operation is repeated that meets a world which has just moved on."""


class SqliteDatabase:
    """One SQLite file.

    Args:
        path: the file; it is created on first use, readable by its owner only.
        driver: how to open it.
        synchronous: `FULL` (a commit survives a power cut) or `NORMAL`.
    """

    dialect = "sqlite"
    schema = ""
    notifies = False
    local = True

    def __init__(self, path: Path, driver: Driver, *, synchronous: str = "FULL") -> None:
        self.path = path.expanduser().absolute()
        self.driver = driver
        self.shown_url = url_of(path)
        self.clock: Callable[[], float] = time.time
        self._synchronous = synchronous
        self._writer = SqliteWriter(self)
        self._reading = threading.RLock()  # A signal handler may read in the middle of a read.
        self._reader: Connection | None = None
        self._reads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._wakeups: weakref.WeakSet[SqliteWakeup] = weakref.WeakSet()
        self._asleep: list[SqliteWakeup] = []
        self._file: FileId | None = None  # Which one is open.
        self._leaving: threading.Thread | None = None
        _living.add(self)

    # --- the port ---------------------------------------------------------------------------------

    def run(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        for repeat in range(REPEATS):
            with contextlib.suppress(Again):
                return self._write(lambda: op(*args, **kwargs))
            time.sleep(0.001 * repeat)
        raise self._restless()

    async def arun(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        for repeat in range(REPEATS):
            with contextlib.suppress(Again):
                return await self._awrite(lambda: op(*args, **kwargs))
            await asyncio.sleep(0.001 * repeat)
        raise self._restless()

    def read(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        self._check_file()
        with self._reading:
            if self._reader is None:
                self._reader = self.open_ready()
            try:
                return carry_out(self._reader, op(*args, **kwargs))
            except self.driver.errors as error:
                self._stop_reader()
                raise self.translate(error) from error

    async def aread(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        # A thread of our own: bodies may keep all of the loop's busy.
        self._reads = self._reads or ThreadPoolExecutor(1, "onward-reads")
        read = partial(self.read, op, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._reads, read)

    def enqueue(self, jobs: Sequence[NewJob]) -> None:
        self._write(lambda: store.enqueue_ours(jobs), jobs)

    async def aenqueue(self, jobs: Sequence[NewJob]) -> None:
        await self._awrite(lambda: store.enqueue_ours(jobs), jobs)

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
        if not os.path.exists(self.path):  # Nor is there one whose name is too long.
            return 0
        with self._reading, self._opened(self._open()) as connection:
            return _version(connection)

    def compact(self) -> bool:
        with self._reading, self._opened(self._ready()) as connection:
            connection.rows("PRAGMA temp_store=FILE")  # The copy may be larger than the memory.
            self._vacuum(connection)
            connection.busy_timeout(LAST_READER_SECONDS)
            busy = connection.rows("PRAGMA wal_checkpoint(TRUNCATE)")[0][0]
        return not busy

    def facts(self) -> dict[str, Any]:
        with self._reading, self._opened(self._ready()) as connection:
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
        self._writer.pause()
        self._writer.resume()
        with self._reading:
            self._stop_reader()
        self._file = None
        reads, self._reads = self._reads, None
        if reads is not None:
            reads.shutdown(wait=False)

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    async def close_loop(self) -> None:
        """Connections here belong to no loop."""

    # --- writing ----------------------------------------------------------------------------------

    def _write(self, make: Callable[[], Op[T]], jobs: Sequence[NewJob] | None = None) -> T:
        """Write in this thread if nobody else writes; else together with the next."""
        self._check_file()
        answers: list[Any] = []
        if not self._writer.write(Work(make, answers.append, jobs)):
            told = threading.Event()

            def tell(answer: Any) -> None:
                answers.append(answer)
                told.set()

            self._writer.submit(Work(make, tell, jobs))
            told.wait()
        answer: T = _taken(answers[0])
        return answer

    async def _awrite(self, make: Callable[[], Op[T]], jobs: Sequence[NewJob] | None = None) -> T:
        """A caller that is cancelled leaves its operation to be written."""
        self._check_file()
        loop = asyncio.get_running_loop()
        told: asyncio.Future[Any] = loop.create_future()
        self._writer.submit(Work(make, partial(_tell, told), jobs, loop))
        answer: T = _taken(await told)
        return answer

    # --- a fork -----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Close every connection, and let none be opened before `resume`."""
        self._writer.pause()
        self._reading.acquire()
        self._stop_reader()
        self._lock.acquire()
        self._asleep = list(self._wakeups)
        for wakeup in self._asleep:
            wakeup.pause()

    def resume(self) -> None:
        """Connections are opened again when they are next needed."""
        while self._asleep:
            self._asleep.pop().resume()
        self._reads = None  # A child has none of its threads.
        self._lock.release()
        self._reading.release()
        self._writer.resume()

    def _stop_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    # --- a file that goes away --------------------------------------------------------------------

    def _check_file(self) -> None:
        """Refuse to use a file to which its path no longer leads: nobody else would see it."""
        file = self._file
        if file is None or (there := file_at(self.path)) == file:
            return
        # Not here: this may be a loop, or a signal handler in the middle of a write.
        if self._leaving is None or not self._leaving.is_alive():
            self._leaving = threading.Thread(target=self._leave, name="onward-leave", daemon=True)
            self._leaving.start()
        make = f"onward db init {options_of(self)}"
        raise another_file(self.shown_url, gone=there is None, make=make)

    def _leave(self) -> None:
        """Close every connection; only then may the file that is there now be opened, or SQLite
        would keep shared memory for both under one name. One that is gone is not made anew: whoever
        has moved it may be about to put another in its place.
        """
        self.pause()
        if file_at(self.path) not in {None, self._file}:
            self._file = None
        self.resume()

    # --- opening ----------------------------------------------------------------------------------

    def open_ready(self, clock: Callable[[], float] | None = None) -> Connection:
        """A connection to be kept, to a file that has today's schema: created and migrated on first
        use.
        """
        before = file_at(self.path)
        connection = self._ready(clock)
        after = file_at(self.path)
        if before not in {None, after}:  # Replaced meanwhile.
            connection.close()
            return self.open_ready(clock)
        self._file = self._file or after
        return connection

    def _ready(self, clock: Callable[[], float] | None = None) -> Connection:
        connection = self._open(clock)
        with self._kept(connection):
            if _version(connection) < newest("sqlite"):
                self._migrate(connection)
            check_version(self, _version(connection))
        return connection

    def _open(self, clock: Callable[[], float] | None = None) -> Connection:
        self._check_file()
        check_place(self.path)
        try:
            connection = self.driver.open(self.path, clock or self._now)
        except self.driver.errors as error:
            raise self.translate(error) from error
        with self._kept(connection):
            connection.busy_timeout(BUSY_SECONDS)
            self._into_wal(connection)
            connection.rows(f"PRAGMA synchronous={self._synchronous}")
            connection.rows("PRAGMA temp_store=MEMORY")  # What RETURNING gathers is no file.
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

    def _vacuum(self, connection: Connection) -> None:
        try:
            connection.rows("VACUUM")
        except self.driver.errors as error:
            if kind(self.driver.code(error)) != BUSY:
                raise
            raise DatabaseUnavailable(
                f"{self.shown_url} cannot be compacted now: {error}",
                why="somebody else held the write lock for too long: a long transaction, or a"
                " process that is stopped",
                fix="compact it when that transaction has ended; fuser FILE names who has it open",
            ) from error

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
                fix=remedy(self.driver.code(error)),
            )
        return error


def _taken(answer: Any) -> Any:
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _tell(told: asyncio.Future[Any], answer: Any) -> None:
    if not told.done():
        told.set_result(answer)


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
