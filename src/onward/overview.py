"""One look at a whole system: states, queues, workers, and what needs a human.

In:  a database.    Out: an `Overview`, and the alarms that follow from it.
`look` reads and decides nothing; `alarms` decides and reads nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import msgspec
from msgspec import Struct

from onward.invariants import NO_LIMBO, Finding, run_check
from onward.lifecycle import JobState, WorkerState
from onward.store import store
from onward.store.database import Database

RECENT = 900.0
"""For how many seconds a lost worker is news."""

HOUR = 3600.0

MOST_WORKERS = 500


class WorkerLine(Struct, frozen=True, kw_only=True):
    """A worker as the database knows it. Durations are seconds, moments seconds since the epoch."""

    id: str
    name: str
    host: str
    pid: int
    version: str
    state: str
    queues: tuple[str, ...]
    tasks: tuple[str, ...]
    concurrency: int
    lease_left: float
    started_at: float
    silent: float
    ended_at: float | None
    reason: str | None
    running: int
    beat_at: float | None

    @property
    def alive(self) -> bool:
        """Whether its lease holds."""
        return self.state in _LIVING and self.lease_left > 0

    @property
    def claims(self) -> bool:
        """Whether it takes new jobs."""
        return self.alive and self.state == WorkerState.ACTIVE

    @property
    def overdue(self) -> bool:
        """Whether its lease is over and nobody has declared it lost yet."""
        return self.state in _LIVING and self.lease_left <= 0


_LIVING = frozenset({WorkerState.ACTIVE.value, WorkerState.DRAINING.value})


class QueueLine(Struct, frozen=True, kw_only=True):
    """A queue's live jobs, and who serves it.

    `later` are queued jobs that are not due yet; `oldest` is the age of the first due one, in
    seconds.
    """

    name: str
    due: int
    oldest: float | None
    later: int
    waiting: int
    running: int
    dead: int
    workers: int
    slots: int


class TaskLine(Struct, frozen=True):
    """How many due jobs of one task there are in a queue; the first has been due for `oldest` s."""

    queue: str
    task: str
    due: int
    oldest: float


class OverdueLine(Struct, frozen=True):
    """Due jobs of one task that a worker leaves lying, how many slots it has free, and when it
    began its newest job of which that is known (0: of none).
    """

    jobs: TaskLine
    worker: WorkerLine
    free: int
    newest: float


class Overview(Struct, frozen=True, kw_only=True):
    """Everything that one screen shows. `ended`: how many jobs ended in the last hour, by state."""

    url: str
    dialect: str
    schema: int
    now: float
    states: dict[str, int]
    queues: tuple[QueueLine, ...]
    tasks: tuple[TaskLine, ...]
    workers: tuple[WorkerLine, ...]
    ended: dict[str, int]
    limbo: Finding


class Alarm(Struct, frozen=True, kw_only=True):
    """Something that needs a human: what it is about, what is wrong, and what to do."""

    code: str
    subject: str
    what: str
    fix: str


# --- look -----------------------------------------------------------------------------------------


def look(database: Database) -> Overview:
    """Read everything that one screen shows."""
    workers = read_workers(database)
    return Overview(
        url=database.shown_url,
        dialect=database.dialect,
        schema=database.schema_version(),
        now=database.read(store.now),
        states=database.read(store.counts),
        queues=tuple(_queues(database.read(store.read, "queues"), workers)),
        tasks=tuple(read_tasks(database)),
        workers=tuple(workers),
        ended=dict(database.read(store.read, "finished_since", seconds=HOUR)),
        limbo=run_check(NO_LIMBO, database),
    )


def read_workers(database: Database, limit: int = MOST_WORKERS) -> list[WorkerLine]:
    """The workers that the database remembers, newest first."""
    return [_worker(row) for row in database.read(store.read, "workers", limit=limit)]


def read_tasks(database: Database) -> list[TaskLine]:
    """The due jobs of each queue by task."""
    return [TaskLine(*row) for row in database.read(store.read, "due_tasks")]


def _worker(row: tuple[Any, ...]) -> WorkerLine:
    return WorkerLine(
        id=row[0],
        name=row[1],
        host=row[2],
        pid=row[3],
        version=row[4],
        state=row[5],
        queues=_names(row[6]),
        tasks=_names(row[7]),
        concurrency=row[8],
        lease_left=_number(row[10]),
        started_at=row[11],
        silent=_number(row[12]),
        ended_at=row[13],
        reason=row[14],
        running=row[15],
        beat_at=row[16],
    )


def _number(value: object) -> float:
    """A number of seconds; 0 if the row is damaged."""
    return float(value) if isinstance(value, (int, float)) else 0.0


def elapsed(start: object, end: object) -> float | None:
    """The seconds between two moments of the database's clock; None if one of them is none.

    Never less than nothing: that clock may have been set back between them.
    """
    if isinstance(start, (int, float)) and isinstance(end, (int, float)):
        return max(float(end - start), 0.0)
    return None


def _names(text: str) -> tuple[str, ...]:
    """A stored list of names; none if it is damaged."""
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except (msgspec.MsgspecError, TypeError):
        return ()


def _queues(rows: Iterable[tuple[Any, ...]], workers: Sequence[WorkerLine]) -> list[QueueLine]:
    """One line a queue: those that have live jobs, and those that a living worker serves."""
    found: dict[str, dict[str, int]] = {name: {} for name in sorted(served(workers))}
    oldest: dict[str, float] = {}
    for queue, state, count, due, age in rows:
        known = found.setdefault(queue, {})
        known[state] = count
        known["due"] = known.get("due", 0) + due
        if age is not None:
            oldest[queue] = age
    return [_queue(name, found[name], oldest.get(name), workers) for name in sorted(found)]


def _queue(
    name: str, counts: dict[str, int], oldest: float | None, workers: Sequence[WorkerLine]
) -> QueueLine:
    serving = [worker for worker in workers if worker.claims and name in worker.queues]
    due = counts.get("due", 0)
    return QueueLine(
        name=name,
        due=due,
        oldest=oldest,
        later=counts.get(JobState.QUEUED, 0) - due,
        waiting=counts.get(JobState.WAITING, 0),
        running=counts.get(JobState.RUNNING, 0) + counts.get(JobState.CANCELLING, 0),
        dead=counts.get(JobState.DEAD, 0),
        workers=len(serving),
        slots=sum(worker.concurrency for worker in serving),
    )


def served(workers: Iterable[WorkerLine]) -> set[str]:
    """The queues that a living worker takes jobs from."""
    return {queue for worker in workers if worker.claims for queue in worker.queues}


# --- decide ---------------------------------------------------------------------------------------


def alarms(seen: Overview, overdue: Sequence[OverdueLine] = ()) -> list[Alarm]:
    """What needs a human, the most urgent first; `overdue` takes longer than a look to find out."""
    return [
        *_limbo(seen),
        *_unserved_queues(seen),
        *_unknown_tasks(seen),
        *_overdue_queues(overdue),
        *_lost_workers(seen),
    ]


def _limbo(seen: Overview) -> Iterable[Alarm]:
    if seen.limbo.holds:
        return
    count = len(seen.limbo.offences)
    many = "or more " if seen.limbo.more else ""
    first = seen.limbo.offences[0] if count else None
    yield Alarm(
        code="limbo",
        subject=first.subject if first else "",
        what=f"{count} {many}{_jobs(count)} in limbo, the first: {first.what}"
        if first
        else f"limbo cannot be looked for: {seen.limbo.problem}",
        fix=f"{NO_LIMBO.fix}; onward doctor lists them",
    )


def _unserved_queues(seen: Overview) -> Iterable[Alarm]:
    names = sorted(served(seen.workers))
    for queue in seen.queues:
        if queue.due and not queue.workers:
            yield Alarm(
                code="queue_unserved",
                subject=queue.name,
                what=f"{queue.name}: {queue.due} waiting, 0 workers{_instead(queue.name, names)}",
                fix=f"onward worker module:app -q {queue.name}",
            )


def _instead(queue: str, names: list[str]) -> str:
    """What is served instead, and which of it may have been meant."""
    if not names:
        return " (no worker is alive)"
    near = get_close_matches(queue, names, n=1)
    return f" (served: {', '.join(names)})" + (f"; did you mean {near[0]}?" if near else "")


def _unknown_tasks(seen: Overview) -> Iterable[Alarm]:
    """Due jobs of a task that none of the queue's workers knows. They stay queued."""
    for line in seen.tasks:
        serving = [w for w in seen.workers if w.claims and line.queue in w.queues]
        known = {task for worker in serving for task in worker.tasks}
        if not serving or line.task in known:
            continue
        near = get_close_matches(line.task, sorted(known), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        yield Alarm(
            code="task_unknown",
            subject=line.task,
            what=f"{line.task}: {line.due} waiting in {line.queue}, "
            f"no worker of that queue knows the task{hint}",
            fix="deploy the code that has the task, or cancel the jobs: onward job cancel "
            f"--task {shlex.quote(line.task)} --queue {shlex.quote(line.queue)}",
        )


def _overdue_queues(overdue: Sequence[OverdueLine]) -> Iterable[Alarm]:
    """Due jobs that nobody starts although slots are free: a worker beats and does not claim."""
    for queue in sorted({line.jobs.queue for line in overdue}):
        lines = [line for line in overdue if line.jobs.queue == queue]
        jobs = {line.jobs.task: line.jobs for line in lines}.values()
        free = {line.worker.id: line.free for line in lines}
        names = ", ".join(sorted({line.worker.name for line in lines}))
        yield Alarm(
            code="overdue",
            subject=queue,
            what=f"{queue}: {sum(line.due for line in jobs)} due for "
            f"{max(line.oldest for line in jobs):.0f} s, {sum(free.values())} slots free ({names})",
            fix="read the worker's log: claim.refused names a job that the database lets nobody "
            "claim; claim.waits and stage.stumbled, what is in the way; if it says nothing, "
            "restart the worker: its jobs are taken back",
        )


def _lost_workers(seen: Overview) -> Iterable[Alarm]:
    for worker in seen.workers:
        if worker.overdue:
            what = f"worker {worker.name}: its lease was over {-worker.lease_left:.0f} s ago"
            yield _lost(worker, what, "a living worker's sweep declares it lost within seconds")
        elif worker.state == WorkerState.LOST and _age(seen, worker) < RECENT:
            what = f"worker {worker.name} was lost {_age(seen, worker):.0f} s ago"
            yield _lost(
                worker,
                f"{what}: {worker.reason}" if worker.reason else what,
                "its jobs run again elsewhere; onward workers --all shows its end",
            )


def _lost(worker: WorkerLine, what: str, fix: str) -> Alarm:
    return Alarm(code="worker_lost", subject=worker.id, what=what, fix=fix)


def _age(seen: Overview, worker: WorkerLine) -> float:
    return elapsed(worker.ended_at, seen.now) or 0.0


def _jobs(count: int) -> str:
    return "job is" if count == 1 else "jobs are"
