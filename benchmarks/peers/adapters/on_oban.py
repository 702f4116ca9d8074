# mypy: disable-error-code="import-not-found,untyped-decorator"
# pyright: standard, reportMissingImports=false
"""Oban for Python, open-source edition: 200 jobs at once, on uvloop as its own command has it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvloop
from oban import Oban, job
from oban.schema import install

from benchmarks.peers.adapters import bodies
from benchmarks.peers.adapters.base import Producer, chunks, main

LIMIT = 200


@job(queue="default")
async def nothing(value: float) -> None:
    bodies.nothing(value)


@job(queue="default")
async def arrive(value: float) -> None:
    bodies.arrive(value)


TASKS: dict[str, Any] = {"nothing": nothing, "arrive": arrive}


async def make(url: str) -> None:
    pool = await Oban.create_pool(url)
    await install(pool)
    await pool.close()


@asynccontextmanager
async def producer(url: str) -> AsyncGenerator[Producer]:
    pool = await Oban.create_pool(url, min_size=1, max_size=4)
    oban = Oban(pool=pool)
    await oban.start()

    # `nothing.enqueue(value)` would nest the arguments of a function twice.
    async def one(task: str, value: float) -> None:
        await oban.enqueue(TASKS[task].new(value))

    async def many(values: Sequence[int]) -> None:
        for part in chunks(values):
            await oban.enqueue_many(TASKS["nothing"].new(value) for value in part)

    yield Producer(one, many)
    await oban.stop()
    await pool.close()


def work(url: str) -> None:
    logging.disable(logging.INFO)
    uvloop.run(run(url))


async def run(url: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    pool = await Oban.create_pool(url, min_size=1, max_size=10)
    async with Oban(pool=pool, queues={"default": {"limit": LIMIT}}):
        await stop.wait()
    await pool.close()


if __name__ == "__main__":
    main(make, producer, work)
