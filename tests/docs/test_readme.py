"""What the pages tell people to type is typed here, from top to bottom, with real workers."""

from __future__ import annotations

from pathlib import Path

from tests.docs import pages
from tests.docs.pages import ROOT

JOBS = """
from onward import Onward

app = Onward()


@app.task
def nothing() -> None:
    pass
"""


def test_the_readme_works(tmp_path: Path, postgres_database: str) -> None:
    page = ROOT / "README.md"
    result = pages.run(page, tmp_path, postgres_database)
    assert result.status == 0, result.output
    lines = result.output.splitlines()
    assert "3" in lines
    assert "999 succeeded" in lines
    assert "LookupError: order 9 has no price" in lines
    assert "Traceback" not in result.output


def test_operating_works(tmp_path: Path, postgres_database: str) -> None:
    page = ROOT / "docs/operating.md"
    result = pages.run(page, tmp_path, postgres_database, {"jobs.py": JOBS})
    assert result.status == 0, result.output
    assert "Traceback" not in result.output


def test_performance_works(tmp_path: Path, postgres_database: str) -> None:
    result = pages.run(ROOT / "docs/performance.md", tmp_path, postgres_database)
    assert result.status == 0, result.output
    assert "pick-up" in result.output


def test_these_are_all_the_pages_with_commands() -> None:
    with_commands = {
        str(path.relative_to(ROOT))
        for path in pages.PAGES
        if any(not pages.is_for_checkout(line) for line in pages.commands(path))
    }
    assert with_commands == {"README.md", "docs/operating.md", "docs/performance.md"}


def test_the_first_job_is_eight_lines() -> None:
    text = dict(pages.files(ROOT / "README.md"))["tasks.py"]
    assert len([line for line in text.splitlines()[1:] if line]) <= 8


def test_the_first_example_is_the_readme_s() -> None:
    """Save for comments, and for the two empty lines that a formatter wants."""
    text = dict(pages.files(ROOT / "README.md"))["tasks.py"]
    example = (ROOT / "examples/quickstart.py").read_text("utf-8")
    assert [line for line in text.splitlines()[1:] if line] == [
        line for line in example.splitlines()[1:] if line
    ]


def test_a_command_that_fails_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\nonward lifecycle > /dev/null\nonward sing\necho never\n```\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    result = pages.run(page, folder, "")
    assert result.status == 2
    assert "never" not in result.output.replace("echo never", "")
