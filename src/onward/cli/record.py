"""One job with everything that is known of it, as `onward job show` has it."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from onward.cli.failures import headline, read_failure
from onward.cli.screen import Screen, message, say
from onward.cli.table import Column
from onward.cli.values import (
    Cut,
    Id,
    Past,
    Payload,
    Span,
    State,
    due,
    entries,
    flaws,
    json_text,
    many_lines,
    one_line,
    payload,
    plain,
)
from onward.failure import ErrorText
from onward.overview import elapsed
from onward.store import store
from onward.store.database import Database
from onward.store.store import not_found

_OPTIONAL = frozenset({"worker", "started_at", "finished_at", "event", "reason", "timeout"})

ATTEMPTS = (
    Column("number", "#"),
    Column("state"),
    Column("event", spare=True),
    Column("started_at", "started", spare=True),
    Column("took"),
    Column("last_beat_at", "last sign"),
    Column("worker"),
    Column("reason", elastic=True),
    Column("error", elastic=True),
)


class Record(Struct, frozen=True, kw_only=True):
    """A job, its attempts, and what was refused; `args` and `result` without secrets."""

    job: dict[str, Any]
    args: Payload
    result: Payload
    attempts: list[dict[str, Any]]
    refusals: list[dict[str, Any]]
    damaged: list[str]
    now: float

    def document(self) -> dict[str, Any]:
        """The content of the JSON document."""
        return {
            **self.job,
            "args": self.args.value,
            "result": self.result.value,
            "attempts": [_attempt_document(attempt) for attempt in self.attempts],
            "refusals": self.refusals,
            "damaged": self.damaged or None,
        }


def read_record(database: Database, id: str) -> Record:
    """Read one job.

    Raises:
        JobNotFound: it has just been pruned.
    """
    rows = database.read(store.read, "record", id=id)
    if not rows:
        raise not_found(id)
    row = rows[-1]
    job, args, result = _job(row), payload(row[7]), payload(row[21])
    attempts = [_attempt(found) for found in database.read(store.read, "attempts", id=id)]
    damaged = [
        *flaws(job, _OPTIONAL),
        *(f"args: {args.flaw}" for _ in [0] if args.flaw),
        *(f"result: {result.flaw}" for _ in [0] if result.flaw),
        *(
            f"attempt {a['number']}: {flaw}"
            for a in attempts
            for flaw in flaws(a, _ATTEMPT_OPTIONAL)
        ),
    ]
    return Record(
        job=job,
        args=args,
        result=result,
        attempts=attempts,
        refusals=[
            _refusal(found) for found in database.read(store.read, "refusals", id=id, limit=20)
        ],
        damaged=damaged,
        now=database.read(store.now),
    )


def _job(row: tuple[Any, ...]) -> dict[str, Any]:
    return {
        "id": Id(row[0]),
        "state": State(row[4]),
        "task": Cut(row[1]),
        "queue": Cut(row[2]),
        "priority": row[3],
        "attempt": row[5],
        "worker": Id(row[6]),
        "failures": row[10],
        "max_attempts": row[8],
        "losses": row[11],
        "max_losses": row[9],
        "budget_from": row[12],
        "timeout": Span(row[13]),
        "created_at": Past(row[17]),
        "run_at": due(row[4], row[14]),
        "started_at": Past(row[15]),
        "finished_at": Past(row[16]),
        "event": row[18],
        "reason": Cut(row[19]),
    }


_ATTEMPT_OPTIONAL = frozenset(
    {"worker", "started_at", "took", "last_beat_at", "reason", "error", "failure"}
)


def _attempt(row: tuple[Any, ...]) -> dict[str, Any]:
    error = read_failure(row[9])
    return {
        "number": row[1],
        "state": State(row[2]),
        "event": row[3],
        "worker": Id(row[4]),
        "started_at": Past(row[5]),
        "ended_at": Past(row[6]),
        "took": Span(elapsed(row[5], row[6])),
        "last_beat_at": Past(row[10]),
        "abandoned": bool(row[7]),
        "reason": Cut(row[8]),
        "error": Cut(headline(error)),
        "failure": error,
    }


def _attempt_document(attempt: dict[str, Any]) -> dict[str, Any]:
    """An attempt for JSON: its error in parts instead of in one line."""
    error: ErrorText | None = attempt["failure"]
    parts = {name: getattr(error, name) for name in ErrorText.__struct_fields__} if error else None
    rest = {name: value for name, value in attempt.items() if name != "failure"}
    return rest | {"error": parts}


def _refusal(row: tuple[Any, ...]) -> dict[str, Any]:
    return {
        "event": row[1],
        "attempt": row[2],
        "worker": Id(row[3]),
        "expected": row[4],
        "found": row[5],
        "found_attempt": row[6],
        "at": Past(row[9]),
    }


# --- show -----------------------------------------------------------------------------------------


def show_record(found: Record) -> None:
    """Print a job for people, or for pipes."""
    screen = Screen(found.now)
    whole = {name: plain(found.job[name]) or None for name in ("id", "worker")}
    screen.fields({**found.job, **whole})
    _show_payload(screen, "Arguments", found.args)
    if found.job["state"].name == "succeeded" or found.result.flaw:
        _show_payload(screen, "Result", found.result)
    if found.attempts:
        screen.title("Attempts")
        screen.table(_columns(screen, found.attempts), found.attempts)
    _show_traceback(screen, found)
    if found.refusals:
        screen.title("Refused writes")
        screen.table([Column(name) for name in found.refusals[0]], found.refusals)
    for flaw in found.damaged:
        message(f"damaged: {flaw}")


def _columns(screen: Screen, attempts: list[dict[str, Any]]) -> list[Column]:
    """The last sign of life is of interest where an attempt was lost; a pipe always has it."""
    known = any(attempt["last_beat_at"].at is not None for attempt in attempts)
    return [c for c in ATTEMPTS if known or not screen.draws or c.key != "last_beat_at"]


def _show_payload(screen: Screen, title: str, value: Payload) -> None:
    screen.title(title)
    if value.flaw:
        screen.line("  damaged: ", value.flaw)
        return
    content: Any = value.value
    for name, part in entries(content) if isinstance(content, dict) else [("", content)]:
        screen.line(f"  {one_line(name)} = {_compact(part)}" if name else f"  {_compact(part)}")


def _compact(value: Any) -> str:
    return one_line(" ".join(line.strip() for line in json_text(value).splitlines()), 2_000)


def _show_traceback(screen: Screen, found: Record) -> None:
    """The traceback of the last attempt that has one."""
    for attempt in reversed(found.attempts):
        error: ErrorText | None = attempt["failure"]
        if error is not None and error.traceback:
            screen.title(f"Error of attempt {attempt['number']}")
            say(many_lines(error.traceback))
            return
