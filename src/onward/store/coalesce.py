"""Group commit for callers: whoever asks while a write is under way shares the next one.

No timer and no thread of its own: a write starts at once when none is under way. A batch that the
database refuses is cut in two until the one bad row is found; its caller gets the error, its
neighbours are written.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Generic, NamedTuple, TypeVar

from onward.errors import DatabaseError, DatabaseUnavailable
from onward.store import portions
from onward.store.database import Refused, halves
from onward.store.portions import Carrier

T = TypeVar("T", bound=Carrier)
D = TypeVar("D")

MOST_PER_WRITE = 1_000


class Entry(NamedTuple, Generic[T, D]):
    """What one caller brings: its items, how much text they carry, and where it hears of them."""

    items: Sequence[T]
    text: int
    done: D


class Coalescer(Generic[T]):
    """For threads: the first to get the lock writes for all who wait; who finds it free and nobody
    waiting has only its own to write.

    Args:
        write: writes a batch durably, or raises.
    """

    def __init__(self, write: Callable[[Sequence[T]], None]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._waiting: list[Entry[T, Future[None]]] = []
        self._by: int | None = None  # The thread that writes.

    def write(self, items: Sequence[T]) -> None:
        """Write the items; returns when they are durable."""
        if self._by == threading.get_ident():
            # A signal handler or a destructor came in the middle of a write of this very thread.
            return self._write(items)
        if not self._waiting and self._lock.acquire(blocking=False):
            try:
                self._by = threading.get_ident()
                return self._write(items)
            finally:
                self._by = None
                self._lock.release()
        done: Future[None] = Future()
        entry = Entry(items, portions.text_of(items), done)
        self._waiting.append(entry)
        try:
            with self._lock, self._writing():
                # More may stand before us than one write takes.
                while self._waiting and not done.done():
                    self._flush(_take(self._waiting))
        except BaseException:  # Nobody waits for it any more, so nobody may write it later.
            with contextlib.suppress(ValueError):
                self._waiting.remove(entry)
            raise
        done.result(0)

    @contextlib.contextmanager
    def _writing(self) -> Generator[None]:
        self._by = threading.get_ident()
        try:
            yield
        finally:
            self._by = None

    def _flush(self, batch: Sequence[Entry[T, Future[None]]]) -> None:
        try:
            self._write([item for entry in batch for item in entry.items])
        except Exception as error:
            if len(batch) > 1 and _may_be_one_row(error):
                self._bisect(batch)
                return
            for entry in batch:
                entry.done.set_exception(error)
        except BaseException:
            _interrupt(batch)
            raise
        else:
            for entry in batch:
                entry.done.set_result(None)

    def _bisect(self, batch: Sequence[Entry[T, Future[None]]]) -> None:
        try:
            for half in halves(batch):
                self._flush(half)
        except BaseException:
            _interrupt(batch)
            raise


class AsyncCoalescer(Generic[T]):
    """For one event loop: a task writes as long as somebody waits.

    Args:
        write: writes a batch durably, or raises.
    """

    def __init__(self, write: Callable[[Sequence[T]], Awaitable[None]]) -> None:
        self._write = write
        self._waiting: list[Entry[T, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def write(self, items: Sequence[T]) -> None:
        """Write the items; returns when they are durable. A caller that is cancelled leaves its
        items to be written.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(Entry(items, portions.text_of(items), done))
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        await done

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._flush(_take(self._waiting))
        except BaseException:
            _interrupt(self._waiting)
            self._waiting = []
            raise
        finally:
            self._task = None

    async def _flush(self, batch: Sequence[Entry[T, asyncio.Future[None]]]) -> None:
        try:
            await self._write([item for entry in batch for item in entry.items])
        except Exception as error:
            if len(batch) > 1 and _may_be_one_row(error):
                await self._bisect(batch)
                return
            for entry in batch:
                _settle(entry.done, error)
        except BaseException:
            _interrupt(batch)
            raise
        else:
            for entry in batch:
                _settle(entry.done, None)

    async def _bisect(self, batch: Sequence[Entry[T, asyncio.Future[None]]]) -> None:
        try:
            for half in halves(batch):
                await self._flush(half)
        except BaseException:
            _interrupt(batch)
            raise


def _may_be_one_row(error: Exception) -> bool:
    """Whether the rest of a batch may be written without the row that met this error. Not so if the
    database is away.
    """
    return isinstance(error, Refused) or not isinstance(error, DatabaseError)


def _interrupted() -> DatabaseUnavailable:
    return DatabaseUnavailable(
        "an enqueue was interrupted",
        why="whoever wrote it together with others was stopped; nobody knows whether it took",
        fix="enqueue with an id of your own: then it can be repeated",
    )


def _interrupt(
    batch: Sequence[Entry[T, Future[None]]] | Sequence[Entry[T, asyncio.Future[None]]],
) -> None:
    """Tell everybody who still waits that nobody knows whether it took."""
    for entry in batch:
        if not entry.done.done():
            entry.done.set_exception(_interrupted())


def _take(waiting: list[Entry[T, D]]) -> list[Entry[T, D]]:
    """What waits, up to a limit of rows and one of text; at least one entry."""
    batch: list[Entry[T, D]] = []
    rows = text = 0
    while waiting and (
        not batch
        or (
            rows + len(waiting[0].items) <= MOST_PER_WRITE
            and text + waiting[0].text <= portions.MOST_TEXT
        )
    ):
        batch.append(waiting.pop(0))
        rows += len(batch[-1].items)
        text += batch[-1].text
    return batch


def _settle(done: asyncio.Future[None], error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
