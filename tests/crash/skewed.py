"""The app on a host whose clock is off by ONWARD_TEST_SKEW seconds."""

from __future__ import annotations

import os
import time

from tests.support.tasks import app

__all__ = ["app"]

_right = time.time


def _wrong() -> float:
    return _right() + float(os.environ["ONWARD_TEST_SKEW"])


time.time = _wrong
