"""What must be true of a whole history: the ledger's lines beside the database's rows.

    history = read(app.database, ledger)
    assert problems(history, enqueued=ids) == []

The ledger is the independent witness: bodies write into it, and no part of Onward does. Each check
bears the name of the promise that it checks, takes a history and answers with what is wrong, in
words; no answer means that the promise was kept. `settled` asks for more: nothing is left to do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from typing import Any

import apsw
import psycopg
from msgspec import Struct

from onward.invariants import run_checks
from onward.store.database import Database
from onward.store.postgres import PostgresDatabase
from onward.store.sqlite import SqliteDatabase
from tests.support.ledger import Ledger

CLOSED_JOBS = {"succeeded", "cancelled", "dead"}
OWNED = {"running", "cancelling"}


class Body(Struct, frozen=True):
    """One run of a task's function, as the ledger tells it. `end` is None when it wrote no end."""

    job: str
    attempt: int
    pid: int
    start: float
    end: float | None
    raised: str | None = None


class JobRow(Struct, frozen=True):
    id: str
    state: str
    attempt: int
    worker: str | None
    event: str | None
    result: str | None


class AttemptRow(Struct, frozen=True):
    job: str
    number: int
    state: str
    event: str
    worker: str | None
    started: bool
    abandoned: bool
    reason: str | None
    error: str | None


class History(Struct, frozen=True):
    """The ledger and the database at one moment."""

    bodies: list[Body]
    jobs: dict[str, JobRow]
    attempts: dict[tuple[str, int], AttemptRow]

    def attempts_of(self, job: str) -> list[AttemptRow]:
        """The closed attempts of one job, in order."""
        found = [row for row in self.attempts.values() if row.job == job]
        return sorted(found, key=lambda row: row.number)

    def bodies_of(self, job: str) -> list[Body]:
        """The runs of one job, in the order in which they began."""
        return sorted((b for b in self.bodies if b.job == job), key=lambda body: body.start)


# --- read -----------------------------------------------------------------------------------------


def rows(database: Database, sql: str) -> list[tuple[Any, ...]]:
    """Run bare SQL past the store (`onward.` before a table), as a witness would."""
    if isinstance(database, PostgresDatabase):
        with psycopg.connect(database.url, autocommit=True) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []
    assert isinstance(database, SqliteDatabase)
    # Of the library that the database uses: two libraries on one file break each other's locks.
    with closing(apsw.Connection(str(database.path))) as file:
        file.set_busy_timeout(20_000)
        return list(file.execute(sql.replace("onward.", "onward_")))


def read(database: Database, ledger: Ledger) -> History:
    """The history so far. The ledger is read first, so that each of its lines has its row."""
    bodies = list(bodies_in(ledger))
    jobs = [
        JobRow(str(r[0]), r[1], r[2], None if r[3] is None else str(r[3]), r[4], r[5])
        for r in rows(database, "SELECT id, state, attempt, worker, event, result FROM onward.jobs")
    ]
    attempts = [
        AttemptRow(
            job=str(r[0]),
            number=r[1],
            state=r[2],
            event=r[3],
            worker=None if r[4] is None else str(r[4]),
            started=r[5] is not None,
            abandoned=bool(r[6]),
            reason=r[7],
            error=r[8],
        )
        for r in rows(
            database,
            "SELECT job, number, state, event, worker, started_at, abandoned, reason, error"
            " FROM onward.attempts",
        )
    ]
    return History(
        bodies, {job.id: job for job in jobs}, {(row.job, row.number): row for row in attempts}
    )


def bodies_in(ledger: Ledger) -> Iterator[Body]:
    """Each start line with its end line: of the same job, attempt and process, in order."""
    open_: dict[tuple[str, int, int], list[dict[str, Any]]] = defaultdict(list)
    for line in ledger.read():
        key = (line["job"], line["attempt"], line["pid"])
        if line["event"] == "start":
            open_[key].append(line)
        elif line["event"] == "end":
            start = open_[key].pop(0)["at"]
            yield Body(*key, start, line["at"], line.get("raised"))
    for key, lines in open_.items():
        for line in lines:
            yield Body(*key, line["at"], None)


# --- check ----------------------------------------------------------------------------------------


def problems(
    history: History,
    *,
    enqueued: Collection[str],
    born_inside: bool = False,
) -> list[str]:
    """Everything that is wrong with a history.

    Args:
        history: of one database.
        enqueued: the jobs whose enqueue was acknowledged.
        born_inside: jobs may enqueue further ones.
    """
    return [
        *lost_jobs(history, enqueued),
        *(() if born_inside else jobs_from_nowhere(history, enqueued)),
        *gaps(history),
        *double_successes(history),
        *unexplained_bodies(history),
        *successes_without_a_body(history),
        *unexplained_overlaps(history),
    ]


def lost_jobs(history: History, enqueued: Collection[str]) -> Iterator[str]:
    """D1: every acknowledged enqueue exists."""
    for id_ in enqueued:
        if id_ not in history.jobs:
            yield f"D1: {id_} was acknowledged and is nowhere"


def jobs_from_nowhere(history: History, enqueued: Collection[str]) -> Iterator[str]:
    """D2: each job was asked for, by a client here."""
    for id_ in history.jobs.keys() - set(enqueued):
        yield f"D2: nobody asked for {id_}"


def gaps(history: History) -> Iterator[str]:
    """M2: attempts 1 to n, the latest of them open as long as the job is not closed."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for job, number in history.attempts:
        numbers[job].append(number)
    for job in history.jobs.values():
        closed = job.attempt if job.state in CLOSED_JOBS else job.attempt - 1
        if sorted(numbers[job.id]) != list(range(1, closed + 1)):
            yield f"M2: {job.id} is {job.state} at attempt {job.attempt}, closed: {numbers[job.id]}"


def double_successes(history: History) -> Iterator[str]:
    """M2: at most one attempt succeeds, and then the job has."""
    won = Counter(row.job for row in history.attempts.values() if row.state == "succeeded")
    for job in history.jobs.values():
        if won[job.id] != (job.state == "succeeded"):
            yield f"M2: {job.id} is {job.state} with {won[job.id]} attempts that succeeded"


def unexplained_bodies(history: History) -> Iterator[str]:
    """L2, and the ledger beside the rows: each run is one attempt, and each attempt one run."""
    seen = Counter((body.job, body.attempt) for body in history.bodies)
    for (job, number), times in seen.items():
        if times > 1:
            yield f"L2: attempt {number} of {job} ran {times} times"
        known = history.jobs.get(job)
        if known is None:
            yield f"D2: {job} ran and is nowhere"
        elif (job, number) in history.attempts:
            if not history.attempts[job, number].started:
                yield f"M2: attempt {number} of {job} ran and has no start"
        elif number != known.attempt or known.state not in OWNED:
            yield f"M2: attempt {number} of {job} ran and has no row; the job is {known.state}"


def successes_without_a_body(history: History) -> Iterator[str]:
    """What succeeded has run to its end: the ledger says so."""
    ended = {(b.job, b.attempt) for b in history.bodies if b.end is not None and b.raised is None}
    for key, row in history.attempts.items():
        if row.state == "succeeded" and key not in ended:
            yield f"attempt {row.number} of {row.job} succeeded without having run to its end"


def unexplained_overlaps(history: History) -> Iterator[str]:
    """L5: two bodies of one job overlap only after a lost lease or an abandoned body."""
    by_job: dict[str, list[Body]] = defaultdict(list)
    for body in history.bodies:
        by_job[body.job].append(body)
    for job, bodies in by_job.items():
        bodies.sort(key=lambda body: body.start)
        for index, first in enumerate(bodies):
            for second in bodies[index + 1 :]:
                if first.end is not None and second.start < first.end:
                    row = history.attempts.get((job, first.attempt))
                    if row is None or not (row.state == "lost" or row.abandoned):
                        yield (
                            f"L5: attempts {first.attempt} and {second.attempt} of {job} overlap,"
                            f" and attempt {first.attempt} ended as {row and row.state}"
                        )


def changed_finals(before: History, after: History) -> list[str]:
    """D5, M3: what was over has not moved since, and what was closed is as it was."""
    found = [
        f"D5: {job.id} was {job.state} and is {after.jobs.get(job.id)}"
        for job in before.jobs.values()
        if job.state in {"succeeded", "cancelled"} and after.jobs.get(job.id) != job
    ]
    return found + [
        f"M3: attempt {key} was {row} and is {after.attempts.get(key)}"
        for key, row in before.attempts.items()
        if after.attempts.get(key) != row
    ]


def broken_rules(database: Database, *, slack: float = 30.0) -> list[str]:
    """What `onward doctor` finds wrong with the database."""
    return [
        f"{finding.check.key} {finding.check.name}: {finding.problem or finding.offences}"
        for finding in run_checks(database, slack=slack)
        if not finding.holds
    ]


def check(
    database: Database,
    ledger: Ledger,
    enqueued: Iterable[str],
    *,
    born_inside: bool = False,
) -> History:
    """Read the history, fail if anything is wrong with it or with the database, and return it."""
    history = read(database, ledger)
    wrong = problems(history, enqueued=set(enqueued), born_inside=born_inside)
    wrong += broken_rules(database)
    assert not wrong, "\n".join(wrong[:20])
    return history


def states(history: History) -> dict[str, int]:
    """How many jobs are in each state."""
    return dict(Counter(job.state for job in history.jobs.values()))


def outcomes(history: History, job: str) -> list[str]:
    """How each attempt of a job ended: its state, and the reason if it has one."""
    return [
        f"{row.state} ({row.reason})" if row.reason else row.state
        for row in history.attempts_of(job)
    ]
