# mypy: disable-error-code="import-not-found"
# pyright: standard, reportMissingImports=false
"""SAQ on Redis: fifty jobs at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from saq import Job, Queue, Worker

from benchmarks.peers.adapters import bodies
from benchmarks.peers.adapters.base import Producer, main

CONCURRENCY = 50


async def nothing(_: object, *, value: float) -> None:
    bodies.nothing(value)


async def arrive(_: object, *, value: float) -> None:
    bodies.arrive(value)


async def make(url: str) -> None:
    """There is nothing to make."""


@asynccontextmanager
async def producer(url: str) -> AsyncGenerator[Producer]:
    queue = Queue.from_url(url)
    await queue.connect()

    async def one(task: str, value: float) -> None:
        await queue.enqueue(Job(task, kwargs={"value": value}))

    yield Producer(one)
    await queue.disconnect()


def work(url: str) -> None:
    asyncio.run(run(url))


async def run(url: str) -> None:
    worker = Worker(Queue.from_url(url), functions=[nothing, arrive], concurrency=CONCURRENCY)
    await worker.start()


if __name__ == "__main__":
    main(make, producer, work)
