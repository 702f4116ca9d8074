"""What commands show, by kind: an id, a moment, a span, a state; each for terminals, plain, JSON.

Whatever comes from the database is text that somebody else wrote: control characters are shown as
escapes, never sent to the terminal, and a value that is not what it should be is shown as it is and
reported as a flaw.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from onward.lifecycle import AttemptState, JobState, WorkerState
from onward.store.stored import is_no_text, stored_text
from onward.text import hide_passwords, is_secret

SHORT_ID = 18
"""Characters of an id that hold its time: within one process no two ids share them."""


class Id(NamedTuple):
    value: Any


class Moment(NamedTuple):
    """Seconds since the epoch, on the database's clock."""

    at: Any


class Past(NamedTuple):
    """A moment that has been. One ahead of the clock, which was set back since, is shown as now."""

    at: Any


def due(state: Any, at: Any) -> Moment | Past:
    """When a job of this state is due; once it has begun, that has been."""
    return Moment(at) if state in {JobState.QUEUED, JobState.WAITING} else Past(at)


class Span(NamedTuple):
    """A duration in seconds."""

    seconds: Any


class State(NamedTuple):
    name: Any


class Cut(NamedTuple):
    """A text that a table may cut; the plain form and JSON have all of it."""

    text: Any


Value = Id | Moment | Past | Span | State | Cut | str | int | float | bool | None
Item = Mapping[str, Any]
"""One row: values by name. The same item makes a table's row and a JSON object."""

_STATES = frozenset[str]({*JobState, *AttemptState, *WorkerState})


# --- three faces ----------------------------------------------------------------------------------


def drawn(value: Any, now: float) -> str:
    """For people: short ids, times as distances from now."""
    match value:
        case Id(value=text):
            return one_line(text)[:SHORT_ID]
        case Moment(at=at) if (number := _number(at)) is not None and iso(number) is not None:
            return distance(number - now)
        case Past(at=at) if (number := _number(at)) is not None and iso(number) is not None:
            return distance(min(number - now, 0.0))
        case Span(seconds=seconds) if (number := _number(seconds)) is not None:
            return duration(number)
        case Cut(text=text):
            return one_line("" if text is None else text)
        case float():
            return f"{value:.3g}"
        case int() if not isinstance(value, bool):
            return f"{value:,}"
        case _:
            return plain(value) or "–"


def plain(value: Any) -> str:
    """For pipes: one line, full ids, times in ISO 8601, spans in seconds."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case Moment(at=at) | Past(at=at):
            return "" if at is None else iso(at) or one_line(at)
        case Span(seconds=seconds):
            number = _number(seconds)
            return (
                one_line("" if seconds is None else seconds) if number is None else f"{number:.3f}"
            )
        case Id() | State() | Cut():
            return one_line("" if value[0] is None else value[0], 20_000)
        case list() | tuple():
            return ",".join(plain(part) for part in _parts(value))
        case _:
            return one_line(value, 20_000)


def as_json(value: Any) -> Any:
    """For scripts: times in ISO 8601, spans as seconds; whatever JSON cannot say becomes text."""
    match value:
        case Moment(at=at) | Past(at=at):
            return None if at is None else iso(at) or str(at)
        case Span(seconds=seconds):
            number = _number(seconds)
            if number is not None:
                return round(number, 6)
            return None if seconds is None else str(seconds)
        case Id() | State() | Cut():
            return None if value[0] is None else str(value[0])
        case Mapping():
            return {str(key): as_json(part) for key, part in entries(value)}
        case list() | tuple():
            return [as_json(part) for part in _parts(value)]
        case float() if not math.isfinite(value):
            return str(value)
        case None | bool() | int() | float() | str():
            return value
        case _:
            return str(value)


def json_text(document: Any, *, ascii_only: bool = False) -> str:
    """A document as JSON text that no terminal takes for a command."""
    text = json.dumps(as_json(document), indent=2, ensure_ascii=ascii_only)
    harmless = text.replace("\n", "").isprintable()
    return text if harmless else "".join(map(_json_escape, text))


def _json_escape(character: str) -> str:
    """A character that no terminal takes for a command, as JSON spells it."""
    if character.isprintable() or character == "\n":
        return character
    return json.dumps(character)[1:-1] if character != "\x7f" else "\\u007f"


def entries(value: Any) -> Iterable[tuple[Any, Any]]:
    """The names and values of an object of which no more is known."""
    found: Mapping[Any, Any] = value
    return found.items()


def _parts(value: Any) -> Iterable[Any]:
    found: Iterable[Any] = value
    return found


# --- flaws ----------------------------------------------------------------------------------------


def flaws(item: Item, optional: frozenset[str] = frozenset()) -> list[str]:
    """What is wrong with the values of a row, in words; empty for a sound one.

    Args:
        item: the row.
        optional: names of values that may be missing.
    """
    found: list[str] = []
    for name, value in item.items():
        inner = value[0] if isinstance(value, (Id, Moment, Past, Span, State, Cut)) else value
        if inner is None:
            if name not in optional:
                found.append(f"{name} is missing")
        elif problem := _flaw(value):
            found.append(f"{name} {one_line(inner, 60)!r} {problem}")
    return found


def _flaw(value: Any) -> str | None:
    match value:
        case State(name=name) if not isinstance(name, str) or name not in _STATES:
            return "is none that Onward knows"
        case Moment(at=at) | Past(at=at) if iso(at) is None:
            return "is no time"
        case Span(seconds=seconds) if _number(seconds) is None:
            return "is no duration"
        case Span(seconds=seconds) if seconds < -1:
            return "is negative"
        case _:
            return None


# --- text -----------------------------------------------------------------------------------------


def one_line(value: Any, limit: int = 300) -> str:
    """Any value as one line without control characters, cut at `limit` characters."""
    text = (
        value if isinstance(value, str) else repr(value) if isinstance(value, bytes) else str(value)
    )
    cut = text[:limit] + "…" if len(text) > limit else text
    return cut if cut.isprintable() else "".join(map(_visible, cut))


def many_lines(value: Any, limit: int = 20_000) -> str:
    """Any value as lines of text without control characters, cut at `limit` characters."""
    text = value if isinstance(value, str) else str(value)
    cut = (
        text[:limit] + f"\n… ({len(text) - limit:,} more characters)" if len(text) > limit else text
    )
    return "\n".join("".join(map(_visible, line.replace("\t", "    "))) for line in cut.split("\n"))


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


def iso(at: Any) -> str | None:
    """A moment in ISO 8601, UTC; None if it is no time that a calendar has."""
    number = _number(at)
    if number is None:
        return None
    try:
        text = datetime.fromtimestamp(number, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return None
    return text.replace("+00:00", "Z")


def distance(seconds: float) -> str:
    """How far a moment is from now: `2 min ago`, `in 31 s`."""
    if abs(seconds) < 0.5:
        return "now"
    return f"in {duration(seconds)}" if seconds > 0 else f"{duration(-seconds)} ago"


_UNITS = (("y", 31_557_600), ("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def duration(seconds: float) -> str:
    """A duration in its two largest units: `840 ms`, `4.2 s`, `6 min 12 s`, `2 d 4 h`."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995:
        thousandths = seconds * 1000
        return f"{thousandths:.2g} ms" if thousandths < 9.95 else f"{thousandths:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    left = round(seconds)
    parts: list[str] = []
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count:,} {unit}" if count else "")
        if len(parts) == 2:
            break
    return " ".join(part for part in parts if part)


def _number(value: Any) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


# --- payloads -------------------------------------------------------------------------------------


class Payload(NamedTuple):
    """Stored arguments or a stored result, without secrets. `flaw`: why it cannot be shown."""

    value: Any
    flaw: str | None


def payload(text: Any) -> Payload:
    """Read stored JSON, with the values of secret-looking keys hidden.

    What is not JSON is not shown at all, because it cannot be redacted.
    """
    if text is None:
        return Payload(None, None)
    if is_no_text(known := stored_text(text)):
        return Payload(None, known)
    try:
        return Payload(redacted(msgspec.json.decode(known)), None)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return Payload(None, f"{len(known):,} characters that are no JSON: {one_line(error, 100)}")


def redacted(value: Any) -> Any:
    """The value with `***` in place of passwords, and of whatever stands under a secret-looking
    key.
    """
    if isinstance(value, dict):
        return {k: "***" if is_secret(str(k)) else redacted(v) for k, v in entries(value)}
    if isinstance(value, list):
        return [redacted(part) for part in _parts(value)]
    return hide_passwords(value) if isinstance(value, str) else value
