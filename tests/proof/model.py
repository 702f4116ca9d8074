"""The store as a few dicts: what a job's life comes to, told once more in plain Python.

Written from `docs/lifecycle.md`, `lifecycle.py` and `policy.py`, and not from the SQL, so that it
errs in other places than the databases do. It decides by itself what an outcome makes of a job; of
the product it takes only the values that go in and out. Times are in seconds from `start`. An
operation that cannot be done raises `Wrong` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import NamedTuple

from onward.job import Job, NewJob
from onward.lifecycle import JobState
from onward.policy import (
    Backoff,
    Crashed,
    Discarded,
    Outcome,
    Raised,
    Rejected,
    Released,
    Returned,
    Snoozed,
    TimedOut,
)

LIVING = ("active", "draining")
OWNED = ("running", "cancelling")
OVER = ("succeeded", "cancelled")

STEP = 2.0
"""Seconds: what lies further ahead was written before the clock went back."""


class Wrong(Exception):
    """The operation is refused; its text is the name of the error that the product raises."""


@dataclass(slots=True)
class Row:
    """A job with everything that is known of it."""

    id: str
    task: str
    queue: str
    priority: int
    args: str
    max_attempts: int
    max_losses: int
    timeout: float | None
    run_at: float
    created_at: float
    state: str = "queued"
    attempt: int = 1
    worker: str | None = None
    started_at: float | None = None
    finished_at: float | None = None
    failures: int = 0
    losses: int = 0
    budget_from: int = 1
    ended_from: str | None = None
    event: str | None = None
    reason: str | None = None
    error: str | None = None
    result: str | None = None


@dataclass(slots=True)
class Worker:
    """One start of a process."""

    id: str
    lease_until: float
    started_at: float
    beat_at: float
    state: str = "active"
    idle: bool = True
    ended_at: float | None = None
    reason: str | None = None


class Attempt(NamedTuple):
    """How a try ended."""

    state: str
    event: str
    worker: str | None
    started_at: float | None
    ended_at: float
    abandoned: bool
    reason: str | None
    error: str | None


class End(NamedTuple):
    """What becomes of a job: the event, where it leads, and how its attempt ended, if it did."""

    event: str
    after: str
    ended: str | None = None
    reason: str | None = None
    error: str | None = None
    result: str | None = None
    delay: float = 0.0
    failed: int = 0
    lost: int = 0
    abandoned: bool = False
    follow_ups: tuple[NewJob, ...] = ()


Decided = tuple[Job, End]
"""A job as its writer saw it, and what the writer wants to become of it."""

Looked = tuple[Job | None, bool]
"""A job as it is after a write that did not take, and whether that write had been made before."""

JOB_COLUMNS = attrgetter(*Row.__slots__)
WORKER_COLUMNS = attrgetter(*Worker.__slots__)
FIRST, FIRST_TWO = itemgetter(0), itemgetter(0, 1)

Refusal = tuple[str, str, int, str | None, str, str | None, int | None, str | None, str | None]


@dataclass
class Model:
    """All that one database would hold. `start` is the epoch's second from which it counts."""

    start: float
    now: float = 0.0
    jobs: dict[str, Row] = field(default_factory=dict[str, Row])
    attempts: dict[tuple[str, int], Attempt] = field(default_factory=dict[tuple[str, int], Attempt])
    workers: dict[str, Worker] = field(default_factory=dict[str, Worker])
    refusals: list[tuple[Refusal, float]] = field(default_factory=list[tuple[Refusal, float]])

    # --- enqueue and claim ------------------------------------------------------------------------

    def enqueue(self, jobs: Sequence[NewJob]) -> None:
        """New jobs, all or none."""
        if any(job.id in self.jobs for job in jobs):
            raise Wrong("Duplicate")
        for job in jobs:
            self._born(job)

    def enqueue_again(self, jobs: Sequence[NewJob]) -> set[str]:
        """Those that are not there yet; one that is there must be the same call."""
        known = [(job, self.jobs[job.id]) for job in jobs if job.id in self.jobs]
        if any((job.task, job.args) != (row.task, row.args) for job, row in known):
            raise Wrong("IdConflict")
        fresh = [job for job in jobs if job.id not in self.jobs]
        for job in fresh:
            self._born(job)
        return {job.id for job in fresh}

    def _born(self, job: NewJob) -> None:
        due = self.now + max(job.delay or 0.0, 0.0)
        if job.run_at is not None:
            due = max(due, job.run_at - self.start)
        self.jobs[job.id] = Row(
            id=job.id,
            task=job.task,
            queue=job.queue,
            priority=job.priority,
            args=job.args,
            max_attempts=job.max_attempts,
            max_losses=job.max_losses,
            timeout=job.timeout,
            run_at=due,
            created_at=self.now,
        )

    def claim(
        self,
        worker: str,
        tasks: Sequence[str],
        lane: tuple[str, int],
        after: tuple[float, str] | None,
        limit: int,
    ) -> list[tuple[Job, float]]:
        """Due jobs of one lane, by due time and id, beyond `after`; each with its due time."""
        claimer = self.workers.get(worker)
        if claimer is None or claimer.state != "active":
            return []
        due = sorted(
            (row.run_at, row.id)
            for row in self.jobs.values()
            if row.state == "queued"
            and (row.queue, row.priority) == lane
            and row.run_at <= self.now
            and row.task in tasks
        )
        due = [place for place in due if after is None or place > after][:limit]
        for _, id_ in due:
            row = self.jobs[id_]
            row.state, row.worker, row.started_at = "running", worker, self.now
        return [(self.seen(id_), run_at) for run_at, id_ in due]

    def lanes(self, queues: Iterable[str]) -> set[tuple[str, int, float]]:
        """The lanes of these queues with queued jobs, and in how long the first of each is due."""
        first: dict[tuple[str, int], float] = {}
        for row in self.jobs.values():
            if row.state == "queued" and row.queue in queues:
                lane = (row.queue, row.priority)
                first[lane] = min(first.get(lane, row.run_at), row.run_at)
        return {(*lane, run_at - self.now) for lane, run_at in first.items()}

    def seen(self, id_: str) -> Job:
        """One job as a reader sees it."""
        row = self.jobs[id_]
        return Job(
            id=row.id,
            task=row.task,
            queue=row.queue,
            priority=row.priority,
            state=JobState(row.state),
            attempt=row.attempt,
            worker=row.worker,
            args=row.args,
            max_attempts=row.max_attempts,
            max_losses=row.max_losses,
            failures=row.failures,
            losses=row.losses,
            budget_from=row.budget_from,
            timeout=row.timeout,
        )

    # --- how attempts end -------------------------------------------------------------------------

    def write(self, decided: Sequence[Decided]) -> set[str]:
        """Let it become so where the job is still as its writer saw it; of several words about one
        job the first counts. Follow-ups of a success come with it.
        """
        first = {seen.id: (seen, end) for seen, end in reversed(decided)}
        taken = [(seen, end) for seen, end in first.values() if self._is_still(seen)]
        born = [job for _, end in taken for job in end.follow_ups]
        before = {seen.id: self.jobs[seen.id] for seen, _ in taken}
        self.enqueue_again(born)
        for seen, end in taken:
            self._become(before[seen.id], end)
        return {seen.id for seen, _ in taken}

    def _is_still(self, seen: Job) -> bool:
        row = self.jobs.get(seen.id)
        return row is not None and (row.state, row.attempt, row.worker) == (
            seen.state,
            seen.attempt,
            seen.worker,
        )

    def _become(self, row: Row, end: End) -> None:
        if end.ended is not None:
            self.attempts[row.id, row.attempt] = Attempt(
                state=end.ended,
                event=end.event,
                worker=row.worker,
                started_at=row.started_at,
                ended_at=self.now,
                abandoned=end.abandoned,
                reason=end.reason,
                error=end.error,
            )
        if end.after in OVER:
            row.ended_from, row.event, row.finished_at = row.state, end.event, self.now
            row.reason, row.error, row.result = end.reason, end.error, end.result
        else:
            self._go_on(row, end)
        row.state = end.after

    def _go_on(self, row: Row, end: End) -> None:
        row.failures += end.failed
        row.losses += end.lost
        if row.state in ("running", "dead") and end.after in ("queued", "waiting"):
            row.attempt += 1
        if end.event == "requeue":
            row.failures, row.losses, row.budget_from = 0, 0, row.attempt
        if end.after == "queued":
            row.run_at = self.now + max(end.delay, 0.0)
        if end.after != "cancelling":
            row.worker = None
        if end.after in ("queued", "waiting"):
            row.started_at = None
        row.finished_at = self.now if end.after == "dead" else None

    def look(self, seen: Job, end: End) -> Looked:
        """What has become of a job whose writer was refused."""
        if seen.id not in self.jobs:
            return None, False
        past = self.attempts.get((seen.id, seen.attempt))
        ours = past is not None and past[:3] == (end.ended, end.event, seen.worker)
        return self.seen(seen.id), ours

    def refuse(self, seen: Job, end: End) -> None:
        """Keep what was refused."""
        row = self.jobs.get(seen.id)
        key: Refusal = (
            seen.id,
            end.event,
            seen.attempt,
            seen.worker,
            str(seen.state),
            row and row.state,
            row and row.attempt,
            row and row.worker,
            end.error or end.result,
        )
        self.refusals.append((key, self.now))

    def move(self, id_: str, end_of: Callable[[Job], End | None]) -> str:
        """Read, decide, write; returns the state that comes of it."""
        if id_ not in self.jobs:
            raise Wrong("JobNotFound")
        seen = self.seen(id_)
        end = end_of(seen)
        if end is not None:
            self.write([(seen, end)])
        return self.jobs[id_].state

    def hold(self, id_: str, attempt: int, seconds: float) -> bool:
        """Put a queued job off, never bring it forward."""
        row = self.jobs.get(id_)
        if row is None or (row.state, row.attempt) != ("queued", attempt):
            return False
        row.run_at = max(row.run_at, self.now + seconds)
        return True

    # --- workers ----------------------------------------------------------------------------------

    def register(self, id_: str, lease: float) -> None:
        self.workers[id_] = Worker(id_, self.now + lease, self.now, self.now)

    def living(self) -> dict[str, Worker]:
        return {id_: one for id_, one in self.workers.items() if one.state in LIVING}

    def beat(self, ids: Sequence[str], lease: float) -> set[str]:
        """Renew; a renewal takes nothing away, and a worker that ended has none. What was promised
        by a clock that has gone back since is promised anew.
        """
        known = [one for id_, one in self.living().items() if id_ in ids]
        for worker in known:
            gone_back = worker.beat_at > self.now + lease
            kept = self.now if gone_back else worker.lease_until
            worker.lease_until = max(kept, self.now + lease)
            worker.beat_at = self.now
        return {worker.id for worker in known}

    def redate(self, id_: str, seen: float, lease: float) -> bool:
        """A lease that was renewed at `seen`, by a clock that has gone back since, begins anew."""
        worker = self.living().get(id_)
        if worker is None or not (worker.beat_at == seen > self.now + STEP):
            return False
        length = worker.lease_until - worker.beat_at
        worker.lease_until = self.now + (length if 0 <= length <= 86_400 else lease)
        worker.beat_at = self.now
        return True

    def set_idle(self, id_: str, idle: bool) -> None:
        if id_ in self.living():
            self.workers[id_].idle = idle

    def drain(self, id_: str) -> bool:
        worker = self.workers.get(id_)
        if worker is None or worker.state != "active":
            return False
        worker.state, worker.idle = "draining", False
        return True

    def end_worker(self, id_: str, state: str, reason: str) -> bool:
        """stopped or lost, once. A lease is over when its worker is lost."""
        worker = self.living().get(id_)
        if worker is None:
            return False
        worker.state, worker.idle, worker.reason, worker.ended_at = state, False, reason, self.now
        if state == "lost":
            worker.lease_until = min(worker.lease_until, self.now)
        return True

    def lose(self, id_: str, reason: str, seen: float | None) -> bool:
        """Lost: by proof, or because the lease that was seen is unchanged and over."""
        worker = self.workers.get(id_)
        if worker is None:
            return False
        if seen is not None and not (worker.lease_until == seen < self.now):
            return False
        return self.end_worker(id_, "lost", reason)

    def sweep(self, limit: int, leave: Iterable[str]) -> list[tuple[str, str]]:
        """Take back what ended workers own, in the order of ids."""
        living = self.living()
        orphans = sorted(
            row.id
            for row in self.jobs.values()
            if row.state in OWNED and row.worker not in living and row.id not in leave
        )
        back: list[Decided] = []
        for id_ in orphans[:limit]:
            seen = self.seen(id_)
            back.append((seen, loss_of(seen, self.workers[str(seen.worker)].reason)))
        self.write(back)
        return [(seen.id, end.event) for seen, end in back]

    # --- retention --------------------------------------------------------------------------------

    def prune(self, state: str, keep: float, limit: int) -> int:
        """Forget what ended in this state long ago, the oldest first, and all about it."""
        old = sorted(
            (row.finished_at, row.id)
            for row in self.jobs.values()
            if row.state == state and row.finished_at is not None
            if row.finished_at < self.now - keep
        )
        gone = {id_ for _, id_ in old[:limit]}
        for id_ in gone:
            del self.jobs[id_]
        self.attempts = {key: one for key, one in self.attempts.items() if key[0] not in gone}
        self.refusals = [one for one in self.refusals if one[0][0] not in gone]
        return len(gone)

    def prune_workers(self, keep: float) -> int:
        owners = {row.worker for row in self.jobs.values() if row.state in OWNED}
        gone = [
            worker.id
            for worker in self.workers.values()
            if worker.ended_at is not None
            and worker.ended_at < self.now - keep
            and worker.id not in owners
        ]
        for id_ in gone:
            del self.workers[id_]
        return len(gone)

    # --- all of it --------------------------------------------------------------------------------

    def rows(self) -> dict[str, list[tuple[object, ...]]]:
        """Every row by table, sorted, as the databases are asked for them."""
        return {
            "jobs": sorted(map(JOB_COLUMNS, self.jobs.values()), key=FIRST),
            "attempts": sorted(((*key, *one) for key, one in self.attempts.items()), key=FIRST_TWO),
            "workers": sorted(map(WORKER_COLUMNS, self.workers.values()), key=FIRST),
            "refusals": [(*key, at) for key, at in self.refusals],
        }


# --- decisions ------------------------------------------------------------------------------------


def wait(backoff: Backoff, failures: int, chance: float) -> float:
    """How long the next try waits after so many failures before this one."""
    grown = backoff.base * backoff.factor**failures
    capped = grown if backoff.cap is None else min(grown, backoff.cap)
    return capped * (1 - backoff.jitter * chance)


def end_of(seen: Job, outcome: Outcome, backoff: Backoff, chance: float) -> End:
    """What an outcome makes of a job that runs or is cancelling."""
    if isinstance(outcome, Returned):
        return End(
            "succeed",
            "succeeded",
            "succeeded",
            result=outcome.result,
            follow_ups=outcome.follow_ups,
        )
    if isinstance(outcome, (Raised, TimedOut, Crashed, Rejected)):
        return _failure(seen, outcome, backoff, chance)
    if seen.state == "cancelling":
        gives_back = isinstance(outcome, (Released, Snoozed))
        ended = "released" if gives_back else "cancelled"
        return End("cancel", "cancelled", ended, reason="cancelled")
    match outcome:
        case Snoozed(delay=delay):
            return End("snooze", "queued", "released", "snoozed", delay=delay)
        case Discarded(why=why):
            return End("drop", "cancelled", "cancelled", why)
        case Released(why=why, delay=delay):
            return End("release", "queued", "released", why, delay=delay)
        case _:
            return End("release", "queued", "released", "stopped")


def _failure(
    seen: Job, outcome: Raised | TimedOut | Crashed | Rejected, backoff: Backoff, chance: float
) -> End:
    """Charged to the budget, unless the job was to stop anyway."""
    reason = _WHY[type(outcome)]
    abandoned = isinstance(outcome, TimedOut) and outcome.abandoned
    fixed = End("cancel", "cancelled", "failed", reason, outcome.error, abandoned=abandoned)
    if seen.state == "cancelling":
        return fixed
    is_last = seen.failures + 1 >= seen.max_attempts
    if is_last or isinstance(outcome, Rejected) or (isinstance(outcome, Raised) and outcome.final):
        return fixed._replace(event="bury", after="dead", failed=1)
    own = outcome.backoff if isinstance(outcome, Raised) else None
    delay = wait(own or backoff, seen.failures, chance)
    if isinstance(outcome, Raised) and outcome.after is not None:
        delay = outcome.after
    if isinstance(outcome, TimedOut):
        delay = max(delay, outcome.hold)
    return fixed._replace(event="retry", after="queued", delay=delay, failed=1)


_WHY = {Raised: "error", TimedOut: "timeout", Crashed: "crashed", Rejected: "rejected"}


def loss_of(seen: Job, reason: str | None) -> End:
    """What becomes of a job whose worker is gone: losses have a budget of their own."""
    if seen.state == "cancelling":
        return End("cancel", "cancelled", "lost", "lost", reason)
    if seen.losses >= seen.max_losses:
        return End("bury", "dead", "lost", "lost", reason, lost=1)
    return End("recover", "queued", "lost", "lost", reason, lost=1)


def cancel_of(seen: Job) -> End | None:
    """What a request to stop makes of a job; None: it changes nothing."""
    match seen.state:
        case "queued" | "waiting":
            return End("cancel", "cancelled", "cancelled", "cancelled on request")
        case "running":
            return End("ask_cancel", "cancelling")
        case "cancelling" | "cancelled":
            return None
        case _:
            raise Wrong("IllegalTransition")


def only_from(state: str, end: End) -> Callable[[Job], End]:
    """A move that leads out of one state only."""

    def end_of_it(seen: Job) -> End:
        if seen.state != state:
            raise Wrong("IllegalTransition")
        return end

    return end_of_it
