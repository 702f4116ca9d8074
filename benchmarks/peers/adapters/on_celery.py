# mypy: disable-error-code="import-not-found"
# pyright: standard, reportMissingImports=false
"""Celery on Redis or RabbitMQ: no results, ten threads in one process, no gossip."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from celery import Celery

from benchmarks.peers.adapters import bodies
from benchmarks.peers.adapters.base import Producer, main

WORKER = ("worker", "--pool", "threads", "--concurrency", "10", "--loglevel", "WARNING")
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")


def open_app(url: str) -> tuple[Any, dict[str, Any]]:
    """The app and its tasks."""
    app = Celery("bench", broker=url)
    app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True)
    if url.startswith("amqp"):
        app.conf.update(task_default_queue="onward-bench")
    return app, {
        "nothing": app.task(name="nothing")(bodies.nothing),
        "arrive": app.task(name="arrive")(bodies.arrive),
    }


async def make(url: str) -> None:
    app, _ = open_app(url)
    with app.connection_for_write() as connection:
        app.amqp.queues[app.conf.task_default_queue](connection.default_channel).declare()
    app.control.purge()


@asynccontextmanager
async def producer(url: str) -> AsyncGenerator[Producer]:
    _, tasks = open_app(url)

    async def one(task: str, value: float) -> None:
        tasks[task].apply_async((value,))

    yield Producer(one)


def work(url: str) -> None:
    app, _ = open_app(url)
    app.worker_main([*WORKER, *QUIET])


if __name__ == "__main__":
    main(make, producer, work)
