"""The explorer in its fast form: all states within small bounds; and that it finds what is wrong.

The deep form goes on to three workers and three attempts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
from msgspec.structs import replace

from onward.job import Change, Job
from onward.policy import recover, settle
from onward.store import store
from onward.store.statements import Op
from onward.store.url import open_database
from tests.proof import explorer_deeds
from tests.proof.explorer import explore
from tests.proof.explorer_databases import PostgresPlace, SqlitePlace
from tests.proof.explorer_place import Bounds, Spoil
from tests.proof.report import Budget, Report
from tests.proof.tiers import first

SEED = 1
FOREVER = Budget(float("inf"))
TWO_BY_TWO = Bounds(workers=2, jobs=2, attempts=2, rich=False)
"""Two workers and two jobs: who comes before whom."""
ALONE = Bounds(workers=1, jobs=1, attempts=2)
"""One worker and one job, and everything that can befall them."""
TWO_WORKERS = Bounds(workers=2, jobs=1, attempts=2, rich=False)
"""All that PostgreSQL is asked, where a deed takes milliseconds."""
TWO_JOBS = Bounds(workers=1, jobs=2, attempts=2, rich=False)

EVERYWHERE = {
    "adopted",
    "beats of the lost",
    "claims whose answer was lost",
    "late ends",
    "leases that ran out",
    "refusals kept",
    "swept to queued",
    "swept to dead",
}
BETWEEN_TWO = {"claims beside a job to be swept", "late ends beside the next owner"}
RICH = {
    "cancels that took",
    "decided again",
    "discards that took",
    "ends after a cancel",
    "learnt that it took",
    "requeues that took",
    "stopped with jobs in hand",
    "swept to cancelled",
}


def proved(report: Report, states: int, edges: int, met: set[str]) -> None:
    """Everything was searched, it was as much as that, and nothing was wrong."""
    assert report.violations == []
    assert report.did["exhausted"] == 1
    assert (report.did["states"], report.did["edges"]) == (states, edges)
    assert {what for what in met if not report.sometimes[what]} == set()


def test_two_workers_and_two_jobs_on_sqlite() -> None:
    with closing(SqlitePlace()) as place:
        report = explore(place, TWO_BY_TWO, SEED, FOREVER)
    proved(report, 2_349, 13_337, EVERYWHERE | BETWEEN_TWO)


def test_all_that_can_befall_one_job_on_sqlite() -> None:
    with closing(SqlitePlace()) as place:
        report = explore(place, ALONE, SEED, FOREVER)
    proved(report, 2_114, 27_198, EVERYWHERE | RICH)


def test_two_workers_on_postgres(postgres_database: str) -> None:
    with closing(open_database(postgres_database)) as database:
        database.migrate()
    with closing(PostgresPlace(postgres_database)) as place:
        report = explore(place, TWO_WORKERS, SEED, FOREVER)
    proved(report, 192, 1_166, EVERYWHERE)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_two_workers_and_two_jobs_on_postgres(postgres_database: str) -> None:
    """As many states and moves as on SQLite, to the last one."""
    with closing(open_database(postgres_database)) as database:
        database.migrate()
    with closing(PostgresPlace(postgres_database)) as place:
        report = explore(place, TWO_BY_TWO, SEED, FOREVER)
    proved(report, 2_349, 13_337, EVERYWHERE | BETWEEN_TWO)


def test_another_seed_deals_other_ids_and_finds_the_same() -> None:
    reports: list[Report] = []
    for seed in (2, 3):
        with closing(SqlitePlace()) as place:
            reports.append(explore(place, TWO_WORKERS, seed, FOREVER))
    assert reports[0].did == reports[1].did
    assert reports[0].violations == reports[1].violations == []


# --- it finds what is wrong -----------------------------------------------------------------------

SPOILT = {
    "a worker that ended claims": (
        "claim",
        "AND EXISTS (SELECT 1 FROM onward_worker WHERE id = :worker AND state = 'active')",
        "",
    ),
    "a claim does not wait for the due time": ("claim", "AND run_at <= onward_clock()", ""),
    "a claim takes one too many": ("claim", "LIMIT :limit", "LIMIT :limit + 1"),
    "an end takes, whosever and of whichever attempt": (
        "finish",
        "AND j.attempt = c.attempt AND j.worker IS :worker",
        "",
    ),
    "an end under another state takes": ("finish", "AND j.state = :before", ""),
    "a retry of another attempt takes": (
        "go_on",
        "AND onward_job.attempt = c.value ->> 'attempt'",
        "",
    ),
    "a lost attempt leaves no record": (
        "go_on",
        "AND c.value ->> 'ended' IS NOT NULL",
        "AND c.value ->> 'ended' <> 'lost'",
    ),
    "a retry does not wait": ("go_on", "+ max(coalesce(c.value ->> 'delay', 0), 0)", ""),
    "a recovered job is due only later": (
        "go_on",
        "max(coalesce(c.value ->> 'delay', 0), 0)",
        "max(coalesce(c.value ->> 'delay', 0), 1)",
    ),
    "a requeue keeps the old budget": (
        "go_on",
        "budget_from = c.value ->> 'budget_from'",
        "budget_from = onward_job.budget_from",
    ),
    "a beat revives the lost": ("beat", "AND state IN ('active', 'draining')", ""),
    "a beat shortens the lease": (
        "beat",
        "max(lease_until, onward_clock() + :lease)",
        "onward_clock() + :lease",
    ),
    "a lease is ended before its time": ("lose", "AND lease_until < onward_clock()", ""),
    "a lease that was renewed is ended": ("lose", "lease_until = :seen AND", ""),
    "the lost keep their lease": (
        "lose",
        "lease_until = min(lease_until, onward_clock())",
        "lease_until = lease_until",
    ),
    "a sweep sees one owner only": ("orphans", "WHERE worker > owner.id", "WHERE 0"),
    "a sweep leaves what is cancelling": (
        "orphans",
        "WHERE j.worker IN (SELECT id FROM gone)",
        "WHERE j.worker IN (SELECT id FROM gone) AND j.state = 'running'",
    ),
    "the hold of an earlier attempt takes": ("hold", "AND attempt = :attempt", ""),
    "an enqueue does not know its repeat": (
        "enqueue_again",
        "WHERE NOT EXISTS (SELECT 1 FROM onward_finished f WHERE f.id = n.id)",
        "WHERE true",
    ),
}


def spoiling(name: str, old: str, new: str) -> Spoil:
    def spoil(statement: str, text: str) -> str:
        return text.replace(old, new) if statement == name else text

    return spoil


def is_found(spoil: Spoil | None = None) -> list[str]:
    """What is found first, by searches that grow."""
    for bounds in (TWO_WORKERS, TWO_JOBS, ALONE, TWO_BY_TWO):
        with closing(SqlitePlace(spoil) if spoil else SqlitePlace()) as place:
            if found := explore(place, bounds, SEED, FOREVER).violations:
                return found
    return []


@pytest.mark.parametrize("fault", first(5, SPOILT))
def test_a_wrong_statement_is_found(fault: str) -> None:
    assert is_found(spoiling(*SPOILT[fault])) != []


def _apply_says_all(changes: Sequence[Change]) -> Op[set[str]]:
    yield from _apply(changes)
    return {change.id for change in changes}


def _recover_for_ever(job: Job, error: str) -> Change:
    return recover(replace(job, max_losses=job.losses + 1), error)


def _settle_uncharged(job: Job, *args: Any, **kwargs: Any) -> Change:
    return replace(settle(job, *args, **kwargs), failures=job.failures)


_apply = store.apply
WRONG: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "nobody looks how many rows changed": (store, "apply", _apply_says_all),
    "a writer takes any end for its own": (store, "_is_ours", lambda *_: True),
    "a writer never knows its own end": (store, "_is_ours", lambda *_: False),
    "losses have no budget": (explorer_deeds, "recover", _recover_for_ever),
    "failures are not counted": (explorer_deeds, "settle", _settle_uncharged),
}


@pytest.mark.parametrize("fault", first(3, WRONG))
def test_a_wrong_function_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WRONG[fault])
    assert is_found() != []
