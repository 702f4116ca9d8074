"""Every move there could be, tried on a real database and held against the table of the life of a
job.

Each function yields a line for every cell where the database does not do what `lifecycle.py` says:
the tests of the tables demand that there is none, the tests of the guards that a broken guard
yields one. Whatever is tried is rolled back, so a cell starts from jobs that were brought where
they are by legal moves.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from msgspec.structs import replace

from onward.job import Change, Job
from onward.lifecycle import (
    ATTEMPT_ENDS,
    BORN,
    JOB_MOVES,
    OWNED,
    TERMINAL,
    WORKER_MOVES,
    AttemptState,
    Event,
    JobState,
    WorkerState,
    mints_attempt,
)
from onward.store import store
from onward.store.database import Database, Refused
from onward.store.statements import Op, Statement
from tests.store.builders import (
    DATABASE_ERRORS,
    START,
    TASK,
    Hand,
    apply,
    claim,
    get,
    hand,
    in_state,
    new_id,
    register,
    release,
    running,
)

LIVE = [state for state in JobState if state not in TERMINAL]


def specimens(database: Database) -> dict[JobState, Job]:
    """One job in each state, on its second attempt or a later one, each in a lane of its own."""
    found: dict[JobState, Job] = {}
    for lane, state in enumerate(JobState):
        worker = register(database, lease=1e6)
        apply(database, release(running(database, worker, priority=lane)))
        (job,) = claim(database, worker, lane=("default", lane))
        found[state] = in_state(database, state, job=job)
    return found


# --- through the store: hand-made changes ---------------------------------------------------------


class Tried(NamedTuple):
    """What became of an operation that was rolled back: the ids it took, or why it was refused; and
    the jobs then.
    """

    taken: set[str]
    refused: str
    rows: dict[str, tuple[Any, ...]]


class RolledBack(Exception):
    """Ends an operation, so that nothing of it stays; carries what it saw."""

    def __init__(self, taken: set[str], rows: dict[str, tuple[Any, ...]]) -> None:
        self.taken = taken
        self.rows = rows


def _tried(database: Database, op: Op[set[str]]) -> Tried:
    def rehearse() -> Op[NoReturn]:
        yield Statement("now", {}, alone=False)
        taken = yield from op
        raise RolledBack(taken, (yield from _rows()))

    try:
        database.run(rehearse)
    except RolledBack as end:
        return Tried(end.taken, "", end.rows)
    except Refused as error:
        return Tried(set(), str(error), {})
    raise AssertionError("the rehearsal did not end")


def _rows() -> Op[dict[str, tuple[Any, ...]]]:
    """State, attempt, owner and counters of every job."""
    filters = {"before": None, "state": None, "queue": None, "task": None, "limit": 1000}
    rows = yield Statement("list", filters)
    return {row[0]: row[4:11] for row in rows}


class Move(NamedTuple):
    """A move that could be asked for, whether it exists or not."""

    before: JobState
    after: JobState
    event: Event
    ended: AttemptState | None

    @property
    def legal(self) -> bool:
        ends: Sequence[AttemptState | None] = sorted(
            ATTEMPT_ENDS.get((self.before, self.event), ())
        )
        return JOB_MOVES.get((self.before, self.event)) is self.after and (
            self.ended in (ends or [None])
        )

    def __str__(self) -> str:
        return f"{self.before} > {self.after} ({self.event}, attempt {self.ended or 'stays open'})"


def moves() -> Iterator[Move]:
    """Every pair of states, with each event that leads to the second from anywhere, and each end it
    may bring.

    Where the table has the pair, only its own events: the databases compare states, not the words
    for them.
    """
    for before, after in itertools.product(JobState, JobState):
        events = {event for (state, event), to in JOB_MOVES.items() if to is after}
        own = {event for event in events if JOB_MOVES.get((before, event)) is after}
        for event in sorted(own or events):
            sources = [before] if own else JobState
            ends = {end for state in sources for end in ATTEMPT_ENDS.get((state, event), ())}
            options: list[AttemptState | None] = [*sorted(ends)]
            for ended in options or [None]:
                yield Move(before, after, event, ended)


def change_of(job: Job, move: Move) -> Change:
    """The change, made by hand: no table was asked."""
    minted = mints_attempt(move.before, move.after)
    return Change(
        id=job.id,
        task=job.task,
        event=move.event,
        before=move.before,
        after=move.after,
        attempt=job.attempt,
        worker=job.worker,
        next_attempt=job.attempt + minted,
        budget_from=job.budget_from,
        failures=job.failures,
        losses=job.losses,
        ended=move.ended,
        result="null" if move.after is JobState.SUCCEEDED else None,
    )


def through_apply(database: Database) -> Iterator[str]:
    """A change takes if its job is as it was seen and the table has the move; a stale one is passed
    over in silence.
    """
    jobs = specimens(database)
    others = {state: register(database, lease=1e6) for state in JobState}
    rows = database.read(_rows)
    for move in moves():
        seen = jobs[move.before]
        stale = {
            "another state": [
                change_of(job, move) for state, job in jobs.items() if state is not move.before
            ],
            "an earlier attempt": [replace(change_of(seen, move), attempt=seen.attempt - 1)],
            "a later attempt": [replace(change_of(seen, move), attempt=seen.attempt + 1)],
            "another worker": [replace(change_of(seen, move), worker=others[move.before])],
            "no worker": [replace(change_of(seen, move), worker=None)] if seen.worker else [],
        }
        for wrong, changes in stale.items():
            tried = _tried(database, store.apply(changes))
            if tried.taken or tried.refused or tried.rows != rows:
                yield f"apply {move}, seen with {wrong}: {tried.refused or 'it took'}"
        yield from _as_seen(database, seen, move, rows)


def _as_seen(
    database: Database, job: Job, move: Move, rows: dict[str, tuple[Any, ...]]
) -> Iterator[str]:
    change = change_of(job, move)
    tried = _tried(database, store.apply([change]))
    moved = bool(tried.rows) and tried.rows[job.id][0] != job.state
    if (
        move.legal and move.event is not Event.CLAIM
    ):  # A claim names an owner, which a change cannot.
        found = tried.rows.get(job.id, ())[:2]
        if tried.taken != {job.id} or found != (move.after, change.next_attempt):
            yield f"apply {move}, as seen: {tried.refused or 'it did not take'}"
        elif {k: v for k, v in tried.rows.items() if k != job.id} != {
            k: v for k, v in rows.items() if k != job.id
        }:
            yield f"apply {move}, as seen: it touched another job"
        for skipped in (-1, 1):
            if move.after in TERMINAL:
                continue
            other = replace(change, next_attempt=change.next_attempt + skipped, budget_from=1)
            if not _tried(database, store.apply([other])).refused:
                yield f"apply {move}, to attempt {other.next_attempt}: it was not refused"
    elif moved or not (tried.refused or move.before in {move.after, *TERMINAL}):
        yield f"apply {move}, as seen: it was not refused"


def through_claim(database: Database) -> Iterator[str]:
    """A claim takes a queued job for an active worker, and passes over everything else in silence."""
    jobs = specimens(database)
    workers = {"unknown": new_id()} | {
        state.value: worker_in(database, state) for state in WorkerState
    }
    rows = database.read(_rows)

    def claim_as(worker: str, lane: int) -> Op[set[str]]:
        taken = yield from store.claim(worker, store.dumps([TASK]), ("default", lane), START, 10)
        return {one.job.id for one in taken}

    for lane, (state, job) in enumerate(jobs.items()):
        for name, worker in workers.items():
            wanted = (state, Event.CLAIM) in JOB_MOVES and name == WorkerState.ACTIVE
            tried = _tried(database, claim_as(worker, lane))
            expected = {job.id} if wanted else set()
            others = {id_ for id_ in rows if id_ != job.id or not wanted}
            if tried.refused or tried.taken != expected:
                what = tried.refused or "it was taken" if not wanted else "it was not taken"
                yield f"claim of a {state} job by the {name} worker: {what}"
            elif any(tried.rows[id_] != rows[id_] for id_ in others):
                yield f"claim of a {state} job by the {name} worker: it touched another job"


def worker_in(database: Database, state: WorkerState) -> str:
    """A worker of its own in this state."""
    worker = register(database, lease=1e6)
    if state is WorkerState.DRAINING:
        database.run(store.drain, worker)
    elif state is WorkerState.STOPPED:
        database.run(store.stop, worker, "done")
    elif state is WorkerState.LOST:
        database.run(store.lose, worker, "killed")
    return worker


# --- past the store: bare SQL ---------------------------------------------------------------------


def attempted(dba: Hand, *statements: tuple[str, dict[str, Any]]) -> tuple[bool, str]:
    """Whether statements were all carried out, or the message of the one that was refused; rolled
    back either way.
    """
    try:
        with dba.undone():
            for text, values in statements:
                dba.sql(text, **values)
    except DATABASE_ERRORS as error:
        return False, str(error)
    return True, ""


MOVE = """
UPDATE onward.job SET state = :state, attempt = attempt + :more, worker = :worker,
    started_at = CASE WHEN CAST(:begun AS integer) = 1 THEN coalesce(started_at, {now}) END,
    finished_at = CASE WHEN CAST(:dead AS integer) = 1 THEN {now} END
WHERE id = :id
"""


def by_update(database: Database) -> Iterator[str]:
    """A DBA's UPDATE moves a live row only as the table says, with the next attempt, and never to
    another owner.
    """
    jobs = specimens(database)
    with hand(database) as dba:
        for before, after in itertools.product(LIVE, JobState):
            for more, owner in itertools.product((-1, 0, 1, 2), ("same", "other", "contrary")):
                yield from _one_update(dba, jobs[before], after, more, owner)


def _one_update(dba: Hand, job: Job, after: JobState, more: int, owner: str) -> Iterator[str]:
    keeps = job.worker if owner == "same" else new_id()
    worker = (keeps or new_id()) if (after in OWNED) != (owner == "contrary") else None
    begun = after in OWNED or after is JobState.DEAD
    values = {"state": after.value, "more": more, "worker": worker, "id": job.id}
    values |= {"begun": int(begun), "dead": int(after is JobState.DEAD)}
    done, message = attempted(dba, (MOVE.format(now=dba.clock), values))
    named = any(s is job.state and to is after for (s, _), to in JOB_MOVES.items())
    stays = job.state is after
    counted = more == mints_attempt(job.state, after) and not (stays and more)
    stolen = job.state in OWNED and after in OWNED and worker != job.worker
    owned = (worker is not None) == (after in OWNED) and not stolen
    legal = (named or stays) and counted and owned and after not in TERMINAL
    cell = f"UPDATE {job.state} > {after}, attempt {more:+}, {owner} owner"
    if done != legal:
        yield f"{cell}: {'it was carried out' if done else message}"
    elif not done and not _readable(message):
        yield f"{cell}: the message says nothing: {message}"


def _readable(message: str) -> bool:
    """Whether a refusal says what it is about: in our own words, or with the name of a constraint."""
    return "onward: job refuses" in message or "constraint" in message.lower()


def _named(message: str) -> bool:
    """Whether a refusal of a row says which rule it breaks. (A trigger of SQLite's has one text.)"""
    return re.search(r"constraint|refuses .*, with \w", message, re.IGNORECASE) is not None


FINISH = """
INSERT INTO onward.finished (id, task, queue, priority, state, attempt, run_at, worker, started_at, finished_at,
    created_at, max_attempts, max_losses, failures, losses, budget_from, args, ended_from, event, attempt_state, result)
VALUES (:id, 't', 'q', 0, :state, :attempt, {now}, :worker, {now}, {now}, {now}, 3, 3, 0, 0, 1, '',
    :ended_from, :event, :ended, :result)
"""
DELETE = "DELETE FROM onward.job WHERE id = :id"


def _finished_row(
    id_: str, move: Move, *, attempt: int = 1, worker: str | None = None
) -> dict[str, Any]:
    """A row of the cold table in which nothing is wrong but, perhaps, the move."""
    owner = (worker or new_id()) if move.before in OWNED else None
    return {
        "id": id_,
        "state": move.after.value,
        "attempt": attempt,
        "worker": owner,
        "ended_from": move.before.value,
        "event": move.event.value,
        "ended": move.ended.value if move.ended else None,
        "result": "null" if move.after is JobState.SUCCEEDED else None,
    }


def by_leaving(database: Database) -> Iterator[str]:
    """A live row is deleted only if the cold table has it, ended from the state, attempt and owner
    that it has.
    """
    jobs = specimens(database)
    endings = [move for move in moves() if move.legal and move.after in TERMINAL]
    with hand(database) as dba:
        for state in LIVE:
            job = jobs[state]
            done, message = attempted(dba, (DELETE, {"id": job.id}))
            if done or "onward: job refuses" not in message:
                yield f"DELETE of a {state} job with no trace: {message or 'it was carried out'}"
            for move, shift, own in itertools.product(endings, (0, -1, 1), (True, False)):
                worker = job.worker if own else None
                row = _finished_row(job.id, move, attempt=job.attempt + shift, worker=worker)
                insert = (FINISH.format(now=dba.clock), row)
                same = move.before is state and shift == 0 and (own or job.worker is None)
                done, message = attempted(dba, insert, (DELETE, {"id": job.id}))
                if done != same:
                    cell = f"{state} > {move.after} as ended from {move.before}"
                    wrong = f"attempt {shift:+}, {'own' if own else 'other'} worker"
                    yield f"leaving {cell}, {wrong}: {message or 'it was carried out'}"


def by_finishing(database: Database) -> Iterator[str]:
    """The cold table takes a row only if its last move is one of the table's."""
    everything = itertools.product(JobState, JobState, Event, [None, *AttemptState])
    cells = list(itertools.starmap(Move, everything))
    cells.sort(key=lambda move: move.after not in TERMINAL)  # A broken guard shows early.
    with hand(database) as dba:
        taken = _taken(dba, [_finished_row(new_id(), move) for move in cells])
        for move, done in zip(cells, taken, strict=True):
            if done != (move.legal and move.after in TERMINAL):
                yield f"INSERT of finished {move}: {'carried out' if done else 'refused'}"
        discard = Move(JobState.DEAD, JobState.CANCELLED, Event.DISCARD, None)
        for ended in ("none", ""):  # No attempt is NULL, and no text for it.
            (done,) = _taken(dba, [_finished_row(new_id(), discard) | {"ended": ended}])
            if done:
                yield f"INSERT of finished {discard} with the attempt {ended!r}: carried out"


def _taken(dba: Hand, rows: Sequence[dict[str, Any]]) -> Iterator[bool]:
    """Which of these rows the cold table would take, each tried by itself and undone."""
    if dba.dialect == "sqlite":
        for row in rows:
            yield attempted(dba, (FINISH.format(now=dba.clock), row))[0]
        return
    dba.sql(TAKES)  # Six thousand round trips would take seconds.
    for start in range(0, len(rows), 400):
        answers = dba.sql(
            "SELECT pg_temp.takes(r) FROM json_array_elements(CAST(:rows AS json)) AS r",
            rows=store.dumps(rows[start : start + 400]),
        )
        yield from (answer[0] for answer in answers)


TAKES = """
CREATE OR REPLACE FUNCTION pg_temp.takes(r json) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO onward.finished (id, task, queue, priority, state, attempt, run_at, worker, started_at, finished_at,
        created_at, max_attempts, max_losses, failures, losses, budget_from, args, ended_from, event, attempt_state, result)
    SELECT id, 't', 'q', 0, state, attempt, now(), worker, now(), now(), now(), 3, 3, 0, 0, 1, '', ended_from, event,
        ended, result
    FROM json_to_record(r) AS r (id uuid, state text, attempt integer, worker uuid, ended_from text, event text,
        ended text, result text);
    RAISE EXCEPTION 'undo' USING ERRCODE = 'ON001';
EXCEPTION
    WHEN SQLSTATE 'ON001' THEN RETURN true;
    WHEN check_violation THEN RETURN false;
END $$
"""


CLOSE = """
INSERT INTO onward.attempt (job, number, state, event, worker, started_at, ended_at)
VALUES (:job, 1, :state, :event, :worker, {now}, {now})
"""


def of_endings(database: Database) -> Iterator[str]:
    """History takes the end of an attempt only with an event that ends it so and leaves its job
    live.
    """
    legal = {
        (event, end)
        for (before, event), after in JOB_MOVES.items()
        if after not in TERMINAL
        for end in ATTEMPT_ENDS.get((before, event), ())
    }
    with hand(database) as dba:
        for event, end in itertools.product(Event, AttemptState):
            values = {"job": new_id(), "state": end.value, "event": event.value, "worker": new_id()}
            done, message = attempted(dba, (CLOSE.format(now=dba.clock), values))
            if done != ((event, end) in legal):
                yield f"INSERT of attempt {end} by {event}: {message or 'it was carried out'}"


NEVER = {"sqlite": "9e999", "postgres": "CAST('infinity' AS timestamptz)"}
ALWAYS = {"sqlite": "-9e999", "postgres": "CAST('-infinity' AS timestamptz)"}
"""Times at the ends of time, in each dialect."""

BIRTH = """
INSERT INTO onward.job (id, task, queue, priority, state, attempt, run_at, worker, started_at, finished_at, created_at,
    max_attempts, max_losses, failures, losses, budget_from, args)
VALUES (:id, 't', 'q', 0, :state, :attempt, {due}, :worker, {begun}, {dead}, {now}, 3, 3, :failures, :losses,
    {budget}, '')
"""


def by_birth(database: Database) -> Iterator[str]:
    """A row is born waiting or queued, on its first attempt, with nothing charged."""
    with hand(database) as dba:
        for state, attempt, failures, losses in itertools.product(JobState, (1, 2), (0, 1), (0, 1)):
            begun = state in OWNED or state is JobState.DEAD
            text = BIRTH.format(
                now=dba.clock,
                due=dba.clock,
                begun=dba.clock if begun else "NULL",
                dead=dba.clock if state is JobState.DEAD else "NULL",
                budget=1,
            )
            values: dict[str, Any] = {"id": new_id(), "state": state.value, "attempt": attempt}
            values |= {"worker": new_id() if state in OWNED else None}
            done, message = attempted(
                dba, (text, values | {"failures": failures, "losses": losses})
            )
            if done != (state in BORN and (attempt, failures, losses) == (1, 0, 0)):
                cell = f"attempt {attempt}, {failures} failures, {losses} losses"
                yield f"birth as {state}, {cell}: {message or 'it was carried out'}"
        yield from _old_births(dba)


def _old_births(dba: Hand) -> Iterator[str]:
    """A row cannot be born with what only comes later, or never."""
    fresh = {"due": dba.clock, "begun": "NULL", "dead": "NULL", "budget": "1"}
    later = {
        "an owner": ("queued", {}, new_id()),
        "a start": ("queued", {"begun": dba.clock}, None),
        "an end": ("queued", {"dead": dba.clock}, None),
        "the budget of a second attempt": ("queued", {"budget": "2"}, None),
        "the name of a later state": ("running", {}, None),
        "no due time that comes": ("queued", {"due": NEVER[dba.dialect]}, None),
        "no due time that came": ("queued", {"due": ALWAYS[dba.dialect]}, None),
    }
    for what, (state, spelt, worker) in later.items():
        text = BIRTH.format(now=dba.clock, **{**fresh, **spelt})
        values = {"id": new_id(), "state": state, "attempt": 1, "failures": 0, "losses": 0}
        done, _ = attempted(dba, (text, values | {"worker": worker}))
        if done:
            yield f"birth with {what}: it was carried out"


# --- workers and history --------------------------------------------------------------------------

WORKER_MOVE = """
UPDATE onward.worker SET state = :state,
    ended_at = CASE WHEN CAST(:over AS integer) = 1 THEN {now} END WHERE id = :id
"""


def of_workers(database: Database) -> Iterator[str]:
    """A worker moves only as its table says: whoever ended never comes back, by whatever hand."""
    with hand(database) as dba:
        for before, after in itertools.product(WorkerState, WorkerState):
            worker = worker_in(database, before)
            over = after in {WorkerState.STOPPED, WorkerState.LOST}
            values = {"id": worker, "state": after.value, "over": int(over)}
            done, message = attempted(dba, (WORKER_MOVE.format(now=dba.clock), values))
            live = before in {WorkerState.ACTIVE, WorkerState.DRAINING}
            named = any(s is before and to is after for (s, _), to in WORKER_MOVES.items())
            if done != (named or (live and before is after)):
                yield f"UPDATE of worker {before} > {after}: {message or 'it was carried out'}"
        yield from _worker_identity(database, dba)
        yield from _worker_times(database, dba)


def _worker_identity(database: Database, dba: Hand) -> Iterator[str]:
    for state in WorkerState:
        worker = worker_in(database, state)
        rename = "UPDATE onward.worker SET id = :new WHERE id = :id"
        done, _ = attempted(dba, (rename, {"id": worker, "new": new_id()}))
        if done:
            yield f"UPDATE of a {state} worker's id: it was carried out"


def _worker_times(database: Database, dba: Hand) -> Iterator[str]:
    worker = worker_in(database, WorkerState.ACTIVE)
    for column in ("lease_until", "beat_at"):
        for time in (NEVER[dba.dialect], ALWAYS[dba.dialect]):
            text = f"UPDATE onward.worker SET {column} = {time} WHERE id = :id"
            done, message = attempted(dba, (text, {"id": worker}))
            if done or "worker_times" not in message:
                yield f"{column} = {time}: {message or 'it was carried out'}"


def of_history(database: Database) -> Iterator[str]:
    """No column of a closed attempt or of a finished job can be set, not even to what it is; no job
    changes its id.
    """
    jobs = specimens(database)
    with hand(database) as dba:
        for table, _ in (("attempt", "job"), ("finished", "id")):
            (row,) = dba.sql(f"SELECT count(*) FROM onward.{table}")
            if row[0] == 0:
                yield f"onward.{table} is empty: nothing was tried"
            for column in _columns(dba, table):
                done, message = attempted(
                    dba, (f"UPDATE onward.{table} SET {column} = {column}", {})
                )
                if done or f"{table} refuses" not in message:
                    yield f"UPDATE of {table}.{column}: {message or 'it was carried out'}"
        for state in LIVE:
            rename = "UPDATE onward.job SET id = :new WHERE id = :id"
            done, _ = attempted(dba, (rename, {"id": jobs[state].id, "new": new_id()}))
            if done:
                yield f"UPDATE of a {state} job's id: it was carried out"


def _columns(dba: Hand, table: str) -> list[str]:
    if dba.dialect == "sqlite":
        return [row[1] for row in dba.sql(f"PRAGMA table_info(onward_{table})")]
    return [
        row[0]
        for row in dba.sql(
            "SELECT column_name FROM information_schema.columns"
            " WHERE table_schema = 'onward' AND table_name = :name",
            name=table,
        )
    ]


IMPOSSIBLE: dict[str, tuple[JobState, str]] = {
    "running without an owner": (JobState.RUNNING, "worker = NULL"),
    "cancelling without an owner": (JobState.CANCELLING, "worker = NULL"),
    "queued with an owner": (JobState.QUEUED, "worker = id"),
    "waiting with an owner": (JobState.WAITING, "worker = id"),
    "dead with an owner": (JobState.DEAD, "worker = id"),
    "running without a start": (JobState.RUNNING, "started_at = NULL"),
    "dead without a start": (JobState.DEAD, "started_at = NULL"),
    "queued with a start": (JobState.QUEUED, "started_at = run_at"),
    "waiting with a start": (JobState.WAITING, "started_at = run_at"),
    "dead without an end": (JobState.DEAD, "finished_at = NULL"),
    "running with an end": (JobState.RUNNING, "finished_at = run_at"),
    "queued with an end": (JobState.QUEUED, "finished_at = run_at"),
    "more failures than attempts": (JobState.RUNNING, "failures = max_attempts + 1"),
    "fewer failures than none": (JobState.RUNNING, "failures = -1"),
    "more losses than one too many": (JobState.RUNNING, "losses = max_losses + 2"),
    "fewer losses than none": (JobState.RUNNING, "losses = -1"),
    "a budget from before the first attempt": (JobState.QUEUED, "budget_from = 0"),
    "a budget from an attempt to come": (JobState.QUEUED, "budget_from = attempt + 1"),
    "no attempts to spend": (JobState.QUEUED, "max_attempts = 0"),
    "losses to spend below none": (JobState.QUEUED, "max_losses = -1"),
    "a priority out of range": (JobState.QUEUED, "priority = 101"),
    "a priority out of range below": (JobState.QUEUED, "priority = -101"),
    "a queue without a name": (JobState.QUEUED, "queue = ''"),
    "a task without a name": (JobState.QUEUED, "task = ''"),
    "no task": (JobState.QUEUED, "task = NULL"),
    "no arguments": (JobState.QUEUED, "args = NULL"),
    "no due time": (JobState.QUEUED, "run_at = NULL"),
    "no time to run": (JobState.QUEUED, "timeout = 0"),
    "a due time that never comes": (JobState.QUEUED, "run_at = {never}"),
    "a due time that has always been": (JobState.DEAD, "run_at = {always}"),
}


def of_rows(database: Database) -> Iterator[str]:
    """A row that says two things at once cannot be stored, whoever writes it."""
    jobs = specimens(database)
    with hand(database) as dba:
        for what, (state, columns) in IMPOSSIBLE.items():
            values = columns.format(never=NEVER[dba.dialect], always=ALWAYS[dba.dialect])
            text = f"UPDATE onward.job SET {values} WHERE id = :id"
            done, message = attempted(dba, (text, {"id": jobs[state].id}))
            if done or not (_named if dba.dialect == "postgres" else _readable)(message):
                yield f"{what}: {message or 'it was carried out'}"


def unchanged(database: Database, jobs: dict[JobState, Job]) -> bool:
    """Whether every specimen is as it was made: whatever was tried has been rolled back."""
    return all(get(database, job.id) == job for job in jobs.values())
