"""The pages hold together: links lead somewhere, commands exist, tables are those of the code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import click
import pytest

from onward import JobState, diagram
from onward.cli.root import root
from tests.docs import pages
from tests.docs.pages import PAGES, ROOT

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in pages.links(page):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in pages.anchors(target), f"{page.name} links to {link}"


@every_page
def test_commands_in_the_text_exist(page: Path) -> None:
    for span in pages.spans(page, "onward "):
        check_command(span)


def check_command(text: str) -> None:
    """Refuse a command or an option that there is not; what is only left out is left out."""
    words = text.partition(" > ")[0].split()[1:]
    command: click.Command = root
    context = click.Context(root, info_name="onward")
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        assert found is not None, f"{text}: there is no {words[0]}"
        command = found
        words.pop(0)
    try:
        command.make_context("onward", list(words))
    except click.MissingParameter:
        return
    except click.exceptions.Exit:
        return


def test_a_command_that_is_not_there_is_noticed() -> None:
    with pytest.raises(AssertionError, match="there is no sing"):
        check_command("onward sing")
    with pytest.raises(click.NoSuchOption):
        check_command("onward job list --loud")


@every_page
def test_what_make_is_told_to_do_it_can_do(page: Path) -> None:
    for line in filter(pages.is_for_checkout, pages.commands(page)):
        target = line.split()[1]
        made = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=False)
        assert made.returncode == 0, line


def test_the_lifecycle_page_is_that_of_the_table() -> None:
    found = (ROOT / "docs/lifecycle.md").read_text("utf-8")
    assert found == diagram.page(), "onward lifecycle --format markdown > docs/lifecycle.md"


def test_the_readme_has_the_states_of_the_table() -> None:
    table = states_of(diagram.page())
    assert table in (ROOT / "README.md").read_text("utf-8"), f"README.md needs this:\n{table}"


def states_of(page: str) -> str:
    """The table of a job's states."""
    start = page.index("| state |")
    table = page[start : page.index("\n\n", start)]
    assert all(f"| `{state}` |" in table for state in JobState)
    return table


@every_page
def test_blocks_are_of_kinds_that_are_looked_at(page: Path) -> None:
    """A Python block is a file that is run; commands are `sh`; the rest is no code."""
    for block in pages.blocks(page):
        assert block.language in {"python", "sh", "mermaid", ""}, block
    named = [text for _, text in pages.files(page)]
    python = [block.text for block in pages.blocks(page) if block.language == "python"]
    assert named == python
