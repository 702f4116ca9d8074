"""SIGKILL at every statement of every write: before it, after it, and while its answer is awaited.

An operation is carried out by a forked child, which kills itself at one boundary; BEGIN and COMMIT
are boundaries too. What the tables then hold must be exactly what they held before, or exactly what
a child leaves that lives (D3); the latter if it was acknowledged (D1, D5). Every rule of
`onward.invariants` must hold, the operation can be repeated, and what the next worker does (lose,
sweep, claim, finish) brings every job to its end, although that worker may die at a statement too.

`tests/crash/by_statement.py` kills whole workers at their statements; here it is each operation of
the store, and what it leaves is known to the row.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import psycopg

from onward.lifecycle import Event, JobState
from onward.policy import (
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
)
from onward.store import store
from onward.store.database import Database
from onward.store.postgres import PostgresDatabase
from onward.store.sqlite import SqliteDatabase
from onward.store.sqlite_driver import Connection, driver
from onward.store.statements import Rows, Statement
from onward.store.url import open_database
from tests.crash import by_statement
from tests.proof.power import (
    FOR_LONG,
    LARGE,
    MEMORY,
    A,
    B,
    C,
    Held,
    Step,
    V,
    W,
    a_job,
    a_step,
    again,
    broken,
    cancel,
    claim,
    closed,
    difference,
    end,
    enqueue,
    held,
    move,
    register,
    run,
    work_off,
)
from tests.proof.report import Budget, Report, Technique
from tests.store import builders
from tests.support import postgres
from tests.support.turns import WIPE

ACKNOWLEDGED = "acknowledged"
PATIENCE = 10.0
LONG_AGO = 3600.0
"""Slack of the rules before a recovery: worlds are made once and used for a while."""


# --- the operations -------------------------------------------------------------------------------


class Operation(NamedTuple):
    """A write, the steps that come before it, and how a client asks again that has had no answer:
    None if it must look first.
    """

    before: tuple[Step, ...]
    act: Step
    again: Step | None = None

    @property
    def name(self) -> str:
        return self.act.name


def _lose_silent(database: Database) -> None:
    (lease,) = database.read(store.leases)
    assert database.run(store.lose, W, "silent", lease.until)


def _refuse(database: Database) -> None:
    change = builders.succeed(builders.get(database, C))
    database.run(store.refuse, [store.refusal_of(change, None)])


START = (register(W), enqueue(1, 2, 3))
RUNNING = (*START, claim(W, 3))
TWO = (register(W), register(V), enqueue(1, 2, 3, 4), claim(W, 2), claim(V, 2))
CANCELLING = (*RUNNING, move(A, Event.ASK_CANCEL))
DEAD = (*RUNNING, end({A: Raised("final", final=True)}))
OVER = (*RUNNING, end({A: Raised("once")}), claim(W, 1), end({A: Returned("1"), B: Returned("2")}))
LOST = run("lose", store.lose, W, "gone")

OUTCOMES: tuple[Outcome, ...] = (
    Returned(LARGE),
    Raised("no"),
    TimedOut("late", abandoned=True),
    Crashed("signal 9"),
    Rejected("never"),
    Snoozed(FOR_LONG),
    Discarded("not wanted"),
    Released(),
    Stopped(),
)

OPERATIONS = (
    Operation((), enqueue(1), again(1)),
    Operation((), enqueue(1, 2, 3), again(1, 2, 3)),
    Operation(OVER, again(1, 3, 4), again(1, 3, 4)),
    Operation(START, claim(W, 2)),
    *(Operation(RUNNING, end({A: outcome})) for outcome in OUTCOMES),
    *(
        Operation(
            CANCELLING,
            end({A: outcome})._replace(name=f"cancelling, {type(outcome).__name__}"),
        )
        for outcome in (Returned(LARGE), Raised("no"), Released(), Stopped())
    ),
    Operation(RUNNING, end({A: Raised("no", final=True)})._replace(name="bury")),
    Operation(RUNNING, end({A: Returned("1", (a_job(4), a_job(5)))})._replace(name="follow-ups")),
    Operation(
        CANCELLING,
        end({A: Stopped(), B: Returned("2", (a_job(4),)), C: Raised("no")})._replace(
            name="a batch"
        ),
    ),
    Operation(
        RUNNING, end({A: Raised("1"), B: Released(), C: Snoozed(0.0)})._replace(name="go on")
    ),
    Operation(START, cancel(A)),
    Operation(RUNNING, move(A, Event.ASK_CANCEL)),
    Operation(DEAD, move(A, Event.REQUEUE)),
    Operation(DEAD, move(A, Event.DISCARD)),
    Operation(START, run("hold", store.hold, A, 1, 2 * FOR_LONG)),
    Operation(OVER, a_step("refuse", _refuse)),
    Operation(TWO, run("lose", store.lose, W, "killed"), run("lose", store.lose, W, "killed")),
    Operation(
        (a_step("register", lambda database: builders.register(database, id=W, lease=-1.0)),),
        a_step("lose a silent one", _lose_silent),
    ),
    Operation((*TWO, move(A, Event.ASK_CANCEL), LOST), run("sweep", store.sweep, recover)),
    Operation(
        (*TWO, move(A, Event.ASK_CANCEL)), run("bury worker", store.bury_worker, W, "x", recover)
    ),
    Operation(RUNNING, run("renew", store.beat, [W], 5 * LONG_AGO)),
    Operation(START, register(V)),
    Operation(RUNNING, run("drain", store.drain, W)),
    Operation(RUNNING, run("stop", store.stop, W, "done")),
    Operation(RUNNING, run("set idle", store.set_idle, W, False)),
    Operation(OVER, run("prune", store.prune, JobState.SUCCEEDED, -1.0, 10)),
    Operation((*START, register(V), LOST), run("prune workers", store.prune_workers, -1.0)),
)


# --- where ----------------------------------------------------------------------------------------


class Place(Protocol):
    """A kind of database whose content can be set back."""

    dialect: str

    def empty(self) -> Database: ...

    def save(self, database: Database) -> Any:
        """Keep the content; the database is closed."""
        ...

    def restore(self, saved: Any) -> Database: ...

    def ask(
        self, database: Database, text: str, params: Mapping[str, Any] | None = None
    ) -> Rows: ...

    def let_go(self) -> None:
        """A fork comes: no connection may stand open to a file beside it."""
        ...

    def buried(self, told: str) -> str:
        """Wait until the server knows of a client's death; returns where it died."""
        ...


class SqlitePlace:
    """A file. It is not synced: a process's death takes nothing from the operating system."""

    dialect = "sqlite"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._looking: Connection | None = None
        made = self._at(b"")
        made.migrate()
        self._template = self.save(made)

    def _at(self, content: bytes) -> SqliteDatabase:
        path = self._folder / f"{next(self._numbers)}.db"
        path.write_bytes(content)
        return SqliteDatabase(path, driver("apsw"), synchronous="OFF")

    def empty(self) -> Database:
        return self._at(self._template)

    def save(self, database: Database) -> bytes:
        self.let_go()
        assert isinstance(database, SqliteDatabase)
        database.close()
        content = database.path.read_bytes()
        database.destroy()
        return content

    def restore(self, saved: bytes) -> Database:
        self.let_go()
        return self._at(saved)

    def ask(self, database: Database, text: str, params: Mapping[str, Any] | None = None) -> Rows:
        assert isinstance(database, SqliteDatabase)
        if self._looking is None:
            self._looking = database.open_ready()
        return self._looking.rows(text.replace("onward.", "onward_"), params)

    def let_go(self) -> None:
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.close()

    def buried(self, told: str) -> str:
        return told


TABLES = ("job", "finished", "attempt", "refusal", "worker")
KEEP = "CREATE SCHEMA IF NOT EXISTS kept;" + "".join(
    f"DROP TABLE IF EXISTS kept.{name}; CREATE TABLE kept.{name} AS SELECT * FROM onward.{name};"
    for name in TABLES
)
SET_BACK = WIPE + "".join(
    f"INSERT INTO onward.{name} SELECT * FROM kept.{name};"
    for name in TABLES
    if name != "refusal"  # No world has any.
)


class PostgresPlace:
    """A database of its own. Its commits need not reach the disk either."""

    dialect = "postgres"

    def __init__(self, url: str) -> None:
        self._database = open_database(url)
        self._database.migrate()
        self._control = psycopg.connect(url, autocommit=True)
        self._do(f"ALTER DATABASE {postgres.database_name(url)} SET synchronous_commit TO off")
        self._do("SET synchronous_commit TO off")

    def _do(self, text: str) -> None:
        self._control.execute(text.encode())

    def empty(self) -> Database:
        self._do(WIPE)
        return self._database

    def save(self, database: Database) -> None:
        self._do(KEEP)

    def restore(self, saved: Any) -> Database:
        self._do(SET_BACK)
        return self._database

    def ask(self, database: Database, text: str, params: Mapping[str, Any] | None = None) -> Rows:
        return self._control.execute(text.encode(), params).fetchall()

    def let_go(self) -> None:
        pass

    def buried(self, told: str) -> str:
        pid, _, at = told.partition(" ")
        limit = time.monotonic() + PATIENCE
        look = "SELECT 1 FROM pg_stat_activity WHERE pid = %s"
        while self._control.execute(look, [int(pid)]).fetchone():
            if time.monotonic() > limit:
                raise AssertionError(f"the session of a dead child is still there, at {at}")
            time.sleep(0.0005)
        return at

    def close(self) -> None:
        self._control.close()
        self._database.close()


# --- a death --------------------------------------------------------------------------------------


class Death(NamedTuple):
    """At which statement, counted from 1, and on which side of it: `before`, `sent` (its answer is
    under way) or `after`.
    """

    number: int
    side: str


SIDES = {"sqlite": ("before", "after"), "postgres": ("before", "sent", "after")}


def killed(place: Place, database: Database, act: Callable[[], object], death: Death) -> str:
    """Let a child act and die; returns where it died, or `ACKNOWLEDGED` if it came to the end.

    Raises:
        AssertionError: it failed.
    """
    place.let_go()
    reader, writer = os.pipe()
    with warnings.catch_warnings():  # Since Python 3.12 a fork beside threads is worth a warning.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(reader)
        _die(database, act, death, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == -signal.SIGKILL, told
    return place.buried(told)


def _die(database: Database, act: Callable[[], object], death: Death, tell: int) -> NoReturn:
    """In the child. Its connections are open before the count begins."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(3 * PATIENCE))
    try:
        database.run(store.now)
        database.read(store.now)
        counter = by_statement.Counter(death.number, death.side == "before", tell)
        session = ""
        if isinstance(database, PostgresDatabase):
            session = watch_postgres(database, counter, death.side == "sent")
        else:
            by_statement.watch_sqlite(counter)
        act()
        counter.die(session + ACKNOWLEDGED)
    except BaseException:
        os.write(tell, traceback.format_exc()[-2000:].encode())
    finally:
        os._exit(1)


def watch_postgres(database: PostgresDatabase, counter: by_statement.Counter, sent: bool) -> str:
    """Count every round trip of a plain caller, and die at one of them; returns how its session is
    called when it tells of a death.
    """
    (connection,) = database._idle  # pyright: ignore[reportPrivateUsage]
    session = f"{connection.info.backend_pid} "
    name = ["begin"]
    named = PostgresDatabase._rows  # pyright: ignore[reportPrivateUsage]
    wait: Any = psycopg.Connection.wait

    def rows(self: Any, connection: Any, statement: Statement) -> Any:
        name[0] = statement.name
        try:
            return named(self, connection, statement)
        finally:
            name[0] = "commit or other"

    def waited(self: Any, trip: Any, *args: Any, **kwargs: Any) -> Any:
        at = session + name[0]
        fatal = counter.reached(at)
        if fatal and sent:
            next(trip)
            counter.die(at)
        found = wait(self, trip, *args, **kwargs)
        if fatal:
            counter.die(at)
        return found

    PostgresDatabase._rows = rows  # type: ignore[method-assign]
    psycopg.Connection.wait = waited  # type: ignore[method-assign]
    return session


# --- the search -----------------------------------------------------------------------------------


class Trial:
    """One operation on one kind of database: what it starts from, and what it leads to.

    Args:
        recoveries: after how many deaths that left the same the rest is worked off.
    """

    def __init__(
        self, place: Place, operation: Operation, report: Report, *, recoveries: int = 1
    ) -> None:
        self._place = place
        self._operation = operation
        self._report = report
        self._left: Counter[tuple[bool, bool]] = Counter()
        self._recoveries = recoveries
        database = place.empty()
        for step in operation.before:
            step.write(database)
        self._saved = place.save(database)
        self._contents = [self._held(self._start())]
        operation.act.write(self._database)
        self._contents.append(self._held(self._database))

    def _start(self) -> Database:
        self._database = self._place.restore(self._saved)
        return self._database

    def every_boundary(self, every: int = 1, offset: int = 0) -> Iterator[Death]:
        """Each statement (or every second, third …), from each side, until a child lives through
        all of them.
        """
        for side in SIDES[self._place.dialect]:
            took = False
            for number in itertools.count(1 + offset, every):
                before, took = took, self.die(Death(number, side))
                if before and not took:
                    self._violate(Death(number, side), "what was there earlier is not there later")
                yield Death(number, side)
                if self.lived:
                    break

    def die(self, death: Death, second: Death | None = None) -> bool:
        """Kill a child at a boundary, and perhaps the one that recovers; returns whether the first
        one's write was found.
        """
        self.lived = False
        took = False
        self._report.did["kills"] += 1
        self._report.did[death.side] += 1
        try:
            took = self._first(death)
            self._check(death, LONG_AGO)
            left = (took, self._repeat(death, took))
            self._left[left] += 1
            if second or self._left[left] <= self._recoveries:
                self._recover(death, second)
        except Exception as error:
            self._violate(death, f"{type(error).__name__}: {error}"[:600])
        finally:
            self._leave()
        return took

    def _leave(self) -> None:
        self._place.let_go()
        if isinstance(self._database, SqliteDatabase):
            with suppress(Exception):
                self._database.destroy()

    def _first(self, death: Death) -> bool:
        database = self._start()
        act = self._operation.act.write
        at = killed(self._place, database, lambda: act(database), death)
        self.lived = at == ACKNOWLEDGED
        found = self._held(database)
        if found not in self._contents:
            self._violate(death, f"D3: half there, at {at}: {self._difference(found)}")
        elif self.lived and found != self._contents[1]:
            self._violate(death, f"D1, D5: acknowledged and lost: {self._difference(found)}")
        took = found == self._contents[1]
        self._met("lived through it" if self.lived else f"died, it {'took' if took else 'is not'}")
        return took

    def _repeat(self, death: Death, took: bool) -> bool:
        """Ask again, as a client does that has had no answer. Every other time, so that a recovery
        meets what was left as it is, too. Returns whether it was asked.
        """
        step = self._operation.again or (None if took else self._operation.act)
        if step is None or (death.number + len(death.side)) % 2:
            return False
        self._met("asked again")
        step.write(self._database)
        found = self._held(self._database)
        if found != self._contents[1]:
            self._violate(death, f"D3: asked again, it is not done once: {self._difference(found)}")
        return True

    def _recover(self, death: Death, second: Death | None) -> None:
        self._report.did["recoveries"] += 1
        final = closed(self._ask)
        if second:
            database = self._database
            at = killed(self._place, database, lambda: work_off(database), second)
            self._report.did["second kills"] += at != ACKNOWLEDGED
            self._check(death, LONG_AGO)
            final |= closed(self._ask)
        work_off(self._database)
        self._check(death, 0.0)
        if changed := final - closed(self._ask):
            self._violate(death, f"D5: what was over has changed: {changed}")
        for job in held(self._ask, self._place.dialect)["job"]:
            if job[4] not in {"dead", "waiting"} and not job[15]:
                self._violate(death, f"a job did not come to its end: {job}")

    def _held(self, database: Database) -> Held:
        return held(self._ask, self._place.dialect)

    def _ask(self, text: str, params: Mapping[str, Any] | None = None) -> Rows:
        return self._place.ask(self._database, text, params)

    def _check(self, death: Death, slack: float) -> None:
        for found in broken(self._ask, self._place.dialect, slack):
            self._violate(death, found)

    def _difference(self, found: Held) -> str:
        return difference(self._contents[0], found)

    def _met(self, what: str) -> None:
        self._report.sometimes[what] += 1

    def _violate(self, death: Death, what: str) -> None:
        self._report.violate(
            f"{self._operation.name}, {death.side} statement {death.number}: {what}"
        )


@contextmanager
def sqlite_place() -> Generator[SqlitePlace]:
    with tempfile.TemporaryDirectory(prefix="onward-kills-", dir=MEMORY) as folder:
        yield SqlitePlace(Path(folder))


@contextmanager
def postgres_place() -> Generator[PostgresPlace]:
    server = postgres.find_server()
    url = postgres.create_database(server)
    try:
        with closing(PostgresPlace(url)) as place:
            yield place
    finally:
        postgres.drop_database(server, url)


def search(place: Place, seed: int, budget: Budget) -> Report:
    """Operations in an order that chance takes; every boundary of each, with a second death at a
    boundary of the recovery.
    """
    report = Report("kills", place.dialect, seed)
    chance = random.Random(seed)
    while budget.left():
        for operation in chance.sample(OPERATIONS, len(OPERATIONS)):
            if not budget.left():
                break
            trial = Trial(place, operation, report, recoveries=1_000)
            for death in trial.every_boundary():
                second = Death(chance.randint(1, 30), chance.choice(SIDES[place.dialect]))
                if budget.left():
                    trial.die(death, second)
    return report


def on_sqlite(seed: int, budget: Budget) -> Report:
    with sqlite_place() as place:
        return search(place, seed, budget)


def on_postgres(seed: int, budget: Budget) -> Report:
    with postgres_place() as place:
        return search(place, seed, budget)


TECHNIQUES = [
    Technique("kills on SQLite", on_sqlite),
    Technique("kills on PostgreSQL", on_postgres),
]
