"""A machine whose clock is off: by ONWARD_TEST_SKEW seconds, or by what stands in the file that it
names, so that a test can step the clock of processes that run.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "ONWARD_TEST_SKEW"

_right = time.time


def shift_time() -> None:
    """Let `time.time` of this process show the wrong time, if the environment says so."""
    said = os.environ.get(VARIABLE)
    if said is not None:
        time.time = lambda: _right() + _offset(said)


def _offset(said: str) -> float:
    return float(Path(said).read_text() if said.startswith("/") else said)


def set_offset(path: Path, seconds: float) -> None:
    """Step the clock of all processes that follow this file, at one moment."""
    fresh = path.with_suffix(".new")
    fresh.write_text(str(seconds))
    fresh.replace(path)
