"""The model in five sentences, each of them tried on every database."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from msgspec.structs import replace

from onward.errors import IllegalTransition
from onward.job import Change, Job
from onward.lifecycle import AttemptState, Event, JobState
from onward.store import store
from onward.store.database import Database, Refused
from tests.store.builders import (
    DATABASE_ERRORS,
    apply,
    bury,
    claim,
    enqueue,
    get,
    hand,
    opened,
    register,
    retry,
    running,
    state_of,
    succeed,
)


def test_a_queued_job_can_become_running(database: Database) -> None:
    """A claim gives it an owner and a start, and it is queued no more."""
    (id_,) = enqueue(database)
    assert state_of(database, id_) is JobState.QUEUED
    worker = register(database)
    (job,) = claim(database, worker)
    assert (job.id, job.state, job.worker) == (id_, JobState.RUNNING, worker)
    assert get(database, id_) == job
    assert claim(database, worker) == []


@pytest.mark.parametrize(
    ("end", "attempt", "state"),
    [
        (succeed, AttemptState.SUCCEEDED, JobState.SUCCEEDED),
        (retry, AttemptState.FAILED, JobState.QUEUED),
        (bury, AttemptState.FAILED, JobState.DEAD),
    ],
    ids=["succeeds", "fails and is tried again", "fails for good"],
)
def test_a_running_job_can_succeed_or_fail(
    database: Database, end: object, attempt: AttemptState, state: JobState
) -> None:
    """Its attempt ends as it did, and the job is done, tried again, or dead."""
    assert callable(end)
    job = running(database)
    assert apply(database, end(job)) == {job.id}
    assert state_of(database, job.id) is state
    assert [one.state for one in database.read(store.attempts, job.id)] == [attempt]


def test_a_queued_job_cannot_succeed_without_running(database: Database) -> None:
    """Not by the model, not by a change made by hand, and not by bare SQL: it stays queued."""
    (id_,) = enqueue(database)
    job = get(database, id_)
    with pytest.raises(IllegalTransition, match=r"cannot succeed job .* it is queued"):
        succeed(job)

    worker = register(database)
    by_hand = Change(
        id=id_,
        task=job.task,
        event=Event.SUCCEED,
        before=JobState.QUEUED,
        after=JobState.SUCCEEDED,
        attempt=1,
        worker=None,
        next_attempt=1,
        budget_from=1,
        failures=0,
        losses=0,
        ended=AttemptState.SUCCEEDED,
        result="1",
    )
    with pytest.raises(Refused):
        apply(database, by_hand)
    pretended = replace(by_hand, before=JobState.RUNNING, worker=worker)
    assert apply(database, pretended) == set()

    with hand(database) as dba:
        for column in ("state = 'succeeded'", "state = 'dead'", "finished_at = run_at"):
            with pytest.raises(DATABASE_ERRORS):
                dba.sql(f"UPDATE onward.job SET {column} WHERE id = :id", id=id_)
        with pytest.raises(DATABASE_ERRORS):
            dba.sql("DELETE FROM onward.job WHERE id = :id", id=id_)
    assert get(database, id_) == job
    assert database.read(store.attempts, id_) == []


def test_a_completed_attempt_cannot_change(database: Database) -> None:
    """What ended stays ended as it did: for its own worker, for the next one, and for a DBA."""
    worker = register(database)
    first = running(database, worker)
    apply(database, retry(first))
    history = database.read(store.attempts, first.id)
    for late in (succeed(first), retry(first, error="another"), bury(first)):
        assert apply(database, late) == set()
    (second,) = claim(database, worker)
    assert apply(database, succeed(second, '"done"')) == {second.id}
    for late in (succeed(second, '"other"'), retry(second), retry(first)):
        assert apply(database, late) == set()
    assert database.read(store.attempts, first.id)[:1] == history
    record = database.read(store.record, first.id)
    assert record.result == '"done"'
    with hand(database) as dba:
        for text in (
            "UPDATE onward.attempt SET error = 'none' WHERE job = :id",
            "UPDATE onward.attempt SET state = 'succeeded', event = 'succeed' WHERE job = :id",
            "UPDATE onward.finished SET result = '1' WHERE id = :id",
            "UPDATE onward.finished SET attempt_state = 'failed' WHERE id = :id",
        ):
            with pytest.raises(DATABASE_ERRORS, match="refuses"):
                dba.sql(text, id=first.id)
    assert database.read(store.record, first.id) == record


def test_two_workers_cannot_both_claim_the_same_job(database: Database) -> None:
    """Four workers, each with a database of its own, race for the same jobs: every job has exactly
    one owner.
    """
    racers = 4
    with ExitStack() as stack:
        databases = [stack.enter_context(opened(database)) for _ in range(racers)]
        workers = [register(one) for one in databases]
        ids = enqueue(database, 150)
        start = threading.Barrier(racers)

        def race(one: Database, worker: str) -> list[Job]:
            start.wait()
            mine: list[Job] = []
            while found := claim(one, worker, 7):
                mine += found
            return mine

        with ThreadPoolExecutor(racers) as pool:
            claims = list(pool.map(race, databases, workers))
    owners = Counter(job.id for claim_ in claims for job in claim_)
    assert set(owners) == set(ids)
    assert max(owners.values()) == 1
    for worker, mine in zip(workers, claims, strict=True):
        assert {job.id for job in database.read(store.owned, worker)} == {job.id for job in mine}
