"""A database moved by hand, and a shell that runs `onward` on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from onward.cli import bulk
from onward.store.url import open_database
from tests.cli.shell import Shell
from tests.support.scene import Scene


@pytest.fixture
def scene(ready_database_url: str) -> Iterator[Scene]:
    """An empty database with one worker of the queue `default`."""
    with closing(open_database(ready_database_url)) as database:
        yield Scene(database)


@pytest.fixture
def shell(scene: Scene, ready_database_url: str) -> Shell:
    """`onward` on the database of `scene`, called in this process, with no terminal."""
    return Shell(ready_database_url)


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The surroundings of the test run change nothing."""
    for name in (
        "ONWARD_URL",
        "ONWARD_SCHEMA",
        "NO_COLOR",
        "FORCE_COLOR",
        "CLICOLOR_FORCE",
        "COLUMNS",
    ):
        monkeypatch.delenv(name, raising=False)


Meanwhile = Callable[[Callable[[], Any]], None]


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Meanwhile:
    """Lets something happen after a bulk action has shown its jobs and before it moves them."""

    def plan(deed: Callable[[], Any]) -> None:
        move_all = bulk.move_all

        def moved(*args: Any) -> bulk.Moved:
            deed()
            return move_all(*args)

        monkeypatch.setattr(bulk, "move_all", moved)

    return plan
