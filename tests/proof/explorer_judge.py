"""Judges a deed by the rows before and after it: was each change a legal move, made by whoever may?

The rules are those of the contract that speak of moves: M1 and M3, L1 to L4 and L6, R1, X1, and
that a deed says what it did. They are written from the tables of `lifecycle.py` and from the
deed, never from what the statement did.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from onward.job import Change
from onward.lifecycle import (
    ATTEMPT_ENDS,
    BORN,
    JOB_MOVES,
    TERMINAL,
    WORKER_MOVES,
    AttemptState,
    Event,
    JobState,
    WorkerEvent,
    WorkerState,
    mints_attempt,
)
from tests.proof.explorer_deeds import Deed
from tests.proof.explorer_place import NOW, Bounds, Dump, Names, Row
from tests.proof.explorer_state import LIVE_WORKER, NOBODY

OWNED = frozenset({"running", "cancelling"})
CONSTANT = ("task", "queue", "priority", "created_at", "max_attempts", "max_losses", "args")
SILENT = {
    ("queued", "running"): Event.CLAIM,
    ("running", "cancelling"): Event.ASK_CANCEL,
    ("dead", "queued"): Event.REQUEUE,
}
"""Moves that leave no record of their event."""
LATER = frozenset({Event.RETRY, Event.SNOOZE})
"""Moves after which the job is due a tick later."""


class Case(NamedTuple):
    """A deed, what was there before and after it, what it answered, and what it meant to write."""

    deed: Deed
    before: Dump
    after: Dump
    answer: Any
    ids: Names
    bounds: Bounds
    changes: tuple[Change, ...]

    @property
    def worker(self) -> str:
        return self.ids.worker(self.deed.worker)

    def live(self, worker: str | None) -> bool:
        """Whether this worker lived before the deed."""
        row = self.before.workers.get(worker or "")
        return row is not None and row["state"] in LIVE_WORKER


def judge(case: Case) -> Iterator[str]:
    """What was wrong with the deed; nothing, if it was right."""
    moved: dict[str, Event] = {}
    if case.after is not case.before:
        for id_ in case.ids.jobs:
            yield from _judge_job(case, id_, moved)
        yield from _judge_history(case, moved)
        yield from _judge_workers(case)
    yield from _RULES.get(case.deed.kind, _moves_nothing)(case, moved)


# --- one job --------------------------------------------------------------------------------------


def _judge_job(case: Case, id_: str, moved: dict[str, Event]) -> Iterator[str]:
    live, cold = case.after.jobs.get(id_), case.after.finished.get(id_)
    if live and cold:
        yield f"M2 {id_} is in both tables"
    if was := case.before.finished.get(id_):
        if cold != was or live:
            yield f"M3 {id_} was finished, and changed"
        return
    before, after = case.before.jobs.get(id_), live or cold
    if before is None:
        if after is not None:
            yield from _judge_birth(case, after)
            moved[id_] = Event.ENQUEUE
    elif after is None:
        yield f"D1 {id_} is gone"
    elif _same(before, after, "run_at"):
        if case.deed.kind != "hold" and after["run_at"] != before["run_at"]:
            yield f"{id_} is due at another time"
    elif before != after:
        yield from _judge_move(case, before, after, moved)


def _same(before: Row, after: Row, *but: str) -> bool:
    return before.keys() == after.keys() and all(
        before[name] == after[name] for name in before if name not in but
    )


def _judge_birth(case: Case, row: Row) -> Iterator[str]:
    if row["state"] not in BORN or row["attempt"] != 1 or row["run_at"] < NOW:
        yield f"M1 {row['id']} is born {row['state']}"
    born_by = {"enqueue", "again"} if case.deed.kind != "apply" else {"apply"}
    if case.deed.kind not in born_by:
        yield f"D2 {row['id']} comes from nowhere"


def _judge_move(case: Case, before: Row, after: Row, moved: dict[str, Event]) -> Iterator[str]:
    id_, was, now = before["id"], JobState(before["state"]), JobState(after["state"])
    closed = case.after.attempts.get((id_, before["attempt"]))
    if (id_, before["attempt"]) in case.before.attempts:
        closed = None  # Of a dead job, whose last attempt was closed before.
    event, end = _told(was, now, after, closed)
    arrow = f"{id_} {was} > {now} by {event}"
    if event is None or JOB_MOVES.get((was, event)) is not now:
        yield f"M1 {arrow} is no move"
        return
    moved[id_] = event
    if end not in ATTEMPT_ENDS.get((was, event), frozenset({None})):
        yield f"M1 {arrow}: the attempt ended {end}"
    if after["attempt"] != before["attempt"] + mints_attempt(was, now):
        yield f"L2 {arrow}: attempt {before['attempt']} > {after['attempt']}"
    if any(before[name] != after[name] for name in CONSTANT):
        yield f"M4 {arrow}: what never changes changed"
    if closed and not _closed_rightly(before, closed):
        yield f"M2 {arrow}: the closed attempt is not what was running: {closed}"
    yield from _judge_columns(before, after, event, arrow)
    yield from _judge_budget(before, after, event, end, arrow)


def _told(
    was: JobState, now: JobState, after: Row, closed: Row | None
) -> tuple[Event | None, AttemptState | None]:
    """By which event the job says that it moved, and how its attempt ended."""
    if now in TERMINAL:
        end = after["attempt_state"]
        if after["ended_from"] != was:
            return None, None
        return Event(after["event"]), AttemptState(end) if end else None
    if closed is not None:
        return Event(closed["event"]), AttemptState(closed["state"])
    return SILENT.get((was, now)), None


def _closed_rightly(before: Row, closed: Row) -> bool:
    return (closed["worker"], closed["started_at"], closed["ended_at"]) == (
        before["worker"],
        before["started_at"],
        NOW,
    )


def _judge_columns(before: Row, after: Row, event: Event, arrow: str) -> Iterator[str]:
    if event is Event.CLAIM:
        if after["started_at"] != NOW or before["run_at"] > NOW:
            yield f"R1 {arrow}: started at {after['started_at']}, due at {before['run_at']}"
    elif after["state"] == "queued":
        least = NOW + (event in LATER)
        if after["run_at"] < least:
            yield f"R1 {arrow}: due again at {after['run_at']}"
        if event in {Event.RELEASE, Event.RECOVER, Event.REQUEUE} and after["run_at"] > NOW:
            yield f"D4 {arrow}: due only at {after['run_at']}"
    elif after["state"] in {"dead", "succeeded", "cancelled"} and after["finished_at"] != NOW:
        yield f"M4 {arrow}: ended at {after['finished_at']}"
    if after["state"] == "cancelling" and after["worker"] != before["worker"]:
        yield f"L3 {arrow}: another worker's"
    if "ended_from" in after and after["worker"] != before["worker"]:
        yield f"M4 {arrow}: ended by {after['worker']}"


def _judge_budget(
    before: Row, after: Row, event: Event, end: AttemptState | None, arrow: str
) -> Iterator[str]:
    charged = before["state"] == "running"
    failures = before["failures"] + (charged and end is AttemptState.FAILED)
    losses = before["losses"] + (charged and end is AttemptState.LOST)
    from_ = before["budget_from"]
    if event is Event.REQUEUE:
        failures, losses, from_ = 0, 0, after["attempt"]
    if (after["failures"], after["losses"], after["budget_from"]) != (failures, losses, from_):
        yield f"L4 {arrow}: {after['failures']} failures, {after['losses']} losses"
    if event is Event.RETRY and failures >= before["max_attempts"]:
        yield f"L4 {arrow}: {failures} failures and another try"
    if event is Event.RECOVER and losses > before["max_losses"]:
        yield f"L4 {arrow}: {losses} losses and another try"


# --- history and workers --------------------------------------------------------------------------


def _judge_history(case: Case, moved: Collection[str]) -> Iterator[str]:
    for key, row in case.before.attempts.items():
        if case.after.attempts.get(key) != row:
            yield f"M3 attempt {key} was closed, and changed"
    for id_, number in case.after.attempts.keys() - case.before.attempts.keys():
        if id_ not in moved:
            yield f"M2 attempt {number} of {id_} was closed, and the job did not move"
    if case.after.refusals and case.deed.kind != "look":
        yield "a refusal that nobody was told"


_WORKER_EVENTS = {
    "drain": WorkerEvent.DRAIN,
    "stop": WorkerEvent.STOP,
    "lose": WorkerEvent.LOSE,
    "bury": WorkerEvent.LOSE,
}


def _judge_workers(case: Case) -> Iterator[str]:
    for id_ in case.ids.workers:
        before, after = case.before.workers.get(id_), case.after.workers.get(id_)
        own = id_ == case.worker
        if before is None:
            if after is not None and not (own and case.deed.kind == "register"):
                yield f"worker {id_} comes from nowhere"
        elif after is None:
            yield f"worker {id_} is gone"
        elif before["state"] != after["state"]:
            event = _WORKER_EVENTS.get(case.deed.kind) if own else None
            move = (WorkerState(before["state"]), event)
            if event is None or WORKER_MOVES.get((move[0], event)) != after["state"]:
                yield f"M1 worker {id_}: {before['state']} > {after['state']}"
            if after["state"] == "lost" and after["lease_until"] > NOW:
                yield f"L1 worker {id_} is lost and has a lease"
        elif before["lease_until"] != after["lease_until"] and not (
            own and case.deed.kind == "beat" and before["state"] in LIVE_WORKER
        ):
            yield f"L6 worker {id_}: its lease changed"
        shorter = before and after and after["lease_until"] < before["lease_until"]
        if shorter and after and after["state"] != "lost":
            yield f"L6 worker {id_}: its lease was shortened"


# --- what each deed may do, and must --------------------------------------------------------------

Moved = dict[str, Event]


def _moves_nothing(case: Case, moved: Moved) -> Iterator[str]:
    if moved:
        yield f"L3 {case.deed.kind} moved {moved}"


def _register(case: Case, moved: Moved) -> Iterator[str]:
    yield from _moves_nothing(case, moved)
    row = case.after.workers.get(case.worker)
    if row is None or row["state"] != "active" or row["lease_until"] != NOW + case.bounds.lease:
        yield f"a worker registered as {row}"


def _beat(case: Case, moved: Moved) -> Iterator[str]:
    yield from _moves_nothing(case, moved)
    if case.answer != case.live(case.worker):
        yield f"L6 a beat says alive={case.answer} of {case.before.workers[case.worker]['state']}"
    lease = case.after.workers[case.worker]["lease_until"]
    if case.answer and case.deed.how != "short" and lease < NOW + case.bounds.lease:
        yield "L6 a beat did not renew the lease"


def _lose(case: Case, moved: Moved) -> Iterator[str]:
    yield from _moves_nothing(case, moved)
    before = case.before.workers[case.worker]
    over = {"proven": True, "seen": before["lease_until"] < NOW, "stale": False}[case.deed.how]
    may = case.live(case.worker) and over
    took = case.after.workers[case.worker]["state"] != before["state"]
    if (took, bool(case.answer)) != (may, may):
        yield f"L1 lose ({case.deed.how}) of {before['state']}: took={took}, said {case.answer}"


def _worker_move(before: Collection[str]) -> Callable[[Case, Moved], Iterator[str]]:
    def rule(case: Case, moved: Moved) -> Iterator[str]:
        yield from _moves_nothing(case, moved)
        was = case.before.workers[case.worker]["state"]
        took = case.after.workers[case.worker]["state"] != was
        if (took, bool(case.answer)) != (was in before, was in before):
            yield f"{case.deed.kind} of {was}: took={took}, said {case.answer}"

    return rule


def _enqueue(case: Case, moved: Moved) -> Iterator[str]:
    id_ = case.ids.jobs[case.deed.job]
    new = id_ not in case.before.jobs and id_ not in case.before.finished
    if moved != ({id_: Event.ENQUEUE} if new else {}):
        yield f"D3 enqueue of one that was {'not ' if new else ''}there: {moved}"


def _claim(case: Case, moved: Moved) -> Iterator[str]:
    row = case.before.workers.get(case.worker)
    may = row is not None and row["state"] == "active" and case.deed.how != "strange"
    due = sorted(
        (job["run_at"], id_)
        for id_, job in case.before.jobs.items()
        if job["state"] == "queued" and job["run_at"] <= NOW
    )
    if case.deed.job != NOBODY:
        place = case.ids.jobs[case.deed.job]
        due = [one for one in due if one > (case.before.jobs[place]["run_at"], place)]
    wanted = [id_ for _, id_ in due[: case.deed.limit]] if may else []
    if moved != dict.fromkeys(wanted, Event.CLAIM):
        yield f"L1 a claim took {moved}, and {wanted} were to be taken"
    if any(case.after.jobs[id_]["worker"] != case.worker for id_ in moved):
        yield "L1 a claim gave a job to another"
    told: list[Any] = [(case.ids.jobs[one.job], one.attempt, one.seen) for one in case.answer]
    if told != [(id_, case.before.jobs[id_]["attempt"], "running") for id_ in wanted]:
        yield f"a claim of {wanted} says {told}"


def _apply(case: Case, moved: Moved) -> Iterator[str]:
    wanted: dict[str, Event] = {}
    for change in case.changes:
        row = case.before.jobs.get(change.id)
        if row and (row["state"], row["attempt"], row["worker"]) == (
            change.before,
            change.attempt,
            change.worker,
        ):
            wanted[change.id] = change.event
    taken: set[str] = {case.ids.jobs[job] for job in case.answer}
    if taken != set(wanted):
        yield f"L3 of the changes to {set(wanted)}, it says that {taken} took"
    for change in case.changes:
        if change.id in wanted:
            wanted |= {job.id: Event.ENQUEUE for job in change.follow_ups}
    if moved != wanted:
        yield f"L3 the writers still own {wanted}, and this moved: {moved}"


def _sweep(case: Case, moved: Moved) -> Iterator[str]:
    """Also of a burial, which ends one worker first."""
    buried = case.worker if case.deed.kind == "bury" else None
    left = None if case.deed.job == NOBODY else case.ids.jobs[case.deed.job]
    orphans = sorted(
        id_
        for id_, job in case.before.jobs.items()
        if job["state"] in OWNED
        and id_ != left
        and (job["worker"] == buried or not case.live(job["worker"]))
    )[: case.deed.limit]
    if sorted(moved) != orphans:
        yield f"D4 a sweep moved {moved}, and {orphans} have lost their worker"
    for id_, event in moved.items():
        cancelling = case.before.jobs[id_]["state"] == "cancelling"
        if event not in ({Event.CANCEL} if cancelling else {Event.RECOVER, Event.BURY}):
            yield f"a sweep moved {id_} by {event}"
        row = case.after.finished.get(id_) or case.after.attempts[id_, _attempt(case, id_)]
        if row.get("attempt_state", row["state"]) != "lost":
            yield f"a sweep's attempt ended {row['state']}"
    told: list[str] = [case.ids.jobs[job] for job in case.answer]
    if sorted(told) != sorted(moved):
        yield f"a sweep that moved {moved} says {case.answer}"


def _attempt(case: Case, id_: str) -> int:
    number: int = case.before.jobs[id_]["attempt"]
    return number


def _by_client(moves: dict[str, Event]) -> Callable[[Case, Moved], Iterator[str]]:
    def rule(case: Case, moved: Moved) -> Iterator[str]:
        id_ = case.ids.jobs[case.deed.job]
        row = case.before.jobs.get(id_) or case.before.finished[id_]
        event = moves.get(row["state"])
        if moved != ({id_: event} if event else {}):
            yield f"X1 {case.deed.kind} of {row['state']} moved {moved}"
        after = case.after.jobs.get(id_) or case.after.finished.get(id_) or {"state": "gone"}
        idle = case.deed.kind == "cancel" and row["state"] in {"cancelling", "cancelled"}
        said = after["state"] if event or idle else "illegal"
        if case.answer != said:
            yield f"X1 {case.deed.kind} of {row['state']} says {case.answer}"

    return rule


def _hold(case: Case, moved: Moved) -> Iterator[str]:
    yield from _moves_nothing(case, moved)
    id_ = case.ids.jobs[case.deed.job]
    before, after = case.before.jobs[id_], case.after.jobs.get(id_)
    may = before["state"] == "queued" and case.deed.how != "stale"
    due = max(before["run_at"], NOW + 1) if may else before["run_at"]
    if after is None or after["run_at"] != due or bool(case.answer) != may:
        yield f"hold of {before['state']} says {case.answer}: {after}"
    if case.before.jobs.keys() - {id_} and any(
        case.before.jobs[other] != case.after.jobs.get(other)
        for other in case.before.jobs.keys() - {id_}
    ):
        yield "hold changed another job"


def _look(case: Case, moved: Moved) -> Iterator[str]:
    yield from _moves_nothing(case, moved)
    ours, state = case.answer
    (change,) = case.changes
    row = case.before.jobs.get(change.id) or case.before.finished.get(change.id)
    own = row is not None and (row["state"], row["attempt"], row["worker"]) in {
        (state, change.attempt, change.worker) for state in OWNED
    }
    if (state is not None) != own or (ours and own):
        yield f"a look at {row} says ours={ours}, {state}"
    kept = [
        (one["job"], one["expected"], one["attempt"], one["worker"], one["found"])
        for one in case.after.refusals
    ]
    found = row["state"] if row else None
    wanted = [(change.id, change.before, change.attempt, change.worker, found)]
    if kept != ([] if ours or own else wanted):
        yield f"L3 the refusals are {kept}"


_RULES: dict[str, Callable[[Case, Moved], Iterator[str]]] = {
    "register": _register,
    "beat": _beat,
    "lose": _lose,
    "drain": _worker_move({"active"}),
    "stop": _worker_move(LIVE_WORKER),
    "enqueue": _enqueue,
    "again": _enqueue,
    "claim": _claim,
    "apply": _apply,
    "look": _look,
    "sweep": _sweep,
    "bury": _sweep,
    "hold": _hold,
    "cancel": _by_client(
        {
            "waiting": Event.CANCEL,
            "queued": Event.CANCEL,
            "running": Event.ASK_CANCEL,
        }
    ),
    "requeue": _by_client({"dead": Event.REQUEUE}),
    "discard": _by_client({"dead": Event.DISCARD}),
}
