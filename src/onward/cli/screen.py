"""Where output goes, and how it looks there.

On a terminal, with rich: aligned columns, colours for states, short ids, distances in time.
Anywhere else: one line a row, columns parted by tabs, whole ids, ISO times. `--json` goes past all
of this. Data is stdout; messages are stderr.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from onward.cli.table import Column, draw_table, speaks_utf8, spelt, style_of
from onward.cli.values import Item, Moment, Past, drawn, flaws, json_text, plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Part = str | tuple[str, str]
"""A piece of a line: text, or text and a style."""


class Screen:
    """stdout, as a terminal or as a pipe.

    Args:
        now: the database's clock, for distances in time.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.draws = _draws()
        self._console = _console() if self.draws else None

    # --- lines ------------------------------------------------------------------------------------

    def line(self, *parts: Part) -> None:
        """One line of pieces, some of them with a style."""
        if self._console is None:
            say("".join(part if isinstance(part, str) else part[0] for part in parts))
        else:
            self._console.print(_text(parts), soft_wrap=True)

    def fields(self, item: Item) -> None:
        """Names and values, one a line."""
        wide = max((len(name) for name in item), default=0)
        for name, value in item.items():
            if self._console is None:
                say(f"{name}\t{plain(value)}")
            elif plain(value):
                title = f"{name.replace('_', ' '):<{wide}}  "
                when = f"  ({plain(value)})" if isinstance(value, (Moment, Past)) else ""
                text = (drawn(value, self.now), style_of(value))
                self.line((title, "bright_black"), text, (when, "bright_black"))

    def title(self, text: str) -> None:
        """A heading, with an empty line before it."""
        self.line("")
        self.line((text, "bold"))

    # --- tables -----------------------------------------------------------------------------------

    def table(self, columns: Sequence[Column], items: Iterable[Item]) -> None:
        """A row for each item."""
        if self._console is not None:
            draw_table(self._console, columns, list(items), self.now)
            return
        say("\t".join(column.title for column in columns))
        for item in items:
            say("\t".join(plain(item.get(column.key)) for column in columns))


def marked(
    items: Sequence[dict[str, Any]], optional: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """The items with what is wrong with them under `damaged`: one odd row takes no list down."""
    for item in items:
        item["damaged"] = flaws(item, optional) or None
    return list(items)


def report_damage(items: Iterable[Item]) -> None:
    """Say on stderr which of the rows shown are damaged."""
    for item in items:
        if item.get("damaged"):
            message(f"damaged: {plain(item.get('id'))}: {'; '.join(item['damaged'])}")


def print_json(schema: str, **parts: Any) -> None:
    """One JSON document on stdout."""
    text = json_text({"schema": f"onward.{schema}", **parts}, ascii_only=not speaks_utf8())
    click.echo(text, file=sys.stdout)


def say(text: str, nl: bool = True) -> None:
    """Text on stdout. The stream is named, because click would write UTF-8 to one that is ASCII."""
    click.echo(spelt(text), file=sys.stdout, nl=nl)


def message(text: str) -> None:
    """A line on stderr."""
    click.echo(spelt(text), file=sys.stderr)


# --- what this terminal can do --------------------------------------------------------------------


def _draws() -> bool:
    wanted = sys.stdout.isatty() or _forced()
    return wanted and importlib.util.find_spec("rich") is not None


def _forced() -> bool:
    return any(
        os.environ.get(name, "0") not in {"", "0"} for name in ("FORCE_COLOR", "CLICOLOR_FORCE")
    )


def _console() -> Console:
    from rich.console import Console

    colourless = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return Console(
        file=sys.stdout,
        color_system=None if colourless else "auto",
        force_terminal=True,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _text(parts: Iterable[Part]) -> Text:
    from rich.text import Text

    found = Text()
    for part in parts:
        text, style = (part, "") if isinstance(part, str) else part
        found.append(spelt(text), style)
    return found
