"""Portions: how much one statement carries, of one caller's jobs or of many callers' together.

A statement gets its jobs as one JSON text. PostgreSQL takes none of 256 MB and SQLite none of 1 GB,
and whoever comes near that holds it in memory several times over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from onward.job import NewJob

MOST_ROWS = 5_000
MOST_TEXT = 8_000_000
"""What one statement carries at most: rows, and characters of their arguments. One job may be
larger than that.
"""


class Carrier(Protocol):
    """What is as large as the arguments that it carries: a job."""

    @property
    def args(self) -> str: ...


def text_of(items: Iterable[Carrier]) -> int:
    """How many characters of arguments these carry."""
    return sum(len(item.args) for item in items)


def cut(jobs: Sequence[NewJob]) -> list[Sequence[NewJob]]:
    """The jobs cut into what one statement carries."""
    portions: list[Sequence[NewJob]] = []
    start = text = 0
    for place, job in enumerate(jobs):
        text += len(job.args)
        if place - start == MOST_ROWS or (text > MOST_TEXT and place > start):
            portions.append(jobs[start:place])
            start, text = place, len(job.args)
    return [*portions, jobs[start:]]
