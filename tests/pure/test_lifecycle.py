"""The tables of the life of a job say what the design says, and nothing in them is a dead end."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from onward import lifecycle
from onward.lifecycle import (
    ATTEMPT_ENDS,
    ATTEMPT_MEANING,
    ATTEMPT_MOVES,
    BORN,
    JOB_MEANING,
    JOB_MOVES,
    OWNED,
    TERMINAL,
    WORKER_MEANING,
    WORKER_MOVES,
    AttemptState,
    Event,
    JobState,
    WorkerEvent,
    WorkerState,
)

# Written out a second time, by hand: whoever changes a cell of the table changes it here too,
# knowingly.
DESIGN = """
waiting     unblock > queued       cancel > cancelled     expire > cancelled
queued      claim > running        cancel > cancelled     expire > cancelled
running     succeed > succeeded    retry > queued         snooze > queued      release > queued
running     suspend > waiting      recover > queued       bury > dead          drop > cancelled
running     ask_cancel > cancelling
cancelling  succeed > succeeded    cancel > cancelled
dead        requeue > queued       discard > cancelled
"""


def design_moves() -> dict[tuple[str, str], str]:
    moves: dict[tuple[str, str], str] = {}
    for line in DESIGN.strip().splitlines():
        before, *words = line.split()
        for event, _, after in zip(words[0::3], words[1::3], words[2::3], strict=True):
            moves[before, event] = after
    return moves


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", JobState)
def test_every_state_and_event_has_the_cell_of_the_design(state: JobState, event: Event) -> None:
    """Each of the 112 cells is legal, with the design's next state, or refused: no cell is left
    open.
    """
    assert JOB_MOVES.get((state, event)) == design_moves().get((state, event))


def test_the_design_names_no_state_or_event_that_does_not_exist() -> None:
    """The second copy of the table is spelt right, so a typing error in it cannot hide a missing
    move.
    """
    for (before, event), after in design_moves().items():
        assert JOB_MOVES[JobState(before), Event(event)] == JobState(after)


def test_every_event_but_enqueue_moves_some_job() -> None:
    """An event without a move would be a word without a meaning; enqueue is the birth, which has no
    state before.
    """
    assert {event for _, event in JOB_MOVES} | {Event.ENQUEUE} == set(Event)
    assert Event.ENQUEUE not in {event for _, event in JOB_MOVES}


def reached(start: frozenset[JobState]) -> set[JobState]:
    """All states that some sequence of moves leads to."""
    seen = set(start)
    while True:
        new = {after for (before, _), after in JOB_MOVES.items() if before in seen} - seen
        if not new:
            return seen
        seen |= new


def test_every_state_can_be_reached_from_birth() -> None:
    """A state that no job can come to would be dead code in every layer."""
    assert reached(BORN) == set(JobState)


@pytest.mark.parametrize("state", sorted(set(JobState) - TERMINAL))
def test_every_state_that_is_not_final_has_a_way_to_the_end(state: JobState) -> None:
    """No job can be caught: from wherever it is, some moves lead it to an end."""
    assert reached(frozenset({state})) & TERMINAL


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_no_move_leads_out_of_a_final_state(state: JobState) -> None:
    """Nothing moves back: what is succeeded or cancelled stays so."""
    assert lifecycle.allowed_events(state) == []
    assert reached(frozenset({state})) == {state}


def test_only_the_final_states_are_final() -> None:
    """TERMINAL is what the table says, not a list beside it that may differ."""
    assert {state for state in JobState if not lifecycle.allowed_events(state)} == TERMINAL


def test_allowed_events_are_those_of_the_table() -> None:
    """What an error message offers as legal is legal, and nothing legal is kept back."""
    for state in JobState:
        offered = lifecycle.allowed_events(state)
        assert [(state, event) in JOB_MOVES for event in offered] == [True] * len(offered)
        assert len(offered) == sum(before is state for before, _ in JOB_MOVES)


# --- attempts -------------------------------------------------------------------------------------


def attempt_state(job: JobState) -> AttemptState | None:
    """In which state the latest attempt of a job in this state is; None where it is closed."""
    if job in OWNED:
        return AttemptState.RUNNING
    return AttemptState.QUEUED if job in BORN else None


def test_the_moves_that_leave_an_open_attempt_behind_close_it() -> None:
    """An attempt ends when its job is taken from its owner, goes on to the next attempt, or ends:
    never silently.
    """
    for (before, event), after in JOB_MOVES.items():
        opened = attempt_state(before) is not None
        goes_on = lifecycle.mints_attempt(before, after)
        closes = opened and (goes_on or attempt_state(after) is None)
        assert ((before, event) in ATTEMPT_ENDS) == closes, (before, event)


def test_an_attempt_ends_only_as_its_own_table_allows() -> None:
    """Job moves and attempt moves agree: what ends with a job's move is a legal next state of the
    attempt.
    """
    for (before, event), ends in ATTEMPT_ENDS.items():
        state = attempt_state(before)
        assert state is not None
        assert ends, (before, event)
        assert ends <= ATTEMPT_MOVES[state], (before, event)


def test_a_closed_attempt_has_no_move() -> None:
    """History never changes: only queued and running attempts may become something else."""
    assert set(ATTEMPT_MOVES) == set(AttemptState)
    open_states = {state for state, after in ATTEMPT_MOVES.items() if after}
    assert open_states == {AttemptState.QUEUED, AttemptState.RUNNING}


def test_every_way_to_end_an_attempt_is_used() -> None:
    """No outcome of an attempt is a word that no job's move ever gives it."""
    used = frozenset[AttemptState]().union(*ATTEMPT_ENDS.values())
    assert used == set(AttemptState) - {AttemptState.QUEUED, AttemptState.RUNNING}


def test_the_next_attempt_is_opened_by_exactly_these_moves() -> None:
    """Attempt n+1 is minted when attempt n is behind the job, by a requeue too; no other move
    counts one.
    """
    minting = {event for (s, event), to in JOB_MOVES.items() if lifecycle.mints_attempt(s, to)}
    assert minting == {
        Event.RETRY,
        Event.SNOOZE,
        Event.RELEASE,
        Event.SUSPEND,
        Event.RECOVER,
        Event.REQUEUE,
    }


# --- workers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", WorkerEvent)
@pytest.mark.parametrize("state", WorkerState)
def test_every_worker_state_and_event_has_the_cell_of_the_design(
    state: WorkerState, event: WorkerEvent
) -> None:
    """A worker drains, stops or is lost; one that ended never comes back under the same
    identity.
    """
    live = {WorkerState.ACTIVE, WorkerState.DRAINING}
    legal: Mapping[WorkerEvent, tuple[set[WorkerState], WorkerState]] = {
        WorkerEvent.START: (set(), WorkerState.ACTIVE),
        WorkerEvent.DRAIN: ({WorkerState.ACTIVE}, WorkerState.DRAINING),
        WorkerEvent.STOP: (live, WorkerState.STOPPED),
        WorkerEvent.LOSE: (live, WorkerState.LOST),
    }
    sources, after = legal[event]
    assert WORKER_MOVES.get((state, event)) == (after if state in sources else None)


def test_every_state_has_a_line_for_people() -> None:
    """The tables that docs and command line print have a row for every state."""
    assert set(JOB_MEANING) == set(JobState)
    assert set(ATTEMPT_MEANING) == set(AttemptState)
    assert set(WORKER_MEANING) == set(WorkerState)
    assert all(JOB_MEANING.values())
    assert all(ATTEMPT_MEANING.values())
    assert all(WORKER_MEANING.values())
