"""Stored errors, read back whatever was stored there."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from onward.failure import ErrorText
from onward.store.stored import stored_text

MOST_TEXT = 100_000
"""Characters of a message or a traceback that are shown, if somebody has stored more."""


def read_failure(text: Any) -> ErrorText | None:
    """A stored error; None where there is none. What is no error of ours is shown as it is."""
    if text is None:
        return None
    known = stored_text(text)
    try:
        found = msgspec.json.decode(known, type=ErrorText)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ErrorText(type="", message=known[:MOST_TEXT], traceback="")
    return ErrorText(
        type=found.type[:MOST_TEXT],
        message=found.message[:MOST_TEXT],
        traceback=found.traceback[:MOST_TEXT],
    )


def headline(error: ErrorText | None) -> str | None:
    """`Type: message`."""
    if error is None:
        return None
    return f"{error.type}: {error.message}" if error.type else error.message


_PART = re.compile(r'"(type|message)":("(?:[^"\\]|\\.)*"?)')


def headline_of_start(text: Any) -> str | None:
    """`Type: message` of a stored error of which only the beginning was read."""
    error = read_failure(text)
    if error is None or error.type:
        return headline(error)
    parts = {name: _decoded(value) for name, value in _PART.findall(str(text))}
    return f"{parts['type']}: {parts.get('message', '')}" if "type" in parts else error.message


def _decoded(literal: str) -> str:
    """A JSON string that may have been cut anywhere, even in an escape or a pair of them."""
    body = literal[1:-1] if literal.endswith('"') and len(literal) > 1 else literal[1:]
    for shorter in range(13):
        try:
            return msgspec.json.decode(f'"{body[: len(body) - shorter]}"', type=str)
        except msgspec.MsgspecError:
            continue
    return body
