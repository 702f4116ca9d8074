"""How values look: durations, distances, moments, hostile text, secrets."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.cli.values import (
    Cut,
    Id,
    Moment,
    Past,
    Span,
    State,
    distance,
    drawn,
    duration,
    flaws,
    iso,
    json_text,
    many_lines,
    one_line,
    payload,
    plain,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0000172, "0.017 ms"),
        (0.0034, "3.4 ms"),
        (0.84, "840 ms"),
        (0.9996, "1.0 s"),
        (4.21, "4.2 s"),
        (9.96, "10 s"),
        (59.6, "1 min"),
        (372, "6 min 12 s"),
        (3600, "1 h"),
        (3661, "1 h 1 min"),
        (187_200, "2 d 4 h"),
        (3e10, "950 y 234 d"),
        (-5.0, "-5.0 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_distances() -> None:
    assert [distance(s) for s in (0.2, -0.2, 31, -120)] == ["now", "now", "in 31 s", "2 min ago"]


def test_what_has_been_is_never_ahead_of_the_clock() -> None:
    """That was set back meanwhile."""
    assert [drawn(Past(at), 1000.0) for at in (880, 1000, 4600)] == ["2 min ago", "now", "now"]
    assert drawn(Moment(4600), 1000.0) == "in 1 h"
    assert flaws({"started_at": Past("soon")}) == ["started_at 'soon' is no time"]


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (1764417600.5, "2025-11-29T12:00:00.500Z"),
        (253402300799, "9999-12-31T23:59:59.000Z"),
        (1e15, None),
        (math.inf, None),
        (math.nan, None),
        ("soon", None),
        (None, None),
        (True, None),
    ],
)
def test_moments(at: Any, text: str | None) -> None:
    assert iso(at) == text


@given(st.text(), st.integers(1, 50))
def test_no_text_can_speak_to_the_terminal(text: str, limit: int) -> None:
    shown = one_line(text, limit)
    assert shown.isprintable()
    assert all(line.isprintable() for line in many_lines(text, limit).split("\n"))
    document = json_text({"text": text})
    assert all(line.isprintable() for line in document.split("\n"))
    assert json.loads(document) == {"text": text}
    assert json_text({"text": text}, ascii_only=True).isascii()


ODD = [None, True, 3, 2.5, math.nan, -math.inf, 10**400, "x", b"\xff\x00", [1], {"a": 1}, object()]


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("kind", [Id, Moment, Past, Span, State, Cut, lambda value: value])
def test_any_value_has_all_three_faces(kind: Any, value: Any) -> None:
    found = kind(value)
    assert isinstance(drawn(found, 0.0), str)
    assert isinstance(plain(found), str)
    json.loads(json_text({"value": found}))
    flaws({"value": found})


def test_flaws_are_named() -> None:
    item = {
        "id": Id("1"),
        "state": State("retrying"),
        "run_at": Moment("soon"),
        "took": Span(-5.0),
        "timeout": Span("long"),
        "reason": Cut(None),
        "note": Cut(None),
    }
    assert flaws(item, frozenset({"note"})) == [
        "state 'retrying' is none that Onward knows",
        "run_at 'soon' is no time",
        "took '-5.0' is negative",
        "timeout 'long' is no duration",
        "reason is missing",
    ]


def test_a_payload_that_is_no_json_is_not_shown() -> None:
    found = payload('{"password": "hunter2"')
    assert found.value is None
    assert "hunter2" not in (found.flaw or "")
    assert payload("[" * 100_000).value is None
    assert payload(b"\xff").value is None
    assert payload(7).value is None
