"""Torture in its short form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proof.report import Budget
from tests.proof.torture import torture


@pytest.mark.parametrize("seed", [3])
def test_torture_finds_nothing(ready_database_url: str, tmp_path: Path, seed: int) -> None:
    """Ten seconds of kills, freezes and cuts: no job is lost, doubled or unexplained."""
    report = torture(ready_database_url, tmp_path, seed, Budget(10))
    assert not report.violations, "\n".join(report.lines())
    assert report.did["jobs acknowledged"] > 50
    assert report.sometimes["attempt lost"], "too tame: nothing was lost"
    assert report.sometimes["job run again"]
