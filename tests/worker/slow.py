"""The app of the tests, in a module that a process for one attempt takes long to load."""

import os
import time

from tests.support.tasks import app

if "ONWARD_TARGET" in os.environ:  # As in a process of its own, and nowhere else.
    if os.environ["ONWARD_TEST_LOADS"] == "never":
        raise SystemExit(3)
    time.sleep(float(os.environ["ONWARD_TEST_LOADS"]))

__all__ = ["app"]
