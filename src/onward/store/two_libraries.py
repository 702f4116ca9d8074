"""A warning where two SQLite libraries in one process open one file.

Each library believes that it alone holds the file's POSIX locks, and closing the file in one drops
the locks of the other: then two writers write at once. Onward opens its file with apsw, which has a
library of its own, so `sqlite3.connect` on the same file is a mistake that damages data, silently.
An audit hook (PEP 578) sees it coming, whoever makes it; only what comes after the app was made.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

from onward.store.database import Database

if TYPE_CHECKING:
    from onward.store.sqlite import SqliteDatabase

_watched: weakref.WeakSet[SqliteDatabase] = weakref.WeakSet()
_warned: set[Path] = set()
_hooked = False


def watch(database: Database) -> None:
    """Warn, once a file, when this process opens the database's file with the other library."""
    global _hooked
    if database.dialect != "sqlite" or cast("SqliteDatabase", database).driver.name != "apsw":
        return
    _watched.add(cast("SqliteDatabase", database))
    if not _hooked:
        _hooked = True
        sys.addaudithook(_hook)  # For the rest of the process: a hook cannot be taken away.


def forget(database: Database) -> None:
    """Watch this database no longer: it is closed."""
    _watched.discard(cast("SqliteDatabase", database))


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event == "sqlite3.connect" and _watched:
        path = _path_of(args[0])
        for database in tuple(_watched):
            if path is not None and _is_same(path, database.path):
                _warn(database.path)


def _path_of(target: object) -> Path | None:
    """The file that `sqlite3.connect` was asked for; None: no file."""
    if not isinstance(target, (str, bytes, os.PathLike)):
        return None
    text = os.fsdecode(cast("str | bytes | os.PathLike[str]", target))
    if text.startswith("file:"):
        try:
            text = unquote(urlsplit(text).path)
        except ValueError:  # `file://[x`: the library itself will say what it thinks of it.
            return None
    return Path(text).absolute() if text and "\0" not in text else None


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return one == other  # One of them is not there yet.


def _warn(path: Path) -> None:
    if path in _warned:
        return
    _warned.add(path)
    warnings.warn(
        f"{path} is opened with sqlite3, and Onward opens it with apsw: two SQLite libraries in one"
        " process on one file cancel each other's locks, which damages the file."
        ' Fix: Onward(…, sqlite_driver="sqlite3")',
        RuntimeWarning,
        stacklevel=3,
    )
