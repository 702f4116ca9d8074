"""Hints that a SQLite file has changed, from whichever process."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

from onward.store.sqlite_driver import Connection

if TYPE_CHECKING:
    from onward.store.sqlite import SqliteDatabase

WATCH_SECONDS = 0.002
"""How often an idle listener looks whether another process has committed."""


class SqliteWakeup:
    """Notices commits of any process: the database's data version changes."""

    lane: tuple[str, int] | None = None

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database
        self._lock = threading.Lock()
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
        with self._lock:
            fresh = self._connection is None
            try:
                connection = self._connection = self._connection or self._database.open_ready()
                seen, self._seen = self._seen, connection.rows("PRAGMA data_version")[0][0]
            except self._database.driver.errors as error:
                self._stop()
                raise self._database.translate(error) from error
        return seen is not None and (fresh or bool(seen != self._seen))

    async def close(self) -> None:
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def pause(self) -> None:
        """Before a fork: close, and wait."""
        self._lock.acquire()
        self._stop()

    def resume(self) -> None:
        """After it: what was missed meanwhile counts as a hint."""
        self._lock.release()
