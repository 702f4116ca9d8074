"""The types of the public face: pyright and mypy, both strict, agree on what is right and wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
RIGHT = HERE / "right.py"
MISTAKES = HERE / "mistakes.py"
SILENCE = "# type: ignore\n"
MARK = re.compile(r"# error$")

Checker = Callable[[Path], set[int]]


def pyright(file: Path) -> set[int]:
    """The lines in which pyright finds an error."""
    settings = file.parent / "pyrightconfig.json"
    # Expressions that only exist to be checked are not "useless" here.
    rules = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "include": [str(file)]}
    quiet = {"reportUnusedExpression": False, "reportUnusedCoroutine": False}
    settings.write_text(
        json.dumps(rules | quiet | {"executionEnvironments": [{"root": str(ROOT)}]})
    )
    command = [sys.executable, "-m", "pyright", "--outputjson", "--project", str(settings)]
    done = subprocess.run(
        [*command, "--pythonpath", sys.executable], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    return {each["range"]["start"]["line"] + 1 for each in report["generalDiagnostics"]}


def mypy(file: Path) -> set[int]:
    """The lines in which mypy finds an error."""
    command = [sys.executable, "-m", "mypy", "--strict", "--python-version", "3.11"]
    options = ["--config-file", "", "--no-error-summary", "--show-absolute-path"]
    cache = ["--cache-dir", str(file.parent / "cache")]
    done = subprocess.run(
        [*command, *options, *cache, str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^(.+?):(\d+): error:", done.stdout, flags=re.MULTILINE)
    assert {Path(name) for name, _ in found} <= {file}, done.stdout
    return {int(line) for _, line in found}


@pytest.fixture(params=[pyright, mypy], ids=lambda checker: checker.__name__)
def checker(request: pytest.FixtureRequest) -> Checker:
    found: Checker = request.param
    return found


def copied(file: Path, folder: Path) -> Path:
    """The file where no setting of the project reaches it, with its line numbers as they are."""
    copy = folder / file.name
    copy.write_text(file.read_text().replace(SILENCE, "\n", 1))
    return copy


def test_correct_code_is_free_of_errors(checker: Checker, tmp_path: Path) -> None:
    assert checker(copied(RIGHT, tmp_path)) == set()


def test_every_mistake_is_found_and_nothing_else(checker: Checker, tmp_path: Path) -> None:
    lines = MISTAKES.read_text().splitlines()
    assert lines[0] == SILENCE.strip()
    marked = {number for number, line in enumerate(lines, 1) if MARK.search(line)}
    assert len(marked) > 40
    found = checker(copied(MISTAKES, tmp_path))
    assert {"missed": marked - found, "not meant": found - marked} == {
        "missed": set(),
        "not meant": set(),
    }
