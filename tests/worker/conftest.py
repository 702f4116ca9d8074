"""Apps for the tests of workers. After every test the database is asked what must always hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from onward import Onward, Settings
from onward.invariants import run_checks
from tests.support import tasks
from tests.support.ledger import VARIABLE, Ledger
from tests.support.workers import QUICK, opened


@pytest.fixture
def app(ready_database_url: str) -> Iterator[Onward]:
    """A fresh app without tasks, for workers embedded in this process."""
    app = Onward(ready_database_url, settings=Settings(**QUICK))
    app.database.migrate()
    try:
        yield app
        check_promises(app)
    finally:
        app.close()


@pytest.fixture
def shop(ready_database_url: str) -> Iterator[Onward]:
    """The app of `tests/support/tasks.py`, for real worker processes."""
    try:
        yield opened(ready_database_url)
        check_promises(tasks.app)
    finally:
        tasks.app.close()


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Where the tasks of `tests/support/tasks.py` write what they do, here and in real workers."""
    path = tmp_path / "ledger"
    monkeypatch.setenv(VARIABLE, str(path))
    return Ledger(path)


def check_promises(app: Onward) -> None:
    """Every rule that `onward doctor` knows must find nothing."""
    broken = [finding for finding in run_checks(app.database) if not finding.holds]
    assert not broken
