"""Which jobs a bulk action is about: of which kind, and which of those.

In:  options of the command line.    Out: the jobs that they show, page by page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any

from msgspec import Struct

from onward.cli.failures import headline_of_start
from onward.cli.values import Cut, Id, Past, State, duration, one_line
from onward.job import Job
from onward.lifecycle import JobState
from onward.overview import read_workers
from onward.store import store
from onward.store.database import Database

PAGE = 500
"""Jobs that are read in one step."""


class Kind(Struct, frozen=True, kw_only=True):
    """The jobs that a bulk action is about.

    Args:
        word: what they are, before "job".
        statement: reads a page of them.
        item: a row of it as people see it.
        since: the name of the moment in an item that makes a job old.
        happened: what it did at that moment.
        still: whether a job may be moved yet, which was shown at this attempt.
    """

    word: str
    statement: str
    item: Callable[[tuple[Any, ...]], dict[str, Any]]
    since: str
    happened: str
    still: Callable[[Job, int], bool]


def _dead_item(row: tuple[Any, ...]) -> dict[str, Any]:
    return {
        "id": Id(row[0]),
        "task": Cut(row[1]),
        "queue": Cut(row[2]),
        "attempt": row[3],
        "failures": row[4],
        "losses": row[5],
        "died_at": Past(row[6]),
        "reason": Cut(row[7]),
        "error": Cut(headline_of_start(row[8])),
    }


def _still_dead(job: Job, attempt: int) -> bool:
    return job.state is JobState.DEAD and job.attempt == attempt


DEAD = Kind(
    word="dead",
    statement="dead",
    item=_dead_item,
    since="died_at",
    happened="died",
    still=_still_dead,
)


def _pending_item(row: tuple[Any, ...]) -> dict[str, Any]:
    return {
        "id": Id(row[0]),
        "task": Cut(row[1]),
        "queue": Cut(row[2]),
        "attempt": row[3],
        "state": State(row[4]),
        "created_at": Past(row[5]),
    }


def _still_live(job: Job, _: int) -> bool:
    """One that began after it was shown is asked to stop, as `job cancel ID` does."""
    return job.state in {JobState.WAITING, JobState.QUEUED, JobState.RUNNING}


PENDING = Kind(
    word="queued or waiting",
    statement="pending",
    item=_pending_item,
    since="created_at",
    happened="enqueued",
    still=_still_live,
)


class Filter(Struct, frozen=True, kw_only=True):
    """Which of them. Names are compared as they are; `error_like` occurs in the error;
    `older_than` is in seconds.
    """

    task: str | None = None
    queue: str | None = None
    error_like: str | None = None
    older_than: float | None = None

    @property
    def empty(self) -> bool:
        return self == Filter()

    def __str__(self) -> str:
        parts = {"task": self.task, "queue": self.queue, "error with": self.error_like}
        said = [f"{name} {one_line(part)!r}" for name, part in parts.items() if part is not None]
        if self.older_than is not None:
            said.append(f"older than {duration(self.older_than)}")
        return ", ".join(said)


def matching(
    database: Database, kind: Kind, chosen: Filter, before: str | None = None
) -> Iterator[dict[str, Any]]:
    """The jobs of a kind that a filter shows, from the highest id."""
    names = {"queue": chosen.queue, "task": chosen.task, "until": _until(database, chosen)}
    while True:
        page = database.read(store.read, kind.statement, before=before, limit=PAGE, **names)
        for item in map(kind.item, page):
            if chosen.error_like is None or chosen.error_like in (item["error"].text or ""):
                yield item
        if len(page) < PAGE:
            return
        before = page[-1][0]


def _until(database: Database, chosen: Filter) -> float | None:
    """The moment before which a job is old enough, on the database's clock."""
    if chosen.older_than is None:
        return None
    return max(database.read(store.now) - chosen.older_than, 0.0)


def up_to(limit: int | None, found: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The first ones; all where there is no limit."""
    if limit is None:
        return found
    return (item for item, _ in zip(found, range(limit), strict=False))


def unknown_names(database: Database, chosen: Filter) -> Iterator[str]:
    """What is wrong with a name that nothing has: it may have been mistyped."""
    rows, workers = database.read(store.read, "names"), read_workers(database)
    queues = {row[0] for row in rows} | {name for w in workers for name in w.queues}
    tasks = {row[1] for row in rows} | {name for w in workers for name in w.tasks}
    for what, name, known in (("queue", chosen.queue, queues), ("task", chosen.task, tasks)):
        if name is not None and name not in known:
            near = [one_line(other) for other in get_close_matches(name, sorted(known))]
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            yield (
                f"there is no {what} {one_line(name)!r}: no live job is of it, "
                f"and no worker knows it{hint}"
            )
