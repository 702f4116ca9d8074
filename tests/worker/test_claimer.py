"""The claimer alone, on a real database."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from onward import Onward
from onward.job import Job
from onward.store import store
from onward.store.database import Refused
from onward.store.postgres import PostgresDatabase
from onward.store.postgres_wakeup import read_hint
from onward.worker import claimer as claimer_module
from onward.worker import refusing
from onward.worker.claimer import Claimer
from tests.store.builders import hand, register
from tests.support import stubborn
from tests.support.workers import wait_until
from tests.worker.history import wait_over


class Watched:
    """A database that notes when somebody looks for lanes, and says when it was done twice."""

    def __init__(self, database: Any, notes: list[str]) -> None:
        self._database = database
        self._notes = notes
        self.twice = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    async def arun(self, op: Any, *args: Any) -> Any:
        if op is store.claim:
            self._notes.append("claim")
        return await self._database.arun(op, *args)

    async def aread(self, op: Any, *args: Any) -> Any:
        if op is store.lanes:
            if "look" in self._notes:
                self.twice.set()
            self._notes.append("look")
        return await self._database.aread(op, *args)


def claimer_of(
    database: Any,
    worker: str,
    task: str,
    start: Callable[[list[Job]], None],
    *,
    limit: int | None = None,
    poll: float = 60.0,
) -> Claimer:
    """A claimer of one queue and one task, with room for ten."""
    return Claimer(
        database,
        worker,
        [task],
        {"default": limit},
        poll,
        room=lambda: 10,
        running=lambda _: 0,
        start=start,
    )


def test_what_was_claimed_begins_before_the_next_look(app: Onward) -> None:
    """A lone job does not wait until the question for the next one is on its way."""
    notes: list[str] = []

    @app.task
    async def lone() -> None: ...

    lone.enqueue()
    database = app.database
    worker = register(database)

    async def body() -> None:
        notes.append("began")

    async def main() -> None:
        bodies: list[asyncio.Task[None]] = []

        def start(jobs: list[Job]) -> None:
            bodies.extend(asyncio.get_running_loop().create_task(body()) for _ in jobs)

        watched = Watched(database, notes)
        claimer = claimer_of(watched, worker, lone.name, start, poll=0.05)
        running = asyncio.create_task(claimer.run())
        async with asyncio.timeout(10):
            await watched.twice.wait()
        claimer.stop()
        await running
        await database.close_loop()

    asyncio.run(main())
    assert notes[:4] == ["look", "claim", "began", "look"]


@pytest.mark.parametrize("pace", [0.3, 0.0])
def test_jobs_that_come_one_by_one_are_claimed_together(
    app: Onward, monkeypatch: pytest.MonkeyPatch, pace: float
) -> None:
    """The first at once, and what comes in the moment after it with one claim. (Without that
    moment each is claimed by itself.)
    """
    monkeypatch.setattr(claimer_module, "PACE", pace)
    taken: list[int] = []

    @app.task
    async def lone() -> None: ...

    database = app.database
    worker = register(database)

    async def main() -> None:
        began = asyncio.Event()

        def start(jobs: list[Job]) -> None:
            taken.append(len(jobs))
            began.set()

        claimer = claimer_of(database, worker, lone.name, start)
        running = asyncio.create_task(claimer.run())
        async with asyncio.timeout(10):
            await claimer.idle.wait()
            for count in range(1, 5):
                await lone.aenqueue()
                claimer.hear()
                if count == 1 or not pace:
                    await began.wait()
                    began.clear()
            while sum(taken) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        claimer.stop()
        await running
        await database.close_loop()

    asyncio.run(main())
    assert taken == ([1, 3] if pace else [1, 1, 1, 1])


def test_a_queue_with_a_limit_of_its_own_waits_for_nothing(
    app: Onward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the limit left is there already."""
    monkeypatch.setattr(claimer_module, "PACE", 60.0)
    taken: list[int] = []

    @app.task
    async def lone() -> None: ...

    database = app.database
    worker = register(database)
    for _ in range(3):
        lone.enqueue()

    async def main() -> None:
        all_taken = asyncio.Event()

        def start(jobs: list[Job]) -> None:
            taken.append(len(jobs))
            if sum(taken) == 3:
                all_taken.set()

        claimer = claimer_of(database, worker, lone.name, start, limit=1)
        running = asyncio.create_task(claimer.run())
        async with asyncio.timeout(10):
            await all_taken.wait()
        claimer.stop()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await database.close_loop()

    asyncio.run(main())
    assert taken == [1, 1, 1]


def test_a_hint_into_a_lane_with_unknown_jobs_is_followed_by_a_look(app: Onward) -> None:
    """To claim from its start would be to pass over each of them. SQLite does that in its index."""
    notes: list[str] = []
    began = asyncio.Event()

    @app.task
    async def lone() -> None: ...

    @app.task
    async def other() -> None: ...

    database = app.database
    worker = register(database)
    other.enqueue()

    def start(jobs: list[Job]) -> None:
        notes.extend("began" for _ in jobs)
        began.set()

    async def main() -> None:
        claimer = claimer_of(Watched(database, notes), worker, lone.name, start)
        claimer._pause = 60.0
        running = asyncio.create_task(claimer.run())
        async with asyncio.timeout(10):
            await claimer.idle.wait()
            notes.clear()
            await lone.aenqueue()
            claimer.hear(("default", 0))
            await began.wait()
        claimer.stop()
        await running
        await database.close_loop()

    asyncio.run(main())
    if database.dialect == "postgres":
        assert notes[:3] == ["look", "claim", "began"]


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_a_hint_that_names_a_lane_is_followed_without_a_look(app: Onward, right: bool) -> None:
    """By a worker that has nothing to do: a lone job is picked up by one statement. The look comes
    next, so a hint that leads nowhere costs one statement and hides nothing.
    """
    notes: list[str] = []
    began = asyncio.Event()

    @app.task
    async def lone() -> None: ...

    database = app.database
    worker = register(database)

    def start(jobs: list[Job]) -> None:
        notes.extend("began" for _ in jobs)
        began.set()

    async def main() -> None:
        claimer = Claimer(
            Watched(database, notes),  # type: ignore[arg-type]
            worker,
            [lone.name],
            {"default": None, "other": None},
            60.0,
            room=lambda: 10,
            running=lambda _: 0,
            start=start,
        )
        claimer._pause = 60.0
        running = asyncio.create_task(claimer.run())
        async with asyncio.timeout(10):
            await claimer.idle.wait()
            notes.clear()
            await lone.aenqueue()
            claimer.hear(("default" if right else "other", 0))
            await began.wait()
        claimer.stop()
        await running
        await database.close_loop()

    asyncio.run(main())
    first = ["claim", "began"] if right else ["claim", "look", "claim", "began"]
    assert notes[: len(first)] == first


ODD_HINTS = {
    "a priority beyond all": '["default",99999]',
    "a priority below all": '["default",-101]',
    "a priority that no number holds": f'["default",{"9" * 5000}]',
    "no whole priority": '["default",0.5]',
    "a priority that is no number": '["default",true]',
    "a queue that is no name": '[{"default":0},0]',
    "no priority": '["default"]',
    "too much": '["default",0,0]',
    "no list": '{"default":0}',
    "a number": "12",
    "nothing": "",
    "no JSON": "wake up",
    "half": '["default",',
    "deep": "[" * 7_000,
    "huge": f'["{"x" * 7_000}",101]',
    "half a letter": '["\\ud800",0]',
}


@pytest.mark.parametrize("payload", ODD_HINTS.values(), ids=ODD_HINTS)
def test_a_hint_that_names_no_lane_that_there_is_names_none(payload: str) -> None:
    """Anybody who can reach the database may send one."""
    assert read_hint(payload) is None
    assert read_hint('["default",-100]') == ("default", -100)
    assert read_hint('["default",100]') == ("default", 100)


@pytest.mark.parametrize("ready_database_url", ["postgres"], indirect=True)
@pytest.mark.parametrize("payload", [ODD_HINTS["a priority beyond all"], ODD_HINTS["deep"]])
def test_odd_hints_delay_no_start(
    app: Onward, payload: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They wake the claimer like any other, and it looks for itself."""
    database = app.database
    assert isinstance(database, PostgresDatabase)

    @app.task
    async def lone() -> None: ...

    with app.worker():
        lone.enqueue().wait(10)
        with psycopg.connect(database.url, autocommit=True) as link:
            for _ in range(20):
                link.execute("SELECT pg_notify(%s, %s)", [database.channel, payload])
                time.sleep(0.02)
            began = time.monotonic()
            lone.enqueue().wait(10)
            took = time.monotonic() - began
    assert "stumbled" not in caplog.text
    assert took < 2.0


# --- jobs that refuse to be claimed ---------------------------------------------------------------


def refused_claims(app: Onward, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations that the database refuses from now on."""
    found: list[str] = []
    write = app.database.arun

    async def watched(op: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await write(op, *args, **kwargs)
        except Refused:
            found.append(op.__name__)
            raise

    monkeypatch.setattr(app.database, "arun", watched)
    return found


def tellings(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if line.startswith("claim.refused ")]


@pytest.mark.parametrize("way", stubborn.WAYS)
def test_a_job_that_refuses_to_be_claimed_holds_up_no_other(
    app: Onward, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Its neighbours run, and so do the lanes behind it; the log names it, once. The worker that
    has found it is refused nothing more for a while.
    """
    refuse, mend, words = stubborn.WAYS[way]

    @app.task
    async def work() -> None: ...

    lanes = [work.using(priority=5), work, work.using(queue="other"), work.using(priority=-5)]
    jobs = app.enqueue_many(lane.call() for lane in lanes for _ in range(12))
    bad = jobs.pop(7)
    refuse(app.database, [bad.id])
    found = refused_claims(app, monkeypatch)
    with app.worker(concurrency=20, queues=["default", "other"]):
        wait_over(jobs)
        known = len(found)
        for lane in lanes:
            lane.enqueue().wait(20)
        assert len(found) == known <= 10, "it is found by halves, and then known"
    (line,) = tellings(caplog)
    assert f"job={bad.id}" in line
    assert re.search(words, line)
    assert bad.refresh().state == "queued"
    mend(app.database)
    with app.worker():
        wait_over([bad])
    assert [attempt.state for attempt in bad.attempts()] == ["succeeded"]


@pytest.mark.parametrize("way", stubborn.WAYS)
def test_a_job_that_refused_is_tried_again_and_runs_when_it_is_mended(
    app: Onward, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """By the same worker, and all the others with it; until then it is told again and again."""
    refuse, mend, _ = stubborn.WAYS[way]
    monkeypatch.setattr(refusing, "AGAIN_AFTER", 0.1)

    @app.task
    async def work() -> None: ...

    jobs = app.enqueue_many(work.call() for _ in range(30))
    bad = [job.id for job in jobs[5:25]]
    refuse(app.database, bad)
    with app.worker(concurrency=8):
        wait_over(jobs[:5] + jobs[25:])
        wait_until(lambda: len({line.split("job=")[1][:36] for line in tellings(caplog)}) == 20)
        mend(app.database)
        wait_over(jobs)
    assert {job.state for job in jobs} == {"succeeded"}


@pytest.mark.parametrize("way", stubborn.WAYS)
def test_a_job_that_refuses_to_be_claimed_can_be_cancelled(app: Onward, way: str) -> None:
    """As the log says; the worker forgets it."""
    refuse, mend, _ = stubborn.WAYS[way]

    @app.task
    async def work() -> None: ...

    bad, good = app.enqueue_many(work.call() for _ in range(2))
    refuse(app.database, [bad.id])
    with app.worker():
        wait_over([good])
        assert app.cancel(bad.id) == "cancelled"
        wait_over([work.enqueue()])
    mend(app.database)


def test_where_hundreds_refuse_those_behind_them_are_claimed(
    app: Onward, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few slots there are; ten of them are told. What is left when only they are left is
    nothing to do.
    """

    @app.task
    async def work() -> None: ...

    jobs = app.enqueue_many(work.call() for _ in range(205))
    stubborn.forbid(app.database, [job.id for job in jobs[:200]])
    found = refused_claims(app, monkeypatch)
    app.run_worker(concurrency=7, until_empty=True)
    assert {job.refresh().state for job in jobs[200:]} == {"succeeded"}
    assert app.counts()["queued"] == 200
    assert len(tellings(caplog)) == refusing.AT_ONCE
    assert len(found) <= 2 * 200 + 40
    stubborn.allow(app.database)


def test_where_too_many_refuse_the_lane_waits_and_the_others_go_on(
    app: Onward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered has an end, and beyond it nothing is searched for again and again."""
    monkeypatch.setattr(refusing, "MOST", 8)

    @app.task
    async def work() -> None: ...

    jobs = app.enqueue_many(work.using(priority=1).call() for _ in range(40))
    stubborn.forbid(app.database, [job.id for job in jobs])
    found = refused_claims(app, monkeypatch)
    with app.worker(concurrency=5):
        for _ in range(10):
            work.enqueue().wait(20)
        known = len(found)
        for _ in range(10):
            work.enqueue().wait(20)
    assert set(found[known:]) <= {"claim_around"}, "one for each look, and no search"
    assert found.count("claim_these") < len(jobs)
    assert app.counts()["queued"] == 40
    stubborn.allow(app.database)


def test_a_search_for_the_one_that_refuses_delays_no_look(
    app: Onward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it takes is no measure of what the next look will take."""
    passed = [0.0]
    monkeypatch.setattr(
        claimer_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    )

    @app.task
    async def work() -> None: ...

    jobs = app.enqueue_many(work.call() for _ in range(8))
    stubborn.forbid(app.database, [job.id for job in jobs[:7]])
    worker, write = register(app.database), app.database.arun
    asked: list[bool] = []

    async def slow(op: Any, *args: Any) -> Any:
        if op is store.claim_these:
            passed[0] += 0.1
        return await write(op, *args)

    async def main() -> None:
        began = asyncio.Event()
        claimer = Claimer(
            app.database,
            worker,
            [work.name],
            {"default": None},
            0.05,
            room=lambda: 2,
            running=lambda _: 0,
            start=lambda _: began.set(),
        )
        running = asyncio.create_task(claimer.run())
        async with asyncio.timeout(10):
            await began.wait()
        asked.append(claimer._lanes.may_look(time.monotonic() + passed[0]))
        claimer.stop()
        await running
        await app.database.close_loop()

    monkeypatch.setattr(app.database, "arun", slow)
    asyncio.run(main())
    assert asked == [True]
    stubborn.allow(app.database)


def test_bytes_that_are_no_text_hold_up_no_other(
    app: Onward, caplog: pytest.LogCaptureFixture
) -> None:
    """PostgreSQL stores none; SQLite stores what it is given."""

    @app.task
    async def work(x: int) -> None: ...

    jobs = app.enqueue_many(work.call(number) for number in range(9))
    if app.database.dialect == "sqlite":
        bad = jobs.pop(4)
        with hand(app.database) as dba:
            dba.sql(
                "UPDATE onward.job SET args = CAST(x'7bff7d' AS TEXT) WHERE id = :id", id=bad.id
            )
    with app.worker(concurrency=20):
        wait_over(jobs)
    assert len(tellings(caplog)) == 9 - len(jobs)
