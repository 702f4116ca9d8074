"""An app on each database, with a few tasks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onward import Onward
from onward.task import AsyncTask, SyncTask
from tests.front.shop import Address
from tests.support.turns import TurnDatabase


@pytest.fixture(scope="session")
def callers_turns(postgres_url: str) -> Iterator[TurnDatabase]:
    """The database that these tests take turns with; callers have a table of their own in it."""
    database = TurnDatabase(postgres_url, extra="note")
    yield database
    database.drop()


@pytest.fixture
def migrated_postgres(callers_turns: TurnDatabase) -> str:
    """The URL of a PostgreSQL database with the schema, and not a row, in it."""
    return callers_turns.emptied()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a SQLite file that is not there yet."""
    return f"sqlite:///{tmp_path}/onward.db"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database with the schema in it, or where it is made on first use."""
    name = "sqlite_url" if request.param == "sqlite" else "migrated_postgres"
    found: str = request.getfixturevalue(name)
    return found


@pytest.fixture
def app(url: str) -> Iterator[Onward]:
    """An app without tasks; the test runs once on each database."""
    made = Onward(url)
    yield made
    made.close()


@pytest.fixture
def idle_app() -> Onward:
    """An app whose database is never opened."""
    return Onward("sqlite:///never-opened.db")


@pytest.fixture
def send(app: Onward) -> SyncTask[..., int]:
    """A task that anything can be sent to."""

    @app.task(name="shop.send")
    def send(what: Any = None, to: str = "you") -> int:
        return len(to)

    return send


@pytest.fixture
def ship(app: Onward) -> AsyncTask[..., str]:
    """A task that is particular about its arguments."""

    @app.task(name="shop.ship", queue="parcels")
    async def ship(order: int, where: Address, *, express: bool = False) -> str:
        return f"{order} to {where.city}"

    return ship
