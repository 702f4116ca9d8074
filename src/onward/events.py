"""What happened, said once: each part of Onward reports events, and listeners make of them what they want.

The only listener that is always there writes one structured line an event through the standard library's `logging`, on the
logger `onward`; the job's id and attempt are in each line and, as attributes, in each record. No other module formats logs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from msgspec import Struct

log = logging.getLogger("onward")


class Happened(Struct, frozen=True, kw_only=True):
    """One event. `name` is its dotted name, `level` a level of `logging`, `fields` what belongs to it."""

    name: str
    level: int = logging.INFO
    job: str | None = None
    attempt: int | None = None
    task: str | None = None
    worker: str | None = None
    fields: dict[str, Any] = {}


Listener = Callable[[Happened], None]

_listeners: list[Listener] = []


def emit(happened: Happened) -> None:
    """Tell every listener. A listener that fails is reported and does not hinder the others."""
    _write_log(happened)
    for listener in list(_listeners):
        try:
            listener(happened)
        except Exception:
            log.exception("listener.failed event=%s", happened.name)


def wanted(level: int) -> bool:
    """Whether anybody looks at events of this level; asked where there are thousands a second."""
    return bool(_listeners) or log.isEnabledFor(level)


def listen(listener: Listener) -> Callable[[], None]:
    """Have a function called with every event of this process; returns the function that ends it."""
    _listeners.append(listener)

    def end() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return end


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
    extra = {f"onward_{key}": value for key, value in ({"event": happened.name} | pairs).items()}
    log.log(happened.level, "%s", line, extra=extra)


def _shown(value: Any) -> str:
    """A value on one line, without control characters, quoted where it has spaces."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if len(text) > 300:
        text = text[:300] + "…"
    if text.isprintable() and text and not set(text) & {" ", '"', "="}:
        return text
    return '"' + "".join(_escaped(c) for c in text) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else character.encode("unicode_escape").decode()
