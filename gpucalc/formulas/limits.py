"""What a check compares: shares and margins of a plan's own figures."""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.num import Num


@formula(unit="fraction", source="the part of the worst GPU's memory left at its peak")
def headroom(*, capacity_bytes: Num, needed_bytes: Num) -> Num:
    """Share of the worst GPU's memory left at its peak; negative where it does not fit."""
    return (capacity_bytes - needed_bytes) / capacity_bytes


@formula(unit="bytes", source="the memory of the worst GPU left at its peak")
def headroom_bytes(*, capacity_bytes: Num, needed_bytes: Num) -> Num:
    """Bytes of the worst GPU left at its peak; negative where it does not fit."""
    return capacity_bytes - needed_bytes


@formula(unit="bytes", source="the rule of the verdict: a plan fits when it does beyond the expected error")
def worst_case_bytes(*, needed_bytes: Num, expected_error: Num) -> Num:
    """Bytes needed when the estimate is too low by its expected error."""
    return needed_bytes * (1 + expected_error)
