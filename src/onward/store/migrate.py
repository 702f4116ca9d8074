"""Migrations: numbered SQL files, each applied once and in order, never edited after they have
landed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from onward.errors import SchemaMissing
from onward.store.options import options_of

if TYPE_CHECKING:
    from onward.store.database import Database


class Migration(NamedTuple):
    version: int
    name: str
    text: str


@cache
def migrations(dialect: str) -> tuple[Migration, ...]:
    """All migrations of a dialect, in order."""
    folder = Path(__file__).parent / "migrations" / dialect
    return tuple(
        sorted(
            Migration(int(match[1]), match[2], file.read_text(encoding="utf-8"))
            for file in folder.iterdir()
            if (match := re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name))
        )
    )


_FUNCTION = re.compile(
    r"^CREATE (?:OR REPLACE )?FUNCTION onward\.(\w+)\(.*?;$(?=\n\n|\n?\Z)", re.MULTILINE | re.DOTALL
)


@cache
def functions() -> Mapping[str, str]:
    """The functions of PostgreSQL's schema by name, each as the last migration that makes it
    says.
    """
    return {
        match[1]: match[0]
        for migration in migrations("postgres")
        for match in _FUNCTION.finditer(migration.text)
    }


def newest(dialect: str) -> int:
    """The schema version that this code is written for."""
    return migrations(dialect)[-1].version


def missing(dialect: str, applied: int) -> list[Migration]:
    """The migrations that a database still needs."""
    return [migration for migration in migrations(dialect) if migration.version > applied]


def check_version(database: Database, applied: int) -> None:
    """Refuse a database whose schema this code does not know.

    Args:
        database: which one.
        applied: the newest migration in it; 0 when there is none.

    Raises:
        SchemaMissing: it has none, or an older or newer one.
    """
    wanted = newest(database.dialect)
    if applied == wanted:
        return
    place = f" (in {database.schema})" if database.schema else ""
    found = f"{database.shown_url}{place} has Onward's schema {applied}"
    if applied > wanted:
        raise SchemaMissing(
            f"{found}; this version of Onward knows {wanted}",
            why="a newer version of Onward has migrated the database",
            fix="upgrade the onward package here",
        )
    if applied == 0:
        raise schema_missing(database)
    raise SchemaMissing(
        f"{found}; this version needs {wanted}",
        why=ONLY_WHEN_TOLD,
        fix=f"onward db migrate {options_of(database)}",
    )


ONLY_WHEN_TOLD = "tables are created and changed only when you say so"


def schema_missing(database: Database) -> SchemaMissing:
    """A database without Onward's tables, as an error."""
    return SchemaMissing(
        f"{database.shown_url} has no Onward schema{named(database)}",
        why=ONLY_WHEN_TOLD,
        fix=f"onward db init {options_of(database)}",
    )


def named(database: Database) -> str:
    """Which schema was looked for; nothing on SQLite, which has one."""
    return f" named {database.schema}" if database.schema else ""
