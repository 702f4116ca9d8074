"""Bulk actions on jobs: find, show, ask, move.

A filter is read once, before the question; what is moved afterwards is what was shown, as far as it
still may be moved. Jobs that come to match meanwhile are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click
from msgspec import Struct, field

from onward.cli.filters import Filter, Kind, matching, unknown_names, up_to
from onward.cli.options import Place
from onward.cli.places import check_sound, opened, whole_ids
from onward.cli.root import NOT_FOUND, PROBLEM, REFUSED
from onward.cli.screen import message, print_json, say
from onward.cli.troubles import tell
from onward.cli.values import Cut, Id, distance, one_line, plain
from onward.job import Change, Job
from onward.lifecycle import JobState
from onward.store import store
from onward.store.database import Database, Refused, halves
from onward.store.statements import Op

PAGE = 500
"""Jobs that are moved in one step."""

SAMPLE = 5

MOST_LOOKS = 5
"""How often a job that moves on between the look and the write is looked at again."""


# --- find, show, ask, move ------------------------------------------------------------------------


class Request(Struct, frozen=True, kw_only=True):
    """What a bulk action was asked to do. `schema` is the name of its JSON document."""

    kind: Kind
    verb: str
    past: str
    promise: str
    schema: str
    decide: Callable[[Job], Change | None]
    chosen: Filter
    limit: int | None
    yes: bool
    dry_run: bool
    as_json: bool
    ids: tuple[str, ...] = ()
    everything: bool = False


class Found(Struct):
    """The jobs that were found, each with its attempt; of all but a few no more is kept. The oldest
    and the newest are seconds since the epoch.
    """

    seen: dict[str, int] = field(default_factory=dict[str, int])
    sample: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    newest: float = float("-inf")
    oldest: float = float("inf")

    def add(self, item: dict[str, Any], since: str) -> None:
        self.seen[item["id"].value] = item["attempt"]
        if len(self.sample) < SAMPLE:
            self.sample.append(item)
        at = item[since].at if since in item else None
        if isinstance(at, (int, float)):
            self.newest, self.oldest = max(self.newest, at), min(self.oldest, at)


def carry_out(place: Place, request: Request) -> None:
    """Find the jobs, show them, ask, move them, and say how many were moved."""
    context = click.get_current_context()
    with opened(place) as database:
        found = _found(database, request)
        if not found.seen and not request.everything:
            _tell_nothing_matches(database, request)
            context.exit(NOT_FOUND)
        if not request.as_json or not request.yes:
            _show_sample(request.kind, found, database.read(store.now))
        asks = found.seen and not request.dry_run and not request.yes
        if asks and not _agreed(request, len(found.seen)):
            message("nothing was changed")
            context.exit(PROBLEM)
        moved = Moved() if request.dry_run else move_all(database, request, found.seen)
    _report(request, found.seen, moved)


def _found(database: Database, request: Request) -> Found:
    found = Found()
    for item in _items(database, request):
        found.add(item, request.kind.since)
    return found


def _items(database: Database, request: Request) -> Iterable[dict[str, Any]]:
    if request.ids:
        return _named(database, request)
    return up_to(request.limit, matching(database, request.kind, request.chosen))


def _named(database: Database, request: Request) -> list[dict[str, Any]]:
    """The jobs that were named by id; if one of them may not be moved, nothing is touched."""
    ids = whole_ids(database, request.ids)[: request.limit]
    for id in ids:
        check_sound(database, id)
    jobs = {job.id: job for job in database.read(store.among, ids)}
    for id in ids:
        if id in jobs:
            request.decide(jobs[id])
    return [_from_job(jobs[id]) for id in ids if id in jobs]


def _from_job(job: Job) -> dict[str, Any]:
    return {"id": Id(job.id), "task": Cut(job.task), "attempt": job.attempt}


def _tell_nothing_matches(database: Database, request: Request) -> None:
    message(f"no {request.kind.word} job matches: {request.chosen}; nothing was changed")
    for unknown in unknown_names(database, request.chosen):
        message(unknown)


def _show_sample(kind: Kind, found: Found, now: float) -> None:
    count = len(found.seen)
    noun = "job" if count == 1 else "jobs"
    message(f"{count:,} {kind.word} {noun}{_when(kind, found, now)}" + (":" if count else ""))
    for item in found.sample:
        cells = [plain(item["id"]), plain(item["task"])]
        cells += [one_line(item[name].text or "", 80) for name in ("error",) if name in item]
        message("  " + "  ".join(cell for cell in cells if cell))
    if count > len(found.sample):
        message(f"  … and {count - len(found.sample):,} more")


def _when(kind: Kind, found: Found, now: float) -> str:
    if found.newest < found.oldest:
        return ""
    newest, oldest = (distance(min(at - now, 0.0)) for at in (found.newest, found.oldest))
    if len(found.seen) == 1:
        return f" ({kind.happened} {newest})"
    return f" (the newest {kind.happened} {newest}, the oldest {oldest})"


def _agreed(request: Request, count: int) -> bool:
    what = "it" if count == 1 else f"these {count:,}"
    return click.confirm(f"{request.promise}\n{request.verb.capitalize()} {what}?", err=True)


# --- move -----------------------------------------------------------------------------------------


class Moved(Struct):
    """What was moved, and whereto; and what the database refused to move."""

    states: dict[str, JobState] = field(default_factory=dict[str, JobState])
    refused: set[str] = field(default_factory=set[str])

    @property
    def asked(self) -> list[str]:
        """Those that run, and have been asked to stop."""
        return [id for id, state in self.states.items() if state is JobState.CANCELLING]


def move_all(database: Database, request: Request, seen: Mapping[str, int]) -> Moved:
    """Move the jobs that may still be moved, in steps."""
    moved = Moved()
    ids = list(seen)
    for start in range(0, len(ids), PAGE):
        _move_page(database, request, seen, ids[start : start + PAGE], moved)
    return moved


def _move_page(
    database: Database, request: Request, seen: Mapping[str, int], ids: Sequence[str], moved: Moved
) -> None:
    """Move these; one that the database refuses is told, and hinders no other."""
    try:
        for _ in range(MOST_LOOKS):
            taken, ids = database.run(_move_some, request, seen, ids)
            moved.states |= taken
            if not ids:
                return
    except Refused as error:
        if len(ids) == 1:
            tell(error)
            moved.refused |= set(ids)
            return
        for half in halves(ids):
            _move_page(database, request, seen, half, moved)


def _move_some(
    request: Request, seen: Mapping[str, int], ids: Sequence[str]
) -> Op[tuple[dict[str, JobState], list[str]]]:
    """Decide and write; returns what was moved, and which have moved on before they could be."""
    jobs = yield from store.among(ids)
    decided = [request.decide(job) for job in jobs if request.kind.still(job, seen[job.id])]
    changes = [change for change in decided if change is not None]
    taken = yield from store.apply(changes)
    moved = {change.id: change.after for change in changes if change.id in taken}
    return moved, [change.id for change in changes if change.id not in taken]


# --- report ---------------------------------------------------------------------------------------


def _report(request: Request, seen: Mapping[str, int], moved: Moved) -> None:
    over = moved.states.keys() | moved.refused
    left = [] if request.dry_run else [id for id in seen if id not in over]
    if request.as_json:
        _print_document(request, seen, moved, left)
    elif request.dry_run:
        say(f"{len(seen):,} would be {request.past}")
    else:
        _say_how_many(request, moved, len(left))
    if moved.refused or (request.ids and left):
        click.get_current_context().exit(REFUSED)


def _print_document(
    request: Request, seen: Mapping[str, int], moved: Moved, left: Sequence[str]
) -> None:
    print_json(
        request.schema,
        matched=len(seen),
        changed=len(moved.states),
        dry_run=request.dry_run,
        ids=[id for id in seen if request.dry_run or id in moved.states],
        asked=moved.asked,
        left=left,
        refused=sorted(moved.refused),
    )


def _say_how_many(request: Request, moved: Moved, left: int) -> None:
    asked, refused = len(moved.asked), len(moved.refused)
    parts = [f"{len(moved.states) - asked:,} {request.past}"]
    if asked:
        parts.append(f"{asked:,} had begun meanwhile and {_were(asked)} asked to stop")
    if left:
        parts.append(f"{left:,} had changed meanwhile and {_were(left)} left alone")
    if refused:
        parts.append(f"{refused:,} {_were(refused)} refused by the database")
    say("; ".join(parts))
    if moved.states and request.verb == "requeue":
        message(request.promise)


def _were(count: int) -> str:
    return "was" if count == 1 else "were"
