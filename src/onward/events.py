"""What happened, said once: each part reports events, and listeners make of them what they want.

The only listener that is always there writes one line an event through the standard library's
`logging`, on the logger `onward`. The job's id and attempt are in each line and, as attributes
(`onward_job`, `onward_attempt`, …), in each record. No other module formats logs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from onward.failure import describe
from onward.text import hide_passwords, safe_repr

log = logging.getLogger("onward")

MOST_TEXT = 300
"""Characters of one value in a line."""


class Happened(Struct, frozen=True, kw_only=True):
    """One event. `name` is its dotted name, `level` a level of `logging`, `fields` all else."""

    name: str
    level: int = logging.INFO
    job: str | None = None
    attempt: int | None = None
    task: str | None = None
    worker: str | None = None
    fields: dict[str, Any] = {}


Listener = Callable[[Happened], None]

_listeners: dict[object, Listener] = {}


def emit(happened: Happened) -> None:
    """Tell every listener. One that fails is reported and hinders neither the others nor us."""
    happened = _without_passwords(happened)
    with suppress(Exception):  # A handler or a filter of the user's may raise.
        _write_log(happened)
    for listener in tuple(_listeners.values()):
        try:
            listener(happened)
        except Exception as error:
            with suppress(Exception):
                _write_log(_failure(listener, happened, error))


def _without_passwords(happened: Happened) -> Happened:
    """An error that is told of may hold the address that it could not reach."""
    fields = {
        name: hide_passwords(value) if type(value) is str else value
        for name, value in happened.fields.items()
    }
    return replace(happened, fields=fields)


def wanted(level: int) -> bool:
    """Whether anybody looks at events of this level; asked where there are thousands a second."""
    return bool(_listeners) or log.isEnabledFor(level)


def listen(listener: Listener) -> Callable[[], None]:
    """Have a function called with every event of this process.

    Returns:
        The function that ends it.
    """
    key = object()
    _listeners[key] = listener

    def end() -> None:
        _listeners.pop(key, None)

    return end


def _failure(listener: Listener, happened: Happened, error: Exception) -> Happened:
    text = describe(error)
    return Happened(
        name="listener.failed",
        level=logging.ERROR,
        job=happened.job,
        attempt=happened.attempt,
        fields={
            "while": happened.name,
            "listener": getattr(listener, "__qualname__", type(listener).__qualname__),
            "error": f"{text.type}: {text.message}",
            "traceback": text.traceback,
        },
    )


def _write_log(happened: Happened) -> None:
    if not log.isEnabledFor(happened.level):
        return
    known = {
        "job": happened.job,
        "attempt": happened.attempt,
        "task": happened.task,
        "worker": happened.worker,
    }
    pairs = {key: value for key, value in (known | happened.fields).items() if value is not None}
    line = " ".join([happened.name, *(f"{key}={_shown(value)}" for key, value in pairs.items())])
    extra = {f"onward_{key}": value for key, value in (pairs | {"event": happened.name}).items()}
    log.log(happened.level, "%s", line, extra=extra)


def _shown(value: Any) -> str:
    """A value on one line, without control characters, quoted where it has spaces."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str.__str__(value) if isinstance(value, str) else safe_repr(value, MOST_TEXT)
    if len(text) > MOST_TEXT:
        text = text[:MOST_TEXT] + "…"
    if text.isprintable() and text and not set(text) & {" ", '"', "="}:
        return text
    return '"' + "".join(_escaped(c) for c in text) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else character.encode("unicode_escape").decode()
