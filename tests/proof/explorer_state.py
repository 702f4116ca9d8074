"""The explorer's states: the rows, and what each worker's process has in mind about them.

A state says nothing that no statement could ever tell apart: ids are numbers, times are distances
from now, and what is past is "past". Workers and jobs that only change places are one state. What
is over and nobody has in mind any more is put down to its barest form, once all of it was checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import permutations
from typing import NamedTuple

from onward.lifecycle import OWNED, TERMINAL

NOBODY = -1
OVER = -0.5
LIVE_WORKER = frozenset({"active", "draining"})
_OWNED = frozenset(state.value for state in OWNED)
_TERMINAL = frozenset(state.value for state in TERMINAL)


class Past(NamedTuple):
    """A closed attempt that its job left behind."""

    state: str
    event: str
    owner: int


class JobRow(NamedTuple):
    """A job, live or finished. `due` is in ticks from now; `last` is how a finished one ended:
    from which state, by which event, its attempt with which end.
    """

    state: str
    attempt: int = 1
    owner: int = NOBODY
    due: float = 0.0
    failures: int = 0
    losses: int = 0
    budget_from: int = 1
    past: tuple[Past, ...] = ()
    last: tuple[str, ...] = ()


class WorkerRow(NamedTuple):
    """A worker; `lease` is in ticks from now."""

    state: str
    lease: float = 0.0


class Rows(NamedTuple):
    """What the database holds."""

    jobs: tuple[JobRow, ...]
    workers: tuple[WorkerRow, ...]


class Held(NamedTuple):
    """What a process has in mind of one attempt.

    `phase`: its body runs (`runs`), its outcome is to be written (`write`), a write did not take
    and the job is to be looked at (`look`). `took`: what only the explorer knows, that the write
    whose answer was lost did take.
    """

    job: int
    attempt: int
    seen: str
    failures: int
    losses: int
    budget_from: int
    phase: str = "runs"
    outcome: str = ""
    took: bool = False


class Mind(NamedTuple):
    """A worker's process: whether it is there, and what it holds."""

    up: bool
    held: tuple[Held, ...] = ()


class State(NamedTuple):
    """One state of the whole."""

    jobs: tuple[JobRow, ...]
    workers: tuple[WorkerRow, ...]
    minds: tuple[Mind, ...]

    @property
    def rows(self) -> Rows:
        return Rows(self.jobs, self.workers)


NO_JOB = JobRow("")
NO_WORKER = WorkerRow("")
NO_MIND = Mind(False)

_ENDED = {
    "succeeded": JobRow("succeeded", last=("running", "succeed", "succeeded")),
    "cancelled": JobRow("cancelled", last=("queued", "cancel", "cancelled")),
}
_PLAIN_EVENT = {"failed": "retry", "lost": "recover", "released": "release"}


def empty(workers: int, jobs: int) -> State:
    """Nothing is there yet."""
    return State((NO_JOB,) * jobs, (NO_WORKER,) * workers, (NO_MIND,) * workers)


def begun(workers: int, jobs: int, lease: float) -> State:
    """All workers have registered, all jobs are due."""
    row = WorkerRow("active", lease)
    return State((JobRow("queued"),) * jobs, (row,) * workers, (Mind(True),) * workers)


def tick(state: State) -> State:
    """Time passes: what was due later comes nearer, leases run out."""
    jobs = tuple(job._replace(due=max(job.due - 1, 0.0)) if job.due else job for job in state.jobs)
    workers = tuple(
        worker._replace(lease=max(worker.lease - 1, OVER))
        if worker.state in LIVE_WORKER
        else worker
        for worker in state.workers
    )
    return State(jobs, workers, state.minds)


# --- the barest form ------------------------------------------------------------------------------


def barest(state: State) -> State:
    """The state without what nobody can ask for any more."""
    keys = {
        (held.job, held.attempt, worker)
        for worker, mind in enumerate(state.minds)
        for held in mind.held
    }
    known = {job for job, _, _ in keys}
    jobs = tuple(
        _barest_job(number, job, keys, number in known) for number, job in enumerate(state.jobs)
    )
    owners = {job.owner for job in jobs}
    gone = [
        worker.state not in LIVE_WORKER and not mind.up and number not in owners
        for number, (worker, mind) in enumerate(zip(state.workers, state.minds, strict=True))
    ]
    workers = tuple(
        NO_WORKER if over else row for row, over in zip(state.workers, gone, strict=True)
    )
    return State(jobs, workers, state.minds)


def _barest_job(number: int, job: JobRow, keys: set[tuple[int, int, int]], known: bool) -> JobRow:
    if job.state in _TERMINAL and not known:
        return _ENDED[job.state]
    past = tuple(
        closed if (number, attempt, closed.owner) in keys else _plain(closed)
        for attempt, closed in enumerate(job.past, 1)
    )
    own = job.state in _OWNED or (number, job.attempt, job.owner) in keys
    return job._replace(past=past, owner=job.owner if own else NOBODY)


def _plain(closed: Past) -> Past:
    event = closed.event if closed.event == "bury" else _PLAIN_EVENT[closed.state]
    return Past(closed.state, event, NOBODY)


# --- who changes places with whom -----------------------------------------------------------------


def canonical(state: State) -> State:
    """The least of all states that differ only in which worker and which job is called which."""
    return min(_renamed(state))


def _renamed(state: State) -> Iterator[State]:
    for order, workers in _orders(len(state.workers)):
        for job_order, jobs in _orders(len(state.jobs)):
            yield State(
                tuple(_job_renamed(state.jobs[number], workers) for number in job_order),
                tuple(state.workers[number] for number in order),
                tuple(_mind_renamed(state.minds[number], jobs) for number in order),
            )


@cache
def _orders(count: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Every order, with what each number is called in it; the last stands for nobody."""
    return tuple(
        (order, (*(order.index(number) for number in range(count)), NOBODY))
        for order in permutations(range(count))
    )


def _job_renamed(job: JobRow, names: tuple[int, ...]) -> JobRow:
    if job.owner == NOBODY and all(closed.owner == NOBODY for closed in job.past):
        return job
    past = tuple(closed._replace(owner=names[closed.owner]) for closed in job.past)
    return job._replace(owner=names[job.owner], past=past)


def _mind_renamed(mind: Mind, names: tuple[int, ...]) -> Mind:
    if not mind.held:
        return mind
    return Mind(mind.up, tuple(sorted(held._replace(job=names[held.job]) for held in mind.held)))
