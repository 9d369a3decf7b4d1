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
        if row["kind"] == "gpipe":
            assert f.gpipe_in_flight_micro_batches(micro_batches=m) == peak
        elif row["kind"] == "1f1b":
            assert f.one_f_one_b_in_flight_micro_batches(pp=p, rank=rank, micro_batches=m) == peak
            assert f.in_flight_micro_batches(pp=p, vpp=1, rank=rank, micro_batches=m) == peak
        else:
            assert f.interleaved_in_flight_chunks(pp=p, vpp=v, rank=rank, micro_batches=m) == peak
            assert f.in_flight_micro_batches(pp=p, vpp=v, rank=rank, micro_batches=m) == peak / v


def test_bubble_by_hand() -> None:
    assert f.bubble_fraction(overhead=0.25) == pytest.approx(0.2)
    assert f.bubble_s(micro_batch_s=2.0, pp=4, vpp=2) == 3.0
    assert f.bubble_overhead(pp=1, vpp=1, micro_batches=7) == 0
    assert f.in_flight_micro_batches(pp=1, vpp=1, rank=0, micro_batches=7) == 1


def test_columns_equal_scalars() -> None:
    m = np.array([1.0, 4.0, 8.0, 64.0])
    for vpp in (1, 2):
        column = f.in_flight_micro_batches(pp=4, vpp=vpp, rank=1, micro_batches=m)
        assert list(column) == [
            f.in_flight_micro_batches(pp=4, vpp=vpp, rank=1, micro_batches=int(x)) for x in m
        ]
