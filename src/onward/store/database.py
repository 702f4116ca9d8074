"""The port: what a database must be able to do for Onward, and nothing else.

An operation is a generator of statements, so one narrow pair of runners (sync and async) is enough
for all of them. Whatever goes wrong below comes up as one of few errors: `DatabaseUnavailable`
(nobody knows whether it took), `Refused` (the data will never be taken), `SchemaMissing`;
everything that only asks to be repeated is repeated here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from onward.errors import DatabaseError, DatabaseUnavailable
from onward.job import NewJob
from onward.store.statements import Op

T = TypeVar("T")
P = ParamSpec("P")


class Again(Exception):
    """Raised inside an operation: roll back and run it again, the world has just moved on."""


class Refused(DatabaseError):
    """The database refuses this data or this move; repeating it cannot help."""

    code = "OW305"


class Duplicate(Refused):
    """A row with this id is there already."""

    code = "OW306"


class Unknown(DatabaseUnavailable):
    """A COMMIT found no answer: nobody knows whether its transaction took."""


class TurnedAway(DatabaseUnavailable):
    """The server answers and lets nobody in by this URL: waiting does not mend that."""


class Wakeup(Protocol):
    """A hint that something may have been enqueued. It may come too often or be lost: the poll is
    the truth.
    """

    lane: tuple[str, int] | None
    """The queue and priority that the last hint was about, if it said so."""

    async def wait(self, timeout: float) -> bool:
        """Wait for a hint, at most `timeout` seconds; returns whether one came."""
        ...

    async def close(self) -> None: ...


class Database(Protocol):
    """One database with Onward's tables in it."""

    dialect: str
    shown_url: str
    schema: str
    """PostgreSQL's schema of the tables; empty on SQLite."""

    notifies: bool
    """Whether a wake-up costs the enqueuer something, so that workers should say when they want
    none.
    """

    local: bool
    """Whether all its workers are on one machine: when one of them cannot write to it, none can."""

    def run(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Carry out an operation in one transaction, and return when it is durable."""
        ...

    async def arun(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T: ...

    def read(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Carry out an operation that only reads."""
        ...

    async def aread(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T: ...

    def enqueue(self, jobs: Sequence[NewJob]) -> None:
        """Write new jobs and wake an idle worker. Concurrent calls share a commit."""
        ...

    async def aenqueue(self, jobs: Sequence[NewJob]) -> None: ...

    def lock_folder(self) -> Path | None:
        """Where worker processes of this machine keep lock files as proof of life; None: no such
        place is shared.
        """
        ...

    async def wakeup(self) -> Wakeup:
        """Start to listen for enqueues, from here or from other processes."""
        ...

    def migrate(self) -> list[str]:
        """Bring the schema up to date; returns the names of the migrations that were applied."""
        ...

    def schema_version(self) -> int:
        """The newest migration in the database; 0 when there is none."""
        ...

    def destroy(self) -> None:
        """Remove the file, or the schema, with every job in it: only for a place that was made to
        be thrown away.
        """
        ...

    def compact(self) -> bool:
        """Give the space of rows that are gone to new ones, or back to the disk; returns whether
        that is done, or waits for a reader.
        """
        ...

    def facts(self) -> dict[str, Any]:
        """Versions and settings that decide about safety and speed."""
        ...

    def close(self) -> None: ...

    async def aclose(self) -> None: ...

    async def close_loop(self) -> None:
        """Close the connections that belong to the running loop; those of threads and other loops
        stay.
        """
        ...


def halves(batch: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """A batch cut in two, to find the one bad row that makes all of it fail."""
    middle = len(batch) // 2
    return batch[:middle], batch[middle:]
