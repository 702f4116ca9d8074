"""Python, SQL and the databases' own guards agree about every move there could be; see
`exhaustive.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from onward.lifecycle import JOB_MOVES, TERMINAL, JobState
from onward.store.database import Database
from tests.store import exhaustive
from tests.store.builders import DATABASE_ERRORS, hand, in_state
from tests.store.exhaustive import LIVE, MOVE, attempted, moves, specimens

CHECKS = [
    exhaustive.through_apply,
    exhaustive.through_claim,
    exhaustive.by_update,
    exhaustive.by_leaving,
    exhaustive.by_finishing,
    exhaustive.of_endings,
    exhaustive.by_birth,
    exhaustive.of_workers,
    exhaustive.of_history,
    exhaustive.of_rows,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_database_does_what_the_tables_say(
    database: Database, check: Callable[[Database], Iterator[str]]
) -> None:
    """Every cell, legal or not, asked for with right and with wrong knowledge: no violation."""
    assert list(check(database)) == []


def test_every_pair_of_states_is_tried() -> None:
    """The enumeration leaves no pair out, and has every legal move with every end of its
    attempt.
    """
    tried = list(moves())
    assert {(move.before, move.after) for move in tried} == {
        (before, after) for before in JobState for after in JobState
    }
    legal = {(move.before, move.event) for move in tried if move.legal}
    assert legal == set(JOB_MOVES)


def test_each_specimen_is_in_its_state(database: Database) -> None:
    """The jobs that the moves are tried on were brought where they are by legal moves, and are on a
    later attempt.
    """
    jobs = specimens(database)
    assert {state: job.state for state, job in jobs.items()} == {state: state for state in JobState}
    assert min(job.attempt for job in jobs.values()) == 2
    assert exhaustive.unchanged(database, jobs)


@pytest.mark.parametrize("state", LIVE)
def test_a_refused_move_says_what_was_refused(database: Database, state: JobState) -> None:
    """A DBA reads which table, which move and which job, with an arrow, and where the legal ones
    stand.
    """
    job = in_state(database, state)
    with hand(database) as dba:
        values = {"state": state.value, "more": 1, "worker": job.worker, "id": job.id}
        owned_or_dead = int(job.worker is not None or state is JobState.DEAD)
        values |= {"begun": owned_or_dead, "dead": int(state is JobState.DEAD)}
        _, message = attempted(dba, (MOVE.format(now=dba.clock), values))
        assert "onward: job refuses" in message
        assert "onward lifecycle" in message
        if database.dialect == "postgres":
            assert f"{state} > {state} (attempt {job.attempt} > {job.attempt + 1})" in message
            assert job.id in message
        _, message = attempted(dba, ("DELETE FROM onward.job WHERE id = :id", {"id": job.id}))
        assert "a job leaves only into" in message


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_a_finished_job_is_beyond_reach_of_the_live_table(
    database: Database, state: JobState
) -> None:
    """It is not there to be updated, and the cold table refuses every change."""
    job = in_state(database, state)
    with hand(database) as dba:
        dba.sql("UPDATE onward.job SET state = 'queued' WHERE id = :id", id=job.id)
        with pytest.raises(DATABASE_ERRORS, match="finished refuses"):
            dba.sql("UPDATE onward.finished SET state = 'succeeded' WHERE id = :id", id=job.id)
    assert exhaustive.unchanged(database, {state: job})
