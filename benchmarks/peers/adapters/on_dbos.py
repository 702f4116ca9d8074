# mypy: disable-error-code="import-not-found,untyped-decorator"
# pyright: standard, reportMissingImports=false
"""DBOS: a workflow for each job, on a queue without a limit; its polls are a second apart.

It has no call that enqueues many. To fill the queue, single enqueues share transactions.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from dbos import DBOS, DBOSClient

from benchmarks.peers.adapters import bodies
from benchmarks.peers.adapters.base import Producer, chunks, main

QUEUE = "bench"
CONNECTIONS = 40


@DBOS.workflow(name="nothing")
async def nothing(value: float) -> None:
    bodies.nothing(value)


@DBOS.workflow(name="arrive")
async def arrive(value: float) -> None:
    bodies.arrive(value)


def launch(url: str) -> None:
    DBOS(
        config={
            "name": "bench",
            "system_database_url": url,
            "sys_db_pool_size": CONNECTIONS,
            "application_version": "1",
            "log_level": "ERROR",
        }
    )
    DBOS.launch()
    DBOS.register_queue(QUEUE)


async def make(url: str) -> None:
    await asyncio.to_thread(_make, url)


def _make(url: str) -> None:
    launch(url)
    DBOS.destroy()


@asynccontextmanager
async def producer(url: str) -> AsyncGenerator[Producer]:
    client = DBOSClient(system_database_url=url)

    async def one(task: str, value: float) -> None:
        client.enqueue({"queue_name": QUEUE, "workflow_name": task}, value)

    async def many(values: Sequence[int]) -> None:
        options = {"queue_name": QUEUE, "workflow_name": "nothing"}
        for part in chunks(values):
            with client._sys_db.engine.begin() as link:
                for value in part:
                    client.enqueue_in_transaction(link, options, value)

    yield Producer(one, many)
    client.destroy()


def work(url: str) -> None:
    launch(url)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    stop.wait()
    os._exit(0)


if __name__ == "__main__":
    main(make, producer, work)
