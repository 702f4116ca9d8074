"""Names of tasks and queues, and which function stands behind one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onward.errors import InvalidOption
from onward.text import safe_repr

MOST_NAME = 200

_MAINS = {"__main__", "__mp_main__"}


def check_name(name: object, what: str) -> str:
    """A queue's or a task's name: text that any list, log line and command line can carry.

    Raises:
        InvalidOption: it is empty, too long, or has characters that hide or break things.
    """
    if isinstance(name, str) and _is_name(name):
        return str.__str__(name)  # A member of an enum of strings is its text from here on.
    shown = f"{name[:60]!r}" if isinstance(name, str) else safe_repr(name)
    raise InvalidOption(
        f"{what} {shown} cannot be used as a name",
        why=f"a name is 1 to {MOST_NAME} printable characters, with no space around it,"
        " none of , * : = and no '-' in front",
        fix='queue="mail", queue="reports.daily"' if what == "queue" else 'name="mail.send"',
    )


def _is_name(name: str) -> bool:
    return (
        0 < len(name) <= MOST_NAME
        and name.isprintable()
        and name == name.strip()
        and not set(name) & set(",*:=")
        and not name.startswith("-")
    )


def default_name(function: Callable[..., Any]) -> str:
    """`module.function`; a script that is run has the name under which it would be imported.

    Raises:
        InvalidOption: it has no name of its own.
    """
    name = getattr(function, "__qualname__", None)
    module = getattr(function, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str):
        raise InvalidOption(
            f"{safe_repr(function)} has no name of its own",
            why="jobs are stored under the name of their task",
            fix="app.task(name='mail.send')(function)",
        )
    if name.endswith("<lambda>"):
        raise InvalidOption(
            "a lambda has no name of its own",
            why="jobs are stored under the name of their task, and the worker looks it up by that",
            fix="write a def, or say app.task(name='mail.send')(lambda …)",
        )
    if module in _MAINS:
        module = _imported_as(getattr(function, "__globals__", None)) or module
    return f"{module.removesuffix('.__main__')}.{name}".replace("<locals>.", "")


def _imported_as(script: Mapping[str, Any] | None) -> str | None:
    """The name of the module that is run as `__main__`: given to `python -m`, or its file's."""
    known = vars(sys.modules["__main__"]) if script is None else script
    spec = known.get("__spec__")
    if spec is not None:
        return str(spec.name)
    file = known.get("__file__")
    return Path(file).stem if file else None


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def same_function(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """The same place in the source: a module that is imported twice registers twice."""
    code, other_code = getattr(one, "__code__", None), getattr(other, "__code__", None)
    if code is None or other_code is None:
        return one is other
    return (code.co_filename, code.co_firstlineno) == (
        other_code.co_filename,
        other_code.co_firstlineno,
    )


def place_of(function: Callable[..., Any]) -> str:
    """Where a function stands, for messages."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else safe_repr(function)
