"""A change that took, told as an event: one name, one line, whoever made the change."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from onward.events import Happened
from onward.failure import ErrorText
from onward.job import Change
from onward.lifecycle import Event

LEVELS = {
    Event.SUCCEED: logging.DEBUG,
    Event.RETRY: logging.WARNING,
    Event.BURY: logging.ERROR,
    Event.SNOOZE: logging.INFO,
    Event.RELEASE: logging.INFO,
}


def told(change: Change, level: int) -> Happened:
    """A change that took, as an event."""
    fields: dict[str, Any] = {
        "move": change.arrow,
        "reason": change.reason,
        "error": _headline(change),
    }
    if change.event is Event.RETRY:
        fields["delay"] = change.delay
    return Happened(
        name=f"job.{change.event}",
        level=level,
        job=change.id,
        task=change.task,
        attempt=change.attempt,
        worker=change.worker,
        fields=fields,
    )


def _headline(change: Change) -> str | None:
    if change.error is None:
        return None
    try:
        error = msgspec.json.decode(change.error, type=ErrorText)
    except msgspec.MsgspecError:
        return change.error[:200]
    return f"{error.type}: {error.message}"[:200]
