"""What must always hold, each rule as one query that must find nothing.

In:  a database.    Out: for each rule, the rows that break it.
The rules bear the names of the promises that they check: D durability, M state machine, L leases
and budgets, R quarantine. A rule looks at what constraints and triggers guard too, because a guard
can be dropped; and for every rule a test makes the impossible row and sees it reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct

from onward.errors import OnwardError
from onward.lifecycle import ATTEMPT_ENDS, JOB_MOVES, TERMINAL
from onward.store import store
from onward.store.database import Database
from onward.store.migrate import migrations
from onward.store.statements import in_schema

SLACK = 30.0
"""Seconds that a sweep has to take jobs of an ended worker back, before they count as forgotten."""

MOST = 100
"""How many offending rows of one rule are fetched at most."""


class Check(Struct, frozen=True, kw_only=True):
    """One rule. `statement` names its query in `sql/checks.sql`; `fix` is for when it is broken."""

    key: str
    name: str
    meaning: str
    statement: str
    fix: str


class Offence(Struct, frozen=True):
    """A row that breaks a rule: its id, and what is wrong about it."""

    subject: str
    what: str


class Finding(Struct, frozen=True, kw_only=True):
    """What a rule found. `problem`: the query failed. `more`: there are offences beyond these."""

    check: Check
    offences: tuple[Offence, ...] = ()
    more: bool = False
    problem: str | None = None

    @property
    def holds(self) -> bool:
        return not self.offences and self.problem is None


_SWEEP = "start a worker: its sweep takes such jobs back within seconds; if they stay, report it"
_HAND = (
    "rows were changed past Onward's guards: keep a copy of the database, look at the job with "
    "onward job show, and report it if no hand did this"
)

NO_LIMBO = Check(
    key="D4",
    name="no limbo",
    meaning="every job is over, dead, or has a due time or a worker under a live lease",
    statement="check_no_limbo",
    fix=_SWEEP,
)

CHECKS: tuple[Check, ...] = (
    NO_LIMBO,
    Check(
        key="D6",
        name="sound database",
        meaning="the database finds no damage in itself",
        statement="check_sound",
        fix="stop the workers, copy the files, restore a backup (SQLite: sqlite3 FILE .recover)",
    ),
    Check(
        key="M2",
        name="one place",
        meaning="a job is in the live table or in the cold one, never in both",
        statement="check_one_place",
        fix=_HAND,
    ),
    Check(
        key="M2",
        name="whole history",
        meaning="attempts 1 to n without gaps, one record for each closed attempt",
        statement="check_history_whole",
        fix=_HAND,
    ),
    Check(
        key="M2",
        name="owned history",
        meaning="no attempt without its job",
        statement="check_history_owned",
        fix=_HAND,
    ),
    Check(
        key="M2",
        name="last attempt",
        meaning="the state of a job and the end of its last attempt agree",
        statement="check_last_attempt",
        fix=_HAND,
    ),
    Check(
        key="M4",
        name="columns of live jobs",
        meaning="an owner and a start while it runs, an end when it is dead",
        statement="check_live_columns",
        fix=_HAND,
    ),
    Check(
        key="M4",
        name="columns of finished jobs",
        meaning="each ended by a move that the table of the job's life has",
        statement="check_finished_columns",
        fix=_HAND,
    ),
    Check(
        key="M4",
        name="columns of attempts",
        meaning="each closed by an event that goes with its state",
        statement="check_attempt_columns",
        fix=_HAND,
    ),
    Check(
        key="L2",
        name="attempt numbers",
        meaning="each attempt number of a job is given out once",
        statement="check_attempt_numbers",
        fix=_HAND,
    ),
    Check(
        key="L4",
        name="budgets",
        meaning="failures and losses since the last requeue are within budget and as history says",
        statement="check_budgets",
        fix=_HAND,
    ),
    Check(
        key="R2",
        name="reason of death",
        meaning="a dead job says why it died",
        statement="check_dead_reason",
        fix=_HAND,
    ),
    Check(
        key="R2",
        name="quarantine",
        meaning="nothing leaves quarantine but by requeue or discard",
        statement="check_quarantine",
        fix=_HAND,
    ),
    Check(
        key="L6",
        name="workers",
        meaning="a worker has a state, an end if it ended, and a lease that is renewed or swept",
        statement="check_workers",
        fix="start a worker: its sweep ends leases that are over; onward workers shows them all",
    ),
    Check(
        key="M1",
        name="guards",
        meaning="triggers, functions and types that refuse impossible rows are as they were made",
        statement="check_guards",
        fix="make it again: its text is in Onward's migrations",
    ),
)


def run_checks(database: Database, *, slack: float = SLACK, limit: int = MOST) -> list[Finding]:
    """Ask for every rule what breaks it.

    Args:
        database: where to look; nothing is changed.
        slack: seconds that a sweep has to take the jobs of an ended worker back.
        limit: how many offending rows of one rule at most.
    """
    return [run_check(check, database, slack=slack, limit=limit) for check in CHECKS]


def run_check(
    check: Check, database: Database, *, slack: float = SLACK, limit: int = MOST
) -> Finding:
    """Ask what breaks one rule. That its query cannot run is a finding too."""
    tables = _tables(database.dialect, database.schema)
    params = {"seconds": slack, "limit": limit + 1, **tables}
    try:
        rows = database.read(store.read, check.statement, **params)
    except OnwardError as error:
        return Finding(check=check, problem=error.what)
    offences = tuple(Offence(str(row[0]), str(row[1])) for row in rows[:limit])
    return Finding(check=check, offences=offences, more=len(rows) > limit)


@cache
def _tables(dialect: str, schema: str) -> Mapping[str, Any]:
    """What the queries compare with: the tables of the job's life, and the migrations' guards."""
    return {
        "moves": _json(last_moves()),
        "ends": _json(closing_events()),
        "guards": _json(guards(dialect, schema or "onward")),
    }


def last_moves() -> list[str]:
    """Every legal move that ends a job, as `from event state end`; `-`: the attempt had ended."""
    return [
        f"{before} {event} {after} {end}"
        for (before, event), after in JOB_MOVES.items()
        if after in TERMINAL
        for end in sorted(ATTEMPT_ENDS.get((before, event), {"-"}))
    ]


def closing_events() -> list[str]:
    """Every legal end of an attempt after which the job is still live, as `event state`."""
    return [
        f"{event} {end}"
        for (before, event), ends in ATTEMPT_ENDS.items()
        if JOB_MOVES[before, event] not in TERMINAL
        for end in sorted(ends)
    ]


class Guard(Struct, frozen=True):
    """Something in a schema that refuses what must not be: a trigger, a domain, a function that is
    more than an expression. Its text is what the database keeps word for word: SQLite of a trigger,
    PostgreSQL of a function.
    """

    kind: str
    name: str
    text: str | None = None


_MADE = re.compile(
    r"^(CREATE|DROP) (?:OR REPLACE )?(TRIGGER|DOMAIN|FUNCTION(?!.* LANGUAGE sql))"
    r" (?:onward\.)?(\w+)",
    re.MULTILINE,
)
_KEPT = {
    ("sqlite", "trigger"): re.compile(r"(CREATE .*?\nEND);", re.DOTALL),
    ("postgres", "function"): re.compile(r"CREATE .*? AS \$\$(.*?)\$\$;", re.DOTALL),
}


def guards(dialect: str, schema: str = "onward") -> list[Guard]:
    """The guards that a database of today's schema has."""
    made: dict[tuple[str, str], Guard] = {}
    for migration in migrations(dialect):
        for found in _MADE.finditer(migration.text):
            kind, name = found[2].lower(), found[3]
            made.pop((kind, name), None)
            if found[1] == "CREATE":
                kept = _KEPT.get((dialect, kind))
                body = kept and kept.match(migration.text, found.start())
                text = in_schema(body[1], schema) if body else None
                made[kind, name] = Guard(kind, name, text)
    return list(made.values())


def _json(values: Iterable[Any]) -> str:
    return msgspec.json.encode(list(values)).decode()
