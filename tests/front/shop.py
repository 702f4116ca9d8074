"""What the tests of the front door are made of."""

from __future__ import annotations

from dataclasses import dataclass

from onward import Onward


@dataclass
class Address:
    """A value with fields, as an argument."""

    street: str
    city: str


def total(app: Onward) -> int:
    """How many jobs there are, in whatever state."""
    return sum(app.counts().values())
