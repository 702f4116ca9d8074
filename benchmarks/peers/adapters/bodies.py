"""The jobs that are measured, as plain functions and as coroutine functions."""

from __future__ import annotations

import os
import time

from benchmarks.tally import tally


def nothing(value: float) -> None:
    """Count, and nothing else."""
    tally.hit()


def arrive(value: float) -> None:
    """Write down how long it took from the producer's call to this line."""
    took = time.time() - value
    with open(os.environ["BENCH_ARRIVALS"], "a") as file:
        file.write(f"{took!r}\n")


async def async_nothing(value: float) -> None:
    """The same on a loop."""
    nothing(value)


async def async_arrive(value: float) -> None:
    """The same on a loop."""
    arrive(value)
