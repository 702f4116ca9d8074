"""Failures: when the next try comes, what is charged, and when it is enough."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from onward import BURY, DROP, Backoff, Discard, Handle, Onward, Retry, Snooze, current
from onward.handle import read_error
from onward.lifecycle import Event
from tests.store.builders import hand
from tests.support import tasks
from tests.support.ledger import Ledger
from tests.support.workers import running, wait_until
from tests.worker.history import ends, last_error, pauses, starts, wait_for, wait_over

SLOW_CLOCK = 0.001
"""Seconds of rounding that a database's clock may have."""


def test_each_retry_waits_longer_than_the_one_before(app: Onward) -> None:
    """0.2, 0.4, 0.8 s: no attempt starts sooner than its backoff, on the database's clock."""

    @app.task(max_attempts=4, backoff=Backoff(base=0.2, factor=2, jitter=0))
    def fail() -> None:
        raise RuntimeError

    with app.worker():
        job = fail.enqueue()
        wait_for(job, "dead")
    for pause, least in zip(pauses(job), [0.2, 0.4, 0.8], strict=True):
        assert least - SLOW_CLOCK <= pause < least + 5


def test_jitter_takes_away_and_never_adds(app: Onward) -> None:
    """With a jitter of one half, each of 40 pauses is at least half the delay, and they differ."""

    @app.task(max_attempts=2, backoff=Backoff(base=0.6, factor=1, jitter=0.5))
    async def fail() -> None:
        raise RuntimeError

    jobs = app.enqueue_many(fail.call() for _ in range(40))
    with app.worker(concurrency=40):
        wait_over(jobs)
    found = [pause for job in jobs for pause in pauses(job)]
    assert min(found) >= 0.3 - SLOW_CLOCK
    due = {round((job.run_at - job.created_at).total_seconds(), 2) for job in jobs}
    assert len(due) > 3


def test_a_task_may_say_when_to_try_again(app: Onward) -> None:
    """`Retry(after=…)` counts as a failure and overrules the backoff, in both directions."""

    @app.task(max_attempts=3, backoff=Backoff(base=3600))
    def fail() -> None:
        if current().attempt == 1:
            raise Retry("not ready", after=timedelta(seconds=0.4))
        raise Retry(after=0)

    with app.worker():
        job = fail.enqueue()
        wait_for(job, "dead")
    assert ends(job) == ["failed: error"] * 3
    assert pauses(job)[0] >= 0.4 - SLOW_CLOCK
    assert job.failures == 3
    assert read_error(job.attempts()[0].error or "").message == "not ready"


def test_retry_without_a_time_goes_by_the_backoff(app: Onward) -> None:
    """Plain `raise Retry` is the task's usual pause."""

    @app.task(max_attempts=2, backoff=Backoff(base=0.3, jitter=0))
    def fail() -> None:
        raise Retry

    with app.worker():
        job = fail.enqueue()
        wait_for(job, "dead")
    assert pauses(job)[0] >= 0.3 - SLOW_CLOCK


def test_a_snooze_is_free_of_charge(app: Onward) -> None:
    """Five snoozes and then success, although `max_attempts` is 1; each pause is kept."""

    @app.task(max_attempts=1)
    def wait() -> int:
        if current().attempt < 6:
            raise Snooze(timedelta(seconds=0.05))
        return current().attempt

    with app.worker():
        job = wait.enqueue()
        assert job.wait(15) == 6
    assert ends(job) == ["released: snoozed"] * 5 + ["succeeded"]
    assert min(pauses(job)) >= 0.05 - SLOW_CLOCK
    assert (job.failures, job.losses) == (0, 0)


def test_a_discard_ends_cancelled_with_its_reason(app: Onward) -> None:
    """No other try, and the reason can be read."""

    @app.task
    def drop() -> None:
        raise Discard("the user is gone")

    with app.worker():
        job = drop.enqueue()
        wait_for(job, "cancelled")
    assert job.reason == "the user is gone"
    assert [attempt.event for attempt in job.attempts()] == [Event.DROP]


class Broken(ValueError):
    """An error of a task's own."""


def test_rules_by_kind_of_error(app: Onward) -> None:
    """BURY: dead at once. DROP: cancelled. A Backoff of its own. The nearest class counts."""

    @app.task(
        max_attempts=2,
        backoff=Backoff(base=3600),
        on_error={ValueError: BURY, LookupError: DROP, Broken: tasks.SOON},
    )
    def fail(kind: str) -> None:
        raise {"value": ValueError, "key": KeyError, "broken": Broken}[kind](kind)

    with app.worker():
        buried, dropped, broken = (fail.enqueue(kind) for kind in ("value", "key", "broken"))
        wait_over([buried, dropped, broken])
    assert (buried.state, ends(buried)) == ("dead", ["failed: error"])
    assert (dropped.state, "KeyError" in (dropped.reason or "")) == ("cancelled", True)
    assert (broken.state, ends(broken)) == ("dead", ["failed: error"] * 2)


@pytest.mark.parametrize("rule", [DROP, BURY, Backoff(base=60)])
def test_what_a_stop_makes_a_body_raise_is_no_error_that_a_rule_is_for(
    app: Onward, rule: Any
) -> None:
    """It would be gone for good because of a deploy."""
    begun = threading.Event()

    @app.task(on_error={Broken: rule})
    async def nap() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise Broken from None

    with app.worker() as worker:
        job = nap.enqueue()
        assert begun.wait(10)
        worker.stop(grace=0.05)
        worker.join()
    assert (job.refresh().state, ends(job)) == ("queued", ["released: shutdown"])


def test_a_body_that_discards_its_job_at_a_stop_is_heard(app: Onward) -> None:
    """It says so itself, and no rule for it."""
    begun = threading.Event()

    @app.task
    async def nap() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise Discard("not worth another try") from None

    with app.worker() as worker:
        job = nap.enqueue()
        assert begun.wait(10)
        worker.stop(grace=0.05)
        worker.join()
    assert (job.refresh().state, job.reason) == ("cancelled", "not worth another try")


def test_a_payload_of_another_job_that_cannot_be_read_is_an_ordinary_failure(app: Onward) -> None:
    """Only a job's own arguments and result say that another try would meet the same."""
    ran: list[int] = []

    @app.task(name="number")
    def number() -> int:
        return 3

    @app.task(max_attempts=2, backoff=tasks.SOON)
    def read(id: str) -> Any:
        ran.append(1)
        return other.get(id).result

    with app.worker():
        first = number.enqueue()
        wait_for(first, "succeeded")
        with closing(Onward(app.url)) as other:

            @other.task(name="number")
            def words() -> list[str]: ...

            job = read.enqueue(first.id)
            wait_for(job, "dead")
    assert len(ran) == 2
    assert ends(job) == ["failed: error"] * 2
    assert "PayloadUnreadable" in last_error(job).type


class Incomparable(type):
    """Makes classes that cannot be put into a dictionary."""

    def __eq__(cls, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class OddError(Exception, metaclass=Incomparable):
    """An error of such a class."""


class Unsayable:
    """A reason that will not be read."""

    def __str__(self) -> str:
        raise RuntimeError


def test_an_error_of_any_class_is_told_as_it_is(app: Onward) -> None:
    """Whatever its metaclass thinks of comparing; a rule for its base holds."""

    @app.task(max_attempts=1, on_error={ValueError: BURY})
    def fail() -> None:
        raise OddError("it broke")

    with app.worker():
        job = fail.enqueue()
        wait_for(job, "dead")
    assert last_error(job).message == "it broke"
    assert last_error(job).type.endswith("OddError")


def test_a_reason_that_cannot_be_read_does_not_undo_a_discard(app: Onward) -> None:
    @app.task
    def drop() -> None:
        raise Discard(Unsayable())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    with app.worker():
        job = drop.enqueue()
        wait_for(job, "cancelled")
    assert "Unsayable" in (job.reason or "")


def test_a_rule_for_every_base_exception(app: Onward) -> None:
    """`BaseException: BURY` holds for `SystemExit` too."""

    @app.task(max_attempts=5, on_error={BaseException: BURY})
    def leave() -> None:
        raise SystemExit(3)

    with app.worker():
        job = leave.enqueue()
        wait_for(job, "dead")
    assert ends(job) == ["failed: error"]


def test_one_attempt_means_one(app: Onward) -> None:
    """`max_attempts=1` and an error: dead after one body, and still so later."""
    ran: list[int] = []

    @app.task(max_attempts=1)
    def fail() -> None:
        ran.append(1)
        raise RuntimeError

    @app.task
    def fine() -> None: ...

    with app.worker():
        job = fail.enqueue()
        wait_for(job, "dead")
        wait_over([fine.enqueue()])
    assert ran == [1]
    assert ends(job) == ["failed: error"]


@pytest.mark.parametrize("way", ["raises", "is too slow", "loses its worker"])
def test_one_attempt_means_one_execution_whatever_ends_it(
    shop: Onward, ledger: Ledger, way: str
) -> None:
    """`max_attempts=1` in a real worker: one start in the ledger, dead with the right reason, and
    still so after 10 sweeps.
    """
    settings = {"sweep": 0.05}
    with running(shop.url, concurrency=2, settings=settings) as worker:
        if way == "raises":
            job: Handle[Any] = tasks.fail.using(max_attempts=1).enqueue()
        elif way == "is too slow":
            job = tasks.nap.using(max_attempts=1, timeout=0.3).enqueue(60)
        else:
            job = tasks.nap.using(max_attempts=1).enqueue(60)
            wait_until(lambda: starts(ledger, job))
            os.kill(worker.pids()[0], signal.SIGKILL)
        wait_for(job, "dead")
        time.sleep(0.6)
        assert tasks.echo.enqueue(1).wait(15) == 1
    reasons = {"raises": "failed: error", "is too slow": "failed: timeout"}
    assert ends(job) == [reasons.get(way, "lost")]
    assert job.refresh().state == "dead"
    assert len(starts(ledger, job)) == 1


def test_a_requeued_job_goes_on_counting_with_fresh_budgets(app: Onward) -> None:
    """Dead after 1, 2, 3; requeued: 4, 5, 6, then dead again, once, with all six in its history."""
    ran: list[int] = []

    @app.task(max_attempts=3, backoff=Backoff(base=0.05, factor=2, jitter=0))
    def fail() -> None:
        ran.append(current().attempt)
        raise RuntimeError(f"attempt {current().attempt}")

    with app.worker():
        job = fail.enqueue()
        wait_for(job, "dead")
        assert job.failures == 3
        app.requeue(job.id)
        wait_for(job, "dead")
    assert ran == [1, 2, 3, 4, 5, 6]
    assert [attempt.number for attempt in job.attempts()] == ran
    assert [attempt.event for attempt in job.attempts()] == [
        Event.RETRY,
        Event.RETRY,
        Event.BURY,
    ] * 2
    assert job.failures == 3
    assert app.counts()["dead"] == 1
    assert pauses(job)[3] < 0.1 + 5  # The delays start afresh, too.


def test_a_requeued_job_may_succeed(app: Onward) -> None:
    """It was quarantined, the cause is mended, it runs: succeeded, with its history."""
    broken = True

    @app.task(max_attempts=2, backoff=tasks.SOON)
    def work() -> str:
        if broken:
            raise RuntimeError
        return "mended"

    with app.worker():
        job = work.enqueue()
        wait_for(job, "dead")
        broken = False
        app.requeue(job.id)
        assert job.wait(10) == "mended"
    assert ends(job) == ["failed: error", "failed: error", "succeeded"]


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(60, id="scaled"),
        pytest.param(10_050, id="as written", marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
    ],
)
def test_dead_jobs_stay_until_someone_decides(app: Onward, count: int) -> None:
    """Workers do not touch them, and retention, which takes everything else at once, does not take
    them, however many there are.
    """
    app.settings = replace(
        app.settings, keep_succeeded=0.0, keep_cancelled=0.0, prune_every=0.05, sweep=0.1
    )

    @app.task(max_attempts=1)
    async def work(end: str) -> None:
        if end == "dead":
            raise RuntimeError
        if end == "cancelled":
            raise Discard

    for start in range(0, count, 500):
        app.enqueue_many(work.call("dead") for _ in range(min(500, count - start)))
    app.enqueue_many(work.call(end) for end in ("succeeded", "cancelled") for _ in range(20))
    with app.worker(concurrency=100):
        wait_until(lambda: app.counts()["dead"] == count, 300)
        wait_until(lambda: sum(app.counts().values()) == count, 60, what="the others pruned")
        time.sleep(0.3)
    assert app.counts()["dead"] == count


def test_a_dead_job_may_be_given_up(app: Onward) -> None:
    """Discarded, it is cancelled, and its history says that it failed."""

    @app.task(max_attempts=1)
    def fail() -> None:
        raise RuntimeError

    with app.worker():
        job = fail.enqueue()
        wait_for(job, "dead")
        assert app.discard(job.id) == "cancelled"
    assert ends(job) == ["failed: error"]


ABRUPT: dict[str, type[BaseException]] = {
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "MemoryError": MemoryError,
    "GeneratorExit": GeneratorExit,
    "StopIteration": StopIteration,
    "CancelledError": asyncio.CancelledError,
    "BaseException": BaseException,
}


@pytest.mark.parametrize("where", ["loop", "thread"])
def test_abrupt_exceptions_are_failures_like_any_other(app: Onward, where: str) -> None:
    """Each is named in history, and the worker that met it goes on."""

    async def on_loop(kind: str) -> None:
        raise ABRUPT[kind]("as asked")

    def in_thread(kind: str) -> None:
        raise ABRUPT[kind]("as asked")

    fail = app.task(name="fail", max_attempts=2, backoff=tasks.SOON)(
        on_loop if where == "loop" else in_thread
    )

    @app.task
    async def fine() -> None: ...

    jobs: dict[str, Handle[Any]] = {}
    with app.worker():
        for kind in ABRUPT:
            jobs[kind] = fail.enqueue(kind)
            wait_until(jobs[kind].attempts)
            wait_over([fine.enqueue()])
        wait_over(jobs.values())
    assert {job.state for job in jobs.values()} == {"dead"}
    for kind, job in jobs.items():
        assert ends(job) == ["failed: error"] * 2
        assert kind in f"{last_error(job).type} {last_error(job).message}"


@pytest.mark.parametrize("where", ["loop", "thread"])
def test_endless_recursion_is_a_failure_like_any_other(app: Onward, where: str) -> None:
    """A RecursionError, at the end of its stack, is recorded with a bounded traceback."""

    def deeper(level: int) -> int:
        return deeper(level + 1) + 1

    async def on_loop() -> int:
        return deeper(0)

    def in_thread() -> int:
        return deeper(0)

    fail = app.task(name="fail", max_attempts=1)(on_loop if where == "loop" else in_thread)
    with app.worker():
        job: Handle[Any] = fail.enqueue()
        wait_for(job, "dead")
    assert last_error(job).type == "RecursionError"
    assert len(last_error(job).traceback) < 40_000


class Mute(Exception):
    """An exception that will not be read."""

    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


class Odd(Exception):
    """An exception whose text is no text."""

    def __str__(self) -> str:
        return 5  # type: ignore[return-value]  # pyright: ignore[reportReturnType]


def own_cause() -> BaseException:
    error = RuntimeError("I am my own cause")
    error.__cause__ = error
    return error


def two_in_a_circle() -> BaseException:
    one, two = RuntimeError("one"), RuntimeError("two")
    one.__cause__, two.__cause__ = two, one
    return one


def long_chain() -> BaseException:
    error = RuntimeError("last")
    for number in range(5_000):
        following = RuntimeError(str(number))
        following.__context__ = error
        error = following
    return error


HOSTILE: dict[str, Any] = {
    "mute": Mute,
    "odd": Odd,
    "own cause": own_cause,
    "circle": two_in_a_circle,
    "long chain": long_chain,
    "group": lambda: ExceptionGroup("many", [ValueError(i) for i in range(10_000)]),
    "holds a mute one": lambda: ValueError(Mute()),
    "large": lambda: ValueError("x" * 50_000_000),
    "pickles badly": lambda: type("Late", (Exception,), {"args": property(lambda s: 1 / 0)})(),
}


def test_exceptions_that_fight_back_are_recorded(app: Onward) -> None:
    """Each is a failed attempt with at least its type's name and a bounded text."""

    @app.task(max_attempts=1)
    def fail(kind: str) -> None:
        raise HOSTILE[kind]()

    jobs = app.enqueue_many(fail.call(kind) for kind in HOSTILE)
    with app.worker(concurrency=2):
        wait_over(jobs)
        again = fail.enqueue("mute")
        wait_for(again, "dead")
    for job in jobs:
        assert ends(job) == ["failed: error"]
        assert last_error(job).type
        assert len(job.attempts()[0].error or "") < 64 * 1024
    large = last_error(jobs[list(HOSTILE).index("large")]).message
    assert "cut" in large


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(6, id="scaled"),
        pytest.param(1_000, id="as written", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_a_long_history_of_failures_stays_bounded(app: Onward, times: int) -> None:
    """Each time a message of 5 MB: the first and the latest error are kept, each of them cut."""

    @app.task(max_attempts=times, backoff=Backoff(base=1e-6, factor=1, jitter=0))
    async def fail() -> None:
        raise ValueError(f"attempt {current().attempt}: " + "x" * 5_000_000)

    with app.worker():
        job = fail.enqueue()
        wait_for(job, "dead", seconds=600)
    past = job.attempts()
    assert [attempt.number for attempt in past] == list(range(1, times + 1))
    for attempt in (past[0], past[-1]):
        assert read_error(attempt.error or "").message.startswith(f"attempt {attempt.number}:")
    with hand(app.database) as dba:
        size = dba.sql("SELECT sum(length(error)) FROM onward.attempt")[0][0]
    assert size < times * 24 * 1024


def test_absurd_delays_stay_dates(app: Onward) -> None:
    """A backoff that would overflow is capped, and the job is a queued one with a due time."""

    @app.task(max_attempts=10_000, backoff=Backoff(base=1e300, factor=1e300, cap=None))
    def fail() -> None:
        raise RuntimeError

    with app.worker():
        job = fail.enqueue()
        wait_until(job.attempts)
    assert job.refresh().state == "queued"
    assert math.isfinite(job.run_at.timestamp())
    job.cancel()
