"""The statements themselves: complete, alike in both dialects, accepted by both databases, and
never put together.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import apsw
import psycopg
import pytest

import onward.store
from onward.store.database import Database
from onward.store.migrate import migrations
from onward.store.postgres import PostgresDatabase
from onward.store.sqlite import SqliteDatabase
from onward.store.statements import (
    in_schema,
    numbered_text,
    postgres_text,
    psycopg_text,
    sqlite_text,
    twins,
)
from tests.store.builders import Hand, hand

SOURCES = sorted(Path(onward.store.__file__).parent.glob("*.py"))
PLACEHOLDER = re.compile(r"(?<![:\w]):([a-z_]+)")

every_statement = pytest.mark.parametrize("name", twins())


def placeholders(text: str) -> set[str]:
    return set(PLACEHOLDER.findall(text))


# --- as they are written --------------------------------------------------------------------------


@every_statement
def test_a_statement_has_both_dialects_and_a_reason(name: str) -> None:
    """A DBA reads why it is so before how, whichever database is in front of them."""
    why, texts = twins()[name]
    assert set(texts) == {"sqlite", "postgres"}
    assert len(why) > 10
    assert why.endswith((".", "?"))
    assert not why.startswith("--")


@every_statement
def test_twins_have_the_same_parameters(name: str) -> None:
    """One operation hands the same values to either: a parameter that only one knows is a mistake
    in the other. (Nobody is woken by a write to SQLite: they see it.)
    """
    texts = twins()[name].texts
    only_postgres = {"wake"} if name == "enqueue_one" else set()
    assert set(placeholders(texts["sqlite"])) | only_postgres == set(
        placeholders(texts["postgres"])
    )


@every_statement
def test_a_statement_for_postgres_is_one_statement(name: str) -> None:
    """What follows a semicolon would not run under the extended protocol; SQLite's steps are run
    one by one.
    """
    assert ";" not in postgres_text(name)
    assert sqlite_text(name)
    assert all(";" not in re.sub(r"'[^']*'", "", step) for step in sqlite_text(name))


@every_statement
def test_every_spelling_says_the_same(name: str) -> None:
    """psycopg's and asyncpg's placeholders are those of the file, each with its name, in its
    place.
    """
    text = postgres_text(name)
    assert psycopg_text(name, "onward").decode() % {p: f":{p}" for p in placeholders(text)} == text
    numbered, names = numbered_text(name, "onward")
    assert set(names) == placeholders(text)
    back = re.sub(r"\$(\d+)", lambda match: f":{names[int(match[1]) - 1]}", numbered)
    assert back == text


@every_statement
def test_another_schema_leaves_no_trace_of_the_first(name: str) -> None:
    """With a schema of its own, an app touches no table of the default one."""
    text = postgres_text(name, "own_one")
    assert not re.search(r"\bonward\.", text)
    assert text.count('"own_one".') == len(re.findall(r"\bonward\.", postgres_text(name)))


def test_another_schema_leaves_the_words_for_people_alone() -> None:
    """Only tables and functions move: a message that begins with our name keeps it."""
    assert in_schema("CREATE SCHEMA onward;\n-- onward lifecycle\n'onward: no'", "x") == (
        "CREATE SCHEMA \"x\";\n-- onward lifecycle\n'onward: no'"
    )


# --- as the databases read them -------------------------------------------------------------------


@pytest.fixture(scope="module", params=["apsw", "sqlite3"])
def sqlite_hand(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hand]:
    """A bare connection to a migrated file, which knows the clock; once for all statements."""
    from onward.store.url import open_database

    path = tmp_path_factory.mktemp("statements") / "onward.db"
    with closing(open_database(f"sqlite:///{path}", sqlite_driver=request.param)) as database:
        database.migrate()
        assert isinstance(database, SqliteDatabase)
        with hand(database) as dba:
            if isinstance(dba.connection, apsw.Connection):
                dba.connection.create_scalar_function("onward_clock", lambda *_: 0.0, 0)
            else:
                dba.connection.create_function("onward_clock", 0, lambda: 0.0)
            yield dba


@every_statement
def test_sqlite_accepts_the_statement(sqlite_hand: Hand, name: str) -> None:
    """Prepared against today's schema: every table, column and function is there, in both
    libraries.
    """
    for step in sqlite_text(name):
        values = dict.fromkeys(placeholders(step))
        assert sqlite_hand.connection.execute(f"EXPLAIN {step}", values).fetchall()


@every_statement
def test_postgres_accepts_the_statement(pg: Database, name: str) -> None:
    """Prepared with untyped parameters, as asyncpg has them: each type can be told from where it
    stands.
    """
    assert isinstance(pg, PostgresDatabase)
    text, names = numbered_text(name, pg.schema)
    with psycopg.connect(pg.url, autocommit=True) as connection:
        connection.execute(f"PREPARE this AS {text}".encode())
        row = connection.execute(
            "SELECT parameter_types::text[] FROM pg_prepared_statements WHERE name = 'this'"
        ).fetchone()
    assert row is not None
    assert len(row[0]) == len(names)


@every_statement
def test_postgres_accepts_the_statement_in_another_schema(
    other_schema: psycopg.Connection, name: str
) -> None:
    """The text that is spelt for another schema fits the tables that were migrated there."""
    text, _ = numbered_text(name, "own_one")
    other_schema.execute(f"PREPARE this AS {text}".encode())
    other_schema.execute("DEALLOCATE this")


@pytest.fixture(scope="module")
def other_schema(shared_postgres: str) -> Iterator[psycopg.Connection]:
    from onward.store.url import open_database

    with closing(open_database(shared_postgres, schema="own_one")) as database:
        database.migrate()
    with psycopg.connect(shared_postgres, autocommit=True) as connection:
        yield connection
        connection.execute("DROP SCHEMA own_one CASCADE")


# --- as the code uses them ------------------------------------------------------------------------


@cache
def names_in_code() -> set[str]:
    """The first argument of every `Statement(…)`, and of every `read(…)` of a named one."""
    found: set[str] = set()
    for source in Path(onward.store.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


@every_statement
def test_a_statement_is_used(name: str) -> None:
    """SQL that nobody runs is SQL that nobody tests."""
    if Path(onward.store.__file__).parents[1].joinpath("app.py").exists():
        assert name in names_in_code() or name.startswith("check_")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_no_sql_is_put_together_from_pieces(source: Path) -> None:
    """A statement with a value in its text is an injection in waiting, and a text that no DBA can
    look up.
    """
    built: list[str] = []
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
            )
        elif isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant):
            text = str(node.left.value)
        else:
            continue
        if re.search(r"\b(SELECT|INSERT INTO|UPDATE|DELETE FROM|VALUES|WHERE)\b", text):
            built.append(text)
    assert built == []


NOW = "-- name: now\n-- Why.\n-- both\nSELECT 1\n"


def test_sql_is_ascii() -> None:
    """A database of any encoding takes it, with its comments."""
    texts = [text for twin in twins().values() for text in twin.texts.values()]
    texts += [each.text for dialect in ("sqlite", "postgres") for each in migrations(dialect)]
    assert all(text.isascii() for text in texts)


def test_only_files_of_sql_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An editor's copy beside a file is no second one, and a picture is no text."""
    folder = tmp_path / "sql"
    folder.mkdir()
    (folder / "a.sql").write_text(NOW)
    (folder / "a.sql~").write_text(NOW)
    (folder / ".picture").write_bytes(b"\xff\xfe")
    (folder / "cache").mkdir()
    monkeypatch.setattr("onward.store.statements.__file__", str(tmp_path / "statements.py"))
    assert list(twins.__wrapped__()) == ["now"]


def test_a_statement_that_is_written_twice_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second would silently win over the first."""
    folder = tmp_path / "sql"
    folder.mkdir()
    (folder / "a.sql").write_text(NOW)
    (folder / "b.sql").write_text(NOW)
    monkeypatch.setattr("onward.store.statements.__file__", str(tmp_path / "statements.py"))
    with pytest.raises(ValueError, match=r"b\.sql: the statement now is written twice"):
        twins.__wrapped__()
