"""The app with a LISTEN connection of its own, of which it soon asks whether it lives."""

from __future__ import annotations

import os

from onward.store import postgres_wakeup
from tests.support.tasks import app

__all__ = ["PING", "URL", "app"]

URL = "ONWARD_TEST_LISTEN_URL"
PING = 1.0

if URL in os.environ:
    postgres_wakeup.PING_SECONDS = PING
    app.use(app.url, listen_url=os.environ[URL])
