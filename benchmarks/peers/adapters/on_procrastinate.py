# mypy: disable-error-code="import-not-found,untyped-decorator"
# pyright: standard, reportMissingImports=false
"""procrastinate: thirty jobs at once; its claims are one job each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from procrastinate import App, PsycopgConnector

from benchmarks.peers.adapters import bodies
from benchmarks.peers.adapters.base import Producer, chunks, main

CONCURRENCY = 30


def open_app(url: str) -> tuple[Any, dict[str, Any]]:
    """The app and its tasks."""
    app = App(connector=PsycopgConnector(conninfo=url, min_size=2, max_size=10))
    return app, {
        "nothing": app.task(name="nothing")(bodies.async_nothing),
        "arrive": app.task(name="arrive")(bodies.async_arrive),
    }


async def make(url: str) -> None:
    app, _ = open_app(url)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()


@asynccontextmanager
async def producer(url: str) -> AsyncGenerator[Producer]:
    app, tasks = open_app(url)

    async def one(task: str, value: float) -> None:
        await tasks[task].defer_async(value=value)

    async def many(values: Sequence[int]) -> None:
        for part in chunks(values):
            await tasks["nothing"].batch_defer_async(*({"value": value} for value in part))

    async with app.open_async():
        yield Producer(one, many)


def work(url: str) -> None:
    logging.disable(logging.INFO)
    asyncio.run(run(url))


async def run(url: str) -> None:
    app, _ = open_app(url)
    async with app.open_async():
        await app.run_worker_async(concurrency=CONCURRENCY)


if __name__ == "__main__":
    main(make, producer, work)
