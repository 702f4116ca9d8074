"""Fixtures that every test may use: fresh databases, and PostgreSQL servers to be rough with."""

import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support import postgres
from tests.support.postgres import PrivatePostgres
from tests.support.turns import TurnDatabase


def pytest_configure(config: pytest.Config) -> None:
    """Give the processes that tests start a place for their bytecode where the environment has
    forbidden the usual one: there are hundreds, and each would compile everything anew.
    """
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        os.environ["PYTHONPYCACHEPREFIX"] = str(config.rootpath / ".pytest_cache/bytecode")


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


@pytest.fixture(scope="session")
def rough_server() -> Iterator[PrivatePostgres]:
    """The server of `private_postgres`: to make one takes seconds."""
    server = PrivatePostgres()
    yield server
    server.close()


@pytest.fixture(scope="module")
def private_postgres(rough_server: PrivatePostgres) -> Iterator[PrivatePostgres]:
    """A started server to stop, restart and reconfigure; no other run has it. A module finds its
    settings as they were.
    """
    rough_server.start()
    yield rough_server
    rough_server.start()
    rough_server.configure(**dict.fromkeys(rough_server.settings))


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a fresh, empty database: the test runs once on SQLite and once on PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/onward.db"
    url: str = request.getfixturevalue("postgres_database")
    return url


@pytest.fixture(scope="session")
def turns(postgres_url: str) -> Iterator[TurnDatabase]:
    """The database that this run's tests take turns with."""
    database = TurnDatabase(postgres_url)
    yield database
    database.drop()


@pytest.fixture(params=["sqlite", "postgres"])
def ready_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database without a row, which has its tables or gets them on first use."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/onward.db"
    database: TurnDatabase = request.getfixturevalue("turns")
    return database.emptied()


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
