"""What every test of crashes has: a ledger, and the app on a fresh database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onward.app import Onward
from tests.support.ledger import VARIABLE, Ledger
from tests.support.workers import opened


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """The witness: bodies write into it, and no part of Onward does."""
    path = tmp_path / "ledger"
    monkeypatch.setenv(VARIABLE, str(path))
    return Ledger(path)


@pytest.fixture
def database_url(ready_database_url: str) -> str:
    """The URL of a database without a row; each test runs once on each kind."""
    return ready_database_url


Open = Callable[..., Onward]


@pytest.fixture
def open_app(database_url: str) -> Iterator[Open]:
    """Opens the app of the tests' tasks on this test's database, with settings of the test's."""
    found: list[Onward] = []

    def open_it(**settings: Any) -> Onward:
        found.append(opened(database_url, **settings))
        return found[-1]

    yield open_it
    for app in found:
        app.close()


@pytest.fixture
def app(open_app: Open) -> Onward:
    """The same with the tests' usual settings."""
    return open_app()
