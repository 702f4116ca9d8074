"""What `onward workers` and `onward job show` say of workers that vanish: who lives, who does not,
and when each was last heard of.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from onward.store import store
from tests.cli.shell import Shell
from tests.crash.conftest import Open
from tests.crash.field import (
    BUSY,
    SHORT,
    enqueue,
    freeze,
    thaw,
    wait_for_state,
    wait_until_begun,
)
from tests.support import tasks
from tests.support.ledger import Ledger
from tests.support.workers import running, wait_until

NOTICED_IN = SHORT["lease"] + 2 * SHORT["sweep"] + 2.0 + BUSY
"""Within so many seconds of a worker's last sign of life it is known to be lost: L + 2S + 2."""


def listed(shell: Shell) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = shell.json("workers")["items"]
    return found


def alive(shell: Shell) -> dict[str, bool]:
    return {item["name"]: item["alive"] for item in listed(shell)}


def lost(shell: Shell) -> int:
    return [item["state"] for item in listed(shell)].count("lost")


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def test_the_list_of_workers_tells_who_lives(
    open_app: Open, database_url: str, ledger: Ledger
) -> None:
    """Of three, one is killed and one frozen, each with its supervisor: both are seen as gone in
    time, the third stays, and only it is left when the list is tidied.
    """
    app, shell = open_app(**SHORT), Shell(database_url)
    gone = {"killed": False, "frozen": False, "well": True}
    with (
        running(database_url, name="well", ledger=ledger),
        running(database_url, name="frozen", ledger=ledger) as frozen,
        running(database_url, name="killed", ledger=ledger) as killed,
    ):
        wait_until(lambda: alive(shell) == dict.fromkeys(("killed", "frozen", "well"), True), 10)
        killed.kill()
        stopped = freeze(frozen, app.database)
        end = time.monotonic() + NOTICED_IN
        try:
            for look in (lambda: alive(shell) == gone, lambda: lost(shell) == 2):
                wait_until(look, end - time.monotonic())
            app.database.run(store.prune_workers, -1.0)
            assert alive(shell) == {"well": True}
        finally:
            thaw(stopped)


def test_the_last_sign_of_life_is_told_apart_from_its_being_noticed(
    open_app: Open, database_url: str, ledger: Ledger
) -> None:
    """A machine stands still in the middle of a job. The attempt ended when that was noticed; the
    worker had not been heard of for a lease by then, and the reason says since when.
    """
    app, shell = open_app(**SHORT), Shell(database_url)
    with running(database_url, name="frozen", ledger=ledger) as frozen:
        (id_,) = enqueue(app, [tasks.nap_once.call(60)])
        wait_until_begun(app, [id_])
        stopped = freeze(frozen, app.database)
        try:
            with running(database_url, name="well", ledger=ledger):
                wait_for_state(app, id_, "succeeded")
        finally:
            thaw(stopped)
    first, _ = shell.json("job", "show", id_)["attempts"]
    (worker,) = [w for w in listed(shell) if w["id"] == first["worker"]]
    last, noticed = moment(first["last_beat_at"]), moment(first["ended_at"])
    assert noticed - last > SHORT["lease"]
    assert (worker["last_beat_at"], worker["state"]) == (first["last_beat_at"], "lost")
    text = first["error"]["message"].partition("no sign of life since ")[2]
    assert abs(moment(text) - last) < 1.0
