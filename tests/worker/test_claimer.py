"""The claimer alone, on a real database."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from onward import Onward
from onward.job import Job
from onward.store import store
from onward.worker.claimer import Claimer
from tests.store.builders import register


class Watched:
    """A database that notes when somebody looks for lanes, and says when it was done twice."""

    def __init__(self, database: Any, notes: list[str]) -> None:
        self._database = database
        self._notes = notes
        self.twice = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    async def arun(self, op: Any, *args: Any) -> Any:
        if op is store.claim:
            self._notes.append("claim")
        return await self._database.arun(op, *args)

    async def aread(self, op: Any, *args: Any) -> Any:
        if op is store.lanes:
            if "look" in self._notes:
                self.twice.set()
            self._notes.append("look")
        return await self._database.aread(op, *args)


def test_what_was_claimed_begins_before_the_next_look(app: Onward) -> None:
    """A lone job does not wait until the question for the next one is on its way."""
    notes: list[str] = []

    @app.task
    async def lone() -> None: ...

    lone.enqueue()
    database = app.database
    worker = register(database)

    async def body() -> None:
        notes.append("began")

    async def main() -> None:
        bodies: list[asyncio.Task[None]] = []

        def start(jobs: list[Job]) -> None:
            bodies.extend(asyncio.get_running_loop().create_task(body()) for _ in jobs)

        watched = Watched(database, notes)
        claimer = Claimer(
            watched,  # type: ignore[arg-type]
            worker,
            [lone.name],
            {"default": None},
            0.05,
            room=lambda: 10,
            running=lambda _: 0,
            start=start,
        )
        running = asyncio.create_task(claimer.run())
        async with asyncio.timeout(10):
            await watched.twice.wait()
        claimer.stop()
        await running
        await database.close_loop()

    asyncio.run(main())
    assert notes[:4] == ["look", "claim", "began", "look"]


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_a_hint_that_names_a_lane_is_followed_without_a_look(app: Onward, right: bool) -> None:
    """By a worker that has nothing to do: a lone job is picked up by one statement. The look comes
    next, so a hint that leads nowhere costs one statement and hides nothing.
    """
    notes: list[str] = []
    began = asyncio.Event()

    @app.task
    async def lone() -> None: ...

    database = app.database
    worker = register(database)

    def start(jobs: list[Job]) -> None:
        notes.extend("began" for _ in jobs)
        began.set()

    async def main() -> None:
        claimer = Claimer(
            Watched(database, notes),  # type: ignore[arg-type]
            worker,
            [lone.name],
            {"default": None, "other": None},
            60.0,
            room=lambda: 10,
            running=lambda _: 0,
            start=start,
        )
        claimer._pause = 60.0
        running = asyncio.create_task(claimer.run())
        async with asyncio.timeout(10):
            await claimer.idle.wait()
            notes.clear()
            await lone.aenqueue()
            claimer.hear(("default" if right else "other", 0))
            await began.wait()
        claimer.stop()
        await running
        await database.close_loop()

    asyncio.run(main())
    first = ["claim", "began"] if right else ["claim", "look", "claim", "began"]
    assert notes[: len(first)] == first
