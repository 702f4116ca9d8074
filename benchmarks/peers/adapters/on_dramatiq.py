# mypy: disable-error-code="import-not-found"
# pyright: standard, reportMissingImports=false
"""Dramatiq on Redis: 32 threads in one process."""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks.peers.adapters import bodies
from benchmarks.peers.adapters.base import Producer, main

THREADS = 32


def open_broker(url: str) -> tuple[Any, dict[str, Any]]:
    """The broker and its actors."""
    broker = RedisBroker(url=url)
    return broker, {
        "nothing": dramatiq.actor(broker=broker)(bodies.nothing),
        "arrive": dramatiq.actor(broker=broker)(bodies.arrive),
    }


async def make(url: str) -> None:
    """There is nothing to make."""


@asynccontextmanager
async def producer(url: str) -> AsyncGenerator[Producer]:
    _, actors = open_broker(url)

    async def one(task: str, value: float) -> None:
        actors[task].send(value)

    yield Producer(one)


def work(url: str) -> None:
    broker, _ = open_broker(url)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    worker = dramatiq.Worker(broker, worker_threads=THREADS)
    worker.start()
    stop.wait()
    worker.stop()


if __name__ == "__main__":
    main(make, producer, work)
