"""Power cuts, I/O errors and full disks at every operation of a disk under SQLite.

A script is a story of writes, told through the real `SqliteDatabase`. It is first told on a sound
disk, and what the tables hold after each step is noted. Then it is told again and again, each time
with one fault at one operation of the disk. Whatever the fault, the file must then hold exactly
what it held after the last step that was acknowledged, or after the one that was under way: so no
acknowledged write is lost (D1, D5) and each is there wholly or not at all (D3). The file must be
sound (D6), keep every rule of `onward.invariants`, and let itself be worked off to the end.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from onward import invariants
from onward.errors import DatabaseUnavailable
from onward.job import NewJob
from onward.lifecycle import Event, JobState
from onward.policy import (
    Backoff,
    Discarded,
    Outcome,
    Raised,
    Rejected,
    Returned,
    Snoozed,
    Stopped,
    recover,
    settle,
)
from onward.store import store
from onward.store.database import Database
from onward.store.sqlite import SqliteDatabase
from onward.store.statements import Rows, psycopg_text, sqlite_text
from tests.proof.disk import CUTS, ERRORS, Disk, DiskDriver, Fault
from tests.proof.report import Budget, Report, Technique
from tests.store import builders

FILE = "onward.db"
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""The disk that counts is the model beside the files, so these need not be on one."""

SOON = Backoff(base=1e-6, factor=1, jitter=0)
FOR_LONG = 5_000.0
KINDS = (*CUTS, *ERRORS)
UNENDED = "SELECT id, state FROM onward.job WHERE state NOT IN ('dead', 'waiting')"

Held = dict[str, Rows]


class Ask(Protocol):
    """A look at the tables past the store. Their names are written as PostgreSQL's."""

    def __call__(self, text: str, params: Mapping[str, Any] | None = None) -> Rows: ...


def an_id(number: int) -> str:
    """The same id in every telling."""
    return str(uuid.UUID(f"01900000-0000-7000-8000-{number:012x}"))


PROBE = an_id(0xFFFF)


def a_job(number: int, **fields: Any) -> NewJob:
    return builders.new_job(id=an_id(number), **fields)


# --- what the tables hold -------------------------------------------------------------------------

_JOB = (
    "CAST(id AS text), task, queue, priority, state, attempt, CAST(worker AS text), max_attempts,"
    " max_losses, failures, losses, budget_from, timeout, args, started_at IS NULL,"
    " run_at > created_at + {long}"
)
LOOKS = {
    "job": f"SELECT {_JOB}, finished_at IS NULL FROM onward.job",
    "finished": f"SELECT {_JOB}, ended_from, event, attempt_state, abandoned, reason, error, result"
    " FROM onward.finished",
    "attempt": "SELECT CAST(job AS text), number, state, event, CAST(worker AS text), abandoned,"
    " reason, error FROM onward.attempt",
    "refusal": "SELECT CAST(job AS text), event, attempt, CAST(worker AS text), expected, found,"
    " found_attempt, CAST(found_worker AS text), detail FROM onward.refusal",
    "worker": "SELECT CAST(id AS text), name, state, concurrency, idle, reason, ended_at IS NULL,"
    " lease_until > started_at + {long} FROM onward.worker",
}


def held(ask: Ask, dialect: str) -> Held:
    """Everything in the tables but the exact times."""
    long = "1000" if dialect == "sqlite" else "interval '1000 seconds'"
    return {
        table: [row for row in ask(look.format(long=long) + " ORDER BY 1, 2") if row[0] != PROBE]
        for table, look in LOOKS.items()
    }


def held_if_any(ask: Ask) -> Held:
    """Nothing where there are no tables yet."""
    return held(ask, "sqlite") if has_tables(ask) else {}


def closed(ask: Ask) -> set[Any]:
    """The rows that must never change again, their times too."""
    return {
        (table, *row)
        for table in ("finished", "attempt")
        for row in ask(f"SELECT * FROM onward.{table}")
    }


def broken(
    ask: Ask,
    dialect: str,
    slack: float,
    checks: Sequence[invariants.Check] = invariants.CHECKS,
    limit: int = 3,
) -> list[str]:
    """Which rules of `onward.invariants` do not hold, and on which rows: all in one query."""
    keys = {check.statement: f"{check.key} {check.name}" for check in checks}
    params = {**_tables(dialect), "seconds": slack, "limit": limit}
    rows = ask(_all_of(tuple(keys), dialect), params)
    return [f"{keys[statement]}: {subject} {what}" for statement, subject, what in rows]


@cache
def _all_of(names: Sequence[str], dialect: str) -> str:
    texts = {
        name: sqlite_text(name)[0] if dialect == "sqlite" else psycopg_text(name, "onward").decode()
        for name in names
    }
    return "\nUNION ALL\n".join(
        f"SELECT '{name}', found.* FROM (\n{text}\n) AS found" for name, text in texts.items()
    )


@cache
def _tables(dialect: str) -> Mapping[str, str]:
    """What the rules compare with."""
    tables = {
        "moves": invariants.last_moves(),
        "ends": invariants.closing_events(),
        "guards": invariants.guards(dialect),
    }
    return {name: msgspec.json.encode(values).decode() for name, values in tables.items()}


def has_tables(ask: Ask) -> bool:
    return bool(ask("SELECT count(*) FROM sqlite_schema")[0][0])


def difference(before: Held, after: Held) -> str:
    """Where two contents differ, in a few words."""
    parts = [
        f"{table}: {sign}{row}"
        for table in LOOKS
        for sign, some, others in (("+", after, before), ("-", before, after))
        for row in some.get(table, [])
        if row not in others.get(table, [])
    ]
    return "; ".join(parts)[:600] or "nothing differs"


# --- the stories ----------------------------------------------------------------------------------


class Step(NamedTuple):
    """One write of a client: when it has returned, it is acknowledged."""

    name: str
    write: Callable[[Database], object]


def a_step(name: str, write: Callable[[Database], object]) -> Step:
    return Step(name, write)


class Script(NamedTuple):
    """Steps to be told in order, from a file with tables, or from none."""

    name: str
    steps: Sequence[Step]
    empty: bool = False


A, B, C, D, E = (an_id(number) for number in range(1, 6))
W, V = an_id(0x101), an_id(0x102)
LARGE = '"' + "x" * 9_000 + '"'


def enqueue(*numbers: int, **fields: Any) -> Step:
    jobs = [a_job(number, **fields) for number in numbers]
    return a_step(f"enqueue {len(jobs)}", lambda database: database.enqueue(jobs))


def again(*numbers: int) -> Step:
    jobs = [a_job(number) for number in numbers]
    return a_step("enqueue again", lambda database: database.run(store.enqueue_again, jobs))


def register(worker: str) -> Step:
    return a_step("register", lambda database: builders.register(database, id=worker))


def claim(worker: str, limit: int) -> Step:
    return a_step("claim", lambda database: builders.claim(database, worker, limit))


def end(outcomes: dict[str, Outcome]) -> Step:
    """Settle some jobs together, as their worker's finisher does."""

    def write(database: Database) -> None:
        jobs = [(builders.get(database, id_), outcome) for id_, outcome in outcomes.items()]
        taken = builders.apply(
            database, *(settle(job, outcome, SOON, chance=0.0) for job, outcome in jobs)
        )
        assert taken == set(outcomes), f"{set(outcomes) - taken} did not take"

    return a_step("end as " + ", ".join(type(each).__name__ for each in outcomes.values()), write)


def move(id_: str, event: Event, **values: Any) -> Step:
    return a_step(
        str(event),
        lambda database: database.run(store.move, id_, lambda job: job.move(event, **values)),
    )


def cancel(id_: str) -> Step:
    """What a caller's cancel does to a queued job."""
    return a_step(
        "cancel", lambda database: database.run(store.move, id_, lambda job: builders.cancel(job))
    )


def run(name: str, op: Callable[..., Any], *args: Any) -> Step:
    return a_step(name, lambda database: database.run(op, *args))


FINAL = Raised("final", final=True)

SCRIPTS = (
    Script(
        "enqueue", (enqueue(1), enqueue(2, 3, args=LARGE), again(1, 4), enqueue(5, delay=FOR_LONG))
    ),
    Script(
        "claim and finish",
        (
            register(W),
            enqueue(1, 2, 3),
            claim(W, 2),
            end({A: Returned("1")}),
            end({B: Returned(LARGE, (a_job(4), a_job(5)))}),
            claim(W, 5),
            end({C: Returned("3"), D: Returned("4"), E: Raised("no")}),
        ),
    ),
    Script(
        "retry, bury, requeue, discard",
        (
            register(W),
            enqueue(1, 2),
            claim(W, 2),
            end({A: Raised("once"), B: Rejected("never")}),
            claim(W, 2),
            end({A: FINAL}),
            move(A, Event.REQUEUE),
            move(B, Event.DISCARD),
            claim(W, 1),
            end({A: Snoozed(FOR_LONG)}),
        ),
    ),
    Script(
        "cancel",
        (
            register(W),
            enqueue(1, 2, 3, 4),
            cancel(D),
            claim(W, 3),
            move(A, Event.ASK_CANCEL),
            move(B, Event.ASK_CANCEL),
            end({A: Stopped(), B: Returned("2"), C: Discarded("not wanted")}),
        ),
    ),
    Script(
        "lose, sweep, bury",
        (
            register(W),
            register(V),
            enqueue(1, 2, 3, 4),
            claim(W, 2),
            claim(V, 2),
            move(A, Event.ASK_CANCEL),
            run("lose", store.lose, W, "gone"),
            run("sweep", store.sweep, recover),
            run("bury worker", store.bury_worker, V, "killed", recover),
        ),
    ),
    Script(
        "migrate and prune",
        (
            a_step("migrate", lambda database: database.migrate()),
            register(W),
            enqueue(1, 2, max_attempts=1),
            claim(W, 2),
            end({A: Returned("1"), B: Raised("no")}),
            run("prune", store.prune, JobState.SUCCEEDED, -1.0, 10),
            run("stop", store.stop, W, "done"),
            run("prune workers", store.prune_workers, -1.0),
        ),
        empty=True,
    ),
)


# --- a telling ------------------------------------------------------------------------------------


class Stage:
    """A database on a disk of its own, as one process opens it.

    Args:
        since: how far its clock is on.
        cuttable: whether the disk must tell what it would keep; without that it is quicker.
    """

    def __init__(
        self,
        files: dict[str, bytes],
        fault: Fault | None = None,
        *,
        synchronous: str = "FULL",
        flaw: str = "",
        since: float = 0.0,
        cuttable: bool = True,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="onward-power-", dir=MEMORY)
        self.disk = Disk(Path(self._folder.name), files, fault, flaw)
        self.driver = DiskDriver(self.disk, modelled=cuttable)
        path = Path(self._folder.name) / FILE
        self.database = SqliteDatabase(path, self.driver, synchronous=synchronous)
        ticks = itertools.count(1)
        self.database.clock = lambda: 1.8e9 + since + next(ticks) / 1000

    @contextlib.contextmanager
    def looking(self) -> Generator[Ask]:
        """Ask past the store, on a connection that is closed again."""
        connection = self.driver.open(self.database.path, self.database.clock)
        try:
            yield lambda text, params=None: connection.rows(
                text.replace("onward.", "onward_"), params
            )
        finally:
            connection.close()

    def held(self) -> Held:
        """What the tables hold; nothing if there are none."""
        with self.looking() as ask:
            return held_if_any(ask)

    def close(self) -> None:
        """Close in order; on a disk that answers no more, as far as it goes."""
        with contextlib.suppress(Exception):
            self.database.close()
        self.driver.close()
        self._folder.cleanup()

    def cut(self, kind: str) -> dict[str, bytes]:
        """Lose the power; returns the files that are left."""
        self.disk.cut()
        left = self.disk.survivors(kind)
        self.close()
        return left

    def end(self) -> dict[str, bytes]:
        """Close in order; returns the files."""
        self.database.close()
        left = self.disk.survivors("kept")
        self.close()
        return left


class Course(NamedTuple):
    """What a script does on a sound disk."""

    script: Script
    files: dict[str, bytes]
    contents: list[Held]
    operations: list[str]


def with_tables() -> dict[str, bytes]:
    """A file that was migrated and closed."""
    stage = Stage({})
    stage.database.migrate()
    return stage.end()


def course(script: Script, files: dict[str, bytes]) -> Course:
    """Tell a script twice on a sound disk: once to look after each step, once undisturbed."""
    files = {} if script.empty else files
    contents, _ = _undisturbed(script, files, look=True)
    _, operations = _undisturbed(script, files, look=False)
    return Course(script, files, contents, operations)


def _undisturbed(
    script: Script, files: dict[str, bytes], *, look: bool
) -> tuple[list[Held], list[str]]:
    stage = Stage(files)
    try:
        contents = [stage.held()] if look else []
        for step in script.steps:
            step.write(stage.database)
            if look:
                contents.append(stage.held())
        stage.end()
    finally:
        stage.close()
    return contents, stage.disk.operations


def courses() -> list[Course]:
    files = with_tables()
    return [course(script, files) for script in SCRIPTS]


class Case:
    """One telling with one fault.

    Args:
        told: the script, and what it does on a sound disk.
        fault: where and how the disk fails.
        synchronous, flaw: of a database, or a disk, that is not to be trusted.
        twice: a cut of the power during the recovery.
    """

    def __init__(
        self,
        told: Course,
        fault: Fault,
        report: Report,
        *,
        synchronous: str = "FULL",
        flaw: str = "",
        twice: Fault | None = None,
    ) -> None:
        self._told = told
        self._fault = fault
        self._report = report
        self._stage = Stage(told.files, fault, synchronous=synchronous, flaw=flaw)
        self._twice = twice
        self._recognised = False
        self._done = 0
        """How many steps were acknowledged."""

    def run(self) -> None:
        self._report.did["cases"] += 1
        self._report.did[self._fault.kind] += 1
        try:
            left = self._cut() if self._fault.kind in CUTS else self._failing()
            self._afterwards(left)
        except Exception as error:
            self._violate(f"{type(error).__name__}: {error}"[:400])
        finally:
            self._stage.close()

    # --- the power goes ---------------------------------------------------------------------------

    def _cut(self) -> dict[str, bytes]:
        self._tell()
        if self._stage.disk.met is None:
            with contextlib.suppress(Exception):
                self._stage.database.close()
            self._met("the power went while the file was being closed")
        return self._stage.cut(self._fault.kind)

    def _tell(self) -> bool:
        """Go on with the story; returns whether it came to its end."""
        for step in self._told.script.steps[self._done :]:
            try:
                step.write(self._stage.database)
            except DatabaseUnavailable:
                return False
            self._done += 1
        return True

    # --- an operation fails -----------------------------------------------------------------------

    def _failing(self) -> dict[str, bytes]:
        """Meet the fault, go on with the same database when it is over, and come to the end."""
        if not self._tell():
            self._met("an error reached the caller")
            if self._fault.kind.endswith("for ever"):
                self._still_failing()
            self._stage.disk.heal()
            self._recognise(self._stage.held(), "once the disk works again")
            if not self._tell():
                raise AssertionError("the database does not go on when the fault is over")
        elif self._stage.disk.met:
            self._met("an error was got over")
        self._stage.disk.heal()
        self._recognise(self._stage.held(), "at the end")
        if self._fault.seed % 2:
            return self._stage.end()
        return self._stage.cut("dropped")

    def _still_failing(self) -> None:
        with contextlib.suppress(DatabaseUnavailable):
            self._stage.database.enqueue([builders.new_job(id=PROBE)])
            self._violate("a write was acknowledged by a disk that fails")

    # --- the power is back ------------------------------------------------------------------------

    def _afterwards(self, left: dict[str, bytes]) -> None:
        final: set[Any] = set()
        if self._twice:
            left, final = self._again(left)
        # The clock of a worker that had begun to work off was far ahead.
        since = 4 * FOR_LONG if self._recognised else 0.0
        self._stage = Stage(left, since=since, cuttable=False)
        with self._stage.looking() as ask:
            if not self._recognised:
                self._recognise(held_if_any(ask), "after the power was back")
            self._stage.database.read(store.now)  # Who comes next makes the tables if need be.
            if not self._recognised:
                self._check(ask, 60.0)
            final |= closed(ask)
            work_off(self._stage.database)
            self._check(ask, 0.0)
            if changed := final - closed(ask):
                self._violate(f"D5: what was over has changed: {changed}")
            for job in ask(UNENDED):
                self._violate(f"a job did not come to its end: {job}")

    def _again(self, left: dict[str, bytes]) -> tuple[dict[str, bytes], set[Any]]:
        """The power goes once more while the next process recovers; returns what is left then, and
        what was seen to be over before.
        """
        final: set[Any] = set()
        self._stage = Stage(left, self._twice)
        with contextlib.suppress(DatabaseUnavailable, *self._stage.driver.errors):
            with self._stage.looking() as ask:
                self._recognise(held_if_any(ask), "after the power was back")
                self._recognised = True
                final = closed(ask) if has_tables(ask) else final
            work_off(self._stage.database)
        self._met("the power went during the recovery")
        kind = self._twice.kind if self._twice else ""
        return self._stage.cut(kind), final

    def _recognise(self, found: Held, when: str) -> None:
        """The content must be that after the last acknowledged step, or after the next."""
        allowed = self._told.contents[self._done : self._done + 2]
        if found == allowed[0]:
            self._met("what was under way was not there")
        elif found in allowed:
            self._met("what was under way was there")
            self._done += 1
        elif found in self._told.contents[: self._done]:
            lost = self._told.contents.index(found)
            names = [step.name for step in self._told.script.steps[lost : self._done]]
            self._violate(f"D1, D5: {when}, acknowledged writes are lost: {', '.join(names)}")
        else:
            self._violate(f"D3: {when}, a write is half there: {difference(allowed[0], found)}")

    def _check(self, ask: Ask, slack: float) -> None:
        for found in broken(ask, "sqlite", slack):
            self._violate(found)

    def _met(self, what: str) -> None:
        self._report.sometimes[what] += 1

    def _violate(self, what: str) -> None:
        at = self._stage.disk.met or "the end"
        self._report.violate(f"{self._told.script.name}, {self._fault}, at {at}: {what}")


def work_off(database: Database) -> None:
    """What the next worker does: lose the dead, sweep, claim and finish all there is."""
    for lease in database.read(store.leases):
        database.run(store.lose, lease.worker, "the machine was off")
    while database.run(store.sweep, recover):
        pass
    if isinstance(database, SqliteDatabase):
        clock = database.clock
        database.clock = lambda: clock() + 2 * FOR_LONG
    worker = builders.register(database)
    while claimed := builders.claim(database, worker, 50):
        changes = [settle(job, Returned("null"), SOON, chance=0.0) for job in claimed]
        database.run(store.apply, changes)
    database.run(store.stop, worker, "done")


# --- the search -----------------------------------------------------------------------------------


def every_operation(told: Course, seed: int, lap: int = 0) -> Iterator[Fault]:
    """A fault at each operation of a script, of a kind that chance takes; at the next lap it is the
    next kind.
    """
    chance = random.Random(f"{seed} {told.script.name}")
    for at in range(len(told.operations)):
        turn = chance.randrange(len(KINDS)) + lap
        yield Fault(KINDS[turn % len(KINDS)], at, chance.randrange(1 << 30) + lap)


def search(seed: int, budget: Budget) -> Report:
    """Every kind of fault at every operation, again and again with other chances; from the second
    round on the power goes a second time.
    """
    report = Report("power", "sqlite", seed)
    chance = random.Random(seed)
    all_told = courses()
    for lap in itertools.count():
        for told in all_told:
            for fault in every_operation(told, seed, lap):
                if not budget.left():
                    return report
                twice = Fault(chance.choice(CUTS), chance.randrange(60), lap) if lap % 2 else None
                Case(told, fault, report, twice=twice).run()
    raise AssertionError("the laps never end")


TECHNIQUES = [Technique("power", search)]
