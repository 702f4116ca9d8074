"""What a claimer remembers of jobs that refuse: pure, and no clock is needed."""

from __future__ import annotations

import pytest

from onward.worker import refusing
from onward.worker.refusing import AGAIN_AFTER, AT_ONCE, Refusing

LANE, OTHER = ("default", 0), ("default", 1)


def test_each_lane_has_its_own() -> None:
    """A lane in which nothing refuses is claimed from as ever."""
    left = Refusing()
    assert LANE not in left
    left.note(LANE, "a", 0.0)
    assert LANE in left
    assert OTHER not in left
    assert (list(left.of(LANE)), list(left.of(OTHER))) == (["a"], [])


def test_few_are_told_and_tried_again_at_a_time() -> None:
    """Those that were tried longest ago come first, and everyone's turn comes."""
    left = Refusing()
    ids = [str(number) for number in range(3 * AT_ONCE)]
    assert [left.note(LANE, id_, 0.0) for id_ in ids] == [n < AT_ONCE for n in range(3 * AT_ONCE)]
    assert left.again(LANE, AGAIN_AFTER - 1, 100) == ()
    for turn in range(1, 5):
        now = turn * AGAIN_AFTER
        again = list(left.again(LANE, now, 100))
        assert again == ids[:AT_ONCE]
        assert not set(again) & set(left.of(LANE))
        assert left.again(LANE, now + 1, 100) == ()
        assert all(left.note(LANE, id_, now) for id_ in again)
        left.tried(LANE, again, 0)
        ids = ids[AT_ONCE:] + again
        assert list(left.of(LANE)) == ids


def test_no_more_are_tried_again_than_there_is_room_for() -> None:
    """The others stay known."""
    left = Refusing()
    for id_ in "abc":
        left.note(LANE, id_, 0.0)
    assert list(left.again(LANE, AGAIN_AFTER, 2)) == ["a", "b"]
    assert list(left.of(LANE)) == ["c"]


def test_when_one_is_mended_all_may_be() -> None:
    """A rule that is taken away again frees thousands at once."""
    left = Refusing()
    for number in range(50):
        left.note(LANE, str(number), 0.0)
    left.tried(LANE, left.again(LANE, AGAIN_AFTER, 100), 1)
    assert LANE not in left


def test_when_none_refuses_again_all_may_be_mended() -> None:
    """Another worker was quicker, and has claimed those that were to be tried."""
    left = Refusing()
    for number in range(50):
        left.note(LANE, str(number), 0.0)
    left.tried(LANE, left.again(LANE, AGAIN_AFTER, 100), 0)
    assert LANE not in left


def test_a_lane_whose_last_one_is_gone_is_as_ever() -> None:
    """It was cancelled, say: it was neither claimed nor did it refuse."""
    left = Refusing()
    left.note(LANE, "a", 0.0)
    left.tried(LANE, left.again(LANE, AGAIN_AFTER, 100), 0)
    assert LANE not in left


def test_memory_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each lane by itself."""
    monkeypatch.setattr(refusing, "MOST", 2)
    left = Refusing()
    left.note(LANE, "a", 0.0)
    assert not left.full(LANE)
    left.note(LANE, "b", 0.0)
    assert left.full(LANE)
    assert not left.full(OTHER)
