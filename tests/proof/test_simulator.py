"""The simulator, in its fast form: it finds nothing in the product, and much in wrong ones."""

from __future__ import annotations

import pytest

from tests.proof.faults import FAULTS, seeded
from tests.proof.report import Budget
from tests.proof.simulator import Run, Size, search, simulate
from tests.proof.tiers import first

LIFETIMES = 20_000
"""Job lifetimes of the fast form, of 100,000 that the soak has."""

MANY = 100_000

AMPLE = 600.0
"""Seconds: the count is what ends a search here."""

MUST_MEET = (
    "adopted",
    "bury",
    "cancel of a running job",
    "cancel raced a finish",
    "claim answer lost",
    "clock stepped",
    "due again",
    "commit unknown",
    "crash",
    "crash before begin",
    "lease lost while running",
    "recovered",
    "release",
    "requeue acknowledged",
    "retry",
    "snooze",
    "stall past the lease",
    "sweep raced a finish",
    "zombie finished late",
)


@pytest.mark.parametrize(
    "lifetimes",
    [
        pytest.param(LIFETIMES, id="scaled", marks=pytest.mark.timeout(400)),
        pytest.param(MANY, id="as written", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_whole_lives_keep_every_promise(lifetimes: int) -> None:
    """Thousands of jobs under workers that die, stand still and lose answers."""
    report = search(1, Budget(AMPLE), most=lifetimes)
    print("\n".join(report.lines()))
    assert report.violations == []
    assert report.did["job lifetimes"] >= lifetimes
    assert [name for name in MUST_MEET if not report.sometimes[name]] == []


def told(run: Run) -> list[str]:
    """What happened, in order."""
    return [str(line) for line in (*run.witness.log, *run.witness.bodies)]


def test_one_seed_is_one_history() -> None:
    size = Size(jobs=60, seconds=8.0)
    first, again, other = (simulate(seed, size) for seed in (5, 5, 6))
    assert told(first) == told(again)
    assert told(first) != told(other)


CAUGHT = (
    "claims before the due time",
    "claims tasks it does not know",
    "claims more than it was asked for",
    "the sweep takes from the draining",
    "an enqueue loses a job",
    "an enqueue makes two jobs",
    "an end without a reason",
    "a loss is not charged",
    "a retry is due at once",
    "follow-ups are dropped",
    "the row count is not looked at",
    "an enqueue forgets its delay",
    "claims for a worker that is gone",
)
"""Faults that are found within a few histories; `python -m tests.proof.teeth` tries them all."""


@pytest.mark.parametrize("name", first(6, CAUGHT))
def test_a_wrong_product_is_found_out(name: str) -> None:
    """Each of these mistakes breaks a promise, and the simulator sees it."""
    with seeded(FAULTS[name]):
        report = search(1, Budget(AMPLE), most=3 * LIFETIMES, until_found=True)
    assert report.violations
