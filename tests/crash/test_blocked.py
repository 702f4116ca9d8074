"""Jobs that keep their whole process busy: the beat comes from elsewhere, and goes on."""

from __future__ import annotations

import pytest

from onward.task import Task
from tests.crash.conftest import Open
from tests.crash.field import (
    AS_WRITTEN,
    Pace,
    beats,
    enqueue,
    longest_gap,
    sampled,
    wait_until_over,
)
from tests.support import history, tasks
from tests.support.ledger import Ledger
from tests.support.workers import running


@pytest.mark.parametrize(
    ("lease", "leases"),
    [
        pytest.param(2.0, 1.6, id="scaled"),
        pytest.param(3.0, 4.0, id="as written", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize(
    "blocker",
    [
        pytest.param(tasks.block_loop, id="blocked loop"),
        pytest.param(tasks.hold_gil, id="held interpreter"),
    ],
)
def test_a_blocked_process_keeps_its_lease(
    open_app: Open,
    database_url: str,
    ledger: Ledger,
    blocker: Task[[float], str],
    lease: float,
    leases: float,
) -> None:
    """A body blocks the loop, or C code holds the interpreter, for several leases: it runs once,
    and no two renewals in the database are more than half a lease apart.
    """
    app = open_app(lease=lease, beat=lease / 3, sweep=lease / 5)
    with (
        running(database_url, processes=2, ledger=ledger),
        sampled(lambda: beats(app.database)) as seen,
    ):
        ids = enqueue(app, [blocker.call(lease * leases)])
        ids += enqueue(app, (tasks.nap.call(0.2) for _ in range(6)))
        wait_until_over(app, 60)
    found = history.check(app.database, ledger, ids)
    assert history.states(found) == {"succeeded": len(ids)}
    assert all(history.outcomes(found, id_) == ["succeeded"] for id_ in ids)
    assert len(found.bodies) == len(ids)
    assert lease / 4 < longest_gap(seen) < lease / 2


@pytest.mark.parametrize(
    "pace",
    [
        pytest.param(Pace({"lease": 0.9, "beat": 0.2, "sweep": 0.1}, 0.0), id="scaled"),
        pytest.param(AS_WRITTEN, id="as written", marks=pytest.mark.soak),
    ],
)
def test_a_long_job_is_not_taken_for_a_lost_one(
    open_app: Open, database_url: str, ledger: Ledger, pace: Pace
) -> None:
    """Nobody judges by age: a job may run for more than ten leases, sweeps, prunings, and times
    after which a silent process is killed.
    """
    app = open_app(**pace.settings, stall_after=pace.lease, prune_every=0.2)
    with running(database_url, processes=2, ledger=ledger) as worker:
        pids = worker.pids()
        long = pace.lease * 10.5
        ids = enqueue(app, [tasks.nap.call(long), tasks.block.call(long)])
        wait_until_over(app, long + 30)
        assert worker.pids() == pids
        assert {line.state for line in worker.workers()} == {"active"}
    found = history.check(app.database, ledger, ids)
    assert all(history.outcomes(found, id_) == ["succeeded"] for id_ in ids)
    assert len(found.bodies) == 2
    assert all(body.end and body.end - body.start > pace.lease * 10 for body in found.bodies)
