"""Pipeline formulas against an event simulation of the schedules (tests/data/pp_schedules.csv)."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from gpucalc.formulas import pipeline as f

SIMULATED = list(
    csv.DictReader((Path(__file__).parent / "data" / "pp_schedules.csv").read_text().splitlines())
)


@pytest.mark.parametrize("row", SIMULATED, ids=lambda r: f"{r['kind']}-p{r['p']}-m{r['m']}-v{r['v']}")
def test_simulated_schedules(row: dict[str, str]) -> None:
    p, m, v = int(row["p"]), int(row["m"]), int(row["v"])
    assert f.bubble_overhead(pp=p, vpp=v, micro_batches=m) == pytest.approx(float(row["overhead"]), abs=1e-5)
    for rank, peak in enumerate(json.loads(row["peak"])):
        vpp = v if row["kind"] == "inter" else 1
        if row["kind"] == "gpipe":
            assert peak == m  # every micro-batch is held; the runs planned here use the schedules below
        else:
            assert f.in_flight_micro_batches(pp=p, vpp=vpp, rank=rank, micro_batches=m) == peak / v


def test_bubble_by_hand() -> None:
    # 4 micro-batches of 2 s, 4 stages, 2 chunks: (4 - 1) / (2 x 4) of 8 s
    overhead = f.bubble_overhead(pp=4, vpp=2, micro_batches=4)
    assert f.bubble_s(ideal_s=8.0, overhead=overhead) == 3.0
    assert f.bubble_overhead(pp=1, vpp=1, micro_batches=7) == 0
    assert f.in_flight_micro_batches(pp=1, vpp=1, rank=0, micro_batches=7) == 1


def test_columns_equal_scalars() -> None:
    m = np.array([1.0, 4.0, 8.0, 64.0])
    for vpp in (1, 2):
        column = f.in_flight_micro_batches(pp=4, vpp=vpp, rank=1, micro_batches=m)
        assert list(column) == [
            f.in_flight_micro_batches(pp=4, vpp=vpp, rank=1, micro_batches=int(x)) for x in m
        ]


def test_zero_bubble_by_hand() -> None:
    # 4 stages, forward 2 s, input gradients 2 s, weight gradients 1.5 s: 3 x (2 + 2 - 1.5)
    assert f.zero_bubble_s(pp=4, forward_s=2.0, input_gradient_s=2.0, weight_gradient_s=1.5) == 7.5
    assert f.zero_bubble_s(pp=1, forward_s=2.0, input_gradient_s=2.0, weight_gradient_s=1.5) == 0
    one_f_one_b = f.bubble_s(ideal_s=8 * 5.5, overhead=f.bubble_overhead(pp=4, vpp=1, micro_batches=8))
    assert one_f_one_b == 16.5


def _dual_pipe_peak(*, ranks: int, rank: int, chunks: int) -> int:
    """Micro-batches in flight on a rank at most, counted over the loops of DualPipe's own `step`."""
    half = min(rank, ranks - 1 - rank)
    rest, fill = ranks // 2 - half - 1, half + 1
    held = peak = 0

    def forward() -> None:
        nonlocal held, peak
        held += 1
        peak = max(peak, held)

    def backward() -> None:
        nonlocal held
        held -= 1

    def overlapped() -> None:  # the forward pass runs beside the backward one
        forward()
        backward()

    for _ in range(2 * rest + 2 * fill):  # steps 1 and 2
        forward()
    for _ in range(rest):  # step 3
        backward()
        forward()
    for _ in range(2 * (chunks // 2 - ranks + half + 1)):  # step 4
        overlapped()
    for _ in range(rest):  # step 5
        backward()
        overlapped()
    for _ in range(2 * fill + rest):  # steps 6 and 7
        backward()
    assert held == 0
    return peak


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_dual_pipe_holds_one_more_than_its_stages(ranks: int) -> None:
    for rank in range(ranks):
        for chunks in (2 * ranks, 2 * ranks + 2, 8 * ranks):
            # In units of both stages of the rank.
            assert (
                f.dual_pipe_in_flight(pp=ranks) == _dual_pipe_peak(ranks=ranks, rank=rank, chunks=chunks) / 2
            )


def test_other_schedules_in_flight() -> None:
    assert f.gpipe_in_flight(micro_batches=32) == 32
    # ZB-H1: what the first stage holds under 1F1B; ZB-H2: 2 x 8 - 1
    assert f.zero_bubble_in_flight(pp=8, micro_batches=32) == 8
    assert f.zero_bubble_in_flight(pp=8, micro_batches=4) == 4
    assert f.fuller_zero_bubble_in_flight(pp=8, micro_batches=32) == 15


def test_other_bubbles_by_hand() -> None:
    # 4 stages, forward 2 s, input gradients 2 s, weight gradients 1.5 s: 3 x (2 + 2 - 3)
    assert f.fuller_zero_bubble_s(pp=4, forward_s=2.0, input_gradient_s=2.0, weight_gradient_s=1.5) == 3.0
    # 8 stages, forward 1 s, backward 2 s of which weights 1 s: 3 x (1 + 2 + 2 - 3)
    assert f.dual_pipe_bubble_s(pp=8, forward_s=1.0, backward_s=2.0, weight_gradient_s=1.0) == 6.0
    assert f.dual_pipe_bubble_s(pp=2, forward_s=1.0, backward_s=2.0, weight_gradient_s=1.0) == 0
