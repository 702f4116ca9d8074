"""One row that refuses every write holds up nothing of its neighbours: beats, sweeps, held retries.
Claims are in `test_claimer`, outcomes in `test_outcomes`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from onward import Onward, Settings
from onward.lifecycle import JobState
from onward.store import store
from onward.worker import keeper
from onward.worker.board import Board
from onward.worker.heart import Heart
from onward.worker.keeper import LEAVE_FOR, Keeper
from onward.worker.worker import Worker
from tests.store.builders import enqueue, register, running, shift_clock, state_of
from tests.support.stubborn import freeze, thaw

T = TypeVar("T")

PATIENT = Settings(lease=10.0, beat=3.0, sweep=2.0)


def on_loop(app: Onward, work: Coroutine[Any, Any, T]) -> T:
    async def main() -> T:
        try:
            return await work
        finally:
            await app.database.close_loop()

    return asyncio.run(main())


def told(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if line.startswith(f"{name} ")]


def test_a_worker_whose_row_refuses_costs_no_other_its_lease(
    app: Onward, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not declared lost either: nobody has said that it is. Its lease ends by itself."""
    workers = [register(app.database) for _ in range(5)]
    bad = workers[3]
    freeze(app.database, "worker", f"old.id = '{bad}'")
    heart = Heart(app.database, 10.0, 3.0)
    boards = {worker: Board(4) for worker in workers}
    heart.boards.update(boards)
    assert on_loop(app, heart.beat_once())
    assert on_loop(app, heart.beat_once())
    beaten = {worker: board.last_beat > 0 for worker, board in boards.items()}
    assert beaten == {worker: worker != bad for worker in workers}
    assert not any(board.lost for board in boards.values())
    (line,) = told(caplog, "beat.missed")
    assert f"worker={bad}" in line
    assert "not this one" in line
    for board in boards.values():
        board.close()
    thaw(app.database, "worker")


def test_a_worker_that_cannot_be_declared_lost_holds_up_no_recovery(
    app: Onward, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are declared lost, and their jobs taken back. Of the one it is told, once a minute."""
    stuck, gone = register(app.database, lease=-1.0), register(app.database, lease=-1.0)
    waiting, orphan = running(app.database, stuck), running(app.database, gone)
    freeze(app.database, "worker", f"old.id = '{stuck}'")
    mine = Keeper(app.database, PATIENT, list)
    turned = _turned(monkeypatch)
    on_loop(app, mine.sweep())
    turned.append(PATIENT.lease)  # Seen unchanged for so long.
    (change,) = on_loop(app, mine.sweep())
    assert change.id == orphan.id
    assert on_loop(app, mine.sweep()) == []
    assert state_of(app.database, waiting.id) is JobState.RUNNING
    (line,) = told(caplog, "worker.undeclarable")
    assert f"worker={stuck}" in line
    assert "not this one" in line
    thaw(app.database, "worker")
    assert [change.id for change in on_loop(app, mine.sweep())] == [waiting.id]


def test_a_lease_that_cannot_begin_anew_holds_up_no_other(
    app: Onward, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock went back under two workers, and one of their rows refuses."""
    stuck, sound = register(app.database), register(app.database)
    freeze(app.database, "worker", f"old.id = '{stuck}'")
    shift_clock(app.database, -3600.0)
    on_loop(app, Keeper(app.database, PATIENT, list).sweep())
    ahead = {lease.worker: lease.ahead for lease in app.database.read(store.leases)}
    assert ahead == {stuck: True, sound: False}
    (line,) = told(caplog, "keeper.stumbled")
    assert "not this one" in line
    thaw(app.database, "worker")
    on_loop(app, Keeper(app.database, PATIENT, list).sweep())
    assert not any(lease.ahead for lease in app.database.read(store.leases))


def test_a_job_that_cannot_be_taken_back_is_told_once_a_minute(
    app: Onward, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sweep leaves it behind from the start, instead of finding it by halves again."""
    owner = register(app.database)
    jobs = [running(app.database, owner) for _ in range(5)]
    app.database.run(store.lose, owner, "gone")
    freeze(app.database, "job", f"old.id = '{jobs[2].id}'")
    mine = Keeper(app.database, PATIENT, list)
    turned = _turned(monkeypatch)
    assert len(on_loop(app, mine.take_back())) == 4
    assert on_loop(app, mine.take_back()) == []
    assert len(told(caplog, "job.unrecoverable")) == 1
    turned.append(LEAVE_FOR)
    assert on_loop(app, mine.take_back()) == []
    assert len(told(caplog, "job.unrecoverable")) == 2
    thaw(app.database, "job")
    assert on_loop(app, mine.take_back()) == []
    turned.append(2 * LEAVE_FOR)
    assert [change.id for change in on_loop(app, mine.take_back())] == [jobs[2].id]


def _turned(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The keeper's own clock: the last number is by how much it has been put forward."""
    by = [0.0]
    monkeypatch.setattr(
        keeper, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + by[-1])
    )
    return by


def test_a_retry_that_cannot_be_held_back_holds_up_no_other(app: Onward) -> None:
    """Nor what comes after it: cancels, and the look at what is owned."""
    ids = enqueue(app.database, 2)
    freeze(app.database, "job", f"old.id = '{ids[0]}'")
    abandoned = {(id_, 0): None for id_ in ids}
    worker = SimpleNamespace(_database=app.database, executor=SimpleNamespace(abandoned=abandoned))
    before = app.database.read(store.record, ids[1]).run_at
    on_loop(app, Worker._hold_retries(cast(Worker, worker)))
    assert app.database.read(store.record, ids[1]).run_at > before
    thaw(app.database, "job")
