"""What a search finds: candidates in order, the front of memory against time, and how it was done."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# A candidate that does not fit; below: the sum of how doubtful the GPU's and the host's memory are.
UNFIT = 3
RIVALS = 4  # kept of every pp and vpp, whose schedules the closed form may take for better than they are


@dataclass(frozen=True, slots=True)
class Candidate:
    """One legal layout by its values for every key, and its headline numbers."""

    values: Mapping[str, Any]
    tier: int  # 0 fits; 1, 2 marginal; UNFIT does not
    needed_bytes: float
    step_s: float  # closed form of the pipeline; infinite where it does not fit
    samples_per_s: float  # 0 where it does not fit

    @property
    def fits(self) -> bool:
        """Whether it may run: it fits or is marginal."""
        return self.tier < UNFIT


def merit(one: Candidate) -> tuple[float, ...]:
    """Sorts candidates, best first: those that fit by speed, else the one that needs least."""
    if not one.fits:
        return (UNFIT, one.needed_bytes, 0.0)
    return (one.tier, -one.samples_per_s, one.needed_bytes)


def front_place(one: Candidate) -> tuple[float, float]:
    """Memory and seconds a sample in single precision: what differs by rounding alone is one on the front."""
    return _single(one.needed_bytes), _single(1 / one.samples_per_s)


def _single(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


@dataclass(slots=True)
class Found:
    """The outcome of a search."""

    best: list[Candidate] = field(default_factory=list)  # best first, no more than were asked for
    rivals: list[Candidate] = field(default_factory=list)  # the best of each pp and vpp, where it fits
    front: list[Candidate] = field(default_factory=list)  # fitting, none beaten in both memory and speed
    legal: int = 0
    fitting: int = 0
    timed: int = 0  # of the legal ones, those whose time was worked out too
    seconds: float = 0.0  # of one core
    in_columns: bool = False


def tier_of(memory_rank: int, host_rank: int) -> int:
    """The tier that levels of the GPU's and the host's memory give, as places among the levels."""
    return UNFIT if max(memory_rank, host_rank) == 2 else memory_rank + host_rank
