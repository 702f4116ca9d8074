"""Turns, medians and the table: how figures are taken and shown.

Speeds of one machine differ from hour to hour by more than what is compared here. So whatever is
compared runs in turn, A B A B, in one run, and what counts is the ratio of the medians.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple, TypeVar

from rich.console import Console
from rich.table import Table

ROUNDS = 5

Figure = TypeVar("Figure")


class Line(NamedTuple):
    """One line of the table. `target` bounds `ratio` from below (or `value` from above where there
    is no ratio); a line without one is there to compare with.
    """

    mark: str
    what: str
    value: float
    unit: str
    ratio: float | None = None
    to: str = ""
    target: float | None = None
    most: float | None = None
    spread: tuple[float, float] | None = None

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; None: there is none."""
        measured = self.value if self.ratio is None else self.ratio
        if self.target is not None:
            return measured >= self.target
        if self.most is not None:
            return measured <= self.most
        return None


def in_turn(
    runs: Mapping[str, Callable[[], Figure]], rounds: int = ROUNDS
) -> dict[str, list[Figure]]:
    """Run each `rounds` times, in turn; returns all figures of each."""
    figures: dict[str, list[Figure]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            gc.collect()
            figures[name].append(run())
    return figures


def line(mark: str, what: str, figures: list[float], unit: str = "jobs/s") -> Line:
    """A line that others are compared with."""
    return Line(mark, what, median(figures), unit, spread=(min(figures), max(figures)))


def compared(
    mark: str,
    what: str,
    figures: list[float],
    base: list[float],
    to: str,
    *,
    target: float | None = None,
    most: float | None = None,
    unit: str = "jobs/s",
) -> Line:
    """A line whose ratio to `base` counts."""
    return Line(
        mark,
        what,
        median(figures),
        unit,
        ratio=median(figures) / median(base),
        to=to,
        target=target,
        most=most,
        spread=(min(figures), max(figures)),
    )


def percentile(figures: list[float], percent: float) -> float:
    """The figure below which `percent` of all lie."""
    ordered = sorted(figures)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def show(console: Console, lines: list[Line], title: str) -> None:
    """Print the table."""
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for name in ("", "workload"):
        table.add_column(name)
    for name in ("median", "from – to", "ratio"):
        table.add_column(name, justify="right")
    for name in ("to", "target"):
        table.add_column(name)
    for each in lines:
        table.add_row(
            each.mark,
            each.what,
            f"{shown_number(each.value)} {each.unit}",
            "" if each.spread is None else " – ".join(shown_number(end) for end in each.spread),
            "" if each.ratio is None else f"{each.ratio:.2f}",
            each.to,
            f"[{'green' if each.reached else 'red'}]{shown_target(each)}[/]",
        )
    console.print(table)


def shown_target(each: Line) -> str:
    """The bound, and whether it is kept."""
    if each.reached is None:
        return ""
    bound = f"≥ {each.target:g}" if each.target is not None else f"≤ {each.most:g}"
    return f"{bound} reached" if each.reached else f"{bound} missed"


def shown_number(value: float) -> str:
    """Three digits, or whole thousands."""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
