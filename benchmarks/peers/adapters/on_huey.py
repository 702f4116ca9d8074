# mypy: disable-error-code="import-not-found"
# pyright: standard, reportMissingImports=false
"""huey on SQLite: one worker thread, which is faster than several; the durability it comes with."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from huey import SqliteHuey

from benchmarks.peers.adapters import bodies
from benchmarks.peers.adapters.base import Producer, main


def open_huey(url: str) -> tuple[Any, dict[str, Any]]:
    """The app and its tasks."""
    app = SqliteHuey("bench", filename=url.removeprefix("sqlite:///"))
    return app, {"nothing": app.task()(bodies.nothing), "arrive": app.task()(bodies.arrive)}


async def make(url: str) -> None:
    open_huey(url)


@asynccontextmanager
async def producer(url: str) -> AsyncGenerator[Producer]:
    _, tasks = open_huey(url)

    async def one(task: str, value: float) -> None:
        tasks[task](value)

    yield Producer(one)


def work(url: str) -> None:
    app, _ = open_huey(url)
    app.create_consumer(workers=1, worker_type="thread", periodic=False).run()


if __name__ == "__main__":
    main(make, producer, work)
