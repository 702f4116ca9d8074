"""What every database must show alike where a job refuses to be claimed: the claim around it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from onward.lifecycle import JobState
from onward.store import store
from onward.store.database import Database, Refused
from tests.store.builders import (
    LANE,
    START,
    TASK,
    claim,
    claimed,
    enqueue,
    get,
    hand,
    in_state,
    new_id,
    register,
    state_of,
)
from tests.support import stubborn

TASKS = store.dumps([TASK])


def due(database: Database, **where: object) -> list[str]:
    """The ids that a claim of the usual lane would take, or of another one."""
    asked = {"tasks": TASKS, "lane": LANE, "after": START, "limit": 10, "leave": ()} | where
    return database.run(store.due, *asked.values())  # type: ignore[arg-type]


def around(
    database: Database, worker: str, *, leave: Sequence[str] = (), limit: int = 10
) -> list[str]:
    """The ids of a claim around those to leave alone."""
    found = database.run(store.claim_around, worker, TASKS, LANE, START, limit, leave)
    return [each.job.id for each in found]


def test_due_is_what_a_claim_would_take(database: Database) -> None:
    """Of one lane, of known tasks, due, in order, behind a place, and no more than asked for."""
    ids = enqueue(database, 4)
    others = [
        *enqueue(database, priority=1),
        *enqueue(database, queue="other"),
        *enqueue(database, task="unknown"),
        *enqueue(database, delay=3600.0),
    ]
    assert due(database) == ids
    assert due(database, limit=2) == ids[:2]
    assert due(database, leave=[ids[0], ids[2], new_id()]) == [ids[1], ids[3]]
    assert due(database, limit=2, leave=[ids[0]]) == ids[1:3]
    assert due(database, lane=(LANE[0], 1)) == others[:1]
    assert due(database, lane=("other", LANE[1])) == others[1:2]
    first, *_ = claimed(database, register(database), 1)
    assert due(database, after=(first.run_at, first.job.id)) == ids[1:]
    assert [get(database, id_).state for id_ in ids[1:]] == ["queued"] * 3


def test_a_claim_around_some_jobs_is_a_claim_of_the_others(database: Database) -> None:
    """The jobs come as a claim hands them over, in the same order."""
    worker, ids = register(database), enqueue(database, 6)
    leave = [ids[0], ids[3]]
    assert around(database, worker, leave=leave, limit=3) == [ids[1], ids[2], ids[4]]
    assert around(database, worker, leave=leave) == [ids[5]]
    assert around(database, worker, leave=leave) == []
    taken = database.read(store.get, ids[1])
    assert (taken.state, taken.worker, taken.attempt) == ("running", worker, 1)
    assert [job.id for job in claim(database, worker)] == [ids[0], ids[3]]


def test_these_jobs_are_claimed_if_they_are_due(database: Database) -> None:
    """And only by an active worker."""
    worker = register(database)
    dead = in_state(database, JobState.DEAD).id
    (one,), (later,) = enqueue(database), enqueue(database, delay=3600.0)
    stopped = register(database)
    database.run(store.stop, stopped, "stopped")
    ids = [one, later, dead, new_id()]
    assert database.run(store.claim_these, stopped, ids) == []
    (taken,) = database.run(store.claim_these, worker, ids)
    assert taken.job == get(database, one)
    assert (taken.job.state, taken.job.worker) == ("running", worker)
    assert database.run(store.claim_these, worker, ids) == []
    assert state_of(database, later) is JobState.QUEUED


def test_concurrent_claims_around_a_job_share_the_others(database: Database) -> None:
    """No job goes to two workers, and none waits for another's lock to end."""
    ids = enqueue(database, 40)
    workers = [register(database) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(partial(around, database, leave=[ids[5]], limit=40), workers))
    assert sorted(id_ for each in found for id_ in each) == sorted({*ids} - {ids[5]})


@pytest.mark.parametrize("way", stubborn.WAYS)
def test_a_job_that_refuses_makes_a_claim_fail_as_a_whole(database: Database, way: str) -> None:
    """A rule that a row breaks, and a trigger that says no, are refusals: nothing is claimed, and
    the claim around it takes the others.
    """
    refuse, mend, words = stubborn.WAYS[way]
    worker, ids = register(database), enqueue(database, 5)
    refuse(database, [ids[2]])
    with pytest.raises(Refused, match=words):
        claim(database, worker)
    with pytest.raises(Refused, match=words):
        database.run(store.claim_these, worker, ids)
    assert due(database) == ids
    assert around(database, worker, leave=[ids[2]]) == [*ids[:2], *ids[3:]]
    mend(database)
    assert [job.id for job in claim(database, worker)] == [ids[2]]


@pytest.mark.timeout(30)
def test_a_claim_around_some_jobs_waits_for_no_lock(pg: Database) -> None:
    """Another worker that claims at the same time has locked what it takes; a claim of these does
    not wait for it either.
    """
    worker, ids = register(pg), enqueue(pg, 4)
    with hand(pg) as other, other.undone():
        other.sql("SELECT 1 FROM onward.job WHERE id = :id FOR UPDATE", id=ids[0])
        assert due(pg) == ids[1:]
        assert around(pg, worker, leave=[ids[1]]) == ids[2:]
        taken = pg.run(store.claim_these, worker, ids[:2])
        assert [each.job.id for each in taken] == [ids[1]]
