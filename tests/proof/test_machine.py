"""The fast form of the stateful search, and proof that it finds what it is for.

`tests/store/test_model.py` tries five sentences about jobs one by one; this tries sequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from onward import policy
from onward.job import Change, Job, NewJob
from onward.lifecycle import JobState
from onward.store import statements
from onward.store.statements import Statement, Twin
from tests.proof import machine
from tests.proof.machine import Place, first_trouble, places, search
from tests.proof.report import Budget
from tests.proof.tiers import first
from tests.support.functions import written_out

STORIES = 500
POSTGRES_STORIES = 25
"""At least so many; as many more as fit into `POSTGRES_SECONDS`."""
POSTGRES_SECONDS = 15.0

MUST_MEET = frozenset(
    {
        "Duplicate",
        "IdConflict",
        "IllegalTransition",
        "JobNotFound",
        "beats of an ended worker",
        "bury > dead",
        "bury of a lost job",
        "cancel > cancelled",
        "cancel of a lost job",
        "cancel of queued",
        "cancel of running",
        "cancel of waiting",
        "claims by a worker that is not active",
        "claims from a remembered place",
        "clock set back",
        "discard of dead",
        "drop > cancelled",
        "expire of queued",
        "finishes of a pruned job",
        "finishes of another attempt by the owner",
        "finishes refused",
        "finishes written twice",
        "follow-ups",
        "losses refused",
        "pruned",
        "recover of a lost job",
        "release > queued",
        "requeue of dead",
        "retry > queued",
        "snooze > queued",
        "succeed > succeeded",
        "suspended",
        "unblock of waiting",
        "workers forgotten",
        "workers lost by lease",
    }
)
"""A search that has not met one of these was too tame."""


@pytest.fixture(scope="module")
def sqlite() -> Generator[Place]:
    with places("apsw") as (place,):
        yield place


@pytest.fixture(scope="module")
def postgres() -> Generator[Place]:
    with places("postgres") as (place,):
        yield place


@pytest.mark.parametrize("first", [1, 1 + STORIES // 2])
def test_sqlite_does_what_the_model_does(first: int, sqlite: Place) -> None:
    """500 stories of 50 moves, in two halves."""
    report = search(sqlite, first, lambda played: played < STORIES // 2)
    assert report.violations == []
    many = STORIES // 2
    assert report.did == {
        "stories": many,
        "tellings on a database": many,
        "moves": many * machine.STEPS,
    }
    assert {name for name in MUST_MEET if not report.sometimes[name]} == set()


def test_the_other_library_does_what_the_model_does() -> None:
    with places("sqlite3") as (place,):
        assert search(place, 10_000, lambda played: played < 40).violations == []


def test_postgresql_does_what_the_model_does(postgres: Place) -> None:
    """The same stories, as many as fit into the time."""
    budget = Budget(POSTGRES_SECONDS)
    report = search(postgres, 1, lambda played: played < POSTGRES_STORIES or budget.left())
    assert report.violations == []
    assert report.did["stories"] >= POSTGRES_STORIES


# --- it finds what is broken ----------------------------------------------------------------------

Break = Callable[[str, str, str, str], None]


@pytest.fixture
def break_statement(monkeypatch: pytest.MonkeyPatch) -> Generator[Break]:
    """Change a statement's text for the time of a test."""

    def change(name: str, dialect: str, old: str, new: str) -> None:
        sound: Mapping[str, Twin] = statements.twins()
        text = sound[name].texts[dialect] if dialect == "sqlite" else written_out(name).text
        assert old in text
        broken = Twin("", {**sound[name].texts, dialect: text.replace(old, new)})
        monkeypatch.setattr(statements, "twins", lambda: {**sound, name: broken})
        _forget_texts()

    yield change
    monkeypatch.undo()
    _forget_texts()


def _forget_texts() -> None:
    for cached in (statements.sqlite_text, statements.postgres_text, statements.psycopg_text):
        cached.cache_clear()


FAULTS = {
    "claims before the due time": ("claim", "AND run_at <= onward.clock()", ""),
    "claims of a draining worker": ("claim", "AND state = 'active'", ""),
    "claims of unknown tasks": ("claim", "AND task IN (SELECT value FROM json_each(:tasks))", ""),
    "claims without order": ("claim", "ORDER BY run_at, id", "ORDER BY run_at DESC, id"),
    "a finish of another attempt": ("finish", "AND j.attempt = c.attempt", ""),
    "a finish of another worker": ("finish", "AND j.worker IS :worker", ""),
    "no record of an attempt": ("go_on", "AND c.value ->> 'ended' IS NOT NULL", "AND 0"),
    "a retry at once": ("go_on", "onward.clock() + max(coalesce(c.value ->> 'delay', 0), 0)", "0"),
    "a start that stays": ("go_on", "IN ('cancelling', 'dead') THEN started", "<> '' THEN started"),
    "a job that lives twice": (
        "enqueue_again",
        "WHERE NOT EXISTS (SELECT 1 FROM onward.finished f WHERE f.id = n.id)",
        "WHERE 1",
    ),
    "a renewal that shortens": ("beat", "max(lease_until, onward.clock() + :lease)", ":lease"),
    "a renewal of the lost": ("beat", "AND state IN ('active', 'draining')", ""),
    "a loss of the renewed": ("lose", "lease_until = :seen AND ", ""),
    "a sweep that leaves some": ("orphans", "state IN ('active', 'draining')", "state <> 'lost'"),
    "refusals that stay": ("prune", "DELETE FROM onward.refusal WHERE", "SELECT 1 WHERE 0 AND"),
    "a hold that hastens": ("hold", "max(run_at, onward.clock() + :seconds)", "onward.clock()"),
}


@pytest.mark.parametrize("fault", first(6, FAULTS))
def test_a_broken_statement_is_found(fault: str, sqlite: Place, break_statement: Break) -> None:
    name, old, new = FAULTS[fault]
    break_statement(name, "sqlite", old, new)
    assert first_trouble(sqlite, range(1, 200)) is not None


POSTGRES_FAULTS = {
    "claims before the due time": ("claim", "AND run_at <= onward.clock()", ""),
    "a finish of another worker": ("finish", "AND j.worker IS NOT DISTINCT FROM c.worker", ""),
    "budgets that stay": ("go_on", "budget_from = s.budget_from", "budget_from = j.budget_from"),
}


@pytest.mark.parametrize("fault", first(1, POSTGRES_FAULTS))
def test_a_broken_statement_is_found_on_postgresql(
    fault: str, postgres: Place, break_statement: Break
) -> None:
    name, old, new = POSTGRES_FAULTS[fault]
    break_statement(name, "postgres", old, new)
    assert first_trouble(postgres, range(1, 60)) is not None


def free_failure(job: Job, reason: str, error: str, **values: Any) -> Change:
    """A failure that is charged to nobody."""
    change = policy.settle(job, policy.Released(), policy.Backoff(), chance=0)
    return replace(change, reason=reason, error=error)


def endless_recovery(job: Job, error: str) -> Change:
    """A loss that is no loss."""
    change = policy.recover(replace(job, losses=-1), error)
    return replace(change, losses=min(job.losses + 1, job.max_losses))


def nothing_wrong(job: NewJob, same: object) -> Iterator[Statement]:
    """A look at a known id that finds nothing to say."""
    return iter(())


PYTHON_FAULTS: dict[str, tuple[str, Any]] = {
    "failures are free": ("onward.policy._failed", free_failure),
    "losses never end": ("tests.proof.machine.recover", endless_recovery),
    "budgets are not made afresh": ("onward.job._FRESH", frozenset[Any]()),
    "a retry has the same number": ("onward.job._MINTING", frozenset[Any]()),
    "one id for two calls": ("onward.store.store._check_same", nothing_wrong),
    "success is not final": ("onward.store.store.TERMINAL", {JobState.CANCELLED}),
}


@pytest.mark.parametrize("fault", first(3, PYTHON_FAULTS))
def test_a_broken_function_is_found(
    fault: str, sqlite: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*PYTHON_FAULTS[fault])
    assert first_trouble(sqlite, range(1, 200)) is not None


def test_what_is_found_is_told_shortly(sqlite: Place, break_statement: Break) -> None:
    """The shortest story has only the moves that matter, in words."""
    break_statement("go_on", "sqlite", "failures = c.value ->> 'failures',", "")
    report = search(sqlite, 1, lambda played: played < 50, most_violations=1)
    (story,) = report.violations
    assert "attempt 1 of job" in story
    assert "  7. " not in story


def test_the_deep_form_ends_with_its_budget() -> None:
    (technique,) = machine.TECHNIQUES
    start = time.monotonic()
    report = technique.run(5, Budget(1.0))
    assert report.violations == []
    assert report.did["tellings on a database"] == 2 * report.did["stories"] > 0
    assert time.monotonic() - start < 30
