"""Which cases run within `make test`, and which only in `make soak`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`: the first of them always, the others in the soak."""
    return [
        case if place < count else pytest.param(*_values(case), marks=pytest.mark.soak)
        for place, case in enumerate(cases)
    ]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
