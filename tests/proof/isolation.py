"""Every order in which the statements of operations that meet on PostgreSQL can run.

The operations are the product's own, carried out by its own runner on a connection each. The runner
is stopped before each transaction and before each commit, and, where a run is `paused`, inside each
statement that asks for the time: then its snapshot is taken and its rows are not locked. A search
lets one session go on at a time; one that waits for another's lock is seen by `pg_blocking_pids`.

A statement that the product sends alone stands in a transaction here, so that another can come
between it and its commit, as may happen within the server.

After each run every rule of `onward.invariants` must hold, each job must have made legal moves
only, whatever an operation has answered must be what it did, and the whole must have come to what
it comes to in one order or another, one after the other. What a sweep skipped because it was locked
is left to the next one, which runs before that comparison.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from typing import Any, NamedTuple

import psycopg

from onward.app import cancel_change, discard_change, requeue_change
from onward.errors import IllegalTransition, JobNotFound
from onward.invariants import CHECKS, closing_events, guards, last_moves
from onward.job import Job, NewJob
from onward.lifecycle import JOB_MOVES, JobState, mints_attempt
from onward.policy import Outcome, Raised, Released, Returned, recover
from onward.store import store
from onward.store.database import Duplicate
from onward.store.postgres import PostgresDatabase
from onward.store.postgres_link import AGAIN, AsyncSide, options
from onward.store.statements import Statement, postgres_text
from onward.store.store import FIRST_ID
from onward.worker.finisher import Finisher
from tests.proof.report import Budget, Report, Technique
from tests.support import postgres
from tests.support.scene import Scene

SESSIONS = 3
PATIENCE = 0.002
"""Seconds after which a statement that has not answered is asked whether it waits for a lock."""

STUCK = 20.0
"""Seconds without any progress after which a run is given up and reported."""

# The witness: what each session did to whom, in order. And the place inside of statements where a
# session is held: the clock, which nearly all of them ask for after their snapshot was taken.
WITNESS = """
CREATE SCHEMA proof;
CREATE TABLE proof.log (n bigserial, session text DEFAULT current_setting('application_name'),
    subject uuid, before text, after text, attempt int, next int, owner uuid, event text);
CREATE FUNCTION proof.hold() RETURNS void LANGUAGE plpgsql AS $$
DECLARE who text := current_setting('application_name');
BEGIN
    IF who LIKE 'proof-%' THEN
        PERFORM pg_advisory_lock_shared(4711, CAST(right(who, 1) AS int));
        PERFORM pg_advisory_unlock_shared(4711, CAST(right(who, 1) AS int));
    END IF;
END $$;
CREATE OR REPLACE FUNCTION onward.clock() RETURNS timestamptz LANGUAGE plpgsql STABLE AS $$
BEGIN PERFORM proof.hold(); RETURN now(); END $$;
CREATE FUNCTION proof.held(value text) RETURNS text LANGUAGE plpgsql STABLE AS $$
BEGIN PERFORM proof.hold(); RETURN value; END $$;
CREATE FUNCTION proof.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_TABLE_NAME = 'worker' THEN
        INSERT INTO proof.log (subject, before, after) VALUES (NEW.id, OLD.state, NEW.state);
    ELSIF TG_TABLE_NAME = 'finished' AND TG_OP = 'INSERT' THEN
        INSERT INTO proof.log (subject, before, after, attempt, next, owner, event)
        VALUES (NEW.id, NEW.ended_from, NEW.state, NEW.attempt, NEW.attempt, NEW.worker, NEW.event);
    ELSIF TG_TABLE_NAME = 'finished' THEN
        INSERT INTO proof.log (subject, before, after) VALUES (OLD.id, OLD.state, 'pruned');
    ELSIF TG_OP = 'INSERT' THEN
        INSERT INTO proof.log (subject, after, next) VALUES (NEW.id, NEW.state, NEW.attempt);
    ELSE
        INSERT INTO proof.log (subject, before, after, attempt, next, owner)
        VALUES (NEW.id, OLD.state, NEW.state, OLD.attempt, NEW.attempt,
                coalesce(OLD.worker, NEW.worker));
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER proof_job AFTER INSERT OR UPDATE OF state, attempt, worker ON onward.job
    FOR EACH ROW EXECUTE FUNCTION proof.note();
CREATE TRIGGER proof_finished AFTER INSERT OR DELETE ON onward.finished
    FOR EACH ROW EXECUTE FUNCTION proof.note();
CREATE TRIGGER proof_worker AFTER UPDATE OF state ON onward.worker
    FOR EACH ROW EXECUTE FUNCTION proof.note();
CREATE TABLE proof.job AS TABLE onward.job;
CREATE TABLE proof.finished AS TABLE onward.finished;
CREATE TABLE proof.attempt AS TABLE onward.attempt;
CREATE TABLE proof.worker AS TABLE onward.worker;
"""

RESTORE = """
DELETE FROM onward.job; DELETE FROM onward.finished; DELETE FROM onward.attempt;
DELETE FROM onward.worker; DELETE FROM onward.refusal; DELETE FROM proof.log;
INSERT INTO onward.job TABLE proof.job; INSERT INTO onward.finished TABLE proof.finished;
INSERT INTO onward.attempt TABLE proof.attempt; INSERT INTO onward.worker TABLE proof.worker;
UPDATE onward.worker SET beat_at = now(), ended_at = CASE WHEN state = 'lost' THEN now() END,
    lease_until = now() + CASE WHEN name = 'late' THEN interval '-1 s' ELSE interval '60 s' END;
"""

STATE = """
SELECT 'job', CAST(id AS text), state, attempt, CAST(worker AS text), failures, losses,
       budget_from, event, reason FROM onward.jobs
UNION ALL
SELECT 'attempt', CAST(job AS text), state, number, CAST(worker AS text), 0, 0, 0, event, reason
FROM onward.attempts
UNION ALL
SELECT 'worker', CAST(id AS text), state, CAST(idle AS int), '',
       CAST(lease_until > now() + interval '90 s' AS int), CAST(lease_until < now() AS int), 0,
       '', ''
FROM onward.worker
UNION ALL
SELECT 'refusal', CAST(job AS text), expected, attempt, CAST(worker AS text), 0, 0, 0, event, ''
FROM onward.refusal
ORDER BY 1, 2, 4, 3
"""

LOG = """
SELECT session, CAST(subject AS text), before, after, attempt, next, CAST(owner AS text), event
FROM proof.log ORDER BY n
"""

Row = tuple[Any, ...]

FRESH_ID = "00000000-0000-7000-8000-0000000000aa"
"""Of a job that is not there when a run begins."""


def rules() -> str:
    """All rules of `onward.invariants` as one query."""
    texts = [
        f"(SELECT '{check.key} {check.name}', CAST(r.* AS text) FROM ("
        + postgres_text(check.statement)
        + ") AS r)"
        for check in CHECKS
    ]
    query = "\nUNION ALL\n".join(texts)
    for name, value in {
        "seconds": "30",
        "limit": "5",
        "moves": _literal(last_moves()),
        "ends": _literal(closing_events()),
        "guards": _literal(guards("postgres")),
    }.items():
        query = query.replace(f":{name}", value)
    return query


def _literal(values: object) -> str:
    text = store.dumps(values).replace("'", "''")
    return f"'{text}'"


# --- what meets -----------------------------------------------------------------------------------


class World(NamedTuple):
    """The rows that every run starts from, as they were seen then."""

    ids: dict[str, str]
    jobs: dict[str, Job]


class Did(NamedTuple):
    """What an operation has answered, and the moves that it says it made; `maybe`: it may have."""

    answer: Any
    moves: tuple[tuple[str, str], ...] = ()
    maybe: tuple[tuple[str, str], ...] = ()
    refused: bool = False


class Program(NamedTuple):
    """One operation, or the few that one actor does in a row.

    `touches` names what it may meet another at; `loose`: its answer depends on what others hold
    locked; `sweeps`: what it leaves is complete only after one more sweep; `saw`: the job as its
    writer knows it.
    """

    name: str
    run: Callable[[PostgresDatabase, World], Awaitable[Did]]
    touches: frozenset[str]
    loose: bool = False
    sweeps: bool = False
    saw: str | None = None


def new(id_: str) -> NewJob:
    return NewJob(
        id=id_,
        task="shop.mail",
        queue="default",
        priority=0,
        args='{"user_id":7}',
        max_attempts=3,
        max_losses=3,
    )


def enqueues(name: str) -> Any:
    async def run(db: PostgresDatabase, world: World) -> Did:
        await db.arun(store.enqueue_ours, [new(world.ids[name])])
        return Did(None, ((world.ids[name], "queued"),))

    return run


def enqueues_again(name: str) -> Any:
    async def run(db: PostgresDatabase, world: World) -> Did:
        born = await db.arun(store.enqueue_again, [new(world.ids[name])])
        return Did(sorted(born), tuple((id_, "queued") for id_ in born))

    return run


def claims(worker: str, limit: int) -> Any:
    async def run(db: PostgresDatabase, world: World) -> Did:
        tasks = store.dumps(["shop.mail"])
        owner = world.ids[worker]
        found = await db.arun(store.claim, owner, tasks, ("default", 0), (0.0, FIRST_ID), limit)
        assert all(each.job.worker == owner for each in found)
        answer = [(each.job.id, each.job.attempt) for each in found]
        return Did(answer, tuple((id_, "running") for id_, _ in answer))

    return run


def finishes(name: str, outcome: Outcome) -> Any:
    async def run(db: PostgresDatabase, world: World) -> Did:
        return await finish(db, world.jobs[name], outcome)

    return run


async def finish(db: PostgresDatabase, job: Job, outcome: Outcome) -> Did:
    """What the product's Finisher makes of this outcome, down to the refusal."""
    took: list[Any] = []
    finisher = Finisher(db, {}, lambda: True, took.extend, lambda _: None)
    finisher.put(job, outcome)
    running = asyncio.ensure_future(finisher.run())
    flushed = asyncio.ensure_future(finisher.flush(STUCK))
    try:
        await asyncio.wait({running, flushed}, return_when=asyncio.FIRST_COMPLETED)
        if running.done() and (error := running.exception()) is not None:
            raise RuntimeError(f"the finisher stumbles: {type(error).__name__}: {error}")
    finally:
        for task in (running, flushed):
            task.cancel()
        await asyncio.gather(running, flushed, return_exceptions=True)
    made = tuple((change.id, change.after.value) for change in took)
    maybe = tuple((child.id, "queued") for change in took for child in change.follow_ups)
    return Did([change.event.value for change in took], made, maybe, refused=not took)


def moves(name: str, decide: Callable[[Job], Any]) -> Any:
    async def run(db: PostgresDatabase, world: World) -> Did:
        made: list[Any] = []

        def decided(job: Job) -> Any:
            made[:] = [decide(job)]
            return made[0]

        state = await db.arun(store.move, world.ids[name], decided)
        return Did(state.value, tuple((each.id, each.after.value) for each in made if each))

    return run


def works(worker: str, after: str, op: Any, *args: Any) -> Any:
    async def run(db: PostgresDatabase, world: World) -> Did:
        took = await db.arun(op, world.ids[worker], *args)
        return Did(took, ((world.ids[worker], after),) if took else ())

    return run


async def _beat_both(db: PostgresDatabase, world: World) -> Did:
    ids = [world.ids["A"], world.ids["E"]]
    return Did(sorted(await db.arun(store.beat, ids, 600.0)))


async def _lose_late(db: PostgresDatabase, world: World) -> Did:
    """What a keeper does: it acts on the lease that it saw."""
    id_ = world.ids["E"]
    seen = [lease for lease in await db.aread(store.leases) if lease.worker == id_ and lease.over]
    took = bool(seen) and await db.arun(store.lose, id_, "no sign of life", seen[0].until)
    return Did(took, ((id_, "lost"),) if took else ())


async def _bury(db: PostgresDatabase, world: World) -> Did:
    return _swept(await db.arun(store.bury_worker, world.ids["A"], "signal 9", recover))


async def _sweep(db: PostgresDatabase, world: World) -> Did:
    return _swept(await db.arun(store.sweep, recover))


def _swept(changes: Iterable[Any]) -> Did:
    return Did(None, tuple((change.id, change.after.value) for change in changes))


async def _prune(db: PostgresDatabase, world: World) -> Did:
    count = await db.arun(store.prune, JobState.SUCCEEDED, -60.0, 100)
    return Did(None, (("", "pruned"),) * count)


async def _idle(db: PostgresDatabase, world: World) -> Did:
    await db.arun(store.set_idle, world.ids["A"], False)
    return Did(None)


async def _hold(db: PostgresDatabase, world: World) -> Did:
    return Did(await db.arun(store.hold, world.ids["q1"], 1, 60.0))


def bulk(gone: str, back: str) -> Any:
    """Two moves in one transaction, in an order in which two of them wait for each other."""

    async def run(db: PostgresDatabase, world: World) -> Did:
        changes = [
            discard_change("bulk")(world.jobs[gone]),
            requeue_change(world.jobs[back]),
        ]
        taken = await db.arun(store.apply, changes)
        done = tuple((each.id, each.after.value) for each in changes if each.id in taken)
        return Did(sorted(taken), done)

    return run


async def _release_and_claim(db: PostgresDatabase, world: World) -> Did:
    """The same worker gives an attempt back and takes the next."""
    first = await finish(db, world.jobs["r"], Released())
    then = await claims("A", 10)(db, world)
    return Did([first.answer, then.answer], first.moves + then.moves, (), first.refused)


def _programs() -> Iterator[Program]:
    final = Raised(error="{}", final=True)
    child = new(FRESH_ID)

    def program(name: str, touches: str, run: Any, **more: Any) -> Program:
        return Program(name, run, frozenset(touches.split()), **more)

    yield program("enqueue", "N q", enqueues("N"))
    yield program("again new", "N q", enqueues_again("N"))
    yield program("again queued", "q", enqueues_again("q1"))
    yield program("again running", "r q", enqueues_again("r"))
    yield program("again finished", "f q", enqueues_again("f"))
    yield program("claim A", "q A", claims("A", 10), loose=True)
    yield program("claim B", "q", claims("B", 10), loose=True)
    yield program("claim B one", "q", claims("B", 1), loose=True)
    yield program("succeed", "r f", finishes("r", Returned(result="1")), saw="r")
    yield program(
        "succeed with child",
        "r N q f",
        finishes("r", Returned(result="1", follow_ups=(child,))),
        saw="r",
    )
    yield program("retry", "r", finishes("r", Raised(error="{}")), saw="r")
    yield program("release", "r q", finishes("r", Released()), saw="r")
    yield program("bury", "r", finishes("r", final), saw="r")
    yield program("end cancelling", "c", finishes("c", final), saw="c")
    yield program("late success", "o f", finishes("o", Returned(result="1")), saw="o")
    yield program("late end cancelling", "o", finishes("p", Returned(result="1")), saw="p")
    yield program("succeed second", "s f", finishes("s", Returned(result="1")), saw="s")
    yield program("late first", "s", finishes("s1", Returned(result="1")), saw="s1")
    yield program("release and claim", "r q A", _release_and_claim, loose=True, saw="r")
    yield program("cancel queued", "q", moves("q1", cancel_change))
    yield program("cancel running", "r", moves("r", cancel_change))
    yield program("cancel orphan", "o", moves("o", cancel_change))
    yield program("requeue", "d q", moves("d1", requeue_change))
    yield program("discard", "d", moves("d1", discard_change("no")))
    yield program("bulk", "d q", bulk("d1", "d2"))
    yield program("bulk back", "d q", bulk("d2", "d1"))
    yield program("renew", "A E", _beat_both)
    yield program("lose late", "E", _lose_late, sweeps=True)
    yield program("lose", "A r", works("A", "lost", store.lose, "gone"), sweeps=True)
    yield program("bury worker", "A r c o q", _bury, loose=True, sweeps=True)
    yield program("sweep", "A E r c o q", _sweep, loose=True, sweeps=True)
    yield program("drain", "A", works("A", "draining", store.drain))
    yield program("stop", "A r", works("A", "stopped", store.stop, "done"), sweeps=True)
    yield program("prune", "f", _prune, loose=True)
    yield program("set idle", "A N", _idle)
    yield program("hold", "q", _hold)


PROGRAMS = {program.name: program for program in _programs()}


# --- sessions that wait for their turn ------------------------------------------------------------


class Session:
    """One connection's program, stopped at each of its steps until it is told to go on."""

    def __init__(self, number: int, moved: asyncio.Event) -> None:
        self.number = number
        self.pid = 0
        self.at: str | None = None
        """Where it is stopped; None: it runs, waits for a lock, or is done."""
        self.held = False
        """Whether it stands inside a statement, held by us."""
        self.closed = False
        """Whether it will be held where it next asks for the time."""
        self.blocked = False
        self.done = True
        self.fresh = False
        """Whether its transaction has just begun: the first statement runs with the BEGIN."""
        self._moved = moved
        self._go = asyncio.Event()

    @property
    def ready(self) -> bool:
        return not self.done and (self.held or self.at is not None)

    def begin(self) -> None:
        self.done, self.at, self.held, self.blocked = False, None, False, False
        self._go.clear()

    async def turn(self, at: str) -> None:
        if self.done:
            return
        self.at = at
        self._moved.set()
        await self._go.wait()
        self._go.clear()

    def go(self) -> None:
        self.at = None
        self._go.set()

    async def carry_out(self, work: Awaitable[Did]) -> Did | str | BaseException:
        """Run to the end. An answer that a caller may get by rights is one, whatever it is."""
        try:
            return await work
        except (IllegalTransition, JobNotFound, Duplicate) as error:
            return type(error).__name__
        except asyncio.CancelledError:
            return RuntimeError("it was given up")
        except Exception as error:
            return error
        finally:
            self.done = True
            self._moved.set()


class PausingCursor(psycopg.AsyncCursor[Any]):
    """`orphans` asks for no time: it is held where it reads whom to leave alone."""

    async def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(query, bytes):
            query = query.replace(b"CAST(%(leave)s AS", b"CAST(proof.held(%(leave)s) AS")
        return await super().execute(query, *args, **kwargs)


class TurnConnection(psycopg.AsyncConnection[Any]):
    """A connection whose transactions begin and commit when it is their turn."""

    session: Session

    @asynccontextmanager
    async def transaction(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        self.session.pid = self.info.backend_pid
        await self.session.turn("begin")
        self.session.fresh = True
        async with super().transaction(*args, **kwargs) as transaction:
            yield transaction
            await self.session.turn("commit")


class TurnDatabase(PostgresDatabase):
    """The product's runner. The first statement of a transaction runs with its BEGIN."""

    def __init__(self, url: str, session: Session) -> None:
        super().__init__(url)
        self._known = self._strict = True
        self._session = session
        self.agains = 0

    async def _aconnect(self, url: str) -> psycopg.AsyncConnection:
        given: dict[str, Any] = options(url) | {"application_name": f"proof-{self._session.number}"}
        connection = await TurnConnection.connect(
            url, autocommit=True, prepare_threshold=None, cursor_factory=PausingCursor, **given
        )
        connection.session = self._session
        await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
        return connection

    async def _aon(self, side: AsyncSide, connection: Any, make: Any) -> Any:
        try:
            return await super()._aon(side, connection, make)
        except AGAIN:
            self.agains += 1
            raise

    async def _arows(self, connection: psycopg.AsyncConnection, statement: Statement) -> list[Row]:
        if self._session.fresh:
            self._session.fresh = False
        else:
            await self._session.turn(statement.name)
        return await super()._arows(connection, statement)


# --- one run --------------------------------------------------------------------------------------

Choose = Callable[[dict[int, str]], int]
"""Says who goes on, of those who can, each with the place where it stands."""


class Run(NamedTuple):
    """What came of one order of steps."""

    programs: tuple[Program, ...]
    trace: list[str]
    dids: list[Did | str | BaseException]
    begun: list[int]
    """At which step each program began, and at which it had ended."""
    ended: list[int]
    log: list[Row]
    state: list[Row]
    after: list[Row]
    """What a further sweep has made of it."""
    broken: list[Row]


class Field:
    """A database with a witness in it, and the sessions that meet there."""

    def __init__(self, url: str, world: World) -> None:
        self.world = world
        self.met: Counter[str] = Counter()
        self._url = url
        self._moved = asyncio.Event()
        self._sessions = [Session(number, self._moved) for number in range(1, SESSIONS + 1)]
        self._databases = [TurnDatabase(url, session) for session in self._sessions]
        self._sweeper = PostgresDatabase(url)
        self._runs = 0

    async def __aenter__(self) -> Field:
        self._control = await psycopg.AsyncConnection.connect(self._url, autocommit=True)
        self._mine = self._control.info.backend_pid
        await self._control.execute("SET session_replication_role = replica")
        await self._control.execute(b"PREPARE rules AS " + rules().encode())
        return self

    async def __aexit__(self, *_: object) -> None:
        for database in (*self._databases, self._sweeper):
            await database.aclose()
        await self._control.close()

    async def rows(self, query: str, *values: Any) -> list[Row]:
        cursor = await self._control.execute(query.encode(), values or None)
        return await cursor.fetchall() if cursor.description else []

    async def run(
        self, programs: tuple[Program, ...], choose: Choose, *, paused: bool = False
    ) -> Run:
        """Carry the programs out at once; `choose` says whose step is next."""
        self._runs += 1
        if self._runs % 300 == 0:
            await self.rows("VACUUM")
        await self._control.execute(RESTORE)
        sessions = self._sessions[: len(programs)]
        for session in sessions:
            session.begin()
        tasks = [
            asyncio.ensure_future(session.carry_out(program.run(database, self.world)))
            for session, program, database in zip(sessions, programs, self._databases, strict=False)
        ]
        trace: list[str] = []
        begun, ended = [-1] * len(programs), [-1] * len(programs)
        try:
            async with asyncio.timeout(STUCK):
                await self._settle(sessions)
                while not all(session.done for session in sessions):
                    await self._step(sessions, choose, paused, trace, begun, ended)
        except TimeoutError:
            trace.append("stuck")
        for session in sessions:
            if session.held:
                await self._let_through(session)
        for task in tasks:
            if not task.done():
                task.cancel()
        dids = list(await asyncio.gather(*tasks))
        for database in self._databases:
            self.met["transaction repeated"] += database.agains
            database.agains = 0
        log = await self.rows(LOG)
        state = await self.rows(STATE)
        broken = await self.rows("EXECUTE rules")
        after = state
        if any(program.sweeps for program in programs):
            await self._sweeper.arun(store.sweep, recover)
            after = await self.rows(STATE)
        return Run(programs, trace, dids, begun, ended, log, state, after, broken)

    async def _step(
        self,
        sessions: list[Session],
        choose: Choose,
        paused: bool,
        trace: list[str],
        begun: list[int],
        ended: list[int],
    ) -> None:
        ready = {n: session.at or "on" for n, session in enumerate(sessions) if session.ready}
        if not ready:  # The server sees it too, and ends one of them.
            self.met["deadlock"] += 1
            while not any(session.ready for session in sessions):
                await asyncio.sleep(PATIENCE)
                await self._settle(sessions)
                if all(session.done for session in sessions):
                    break
            return
        index = choose(ready)
        session = sessions[index]
        if begun[index] < 0:
            begun[index] = len(trace)
        trace.append(f"{index + 1} {ready[index]}")
        if session.held:
            await self._let_through(session)
        else:
            if paused and session.at != "commit":
                await self.rows("SELECT pg_advisory_lock(4711, %s)", session.number)
                session.closed = True
            session.go()
        await self._settle(sessions)
        for each, one in enumerate(sessions):
            if one.done and ended[each] < 0:
                ended[each] = len(trace)

    async def _let_through(self, session: Session) -> None:
        session.held = session.closed = False
        await self.rows("SELECT pg_advisory_unlock(4711, %s)", session.number)

    async def _settle(self, sessions: list[Session]) -> None:
        """Wait until each session is stopped, held, done, or waits for another's lock."""
        while True:
            for session in sessions:
                if session.closed and (session.done or session.at is not None):
                    await self._let_through(session)
            going = [each for each in sessions if not each.done and not each.ready]
            if not going:
                return
            self._moved.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await self._moved.wait()
                continue
            if all([await self._waits(each) for each in going]):
                return

    async def _waits(self, session: Session) -> bool:
        """Whether its statement waits: for us, or for the lock of another session."""
        ((blockers,),) = await self.rows("SELECT pg_blocking_pids(%s)", session.pid)
        session.held = self._mine in blockers
        self.met["held inside a statement"] += session.held
        others = {each.pid for each in self._sessions} & set(blockers)
        self.met["waited for a lock"] += bool(others) and not session.blocked
        session.blocked = bool(others)
        return session.held or session.blocked


# --- what must be so afterwards -------------------------------------------------------------------

OWNED = ("running", "cancelling")
OVER = ("succeeded", "cancelled", "dead", "pruned")


def problems(run: Run, world: World) -> Iterator[str]:
    """Everything that one run alone shows to be wrong."""
    for row in run.broken:
        yield f"{row[0]}: {row[1]}"
    if "stuck" in run.trace:
        yield "it came to a standstill"
    for number, (program, did) in enumerate(zip(run.programs, run.dids, strict=True), 1):
        made = [row for row in run.log if row[0] == f"proof-{number}"]
        if isinstance(did, BaseException):
            yield f"{program.name} raised {type(did).__name__}: {did}"
        elif isinstance(did, str):
            if made:
                yield f"{program.name} answered {did} and made {made}"
        else:
            yield from untrue(program, did, made)
            yield from unseen(program, made, world)
            if did.refused and not is_kept(program, run, world):
                yield f"L3: {program.name} was refused, and no refusal was kept"
    yield from illegal(run.log, world)
    yield from claims_after_the_end(run, world)
    yield from lost(run, world)
    yield from orphans(run)


def untrue(program: Program, did: Did, made: list[Row]) -> Iterator[str]:
    """What was answered is what was done."""
    said = sorted(did.moves)
    done = sorted(("" if row[3] == "pruned" else row[1], row[3]) for row in made)
    if program.loose:
        done = [each for each in done if each[1] != "lost"]
    for move in did.maybe:
        done = [each for each in done if each != move]
    if said != done:
        yield f"{program.name} answered {said} and did {done}"


def unseen(program: Program, made: list[Row], world: World) -> Iterator[str]:
    """L3: a worker writes only to the attempt that it had, under its own name."""
    if program.saw is None:
        return
    job = world.jobs[program.saw]
    for _, subject, before, after, attempt, _, owner, _ in made:
        if subject == job.id and before in OWNED and (attempt, owner) != (job.attempt, job.worker):
            yield f"L3: {program.name} wrote {before} > {after} to attempt {attempt} of {owner}"


def is_kept(program: Program, run: Run, world: World) -> bool:
    job = world.jobs[program.saw or "r"]
    return any(
        row[:2] == ("refusal", job.id) and (row[3], row[4]) == (job.attempt, job.worker)
        for row in run.state
    )


def illegal(log: list[Row], world: World) -> Iterator[str]:
    """M1, M3, L2: each job goes on from where it was, by a move that the table has. A birth is
    noted when it is written, and may be of a job that is pruned before that is committed.
    """
    pruned = [row[1] for row in log if row[3] == "pruned"]
    reborn: set[str] = set()
    at: dict[str, tuple[str, int]] = {
        job.id: (job.state, job.attempt) for job in world.jobs.values()
    }
    claimed: set[tuple[str, int]] = set()
    for _, subject, before, after, attempt, number, _, event in log:
        was = at.get(subject)
        if after == "pruned":
            pruned.remove(subject)
            if subject not in reborn:
                at.pop(subject, None)
            reborn.discard(subject)
        elif number is None:
            continue  # A worker's move.
        elif before is None:
            if was is not None and subject in pruned:
                reborn.add(subject)
            elif was is not None:
                yield f"M2: {subject} was born although it was {was}"
            at[subject] = (after, number)
        else:
            if was != (before, attempt):
                yield f"M2: {subject} moved from {before} {attempt}, it was {was}"
            if not is_legal(before, after, attempt, number, event):
                yield f"M1: {before} > {after}, attempt {attempt} > {number}, is no move"
            at[subject] = (after, number)
        if (before, after) == ("queued", "running"):
            if (subject, attempt) in claimed:
                yield f"L1: attempt {attempt} of {subject} was claimed twice"
            claimed.add((subject, attempt))


def is_legal(before: str, after: str, attempt: int, number: int, event: str | None) -> bool:
    by_name = [
        name.value for (state, name), then in JOB_MOVES.items() if (state, then) == (before, after)
    ]
    minted = mints_attempt(JobState(before), JobState(after))
    return bool(by_name) and event in (None, *by_name) and number == attempt + minted


def claims_after_the_end(run: Run, world: World) -> Iterator[str]:
    """Z1: what begins after a worker drained, stopped or was lost claims nothing for it."""
    for number, did in enumerate(run.dids):
        if isinstance(did, Did) and run.programs[number].name == "claim A" and did.moves:
            for other, ended in enumerate(run.ended):
                gone = any(
                    row[0] == f"proof-{other + 1}" and row[1] == world.ids["A"] for row in run.log
                )
                if gone and ended <= run.begun[number]:
                    yield f"Z1: claimed after {run.programs[other].name}"


def lost(run: Run, world: World) -> Iterator[str]:
    """D1: what was there, or was acknowledged, is there in one place, or was pruned."""
    there = [row[1] for row in run.state if row[0] == "job"]
    known = {job.id for job in world.jobs.values()}
    known |= {row[1] for row in run.log if row[2] is None}
    known -= {row[1] for row in run.log if row[3] == "pruned"} - set(there)
    if sorted(there) != sorted(known):
        yield f"D1: there are {sorted(there)}, there should be {sorted(known)}"


def orphans(run: Run) -> Iterator[str]:
    """D4: after a sweep nobody's job runs."""
    if any(program.sweeps for program in run.programs):
        live = {row[1] for row in run.after if row[0] == "worker" and row[2] in LIVE}
        for row in run.after:
            if row[0] == "job" and row[2] in OWNED and row[4] not in live:
                yield f"D4: {row[1]} is {row[2]} under a worker that is gone, after a sweep"


LIVE = ("active", "draining")


def outcome(run: Run) -> frozenset[Any]:
    """What a run came to: the answers, and each job and worker as a further sweep has left it."""
    answers = (
        ("answer", number, str(did.answer if isinstance(did, Did) else did))
        for number, did in enumerate(run.dids)
        if not run.programs[number].loose
    )
    claimed = {row[1] for row in run.log if (row[2], row[3]) == ("queued", "running")}
    parts: dict[str, list[Row]] = {}
    for row in run.after:
        parts.setdefault(row[1], []).append(unclaimed(row) if row[1] in claimed else row)
    return frozenset((*answers, *((subject, *rows) for subject, rows in parts.items())))


def unclaimed(row: Row) -> Row:
    """Which of the jobs that are queued a claim has got is chance: others may hold some locked."""
    if (row[0], row[2]) != ("job", "running"):
        return row
    return (*row[:2], "queued", row[3], None, *row[5:])


def is_serial(run: Run, allowed: list[frozenset[Any]]) -> bool:
    """Whether some order one after the other comes to the same. What skips rows that are locked may
    do half of its work before, and half of it after another: then each job alone must fit.
    """
    found = outcome(run)
    if found in allowed:
        return True
    loose = sum(program.loose for program in run.programs)
    return bool(loose) and found <= frozenset().union(*allowed)


# --- search ---------------------------------------------------------------------------------------


class Orders:
    """Every order in which steps can come, found while they are run: each is picked by chance from
    those that are open. `whole`: nobody comes between the steps of a transaction.
    """

    def __init__(self, chance: random.Random, *, whole: bool = False) -> None:
        self.open: list[list[int]] = [[]]
        self._chance = chance
        self._whole = whole

    def begin(self) -> Choose:
        """Take one; the answer chooses its steps."""
        prefix = self.open.pop(self._chance.randrange(len(self.open)))
        path: list[int] = []

        def choose(ready: dict[int, str]) -> int:
            pick = prefix[len(path)] if len(path) < len(prefix) else -1
            if self._whole and path and ready.get(path[-1], "begin") != "begin":
                pick = path[-1]
            elif pick not in ready:
                pick = self._chance.choice(list(ready))
                self.open += [[*path, other] for other in ready if other != pick]
            path.append(pick)
            return pick

        return choose


class Search:
    """Runs programs against each other on one field and reports what it met.

    Args:
        field: where.
        report: takes up what happens.
        seed: of every choice.
    """

    def __init__(self, field: Field, report: Report, seed: int) -> None:
        self._field = field
        self._report = report
        self._seed = seed
        self._serial: dict[tuple[str, ...], list[frozenset[Any]]] = {}

    async def interleave(
        self,
        names: tuple[str, ...],
        *,
        most: int,
        paused: bool = False,
        budget: Budget | None = None,
    ) -> bool:
        """Run each order of the steps of these programs once, up to `most` of them, picked by the
        seed; returns whether those were all.
        """
        programs = tuple(PROGRAMS[name] for name in names)
        if names not in self._serial:
            orders = Orders(random.Random(0), whole=True)
            self._serial[names] = [outcome(run) async for run in self._runs(programs, orders)]
        allowed = self._serial[names]
        orders = Orders(random.Random(f"{self._seed} {names} {paused}"))
        async for run in self._runs(programs, orders, paused=paused):
            if not is_serial(run, allowed):
                self._violate(run, "came to what no order one after the other comes to")
            most -= 1
            if most <= 0 or (budget is not None and not budget.left()):
                break
        return not orders.open

    async def _runs(
        self, programs: tuple[Program, ...], orders: Orders, *, paused: bool = False
    ) -> AsyncIterator[Run]:
        while orders.open:
            run = await self._field.run(programs, orders.begin(), paused=paused)
            self._report.did["orders"] += 1
            self._look(run)
            yield run

    def _look(self, run: Run) -> None:
        for problem in problems(run, self._field.world):
            self._violate(run, problem)
        met = self._report.sometimes
        met["claim under a worker that was just lost"] += is_late_claim(run, self._field.world)
        met["write refused"] += any(isinstance(did, Did) and did.refused for did in run.dids)
        met += self._field.met
        self._field.met.clear()

    def _violate(self, run: Run, problem: str) -> None:
        names = " | ".join(program.name for program in run.programs)
        text = f"{problem} [{names}] {', '.join(run.trace)}"
        for name, id_ in self._field.world.ids.items():
            text = text.replace(id_, name)
        self._report.violate(f"{text}; seed {self._seed}")


def is_late_claim(run: Run, world: World) -> bool:
    """Whether a claim committed under a worker that had been buried meanwhile."""
    moves_ = [(row[1], row[3], row[6]) for row in run.log]
    workers = {row[1]: row[2] for row in run.state if row[0] == "worker"}
    return any(
        row[0] == "job"
        and row[2] == "running"
        and row[4] == world.ids["A"]
        and (row[1], "running", row[4]) in moves_
        for row in run.state
    ) and workers[world.ids["A"]] in ("lost", "stopped")


def pairs() -> list[tuple[str, str]]:
    """Each program with each, itself too."""
    return list(itertools.combinations_with_replacement(PROGRAMS, 2))


def meet(names: Sequence[str]) -> bool:
    """Whether these have rows in common, and may run at once: an attempt has one writer."""
    programs = [PROGRAMS[name] for name in names]
    writers = [program.saw for program in programs if program.saw]
    first, *others = (program.touches for program in programs)
    return len(writers) == len(set(writers)) and any(first & other for other in others)


TRIPLES = (
    ("claim A", "claim B", "sweep"),
    ("claim A", "claim B", "bury worker"),
    ("claim A", "lose", "sweep"),
    ("sweep", "bury worker", "claim B"),
    ("succeed", "bury worker", "claim B"),
    ("cancel running", "retry", "sweep"),
    ("again running", "succeed", "prune"),
)


@contextmanager
def field_url(server: str) -> Generator[tuple[str, World]]:
    """A database of its own with the rows that runs start from."""
    url = postgres.create_database(server)
    try:
        yield url, prepare(url)
    finally:
        postgres.drop_database(server, url)


def prepare(url: str) -> World:
    name = postgres.database_name(url)
    with closing(PostgresDatabase(url)) as database:
        scene = Scene(database)
        ids = {"A": scene.worker, "N": FRESH_ID}
        for label, title in (("B", "b"), ("E", "late"), ("L", "lost")):
            ids[label] = scene.start_worker(name=title)
        for label, worker in (("r", "A"), ("c", "A"), ("e", "E"), ("o", "L"), ("p", "L")):
            ids[label] = scene.claim(scene.enqueue(), ids[worker])
        for label in ("c", "p"):
            scene.ask_cancel(ids[label])
        scene.lose_worker(ids["L"])
        ids |= {"d1": scene.dead(), "d2": scene.dead()}
        ids["s"] = ids["s1"] = scene.claim(scene.enqueue())
        first = scene.job(ids["s"])
        scene.claim(scene.settle(ids["s"], Released()))
        ids["f"] = scene.attempt(scene.enqueue(), Returned(result="1"))
        ids |= {"q1": scene.enqueue(), "q2": scene.enqueue()}
        jobs = {label: scene.job(id_) for label, id_ in ids.items() if label not in "ABELN"}
        jobs = {"s1": first} | {label: job for label, job in jobs.items() if label != "s1"}
    with psycopg.connect(url, autocommit=True) as dba:
        dba.execute(WITNESS.encode())
        for setting in ("deadlock_timeout = '10ms'", "synchronous_commit = off"):
            dba.execute(f"ALTER DATABASE {name} SET {setting}".encode())
    return World(ids, jobs)


async def deep(url: str, world: World, seed: int, budget: Budget) -> Report:
    """The known triples first, each with each then, and any three; held inside or not."""
    report = Report("isolation", "postgres", seed)
    chance = random.Random(seed)
    async with Field(url, world) as field:
        search = Search(field, report, seed)
        todo: list[tuple[str, ...]] = [*TRIPLES, *(pair for pair in pairs() if meet(pair))]
        while budget.left():
            names = todo.pop(0) if todo else tuple(chance.choices(list(PROGRAMS), k=3))
            if not meet(names):
                continue
            whole = await search.interleave(
                names, most=60, paused=chance.random() < 0.5, budget=budget
            )
            report.did["combinations"] += 1
            report.did["combinations in every order"] += whole
    return report


@contextmanager
def quiet() -> Generator[None]:
    """The product's log is silent: what it complains of is what is done to it."""
    log = logging.getLogger("onward")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def run_deep(seed: int, budget: Budget) -> Report:
    with quiet(), field_url(postgres.find_server()) as (url, world):
        return asyncio.run(deep(url, world, seed, budget))


TECHNIQUES = [Technique("isolation", run_deep)]
