"""PostgreSQL that fails under the product's own connections, and what must be so afterwards.

Three searches. *Strikes*: for each writing operation, from a thread and on a loop, on a connection
of the pool and on a fresh one, and for each of its round trips, BEGIN and COMMIT too: the session
is ended before it, the request is lost on its way, or its answer is. *Crashes*: clients and a
worker are busy while the server is stopped like in a crash and started again. *Partitions*: the
wire between clients and the server carries nothing for a while, and then delivers what it held.

What was acknowledged is there, what is unknown is there wholly or not at all, to repeat it by its
id makes nothing twice, what is over stays as it is, and the next call works.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import psycopg
from msgspec import Struct
from msgspec.structs import replace

from onward.app import cancel_change, discard_change, requeue_change
from onward.errors import DatabaseUnavailable, IllegalTransition
from onward.ids import new_id
from onward.job import Change, NewJob
from onward.lifecycle import AttemptState, Event
from onward.policy import recover
from onward.store import postgres as adapter
from onward.store import store
from onward.store.postgres import PostgresDatabase
from tests.crash.wire import Wire
from tests.proof.isolation import quiet, rules
from tests.proof.report import Budget, Report, Technique
from tests.support import history, postgres, tasks
from tests.support.ledger import VARIABLE, Ledger
from tests.support.postgres import PrivatePostgres
from tests.support.proxy import Proxy
from tests.support.scene import FATAL, Scene
from tests.support.workers import opened

FACTS = """
SELECT CAST(id AS text), state, attempt FROM onward.jobs WHERE id = ANY(%(ids)s)
UNION ALL
SELECT CAST(id AS text), state, CAST(lease_until > now() + interval '2 h' AS int) FROM onward.worker
WHERE id = ANY(%(ids)s)
"""
FINAL = "SELECT CAST(id AS text), CAST(f.* AS text) FROM onward.finished AS f"
KILL = "SELECT pg_terminate_backend(%s)"
ALIVE = "SELECT 1 FROM pg_stat_activity WHERE pid = %s"
OPEN = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
AND application_name = 'onward' AND state LIKE 'idle in transaction%'
"""

Facts = dict[str, tuple[str, int]]


class Runner:
    """Carries operations out, from this thread or on a loop of its own."""

    def __init__(self, database: PostgresDatabase, *, on_loop: bool) -> None:
        self.database = database
        self._loop = asyncio.new_event_loop() if on_loop else None

    def call(self, op: Callable[..., Any], *args: Any) -> Any:
        if self._loop is None:
            return self.database.run(op, *args)
        return self._loop.run_until_complete(self.database.arun(op, *args))

    def enqueue(self, jobs: Sequence[NewJob]) -> None:
        if self._loop is None:
            self.database.enqueue(jobs)
        else:
            self._loop.run_until_complete(self.database.aenqueue(jobs))

    def drop_connections(self) -> None:
        if self._loop is not None:
            self._loop.run_until_complete(self.database.close_loop())
        self.database.close()

    def close(self) -> None:
        self.drop_connections()
        if self._loop is not None:
            self._loop.close()


class Truth:
    """A witness with a connection of its own: what is in the database, and what was over before."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        self._connection.execute(b"PREPARE rules AS " + rules().encode())
        self._final: dict[str, str] = {}

    def facts(self, ids: Iterable[str]) -> Facts:
        rows = self._connection.execute(FACTS, {"ids": list(ids)}).fetchall()
        assert len({row[0] for row in rows}) == len(rows), f"one of {ids} is there twice"
        return {row[0]: (row[1], row[2]) for row in rows}

    def broken(self) -> list[str]:
        """The rules that do not hold, and what has changed of what was over."""
        found = [f"{row[0]}: {row[1]}" for row in self._connection.execute("EXECUTE rules")]
        final = dict(self._connection.execute(FINAL).fetchall())
        found += [
            f"D5: {id_} is not as it was"
            for id_, row in self._final.items()
            if final.get(id_) != row
        ]
        self._final = final
        return found

    def kill(self, pid: int) -> None:
        """End a session; it is gone when this returns."""
        self._connection.execute(KILL, [pid])
        while self._connection.execute(ALIVE, [pid]).fetchone():
            pass

    def left_open(self) -> bool:
        """Whether a transaction of ours stays open."""
        end = time.monotonic() + 5
        while time.monotonic() < end:
            row = self._connection.execute(OPEN).fetchone()
            if row is not None and row[0] == 0:
                return False
        return True

    def close(self) -> None:
        self._connection.close()


# --- strikes --------------------------------------------------------------------------------------


class Strike:
    """One thing that goes wrong, at one round trip: `session`, `request` or `answer`."""

    def __init__(self, kind: str, at: int, truth: Truth, proxy: Proxy) -> None:
        self.kind = kind
        self.at = at
        self.done = False
        self._count = 0
        self._truth = truth
        self._proxy = proxy

    def before(self, pid: int) -> None:
        self._count += 1
        if self.done or self._count < self.at:
            return
        self.done = True
        if self.kind == "session":
            self._truth.kill(pid)
        elif self.kind == "request":
            self._proxy.lose_request(b"")
        else:
            self._proxy.lose_answer(b"")


class StruckDatabase(PostgresDatabase):
    """The product's runner, on connections that are struck at a round trip."""

    strike: Strike | None = None

    def _meet(self, connection: psycopg.Connection | psycopg.AsyncConnection) -> None:
        if self.strike is not None:
            self.strike.before(connection.info.backend_pid)

    def _connect(self, url: str) -> psycopg.Connection:
        connection = super()._connect(url)
        wait = connection.wait

        def waited(*args: Any, **kwargs: Any) -> Any:
            self._meet(connection)
            return wait(*args, **kwargs)

        setattr(connection, "wait", waited)  # noqa: B010
        return connection

    async def _aconnect(self, url: str) -> psycopg.AsyncConnection:
        connection = await super()._aconnect(url)
        wait = connection.wait

        async def waited(*args: Any, **kwargs: Any) -> Any:
            self._meet(connection)
            return await wait(*args, **kwargs)

        setattr(connection, "wait", waited)  # noqa: B010
        return connection


Do = Callable[[Runner], Any]


class Deed(Struct, frozen=True):
    """One operation on rows of its own: `do` it, `after` that they are so. `again`: to ask for it
    once more is refused by rights.
    """

    do: Do
    after: Facts
    again: bool = False


class Unrecognised(Exception):
    """An outcome was written, and its writer was told that it was not."""


def apply(runner: Runner, *changes: Change) -> None:
    """What a finisher does: of what did not take, it looks whether it did after all."""
    taken = runner.call(store.apply, changes)
    for change in changes:
        if change.id not in taken and not runner.call(store.look, change)[1]:
            raise Unrecognised(f"{change.arrow} of {change.id}")


def new(queue: str = "default", id_: str | None = None) -> NewJob:
    return NewJob(
        id=id_ or new_id(),
        task="shop.mail",
        queue=queue,
        priority=0,
        args="{}",
        max_attempts=3,
        max_losses=3,
    )


def succeed(scene: Scene, id_: str, *children: NewJob) -> Change:
    return scene.job(id_).move(
        Event.SUCCEED, ended=AttemptState.SUCCEEDED, result='"done"', follow_ups=children
    )


def _enqueue(count: int) -> Callable[[Scene], Deed]:
    def deed(_: Scene) -> Deed:
        jobs = [new() for _ in range(count)]
        after: Facts = {job.id: ("queued", 1) for job in jobs}
        return Deed(lambda on: on.enqueue(jobs), after)

    return deed


def _enqueue_again(scene: Scene) -> Deed:
    there = scene.job(scene.enqueue())
    jobs = [new(), replace(new(), id=there.id, args=there.args)]
    after: Facts = {job.id: ("queued", 1) for job in jobs}
    return Deed(lambda on: on.call(store.enqueue_again, jobs), after)


def _claim(scene: Scene) -> Deed:
    worker, queue = scene.start_worker(), new_id()
    ids = [scene.enqueue(queue=queue) for _ in range(2)]

    def do(on: Runner) -> None:
        tasks = store.dumps(["shop.mail"])
        found = on.call(store.claim, worker, tasks, (queue, 0), (0.0, store.FIRST_ID), 10)
        owned = {job.id for job in on.call(store.owned, worker)}
        if not {each.job.id for each in found} <= owned == set(ids):
            raise Unrecognised(f"claimed {found}, owns {owned}")

    return Deed(do, dict.fromkeys(ids, ("running", 1)))


def _finish(scene: Scene) -> Deed:
    job, child = scene.claim(scene.enqueue()), new()
    change = succeed(scene, job, child)
    return Deed(lambda on: apply(on, change), {job: ("succeeded", 1), child.id: ("queued", 1)})


def _finish_mixed(scene: Scene) -> Deed:
    one, two, three = (scene.claim(scene.enqueue()) for _ in range(3))
    child = new()
    retry = scene.job(two).move(
        Event.RETRY, ended=AttemptState.FAILED, reason="error", error="{}", failures=1
    )
    drop = scene.job(three).move(Event.DROP, ended=AttemptState.CANCELLED, reason="not wanted")
    changes = (succeed(scene, one, child), retry, drop)
    after: Facts = {one: ("succeeded", 1), two: ("queued", 2), three: ("cancelled", 1)}
    return Deed(lambda on: apply(on, *changes), after | {child.id: ("queued", 1)})


def _move(state: str, decide: Any, after: tuple[str, int], *, again: bool) -> Any:
    def deed(scene: Scene) -> Deed:
        id_ = scene.enqueue()
        if state != "queued":
            scene.claim(id_)
        if state == "dead":
            scene.settle(id_, FATAL)
        return Deed(lambda on: on.call(store.move, id_, decide), {id_: after}, again)

    return deed


def _orphans(scene: Scene, worker: str) -> Facts:
    ids = [scene.claim(scene.enqueue(), worker) for _ in range(2)]
    scene.ask_cancel(ids[1])
    return {ids[0]: ("queued", 2), ids[1]: ("cancelled", 1)}


def _sweep(scene: Scene) -> Deed:
    worker = scene.start_worker()
    after = _orphans(scene, worker)
    scene.lose_worker(worker)
    return Deed(lambda on: on.call(store.sweep, recover), after)


def _bury(scene: Scene) -> Deed:
    worker = scene.start_worker()
    after = _orphans(scene, worker) | {worker: ("lost", 0)}
    return Deed(lambda on: on.call(store.bury_worker, worker, "signal 9", recover), after)


def _worker(after: tuple[str, int], op: Any, *args: Any) -> Callable[[Scene], Deed]:
    def deed(scene: Scene) -> Deed:
        worker = scene.start_worker()
        return Deed(lambda on: on.call(op, worker, *args), {worker: after})

    return deed


def _beat(scene: Scene) -> Deed:
    workers = [scene.start_worker() for _ in range(2)]
    after: Facts = dict.fromkeys(workers, ("active", 1))
    return Deed(lambda on: on.call(store.beat, workers, 9_000.0), after)


DEEDS: dict[str, Callable[[Scene], Deed]] = {
    "enqueue": _enqueue(1),
    "enqueue many": _enqueue(3),
    "enqueue again": _enqueue_again,
    "claim": _claim,
    "finish with a child": _finish,
    "finish a mixed batch": _finish_mixed,
    "cancel queued": _move("queued", cancel_change, ("cancelled", 1), again=False),
    "cancel running": _move("running", cancel_change, ("cancelling", 1), again=False),
    "requeue": _move("dead", requeue_change, ("queued", 2), again=True),
    "discard": _move("dead", discard_change("no"), ("cancelled", 1), again=True),
    "sweep": _sweep,
    "bury worker": _bury,
    "lose": _worker(("lost", 0), store.lose, "gone"),
    "drain": _worker(("draining", 0), store.drain),
    "stop": _worker(("stopped", 0), store.stop, "done"),
    "renew": _beat,
}


class Strikes:
    """A migrated database behind a proxy, and deeds that are struck there."""

    def __init__(self, url: str, report: Report) -> None:
        self._report = report
        self._real = PostgresDatabase(url)
        self._scene = Scene(self._real)
        self._truth = Truth(url)
        self._proxy = Proxy(url)
        self._databases = [StruckDatabase(url), StruckDatabase(self._proxy.url)]
        self._runners = {
            (database, on_loop): Runner(database, on_loop=on_loop)
            for database in self._databases
            for on_loop in (False, True)
        }

    def close(self) -> None:
        for runner in self._runners.values():
            runner.close()
        self._proxy.close()
        self._truth.close()
        self._real.close()

    def every(self, name: str, kind: str, *, on_loop: bool, pooled: bool) -> None:
        """Strike each round trip of one deed, one after the other, until it gets past them all."""
        at = 1
        while self.once(name, kind, at, on_loop=on_loop, pooled=pooled):
            at += 1

    def once(self, name: str, kind: str, at: int, *, on_loop: bool, pooled: bool) -> bool:
        """Strike one round trip; returns whether there was one."""
        database = self._databases[kind != "session"]
        runner = self._runners[database, on_loop]
        deed = DEEDS[name](self._scene)
        runner.call(store.now)
        if not pooled:
            runner.drop_connections()
        before = self._truth.facts(deed.after)
        strike = database.strike = Strike(kind, at, self._truth, self._proxy)
        told: Exception | None = None
        try:
            deed.do(runner)
        except Exception as error:
            told = error
        database.strike = None
        where = (
            f"[{name}, {kind} at round trip {at}, {'loop' if on_loop else 'thread'},"
            f" {'pooled' if pooled else 'fresh'}]"
        )
        for problem in self._wrong(runner, deed, before, told, strike, pooled):
            self._report.violate(f"{problem} {where}; seed {self._report.seed}")
        self._report.did[f"{kind} lost"] += strike.done
        return strike.done

    def _wrong(
        self,
        runner: Runner,
        deed: Deed,
        before: Facts,
        told: Exception | None,
        strike: Strike,
        pooled: bool,
    ) -> Generator[str]:
        met = self._report.sometimes
        try:
            runner.call(store.now)
        except Exception as error:
            yield f"the next call fails: {error}"
        if self._truth.left_open():  # Until the server has noticed, it keeps the rows locked.
            yield "a transaction is left open"
        now = self._truth.facts(deed.after)
        if now != deed.after and now != before:
            yield f"D3: half of it is there: {now}"
        if isinstance(told, IllegalTransition) and deed.again and now == deed.after:
            met["done, and then told that it cannot be done"] += 1
        elif isinstance(told, DatabaseUnavailable):
            met["unknown and done" if now == deed.after else "unknown and not done"] += 1
            if pooled and strike.kind == "session" and strike.at == 1:
                yield f"a pooled connection that had died was noticed: {told}"
            yield from self._repeat(runner, deed, now)
        elif told is not None:
            yield f"it raised {type(told).__name__}: {told}"
        elif now != deed.after:
            yield f"D1, D5: it was acknowledged and is not so: {now}"
        else:
            met["struck and healed"] += strike.done
        yield from self._truth.broken()

    def _repeat(self, runner: Runner, deed: Deed, now: Facts) -> Generator[str]:
        """Who does not know repeats it: then it is so, once."""
        try:
            deed.do(runner)
        except IllegalTransition as error:
            if not deed.again or now != deed.after:
                yield f"the repeat is refused: {error}"
        except Exception as error:
            yield f"the repeat raised {type(error).__name__}: {error}"
        after = self._truth.facts(deed.after)
        if after != deed.after:
            yield f"D3: after the repeat it is not so: {after}"


def strikes(
    url: str, seed: int, kinds: Sequence[str], *, most: int, budget: Budget | None = None
) -> Report:
    """Strike each deed by chance on a loop or not, pooled or not, until so many were struck."""
    report = Report("server", "postgres", seed)
    chance = random.Random(f"{seed} {kinds}")
    with closing(Strikes(url, report)) as place:
        while sum(report.did.values()) < most and (budget is None or budget.left()):
            names = list(DEEDS)
            chance.shuffle(names)
            for name in names:
                if sum(report.did.values()) >= most or (budget is not None and not budget.left()):
                    break
                on_loop, pooled = chance.random() < 0.5, chance.random() < 0.6
                place.every(name, chance.choice(kinds), on_loop=on_loop, pooled=pooled)
    return report


# --- clients that live through it -----------------------------------------------------------------


class Client:
    """Enqueues, claims, finishes and cancels in a queue of its own, and writes down what it was
    told. What is unknown to it, it repeats or looks up, as an application would.
    """

    def __init__(self, runner: Runner, seed: str) -> None:
        self.runner = runner
        self.queue = new_id()
        self.worker = new_id()
        self.asked: list[list[str]] = []
        """Batches of jobs that it tried to enqueue together."""
        self.told: dict[str, str] = {}
        """The state of each job, by what was acknowledged."""
        self.results: dict[str, str] = {}
        self.children: dict[str, str] = {}
        """For each outcome that it tried to write: the follow-up that goes with it."""
        self.steps = 0
        self.troubles = 0
        self.found: list[str] = []
        self._mine: dict[str, Any] = {}
        self._chance = random.Random(seed)

    def register(self) -> None:
        worker = store.Registration(
            id=self.worker,
            name="client",
            host="here",
            pid=1,
            version="0",
            queues=(self.queue,),
            tasks=("shop.mail",),
            concurrency=4,
            lease=3600.0,
        )
        self.runner.call(store.register, worker)

    def step(self) -> None:
        """One thing that it wants, asked for until it knows that it is so."""
        want = self._chance.choice([self._enqueue, self._claim, self._finish, self._cancel])
        ask = want()
        while True:
            try:
                ask()
            except DatabaseUnavailable:
                self.troubles += 1
            else:
                self.steps += 1
                return

    def _enqueue(self) -> Callable[[], None]:
        jobs = [new(self.queue) for _ in range(self._chance.choice((1, 3)))]
        self.asked.append([job.id for job in jobs])
        tries = [lambda: self.runner.enqueue(jobs)]

        def ask() -> None:
            if tries:
                tries.pop()()
            else:
                self.runner.call(store.enqueue_again, jobs)
            self.told |= {job.id: "queued" for job in jobs}

        return ask

    def _claim(self) -> Callable[[], None]:
        def ask() -> None:
            tasks = store.dumps(["shop.mail"])
            lane = (self.queue, 0)
            self.runner.call(store.claim, self.worker, tasks, lane, (0.0, store.FIRST_ID), 3)
            self._mine = {job.id: job for job in self.runner.call(store.owned, self.worker)}
            self.told |= {id_: job.state.value for id_, job in self._mine.items()}

        return ask

    def _finish(self) -> Callable[[], None]:
        if not self._mine:
            return self._claim()
        id_, job = self._mine.popitem()
        child = new(self.queue)
        self.children[id_] = child.id
        change = job.move(
            Event.SUCCEED,
            ended=AttemptState.SUCCEEDED,
            result=f'"{new_id()}"',
            follow_ups=(child,),
        )

        def ask() -> None:
            apply(self.runner, change)
            self.told |= {id_: "succeeded", child.id: "queued"}
            self.results[id_] = str(change.result)

        return ask

    def _cancel(self) -> Callable[[], None]:
        queued = [id_ for id_, state in self.told.items() if state == "queued"]
        if not queued:
            return self._enqueue()
        id_ = self._chance.choice(queued)

        def ask() -> None:
            self.told[id_] = self.runner.call(store.move, id_, cancel_change).value

        return ask

    def run(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                self.step()
        except Exception as error:
            self.found.append(f"a client was told {type(error).__name__}: {error}")

    # --- afterwards -------------------------------------------------------------------------------

    def wrong(self, url: str) -> Generator[str]:
        """What it was told, beside what is there."""
        yield from self.found
        with psycopg.connect(url) as connection:
            rows = connection.execute(
                "SELECT CAST(id AS text), state, result FROM onward.jobs WHERE queue = %s",
                [self.queue],
            ).fetchall()
        there = {row[0]: row[1] for row in rows}
        results = {row[0]: row[2] for row in rows}
        if len(there) != len(rows):
            yield f"M2: {len(rows)} rows of {len(there)} jobs"
        for id_, state in self.told.items():
            if there.get(id_) != state:
                yield f"D1, D5: {id_} is {there.get(id_)}, it was said to be {state}"
        for id_, result in self.results.items():
            if results.get(id_) != result:
                yield f"D5: {id_} came to {results.get(id_)}, acknowledged was {result}"
        for id_, child in self.children.items():
            if (there.get(id_) == "succeeded") != (child in there):
                yield f"D3: {id_} is {there.get(id_)}, and its follow-up is {there.get(child)}"
        known = {id_ for batch in self.asked for id_ in batch} | set(self.children.values())
        for id_ in there.keys() - known:
            yield f"D2: nobody asked for {id_}"
        for batch in self.asked:
            if len({id_ in there for id_ in batch}) != 1:
                yield f"D3: half of {batch} is there"


class Crowd:
    """Clients on threads of their own, every other one with a loop."""

    def __init__(self, url: str, seed: int, count: int) -> None:
        self._url = url
        self._stop = threading.Event()
        self.clients = [
            Client(Runner(PostgresDatabase(url), on_loop=bool(number % 2)), f"{seed} {number}")
            for number in range(count)
        ]
        self._threads = [
            threading.Thread(target=client.run, args=(self._stop,), daemon=True)
            for client in self.clients
        ]

    def start(self) -> None:
        for client in self.clients:
            client.register()
        for thread in self._threads:
            thread.start()

    def wait(self, count: Callable[[Client], int], more: int, clients: Sequence[Client]) -> None:
        """Wait until each of these clients has so many more of what is counted."""
        aims = [count(client) + more for client in clients]
        end = time.monotonic() + 60
        while any(
            count(client) < aim and not client.found
            for client, aim in zip(clients, aims, strict=True)
        ):
            if time.monotonic() > end:
                clients[0].found.append("a client came to a standstill")
                return
            time.sleep(0.005)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        for client in self.clients:
            client.runner.close()

    def judge(self, report: Report, url: str) -> None:
        """Report all that is wrong, and what was met."""
        with closing(Truth(url)) as truth:
            wrong = truth.broken()
        for client in self.clients:
            wrong += client.wrong(url)
            report.did["steps of clients"] += client.steps
            report.sometimes["client was told that the database is away"] += client.troubles
        for problem in wrong:
            report.violate(f"{problem} [{report.place}]; seed {report.seed}")


# --- a worker that lives through it ---------------------------------------------------------------


class Working:
    """An embedded worker on a database of its own, with bodies that bear witness."""

    def __init__(self, server: str, path: Path) -> None:
        self.url = postgres.create_database(server)
        self.app = opened(self.url)
        self._real = PostgresDatabase(self.url)
        self._server = server
        self._ledger = Ledger(path)
        self._asked: list[str] = []

    def enqueue(self, count: int) -> None:
        for _ in range(count):
            calls = [tasks.echo.call(1), tasks.aecho.call(2), tasks.nap.call(0.02)]
            handles = self.app.enqueue_many([*calls, tasks.link.call(1, 2)])
            self._asked += [handle.id for handle in handles]

    def finish(self, report: Report) -> None:
        """Wait until all is over, and hold the rows against what the bodies wrote down."""
        if not self.wait():
            report.violate(f"D4: not over: {self._counts()}; seed {report.seed}")
        found = history.read(self._real, self._ledger)
        wrong = history.problems(found, enqueued=self._asked, born_inside=True)
        for problem in wrong + history.broken_rules(self._real):
            report.violate(f"{problem} [worker, {report.place}]; seed {report.seed}")
        report.did["jobs of a worker"] += len(found.jobs)

    def wait(self) -> bool:
        """Wait until nothing is left to do; returns whether that came to pass."""
        end = time.monotonic() + 60
        while any(self._counts()[state] for state in ("queued", "running", "cancelling")):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def _counts(self) -> dict[str, int]:
        return self._real.read(store.counts)

    def close(self) -> None:
        self.app.close()
        self._real.close()
        postgres.drop_database(self._server, self.url)


@contextmanager
def working(server: str, chance: random.Random | None = None) -> Generator[Working]:
    """A worker that works; with a `chance`, on a database whose sessions are ended by it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger"
        with mock.patch.dict(os.environ, {VARIABLE: str(path)}):
            with closing(Working(server, path)) as made:
                if chance is not None:
                    made.app.database = Unsteady(made.url, chance)
                with made.app.worker(concurrency=4):
                    yield made


class Unsteady(StruckDatabase):
    """A database of which each eighth round trip or so finds its session ended."""

    def __init__(self, url: str, chance: random.Random) -> None:
        super().__init__(url)
        self.kills = 0
        self.armed = False
        self._chance = chance
        self._truth = Truth(url)
        self._lock = threading.Lock()

    def _meet(self, connection: psycopg.Connection | psycopg.AsyncConnection) -> None:
        with self._lock:
            if self.armed and self._chance.random() < 1 / 8:
                self.kills += 1
                self._truth.kill(connection.info.backend_pid)

    def close(self) -> None:
        super().close()
        self._truth.close()


def unsteady_worker(server: str, seed: int, kills: int) -> Report:
    """A worker that works on until its sessions were ended so many times."""
    report = Report("server", "postgres that ends sessions", seed)
    with working(server, random.Random(seed)) as worker:
        database = worker.app.database
        assert isinstance(database, Unsteady)
        end = time.monotonic() + 60
        while database.kills < kills and time.monotonic() < end:
            database.armed = False
            worker.enqueue(2)
            database.armed = True
            worker.wait()
        worker.finish(report)
        database.armed = False
        report.did["session of a worker lost"] += database.kills
    return report


# --- crashes of the server ------------------------------------------------------------------------


def crashes(server: PrivatePostgres, seed: int, stops: int) -> Report:
    """Stop the server like in a crash, so many times, under clients and a worker."""
    report = Report("server", "postgres that crashes", seed)
    chance = random.Random(seed)
    server.start()
    with ExitStack() as stack:
        worker = stack.enter_context(working(server.url()))
        url = stack.enter_context(migrated(server.url()))
        crowd = Crowd(url, seed, 3)
        crowd.start()
        for _ in range(stops):
            crowd.wait(lambda client: client.steps, chance.randrange(3, 30), crowd.clients)
            worker.enqueue(3)
            server.stop("immediate")
            crowd.wait(lambda client: client.troubles, 1, crowd.clients[:1])
            server.start()
            report.did["crashes of the server"] += 1
        crowd.wait(lambda client: client.steps, 5, crowd.clients)
        crowd.stop()
        crowd.judge(report, url)
        worker.finish(report)
    return report


@contextmanager
def migrated(server: str) -> Generator[str]:
    """A database of its own with Onward's tables."""
    url = postgres.create_database(server)
    try:
        with closing(PostgresDatabase(url)) as database:
            database.migrate()
        yield url
    finally:
        postgres.drop_database(server, url)


# --- partitions -----------------------------------------------------------------------------------

PATIENCE = 0.5
"""Seconds for which a loop waits for an answer here, where the product waits 15."""


def partitions(server: str, seed: int, times: int) -> Report:
    """Let the wire carry nothing until each client on a loop has noticed, then deliver what it
    held: requests whose senders have given them up arrive late.
    """
    report = Report("server", "postgres behind a wire", seed)
    chance = random.Random(seed)
    port = int(urlsplit(server).port or 5432)
    with (
        migrated(server) as url,
        Wire(port) as wire,
        mock.patch.object(adapter, "ANSWER_SECONDS", PATIENCE),
    ):
        crowd = Crowd(wire.url(url) + "?connect_timeout=2", seed, 4)
        crowd.start()
        for _ in range(times):
            crowd.wait(lambda client: client.steps, chance.randrange(3, 30), crowd.clients)
            wire.frozen = True
            on_loops = crowd.clients[1::2]
            crowd.wait(lambda client: client.troubles, 1, on_loops)
            wire.frozen = False
            report.did["partitions"] += 1
        crowd.wait(lambda client: client.steps, 5, crowd.clients)
        crowd.stop()
        crowd.judge(report, url)
    return report


# --- deep -----------------------------------------------------------------------------------------


def run_deep(seed: int, budget: Budget) -> Report:
    """All of it in turn, from seed after seed."""
    report = Report("server", "postgres", seed)
    server = postgres.find_server()
    with closing(PrivatePostgres()) as private, migrated(server) as url, quiet():
        round_ = seed
        while budget.left():
            for kinds in (("session",), ("request", "answer")):
                report.add(strikes(url, round_, kinds, most=20, budget=budget))
            if budget.left():
                report.add(unsteady_worker(server, round_, 5))
            if budget.left():
                report.add(crashes(private, round_, 4))
            if budget.left():
                report.add(partitions(server, round_, 1))
            round_ += 1
    return report


TECHNIQUES = [Technique("server", run_deep)]
