# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# pyright: standard, reportMissingImports=false
"""PGQueuer: asyncpg, the worker on uvloop as its own command has it, claims of 500."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from benchmarks.peers.adapters import bodies
from benchmarks.peers.adapters.base import Producer, chunks, main

BATCH = 500


def pack(value: float) -> bytes:
    return json.dumps({"value": value}).encode()


async def make(url: str) -> None:
    link = await asyncpg.connect(url)
    await Queries(AsyncpgDriver(link)).install()
    await link.close()


@asynccontextmanager
async def producer(url: str) -> AsyncGenerator[Producer]:
    link = await asyncpg.connect(url)
    queries = Queries(AsyncpgDriver(link))

    async def one(task: str, value: float) -> None:
        await queries.enqueue(task, pack(value))

    async def many(values: Sequence[int]) -> None:
        for part in chunks(values):
            many = len(part)
            await queries.enqueue(["nothing"] * many, [pack(each) for each in part], [0] * many)

    yield Producer(one, many)
    await link.close()


def work(url: str) -> None:
    logging.disable(logging.INFO)
    uvloop.run(run(url))


async def run(url: str) -> None:
    queue = PgQueuer(AsyncpgDriver(await asyncpg.connect(url)))

    @queue.entrypoint("nothing")
    async def nothing(job: Job) -> None:
        bodies.nothing(**json.loads(job.payload))

    @queue.entrypoint("arrive")
    async def arrive(job: Job) -> None:
        bodies.arrive(**json.loads(job.payload))

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, queue.shutdown.set)
    await queue.run(batch_size=BATCH)


if __name__ == "__main__":
    main(make, producer, work)
