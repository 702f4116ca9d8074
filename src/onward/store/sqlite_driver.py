"""The two ways to open SQLite: apsw, whose bundled library is current, and the standard library's
sqlite3.

Two SQLite libraries in one process on one file cancel each other's POSIX locks. So a file that the
application itself opens with sqlite3 must be driven through sqlite3 here too: `Onward(...,
sqlite_driver="sqlite3")`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from onward.errors import InvalidOption
from onward.store.statements import Rows


class Connection(Protocol):
    """An open connection that commits only when told."""

    def rows(self, text: str, params: Mapping[str, Any] | None = None) -> Rows: ...

    def script(self, text: str) -> None:
        """Run several statements, inside the transaction that is open."""
        ...

    def busy_timeout(self, seconds: float) -> None: ...

    def close(self) -> None: ...


class Driver(Protocol):
    """A SQLite library."""

    name: str
    library: str
    version: str
    errors: tuple[type[BaseException], ...]
    constraint: tuple[type[BaseException], ...]

    def open(self, path: Path, clock: Callable[[], float]) -> Connection: ...

    def code(self, error: BaseException) -> int:
        """SQLite's extended result code of an error; 0 where it has none."""
        ...


_MEANING = {
    5: "another process held the write lock for too long (it is stopped, or a long transaction),"
    " or a transaction of your own does that is open here",
    6: "another connection in this process holds a lock",
    8: "the file or its directory is read-only",
    10: "the disk answered with an input/output error",
    11: "the file is damaged",
    13: "the disk is full",
    14: "the file or its directory cannot be opened",
    26: "the file is not a SQLite database",
}


def driver(name: str) -> Driver:
    """The driver of this name: `apsw` or `sqlite3`."""
    if name == "apsw":
        from onward.store.sqlite_apsw import ApswDriver

        return ApswDriver()
    if name == "sqlite3":
        from onward.store.sqlite_stdlib import StdlibDriver

        return StdlibDriver()
    raise InvalidOption(
        f"there is no SQLite driver {name!r}",
        why="SQLite is opened by apsw (bundles a current library) or by Python's sqlite3",
        fix='sqlite_driver="apsw", or "sqlite3" where the application uses sqlite3 on the file',
    )


BUSY = 5
"""The kind of the result code that says: another connection holds the lock just now."""

SAME_KEY = frozenset({1555, 2067})
"""The extended result codes of a row whose primary key, or another unique key, is there already."""


def kind(code: int) -> int:
    """Codes are extended: the low byte is the kind."""
    return code & 0xFF


def meaning(code: int) -> str:
    """What a result code of SQLite means to the user."""
    return _MEANING.get(kind(code), "SQLite reports an error")


def remedy(code: int) -> str:
    """What the user can do about it."""
    if kind(code) == BUSY:
        return (
            "if the lock is your own transaction's, commit before you enqueue, or enqueue in it:"
            " task.using(connection=…).enqueue(…); else end the process that holds it (fuser FILE)"
        )
    return "check the file, its directory's permissions and the space on its disk"
