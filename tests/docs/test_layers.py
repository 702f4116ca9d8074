"""The layers of docs/architecture.md: each module stands in one, and imports go downward only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

SOURCE = ROOT / "src"

EXCEPTIONS = {("onward.app", "onward.worker.embedded")}
"""The app runs a worker when it is asked to."""


def layers() -> list[set[str]]:
    """The modules of each layer, the lowest first, as the page lists them."""
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| \w[\w ]* \| (`.*`) \| .* \|$", page, re.MULTILINE)
    cells = [re.findall(r"`([\w/]+?)(?:\.py|/)`", cell) for cell in rows]
    return [set(cell) for cell in reversed(cells) if cell][-6:]


def test_every_module_stands_in_one_layer() -> None:
    listed = [name for layer in layers() for name in layer]
    there = {path.stem for path in (SOURCE / "onward").iterdir() if path.suffix == ".py"}
    there |= {path.parent.name for path in (SOURCE / "onward").glob("*/__init__.py")}
    assert sorted(listed) == sorted(there)


def modules() -> list[Path]:
    return sorted((SOURCE / "onward").rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_downward(path: Path) -> None:
    module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for imported in imports(path):
        if (module, imported) not in EXCEPTIONS and height(imported) > height(module):
            raise AssertionError(f"{module} imports {imported}, which is above it")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_words_and_decisions_know_no_clock_and_no_io(path: Path) -> None:
    module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    if height(module) <= 1:
        forbidden = {"asyncio", "time", "random", "threading", "socket", "apsw", "psycopg"}
        assert not forbidden & {name.partition(".")[0] for name in foreign(path)}


def height(module: str) -> int:
    """Which layer a module stands in, from 0."""
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "__init__"
    return next(place for place, layer in enumerate(layers()) if name in layer)


def imports(path: Path) -> Iterator[str]:
    """The modules of Onward that a file imports, inside functions too."""
    return (name for name in foreign(path) if name.partition(".")[0] == "onward")


def foreign(path: Path) -> Iterator[str]:
    """Every module that a file imports."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            parts = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (
                part for part in parts if (SOURCE / f"{part.replace('.', '/')}.py").exists()
            )
