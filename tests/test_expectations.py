"""What a job expects of its plan: comparisons with units, levels, and the matrix of jobs it stands for."""

from __future__ import annotations

from typing import Any

import pytest

from gpucalc.errors import InputError
from gpucalc.spec.check import read_expect, read_matrix


@pytest.mark.parametrize(
    ("key", "written", "op", "limit", "scale"),
    [
        ("headroom", ">=10%", ">=", 10, 0.01),
        ("headroom", ">= 0.1", ">=", 0.1, 1),
        ("headroom", ">=8 GiB", ">=", 8, 2**30),
        ("peak_gib", "<=70", "<=", 70, 2**30),
        ("peak_gib", "< 75 GB", "<", 75, 1e9),
        ("step_s", "≤ 1.5 min", "<=", 1.5, 60),
        ("tokens_per_s_per_gpu", ">=9_000 tokens/s", ">=", 9000, 1),
        ("mfu", "38 % +-5 %", "within", 38, 0.01),
        ("ttft_ms", "<=200", "<=", 200, 1e-3),
        ("cost", "<=0.2 USD/Mtok", "<=", 0.2, 1),
        ("cost", "<=100 kg", "<=", 100, 1),
        ("goodput", ">=95 %", ">=", 95, 0.01),
        ("gpus", 8, "==", 8, 1),
        ("gpus", "<=16", "<=", 16, 1),
        ("kv_tokens", ">=1e5", ">=", 1e5, 1),
    ],
)
def test_comparisons_carry_units(key: str, written: object, op: str, limit: float, scale: float) -> None:
    (asked,) = read_expect({key: written})
    assert (asked.op, asked.limit, asked.unit.scale) == (op, limit, scale)


def test_several_comparisons_of_one_key() -> None:
    asked = read_expect({"step_s": ">=10 s, <=25 s", "warn": {"mfu": ">=40 %"}})
    assert [(item.key, item.op, item.level) for item in asked] == [
        ("step_s", ">=", "fail"),
        ("step_s", "<=", "fail"),
        ("mfu", ">=", "warn"),
    ]


@pytest.mark.parametrize(
    ("expect", "words"),
    [
        ({"peak_gb": "<=70"}, "expect.peak_gb: no such expectation"),
        ({"peak_gib": 70}, "does not say which side is good"),
        ({"peak_gib": "about 70"}, "is not a comparison"),
        ({"peak_gib": "70"}, "is not a comparison"),
        ({"peak_gib": "<=70 s"}, "has a unit of something else"),
        ({"cost": "<=70"}, "has no unit"),
        ({"headroom": ">=10"}, "is more than the whole"),
        ({"fits": 1}, "is not a verdict"),
        ({"fits": [True]}, "is not a verdict"),
        ({"fits": "yes"}, "is not a verdict"),
        ({"warn": {"warn": {}}}, "expect.warn.warn: no such expectation"),
        ({"step_s": [1]}, "is not a comparison"),
        (["fits"], "must be a group of keys"),
        (None, "must be a group of keys"),
    ],
)
def test_what_is_not_a_comparison_is_said(expect: Any, words: str) -> None:
    with pytest.raises(InputError) as error:
        read_expect(expect)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        ({"gpu": ["8xH100"]}, "matrix.gpu: cannot be varied"),
        ({"gpus": "8xH100"}, "must be a list"),
        ({"gpus": []}, "must be a list"),
        ({}, "must be a group of lists"),
        ({"batch": [1, 1]}, "holds a value twice"),
        ({"batch": list(range(1, 100)), "seq_len": list(range(1, 100))}, "too many combinations"),
    ],
)
def test_what_is_not_a_matrix_is_said(matrix: Any, words: str) -> None:
    with pytest.raises(InputError) as error:
        read_matrix(matrix, "train")
    assert words in str(error.value)


def test_short_keys_of_a_matrix_go_where_the_task_has_them() -> None:
    matrix = {"gpus": ["1xL4"], "seq_len": [4096], "batch": [8], "run.tp": [1]}
    (cell,) = read_matrix(matrix, "serve")
    assert cell.label == "gpus=1xL4, seq_len=4096, batch=8, run.tp=1"
    assert dict(cell.changes) == {
        "gpus": "1xL4",
        "run.max_model_len": 4096,
        "run.concurrency": 8,
        "run.tp": 1,
    }
    assert set(read_matrix(matrix, "train")[0].changes) == {
        "gpus",
        "run.seq_len",
        "run.global_batch",
        "run.tp",
    }
