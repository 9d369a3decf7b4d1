"""Explanations: the line that is meant, its formula as code and with values, and the facts below it."""

from __future__ import annotations

import fake
import pytest

from gpucalc.errors import InputError, UnknownName
from gpucalc.explain import explain, find, number

ROOT = fake.plan().root
PEAK = ("stage_0", "backward")


def test_a_full_path_and_its_unique_end_name_the_same_line() -> None:
    whole = "memory.stage_0.backward.activations.attention"
    assert find(ROOT, whole) == find(ROOT, "stage_0.backward.activations.attention")


def test_a_name_met_often_means_the_worst_gpu_at_its_peak() -> None:
    assert find(ROOT, "activations", prefer=PEAK)[0] == "memory.stage_0.backward.activations"


def test_a_name_that_fits_several_lines_lists_their_paths() -> None:
    with pytest.raises(InputError, match=r"memory\.stage_0\.forward, memory\.stage_1\.forward"):
        find(ROOT, "forward")


def test_an_unknown_name_brings_near_ones() -> None:
    with pytest.raises(UnknownName, match="activations"):
        find(ROOT, "activatons")


def test_the_formula_is_shown_as_its_code_and_with_its_values() -> None:
    found = explain(ROOT, "weights", prefer=PEAK)
    assert found.formula == "weight_bytes"
    assert found.expression == "params * parameter_bytes / where(zero_stage >= 3, shard, 1)"
    assert found.substituted == "8_589_934_592 * 4 / where(3 >= 3, 8, 1)"
    assert eval(found.substituted, {"where": lambda c, a, b: a if c else b}) == found.line.value


def test_inputs_that_are_lines_are_explained_down_to_their_source() -> None:
    inputs = {given.name: given for given in explain(ROOT, "weights", prefer=PEAK).inputs}
    params = inputs["params"].explanation
    assert params is not None
    assert params.source == "counted from the architecture"
    assert inputs["zero_stage"].explanation is None


def test_a_sum_names_its_parts_by_path() -> None:
    parts = explain(ROOT, "memory").parts
    assert [part.path for part in parts] == ["memory.stage_0", "memory.stage_1"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(8_589_934_592, "8_589_934_592"), (2.0, "2"), (0.41, "0.41"), (1 / 3, "0.3333333"), (True, "True")],
)
def test_numbers_can_stand_in_an_expression(value: object, text: str) -> None:
    assert number(value) == text
