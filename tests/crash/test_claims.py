"""Two workers cannot both claim the same job, and what has just been claimed is not taken back."""

from __future__ import annotations

import asyncio
import random
import re
import threading

import pytest

from onward.app import Onward
from onward.config import Settings
from onward.store.url import open_database
from onward.worker.keeper import Keeper
from tests.crash.conftest import Open
from tests.crash.field import enqueue, wait_until_over
from tests.support import history, stubborn, tasks
from tests.support.ledger import Ledger
from tests.support.workers import running, wait_until


@pytest.mark.parametrize(
    ("processes", "jobs", "due_in"),
    [
        pytest.param(4, 3_000, 1.0, id="scaled"),
        pytest.param(16, 10_000, 6.0, id="as written", marks=pytest.mark.soak),
    ],
)
def test_each_job_is_claimed_by_one_of_many_processes(
    app: Onward, database_url: str, ledger: Ledger, processes: int, jobs: int, due_in: float
) -> None:
    """All processes wait for the same moment, at which every job falls due: they claim at once, and
    yet each job runs once.
    """
    with running(database_url, processes=processes, ledger=ledger):
        ids = enqueue(
            app, (tasks.aecho.using(run_after=due_in).call(number) for number in range(jobs))
        )
        wait_until_over(app, 120)
    found = history.check(app.database, ledger, ids)
    assert history.states(found) == {"succeeded": jobs}
    assert {job.attempt for job in found.jobs.values()} == {1}
    assert len(found.bodies) == len({body.job for body in found.bodies}) == jobs
    assert len({body.pid for body in found.bodies}) > processes // 2, "too tame: few took part"


@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param(300, id="scaled"),
        pytest.param(5_000, id="as written", marks=pytest.mark.soak),
    ],
)
def test_fresh_claims_are_not_swept(
    open_app: Open, database_url: str, ledger: Ledger, jobs: int
) -> None:
    """A sweeper that looks every 20 ms finds nothing to take back from workers that are well."""
    app = open_app(lease=4.0, beat=1.0)
    chance = random.Random(7)
    with (
        running(database_url, processes=4, ledger=ledger),
        _Sweeper(database_url, Settings(lease=4.0, beat=1.0, sweep=0.02)) as sweeper,
    ):
        ids = enqueue(app, (tasks.nap.call(chance.random() / 50) for _ in range(jobs)))
        wait_until_over(app, 60)
    assert sweeper.took == 0
    found = history.check(app.database, ledger, ids)
    assert history.states(found) == {"succeeded": jobs}
    assert {job.attempt for job in found.jobs.values()} == {1}


@pytest.mark.parametrize("way", stubborn.WAYS)
def test_a_job_that_cannot_be_claimed_holds_up_no_other(
    app: Onward, database_url: str, ledger: Ledger, way: str
) -> None:
    """Three processes of two supervisors find it, each for itself: nobody is told of another one,
    and every other job runs once, whatever stands where. Mended, it runs too.
    """
    refuse, mend, words = stubborn.WAYS[way]
    ids = enqueue(app, (tasks.aecho.using(priority=p).call(n) for p in (5, 0) for n in range(300)))
    bad = ids[120]
    refuse(app.database, [bad])
    with (
        running(database_url, processes=2, ledger=ledger) as one,
        running(database_url, ledger=ledger) as other,
    ):
        wait_until(lambda: app.counts()["succeeded"] == 599, 30)
        wait_until(lambda: "claim.refused" in one.log() + other.log())
        told = [line for line in (one.log() + other.log()).splitlines() if "claim.refused" in line]
    assert all(bad in line and re.search(words, line) for line in told), told
    assert 1 <= len(told) <= 3
    mend(app.database)
    with running(database_url, ledger=ledger):
        wait_until_over(app, 30)
    found = history.check(app.database, ledger, ids)
    assert history.states(found) == {"succeeded": 600}
    assert {job.attempt for job in found.jobs.values()} == {1}
    assert len(found.bodies) == 600


class _Sweeper:
    """A keeper that sweeps without a pause of more than 20 ms, on a thread of its own."""

    def __init__(self, url: str, settings: Settings) -> None:
        self._url = url
        self._settings = settings
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.took = 0

    def __enter__(self) -> _Sweeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    async def _run(self) -> None:
        database = open_database(self._url)
        keeper = Keeper(database, self._settings, lambda: ())
        while not self._over.is_set():
            self.took += len(await keeper.sweep())
            await asyncio.sleep(0.02)
        await database.aclose()
