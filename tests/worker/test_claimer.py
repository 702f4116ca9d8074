"""The claimer alone, on a real database."""

from __future__ import annotations

import asyncio
from typing import Any

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
    assert notes[:3] == ["look", "began", "look"]
