"""The life of a job, of an attempt and of a worker: every state, every event, every legal move.

This is the file to read first. A move that is missing from these tables does not exist: `Job.move`
raises `IllegalTransition`, the conditional write changes no row, and the database's trigger refuses
it. `onward lifecycle`, `docs/lifecycle.md` and the diagrams are made from here. Nothing here does
I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class JobState(StrEnum):
    """Where a job is. Strings, so `job.state == "succeeded"` reads as it looks."""

    WAITING = "waiting"
    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    DEAD = "dead"


class AttemptState(StrEnum):
    """Where one try at a job is."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    RELEASED = "released"
    CANCELLED = "cancelled"


class WorkerState(StrEnum):
    """Where one process start that runs jobs is."""

    ACTIVE = "active"
    DRAINING = "draining"
    STOPPED = "stopped"
    LOST = "lost"


class Event(StrEnum):
    """The name of a job's move. Several lead to one state; logs, metrics and history tell them
    apart by the event.
    """

    ENQUEUE = "enqueue"
    UNBLOCK = "unblock"
    CLAIM = "claim"
    SUCCEED = "succeed"
    RETRY = "retry"
    SNOOZE = "snooze"
    RELEASE = "release"
    SUSPEND = "suspend"
    RECOVER = "recover"
    BURY = "bury"
    DROP = "drop"
    ASK_CANCEL = "ask_cancel"
    CANCEL = "cancel"
    EXPIRE = "expire"
    REQUEUE = "requeue"
    DISCARD = "discard"


class WorkerEvent(StrEnum):
    """The name of a worker's move."""

    START = "start"
    DRAIN = "drain"
    STOP = "stop"
    LOSE = "lose"


_J, _A, _E = JobState, AttemptState, Event

BORN: frozenset[JobState] = frozenset({_J.WAITING, _J.QUEUED})
"""The states in which `enqueue` may create a job."""

JOB_MOVES: Mapping[tuple[JobState, Event], JobState] = {
    (_J.WAITING, _E.UNBLOCK): _J.QUEUED,
    (_J.WAITING, _E.CANCEL): _J.CANCELLED,
    (_J.WAITING, _E.EXPIRE): _J.CANCELLED,
    (_J.QUEUED, _E.CLAIM): _J.RUNNING,
    (_J.QUEUED, _E.CANCEL): _J.CANCELLED,
    (_J.QUEUED, _E.EXPIRE): _J.CANCELLED,
    (_J.RUNNING, _E.SUCCEED): _J.SUCCEEDED,
    (_J.RUNNING, _E.RETRY): _J.QUEUED,
    (_J.RUNNING, _E.SNOOZE): _J.QUEUED,
    (_J.RUNNING, _E.RELEASE): _J.QUEUED,
    (_J.RUNNING, _E.SUSPEND): _J.WAITING,
    (_J.RUNNING, _E.RECOVER): _J.QUEUED,
    (_J.RUNNING, _E.BURY): _J.DEAD,
    (_J.RUNNING, _E.DROP): _J.CANCELLED,
    (_J.RUNNING, _E.ASK_CANCEL): _J.CANCELLING,
    (_J.CANCELLING, _E.SUCCEED): _J.SUCCEEDED,
    (_J.CANCELLING, _E.CANCEL): _J.CANCELLED,
    (_J.DEAD, _E.REQUEUE): _J.QUEUED,
    (_J.DEAD, _E.DISCARD): _J.CANCELLED,
}
"""Every legal move of a job: (state, event) leads to a state."""

ATTEMPT_ENDS: Mapping[tuple[JobState, Event], frozenset[AttemptState]] = {
    (_J.WAITING, _E.CANCEL): frozenset({_A.CANCELLED}),
    (_J.WAITING, _E.EXPIRE): frozenset({_A.CANCELLED}),
    (_J.QUEUED, _E.CANCEL): frozenset({_A.CANCELLED}),
    (_J.QUEUED, _E.EXPIRE): frozenset({_A.CANCELLED}),
    (_J.RUNNING, _E.SUCCEED): frozenset({_A.SUCCEEDED}),
    (_J.RUNNING, _E.RETRY): frozenset({_A.FAILED}),
    (_J.RUNNING, _E.SNOOZE): frozenset({_A.RELEASED}),
    (_J.RUNNING, _E.RELEASE): frozenset({_A.RELEASED}),
    (_J.RUNNING, _E.SUSPEND): frozenset({_A.RELEASED}),
    (_J.RUNNING, _E.RECOVER): frozenset({_A.LOST}),
    (_J.RUNNING, _E.BURY): frozenset({_A.FAILED, _A.LOST}),
    (_J.RUNNING, _E.DROP): frozenset({_A.CANCELLED}),
    (_J.CANCELLING, _E.SUCCEED): frozenset({_A.SUCCEEDED}),
    (_J.CANCELLING, _E.CANCEL): frozenset({_A.CANCELLED, _A.FAILED, _A.LOST, _A.RELEASED}),
}
"""Which moves close the job's latest attempt, and how that attempt may have ended."""

ATTEMPT_MOVES: Mapping[AttemptState, frozenset[AttemptState]] = {
    _A.QUEUED: frozenset({_A.RUNNING, _A.CANCELLED}),
    _A.RUNNING: frozenset({_A.SUCCEEDED, _A.FAILED, _A.LOST, _A.RELEASED, _A.CANCELLED}),
    _A.SUCCEEDED: frozenset(),
    _A.FAILED: frozenset(),
    _A.LOST: frozenset(),
    _A.RELEASED: frozenset(),
    _A.CANCELLED: frozenset(),
}
"""Every legal move of an attempt. A closed attempt is history and never changes."""

WORKER_MOVES: Mapping[tuple[WorkerState, WorkerEvent], WorkerState] = {
    (WorkerState.ACTIVE, WorkerEvent.DRAIN): WorkerState.DRAINING,
    (WorkerState.ACTIVE, WorkerEvent.STOP): WorkerState.STOPPED,
    (WorkerState.ACTIVE, WorkerEvent.LOSE): WorkerState.LOST,
    (WorkerState.DRAINING, WorkerEvent.STOP): WorkerState.STOPPED,
    (WorkerState.DRAINING, WorkerEvent.LOSE): WorkerState.LOST,
}
"""Every legal move of a worker. One that was stopped or lost never comes back: a new start is a new
worker.
"""

OWNED: frozenset[JobState] = frozenset({_J.RUNNING, _J.CANCELLING})
"""The states in which a worker owns the job."""

TERMINAL: frozenset[JobState] = frozenset({_J.SUCCEEDED, _J.CANCELLED})
"""The states that a job never leaves."""

JOB_MEANING: Mapping[JobState, str] = {
    _J.WAITING: "for other jobs, a signal or a timer of its own",
    _J.QUEUED: "its next attempt waits for a worker, not before its due time",
    _J.RUNNING: "its latest attempt is running under a live lease",
    _J.CANCELLING: "the owner has been asked to stop",
    _J.SUCCEEDED: "done",
    _J.CANCELLED: "stopped on request, expired before it began, or discarded",
    _J.DEAD: "out of attempts; quarantined until a human requeues or discards it",
}
"""One line about each job state, for the tables that people read."""

ATTEMPT_MEANING: Mapping[AttemptState, str] = {
    _A.QUEUED: "waits for a worker",
    _A.RUNNING: "one worker owns it",
    _A.SUCCEEDED: "the work completed",
    _A.FAILED: "it stopped with an error: an exception, a time-out, a crash",
    _A.LOST: "its worker vanished",
    _A.RELEASED: "the worker gave it back unfinished: shutdown or snooze",
    _A.CANCELLED: "stopped on request",
}
"""One line about each attempt state."""

WORKER_MEANING: Mapping[WorkerState, str] = {
    WorkerState.ACTIVE: "claims and runs jobs",
    WorkerState.DRAINING: "claims no more, finishes what runs",
    WorkerState.STOPPED: "ended in order",
    WorkerState.LOST: "vanished: its lease ran out or its process died",
}
"""One line about each worker state."""


def allowed_events(state: JobState) -> list[Event]:
    """The events that a job in this state may meet, in table order."""
    return [event for (before, event) in JOB_MOVES if before is state]


def mints_attempt(before: JobState, after: JobState) -> bool:
    """Whether a move opens the next attempt: attempt n+1 is minted when attempt n is behind the
    job.
    """
    return before in {_J.RUNNING, _J.DEAD} and after in BORN
