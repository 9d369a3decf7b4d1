"""Which rank holds the others up, from how long each waits for the rest or how long each works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

LATE_S = 0.3  # after the others at a meeting: more than any scheduler's hiccup
SLOW = 1.5  # times the others' time for the same work: worth a word
HOPELESS = 3.0  # not worth going on
LEAST_S = {"cuda": 0.0, "cpu": LATE_S}  # behind the others for that: ranks on one CPU take turns on its cores
RUNNING = 4  # times in a row before a rank is called slow: once is chance


def latest(waits: Sequence[float]) -> tuple[int, float]:
    """The rank that waited least at a meeting, and how long after the others it came."""
    rank = min(range(len(waits)), key=waits.__getitem__)
    others = [wait for index, wait in enumerate(waits) if index != rank]
    return rank, (min(others) if others else waits[rank]) - waits[rank]


def slowest(paces: Sequence[float], least_s: float = 0.0) -> tuple[int, float]:
    """The rank that took longest for the same work, and how many times the usual rank's time.

    1 where it is less than `least_s` behind.
    """
    rank = max(range(len(paces)), key=paces.__getitem__)
    usual = median_low(paces)
    return rank, paces[rank] / usual if usual > 0 and paces[rank] - usual >= least_s else 1.0


@dataclass(slots=True)
class Streak:
    """How often in a row the same rank was behind."""

    rank: int | None = None
    length: int = 0
    worst: list[float] = field(default_factory=list)

    def add(self, rank: int, by: float, limit: float) -> bool:
        """Count one look; true when the rank has been behind by more than the limit often enough."""
        if by <= limit:
            self.rank, self.length, self.worst = None, 0, []
            return False
        if rank != self.rank:
            self.rank, self.length, self.worst = rank, 0, []
        self.length += 1
        self.worst.append(by)
        return self.length >= RUNNING
