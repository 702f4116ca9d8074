"""The search by kills at statements, in its fast form, and that it finds what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from onward.errors import DatabaseError
from onward.job import Change, Job
from onward.policy import recover
from onward.store import postgres as postgres_module
from onward.store import sqlite_writer, statements
from onward.store.postgres import PostgresDatabase
from onward.store.sqlite_apsw import ApswConnection
from onward.store.sqlite_driver import Connection
from onward.store.statements import Op, Rows, Statement
from tests.proof import power
from tests.proof.kills import (
    OPERATIONS,
    SIDES,
    Death,
    Operation,
    Place,
    Trial,
    on_postgres,
    on_sqlite,
    postgres_place,
    sqlite_place,
)
from tests.proof.report import Budget, Report
from tests.proof.tiers import first

PARTS = 8


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with (sqlite_place if request.param == "sqlite" else postgres_place)() as made:
        yield made


def tried(place: Place, operations: Sequence[Operation], every: int = 1) -> Report:
    """Every boundary of each operation once (or every second, third …), and one death of the next
    worker for each.
    """
    report = Report("kills", place.dialect, 1)
    sides = SIDES[place.dialect]
    for number, operation in enumerate(operations):
        trial = Trial(place, operation, report)
        deaths = list(trial.every_boundary(every, number % every))
        again = Death(1 + number % 12, sides[number % len(sides)])
        trial.die(deaths[number % len(deaths)], again)
        report.did["operations"] += 1
    return report


@pytest.mark.parametrize(
    "every",
    [
        pytest.param(3, id="scaled to every third"),
        pytest.param(1, id="as written", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_death_at_any_statement_leaves_all_or_nothing(
    place: Place, part: int, every: int
) -> None:
    """Before and after every statement, and on PostgreSQL while its answer is awaited."""
    mine = OPERATIONS[part::PARTS]
    report = tried(place, mine, every)
    assert report.violations == [], "\n".join(report.lines())
    assert report.did["operations"] == len(mine)
    assert report.did["kills"] >= len(mine) * 7 // every
    assert report.did["second kills"] >= len(mine) // 2
    assert all(report.did[side] >= 2 * len(mine) // every - 2 for side in SIDES[place.dialect])
    assert set(report.sometimes) >= {
        "asked again",
        "died, it is not",
        "died, it took",
        "lived through it",
    }


def test_the_deep_forms_end_with_their_budget() -> None:
    for search in (on_sqlite, on_postgres):
        assert search(2, Budget(0.0)).violations == []


# --- that it finds what is wrong ------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def steps_committed_apart(patch: pytest.MonkeyPatch) -> None:
    """Each step of a statement is committed for itself."""

    def wrong(connection: Connection, statement: Statement) -> Rows:
        rows: Rows = []
        for number, step in enumerate(statements.sqlite_text(statement.name)):
            if number:
                connection.rows("COMMIT")
                connection.rows("BEGIN IMMEDIATE")
            rows = connection.rows(step, statement.params)
        return rows

    patch.setattr(sqlite_writer, "_rows", wrong)


def no_transaction(patch: pytest.MonkeyPatch) -> None:
    """Several statements of one operation, and each is committed for itself."""

    def wrong(self: PostgresDatabase, connection: Any, op: Op[Any]) -> Any:
        rows: Rows | None = None
        while True:
            try:
                statement = next(op) if rows is None else op.send(rows)
            except StopIteration as end:
                return end.value
            rows = self._rows(connection, statement)  # pyright: ignore[reportPrivateUsage]

    patch.setattr(PostgresDatabase, "_carry_out", wrong)


def child_does_not_commit(patch: pytest.MonkeyPatch) -> None:
    """The answer comes before the commit, which a process that dies never makes."""
    rows = ApswConnection.rows
    parent = os.getpid()

    def wrong(self: ApswConnection, text: str, params: Any = None) -> Rows:
        if text == "COMMIT" and os.getpid() != parent:
            return []
        if text == "BEGIN IMMEDIATE" and self._connection.in_transaction:  # pyright: ignore[reportPrivateUsage]
            rows(self, "COMMIT")
        return rows(self, text, params)

    patch.setattr(ApswConnection, "rows", wrong)


def texts(
    patch: pytest.MonkeyPatch, name: str, sqlite: tuple[str, str], postgres: tuple[str, str]
) -> None:
    """A statement with one piece of its text replaced, on both databases."""
    right, right_postgres = statements.sqlite_text, statements.psycopg_text
    assert any(sqlite[0] in step for step in right(name))
    assert postgres[0] in right_postgres(name, "onward").decode()

    def wrong(asked: str) -> tuple[str, ...]:
        steps = right(asked)
        return tuple(step.replace(*sqlite) for step in steps) if asked == name else steps

    def wrong_postgres(asked: str, schema: str) -> bytes:
        text = right_postgres(asked, schema)
        return text.decode().replace(*postgres).encode() if asked == name else text

    patch.setattr(sqlite_writer, "sqlite_text", wrong)
    patch.setattr(postgres_module, "psycopg_text", wrong_postgres)


def record_skipped(patch: pytest.MonkeyPatch) -> None:
    """A job goes on, and the attempt that ended is not written to history."""
    kept = "->> 'ended' IS NOT NULL"
    texts(patch, "go_on", (kept, kept + " AND 0"), ("ended IS NOT NULL", "ended = ''"))


def cancelling_left(patch: pytest.MonkeyPatch) -> None:
    """The sweep takes back what runs, and forgets what was asked to stop."""
    text = "ORDER BY CAST(j.id", "AND j.state = 'running' ORDER BY CAST(j.id"
    texts(patch, "orphans", ("ORDER BY +j.id", "AND j.state = 'running' ORDER BY +j.id"), text)


def attempt_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A retry does not count up: the number of the attempt stays as it was."""
    texts(
        patch,
        "go_on",
        ("attempt = c.value ->> 'next_attempt'", "attempt = c.value ->> 'attempt'"),
        ("attempt = s.next_attempt", "attempt = s.attempt"),
    )


def finished_not_asked(patch: pytest.MonkeyPatch) -> None:
    """A repeated enqueue does not look whether the job is over."""
    text = "WHERE NOT EXISTS (SELECT 1 FROM onward{}finished f WHERE f.id = n.id)"
    texts(
        patch,
        "enqueue_again",
        (text.format("_"), "WHERE true"),
        (text.format("."), ""),
    )


def loss_not_charged(patch: pytest.MonkeyPatch) -> None:
    """A loss costs its job nothing."""

    def wrong(job: Job, error: str) -> Change:
        change = recover(job, error)
        return replace(change, losses=job.losses)

    patch.setattr(power, "recover", wrong)


BOTH: tuple[tuple[Patch, str], ...] = (
    (record_skipped, "go on"),
    (cancelling_left, "ask_cancel"),
    (attempt_not_compared, "go on"),
    (finished_not_asked, "enqueue again"),
    (loss_not_charged, "claim"),
)
FAULTS: list[tuple[str, Patch, str]] = [
    ("sqlite", steps_committed_apart, "go on"),
    ("sqlite", child_does_not_commit, "enqueue 1"),
    ("postgres", no_transaction, "follow-ups"),
    ("postgres", no_transaction, "bury worker"),
    *((dialect, fault, name) for dialect in ("sqlite", "postgres") for fault, name in BOTH),
]


@pytest.mark.parametrize(
    ("place", "fault", "name"),
    first(6, FAULTS),
    indirect=["place"],
    ids=[f"{place}-{fault.__name__}-{name}" for place, fault, name in FAULTS],
)
def test_a_fault_of_ours_is_found(
    place: Place, fault: Patch, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that does one thing wrong is caught within the bounds of the fast form: by a rule, by
    what is left after a death, or because it cannot even do the thing undisturbed.
    """
    operations = [operation for operation in OPERATIONS if operation.name == name]
    assert operations
    fault(monkeypatch)
    try:
        violations = tried(place, operations).violations
    except DatabaseError as error:
        violations = [str(error)]
    assert violations
