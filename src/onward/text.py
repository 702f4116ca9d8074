"""Text: what people read about values and errors, made without trusting either.

A value may be hostile without meaning it: a `__repr__` that raises, blocks or tells a secret, a
metaclass that lies about its name, 50 MB, a NUL. So no code of a value's class runs here: classes
are read past their metaclass, values are shown by their exact built-in type, whatever stands under
a name that looks secret becomes `***`, as does the password in a URL, and every text is clean and
bounded. Only an error's own message is asked for, and it may refuse.
"""

from __future__ import annotations

import datetime as dt
import enum
import itertools
import re
import sys
import uuid
from decimal import Decimal
from typing import Any, cast

_SECRET = re.compile(
    r"passw|pwd|secret|token|api_?key|private_?key|access_?key|authori[sz]ation|credential|cookie",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether a parameter, key or path looks as if its value should not be shown."""
    return _SECRET.search(name) is not None


def hide_passwords(text: str) -> str:
    """The text with `***` in place of the password of every URL and of every `password=…`.

    Rather too much is hidden than too little: a password may have any character in it.
    """
    return _NAMED.sub(r"\1***", _IN_URL.sub(_hide_in_url, text))


_IN_URL = re.compile(r"(://[^\s/?#:]*:)(\S+)")
_NAMED = re.compile(
    r"""((?:passw|pwd)\w{0,20}(?:[ \t]*=(?!=)[ \t]*|\\?["'][ \t]*:[ \t]*))"""
    r"""(?!\*\*\*(?:\W|$))"""  # Hidden already.
    r"""(?:\\?(?:'(?:[^'\\\n]|\\.)*'?|"(?:[^"\\\n]|\\.)*"?)[^\s&,;)}\]]*"""
    # A piece without a `=` may be the rest of a password with an & in it.
    r"""|[^\s&]+(?:&[^\s&=]+(?=[\s&]|$))*)""",
    re.IGNORECASE,
)


def _hide_in_url(match: re.Match[str]) -> str:
    """What stands between the user and the last `@` of a URL."""
    _, at, rest = match[2].rpartition("@")
    return f"{match[1]}***{at}{rest}" if at else match[0]


# ---------------------------------------------------------------------------- classes


def type_name(kind: type) -> str:
    """`module.Qualname`, builtins without the module; a metaclass has no say in it."""
    module = module_of(kind)
    name = _plain_text(type.__dict__["__qualname__"].__get__(kind))
    return clean_text(name if module in ("builtins", "") else f"{module}.{name}", 200)


def module_of(kind: type) -> str:
    """The name of the module that defines a class, whatever its metaclass says."""
    try:
        return _plain_text(type.__dict__["__module__"].__get__(kind))
    except AttributeError:
        return ""


def _plain_text(value: object) -> str:
    """An exact str: a subclass may have methods of its own."""
    return str.__str__(cast(str, value)) if issubclass(type(value), str) else ""


def kind_of(value: object) -> type[object]:
    """The class of a value, whatever its `__class__` says."""
    return type(value)


def mro_of(kind: type) -> tuple[type, ...]:
    """A class and its bases, whatever its metaclass says."""
    return cast("tuple[type, ...]", type.__dict__["__mro__"].__get__(kind))


# ---------------------------------------------------------------------------- values


def safe_repr(value: object, limit: int = 80) -> str:
    """A short text for a value, for messages.

    Never runs code of the value's class (a `__repr__` may raise, block or tell a secret), and shows
    entries whose key looks secret, and passwords in texts, as `***`.
    """
    try:
        # More than is shown: the `@` that ends a password may be in it.
        text = hide_passwords(_render(value, limit + MOST_PASSWORD, 3))
    except Exception:  # Changed by another thread meanwhile.
        text = f"<{type_name(type(value))} object>"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _render(value: Any, limit: int, depth: int) -> str:
    kind = kind_of(value)
    if kind in (str, bytes, bytearray):
        return repr(value[: limit + 1])
    if kind is int and value.bit_length() > 256:
        return f"<int of {value.bit_length():,} bits>"
    if kind in _HARMLESS or (kind in _TIMES and _is_plain_zone(value.tzinfo)):
        return repr(value)
    if kind is dict:
        return _render_dict(value, limit, depth)
    if kind in _BRACKETS:
        opened, closed = _BRACKETS[kind]
        closed = ",)" if kind is tuple and len(value) == 1 else closed
        return opened + _render_items(value, limit, depth) + closed
    if enum.Enum in mro_of(kind):
        return f"{type_name(kind)}.{object.__getattribute__(value, '_name_')}"
    return f"<{type_name(kind)} object>"


_HARMLESS = frozenset(
    {int, float, bool, complex, type(None), Decimal, uuid.UUID, dt.date, dt.timedelta}
)
_TIMES = frozenset({dt.datetime, dt.time})
_ZONES = frozenset({type(None), dt.timezone})
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}


def _is_plain_zone(zone: object) -> bool:
    """Whether a time zone is one of the standard library's, whose `repr` is harmless."""
    zones = sys.modules.get("zoneinfo")
    return type(zone) in _ZONES or (zones is not None and type(zone) is zones.ZoneInfo)


def _render_items(value: Any, limit: int, depth: int) -> str:
    if depth == 0:
        return "…"
    shown = [_render(item, limit, depth - 1) for item in itertools.islice(value, 6)]
    return ", ".join(shown + (["…"] if len(value) > 6 else []))


def _render_dict(value: dict[Any, Any], limit: int, depth: int) -> str:
    if depth == 0:
        return "{…}"
    shown = [
        f"{_render(key, limit, 1)}: "
        + ("***" if type(key) is str and is_secret(key) else _render(part, limit, depth - 1))
        for key, part in itertools.islice(value.items(), 6)
    ]
    return "{" + ", ".join(shown + (["…"] if len(value) > 6 else [])) + "}"


# ---------------------------------------------------------------------------- stored text


# ---------------------------------------------------------------------------- errors and plain text


def said(error: BaseException) -> str:
    """An error as `Type: message`, or its type alone if its message cannot be had."""
    try:
        return clean_text(f"{type_name(type(error))}: {error}", 300)
    except Exception:
        return type_name(type(error))


MOST_PASSWORD = 2_000
"""Characters beyond the end of what is shown that are looked at for the end of a password."""

_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def clean_text(text: str, limit: int) -> str:
    """Make a text that every database, log and terminal takes, of at most `limit` characters.

    NUL, other control characters (but not newline and tab) and lone surrogates become visible
    escapes (`\\x00`, `\\ud800`), passwords `***`. A longer text is cut in the middle, and says by
    how much.
    """
    if len(text) > limit + MOST_PASSWORD:
        front, back = text[: limit + MOST_PASSWORD], text[-limit - MOST_PASSWORD :]
        return _cut(hide_passwords(front), hide_passwords(back), len(text), limit)
    text = hide_passwords(text)
    if len(text) <= limit:
        escaped = _UNSAFE.sub(_escape, text)
        if len(escaped) <= limit:
            return escaped
    return _cut(text, text, len(text), limit)


def _cut(front: str, back: str, length: int, limit: int) -> str:
    """The beginning and the end of a text that is `length` characters long."""
    marker = f" […{length:,} characters cut…] "  # As long as the real one, or longer.
    room = max(limit - len(marker), 0)
    head = _take(front[:room], room - room // 2)
    tail = _take(back[: -room - 1 : -1], room // 2)
    shown = _UNSAFE.sub(_escape, head)
    ending = _UNSAFE.sub(_escape, tail[::-1])
    cut = f" […{length - len(head) - len(tail):,} characters cut…] "
    return (shown + cut + ending)[:limit]


def _take(text: str, room: int) -> str:
    """As many characters from the start as fit into `room` once they are escaped."""
    for index, character in enumerate(text):
        room -= len(_UNSAFE.sub(_escape, character))
        if room < 0:
            return text[:index]
    return text


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
