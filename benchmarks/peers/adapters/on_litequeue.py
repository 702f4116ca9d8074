# mypy: disable-error-code="import-not-found"
# pyright: standard, reportMissingImports=false
"""litequeue: a queue without a worker, so the loop is here; one thread, which is the fastest."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from litequeue import LiteQueue

from benchmarks.peers.adapters import bodies
from benchmarks.peers.adapters.base import Producer, main

TASKS = {"nothing": bodies.nothing, "arrive": bodies.arrive}
LOOK = 0.01


def open_queue(url: str) -> Any:
    return LiteQueue(url.removeprefix("sqlite:///"), timeout=30)


async def make(url: str) -> None:
    open_queue(url)


@asynccontextmanager
async def producer(url: str) -> AsyncGenerator[Producer]:
    queue = open_queue(url)

    async def one(task: str, value: float) -> None:
        queue.put(json.dumps([task, value]))

    async def many(values: Sequence[int]) -> None:
        with queue.transaction():
            for value in values:
                queue.put(json.dumps(["nothing", value]))

    yield Producer(one, many)


def work(url: str) -> None:
    queue = open_queue(url)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    while not stop.is_set():
        message = queue.pop()
        if message is None:
            stop.wait(LOOK)
            continue
        task, value = json.loads(message.data)
        TASKS[task](value)
        queue.done(message.message_id, claim_id=message.claim_id)


if __name__ == "__main__":
    main(make, producer, work)
