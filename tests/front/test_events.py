"""Events: one line each, with the job and the attempt, whatever is in them and whoever listens."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from onward import Happened, Onward, current, listen
from onward.events import emit, wanted
from onward.lifecycle import JobState
from onward.running import Current, set_current
from tests.support import by_hand

JOB = "0198c5f2-7b1e-7c3a-9d4e-5f6071829304"

HOSTILE = [
    "two\nlines",
    "carriage\rreturn",
    "\x1b[2J\x1b[31mred",
    "nul\x00",
    "bell\x07",
    "next\x85line",
    "line\u2028separator",
    "right\u202eleft",
    "lone \ud800 surrogate",
    'quote " and = and \\',
    "tab\there",
    "\x9b31m",
]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What is logged, from DEBUG on."""
    with caplog.at_level(logging.DEBUG, logger="onward"):
        yield caplog


@pytest.fixture
def heard() -> Iterator[list[Happened]]:
    """What a listener hears."""
    found: list[Happened] = []
    end = listen(found.append)
    yield found
    end()


def happened(**fields: Any) -> Happened:
    values: dict[str, Any] = {"name": "job.retry", "job": JOB, "attempt": 2, "task": "shop.send"}
    return Happened(**(values | fields))


def test_an_event_is_one_line_with_its_job_and_attempt(lines: pytest.LogCaptureFixture) -> None:
    emit(happened(fields={"delay": 1.23456789, "why": "too blue", "none": None, "empty": ""}))
    assert lines.messages == [
        f'job.retry job={JOB} attempt=2 task=shop.send delay=1.23457 why="too blue" empty=""'
    ]


def test_a_record_carries_what_the_line_says_as_attributes(
    lines: pytest.LogCaptureFixture,
) -> None:
    emit(happened(level=logging.WARNING, worker="w-1", fields={"delay": 1.5, "event": "retry"}))
    (record,) = lines.records
    assert (record.name, record.levelname) == ("onward", "WARNING")
    known = {name: value for name, value in vars(record).items() if name.startswith("onward_")}
    assert known == {
        "onward_event": "job.retry",
        "onward_job": JOB,
        "onward_attempt": 2,
        "onward_task": "shop.send",
        "onward_worker": "w-1",
        "onward_delay": 1.5,
    }


PAIR = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|[^" =]+)')


def read_back(line: str) -> dict[str, str]:
    """The pairs of a line, as a program would read them."""
    name, _, rest = line.partition(" ")
    assert name == "job.retry"
    pairs = PAIR.findall(f" {rest}")
    assert "".join(f" {key}={value}" for key, value in pairs) == f" {rest}"
    return {key: _unquoted(value) for key, value in pairs}


def _unquoted(value: str) -> str:
    if not value.startswith('"'):
        return value
    return value[1:-1].encode("latin-1", "backslashreplace").decode("unicode_escape")


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
@pytest.mark.parametrize("place", ["task", "error"])
def test_control_characters_are_spelt_out_and_can_be_read_back(
    lines: pytest.LogCaptureFixture, text: str, place: str
) -> None:
    given: dict[str, Any] = {"task": text} if place == "task" else {"fields": {"error": text}}
    emit(happened(**given))
    (line,) = lines.messages
    assert line.isprintable()
    assert len(line.splitlines()) == 1
    line.encode()
    expected = {"job": JOB, "attempt": "2", "task": "shop.send"} | {place: text}
    assert read_back(line) == expected


class Explosive:
    """A value that goes off when it is looked at."""

    def __repr__(self) -> str:
        raise RuntimeError("boom")

    __str__ = __repr__


def test_a_value_that_cannot_be_shown_costs_neither_the_line_nor_the_caller(
    lines: pytest.LogCaptureFixture,
) -> None:
    emit(happened(fields={"value": Explosive(), "state": JobState.DEAD, "list": [1, "a"]}))
    (line,) = lines.messages
    assert "Explosive object" in line
    assert "state=dead" in line


def test_a_long_value_is_cut(lines: pytest.LogCaptureFixture) -> None:
    emit(happened(fields={"error": "x" * 100_000}))
    assert len(lines.messages[0]) < 500
    assert lines.messages[0].endswith("…") or "…" in lines.messages[0]


def test_a_listener_that_fails_hinders_neither_the_others_nor_the_caller(
    lines: pytest.LogCaptureFixture, heard: list[Happened]
) -> None:
    def fails(_: Happened) -> None:
        raise ValueError("not\ntoday")

    end_first = listen(fails)
    later: list[Happened] = []
    end_later = listen(later.append)
    try:
        emit(happened())
    finally:
        end_first()
        end_later()
    assert [each.name for each in heard] == [each.name for each in later] == ["job.retry"]
    (_, report) = lines.messages
    assert report.startswith(f"listener.failed job={JOB} attempt=2 while=job.retry")
    assert "ValueError: not" in report
    assert "fails" in report
    assert report.isprintable()
    assert "test_events.py" in vars(lines.records[1])["onward_traceback"]


def test_a_log_filter_that_fails_hinders_nobody(
    lines: pytest.LogCaptureFixture, heard: list[Happened]
) -> None:
    def refuse(_: logging.LogRecord) -> bool:
        raise RuntimeError("a filter of the user's")

    logger = logging.getLogger("onward")
    logger.addFilter(refuse)
    try:
        emit(happened())
    finally:
        logger.removeFilter(refuse)
    assert len(heard) == 1


def test_a_listener_hears_until_it_is_ended_even_when_it_listens_twice() -> None:
    heard: list[Happened] = []
    first, second = listen(heard.append), listen(heard.append)
    emit(happened(level=logging.DEBUG))
    assert len(heard) == 2
    first()
    first()
    emit(happened(level=logging.DEBUG))
    assert len(heard) == 3
    second()
    emit(happened(level=logging.DEBUG))
    assert len(heard) == 3


def test_a_listener_may_end_itself_while_it_listens(heard: list[Happened]) -> None:
    def once(_: Happened) -> None:
        end()

    end = listen(once)
    emit(happened())
    emit(happened())
    assert len(heard) == 2


def test_nobody_is_asked_for_what_nobody_wants(lines: pytest.LogCaptureFixture) -> None:
    lines.set_level(logging.WARNING, logger="onward")
    assert not wanted(logging.INFO)
    assert wanted(logging.WARNING)
    emit(happened())
    assert lines.messages == []
    end = listen(lambda _: None)
    assert wanted(logging.DEBUG)
    end()
    assert not wanted(logging.INFO)


def test_a_jobs_own_log_carries_the_job_and_what_the_body_adds(
    app: Onward, lines: pytest.LogCaptureFixture
) -> None:
    @app.task(name="shop.note")
    def note() -> None: ...

    job = by_hand.claim(app, note.enqueue().id)
    set_current(Current(job, app))
    try:
        current().log.info("at %d of %d", 3, 9, extra={"order": 5})
        current().log.info("plain")
    finally:
        set_current(None)
    first, second = lines.records
    assert (first.name, first.getMessage()) == ("onward.task", "at 3 of 9")
    for record in (first, second):
        assert vars(record)["onward_job"] == job.id
        assert (vars(record)["onward_attempt"], vars(record)["onward_task"]) == (1, "shop.note")
    assert vars(first)["order"] == 5


def test_a_password_reaches_no_listener_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Happened] = []
    end = listen(heard.append)
    with caplog.at_level(logging.INFO, "onward"):
        emit(Happened(name="a.thing", fields={"error": "no postgresql://bob:hunter2@db/x", "n": 1}))
    end()
    assert heard[0].fields == {"error": "no postgresql://bob:***@db/x", "n": 1}
    assert "hunter2" not in caplog.text + repr(vars(caplog.records[0]))
