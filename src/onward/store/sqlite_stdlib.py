"""SQLite through Python's sqlite3, for files that the application opens with it too."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onward.store.sqlite_driver import Connection
from onward.store.statements import Rows


class StdlibConnection:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self, text: str, params: Mapping[str, Any] | None = None) -> Rows:
        return self._connection.execute(text, params or {}).fetchall()

    def script(self, text: str) -> None:
        # executescript would commit what is open, so the steps are cut here: a step ends where
        # SQLite says it is complete.
        step = ""
        for line in text.splitlines(keepends=True):
            step += line
            if sqlite3.complete_statement(step):
                self._connection.execute(step)
                step = ""

    def busy_timeout(self, seconds: float) -> None:
        self._connection.execute(f"PRAGMA busy_timeout={int(seconds * 1000)}")

    def close(self) -> None:
        self._connection.close()


class StdlibDriver:
    name = "sqlite3"
    library = "sqlite3"
    version = sqlite3.sqlite_version
    errors: tuple[type[BaseException], ...] = (sqlite3.Error,)
    constraint: tuple[type[BaseException], ...] = (sqlite3.IntegrityError, sqlite3.DataError)

    def open(self, path: Path, clock: Callable[[], float]) -> Connection:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        connection.create_function("onward_clock", 0, clock, deterministic=True)
        if sys.version_info >= (3, 12):  # See `sqlite_apsw`.
            connection.setconfig(sqlite3.SQLITE_DBCONFIG_ENABLE_QPSG)
        return StdlibConnection(connection)

    def code(self, error: BaseException) -> int:
        return int(getattr(error, "sqlite_errorcode", 0))
