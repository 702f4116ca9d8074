"""What every connection to PostgreSQL has in common: options, deadlines, what its errors mean."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self, TypeVar

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from onward.errors import DatabaseUnavailable
from onward.job import NewJob
from onward.store.coalesce import AsyncCoalescer
from onward.store.database import Again, Duplicate, Refused, TurnedAway, Unknown
from onward.store.migrate import schema_missing

if TYPE_CHECKING:
    from onward.store.postgres import PostgresDatabase

MOST_CONNECTIONS = 8
"""Connections at most of a process's threads together, and of each of its event loops; a worker
process adds one that listens.
"""

TRANSACTION_SECONDS = 8
"""How long the server keeps an open transaction whose client has gone silent. Below the lease."""

ANSWER_SECONDS = 15.0
"""How long a loop waits for an operation's answer before it takes the connection for dead, and a
thread for that of an enqueue or a look at one job.
"""

FRESH_SECONDS = 1.0
"""An idle connection of a loop that was used so recently is trusted; another is asked first."""

LOOK_SECONDS = 1.0
"""How often a thread looks whether other threads wait for an answer in vain."""

QUIET_LOOKS = 30
"""After so many looks at nothing that thread ends."""

ASK_SECONDS = 2.0
"""How long an idle connection may take to say that it lives."""

DEFAULTS: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
    "application_name": "onward",
}

AGAIN = (errors.SerializationFailure, errors.DeadlockDetected, Again)
REFUSED = (
    psycopg.IntegrityError,
    psycopg.DataError,
    # To psycopg an operational error; it means a name too long for an index.
    errors.ProgramLimitExceeded,
    # A trigger of somebody's own says no, without a code.
    errors.RaiseException,
)
MISSING = (errors.UndefinedTable, errors.InvalidSchemaName)


LOCK_SECONDS = 10
"""How long a transaction of several statements waits for what another has locked. That may be one
of the caller's own, which ends only after us: the wait would have no end.
"""

LIMIT = (
    f"SET LOCAL idle_in_transaction_session_timeout = '{TRANSACTION_SECONDS}s';"
    f" SET LOCAL lock_timeout = '{LOCK_SECONDS}s'"
).encode()
ISOLATION = b"SHOW default_transaction_isolation"


class translated:
    """A driver's errors as the port's. A class, because every write passes here."""

    __slots__ = ("_database",)

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, psycopg.Error) and not isinstance(error, AGAIN):
            raise _translated(self._database, error) from error


def _translated(database: PostgresDatabase, error: psycopg.Error) -> Exception:
    if isinstance(error, MISSING):
        database.forget_schema()
        return schema_missing(database)
    if isinstance(error, errors.UniqueViolation):
        return Duplicate(f"{database.shown_url}: {first_line(error)}")
    if isinstance(error, REFUSED):
        return Refused(f"{database.shown_url} refuses the write: {first_line(error)}")
    if isinstance(error, errors.LockNotAvailable):
        return DatabaseUnavailable(
            f"{database.shown_url} waited in vain for a lock: {first_line(error)}",
            why="another transaction has written the same id, or holds the same rows, and does not"
            " end: perhaps one of yours that is still open",
            fix="commit it or roll it back before; pg_stat_activity and pg_locks show who holds it",
        )
    if isinstance(error, errors.QueryCanceled):
        return DatabaseUnavailable(
            f"{database.shown_url} cancelled a statement: {first_line(error)}",
            why="it took longer than a statement_timeout allows, or somebody cancelled it",
            fix="the server answers; see SHOW statement_timeout, or ALTER ROLE … SET it higher",
        )
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        kind, why, fix = _cause(str(error))
        return kind(
            f"{database.shown_url} cannot be reached: {first_line(error)}", why=why, fix=fix
        )
    # A standby, a missing privilege, a session that was ended: no fault of the data, so it is not
    # refused.
    return DatabaseUnavailable(
        f"{database.shown_url} cannot be used: {first_line(error)}",
        why=f"PostgreSQL answers {type(error).__name__}",
        fix="see PostgreSQL's log; Onward goes on when the cause is gone",
    )


class Permits:
    """So many may be inside at once: a semaphore, made of a queue because that one is quick."""

    __slots__ = ("_free",)

    def __init__(self, count: int) -> None:
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(count):
            self._free.put(None)

    def __enter__(self) -> None:
        self._free.get()

    def __exit__(self, *_: object) -> None:
        self._free.put(None)


class Commit:
    """Whether a transaction has come to its COMMIT."""

    is_next = False


@contextlib.contextmanager
def commit_watched(shown_url: str) -> Generator[Commit]:
    """A transaction whose COMMIT found no answer is not begun again: perhaps it took, and then the
    same decision would meet its own doing.
    """
    commit = Commit()
    try:
        yield commit
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        if not commit.is_next or isinstance(error, AGAIN):
            raise
        raise Unknown(
            f"{shown_url} did not answer a COMMIT: {first_line(error)}",
            why="the connection broke; nobody knows whether the transaction took",
            fix="look whether it did before it is repeated",
        ) from error


_CAUSES: tuple[tuple[str, type[DatabaseUnavailable], str, str], ...] = (
    (
        r'database ".*" does not exist',
        TurnedAway,
        "the server answers, and has no database of that name",
        "createdb NAME, or mend the URL: postgresql://user@host/NAME",
    ),
    (
        r'role ".*" does not exist|authentication failed|no pg_hba.conf entry|no password supplied',
        TurnedAway,
        "the server answers, and does not let this user in",
        "mend the user or the password in the URL, or pg_hba.conf",
    ),
    (
        r"could not translate host name|[Nn]ame or service not known|failed to resolve host",
        DatabaseUnavailable,
        "no machine of that name is known here",
        "mend the host in the URL: postgresql://user@HOST/name",
    ),
)
"""What PostgreSQL's words at a failed connection mean; such an error bears no code."""


def _cause(text: str) -> tuple[type[DatabaseUnavailable], str, str]:
    """Why a server cannot be reached, and what helps."""
    for words, kind, why, fix in _CAUSES:
        if re.search(words, text):
            return kind, why, fix
    return (
        DatabaseUnavailable,
        "the server is down, restarting, out of connections, or the network is cut",
        "check that the server answers: psql, pg_isready; a worker tries again until it answers",
    )


class AsyncSide:
    """The connections of one event loop: they cannot be shared with another."""

    def __init__(self, write: Callable[[Sequence[NewJob]], Any]) -> None:
        self.idle: list[tuple[float, psycopg.AsyncConnection]] = []
        self.slots = asyncio.Semaphore(MOST_CONNECTIONS)
        self.coalescer: AsyncCoalescer[NewJob] = AsyncCoalescer(write)

    async def take(self) -> psycopg.AsyncConnection | None:
        """The idle connection that was used last, if there is one that lives. What lies between us
        and the server may have dropped it without a word while it was idle, and then those that
        were idle for longer too: they are not asked one after another.
        """
        found = popped(self.idle)
        if found is None:
            return None
        used, connection = found
        try:
            if time.monotonic() - used < FRESH_SECONDS or await lives(connection):
                return connection
        except BaseException:
            await connection.close()
            raise
        await connection.close()
        await self.close()
        return None

    async def close(self) -> None:
        """Close what is idle."""
        while found := popped(self.idle):
            await found[1].close()

    def give(self, connection: psycopg.AsyncConnection) -> None:
        """It is idle again."""
        self.idle.append((time.monotonic(), connection))


async def lives(connection: psycopg.AsyncConnection) -> bool:
    """Whether a connection answers, and soon."""
    try:
        with deadline(connection, ASK_SECONDS):
            await connection.execute("")
    except psycopg.Error:
        return False
    return True


@contextlib.contextmanager
def deadline(connection: psycopg.AsyncConnection, seconds: float) -> Generator[None]:
    """Break the connection if the block lasts longer: whoever waits for its answer gets an error at
    once, where a cancellation would wait for the server's word first.
    """
    timer = asyncio.get_running_loop().call_later(seconds, sever, connection)
    try:
        yield
    finally:
        timer.cancel()


def sever(connection: psycopg.AsyncConnection | psycopg.Connection) -> None:
    """End the connection's traffic under it, as a reset would."""
    with (
        contextlib.suppress(OSError, psycopg.Error),
        socket.socket(fileno=os.dup(connection.fileno())) as line,
    ):
        line.shutdown(socket.SHUT_RDWR)


class Watch:
    """Breaks the connection of a thread whose answer does not come: who waits for the network
    cannot look at a clock. One thread looks for all, as long as there is something to look for.
    """

    def __init__(self) -> None:
        self._ends: dict[psycopg.Connection, float] = {}
        # A signal handler or a destructor may enqueue in the middle of this very thread's enqueue.
        self._lock = threading.RLock()
        self._there = False

    def over(self, connection: psycopg.Connection, seconds: float) -> Watched:
        """Watch the connection for the time of a block; the seconds count from the last `again`."""
        return Watched(self, connection, seconds)

    def expect(self, connection: psycopg.Connection, seconds: float) -> None:
        """An answer is due within so many seconds."""
        with self._lock:
            self._ends[connection] = time.monotonic() + seconds
            if self._there:
                return
            self._there = True
        threading.Thread(target=self._look, name="onward-watch", daemon=True).start()

    def forget(self, connection: psycopg.Connection) -> None:
        """Nothing is waited for."""
        with self._lock:
            self._ends.pop(connection, None)

    def _look(self) -> None:
        quiet, never = 0, threading.Event()
        while quiet < QUIET_LOOKS:
            never.wait(LOOK_SECONDS)
            with self._lock:
                quiet = 0 if self._ends else quiet + 1
                now = time.monotonic()
                for connection, end in list(self._ends.items()):
                    if now > end:
                        del self._ends[connection]
                        sever(connection)
                if quiet == QUIET_LOOKS:
                    self._there = False


class Watched:
    """A connection that is watched; a class, because each enqueue passes here."""

    __slots__ = ("_connection", "_seconds", "_watch")

    def __init__(self, watch: Watch, connection: psycopg.Connection, seconds: float) -> None:
        self._watch = watch
        self._connection = connection
        self._seconds = seconds

    def again(self) -> None:
        """The next answer is waited for."""
        self._watch.expect(self._connection, self._seconds)

    def __enter__(self) -> Self:
        self.again()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.forget(self._connection)


C = TypeVar("C")


def popped(idle: list[C]) -> C | None:
    """An idle connection, if there is one; in one step, because other threads take them too."""
    try:
        return idle.pop()
    except IndexError:
        return None


def options(url: str) -> dict[str, Any]:
    """Our connection defaults, where the URL does not set its own. Texts are ours to read, whatever
    the encoding of the database: of one that has none the driver would hand us bytes.
    """
    given = conninfo_to_dict(url)
    ours = {name: value for name, value in DEFAULTS.items() if name not in given}
    return ours | {"client_encoding": "utf8"}


def pause(repeat: int) -> float:
    return min(0.001 * 2.0**repeat, 0.1)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
