"""The search among orders of statements, small: it finds nothing, and finds each seeded fault."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from psycopg import errors

from onward.lifecycle import JobState
from onward.store import postgres as adapter
from onward.store import postgres_link, store
from onward.store.database import Again
from onward.store.statements import Op, Statement
from tests.proof.isolation import TRIPLES, Field, Search, World, field_url, meet
from tests.proof.report import Report
from tests.proof.tiers import first
from tests.support.functions import written_out

SEED = 20
MOST = 2
"""Orders of each pair beyond those in which one comes after the other."""

QUICK = (
    "again new",
    "again running",
    "claim A",
    "claim B",
    "succeed with child",
    "retry",
    "release",
    "bury",
    "end cancelling",
    "cancel queued",
    "cancel running",
    "requeue",
    "discard",
    "renew",
    "lose late",
    "lose",
    "bury worker",
    "sweep",
    "drain",
    "stop",
    "prune",
    "set idle",
)
"""One of each kind. The deep search has them all, and those that have no row in common, too."""

CLOSE: tuple[tuple[tuple[str, ...], bool], ...] = (
    (("claim A", "claim B"), True),
    (("claim A", "bury worker"), False),
    (("claim A", "stop"), True),
    (("again running", "succeed"), True),
    (("again finished", "prune"), False),
    (("bulk", "bulk back"), False),
    (("cancel running", "retry"), True),
    (("renew", "lose late"), True),
    (("late success", "sweep"), False),
    (("late first", "succeed second"), False),
    (("enqueue", "again new"), False),
)
"""Those that meet at one row: every order; or those inside of statements, too, up to 12."""

Ground = tuple[str, World]


@pytest.fixture(scope="module")
def ground(postgres_url: str) -> Iterator[Ground]:
    """The database where operations meet."""
    with field_url(postgres_url) as found:
        yield found


async def search(
    ground: Ground, combinations: Sequence[tuple[tuple[str, ...], bool, int]]
) -> Report:
    report = Report("isolation", "postgres", SEED)
    async with Field(*ground) as field:
        searching = Search(field, report, SEED)
        for names, paused, most in combinations:
            whole = await searching.interleave(names, most=most, paused=paused)
            report.did["combinations"] += 1
            report.did["in every order"] += whole
    return report


def quick_pairs() -> list[tuple[str, ...]]:
    return [names for names in itertools.combinations_with_replacement(QUICK, 2) if meet(names)]


def test_a_late_end_of_a_cancelling_job_is_refused(ground: Ground) -> None:
    """Found by this search: what a sweep has cancelled keeps its owner's name, and the finisher
    decided about it again for ever.
    """
    names = [("late end cancelling", "sweep"), ("end cancelling", "bury worker")]
    report = asyncio.run(search(ground, [(each, False, 20) for each in names]))
    assert report.violations == []


@pytest.mark.parametrize("part", first(1, range(3)))
def test_pairs_come_to_what_one_after_the_other_comes_to(ground: Ground, part: int) -> None:
    """Each pair of writing operations that have rows in common, in a few orders of their steps."""
    mine = quick_pairs()[part::3]
    report = asyncio.run(search(ground, [(names, False, MOST) for names in mine]))
    assert report.violations == []
    assert report.did["combinations"] == len(mine) > 30
    assert report.did["orders"] >= 3 * len(mine)
    assert report.sometimes["waited for a lock"]


def test_close_pairs_in_every_order(ground: Ground) -> None:
    """Those that meet at one row: all orders of their steps, or many of those inside of them."""
    plain = [(names, False, 100) for names, _ in CLOSE]
    inside = [(names, True, 12) for names, paused in CLOSE if paused]
    report = asyncio.run(search(ground, plain + inside))
    assert report.violations == []
    assert report.did["in every order"] >= len(plain)
    for what in (
        "waited for a lock",
        "held inside a statement",
        "deadlock",
        "transaction repeated",
        "write refused",
        "claim under a worker that was just lost",
    ):
        assert report.sometimes[what], what


def test_triples(ground: Ground) -> None:
    """Two claims and a sweep, and others of three, in some orders."""
    report = asyncio.run(search(ground, [(names, False, 4) for names in TRIPLES]))
    assert report.violations == []
    assert report.did["combinations"] == len(TRIPLES)


# --- seeded faults --------------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def says(name: str, *changes: tuple[str, str]) -> Patch:
    """The statement as it must not be."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = adapter.psycopg_text
        wrong = written_out(name).for_psycopg
        for old, new in changes:
            assert old in wrong, f"{name} is written in another way now"
            wrong = wrong.replace(old, new)

        def text(each: str, schema: str) -> bytes:
            return wrong.encode() if each == name else real(each, schema)

        monkeypatch.setattr(adapter, "psycopg_text", text)

    return patch


def ignores_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(id: str, decide: Callable[[Any], Any]) -> Op[JobState]:
        job = yield from store.get(id)
        change = decide(job)
        if change is None:
            return job.state
        yield from store.apply([change])
        return change.after

    def apart(op: Op[Any]) -> Op[Any]:
        rows: Any = None
        while True:
            try:
                statement = op.send(rows)
            except StopIteration as end:
                return end.value
            rows = yield statement._replace(alone=False)

    def moved(id: str, decide: Callable[[Any], Any]) -> Op[Any]:
        return apart(move(id, decide))

    monkeypatch.setattr(store, "move", moved)


def knows_no_deadlocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (adapter, postgres_link):
        monkeypatch.setattr(module, "AGAIN", (errors.SerializationFailure, Again))


def keeps_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> Op[None]:
        yield Statement("now", {})

    monkeypatch.setattr(store, "refuse", refuse)


FAULTS: dict[str, tuple[Patch, tuple[str, str], str]] = {
    "claims what others have": (
        says(
            "claim",
            (" FOR UPDATE SKIP LOCKED", ""),
            # PostgreSQL's own second look at a row would find it at another place.
            (
                "ctid = ANY(ARRAY(\n            SELECT ctid",
                "id = ANY(ARRAY(\n            SELECT id",
            ),
            ("AND state || '' = 'queued'\n      AND EX", "AND EX"),
        ),
        ("claim A", "claim B"),
        "raised Refused",
    ),
    "claims for a worker that drains": (
        says("claim", ("AND state = 'active')", "AND state <> 'nothing')")),
        ("claim A", "drain"),
        "Z1",
    ),
    "finishes whatever attempt": (
        says("finish", (" AND j.attempt = c.attempt", "")),
        ("late first", "again running"),
        "L3",
    ),
    "skips the attempt's record": (
        says("go_on", ("WHERE ended IS NOT NULL", "WHERE false")),
        ("retry", "sweep"),
        "M2",
    ),
    "locks nothing before it writes": (
        says("go_on", (" FOR UPDATE OF j", "")),
        ("cancel running", "retry"),
        "M2",
    ),
    "does not look a second time": (
        says("finished_among", ("WHERE id", "WHERE false AND id")),
        ("again running", "succeed"),
        "M2",
    ),
    "leaves history behind": (
        says("prune", ("WHERE job = ANY", "WHERE false AND job = ANY")),
        ("succeed second", "prune"),
        "M2 owned history",
    ),
    "ignores how many rows it wrote": (
        ignores_the_count,
        ("cancel queued", "claim B"),
        "answered",
    ),
    "knows no deadlocks": (knows_no_deadlocks, ("bulk", "bulk back"), "DatabaseUnavailable"),
    "keeps no refusal": (keeps_no_refusal, ("late success", "sweep"), "no refusal was kept"),
}


@pytest.mark.parametrize("fault", first(6, FAULTS))
def test_a_seeded_fault_is_found(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The search reports it, within the orders that the others have."""
    patch, names, told = FAULTS[fault]
    patch(monkeypatch)
    report = asyncio.run(search(ground, [(names, False, 12)]))
    assert any(told in violation for violation in report.violations), report.violations[:5]
