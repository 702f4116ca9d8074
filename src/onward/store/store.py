"""What the store can do, in no dialect: each operation yields statements and returns what it found.

In:  values from the words (`NewJob`, `Change`).    Out: rows as values, and which writes took.
Every write is conditional on what its writer saw. The store decides nothing: a sweep is handed its
decision as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from enum import IntEnum
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from onward.errors import IdConflict, JobNotFound
from onward.job import Attempt, Change, Job, NewJob
from onward.lifecycle import TERMINAL, AttemptState, Event, JobState
from onward.store import portions
from onward.store.database import Again
from onward.store.statements import Op, Statement
from onward.store.stored import stored_text

MOST_OWNED = 100_000
"""More jobs than one worker can own."""

FIRST_ID = "00000000-0000-0000-0000-000000000000"

LEAST_STEP = 2.0
"""Seconds by which the database's clock must have gone back before anything is moved."""


class Claimed(Struct, frozen=True):
    """A job that this worker now owns, and its due time: the place in the queue where the next
    claim goes on.
    """

    job: Job
    run_at: float


class Lane(Struct, frozen=True):
    """A (queue, priority) pair that has queued jobs; the first is due in `due_in` seconds (0 or
    less: now), which is at `first`. `known`: of tasks that whoever looks may claim.
    """

    queue: str
    priority: int
    due_in: float
    first: float = 0.0
    known: bool = True


class Record(Struct, frozen=True, kw_only=True):
    """Everything that is known of one job. Times are in seconds since the epoch."""

    job: Job
    run_at: float
    started_at: float | None
    finished_at: float | None
    created_at: float
    event: str | None
    reason: str | None
    error: str | None
    result: str | None


class Refusal(Struct, frozen=True, kw_only=True):
    """A write that was refused: what its writer expected, and what was found instead."""

    job: str
    event: str
    attempt: int
    worker: str | None
    expected: str
    found: str | None
    found_attempt: int | None
    found_worker: str | None
    detail: str | None
    at: float | None = None


class Registration(Struct, frozen=True, kw_only=True):
    """A worker as it introduces itself. `lease` is in seconds; `lock_path` proves its death where
    there is one file.
    """

    id: str
    name: str
    host: str
    pid: int
    version: str
    queues: tuple[str, ...]
    tasks: tuple[str, ...]
    concurrency: int
    lease: float
    lock_path: str | None = None


class Lease(Struct, frozen=True):
    """A live worker's lease as a sweeper sees it: its end and its last renewal (both opaque),
    whether the database's clock is past its end, and whether it has gone back since that renewal.
    """

    worker: str
    until: float
    over: bool
    lock_path: str | None
    beat: float = 0.0
    ahead: bool = False


def dumps(value: Any) -> str:
    """A batch as one JSON text."""
    return msgspec.json.encode(value).decode()


# --- jobs -----------------------------------------------------------------------------------------


class Wake(IntEnum):
    """What an enqueue leaves to be done for workers that wait."""

    NOBODY = 0
    TOLD = 1
    WANTED = 2


def enqueue(jobs: Sequence[NewJob], *, alone: bool = True) -> Op[Wake]:
    """Write new jobs, each of them for the first time. Returns whether somebody is to be woken.
    `alone`: its transaction consists of nothing else.
    """
    alike = _alike(jobs)
    if alike is None:
        rows = yield Statement("enqueue", {"jobs": dumps(jobs)}, alone)
    else:
        own = [(job.id, job.args, job.run_at, job.delay) for job in jobs]
        rows = yield Statement("enqueue_alike", {"jobs": dumps(own), "alike": dumps(alike)}, alone)
    return Wake.WANTED if rows and rows[0][0] else Wake.NOBODY


_ALIKE = ("task", "queue", "priority", "max_attempts", "max_losses", "timeout")
_kind_of = attrgetter(*_ALIKE)


def _alike(jobs: Sequence[NewJob]) -> dict[str, Any] | None:
    """What all of these jobs have in common beside their ids, arguments and times; None: it is not
    all the same.
    """
    if not jobs:
        return None
    kind = _kind_of(jobs[0])
    if any(_kind_of(job) != kind for job in jobs):
        return None
    return dict(zip(_ALIKE, kind, strict=True))


def enqueue_one(job: NewJob, *, wake: bool = False) -> Op[Wake]:
    """The same for one job, through a connection of ours: not every driver of a caller's takes
    plain parameters of each type. `wake`: an idle worker may be told with the commit.
    """
    rows = yield Statement("enqueue_one", asdict(job) | {"wake": wake})
    return Wake(rows[0][0]) if rows else Wake.NOBODY


def enqueue_ours(jobs: Sequence[NewJob], *, wake: bool = False) -> Op[Wake]:
    """The quicker of the two."""
    return enqueue_one(jobs[0], wake=wake) if len(jobs) == 1 else enqueue(jobs)


def _same_text(job: NewJob, args: str) -> bool:
    return job.args == args


def _same_json(job: NewJob, args: str) -> bool:
    """Whether it is the same JSON, in whatever order its mappings stand. What a signature may know
    beyond that (a set, an int for a float) is not known here.
    """
    try:
        return job.args == args or _sorted(job.args) == _sorted(args)
    except (ValueError, RecursionError):  # Stored by a foreign hand.
        return False


def _sorted(text: str) -> bytes:
    return msgspec.json.encode(msgspec.json.decode(text), order="deterministic")


def enqueue_again(
    jobs: Sequence[NewJob], same: Callable[[NewJob, str], bool] = _same_text
) -> Op[set[str]]:
    """Write those of the jobs that are not there yet; returns the ids that were new.

    Args:
        jobs: calls that may be there already.
        same: whether stored arguments, of a job of the same task, are those of this call.

    Raises:
        IdConflict: an id belongs to a call of another task or with other arguments.
    """
    first: dict[str, NewJob] = {}
    for job in jobs:
        other = first.setdefault(job.id, job)
        if other.task != job.task or not same(job, other.args):
            raise _conflict(job.id, other.task)
    rows = yield Statement("enqueue_again", {"jobs": dumps(jobs)}, alone=False)
    born: set[str] = {row[0] for row in rows}
    # A job may have ended between the two statements: then roll back, and look again with that
    # known.
    rows = yield Statement("finished_among", {"ids": dumps([job.id for job in jobs])}, alone=False)
    if any(row[0] in born for row in rows):
        raise Again
    there = [job for job in jobs if job.id not in born]
    if there:
        yield from _check_same(there, same)
    return born


def _check_same(jobs: Sequence[NewJob], same: Callable[[NewJob, str], bool]) -> Op[None]:
    rows = yield Statement("calls", {"ids": dumps([job.id for job in jobs])}, alone=False)
    known = {row[0]: (row[1], stored_text(row[2])) for row in rows}
    for job in jobs:
        if job.id not in known:
            raise Again  # It was there, and was pruned just now.
        task, args = known[job.id]
        if task != job.task or not same(job, args):
            raise _conflict(job.id, task)


def _conflict(id: str, task: str) -> IdConflict:
    return IdConflict(
        f"job id {id} belongs to another call, of {task}",
        why="an explicit id makes an enqueue repeatable: the same id means the same call",
        fix="use a new id for a new call; uuid.uuid5(namespace, key) makes one from your key",
    )


def claim(
    worker: str,
    tasks: str,
    lane: tuple[str, int],
    after: tuple[float, str],
    limit: int,
) -> Op[list[Claimed]]:
    """Claim up to `limit` due jobs of one lane, in order.

    Args:
        worker: who claims.
        tasks: the names of the tasks it knows, as a JSON list.
        lane: the queue and the priority.
        after: due time and id of the last job claimed there, or `(0, FIRST_ID)` to look from the
            start.
        limit: how many at most.
    """
    place = _place(tasks, lane, after, limit)
    rows = yield Statement("claim", {"worker": worker, **place})
    rows.sort(key=_FIRST)
    return [_won(row, worker, lane) for row in rows]


_FIRST = itemgetter(10, 0)  # The due time, then the id.


def _won(row: tuple[Any, ...], worker: str, lane: tuple[str, int]) -> Claimed:
    """A row of `claim`, which leaves out what its caller knows."""
    id, task, attempt, *rest, due = row
    return Claimed(_job((id, task, *lane, JobState.RUNNING.value, attempt, worker, *rest)), due)


def _place(
    tasks: str, lane: tuple[str, int], after: tuple[float, str], limit: int
) -> dict[str, Any]:
    """Where a claim goes on, as its statements are told."""
    return {
        "tasks": tasks,
        "queue": lane[0],
        "priority": lane[1],
        "after_time": after[0],
        "after_id": after[1],
        "limit": limit,
    }


def due(
    tasks: str,
    lane: tuple[str, int],
    after: tuple[float, str],
    limit: int,
    leave: Collection[str],
    *,
    alone: bool = True,
) -> Op[list[str]]:
    """The ids of the jobs that such a claim would take, without those to `leave` alone."""
    place = _place(tasks, lane, after, limit)
    rows = yield Statement("due", {"leave": dumps(list(leave)), **place}, alone)
    return [row[0] for row in rows]


def claim_these(worker: str, ids: Sequence[str], *, alone: bool = True) -> Op[list[Claimed]]:
    """Claim those of these jobs that are still due."""
    rows = yield Statement("claim_these", {"worker": worker, "ids": dumps(ids)}, alone)
    rows.sort(key=_PLACE)
    return [Claimed(_job(row), row[14]) for row in rows]


_PLACE = itemgetter(14, 0)


def claim_around(
    worker: str,
    tasks: str,
    lane: tuple[str, int],
    after: tuple[float, str],
    limit: int,
    leave: Collection[str],
) -> Op[list[Claimed]]:
    """The same as `claim`, around the jobs to `leave` alone."""
    ids = yield from due(tasks, lane, after, limit, leave, alone=False)
    return (yield from claim_these(worker, ids, alone=False)) if ids else []


def lanes(queues: Iterable[str], tasks: Container[str] | None = None) -> Op[list[Lane]]:
    """Which lanes of these queues have queued jobs, the highest priority first. With `tasks`, where
    the database can tell: one of what is of these tasks, and one of what is of others.
    """
    rows = yield Statement("lanes", {"queues": dumps(list(queues))})
    found: dict[tuple[str, int, bool], Lane] = {}
    for queue, priority, task, first, due_in in rows:
        known = task is None or tasks is None or task in tasks
        lane = Lane(queue, priority, due_in, first, known)
        other = found.setdefault((queue, priority, known), lane)
        if lane.due_in < other.due_in:
            found[queue, priority, known] = lane
    return list(found.values())


def apply(changes: Sequence[Change]) -> Op[set[str]]:
    """Write the changes whose job is still as it was seen; returns the ids of those that took.

    Follow-up jobs of a change are written with it, or not at all. Of several changes of one job
    only the first can take.
    """
    kinds: dict[tuple[str | None, ...], list[Change]] = {}
    live: list[Change] = []
    seen: set[str] = set()
    for change in changes:
        if change.id in seen:
            continue
        seen.add(change.id)
        if change.after in TERMINAL:  # The same move by the same writer: nearly always the batch.
            kind = (change.event, change.before, change.ended, change.worker)
            kinds.setdefault(kind, []).append(change)
        else:
            live.append(change)
    final = [change for alike in kinds.values() for change in alike]
    alone = len(kinds) + bool(live) == 1 and not any(change.follow_ups for change in final)
    taken: set[str] = set()
    for alike in kinds.values():
        taken |= yield from _finish(alike, alone)
    if live:
        taken |= yield from _go_on(live, alone)
    born = [job for change in final if change.id in taken for job in change.follow_ups]
    for portion in portions.cut(born) if born else ():
        # One may have an id of the caller's, which may be there already.
        yield from enqueue_again(portion, _same_json)
    return taken


def _finish(changes: list[Change], alone: bool) -> Op[set[str]]:
    """Write final changes of one kind."""
    rows = yield Statement("finish", finish_params(changes), alone)
    return {row[0] for row in rows}


def finish_params(changes: Sequence[Change]) -> dict[str, Any]:
    """What `finish` is told of changes of one kind."""
    first = changes[0]
    return {
        "event": first.event.value,
        "before": first.before.value,
        "after": first.after.value,
        "ended": None if first.ended is None else first.ended.value,
        "worker": first.worker,
        "rows": dumps([_finish_row(each) for each in changes]),
    }


def _finish_row(change: Change) -> tuple[Any, ...]:
    """Nearly every job ends with a result and nothing else to be said."""
    if change.error is None and change.reason is None and not change.abandoned:
        return change.id, change.attempt, change.result
    said = change.error, change.reason, change.abandoned
    return change.id, change.attempt, change.result, *said


def _go_on(changes: list[Change], alone: bool) -> Op[set[str]]:
    """Write changes after which the job is still live."""
    rows = yield Statement("go_on", {"changes": dumps(changes)}, alone)
    return {row[0] for row in rows}


def move(id: str, decide: Callable[[Job], Change | None]) -> Op[JobState]:
    """Read one job, decide, and write if it is still as it was read; otherwise the whole is
    repeated.

    Args:
        id: of the job.
        decide: what becomes of it; None: nothing needs to be done.

    Returns:
        The state that it is in now.

    Raises:
        JobNotFound: no such job.
        IllegalTransition: raised by `decide`.
    """
    rows = yield Statement("job", {"id": id}, alone=False)
    if not rows:
        raise not_found(id)
    job = _job(rows[0])
    change = decide(job)
    if change is None:
        return job.state
    taken = yield from apply([change])
    if change.id not in taken:
        raise Again
    return change.after


def hold(job: str, attempt: int, seconds: float) -> Op[bool]:
    """Keep a queued job from being due for `seconds` from now; returns whether it is still queued
    with that attempt.
    """
    rows = yield Statement("hold", {"id": job, "attempt": attempt, "seconds": seconds})
    return bool(rows)


def due_again(
    lane: tuple[str, int], step: float, before: float, since: float, limit: int
) -> Op[list[str]]:
    """After the clock went back: move up to `limit` jobs of a lane that were due by the old time;
    returns which.

    Args:
        lane: the queue and the priority.
        step: by how many seconds it went back.
        before: what is due by then, on the old time.
        since: what was given its due time after this moment, on the new time, is left alone.
        limit: how many at most.
    """
    rows = yield Statement(
        "due_again",
        {
            "queue": lane[0],
            "priority": lane[1],
            "step": step,
            "before": before,
            "since": since,
            "limit": limit,
        },
    )
    return [row[0] for row in rows]


def look(change: Change) -> Op[tuple[Job | None, bool]]:
    """Look again at a job whose change did not take.

    Returns the job as it is now (None: gone), and whether this very change took after all: its
    answer may have been lost.
    """
    rows = yield Statement("job", {"id": change.id}, alone=False)
    past = yield Statement("attempt", {"id": change.id, "number": change.attempt}, alone=False)
    if not rows:
        return None, False
    job = _job(rows[0])
    if change.ended is not None:
        return job, bool(past) and _is_ours(_attempt(past[0]), change)
    return job, (job.state, job.attempt) == (change.after, change.next_attempt)


def _is_ours(attempt: Attempt, change: Change) -> bool:
    return (attempt.event, attempt.worker, attempt.state) == (
        change.event,
        change.worker,
        change.ended,
    )


def refuse(refusals: Sequence[Refusal]) -> Op[None]:
    """Keep refused writes as data."""
    yield Statement("refuse", {"refusals": dumps(refusals)})


def refusal_of(change: Change, found: Job | None, detail: str | None = None) -> Refusal:
    """What to keep of a change that did not take."""
    return Refusal(
        job=change.id,
        event=change.event,
        attempt=change.attempt,
        worker=change.worker,
        expected=change.before,
        found=found.state if found else None,
        found_attempt=found.attempt if found else None,
        found_worker=found.worker if found else None,
        detail=detail if detail is not None else (change.error or change.result),
    )


# --- workers --------------------------------------------------------------------------------------


def register(worker: Registration) -> Op[None]:
    """Make a process start known, with its first lease."""
    params = {name: getattr(worker, name) for name in worker.__struct_fields__}
    params |= {"queues": dumps(worker.queues), "tasks": dumps(worker.tasks)}
    yield Statement("register", params)


def beat(workers: Sequence[str], lease: float) -> Op[set[str]]:
    """Renew leases to `lease` seconds from now; returns the workers that still live."""
    rows = yield Statement("beat", {"ids": dumps(workers), "lease": lease})
    return {row[0] for row in rows}


def set_idle(worker: str, idle: bool) -> Op[None]:
    """Say whether the worker wants to be woken by enqueues."""
    yield Statement("idle", {"id": worker, "idle": idle})


def drain(worker: str) -> Op[bool]:
    """active > draining; returns whether it took."""
    rows = yield Statement("drain", {"id": worker})
    return bool(rows)


def stop(worker: str, reason: str) -> Op[bool]:
    """active or draining > stopped; returns whether it took."""
    rows = yield Statement("stop", {"id": worker, "reason": reason})
    return bool(rows)


def lose(
    worker: str,
    reason: str,
    seen: float | None = None,
    still: Callable[[], bool] | None = None,
) -> Op[bool]:
    """active or draining > lost: with the lease that was `seen`, only while it is unchanged and
    over. `still` is asked when the write's turn has come: whether it is to be made at all.
    """
    if still is not None and not still():
        return False
    rows = yield Statement("lose", {"id": worker, "reason": reason, "seen": seen})
    return bool(rows)


def leases() -> Op[list[Lease]]:
    """The leases of all live workers."""
    rows = yield Statement("leases", {"step": LEAST_STEP})
    return [Lease(row[0], row[1], bool(row[2]), row[3], row[4], bool(row[5])) for row in rows]


def redate(worker: str, seen: float, lease: float) -> Op[bool]:
    """After the clock went back: let a lease begin anew whose last renewal, `seen`, lies ahead;
    returns whether it took.

    Args:
        worker: whose lease.
        seen: only while it has not been renewed since.
        lease: how long it is if its row does not show that, in seconds.
    """
    params = {"id": worker, "seen": seen, "lease": lease, "step": LEAST_STEP}
    rows = yield Statement("redate", params)
    return bool(rows)


def sweep(
    decide: Callable[[Job, str], Change], limit: int = 500, leave: Collection[str] = ()
) -> Op[list[Change]]:
    """Take back jobs whose worker is gone, in one transaction; returns the changes that took.

    Args:
        decide: what becomes of such a job, given what is known about its worker's end.
        limit: how many at most; a full answer means that there may be more.
        leave: jobs to leave alone.
    """
    rows = yield Statement("orphans", {"limit": limit, "leave": dumps(list(leave))}, alone=False)
    if not rows:
        return []
    # Between the look and the lock another sweeper may have recovered a job, and a live worker
    # claimed it. The rows are locked now, so what this second look says stays true.
    owners = dumps(sorted({row[6] for row in rows}))
    alive = {row[0] for row in (yield Statement("live_among", {"ids": owners}, alone=False))}
    changes = [
        decide(_job(row), row[14] or "its worker vanished") for row in rows if row[6] not in alive
    ]
    if not changes:
        return []
    taken = yield from apply(changes)
    return [change for change in changes if change.id in taken]


def bury_worker(worker: str, reason: str, decide: Callable[[Job, str], Change]) -> Op[list[Change]]:
    """Declare a worker lost whose death is proven and take back every orphan there is, its own jobs
    above all, in one transaction: no other sweeper, who knows less about its end, can come between.

    Args:
        worker: who died.
        reason: what is known about its end.
        decide: what becomes of each of its jobs.
    """
    yield Statement("lose", {"id": worker, "reason": reason, "seen": None}, alone=False)
    return (yield from sweep(decide, limit=MOST_OWNED))


def owned(worker: str, held: Collection[str] = ()) -> Op[list[Job]]:
    """What the database says that this worker owns, beside the jobs that it holds."""
    rows = yield Statement("owned", {"worker": worker, "held": dumps(list(held))})
    return [_job(row) for row in rows]


def cancelling(worker: str) -> Op[list[tuple[str, int]]]:
    """Which of this worker's attempts have been asked to stop."""
    rows = yield Statement("cancelling", {"worker": worker})
    return [(row[0], row[1]) for row in rows]


# --- reads ----------------------------------------------------------------------------------------


def now() -> Op[float]:
    """The database's clock, in seconds since the epoch."""
    rows = yield Statement("now", {})
    return float(rows[0][0])


def get(id: str) -> Op[Job]:
    """One job as a decision sees it.

    Raises:
        JobNotFound: no such job.
    """
    rows = yield Statement("job", {"id": id})
    if not rows:
        raise not_found(id)
    return _job(rows[0])


def record(id: str) -> Op[Record]:
    """Everything that is known of one job.

    Raises:
        JobNotFound: no such job.
    """
    rows = yield Statement("record", {"id": id})
    if not rows:
        raise not_found(id)
    return _record(rows[0])


def records(ids: Sequence[str]) -> Op[list[Record]]:
    """Everything that is known of those of these jobs that are there; more statements may follow in
    the transaction.
    """
    rows = yield Statement("records", {"ids": dumps(ids)}, alone=False)
    return [_record(row) for row in rows]


def _record(row: tuple[Any, ...]) -> Record:
    return Record(
        job=_job(row),
        run_at=row[14],
        started_at=row[15],
        finished_at=row[16],
        created_at=row[17],
        event=row[18],
        reason=_maybe(row[19]),
        error=_maybe(row[20]),
        result=_maybe(row[21]),
    )


def attempts(id: str) -> Op[list[Attempt]]:
    """Every closed attempt of one job, in order."""
    rows = yield Statement("attempts", {"id": id})
    return [_attempt(row) for row in rows]


def among(ids: Sequence[str]) -> Op[list[Job]]:
    """Those of these jobs that are there, as a decision sees them; more statements may follow in
    the transaction.
    """
    rows = yield Statement("jobs_among", {"ids": dumps(ids)}, alone=False)
    return [_job(row) for row in rows]


def refusals(id: str | None = None, limit: int = 100) -> Op[list[Refusal]]:
    """Refused writes, newest first: of one job, or of all."""
    rows = yield Statement("refusals", {"id": id, "limit": limit})
    return [
        Refusal(
            job=row[0],
            event=row[1],
            attempt=row[2],
            worker=row[3],
            expected=row[4],
            found=row[5],
            found_attempt=row[6],
            found_worker=row[7],
            detail=row[8],
            at=row[9],
        )
        for row in rows
    ]


def counts() -> Op[dict[str, int]]:
    """How many jobs are in each state; states without jobs are 0."""
    rows = yield Statement("counts", {})
    return {state.value: 0 for state in JobState} | {row[0]: row[1] for row in rows}


def read(name: str, **params: Any) -> Op[list[tuple[Any, ...]]]:
    """The rows of a named statement that only reads, as they are."""
    rows = yield Statement(name, params)
    return rows


def prune(state: JobState, keep: float, limit: int) -> Op[int]:
    """One step of retention: up to `limit` jobs that ended in `state` more than `keep` seconds ago;
    returns how many.
    """
    rows = yield Statement("prune", {"state": state.value, "keep": keep, "limit": limit})
    return len(rows)


def prune_workers(keep: float) -> Op[int]:
    """Forget workers that ended more than `keep` seconds ago; returns how many."""
    rows = yield Statement("prune_workers", {"keep": keep})
    return len(rows)


def not_found(id: str) -> JobNotFound:
    return JobNotFound(
        f"no job has the id {id}",
        why="it was never enqueued here, or it ended and was pruned",
        fix="onward job list shows what there is; onward status names the database",
    )


def _job(row: tuple[Any, ...]) -> Job:
    return Job(
        id=row[0],
        task=row[1],
        queue=row[2],
        priority=row[3],
        state=_STATES[row[4]],
        attempt=row[5],
        worker=row[6],
        args=stored_text(row[7]),
        max_attempts=row[8],
        max_losses=row[9],
        failures=row[10],
        losses=row[11],
        budget_from=row[12],
        timeout=row[13],
    )


def _attempt(row: tuple[Any, ...]) -> Attempt:
    return Attempt(
        job=row[0],
        number=row[1],
        state=AttemptState(row[2]),
        event=Event(row[3]),
        worker=row[4],
        started_at=row[5],
        ended_at=row[6],
        abandoned=bool(row[7]),
        reason=_maybe(row[8]),
        error=_maybe(row[9]),
    )


def _maybe(value: Any) -> str | None:
    return None if value is None else stored_text(value)


_STATES = {state.value: state for state in JobState}
