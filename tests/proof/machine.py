"""Random stories, played on the model and on real databases at once: they must agree word by word.

A story is a list of (move, number); the number is the seed of all chances of its move, and the move
chooses among what the model knows by then. So a story is the same on every database, and what is
left of it after some moves were dropped is a story again: the shortest one that still fails is what
is printed.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import msgspec
import psycopg
from msgspec.structs import replace

from onward.app import cancel_change, discard_change, requeue_change
from onward.errors import OnwardError
from onward.invariants import CHECKS, run_check
from onward.job import Change, Job, NewJob
from onward.lifecycle import AttemptState, Event, JobState
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
    Stopped,
    TimedOut,
    recover,
    settle,
)
from onward.store import store
from onward.store.database import Database
from onward.store.sqlite import SqliteDatabase
from onward.store.sqlite_driver import driver
from onward.store.statements import Rows as Answers
from onward.store.store import FIRST_ID, Registration
from onward.store.url import open_database
from tests.proof.model import (
    Decided,
    End,
    Looked,
    Model,
    Wrong,
    cancel_of,
    end_of,
    only_from,
)
from tests.proof.power import broken
from tests.proof.report import Budget, Report, Technique
from tests.support import postgres
from tests.support.turns import WIPE

START = 1_800_000_000.0
"""The virtual clock begins here. All durations are multiples of 1/8 s, so that no database rounds
them.
"""

STEPS = 50
LONG = 200
CHECK_EVERY = 25
LENIENT = 1e9
"""Seconds for which a check of a state in between overlooks that nobody has swept."""

Story = Sequence[tuple[str, int]]
Rows = Mapping[str, Sequence[Sequence[Any]]]
"""All that is compared, by table."""

# --- the places -----------------------------------------------------------------------------------

LOOKS = {
    "jobs": (
        "id task queue priority args max_attempts max_losses timeout @run_at @created_at state"
        " attempt worker @started_at @finished_at failures losses budget_from ended_from event"
        " reason error result",
        "onward.jobs ORDER BY id",
    ),
    "attempts": (
        "job number state event worker @started_at @ended_at abandoned reason error",
        "onward.attempts ORDER BY job, number",
    ),
    "workers": (
        "id @lease_until @started_at @beat_at state idle @ended_at reason",
        "onward.worker ORDER BY id",
    ),
    "refusals": (
        "job event attempt worker expected found found_attempt found_worker detail @at",
        "onward.refusal ORDER BY id",
    ),
}
"""What is compared after each move, in the model's order; `@` stands before times."""


def _look(array: str, gather: str, since: str) -> str:
    """One query that answers with all rows of all tables, each table as one JSON text."""
    looks: list[str] = []
    for columns, source in LOOKS.values():
        spelt = ", ".join(
            since.format(name[1:], START) if name[0] == "@" else name for name in columns.split()
        )
        table, _, order = source.partition(" ")
        rows = f"(SELECT * FROM {table} {order}) AS t"
        looks.append(f"(SELECT {gather}({array}({spelt})) FROM {rows})")
    return ", ".join(looks)


_SQLITE_LOOK = "SELECT " + _look("json_array", "json_group_array", "{} - {}").replace(
    "onward.", "onward_"
)
_POSTGRES_ROWS = _look(
    "json_build_array", "json_agg", "CAST(extract(epoch FROM {}) - {} AS float8)"
)
_POSTGRES_LOOK = f"""
SELECT at, CASE WHEN at <> %s THEN (SELECT CAST(json_build_array({_POSTGRES_ROWS}) AS text)) END
FROM (SELECT CAST(pg_current_snapshot() AS text) AS at) AS now
""".encode()
"""The rows, unless no transaction has come to its end since the snapshot that was seen last."""

# A live job may leave only into the cold table: so there it goes, and then from there.
_SQLITE_WIPE = """
BEGIN IMMEDIATE;
INSERT INTO onward_finished (id, task, queue, priority, state, attempt, run_at, worker, finished_at,
    created_at, max_attempts, max_losses, failures, losses, budget_from, args, ended_from, event)
SELECT id, task, queue, priority, state, attempt, run_at, worker, 0, created_at, max_attempts,
    max_losses, failures, losses, budget_from, args, state, 'wipe' FROM onward_job WHERE true
ON CONFLICT DO NOTHING;
DELETE FROM onward_job;
DELETE FROM onward_finished;
DELETE FROM onward_attempt;
DELETE FROM onward_refusal;
DELETE FROM onward_worker;
COMMIT
"""

_POSTGRES_CLOCK = """
CREATE TABLE onward.proof_clock (at timestamptz);
INSERT INTO onward.proof_clock VALUES (now());
CREATE OR REPLACE FUNCTION onward.clock() RETURNS timestamptz LANGUAGE plpgsql STABLE
AS 'BEGIN RETURN (SELECT at FROM onward.proof_clock); END';
"""


class Place(Protocol):
    """A database of the product's with a clock in our hand, and a look at its rows past it."""

    name: str
    database: Database

    def set_clock(self, now: float) -> None: ...

    def rows(self) -> Rows: ...

    def ask(self, text: str, params: Mapping[str, Any] | None = None) -> Answers: ...

    def wipe(self) -> None:
        """Begin again, with a database that has no row."""
        ...


class SqlitePlace:
    """A file without fsync."""

    def __init__(self, folder: Path, library: str = "apsw") -> None:
        self.name = f"SQLite through {library}"
        self._now = START
        database = SqliteDatabase(folder / "proof.db", driver(library), synchronous="OFF")
        database.clock = lambda: self._now
        database.migrate()
        self.database = database
        self._look = database.open_ready()
        self._look.rows("PRAGMA ignore_check_constraints = ON")
        self._version: int | None = None
        self._rows: Rows = {}

    def set_clock(self, now: float) -> None:
        self._now = START + now

    def wipe(self) -> None:
        for text in _SQLITE_WIPE.split(";"):
            self._look.rows(text)
        self._version = None
        self.set_clock(0)

    def rows(self) -> Rows:
        ((version,),) = self._look.rows("PRAGMA data_version")
        if version != self._version:
            (texts,) = self._look.rows(_SQLITE_LOOK)
            self._version = version
            self._rows = {
                table: [tuple(row) for row in msgspec.json.decode(text)]
                for table, text in zip(LOOKS, texts, strict=True)
            }
        return self._rows

    def ask(self, text: str, params: Mapping[str, Any] | None = None) -> Answers:
        return self._look.rows(text.replace("onward.", "onward_"), params)

    def close(self) -> None:
        self._look.close()
        self.database.close()


class PostgresPlace:
    """A database of its own, whose clock reads a table."""

    name = "PostgreSQL"

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._url = postgres.create_database(server_url)
        self.database = open_database(self._url)
        self.database.migrate()
        self._dba = psycopg.connect(self._url, autocommit=True)
        self._dba.execute(_POSTGRES_CLOCK)
        # A change of the replication role makes a session forget its plans: so not the one above.
        self._wiping = psycopg.connect(self._url, autocommit=True)
        self._now: float | None = None
        self._seen = ""
        self._rows: Rows = {}
        name = postgres.database_name(self._url)
        self._dba.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = off'.encode())

    def set_clock(self, now: float) -> None:
        if now != self._now:
            self._dba.execute(
                "UPDATE onward.proof_clock SET at = to_timestamp(%s::float8)", [START + now]
            )
            self._now = now

    def wipe(self) -> None:
        self._wiping.execute(WIPE.encode())
        self.set_clock(0)

    def rows(self) -> Rows:
        ((self._seen, text),) = self._dba.execute(_POSTGRES_LOOK, [self._seen]).fetchall()
        if text is not None:
            found = msgspec.json.decode(text, type=list[list[Any] | None])
            self._rows = {
                table: list(map(tuple, rows or []))
                for table, rows in zip(LOOKS, found, strict=True)
            }
        return self._rows

    def ask(self, text: str, params: Mapping[str, Any] | None = None) -> Answers:
        return self._dba.execute(text.encode(), params).fetchall()

    def close(self) -> None:
        self._dba.close()
        self._wiping.close()
        self.database.close()
        postgres.drop_database(self._server_url, self._url)


@contextmanager
def places(*kinds: str) -> Generator[list[Place]]:
    """Places of these kinds: `apsw`, `sqlite3`, `postgres`."""
    with ExitStack() as stack:
        found: list[Place] = []
        for kind in kinds:
            if kind == "postgres":
                place: Any = PostgresPlace(postgres.find_server())
            else:
                folder = stack.enter_context(TemporaryDirectory(prefix="onward-proof-"))
                place = SqlitePlace(Path(folder), kind)
            found.append(stack.enter_context(closing(place)))
        yield found


# --- the moves ------------------------------------------------------------------------------------

TASKS = ("shop.report", "mail.send", "unknown")
LANES = (("default", 0), ("default", 5), ("mail", 0))
BACKOFF = Backoff(base=2, factor=4, cap=100, jitter=0.5)
OWN_BACKOFF = Backoff(base=0.5, factor=2, cap=None, jitter=0)
SECONDS = (0.125, 0.5, 2.0, 7.0, 30.0)


@dataclass(frozen=True, slots=True)
class Step:
    """One move, ready: what it is, and how the model and a database make it. `then` hears the
    model's answer.
    """

    told: str
    ours: Callable[[], Any]
    real: Callable[[Database], Any]
    then: Callable[[Any], object] = id


class Moves:
    """Makes steps out of chances and of what the model knows."""

    def __init__(self, report: Report) -> None:
        self.model = Model(START)
        self.names: dict[str, str] = {}
        self._met = report.sometimes
        self._calls: dict[str, NewJob] = {}
        self._tickets: list[Job] = []
        self._ended: list[tuple[Job, Outcome, float]] = []
        self._places: dict[tuple[str, int], tuple[float, str]] = {}

    # --- enqueue and claim

    def enqueue(self, chance: random.Random) -> Step:
        jobs = [self._new_call(chance) for _ in range(chance.choice((1, 1, 1, 2, 4)))]
        alive = [row.id for row in self.model.jobs.values() if row.finished_at is None]
        if alive and chance.random() < 0.05:
            jobs[-1] = replace(jobs[-1], id=chance.choice(alive))
        return Step(
            f"enqueue {_told_jobs(jobs)}",
            lambda: self.model.enqueue(jobs),
            lambda database: database.enqueue(jobs),
        )

    def enqueue_again(self, chance: random.Random) -> Step:
        jobs = {
            job.id: job for job in (self._call(chance) for _ in range(chance.choice((1, 1, 3))))
        }
        batch = list(jobs.values())
        return Step(
            f"enqueue again {_told_jobs(batch)}",
            lambda: self.model.enqueue_again(batch),
            lambda database: database.run(store.enqueue_again, batch),
        )

    def claim(self, chance: random.Random) -> Step:
        lane = self._lane(chance)
        tasks = TASKS[: chance.choice((1, 2, 3, 3))]
        after = self._places.get(lane) if chance.random() < 0.5 else None
        worker, limit = self._worker(chance), chance.choice((1, 2, 4))
        place = (0.0, FIRST_ID) if after is None else (after[0] + START, after[1])

        def real(database: Database) -> list[tuple[Job, float]]:
            names = store.dumps(tasks)
            got = database.run(store.claim, worker, names, lane, place, limit)
            return [(one.job, one.run_at - START) for one in got]

        def then(got: list[tuple[Job, float]]) -> None:
            for job, run_at in got:
                self._tickets.append(job)
                self._places[lane] = (run_at, job.id)
            state = self.model.workers[worker].state if worker in self.model.workers else "none"
            self._met["claims by a worker that is not active"] += state != "active"
            self._met["claims from a remembered place"] += bool(got and after)

        return Step(
            f"claim {limit} of {lane} after {after} for {worker}, who knows {tasks}",
            lambda: self.model.claim(worker, tasks, lane, after, limit),
            real,
            then,
        )

    # --- how attempts end

    def finish(self, chance: random.Random) -> Step:
        count = min(chance.choice((1, 1, 2, 3)), max(len(self._tickets), 1))
        seen = [self._ticket(chance, 0.9) for _ in range(count)]
        return self._finish([(job, self._outcome(chance), _part(chance)) for job in seen if job])

    def finish_late(self, chance: random.Random) -> Step:
        """By a worker that may have lost the job, or that has been answered before."""
        if self._ended and chance.random() < 0.4:
            return self._finish([chance.choice(self._ended[-10:])])
        job = self._ticket(chance, 0.0)
        return self._finish([(job, self._outcome(chance), _part(chance))] if job else [])

    def finish_wrongly(self, chance: random.Random) -> Step:
        """By somebody who never was the owner of that attempt."""
        job = self._ticket(chance, 0.8)
        if job is None or job.id not in self.model.jobs:
            return self._finish([])
        row = self.model.jobs[job.id]
        forged = chance.choice(
            (
                replace(job, worker=self._name("worker", 99)),
                replace(job, worker=self._worker(chance)),
                replace(job, attempt=job.attempt + 1),
                replace(job, attempt=job.attempt + 1),
                replace(job, attempt=max(job.attempt - 1, 1)),
            )
        )
        if (forged.attempt, forged.worker) == (row.attempt, row.worker):
            return self._finish([])
        by_owner = (forged.worker, forged.state) == (row.worker, row.state)
        self._met["finishes of another attempt by the owner"] += by_owner
        how = self._outcome(chance) if chance.random() < 0.5 else Returned("0")
        return self._finish([(forged, how, 0.0)], known=False)

    def _finish(self, ended: list[tuple[Job, Outcome, float]], *, known: bool = True) -> Step:
        """Write these ends. `known`: they may be written once more, later; not so what somebody has
        made up, whose budgets are those of no attempt there ever was.
        """
        if sum(len(_follow_ups(how)) for _, how, _ in ended) > 1:
            ended = ended[:1]
        decided = [(job, end_of(job, how, BACKOFF, part)) for job, how, part in ended]

        def real(database: Database) -> tuple[set[str], list[Looked]]:
            changes = [settle(job, how, BACKOFF, chance=part) for job, how, part in ended]
            return _write(database, changes)

        def then(answer: tuple[set[str], list[Looked]]) -> None:
            self._ended += ended if known else ()
            taken, looks = answer
            self._met["finishes refused"] += len(looks) > 0
            self._met["finishes written twice"] += any(ours for _, ours in looks)
            self._met["finishes of a pruned job"] += any(found is None for found, _ in looks)
            for job, end in decided:
                if job.id in taken:
                    self._met[f"{end.event} > {end.after}"] += 1
                    self._met["follow-ups"] += len(end.follow_ups)

        told = "; ".join(f"{_told(job)}: {how}, chance {part}" for job, how, part in ended)
        return Step(f"finish {told or 'nothing'}", lambda: self._written(decided), real, then)

    def _written(self, decided: list[Decided]) -> tuple[set[str], list[Looked]]:
        taken = self.model.write(decided)
        refused = [(seen, end) for seen, end in decided if seen.id not in taken]
        looks = [self.model.look(seen, end) for seen, end in refused]
        for (seen, end), (_, ours) in zip(refused, looks, strict=True):
            if not ours:
                self.model.refuse(seen, end)
        return taken, looks

    def suspend(self, chance: random.Random) -> Step:
        job = self._ticket(chance, 0.9)
        if job is None or job.state != "running":
            return self._finish([])
        decided: list[Decided] = [(job, End("suspend", "waiting", "released", "suspended"))]

        def real(database: Database) -> tuple[set[str], list[Looked]]:
            change = job.move(Event.SUSPEND, ended=AttemptState.RELEASED, reason="suspended")
            return _write(database, [change])

        told = f"suspend {_told(job)}"
        return Step(told, lambda: self._written(decided), real, self._count("suspended"))

    # --- what people do

    def cancel(self, chance: random.Random) -> Step:
        state = chance.choice(("running", "running", "queued", "waiting", "cancelling"))
        return self._move("cancel", self._id(chance, state), cancel_of, cancel_change)

    def requeue(self, chance: random.Random) -> Step:
        ours = only_from("dead", End("requeue", "queued"))
        return self._move("requeue", self._id(chance, "dead"), ours, requeue_change)

    def discard(self, chance: random.Random) -> Step:
        ours = only_from("dead", End("discard", "cancelled", reason="of no use"))
        return self._move("discard", self._id(chance, "dead"), ours, discard_change("of no use"))

    def unblock(self, chance: random.Random) -> Step:
        ours = only_from("waiting", End("unblock", "queued"))
        id_ = self._id(chance, "waiting")
        return self._move("unblock", id_, ours, lambda job: job.move(Event.UNBLOCK))

    def expire(self, chance: random.Random) -> Step:
        end = End("expire", "cancelled", "cancelled", "expired")

        def ours(seen: Job) -> End:
            return only_from("waiting" if seen.state == "waiting" else "queued", end)(seen)

        def real(job: Job) -> Change:
            return job.move(Event.EXPIRE, ended=AttemptState.CANCELLED, reason="expired")

        return self._move("expire", self._id(chance, "waiting", "queued"), ours, real)

    def _move(
        self,
        name: str,
        id_: str,
        ours: Callable[[Job], End | None],
        real: Callable[[Job], Change | None],
    ) -> Step:
        before = self.model.jobs[id_].state if id_ in self.model.jobs else "none"
        return Step(
            f"{name} {id_}",
            lambda: self.model.move(id_, ours),
            lambda database: str(database.run(store.move, id_, real)),
            self._count(f"{name} of {before}"),
        )

    def hold(self, chance: random.Random) -> Step:
        id_ = self._id(chance, "queued")
        row = self.model.jobs.get(id_)
        attempt = row.attempt if row and chance.random() < 0.8 else 7
        return self._same("hold", id_, attempt, chance.choice(SECONDS))

    # --- workers

    def register(self, chance: random.Random) -> Step:
        worker = self._name("worker", len([n for n in self.names.values() if n[0] == "w"]))
        lease = chance.choice((5.0, 15.0, 60.0))
        return Step(
            f"register {worker} with a lease of {lease}",
            lambda: self.model.register(worker, lease),
            lambda database: database.run(store.register, _registration(worker, lease)),
        )

    def beat(self, chance: random.Random) -> Step:
        ids = [id_ for id_ in self.model.workers if chance.random() < 0.7]

        def then(living: set[str]) -> None:
            self._met["beats of an ended worker"] += len(living) < len(ids)

        return self._same("beat", ids, chance.choice((1.0, 15.0, 60.0)), then=then)

    def redate(self, chance: random.Random) -> Step:
        """A lease whose renewal may lie ahead, by who saw it as it is, or as it was."""
        ahead = [id_ for id_, one in self.model.living().items() if one.beat_at > self.model.now]
        worker = chance.choice(ahead) if ahead else self._worker(chance)
        known = self.model.workers.get(worker)
        beat = known.beat_at if known else 0.0
        seen, lease = chance.choice((beat, beat, beat, beat - 0.5)), chance.choice((5.0, 15.0))

        def then(took: bool) -> None:
            self._met["leases begun anew"] += took

        return Step(
            f"redate {worker}, renewal seen {seen}, else for {lease}",
            lambda: self.model.redate(worker, seen, lease),
            lambda database: database.run(store.redate, worker, START + seen, lease),
            then,
        )

    def set_idle(self, chance: random.Random) -> Step:
        return self._same("set_idle", self._worker(chance), chance.random() < 0.5)

    def drain(self, chance: random.Random) -> Step:
        return self._same("drain", self._worker(chance))

    def stop(self, chance: random.Random) -> Step:
        worker = self._worker(chance)
        return Step(
            f"stop {worker}",
            lambda: self.model.end_worker(worker, "stopped", "asked"),
            lambda database: database.run(store.stop, worker, "asked"),
        )

    def lose(self, chance: random.Random) -> Step:
        """By proof, by a lease that may be over, or by one that was renewed since it was seen."""
        worker = self._worker(chance)
        known = self.model.workers.get(worker)
        until = known.lease_until if known else 0.0
        seen = chance.choice((None, until, until, until, until - 0.5))
        real = None if seen is None else START + seen

        def then(took: bool) -> None:
            self._met["workers lost by lease"] += took and seen is not None
            self._met["losses refused"] += not took

        return Step(
            f"lose {worker}, lease seen {seen}",
            lambda: self.model.lose(worker, "no sign of life", seen),
            lambda database: database.run(store.lose, worker, "no sign of life", real),
            then,
        )

    def sweep(self, chance: random.Random) -> Step:
        limit = chance.choice((1, 2, 500, 500))
        leave = {self._id(chance, "running")} if chance.random() < 0.1 else set[str]()
        return Step(
            f"sweep {limit}, but for {sorted(leave)}",
            lambda: self.model.sweep(limit, leave),
            lambda database: _events(database.run(store.sweep, recover, limit, leave)),
            self._swept,
        )

    def bury(self, chance: random.Random) -> Step:
        worker = self._worker(chance)

        def ours() -> list[tuple[str, str]]:
            self.model.end_worker(worker, "lost", "its lock is free")
            return self.model.sweep(1_000, ())

        def real(database: Database) -> list[tuple[str, str]]:
            return _events(database.run(store.bury_worker, worker, "its lock is free", recover))

        return Step(f"bury {worker}", ours, real, self._swept)

    def lose_now(self, worker: str) -> Step:
        """By its lease, as a keeper does that has watched it long enough."""
        seen = self.model.workers[worker].lease_until
        return Step(
            f"lose {worker}, lease seen {seen}",
            lambda: self.model.lose(worker, "no sign of life", seen),
            lambda database: database.run(store.lose, worker, "no sign of life", START + seen),
        )

    def sweep_all(self) -> Step:
        return Step(
            "sweep",
            lambda: self.model.sweep(500, ()),
            lambda database: _events(database.run(store.sweep, recover)),
            self._swept,
        )

    def _swept(self, back: list[tuple[str, str]]) -> None:
        for _, event in back:
            self._met[f"{event} of a lost job"] += 1

    # --- time, retention, looks

    def time(self, chance: random.Random) -> Step:
        """Time passes; when nothing runs, the clock may also be set back."""
        seconds = chance.choice((*SECONDS, *SECONDS, 120.0))
        idle = not any(row.worker for row in self.model.jobs.values() if row.finished_at is None)
        if idle and chance.random() < 0.2:
            seconds = -seconds
            self._met["clock set back"] += 1

        def ours() -> None:
            self.model.now += seconds

        return Step(f"{seconds} s pass", ours, lambda database: None)

    def prune(self, chance: random.Random) -> Step:
        state = chance.choice((JobState.SUCCEEDED, JobState.CANCELLED))
        keep, limit = chance.choice((0.0, 5.0, 60.0)), chance.choice((1, 100))

        def then(gone: int) -> None:
            self._met["pruned"] += gone

        return self._same("prune", state, keep, limit, then=then)

    def prune_workers(self, chance: random.Random) -> Step:
        def then(gone: int) -> None:
            self._met["workers forgotten"] += gone

        return self._same("prune_workers", chance.choice((0.0, 30.0)), then=then)

    def look(self, chance: random.Random) -> Step:
        """What a worker and a sweeper ask."""
        worker = self._worker(chance)
        model = self.model

        def ours() -> Any:
            own = [row.id for row in model.jobs.values() if row.worker == worker]
            own = [id_ for id_ in own if model.jobs[id_].finished_at is None]
            return (
                {id_: model.seen(id_) for id_ in own},
                {id_ for id_ in own if model.jobs[id_].state == "cancelling"},
                model.lanes(("default", "mail")),
                {
                    (one.id, one.lease_until, one.lease_until < model.now, one.beat_at)
                    for one in model.living().values()
                },
                {
                    state: sum(row.state == state for row in model.jobs.values())
                    for state in JobState
                },
            )

        def real(database: Database) -> Any:
            lanes = database.read(store.lanes, ("default", "mail"))
            assert [lane.priority for lane in lanes] == sorted(
                (lane.priority for lane in lanes), reverse=True
            )
            return (
                {job.id: job for job in database.read(store.owned, worker)},
                {id_ for id_, _ in database.read(store.cancelling, worker)},
                {(lane.queue, lane.priority, lane.due_in) for lane in lanes},
                {
                    (one.worker, one.until - START, one.over, one.beat - START)
                    for one in database.read(store.leases)
                },
                database.read(store.counts),
            )

        return Step(f"look at what {worker} has", ours, real)

    def _same(self, name: str, *args: Any, then: Callable[[Any], object] = id) -> Step:
        """An operation that has the same name and arguments in the model and in the store."""
        ours, real = getattr(self.model, name), getattr(store, name)
        return Step(
            f"{name} {', '.join(map(str, args))}",
            lambda: ours(*args),
            lambda database: database.run(real, *args),
            then,
        )

    # --- choices

    def _name(self, kind: str, number: int) -> str:
        id_ = id_of(kind, number)
        self.names[id_] = f"{kind} {number}"
        return id_

    def _worker(self, chance: random.Random) -> str:
        """Mostly one that lives."""
        living = list(self.model.living())
        if living and chance.random() < 0.85:
            return chance.choice(living)
        return chance.choice([*self.model.workers, self._name("worker", 99)])

    def _lane(self, chance: random.Random) -> tuple[str, int]:
        """Mostly one in which a job is due."""
        queued = [row for row in self.model.jobs.values() if row.state == "queued"]
        due = [(row.queue, row.priority) for row in queued if row.run_at <= self.model.now]
        return chance.choice(due if due and chance.random() < 0.9 else LANES)

    def _id(self, chance: random.Random, *states: str) -> str:
        """Mostly a job in one of these states."""
        fit = [row.id for row in self.model.jobs.values() if row.state in states]
        if fit and chance.random() < 0.85:
            return chance.choice(fit)
        return chance.choice([*self._calls, self._name("job", 999)])

    def _ticket(self, chance: random.Random, valid: float) -> Job | None:
        """A job as a worker saw it: as it still is, if that is wanted, or as it was."""
        if chance.random() < valid:
            owned = [row for row in self.model.jobs.values() if row.finished_at is None]
            owned = [row for row in owned if row.worker is not None]
            if owned:
                return self.model.seen(chance.choice(owned).id)
        return chance.choice(self._tickets[-20:]) if self._tickets else None

    def _new_call(self, chance: random.Random) -> NewJob:
        queue, priority = chance.choice(LANES)
        job = NewJob(
            id=self._name("job", len(self._calls)),
            task=chance.choice(TASKS),
            queue=queue,
            priority=priority,
            args=chance.choice(('{"n":1}', '{"n":2}')),
            max_attempts=chance.randint(1, 3),
            max_losses=chance.randint(0, 2),
            timeout=chance.choice((None, 2.5)),
            run_at=chance.choice((None, None, None, START + self.model.now + 3.0, START - 9.0)),
            delay=chance.choice((None, None, None, 0.5, 4.0, -3.0)),
        )
        self._calls[job.id] = job
        return job

    def _call(self, chance: random.Random) -> NewJob:
        """A new call, one that was made before, or another with its id."""
        if not self._calls or chance.random() < 0.4:
            return self._new_call(chance)
        call = self._calls[chance.choice(list(self._calls))]
        if chance.random() < 0.3:
            return replace(call, **chance.choice(({"args": "{}"}, {"task": "mail.other"})))
        return call

    def _outcome(self, chance: random.Random) -> Outcome:
        error = chance.choice(ERRORS)
        seconds = chance.choice(SECONDS)
        calls = tuple(self._call(chance) for _ in range(chance.choice((0, 0, 1))))
        return chance.choice(
            (
                Returned('{"done": "\u2028"}', calls),
                Returned("1", calls),
                Returned("null"),
                Raised(error),
                Raised(error, after=seconds),
                Raised(error, backoff=OWN_BACKOFF),
                Raised(error, final=True),
                TimedOut(error),
                TimedOut(error, abandoned=True, hold=10.0),
                Crashed(error),
                Rejected(error),
                Snoozed(seconds),
                Discarded("not wanted"),
                Released(),
                Released("shutdown", delay=seconds),
                Stopped(),
            )
        )

    def _count(self, name: str) -> Callable[[Any], None]:
        def then(answer: Any) -> None:
            self._met[name] += 1

        return then


ERRORS = ("boom", '{"type":"E","message":"%s :id $1 \'; --","traceback":"\u202e"}')


def id_of(kind: str, number: int) -> str:
    """The id of a numbered job or worker; in no order, so that the databases must sort."""
    start = {"job": 1, "worker": 1 << 20}[kind]
    return str(uuid.UUID(int=(start + number) * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)))


def _part(chance: random.Random) -> float:
    return chance.choice((0.0, 0.25, 0.5, 1.0))


def _registration(id_: str, lease: float) -> Registration:
    return Registration(
        id=id_,
        name="proof",
        host="here",
        pid=1,
        version="0",
        queues=("default", "mail"),
        tasks=TASKS[:2],
        concurrency=4,
        lease=lease,
    )


def _write(database: Database, changes: Sequence[Change]) -> tuple[set[str], list[Looked]]:
    """As the finisher does: what did not take is looked at again, and kept unless it is ours."""
    taken = database.run(store.apply, changes)
    refused = [change for change in changes if change.id not in taken]
    looks = [database.read(store.look, change) for change in refused]
    kept = [
        store.refusal_of(change, found)
        for change, (found, ours) in zip(refused, looks, strict=True)
        if not ours
    ]
    if kept:
        database.run(store.refuse, kept)
    return taken, looks


def _follow_ups(outcome: Outcome) -> tuple[NewJob, ...]:
    return outcome.follow_ups if isinstance(outcome, Returned) else ()


def _events(changes: Iterable[Change]) -> list[tuple[str, str]]:
    return sorted((change.id, str(change.event)) for change in changes)


def _told(job: Job) -> str:
    return f"{job.state} attempt {job.attempt} of {job.id} by {job.worker}"


def _told_jobs(jobs: Iterable[NewJob]) -> str:
    return "; ".join(
        f"{job.id} ({job.task} {job.args} in {job.queue} {job.priority}, {job.max_attempts} tries,"
        f" {job.max_losses} losses, run_at {job.run_at}, delay {job.delay})"
        for job in jobs
    )


# --- stories --------------------------------------------------------------------------------------

WEIGHTS = {
    "enqueue": 9,
    "enqueue_again": 4,
    "claim": 18,
    "finish": 15,
    "finish_late": 4,
    "finish_wrongly": 4,
    "suspend": 2,
    "cancel": 4,
    "requeue": 4,
    "discard": 2,
    "unblock": 2,
    "expire": 1,
    "hold": 1,
    "register": 3,
    "beat": 3,
    "redate": 2,
    "set_idle": 1,
    "drain": 1,
    "stop": 2,
    "lose": 4,
    "sweep": 4,
    "bury": 2,
    "time": 10,
    "prune": 3,
    "prune_workers": 1,
    "look": 3,
}
_NAMES, _SHARES = list(WEIGHTS), list(WEIGHTS.values())
BEGINNING = ("register", "register", "enqueue", "enqueue")


def story_of(seed: int, steps: int = STEPS) -> Story:
    """The story of this seed."""
    chance = random.Random(seed)
    names = chance.choices(_NAMES, _SHARES, k=steps - len(BEGINNING))
    return [(name, chance.randrange(1 << 30)) for name in (*BEGINNING, *names)]


class Refused(NamedTuple):
    """An operation's answer when it is an error."""

    kind: str


class Player:
    """Plays one story on the model and on some places."""

    def __init__(
        self,
        places: Sequence[Place],
        report: Report,
        told: Callable[[str], object] | None = None,
    ) -> None:
        self._places = places
        self._report = report
        self._moves = Moves(report)
        self._told = told

    def play(self, story: Story) -> str | None:
        """Returns the first disagreement or violation; None: there is none."""
        for place in self._places:
            place.wipe()
        for number, (name, seed) in enumerate(story, 1):
            move: Callable[[random.Random], Step] = getattr(self._moves, name)
            if trouble := self._take(move(random.Random(seed))):
                return trouble
            if (
                number % CHECK_EVERY == 0
                and number < len(story)
                and (trouble := self._checked(LENIENT))
            ):
                return trouble
        return self._tidied()

    def _take(self, step: Step) -> str | None:
        model = self._moves.model
        ours = _own_answer(step.ours)
        if self._told is not None:
            self._told(self._named(f"{step.told}\n        {ours}"))
        for place in self._places:
            place.set_clock(model.now)
            real = _answer(lambda database=place.database: step.real(database))
            if ours != real:
                return self._named(f"the model answers {ours}, {place.name} {real}")
        if isinstance(ours, Refused):
            self._report.sometimes[ours.kind] += 1
        else:
            step.then(ours)
        mine = model.rows()
        for place in self._places:
            theirs = place.rows()
            if mine != theirs:
                return self._named(_first_difference(mine, theirs, place.name))
        return None

    def _tidied(self) -> str | None:
        """After one more sweep nothing may be left in limbo."""
        moves, model = self._moves, self._moves.model
        model.now += 200.0
        for worker in [*model.living()]:
            for step in (moves.lose_now(worker), moves.sweep_all()):
                if trouble := self._take(step):
                    return trouble
        return self._take(moves.sweep_all()) or self._checked(1.0)

    def _checked(self, slack: float) -> str | None:
        thorough = slack != LENIENT and self._report.did["stories"] % 10 == 0
        for place in self._places:
            try:
                said = broken(place.ask, place.database.dialect, slack, OFTEN)
            except Exception as error:
                said = [f"cannot be asked for: {error!r}"]
            for check in RARE if thorough else ():
                found = run_check(check, place.database, slack=slack)
                if not found.holds:
                    said.append(f"{check.key} {check.name}: {found.problem or found.offences}")
            if said:
                return self._named(f"on {place.name} a rule is broken: {'; '.join(said)}")
        return None

    def _named(self, text: str) -> str:
        for id_, name in self._moves.names.items():
            text = text.replace(id_, name)
        return text


RARE = [check for check in CHECKS if check.statement in {"check_sound", "check_guards"}]
"""Checks that no story can break: they are made at the end of every tenth."""
OFTEN = [check for check in CHECKS if check not in RARE]


def _own_answer(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except Wrong as error:
        return Refused(str(error))


def _answer(act: Callable[[], Any]) -> Any:
    """A database's answer; whatever it raises that is no error of ours is shown, and no answer."""
    try:
        return act()
    except OnwardError as error:
        return Refused(type(error).__name__)
    except Exception as error:
        return f"raised {error!r}"


def _first_difference(mine: Rows, theirs: Rows, name: str) -> str:
    for table, rows in mine.items():
        others = list(theirs[table])
        for row in rows:
            if row not in others:
                near = [other for other in others if other[0] == row[0]]
                return f"{table}: the model has {row}, {name} has {near}"
        for other in others:
            if other not in rows:
                return f"{table}: {name} has {other}, the model has no such row"
    return f"the order of rows in {name} is another"


# --- the search -----------------------------------------------------------------------------------


def shortest(story: Story, fails: Callable[[Story], bool], tries: int = 300) -> Story:
    """Drop moves, in ever smaller pieces, while the story still fails."""
    size = len(story) // 2
    while size:
        start = 0
        while start < len(story) and tries:
            shorter = [*story[:start], *story[start + size :]]
            tries -= 1
            if fails(shorter):
                story = shorter
            else:
                start += size
        size //= 2
    return story


def in_words(places: Sequence[Place], story: Story) -> tuple[list[str], str | None]:
    """A story in words, and how it ends."""
    lines: list[str] = []
    trouble = Player(places, Report("", "", 0), lines.append).play(story)
    return [f"  {number:3}. {line}" for number, line in enumerate(lines, 1)], trouble


def play(places: Sequence[Place], seed: int, report: Report, steps: int = STEPS) -> bool:
    """Play the story of a seed; whether all agreed. A disagreement is reported at its shortest."""
    story = story_of(seed, steps)
    trouble = Player(places, report).play(story)
    report.did["stories"] += 1
    report.did["moves"] += len(story)
    report.did["tellings on a database"] += len(places)
    if trouble is None:
        return True

    def fails(shorter: Story) -> bool:
        return in_words(places, shorter)[1] is not None

    lines, end = in_words(places, shortest(story, fails))
    whole = "\n    ".join([*lines, str(end or trouble)])
    names = " and ".join(place.name for place in places)
    report.violate(f"M5 on {names}, story {seed} ({trouble}). The shortest story:\n    {whole}")
    return False


def first_trouble(place: Place, seeds: Iterable[int]) -> str | None:
    """The first disagreement in the stories of these seeds, as it was met."""
    report = Report("stateful model", place.name, 0)
    troubles = (Player([place], report).play(story_of(seed)) for seed in seeds)
    return next((trouble for trouble in troubles if trouble is not None), None)


def search(
    place: Place, first: int, goes_on: Callable[[int], bool], most_violations: int = 3
) -> Report:
    """Play story after story, from the seed `first` on, while `goes_on(how many were played)`."""
    report = Report("stateful model", place.name, first)
    while goes_on(report.did["stories"]) and len(report.violations) < most_violations:
        play([place], first + report.did["stories"], report)
    return report


def run(seed: int, budget: Budget) -> Report:
    """The deep form: each story on PostgreSQL and through one of the SQLite libraries, and longer
    ones among them.
    """
    chance = random.Random(seed)
    total = Report("stateful model", "SQLite and PostgreSQL", seed)
    with places("apsw", "sqlite3", "postgres") as (*sqlites, server):
        while (budget.left() or not total.did) and len(total.violations) < 3:
            story = chance.randrange(1 << 40)
            steps = LONG if chance.random() < 0.05 else STEPS
            play([chance.choice(sqlites), server], story, total, steps)
    return total


TECHNIQUES = [Technique("stateful model", run)]
