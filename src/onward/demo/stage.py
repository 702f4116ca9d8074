"""What is seen of the demo: on a terminal colours and a bar that grows, elsewhere plain lines."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from onward.cli.screen import Part, Screen
from onward.cli.table import Column, spelt
from onward.demo.look import Tally

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.text import Text

WIDE = 10
"""Characters that the labels on the left take."""

QUIET = 2.0
"""Seconds between two plain lines of progress."""

Row = Sequence[str | int]


class Stage:
    """Everything that the demo says. Each line has a label on the left, for the eye."""

    def __init__(self) -> None:
        self._screen = Screen()
        self._bar: Progress | None = None
        self._told = 0.0

    def title(self, text: str, more: str) -> None:
        self._screen.line((text, "bold"), f" · {more}")
        self._screen.line("")

    def say(self, label: str, *parts: Part) -> None:
        """One line; while the bar is there, above it."""
        line: tuple[Part, ...] = ((f"{label:<{WIDE}}", "bright_black"), *parts)
        if self._bar is None:
            self._screen.line(*line)
        else:
            self._bar.console.print(_text(line), soft_wrap=True)

    def verdict(self, holds: bool, *parts: Part) -> None:
        """One line with a tick or a cross."""
        sign: Part = ("✓ ", "green") if holds else ("✗ ", "bold red")
        self._screen.line(sign, *parts)

    def gap(self) -> None:
        self._screen.line("")

    def table(self, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """A row for each; the first column is text, the others are numbers."""
        if self._screen.draws:
            items = [dict(zip(columns, row, strict=True)) for row in rows]
            self._screen.table([Column(name) for name in columns], items)
            return
        for row in ([name.upper() for name in columns], *rows):
            self._screen.line(aligned(row, columns))

    # --- progress ---------------------------------------------------------------------------------

    @contextmanager
    def progress(self, expected: int) -> Generator[None]:
        """While jobs run: a bar, or a line now and then."""
        if not self._screen.draws:
            yield
            return
        with _bar() as bar:
            bar.add_task("jobs", total=expected, detail="the workers are starting")
            self._bar = bar
            try:
                yield
            finally:
                self._bar = None

    def show(self, tally: Tally, expected: int) -> None:
        """How far the jobs are."""
        detail = f"{tally.running} with a worker, {tally.queued:,} queued"
        if self._bar is not None:
            if tally.running or tally.ended:
                self._bar.update(self._bar.task_ids[0], completed=tally.ended, detail=detail)
        elif not self._screen.draws and time.monotonic() - self._told >= QUIET:
            self._told = time.monotonic()
            self.say("progress", f"{tally.ended:,} of {expected:,} jobs ended, {detail}")


def aligned(row: Row, columns: Sequence[str]) -> str:
    """A row of a plain table: each number under the end of its heading."""
    name, *numbers = row
    cells = [f"{_number(n):>{len(column)}}" for n, column in zip(numbers, columns[1:], strict=True)]
    return "  ".join([f"{name:<{WIDE - 2}}", *cells])


def _number(value: str | int) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _text(parts: Sequence[Part]) -> Text:
    from rich.text import Text

    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((spelt(text), style) for text, style in pairs))


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        TextColumn(f"{'run':<{WIDE - 1}}", style="bright_black"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}", style="bright_black"),
        console=Console(highlight=False),
        transient=True,
    )
