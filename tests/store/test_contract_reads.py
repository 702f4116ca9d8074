"""What every database must show alike to those who look: records, pages, counts, retention."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from onward.errors import JobNotFound
from onward.lifecycle import JobState
from onward.store import store
from onward.store.database import Database
from onward.store.sqlite import SqliteDatabase
from tests.store.builders import (
    apply,
    bury,
    claim,
    enqueue,
    get,
    hand,
    in_state,
    new_id,
    register,
    retry,
    running,
    shift_clock,
    succeed,
)


def rows(database: Database, name: str, **params: Any) -> list[tuple[Any, ...]]:
    return database.read(store.read, name, **params)


def page(database: Database, **filters: Any) -> list[str]:
    """The ids of one page of the list."""
    values = {"before": None, "state": None, "queue": None, "task": None, "limit": 100} | filters
    return [row[0] for row in rows(database, "list", **values)]


# --- one job --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", JobState)
def test_a_job_is_found_in_whatever_state_it_is(database: Database, state: JobState) -> None:
    """One view of both tables: no reader has to know where a job lives."""
    job = in_state(database, state)
    assert job.state is state
    record = database.read(store.record, job.id)
    assert record.job == job
    owned = state in {JobState.RUNNING, JobState.CANCELLING}
    over = state in {JobState.SUCCEEDED, JobState.CANCELLED, JobState.DEAD}
    assert (record.started_at is not None) == (owned or over)
    assert (record.finished_at is not None) == over
    assert page(database) == [job.id]


def test_a_job_that_does_not_exist_is_not_found(database: Database) -> None:
    """The error names the id that was asked for."""
    missing = new_id()
    for read in (store.get, store.record):
        with pytest.raises(JobNotFound, match=missing):
            database.read(read, missing)
    assert database.read(store.attempts, missing) == []
    assert database.read(store.refusals, missing) == []


def test_a_read_on_a_loop_waits_for_none_of_its_threads(database: Database) -> None:
    """They may all be taken: by `asyncio.to_thread` in bodies, or by names that are looked up."""
    release = threading.Event()

    async def main() -> dict[str, int]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        await database.aread(store.counts)
        taken = loop.run_in_executor(None, release.wait, 20)
        try:
            async with asyncio.timeout(5):
                return await database.aread(store.counts)
        finally:
            release.set()
            await taken
            await database.close_loop()

    assert asyncio.run(main())["queued"] == 0


def test_the_clock_is_the_databases_own(database: Database) -> None:
    """Every time comes from there, so it can be set for a test, and an hour's error of a worker
    does no harm.
    """
    assert database.read(store.now) == pytest.approx(time.time(), abs=2)
    shift_clock(database, 7200)
    assert database.read(store.now) == pytest.approx(time.time() + 7200, abs=2)


def test_several_jobs_are_read_at_once_wherever_they_are(database: Database) -> None:
    """Live and finished ones; what does not exist is left out."""
    jobs = [in_state(database, state, priority=n) for n, state in enumerate(JobState)]
    found = database.read(store.among, [*(job.id for job in jobs), new_id()])
    assert sorted(found, key=lambda job: job.id) == jobs
    assert database.read(store.among, []) == []


# --- pages ----------------------------------------------------------------------------------------


def test_pages_go_through_all_jobs_newest_first_without_gaps(database: Database) -> None:
    """A page is keyed by the last id of the one before, across live and finished jobs alike."""
    ids = enqueue(database, 7)
    jobs = claim(database, register(database), 4)
    apply(database, succeed(jobs[0]), succeed(jobs[2]), bury(jobs[3]))
    seen: list[str] = []
    before = None
    while found := page(database, before=before, limit=3):
        seen += found
        before = found[-1]
    assert seen == ids[::-1]


def test_the_list_filters_by_state_queue_and_task_as_they_are_written(database: Database) -> None:
    """No character is a wildcard, and filters may be combined."""
    (mail,) = enqueue(database, queue="mail", task="a.b")
    (other,) = enqueue(database, queue="m%", task="a_b")
    done = in_state(database, JobState.SUCCEEDED)
    assert page(database, queue="mail") == [mail]
    assert page(database, queue="m%") == [other]
    assert page(database, task="a_b") == [other]
    assert page(database, state="succeeded") == [done.id]
    assert page(database, state="queued", queue="mail", task="a.b") == [mail]
    assert page(database, state="queued", queue="mail", task="a_b") == []


def test_the_list_shows_what_a_table_needs(database: Database) -> None:
    """The columns stand in the order in which the screens read them."""
    job = in_state(database, JobState.CANCELLED)
    (row,) = rows(database, "list", before=None, state=None, queue=None, task=None, limit=10)
    record = database.read(store.record, job.id)
    assert row[:7] == (job.id, job.task, job.queue, 0, "cancelled", 1, job.worker)
    assert row[7:11] == (job.max_attempts, job.max_losses, job.failures, job.losses)
    assert row[11:15] == (
        record.run_at,
        record.started_at,
        record.finished_at,
        record.created_at,
    )
    assert row[15] == "not wanted"


def test_ids_are_found_by_their_first_characters(database: Database) -> None:
    """People type a few characters; live and finished jobs are looked through, five at most."""
    live, done = enqueue(database, 1)[0], in_state(database, JobState.SUCCEEDED).id
    lowest, highest = "0" * 8, "f" * 8
    tail = "-{0}{0}{0}{0}-{0}{0}{0}{0}-{0}{0}{0}{0}-{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}"
    bounds = {"low": lowest + tail.format("0"), "high": highest + tail.format("f")}
    assert [row[0] for row in rows(database, "ids_like", **bounds)] == [live, done]
    assert rows(database, "ids_like", low=live, high=live) == [(live,)]
    enqueue(database, 9)
    assert len(rows(database, "ids_like", **bounds)) == 5


def test_dead_jobs_are_listed_with_their_last_error(database: Database) -> None:
    """Quarantine on one page: newest first, filtered, long errors cut."""
    dead = [in_state(database, JobState.DEAD) for _ in range(2)]
    worker = register(database)
    job = running(database, worker)
    apply(database, retry(job, error="first"))
    (job,) = claim(database, worker)
    apply(database, bury(job, error="x" * 5000, reason="timeout"))
    in_state(database, JobState.CANCELLED)
    found = rows(database, "dead", before=None, queue=None, task=None, until=None, limit=10)
    assert [row[0] for row in found] == [job.id, dead[1].id, dead[0].id]
    assert found[0][1:6] == (job.task, job.queue, 2, 2, 0)
    assert found[0][6] == database.read(store.record, job.id).finished_at
    assert (found[0][7], found[0][8]) == ("timeout", "x" * 2000)
    assert found[1][8] == "boom"
    rest = rows(
        database, "dead", before=job.id, queue="default", task=job.task, until=None, limit=1
    )
    assert [row[0] for row in rest] == [dead[1].id]
    everything: dict[str, Any] = {"before": None, "until": None, "limit": 10}
    assert rows(database, "dead", queue="mail", task=None, **everything) == []
    assert rows(database, "dead", queue=None, task="other", **everything) == []


# --- counts ---------------------------------------------------------------------------------------


def test_counts_name_every_state(database: Database) -> None:
    """A state without jobs is 0 and not missing, and no job is counted twice."""
    assert database.read(store.counts) == {state.value: 0 for state in JobState}
    for number, state in enumerate(JobState, 1):
        for _ in range(number):
            in_state(database, state, priority=number)
            claim(database, register(database), lane=("default", 0))
    counts = database.read(store.counts)
    assert set(counts) == set(JobState)
    assert sum(counts.values()) == 28
    assert counts["dead"] == 7


def test_queues_show_what_is_due_and_for_how_long(database: Database) -> None:
    """Per queue and state: how many, how many of them due, and the age of the oldest due one."""
    enqueue(database, 2)
    enqueue(database, 1, delay=500.0)
    enqueue(database, 1, queue="mail", delay=500.0)
    in_state(database, JobState.DEAD, priority=1)
    shift_clock(database, 100)
    found = {row[:2]: row[2:] for row in rows(database, "queues")}
    assert set(found) == {("default", "queued"), ("default", "dead"), ("mail", "queued")}
    count, due, oldest = found["default", "queued"]
    assert (count, due) == (3, 2)
    assert oldest == pytest.approx(100, abs=5)
    assert found["mail", "queued"] == (1, 0, None)
    assert found["default", "dead"] == (1, 0, None)


def test_due_jobs_are_counted_by_queue_and_task(database: Database) -> None:
    """Held against what live workers know, this shows the tasks that nobody runs."""
    enqueue(database, 2, task="b")
    enqueue(database, 1, task="a", queue="mail")
    enqueue(database, 1, task="c", delay=500.0)
    in_state(database, JobState.RUNNING, priority=1)
    assert rows(database, "waiting_tasks") == [("default", "b", 2), ("mail", "a", 1)]


def test_due_jobs_are_aged_by_queue_and_task(database: Database) -> None:
    """Over all priorities, each counted once; what is due tomorrow does not count."""
    assert rows(database, "due_tasks") == []
    for age, priority in ((100, 0), (300, -3), (200, 7)):
        shift_clock(database, -age)
        enqueue(database, 2, task="b", priority=priority)
    shift_clock(database, -50)
    enqueue(database, 1, task="a", queue="mail")
    shift_clock(database, 0)
    enqueue(database, 1, task="c", delay=500.0)
    enqueue(database, 1, task="c", queue="later", delay=500.0)
    found = {row[:2]: row[2:] for row in rows(database, "due_tasks")}
    assert found == {
        ("default", "b"): (6, pytest.approx(300, abs=5)),
        ("mail", "a"): (1, pytest.approx(50, abs=5)),
    }


def test_what_workers_hold_is_counted_by_queue(database: Database) -> None:
    """How many, and when the newest of them began: a worker that claims is seen by that."""
    mine, other = (register(database, lease=1e6) for _ in range(2))
    ids = store.dumps([mine])
    assert rows(database, "held", ids=ids) == []
    shift_clock(database, -100)
    running(database, mine)
    shift_clock(database, 0)
    running(database, mine)
    running(database, other)
    found = rows(database, "held", ids=ids)
    (now,) = rows(database, "now")
    assert [row[:3] for row in found] == [(mine, "default", 2)]
    assert found[0][3] == pytest.approx(now[0], abs=5)


def test_what_ended_lately_tells_when_its_worker_began_it(database: Database) -> None:
    """The newest of each worker, of those that ended within the last so many seconds."""
    busy, idle = (register(database, lease=1e6) for _ in range(2))
    shift_clock(database, -100)
    apply(database, succeed(running(database, idle)))
    shift_clock(database, -50)
    first = running(database, busy)
    shift_clock(database, -20)
    second = running(database, busy)
    shift_clock(database, 0)
    for job in (second, first):
        apply(database, succeed(job))
    ((now,),) = rows(database, "now")
    ((worker, began),) = rows(database, "newest_ended", seconds=10.0)
    assert worker == busy
    assert began == pytest.approx(now - 20, abs=5)


def test_pages_of_what_waits_follow_each_other(database: Database) -> None:
    """Queued and waiting jobs, newest first, by any of their names and by age."""
    shift_clock(database, -100)
    old = enqueue(database, 2)
    shift_clock(database, 0)
    new = enqueue(database, 1, queue="mail", task="a", delay=60.0)
    waits = in_state(database, JobState.WAITING, priority=1).id
    in_state(database, JobState.RUNNING, priority=2)
    in_state(database, JobState.DEAD, priority=3)

    def ids(**given: Any) -> list[str]:
        some = {"before": None, "queue": None, "task": None, "until": None, "limit": 10} | given
        return [row[0] for row in rows(database, "pending", **some)]

    (now,) = rows(database, "now")
    assert ids() == sorted([*old, *new, waits], reverse=True)
    assert ids(before=ids()[1], limit=1) == [ids()[2]]
    assert ids(queue="mail") == ids(task="a") == new
    assert ids(until=now[0] - 50) == sorted(old, reverse=True)


def test_recent_ends_are_counted_by_state(database: Database) -> None:
    """The rate that people watch: what ended within the last so many seconds."""
    in_state(database, JobState.CANCELLED)
    shift_clock(database, 100)
    in_state(database, JobState.SUCCEEDED)
    in_state(database, JobState.SUCCEEDED)
    assert dict(rows(database, "finished_since", seconds=50.0)) == {"succeeded": 2}
    assert dict(rows(database, "finished_since", seconds=500.0)) == {
        "succeeded": 2,
        "cancelled": 1,
    }


# --- retention ------------------------------------------------------------------------------------


def aged(database: Database, state: JobState, age: float) -> str:
    """A job with an attempt in its history and a refusal, which ended so long ago."""
    shift_clock(database, -age)
    worker = register(database, lease=1e9)
    job = running(database, worker)
    apply(database, retry(job))
    database.run(store.refuse, [store.refusal_of(succeed(job), None)])
    (job,) = claim(database, worker, 500)
    if state is JobState.SUCCEEDED:
        apply(database, succeed(job))
    elif state is JobState.DEAD:
        apply(database, bury(job))
    shift_clock(database, 0)
    return job.id


def leftovers(database: Database) -> tuple[int, int]:
    """How many attempts and refusals belong to no job that is still there."""
    with hand(database) as dba:
        (attempts,) = dba.sql(
            "SELECT count(*) FROM onward.attempt WHERE job NOT IN (SELECT id FROM onward.jobs)"
        )
        (refusals,) = dba.sql(
            "SELECT count(*) FROM onward.refusal WHERE job NOT IN (SELECT id FROM onward.jobs)"
        )
    return attempts[0], refusals[0]


def test_pruning_takes_the_oldest_in_steps_with_their_history(database: Database) -> None:
    """Each step is small; what goes leaves nothing behind, and what is young enough stays whole."""
    ids = [aged(database, JobState.SUCCEEDED, age) for age in (500, 400, 300, 20, 10)]
    steps = [database.run(store.prune, JobState.SUCCEEDED, 100.0, 2) for _ in range(3)]
    assert steps == [2, 1, 0]
    assert page(database) == sorted(ids[3:], reverse=True)
    for id_ in ids[:3]:
        assert database.read(store.attempts, id_) == []
        assert database.read(store.refusals, id_) == []
    for id_ in ids[3:]:
        assert len(database.read(store.attempts, id_)) == 2
        assert len(database.read(store.refusals, id_)) == 1
    assert leftovers(database) == (0, 0)


def test_what_a_prune_would_take_is_known_beforehand(database: Database) -> None:
    """A rehearsal: the number that is told is the number that goes."""
    for age in (500, 300, 20):
        aged(database, JobState.SUCCEEDED, age)
    aged(database, JobState.DEAD, 500)
    assert rows(database, "prunable", keep=100.0, state="succeeded") == [(2,)]
    assert database.run(store.prune, JobState.SUCCEEDED, 100.0, 10) == 2
    assert rows(database, "prunable", keep=100.0, state="succeeded") == [(0,)]


def test_pruning_takes_the_oldest_first(database: Database) -> None:
    """A step that is full has left only younger ones."""
    young, old = aged(database, JobState.SUCCEEDED, 300), aged(database, JobState.SUCCEEDED, 900)
    assert database.run(store.prune, JobState.SUCCEEDED, 100.0, 1) == 1
    assert page(database) == [young]
    with pytest.raises(JobNotFound):
        database.read(store.get, old)


def test_pruning_leaves_other_states_and_live_jobs_alone(database: Database) -> None:
    """Each state has its own retention, and nothing that may still move is ever pruned."""
    done = aged(database, JobState.SUCCEEDED, 900)
    dead = aged(database, JobState.DEAD, 900)
    owned = aged(database, JobState.RUNNING, 900)
    for state in (JobState.CANCELLED, JobState.DEAD, JobState.RUNNING, JobState.QUEUED):
        assert database.run(store.prune, state, 100.0, 10) == 0
    assert {done, dead, owned} == set(page(database))
    assert get(database, owned).state is JobState.RUNNING


@pytest.mark.parametrize("calls", range(1, 12))
def test_a_prune_is_one_moment_while_time_goes_on(sqlite: Database, calls: int) -> None:
    """A job that comes of age between the parts of one step waits for the next, so no history loses
    its job.
    """
    assert isinstance(sqlite, SqliteDatabase)
    id_ = aged(sqlite, JobState.SUCCEEDED, 900)
    ended = sqlite.read(store.record, id_).finished_at
    assert ended is not None
    asked = itertools.count()
    sqlite.clock = lambda: ended + 100 + (1 if next(asked) >= calls else -1)
    sqlite.run(store.prune, JobState.SUCCEEDED, 100.0, 10)
    assert leftovers(sqlite) == (0, 0)
    sqlite.run(store.prune, JobState.SUCCEEDED, 100.0, 10)
    assert leftovers(sqlite) == (0, 0)
