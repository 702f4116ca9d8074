"""The tasks that are measured, and their app; workers import this module."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from benchmarks.tally import tally
from onward import Onward

app = Onward()


@app.task
async def nothing(number: int) -> None:
    """The job of most workloads: it does nothing, on the loop."""
    tally.hit()


@app.task
def nothing_in_a_thread(number: int) -> None:
    """The same as a plain function."""
    tally.hit()


@app.task
async def pause(seconds: float) -> None:
    """Wait, on the loop."""
    await asyncio.sleep(seconds)
    tally.hit()


@app.task
async def note_arrival(sent: float) -> None:
    """Write down how long it took from the caller's call to this line."""
    _write_down(time.time() - sent)


def _write_down(seconds: float) -> None:
    with Path(os.environ["BENCH_ARRIVALS"]).open("a") as file:
        file.write(f"{seconds!r}\n")
