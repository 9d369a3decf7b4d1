"""Peaks: over measured steps tensor by tensor, and over peaks that others published.

tests/data/peaks.csv: largest sum of live tensors of one forward and backward pass beyond parameters
(dispatch mode with weak references on storages, torch 2.13 / transformers 5.24; the 8B and 70B rows are
Llama 3). `logits_kept`: the caller holds the outputs alive, so e x V x T bytes of logits stay.
Published: Megatron-Core with TransformerEngine on eight B200 (SimuMax docs), torch's max_memory_allocated.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from gpucalc.builders.build import build_graph
from gpucalc.line import Line
from gpucalc.plan.memory import MemoryPeak, allocated_peak, memory_peak, reserved_peak
from gpucalc.plan.resolve import resolve_layout, resolve_recipe, settle
from gpucalc.spec.model import ModelSpec
from gpucalc.spec.train_run import TrainRun

GIB = 2**30
ROWS = list(csv.DictReader((Path(__file__).parent / "data" / "peaks.csv").read_text().splitlines()))


def peak(model: dict[str, Any], gpus: int, **run: Any) -> MemoryPeak:
    """The memory tree of a run."""
    graph = build_graph(ModelSpec.read({"name": "model", "architecture": "llama", **model}))
    settled, _ = settle(TrainRun.read(run))
    layout, _ = resolve_layout(settled, graph, gpus=gpus)
    return memory_peak(graph, layout, resolve_recipe(settled, graph), hopper_or_later=True)


def beyond_states(phase: Line) -> float:
    """What a phase allocates beside weights, optimizer states and cuBLAS's workspace."""
    held = {"weights", "optimizer_states", "cublas_workspace"}
    return float(sum(line.value for line in phase.child("allocated").children if line.name not in held))


def measured_step(row: dict[str, str]) -> tuple[float, str]:
    """The peak of a measured step over parameters and states, and its phase."""
    sizes = {key: int(row[key]) for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")}
    found = peak(
        sizes,
        1,
        framework="ddp",
        precision="fp32" if row["dtype"] == "fp32" else "bf16-pure",
        seq_len=int(row["seq"]),
        micro_batch=int(row["batch"]),
        recompute=row["recompute"],
        attention="flash",
    )
    (stage,) = found.tree.children
    tokens = int(row["seq"]) * int(row["batch"])
    # The plan drops the logits once the loss is taken, as trainers do; a caller may keep them to the end.
    logits = int(row["logits_kept"]) * (4 if row["dtype"] == "fp32" else 2) * int(row["vocab"]) * tokens
    return max(
        (beyond_states(phase) + logits, phase.name)
        for phase in stage.children
        if phase.name in ("loss", "backward")
    )


@pytest.mark.parametrize(
    "row",
    ROWS,
    ids=lambda r: "-".join((r["dtype"], *(r[k] for k in ("hidden", "layers", "seq", "recompute")))),
)
def test_a_measured_step(row: dict[str, str]) -> None:
    value, _ = measured_step(row)
    assert value == pytest.approx(int(row["peak_bytes"]), rel=5e-5)


@pytest.mark.parametrize(
    ("hidden", "recompute", "measured", "phase"),
    [
        ("4096", "none", 33_815_576_584, "loss"),
        ("4096", "full", 17_144_782_856, "backward"),
        ("8192", "none", 275_805_995_016, "loss"),
        ("8192", "full", 144_335_093_768, "backward"),
    ],
)
def test_llama_3_steps_and_where_they_peak(hidden: str, recompute: str, measured: int, phase: str) -> None:
    (row,) = (
        row
        for row in ROWS
        if (row["hidden"], row["recompute"]) == (hidden, recompute) and int(row["seq"]) >= 4096
    )
    assert int(row["peak_bytes"]) == measured
    value, where = measured_step(row)
    assert value == pytest.approx(measured, rel=1e-5)
    assert where == phase


def test_a_llama_3_8b_step_by_hand() -> None:
    """The loss phase of 4,096 tokens without recomputation, term by term, in bytes."""
    tokens, vocab, hidden = 4096, 128_256, 4096
    layers = 32 * 200_840 * tokens
    ids, rotation = 8 * tokens, 2 * tokens * 128 * 2
    head = (2 * hidden) * tokens + (6 * hidden + 4) * tokens  # input of the output matrix, final norm
    log_softmax = (4 * vocab + 8) * tokens
    gradients = 8 * vocab * tokens  # of the loss and of the log-softmax
    kept_logits = 2 * vocab * tokens
    by_hand = layers + ids + rotation + head + log_softmax + gradients + kept_logits
    (row,) = (r for r in ROWS if (r["hidden"], r["seq"], r["recompute"]) == ("4096", "4096", "none"))
    assert measured_step(row)[0] == by_hand
    assert by_hand == pytest.approx(33_815_576_584, rel=1e-6)


# --- Megatron on B200 --------------------------------------------------------------------------------------

LLAMA_70B = {"layers": 12, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28_672, "vocab": 128_256}
LLAMA_405B = {"layers": 4, "hidden": 16_384, "heads": 128, "kv_heads": 16, "ffn": 53_248, "vocab": 128_256}
MEGATRON = {
    "framework": "megatron",
    "precision": "bf16",
    "micro_batch": 1,
    "grad_accum": 4,
    "zero_stage": 1,
}
PUBLISHED = [  # model, tp, pp, dp, cp, sequence length, GiB
    (LLAMA_70B, 1, 2, 4, 1, 4096, 66.55),
    (LLAMA_70B, 2, 1, 4, 1, 4096, 60.68),
    (LLAMA_70B, 4, 1, 2, 1, 4096, 39.07),
    (LLAMA_70B, 8, 1, 1, 1, 4096, 28.29),
    (LLAMA_405B, 1, 2, 4, 1, 4096, 87.08),
    (LLAMA_405B, 2, 1, 4, 1, 4096, 81.59),
    (LLAMA_405B, 4, 1, 2, 1, 4096, 52.89),
    (LLAMA_405B, 8, 1, 1, 1, 4096, 38.57),
    (LLAMA_70B, 2, 1, 1, 4, 32_768, 68.43),
    (LLAMA_70B, 1, 1, 1, 8, 32_768, 104.51),
    (LLAMA_70B, 2, 1, 1, 4, 131_072, 112.67),
    (LLAMA_405B, 2, 1, 1, 4, 32_768, 87.03),
    (LLAMA_405B, 1, 1, 1, 8, 32_768, 139.22),
    (LLAMA_405B, 2, 1, 1, 4, 131_072, 118.13),
]


@pytest.mark.parametrize(("model", "tp", "pp", "dp", "cp", "seq_len", "gib"), PUBLISHED)
def test_published_megatron_peaks(
    model: dict[str, Any], tp: int, pp: int, dp: int, cp: int, seq_len: int, gib: float
) -> None:
    degrees = {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "seq_len": seq_len, "sequence_parallel": True}
    found = peak(model, tp * pp * dp * cp, **MEGATRON, **degrees)
    # Context parallelism: buffers of the key and value exchange are not modelled.
    bound = 0.005 if cp == 1 else 0.025
    assert allocated_peak(found.tree) / GIB == pytest.approx(gib, rel=bound)
    # What the driver sees is more: fragments, context, communicators.
    assert allocated_peak(found.tree) < reserved_peak(found.tree) < found.tree.value


DEEPSEEK_V3_4_LAYERS = {
    "architecture": "deepseek_v3",
    "layers": 4,
    "hidden": 7168,
    "heads": 128,
    "kv_heads": 128,
    "ffn": 18_432,
    "vocab": 129_280,
    "moe": {"experts": 256, "top_k": 8, "expert_ffn": 2048, "shared_expert_ffn": 2048, "dense_layers": 1},
    "mla": {"q_lora": 1536, "kv_lora": 512, "qk_nope": 128, "qk_rope": 64, "v_head": 128},
}


@pytest.mark.parametrize(
    ("pp", "ep", "dp", "gib", "worst"), [(1, 8, 8, 104.3, 0), (2, 4, 4, 114.0, 1)], ids=["ep8", "pp2-ep4"]
)
def test_published_peaks_of_a_short_deepseek_v3(pp: int, ep: int, dp: int, gib: float, worst: int) -> None:
    found = peak(DEEPSEEK_V3_4_LAYERS, 8, **MEGATRON, seq_len=4096, pp=pp, ep=ep, dp=dp, etp=1)
    assert allocated_peak(found.tree) / GIB == pytest.approx(gib, rel=0.015)
    assert found.stage == worst


# --- pipelines ---------------------------------------------------------------------------------------------


def kept(found: MemoryPeak, stage: int) -> float:
    """Bytes a stage keeps of its layers for backward."""
    forward = found.tree.child(f"stage_{stage}").child("forward")
    (layers,) = (
        line
        for line in forward.child("allocated").child("activations").children
        if line.name.startswith("decoder.")
    )
    return float(layers.value)


def test_micro_batches_in_flight_by_stage() -> None:
    """1F1B: stage r of p holds p - r micro-batches, so what a stage keeps falls along the pipeline."""
    model = {**LLAMA_70B, "layers": 32}
    found = peak(model, 8, **{**MEGATRON, "grad_accum": 32}, seq_len=4096, pp=8, dp=1)
    first = kept(found, 0)
    for stage in range(8):
        assert kept(found, stage) == pytest.approx(first * (8 - stage) / 8)
    # Four micro-batches cannot fill the first stages.
    short = peak(model, 8, **MEGATRON, seq_len=4096, pp=8, dp=1)
    assert [round(8 * kept(short, stage) / first) for stage in range(8)] == [4, 4, 4, 4, 4, 3, 2, 1]


def test_interleaving_keeps_more() -> None:
    """p = 4, v = 2, 8 micro-batches: 11, 9, 7, 5 passes through half a stage."""
    model = {**LLAMA_70B, "layers": 32}
    shared = {**MEGATRON, "grad_accum": 8, "seq_len": 4096, "pp": 4, "dp": 1}
    plain, interleaved = peak(model, 4, **shared), peak(model, 4, **shared, vpp=2)
    one = kept(plain, 3)
    assert [kept(plain, stage) / one for stage in range(4)] == [4, 3, 2, 1]
    assert [2 * kept(interleaved, stage) / one for stage in range(4)] == [11, 9, 7, 5]


def test_the_worst_stage_decides() -> None:
    """Few deep layers: the last stage's head and loss outweigh what the first keeps in flight."""
    head_heavy = peak(LLAMA_405B, 8, **MEGATRON, seq_len=4096, pp=2, dp=4)
    assert head_heavy.stage == 1
    depth_heavy = peak(LLAMA_70B, 8, **MEGATRON, seq_len=4096, pp=2, dp=4)
    assert depth_heavy.stage == 0
    assert head_heavy.tree.value == max(stage.value for stage in head_heavy.tree.children)


# --- phases ------------------------------------------------------------------------------------------------


def test_gradients_join_activations_only_when_accumulating() -> None:
    model = {**LLAMA_70B, "layers": 2}
    shared = {"framework": "ddp", "precision": "bf16", "seq_len": 2048, "micro_batch": 1}
    once, twice = peak(model, 1, **shared, grad_accum=1), peak(model, 1, **shared, grad_accum=2)

    def names(found: MemoryPeak) -> set[str]:
        forward = found.tree.child("stage_0").child("forward")
        return {line.name for line in forward.child("allocated").children}

    assert "gradients" not in names(once)
    assert "gradients" in names(twice)


def test_deepspeed_holds_a_second_copy_while_it_loads() -> None:
    model = {**LLAMA_70B, "layers": 4}
    shared = {"framework": "deepspeed", "precision": "bf16", "seq_len": 2048, "micro_batch": 1}
    load = peak(model, 8, **shared, zero_stage=2).tree.child("stage_0").child("load").child("allocated")
    parts = {line.name: line.value for line in load.children}
    weights = parts.pop("weights")
    parts.pop("cublas_workspace")
    assert max(parts.values()) >= weights  # at least the flat copy that is partitioned
    sharded = peak(model, 8, **shared, zero_stage=3).tree.child("stage_0").child("load").child("allocated")
    assert {line.name for line in sharded.children} == {"weights", "cublas_workspace"}


@pytest.mark.parametrize(
    ("model", "year", "mebibytes"),
    [
        ({}, 2025, 64),  # torch's 32 and Transformer Engine's 32
        ({"moe": {"experts": 8, "top_k": 2, "expert_ffn": 1024}}, 2025, 192),  # 4 for experts
        ({}, 2022, 32),
    ],
)
def test_transformer_engine_has_workspaces_of_its_own(
    model: dict[str, Any], year: int, mebibytes: int
) -> None:
    sizes = {"layers": 2, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000, **model}
    found = peak(sizes, 1, framework="megatron", precision="bf16", seq_len=1024, micro_batch=1, year=year)
    (stage,) = found.tree.children
    workspace = stage.child("step").child("allocated").child("cublas_workspace")
    assert workspace.value == mebibytes * 2**20
