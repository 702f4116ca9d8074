"""Where to claim next: pure bookkeeping over (queue, priority) lanes, without clock or I/O.

The claim goes on where the last one ended, because the entries before that place are dead weight
while a long transaction holds back vacuum. What can land behind the place (late commits, retries,
released and recovered jobs, rows that were locked) is found by a full look: after a short claim, on
every wake-up, and at least every max(1 s, 20 x what a full look costs), 3 s at most. A worker that
claims only a few jobs between two looks makes them more often, so that what was recovered or
retried keeps its place among slow jobs.
"""

from __future__ import annotations

from collections.abc import Sequence

from onward.store.store import FIRST_ID, Claimed, Lane

START = (0.0, FIRST_ID)

LEAST_GAP = 1.0
COST_FACTOR = 20.0

FEW = 20
SLOW_GAP = 0.04
"""As long as no more than so many jobs were claimed since the last look, the next one comes after
so many seconds: less than the jobs that are worth it take.
"""

MOST_GAP = 3.0
"""A look is never put off for longer, whatever it seems to cost: a busy machine or a blocked loop
counts too.
"""

EDGE = 1e-5
"""Seconds: more than a due time loses on its way."""

CHEAP = 0.025
"""A full look that takes less than so many seconds may be made whenever there is reason to."""


class Lanes:
    """The lanes that are worth claiming from, the highest priority first, each with the place where
    to go on.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], tuple[float, str]] = {}
        self._turn = 0
        self._looked = float("-inf")
        self._cost = 0.0
        self._last_cost = 0.0
        self._stale = True
        self._since_look = 0
        self.next_due = float("inf")
        self.crowded: set[tuple[str, int]] = set()
        """Lanes that hold jobs of other tasks than ours: to claim from their start takes long."""

    def want_look(self, now: float) -> bool:
        """Whether a full look is due."""
        return self._stale or now - self._looked >= self.gap

    @property
    def gap(self) -> float:
        """The longest time between two full looks: a due job is claimed within it."""
        return max(SLOW_GAP if self._since_look <= FEW else LEAST_GAP, self._rest)

    def may_look(self, now: float, *, hinted: bool = False) -> bool:
        """Whether a full look may be made now, so that expensive ones take a small share of the
        time. Somebody's word that there is something new is worth up to half of it.
        """
        rest = 2 * self._cost if hinted else self._rest
        return self._cost < CHEAP or now - self._looked >= rest

    @property
    def _rest(self) -> float:
        return min(COST_FACTOR * self._cost, MOST_GAP)

    def spoil(self) -> None:
        """Something may have landed behind the places."""
        self._stale = True

    def looked(self, lanes: Sequence[Lane], now: float) -> None:
        """A full look found these lanes: start each before its first job that we know."""
        self.crowded = {(lane.queue, lane.priority) for lane in lanes if not lane.known}
        lanes = [lane for lane in lanes if lane.known]
        due = [lane for lane in lanes if lane.due_in <= 0]
        self._turn += 1
        queues = sorted({lane.queue for lane in due})
        due.sort(key=lambda lane: (-lane.priority, self._rank(lane.queue, queues)))
        self._places = {(lane.queue, lane.priority): _before(lane) for lane in due}
        self.next_due = min(
            (lane.due_in for lane in lanes if lane.due_in > 0), default=float("inf")
        )
        self._looked = now
        self._since_look = 0
        self._stale = False

    def _rank(self, queue: str, queues: Sequence[str]) -> int:
        """Queues of one priority take turns at being first."""
        return (queues.index(queue) + self._turn) % len(queues)

    def cost(self, look: float, claims: float = 0.0, *, found: bool = False) -> None:
        """What the last full look took, and the claims from the start that came with it, in
        seconds. Claims count unless they found something and were quick: slow ones had to pass over
        what this worker may not claim. One slow look (a new connection, a busy machine) does not
        count yet: the cheaper of two does.
        """
        seconds = look if found and claims < CHEAP else look + claims
        self._cost, self._last_cost = min(seconds, self._last_cost), seconds

    def order(self) -> list[tuple[tuple[str, int], tuple[float, str]]]:
        """The lanes to claim from, in order, each with the place after which to go on."""
        return list(self._places.items())

    def claimed(self, lane: tuple[str, int], got: Sequence[Claimed], asked: int) -> None:
        """A claim from this lane got these jobs."""
        self._since_look += len(got)
        if got:
            self._places[lane] = (got[-1].run_at, got[-1].job.id)
        if len(got) < asked:
            self._places.pop(lane, None)
            self._stale = self._stale or bool(got)

    @property
    def empty(self) -> bool:
        return not self._places


def _before(lane: Lane) -> tuple[float, str]:
    """The place in front of a lane's first job: a due time as a number is not to the microsecond
    what the database has.
    """
    return (max(0.0, lane.first - EDGE), FIRST_ID)
