"""Tables and state colours on a terminal: columns as wide as they must be, if the screen is."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onward.cli.values import Item, Span, State, drawn, one_line
from onward.lifecycle import JobState, WorkerState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

GAP = 2

NARROWEST = 8
"""What is left of an elastic column at least."""

READABLE = 20
"""Before less than this is left of an elastic column, columns that can be spared go."""

STYLES: dict[str, str] = {
    JobState.WAITING: "bright_black",
    JobState.QUEUED: "cyan",
    JobState.RUNNING: "blue",
    JobState.CANCELLING: "yellow",
    JobState.SUCCEEDED: "green",
    JobState.CANCELLED: "bright_black",
    JobState.DEAD: "red",
    "failed": "red",
    "released": "yellow",
    WorkerState.ACTIVE: "green",
    WorkerState.DRAINING: "yellow",
    WorkerState.STOPPED: "bright_black",
    WorkerState.LOST: "red",
}
"""The colour of a state. The word stands beside it always: a colour alone says nothing."""

_ASCII = str.maketrans(
    {"✓": "ok", "✗": "x", "·": "-", "–": "-", "…": "...", "▶": ">", "─": "-", "■": "|", "×": "x"}
)


class Column:
    """One column of a table.

    Args:
        key: where its value is in the item.
        title: its heading; by default the key.
        elastic: it gives way on a narrow screen: its texts are cut there.
        wraps: its texts go on in the next line instead of being cut.
        spare: it is left out where the screen is too narrow for the others.
    """

    def __init__(
        self,
        key: str,
        title: str | None = None,
        *,
        elastic: bool = False,
        wraps: bool = False,
        spare: bool = False,
    ) -> None:
        self.key = key
        self.title = (title or key.replace("_", " ")).upper()
        self.elastic = elastic or wraps
        self.wraps = wraps
        self.spare = spare


def style_of(value: Any) -> str:
    """The colour of a value: states have one, a state that does not exist is loud."""
    return STYLES.get(one_line(value.name), "bold red") if isinstance(value, State) else ""


def spelt(text: str) -> str:
    """The text as this terminal can show it."""
    return text if speaks_utf8() else text.translate(_ASCII)


def speaks_utf8() -> bool:
    return "utf" in (getattr(sys.stdout, "encoding", None) or "ascii").lower()


def draw_table(
    console: Console, columns: Sequence[Column], items: Sequence[Item], now: float
) -> None:
    """Print a heading and a row for each item."""
    columns = [c for c in columns if not c.elastic or any(drawn(i.get(c.key), now) for i in items)]
    columns = _affordable(console.width, columns, items, now)
    values = [[item.get(column.key) for column in columns] for item in items]
    texts = [[spelt(drawn(value, now)) for value in row] for row in values]
    widths = _widths(console.width, columns, texts)
    right = [any(_is_number(row[place]) for row in values) for place in range(len(columns))]
    head = [[(column.title, "bright_black")] for column in columns]
    console.print(_row(head, widths, right), no_wrap=True, overflow="crop")
    for row, shown in zip(values, texts, strict=True):
        cells = [
            [(line, style_of(value)) for line in _lines(text, column, width)]
            for value, text, column, width in zip(row, shown, columns, widths, strict=True)
        ]
        console.print(_row(cells, widths, right), no_wrap=True, overflow="crop")


def _affordable(
    screen: int, columns: Sequence[Column], items: Sequence[Item], now: float
) -> Sequence[Column]:
    """The columns without those that must be spared, the last of them first, so that the others can
    be read.
    """
    while spare := [column for column in columns if column.spare]:
        texts = [[spelt(drawn(item.get(c.key), now)) for c in columns] for item in items]
        whole, given = _widths(10_000, columns, texts), _widths(screen, columns, texts)
        cramped = any(
            now_wide < min(wide, READABLE) for wide, now_wide in zip(whole, given, strict=True)
        )
        if not cramped and sum(given) + GAP * (len(given) - 1) <= screen:
            break
        columns = [column for column in columns if column is not spare[-1]]
    return columns


def _widths(screen: int, columns: Sequence[Column], texts: Sequence[Sequence[str]]) -> list[int]:
    """As wide as the widest text; on a narrow screen elastic columns give way, the widest first."""
    from rich.cells import cell_len

    widths = [
        max(len(column.title), *(cell_len(row[place]) for row in texts), 0)
        for place, column in enumerate(columns)
    ]
    elastic = [place for place, column in enumerate(columns) if column.elastic]
    excess = sum(widths) + GAP * (len(widths) - 1) - screen
    while excess > 0 and any(widths[place] > NARROWEST for place in elastic):
        widest = max(elastic, key=lambda place: widths[place])
        widths[widest] -= 1
        excess -= 1
    return widths


def _lines(text: str, column: Column, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 1)) or [""] if column.wraps else [text]


def _row(
    cells: Sequence[Sequence[tuple[str, str]]], widths: Sequence[int], right: Sequence[bool]
) -> Text:
    """The cells beside each other; one with more lines than the others goes on below."""
    from rich.text import Text

    found = Text()
    for height in range(max(len(cell) for cell in cells)):
        line = Text()
        for cell, width, to_right in zip(cells, widths, right, strict=True):
            text, style = cell[height] if height < len(cell) else ("", "")
            part = Text(text, style)
            part.truncate(width, overflow="ellipsis" if speaks_utf8() else "crop")
            part.align("right" if to_right else "left", width)
            line.append_text(part).append(" " * GAP)
        line.rstrip()
        found.append("\n" if height else "").append_text(line)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Span)) and not isinstance(value, bool)
