"""An app whose errors hold an address with its password, in every place where an error has text.

`ONWARD_TEST_LEAK` names where it even fails to load: `everywhere`, or in processes of their own.
"""

from __future__ import annotations

import json
import os

from onward import Discard, Onward, Settings, current
from tests.support.tasks import SETTINGS_VARIABLE, SOON

SECRET = "Zq7-hush-hush"
LEAK_VARIABLE = "ONWARD_TEST_LEAK"


def connect(address: str) -> None:
    """What a driver does that cannot reach its server, and some say too much then."""
    error = ConnectionError(f"cannot reach {address}")
    error.add_note(f"asked for {address}, then for host=db password='{SECRET}'")
    raise error


def reach(address: str) -> None:
    """An error with a cause, and both hold the address; so does the line that made the call."""
    try:
        connect("postgresql://bob:Zq7-hush-hush@db.example/shop?sslpassword=Zq7-hush-hush")
    except ConnectionError as error:
        long = "x" * 5_000
        raise RuntimeError(f"no {address} {long} of {long} {address}") from error


place = os.environ.get(LEAK_VARIABLE)
if place == "everywhere" or (place == "isolated" and "ONWARD_TARGET" in os.environ):
    reach("postgresql://bob:Zq7-hush-hush@db.example/shop")

app = Onward(settings=Settings(**json.loads(os.environ.get(SETTINGS_VARIABLE, "{}"))))


@app.task(max_attempts=2, backoff=SOON)
def plain() -> None:
    reach(f"{app.url}?password={SECRET}, {os.environ['ONWARD_URL']}")


@app.task(max_attempts=2, backoff=SOON)
async def on_loop() -> None:
    reach(f"{app.url}?password={SECRET}")


@app.task(max_attempts=2, max_losses=1, backoff=SOON, isolation="process")
def isolated() -> None:
    reach(f"{app.url}?password={SECRET}")


@app.task
def unwanted() -> None:
    current().log.info("not wanted")
    raise Discard(f"gone with smtp://me@example.com:{SECRET}@mail.example")
