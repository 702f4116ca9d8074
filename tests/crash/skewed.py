"""The app on a machine whose clock is off; see `tests.support.skew`."""

from __future__ import annotations

from tests.support.skew import shift_time
from tests.support.tasks import app

__all__ = ["app"]

shift_time()
app.use(app.url)  # Opened anew, with the time that is shown now.
