"""Which job is next: priority, then age, in every queue that is served, of every known task."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from onward import InvalidOption, Onward
from tests.cli.shell import in_process
from tests.support import history, tasks
from tests.support.ledger import Ledger
from tests.support.workers import TARGET, running, wait_until
from tests.worker.history import ends, starts, wait_over


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(700, id="scaled"),
        pytest.param(15_000, id="as written", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_a_mixed_backlog_starts_in_order(app: Onward, count: int) -> None:
    """One slot: the highest priority first, the oldest first within one; 0 inversions."""
    began: list[tuple[int, int]] = []

    @app.task
    async def note(priority: int, number: int) -> None:
        began.append((priority, number))

    chance = random.Random(7)
    calls = [(chance.choice([-100, -1, 0, 1, 100]), number) for number in range(count)]
    for start in range(0, count, 500):
        app.enqueue_many(
            note.using(priority=priority).call(priority, number)
            for priority, number in calls[start : start + 500]
        )
    app.run_worker(concurrency=1, until_empty=True)
    assert began == sorted(calls, key=lambda job: (-job[0], job[1]))


def test_a_later_job_of_higher_priority_overtakes_the_backlog(app: Onward) -> None:
    """It starts before most of what was queued earlier, although that is being claimed already."""
    began: list[str] = []

    @app.task
    def work(name: str) -> None:
        began.append(name)
        time.sleep(0.03)

    backlog = app.enqueue_many(work.call("low") for _ in range(60))
    with app.worker(concurrency=1):
        wait_until(lambda: len(began) > 3)
        wait_over([work.using(priority=10).enqueue("high")])
        place = began.index("high")
        wait_over(backlog)
    assert place < 50


def test_a_high_priority_does_not_starve_the_other_queues_of_their_slots(app: Onward) -> None:
    """Queues of one priority take turns at being first."""
    began: list[str] = []

    @app.task
    def work(name: str) -> None:
        began.append(name)
        time.sleep(0.01)

    jobs = app.enqueue_many(
        work.using(queue=name).call(name) for name in ("a", "b") for _ in range(20)
    )
    with app.worker(concurrency=1, queues=["a", "b"]):
        wait_over(jobs)
    assert set(began) == {"a", "b"}


@pytest.mark.parametrize(
    ("count", "length"),
    [
        pytest.param(60, 0.02, id="scaled"),
        pytest.param(500, 0.05, id="as written", marks=pytest.mark.soak),
    ],
)
def test_a_recovered_job_keeps_its_place(
    shop: Onward, ledger: Ledger, count: int, length: float
) -> None:
    """Its worker is killed; afterwards it goes before a long list of lower priority: at most one
    other job starts between the sweep and its own start.
    """
    job = tasks.nap_once.using(priority=5).enqueue(60)
    with running(shop.url, concurrency=1) as worker:
        wait_until(lambda: starts(ledger, job))
        backlog = shop.enqueue_many(tasks.nap.using(priority=1).call(length) for _ in range(count))
        os.kill(worker.pids()[0], signal.SIGKILL)
        wait_over([job, *backlog], 100)
    order = [line["job"] for line in starts(ledger)[1:]]
    assert order.index(job.id) <= 1
    assert ends(job) == ["lost", "succeeded"]


def test_a_retried_job_goes_before_lower_priorities(app: Onward) -> None:
    """Once its pause is over it starts within the bound of a full look, 1 s, although the worker is
    busy with a long list of others.
    """
    began: list[str] = []

    @app.task(backoff=tasks.SOON, max_attempts=2)
    def work(name: str, fail: bool = False) -> None:
        began.append(name)
        time.sleep(0.02)
        if fail and began.count(name) == 1:
            raise RuntimeError

    job = work.using(priority=5).enqueue("high", fail=True)
    backlog = app.enqueue_many(work.call("low") for _ in range(100))
    with app.worker(concurrency=1):
        wait_over([job, *backlog])
    first, second = [place for place, name in enumerate(began) if name == "high"]
    assert first == 0
    assert second < 80


QUEUES = [
    "*",
    "all",
    "default",
    "a,b",
    " lead",
    "NULL",
    "None",
    "-q",
    'it\'s; "fine"',
    "🙂",
    "x" * 300,
    "",
    "a:4",
    "a\x00b",
    "a\nb",
    "\\",
    "%",
    "Ünïcode",
    ".",
    "\ud800",
]


@pytest.mark.parametrize("queue", QUEUES)
def test_every_queue_is_refused_or_reachable(app: Onward, queue: str) -> None:
    """No name is accepted and never served: either `enqueue` names it in an error, or a worker for
    exactly that name runs its job.
    """

    @app.task
    def work() -> str:
        return "done"

    try:
        job = work.using(queue=queue).enqueue()
    except InvalidOption:
        with pytest.raises(InvalidOption, match="queue"):
            work.using(queue=queue).enqueue()
        return
    with app.worker(queues=[queue]):
        assert job.wait(10) == "done"


def test_a_worker_serves_only_its_queues(app: Onward) -> None:
    """What is in another queue stays there."""

    @app.task
    def work() -> None: ...

    mine, other = work.using(queue="mine").enqueue(), work.using(queue="other").enqueue()
    with app.worker(queues=["mine"]):
        wait_over([mine])
        time.sleep(0.3)
    assert other.refresh().state == "queued"


def test_by_default_a_worker_serves_the_queues_of_its_tasks(app: Onward) -> None:
    """And `default`."""

    @app.task(queue="mail")
    def mail() -> None: ...

    @app.task(queue="reports")
    def report() -> None: ...

    with app.worker():
        wait_over([mail.enqueue(), report.enqueue(), report.using(queue="default").enqueue()])


@pytest.mark.parametrize("queues", [[], (), "mail", ["*"], ["a,b"], [""], [5], 5])
def test_queues_that_name_no_queue_are_refused(app: Onward, queues: Any) -> None:
    """An empty list is not every queue, a text is not its letters, and no name is a pattern."""
    with pytest.raises(InvalidOption, match="queue") as caught:
        app.worker(queues=queues)
    assert "queue" in caught.value.fix
    with pytest.raises(InvalidOption, match="queue"):
        app.run_worker(queues=queues, until_empty=True)


@pytest.mark.parametrize("concurrency", [0, -1, 1.5, True, "4", 1_000_000])
def test_a_concurrency_that_cannot_work_is_refused(app: Onward, concurrency: Any) -> None:
    with pytest.raises(InvalidOption, match="concurrency"):
        app.worker(concurrency=concurrency)
    with pytest.raises(InvalidOption, match="concurrency"):
        app.run_worker(concurrency=concurrency, until_empty=True)


def test_a_supervisor_told_of_no_queue_serves_none(shop: Onward) -> None:
    with running(shop.url, queues=[], ready=False) as worker:
        assert worker.wait(60)
        assert "names no queue" in worker.log()


def test_a_queue_that_no_task_uses_is_doubted(
    app: Onward, shop: Onward, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever serves it, an embedded worker or one of a supervisor, warns, and names those that
    there are; a queue that some task uses is beyond doubt.
    """

    @app.task(queue="mail")
    def mail() -> None: ...

    with caplog.at_level(logging.WARNING, "onward"), app.worker(queues=["mail", "emial"]):
        pass
    assert caplog.text.count("queue.unknown queue=emial") == caplog.text.count("queue.unknown") == 1
    assert "known=default,mail" in caplog.text
    with running(shop.url, queues=[("emial", None), ("default", 2)]) as worker:
        wait_until(lambda: "queue.unknown queue=emial" in worker.log())
        assert worker.log().count("queue.unknown") == 1


def test_an_app_without_tasks_is_doubted(
    app: Onward, shop: Onward, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Whoever runs it, an embedded worker or one of a supervisor."""
    with caplog.at_level(logging.WARNING, "onward"), app.worker():
        pass
    assert caplog.text.count("tasks.none hint=") == 1
    (tmp_path / "idle_shop.py").write_text("from onward import Onward\napp = Onward()\n")
    with running(shop.url, target=f"{tmp_path}/idle_shop.py:app") as worker:
        wait_until(lambda: "tasks.none hint=" in worker.log())


def test_a_task_that_nobody_knows_waits_and_the_log_says_so(
    app: Onward, caplog: pytest.LogCaptureFixture
) -> None:
    """A rolling deploy: the old worker leaves the job alone, names it, and the new one runs it with
    its first attempt.
    """

    @app.task(name="old")
    def old() -> str:
        return "old"

    @app.task(name="new")
    def new() -> str:
        return "new"

    job = new.enqueue()
    del app.tasks["new"]
    with caplog.at_level(logging.WARNING, "onward"), app.worker():
        assert old.enqueue().wait(10) == "old"
        wait_until(lambda: "task.unknown" in caplog.text)
        assert "task=new" in caplog.text
        assert job.refresh().state == "queued"
    app.tasks["new"] = new
    with app.worker():
        assert job.wait(10) == "new"
    assert ends(job) == ["succeeded"]


def test_unknown_tasks_in_front_do_not_slow_the_others(app: Onward) -> None:
    """3,000 due jobs of an unknown task stand in front; a known one runs soon all the same."""

    @app.task(name="known")
    def known() -> str:
        return "here"

    @app.task(name="unknown")
    def unknown() -> None: ...

    for _ in range(3):
        app.enqueue_many(unknown.using(priority=5).call() for _ in range(1_000))
    del app.tasks["unknown"]
    with app.worker():
        began = time.monotonic()
        assert known.enqueue().wait(10) == "here"
        assert time.monotonic() - began < 5


def test_a_delayed_job_starts_when_it_is_due_and_not_before(app: Onward) -> None:
    """On the database's clock, while the worker is idle and while it is busy."""

    @app.task
    async def work() -> None: ...

    job = work.using(run_after=0.6).enqueue()
    with app.worker():
        wait_over([job])
    lag = job.attempts()[0].started_at
    assert lag is not None
    assert 0 <= lag - job.run_at.timestamp() < 3


@pytest.mark.parametrize(
    ("count", "processes"),
    [
        pytest.param(300, 3, id="scaled"),
        pytest.param(10_000, 8, id="as written", marks=pytest.mark.soak),
    ],
)
def test_many_small_jobs_on_several_processes_run_once_each(
    shop: Onward, ledger: Ledger, count: int, processes: int
) -> None:
    """A full queue, and processes that all start at the same moment."""
    jobs = shop.enqueue_many(tasks.aecho.call(i) for i in range(count))
    with running(shop.url, processes=processes, concurrency=4, ready=False):
        wait_until(lambda: shop.counts()["succeeded"] == count, 100)
    assert sorted(line["job"] for line in starts(ledger)) == sorted(job.id for job in jobs)
    assert {tuple(ends(job)) for job in jobs[:300]} == {("succeeded",)}
    assert {row.attempt for row in history.read(shop.database, ledger).jobs.values()} == {1}


ODD = ["NULL", "None", 'it\'s; "fine"', "🙂", "\\", "%", "Ünïcode", ".", "all"]
"""Names of queues that are accepted."""


def test_odd_queues_are_reachable_from_the_command_line(shop: Onward) -> None:
    """`onward worker -q NAME` serves exactly the queue of that name."""
    jobs = [tasks.aecho.using(queue=name).enqueue(name) for name in ODD]
    other = tasks.aecho.using(queue="null").enqueue("other")
    words = [word for name in ODD for word in ("-q", name)]
    done = in_process("worker", TARGET, *words, "--until-empty", ONWARD_URL=shop.url)
    assert done.returncode == 0, done.stderr
    assert {job.refresh().state for job in jobs} == {"succeeded"}
    assert other.refresh().state == "queued"
