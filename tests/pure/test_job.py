"""`Job.move` makes every legal change and no other, and says why it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from onward.errors import IllegalTransition
from onward.job import Job, NewJob
from onward.lifecycle import (
    ATTEMPT_ENDS,
    JOB_MOVES,
    OWNED,
    TERMINAL,
    AttemptState,
    Event,
    JobState,
    allowed_events,
)


def a_job(state: JobState, **fields: Any) -> Job:
    """A job in this state that has failed once and been lost once, on its fifth attempt."""
    values: dict[str, Any] = {
        "id": "0190a6d8-0000-7000-8000-000000000001",
        "task": "shop.report",
        "queue": "default",
        "priority": 0,
        "state": state,
        "attempt": 5,
        "worker": "w" if state in OWNED else None,
        "args": "{}",
        "max_attempts": 3,
        "max_losses": 3,
        "failures": 1,
        "losses": 1,
        "budget_from": 2,
        "timeout": None,
    }
    return Job(**(values | fields))


def an_end(state: JobState, event: Event) -> dict[str, Any]:
    """The values that a move cannot do without: how the attempt ended, where one ends."""
    ends = ATTEMPT_ENDS.get((state, event))
    return {"ended": sorted(ends)[0]} if ends else {}


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", JobState)
def test_every_state_and_event_is_legal_or_refused(state: JobState, event: Event) -> None:
    """Each of the 112 cells gives the table's change, or raises: there is no third way."""
    job = a_job(state)
    after = JOB_MOVES.get((state, event))
    if after is None:
        with pytest.raises(IllegalTransition):
            job.move(event, **an_end(state, event))
        return
    change = job.move(event, **an_end(state, event))
    assert (change.id, change.event) == (job.id, event)
    assert (change.before, change.after) == (state, after)
    assert (change.attempt, change.worker) == (job.attempt, job.worker)
    assert change.arrow == f"{state} > {after}"


ENDS = [None, *AttemptState]


@pytest.mark.parametrize(("state", "event"), sorted(JOB_MOVES))
@pytest.mark.parametrize("ended", ENDS)
def test_an_attempt_ends_only_as_the_move_allows(
    state: JobState, event: Event, ended: AttemptState | None
) -> None:
    """A change that would close an attempt wrongly, or leave it open, is refused before any
    database sees it.
    """
    job = a_job(state)
    values: dict[str, Any] = {} if ended is None else {"ended": ended}
    ends = ATTEMPT_ENDS.get((state, event))
    if ended is None if ends is None else ended in ends:
        assert job.move(event, **values).ended is ended
    else:
        with pytest.raises(IllegalTransition) as caught:
            job.move(event, **values)
        assert job.id in caught.value.what
        assert event in caught.value.what
        assert caught.value.what.endswith(f"cannot end as {ended} there")
        possible = ", ".join(sorted(ends)) if ends else "no end of the attempt"
        assert caught.value.why == f"{event} from {state} goes with {possible}"
        assert caught.value.fix == "onward lifecycle shows every legal move"


def test_a_refusal_names_the_job_its_state_the_event_and_what_would_be_allowed() -> None:
    """Who reads the error knows which job, where it is, what was tried and what can be done
    instead.
    """
    job = a_job(JobState.QUEUED)
    with pytest.raises(IllegalTransition) as caught:
        job.move(Event.SUCCEED, ended=AttemptState.SUCCEEDED)
    error = caught.value
    assert error.what == f"cannot succeed job {job.id}: it is queued"
    assert error.why == "from queued the legal events are: claim, cancel, expire"
    assert error.fix == "onward lifecycle shows every legal move"
    assert str(error).startswith("[OW401] cannot succeed job")


@pytest.mark.parametrize("state", JobState)
def test_every_refusal_offers_exactly_the_legal_events(state: JobState) -> None:
    """The offer in the message is made from the table, for every state."""
    with pytest.raises(IllegalTransition) as caught:
        a_job(state).move(Event.ENQUEUE)
    if state in TERMINAL:
        assert caught.value.why == f"{state} is final: no move leads out of it"
    else:
        assert caught.value.why.endswith(": " + ", ".join(allowed_events(state)))


@pytest.mark.parametrize(
    "event", [Event.RETRY, Event.SNOOZE, Event.RELEASE, Event.SUSPEND, Event.RECOVER]
)
def test_going_back_to_the_queue_is_a_new_attempt(event: Event) -> None:
    """A retry never reuses a number: the change expects attempt 5 and opens attempt 6, budgets as
    they were.
    """
    change = a_job(JobState.RUNNING).move(event, **an_end(JobState.RUNNING, event))
    assert (change.attempt, change.next_attempt) == (5, 6)
    assert (change.failures, change.losses, change.budget_from) == (1, 1, 2)


def test_requeue_opens_the_next_attempt_and_starts_both_budgets_afresh() -> None:
    """A human's second chance is whole: nothing that went wrong before is charged to it."""
    change = a_job(JobState.DEAD).move(Event.REQUEUE)
    assert (change.attempt, change.next_attempt, change.budget_from) == (5, 6, 6)
    assert (change.failures, change.losses) == (0, 0)
    assert change.ended is None  # Its last attempt was closed when it was buried.


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (JobState.WAITING, Event.UNBLOCK),
        (JobState.QUEUED, Event.CLAIM),
        (JobState.RUNNING, Event.ASK_CANCEL),
        (JobState.RUNNING, Event.BURY),
        (JobState.DEAD, Event.DISCARD),
    ],
)
def test_other_moves_stay_with_their_attempt(state: JobState, event: Event) -> None:
    """The number that fences a worker changes only where the next attempt begins."""
    change = a_job(state).move(event, **an_end(state, event))
    assert (change.attempt, change.next_attempt, change.budget_from) == (5, 5, 2)


def test_what_an_event_brings_along_is_in_the_change() -> None:
    """Counters that a decision gives replace those of the job; delays, errors and follow-ups go as
    they are.
    """
    follow_up = NewJob(
        id="f", task="t", queue="q", priority=0, args="{}", max_attempts=1, max_losses=0
    )
    change = a_job(JobState.RUNNING).move(
        Event.RETRY,
        ended=AttemptState.FAILED,
        failures=2,
        delay=7.5,
        reason="error",
        error="boom",
        abandoned=True,
        follow_ups=(follow_up,),
    )
    assert (change.id, change.task, change.worker) == (
        a_job(JobState.RUNNING).id,
        "shop.report",
        "w",
    )
    assert (change.failures, change.losses) == (2, 1)
    assert (change.delay, change.reason, change.error) == (7.5, "error", "boom")
    assert change.abandoned
    assert change.follow_ups == (follow_up,)


def test_a_change_cannot_be_altered() -> None:
    """What was decided is what is written: a change is a value, not a form to fill in."""
    change = a_job(JobState.QUEUED).move(Event.CANCEL, ended=AttemptState.CANCELLED)
    with pytest.raises(AttributeError):
        change.after = JobState.SUCCEEDED  # type: ignore[misc]
