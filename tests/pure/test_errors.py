"""Errors are for people, and for programs: what they say goes along wherever they are sent."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest

from onward import errors
from onward.errors import OnwardError


def every_kind(base: type[OnwardError] = OnwardError) -> Iterator[type[OnwardError]]:
    yield base
    for kind in base.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield from every_kind(kind)


@pytest.mark.parametrize("kind", list(dict.fromkeys(every_kind())), ids=lambda kind: kind.__name__)
def test_an_error_comes_out_of_another_process_with_all_that_it_says(
    kind: type[OnwardError],
) -> None:
    """A pool of processes pickles what its workers raise: the reason and the way out are not
    lost.
    """
    error = kind("it broke", why="it was old", fix="a new one")
    error.add_note("on a Monday")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is kind
        assert str(other) == f"[{kind.code}] it broke\n  why: it was old\n  fix: a new one"
        assert (other.what, other.why, other.fix) == ("it broke", "it was old", "a new one")
        assert other.__notes__ == ["on a Monday"]
