"""Misfit: the paths and the words of the errors about calls that do not fit.

A path leads to the culprit as the caller would write it (`items[3].price`, `options['a']`); where
the decoder only says "some value of this dict", the dict is halved until one key is left to blame.
A call and a signature are spelt as Python spells them, but short, without secrets, and without the
`repr` of anything that was passed.
"""

from __future__ import annotations

import inspect
import itertools
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import msgspec

from onward.errors import InvalidOption, OnwardError, PayloadTooLarge, PayloadUnreadable
from onward.text import clean_text, is_secret, kind_of, safe_repr, said, type_name

# ---------------------------------------------------------------------------- whole errors


def unresolved(function: Callable[..., Any], name: str, error: Exception) -> OnwardError:
    """The annotations of a task name something that cannot be found."""
    missing = str(getattr(error, "name", "") or "")
    texts: Mapping[str, object] = getattr(function, "__annotations__", {})
    blamed = [
        f"`{where}: {text}`"
        for where, text in texts.items()
        if isinstance(text, str) and missing and missing in text
    ]
    return InvalidOption(
        f"cannot use {name} as a task: its signature cannot be read",
        why=f"{', '.join(blamed) or 'its annotations'}: {clean_text(str(error), 200)}",
        fix="import or define the name at module level (not under `if TYPE_CHECKING:`)",
    )


def unreadable(name: str, why: str, *, noun: str = "arguments") -> OnwardError:
    """Stored arguments, or the stored result, do not fit today's code."""
    return PayloadUnreadable(
        f"stored {noun} {'does' if noun == 'result' else 'do'} not fit {name}",
        why=why,
        fix="deploy code that still reads them, then requeue the job; or discard it",
    )


def too_large(what: str, subject: str, size: int, limit: int) -> OnwardError:
    """Arguments or a result take more room than one job may."""
    return PayloadTooLarge(
        what,
        why=f"{subject} {size:,} bytes of JSON; at most {limit:,} are stored for one job",
        fix="keep large data in a file or a table and pass its name or id",
    )


# ---------------------------------------------------------------------------- paths


def locate(decoder: msgspec.json.Decoder[Any], raw: bytes, error: Exception) -> tuple[str, str]:
    """Where and why a text does not fit: the path (`items[3].price`, or nothing) and the reason."""
    if cause_of(error) is not None:
        return "", said(error)
    message = clean_text(str(error), 300)
    named = re.search(r"field `(.*)`$", message)
    if named and " - at " not in message:
        return named[1], "missing" if "missing" in message else "no such parameter"
    reason, _, place = message.rpartition(" - at ")
    found = re.search(r"`\$(.*)`$", place)
    if found is None:
        return "", lower_first(message)
    steps = _STEP.findall(found[1]) + (["[...]"] if place.startswith("`key`") else [])
    path = "".join(_pinpoint(decoder, raw, steps)).removeprefix(".")
    if is_secret(path):
        reason = "the value has the wrong form"
    return path, lower_first(f"{reason}, as a key" if place.startswith("`key`") else reason)


def in_python(reason: str) -> str:
    """A reason for people who passed Python values: without the decoder's words for JSON."""
    reason = _ENCODED.sub(lambda found: f"expected `{_ENCODED_AS[found[1]]}`", reason)
    if not reason.startswith("expected `"):
        return reason
    reason = re.sub(r"got `(array|object)`", lambda found: f"got `{_ARRIVED[found[1]]}`", reason)
    return re.sub(r"`[^`]*`", lambda found: re.sub(r"\bnull\b", "None", found[0]), reason)


def at_hand(reason: str, value: object, annotation: object) -> str:
    """The same where the value is at hand, and what is declared for it."""
    found = _MISMATCH.fullmatch(reason)
    if found is None:
        return reason
    known = re.search(r"\b(array|object)\b", found[1]) is None
    got = "None" if value is None else type_name(kind_of(value))
    return f"expected `{found[1] if known else spell(annotation)}`, got `{got}`"


_ENCODED = re.compile(r"^invalid (?:RFC3339 encoded|ISO8601|base64 encoded) (\w+)")
_ENCODED_AS = {
    "datetime": "datetime",
    "date": "date",
    "time": "time",
    "duration": "timedelta",
    "string": "bytes",
}
_ARRIVED = {"array": "list", "object": "dict"}
_MISMATCH = re.compile(r"expected `([^`]*)`(?:, got `[^`]*`)?")

_STEP = re.compile(r"\.[^.\[]+|\[\d+\]|\[\.\.\.\]")


def _pinpoint(decoder: msgspec.json.Decoder[Any], raw: bytes, steps: list[str]) -> list[str]:
    """Replace each `[...]`, as msgspec says for a value of a dict, by the key that is to blame."""
    try:
        document: Any = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):  # Also spoilt further on.
        return steps
    node, path = document, list[str]()
    for step in steps:
        if step == "[...]" and isinstance(node, dict):
            entries = cast("dict[str, Any]", node)
            key = _blamed_key(decoder, document, entries)
            path.append(key_step(key))
            node = entries[key]
            continue
        path.append(step)
        try:
            node = node[int(step[1:-1]) if step.startswith("[") else step[1:]]
        except (LookupError, TypeError, ValueError):
            return [*path, *steps[len(path) :]]
    return path


def _blamed_key(decoder: msgspec.json.Decoder[Any], document: Any, node: dict[str, Any]) -> str:
    """Halve a dict inside the document until one entry is left that still does not decode."""
    entries = list(node.items())
    while len(entries) > 1:
        half = entries[: len(entries) // 2]
        node.clear()
        node.update(half)
        entries = half if _fails(decoder, document) else entries[len(half) :]
    node.clear()
    node.update(entries)
    return entries[0][0]


def _fails(decoder: msgspec.json.Decoder[Any], document: object) -> bool:
    try:
        decoder.decode(msgspec.json.encode(document))
    except Exception:
        return True
    return False


def key_step(key: object) -> str:
    """The step of a path that leads to a dict's value."""
    return f"[{safe_repr(key, 40)}]"


def short(path: str) -> str:
    """A path that fits into a message."""
    return clean_text(path if len(path) <= 100 else path[:99] + "…", 200)


def joined(path: str) -> str:
    """A path as it continues after a name."""
    return path if not path or path.startswith("[") else f".{path}"


def first_name(path: str) -> str:
    """The parameter at which a path begins."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def cause_of(error: Exception) -> Exception | None:
    """An error of the user's own code is kept as the cause; msgspec's adds nothing to ours."""
    ours = (msgspec.MsgspecError, UnicodeError, RecursionError)
    return None if isinstance(error, ours) or type(error) is TypeError else error


# ---------------------------------------------------------------------------- words


def spell_call(name: str, kwargs: Mapping[str, Any], args: Iterable[tuple[str, Any]] = ()) -> str:
    """A call as it was written, without what looks secret."""
    shown = [_shown(place, value) for place, value in args]
    shown += [f"{clean_text(key, 60)}={_shown(key, value)}" for key, value in kwargs.items()]
    inside = ", ".join(shown[:8]) + (", …" if len(shown) > 8 else "")
    return f"{name}({inside})"


def _shown(name: str, value: object) -> str:
    return "***" if is_secret(name) else safe_repr(value, 40)


def spell_given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """What a call gave: how many by position, and which by name."""
    words = [f"{len(args)} positional"] if args else []
    words += [f"`{clean_text(name, 60)}`" for name in itertools.islice(kwargs, 8)]
    return ", ".join(words) or "no arguments"


def spell_signature(signature: inspect.Signature) -> str:
    """A signature, spelt without calling the `repr` of any default."""
    shown = [
        p.replace(
            default=p.default if p.default is p.empty else _Ellipsis(),
            annotation=p.annotation if p.annotation is p.empty else _Spelt(spell(p.annotation)),
        )
        for p in signature.parameters.values()
    ]
    return clean_text(str(inspect.Signature(shown)), 400)


class _Ellipsis:
    def __repr__(self) -> str:
        return "…"


class _Spelt(str):
    """An annotation that `inspect` prints as it is, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def spell(annotation: object) -> str:
    """An annotation as it stands in the source, or nearly so."""
    if isinstance(annotation, str):
        return clean_text(annotation, 120)
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return type_name(annotation)
    try:
        return clean_text(inspect.formatannotation(annotation), 120)
    except Exception:
        return "…"


def lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
