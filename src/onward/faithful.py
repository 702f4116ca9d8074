"""Faithful: compares what was sent with what arrived, and finds the part that would not survive.

A value must arrive equal and of the same type. Four changes are allowed, each towards what was
declared:

- an int where `float` is declared arrives as the float, if it is exactly equal (PEP 484);
- an aware datetime keeps its instant and its offset; a zone's name does not travel;
- in a result, a tuple arrives as a list wherever the annotation does not say tuple;
- a dataclass, Struct or model is its fields: other attributes do not travel.
"""

from __future__ import annotations

import datetime as dt
import enum
import math
import types
import uuid
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from onward.errors import NotSerializable, OnwardError, PayloadTooLarge
from onward.foreign import ENCODER, MISSING, field_names, fields_of, is_pydantic
from onward.misfit import key_step, short
from onward.text import is_secret, kind_of, module_of, mro_of, safe_repr, said, type_name

MAX_DEPTH = 128
"""Deepest nesting of containers in one argument or result."""


class Flaw(Struct, frozen=True, kw_only=True):
    """Where and why a value would not arrive as it is; `path` is built from the inside out."""

    why: str
    fix: str
    path: str = ""
    kind: type[OnwardError] = NotSerializable
    quotes: bool = False
    """Whether `why` quotes the value, which may be a secret."""

    def under(self, step: str) -> Flaw:
        return replace(self, path=step + self.path)

    def error_for(self, what: str, noun: str) -> OnwardError:
        hidden = self.quotes and is_secret(self.path)
        why = "would not arrive as it is" if hidden else self.why
        return self.kind(what, why=f"{noun} `{short(self.path)}` {why}", fix=self.fix)


# ---------------------------------------------------------------------------- comparing


def compare_arguments(
    bound: dict[str, Any], names: tuple[str, ...], received: tuple[Any, ...]
) -> Flaw | None:
    """The first argument that would arrive as something else, if any.

    Args:
        bound: those that are sent, in the order of `names`; some may be left out.
        names: of all parameters.
        received: what would arrive, one for each name.
    """
    for name, other in zip(names, received, strict=True):
        if name in bound:
            value = bound[name]
            if type(value) in _SCALARS and type(value) is type(other) and value == other:
                continue
            flaw = compare_safely(value, other)
            if flaw is not None:
                return flaw.under(name)
    return None


def compare_safely(sent: object, received: object, *, tuples_as_lists: bool = False) -> Flaw | None:
    """Compare one value; whatever its own code raises meanwhile is a flaw of it."""
    try:
        return _compare(sent, received, 0, tuples_as_lists)
    except RecursionError:
        return _too_deep("nests deeper than the stack that is left here")
    except Exception as error:  # A user's __eq__ or property.
        return odd(sent, error)


def _compare(sent: object, received: object, depth: int, loose: bool) -> Flaw | None:
    """The first difference between what was sent and what would be received, if any."""
    kind = type(sent)
    if kind is not type(received) and not _may_become(sent, received, loose):
        return _changed(sent, received)
    if kind in _SCALARS:
        return None if sent == received else _changed(sent, received)
    if kind is list or kind is tuple:
        if depth >= MAX_DEPTH:
            return _too_deep()
        return _compare_items(sent, received, depth + 1, loose)
    if kind is dict:
        if depth >= MAX_DEPTH:
            return _too_deep()
        return _compare_entries(sent, received, depth + 1, loose)
    return _compare_objects(sent, received, depth, loose)


_SCALARS = frozenset(
    {int, str, bool, type(None), float, bytes, bytearray, dt.date, dt.timedelta, uuid.UUID}
)


def _may_become(sent: Any, received: Any, loose: bool) -> bool:
    """The changes that are allowed, each towards what was declared (see the top of this module)."""
    if type(sent) is int:
        return type(received) is float  # Whether they are equal is compared next.
    return loose and type(sent) is tuple and type(received) is list


def _compare_items(sent: Any, received: Any, depth: int, loose: bool) -> Flaw | None:
    if len(sent) != len(received):
        return _changed(sent, received)
    for index, item in enumerate(sent):
        flaw = _compare(item, received[index], depth, loose)
        if flaw is not None:
            return flaw.under(f"[{index}]")
    return None


def _compare_entries(sent: Any, received: Any, depth: int, loose: bool) -> Flaw | None:
    """JSON keeps the order of entries, so keys are compared in step."""
    if len(sent) != len(received):
        return _lost_entry(sent, received)
    for (key, value), (other_key, other) in zip(sent.items(), received.items(), strict=True):
        if type(key) is not str or key != other_key:
            flaw = _compare(key, other_key, depth, loose)
            if flaw is not None:
                return _bad_key(key, flaw.why, _KEY_FIX if type(other_key) is str else flaw.fix)
        flaw = _compare(value, other, depth, loose)
        if flaw is not None:
            return flaw.under(key_step(key))
    return None


def _lost_entry(sent: dict[Any, Any], received: dict[Any, Any]) -> Flaw:
    """Two keys became one (`1` and `'1'`), or the declared type has no such key."""
    kept = {(kind_of(key), key) for key in received}
    lost = next(key for key in sent if (kind_of(key), key) not in kept)
    if type(lost) is not str:
        return _bad_key(lost, "would not be kept apart from the others")
    fix = "pass only keys that the declared type has, each once"
    return Flaw(path=key_step(lost), why="would be lost", fix=fix)


_KEY_FIX = "keys of JSON are strings: annotate the place (`dict[int, …]`), or pass string keys"


def _bad_key(key: object, why: str, fix: str = _KEY_FIX) -> Flaw:
    return Flaw(path=key_step(key), why=f"has a key that {why}", fix=fix)


def _compare_objects(sent: Any, received: Any, depth: int, loose: bool) -> Flaw | None:
    kind = kind_of(sent)
    if kind is set or kind is frozenset:
        return _compare_sets(sent, received, depth, loose)
    if kind is dt.datetime or kind is dt.time:
        return None if _same_time(sent, received) else _changed(sent, received)
    if kind is Decimal:
        # Exactly: 1.10 is not 1.1, and NaN is NaN.
        same = sent.as_tuple() == received.as_tuple()
        return None if same else _changed(sent, received)
    fields = None if issubclass(kind, enum.Enum) else fields_of(sent)
    if fields is None:
        return None if sent is received or sent == received else _changed(sent, received)
    if depth >= MAX_DEPTH:
        return _too_deep()
    return _compare_fields(fields, dict(fields_of(received) or ()), depth + 1, loose)


def _compare_sets(sent: Any, received: Any, depth: int, loose: bool) -> Flaw | None:
    others = {item: item for item in received}
    if len(sent) != len(others):
        return _changed(sent, received)
    for item in sent:
        if item not in others or _compare(item, others[item], depth + 1, loose):
            return _changed(sent, received)
    return None


def _compare_fields(
    ours: list[tuple[str, Any]], theirs: Mapping[str, Any], depth: int, loose: bool
) -> Flaw | None:
    for name, value in ours:
        flaw = _compare(value, theirs.get(name, MISSING), depth, loose)
        if flaw is not None:
            return flaw.under(f".{name}")
    return None


def _same_time(sent: Any, received: Any) -> bool:
    """The same reading of the clock at the same offset; a zone comes back as that offset."""
    if (sent.tzinfo is None) != (received.tzinfo is None):
        return False
    if sent.tzinfo is None and sent.fold != received.fold:
        return False
    same_clock = sent.replace(tzinfo=None, fold=0) == received.replace(tzinfo=None, fold=0)
    return bool(same_clock and sent.utcoffset() == received.utcoffset())


# ---------------------------------------------------------------------------- finding the culprit


def first_flaw(bound: dict[str, Any]) -> Flaw | None:
    """The first argument that has no JSON form, if any."""
    for name, value in bound.items():
        flaw = unwritable(value)
        if flaw is not None:
            return flaw.under(name)
    return None


def unwritable(value: object) -> Flaw | None:
    """The first part of a value that has no JSON form at all."""
    try:
        return _search(value, 0, ())
    except RecursionError:
        return _too_deep("nests deeper than the stack that is left here")
    except Exception as error:  # A property of the user's, or another thread changes the value.
        return odd(value, error)


def _search(value: Any, depth: int, above: tuple[int, ...]) -> Flaw | None:
    if id(value) in above:
        return _too_deep("contains itself")
    parts = _parts(value)
    if parts is None:
        return _unwritable_leaf(value)
    if depth >= MAX_DEPTH:
        return _too_deep()
    for step, part in parts:
        flaw = _search(part, depth + 1, (*above, id(value)))
        if flaw is not None:
            return flaw.under(step)
    if dict in mro_of(kind_of(value)):
        return _unwritable_key(value)
    return _unwritable_leaf(value)  # Its parts can be written: a serializer of its own cannot.


def _parts(value: Any) -> Iterator[tuple[str, Any]] | None:
    kind = kind_of(value)
    if dict in mro_of(kind):
        return ((key_step(key), part) for key, part in value.items())
    fields = fields_of(value)
    if fields is not None:
        return ((f".{name}", part) for name, part in fields)
    if not _ITERABLE.isdisjoint(mro_of(kind)):
        return ((f"[{index}]", item) for index, item in enumerate(value))
    return None


_ITERABLE = frozenset({list, tuple, set, frozenset})


def _unwritable_key(value: dict[Any, Any]) -> Flaw | None:
    for key in value:
        try:
            ENCODER.encode({key: None})
        except Exception:
            surrogate = type(key) is str
            return _bad_key(key, _SURROGATE_WHY if surrogate else f"is {_a(kind_of(key))}")
    return None


def _unwritable_leaf(value: Any) -> Flaw | None:
    if type(value) is float and not math.isfinite(value):
        return _not_finite(value)
    try:
        ENCODER.encode(value)
    except Exception as error:
        return _without_form(value, error)
    return None


# ---------------------------------------------------------------------------- flaws


def _without_form(value: Any, error: Exception) -> Flaw:
    kind = kind_of(value)
    if kind is str:
        return Flaw(why=_SURROGATE_WHY, fix=_SURROGATE_FIX)
    if kind is int:
        return Flaw(
            why=f"is {safe_repr(value)}, more digits than Python itself reads from text",
            fix="pass it as hexadecimal text",
        )
    if is_pydantic(kind):
        return odd(value, error)
    return Flaw(
        why=f"is {_a(kind)}; what a job is called with and returns is stored as JSON",
        fix=_advice(value),
    )


_SURROGATE_WHY = "is a text with a lone surrogate, which is not valid Unicode"
_SURROGATE_FIX = "pass bytes, or decode the text with errors='replace'"


def _changed(sent: Any, received: Any) -> Flaw:
    if type(sent) is float and not math.isfinite(sent):
        return _not_finite(sent)
    if type(sent) is type(received):
        why = f"is {safe_repr(sent)} and would arrive as {safe_repr(received)}"
        fix = "pass it in a form that JSON keeps, such as a string"
        return Flaw(why=why, fix=fix, quotes=True)
    kind = kind_of(received)
    why = f"is {_a(kind_of(sent))} and would arrive as {_a(kind)}"
    return Flaw(why=why, fix=_advice(sent) if kind in _UNDECLARED else f"pass {_a(kind)}")


_UNDECLARED = frozenset({dict, list, str, int, float, bool, type(None), type(MISSING)})
"""What arrives where nothing is declared. Any other kind arrives because the place asks for it."""


def _not_finite(value: float) -> Flaw:
    return Flaw(
        why=f"is {value!r}, and JSON has no such number",
        fix="pass None (annotate `float | None`), or the number as a Decimal or string",
    )


def _too_deep(why: str = f"nests deeper than {MAX_DEPTH} levels") -> Flaw:
    return Flaw(why=why, fix="pass flatter data", kind=PayloadTooLarge)


def odd(value: object, error: Exception) -> Flaw:
    """The flaw of a value that raised an error of its own."""
    return Flaw(
        why=f"is {_a(kind_of(value))} and cannot be written and read again: {said(error)}",
        fix=_advice(value),
        quotes=True,
    )


def _advice(value: Any) -> str:
    kind = kind_of(value)
    if kind is types.CoroutineType:
        return "await it first and pass its result; to enqueue a call, use `task.enqueue(…)`"
    if any(module_of(base).partition(".")[0] == "numpy" for base in mro_of(kind)):
        return "pass a Python value: `.item()` of a scalar, `.tolist()` of an array"
    if kind in _EXAMPLES:
        return f"annotate the place, for example `{_EXAMPLES[kind]}`, or pass a list"
    if kind in _ANNOTATED or kind in _PLAIN or _is_declarable(kind):
        return f"annotate the place with `{type_name(kind)}`"
    for base in _PLAIN:
        if base in mro_of(kind):
            return f"pass the plain `{base.__name__}`: a subclass is not kept"
    return "pass plain data, such as an id, and load the object in the job"


def _is_declarable(kind: type) -> bool:
    structured = is_pydantic(kind) or field_names(cast(Any, kind)) is not None
    return structured or enum.Enum in mro_of(kind)


_EXAMPLES: dict[type, str] = {
    tuple: "tuple[int, ...]",
    set: "set[int]",
    frozenset: "frozenset[int]",
}
_ANNOTATED = frozenset(
    {bytes, bytearray, dt.date, dt.datetime, dt.time, dt.timedelta, Decimal, uuid.UUID}
)
_PLAIN = (str, int, float, bytes, dict, list, tuple, set, frozenset, dt.datetime, dt.date)


def _a(kind: type) -> str:
    if kind is type(None):
        return "None"
    if kind is bytes:
        return "bytes"
    name = type_name(kind)
    return f"{'an' if name[0] in 'aeio' else 'a'} {name}"
