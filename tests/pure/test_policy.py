"""Decisions: every outcome from every state, two budgets that never overdraw, and delays that stay
sane.
"""

from __future__ import annotations

import ast
import inspect
import math
from datetime import timedelta
from decimal import Decimal
from types import ModuleType
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward import job as job_module
from onward import lifecycle, policy
from onward.errors import IllegalTransition, InvalidOption
from onward.job import Change, Job, NewJob
from onward.lifecycle import ATTEMPT_ENDS, OWNED, AttemptState, Event, JobState
from onward.policy import (
    MAX_DELAY,
    Backoff,
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
    settle,
)

BACKOFF = Backoff(base=10, factor=2, cap=None, jitter=0)


def a_job(state: JobState = JobState.RUNNING, **fields: Any) -> Job:
    """A job in this state on its first attempt, with three tries and three losses to spend."""
    values: dict[str, Any] = {
        "id": "0190a6d8-0000-7000-8000-000000000001",
        "task": "shop.report",
        "queue": "default",
        "priority": 0,
        "state": state,
        "attempt": 1,
        "worker": "w" if state in OWNED else None,
        "args": "{}",
        "max_attempts": 3,
        "max_losses": 3,
        "failures": 0,
        "losses": 0,
        "budget_from": 1,
        "timeout": None,
    }
    return Job(**(values | fields))


def decide(job: Job, outcome: Outcome) -> Change:
    return settle(job, outcome, BACKOFF, chance=0.0)


# --- every state, every outcome -------------------------------------------------------------------

OUTCOMES: dict[str, Outcome] = {
    "returned": Returned("1"),
    "raised": Raised("boom"),
    "raised for good": Raised("boom", final=True),
    "timed out": TimedOut("too long"),
    "crashed": Crashed("signal 11"),
    "rejected": Rejected("does not fit"),
    "snoozed": Snoozed(60),
    "discarded": Discarded("no longer wanted"),
    "released": Released("shutdown"),
    "stopped": Stopped(),
}

# outcome: (event, end of the attempt, reason, charged) from running, and (end of the attempt,
# reason) from cancelling
CELLS: dict[str, tuple[str, str, str | None, int, str, str | None]] = {
    "returned": ("succeed", "succeeded", None, 0, "succeeded", None),
    "raised": ("retry", "failed", "error", 1, "failed", "error"),
    "raised for good": ("bury", "failed", "error", 1, "failed", "error"),
    "timed out": ("retry", "failed", "timeout", 1, "failed", "timeout"),
    "crashed": ("retry", "failed", "crashed", 1, "failed", "crashed"),
    "rejected": ("bury", "failed", "rejected", 1, "failed", "rejected"),
    "snoozed": ("snooze", "released", "snoozed", 0, "released", "cancelled"),
    "discarded": ("drop", "cancelled", "no longer wanted", 0, "cancelled", "cancelled"),
    "released": ("release", "released", "shutdown", 0, "released", "cancelled"),
    "stopped": ("release", "released", "stopped", 0, "cancelled", "cancelled"),
}


def test_the_grid_has_every_kind_of_outcome() -> None:
    """A new outcome without a row in this grid fails here first."""
    assert {type(outcome) for outcome in OUTCOMES.values()} == set(get_args(Outcome))
    assert set(CELLS) == set(OUTCOMES)


@pytest.mark.parametrize("name", OUTCOMES)
@pytest.mark.parametrize("state", JobState)
def test_every_state_and_outcome_has_a_cell(state: JobState, name: str) -> None:
    """Only a job that somebody owns can be settled; of each outcome it is known what becomes of
    attempt and job.
    """
    job, outcome = a_job(state), OUTCOMES[name]
    if state not in OWNED:
        with pytest.raises(IllegalTransition, match=job.id):
            decide(job, outcome)
        return
    event, ended, reason, charged, ended_asked, reason_asked = CELLS[name]
    change = decide(job, outcome)
    assert change.ended in ATTEMPT_ENDS[state, change.event]
    assert change.losses == 0
    if state is JobState.RUNNING:
        assert (change.event, change.ended, change.reason) == (event, ended, reason)
        assert change.failures == charged
    else:
        assert change.event == (Event.SUCCEED if name == "returned" else Event.CANCEL)
        assert (change.ended, change.reason) == (ended_asked, reason_asked)
        assert change.failures == 0


@pytest.mark.parametrize("state", JobState)
def test_every_state_has_a_cell_for_a_vanished_worker(state: JobState) -> None:
    """A loss is a matter of owned jobs only; one that was to be cancelled is cancelled."""
    job = a_job(state)
    if state not in OWNED:
        with pytest.raises(IllegalTransition, match=job.id):
            recover(job, "lease over")
        return
    change = recover(job, "lease over")
    assert (change.ended, change.reason, change.error) == (AttemptState.LOST, "lost", "lease over")
    assert change.failures == 0
    asked = state is JobState.CANCELLING
    assert change.event == (Event.CANCEL if asked else Event.RECOVER)
    assert change.losses == (0 if asked else 1)


@pytest.mark.parametrize("name", sorted(set(OUTCOMES) - {"returned"}))
def test_a_job_asked_to_stop_ends_cancelled_with_nothing_charged(name: str) -> None:
    """The attempt keeps what really happened to it, error and all, and no budget pays for the
    caller's wish.
    """
    job = a_job(JobState.CANCELLING, failures=2, losses=1, attempt=4)
    change = decide(job, OUTCOMES[name])
    assert change.after is JobState.CANCELLED
    assert (change.failures, change.losses, change.attempt) == (2, 1, 4)
    assert change.error == getattr(OUTCOMES[name], "error", None)
    assert change.delay == 0


def test_a_job_that_returned_has_succeeded_though_it_was_asked_to_stop() -> None:
    """The work is done, whoever asked for what; its result and its follow-ups stay."""
    follow_up = NewJob(
        id="f", task="t", queue="q", priority=0, args="{}", max_attempts=1, max_losses=0
    )
    for state in (JobState.RUNNING, JobState.CANCELLING):
        change = decide(a_job(state), Returned("42", follow_ups=(follow_up,)))
        assert change.after is JobState.SUCCEEDED
        assert (change.result, change.follow_ups) == ("42", (follow_up,))


def test_an_abandoned_body_is_recorded_in_both_states() -> None:
    """That a body may still run is told whether its job is retried or cancelled."""
    for state in OWNED:
        assert decide(a_job(state), TimedOut("stuck", abandoned=True)).abandoned
        assert not decide(a_job(state), TimedOut("slow")).abandoned


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["raised", "timed out", "crashed"])
def test_the_last_failure_of_the_budget_buries(name: str) -> None:
    """Three attempts mean three failures: the first two are retried, the third is dead."""
    events = [decide(a_job(failures=n), OUTCOMES[name]).event for n in range(3)]
    assert events == [Event.RETRY, Event.RETRY, Event.BURY]


def test_the_loss_after_the_budget_of_losses_buries() -> None:
    """Three losses are forgiven, and the fourth is dead: a job that kills its workers does not do
    so for ever.
    """
    events = [recover(a_job(losses=n), "gone").event for n in range(4)]
    assert events == [Event.RECOVER, Event.RECOVER, Event.RECOVER, Event.BURY]


def test_the_two_budgets_do_not_touch_each_other() -> None:
    """A deploy that loses attempts spends no retries, and a failing job spends no losses."""
    spent = a_job(failures=2, losses=3)
    failed = decide(spent, Raised("boom"))
    assert (failed.failures, failed.losses) == (3, 3)
    lost = recover(spent, "gone")
    assert (lost.failures, lost.losses) == (2, 4)
    assert recover(a_job(failures=2, losses=0), "gone").event is Event.RECOVER
    assert decide(a_job(failures=0, losses=3), Raised("boom")).event is Event.RETRY


@pytest.mark.parametrize("name", ["snoozed", "released", "stopped"])
def test_giving_a_job_back_is_free(name: str) -> None:
    """However often a job is snoozed or handed back at a shutdown, its budgets stay, even when
    nearly spent.
    """
    job = a_job(failures=2, losses=3, attempt=500)
    change = decide(job, OUTCOMES[name])
    assert change.after is JobState.QUEUED
    assert (change.failures, change.losses) == (2, 3)


@pytest.mark.parametrize("ending", ["raised", "timed out", "crashed", "rejected", "lost"])
def test_one_attempt_means_one_execution_even_if_its_worker_vanishes(ending: str) -> None:
    """`max_attempts=1` promises at most once, so no end of that execution may lead to a second."""
    job = a_job(max_attempts=1, max_losses=0)
    change = recover(job, "gone") if ending == "lost" else decide(job, OUTCOMES[ending])
    assert change.after is JobState.DEAD


def test_a_rejected_job_is_buried_at_once() -> None:
    """Arguments that do not fit the code will not fit it the next time: no tries are spent on
    that.
    """
    change = decide(a_job(max_attempts=100), Rejected("argument `n` is missing"))
    assert change.after is JobState.DEAD
    assert (change.failures, change.error) == (1, "argument `n` is missing")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("raised", "boom"),
        ("timed out", "too long"),
        ("crashed", "signal 11"),
    ],
)
@pytest.mark.parametrize("state", sorted(OWNED))
def test_an_attempt_keeps_what_is_known_of_its_failure(
    state: JobState, name: str, text: str
) -> None:
    """With another try ahead, in the last one, and in a job that was asked to stop."""
    for failures in (0, 2):
        change = decide(a_job(state, failures=failures), OUTCOMES[name])
        assert (change.ended, change.error) == (AttemptState.FAILED, text)
        assert not change.abandoned


def test_a_released_job_waits_as_long_as_was_asked() -> None:
    """An attempt that could not begin for want of memory does not come back at once."""
    assert decide(a_job(), Released("no thread", delay=4.5)).delay == 4.5


def test_a_buried_job_is_not_delayed() -> None:
    """There is no next try, so a delay would be a number without a meaning."""
    assert decide(a_job(failures=2), Raised("boom", after=60)).delay == 0
    assert decide(a_job(failures=1), Raised("boom", after=60)).delay == 60


def test_the_delay_is_the_backoff_unless_the_task_names_its_own() -> None:
    """`Retry(after=…)` overrides, also with zero; every other failure waits as its task's backoff
    says.
    """
    job = a_job(failures=1)
    for name in ("raised", "timed out", "crashed"):
        assert decide(job, OUTCOMES[name]).delay == pytest.approx(20)
    assert decide(job, Raised("boom", after=0)).delay == 0
    assert decide(job, Snoozed(33)).delay == 33
    assert decide(job, Released()).delay == 0
    assert recover(job, "gone").delay == 0


def test_an_error_may_bring_a_backoff_of_its_own() -> None:
    """A task that knows why it failed may slow its retries down; a plain `after` is stronger
    still.
    """
    slow = Backoff(base=100, factor=2, jitter=0)
    job = a_job(failures=1)
    assert decide(job, Raised("busy", backoff=slow)).delay == pytest.approx(200)
    assert decide(job, Raised("busy", backoff=slow, after=3)).delay == 3


def test_a_body_that_runs_on_holds_its_retry_back() -> None:
    """The next try of an abandoned body waits at least as long as asked, or the backoff where that
    is longer.
    """
    job = a_job(failures=1)
    assert decide(job, TimedOut("stuck", abandoned=True, hold=500)).delay == 500
    assert decide(job, TimedOut("stuck", abandoned=True, hold=5)).delay == pytest.approx(20)


ENDINGS = [*OUTCOMES, "lost"]


def next_job(job: Job, change: Change) -> Job:
    """The job as the store makes it of a change."""
    return msgspec.structs.replace(
        job,
        state=change.after,
        attempt=change.next_attempt,
        worker=job.worker if change.after is JobState.CANCELLING else None,
        failures=change.failures,
        losses=change.losses,
        budget_from=change.budget_from,
    )


def one_step(job: Job, step: str) -> Change | None:
    """What a step of a story does to the job, if it can do anything."""
    if job.state is JobState.DEAD:
        return job.move(Event.REQUEUE) if step == "requeue" else None
    if job.state in OWNED:
        if step == "ask":
            return job.move(Event.ASK_CANCEL) if job.state is JobState.RUNNING else None
        if step == "lost":
            return recover(job, "gone")
        return decide(job, OUTCOMES[step]) if step in OUTCOMES else None
    return None


@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.lists(st.sampled_from([*ENDINGS, "ask", "requeue"]), max_size=30),
)
def test_no_story_overdraws_a_budget(max_attempts: int, max_losses: int, steps: list[str]) -> None:
    """Whatever happens in whatever order, the counters are the true counts since the last requeue
    and stay in bounds.
    """
    job = a_job(JobState.QUEUED, max_attempts=max_attempts, max_losses=max_losses)
    ended: list[tuple[int, AttemptState]] = []
    for step in steps:
        if job.state is JobState.QUEUED:
            job = msgspec.structs.replace(job, state=JobState.RUNNING, worker="w")
        change = one_step(job, step)
        if change is None:
            continue
        if change.ended is not None and change.after is not JobState.CANCELLED:
            ended.append((change.attempt, change.ended))
        job = next_job(job, change)
        since = [end for number, end in ended if number >= job.budget_from]
        assert job.failures == since.count(AttemptState.FAILED) <= max_attempts
        assert job.losses == since.count(AttemptState.LOST) <= max_losses + 1
        alive = job.failures < max_attempts and job.losses <= max_losses
        assert alive or job.state not in {JobState.QUEUED, JobState.RUNNING}
    assert [number for number, _ in ended] == sorted({number for number, _ in ended})


@given(st.lists(st.sampled_from(ENDINGS), max_size=12))
def test_at_most_once_is_at_most_one_charged_execution(steps: list[str]) -> None:
    """With one attempt and no losses, only executions that were handed back free of charge are
    followed by another.
    """
    job = a_job(max_attempts=1, max_losses=0)
    free = {AttemptState.RELEASED}
    for step in steps:
        change = recover(job, "gone") if step == "lost" else decide(job, OUTCOMES[step])
        if change.ended not in free:
            assert change.after is not JobState.QUEUED
            return
        job = msgspec.structs.replace(next_job(job, change), state=JobState.RUNNING, worker="w")


# --- backoff --------------------------------------------------------------------------------------


def test_the_delay_grows_as_documented_up_to_the_cap() -> None:
    """2, 6, 18, 54 seconds and so on, and no more than an hour."""
    backoff = Backoff(jitter=0)
    assert [round(backoff.delay(n, 0.5), 6) for n in range(4)] == [2, 6, 18, 54]
    assert backoff.delay(6, 0.5) == pytest.approx(1458)
    assert backoff.delay(7, 0.5) == 3600


@pytest.mark.parametrize("failures", [0, 1, 63, 64, 1023, 1024, 2000, 100_000])
@pytest.mark.parametrize("cap", [3600.0, None, math.inf, 1e300, 5e-324])
@pytest.mark.parametrize("base", [2.0, 1e-300, 1e300, 5e-324])
@pytest.mark.parametrize("factor", [1.0, 3.0, 1e300])
def test_no_number_of_failures_overflows(
    failures: int, cap: float | None, base: float, factor: float
) -> None:
    """A counter that no one expected gives a long delay, not an exception in the code that records
    failures.
    """
    delay = Backoff(base=base, factor=factor, cap=cap, jitter=0).delay(failures, 0.5)
    assert math.isfinite(delay)
    assert 0 <= delay <= min(cap or MAX_DELAY, MAX_DELAY)


@pytest.mark.parametrize("failures", [64, 1023, 2000, 100_000])
def test_after_many_failures_the_delay_is_the_cap(failures: int) -> None:
    """An hour by default; without a cap, the longest delay that every database can store."""
    assert Backoff(jitter=0).delay(failures, 0.5) == 3600
    assert Backoff(cap=None, jitter=0).delay(failures, 0.5) == MAX_DELAY


@given(
    st.floats(1e-3, 1e6),
    st.floats(1, 100),
    st.floats(0, 1),
    st.integers(0, 3000),
    st.floats(0, 1),
)
def test_jitter_only_takes_away_and_at_most_its_share(
    base: float, factor: float, jitter: float, failures: int, chance: float
) -> None:
    """The delay lies between (1 - jitter) and 1 times the full one, and chance 0 and 1 are its
    ends.
    """
    backoff = Backoff(base=base, factor=factor, jitter=jitter)
    full = Backoff(base=base, factor=factor, jitter=0).delay(failures, chance)
    delay = backoff.delay(failures, chance)
    assert full * (1 - jitter) <= delay <= full
    assert backoff.delay(failures, 0) == full
    assert backoff.delay(failures, 1) == pytest.approx(full * (1 - jitter))


@given(st.floats(1e-3, 1e6), st.floats(1, 100), st.integers(0, 3000), st.floats(0, 1))
def test_one_more_failure_never_shortens_the_delay(
    base: float, factor: float, failures: int, chance: float
) -> None:
    """With the same chance, a job waits at least as long after its next failure."""
    backoff = Backoff(base=base, factor=factor)
    assert backoff.delay(failures + 1, chance) >= backoff.delay(failures, chance) * (1 - 1e-12)


NO_NUMBERS = ("2", Decimal("0.5"), timedelta(seconds=5), True, [1])
"""A Decimal passes every comparison, and no delay can be added to it."""

RULES = {
    "base": "must be a number of seconds, more than 0",
    "factor": "must be a number, at least 1",
    "cap": "must be a number of seconds, more than 0, or None",
    "jitter": "must be a number between 0 and 1",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("base", bad) for bad in (0, -1, math.nan, math.inf, -math.inf, *NO_NUMBERS)],
        *[("factor", bad) for bad in (0, 0.99, -2, math.nan, math.inf, *NO_NUMBERS)],
        *[("cap", bad) for bad in (0, -3600, math.nan, *NO_NUMBERS)],
        *[("jitter", bad) for bad in (-0.1, 1.1, math.nan, math.inf, *NO_NUMBERS)],
    ],
)
def test_a_backoff_that_cannot_work_is_refused_where_it_is_written(
    name: str, value: object
) -> None:
    """The error names the number, so that it is found at the task and not in a worker's log at
    night.
    """
    options: dict[str, Any] = {name: value}
    with pytest.raises(InvalidOption) as caught:
        Backoff(**options)
    error = caught.value
    assert error.what == f"Backoff({name}={value!r}) cannot work: {name} {RULES[name]}"
    assert error.why == "the delay between tries grows from these numbers"
    assert error.fix == (
        "Backoff(base=2, factor=3, cap=3600) waits 2, 6, 18, 54 seconds … up to an hour"
    )


# --- purity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [policy, job_module, lifecycle], ids=lambda m: m.__name__)
def test_decisions_import_no_clock_and_no_chance(module: ModuleType) -> None:
    """A decision can be replayed: what it depends on are its arguments."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert not imported & {"time", "datetime", "random", "secrets", "uuid", "os", "asyncio"}


def test_the_same_arguments_give_the_same_change() -> None:
    """Settling twice decides the same: nothing but the arguments has a say, and durations stand for
    times.
    """
    for outcome in OUTCOMES.values():
        assert settle(a_job(), outcome, Backoff(), chance=0.3) == settle(
            a_job(), outcome, Backoff(), chance=0.3
        )
    assert not [name for name in Change.__struct_fields__ if name.endswith("_at")]
