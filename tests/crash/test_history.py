"""The checks of histories themselves: for each there is a history that it must not let pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support import history
from tests.support.history import AttemptRow, Body, History, JobRow
from tests.support.ledger import Ledger


def attempt(number: int, state: str, **fields: Any) -> AttemptRow:
    values: dict[str, Any] = {
        "job": "a",
        "number": number,
        "state": state,
        "event": "succeed" if state == "succeeded" else "recover",
        "worker": f"worker {number}",
        "started": True,
        "abandoned": False,
        "reason": None,
        "error": None,
    }
    return AttemptRow(**(values | fields))


def whole() -> History:
    """A job that was lost once, while its body ran on, and then succeeded; and one that waits."""
    return History(
        bodies=[Body("a", 1, 10, 1.0, 5.0), Body("a", 2, 11, 3.0, 4.0)],
        jobs={
            "a": JobRow("a", "succeeded", 2, "worker 2", "succeed", "1"),
            "b": JobRow("b", "queued", 1, None, None, None),
        },
        attempts={("a", 1): attempt(1, "lost"), ("a", 2): attempt(2, "succeeded")},
    )


def test_a_whole_history_passes() -> None:
    assert history.problems(whole(), enqueued={"a", "b"}) == []


def test_a_job_that_is_gone_is_missed() -> None:
    assert history.problems(whole(), enqueued={"a", "b", "c"}) == [
        "D1: c was acknowledged and is nowhere"
    ]


def test_a_job_that_nobody_asked_for_is_seen() -> None:
    assert history.problems(whole(), enqueued={"a"}) == ["D2: nobody asked for b"]
    assert history.problems(whole(), enqueued={"a"}, born_inside=True) == []


def changed(found: History, **fields: Any) -> History:
    return replace(found, **fields)


def without_first_attempt(found: History) -> History:
    return changed(found, attempts={("a", 2): found.attempts["a", 2]})


def succeeded_twice(found: History) -> History:
    return changed(found, attempts=found.attempts | {("a", 1): attempt(1, "succeeded")})


def ran_twice(found: History) -> History:
    return changed(found, bodies=[*found.bodies, Body("a", 2, 12, 8.0, 9.0)])


def ran_unknown(found: History) -> History:
    return changed(found, bodies=[*found.bodies, Body("z", 1, 12, 8.0, 9.0)])


def ran_beyond(found: History) -> History:
    return changed(found, bodies=[*found.bodies, Body("a", 3, 12, 8.0, 9.0)])


def ran_unstarted(found: History) -> History:
    row = attempt(1, "lost", started=False)
    return changed(found, attempts=found.attempts | {("a", 1): row})


def succeeded_unheard(found: History) -> History:
    return changed(found, bodies=found.bodies[:1])


def overlapping(found: History) -> History:
    return changed(found, attempts=found.attempts | {("a", 1): attempt(1, "failed")})


@pytest.mark.parametrize(
    ("spoil", "promise", "words"),
    [
        (without_first_attempt, history.gaps, "closed: [2]"),
        (succeeded_twice, history.double_successes, "2 attempts that succeeded"),
        (ran_twice, history.unexplained_bodies, "attempt 2 of a ran 2 times"),
        (ran_unknown, history.unexplained_bodies, "z ran and is nowhere"),
        (ran_beyond, history.unexplained_bodies, "attempt 3 of a ran and has no row"),
        (ran_unstarted, history.unexplained_bodies, "ran and has no start"),
        (succeeded_unheard, history.successes_without_a_body, "without having run to its end"),
        (overlapping, history.unexplained_overlaps, "attempts 1 and 2 of a overlap"),
    ],
)
def test_each_check_sees_what_it_is_for(
    spoil: Callable[[History], History],
    promise: Callable[[History], Iterator[str]],
    words: str,
) -> None:
    assert list(promise(whole())) == []
    (problem, *_) = promise(spoil(whole()))
    assert words in problem


def test_a_body_that_was_abandoned_may_overlap() -> None:
    found = overlapping(whole())
    row = replace(found.attempts["a", 1], abandoned=True)
    abandoned = changed(found, attempts=found.attempts | {("a", 1): row})
    assert list(history.unexplained_overlaps(abandoned)) == []


def test_what_was_over_and_has_changed_is_seen() -> None:
    before = whole()
    revived = changed(before, jobs=before.jobs | {"a": JobRow("a", "queued", 3, None, None, None)})
    assert history.changed_finals(before, before) == []
    assert history.changed_finals(before, revived)[0].startswith("D5: a was succeeded")
    rewritten = changed(before, attempts=before.attempts | {("a", 1): attempt(1, "failed")})
    assert history.changed_finals(before, rewritten)[0].startswith("M3: attempt ('a', 1)")


def test_lines_become_bodies(ledger: Ledger) -> None:
    """A start without an end is a body that was killed; two runs of one attempt are two bodies."""
    for event in ("start", "end", "start"):
        ledger.append(event=event, job="a", attempt=1)
    first, second = history.bodies_in(ledger)
    assert first.end is not None
    assert second.end is None
    assert first.end >= first.start
