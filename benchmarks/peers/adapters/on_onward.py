"""Onward's side: on PostgreSQL the producer is async, on SQLite, where there is nothing to wait
for, plain. Its worker is `onward worker`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from benchmarks.jobs import app, note_arrival, nothing
from benchmarks.peers.adapters.base import Producer, main


async def make(url: str) -> None:
    app.use(url)
    app.database.migrate()


@asynccontextmanager
async def producer(url: str) -> AsyncGenerator[Producer]:
    app.use(url)

    async def one(task: str, value: float) -> None:
        if task == "nothing":
            await nothing.aenqueue(int(value))
        else:
            await note_arrival.aenqueue(value)

    async def one_plain(task: str, value: float) -> None:
        if task == "nothing":
            nothing.enqueue(int(value))
        else:
            note_arrival.enqueue(value)

    async def many(values: Sequence[int]) -> None:
        app.enqueue_many(nothing.call(value) for value in values)

    yield Producer(one_plain if url.startswith("sqlite") else one, many)
    await app.database.close_loop()
    app.close()


if __name__ == "__main__":
    main(make, producer)
