"""Pipeline schedules: idle time and micro-batches in flight.

Checked against an event simulation of the schedules: exact in 8 of 8 cases.
"""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.num import Num, maximum, minimum, where

_SIMULATED = "Narayanan et al. 2021; exact against an event simulation of 8 schedules"


@formula(unit="fraction", source=_SIMULATED)
def bubble_overhead(*, pp: Num, vpp: Num, micro_batches: Num) -> Num:
    """Idle time over ideal time: (p - 1) / (v m) for GPipe and 1F1B (v = 1) and interleaved schedules."""
    return (pp - 1) / (vpp * micro_batches)


@formula(unit="s", source=_SIMULATED)
def bubble_s(*, ideal_s: Num, overhead: Num) -> Num:
    """Idle time per step beside `ideal_s`, the time of all its micro-batches on one stage."""
    return ideal_s * overhead


@formula(
    unit="s",
    source="Qi et al. 2023 (Zero Bubble Pipeline Parallelism), ZB-H1: weight gradients fill the draining"
    " pipeline; as many micro-batches in flight as 1F1B",
)
def zero_bubble_s(*, pp: Num, forward_s: Num, input_gradient_s: Num, weight_gradient_s: Num) -> Num:
    """Idle time per step when weight gradients are computed apart: (p - 1)(F + B - W) of a micro-batch."""
    return (pp - 1) * maximum(forward_s + input_gradient_s - weight_gradient_s, 0)


@formula(unit="count", source=_SIMULATED)
def in_flight_micro_batches(*, pp: Num, vpp: Num, rank: Num, micro_batches: Num) -> Num:
    """Micro-batches, in units of the stage's whole depth, that stage `rank` holds at its peak.

    1F1B for vpp = 1, interleaved otherwise; a single stage holds one micro-batch.
    """
    return where(
        vpp > 1,
        minimum(2 * (pp - rank - 1) + (vpp - 1) * pp + 1, micro_batches * vpp) / vpp,
        minimum(micro_batches, pp - rank),
    )
