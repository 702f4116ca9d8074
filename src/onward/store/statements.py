"""Every SQL statement by name, read from the `.sql` files beside this one.

A statement with its parameters is a value, so whatever can carry out SQL can carry it: our own
connections, sync and async, and the caller's. Text is never built; it is only spelt for the
dialect: the tables' prefix and the placeholders.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Rows = list[tuple[Any, ...]]


class Statement(NamedTuple):
    """One named statement and its parameters. `alone` says that its operation consists of nothing
    else.
    """

    name: str
    params: Mapping[str, Any]
    alone: bool = True


Op = Generator[Statement, Rows, T]
"""An operation of the store: it yields statements, is sent their rows, and returns what it found.
One transaction.
"""


class Twin(NamedTuple):
    """One statement as it is written: why it is so, and its text for each dialect."""

    why: str
    texts: Mapping[str, str]


_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_DIALECT = re.compile(r"^-- (sqlite|postgres|both)$", re.MULTILINE)
_PLACEHOLDER = re.compile(r"(?<![:\w]):([a-z_]+)")


@cache
def twins() -> Mapping[str, Twin]:
    """All statements, in the order of the files."""
    found: dict[str, Twin] = {}
    folder = Path(__file__).parent / "sql"
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if not file.name.endswith(".sql"):
            continue
        parts = _NAME.split(file.read_text(encoding="utf-8"))
        for name, body in zip(parts[1::2], parts[2::2], strict=True):
            if name in found:
                raise ValueError(f"{file.name}: the statement {name} is written twice")
            found[name] = _twin(body)
    return found


def _twin(body: str) -> Twin:
    why, *parts = _DIALECT.split(body)
    texts = dict(zip(parts[0::2], (part.strip() for part in parts[1::2]), strict=True))
    if both := texts.pop("both", None):
        texts |= {"sqlite": both, "postgres": both}
    reason = " ".join(line.removeprefix("-- ") for line in why.strip().splitlines())
    return Twin(reason, texts)


@cache
def sqlite_text(name: str) -> tuple[str, ...]:
    """The statement for SQLite: one text a step, because a driver may carry only one at a time."""
    text = twins()[name].texts["sqlite"].replace("onward.", "onward_")
    return tuple(step.strip() for step in re.split(r";[ \t]*(?:\n|$)", text) if step.strip())


@cache
def postgres_text(name: str, schema: str = "onward") -> str:
    """The statement for PostgreSQL with `:name` placeholders, for tables in `schema`."""
    return in_schema(twins()[name].texts["postgres"], schema)


def in_schema(text: str, schema: str) -> str:
    """The text with its tables in another schema than `onward`."""
    if schema == "onward":
        return text
    return re.sub(r"\bonward\b(?=[.;]|$)", f'"{schema}"', text, flags=re.MULTILINE)


@cache
def psycopg_text(name: str, schema: str) -> bytes:
    """The statement as psycopg wants it: `%(name)s`, and in bytes because it is no literal."""
    text = postgres_text(name, schema).replace("%", "%%")
    return _PLACEHOLDER.sub(r"%(\1)s", text).encode()


@cache
def numbered_text(name: str, schema: str) -> tuple[str, tuple[str, ...]]:
    """The statement as asyncpg wants it, `$1`, and the parameters' names in their order."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    text = _PLACEHOLDER.sub(number, postgres_text(name, schema))
    return text, tuple(names)
