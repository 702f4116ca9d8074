"""From a command line to an open database and to whole ids. Commands that read create nothing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import click

from onward.cli.options import Place
from onward.cli.values import one_line
from onward.errors import DatabaseUnavailable, JobNotFound, OnwardError
from onward.lifecycle import JobState
from onward.store import store
from onward.store.database import Database
from onward.store.migrate import check_version
from onward.store.options import options_of
from onward.store.url import open_database


@contextlib.contextmanager
def opened(place: Place, *, create: bool = False) -> Generator[Database]:
    """The database of a command, closed afterwards.

    Args:
        place: what the command line says.
        create: whether a file or schema that is not there may be made.

    Raises:
        DatabaseUnavailable, SchemaMissing: there is nothing to read, or it does not answer.
    """
    database = named(place)
    try:
        if not create:
            _check_there(database)
        yield database
    finally:
        database.close()


def named(place: Place) -> Database:
    """The database that the command line names; nothing is opened yet."""
    place.check_schema(place.chosen)
    return open_database(place.chosen, schema=place.schema)


def file_of(database: Database) -> Path | None:
    """The file of a SQLite database; None on a server."""
    return getattr(database, "path", None)


def _check_there(database: Database) -> None:
    path = file_of(database)
    if path is not None and not path.exists():
        raise DatabaseUnavailable(
            f"there is no database file {path}",
            why="looking creates nothing; an app or a worker creates the file on first use",
            fix="name the right one with --database or ONWARD_URL, or: "
            f"onward db init {options_of(database)}",
        )
    check_version(database, schema_inside(database))


def schema_inside(database: Database) -> int:
    """The schema version of a database, of which nothing is touched; 0: none, or no database."""
    path = file_of(database)
    if path is None:
        return database.schema_version()
    return _version_inside(path) if path.exists() else 0


def _version_inside(path: Path) -> int:
    """The schema version of a file, read without touching it: it may be somebody else's."""
    import apsw

    version: Any
    try:
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            version = connection.execute("SELECT max(version) FROM onward_migration").get  # pyright: ignore[reportUnknownMemberType]
        finally:
            connection.close()
    except apsw.SQLError:  # No such table.
        return 0
    except apsw.Error as error:
        raise DatabaseUnavailable(
            f"sqlite:///{path} cannot be read: {error}",
            why="the file is damaged, is no SQLite database, or may not be read",
            fix="check the file and its permissions",
        ) from error
    return int(version or 0)


# --- ids ------------------------------------------------------------------------------------------


def whole_ids(database: Database, given: Sequence[str]) -> list[str]:
    """The ids that a user typed, each by a prefix that only it has; once each."""
    return list(dict.fromkeys(whole_id(database, text) for text in given))


def whole_id(database: Database, given: str) -> str:
    """The one id that begins with what a user typed.

    Raises:
        JobNotFound: no id begins so.
        click.BadParameter: several do, or no id can.
    """
    digits = given.strip().lower().replace("-", "")
    if not re.fullmatch(r"[0-9a-f]{1,32}", digits):
        raise click.BadParameter(
            f"{one_line(given, 60)!r} is no id and no beginning of one: ids are hexadecimal."
        )
    low, high = _dashed(digits.ljust(32, "0")), _dashed(digits.ljust(32, "f"))
    rows = database.read(store.read, "ids_like", low=low, high=high)
    # A job that ends between two reads may be seen in both tables; it is one id all the same.
    found = sorted({str(row[0]) for row in rows})
    if not found:
        raise JobNotFound(
            f"no job has an id that begins with {given}"
            if len(digits) < 32
            else f"no job has the id {given}",
            why="it was never enqueued here, or it ended and was pruned",
            fix="onward job list shows what there is; onward status names the database",
        )
    if len(found) > 1:
        raise click.BadParameter(
            f"{given} is not unique: " + ", ".join(found) + (", …" if len(found) == 5 else "")
        )
    return found[0]


def _dashed(digits: str) -> str:
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def check_sound(database: Database, id: str) -> None:
    """Refuse to move a job whose stored state is none that Onward knows."""
    rows: list[tuple[Any, ...]] = database.read(store.read, "job", id=id)
    if rows and rows[0][4] not in set(JobState):
        raise OnwardError(
            f"job {id} is damaged: its state is {one_line(rows[0][4], 60)!r}",
            why="somebody changed the row past Onward's guards",
            fix="onward doctor lists what is damaged",
        )
