"""Due jobs that nobody starts although slots are free: a worker that beats and does not claim.

In:  what `look` has seen.    Out: an `OverdueLine` for each task that a worker leaves lying.
One look cannot tell: with each job that ends a slot is free for a moment, and to a machine that
slept everything is overdue at once. So a suspicion is watched for a while, and dropped as soon as
the worker has begun a job or is busy, or the jobs get fewer. Where none is, nothing more is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import monotonic, sleep

from onward.overview import (
    OverdueLine,
    Overview,
    TaskLine,
    WorkerLine,
    elapsed,
    read_tasks,
    read_workers,
)
from onward.store import store
from onward.store.database import Database

PATIENCE = 15.0
"""For how many seconds a due job may wait beside a free slot: far more than a claim ever takes."""

WATCH = 2.0
"""For how many seconds a suspicion is watched: well over the bound of a claim on an idle worker."""

LOOK_AGAIN = 0.25


_Suspicions = dict[tuple[str, str, str], OverdueLine]
"""By queue, task and worker."""


def watch(database: Database, seen: Overview) -> list[OverdueLine]:
    """Which due jobs are left lying, by workers that have slots free for them all the time."""
    found = _suspicions(database, seen.tasks, seen.workers)
    end = monotonic() + WATCH
    while found and monotonic() < end:
        sleep(LOOK_AGAIN)
        now = _suspicions(database, read_tasks(database), read_workers(database))
        found = {
            key: now[key]
            for key, before in found.items()
            if key in now and not _moves(before, now[key])
        }
    return list(found.values())


def _moves(before: OverdueLine, now: OverdueLine) -> bool:
    """Whether the worker has begun a job, or somebody the jobs."""
    return now.newest > before.newest or now.jobs.due < before.jobs.due


def _suspicions(
    database: Database, tasks: Iterable[TaskLine], workers: Iterable[WorkerLine]
) -> _Suspicions:
    late = [line for line in tasks if line.oldest > PATIENCE]
    if not late:
        return {}
    now = database.read(store.now)
    claiming = [worker for worker in workers if worker.claims and not _is_new(worker, now)]
    held = _held(database, claiming)
    ended = dict(database.read(store.read, "newest_ended", seconds=2 * WATCH))
    found: _Suspicions = {}
    for worker in claiming:
        own = held.get(worker.id, {})
        newest = max([ended.get(worker.id) or 0.0, *(begun for _, begun in own.values())])
        for line in late:
            if (free := _free(worker, line, own)) > 0:
                found[line.queue, line.task, worker.id] = OverdueLine(line, worker, free, newest)
    return found


def _is_new(worker: WorkerLine, now: float) -> bool:
    """Whether it has not had the time yet to claim what was due before it came."""
    return (elapsed(worker.started_at, now) or 0.0) < PATIENCE


_Held = Mapping[str, tuple[int, float]]
"""What a worker runs of each queue: how many jobs, and when it began the newest of them."""


def _held(
    database: Database, workers: Iterable[WorkerLine]
) -> dict[str, dict[str, tuple[int, float]]]:
    found: dict[str, dict[str, tuple[int, float]]] = {}
    ids = store.dumps([worker.id for worker in workers])
    for worker, queue, count, newest in database.read(store.read, "held", ids=ids):
        found.setdefault(worker, {})[queue] = (count, newest)
    return found


def _free(worker: WorkerLine, line: TaskLine, held: _Held) -> int:
    """How many slots a worker surely has for these jobs. One that runs others of the queue may be
    at a limit that it was given for the queue: only the worker itself knows.
    """
    if line.queue not in worker.queues or line.task not in worker.tasks or line.queue in held:
        return 0
    return worker.concurrency - sum(count for count, _ in held.values())
