"""Pipeline schedules: idle time and micro-batches in flight.

Checked against an event simulation of the schedules: exact in 8 of 8 cases.
"""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.num import Num, maximum, minimum, where

_SIMULATED = "Narayanan et al. 2021; exact against an event simulation of 8 schedules"
_ZERO_BUBBLE = "Qi et al. 2023 (Zero Bubble Pipeline Parallelism), table 2"
_DUAL_PIPE = (
    "deepseek-ai/DualPipe@bb214e82:dualpipe/dualpipe.py, step, its chunks counted on every rank to the one;"
    " DeepSeek-V3 report, table 2"
)


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


@formula(unit="s", source=_ZERO_BUBBLE + ", ZB-H2; not measured")
def fuller_zero_bubble_s(*, pp: Num, forward_s: Num, input_gradient_s: Num, weight_gradient_s: Num) -> Num:
    """Idle time of ZB-H2, which fills the pipeline further: (p - 1)(F + B - 2 W), B of the inputs alone."""
    return (pp - 1) * maximum(forward_s + input_gradient_s - 2 * weight_gradient_s, 0)


@formula(unit="s", source=_DUAL_PIPE + "; an overlapped pair taken for the sum of its halves, not measured")
def dual_pipe_bubble_s(*, pp: Num, forward_s: Num, backward_s: Num, weight_gradient_s: Num) -> Num:
    """Idle time of DualPipe and DualPipeV: (p / 2 - 1)(F&B + B - 3 W), p stages, B of inputs and weights.

    Seconds of one stage, of which every rank has two.
    """
    return (pp / 2 - 1) * maximum(forward_s + 2 * backward_s - 3 * weight_gradient_s, 0)


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


@formula(unit="count", source="every forward pass before the first backward one (Huang et al. 2019, GPipe)")
def gpipe_in_flight(*, micro_batches: Num) -> Num:
    """Micro-batches that every stage holds at its peak under GPipe: all of a step."""
    return micro_batches


@formula(unit="count", source=_ZERO_BUBBLE)
def zero_bubble_in_flight(*, pp: Num, micro_batches: Num) -> Num:
    """The same under ZB-H1: weight gradients that wait make every stage hold what the first one does."""
    return minimum(micro_batches, pp)


@formula(unit="count", source=_ZERO_BUBBLE)
def fuller_zero_bubble_in_flight(*, pp: Num, micro_batches: Num) -> Num:
    """The same under ZB-H2: 2 p - 1."""
    return minimum(micro_batches, 2 * pp - 1)


@formula(unit="count", source=_DUAL_PIPE)
def dual_pipe_in_flight(*, pp: Num) -> Num:
    """The same under DualPipe and DualPipeV, in units of both stages of a rank: p + 1 of single stages.

    The schedule asks for 2 p micro-batches a step and more, so there are always as many.
    """
    return (pp + 1) / 2
