"""What the adapters have in common: how a producer is driven, and the command line.

An adapter runs in its system's own environment. So it imports nothing but the standard library,
its system, `benchmarks.tally` and the modules beside it. Each is a program:

    python -m benchmarks.peers.adapters.on_NAME URL make
    python -m benchmarks.peers.adapters.on_NAME URL fill JOBS     prints jobs a second
    python -m benchmarks.peers.adapters.on_NAME URL one JOBS      prints jobs a second
    python -m benchmarks.peers.adapters.on_NAME URL paced JOBS
    python -m benchmarks.peers.adapters.on_NAME URL work

`make` makes the tables in an empty store, `fill` enqueues by the fastest call there is, `one` one
job at a time, `paced` one each 50 ms, and `work` runs jobs until SIGTERM.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

WARM = 20
EVERY = 0.05
CHUNK = 5_000


class Producer(NamedTuple):
    """What enqueues, on open connections.

    Args:
        one: enqueues the task of this name with this argument.
        many: enqueues `nothing` once for each argument; None: there is nothing faster than `one`.
    """

    one: Callable[[str, float], Awaitable[object]]
    many: Callable[[Sequence[int]], Awaitable[object]] | None = None


def main(
    make: Callable[[str], Awaitable[object]],
    producer: Callable[[str], AbstractAsyncContextManager[Producer]],
    work: Callable[[str], object] | None = None,
) -> None:
    """Do what the command line says; each argument is called with the URL of the store. Without
    `work` the system's own command is the worker.
    """
    url, command, *count = sys.argv[1:]
    if work and command == "work":
        work(url)
    elif command == "make":
        asyncio.run(_await(make(url)))
    else:
        print(asyncio.run(_produce(producer(url), PRODUCE[command], int(count[0]))))


async def _await(made: Awaitable[object]) -> None:
    await made


async def _produce(
    opened: AbstractAsyncContextManager[Producer],
    send: Callable[[Producer, int], Awaitable[object]],
    jobs: int,
) -> float:
    """Jobs a second."""
    async with opened as producer:
        if send is one_by_one:
            await one_by_one(producer, WARM)
        began = time.perf_counter()
        await send(producer, jobs)
        return jobs / (time.perf_counter() - began)


async def fill(producer: Producer, jobs: int) -> None:
    """By the call for many, if there is one."""
    if producer.many is None:
        await one_by_one(producer, jobs)
    else:
        await producer.many(range(jobs))


async def one_by_one(producer: Producer, jobs: int) -> None:
    """Each call after the last has returned."""
    for number in range(jobs):
        await producer.one("nothing", number)


async def paced(producer: Producer, jobs: int) -> None:
    """One job each 50 ms, with the time of the call."""
    due = time.perf_counter()
    for _ in range(jobs):
        due += EVERY
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await producer.one("arrive", time.time())


PRODUCE = {"fill": fill, "one": one_by_one, "paced": paced}


def chunks(values: Sequence[int], size: int = CHUNK) -> list[Sequence[int]]:
    """Parts of at most this size, for calls that take thousands at a time and not more."""
    return [values[at : at + size] for at in range(0, len(values), size)]
