"""A stage runs for ever: an error in it is shown, and after a pause it goes on.

What is in the way for longer is said at once, and then once a minute: an outage fills no log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from onward.errors import DatabaseError
from onward.events import Happened, emit

SAY_EVERY = 60.0
"""Seconds between two events about the same thing that is still in the way."""


class Complaint:
    """Reports what is in the way: at once, and then once in a while as long as it is."""

    def __init__(self) -> None:
        self._said = float("-inf")
        self._unsaid = 0

    def make(self, happened: Happened) -> None:
        """It has happened, perhaps again."""
        now = time.monotonic()
        if now - self._said < SAY_EVERY:
            self._unsaid += 1
            return
        times = {"times": self._unsaid + 1} if self._unsaid else {}
        self._said, self._unsaid = now, 0
        emit(replace(happened, fields=happened.fields | times))

    def over(self) -> None:
        """Nothing is in the way any more: the next time is news."""
        self._said, self._unsaid = float("-inf"), 0


async def keep_going(name: str, step: Callable[[], Awaitable[None]]) -> None:
    """Run a stage for ever: an error in it is shown, and after a pause it goes on. Never a silent
    stall.
    """
    pause = 0.1
    complaint = Complaint()
    while True:
        began = time.monotonic()
        try:
            await step()
        except DatabaseError as error:
            complaint.make(_stumbled(name, error, logging.WARNING))
        except Exception as error:
            emit(_stumbled(name, error, logging.ERROR))
            logging.getLogger("onward").debug("stage %s", name, exc_info=True)
        else:
            return
        if time.monotonic() - began > 10:
            pause = 0.1
            complaint.over()
        else:
            pause = min(pause * 2, 5.0)
        await asyncio.sleep(pause)


def _stumbled(name: str, error: Exception, level: int) -> Happened:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return Happened(name="stage.stumbled", level=level, fields={"stage": name, "error": text})
