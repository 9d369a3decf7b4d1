"""`gpus`, `systems`, `models` and `validate` as a user meets them: rows, sources, filters, widths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpucalc.__main__ import main
from gpucalc.points import Point, Skipped
from gpucalc.report import validation
from gpucalc.report.screen import render
from gpucalc.validate import Report
from gpucalc.validate_training import FitCase

Capture = pytest.CaptureFixture[str]


def answer(line: str, capsys: Capture, code: int = 0) -> str:
    assert main(line.split()) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize(
    "line",
    [
        "gpus",
        "gpus show H100-SXM",
        "gpus compare A100 H100",
        "systems",
        "systems show dgx-h100",
        "models --family llama",
        "models show mixtral-8x7b",
        "models compare llama-3-8b mixtral-8x7b",
    ],
)
@pytest.mark.parametrize("width", [80, 120])
def test_tables_keep_to_the_width(
    line: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert max(map(len, answer(line, capsys).splitlines())) <= width


def test_every_figure_shown_has_unit_kind_and_a_source_in_full(capsys: Capture) -> None:
    document = json.loads(answer("gpus show H100-SXM --json", capsys))
    figures = [document["memory_label"], document["memory_bandwidth"], *document["peaks"].values()]
    for figure in figures:
        assert figure["unit"]
        assert figure["kind"]
        assert all(document["sources"][key] for key in figure["source"])


def test_filters_keep_what_they_name(capsys: Capture) -> None:
    rows = json.loads(answer("gpus --arch hopper --min-memory 100GB --json", capsys))["gpus"]
    assert {"h200-sxm-141gb"} <= {row["id"] for row in rows}
    assert {row["arch"] for row in rows} == {"hopper"}
    assert "h100-sxm-80gb" not in {row["id"] for row in rows}


def test_a_value_no_entry_has_is_an_error(capsys: Capture) -> None:
    assert main(["gpus", "--arch", "hoper"]) == 2
    assert "did you mean hopper" in capsys.readouterr().err
    assert main(["gpus", "--min-memory", "lots"]) == 2
    assert "GiB" in capsys.readouterr().err


def test_comparison_divides_in_equal_units(capsys: Capture) -> None:
    rows = json.loads(answer("gpus compare A100-SXM-80GB H100-SXM --json", capsys))["figures"]
    ratios = {row["figure"]: row["ratio"] for row in rows}
    assert ratios["peaks.bf16"] == pytest.approx(989.4 / 312)
    assert ratios["peaks.fp8"] is None


def test_parameters_are_counted_not_quoted(capsys: Capture) -> None:
    document = json.loads(answer("models show llama-3-8b --json", capsys))
    assert document["params_total"] == 8_030_261_248
    assert document["lines"][0]["value"] == document["params_total"]
    assert document["lines"][0]["children"]


def test_a_model_is_read_from_a_config_or_its_folder(tmp_path: Path, capsys: Capture) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    # Two tables; per layer q and o, k and v, three MLP matrices, two norms; a last norm.
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    for path in (tmp_path, tmp_path / "config.json"):
        document = json.loads(answer(f"models show {path} --json", capsys))
        assert document["params_total"] == 2 * 100 * 64 + 2 * layer + 64


def point(group: str, ratio: float) -> Point:
    return Point(
        id=f"run-of-{group}",
        quantity="peak_memory",
        measured=40 * 2**30,
        estimated=40 * 2**30 * ratio,
        unit="bytes",
        group=group,
        framework="fsdp",
        stack="fsdp",
        gpu="h100-sxm-80gb",
        arch="hopper",
        model="llama-3-8b",
        quality="A",
        meter="allocated",
    )


def test_a_validation_report_says_errors_reasons_and_broken_bounds() -> None:
    found = Report(
        rows=4,
        points=(point("a", 1.1), point("b", 0.8)),
        skipped=(Skipped("c", "peak_memory", "run.micro_batch not stated", "c"),),
        fits=(FitCase("d", "d", True, 60 * 2**30, 80 * 2**30),),
        quantities=("peak_memory",),
    )
    text = render(
        validation.report(found, ("peak_memory: too far off",), by="framework", points=True), color=False
    )
    for words in (
        "0.800",
        "44.00 GiB",
        "run-of-b",
        "run.micro_batch not stated",
        "BOUND BROKEN",
        "right on 1 of 1",
    ):
        assert words in text
