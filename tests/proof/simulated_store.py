"""A database of the product's port whose every answer may come late, get lost, or not come at all.

The SQL is the real one, on SQLite in memory, and so are the operations of `onward.store.store`. In
between is the way there and back, in virtual time: the asking process may die before the write or
after it, the answer may be lost although the write took, the database may be away for a while, or
its clock may be put forward or back. Each operation is one moment; how statements of several
transactions interleave is for others to search. What took is told to a witness.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, ParamSpec, TypeVar

import apsw
from msgspec import Struct

from onward.config import Settings
from onward.errors import DatabaseUnavailable
from onward.invariants import run_checks
from onward.job import Change, NewJob
from onward.lifecycle import TERMINAL, Event
from onward.store import store
from onward.store.database import Again
from onward.store.migrate import missing
from onward.store.sqlite import SqliteDatabase
from onward.store.sqlite_apsw import ApswConnection, ApswDriver
from onward.store.sqlite_writer import carry_out
from onward.store.statements import Op
from onward.store.store import Refusal, Registration
from tests.proof.simulated_loop import EPOCH, Process, SimulatedLoop, here
from tests.support import history

T = TypeVar("T")
P = ParamSpec("P")

REPEATS = 50
HOLD = 10.0
LAST_BREATH = 2.0
"""How long the attempt after a body that could not be stopped waits, while its worker goes on and
when it ends: what the product promises, in numbers of our own.
"""

HUGE = 1e300


class Weather(Struct):
    """What may befall an operation: the share of operations that meet it.

    Args:
        refused: told at once that the database is away.
        dies_before: the process that asks dies before the write.
        dies_after: it dies when the write is made, before it knows.
        unknown: the write is made, and the answer says that the database went away.
        late: the answer comes seconds later.
        slow: the request comes seconds later.
        slow_beat: the same, for renewals of a lease only.
    """

    refused: float = 0.0
    dies_before: float = 0.0
    dies_after: float = 0.0
    unknown: float = 0.0
    late: float = 0.0
    slow: float = 0.0
    slow_beat: float = 0.0


class Committed(NamedTuple):
    """One operation that was carried out: what, for whom, and when (true time, database's time)."""

    op: str
    args: tuple[Any, ...]
    answer: Any
    process: Process
    asked: float
    at: float
    clock: float
    fate: str


class SimulatedDatabase:
    """The database.

    Args:
        loop: whose time it is.
        chance: what happens to each operation.
        local: as SQLite is: a write that is under way dies and stands still with the process that
            asked, and its writes go in order; else a server carries it out, whatever becomes of
            that process.
        notifies: whether workers say when they want no wake-up.
        witness: told of everything that took.
    """

    dialect = "sqlite"
    shown_url = "simulated"
    schema = ""

    def __init__(
        self,
        loop: SimulatedLoop,
        chance: Random,
        *,
        local: bool,
        notifies: bool,
        witness: Callable[[Committed], None],
    ) -> None:
        self.local = local
        self.notifies = notifies
        self.weather = Weather()
        self.step = 0.0
        """How far the database's clock is from the right time."""
        self.away_until = 0.0
        self.met: Counter[str] = Counter()
        self._loop = loop
        self._chance = chance
        self._witness = witness
        self._server = Process("database")
        self._moment: float | None = None
        self._file: Any = apsw.Connection(":memory:")
        with self._file.backup("main", empty(), "main") as copy:
            copy.step()
        self._file.create_scalar_function("onward_clock", self.clock, 0, deterministic=True)
        # As the product has it: or each statement is prepared anew when it is given other values.
        self._file.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        self._connection = ApswConnection(self._file)
        self._driver = SqliteDatabase(Path("nowhere"), ApswDriver())  # Only to translate errors.
        self._wakeups: list[SimulatedWakeup] = []

    def clock(self) -> float:
        """The database's time; it stands still while a transaction lasts."""
        if self._moment is not None:
            return self._moment
        return EPOCH + self._loop.time() + self.step

    # --- the port ---------------------------------------------------------------------------------

    def run(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return _taken(self._carry_out(lambda: op(*args, **kwargs)))

    def read(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return _taken(self._carry_out(lambda: op(*args, **kwargs), writes=False))

    async def arun(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        for repeat in range(REPEATS):
            with contextlib.suppress(Again):
                return await self._ask(_name(op), args, lambda: op(*args, **kwargs), True)
            await asyncio.sleep(0.001 * repeat)
        raise _away("it asked for too many repeats")

    async def aread(self, op: Callable[P, Op[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._ask(_name(op), args, lambda: op(*args, **kwargs), False)

    def enqueue(self, jobs: Sequence[NewJob]) -> None:
        self.run(store.enqueue_ours, jobs)

    async def aenqueue(self, jobs: Sequence[NewJob]) -> None:
        lanes = [(job.queue, job.priority) for job in jobs] if self.notifies else []
        if jobs:
            await self.arun(store.enqueue_ours, jobs)
        self._hint(lanes[0] if lanes else None)

    async def wakeup(self) -> SimulatedWakeup:
        wakeup = SimulatedWakeup()
        self._wakeups.append(wakeup)
        return wakeup

    def lock_folder(self) -> Path | None:
        return None

    def migrate(self) -> list[str]:
        return []

    def schema_version(self) -> int:
        return missing("sqlite", 0)[-1].version

    def destroy(self) -> None:
        self.close()

    def compact(self) -> bool:
        return True

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Nobody gets an answer any more."""
        self._file.close()

    async def aclose(self) -> None:
        self.close()

    async def close_loop(self) -> None: ...

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Run bare SQL past the store, as a witness would."""
        return self._connection.rows(sql.replace("onward.", "onward_"))

    # --- the way there and back -------------------------------------------------------------------

    async def _ask(
        self, name: str, args: tuple[Any, ...], make: Callable[[], Op[T]], writes: bool
    ) -> T:
        process, asked = here(), self._loop.time()
        fate = self._fate(name) if process.mortal else ""
        told: asyncio.Future[Any] = self._loop.create_future()
        # With a server the write is its doing. With a file it is that of the process.
        where = (process if self.local else self._server).context

        def arrive() -> None:
            if fate == "dies_before":
                return process.die(self._loop.time())
            if self._loop.time() < self.away_until:
                return answer(_away("it is away"))
            found = self._carry_out(make, writes)
            if writes and not isinstance(found, BaseException):
                moment = (self._loop.time(), self.clock())
                self._witness(Committed(name, args, found, process, asked, *moment, fate))
            if fate == "dies_after":
                process.die(self._loop.time())
            elif fate == "unknown":
                answer(_away("the connection broke before the answer came"))
            else:
                answer(found)

        def answer(found: Any) -> None:
            back = self._chance.uniform(1, 8) if fate == "late" else self._chance.random() * 0.004
            self._loop.call_later(back, _tell, told, found, context=where)

        self.met[fate] += fate != ""
        if fate == "refused":
            answer(_away("it cannot be reached"))
        else:
            there = self._chance.uniform(1, 8) if fate in {"slow", "slow_beat"} else 0.0
            when = self._loop.time() + there + self._chance.random() * 0.004
            if self.local and writes:
                when = process.last_write = max(when, process.last_write + 1e-6)
            self._loop.call_at(when, arrive, context=where)
        answered: T = _taken(await told)
        return answered

    def _fate(self, name: str) -> str:
        """What happens to this operation; nothing, most of the time."""
        dice = self._chance.random()
        for fate in Weather.__struct_fields__:
            share: float = getattr(self.weather, fate)
            if fate != "slow_beat" or name == "beat":
                if dice < share:
                    return fate
                dice -= share
        return ""

    def _carry_out(self, make: Callable[[], Op[Any]], writes: bool = True) -> Any:
        """Carry out an operation in a transaction of one moment; its error is its answer."""
        self._moment = self.clock()
        try:
            if not writes:
                return carry_out(self._connection, make())
            self._file.execute("BEGIN IMMEDIATE")
            try:
                answer: Any = carry_out(self._connection, make())
            except Exception as error:
                self._file.execute("ROLLBACK")
                return self._driver.translate(error)
            self._file.execute("COMMIT")
            return answer
        except apsw.ConnectionClosedError:
            return _away("it was shut down")
        finally:
            self._moment = None

    def _hint(self, lane: tuple[str, int] | None) -> None:
        """Most hints arrive."""
        for wakeup in self._wakeups:
            if self._chance.random() < 0.8:
                wakeup.lane = lane
                wakeup.hint.set()


class SimulatedWakeup:
    """Hears of enqueues, if the hint is not lost."""

    def __init__(self) -> None:
        self.lane: tuple[str, int] | None = None
        self.hint = asyncio.Event()

    async def wait(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await self.hint.wait()
        except TimeoutError:
            return False
        self.hint.clear()
        return True

    async def close(self) -> None: ...


@cache
def empty() -> Any:
    """A database with the tables of today's schema, and nothing in them."""
    file: Any = apsw.Connection(":memory:")
    connection = ApswConnection(file)
    for migration in missing("sqlite", 0):
        connection.script(migration.text)
    return file


def _name(op: Callable[..., Any]) -> str:
    """The name of an operation, also of one that a test has put in its place."""
    name = op.__name__
    if getattr(store, name, None) is op:
        return name
    return next((name for name, value in vars(store).items() if value is op), name)


def _away(why: str) -> DatabaseUnavailable:
    return DatabaseUnavailable("the simulated database does not answer", why=why)


def _taken(answer: Any) -> Any:
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _tell(told: asyncio.Future[Any], answer: Any) -> None:
    if not told.done():
        told.set_result(answer)


# --- the witness ----------------------------------------------------------------------------------


class Seen(Struct):
    """One run of a body, as the body itself told it."""

    job: str
    attempt: int
    process: Process
    line: str
    start: float
    end: float | None = None
    raised: str | None = None


class Witness:
    """Sees what the database took and what bodies did, and says what should not have been.

    Args:
        loop: whose time it is.
        settings: what the workers go by.
        wrong: where to say it.
        met: where to count rare things.
    """

    def __init__(
        self, loop: SimulatedLoop, settings: Settings, wrong: list[str], met: Counter[str]
    ) -> None:
        self._loop = loop
        self._patience = max(settings.lease - settings.sweep, settings.lease / 2)
        self._wrong = wrong
        self._met = met
        self.closed = False
        self.operations = 0
        self.jobs = 0
        self.asked: dict[str, frozenset[str]] = {}
        """The jobs that were asked for, each with those of the same transaction."""
        self.acknowledged: set[str] = set()
        self.delays: dict[str, float] = {}
        """For how long jobs were put off when they were enqueued."""
        self.last_event: dict[str, str] = {}
        self.bodies: list[Seen] = []
        self.log: list[tuple[str, str, float, float, float, str]] = []
        """Every operation that was carried out."""
        self._round: dict[str, float] = {}
        self._told_to_stop: dict[str, float] = {}
        self._begun: dict[tuple[str, int], Seen] = {}
        self._children: dict[tuple[str, int], list[str]] = {}
        self._claims: dict[tuple[str, int], Committed] = {}
        self._owner: dict[str, tuple[str | None, int]] = {}
        self._last: dict[str, int] = {}
        self._swept: dict[tuple[str, int], float] = {}
        self._over: dict[str, tuple[str, int]] = {}
        self._not_before: dict[str, float] = {}
        self._moved_by: dict[str, float] = {}
        self._renewed: dict[str, float] = {}
        self._ended: dict[str, str] = {}
        self._cancels: dict[str, str] = {}

    def _say(self, text: str) -> None:
        self._wrong.append(f"{text} at {self._loop.time():.3f}")

    # --- what bodies, workers and the client tell -------------------------------------------------

    def begins(self, job: str, attempt: int, line: str) -> Seen:
        body = Seen(job, attempt, here(), line, self._loop.time())
        if not self.closed:
            self.bodies.append(body)
            self._begun[job, attempt] = body
            claim = self._claims.get((job, attempt))
            self._met["adopted"] += claim is not None and claim.fate == "unknown"
        return body

    def ends(self, body: Seen, raised: str | None) -> None:
        body.end, body.raised = self._loop.time(), raised

    def has_begun(self, job: str) -> bool:
        return (job, 1) in self._begun

    def has_child(self, job: str, attempt: int, child: str) -> None:
        self._children.setdefault((job, attempt), []).append(child)

    def watched(self, claim_round: Callable[[Any, int], Awaitable[int]]) -> Any:
        """A claimer's round, noted: one that is under way when its worker is told to stop may go on
        to the next lane.
        """

        async def noted(claimer: Any, room: int) -> int:
            self._round[claimer._worker] = self._loop.time()
            return await claim_round(claimer, room)

        return noted

    def stops(self, stop: Callable[[Any], None]) -> Any:
        """A claimer's stop, noted as it hears of it: a round may begin between a worker's order to
        stop and the moment at which its loop comes to it.
        """

        def noted(claimer: Any) -> None:
            self._told_to_stop.setdefault(claimer._worker, self._loop.time())
            stop(claimer)

        return noted

    def cancel_acknowledged(self, job: str, state: str) -> None:
        self._cancels[job] = state

    # --- what the database took -------------------------------------------------------------------

    def sees(self, took: Committed) -> None:
        self.operations += 1
        self.log.append((took.op, took.process.name, took.asked, took.at, took.clock, took.fate))
        saw = getattr(self, f"_saw_{took.op}", None)
        if saw is not None:
            saw(took, *took.args)

    def _saw_register(self, took: Committed, worker: Registration) -> None:
        self._renewed[worker.id] = took.at

    def _saw_beat(self, took: Committed, workers: list[str], lease: float) -> None:
        for worker in took.answer:
            if worker in self._ended and self._ended[worker] != "draining":
                self._say(f"L6: worker {worker} was {self._ended[worker]} and renewed its lease")
            self._renewed[worker] = took.at

    def _saw_lose(
        self, took: Committed, worker: str, reason: str, seen: float | None = None, *_: Any
    ) -> None:
        if not took.answer:
            return
        self._ended[worker] = "lost"
        since = took.at - self._renewed[worker]
        if seen is not None and since < self._patience:
            self._say(f"L7: worker {worker} renewed its lease {since:.3f} s ago and is lost")
        if any(owner == worker for owner, _ in self._owner.values()):
            self._met["lease lost while running"] += 1

    def _saw_drain(self, took: Committed, worker: str) -> None:
        if took.answer:
            self._ended[worker] = "draining"

    def _saw_stop(self, took: Committed, worker: str, reason: str) -> None:
        if took.answer:
            self._ended[worker] = "stopped"

    def _saw_claim(self, took: Committed, worker: str, tasks: str, *where: Any) -> None:
        if len(took.answer) > where[-1]:
            self._say(f"L1: {took.process.name} asked for {where[-1]} and got {len(took.answer)}")
        for claimed in took.answer:
            job, attempt = claimed.job.id, claimed.job.attempt
            if f'"{claimed.job.task}"' not in tasks:
                self._say(f"D4: {took.process.name} claims {job}, a {claimed.job.task}")
            if job in self._owner:
                self._say(f"L1: {job} is claimed, and {self._owner[job]} has it")
            if attempt <= self._last.get(job, 0):
                self._say(f"L2: attempt {attempt} of {job} is given out again")
            if worker in self._ended:
                self._say(f"L1: worker {worker} is {self._ended[worker]} and claims {job}")
            if self._round.get(worker, 0.0) > self._told_to_stop.get(worker, HUGE):
                self._say(f"Z1: {took.process.name} was told to stop and claims {job}")
            if took.clock < self._not_before.get(job, 0):
                early = self._not_before[job] - took.clock
                self._say(f"R1: attempt {attempt} of {job} is claimed {early:.3f} s too early")
            self._owner[job] = (worker, attempt)
            self._last[job] = attempt
            self._claims[job, attempt] = took
        if took.answer and took.fate == "unknown":
            self._met["claim answer lost"] += 1

    def _saw_apply(self, took: Committed, changes: Sequence[Change]) -> None:
        self._met["commit unknown"] += took.fate == "unknown"
        for change in changes:
            if change.id in took.answer:
                self._moved(took, change)
            elif self._swept.get((change.id, change.attempt), 0) > took.asked:
                self._met["sweep raced a finish"] += 1
            elif self._owner.get(change.id) == (change.worker, change.attempt):
                self._met["cancel raced a finish"] += 1

    def _saw_sweep(self, took: Committed, *_: Any) -> None:
        for change in took.answer:
            self._swept[change.id, change.attempt] = took.at
            self._met["recovered"] += 1
            self._moved(took, change)
            if change.worker is not None and self._ended.get(change.worker) in {None, "draining"}:
                self._say(f"L1: {change.id} is taken from worker {change.worker}, which lives")

    def _moved(self, took: Committed, change: Change) -> None:
        """A change took: it must have been its writer's to make."""
        job, owner = change.id, self._owner.get(change.id)
        if change.ended is not None and owner != (change.worker, change.attempt):
            self._say(f"L3: {change.worker} {change.event} {job}, which {owner} has")
        if job in self._over:
            self._say(f"M3: {job} is {self._over[job]} and moves: {change.event}")
        self._met[str(change.event)] += 1
        self.last_event[job] = change.event
        if change.after in TERMINAL:
            self._over[job] = (change.after, change.attempt)
        if change.ended is not None:
            self._owner.pop(job, None)
            self._not_before[job] = took.clock + self._least_delay(change) - 1e-4

    def _least_delay(self, change: Change) -> float:
        """How long the next attempt must wait at least, by what its body did and its task says."""
        body = self._begun.get((change.id, change.attempt))
        said = float(body.line.split()[1]) if body is not None else 0.0
        match change.event, change.reason:
            case (Event.SNOOZE, _):
                return said
            case (Event.RETRY, "error") if body is not None and body.raised == "Retry":
                return said
            case (Event.RETRY, _):
                # A body that outlasts its worker ends with the process, two seconds later.
                told = change.worker is not None and change.worker in self._told_to_stop
                held = LAST_BREATH if told else HOLD
                hold = held if change.abandoned else 0.0
                return max(hold, min(8.0, 0.5 * 2.0 ** (change.failures - 1)) * 0.5)
            case _:
                return 0.0

    def _saw_move(self, took: Committed, job: str, *_: Any) -> None:
        self._met["cancel of a running job"] += took.answer == "cancelling"
        if took.answer == "cancelled":
            self._over.setdefault(job, ("cancelled", self._last.get(job, 0)))
        elif took.answer == "queued":
            self._not_before.pop(job, None)
            self.last_event[job] = "requeue"

    def _saw_due_again(self, took: Committed, lane: tuple[str, int], step: float, *_: Any) -> None:
        """The clock has gone back, and due times with it."""
        self._met["due again"] += len(took.answer)
        for job in took.answer:
            self._moved_by[job] = self._moved_by.get(job, 0.0) + step
            if job in self._not_before:
                self._not_before[job] -= step

    def _saw_refuse(self, took: Committed, refusals: Sequence[Refusal]) -> None:
        self._met["zombie finished late"] += len(refusals)

    # --- the end ----------------------------------------------------------------------------------

    def judge(self, database: SimulatedDatabase) -> None:
        """Hold everything that was seen against what the database has in the end."""
        found = self._history(database)
        for texts in (
            history.lost_jobs(found, self.acknowledged),
            history.jobs_from_nowhere(found, [*self.asked, *self._born(found)]),
            history.gaps(found),
            history.double_successes(found),
            history.unexplained_bodies(found),
            history.unexplained_overlaps(found),
            history.successes_without_a_body(found),
            self._torn(found),
            self._moved_back(found),
            self._too_early(database),
            self._cancelled_and_ran(found, database),
            self._broken_rules(database),
        ):
            self._wrong.extend(texts)
        for key, claim in self._claims.items():
            if claim.process.died_at is not None and key not in self._begun:
                self._met["crash before begin"] += 1
        self.jobs = len(found.jobs)

    def _history(self, database: SimulatedDatabase) -> history.History:
        jobs = database.rows("SELECT id, state, attempt, worker, event, result FROM onward.jobs")
        attempts = database.rows(
            "SELECT job, number, state, event, worker, started_at IS NOT NULL, abandoned, reason,"
            " error FROM onward.attempts"
        )
        rows = {(row[0], row[1]): history.AttemptRow(*row) for row in attempts}
        return history.History(
            [self._body(body, rows.get((body.job, body.attempt))) for body in self.bodies],
            {row[0]: history.JobRow(*row) for row in jobs},
            rows,
        )

    def _body(self, body: Seen, row: history.AttemptRow | None) -> history.Body:
        """A run of a body; those in a dead process ended with it. One that goes on although its
        worker ends is given back all the same, and in an embedded worker nothing ends it: it tells
        no end.
        """
        end = body.process.died_at if body.end is None else body.end
        raised = "died" if body.end is None else body.raised
        if body.line.startswith("stubborn") and row is not None and row.state == "released":
            self._met["given back while it went on"] += 1
            end = None
        number = body.process.number
        return history.Body(body.job, body.attempt, number, body.start, end, raised)

    def _born(self, found: history.History) -> list[str]:
        """The children of attempts that succeeded."""
        return [
            child
            for parent, children in self._children.items()
            if parent in found.attempts and found.attempts[parent].state == "succeeded"
            for child in children
        ]

    def _torn(self, found: history.History) -> Iterator[str]:
        """D3: what was asked for in one transaction is there as a whole, or not at all."""
        for batch in set(self.asked.values()):
            there = sum(job in found.jobs for job in batch)
            if there not in {0, len(batch)}:
                yield f"D3: {there} of {len(batch)} jobs of one enqueue are there"
        for child in self._born(found):
            if child not in found.jobs:
                yield f"D3: the parent of {child} succeeded, and it is nowhere"

    def _moved_back(self, found: history.History) -> Iterator[str]:
        """D5: what was over is over, in the same way."""
        for job, (state, attempt) in self._over.items():
            row = found.jobs.get(job)
            if row is None or row.state != state or row.attempt < attempt:
                yield f"D5: {job} was {state} with attempt {attempt} and is {row}"

    def _too_early(self, database: SimulatedDatabase) -> Iterator[str]:
        """R1: a job that was put off did not start before its time."""
        for job, delay, start in database.rows(
            "SELECT id, run_at - created_at, started_at - run_at FROM onward.jobs WHERE attempt = 1"
        ):
            delay += self._moved_by.get(job, 0.0)
            if delay < self.delays.get(job, 0.0) - 1e-4 or (start or 0.0) < -1e-4:
                yield f"R1: {job} was put off by {self.delays.get(job)} s, not {delay} and {start}"

    def _cancelled_and_ran(
        self, found: history.History, database: SimulatedDatabase
    ) -> Iterator[str]:
        """X1: who was cancelled while it was queued never ran; who was asked to stop, ended."""
        for job, attempt in database.rows(
            "SELECT id, attempt FROM onward.finished WHERE ended_from = 'queued'"
        ):
            if (job, attempt) in self._begun:
                yield f"X1: attempt {attempt} of {job} was cancelled before it ran, and ran"
        for job, state in self._cancels.items():
            ends = {"cancelled"} if state == "cancelled" else {"cancelled", "succeeded"}
            row = found.jobs.get(job)
            if row is None or row.state not in ends:
                yield f"X1: {job} was asked to stop, was {state}, and is {row}"

    def _broken_rules(self, database: SimulatedDatabase) -> Iterator[str]:
        """What `onward doctor` finds."""
        for finding in run_checks(database, slack=5.0):
            if finding.problem is not None:
                yield f"{finding.check.key} {finding.check.name}: {finding.problem}"
            for offence in finding.offences:
                yield f"{finding.check.key} {finding.check.name}: {offence}"
