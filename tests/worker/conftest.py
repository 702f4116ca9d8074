"""Apps for the tests of workers, and a ledger of what their bodies did. After every test the
database is asked what must always hold, and the ledger whether the rows explain it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from onward import Onward, Settings
from onward.invariants import run_checks
from onward.running import in_job
from onward.task import Task
from tests.support import history, tasks
from tests.support.ledger import VARIABLE, Ledger
from tests.support.workers import QUICK, opened


@pytest.fixture
def app(ready_database_url: str, ledger: Ledger) -> Iterator[Onward]:
    """A fresh app without tasks, for workers embedded in this process."""
    app = Witnessed(ready_database_url, settings=Settings(**QUICK))
    app.database.migrate()
    try:
        yield app
        check_promises(app, ledger)
    finally:
        app.close()


@pytest.fixture
def shop(ready_database_url: str, ledger: Ledger) -> Iterator[Onward]:
    """The app of `tests/support/tasks.py`, for real worker processes."""
    try:
        yield opened(ready_database_url)
        check_promises(tasks.app, ledger)
    finally:
        tasks.app.close()


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Where the tasks of `tests/support/tasks.py`, and those of `app`, write what they do, here and
    in real workers.
    """
    path = tmp_path / "ledger"
    monkeypatch.setenv(VARIABLE, str(path))
    return Ledger(path)


def check_promises(app: Onward, ledger: Ledger) -> None:
    """Every rule that `onward doctor` knows must find nothing, and each run of a body must be one
    attempt of the database.
    """
    broken = [finding for finding in run_checks(app.database) if not finding.holds]
    assert not broken
    found = history.read(app.database, ledger)
    if app.settings.keep_succeeded == 0:  # Retention has taken what was over.
        found = replace(found, bodies=[body for body in found.bodies if body.job in found.jobs])
    wrong = history.problems(found, enqueued=(), born_inside=True)
    assert not wrong, "\n".join(wrong[:20])


class Witnessed(Onward):
    """An app whose bodies write into the ledger when they start and when they end."""

    def _register(self, task: Task[Any, Any]) -> Task[Any, Any]:
        registered = super()._register(task)
        registered.function = witnessed(registered)
        return registered


def witnessed(task: Task[Any, Any]) -> Callable[..., Any]:
    """The task's function, which tells the ledger of each run in a job."""
    body = task.function

    @functools.wraps(body)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if not in_job():
            return body(*args, **kwargs)
        with tasks.noted():
            return body(*args, **kwargs)

    @functools.wraps(body)
    async def on_loop(*args: Any, **kwargs: Any) -> Any:
        if not in_job():
            return await body(*args, **kwargs)
        with tasks.noted():
            return await body(*args, **kwargs)

    return on_loop if task.is_async else plain
