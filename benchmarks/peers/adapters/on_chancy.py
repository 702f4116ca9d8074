# mypy: disable-error-code="import-not-found,untyped-decorator"
# pyright: standard, reportMissingImports=false
"""Chancy: a thousand jobs at once on its async executor, and a fetch as soon as one has ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from chancy import Chancy, Queue, Worker, job

from benchmarks.peers.adapters import bodies
from benchmarks.peers.adapters.base import Producer, main

CONCURRENCY = 1_000


@job(queue="bench")
async def nothing(*, value: float) -> None:
    bodies.nothing(value)


@job(queue="bench")
async def arrive(*, value: float) -> None:
    bodies.arrive(value)


TASKS: dict[str, Any] = {"nothing": nothing, "arrive": arrive}


def open_chancy(url: str) -> Any:
    log = logging.getLogger("chancy")
    log.setLevel(logging.WARNING)
    return Chancy(url, log=log)


async def make(url: str) -> None:
    async with open_chancy(url) as chancy:
        await chancy.migrate()


@asynccontextmanager
async def producer(url: str) -> AsyncGenerator[Producer]:
    async with open_chancy(url) as chancy:

        async def one(task: str, value: float) -> None:
            await chancy.push(TASKS[task].job.with_kwargs(value=value))

        async def many(values: Sequence[int]) -> None:
            call = TASKS["nothing"].job
            async for _ in chancy.push_many([call.with_kwargs(value=value) for value in values]):
                pass

        yield Producer(one, many)


def work(url: str) -> None:
    asyncio.run(run(url))


async def run(url: str) -> None:
    async with open_chancy(url) as chancy:
        queue = Queue(
            "bench",
            concurrency=CONCURRENCY,
            executor=Chancy.Executor.Async,
            eager_polling=True,
            polling_interval=1,
        )
        await chancy.declare(queue, upsert=True)
        async with Worker(chancy) as worker:
            await worker.wait_for_shutdown()


if __name__ == "__main__":
    main(make, producer, work)
