"""An operation that meets a world which has just moved on is tried again, and at last given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from onward.errors import DatabaseUnavailable
from onward.job import NewJob
from onward.store import postgres, sqlite, store
from onward.store.database import Again, Database
from onward.store.statements import Op, Statement
from tests.store.builders import new_job

Run = Callable[[Database, Callable[[], Op[Any]]], Any]


def on_loop(database: Database, operation: Callable[[], Op[Any]]) -> Any:
    async def main() -> Any:
        try:
            return await database.arun(operation)
        finally:
            await database.close_loop()

    return asyncio.run(main())


@pytest.fixture(params=["thread", "loop"])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "loop":
        return on_loop
    return lambda database, operation: database.run(operation)


class Overtaken:
    """Enqueues a job, and then finds so many times that it has to look again."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.jobs: list[NewJob] = []

    def __call__(self) -> Op[str]:
        self.jobs.append(new_job())
        yield Statement("enqueue", {"jobs": store.dumps(self.jobs[-1:])}, alone=False)
        if self.left:
            self.left -= 1
            raise Again
        return "at last"


def test_an_operation_that_was_overtaken_is_repeated_and_leaves_nothing_of_its_first_tries(
    database: Database, run: Run
) -> None:
    operation = Overtaken(3)
    assert run(database, operation) == "at last"
    assert len(operation.jobs) == 4
    assert database.read(store.counts)["queued"] == 1
    assert database.read(store.get, operation.jobs[-1].id)


def test_an_operation_that_is_overtaken_for_ever_is_given_up(
    database: Database, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller hears of it in our own words, and the database is free for the next."""
    for adapter in (postgres, sqlite):
        monkeypatch.setattr(adapter, "REPEATS", 5)
    operation = Overtaken(10**6)
    with pytest.raises(DatabaseUnavailable, match="asked 5 times to repeat a write") as caught:
        run(database, operation)
    assert "the same rows" in caught.value.why
    assert len(operation.jobs) == 5
    assert database.read(store.counts)["queued"] == 0
    assert run(database, Overtaken(0)) == "at last"
