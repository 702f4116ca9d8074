"""Bulk actions on dead jobs: find, show, ask, move.

A filter is read once, before the question; what is moved afterwards is what was shown and is still
dead at the attempt that was shown. Jobs that die meanwhile, or that somebody else has moved, are
left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
from msgspec import Struct

from onward.cli.failures import headline_of_start
from onward.cli.options import Place
from onward.cli.places import check_sound, opened, whole_ids
from onward.cli.root import NOT_FOUND, PROBLEM, REFUSED
from onward.cli.screen import message, print_json, say
from onward.cli.values import Cut, Id, Moment, distance, one_line, plain
from onward.job import Change, Job
from onward.lifecycle import JobState
from onward.store import store
from onward.store.database import Database
from onward.store.statements import Op

PAGE = 500
"""Dead jobs that are read, and jobs that are moved, in one step."""

SAMPLE = 5


class Filter(Struct, frozen=True, kw_only=True):
    """Which dead jobs. Names are compared as they are; `error_like` occurs in the error."""

    task: str | None = None
    queue: str | None = None
    error_like: str | None = None

    @property
    def empty(self) -> bool:
        return self.task is None and self.queue is None and self.error_like is None

    def __str__(self) -> str:
        parts = {"task": self.task, "queue": self.queue, "error with": self.error_like}
        return ", ".join(
            f"{name} {one_line(part)!r}" for name, part in parts.items() if part is not None
        )


def matching(
    database: Database, chosen: Filter, before: str | None = None
) -> Iterator[dict[str, Any]]:
    """The dead jobs that a filter shows, the newest first."""
    while True:
        page = database.read(
            store.read, "dead", before=before, limit=PAGE, queue=chosen.queue, task=chosen.task
        )
        for item in map(_item, page):
            if chosen.error_like is None or chosen.error_like in (item["error"].text or ""):
                yield item
        if len(page) < PAGE:
            return
        before = page[-1][0]


def _item(row: tuple[Any, ...]) -> dict[str, Any]:
    return {
        "id": Id(row[0]),
        "task": Cut(row[1]),
        "queue": Cut(row[2]),
        "attempt": row[3],
        "failures": row[4],
        "losses": row[5],
        "died_at": Moment(row[6]),
        "reason": Cut(row[7]),
        "error": Cut(headline_of_start(row[8])),
    }


def up_to(limit: int | None, found: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first ones; all where there is no limit."""
    if limit is None:
        return list(found)
    return [item for item, _ in zip(found, range(limit), strict=False)]


class Request(Struct, frozen=True, kw_only=True):
    """What a bulk action was asked to do."""

    verb: str
    past: str
    promise: str
    decide: Callable[[Job], Change]
    ids: tuple[str, ...]
    chosen: Filter
    everything: bool
    limit: int | None
    yes: bool
    dry_run: bool
    as_json: bool


def carry_out(place: Place, request: Request) -> None:
    """Find the jobs, show them, ask, move them, and say how many were moved."""
    context = click.get_current_context()
    with opened(place) as database:
        found = _found(database, request)
        if not found and not request.everything:
            message(f"no dead job matches: {request.chosen}; nothing was changed")
            context.exit(NOT_FOUND)
        if not request.as_json or not request.yes:
            _show_sample(found, database.read(store.now))
        if found and not request.dry_run and not request.yes and not _agreed(request, len(found)):
            message("nothing was changed")
            context.exit(PROBLEM)
        seen = {item["id"].value: item["attempt"] for item in found}
        changed = [] if request.dry_run else move_all(database, seen, request.decide)
    _report(request, seen, changed)


def _found(database: Database, request: Request) -> list[dict[str, Any]]:
    if request.ids:
        return _named(database, request)
    return up_to(request.limit, matching(database, request.chosen))


def _named(database: Database, request: Request) -> list[dict[str, Any]]:
    """The jobs that were named by id; if one of them is not dead, nothing is touched."""
    ids = whole_ids(database, request.ids)[: request.limit]
    for id in ids:
        check_sound(database, id)
    jobs = {job.id: job for job in database.read(store.among, ids)}
    changes = [request.decide(jobs[id]) for id in ids if id in jobs]
    return [_from_job(jobs[change.id]) for change in changes]


def _from_job(job: Job) -> dict[str, Any]:
    return {"id": Id(job.id), "task": Cut(job.task), "attempt": job.attempt, "error": Cut(None)}


def _show_sample(found: Sequence[Mapping[str, Any]], now: float) -> None:
    count = len(found)
    noun = "job" if count == 1 else "jobs"
    message(f"{count:,} dead {noun}{_when(found, now)}" + (":" if count else ""))
    for item in found[:SAMPLE]:
        cells = (plain(item["id"]), plain(item["task"]), one_line(item["error"].text or "", 80))
        message("  " + "  ".join(cell for cell in cells if cell))
    if count > SAMPLE:
        message(f"  … and {count - SAMPLE:,} more")


def _when(found: Sequence[Mapping[str, Any]], now: float) -> str:
    moments = [item["died_at"].at for item in found if "died_at" in item]
    died = [at - now for at in moments if isinstance(at, (int, float))]
    if not died:
        return ""
    if len(found) == 1:
        return f" (died {distance(died[0])})"
    return f" (the newest died {distance(max(died))}, the oldest {distance(min(died))})"


def _agreed(request: Request, count: int) -> bool:
    what = "it" if count == 1 else f"these {count:,}"
    return click.confirm(f"{request.promise}\n{request.verb.capitalize()} {what}?", err=True)


def move_all(
    database: Database, seen: Mapping[str, int], decide: Callable[[Job], Change]
) -> list[str]:
    """Move the jobs that are still dead at the attempt that was seen; returns which were moved."""
    ids = list(seen)
    changed: list[str] = []
    for start in range(0, len(ids), PAGE):
        changed += database.run(_move_some, ids[start : start + PAGE], seen, decide)
    return changed


def _move_some(
    ids: Sequence[str], seen: Mapping[str, int], decide: Callable[[Job], Change]
) -> Op[list[str]]:
    jobs = yield from store.among(ids)
    still = [job for job in jobs if job.state is JobState.DEAD and job.attempt == seen[job.id]]
    taken = yield from store.apply([decide(job) for job in still])
    return [id for id in ids if id in taken]


def _report(request: Request, seen: Mapping[str, int], changed: Sequence[str]) -> None:
    moved = set(changed)
    left = [] if request.dry_run else [id for id in seen if id not in moved]
    if request.as_json:
        print_json(
            f"dead.{request.verb}/1",
            matched=len(seen),
            changed=len(changed),
            dry_run=request.dry_run,
            ids=list(seen) if request.dry_run else list(changed),
            left=left,
        )
    elif request.dry_run:
        say(f"{len(seen):,} would be {request.past}")
    else:
        rest = f"; {len(left):,} had changed meanwhile and were left alone" if left else ""
        say(f"{len(changed):,} {request.past}{rest}")
        if changed and request.verb == "requeue":
            message(request.promise)
    if request.ids and left:
        click.get_current_context().exit(REFUSED)
