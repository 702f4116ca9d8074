"""Listener: hears that something may have been enqueued, and wakes the claimer. A hint only: the
poll is the truth.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from onward.store.database import Database

WAIT = 30.0


async def listen(
    database: Database, wake: Callable[[tuple[str, int] | None], None], idle: asyncio.Event
) -> None:
    """Listen for ever.

    Args:
        database: whose enqueues to hear.
        wake: called with each hint: the queue and priority that it names, or None.
        idle: set while somebody wants to be woken; a busy worker is not disturbed.
    """
    wakeup = await database.wakeup()
    try:
        while True:
            await idle.wait()
            if await wakeup.wait(WAIT):
                wake(wakeup.lane)
    finally:
        with contextlib.suppress(Exception):
            await wakeup.close()
