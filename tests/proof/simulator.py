"""Whole lives of jobs under workers that die, stand still and lose answers, in virtual time.

The real worker runs here (`EmbeddedWorker` with its claimer, executor, finisher, listener; heart
and keeper as tasks beside it, because there are no threads), several of them on one simulated loop,
each a process of its own, beside a client and a fate that breaks things. At the end all faults
stop; then every job must come to its end, and `Witness` and the database are asked for everything
that must hold. One seed is one history.

Not driven here: threads and processes for bodies, the supervisor, lock files as proof of death.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from random import Random
from typing import Any
from unittest.mock import patch

from msgspec import Struct
from msgspec.structs import replace

from onward import Discard, Onward, Retry, Settings, Snooze, current
from onward.errors import DatabaseError, IllegalTransition, JobNotFound
from onward.events import Happened
from onward.ids import new_id
from onward.policy import Backoff
from onward.worker import embedded, stage
from onward.worker.board import Board
from onward.worker.claimer import Claimer
from onward.worker.embedded import EmbeddedWorker
from onward.worker.heart import Heart
from onward.worker.keeper import Keeper
from onward.worker.stage import keep_going
from tests.proof.report import Budget, Report, Technique
from tests.proof.simulated_loop import (
    Process,
    SimulatedLoop,
    in_place_of_the_machine,
    inside,
)
from tests.proof.simulated_store import SimulatedDatabase, Weather, Witness

HOUR = 3_600.0
STRANGE = "a task of another app"
ROUND = Claimer._round  # pyright: ignore[reportPrivateUsage]
STOP = Claimer.stop

MANY = 10

LONGEST = 120.0
"""Virtual seconds without faults after which every job must have come to its end."""

app = Onward("sqlite:///simulated.db")


# --- what jobs do ---------------------------------------------------------------------------------


@app.task(max_attempts=3, max_losses=4, backoff=Backoff(base=0.5, factor=2, cap=8, jitter=0.5))
async def play(script: list[str]) -> int:
    """Each attempt plays its line of the script, the last line again and again."""
    return await _play(script)


@app.task(max_attempts=1, queue="mail", priority=5)
async def once(script: list[str]) -> int:
    """At most once: a failure or a loss is the end."""
    return await _play(script)


@app.task(max_attempts=2, timeout=1.5, backoff=Backoff(base=0.5, factor=2, cap=8, jitter=0))
async def limited(script: list[str]) -> int:
    """Has a time limit."""
    return await _play(script)


async def _play(script: list[str]) -> int:
    me = current()
    run = Run.now
    assert run is not None
    line = script[min(me.attempt, len(script)) - 1]
    body = run.witness.begins(me.id, me.attempt, line)
    try:
        await _act(run, *line.split())
    except BaseException as error:
        run.witness.ends(body, type(error).__name__)
        raise
    run.witness.ends(body, None)
    return me.attempt


async def _act(run: Run, verb: str, seconds: str) -> None:
    length = float(seconds)
    if verb == "stubborn":
        return await _be_stubborn(run, length)
    if verb == "polite":
        for _ in range(int(length / 0.1)):
            await asyncio.sleep(0.1)
            current().check()
        return
    if verb not in {"retry", "snooze"}:
        await asyncio.sleep(length)
    match verb:
        case "fail":
            raise ValueError("as the script says")
        case "retry":
            raise Retry(after=length)
        case "snooze":
            raise Snooze(length)
        case "discard":
            raise Discard("as the script says")
        case "child":
            call = play.call([f"work {length}"])
            run.witness.has_child(current().id, current().attempt, call.job.id)
            current().enqueue(call)
        case "outer":
            call = play.call(["work 0.1"])
            run.witness.asked[call.job.id] = frozenset({call.job.id})
            await app.aenqueue_many([call])
            run.witness.acknowledged.add(call.job.id)
        case _:
            assert verb == "work"


async def _be_stubborn(run: Run, seconds: float) -> None:
    """Goes on, whatever it is told."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end and not run.over:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(end - loop.time())


LINES = (
    ("work 0.05", 12),
    ("work 0.5", 8),
    ("work 3", 2),
    ("work 9", 1),
    ("fail 0.1", 5),
    ("retry 0.7", 2),
    ("retry 3", 1),
    ("snooze 0.8", 2),
    ("discard 0.1", 1),
    ("child 0.2", 3),
    ("outer 0.1", 1),
    ("polite 2", 2),
    ("stubborn 4", 1),
)


def script(chance: Random) -> list[str]:
    lines, weights = [line for line, _ in LINES], [weight for _, weight in LINES]
    found = chance.choices(lines, weights, k=chance.choice([1, 1, 2, 3, 4]))
    return [*found, chance.choice(["work 0.1", "work 0.3", "fail 0.1"])]


# --- one worker -----------------------------------------------------------------------------------


class SimulatedSteward:
    """Heart and keeper as the product's steward runs them, but as tasks: there are no threads."""

    def __init__(self, database: Any, settings: Settings, worker: str, board: Board) -> None:
        self._heart = Heart(database, settings.lease, settings.beat)
        self._heart.boards[worker] = board
        self._keeper = Keeper(database, settings, lambda: [worker])
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(keep_going("heart", self._heart.run)),
            asyncio.create_task(keep_going("keeper", self._keeper.run)),
        ]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()


class OnLoop(EmbeddedWorker):
    """An embedded worker that no signal reaches."""

    def _handle_signals(self) -> dict[Any, Any]:
        return {}


class Node:
    """A process with a worker in it."""

    def __init__(self, run: Run, number: int) -> None:
        self.process = Process(f"worker {number}", number, mortal=True)
        self.worker = OnLoop(app, concurrency=run.chance.choice([2, 8, 16]))
        self.stopped_at: float | None = None
        self.task: asyncio.Task[str] = run.loop.create_task(
            self.worker.arun(), context=inside(self.process)
        )
        # Bodies that go on when their worker has ended end with its process.
        self.task.add_done_callback(lambda _: self.process.die(run.loop.time()))

    @property
    def runs(self) -> bool:
        return self.process.alive and not self.task.done()

    def stop(self, run: Run, grace: float | None) -> None:
        """As a signal does: the worker hears of it when its process runs."""
        self.stopped_at = run.loop.time()
        run.loop.call_soon(self.worker.stop, grace, context=inside(self.process))


# --- one run --------------------------------------------------------------------------------------


class Size(Struct, frozen=True):
    """How much happens in a run: jobs of the client, and seconds with faults. A long history costs
    less a job than a short one, because every history ends with a while in which little happens.
    """

    jobs: int = 800
    seconds: float = 56.0


class Run:
    """One history, from its seed.

    Args:
        seed: of all its chances.
        size: how much happens.
    """

    now: Run | None = None

    def __init__(self, seed: int, size: Size) -> None:
        self.chance = Random(seed)
        self.size = size
        self.over = False
        self.loop = SimulatedLoop(Random(seed + 1), in_order=self.chance.random() < 0.5)
        self.settings = self._settings()
        self.met: Counter[str] = Counter()
        self.wrong: list[str] = []
        local = self.chance.random() < 0.5
        self.witness = Witness(self.loop, self.settings, self.wrong, self.met)
        self.database = SimulatedDatabase(
            self.loop,
            Random(seed + 2),
            local=local,
            notifies=self.chance.random() < 0.5,
            witness=self.witness.sees,
        )
        self.nodes: list[Node] = []
        self.worst_step = 0.0

    def _settings(self) -> Settings:
        """Times as the defaults stand to each other, most of them shorter."""
        quick = self.chance.random() < 0.8
        lease, beat, sweep = (3.0, 1.0, 1.0) if quick else (15.0, 5.0, 2.0)
        return Settings(
            lease=lease,
            beat=beat,
            sweep=sweep,
            poll=1.0,
            grace=self.chance.choice([0.5, 3.0]),
            cancel_poll=0.5,
            cancel_raise_after=0.5,
            abandon_after=2.0,
            timeout_grace=0.5,
            prune_every=HOUR,
        )

    # --- the play -----------------------------------------------------------------------------

    def play(self) -> None:
        """Everything that happens, and then what is wrong with it."""
        with self._set_up():
            self.loop.run(self._live(), Process("fate"))
            gc.collect()  # What died with an error that nobody took says so now.
            self.witness.judge(self.database)
            self.over = self.witness.closed = True
            self.database.close()
            self.loop.end()
        self.wrong += [f"nobody took this error: {error}" for error in self.loop.errors]
        self.met.update({f"answer {fate}": n for fate, n in self.database.met.items() if fate})

    @contextmanager
    def _set_up(self) -> Generator[None]:
        with ExitStack() as stack:
            stack.enter_context(in_place_of_the_machine(self.loop, self.chance))
            stack.enter_context(patch.object(app, "database", self.database))
            stack.enter_context(patch.object(app, "settings", self.settings))
            stack.enter_context(patch.object(embedded, "Steward", SimulatedSteward))
            stack.enter_context(patch.object(embedded, "target_of", _nowhere))
            stack.enter_context(patch.object(stage, "emit", self._stumbled))
            stack.enter_context(patch.object(Claimer, "_round", self.witness.watched(ROUND)))
            stack.enter_context(patch.object(Claimer, "stop", self.witness.stops(STOP)))
            stack.enter_context(patch.object(logging.getLogger("onward"), "disabled", True))
            stack.enter_context(patch.object(Run, "now", self))
            stack.callback(gc.enable)
            gc.disable()
            yield

    def _stumbled(self, happened: Happened) -> None:
        """A stage that met an error which nobody expected."""
        if happened.level >= logging.ERROR and not self.over:
            self.wrong.append(f"a stage stumbled: {happened.fields}")

    async def _live(self) -> None:
        for _ in range(self.chance.choice([2, 3])):
            self._start_node()
        client = self.loop.create_task(self._be_client(), context=inside(Process("client")))
        await self._break_things()
        await client
        self._stop_faults()
        await self._come_to_an_end()
        await self._probe()
        await self._stop_all()

    def _start_node(self) -> None:
        self.nodes.append(Node(self, len(self.nodes) + 1))

    # --- the client -------------------------------------------------------------------------------

    async def _be_client(self) -> None:
        self._enqueue_stranger()
        left = self.size.jobs
        pace = self.size.seconds / left
        while left > 0:
            count = min(left, self.chance.choice([1, 1, 2, 5, 20]))
            left -= count
            await self._enqueue(count)
            await asyncio.sleep(self.chance.uniform(0, 2 * pace * count))
            for _ in range(self.chance.choice([0, 0, 1, 3])):
                await self._meddle()

    def _enqueue_stranger(self) -> None:
        """A job of a task that no worker here knows stays where it is."""
        job = replace(play.call([]).job, id=new_id(), task=STRANGE, priority=9)
        self.database.enqueue([job])
        self.witness.asked[job.id] = frozenset({job.id})
        self.witness.acknowledged.add(job.id)

    async def _enqueue(self, count: int) -> None:
        """A call in a transaction; where its answer was lost, it is repeated if it can be."""
        own = self.chance.random() < 0.5
        calls: list[Any] = []
        for _ in range(count):
            task: Any = self.chance.choices([play, once, limited], [7, 1, 2])[0]
            delay = self.chance.choice([None, None, None, 0.3, 2.0])
            id_ = f"{self.chance.getrandbits(128):032x}" if own else None
            calls.append(task.using(run_after=delay, id=id_).call(script(self.chance)))
            self.witness.delays[calls[-1].job.id] = delay or 0.0
        ids = frozenset(call.job.id for call in calls)
        self.witness.asked |= {call.job.id: ids for call in calls}
        for _ in range(3 if own else 1):
            try:
                await app.aenqueue_many(calls)
            except DatabaseError:
                self.met["enqueue unknown"] += 1
                await asyncio.sleep(0.3)
            else:
                self.witness.acknowledged |= ids
                return

    async def _meddle(self) -> None:
        """Cancel a job, or take one out of quarantine."""
        id_ = self.chance.choice(list(self.witness.asked))
        what = self.chance.choice(["cancel", "cancel", "requeue", "discard"])
        if what != "cancel":
            dead = [job for job, event in self.witness.last_event.items() if event == "bury"]
            id_ = self.chance.choice(dead) if dead else id_
        try:
            state = await getattr(app, f"a{what}")(id_)
        except (DatabaseError, IllegalTransition, JobNotFound):
            return
        self.met[f"{what} acknowledged"] += 1
        if what == "cancel":
            self.witness.cancel_acknowledged(id_, state)

    # --- fate -------------------------------------------------------------------------------------

    async def _break_things(self) -> None:
        """Faults at random moments, among them those of single answers."""
        rate = self.chance.choice([0.0, 0.02, 0.06])
        self.database.weather = Weather(
            refused=rate,
            dies_before=rate / 16,
            dies_after=rate / 8,
            unknown=rate,
            late=rate / 4,
            slow=rate / 3,
            slow_beat=self.chance.choice([0.0, 0.1]),
        )
        end = self.loop.time() + self.size.seconds
        while self.loop.time() < end:
            await asyncio.sleep(self.chance.expovariate(1.6))
            self._break_one_thing()
            if sum(node.runs for node in self.nodes) < 2 and self.chance.random() < 0.7:
                self._start_node()

    def _break_one_thing(self) -> None:
        nodes = [node for node in self.nodes if node.runs]
        if not nodes:
            return
        node = self.chance.choice(nodes)
        now, lease = self.loop.time(), self.settings.lease
        match self.chance.randrange(8):
            case 0 | 1:
                node.process.die(now)
                self.met["crash"] += 1
            case 2:
                node.process.stands_until = now + lease * self.chance.uniform(1.1, 2.5)
                self.met["stall past the lease"] += 1
            case 3:
                node.process.stands_until = now + self.chance.uniform(0.2, 0.9 * lease)
                self.met["stall"] += 1
            case 4:
                self.database.away_until = now + self.chance.choice([0.5, 2.0, 1.2 * lease])
                self.met["outage"] += 1
            case 5 | 6 if self.chance.random() < 0.5:
                self.database.step = self.chance.choice([-HOUR, 0.0, HOUR])
                self.worst_step = max(self.worst_step, self.database.step)
                self.met["clock stepped"] += 1
            case _:
                node.stop(self, self.chance.choice([None, 0.0, 1.0]))
                self.met["stop"] += 1

    # --- the end ----------------------------------------------------------------------------------

    def _stop_faults(self) -> None:
        """From now on nothing breaks. What was written while the clock was ahead becomes due."""
        self.database.weather = Weather()
        self.database.away_until = 0.0
        self.database.step = self.worst_step
        for node in self.nodes:
            node.process.stands_until = 0.0
        for _ in range(2):
            self._start_node()

    async def _come_to_an_end(self) -> None:
        end = self.loop.time() + LONGEST
        live = (
            "SELECT id, state, attempt, run_at FROM onward.job"
            f" WHERE state <> 'dead' AND task <> '{STRANGE}' LIMIT 3"
        )
        while left := self.database.rows(live):
            if len(self.wrong) >= MANY:
                return  # What is so wrong need not come to an end.
            if self.loop.time() > end:
                self.wrong.append(f"D4: {LONGEST:g} s after the last fault there are {left}")
                return
            await asyncio.sleep(1.0)

    async def _probe(self) -> None:
        """With free slots and no faults, a due job is claimed within the bound of the full look."""
        for _ in range(2):
            await asyncio.sleep(self.chance.uniform(0, 2))
            call = play.using(run_after=self.chance.choice([None, 0.2])).call(["work 0.1"])
            self.witness.asked[call.job.id] = frozenset({call.job.id})
            await app.aenqueue_many([call])
            self.witness.acknowledged.add(call.job.id)
            end = self.loop.time() + 0.2 + 3.0 + self.settings.poll
            while not self.witness.has_begun(call.job.id):
                if self.loop.time() > end:
                    self.wrong.append(f"D4: {call.job.id} was due and nobody claimed it")
                    break
                await asyncio.sleep(0.1)
        await self._come_to_an_end()

    async def _stop_all(self) -> None:
        """Everybody stops in order, and owns nothing afterwards."""
        nodes = [node for node in self.nodes if node.runs]
        for node in nodes:
            node.stop(self, None)
        await asyncio.wait({node.task for node in nodes}, timeout=60)
        for node in nodes:
            if not node.task.done() or node.task.exception():
                self.wrong.append(f"Z1: {node.process.name} did not stop: {node.task}")


def _nowhere(_: Onward) -> None:
    """No process of its own can find the app, so all bodies run on the loop."""


def simulate(seed: int, size: Size) -> Run:
    """One history."""
    run = Run(seed, size)
    run.play()
    return run


def search(
    seed: int,
    budget: Budget,
    *,
    size: Size | None = None,
    most: int = 10**9,
    until_found: bool = False,
) -> Report:
    """Histories of this seed and those after it.

    Args:
        seed: of the first.
        budget: for how long.
        size: of each.
        most: job lifetimes after which it is enough.
        until_found: end with the first history that is wrong.
    """
    report = Report("simulator", "sqlite in memory, in virtual time", seed)
    gc.freeze()  # What is there before the first history is not looked through after each one.
    number = seed
    while report.did["job lifetimes"] < most and budget.left():
        run = simulate(number, size or Size())
        report.did["histories"] += 1
        report.did["job lifetimes"] += run.witness.jobs
        report.did["attempts"] += len(run.witness.bodies)
        report.did["operations"] += run.witness.operations
        report.sometimes.update(run.met)
        for text in run.wrong:
            report.violate(f"{text} (seed {number})")
        if run.wrong and until_found:
            break
        number += 1
    return report


TECHNIQUES = [Technique("simulator", search)]
