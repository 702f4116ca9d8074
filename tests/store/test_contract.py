"""What every database must show alike about jobs: enqueue, claim, apply, look, hold, refusals."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from onward.errors import IdConflict, IllegalTransition, JobNotFound, OnwardError
from onward.job import Change, Job, NewJob
from onward.lifecycle import AttemptState, Event, JobState
from onward.store import portions, store
from onward.store.database import Database, Duplicate, Refused
from onward.store.statements import Op, Statement
from onward.store.store import FIRST_ID, Wake
from tests.store.builders import (
    LANE,
    TASK,
    apply,
    bury,
    cancel,
    claim,
    claimed,
    enqueue,
    get,
    in_state,
    new_id,
    new_job,
    opened,
    register,
    release,
    retry,
    running,
    shift_clock,
    state_of,
    succeed,
)

# --- enqueue --------------------------------------------------------------------------------------


def test_an_enqueued_job_is_queued_with_all_that_was_given(database: Database) -> None:
    """Nothing of a job is lost or changed on its way into the table."""
    job = new_job(
        task="mail.send",
        queue="mail",
        priority=-100,
        args='{"user": 5}',
        max_attempts=7,
        max_losses=4,
        timeout=12.5,
    )
    before = time.time()
    database.run(store.enqueue, [job])
    record = database.read(store.record, job.id)
    assert record.job == Job(
        id=job.id,
        task="mail.send",
        queue="mail",
        priority=-100,
        state=JobState.QUEUED,
        attempt=1,
        worker=None,
        args='{"user": 5}',
        max_attempts=7,
        max_losses=4,
        failures=0,
        losses=0,
        budget_from=1,
        timeout=12.5,
    )
    assert before - 1 <= record.created_at == record.run_at <= time.time() + 1
    assert (record.started_at, record.finished_at) == (None, None)
    assert (record.result, record.error) == (None, None)


OTHERS: list[dict[str, Any]] = [
    {},
    {"task": "shop.other"},
    {"queue": "mail"},
    {"priority": -7},
    {"max_attempts": 1},
    {"max_losses": 0},
    {"timeout": 0.25},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_jobs_of_a_bulk_are_written_as_they_are_given(
    database: Database, other: dict[str, Any]
) -> None:
    """Whether they have everything in common but their arguments, or differ in anything."""
    common = {"priority": 9, "max_attempts": 8, "max_losses": 7, "timeout": 12.5}
    jobs = [new_job(args=json.dumps({"n": number}), **common) for number in range(3)]
    jobs[1] = msgspec.structs.replace(jobs[1], **other)
    database.run(store.enqueue, jobs)
    fields = ("id", "task", "queue", "priority", "args", "max_attempts", "max_losses", "timeout")
    for job in jobs:
        found = get(database, job.id)
        assert [getattr(found, name) for name in fields] == [getattr(job, name) for name in fields]


@pytest.mark.parametrize("priority", [0, 1], ids=["alike", "not alike"])
def test_a_delay_and_a_time_set_the_due_time_which_is_never_in_the_past(
    database: Database, priority: int
) -> None:
    """The database's clock decides; a time long gone means now, so nothing lands behind the claim's
    position.
    """
    far = time.time() + 5000
    jobs = [new_job(delay=60.0), new_job(run_at=far), new_job(run_at=1.0)]
    jobs.append(new_job(delay=-60.0, priority=priority))
    database.run(store.enqueue, jobs)
    records = [database.read(store.record, job.id) for job in jobs]
    waits = [record.run_at - record.created_at for record in records]
    assert waits[0] == pytest.approx(60, abs=0.01)
    assert records[1].run_at == pytest.approx(far, abs=0.001)
    assert waits[2:] == [0, 0]


def test_a_duplicate_id_is_refused_and_nothing_of_the_batch_is_written(database: Database) -> None:
    """The first try of an enqueue is a plain insert: an id that is there already is an error, never
    a silent skip.
    """
    first, fresh = new_job(), new_job()
    database.run(store.enqueue, [first])
    with pytest.raises(Duplicate):
        database.run(store.enqueue, [fresh, msgspec.structs.replace(first, task="other")])
    assert get(database, first.id).task == TASK
    with pytest.raises(JobNotFound, match=fresh.id):
        database.read(store.get, fresh.id)


@pytest.mark.parametrize(
    "fields",
    [
        {"priority": 101},
        {"priority": -101},
        {"max_attempts": 0},
        {"max_losses": -1},
        {"task": ""},
        {"queue": ""},
        {"timeout": 0.0},
        {"timeout": -1.0},
    ],
    ids=lambda fields: "{}={!r}".format(*next(iter(fields.items()))),
)
def test_an_impossible_job_is_refused(database: Database, fields: dict[str, Any]) -> None:
    """The table's own checks hold whatever the code above has let through."""
    with pytest.raises(Refused) as caught:
        enqueue(database, **fields)
    assert not isinstance(caught.value, Duplicate)
    assert database.read(store.counts)["queued"] == 0


def test_enqueue_again_writes_what_is_missing_and_leaves_the_rest(database: Database) -> None:
    """A repeated enqueue makes no second job: it answers which ids were new."""
    there, missing = new_job(), new_job()
    database.run(store.enqueue, [there])
    assert database.run(store.enqueue_again, [there, missing]) == {missing.id}
    assert database.run(store.enqueue_again, [there, missing]) == set()
    assert database.run(store.enqueue_again, []) == set()
    assert database.read(store.counts)["queued"] == 2


@pytest.mark.parametrize("state", JobState)
def test_enqueue_again_meets_itself_in_any_state(database: Database, state: JobState) -> None:
    """Also a job that is long over is not made a second time, and a running one is not
    disturbed.
    """
    job = in_state(database, state)
    again = new_job(id=job.id)
    assert database.run(store.enqueue_again, [again]) == set()
    assert get(database, job.id) == job
    assert sum(database.read(store.counts).values()) == 1


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.RUNNING, JobState.SUCCEEDED])
@pytest.mark.parametrize("other", [{"task": "other"}, {"args": '{"n": 2}'}])
def test_an_id_of_another_call_is_a_conflict(
    database: Database, state: JobState, other: dict[str, Any]
) -> None:
    """The same id means the same call: a second meaning is an error, and its batch leaves no
    trace.
    """
    job = in_state(database, state)
    fresh = new_job()
    with pytest.raises(IdConflict) as caught:
        database.run(store.enqueue_again, [fresh, new_job(id=job.id, **other)])
    assert caught.value.what == f"job id {job.id} belongs to another call, of {job.task}"
    assert caught.value.why == (
        "an explicit id makes an enqueue repeatable: the same id means the same call"
    )
    assert caught.value.fix == (
        "use a new id for a new call; uuid.uuid5(namespace, key) makes one from your key"
    )
    assert get(database, job.id) == job
    with pytest.raises(JobNotFound):
        database.read(store.get, fresh.id)


def test_whoever_repeats_a_call_may_say_when_arguments_are_the_same(database: Database) -> None:
    """Another spelling of the same arguments is the same call, if the caller knows it to be; of
    another task it never is.
    """
    (id_,) = enqueue(database, args='{"n":1}')
    spaced = new_job(id=id_, args='{ "n": 1 }')

    def same(job: NewJob, args: str) -> bool:
        return msgspec.json.decode(job.args) == msgspec.json.decode(args)

    with pytest.raises(IdConflict):
        database.run(store.enqueue_again, [spaced])
    assert database.run(store.enqueue_again, [spaced], same) == set()
    with pytest.raises(IdConflict):
        database.run(store.enqueue_again, [msgspec.structs.replace(spaced, task="other")], same)
    assert get(database, id_).args == '{"n":1}'


def test_an_id_that_is_written_twice_in_one_repeat_is_one_job(database: Database) -> None:
    """A batch may hold the same call twice; the second copy meets the first."""
    job = new_job()
    assert database.run(store.enqueue_again, [job, job]) == {job.id}
    assert database.read(store.counts)["queued"] == 1


@pytest.mark.parametrize("other", [{"task": "other"}, {"args": '{"n": 2}'}])
def test_two_meanings_of_one_id_in_one_repeat_are_a_conflict(
    database: Database, other: dict[str, Any]
) -> None:
    """Neither is written: nobody can say which of them was meant."""
    job = new_job()
    with pytest.raises(IdConflict) as caught:
        database.run(store.enqueue_again, [job, msgspec.structs.replace(job, **other)])
    assert caught.value.what == f"job id {job.id} belongs to another call, of {job.task}"
    with pytest.raises(JobNotFound):
        database.read(store.get, job.id)


def test_a_job_that_is_not_there_is_named(database: Database) -> None:
    """Whoever asks learns what may have become of it, and where to look."""
    missing = new_id()
    for ask in (
        lambda: database.read(store.get, missing),
        lambda: database.run(store.move, missing, lambda _: None),
    ):
        with pytest.raises(JobNotFound) as caught:
            ask()
        assert caught.value.what == f"no job has the id {missing}"
        assert caught.value.why == "it was never enqueued here, or it ended and was pruned"
        assert caught.value.fix == (
            "onward job list shows what there is; onward status names the database"
        )


@pytest.mark.parametrize("write", [store.enqueue, store.enqueue_ours])
def test_an_enqueue_says_whether_a_worker_waits_to_be_woken(
    database: Database, write: Callable[[list[NewJob]], Op[Wake]]
) -> None:
    """Only PostgreSQL has to be told; there the answer follows the workers' own word, and only
    active ones count.
    """
    assert database.run(write, [new_job()]) is Wake.NOBODY
    worker = register(database)
    answers = [database.run(write, [new_job()])]
    for idle in (False, True):
        database.run(store.set_idle, worker, idle)
        answers.append(database.run(write, [new_job()]))
    database.run(store.drain, worker)
    for idle in (False, True):
        database.run(store.set_idle, worker, idle)
        answers.append(database.run(write, [new_job()]))
    waits = [True, False, True, False, False] if database.dialect == "postgres" else [False] * 5
    assert answers == [Wake.WANTED if each else Wake.NOBODY for each in waits]


# --- claim ----------------------------------------------------------------------------------------


def test_a_claim_takes_due_jobs_in_order_and_makes_them_running(database: Database) -> None:
    """Within a lane the oldest due time goes first, and of equals the smaller id; each is then
    owned and started.
    """
    worker = register(database)
    base = time.time() + 1
    jobs = [new_job(run_at=base + n % 3) for n in range(9)]
    database.run(store.enqueue, random.Random(1).sample(jobs, 9))
    shift_clock(database, 10)
    taken = claimed(database, worker, 100)
    expected = sorted(jobs, key=lambda job: (job.run_at, job.id))
    assert [one.job.id for one in taken] == [job.id for job in expected]
    assert [one.run_at for one in taken] == pytest.approx([job.run_at for job in expected])
    assert {(one.job.state, one.job.worker) for one in taken} == {(JobState.RUNNING, worker)}
    assert taken[0].job == get(database, taken[0].job.id)
    assert database.read(store.record, taken[0].job.id).started_at is not None


def test_the_jobs_of_one_batch_keep_their_order(database: Database) -> None:
    """A batch is one moment: its jobs are due together, and so run in the order of their ids."""
    ids = enqueue(database, 50)
    assert len({database.read(store.record, id_).run_at for id_ in ids}) == 1
    assert [job.id for job in claim(database, register(database), 50)] == ids


def test_a_claim_takes_no_more_than_its_limit(database: Database) -> None:
    """Free slots bound what a worker owns; what is left is found by the next claim."""
    worker = register(database)
    ids = enqueue(database, 5)
    found = [[job.id for job in claim(database, worker, 2)] for _ in range(4)]
    assert found == [ids[0:2], ids[2:4], ids[4:], []]


def test_a_claim_goes_on_where_the_last_one_ended(database: Database) -> None:
    """The position is exclusive and compares due time, then id; from the start everything is seen
    again.
    """
    worker = register(database)
    ids = enqueue(database, 6)
    first = claimed(database, worker, 2)
    after = (first[-1].run_at, first[-1].job.id)
    assert apply(database, *(release(one.job) for one in first)) == set(ids[:2])
    assert [job.id for job in claim(database, worker, 2, after=after)] == ids[2:4]
    at_the_next = (database.read(store.record, ids[4]).run_at, ids[4])
    assert ids[4] not in {job.id for job in claim(database, worker, 1, after=at_the_next)}
    beyond = (time.time() + 3600, FIRST_ID)
    assert claim(database, worker, 10, after=beyond) == []
    assert {job.id for job in claim(database, worker, 10)} == {*ids[:2], ids[4]}


def test_a_position_survives_its_way_through_the_client_exactly(database: Database) -> None:
    """Due times come back as numbers; none may be skipped or met twice for a rounding of the last
    digit.
    """
    worker = register(database)
    ids = [id_ for _ in range(40) for id_ in enqueue(database, 1, delay=random.random() / 1000)]
    shift_clock(database, 5)
    seen: list[str] = []
    after = (0.0, FIRST_ID)
    while taken := claimed(database, worker, 1, after=after):
        seen.append(taken[0].job.id)
        after = (taken[0].run_at, taken[0].job.id)
    assert sorted(seen) == sorted(ids)


def test_lanes_come_with_the_highest_priority_first(database: Database) -> None:
    """Each (queue, priority) pair with queued jobs is there once, with the time until its first is
    due.
    """
    for priority in (0, 100, 1, -100, 0):
        enqueue(database, 1, priority=priority)
    enqueue(database, 1, queue="mail", delay=50.0)
    enqueue(database, 1, queue="other")
    lanes = database.read(store.lanes, ["default", "mail", "empty"])
    found = [(lane.queue, lane.priority) for lane in lanes]
    assert [lane.priority for lane in lanes] == sorted((p for _, p in found), reverse=True)
    default = {("default", priority) for priority in (100, 1, 0, -100)}
    assert sorted(found) == sorted({*default, ("mail", 0)})
    due = {lane.queue: lane.due_in for lane in lanes}
    assert due["mail"] == pytest.approx(50, abs=2)
    assert due["default"] <= 0.01
    assert database.read(store.lanes, []) == []


def test_lanes_tell_apart_what_a_worker_knows_where_the_database_can(database: Database) -> None:
    """On PostgreSQL; each with the due time of its own first job. On SQLite all count as known,
    and with them nothing is lost but time.
    """
    enqueue(database, 2, task="old")
    (mine,) = enqueue(database, 1, task="new", delay=50.0)
    enqueue(database, 1, task="new", delay=60.0)
    enqueue(database, 1, task="old", priority=5)
    first = {lane.known: lane for lane in database.read(store.lanes, ["default"], {"new"})}
    at = database.read(store.record, mine).run_at
    if database.dialect == "sqlite":
        assert set(first) == {True}
        return
    assert (first[True].priority, first[False].priority) == (0, 0)
    assert first[True].first == pytest.approx(at, abs=1e-5)
    assert first[True].due_in == pytest.approx(50, abs=2)
    assert first[False].due_in <= 0.01
    lanes = database.read(store.lanes, ["default"], {"new"})
    assert [(lane.priority, lane.known) for lane in lanes if lane.priority] == [(5, False)]
    assert lanes[0].priority == 5
    assert len(lanes) == 3


def test_a_claim_looks_only_into_its_lane(database: Database) -> None:
    """A job of another queue or priority stays where it is."""
    worker = register(database)
    (mine,) = enqueue(database)
    enqueue(database, queue="mail")
    enqueue(database, priority=5)
    assert [job.id for job in claim(database, worker)] == [mine]
    assert [job.priority for job in claim(database, worker, lane=(LANE[0], 5))] == [5]


def test_a_job_that_is_not_due_is_not_claimed(database: Database) -> None:
    """The database's clock says when; not a moment earlier."""
    worker = register(database)
    (id_,) = enqueue(database, 1, delay=30.0)
    assert claim(database, worker) == []
    shift_clock(database, 31)
    assert [job.id for job in claim(database, worker)] == [id_]


def test_tasks_that_the_worker_does_not_know_are_passed_over(database: Database) -> None:
    """A rolling deploy: the old worker takes what it knows, in order, and leaves the new tasks to
    new workers.
    """
    worker = register(database)
    enqueue(database, 3, task="new.task")
    known = enqueue(database, 2)
    enqueue(database, 3, task="new.task")
    assert [job.id for job in claim(database, worker)] == known
    assert claim(database, worker, tasks=()) == []
    assert database.read(store.counts)["queued"] == 6


@pytest.mark.parametrize("ending", ["draining", "stopped", "lost", "unknown"])
def test_only_an_active_worker_claims(database: Database, ending: str) -> None:
    """A worker that drains, ended, or was never registered gets nothing, however late it asks."""
    worker = new_id() if ending == "unknown" else register(database)
    enqueue(database)
    if ending == "draining":
        assert database.run(store.drain, worker)
    elif ending == "stopped":
        assert database.run(store.stop, worker, "done")
    elif ending == "lost":
        assert database.run(store.lose, worker, "killed")
    assert claim(database, worker) == []
    assert database.read(store.counts)["queued"] == 1


@pytest.mark.parametrize("state", sorted(set(JobState) - {JobState.QUEUED}))
def test_only_queued_jobs_are_claimed(database: Database, state: JobState) -> None:
    """A claim never takes what somebody has, what waits, what is dead or what is over."""
    job = in_state(database, state)
    assert claim(database, register(database)) == []
    assert get(database, job.id) == job


# --- apply ----------------------------------------------------------------------------------------


def test_success_moves_the_job_to_the_cold_table_with_its_last_attempt(database: Database) -> None:
    """Result, owner and times stay with the job for good, and history has the attempt."""
    job = running(database)
    assert apply(database, succeed(job, '"done"')) == {job.id}
    record = database.read(store.record, job.id)
    assert record.job == msgspec.structs.replace(job, state=JobState.SUCCEEDED)
    assert (record.event, record.result, record.error) == ("succeed", '"done"', None)
    assert record.started_at is not None
    assert record.finished_at is not None
    (attempt,) = database.read(store.attempts, job.id)
    assert (attempt.number, attempt.state, attempt.event) == (1, "succeeded", "succeed")
    assert (attempt.worker, attempt.ended_at) == (job.worker, record.finished_at)
    assert attempt.started_at == record.started_at <= record.finished_at


def test_a_retry_closes_the_attempt_and_queues_the_next(database: Database) -> None:
    """The failure is history, its error kept; the job waits its delay, on the database's clock,
    with the next number.
    """
    job = running(database)
    shift_clock(database, 1000)
    assert apply(database, retry(job, delay=30.0)) == {job.id}
    record = database.read(store.record, job.id)
    assert (record.job.state, record.job.attempt, record.job.worker) == (JobState.QUEUED, 2, None)
    assert (record.job.failures, record.job.losses, record.job.budget_from) == (1, 0, 1)
    assert record.started_at is None
    assert record.run_at == pytest.approx(time.time() + 1030, abs=5)
    (attempt,) = database.read(store.attempts, job.id)
    assert (attempt.number, attempt.state, attempt.event) == (1, AttemptState.FAILED, Event.RETRY)
    assert (attempt.worker, attempt.reason, attempt.error) == (job.worker, "error", "boom")
    assert attempt.ended_at == pytest.approx(record.run_at - 30, abs=0.001)


def test_history_tells_of_bodies_that_went_on(database: Database) -> None:
    """An abandoned attempt is marked, and no other; a cancelled job keeps the error of its end."""
    job = running(database)
    apply(database, retry(job, abandoned=True))
    shift_clock(database, 100)
    (again,) = claim(database, register(database))
    apply(database, again.move(Event.ASK_CANCEL))
    asked = get(database, job.id)
    failed = AttemptState.FAILED
    apply(database, asked.move(Event.CANCEL, ended=failed, reason="error", error="for good"))
    first, second = database.read(store.attempts, job.id)
    assert [(one.job, one.number, one.abandoned) for one in (first, second)] == [
        (job.id, 1, True),
        (job.id, 2, False),
    ]
    assert database.read(store.record, job.id).error == "for good"


def test_of_two_changes_of_one_job_only_the_first_takes(database: Database) -> None:
    """And the changes of others behind them are written all the same."""
    job, other = running(database), running(database)
    assert apply(database, retry(job), succeed(job), succeed(other)) == {job.id, other.id}
    assert state_of(database, job.id) is JobState.QUEUED
    assert state_of(database, other.id) is JobState.SUCCEEDED


EVENTS: dict[str, tuple[Callable[[Job], Change], JobState, AttemptState | None]] = {
    "retry": (retry, JobState.QUEUED, AttemptState.FAILED),
    "snooze": (
        lambda job: job.move(Event.SNOOZE, ended=AttemptState.RELEASED, reason="snoozed", delay=9),
        JobState.QUEUED,
        AttemptState.RELEASED,
    ),
    "release": (release, JobState.QUEUED, AttemptState.RELEASED),
    "recover": (
        lambda job: job.move(Event.RECOVER, ended=AttemptState.LOST, losses=1),
        JobState.QUEUED,
        AttemptState.LOST,
    ),
    "suspend": (
        lambda job: job.move(Event.SUSPEND, ended=AttemptState.RELEASED),
        JobState.WAITING,
        AttemptState.RELEASED,
    ),
    "bury": (bury, JobState.DEAD, AttemptState.FAILED),
    "drop": (
        lambda job: job.move(Event.DROP, ended=AttemptState.CANCELLED, reason="enough"),
        JobState.CANCELLED,
        AttemptState.CANCELLED,
    ),
    "succeed": (succeed, JobState.SUCCEEDED, AttemptState.SUCCEEDED),
    "ask_cancel": (lambda job: job.move(Event.ASK_CANCEL), JobState.CANCELLING, None),
}


@pytest.mark.parametrize("event", EVENTS)
def test_every_move_of_a_running_job_is_written(database: Database, event: str) -> None:
    """State, attempt, owner, counters and history agree with the change, whichever it is."""
    job = running(database)
    make, state, ended = EVENTS[event]
    change = make(job)
    assert apply(database, change) == {job.id}
    after = get(database, job.id)
    assert (after.state, after.attempt) == (state, change.next_attempt)
    assert (after.failures, after.losses) == (change.failures, change.losses)
    keeps_owner = state in {JobState.CANCELLING, JobState.SUCCEEDED, JobState.CANCELLED}
    assert after.worker == (job.worker if keeps_owner else None)
    attempts = database.read(store.attempts, job.id)
    assert [(one.number, one.state) for one in attempts] == ([] if ended is None else [(1, ended)])
    assert apply(database, change) == set()  # The same again: the job is no longer as it was seen.
    assert get(database, job.id) == after


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (AttemptState.CANCELLED, "cancelled"),
        (AttemptState.FAILED, "error"),
        (AttemptState.LOST, "lost"),
        (AttemptState.RELEASED, "cancelled"),
        (AttemptState.SUCCEEDED, None),
    ],
)
def test_a_cancelling_job_ends_and_its_attempt_keeps_its_own_outcome(
    database: Database, ended: AttemptState, reason: str | None
) -> None:
    """The job is cancelled, or succeeded if it returned; history tells how the attempt itself
    ended.
    """
    job = in_state(database, JobState.CANCELLING)
    done = ended is AttemptState.SUCCEEDED
    change = succeed(job) if done else cancel(job, ended=ended, reason=reason)
    assert apply(database, change) == {job.id}
    assert state_of(database, job.id) is (JobState.SUCCEEDED if done else JobState.CANCELLED)
    assert [one.state for one in database.read(store.attempts, job.id)] == [ended]
    assert database.read(store.record, job.id).reason == reason


@pytest.mark.parametrize("state", [JobState.WAITING, JobState.QUEUED])
@pytest.mark.parametrize("event", [Event.CANCEL, Event.EXPIRE])
def test_a_job_that_has_not_begun_is_cancelled_without_a_start(
    database: Database, state: JobState, event: Event
) -> None:
    """Its open attempt is closed with no owner and no start time."""
    job = in_state(database, state)
    change = job.move(event, ended=AttemptState.CANCELLED, reason="caller")
    assert apply(database, change) == {job.id}
    last = database.read(store.attempts, job.id)[-1]
    assert (last.number, last.state, last.event) == (2, AttemptState.CANCELLED, event)
    assert (last.worker, last.started_at) == (None, None)


def test_a_waiting_job_is_queued_again_with_the_same_attempt(database: Database) -> None:
    """What it waited for has come: the attempt that waited is the one that runs."""
    job = in_state(database, JobState.WAITING)
    assert apply(database, job.move(Event.UNBLOCK)) == {job.id}
    (again,) = claim(database, register(database))
    assert (again.id, again.attempt) == (job.id, job.attempt)


def test_a_dead_job_is_requeued_with_fresh_budgets_and_its_history(database: Database) -> None:
    """A human's second chance: the next attempt, nothing charged, nothing forgotten."""
    job = in_state(database, JobState.DEAD)
    assert (job.failures, database.read(store.record, job.id).finished_at is None) == (1, False)
    assert apply(database, job.move(Event.REQUEUE)) == {job.id}
    record = database.read(store.record, job.id)
    assert (record.job.state, record.job.attempt) == (JobState.QUEUED, 2)
    assert (record.job.failures, record.job.budget_from) == (0, 2)
    assert (record.started_at, record.finished_at) == (None, None)
    assert [one.event for one in database.read(store.attempts, job.id)] == [Event.BURY]


def test_a_dead_job_is_discarded_and_its_last_error_stays(database: Database) -> None:
    """Quarantine is left by a human's word only, and the reason why it was there is kept."""
    job = in_state(database, JobState.DEAD)
    assert apply(database, job.move(Event.DISCARD, reason="not worth it")) == {job.id}
    assert state_of(database, job.id) is JobState.CANCELLED
    assert database.read(store.record, job.id).reason == "not worth it"
    (attempt,) = database.read(store.attempts, job.id)
    assert (attempt.event, attempt.error) == (Event.BURY, "boom")


def test_attempts_are_numbered_without_gaps_through_a_long_life(database: Database) -> None:
    """Each number is given out once and closed once, whatever ended it, and the last stands with
    the finished job.
    """
    worker = register(database)
    (id_,) = enqueue(database, max_attempts=10)
    moves = [retry, release, EVENTS["recover"][0], EVENTS["snooze"][0], retry, succeed]
    for number, make in enumerate(moves, 1):
        shift_clock(database, 100 * number)
        (job,) = claim(database, worker)
        assert job.attempt == number
        apply(database, make(job))
    attempts = database.read(store.attempts, id_)
    assert [one.number for one in attempts] == [1, 2, 3, 4, 5, 6]
    assert [one.event for one in attempts] == [
        "retry",
        "release",
        "recover",
        "snooze",
        "retry",
        "succeed",
    ]
    assert get(database, id_).failures == 2


def test_a_batch_of_many_moves_says_which_took(database: Database) -> None:
    """Finishing and going on, stale and fresh, all in one batch: each change stands for itself."""
    worker = register(database)
    enqueue(database, 6)
    jobs = claim(database, worker)
    apply(database, succeed(jobs[0]))
    changes = [
        succeed(jobs[0]),  # stale: it is over
        succeed(jobs[1]),
        retry(jobs[2]),
        bury(msgspec.structs.replace(jobs[3], attempt=2, budget_from=1)),  # stale: another attempt
        jobs[4].move(Event.ASK_CANCEL),
        cancel(msgspec.structs.replace(jobs[5], state=JobState.QUEUED)),  # stale: another state
    ]
    assert apply(database, *changes) == {jobs[1].id, jobs[2].id, jobs[4].id}
    assert [state_of(database, job.id).value for job in jobs] == [
        "succeeded",
        "succeeded",
        "queued",
        "running",
        "cancelling",
        "running",
    ]


def test_of_two_changes_of_one_job_the_first_counts(database: Database) -> None:
    """A batch may decide one job twice; the second is then as stale as if it had come a moment
    later.
    """
    for first, second, state in [(succeed, retry, "succeeded"), (retry, succeed, "queued")]:
        job = running(database)
        assert apply(database, first(job), second(job)) == {job.id}
        assert state_of(database, job.id) == state


def test_an_empty_batch_is_nothing(database: Database) -> None:
    """No changes, no statements, an empty answer: from threads and from a loop."""
    assert database.run(store.apply, []) == set()
    assert in_loop(database, lambda: database.arun(store.apply, [])) == set()


STALE: dict[str, dict[str, Any]] = {
    "an earlier attempt": {"attempt": 1},
    "a later attempt": {"attempt": 3},
    "another worker": {"worker": FIRST_ID},
    "no worker": {"worker": None},
    "another state": {"state": JobState.CANCELLING},
    "another job": {"id": "0190a6d8-0000-7000-8000-00000000dead"},
}


@pytest.mark.parametrize("wrong", STALE)
@pytest.mark.parametrize("make", [succeed, retry], ids=["finish", "go on"])
def test_a_writer_that_saw_something_else_changes_nothing(
    database: Database, wrong: str, make: Callable[[Job], Change]
) -> None:
    """A worker that lost the job never writes to it: no state, no history, no counter, and no error
    either.
    """
    worker = register(database)
    first = running(database, worker)
    apply(database, release(first))
    (job,) = claim(database, worker)
    assert job.attempt == 2
    good = make(job)
    fields = {("before" if name == "state" else name): v for name, v in STALE[wrong].items()}
    bad = msgspec.structs.replace(good, **fields)
    assert apply(database, bad) == set()
    assert get(database, job.id) == job
    assert len(database.read(store.attempts, job.id)) == 1
    assert apply(database, good) == {job.id}


def test_follow_ups_are_written_with_the_change_that_took(database: Database) -> None:
    """A finished job's children exist at once, in the order given, with whatever they ask for."""
    job = running(database)
    children = (new_job(delay=60.0, args='{"n": 1}'), new_job(task="other"))
    assert apply(database, succeed(job, follow_ups=children)) == {job.id}
    assert [get(database, child.id).args for child in children] == ['{"n": 1}', "{}"]
    assert database.read(store.counts)["queued"] == 2


def texts_written(database: Database, *changes: Change) -> list[list[int]]:
    """Write these changes; returns how much text of follow-ups each statement carried."""
    written: list[list[int]] = []

    def noted() -> Op[set[str]]:
        op, rows = store.apply(changes), None
        while True:
            try:
                statement = next(op) if rows is None else op.send(rows)
            except StopIteration as end:
                taken: set[str] = end.value
                return taken
            if statement.name == "enqueue_again":
                jobs = json.loads(statement.params["jobs"])
                written.append([len(job[4]) for job in jobs])
            rows = yield statement

    assert database.run(noted) == {change.id for change in changes}
    return written


def test_follow_ups_that_are_too_large_for_one_statement_take_several(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is too large for one fails for ever, and every follow-up was a legal call. They are
    still one write with what they follow.
    """
    monkeypatch.setattr(portions, "MOST_TEXT", 1_000)
    one, other = running(database), running(database)
    sizes = [400, 400, 400, 1_500, 10, 10, 800]
    children = [new_job(args=f'"{"x" * (size - 2)}"') for size in sizes]
    few, rest = tuple(children[:2]), tuple(children[2:])
    written = texts_written(database, succeed(one, follow_ups=few), succeed(other, follow_ups=rest))
    assert written == [[400, 400], [400], [1_500], [10, 10, 800]]
    assert [len(get(database, child.id).args) for child in children] == sizes


def test_a_follow_up_that_is_refused_undoes_those_of_earlier_statements(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several statements are one write all the same."""
    monkeypatch.setattr(portions, "MOST_ROWS", 2)
    job, key = running(database), new_id()
    bad = (
        [new_job(priority=999)],
        [new_job(id=key), new_job(), new_job(), new_job(id=key, args="1")],
    )
    for last, kind in zip(bad, (Refused, IdConflict), strict=True):
        with pytest.raises(kind):
            apply(database, succeed(job, follow_ups=(new_job(), new_job(), new_job(), *last)))
        assert get(database, job.id) == job
        assert database.read(store.counts)["queued"] == 0
    again = new_job(id=key), new_job(), new_job(), new_job(id=key)
    assert apply(database, succeed(job, follow_ups=again)) == {job.id}
    assert database.read(store.counts)["queued"] == 3


def test_a_follow_up_that_is_there_is_the_same_call_in_any_order_of_its_mappings(
    database: Database,
) -> None:
    """Its caller's id makes it repeatable; that its first enqueue spelt a dict the other way round
    is no reason to fail the job that repeats it.
    """
    first, again = '{"a": {"x": 1, "y": [1, 2]}, "b": 2.0}', '{"b":2.0,"a":{"y":[1,2],"x":1}}'
    (id_,) = enqueue(database, args=first)
    one, other = running(database), running(database)
    repeats = new_job(id=id_, args=again), new_job(id=id_, args=first)
    assert apply(database, succeed(one, follow_ups=repeats)) == {one.id}
    assert get(database, id_).args == first
    for args in (
        again.replace("2.0", "2"),
        again.replace("[1,2]", "[2,1]"),
        again.replace("1,2", "true,2"),
        again.replace('"b"', '"c"'),
        "{",
    ):
        with pytest.raises(IdConflict):
            apply(database, succeed(other, follow_ups=(new_job(id=id_, args=args),)))
        assert get(database, other.id) == other


@pytest.mark.parametrize("wrong", STALE)
def test_a_worker_that_lost_the_job_enqueues_no_follow_ups(database: Database, wrong: str) -> None:
    """Children of an attempt that does not count would be jobs from nowhere."""
    lost, kept = running(database), running(database)
    child, other = new_job(), new_job()
    fields = {("before" if name == "state" else name): v for name, v in STALE[wrong].items()}
    if wrong == "an earlier attempt":
        fields = {"attempt": 2}
    bad = msgspec.structs.replace(succeed(lost, follow_ups=(child,)), **fields)
    assert apply(database, bad, succeed(kept, follow_ups=(other,))) == {kept.id}
    assert get(database, other.id).state is JobState.QUEUED
    with pytest.raises(JobNotFound):
        database.read(store.get, child.id)


def test_a_follow_up_that_is_refused_takes_its_change_with_it(database: Database) -> None:
    """Outcome and children are one write: all of it, or nothing."""
    job = running(database)
    with pytest.raises(Refused):
        apply(database, succeed(job, follow_ups=(new_job(), new_job(priority=999))))
    assert get(database, job.id) == job
    assert database.read(store.counts)["queued"] == 0


def test_a_success_without_a_result_is_refused(database: Database) -> None:
    """A finished job says what came of it: the row would be impossible."""
    job = running(database)
    bare = job.move(Event.SUCCEED, ended=AttemptState.SUCCEEDED)
    with pytest.raises(Refused):
        apply(database, bare)
    assert get(database, job.id) == job


# --- look, refuse, hold, move ---------------------------------------------------------------------


@pytest.mark.parametrize("event", EVENTS)
def test_a_look_recognises_a_change_whose_answer_was_lost(database: Database, event: str) -> None:
    """The change took and nobody heard of it: looking again says so, so that it is not called
    refused.
    """
    job = running(database)
    change = EVENTS[event][0](job)
    assert database.run(store.look, change) == (job, False)
    apply(database, change)
    found, ours = database.run(store.look, change)
    assert ours
    assert found is not None
    assert found.state is change.after
    if change.after is JobState.QUEUED:
        shift_clock(database, 100)
        claim(database, register(database))
        assert database.run(store.look, change)[1]  # Still ours when the job has gone on.


def test_a_look_does_not_take_another_writers_change_for_its_own(database: Database) -> None:
    """The same job moved, but by somebody else or in another way: the writer learns what is there
    now.
    """
    job = running(database)
    apply(database, EVENTS["recover"][0](job))  # The sweeper was faster.
    for mine in (retry(job), succeed(job), bury(job)):
        found, ours = database.run(store.look, mine)
        assert not ours
        assert found == get(database, job.id)
    (again,) = claim(database, register(database))
    apply(database, succeed(again))
    assert database.run(store.look, succeed(job))[1] is False
    assert database.run(store.look, succeed(again))[1] is True


def test_a_look_at_a_job_that_is_gone_finds_nothing(database: Database) -> None:
    """A pruned job is neither there nor ours."""
    job = running(database)
    missing = msgspec.structs.replace(succeed(job), id=new_id())
    assert database.run(store.look, missing) == (None, False)


def test_a_refused_write_is_kept_with_what_was_expected_and_found(database: Database) -> None:
    """A late result of a lost attempt is data, newest first, to be asked for by job or all
    together.
    """
    job = running(database)
    other = running(database)
    late = succeed(job, '"late"')
    apply(database, EVENTS["recover"][0](job))
    found, _ = database.run(store.look, late)
    refusals = [
        store.refusal_of(late, found),
        store.refusal_of(retry(other), None, "gone"),
    ]
    database.run(store.refuse, refusals)
    (kept,) = database.read(store.refusals, job.id)
    assert (kept.job, kept.event, kept.attempt, kept.worker) == (job.id, "succeed", 1, job.worker)
    assert (kept.expected, kept.found, kept.found_attempt) == ("running", "queued", 2)
    assert (kept.found_worker, kept.detail) == (None, '"late"')
    assert kept.at == pytest.approx(time.time(), abs=5)
    again = running(database)
    apply(database, EVENTS["recover"][0](again))
    shift_clock(database, 100)
    (taken,) = claim(database, register(database), 1)
    database.run(store.refuse, [store.refusal_of(succeed(again), taken)])
    (kept,) = database.read(store.refusals, again.id)
    assert (kept.found, kept.found_worker) == ("running", taken.worker)
    everything = database.read(store.refusals)[1:]
    assert [one.job for one in everything] == [other.id, job.id]
    assert (everything[0].found, everything[0].detail) == (None, "gone")
    assert len(database.read(store.refusals, None, 1)) == 1


def test_a_hold_keeps_a_queued_attempt_from_being_due(database: Database) -> None:
    """Only that attempt, only while it is queued, and never to an earlier time."""
    job = running(database)
    apply(database, retry(job))
    assert database.run(store.hold, job.id, 2, 60.0)
    assert claim(database, register(database)) == []
    assert database.read(store.record, job.id).run_at == pytest.approx(time.time() + 60, abs=5)
    assert not database.run(store.hold, job.id, 1, 60.0)
    assert not database.run(store.hold, job.id, 3, 60.0)
    assert not database.run(store.hold, new_id(), 1, 60.0)
    shift_clock(database, 61)
    claim(database, register(database))
    assert not database.run(store.hold, job.id, 2, 60.0)


def test_a_move_reads_decides_and_writes_as_one(database: Database) -> None:
    """A caller's cancel or requeue sees the job as it is; a decision to do nothing leaves it so."""
    job = in_state(database, JobState.DEAD)
    assert database.run(store.move, job.id, lambda j: None) is JobState.DEAD
    requeue = database.run(store.move, job.id, lambda j: j.move(Event.REQUEUE))
    assert requeue is state_of(database, job.id) is JobState.QUEUED
    with pytest.raises(IllegalTransition, match=job.id):
        database.run(store.move, job.id, lambda j: j.move(Event.REQUEUE))
    with pytest.raises(JobNotFound):
        database.run(store.move, new_id(), lambda j: None)
    assert database.run(store.move, job.id, cancel) is JobState.CANCELLED


def test_a_move_that_was_overtaken_decides_again(database: Database) -> None:
    """The world moves on between reading and writing: the second decision is made on what is there
    then.
    """
    job = running(database)
    seen: list[Job] = []

    def decide(found: Job) -> Change:
        seen.append(found)
        if len(seen) == 1:  # As if it had been read a moment earlier, under its last owner.
            found = msgspec.structs.replace(found, worker=FIRST_ID)
        return found.move(Event.ASK_CANCEL)

    assert database.run(store.move, job.id, decide) is JobState.CANCELLING
    assert len(seen) == 2


# --- texts and sizes ------------------------------------------------------------------------------

TEXTS = {
    "an escaped NUL": '{"s": "\\u0000"}',
    "an escaped lone surrogate": '{"s": "\\ud800"}',
    "quotes and backslashes": '{"s": "\\\\ \' \\" %s %(x)s :id $1 ; -- onward.job"}',
    "every plane": '{"s": "ä 漢 🦀 \u2028"}',
    "control characters": '{"s": "\\u001b[31m \\u0007 \x7f"}',
    "ten megabytes": '{"s": "' + "x" * 10_000_000 + '"}',
}


@pytest.mark.parametrize("name", TEXTS)
def test_arguments_results_and_errors_come_back_as_they_were(database: Database, name: str) -> None:
    """Text is data: nothing in it is read as SQL, as a placeholder or as an escape, at any size."""
    text = TEXTS[name]
    job = running(database, args=text)
    assert job.args == text
    apply(database, retry(job, error=text))
    (job,) = claim(database, register(database))
    apply(database, succeed(job, text))
    record = database.read(store.record, job.id)
    assert (record.job.args, record.result) == (text, text)
    assert database.read(store.attempts, job.id)[0].error == text


def test_hostile_names_are_only_names(database: Database) -> None:
    """A queue or task called like a statement, a wildcard or a placeholder finds exactly itself."""
    names = ["'; DROP TABLE onward.job; --", "%", "_", "%(worker)s", ":worker", "$1", "a\nb", "ü"]
    for name in names:
        enqueue(database, task=name, queue=name)
    for name in names:
        worker = register(database, queues=(name,), tasks=(name,))
        (job,) = claim(database, worker, tasks=(name,), lane=(name, 0))
        assert (job.task, job.queue) == (name, name)
    assert database.read(store.counts)["running"] == len(names)


# --- two writers, and both runners ----------------------------------------------------------------


def test_of_two_writers_with_the_same_knowledge_one_wins(database: Database) -> None:
    """A second program decides the same job: its change takes nothing, and it can see why."""
    job = running(database)
    with opened(database) as second:
        assert apply(second, retry(job)) == {job.id}
        assert apply(database, succeed(job)) == set()
        found, ours = database.run(store.look, succeed(job))
    assert not ours
    assert found is not None
    assert (found.state, found.attempt) == (JobState.QUEUED, 2)


def test_what_one_program_commits_the_other_reads_at_once(database: Database) -> None:
    """After the answer, the write is there for everyone."""
    with opened(database) as second:
        (id_,) = enqueue(database)
        assert state_of(second, id_) is JobState.QUEUED
        (job,) = claim(second, register(second))
        assert state_of(database, id_) is JobState.RUNNING
        apply(database, succeed(job))
        assert state_of(second, id_) is JobState.SUCCEEDED


def test_an_operation_that_fails_half_way_leaves_nothing(database: Database) -> None:
    """Each operation is one transaction, whatever error ends it."""

    class OwnError(Exception):
        pass

    job = new_job()

    def half() -> Op[None]:
        yield Statement("enqueue", {"jobs": store.dumps([job])}, alone=False)
        raise OwnError

    with pytest.raises(OwnError):
        database.run(half)
    with pytest.raises(OwnError):
        in_loop(database, lambda: database.arun(half))
    with pytest.raises(JobNotFound):
        database.read(store.get, job.id)
    assert enqueue(database)


def in_loop(database: Database, make: Callable[[], Any]) -> Any:
    """Run one coroutine on a loop of its own, and close what it opened there."""

    async def main() -> Any:
        try:
            return await make()
        finally:
            await database.aclose()

    return asyncio.run(main())


def test_a_life_on_a_loop_is_the_same_as_in_threads(database: Database) -> None:
    """Both runners carry out the same operations: nothing is written twice."""

    async def life() -> str:
        worker = register(database)
        job = new_job()
        await database.aenqueue([job])
        with pytest.raises(Duplicate):
            await database.aenqueue([job])
        assert await database.arun(store.enqueue_again, [job]) == set()
        tasks = store.dumps([TASK])
        (taken,) = await database.arun(store.claim, worker, tasks, LANE, (0.0, FIRST_ID), 10)
        child = new_job()
        change = succeed(taken.job, follow_ups=(child,))
        assert await database.arun(store.apply, [change]) == {job.id}
        assert await database.arun(store.apply, [change]) == set()
        assert (await database.aread(store.get, child.id)).state is JobState.QUEUED
        with pytest.raises(JobNotFound):
            await database.aread(store.get, new_id())
        with pytest.raises(OnwardError):
            await database.arun(store.move, job.id, lambda j: j.move(Event.REQUEUE))
        assert await database.arun(store.move, child.id, cancel) is JobState.CANCELLED
        return job.id

    id_ = in_loop(database, life)
    assert state_of(database, id_) is JobState.SUCCEEDED


def test_a_caller_that_gives_up_leaves_the_database_usable(database: Database) -> None:
    """A cancelled task may or may not have written; the connections are sound either way."""

    async def impatient() -> None:
        for _ in range(20):
            waiting = asyncio.gather(database.aenqueue([new_job() for _ in range(50)]))
            await asyncio.sleep(random.random() / 500)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await database.aenqueue([new_job()])

    in_loop(database, impatient)
    queued = database.read(store.counts)["queued"]
    assert queued % 50 == 1
