"""Which files the demo works on: those of a folder, or of Onward and Python's standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

from msgspec import Struct

from onward.errors import InvalidOption

MOST_BYTES = 256 * 1024
"""Larger files are left out: the demo is about jobs, not about compression."""

MOST_FILES = 100_000
"""How many files of a folder are looked through."""

STRANGERS = 3
"""How many files that are no text are taken: their statistics fail each time, and end dead."""

_SKIPPED = {"__pycache__", "node_modules", "site-packages", "dist-packages"}


class Sight(Struct, frozen=True):
    """A file as it was when it was chosen. `is_text`: it can be read as UTF-8."""

    path: Path
    size: int
    changed: int
    is_text: bool

    def is_unchanged(self) -> bool:
        """Whether the file is still the one that was chosen."""
        try:
            now = self.path.stat()
        except OSError:
            return False
        return (now.st_size, now.st_mtime_ns) == (self.size, self.changed)


def choose(folder: Path | None, count: int) -> list[Sight]:
    """Up to `count` text files, from all over the folder, and a few that are no text.

    Raises:
        InvalidOption: the folder has no text file.
    """
    roots = [folder.absolute()] if folder else [package(), library()]
    texts, strangers = _sorted_out(_spread(_walk(roots), count), count)
    if not texts:
        raise InvalidOption(
            f"{folder} has no file to work on",
            why=f"the demo reads text files of up to {MOST_BYTES // 1024} KiB, but no hidden ones",
            fix="onward demo, without a folder, reads those of Python",
        )
    return [*texts, *islice(chain(strangers, _seen(_compiled())), STRANGERS)]


def _sorted_out(paths: Iterable[Path], count: int) -> tuple[list[Sight], list[Sight]]:
    """The first `count` texts, and the first few files that are none."""
    texts: list[Sight] = []
    strangers: list[Sight] = []
    for file in _seen(paths):
        if file.is_text:
            texts.append(file)
        elif len(strangers) < STRANGERS:
            strangers.append(file)
        if len(texts) == count:
            break
    return texts, strangers


def package() -> Path:
    """Where Onward is installed."""
    return Path(__file__).parent.parent


def library() -> Path:
    """Where Python's standard library is."""
    return Path(sysconfig.get_path("stdlib"))


def _walk(roots: Iterable[Path]) -> list[Path]:
    return sorted(islice(chain.from_iterable(map(_files_in, roots)), MOST_FILES))


def _files_in(root: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED and name[0] != "."]
        yield from (Path(place, name) for name in names if name[0] != ".")


def _spread(paths: list[Path], count: int) -> list[Path]:
    """The paths in an order in which the first `count` come from all over."""
    step = max(1, len(paths) // count)
    return [path for start in range(step) for path in paths[start::step]]


def _compiled() -> Iterator[Path]:
    """Files of Python's own that are no text."""
    yield from sorted(library().glob("__pycache__/*.pyc"))
    yield from sorted(library().glob("lib-dynload/*.so"))


def _seen(paths: Iterable[Path]) -> Iterator[Sight]:
    """The files that can be read, each looked at once."""
    for path in paths:
        try:
            status = path.stat()
            if path.is_file() and not path.is_symlink() and 0 < status.st_size <= MOST_BYTES:
                data = path.read_bytes()
                yield Sight(path, status.st_size, status.st_mtime_ns, _is_text(data))
        except OSError:
            continue


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
