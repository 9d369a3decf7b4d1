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
