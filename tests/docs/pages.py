"""The project's pages as tests read them: fenced blocks, links, headings, and commands in the text.

A Python block whose first line is `# name.py` is a file. The lines of `sh` blocks are run in order
by one shell, in a folder with those files, as somebody would who reads from top to bottom; lines of
`make` are for the checkout, and looked at apart.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

ROOT = Path(__file__).parents[2]

PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"))
    if path.is_file()
)

SERVER = "postgresql://app@db/shop"
"""How the pages name a PostgreSQL database."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]+)`")


class Block(Struct, frozen=True):
    """A fenced block: its language, and its text."""

    language: str
    text: str


class Result(Struct, frozen=True):
    """What came of a page's commands."""

    status: int
    output: str


def blocks(page: Path) -> list[Block]:
    """Every fenced block, in order."""
    return [Block(match[1], match[2]) for match in _FENCE.finditer(page.read_text("utf-8"))]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text("utf-8"))


def links(page: Path) -> list[str]:
    """Where its links lead."""
    return _LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """What can stand behind `#` in a link to it."""
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in _HEADING.findall(prose(page))
    }


def spans(page: Path, beginning: str) -> list[str]:
    """The pieces of code in its text that begin so."""
    return [span for span in _SPAN.findall(prose(page)) if span.startswith(beginning)]


def files(page: Path) -> Iterator[tuple[str, str]]:
    """The Python files that it shows: name and text."""
    for block in blocks(page):
        if block.language == "python" and (name := re.match(r"# (\w+\.py)\n", block.text)):
            yield name[1], block.text


def commands(page: Path) -> list[str]:
    """The lines of its shell blocks."""
    shell = [block.text for block in blocks(page) if block.language == "sh"]
    return [line for text in shell for line in text.splitlines() if line.strip()]


def is_for_checkout(line: str) -> bool:
    return line.startswith("make ")


_PRELUDE = """
set -euo pipefail
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
"""


def run(page: Path, folder: Path, server: str, given: Mapping[str, str] | None = None) -> Result:
    """Write the page's files into a folder and run its commands there.

    Args:
        page: which.
        folder: an empty one.
        server: the URL of an empty PostgreSQL database, for the one that the page names.
        given: files that the page takes for granted, by name.
    """
    for name, text in {**(given or {}), **dict(files(page))}.items():
        (folder / name).write_text(text, encoding="utf-8")
    lines = [line for line in commands(page) if not is_for_checkout(line)]
    script = _PRELUDE + "\n".join(lines).replace(SERVER, server)
    return _bash(script, folder)


def _bash(script: str, folder: Path) -> Result:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ONWARD")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    output = folder / "output"
    with output.open("wb") as sink:
        shell = subprocess.Popen(
            ["bash", "-x", "-c", script],
            cwd=folder,
            env=kept | {"PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = shell.wait(100)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    return Result(status, output.read_text("utf-8"))
