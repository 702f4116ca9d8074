"""Faults to be seeded into the product, one at a time, to see that the searches have teeth.

    with seeded(FAULTS["zombie finishes"]):
        report = run(seed, budget)      # must hold a violation

A fault is a wrong statement or a wrong decision, as an honest mistake would make it: a guard left
out, a number not counted, an answer not looked at. `python -m tests.proof.teeth` seeds each of them
into every technique and prints who caught it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest import mock

from msgspec.structs import replace

import onward.job
from onward import policy
from onward.ids import new_id
from onward.job import Change, Job
from onward.policy import Outcome, Released
from onward.store import statements, store
from onward.store.statements import Op, Twin
from tests.support.functions import written_out

Swap = tuple[str, str]


class Fault(NamedTuple):
    """One mistake: which promise it breaks, and how it is made."""

    name: str
    promise: str
    seed: Callable[[], AbstractContextManager[Any]]


# --- ways to make a mistake -----------------------------------------------------------------------


@contextmanager
def wrong_statement(name: str, sqlite: Sequence[Swap], postgres: Sequence[Swap]) -> Generator[None]:
    """A named statement with parts of its text replaced; each part must be there. What is to be
    wrong in a function of the schema is written out for it.
    """
    right = statements.twins()[name]
    server = written_out(name).text if postgres else right.texts["postgres"]
    texts = {
        "sqlite": _swapped(name, right.texts["sqlite"], sqlite),
        "postgres": _swapped(name, server, postgres),
    }
    wrong = {**statements.twins(), name: Twin(right.why, texts)}
    with mock.patch.object(statements, "twins", return_value=wrong):
        _forget_texts()
        try:
            yield
        finally:
            _forget_texts()


def _swapped(name: str, text: str, swaps: Sequence[Swap]) -> str:
    for old, new in swaps:
        assert old in text, f"{name} has no {old!r} any more: mend this fault"
        text = text.replace(old, new)
    return text


def _forget_texts() -> None:
    for spelt in (
        statements.sqlite_text,
        statements.postgres_text,
        statements.psycopg_text,
        statements.numbered_text,
    ):
        spelt.cache_clear()


def statement(
    name: str, sqlite: Sequence[Swap], postgres: Sequence[Swap] | None = None
) -> Callable[[], AbstractContextManager[None]]:
    """A wrong statement on both databases; by default by the same replacement."""
    return lambda: wrong_statement(name, sqlite, sqlite if postgres is None else postgres)


def settled(twist: Callable[[Job, Outcome, Change], Change]) -> Callable[[], Any]:
    """A wrong decision about how an attempt ends, wherever `settle` was imported to."""
    right = policy.settle

    def wrong(job: Job, outcome: Outcome, *args: Any, **kwargs: Any) -> Change:
        return twist(job, outcome, right(job, outcome, *args, **kwargs))

    return lambda: _everywhere("settle", right, wrong)


def recovered(twist: Callable[[Job, Change], Change]) -> Callable[[], Any]:
    """A wrong decision about a lost job."""
    right = policy.recover

    def wrong(job: Job, error: str) -> Change:
        return twist(job, right(job, error))

    return lambda: _everywhere("recover", right, wrong)


@contextmanager
def _everywhere(name: str, right: object, wrong: object) -> Generator[None]:
    """Replace a function in every module that has it by this name."""
    with mock.patch("onward.policy." + name, wrong):
        places = [
            module
            for path, module in list(sys.modules.items())
            if path.startswith(("onward.", "tests.")) and getattr(module, name, None) is right
        ]
        for place in places:
            setattr(place, name, wrong)
        try:
            yield
        finally:
            for place in places:
                setattr(place, name, right)


def operation(name: str, wrong: Callable[..., Op[Any]]) -> Callable[[], Any]:
    """A wrong operation of the store; `wrong` gets the right one first."""
    right = getattr(store, name)

    def instead(*args: Any, **kwargs: Any) -> Op[Any]:
        return wrong(right, *args, **kwargs)

    return lambda: mock.patch.object(store, name, instead)


Right = Callable[..., Op[Any]]
"""The operation as it should be."""

# --- wrong operations -----------------------------------------------------------------------------


def _believes_all(right: Right, changes: Sequence[Change]) -> Op[set[str]]:
    """The row count is not looked at."""
    yield from right(changes)
    return {change.id for change in changes}


def _drops_follow_ups(right: Right, changes: Sequence[Change]) -> Op[set[str]]:
    answer: set[str] = yield from right([replace(change, follow_ups=()) for change in changes])
    return answer


def _births_twice(right: Right, jobs: Sequence[Any], *args: Any, **kwargs: Any) -> Op[Any]:
    """An enqueue makes a second job, as a repeat without the id would."""
    twice = [*jobs, *(replace(job, id=new_id()) for job in jobs[:1])]
    answer = yield from right(twice, *args, **kwargs)
    return answer


def _loses_one(right: Right, jobs: Sequence[Any], *args: Any, **kwargs: Any) -> Op[Any]:
    """Of several jobs the last is forgotten."""
    kept = jobs[:-1] if len(jobs) > 1 else jobs
    answer = yield from right(kept, *args, **kwargs)
    return answer


def _uncounted_loss(job: Job, change: Change) -> Change:
    return replace(change, losses=job.losses)


def _charged_release(job: Job, outcome: Outcome, change: Change) -> Change:
    if isinstance(outcome, Released) and change.failures < job.max_attempts:
        return replace(change, failures=change.failures + 1)
    return change


def _impatient(_: Job, __: Outcome, change: Change) -> Change:
    return replace(change, delay=0.0)


def _forgiving(job: Job, _: Outcome, change: Change) -> Change:
    return replace(change, failures=job.failures)


def _mute(_: Job, __: Outcome, change: Change) -> Change:
    return replace(change, reason=None, error=None)


@contextmanager
def _same_attempt_again() -> Generator[None]:
    """A retry does not mint a new attempt."""
    with mock.patch.object(onward.job, "_MINTING", set[object]()):
        yield


@contextmanager
def _old_budget() -> Generator[None]:
    """A requeue keeps the budgets as they were spent."""
    with mock.patch.object(onward.job, "_FRESH", set[object]()):
        yield


# --- the list -------------------------------------------------------------------------------------

OWNER_LITE = " AND j.worker IS :worker"
OWNER_PG = " AND j.worker IS NOT DISTINCT FROM c.worker"
ACTIVE_LITE = "\n  AND EXISTS (SELECT 1 FROM onward.worker WHERE id = :worker AND state = 'active')"
ACTIVE_PG = (
    "\n      AND EXISTS (SELECT 1 FROM onward.worker"
    " WHERE id = CAST(:worker AS uuid) AND state = 'active')"
)

_ALL = [
    Fault(
        "claims before the due time",
        "R1",
        statement(
            "claim",
            [(" AND run_at <= onward.clock()", "")],
            [("\n              AND run_at <= onward.clock()", "")],
        ),
    ),
    Fault(
        "claims tasks it does not know",
        "D4",
        statement(
            "claim",
            [("AND task IN (SELECT value FROM json_each(:tasks))", "AND :tasks IS NOT NULL")],
            [
                (
                    "AND task = ANY(ARRAY(SELECT value"
                    " FROM json_array_elements_text(CAST(:tasks AS json))))",
                    "AND CAST(:tasks AS text) IS NOT NULL",
                )
            ],
        ),
    ),
    Fault(
        "claims for a worker that is gone",
        "L1",
        statement("claim", [(ACTIVE_LITE, "")], [(ACTIVE_PG, "")]),
    ),
    Fault(
        "claims more than it was asked for",
        "M5",
        statement(
            "claim",
            [("LIMIT :limit", "LIMIT :limit + 1")],
            [("LIMIT CAST(:limit AS integer)", "LIMIT CAST(:limit AS integer) + 1")],
        ),
    ),
    Fault(
        "claims in the wrong order",
        "M5",
        statement("claim", [("ORDER BY run_at, id", "ORDER BY run_at DESC, id DESC")]),
    ),
    Fault(
        "finishes another's job",
        "L3",
        statement("finish", [(OWNER_LITE, " AND :worker IS :worker")], [(OWNER_PG, "")]),
    ),
    Fault(
        "finishes whatever attempt there is",
        "L3",
        statement("finish", [(" AND j.attempt = c.attempt", "")]),
    ),
    Fault(
        "ends a job without taking it from the live table",
        "M2",
        statement(
            "finish",
            [
                (
                    "WHERE id IN (SELECT value ->> 0 FROM json_each(:rows))",
                    "WHERE 0 AND id IN (SELECT value ->> 0 FROM json_each(:rows))",
                )
            ],
            [
                (
                    "DELETE FROM onward.job AS j USING c\n        WHERE",
                    "UPDATE onward.job AS j SET queue = j.queue FROM c\n        WHERE",
                )
            ],
        ),
    ),
    Fault(
        "forgets the result",
        "D5",
        statement(
            "finish",
            [("c.error, c.result", "c.error, CASE WHEN c.result IS NOT NULL THEN 'null' END")],
            [
                (
                    "c.error, c.result\n",
                    "c.error, CASE WHEN c.result IS NOT NULL THEN 'null' END AS result\n",
                )
            ],
        ),
    ),
    Fault(
        "moves another's job",
        "L3",
        statement(
            "go_on",
            [
                (" AND onward.job.worker IS c.value ->> 'worker'", ""),
                ("\n  AND j.worker IS c.value ->> 'worker'", ""),
            ],
            [(" AND j.worker IS NOT DISTINCT FROM c.worker", "")],
        ),
    ),
    Fault(
        "moves whatever attempt there is",
        "L3",
        statement(
            "go_on",
            [
                ("\n  AND onward.job.attempt = c.value ->> 'attempt'", ""),
                (" AND j.attempt = c.value ->> 'attempt'", ""),
            ],
            [(" AND j.attempt = c.attempt", ""), (" AND j.attempt = s.attempt", "")],
        ),
    ),
    Fault(
        "writes no history",
        "M2",
        statement(
            "go_on",
            [("c.value ->> 'ended' IS NOT NULL", "c.value ->> 'ended' = 'nothing'")],
            [("WHERE ended IS NOT NULL", "WHERE ended = 'nothing'")],
        ),
    ),
    Fault(
        "retries at once",
        "R1",
        statement(
            "go_on",
            [("max(coalesce(c.value ->> 'delay', 0), 0)", "0")],
            [("greatest(s.delay, 0)", "0")],
        ),
    ),
    Fault(
        "does not count failures",
        "L4",
        statement(
            "go_on",
            [("failures = c.value ->> 'failures'", "failures = failures")],
            [("failures = s.failures", "failures = j.failures")],
        ),
    ),
    Fault(
        "does not count losses",
        "L4",
        statement(
            "go_on",
            [("losses = c.value ->> 'losses'", "losses = losses")],
            [("losses = s.losses", "losses = j.losses")],
        ),
    ),
    Fault(
        "forgets where the budget starts",
        "L4",
        statement(
            "go_on",
            [("budget_from = c.value ->> 'budget_from'", "budget_from = budget_from")],
            [("budget_from = s.budget_from", "budget_from = j.budget_from")],
        ),
    ),
    Fault(
        "a beat revives the lost",
        "L6",
        statement(
            "beat",
            [
                (
                    "AND state IN ('active', 'draining')",
                    "AND state IN ('active', 'draining', 'lost')",
                )
            ],
        ),
    ),
    Fault(
        "a beat shortens a lease",
        "L6",
        statement(
            "beat",
            [("max(lease_until, onward.clock() + :lease)", "onward.clock() + :lease")],
            [
                (
                    "greatest(lease_until, onward.clock()"
                    " + CAST(:lease AS float8) * interval '1 second')",
                    "onward.clock() + CAST(:lease AS float8) * interval '1 second'",
                )
            ],
        ),
    ),
    Fault(
        "declares the living lost",
        "L1",
        statement(
            "lose",
            [("lease_until = :seen AND lease_until < onward.clock()", ":seen = :seen")],
            [
                (
                    "CAST(extract(epoch FROM lease_until) AS float8)"
                    " = CAST(:seen AS float8) AND lease_until < onward.clock()",
                    "CAST(:seen AS float8) = CAST(:seen AS float8)",
                )
            ],
        ),
    ),
    Fault(
        "a lost worker keeps its lease",
        "L1",
        statement(
            "lose",
            [("min(lease_until, onward.clock())", "lease_until + 60")],
            [("least(lease_until, onward.clock())", "lease_until + interval '60 seconds'")],
        ),
    ),
    Fault(
        "a lost worker stops in order",
        "L6",
        statement("stop", [("AND state IN ('active', 'draining')", "AND state <> 'stopped'")]),
    ),
    Fault(
        "the sweep forgets cancelling jobs",
        "D4",
        statement(
            "orphans",
            [
                (
                    "WHERE j.worker IN (SELECT id FROM gone)",
                    "WHERE j.state = 'running' AND j.worker IN (SELECT id FROM gone)",
                )
            ],
            [("WHERE j.worker = ANY", "WHERE j.state = 'running' AND j.worker = ANY")],
        ),
    ),
    Fault(
        "the sweep forgets workers that stopped",
        "D4",
        statement(
            "orphans",
            [
                (
                    "WHERE state IN ('active', 'draining')",
                    "WHERE state IN ('active', 'draining', 'stopped')",
                )
            ],
            [("w.state IN ('active', 'draining')", "w.state IN ('active', 'draining', 'stopped')")],
        ),
    ),
    Fault("the sweep takes from the draining", "L1", lambda: _sweep_from_draining()),
    Fault(
        "an enqueue forgets its delay",
        "R1",
        lambda: _hasty_enqueue(),
    ),
    Fault(
        "a repeat revives what is over",
        "D3",
        statement(
            "enqueue_again",
            [("WHERE NOT EXISTS (SELECT 1 FROM onward.finished f WHERE f.id = n.id)", "WHERE 1")],
            [
                (
                    "WHERE NOT EXISTS (SELECT 1 FROM onward.finished f WHERE f.id = n.id)",
                    "WHERE true",
                )
            ],
        ),
    ),
    Fault(
        "pruning takes what is young",
        "G1",
        statement(
            "prune",
            [("finished_at < onward.clock() - :keep", "finished_at <= onward.clock() + :keep")],
            [
                (
                    "finished_at < onward.clock() - CAST(:keep AS float8) * interval '1 second'",
                    "finished_at <= onward.clock() + CAST(:keep AS float8) * interval '1 second'",
                )
            ],
        ),
    ),
    Fault(
        "pruning leaves history behind",
        "M2",
        statement(
            "prune",
            [
                (
                    "DELETE FROM onward.attempt WHERE job IN",
                    "DELETE FROM onward.attempt WHERE number < 0 AND job IN",
                )
            ],
            [
                (
                    "DELETE FROM onward.attempt WHERE job =",
                    "DELETE FROM onward.attempt WHERE number < 0 AND job =",
                )
            ],
        ),
    ),
    Fault("the row count is not looked at", "L3", operation("apply", _believes_all)),
    Fault("follow-ups are dropped", "D3", operation("apply", _drops_follow_ups)),
    Fault("an enqueue makes two jobs", "D2", operation("enqueue", _births_twice)),
    Fault("an enqueue loses a job", "D1", operation("enqueue", _loses_one)),
    Fault("a loss is not charged", "L4", recovered(_uncounted_loss)),
    Fault("a release is charged", "Z1", settled(_charged_release)),
    Fault("a retry is due at once", "R1", settled(_impatient)),
    Fault("a failure is not charged", "L4", settled(_forgiving)),
    Fault("an end without a reason", "R2", settled(_mute)),
    Fault("a retry is the same attempt", "L2", _same_attempt_again),
    Fault("a requeue keeps the spent budgets", "L4", _old_budget),
]


@contextmanager
def _sweep_from_draining() -> Generator[None]:
    """Both looks of the sweep take a draining worker for gone."""
    lite = [("IN ('active', 'draining')", "IN ('active')")]
    with wrong_statement("orphans", lite, lite), wrong_statement("live_among", lite, lite):
        yield


@contextmanager
def _hasty_enqueue() -> Generator[None]:
    """Every job is due at once. (On PostgreSQL only where several are enqueued: one is written by a
    function of the schema.)
    """
    lite, server = [("max(coalesce(n.delay, 0), 0)", "0")], [("greatest(n.delay, 0)", "0")]
    one = [("max(coalesce(:delay, 0), 0)", "0 * coalesce(:delay, 0)")]
    with (
        wrong_statement("enqueue", lite, server),
        wrong_statement("enqueue_alike", lite, server),
        wrong_statement("enqueue_one", one, []),
    ):
        yield


FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _ALL}


@contextmanager
def seeded(fault: Fault) -> Generator[None]:
    """The product with this fault, for the time of a block."""
    with fault.seed():
        yield
