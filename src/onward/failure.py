"""Failure: turns any exception into a text that can be stored, whatever the exception does.

An exception may be hostile without meaning it: a `__str__` that raises, a cause that is itself, a
context 5,000 links long, a group of 10,000, a message of 50 MB, a name with a NUL. So the parts of
an exception are read past its class (no property or metaclass has a say), its own code runs only
for its message, and every list, text and depth is bounded; where something was cut, the text says
so. Local variables are never stored.
"""

from __future__ import annotations

import collections
import itertools
import linecache
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any, cast

import msgspec

from onward.text import clean_text, safe_repr, type_name

MESSAGE_BYTES = 4 * 1024
TRACEBACK_BYTES = 16 * 1024
MOST_REASON = 1_000
"""Characters of a reason that somebody gives for the end of a job."""
MAX_LINKS = 6
"""Exceptions of a chain of causes and contexts that are shown: those nearest to the one raised."""
MAX_FRAMES = 30
MAX_MEMBERS = 5
"""Members of an exception group that are shown, and how many groups deep, are both bounded."""
MAX_GROUPS_DEEP = 3
MAX_NOTES = 5
MAX_BLOCKS = 40
"""Exceptions shown in one traceback, links and members together."""
MAX_SOURCE_BYTES = 4 * 1024 * 1024


class ErrorText(msgspec.Struct, frozen=True):
    """An error as it is stored: `type` is `module.Qualname`, builtins without the module."""

    type: str
    message: str
    traceback: str


def describe(exc: BaseException, *, skip_frames: int = 0) -> ErrorText:
    """Describe an exception in bounded, clean text; never raises for anything the exception does.

    Args:
        exc: the exception, with its traceback, causes, notes and members.
        skip_frames: outermost frames of `exc` to leave out: those of the runner. The last stays.
    """
    lines = _Report().chain(exc, skip_frames=skip_frames)
    return ErrorText(
        type=type_name(type(exc)),
        message=_fit(_message(exc), MESSAGE_BYTES),
        traceback=_fit("\n".join(lines), TRACEBACK_BYTES),
    )


class _Report:
    """The traceback of one failure; counts the exceptions it has shown, so that it stays small."""

    def __init__(self) -> None:
        self._blocks_left = MAX_BLOCKS

    def chain(self, exc: BaseException, *, groups_deep: int = 0, skip_frames: int = 0) -> list[str]:
        """An exception after those that led to it, the oldest first, as Python prints them."""
        links, longer = _links(exc)
        lines = [f"(the chain of causes was cut after {MAX_LINKS})", ""] if longer else []
        for link, joint in reversed(links):
            lines += self._block(link, groups_deep, skip_frames if link is exc else 0)
            if joint:
                lines += ["", joint, ""]
        return lines

    def _block(self, exc: BaseException, groups_deep: int, skip_frames: int) -> list[str]:
        if self._blocks_left == 0:
            return ["(more exceptions were cut)"]
        self._blocks_left -= 1
        lines = _frames(exc, skip_frames)
        message = clean_text(_message(exc), 2_000)
        lines.append(type_name(type(exc)) + (f": {message}" if message else ""))
        lines += _notes(exc)
        if issubclass(type(exc), BaseExceptionGroup):  # isinstance would ask `exc.__class__`.
            lines += self._members(cast("BaseExceptionGroup[BaseException]", exc), groups_deep)
        return lines

    def _members(self, group: BaseExceptionGroup[BaseException], groups_deep: int) -> list[str]:
        members = _part(BaseExceptionGroup, "exceptions", group)
        if groups_deep == MAX_GROUPS_DEEP:
            return [f"  ({len(members):,} members were cut: groups nest deeper here)"]
        lines: list[str] = []
        for number, member in enumerate(members[:MAX_MEMBERS], 1):
            lines.append(f"  +-- {number} of {len(members):,}")
            inner = self.chain(member, groups_deep=groups_deep + 1)
            lines += [f"  | {line}" for text in inner for line in text.split("\n")]
        if len(members) > MAX_MEMBERS:
            lines.append(f"  +-- ({len(members) - MAX_MEMBERS:,} more members were cut)")
        return lines


def _links(exc: BaseException) -> tuple[list[tuple[BaseException, str]], bool]:
    """The nearest links of the chain with the words that join each to the one before."""
    links: list[tuple[BaseException, str]] = []
    seen = {id(exc)}
    link: BaseException | None = exc
    joint = ""
    while link is not None and len(links) < MAX_LINKS:
        links.append((link, joint))
        link, joint = _origin(link)
        if id(link) in seen:
            return links, False
        seen.add(id(link))
    return links, link is not None


def _origin(exc: BaseException) -> tuple[BaseException | None, str]:
    cause = _part(BaseException, "__cause__", exc)
    if cause is not None:
        return cause, "The above exception was the direct cause of the following exception:"
    if _part(BaseException, "__suppress_context__", exc):
        return None, ""
    context = _part(BaseException, "__context__", exc)
    return context, "During handling of the above exception, another exception occurred:"


def _part(kind: type, name: str, exc: BaseException) -> Any:
    """Read an attribute by the descriptor of the built-in class, past any override."""
    return kind.__dict__[name].__get__(exc)


def _message(exc: BaseException) -> str:
    try:
        text = str(exc)
    except BaseException as error:  # `__str__` may raise anything, SystemExit too.
        return f"<no message: __str__ raised {type_name(type(error))}>"
    return str.__str__(text)  # An exact str: a subclass may have methods of its own.


def _notes(exc: BaseException) -> list[str]:
    try:
        notes: Any = getattr(exc, "__notes__", None)
    except BaseException as error:  # So may a property.
        return [f"<no notes: __notes__ raised {type_name(type(error))}>"]
    if notes is None:
        return []
    if type(notes) not in (list, tuple):
        return [safe_repr(notes, 200)]
    shown = [_note(note) for note in notes[:MAX_NOTES]]
    cut = len(notes) - MAX_NOTES
    return [*shown, f"({cut:,} more notes were cut)"] if cut > 0 else shown


def _note(note: object) -> str:
    return clean_text(note, 1_000) if type(note) is str else safe_repr(note, 200)


# ---------------------------------------------------------------------------- frames


def _frames(exc: BaseException, skip: int) -> list[str]:
    """The outermost and the innermost frames; deep recursion is cut in between."""
    trace: TracebackType | None = _part(BaseException, "__traceback__", exc)
    if trace is None:
        return []
    while skip > 0 and trace.tb_next is not None:
        trace, skip = trace.tb_next, skip - 1
    every = _walk(trace)
    first = list(itertools.islice(every, MAX_FRAMES // 3))
    last = collections.deque[TracebackType](maxlen=MAX_FRAMES - len(first))
    total = len(first)
    for entry in every:
        last.append(entry)
        total += 1
    cut = total - len(first) - len(last)
    middle = [f"  ({cut:,} frames were cut)"] if cut else []
    return [
        "Traceback (most recent call last):",
        *map(_frame, first),
        *middle,
        *map(_frame, last),
    ]


def _walk(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _frame(entry: TracebackType) -> str:
    code = entry.tb_frame.f_code
    where = f'  File "{clean_text(code.co_filename, 200)}", line {entry.tb_lineno}'
    source = _source_line(code.co_filename, entry.tb_lineno)
    return f"{where}, in {clean_text(code.co_qualname, 200)}" + (
        f"\n    {source}" if source else ""
    )


def _source_line(filename: str, number: int) -> str:
    """A line of source, if that is a Python file of a sane size.

    The name of a file comes from the code object and may be anything: reading a pipe would block,
    and a loader would run code of its own.
    """
    try:
        if filename not in linecache.cache and not _is_source(filename):
            return ""
        linecache.checkcache(filename)
        return clean_text(linecache.getline(filename, number).strip(), 200)
    except Exception:
        return ""


def _is_source(filename: str) -> bool:
    if not filename.endswith((".py", ".pyw")) or not os.path.isfile(filename):
        return False
    return os.path.getsize(filename) <= MAX_SOURCE_BYTES


# ---------------------------------------------------------------------------- size


def _fit(text: str, size: int) -> str:
    """Clean a text and cut it to a number of bytes."""
    for limit in (size, size // 2):
        cleaned = clean_text(text, limit)
        if len(cleaned.encode()) <= size:
            return cleaned
    return clean_text(text, size // 4)  # A character takes at most four bytes.
