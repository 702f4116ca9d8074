# mypy: disable-error-code="import-not-found"
# pyright: standard, reportMissingImports=false
"""arq: a hundred jobs at once, no results; its polls are half a second apart."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker, func

from benchmarks.peers.adapters import bodies
from benchmarks.peers.adapters.base import Producer, main

CONCURRENCY = 100


async def nothing(_: object, value: float) -> None:
    bodies.nothing(value)


async def arrive(_: object, value: float) -> None:
    bodies.arrive(value)


async def make(url: str) -> None:
    """There is nothing to make."""


@asynccontextmanager
async def producer(url: str) -> AsyncGenerator[Producer]:
    pool = await create_pool(RedisSettings.from_dsn(url))

    async def one(task: str, value: float) -> None:
        await pool.enqueue_job(task, value)

    yield Producer(one)
    await pool.aclose()


def work(url: str) -> None:
    Worker(
        functions=[func(task, keep_result=0) for task in (nothing, arrive)],
        redis_settings=RedisSettings.from_dsn(url),
        max_jobs=CONCURRENCY,
    ).run()


if __name__ == "__main__":
    main(make, producer, work)
