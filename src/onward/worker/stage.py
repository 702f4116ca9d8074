"""A stage runs for ever: an error in it is shown, and after a pause it goes on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from onward.errors import DatabaseError
from onward.events import Happened, emit


async def keep_going(name: str, step: Callable[[], Awaitable[None]]) -> None:
    """Run a stage for ever: an error in it is shown, and after a pause it goes on. Never a silent
    stall.
    """
    pause = 0.1
    while True:
        began = time.monotonic()
        try:
            await step()
        except DatabaseError as error:
            emit(_stumbled(name, error, logging.WARNING))
        except Exception as error:
            emit(_stumbled(name, error, logging.ERROR))
            logging.getLogger("onward").debug("stage %s", name, exc_info=True)
        else:
            return
        pause = 0.1 if time.monotonic() - began > 10 else min(pause * 2, 5.0)
        await asyncio.sleep(pause)


def _stumbled(name: str, error: Exception, level: int) -> Happened:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return Happened(name="stage.stumbled", level=level, fields={"stage": name, "error": text})
