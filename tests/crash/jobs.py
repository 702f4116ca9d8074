"""More tasks, in the app of `tests/support/tasks.py`: `running(url, target=TARGET)`."""

from __future__ import annotations

import asyncio
import os
import time

from onward import current
from tests.support.tasks import SOON, app, noted

__all__ = ["TARGET", "app"]

TARGET = "tests.crash.jobs:app"


@app.task(backoff=SOON)
async def by_attempt(plan: list[tuple[float, str]]) -> str:
    """Does in each attempt what the plan says for it: wait so long, then return or raise. After the
    last entry: as the last.
    """
    seconds, end = plan[min(current().attempt, len(plan)) - 1]
    with noted():
        await asyncio.sleep(seconds)
        if end == "raise":
            raise RuntimeError(f"attempt {current().attempt} was to raise")
    return f"attempt {current().attempt}"


@app.task(backoff=SOON)
def block_by_attempt(seconds: list[float]) -> str:
    """Blocks a thread in each attempt for as long as is said for it; after the last: as the
    last.
    """
    with noted():
        time.sleep(seconds[min(current().attempt, len(seconds)) - 1])
    return f"attempt {current().attempt}"


@app.task(backoff=SOON)
async def die_after_return(status: int) -> str:
    """Returns, and ends its process before anybody can write that down."""
    with noted():
        asyncio.get_running_loop().call_soon(os._exit, status)
    return "unheard"


@app.task(backoff=SOON)
def block_each(seconds: float) -> int:
    """A thread of its own is blocked for so long, whatever the attempt."""
    with noted():
        time.sleep(seconds)
    return current().attempt
