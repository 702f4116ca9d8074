"""What becomes of the jobs of a process that died, told by its board: not begun is given back, past
its time limit has timed out, under way at an orderly stop is given back, and everything else is
lost.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from onward.job import Change, Job
from onward.policy import Backoff, Released, TimedOut, settle
from onward.worker.board import Begun
from onward.worker.body import plain_error
from onward.worker.keeper import decide_loss

MOST_REMEMBERED = 100


class Deaths:
    """The last processes of this supervisor that died. A claim may commit just after its worker was
    declared lost; when our keeper finds that job we still know that it never began. (To the keeper
    of another supervisor it is a loss.)
    """

    def __init__(self) -> None:
        self.known: OrderedDict[str, Aftermath] = OrderedDict()

    def remember(self, aftermath: Aftermath) -> None:
        self.known[aftermath.worker] = aftermath
        if len(self.known) > MOST_REMEMBERED:
            self.known.popitem(last=False)

    def decide(self, job: Job, reason: str) -> Change:
        """What becomes of a job whose worker is gone."""
        known = self.known.get(job.worker or "")
        return decide_loss(job, reason) if known is None else known.decide(job, reason)


class Aftermath:
    """Decides about the jobs of one dead worker.

    Args:
        worker: who died.
        begun: what was under way.
        in_order: whether it was killed because an orderly stop took too long.
        backoffs: the tasks' delays between tries.
    """

    def __init__(
        self, worker: str, begun: Sequence[Begun], in_order: bool, backoffs: Mapping[str, Backoff]
    ) -> None:
        self.worker = worker
        self._begun = {(attempt.job, attempt.attempt): attempt for attempt in begun}
        self._in_order = in_order
        self._backoffs = backoffs
        self._now = time.monotonic()

    def decide(self, job: Job, reason: str) -> Change:
        """What becomes of this job."""
        attempt = self._begun.get((job.id, job.attempt))
        backoff = self._backoffs.get(job.task, Backoff())
        if attempt is None:
            return settle(job, Released("its worker died before it began"), backoff, chance=0)
        if attempt.deadline < self._now:
            text = f"the attempt passed its time limit of {job.timeout:g} s; {reason}"
            outcome = TimedOut(plain_error("TimeLimit", text))
            return settle(job, outcome, backoff, chance=random.random())
        if self._in_order:
            return settle(job, Released("shutdown"), backoff, chance=0)
        return decide_loss(job, reason)
