"""The bench's app and tasks: as small as tasks can be. Its target is `onward.bench.tasks:app`."""

from __future__ import annotations

import os
import time

from onward import Onward

app = Onward(schema=os.environ.get("ONWARD_SCHEMA", "onward"))


@app.task(queue="onward-bench")
async def nothing(number: int) -> None:
    """What a queue costs is all that this costs."""


@app.task(queue="onward-bench")
async def arrive() -> float:
    """The time at the first line of a body."""
    return time.time()
