"""The search by power cuts and failing disks, in its fast form, and that it finds what is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import apsw
import pytest

from onward.store import sqlite_writer, statements
from onward.store.sqlite import SqliteDatabase
from onward.store.sqlite_apsw import ApswConnection
from onward.store.sqlite_driver import Connection
from onward.store.statements import Rows, Statement
from tests.proof.disk import CUTS, LIES, Fault
from tests.proof.power import (
    KINDS,
    SCRIPTS,
    Case,
    Course,
    Script,
    course,
    every_operation,
    with_tables,
)
from tests.proof.power import search as deep
from tests.proof.report import Budget, Report
from tests.proof.tiers import first

FEWEST = {
    "enqueue": 50,
    "claim and finish": 100,
    "retry, bury, requeue, discard": 100,
    "cancel": 60,
    "lose, sweep, bury": 80,
    "migrate and prune": 120,
}
"""At least so many operations of the disk each script comes to: one case each."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_no_fault_of_a_disk_loses_what_was_acknowledged(script: Script) -> None:
    """One fault at every operation of the disk, of a kind taken by chance."""
    report = Report("power", "sqlite", 1)
    told = course(script, with_tables())
    for fault in every_operation(told, report.seed):
        Case(told, fault, report).run()
    assert report.violations == [], "\n".join(report.lines())
    assert report.did["cases"] == len(told.operations) >= FEWEST[script.name]
    assert all(report.did[kind] for kind in KINDS)
    assert set(report.sometimes) >= {
        "an error reached the caller",
        "what was under way was not there",
        "what was under way was there",
        "the power went while the file was being closed",
    }


def test_the_power_may_go_again_during_the_recovery() -> None:
    """What the first cut left is recovered, in part, and what that left is recovered again."""
    report = Report("power", "sqlite", 2)
    files = with_tables()
    for script in (SCRIPTS[1], SCRIPTS[4]):
        told = course(script, files)
        for number, fault in enumerate(every_operation(told, report.seed)):
            if number % 8 == 0:
                twice = Fault(CUTS[number // 8 % len(CUTS)], number % 60, number)
                Case(told, fault, report, twice=twice).run()
    assert report.violations == [], "\n".join(report.lines())
    assert report.sometimes["the power went during the recovery"] == report.did["cases"] >= 25


def test_the_deep_form_ends_with_its_budget() -> None:
    report = deep(3, Budget(0.0))
    assert report.violations == []


# --- that it finds what is wrong ------------------------------------------------------------------


def found(**wrong: Any) -> list[str]:
    """The first violations that the search meets within its fast bounds."""
    report = Report("power", "sqlite", 1)
    files = with_tables()
    for script in reversed(SCRIPTS):
        try:
            told = course(script, files)
        except Exception as error:
            return [f"{script.name} on a sound disk: {error!r}"]
        if met := _first(told, report, wrong):
            return met
    return []


def _first(told: Course, report: Report, wrong: Any) -> list[str]:
    for fault in every_operation(told, report.seed):
        Case(told, fault, report, **wrong).run()
        if report.violations:
            break
    return report.violations


@pytest.mark.parametrize(
    "wrong",
    [
        {"synchronous": "NORMAL"},
        {"synchronous": "OFF"},
        {"flaw": LIES},
    ],
    ids=lambda wrong: "-".join(wrong.values()),
)
def test_lost_commits_are_found(wrong: dict[str, str]) -> None:
    """Without FULL, or on a disk that lies about its syncs, acknowledged commits are lost."""
    assert any("acknowledged writes are lost" in line for line in found(**wrong))


Patch = Callable[[pytest.MonkeyPatch], None]


def commit_error_ignored(patch: pytest.MonkeyPatch) -> None:
    """The answer goes out although the commit has failed."""
    rows = ApswConnection.rows

    def wrong(self: ApswConnection, text: str, params: Any = None) -> Rows:
        with contextlib.suppress(*((apsw.Error,) if text == "COMMIT" else ())):
            return rows(self, text, params)
        return []

    patch.setattr(ApswConnection, "rows", wrong)


def raw_errors(patch: pytest.MonkeyPatch) -> None:
    """The driver's error reaches the caller as it is."""

    def wrong(self: SqliteDatabase, error: BaseException) -> BaseException:
        return error

    patch.setattr(SqliteDatabase, "translate", wrong)


def migration_in_pieces(patch: pytest.MonkeyPatch) -> None:
    """A migration whose statements are committed one by one."""
    migrate = SqliteDatabase._migrate  # pyright: ignore[reportPrivateUsage]

    class Bare:
        def __init__(self, connection: Connection) -> None:
            self.script = connection.script
            self._rows = connection.rows

        def rows(self, text: str, params: Any = None) -> Rows:
            return [] if text in {"BEGIN IMMEDIATE", "COMMIT"} else self._rows(text, params)

    def wrong(self: SqliteDatabase, connection: Any) -> list[str]:
        return migrate(self, Bare(connection))  # type: ignore[arg-type]

    patch.setattr(SqliteDatabase, "_migrate", wrong)


def statement_in_pieces(patch: pytest.MonkeyPatch) -> None:
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


def journal_in_memory(patch: pytest.MonkeyPatch) -> None:
    """What a transaction overwrites is kept nowhere but in memory."""

    def wrong(self: SqliteDatabase, connection: Connection) -> None:
        connection.rows("PRAGMA journal_mode=MEMORY")

    patch.setattr(SqliteDatabase, "_into_wal", wrong)


def late_commit(patch: pytest.MonkeyPatch) -> None:
    """The answer goes out first, and the commit is made with the next write."""
    rows = ApswConnection.rows

    def wrong(self: ApswConnection, text: str, params: Any = None) -> Rows:
        raw = self._connection  # pyright: ignore[reportPrivateUsage]
        if text == "BEGIN IMMEDIATE" and raw.in_transaction:
            rows(self, "COMMIT")
        return [] if text == "COMMIT" else rows(self, text, params)

    patch.setattr(ApswConnection, "rows", wrong)


def record_skipped(patch: pytest.MonkeyPatch) -> None:
    """A job goes on, and the attempt that ended is not written to history."""
    right = statements.sqlite_text

    def wrong(name: str) -> tuple[str, ...]:
        return right(name)[1:] if name == "go_on" else right(name)

    patch.setattr(sqlite_writer, "sqlite_text", wrong)


@pytest.mark.parametrize(
    "fault",
    first(
        4,
        [
            commit_error_ignored,
            raw_errors,
            migration_in_pieces,
            statement_in_pieces,
            journal_in_memory,
            late_commit,
            record_skipped,
        ],
    ),
    ids=lambda fault: fault.__name__,
)
def test_a_fault_of_ours_is_found(fault: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that does one thing wrong is caught within the bounds of the fast form."""
    fault(monkeypatch)
    assert found()
