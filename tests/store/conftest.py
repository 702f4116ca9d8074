"""One Database of each kind: SQLite through both of its libraries, and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from onward.store.database import Database
from onward.store.url import open_database
from tests.support import postgres, turns

KINDS = ["apsw", "sqlite3", "postgres"]


WIPE = f"""
{turns.WIPE}
CREATE OR REPLACE FUNCTION onward.clock() RETURNS timestamptz LANGUAGE sql STABLE
AS 'SELECT statement_timestamp()';
"""


@pytest.fixture(scope="session")
def shared_postgres(postgres_url: str) -> Iterator[str]:
    """A migrated database that the tests of this run use one after the other."""
    url = postgres.create_database(postgres_url)
    with closing(open_database(url)) as database:
        database.migrate()
    yield url
    postgres.drop_database(postgres_url, url)


@pytest.fixture
def wiped_postgres(shared_postgres: str) -> str:
    """The URL of a migrated database without a row: wiping is ten times quicker than making
    another.

    A superuser's session is past the triggers, which let no live job be deleted.
    """
    with psycopg.connect(shared_postgres, autocommit=True) as connection:
        connection.execute("SET lock_timeout = '10s'")
        connection.execute(WIPE.encode())
    return shared_postgres


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """An opened, migrated, empty Database; the test runs once on each kind."""
    if request.param == "postgres":
        opened = open_database(request.getfixturevalue("wiped_postgres"))
    else:
        opened = open_database(f"sqlite:///{tmp_path}/onward.db", sqlite_driver=request.param)
        opened.migrate()
    yield opened
    opened.close()


@pytest.fixture(params=["apsw", "sqlite3"])
def sqlite(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A migrated SQLite file, through each of the two libraries."""
    with closing(
        open_database(f"sqlite:///{tmp_path}/onward.db", sqlite_driver=request.param)
    ) as database:
        database.migrate()
        yield database


@pytest.fixture
def pg(wiped_postgres: str) -> Iterator[Database]:
    """A migrated, empty PostgreSQL database."""
    with closing(open_database(wiped_postgres)) as database:
        yield database


@pytest.fixture
def own_postgres(postgres_database: str) -> Iterator[Database]:
    """A migrated PostgreSQL database of the test's own, to change more in it than rows."""
    with closing(open_database(postgres_database)) as database:
        database.migrate()
        yield database
