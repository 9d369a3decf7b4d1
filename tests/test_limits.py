"""Shares and margins, worked by hand."""

from __future__ import annotations

import pytest

from gpucalc.formulas.limits import headroom, headroom_bytes, worst_case_bytes


def test_headroom_is_what_is_left_of_the_card() -> None:
    assert headroom(capacity_bytes=80, needed_bytes=60) == pytest.approx(0.25)
    assert headroom(capacity_bytes=80, needed_bytes=100) == pytest.approx(-0.25)
    assert headroom_bytes(capacity_bytes=80, needed_bytes=60) == 20


def test_the_worst_case_is_the_estimate_and_its_error() -> None:
    assert worst_case_bytes(needed_bytes=60, expected_error=0.05) == pytest.approx(63)
