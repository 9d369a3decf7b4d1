"""Published layouts their authors tuned, against the search's best: a few rows of `benchmarks/tuned.py`."""

from __future__ import annotations

import pytest

from tests.benchmarks.tuned import Compared, compared, shares

# One or two of a source; the rest would take minutes.
ROWS = (
    "korthikanti-tab5-megatron-22b-selective",
    "nemo2407-llama3-70b-h100-64g-pretrain-s8192",
    "nemo-longseq-llama-3-8b-b200-32g-s32k-cp",
    "mbridge-25.11-llama3-8b-b200-8g-fp8-tp1pp1-pretrain",
    "mbridge-26.08-nemotron-3-ultra-gb300-256g-mxfp8-tp1pp1-pretrain",  # groups that are a part of a rack
    "mbridge-26.06-qwen3-30b-a3b-gb300-8g-mxfp8-tp1pp1-pretrain",  # captured whole, exchange overlapped
    "torchtitan-llama3.1-8b-h200-64g",
)


@pytest.fixture(scope="module")
def rows() -> list[Compared]:
    return compared(only=ROWS)


def test_published_layouts_are_legal_and_fit(rows: list[Compared]) -> None:
    assert {row.row for row in rows} == set(ROWS)
    assert shares(rows)[0] == 1.0


def test_published_layouts_are_near_the_best(rows: list[Compared]) -> None:
    assert [row.row for row in rows if not row.near] == []
    # What is found is never slower by more than the order of the simulated schedules leaves open.
    assert all(row.own_s is not None and row.best_s is not None for row in rows)
    assert all(row.best_s <= 1.03 * row.own_s for row in rows if row.own_s and row.best_s)
