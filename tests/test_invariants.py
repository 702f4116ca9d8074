"""Every rule finds its fault, and finds nothing where there is none.

A check that cannot fail is worth nothing: each fault below makes a row that Onward never makes, by
bare SQL with the database's own guards taken away, and its check must report just that row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import NamedTuple

import pytest

from onward.invariants import CHECKS, Check, Finding, guards, run_check, run_checks
from onward.policy import Returned
from onward.store.database import Database
from onward.store.statements import twins
from onward.store.url import open_database
from tests.store.builders import Hand, hand, loosen
from tests.support.scene import RAISED, Scene


@pytest.fixture
def scene(quick_database_url: str) -> Iterator[Scene]:
    """An empty database, moved by hand."""
    with closing(open_database(quick_database_url)) as database:
        yield Scene(database)


def by_statement(name: str) -> Check:
    return next(check for check in CHECKS if check.statement == name)


def unguard(dba: Hand) -> None:
    """Take away what refuses impossible rows: triggers, and CHECKs of tables and of types."""
    for trigger in triggers(dba.dialect):
        drop_guard(dba, trigger)
    if dba.dialect == "sqlite":
        dba.sql("PRAGMA ignore_check_constraints = ON")
        loosen(dba)
        return
    found = dba.sql(
        "SELECT conrelid::regclass::text, conname FROM pg_constraint"
        " WHERE contype = 'c' AND conrelid <> 0"
    )
    for table, name in found:
        dba.sql(f"ALTER TABLE {table} DROP CONSTRAINT {name}")
    found = dba.sql(
        "SELECT contypid::regtype::text, conname FROM pg_constraint"
        " WHERE contypid <> 0 AND connamespace = 'onward'::regnamespace"
    )
    for domain, name in found:
        dba.sql(f"ALTER DOMAIN {domain} DROP CONSTRAINT {name}")


def drop_guard(dba: Hand, trigger: str) -> None:
    if dba.dialect == "sqlite":
        dba.sql(f"DROP TRIGGER {trigger}")
        return
    ((table,),) = dba.sql(
        "SELECT tgrelid::regclass::text FROM pg_trigger WHERE tgname = :name", name=trigger
    )
    dba.sql(f"DROP TRIGGER {trigger} ON {table}")


# --- healthy --------------------------------------------------------------------------------------


def test_a_healthy_database_with_jobs_in_every_state_breaks_no_rule(scene: Scene) -> None:
    scene.everything()
    found = [finding for finding in run_checks(scene.database) if not finding.holds]
    assert found == []


def test_every_rule_has_its_own_statement_and_every_statement_is_a_rule() -> None:
    written = {name for name in twins() if name.startswith("check_")}
    assert {check.statement for check in CHECKS} == written
    assert len(CHECKS) == len(written)


def test_every_rule_has_a_fault() -> None:
    assert {fault.check for fault in FAULTS} | {"check_sound", "check_guards"} == {
        c.statement for c in CHECKS
    }


# --- one fault for each way to break a rule -------------------------------------------------------


class Fault(NamedTuple):
    """A job or worker made by legal moves, and the statement that makes it impossible."""

    check: str
    make: Callable[[Scene], str]
    sql: str
    slack: float = 30.0


def queued(scene: Scene) -> str:
    return scene.enqueue()


def running(scene: Scene) -> str:
    return scene.claim(scene.enqueue())


def retried(scene: Scene) -> str:
    return scene.attempt(scene.attempt(scene.enqueue(), RAISED), RAISED)


def succeeded(scene: Scene) -> str:
    return scene.attempt(scene.attempt(scene.enqueue(), RAISED), Returned(result="3"))


def dead(scene: Scene) -> str:
    return scene.dead()


def under_lost_worker(scene: Scene) -> str:
    worker = scene.start_worker()
    id = scene.claim(scene.enqueue(), worker)
    scene.lose_worker(worker)
    return id


def under_silent_worker(scene: Scene) -> str:
    return scene.claim(scene.enqueue(), scene.start_worker(lease=-60.0))


def worker(scene: Scene) -> str:
    return scene.start_worker()


def silent_worker(scene: Scene) -> str:
    return scene.start_worker(lease=-60.0)


def worker_for_ever(scene: Scene) -> str:
    return scene.start_worker(lease=1e8)


NOTHING = "SELECT 1"

FAULTS = [
    Fault("check_no_limbo", under_lost_worker, NOTHING, slack=-1.0),
    Fault("check_no_limbo", under_silent_worker, NOTHING),
    Fault("check_no_limbo", running, "DELETE FROM onward.worker"),
    Fault("check_no_limbo", queued, "UPDATE onward.job SET state = 'retrying' WHERE id = :id"),
    Fault(
        "check_one_place",
        succeeded,
        "INSERT INTO onward.job (id, task, queue, priority, state, attempt, run_at, created_at,"
        " max_attempts, max_losses, failures, losses, budget_from, args)"
        " SELECT id, task, queue, priority, 'queued', attempt, run_at, created_at,"
        " max_attempts, max_losses, failures, losses, budget_from, args"
        " FROM onward.finished WHERE id = :id",
    ),
    Fault(
        "check_history_whole",
        succeeded,
        "DELETE FROM onward.attempt WHERE job = :id AND number = 1",
    ),
    Fault("check_history_whole", queued, "UPDATE onward.job SET attempt = 2 WHERE id = :id"),
    Fault("check_history_whole", dead, "UPDATE onward.attempt SET number = 2 WHERE job = :id"),
    Fault("check_history_owned", succeeded, "DELETE FROM onward.finished WHERE id = :id"),
    Fault("check_last_attempt", dead, "UPDATE onward.attempt SET event = 'retry' WHERE job = :id"),
    Fault(
        "check_last_attempt",
        succeeded,
        "UPDATE onward.finished SET attempt_state = 'failed' WHERE id = :id",
    ),
    Fault("check_live_columns", running, "UPDATE onward.job SET worker = NULL WHERE id = :id"),
    Fault("check_live_columns", dead, "UPDATE onward.job SET finished_at = NULL WHERE id = :id"),
    Fault("check_live_columns", queued, "UPDATE onward.job SET started_at = run_at WHERE id = :id"),
    Fault(
        "check_finished_columns",
        succeeded,
        "UPDATE onward.finished SET event = 'drop' WHERE id = :id",
    ),
    Fault(
        "check_finished_columns",
        succeeded,
        "UPDATE onward.finished SET result = NULL WHERE id = :id",
    ),
    Fault(
        "check_attempt_columns",
        retried,
        "UPDATE onward.attempt SET event = 'recover' WHERE job = :id AND number = 2",
    ),
    Fault(
        "check_attempt_numbers",
        running,
        "INSERT INTO onward.attempt (job, number, state, event, worker, started_at, ended_at)"
        " SELECT id, attempt, 'failed', 'retry', worker, started_at, started_at"
        " FROM onward.job WHERE id = :id",
    ),
    Fault(
        "check_attempt_numbers",
        succeeded,
        "INSERT INTO onward.attempt (job, number, state, event, worker, started_at, ended_at)"
        " SELECT id, attempt, 'failed', 'retry', worker, started_at, started_at"
        " FROM onward.finished WHERE id = :id",
    ),
    Fault("check_budgets", retried, "UPDATE onward.job SET failures = 1 WHERE id = :id"),
    Fault("check_budgets", retried, "UPDATE onward.job SET max_attempts = 1 WHERE id = :id"),
    Fault("check_dead_reason", dead, "UPDATE onward.attempt SET reason = NULL WHERE job = :id"),
    Fault(
        "check_quarantine",
        dead,
        "UPDATE onward.job SET state = 'queued', attempt = attempt + 1, started_at = NULL,"
        " finished_at = NULL WHERE id = :id",
    ),
    Fault("check_quarantine", retried, "UPDATE onward.job SET budget_from = 2 WHERE id = :id"),
    Fault("check_workers", worker, "UPDATE onward.worker SET state = 'lost' WHERE id = :id"),
    Fault("check_workers", silent_worker, NOTHING),
    Fault("check_workers", worker_for_ever, NOTHING),
]


@pytest.mark.parametrize(
    "fault",
    FAULTS,
    ids=[f"{f.check}-{f.make.__name__}-{n}" for n, f in enumerate(FAULTS)],
)
def test_a_rule_reports_the_row_that_breaks_it(scene: Scene, fault: Fault) -> None:
    healthy = queued(scene)
    id = fault.make(scene)
    check = by_statement(fault.check)
    if fault.sql != NOTHING:
        assert run_check(check, scene.database, slack=fault.slack).holds
    with hand(scene.database) as dba:
        unguard(dba)
        dba.sql(fault.sql, id=id) if ":id" in fault.sql else dba.sql(fault.sql)
    finding = run_check(check, scene.database, slack=fault.slack)
    assert finding.problem is None
    assert {offence.subject for offence in finding.offences} == {id}
    assert healthy not in str(finding.offences)


def triggers(dialect: str) -> list[str]:
    return [guard.name for guard in guards(dialect) if guard.kind == "trigger"]


@pytest.mark.parametrize("number", range(6))
def test_a_guard_that_was_dropped_is_missed(scene: Scene, number: int) -> None:
    expected = triggers(scene.database.dialect)
    assert len(expected) == 6
    with hand(scene.database) as dba:
        drop_guard(dba, expected[number])
    finding = run_check(by_statement("check_guards"), scene.database)
    assert [offence.subject for offence in finding.offences] == [expected[number]]


def test_a_guard_that_is_switched_off_is_missed(postgres_database: str) -> None:
    with closing(open_database(postgres_database)) as database:
        database.migrate()
        with hand(database) as dba:
            dba.sql("ALTER TABLE onward.job DISABLE TRIGGER job_moves")
        finding = run_check(by_statement("check_guards"), database)
    assert [offence.subject for offence in finding.offences] == ["job_moves"]


HOLLOWED = {
    "a trigger": (
        "sqlite",
        "onward_job_born",
        "DROP TRIGGER onward_job_born",
        "CREATE TRIGGER onward_job_born BEFORE INSERT ON onward_job WHEN 0 BEGIN SELECT 1; END",
    ),
    "a function": (
        "postgres",
        "check_birth",
        "CREATE OR REPLACE FUNCTION jobs.check_birth() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN RETURN NULL; END'",
    ),
    "a function that is gone": (
        "postgres",
        "claim",
        "DROP FUNCTION jobs.claim(uuid, text, text, smallint, float8, uuid, integer)",
    ),
    "a type": ("postgres", "label", "ALTER DOMAIN jobs.label DROP CONSTRAINT label_check"),
}


@pytest.mark.parametrize("how", HOLLOWED)
def test_a_guard_that_was_hollowed_out_is_missed(
    request: pytest.FixtureRequest, tmp_path: object, how: str
) -> None:
    """It is still there, by its name; what it said it says no more. In a schema of any name."""
    dialect, name, *texts = HOLLOWED[how]
    url, schema = f"sqlite:///{tmp_path}/onward.db", "onward"
    if dialect == "postgres":
        url, schema = request.getfixturevalue("postgres_database"), "jobs"
    with closing(open_database(url, schema=schema)) as database:
        database.migrate()
        assert run_check(by_statement("check_guards"), database).holds
        with hand(database) as dba:
            for text in texts:
                dba.sql(text)
        finding = run_check(by_statement("check_guards"), database)
    assert [offence.subject for offence in finding.offences] == [name]


def test_a_damaged_page_is_found(tmp_path: object) -> None:
    path = f"{tmp_path}/onward.db"
    with closing(open_database(f"sqlite:///{path}")) as database:
        Scene(database).enqueue()
        with hand(database) as dba:
            ((root,),) = dba.sql("SELECT rootpage FROM sqlite_schema WHERE name = 'onward_job_due'")
            ((size,),) = dba.sql("PRAGMA page_size")
    with open(path, "r+b") as file:
        file.seek((root - 1) * size)
        file.write(b"\x00" * size)
    with closing(open_database(f"sqlite:///{path}")) as database:
        assert not sound(database).holds


def test_a_constraint_that_rows_may_break_is_found(postgres_database: str) -> None:
    with closing(open_database(postgres_database)) as database:
        database.migrate()
        assert sound(database).holds
        with hand(database) as dba:
            dba.sql("ALTER TABLE onward.job ADD CONSTRAINT later CHECK (priority > 0) NOT VALID")
        assert [offence.subject for offence in sound(database).offences] == ["later"]


def sound(database: Database) -> Finding:
    return run_check(by_statement("check_sound"), database)


# --- how findings are told ------------------------------------------------------------------------


def test_a_sweep_has_time_before_its_jobs_count_as_forgotten(scene: Scene) -> None:
    under_lost_worker(scene)
    assert run_check(by_statement("check_no_limbo"), scene.database).holds


def test_many_offences_are_cut_and_the_finding_says_so(scene: Scene) -> None:
    worker = scene.start_worker(lease=-60.0)
    for _ in range(3):
        scene.claim(scene.enqueue(), worker)
    check = by_statement("check_no_limbo")
    cut = run_check(check, scene.database, limit=2)
    whole = run_check(check, scene.database, limit=3)
    assert (len(cut.offences), cut.more) == (2, True)
    assert (len(whole.offences), whole.more) == (3, False)


def test_a_query_that_cannot_run_is_a_finding(scene: Scene) -> None:
    with hand(scene.database) as dba:
        dba.sql("DROP VIEW onward.jobs")
    finding = run_check(by_statement("check_dead_reason"), scene.database)
    assert not finding.holds
    assert finding.problem
