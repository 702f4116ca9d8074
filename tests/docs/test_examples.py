"""Each example runs, in an empty folder, as its first lines say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

SAID = {
    "transactional": ["no order, no job: the payment service hung up", "packed: ['Middlemarch']"],
    "retries": [
        "flaky succeeded at attempt 3",
        "patient: now",
        "outdated is cancelled: there is a newer report",
        "parse is dead: ValueError: invalid literal for int() with base 10: 'many'",
        "deliver is dead: RuntimeError: the bridge is closed",
        "dead: 2",
        "the parcel is delivered",
        "its attempts: ['1 failed', '2 failed', '3 succeeded']",
    ],
}


@pytest.mark.parametrize("name", SAID)
def test_an_example_that_runs_its_own_worker(name: str, tmp_path: Path) -> None:
    done = run([sys.executable, "-W", "error", copied(name, tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line in SAID[name]] == SAID[name]


def test_the_example_of_retries_can_be_run_again(tmp_path: Path) -> None:
    """What it says once more, save for the dead of the first time."""
    script = copied("retries", tmp_path)
    for _ in range(2):
        done = run([sys.executable, script], tmp_path)
        assert done.returncode == 0, done.stderr
        assert "deliver is dead: RuntimeError: the bridge is closed" in done.stdout


def test_the_quickstart_with_a_worker_beside_it(tmp_path: Path) -> None:
    script = copied("quickstart", tmp_path)
    worker = subprocess.Popen(
        [sys.executable, "-m", "onward.cli", "worker", "quickstart:app"], cwd=tmp_path
    )
    try:
        done = run([sys.executable, script], tmp_path)
    finally:
        worker.terminate()
        assert worker.wait(60) == 0
    assert done.stdout == "3\n", done.stderr


def test_every_example_is_run_and_listed() -> None:
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert names == {*SAID, "quickstart"}
    page = (ROOT / "examples/README.md").read_text("utf-8")
    assert all(f"]({name}.py)" in page for name in names)


def copied(name: str, folder: Path) -> str:
    return Path(shutil.copy(ROOT / "examples" / f"{name}.py", folder)).name


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=90, check=False
    )
