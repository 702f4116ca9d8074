"""Fixtures that every test may use: fresh databases, and PostgreSQL servers to be rough with."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support import postgres
from tests.support.postgres import PrivatePostgres


@pytest.fixture(scope="session")
def postgres_url() -> str:
    """The URL of the PostgreSQL server that tests share; see `tests.support.postgres`."""
    url = postgres.find_server()
    postgres.drop_leftovers(url)
    return url


@pytest.fixture
def postgres_database(postgres_url: str) -> Iterator[str]:
    """The URL of a fresh, empty database on the shared server."""
    url = postgres.create_database(postgres_url)
    yield url
    postgres.drop_database(postgres_url, url)


@pytest.fixture(scope="module")
def private_postgres() -> Iterator[PrivatePostgres]:
    """A started server of this module's own, to stop, restart and reconfigure."""
    server = PrivatePostgres()
    server.start()
    yield server
    server.close()


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a fresh, empty database: the test runs once on SQLite and once on PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/onward.db"
    url: str = request.getfixturevalue("postgres_database")
    return url


@pytest.fixture(scope="module")
def shared_postgres_database(postgres_url: str) -> Iterator[str]:
    """The URL of a database that a module's tests take turns with."""
    url = postgres.create_database(postgres_url)
    yield url
    postgres.drop_database(postgres_url, url)


@pytest.fixture(params=["sqlite", "postgres"])
def quick_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Like `database_url`, but on PostgreSQL it is one database, emptied of Onward's tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/onward.db"
    url: str = request.getfixturevalue("shared_postgres_database")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS onward CASCADE")
    return url
