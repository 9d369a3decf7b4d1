"""Whole reports of real jobs, so that a change of numbers or words is seen where a user sees it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpucalc.__main__ import main

PLANS = {
    "fits": "plan llama-3-8b",
    "pipeline": "plan llama-3-70b",
    "experts": "plan models/mixtral-8x7b --gpus 4x8xH100-SXM --set run.framework=megatron --set run.ep=8",
    "too-large": "plan models/llama-3-8b --gpus 1xRTX4090",
    "explain": "explain llama-3-8b weights",
}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", PLANS)
def test_report(
    name: str,
    width: int,
    golden: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(PLANS[name].split()) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= width
    golden(f"real-{name}-{width}.txt", out.rstrip("\n"))
