"""What every database must show alike about workers: leases, losses, sweeps, and what a worker
owns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from onward import policy
from onward.job import Change, Job
from onward.lifecycle import Event, JobState, WorkerState
from onward.store import store
from onward.store.database import Database, Duplicate, Refused
from onward.store.statements import Op
from onward.store.store import Lease, Registration
from tests.store.builders import (
    apply,
    claim,
    enqueue,
    get,
    hand,
    in_state,
    new_id,
    opened,
    register,
    running,
    shift_clock,
    state_of,
    succeed,
)


def lease_of(database: Database, worker: str) -> Lease | None:
    """The lease of a live worker, as a sweeper sees it; None once it has ended."""
    return {lease.worker: lease for lease in database.read(store.leases)}.get(worker)


def until(database: Database, worker: str) -> float:
    lease = lease_of(database, worker)
    assert lease is not None
    return lease.until


def worker_state(database: Database, worker: str) -> str:
    return str({row[0]: row[5] for row in database.read(store.read, "workers", limit=100)}[worker])


# --- registering and beating ----------------------------------------------------------------------


def test_a_registered_worker_is_active_under_a_lease(database: Database) -> None:
    """A process start is known from its first word on, with all that it says of itself."""
    worker = Registration(
        id=new_id(),
        name="mailer",
        host="box-1",
        pid=4711,
        version="1.2",
        queues=("mail", "default"),
        tasks=("mail.send",),
        concurrency=8,
        lease=15.0,
        lock_path="/tmp/a lock",
    )
    database.run(store.register, worker)
    (row,) = database.read(store.read, "workers", limit=10)
    assert row[:6] == (worker.id, "mailer", "box-1", 4711, "1.2", "active")
    assert msgspec.json.decode(row[6]) == ["mail", "default"]
    assert msgspec.json.decode(row[7]) == ["mail.send"]
    assert (row[8], bool(row[9])) == (8, True)
    assert row[10] == pytest.approx(15, abs=2)
    assert row[12] == pytest.approx(0, abs=2)
    assert (row[13], row[14], row[15]) == (None, None, 0)
    lease = lease_of(database, worker.id)
    assert lease is not None
    assert lease.until == pytest.approx(time.time() + 15, abs=2)
    assert (lease.over, lease.lock_path) == (False, "/tmp/a lock")


def test_an_identity_is_used_once(database: Database) -> None:
    """A restart is another worker: the same id a second time is refused, live or ended."""
    worker = register(database)
    with pytest.raises(Duplicate):
        register(database, id=worker)
    database.run(store.stop, worker, "done")
    with pytest.raises(Duplicate):
        register(database, id=worker)


def test_a_worker_without_a_slot_is_refused(database: Database) -> None:
    """A worker that can run nothing would be a lease for nothing."""
    with pytest.raises(Refused):
        register(database, concurrency=0)


def test_a_beat_renews_the_leases_of_those_that_live(database: Database) -> None:
    """One statement renews many; who is not in the answer has been declared ended, or never was."""
    alive, draining, stopped, lost = (register(database, lease=10.0) for _ in range(4))
    database.run(store.drain, draining)
    database.run(store.stop, stopped, "done")
    database.run(store.lose, lost, "killed")
    everyone = [alive, draining, stopped, lost, new_id()]
    assert database.run(store.beat, everyone, 30.0) == {alive, draining}
    for worker in (alive, draining):
        assert until(database, worker) == pytest.approx(time.time() + 30, abs=2)
    assert database.run(store.beat, [], 30.0) == set()


def test_a_beat_never_shortens_a_lease(database: Database) -> None:
    """A short renewal, or a clock that was set back a little, takes nothing away that was
    promised.
    """
    worker = register(database, lease=60.0)
    promised = until(database, worker)
    assert database.run(store.beat, [worker], 1.0) == {worker}
    assert until(database, worker) == promised
    shift_clock(database, -14)
    assert database.run(store.beat, [worker], 15.0) == {worker}
    assert until(database, worker) == promised


def test_a_beat_after_the_clock_went_back_begins_a_lease_anew(database: Database) -> None:
    """By the old time it would last as long as the step. It is as long as was asked for, and the
    next beat goes on from there.
    """
    worker = register(database, lease=15.0)
    for step in (-3600, -7200):
        shift_clock(database, step)
        for _ in range(2):
            assert database.run(store.beat, [worker], 15.0) == {worker}
            assert until(database, worker) == pytest.approx(time.time() + step + 15, abs=2)


def test_a_lease_that_was_renewed_before_the_clock_went_back_begins_anew_once(
    database: Database,
) -> None:
    """As long as it was, whoever sweeps; and only as long as it is the lease that was seen."""
    worker, other = register(database, lease=40.0), register(database, lease=15.0)
    database.run(store.drain, worker)
    shift_clock(database, -3600)
    seen = lease_of(database, worker)
    assert seen is not None
    assert seen.ahead
    assert not seen.over
    assert not database.run(store.redate, worker, seen.beat - 1, 10.0)
    assert database.run(store.redate, worker, seen.beat, 10.0)
    assert not database.run(store.redate, worker, seen.beat, 10.0)
    found = lease_of(database, worker)
    assert found is not None
    assert found.until - found.beat == pytest.approx(40)
    assert found.beat == pytest.approx(time.time() - 3600, abs=2)
    assert (found.ahead, worker_state(database, worker)) == (False, "draining")
    assert not database.run(store.redate, worker, found.beat, 10.0)
    untouched = lease_of(database, other)
    assert untouched is not None
    assert untouched.ahead
    shift_clock(database, 0)
    assert not database.run(store.redate, other, untouched.beat, 10.0)
    assert lease_of(database, other) == msgspec.structs.replace(untouched, ahead=False)


@pytest.mark.parametrize("until", ["beat_at - 1", "beat_at + 100000"], ids=["none", "too long"])
def test_a_lease_whose_length_nobody_can_see_begins_anew_with_the_sweepers(
    database: Database, until: str
) -> None:
    """A foreign hand has been in its row."""
    worker = register(database, lease=15.0)
    if database.dialect == "postgres":
        until = f"beat_at + interval '{until.removeprefix('beat_at').replace(' ', '')} s'"
    with hand(database) as dba:
        dba.sql(f"UPDATE onward.worker SET lease_until = {until} WHERE id = :id", id=worker)
    shift_clock(database, -3600)
    seen = lease_of(database, worker)
    assert seen is not None
    assert database.run(store.redate, worker, seen.beat, 10.0)
    found = lease_of(database, worker)
    assert found is not None
    assert found.until - found.beat == pytest.approx(10)


def test_the_lease_of_an_ended_worker_stays_as_it_is(database: Database) -> None:
    worker = register(database, lease=15.0)
    seen = lease_of(database, worker)
    assert seen is not None
    database.run(store.stop, worker, "done")
    shift_clock(database, -3600)
    assert not database.run(store.redate, worker, seen.beat, 10.0)


def test_a_beat_never_revives_a_worker_that_was_declared_lost(database: Database) -> None:
    """Zero rows are the message: stop, and start again under a new identity."""
    worker = register(database)
    database.run(store.lose, worker, "killed")
    assert database.run(store.beat, [worker], 60.0) == set()
    assert worker_state(database, worker) == WorkerState.LOST
    assert lease_of(database, worker) is None


# --- the end of a worker --------------------------------------------------------------------------


def test_draining_and_stopping_go_forward_only(database: Database) -> None:
    """Each move says whether it took; none is undone, and an end keeps its reason."""
    worker = register(database)
    assert database.run(store.drain, worker)
    assert not database.run(store.drain, worker)
    assert worker_state(database, worker) == WorkerState.DRAINING
    (row,) = database.read(store.read, "workers", limit=10)
    assert not row[9]  # It wants to be woken for nothing.
    assert database.run(store.stop, worker, "SIGTERM")
    for again in (
        database.run(store.stop, worker, "again"),
        database.run(store.drain, worker),
        database.run(store.lose, worker, "late"),
    ):
        assert again is False
    (row,) = database.read(store.read, "workers", limit=10)
    assert (row[5], row[14]) == ("stopped", "SIGTERM")
    assert row[13] == pytest.approx(time.time(), abs=5)


@pytest.mark.parametrize("draining", [False, True])
def test_a_proven_death_ends_the_lease_at_once(database: Database, draining: bool) -> None:
    """An exit status or a free lock needs no waiting: the lease ends now, so that it does not
    outlive the worker.
    """
    worker = register(database, lease=3600.0)
    if draining:
        database.run(store.drain, worker)
    assert database.run(store.lose, worker, "signal 9")
    assert worker_state(database, worker) == WorkerState.LOST
    with hand(database) as dba:
        ((ended,),) = dba.sql(
            "SELECT lease_until <= ended_at FROM onward.worker WHERE id = :id", id=worker
        )
    assert ended
    assert not database.run(store.lose, worker, "again")


def test_each_beat_is_a_new_sign_of_life(database: Database) -> None:
    """Also one that cannot make the lease longer, because the database's clock went back."""
    worker = register(database, lease=10.0)
    first = lease_of(database, worker)
    shift_clock(database, -5)
    database.run(store.beat, [worker], 10.0)
    second = lease_of(database, worker)
    assert first is not None
    assert second is not None
    assert second.until == first.until
    assert second.beat != first.beat


def test_a_worker_is_declared_lost_only_with_the_lease_that_was_seen_over(
    database: Database,
) -> None:
    """A sweeper that saw an old lease, or one that still runs, declares nobody lost."""
    worker = register(database, lease=10.0)
    seen = until(database, worker)
    assert not database.run(store.lose, worker, "lease over", seen)  # It still runs.
    shift_clock(database, 11)
    assert database.read(store.leases)[0].over
    assert not database.run(store.lose, worker, "lease over", seen - 1)  # It was renewed since.
    database.run(store.beat, [worker], 10.0)
    assert not database.run(store.lose, worker, "lease over", seen)
    renewed = until(database, worker)
    shift_clock(database, 22)
    assert not database.run(store.lose, worker, "lease over", seen)
    assert database.run(store.lose, worker, "lease over", renewed)
    assert worker_state(database, worker) == WorkerState.LOST


# --- sweeping -------------------------------------------------------------------------------------


def test_a_sweep_takes_back_every_job_of_workers_that_are_gone(database: Database) -> None:
    """Lost, stopped and unknown owners alike; the jobs of live and draining workers are left
    alone.
    """
    owners: dict[str, str] = {
        name: register(database) for name in ("live", "drains", "gone", "off")
    }
    jobs = {name: running(database, worker) for name, worker in owners.items()}
    database.run(store.drain, owners["drains"])
    database.run(store.lose, owners["gone"], "signal 9")
    database.run(store.stop, owners["off"], "SIGTERM")
    taken = database.run(store.sweep, policy.recover)
    assert {change.id for change in taken} == {jobs["gone"].id, jobs["off"].id}
    assert {change.event for change in taken} == {Event.RECOVER}
    assert state_of(database, jobs["live"].id) is JobState.RUNNING
    assert state_of(database, jobs["drains"].id) is JobState.RUNNING
    (attempt,) = database.read(store.attempts, jobs["gone"].id)
    assert (attempt.state, attempt.error, attempt.worker) == ("lost", "signal 9", owners["gone"])
    assert get(database, jobs["gone"].id).losses == 1
    assert database.run(store.sweep, policy.recover) == []


def test_a_sweep_finds_a_job_whose_worker_is_not_even_known(database: Database) -> None:
    """A claim that committed under a worker that was pruned, or under a forged one, is not in
    limbo.
    """
    job = running(database)
    assert job.worker is not None
    database.run(store.stop, job.worker, "done")
    with hand(database) as dba:
        dba.sql("DELETE FROM onward.worker WHERE id = :id", id=job.worker)
    (change,) = database.run(store.sweep, policy.recover)
    assert (change.id, change.error) == (job.id, "its worker vanished")


def test_a_sweep_decides_by_the_policy(database: Database) -> None:
    """Within its budget a job is recovered, beyond it buried, and one that was to stop is
    cancelled.
    """
    worker = register(database)
    within = running(database, worker, max_losses=1)
    beyond = running(database, worker, max_losses=0)
    asked = running(database, worker)
    apply(database, asked.move(Event.ASK_CANCEL))
    database.run(store.lose, worker, "killed")
    taken = {change.id: change.event for change in database.run(store.sweep, policy.recover)}
    assert taken == {within.id: "recover", beyond.id: "bury", asked.id: "cancel"}
    found = [get(database, job.id) for job in (within, beyond, asked)]
    assert [job.state.value for job in found] == ["queued", "dead", "cancelled"]
    assert [job.losses for job in found] == [1, 1, 0]
    assert database.read(store.attempts, asked.id)[0].state == "lost"


def test_a_sweep_goes_in_steps_of_its_limit_in_id_order(database: Database) -> None:
    """A full answer means that there may be more, so nothing is left behind however many there
    are.
    """
    worker = register(database)
    ids = enqueue(database, 5)
    claim(database, worker)
    database.run(store.lose, worker, "killed")
    steps = [[c.id for c in database.run(store.sweep, policy.recover, 2)] for _ in range(4)]
    assert steps == [ids[:2], ids[2:4], ids[4:], []]


def test_a_sweep_that_fails_takes_nothing(database: Database) -> None:
    """All of a sweep is one transaction: an error in the decision leaves the jobs for the next
    one.
    """
    worker = register(database)
    enqueue(database, 3)
    jobs = claim(database, worker)
    database.run(store.lose, worker, "killed")

    def broken(job: Job, error: str) -> Change:
        if job.id == jobs[-1].id:
            raise ValueError("no decision")
        return policy.recover(job, error)

    with pytest.raises(ValueError, match="no decision"):
        database.run(store.sweep, broken)
    assert [get(database, job.id) for job in jobs] == jobs
    assert len(database.run(store.sweep, policy.recover)) == 3


def test_two_sweepers_take_each_job_once(database: Database) -> None:
    """The keeper runs on every worker: what one sweep has taken is not there for the other."""
    worker = register(database)
    enqueue(database, 4)
    jobs = claim(database, worker)
    database.run(store.lose, worker, "killed")
    with opened(database) as second:
        first = database.run(store.sweep, policy.recover, 3)
        rest = second.run(store.sweep, policy.recover, 3)
    assert [c.id for c in first] + [c.id for c in rest] == [job.id for job in jobs]


def test_a_late_result_of_a_swept_job_takes_nothing(database: Database) -> None:
    """The zombie comes back after its job went on, even after the same job runs again: it writes to
    neither.
    """
    job = running(database)
    assert job.worker is not None
    database.run(store.lose, job.worker, "killed")
    database.run(store.sweep, policy.recover)
    assert apply(database, succeed(job)) == set()
    (again,) = claim(database, register(database))
    assert apply(database, succeed(job)) == set()
    assert get(database, job.id) == again


def test_a_worker_whose_death_is_proven_is_buried_with_its_jobs_taken_back(
    database: Database,
) -> None:
    """Declared lost and swept in one transaction, so that the reason of its end is what its jobs
    are told; whoever comes later finds nothing to do.
    """
    worker, other = register(database), register(database)
    enqueue(database, 3)
    jobs = claim(database, worker)
    stranger = running(database, other)
    taken = database.run(store.bury_worker, worker, "signal 11", policy.recover)
    assert {change.id for change in taken} == {job.id for job in jobs}
    assert {change.error for change in taken} == {"signal 11"}
    assert worker_state(database, worker) == WorkerState.LOST
    assert state_of(database, stranger.id) is JobState.RUNNING
    assert database.run(store.bury_worker, worker, "again", policy.recover) == []
    ((_, reason),) = [
        (row[0], row[14])
        for row in database.read(store.read, "workers", limit=10)
        if row[0] == worker
    ]
    assert reason == "signal 11"


def test_a_burial_that_fails_leaves_the_worker_alive(database: Database) -> None:
    """Half of it would be a lost worker whose jobs nobody was told about."""
    job = running(database)
    assert job.worker is not None

    def broken(found: Job, error: str) -> Change:
        raise ValueError("no decision")

    with pytest.raises(ValueError, match="no decision"):
        database.run(store.bury_worker, job.worker, "killed", broken)
    assert worker_state(database, job.worker) == WorkerState.ACTIVE
    assert get(database, job.id) == job


def test_a_doubt_at_the_last_moment_declares_nobody_lost(database: Database) -> None:
    """The sweeper is asked once more when its write has its turn: it may have waited for long."""
    worker = register(database)
    assert not database.run(store.lose, worker, "lease over", None, lambda: False)
    assert worker_state(database, worker) == WorkerState.ACTIVE
    assert database.run(store.lose, worker, "lease over", None, lambda: True)


# --- what a worker owns ---------------------------------------------------------------------------


def test_a_worker_can_ask_what_it_owns_and_what_is_to_stop(database: Database) -> None:
    """With every beat it compares this with what it holds, so nothing sits under a live lease for
    ever.
    """
    worker, other = register(database), register(database)
    jobs = [running(database, worker), running(database, worker)]
    running(database, other)
    apply(database, jobs[1].move(Event.ASK_CANCEL))
    owned = {job.id: job for job in database.read(store.owned, worker)}
    assert set(owned) == {jobs[0].id, jobs[1].id}
    assert owned[jobs[0].id] == jobs[0]
    assert owned[jobs[1].id].state is JobState.CANCELLING
    assert database.read(store.owned, worker, {jobs[1].id, new_id()}) == [jobs[0]]
    assert database.read(store.owned, worker, set(owned)) == []
    assert database.read(store.cancelling, worker) == [(jobs[1].id, 1)]
    assert database.read(store.cancelling, other) == []
    apply(database, *(succeed(job) for job in owned.values()))
    assert database.read(store.owned, worker) == []


def test_workers_are_listed_newest_first_with_what_they_own(database: Database) -> None:
    """The list that people see: page by page, ended ones included."""
    workers = [register(database) for _ in range(3)]
    running(database, workers[1])
    rows = database.read(store.read, "workers", limit=2)
    assert [row[0] for row in rows] == [workers[2], workers[1]]
    assert [row[15] for row in rows] == [0, 1]


def test_workers_that_ended_long_ago_and_own_nothing_are_forgotten(database: Database) -> None:
    """A live worker and one that still owns a job stay, however old."""
    live, done, fresh, owner = (register(database) for _ in range(4))
    running(database, owner)
    database.run(store.stop, done, "done")
    database.run(store.lose, owner, "killed")
    shift_clock(database, 100)
    database.run(store.stop, fresh, "done")
    assert database.run(store.prune_workers, 50.0) == 1
    left = {row[0] for row in database.read(store.read, "workers", limit=10)}
    assert left == {live, fresh, owner}


@pytest.mark.parametrize("idle", [True, False])
def test_an_ended_worker_is_not_idle(database: Database, idle: bool) -> None:
    """It wants to be woken for nothing, whatever it said last, and can no longer say so."""
    for end in (store.stop, store.lose):
        worker = register(database)
        database.run(store.set_idle, worker, idle)
        database.run(end, worker, "over")
        database.run(store.set_idle, worker, True)
        rows: dict[str, Any] = {r[0]: r for r in database.read(store.read, "workers", limit=9)}
        assert not rows[worker][9]


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.CANCELLING])
def test_an_owned_job_is_in_nobodys_queue(database: Database, state: JobState) -> None:
    """While one worker has it, no other is offered it."""
    in_state(database, state)
    assert database.read(store.lanes, ["default"]) == []


def test_a_sweep_asks_again_who_lives_about_the_rows_that_it_has_locked(database: Database) -> None:
    """Between the look and the lock another sweeper may have recovered a job and a live worker
    claimed it; PostgreSQL then hands over the new row, as if its owner were gone.
    """
    job = running(database)
    assert job.worker is not None
    row = (
        *(job.id, job.task, job.queue, job.priority, job.state.value, job.attempt, job.worker),
        *(job.args, job.max_attempts, job.max_losses, job.failures, job.losses, job.budget_from),
        *(job.timeout, None),
    )

    def stale(decide: Callable[[Job, str], Change]) -> Op[list[Change]]:
        """A sweep whose look at the orphans has just been overtaken."""
        sweep = store.sweep(decide)
        assert next(sweep).name == "orphans"
        statement = sweep.send([row])
        while True:
            try:
                statement = sweep.send((yield statement))
            except StopIteration as end:
                answer: list[Change] = end.value
                return answer

    assert database.run(stale, policy.recover) == []
    assert state_of(database, job.id) is JobState.RUNNING
    assert database.run(store.lose, job.worker, "for the test")
    assert len(database.run(stale, policy.recover)) == 1


def test_workers_that_live_come_before_the_dead(database: Database) -> None:
    """However many have died since they started."""
    alive = register(database)
    for _ in range(3):
        database.run(store.lose, register(database), "killed")
    rows = database.read(store.read, "workers", limit=2)
    assert rows[0][0] == alive
