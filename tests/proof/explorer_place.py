"""A database for the explorer: it is put into any rows, runs one operation of the store, is read
back, and forgets what was done.

Rows are put in through a connection of its own that is past the triggers; operations run on
another, with every guard in place, and are rolled back when they have been looked at. Time stands
still at `NOW` unless it is set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import apsw
import psycopg

from onward.errors import OnwardError
from onward.store.database import Again
from onward.store.statements import Op
from tests.proof.explorer_state import LIVE_WORKER, NOBODY, OVER, JobRow, Past, Rows, WorkerRow

T = TypeVar("T")

NOW = 1_000_000.0
THEN = NOW - 1
"""When everything happened that is past."""

TASK = "t"
QUEUE = "q"
FORGOTTEN = "00000000-0000-7000-8000-00000000ffff"
"""The worker of attempts of which nobody remembers whose they were."""

ERRORS: tuple[type[Exception], ...] = (apsw.Error, psycopg.Error, OnwardError, Again)

JOB = (
    "id", "state", "attempt", "worker", "run_at", "started_at", "finished_at", "failures",
    "losses", "budget_from", "task", "queue", "priority", "created_at", "max_attempts",
    "max_losses", "args",
)  # fmt: skip
FINISHED = (
    *JOB, "ended_from", "event", "attempt_state", "abandoned", "reason", "error", "result"
)  # fmt: skip
ATTEMPT = (
    "job", "number", "state", "event", "worker", "started_at", "ended_at", "abandoned", "reason",
    "error",
)  # fmt: skip
WORKER = (
    "id", "state", "lease_until", "started_at", "beat_at", "ended_at", "reason", "idle", "name",
    "host", "pid", "version", "queues", "tasks", "concurrency",
)  # fmt: skip
REFUSAL = ("job", "event", "attempt", "worker", "expected", "found", "found_attempt")
TABLES = {
    "job": JOB,
    "finished": FINISHED,
    "attempt": ATTEMPT,
    "worker": WORKER,
    "refusal": REFUSAL,
}

Row = dict[str, Any]


class Dump(NamedTuple):
    """Every row there is, by its key."""

    jobs: dict[str, Row]
    finished: dict[str, Row]
    attempts: dict[tuple[str, int], Row]
    workers: dict[str, Row]
    refusals: list[Row]

    def tables(self) -> list[tuple[str, list[Row]]]:
        """The rows of each table that can be put in."""
        return [
            ("job", [*self.jobs.values()]),
            ("finished", [*self.finished.values()]),
            ("attempt", [*self.attempts.values()]),
            ("worker", [*self.workers.values()]),
        ]


class Bounds(NamedTuple):
    """How much there is of everything. `lease` is in ticks; a tick is the delay of a retry."""

    workers: int = 2
    jobs: int = 2
    attempts: int = 2
    max_attempts: int = 2
    max_losses: int = 1
    lease: float = 0.5
    rich: bool = True
    """Whether everything is followed. Else all workers and jobs are there from the start, and no
    worker comes anew; orderly ends of workers, rare outcomes and clients' second chances are only
    judged wherever they can happen, not followed; and no end of an attempt is doubted.
    """


class Names(NamedTuple):
    """Which number has which id."""

    jobs: tuple[str, ...]
    workers: tuple[str, ...]

    def worker(self, number: int) -> str:
        return FORGOTTEN if number == NOBODY else self.workers[number]


def names(bounds: Bounds, turned: bool) -> Names:
    """The ids; turned, the last has the least: no rule may hang on who comes first."""
    jobs = [f"00000000-0000-7000-8000-0000000000a{number}" for number in range(bounds.jobs)]
    workers = [f"00000000-0000-7000-8000-0000000000b{number}" for number in range(bounds.workers)]
    step = -1 if turned else 1
    return Names(tuple(jobs[::step]), tuple(workers[::step]))


# --- rows as they are stored ----------------------------------------------------------------------


def stored(rows: Rows, bounds: Bounds, ids: Names) -> Dump:
    """The rows as the tables hold them."""
    dump = Dump({}, {}, {}, {}, [])
    for id_, job in zip(ids.jobs, rows.jobs, strict=True):
        if job.state:
            _store_job(dump, id_, job, bounds, ids)
    for id_, worker in zip(ids.workers, rows.workers, strict=True):
        if worker.state:
            dump.workers[id_] = _stored_worker(id_, worker)
    return dump


def _store_job(dump: Dump, id_: str, job: JobRow, bounds: Bounds, ids: Names) -> None:
    owned = job.state in {"running", "cancelling"}
    begun = owned or job.state == "dead" or (bool(job.last) and job.last[0] != "queued")
    row: Row = {
        "id": id_,
        "state": job.state,
        "attempt": job.attempt,
        "worker": ids.worker(job.owner) if owned else None,
        "run_at": NOW + job.due,
        "started_at": THEN if begun else None,
        "finished_at": THEN if job.state == "dead" or job.last else None,
        "failures": job.failures,
        "losses": job.losses,
        "budget_from": job.budget_from,
        "task": TASK,
        "queue": QUEUE,
        "priority": 0,
        "created_at": THEN,
        "max_attempts": bounds.max_attempts,
        "max_losses": bounds.max_losses,
        "args": "{}",
    }
    for number, closed in enumerate(job.past, 1):
        dump.attempts[id_, number] = {
            "job": id_,
            "number": number,
            "state": closed.state,
            "event": closed.event,
            "worker": ids.worker(closed.owner),
            "started_at": THEN,
            "ended_at": THEN,
            "abandoned": False,
            "reason": "before",
            "error": None,
        }
    if not job.last:
        dump.jobs[id_] = row
        return
    before, event, end = job.last
    row["worker"] = ids.worker(job.owner) if before in {"running", "cancelling"} else None
    dump.finished[id_] = row | {
        "ended_from": before,
        "event": event,
        "attempt_state": end or None,
        "abandoned": False,
        "reason": None,
        "error": None,
        "result": "null" if job.state == "succeeded" else None,
    }


def _stored_worker(id_: str, worker: WorkerRow) -> Row:
    live = worker.state in LIVE_WORKER
    return {
        "id": id_,
        "state": worker.state,
        "lease_until": NOW + worker.lease if live else THEN,
        "started_at": THEN,
        "beat_at": THEN,
        "ended_at": None if live else THEN,
        "reason": None if live else "gone",
        "idle": False,
        "name": "w",
        "host": "h",
        "pid": 1,
        "version": "0",
        "queues": [QUEUE],
        "tasks": [TASK],
        "concurrency": 4,
    }


def read_back(dump: Dump, ids: Names) -> Rows:
    """The tables' rows as a state has them."""
    owner = {id_: number for number, id_ in enumerate(ids.workers)}
    return Rows(
        tuple(_job_of(dump, id_, owner) for id_ in ids.jobs),
        tuple(_worker_of(dump.workers.get(id_)) for id_ in ids.workers),
    )


def _job_of(dump: Dump, id_: str, owner: Mapping[str, int]) -> JobRow:
    row = dump.jobs.get(id_) or dump.finished.get(id_)
    if row is None:
        return JobRow("")
    closed = sorted((key, value) for key, value in dump.attempts.items() if key[0] == id_)
    return JobRow(
        state=row["state"],
        attempt=row["attempt"],
        owner=owner.get(row["worker"], NOBODY),
        due=max(row["run_at"] - NOW, 0.0) if row["state"] == "queued" else 0.0,
        failures=row["failures"],
        losses=row["losses"],
        budget_from=row["budget_from"],
        past=tuple(
            Past(past["state"], past["event"], owner.get(past["worker"], NOBODY))
            for _, past in closed
        ),
        last=(row["ended_from"], row["event"], row["attempt_state"] or "")
        if "ended_from" in row
        else (),
    )


def _worker_of(row: Row | None) -> WorkerRow:
    if row is None:
        return WorkerRow("")
    live = row["state"] in LIVE_WORKER
    return WorkerRow(row["state"], max(row["lease_until"] - NOW, OVER) if live else 0.0)


# --- what the explorer needs of a database --------------------------------------------------------

Spoil = Callable[[str, str], str]
"""Makes another text of a named statement's, to see that a fault is found."""


def unspoilt(name: str, text: str) -> str:
    return text


class Place(Protocol):
    """A database in the explorer's hands."""

    dialect: str
    runs: int

    def put(self, dump: Dump) -> None:
        """Hold these rows and no others."""
        ...

    def passing(self) -> Any:
        """A transaction that is rolled back at its end."""
        ...

    def run(self, op: Op[T]) -> T:
        """Carry out an operation inside it."""
        ...

    def ask(self, names: Sequence[str], params: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """The rows of several reading statements at once, each with its statement's name."""
        ...

    def dump(self) -> Dump | None:
        """What is there now; None: what was put, no row has been written."""
        ...

    def clock(self, time: float) -> None:
        """Set the time until the transaction ends."""
        ...

    def close(self) -> None: ...


def dump_of(tables: Mapping[str, list[Row]]) -> Dump:
    return Dump(
        {row["id"]: row for row in tables["job"]},
        {row["id"]: row for row in tables["finished"]},
        {(row["job"], row["number"]): row for row in tables["attempt"]},
        {row["id"]: row for row in tables["worker"]},
        tables["refusal"],
    )
