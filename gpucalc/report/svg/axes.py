"""Scales: from a value to a share of the width or height, and where the ticks stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from low to high. `start` and `end` are the shares of the drawing it reaches between."""

    low: float
    high: float
    log: bool = False
    start: float = 0.0
    end: float = 1.0

    def at(self, value: float) -> float:
        """Where a value stands; what lies outside is put at the edge."""
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            share = (math.log(max(value, self.low)) - low) / (high - low) if high > low else 0.5
        else:
            share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self, most: int = 5, unit: float = 1.0) -> tuple[float, ...]:
        """Values within the scale that are round in the unit they are shown in, at most about so many."""
        if self.log:
            return _decades(self.low, self.high, most)
        return tuple(unit * step for step in _steps(self.low / unit, self.high / unit, most))


def linear(values: Sequence[float], *, start: float = 0.0, end: float = 1.0) -> Axis:
    """From zero to a little above the largest value."""
    return Axis(0.0, 1.08 * max([*values, 1e-12]), start=start, end=end)


def logarithmic(values: Sequence[float], *, start: float = 0.0, end: float = 1.0, room: float = 1.5) -> Axis:
    """Around the positive values, with `room` times as much on either side."""
    known = [value for value in values if value > 0] or [1.0]
    return Axis(min(known) / room, max(known) * room, log=True, start=start, end=end)


def _steps(low: float, high: float, most: int) -> tuple[float, ...]:
    span = high - low
    if span <= 0:
        return (low,)
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return tuple(count * step for count in range(first, last + 1))


def _decades(low: float, high: float, most: int) -> tuple[float, ...]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**power for power in range(first, last + 1) for f in factors]
        within = [value for value in found if low <= value <= high]
        if len(within) <= most:
            return tuple(within)
    step = math.ceil(len(within) / most)
    return tuple(within[::step])
