"""SQLite through apsw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import apsw

from onward.store.sqlite_driver import Connection
from onward.store.statements import Rows


class ApswConnection:
    def __init__(self, connection: Any) -> None:
        self._connection = connection  # apsw's own types name some that no checker knows

    def rows(self, text: str, params: Mapping[str, Any] | None = None) -> Rows:
        rows: Rows = self._connection.execute(text, dict(params) if params else None).fetchall()
        return rows

    def script(self, text: str) -> None:
        self._connection.execute(text).fetchall()

    def busy_timeout(self, seconds: float) -> None:
        self._connection.set_busy_timeout(int(seconds * 1000))

    def close(self) -> None:
        self._connection.close()


class ApswDriver:
    name = "apsw"
    library = f"apsw {apsw.apsw_version()}"
    version = apsw.sqlite_lib_version()
    errors: tuple[type[BaseException], ...] = (apsw.Error,)
    constraint: tuple[type[BaseException], ...] = (
        apsw.ConstraintError,
        apsw.MismatchError,
        apsw.TooBigError,
    )

    def open(self, path: Path, clock: Callable[[], float]) -> Connection:
        connection: Any = apsw.Connection(str(path))
        connection.create_scalar_function("onward_clock", clock, 0, deterministic=True)
        # One plan a statement, whatever it is given: a library with STAT4 would else prepare it
        # anew each time that other values are bound.
        connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        return ApswConnection(connection)

    def code(self, error: BaseException) -> int:
        return int(getattr(error, "extendedresult", 0))
