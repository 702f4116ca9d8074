"""The demo's app and tasks: what a user of Onward writes. Its target is `onward.demo.tasks:app`.

`digest` and `words` are enqueued for each file. A digest that succeeds enqueues `pack` and
`publish` in the same write as its success: an attempt that is lost enqueues nothing.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from onward import Backoff, Onward, current
from onward.demo.work import Packed, Words, digest_of, is_refused, packed, words_of

LATENCY = 0.02
"""Seconds that the far end takes to answer."""

LOOK = 0.05

app = Onward(schema=os.environ.get("ONWARD_SCHEMA", "onward"))

soon = Backoff(base=0.3, factor=2)


@app.task(queue="onward-demo", max_attempts=3, backoff=soon)
def words(path: str) -> Words:
    """Statistics of a text. A file that is no text fails each time, and ends dead."""
    return words_of(Path(path).read_bytes())


@app.task(queue="onward-demo", max_attempts=3, backoff=soon)
def pack(path: str) -> Packed:
    """Compress a file."""
    return packed(Path(path).read_bytes())


@app.task(queue="onward-demo", max_attempts=5, backoff=soon)
async def publish(path: str, digest: str) -> int:
    """Tell the far end of a file's digest. It stands for a network: it fails now and then, and a
    later attempt gets through.

    Returns:
        The number of the attempt that got through.
    """
    await asyncio.sleep(LATENCY)
    if is_refused(digest, current().attempt):
        raise ConnectionError(f"the far end hung up on {Path(path).name}")
    return current().attempt


@app.task(queue="onward-demo", max_attempts=3, backoff=soon)
def digest(path: str) -> str:
    """The file's digest; with its success go two more jobs."""
    found = digest_of(Path(path).read_bytes())
    job = current()
    job.enqueue(pack.using(queue=job.queue).call(path))
    job.enqueue(publish.using(queue=job.queue).call(path, found))
    return found


@app.task(queue="onward-demo")
def watch(path: str) -> str:
    """Wait until a file is there, and return its text. It lasts, so that the kill never meets idle
    workers; and it stops when it is asked to.
    """
    job = current()
    while not Path(path).exists():
        job.cancel_token.wait(LOOK)
        job.check()
    return Path(path).read_text(encoding="utf-8")
