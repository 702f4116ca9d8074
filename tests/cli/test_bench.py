"""`onward bench` measures beside one's own jobs, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from onward.cli.root import root
from onward.store.database import Database
from onward.store.url import open_database
from tests.store.builders import hand

FIGURES = [
    "enqueue",
    "one commit",
    "enqueue together",
    "enqueue in bulk",
    "drain",
    "pick-up",
    "pick-up, slow",
]


@pytest.fixture
def database(database_url: str) -> Database:
    """The user's own, with nothing in it yet."""
    return open_database(database_url)


def test_every_figure_is_taken_and_nothing_stays_behind(
    database: Database, database_url: str
) -> None:
    before = remains(database)
    words = ["bench", "--jobs", "1000", "--seconds", "0.2", "--json", "--database", database_url]
    result = CliRunner().invoke(root, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert [item["figure"] for item in answer["items"]] == FIGURES
    assert all(item["value"] > 0 for item in answer["items"])
    assert remains(database) == before


def remains(database: Database) -> list[str]:
    """Files beside a SQLite file, schemas of a PostgreSQL database."""
    if database.dialect == "sqlite":
        folder = Path(database.shown_url.removeprefix("sqlite:///")).parent
        return sorted(path.name for path in folder.iterdir() if "bench" in path.name)
    with hand(database) as dba:
        rows = dba.sql("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'onward_bench%'")
    return [row[0] for row in rows]
