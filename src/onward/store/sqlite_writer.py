"""The one writing connection of a SQLite file: whatever was asked meanwhile shares its next commit.

A thread of its own writes for loops, which must not wait for a disk, and for everybody who finds a
commit under way. A plain caller who finds none writes in its own thread: to be woken twice would
cost as much as a third of a commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from onward.errors import DatabaseError
from onward.job import NewJob
from onward.store import portions, store
from onward.store.sqlite_driver import Connection
from onward.store.statements import Op, Rows, Statement, sqlite_text

if TYPE_CHECKING:
    from onward.store.sqlite import SqliteDatabase

T = TypeVar("T")

MOST_PER_COMMIT = 256

MOST_JOINED = 1_000
"""How many jobs of different callers are written by one statement; `portions` limits their text."""


class Work(NamedTuple):
    """An operation for the writer, and who is told its answer: a value, or an error.

    `jobs`: it enqueues these and does nothing else, so it can be joined with others of its kind.
    `loop`: where the answer is to be told, if not in the thread that has written.
    """

    make: Callable[[], Op[Any]]
    answer: Callable[[Any], object]
    jobs: Sequence[NewJob] | None = None
    loop: asyncio.AbstractEventLoop | None = None


class SqliteWriter:
    """Writes to one database, from one thread at a time."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database
        self._moment: float | None = None
        self._lock = threading.Lock()
        self._todo: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._writing = threading.Lock()
        self._wanted = False  # The thread waits for its turn, which no plain caller may take.
        self._by: int | None = None  # The caller's thread that writes.
        self._connection: Connection | None = None

    def submit(self, work: Work) -> None:
        """Leave it to the thread, which answers after the commit."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._work, args=(self._todo,), name="onward-sqlite", daemon=True
                )
                self._thread.start()
            self._todo.put(work)

    def write(self, work: Work) -> bool:
        """Write here and now, if nobody else does; returns whether it was.

        Raises:
            DatabaseError: this very thread is writing: it was interrupted by a signal handler or a
                destructor that wants to write too, and would wait for itself.
        """
        if self._by == threading.get_ident():
            raise DatabaseError(
                "this thread is in the middle of another write",
                why="a signal handler or a __del__ wants to enqueue, and would wait for itself",
                fix="note it there, and enqueue from the program's own course",
            )
        if self._wanted or not self._todo.empty() or not self._writing.acquire(blocking=False):
            return False
        try:
            self._by = threading.get_ident()
            self._write([work])
        finally:
            self._by = None
            self._writing.release()
        return True

    def pause(self) -> None:
        """Write what was given, close, and let nothing be opened before `resume`."""
        self._lock.acquire()
        # Under the lock, so that nobody starts the next thread while this one does what it has
        # been given.
        thread, self._thread = self._thread, None
        if thread is not None:
            self._todo.put(None)
            thread.join()
        self._writing.acquire()
        self._close()

    def resume(self) -> None:
        self._writing.release()
        self._lock.release()

    # --- the writing itself -----------------------------------------------------------------------

    def _work(self, todo: queue.SimpleQueue[Work | None]) -> None:
        """The thread: take what there is, write it in one transaction, answer."""
        ended = False
        while not ended:
            batch, ended = _take(todo)
            if not batch:
                return
            self._wanted = True
            with self._writing:
                self._wanted = False
                self._write(batch)

    def _write(self, batch: list[Work]) -> None:
        """Write it and answer. If the transaction fails as a whole everyone is told, and the
        connection is opened anew. Nothing of it took, unless the COMMIT itself failed.
        """
        try:
            self._connection = self._connection or self._database.open_ready(self._now)
            answers = self._commit(self._connection, batch)
        except BaseException as error:
            self._close()
            answers = [self._database.translate(error)] * len(batch)
        _tell(zip(batch, answers, strict=True))

    def _close(self) -> None:
        """SQLite rolls back what is open."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()

    def _commit(self, connection: Connection, batch: list[Work]) -> list[Any]:
        self._moment = None
        connection.rows("BEGIN IMMEDIATE")
        self._moment = self._database.clock()
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
        return answers

    def _join(self, connection: Connection, works: list[Work]) -> bool:
        """Write several enqueues as one; returns whether they are written: not if one is bad,
        nor if they are too much for one statement.
        """
        jobs = [job for work in works for job in work.jobs or ()]
        if len(works) < 2 or len(jobs) > MOST_JOINED:
            return False
        if portions.text_of(jobs) > portions.MOST_TEXT:
            return False
        answer = self._attempt(connection, lambda: store.enqueue(jobs), among=True)
        return not isinstance(answer, BaseException)

    def _attempt(self, connection: Connection, make: Callable[[], Op[T]], among: bool) -> Any:
        """Run one operation; its error is its answer, unless the database itself is in trouble."""
        if among:
            connection.rows("SAVEPOINT op")
        try:
            answer: Any = carry_out(connection, make())
        except Exception as error:
            if self._in_trouble(error):
                raise
            answer = self._database.translate(error)
            if among:
                connection.rows("ROLLBACK TO op")
        if among:
            connection.rows("RELEASE op")
        return answer

    def _in_trouble(self, error: Exception) -> bool:
        """Whether an error is about the database, and not about one operation."""
        driver = self._database.driver
        return isinstance(error, driver.errors) and not isinstance(error, driver.constraint)

    def _now(self) -> float:
        """The writer's time stands still while a transaction lasts, as PostgreSQL's does: what it
        writes is one moment.
        """
        return self._database.clock() if self._moment is None else self._moment


Answer = tuple[Work, Any]


def _tell(answers: Iterable[Answer]) -> None:
    """Tell everybody: a loop is woken once, however many wait there."""
    elsewhere: dict[asyncio.AbstractEventLoop, list[Answer]] = {}
    for work, answer in answers:
        if work.loop is None:
            work.answer(answer)
        else:
            elsewhere.setdefault(work.loop, []).append((work, answer))
    for loop, told in elsewhere.items():
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits there.
            loop.call_soon_threadsafe(_tell_here, told)


def _tell_here(answers: list[Answer]) -> None:
    for work, answer in answers:
        work.answer(answer)


def carry_out(connection: Connection, op: Op[T]) -> T:
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
    """All work that is there, none if the end came first; and whether the end was among it."""
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
