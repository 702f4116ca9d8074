"""Breaking any one guard is noticed: for each there is a seeded fault that makes the exhaustive
check fail.

A checker that cannot fail is worth nothing. So each guard is taken away by itself, a condition out
of a statement, a trigger or a CHECK out of the schema, a cell out of the table, and the check that
covers it must report a violation, although the other guards still stand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from onward import invariants
from onward.job import Job
from onward.lifecycle import ATTEMPT_ENDS, JOB_MOVES, TERMINAL, AttemptState, Event, JobState
from onward.store import migrate, statements
from onward.store.database import Database, Refused
from onward.store.migrate import Migration
from onward.store.url import open_database
from tests.store import exhaustive
from tests.store.builders import apply, enqueue, hand, in_state
from tests.support import postgres
from tests.support.functions import written_out

Check = Callable[[Database], Iterator[str]]
Open = Callable[[], Database]


@pytest.fixture(autouse=True)
def tables_as_they_were() -> Iterator[None]:
    """The tables are put back in their own order, which the pages made from them follow."""
    moves, ends = dict(JOB_MOVES), dict(ATTEMPT_ENDS)
    yield
    tables: list[tuple[Any, dict[Any, Any]]] = [(JOB_MOVES, moves), (ATTEMPT_ENDS, ends)]
    for table, was in tables:
        table.clear()
        table.update(was)


@pytest.fixture(scope="module")
def bare_postgres(postgres_url: str) -> Iterator[str]:
    """A database of this module's own, in which each test makes the schema anew."""
    url = postgres.create_database(postgres_url)
    yield url
    postgres.drop_database(postgres_url, url)


@pytest.fixture(params=["sqlite", "postgres"])
def open_empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens and migrates a database when it is called, after the fault has been seeded."""
    opened: list[Database] = []

    def open_() -> Database:
        url = f"sqlite:///{tmp_path}/onward.db"
        if request.param == "postgres":
            url = request.getfixturevalue("bare_postgres")
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute("DROP SCHEMA IF EXISTS onward CASCADE")
        opened.append(open_database(url))
        opened[0].migrate()
        return opened[0]

    yield open_
    for database in opened:
        database.close()


def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["open_empty"])


def triggers(dialect: str) -> list[str]:
    return [guard.name for guard in invariants.guards(dialect) if guard.kind == "trigger"]


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_a_trigger_that_a_later_migration_drops_is_no_guard_that_lacks(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the doctor would find every database damaged; what is made anew counts again."""
    known = triggers(dialect)
    gone, renewed, *_ = known
    later = [
        f"DROP TRIGGER {gone} ON onward.job;\n  DROP TRIGGER {known[2]};\n",
        f"DROP TRIGGER {renewed};\nCREATE TRIGGER {renewed} BEFORE\n",
        "DROP TRIGGER never_there;\n",
    ]
    made = [Migration(9_000 + n, "later", text) for n, text in enumerate(later)]
    all_of_them = [*migrate.migrations(dialect), *made]
    monkeypatch.setattr(invariants, "migrations", {dialect: all_of_them}.get)
    assert triggers(dialect) == [
        *(name for name in known if name not in (gone, renewed)),
        renewed,
    ]


def first(check: Check, database: Database) -> str | None:
    """The first violation, if any: one is enough, and there may be hundreds."""
    try:
        return next(check(database), None)
    except Refused as error:
        return f"a legal move on the way was refused: {error}"


# --- conditions of the statements -----------------------------------------------------------------


class Condition(NamedTuple):
    """A condition of a statement in each dialect, and what stands there when it is broken."""

    statement: str
    sqlite: str
    postgres: str
    check: Check


CONDITIONS: dict[str, Condition] = {
    "finish expects the state": Condition(
        "finish",
        "AND j.state = :before",
        "AND j.state = c.state",
        exhaustive.through_apply,
    ),
    "finish expects the attempt": Condition(
        "finish",
        "AND j.attempt = c.attempt",
        "AND j.attempt = c.attempt",
        exhaustive.through_apply,
    ),
    "finish expects the owner": Condition(
        "finish",
        "AND j.worker IS :worker",
        "AND j.worker IS NOT DISTINCT FROM c.worker",
        exhaustive.through_apply,
    ),
    "go_on expects the state": Condition(
        "go_on",
        "AND {job}.state = c.value ->> 'before'",
        "AND {j}.state = {c}.before",
        exhaustive.through_apply,
    ),
    "go_on expects the attempt": Condition(
        "go_on",
        "AND {job}.attempt = c.value ->> 'attempt'",
        "AND {j}.attempt = {c}.attempt",
        exhaustive.through_apply,
    ),
    "go_on expects the owner": Condition(
        "go_on",
        "AND {job}.worker IS c.value ->> 'worker'",
        "AND j.worker IS NOT DISTINCT FROM c.worker",
        exhaustive.through_apply,
    ),
    "claim expects a queued job": Condition(
        "claim",
        "state = 'queued'",
        "state = 'queued'",
        exhaustive.through_claim,
    ),
    "claim expects an active worker": Condition(
        "claim",
        "AND state = 'active'",
        "AND state = 'active'",
        exhaustive.through_claim,
    ),
}


def without(text: str, condition: str) -> str:
    """The statement with a condition taken out wherever it stands, for whatever name the row has
    there, and however it is spelt for the planner's sake.
    """
    text = text.replace("state || '' =", "state =")
    pattern = re.escape(condition)
    for name in ("job", "j", "c"):
        pattern = pattern.replace(re.escape("{" + name + "}"), r"[\w.]+")
    replacement = "TRUE" if not condition.startswith("AND") else ""
    broken, count = re.subn(pattern, replacement, text)
    assert count, f"{condition} does not stand in the statement"
    return broken


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_that_is_taken_out_of_a_statement_is_noticed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, open_empty: Open, name: str
) -> None:
    """Every UPDATE names what it expects; without any one of these words a stale writer would be
    heard.
    """
    condition = CONDITIONS[name]
    spelt = condition.sqlite if dialect(request) == "sqlite" else condition.postgres
    twin = statements.twins()[condition.statement]
    sqlite = dialect(request) == "sqlite"
    right = twin.texts["sqlite"] if sqlite else written_out(condition.statement).text
    broken = {**twin.texts, dialect(request): without(right, spelt)}
    monkeypatch.setitem(statements.twins(), condition.statement, twin._replace(texts=broken))
    with fresh_texts():
        assert first(condition.check, open_empty())


class fresh_texts:
    """Statements are spelt once a process: spell them anew, now and afterwards."""

    def __enter__(self) -> None:
        for spelling in (
            statements.sqlite_text,
            statements.postgres_text,
            statements.psycopg_text,
            statements.numbered_text,
        ):
            spelling.cache_clear()

    def __exit__(self, *_: object) -> None:
        self.__enter__()


# --- guards of the schema -------------------------------------------------------------------------


class Guard(NamedTuple):
    """A trigger or a constraint of the schema, by its name without a prefix. What is a constraint
    in SQLite may be a line of a trigger in PostgreSQL.
    """

    name: str
    check: Check
    line: str = ""


TRIGGERS: list[Guard] = [
    Guard("job_born", exhaustive.by_birth),
    Guard("job_moves", exhaustive.by_update),
    Guard("job_leaves", exhaustive.by_leaving),
    Guard("finished_is_final", exhaustive.of_history),
    Guard("attempt_is_final", exhaustive.of_history),
    Guard("worker_moves", exhaustive.of_workers),
]

CONSTRAINTS: list[Guard] = [
    Guard("finished_move", exhaustive.by_finishing),
    Guard("attempt_end", exhaustive.of_endings),
    Guard(
        "job_owner",
        exhaustive.by_update,
        "OR (new.worker IS NULL) <> (new.started_at IS NULL OR new.finished_at IS NOT NULL)",
    ),
    Guard(
        "job_start",
        exhaustive.of_rows,
        "OR (new.state IN ('waiting', 'queued')) <> (new.started_at IS NULL)",
    ),
    Guard(
        "job_end",
        exhaustive.of_rows,
        "OR (new.state = 'dead') <> (new.finished_at IS NOT NULL)",
    ),
    Guard("job_time", exhaustive.of_rows, "OR NOT isfinite(new.run_at)"),
    Guard("worker_times", exhaustive.of_workers),
]

LINES = {
    "the attempt": (exhaustive.by_birth, " AND new.attempt = 1"),
    "the budget": (exhaustive.by_birth, " AND new.budget_from = 1"),
    "the state": (exhaustive.by_birth, "new.state IN ('waiting', 'queued') AND "),
    "failures": (exhaustive.by_birth, " AND new.failures = 0"),
    "losses": (exhaustive.by_birth, " AND new.losses = 0"),
    "what only a begun job has": (
        exhaustive.by_birth,
        "AND num_nonnulls(new.worker, new.started_at, new.finished_at) = 0",
    ),
    "a due time": (exhaustive.by_birth, " AND isfinite(new.run_at)"),
    "the id": (exhaustive.of_history, "new.id <> old.id\n    OR "),
    "spent failures": (exhaustive.of_rows, "OR new.failures > new.max_attempts "),
    "spent losses": (exhaustive.of_rows, "OR new.losses - 1 > new.max_losses "),
    "the budget's start": (exhaustive.of_rows, "OR new.budget_from > new.attempt"),
    "no attempt": (
        exhaustive.by_finishing,
        "\n        AND (ended_from = 'dead') = (attempt_state IS NULL)",
    ),
    "a name": (exhaustive.of_rows, " CHECK (VALUE <> '')"),
    "a priority": (exhaustive.of_rows, " CHECK (VALUE BETWEEN -100 AND 100)"),
    "an ordinal": (exhaustive.of_rows, " CHECK (VALUE >= 1)"),
    "an amount": (exhaustive.of_rows, " CHECK (VALUE >= 0)"),
    "seconds": (exhaustive.of_rows, " CHECK (VALUE > 0)"),
    "the attempt of a retry": (exhaustive.by_update, "WHEN 'running > queued'     THEN 1"),
    "the owner of what is asked to stop": (
        exhaustive.by_update,
        "CASE WHEN new.worker = old.worker THEN 0 END",
    ),
    "the owner of what stays": (
        exhaustive.by_update,
        " AND new.worker IS NOT DISTINCT FROM old.worker",
    ),
}
INSTEAD = {
    "the attempt of a retry": "WHEN 'running > queued' THEN 0",
    "the owner of what is asked to stop": "0",
}
"""The other lines of PostgreSQL's triggers, what sees each of them, and what it is about."""


def without_trigger(text: str, name: str) -> str:
    """The migration without one CREATE TRIGGER."""
    ending = r"\nEND;" if f"CREATE TRIGGER onward_{name} " in text else r"\);"
    pattern = rf"CREATE TRIGGER (onward_)?{name} .*?{ending}"
    broken, count = re.subn(pattern, "", text, flags=re.DOTALL)
    assert count == 1, f"{name} does not stand in the migration"
    return re.sub(rf"ALTER TABLE \S+ ENABLE ALWAYS TRIGGER {name};", "", broken)


def without_constraint(text: str, name: str) -> str:
    """The migration with one CHECK that is always true."""
    start = re.search(rf"CONSTRAINT {name}\s+CHECK \(", text)
    assert start, f"{name} does not stand in the migration"
    depth, end = 1, start.end()
    while depth:
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    return text[: start.start()] + f"CONSTRAINT {name} CHECK (1 = 1)" + text[end:]


def without_line(text: str, line: str, instead: str = "") -> str:
    """The migration without one condition of its types and triggers."""
    assert text.count(line) == 1, f"{line} does not stand in the migration"
    return text.replace(line, instead)


def seed(monkeypatch: pytest.MonkeyPatch, break_: Callable[[str], str]) -> None:
    """Make the next migration apply a broken text."""
    real = migrate.migrations

    def broken(dialect: str) -> tuple[Migration, ...]:
        first_, *rest = real(dialect)
        return (first_._replace(text=break_(first_.text)), *rest)

    monkeypatch.setattr(migrate, "migrations", broken)


@pytest.mark.parametrize("guard", TRIGGERS, ids=lambda guard: guard.name)
def test_a_trigger_that_is_taken_out_of_the_schema_is_noticed(
    monkeypatch: pytest.MonkeyPatch, open_empty: Open, guard: Guard
) -> None:
    """What a DBA's hand could then do is seen to be possible."""
    seed(monkeypatch, lambda text: without_trigger(text, guard.name))
    assert first(guard.check, open_empty())


@pytest.mark.parametrize("guard", CONSTRAINTS, ids=lambda guard: guard.name)
def test_a_constraint_that_is_taken_out_of_the_schema_is_noticed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, open_empty: Open, guard: Guard
) -> None:
    """An impossible row, or an impossible last move, is then seen to be stored."""
    if guard.line and dialect(request) == "postgres":
        seed(monkeypatch, lambda text: without_line(text, guard.line))
    else:
        seed(monkeypatch, lambda text: without_constraint(text, guard.name))
    assert first(guard.check, open_empty())


@pytest.mark.parametrize("about", LINES)
@pytest.mark.parametrize("open_empty", ["postgres"], indirect=True)
def test_a_line_that_is_taken_out_of_a_trigger_is_noticed(
    monkeypatch: pytest.MonkeyPatch, open_empty: Open, about: str
) -> None:
    """Where a trigger says what a row may be, no word of it is there for nothing."""
    check, line = LINES[about]
    seed(monkeypatch, lambda text: without_line(text, line, INSTEAD.get(about, "")))
    assert first(check, open_empty())


SMUGGLE = (
    "CREATE FUNCTION onward.smuggle() RETURNS trigger LANGUAGE plpgsql AS"
    " $$ BEGIN new.started_at := now(); RETURN new; END $$",
    "CREATE TRIGGER zz_smuggle BEFORE INSERT OR UPDATE ON onward.job FOR EACH ROW"
    " WHEN (new.state = 'queued') EXECUTE FUNCTION onward.smuggle()",
)


@pytest.mark.parametrize("open_empty", ["postgres"], indirect=True)
@pytest.mark.parametrize("move", ["birth", "requeue"])
def test_a_trigger_of_somebody_s_own_cannot_store_what_is_refused(
    open_empty: Open, move: str
) -> None:
    """Whatever its name: rows are looked at after all that may still change them."""
    database = open_empty()
    dead = in_state(database, JobState.DEAD)
    with hand(database) as dba:
        for text in SMUGGLE:
            dba.sql(text)
    write = partial(enqueue, database)
    if move == "requeue":
        write = partial(apply, database, dead.move(Event.REQUEUE))
    with pytest.raises(Refused, match="job refuses"):
        write()


@pytest.mark.parametrize("open_empty", ["postgres"], indirect=True)
def test_a_replay_of_changes_is_held_to_the_moves_too(open_empty: Open) -> None:
    """A subscriber, or a restore that passes triggers by."""
    database = open_empty()
    job = in_state(database, JobState.QUEUED)
    with hand(database) as dba:
        dba.sql("SET session_replication_role = replica")
        done, message = exhaustive.attempted(
            dba, ("UPDATE onward.job SET state = 'dead' WHERE id = :id", {"id": job.id})
        )
    assert not done
    assert "queued > dead" in message
    assert "with no start" in message


ARROWS = [
    "waiting > queued",
    "queued > running",
    "running > queued",
    "running > waiting",
    "running > dead",
    "running > cancelling",
    "dead > queued",
]


def with_arrow(text: str, arrow: str, other: str) -> str:
    """The trigger with the after-state of one of its moves exchanged."""
    before, after = arrow.split(" > ")
    sqlite = rf"(old\.state = '{before}'\s+AND new\.state = ')({after})'"
    postgres = rf"(WHEN '{before} > )({after})'"
    broken, count = re.subn(f"{sqlite}|{postgres}", rf"\1\3{other}'", text)
    assert count == 1, f"{arrow} does not stand in the trigger"
    return broken


EXTRA = sorted(
    f"{before} > {after}"
    for before in exhaustive.LIVE
    for after in exhaustive.LIVE
    if before is not after and f"{before} > {after}" not in ARROWS
)


@pytest.mark.parametrize("arrow", EXTRA)
def test_a_move_too_many_in_the_trigger_is_noticed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, open_empty: Open, arrow: str
) -> None:
    """A move that the table does not have cannot be let in by one line of SQL."""
    before, after = arrow.split(" > ")
    last, line = (
        "OR (old.state = 'dead'    AND",
        f"OR (old.state = '{before}' AND new.state = '{after}')",
    )
    if dialect(request) == "postgres":
        last, line = "WHEN 'dead > queued'", f"WHEN '{arrow}' THEN 0"

    def break_(text: str) -> str:
        assert text.count(last) == 1
        return text.replace(last, f"{line} {last}")

    seed(monkeypatch, break_)
    assert first(exhaustive.by_update, open_empty())


@pytest.mark.parametrize("arrow", ARROWS)
def test_a_move_that_is_spelt_wrong_in_the_trigger_is_noticed(
    monkeypatch: pytest.MonkeyPatch, open_empty: Open, arrow: str
) -> None:
    """Each line of the trigger's list is one move of the table: neither missing nor another."""
    seed(monkeypatch, lambda text: with_arrow(text, arrow, "nowhere"))
    assert first(exhaustive.by_update, open_empty())


def test_the_trigger_lists_every_live_move_and_no_other(
    request: pytest.FixtureRequest, open_empty: Open
) -> None:
    """The arrows above are those of the table, so that no line of the trigger goes without its
    fault.
    """
    live = {f"{before} > {to}" for (before, _), to in JOB_MOVES.items() if to not in TERMINAL}
    assert set(ARROWS) == live
    text = migrate.migrations(open_empty().dialect)[0].text
    spelt = r"old\.state = '(\w+)'\s+AND new\.state = '(\w+)'"
    if dialect(request) == "postgres":
        spelt = r"WHEN '(\w+) > (\w+)'"
    found = re.findall(spelt, text)
    assert {f"{before} > {after}" for before, after in found} == live


COMPARISONS = {
    "the attempt of a job that leaves": (
        " AND f.attempt = old.attempt",
        " OR f.attempt <> gone.attempt",
    ),
    "the state of a job that leaves": (
        " AND f.ended_from = old.state",
        " OR f.ended_from <> gone.state",
    ),
    "the owner of a job that leaves": (
        " AND f.worker IS old.worker",
        "\n       OR f.worker IS DISTINCT FROM gone.worker",
    ),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_that_is_taken_out_of_a_trigger_is_noticed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, open_empty: Open, name: str
) -> None:
    """A row in the cold table lets a live one go only if it is about the same state, attempt and
    owner.
    """
    text = COMPARISONS[name][dialect(request) == "postgres"]

    def break_(migration: str) -> str:
        assert migration.count(text) == 1
        return migration.replace(text, "")

    seed(monkeypatch, break_)
    assert first(exhaustive.by_leaving, open_empty())


# --- the table itself -----------------------------------------------------------------------------


def covering(move: tuple[JobState, Event]) -> Check:
    """The check that sees a move by itself: several events may lead from one state to another."""
    before, after = move[0], JOB_MOVES[move]
    if after in TERMINAL:
        return exhaustive.by_finishing
    alone = sum(state is before and to is after for (state, _), to in JOB_MOVES.items()) == 1
    return exhaustive.by_update if alone else exhaustive.of_endings


@pytest.mark.parametrize("move", sorted(JOB_MOVES), ids=lambda move: " ".join(move))
def test_a_cell_that_is_taken_out_of_the_table_is_noticed(
    monkeypatch: pytest.MonkeyPatch, open_empty: Open, move: tuple[JobState, Event]
) -> None:
    """The databases still allow what Python no longer knows: the three guards are one table, or the
    check fails.
    """
    check = covering(move)
    specimens = exhaustive.specimens

    def made_before(database: Database) -> dict[JobState, Job]:
        with monkeypatch.context() as whole:
            whole.setitem(JOB_MOVES, move, after)
            return specimens(database)

    after = JOB_MOVES[move]
    monkeypatch.setattr(exhaustive, "specimens", made_before)
    monkeypatch.delitem(JOB_MOVES, move)
    assert first(check, open_empty())


@pytest.mark.parametrize(
    ("move", "after"),
    [
        ((JobState.QUEUED, Event.BURY), JobState.DEAD),
        ((JobState.SUCCEEDED, Event.REQUEUE), JobState.QUEUED),
        ((JobState.CANCELLING, Event.ASK_CANCEL), JobState.RUNNING),
        ((JobState.QUEUED, Event.SUSPEND), JobState.WAITING),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_cell_that_only_python_has_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    open_empty: Open,
    move: tuple[JobState, Event],
    after: JobState,
) -> None:
    """A new move is in the table, the trigger and the statements, or the check says that it is
    not.
    """
    database = open_empty()
    monkeypatch.setitem(JOB_MOVES, move, after)
    assert first(exhaustive.through_apply, database)


def test_an_end_of_an_attempt_that_only_python_has_is_noticed(
    monkeypatch: pytest.MonkeyPatch, open_empty: Open
) -> None:
    """How an attempt may end is compared too, not only where the job goes."""
    database = open_empty()
    key = (JobState.RUNNING, Event.RETRY)
    ends = ATTEMPT_ENDS[key] | {AttemptState.LOST}
    monkeypatch.setitem(ATTEMPT_ENDS, key, ends)
    assert first(exhaustive.through_apply, database)
