"""Ids: time-ordered UUIDs (RFC 9562, version 7), so that an enqueue can be repeated by its id.

They are made by the client. Within a process they strictly rise, so jobs enqueued together keep
their order: the twelve bits after the milliseconds carry a fraction of one (RFC 9562, section 6.2,
method 3). The rest is fresh randomness of the system, which is safe across a fork.
"""

from __future__ import annotations

import os
import re
import threading
import time
import uuid

from onward.errors import InvalidOption
from onward.text import safe_repr

_lock = threading.Lock()
_last = 0
_VARIANTS = {f"{digit:x}": f"{8 | digit & 3:x}" for digit in range(16)}
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def new_id() -> str:
    """A new id, as text in lower case."""
    global _last
    nanos = time.time_ns()
    stamp = (nanos // 1_000_000 << 12) | (nanos % 1_000_000 * 4096 // 1_000_000)
    with _lock:
        if stamp <= _last:
            stamp = _last + 1
        _last = stamp
    digits = f"{stamp:015x}{os.urandom(8).hex()}"
    return (
        f"{digits[:8]}-{digits[8:12]}-7{digits[12:15]}"
        f"-{_VARIANTS[digits[15]]}{digits[16:19]}-{digits[19:]}"
    )


def parse_id(value: object) -> str:
    """An id that a caller gave, in its one spelling.

    Raises:
        InvalidOption: it is no UUID.
    """
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, str):
        if _ID.fullmatch(value):
            return str.__str__(value)
        try:
            return str(uuid.UUID(value))
        except ValueError:
            pass
    raise InvalidOption(
        f"{safe_repr(value)} is not a job id",
        why="job ids are UUIDs",
        fix="the id that enqueue returned, in full; for using(id=…),"
        " uuid.uuid5(uuid.NAMESPACE_URL, key) makes one from a key of yours",
    )


def _unlock() -> None:
    """A child that was forked while a thread held the lock starts with a free one."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)
