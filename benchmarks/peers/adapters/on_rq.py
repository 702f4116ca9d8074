# mypy: disable-error-code="import-not-found"
# pyright: standard, reportMissingImports=false
"""RQ: the simple worker, which forks for no job, and no results."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from redis import Redis
from rq import Queue, SimpleWorker

from benchmarks.peers.adapters import bodies
from benchmarks.peers.adapters.base import Producer, chunks, main

TASKS = {"nothing": bodies.nothing, "arrive": bodies.arrive}


async def make(url: str) -> None:
    """There is nothing to make."""


@asynccontextmanager
async def producer(url: str) -> AsyncGenerator[Producer]:
    queue = Queue(connection=Redis.from_url(url))

    async def one(task: str, value: float) -> None:
        queue.enqueue(TASKS[task], value, result_ttl=0)

    async def many(values: Sequence[int]) -> None:
        for part in chunks(values):
            queue.enqueue_many(
                [Queue.prepare_data(bodies.nothing, (value,), result_ttl=0) for value in part]
            )

    yield Producer(one, many)


def work(url: str) -> None:
    link = Redis.from_url(url)
    SimpleWorker([Queue(connection=link)], connection=link).work(logging_level="WARNING")


if __name__ == "__main__":
    main(make, producer, work)
