"""What a search did, what it met on the way, and what it found."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

MOST_SHOWN = 20


class Report:
    """The account of one search.

    Args:
        technique: its name.
        place: on which database, or on what.
        seed: what all its chances came from: the same seed searches the same way.
    """

    def __init__(self, technique: str, place: str, seed: int) -> None:
        self.technique = technique
        self.place = place
        self.seed = seed
        self.did: Counter[str] = Counter()
        """How much of what was tried: moves, kills, cases."""
        self.sometimes: Counter[str] = Counter()
        """Rare things that the search must have met, or it was too tame."""
        self.violations: list[str] = []

    def violate(self, text: str) -> None:
        """Something that must never be was so; `text` tells what, and how to see it again."""
        self.violations.append(text)

    def add(self, other: Report) -> None:
        """Take up what a further search of the same kind did."""
        self.did += other.did
        self.sometimes += other.sometimes
        self.violations += other.violations

    def lines(self) -> list[str]:
        """The report as a person reads it."""
        counts = ", ".join(f"{count:,} {what}" for what, count in sorted(self.did.items()))
        met = ", ".join(f"{what} {count:,}" for what, count in sorted(self.sometimes.items()))
        found = [f"    VIOLATION {text}" for text in self.violations[:MOST_SHOWN]]
        return [
            f"{self.technique} on {self.place}, seed {self.seed}: {counts or 'nothing'}",
            *([f"    met: {met}"] if met else []),
            *found,
        ]


class Budget:
    """For how long a search may go on: it asks before each further step."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> bool:
        return time.monotonic() < self._end


class Technique(NamedTuple):
    """One search in its deep form.

    `run(seed, budget)` searches from that seed until the budget is used up and reports. `whole`: it
    comes further in one go than in slices.
    """

    name: str
    run: Callable[[int, Budget], Report]
    whole: bool = False
