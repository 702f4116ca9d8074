"""Jobs that refuse to be claimed: pure bookkeeping, without clock or I/O.

A row may be damaged, or violate a constraint or a trigger that somebody has added since. One such
row makes a claim of many fail as a whole. A claimer that has found it leaves it alone, and after a
while tries again whether it has been mended. Where thousands refuse, only a few of them are told
and tried again at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

AGAIN_AFTER = 60.0
"""Seconds until jobs that refused are tried again."""

AT_ONCE = 10
"""How many of a lane are told, and tried again, in that time."""

MOST = 10_000
"""How many of a lane are remembered. With more of them the lane waits until it is mended."""

LaneName = tuple[str, int]


class Refusing:
    """The jobs of each lane that refuse to be claimed."""

    def __init__(self) -> None:
        self._lanes: dict[LaneName, _Left] = {}

    def __contains__(self, lane: LaneName) -> bool:
        return lane in self._lanes

    def of(self, lane: LaneName) -> Sequence[str]:
        """The jobs of this lane to leave alone."""
        left = self._lanes.get(lane)
        return () if left is None else list(left.ids)

    def full(self, lane: LaneName) -> bool:
        """Whether no more can be remembered of this lane."""
        left = self._lanes.get(lane)
        return left is not None and len(left.ids) >= MOST

    def note(self, lane: LaneName, id: str, now: float) -> bool:
        """A job has refused; returns whether that is worth telling."""
        left = self._lanes.setdefault(lane, _Left(now + AGAIN_AFTER))
        left.ids[id] = None
        left.told += 1
        return left.told <= AT_ONCE

    def again(self, lane: LaneName, now: float, most: int) -> Sequence[str]:
        """Up to so many jobs of this lane to try again now: those that were tried longest ago. They
        are no longer remembered, unless they refuse again.
        """
        left = self._lanes.get(lane)
        if left is None or now < left.again_at:
            return ()
        left.again_at = now + AGAIN_AFTER
        left.told = 0
        ids = list(islice(left.ids, min(most, AT_ONCE)))
        for id in ids:
            del left.ids[id]
        return ids

    def tried(self, lane: LaneName, ids: Sequence[str], claimed: int) -> None:
        """These were tried again. If some were claimed, or none refused (others were quicker), then
        perhaps all of them are mended.
        """
        left = self._lanes.get(lane)
        if left is not None and (claimed or not any(id in left.ids for id in ids)):
            del self._lanes[lane]


class _Left:
    """What is left alone of one lane, in the order of the last try."""

    def __init__(self, again_at: float) -> None:
        self.ids: dict[str, None] = {}
        self.again_at = again_at
        self.told = 0
