"""A worker killed just before, and just after, each of its SQL statements: whatever it was doing,
the next one finds every job where it can be found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from onward.app import Onward
from tests.support import history
from tests.support.ledger import Ledger
from tests.support.workers import ROOT

KINDS = {"sqlite": 20, "postgres": 15}
"""Of so many kinds of statements at least a worker dies at each, if it dies at every one."""


@pytest.mark.parametrize(
    ("step", "offset"),
    [
        pytest.param(9, 4, id="scaled to every ninth"),
        pytest.param(1, 1, id="as written", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_a_worker_may_die_at_any_statement(
    app: Onward, database_url: str, ledger: Ledger, step: int, offset: int
) -> None:
    """Claim, run and finish, a retry and a follow-up among them, with a death at each statement:
    all jobs succeed, none is there twice, none runs more than once more than it would have without
    a death, and the record of attempts explains every run.
    """
    run = subprocess.run(
        [sys.executable, "-m", "tests.crash.by_statement", str(step), str(offset)],
        env=os.environ | {"ONWARD_URL": database_url},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    deaths = [json.loads(line) for line in run.stdout.splitlines()]
    ids = [id_ for death in deaths for id_ in death["ids"]]
    found = history.check(app.database, ledger, ids, born_inside=True)
    follow_ups = len(ids) // 2
    assert history.states(found) == {"succeeded": len(ids) + follow_ups}
    runs = {id_: len(found.bodies_of(id_)) for id_ in found.jobs}
    failing = set(ids[1::2])
    assert all(1 <= times <= (3 if id_ in failing else 2) for id_, times in runs.items())
    assert len({death["at"] for death in deaths}) >= KINDS[app.database.dialect] // step, "too tame"
    leases = history.rows(
        app.database, "SELECT id FROM onward.worker WHERE state IN ('active', 'draining')"
    )
    assert leases == []
