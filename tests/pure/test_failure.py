"""Whatever an exception does, a short and clean text of it can be stored, and fast."""

from __future__ import annotations

import gc
import linecache
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.failure import (
    MAX_FRAMES,
    MAX_LINKS,
    MAX_MEMBERS,
    MESSAGE_BYTES,
    TRACEBACK_BYTES,
    ErrorText,
    describe,
)


def raised(exc: BaseException) -> BaseException:
    """The exception with a traceback and whatever context it has."""
    try:
        raise exc
    except BaseException as caught:
        return caught


def stored(exc: BaseException, **options: Any) -> ErrorText:
    """Describe an exception and check what holds for every text: bounded, clean, and in time."""
    start = time.perf_counter()
    text = describe(exc, **options)
    assert time.perf_counter() - start < 1
    assert len(text.type.encode()) <= 1024
    assert len(text.message.encode()) <= MESSAGE_BYTES
    assert len(text.traceback.encode()) <= TRACEBACK_BYTES
    for part in (text.type, text.message, text.traceback):
        assert type(part) is str
        assert "\x00" not in part
        assert "\x1b" not in part
    return text


# ---------------------------------------------------------------------------- the ordinary


class OrderError(Exception):
    class Late(Exception):
        pass


def test_the_type_is_qualified_and_builtins_are_bare() -> None:
    assert stored(ValueError("x")).type == "ValueError"
    assert stored(OrderError.Late("x")).type == f"{__name__}.OrderError.Late"


def test_the_message_is_that_of_the_exception() -> None:
    assert stored(ValueError("boom")).message == "boom"
    assert stored(KeyError("k")).message == "'k'"
    assert stored(ValueError()).message == ""


def fails() -> None:
    secret_local = "hunter2" * 2
    raise ValueError(len(secret_local))  # the line that fails


def runner(task: Callable[[], object]) -> None:
    task()


def caught(task: Callable[[], object]) -> BaseException:
    """What a task raises; its two outermost frames are this one and the runner's."""
    try:
        runner(task)
    except BaseException as error:
        return error
    raise AssertionError


def test_the_traceback_reads_like_pythons() -> None:
    error = caught(fails)
    theirs = "".join(traceback.format_exception(error)).splitlines()
    without_markers = [line for line in theirs if line.strip(" ^~")]
    assert stored(error).traceback.splitlines() == without_markers


def test_local_variables_are_not_stored() -> None:
    text = stored(caught(fails)).traceback
    assert "the line that fails" in text
    assert "hunter2hunter2" not in text


def test_frames_of_the_runner_are_left_out_but_never_the_last() -> None:
    error = caught(fails)
    assert "in runner" in stored(error).traceback
    for skip in (2, 99):
        text = stored(error, skip_frames=skip).traceback
        assert "in runner" not in text
        assert "in fails" in text


def test_frames_of_a_cause_are_all_kept() -> None:
    def task() -> None:
        raise OrderError("outer") from caught(fails)

    assert stored(caught(task), skip_frames=2).traceback.count("in runner") == 1


def test_an_exception_that_was_never_raised_has_no_frames() -> None:
    assert stored(ValueError("x")).traceback == "ValueError: x"


def chained(*, explicit: bool) -> None:
    try:
        raise KeyError("root")
    except KeyError as error:
        if explicit:
            raise ValueError("outer") from error
        raise ValueError("outer")  # noqa: B904 - a context is meant


def test_causes_and_contexts_come_first_with_the_words_of_python() -> None:
    text = stored(caught(lambda: chained(explicit=True))).traceback
    assert text.index("KeyError: 'root'") < text.index("direct cause") < text.index(": outer")
    error = caught(lambda: chained(explicit=False))
    text = stored(error).traceback
    assert text.index("KeyError: 'root'") < text.index("During handling") < text.index(": outer")
    error.__suppress_context__ = True
    assert "KeyError: 'root'" not in stored(error).traceback


def test_notes_are_kept() -> None:
    error = ValueError("x")
    error.add_note("while reading orders.csv")
    assert stored(error).traceback.endswith("ValueError: x\nwhile reading orders.csv")


def test_members_of_a_group_are_shown_with_their_causes() -> None:
    inner = ValueError("inner")
    inner.__cause__ = KeyError("root")
    text = stored(raised(ExceptionGroup("many", [inner, ExceptionGroup("more", [OSError("e")])])))
    assert "1 of 2" in text.traceback
    for part in ("ValueError: inner", "KeyError: 'root'", "OSError: e", "ExceptionGroup: more"):
        assert part in text.traceback


def test_a_source_that_cannot_be_read_costs_no_more_than_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loader of somebody's own is asked for it, and may fail in any way."""

    def broken() -> str:
        raise RuntimeError("no source today")

    names: dict[str, Any] = {}
    exec(compile("def fails():\n    raise ValueError('x')\n", "made up.py", "exec"), names)
    monkeypatch.setitem(linecache.cache, "made up.py", (broken,))
    error = caught(names["fails"])
    text = stored(error).traceback
    assert text.splitlines()[-2:] == ['  File "made up.py", line 2, in fails', "ValueError: x"]


# ---------------------------------------------------------------------------- those that fight back


class Mute(Exception):
    def __str__(self) -> str:
        raise LookupError

    __repr__ = __str__


class Exits(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class NoText(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class Slippery(str):
    """A string whose methods lie."""

    __slots__ = ()

    def __len__(self) -> int:
        raise SystemExit

    def __str__(self) -> str:
        raise SystemExit

    def __getitem__(self, key: Any) -> str:
        raise SystemExit

    def encode(self, *args: Any) -> bytes:
        raise SystemExit


class SaysSlippery(Exception):
    def __str__(self) -> str:
        return Slippery("slippery")


class Recursive(Exception):
    def __str__(self) -> str:
        return str(self)


class BadRepr:
    def __repr__(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Mute, "<no message: __str__ raised LookupError>"),
        (Exits, "<no message: __str__ raised SystemExit>"),
        (NoText, "<no message: __str__ raised TypeError>"),
        (SaysSlippery, "slippery"),
        (Recursive, "<no message: __str__ raised RecursionError>"),
        (lambda: ValueError(BadRepr(), 1), "<no message: __str__ raised KeyboardInterrupt>"),
    ],
    ids=range(6),
)
def test_a_message_that_cannot_be_had_is_said_to_be_missing(
    make: Callable[[], BaseException], message: str
) -> None:
    error = raised(make())
    assert stored(error).message == message
    assert message in stored(error).traceback


class Overrides(Exception):
    """Overrides every attribute that a traceback is made of."""

    def refuse(self) -> Any:
        raise SystemExit

    __class__ = __traceback__ = __cause__ = __context__ = property(refuse)
    __suppress_context__ = __notes__ = __dict__ = property(refuse)


def test_overridden_attributes_are_read_past() -> None:
    text = stored(raised(Overrides("still here")))
    assert text.type == f"{__name__}.Overrides"
    assert text.message == "still here"
    assert "in raised" in text.traceback
    assert "<no notes: __notes__ raised SystemExit>" in text.traceback


def test_a_hostile_metaclass_has_no_say() -> None:
    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise SystemExit(name)

    hostile = Meta("Hostile", (Exception,), {"__module__": "shop"})
    assert stored(raised(hostile("x"))).type == "shop.Hostile"


@pytest.mark.parametrize(
    ("name", "module", "shown"),
    [
        ("A\x00B", "shop", r"shop.A\x00B"),
        ("A\ud800", "shop", r"shop.A\ud800"),
        ("A\x1b[31m", "shop", r"shop.A\x1b[31m"),
        ("A", "shop\x00", r"shop\x00.A"),
        ("A", 5, "A"),
        ("A", BadRepr(), "A"),
        (Slippery("A"), Slippery("shop"), "shop.A"),
    ],
    ids=range(7),
)
def test_odd_names_of_a_class_are_shown_safely(name: str, module: object, shown: str) -> None:
    kind = type("A", (Exception,), {"__module__": module})
    kind.__qualname__ = name
    text = stored(raised(kind("x")))
    assert text.type == shown
    assert f"{shown}: x" in text.traceback


def test_a_very_long_name_is_cut() -> None:
    kind = type("A", (Exception,), {})
    kind.__qualname__ = "A" * 1_000_000
    assert "characters cut" in stored(raised(kind("x"))).type


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("boom\x00tail", r"boom\x00tail"),
        ("x\ud800y", r"x\ud800y"),
        ("\x1b[31mred", r"\x1b[31mred"),
    ],
    ids=range(3),
)
def test_unsafe_characters_are_replaced_and_the_text_around_them_kept(
    message: str, shown: str
) -> None:
    error = raised(ValueError(message))
    error.add_note(f"note {message}")
    text = stored(error)
    assert text.message == shown
    assert f"ValueError: {shown}" in text.traceback
    assert f"note {shown}" in text.traceback


def test_a_huge_message_keeps_its_ends_and_says_that_it_was_cut() -> None:
    error = raised(ValueError("start " + "x" * 50_000_000 + " end"))
    text = stored(error)
    assert text.message.startswith("start ")
    assert text.message.endswith(" end")
    assert "characters cut" in text.message
    assert "characters cut" in text.traceback


@pytest.mark.parametrize("character", ["é", "\U0001f600", "\x00", "\ud800"], ids=ascii)
def test_the_bound_is_one_of_bytes(character: str) -> None:
    text = stored(raised(ValueError(character * 100_000)))
    assert len(text.message.encode()) > MESSAGE_BYTES // 8


@pytest.mark.parametrize(
    ("notes", "shown"),
    [
        (5, "5"),
        ("text", "'text'"),
        ([1, b"x", "ok"], "1\nb'x'\nok"),
        (("a",), "a"),
        ([BadRepr()], f"<{__name__}.BadRepr object>"),
        (BadRepr(), f"<{__name__}.BadRepr object>"),
        (["n"] * 10_000, "n\nn\nn\nn\nn\n(9,995 more notes were cut)"),
        ([Slippery("a")], f"<{__name__}.Slippery object>"),
    ],
    ids=range(8),
)
def test_notes_of_any_kind_are_shown(notes: object, shown: str) -> None:
    error = ValueError("x")
    error.__notes__ = notes  # type: ignore[assignment]
    assert stored(error).traceback == f"ValueError: x\n{shown}"


def test_an_exception_that_is_its_own_cause_ends() -> None:
    error = raised(ValueError("x"))
    error.__cause__ = error
    assert stored(error).traceback.count("ValueError: x") == 1


def test_a_loop_of_causes_ends() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    text = stored(first).traceback
    assert text.count("first") == 1
    assert text.count("second") == 1
    assert "cut" not in text


def test_a_long_chain_is_cut_and_says_so() -> None:
    error: Exception = ValueError("0")
    for number in range(1, 5000):
        outer = ValueError(str(number))
        outer.__context__ = error
        error = outer
    text = stored(error).traceback
    assert text.startswith(f"(the chain of causes was cut after {MAX_LINKS})")
    assert text.endswith("ValueError: 4999")
    assert text.count("ValueError: ") == MAX_LINKS
    while error.__context__ is not None:  # Or else its end would recurse.
        error.__context__, error = None, error.__context__  # type: ignore[assignment]
    gc.collect()


def test_a_chain_of_exactly_the_limit_is_not_called_cut() -> None:
    error: Exception = ValueError("0")
    for number in range(1, MAX_LINKS):
        outer = ValueError(str(number))
        outer.__context__ = error
        error = outer
    assert "cut" not in stored(error).traceback


def test_a_large_group_is_cut_and_says_so() -> None:
    group = ExceptionGroup("many", [ValueError(str(number)) for number in range(10_000)])
    text = stored(raised(group))
    assert text.message == "many (10000 sub-exceptions)"
    assert text.traceback.count("ValueError: ") == MAX_MEMBERS
    assert f"({10_000 - MAX_MEMBERS:,} more members were cut)" in text.traceback


def test_deep_groups_are_cut_and_say_so() -> None:
    group: ExceptionGroup[Exception] = ExceptionGroup("g", [ValueError("x")])
    for _ in range(100):
        group = ExceptionGroup("g", [group])
    assert "groups nest deeper here" in stored(group).traceback


def test_wide_groups_of_chains_of_groups_stay_small() -> None:
    def grow(levels: int) -> Exception:
        if levels == 0:
            return ValueError("x")
        group = ExceptionGroup("g", [grow(levels - 1) for _ in range(5)])
        group.__cause__ = ExceptionGroup("c", [grow(levels - 1) for _ in range(5)])
        return raised(group)  # type: ignore[return-value]

    assert "(more exceptions were cut)" in describe_lines(grow(3))


def describe_lines(exc: BaseException) -> str:
    """The traceback before it is cut to its size."""
    from onward.failure import _Report

    return "\n".join(_Report().chain(exc))


def test_a_group_that_hides_its_members_shows_them() -> None:
    class Hiding(ExceptionGroup[Exception]):
        @property
        def exceptions(self) -> Any:
            raise SystemExit

    assert "ValueError: x" in stored(raised(Hiding("g", [ValueError("x")]))).traceback


# ---------------------------------------------------------------------------- frames


def dive(levels: int) -> None:
    if levels == 0:
        raise ValueError("deep")
    dive(levels - 1)


def test_a_deep_traceback_keeps_both_ends_and_says_how_much_was_cut() -> None:
    with pytest.raises(ValueError, match="deep") as caught:
        dive(200)
    text = stored(caught.value).traceback
    assert "test_a_deep_traceback" in text
    assert text.count('  File "') == MAX_FRAMES
    assert f"({202 - MAX_FRAMES} frames were cut)" in text
    assert 'raise ValueError("deep")' in text


def test_a_recursion_error_is_described() -> None:
    def forever() -> None:
        forever()

    with pytest.raises(RecursionError) as caught:
        forever()
    assert "frames were cut" in stored(caught.value).traceback


def run_as(filename: str) -> BaseException:
    """An exception from code that says it comes from this file."""
    code = compile("raise ValueError('x')", "plain", "exec").replace(co_filename=filename)
    tracer = sys.gettrace()
    sys.settrace(None)  # What measures the tests would look for a file of this name.
    try:
        exec(code, {"__loader__": BadRepr(), "__name__": "odd"})
    except ValueError as error:
        return error
    finally:
        sys.settrace(tracer)
    raise AssertionError


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    """A pipe with the name of a source file: opening it for reading would block for ever."""
    path = tmp_path / "pipe.py"
    os.mkfifo(path)
    return str(path)


def test_a_pipe_is_not_opened_for_its_source(fifo: str) -> None:
    assert f'File "{fifo}", line 1' in stored(run_as(fifo)).traceback


@pytest.mark.parametrize(
    "filename", ["/dev/zero", "<string>", "a\x00b.py", "a\ud800.py", "x" * 100_000 + ".py", ""]
)
def test_an_odd_file_name_is_shown_and_not_read(filename: str) -> None:
    text = stored(run_as(filename)).traceback
    assert ", line 1, in <module>" in text
    assert text.endswith("ValueError: x")
    assert len(text) < 500


def test_only_python_files_are_read_for_their_source(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_text("hunter2\n")
    assert "hunter2" not in stored(run_as(str(path))).traceback


def test_an_oversized_source_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.py"
    path.write_text("'should not be shown'\n" + "#" * 5_000_000)
    assert "should not be shown" not in stored(run_as(str(path))).traceback
    path = tmp_path / "small.py"
    path.write_text("'should be shown'\n")
    assert "should be shown" in stored(run_as(str(path))).traceback


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "task.py"
    path.write_text("'old'\n")
    assert "'old'" in stored(run_as(str(path))).traceback
    path.write_text("'newer'\n")
    assert "'newer'" in stored(run_as(str(path))).traceback


# ---------------------------------------------------------------------------- anything


@given(st.text(st.characters()), st.lists(st.text(st.characters())))
@settings(deadline=None)
def test_any_text_is_stored_clean_and_bounded(message: str, notes: list[str]) -> None:
    error = ValueError(message)
    for note in notes:
        error.add_note(note)
    text = stored(raised(error))
    assert text.traceback.encode().decode() == text.traceback
