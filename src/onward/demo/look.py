"""The demo's own jobs as the database has them, read in pages and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from onward.lifecycle import JobState
from onward.store import store
from onward.store.database import Database

PAGE = 2_000

ENDED = frozenset({JobState.SUCCEEDED, JobState.CANCELLED, JobState.DEAD})


class Line(Struct, frozen=True, kw_only=True):
    """One job, as a page of the list has it."""

    id: str
    task: str
    state: JobState
    attempt: int
    failures: int
    losses: int

    @property
    def releases(self) -> int:
        """Attempts that were given back unfinished: closed, but not failed, lost or succeeded."""
        closed = self.attempt if self.state in ENDED else self.attempt - 1
        return closed - self.failures - self.losses - (self.state is JobState.SUCCEEDED)


class Tally(Struct, frozen=True, kw_only=True):
    """How far the jobs are."""

    ended: int
    running: int
    queued: int
    lost: int

    @property
    def live(self) -> int:
        return self.running + self.queued


def read_jobs(database: Database, queue: str, first: str) -> list[Line]:
    """Every job of a queue from the first id on, oldest first. Ids rise with time, so others' jobs
    of before are not read.
    """
    lines: list[Line] = []
    before: str | None = None
    while before is None or before > first:
        page = database.read(
            store.read, "list", before=before, state=None, queue=None, task=None, limit=PAGE
        )
        lines += [_line(row) for row in page if row[2] == queue and row[0] >= first]
        if len(page) < PAGE:
            break
        before = page[-1][0]
    return sorted(lines, key=lambda line: line.id)


def _line(row: tuple[object, ...]) -> Line:
    return Line(
        id=str(row[0]),
        task=str(row[1]).rpartition(".")[2],
        state=JobState(str(row[4])),
        attempt=int(str(row[5])),
        failures=int(str(row[9])),
        losses=int(str(row[10])),
    )


def tally(lines: Sequence[Line]) -> Tally:
    """Count the jobs by how far they are."""
    states = Counter(line.state for line in lines)
    ended = sum(states[state] for state in ENDED)
    queued = states[JobState.QUEUED] + states[JobState.WAITING]
    return Tally(
        ended=ended,
        running=len(lines) - ended - queued,
        queued=queued,
        lost=count(lines, lambda line: line.losses > 0),
    )


def count(lines: Iterable[Line], fits: Callable[[Line], bool]) -> int:
    """How many of the jobs it fits."""
    return sum(map(fits, lines))
