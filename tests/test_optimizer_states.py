"""Optimizer states by shape and weight-decomposed adapters: by hand, and in plans."""

from __future__ import annotations

from typing import Any

import pytest

from gpucalc.builders.build import build_graph
from gpucalc.catalog import open_catalog
from gpucalc.formulas import optimizers as opt
from gpucalc.line import Line
from gpucalc.plan.memory import memory_peak
from gpucalc.plan.resolve import resolve_layout, resolve_recipe, settle
from gpucalc.spec.model import ModelSpec
from gpucalc.spec.train_run import TrainRun

HIDDEN, FFN, VOCAB, LAYERS = 512, 1024, 2048, 2
SPEC = {
    "name": "model", "architecture": "llama", "layers": LAYERS, "hidden": HIDDEN, "heads": 8, "kv_heads": 8,
    "ffn": FFN, "vocab": VOCAB,
}  # fmt: skip
MATRICES = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * FFN)
REST = 2 * VOCAB * HIDDEN + (2 * LAYERS + 1) * HIDDEN


def phases(gpus: int = 1, **run: Any) -> dict[str, Line]:
    """The allocated lines of every phase of the only stage."""
    graph = build_graph(ModelSpec.read(SPEC))
    base = {"framework": "ddp", "precision": "bf16", "seq_len": 256, "micro_batch": 1}
    settled, _ = settle(TrainRun.read({**base, **run}))
    layout, _ = resolve_layout(settled, graph, gpus=gpus)
    (stage,) = memory_peak(graph, layout, resolve_recipe(settled, graph), hopper_or_later=True).tree.children
    return {phase.name: phase.child("allocated") for phase in stage.children}


# --- formulas ----------------------------------------------------------------------------------------------


def test_muon() -> None:
    assert opt.muon_second_moment_bytes(other_params=1000, element_bytes=4, shard=4, zero_stage=0) == 4000
    assert opt.muon_second_moment_bytes(other_params=1000, element_bytes=4, shard=4, zero_stage=1) == 1000


def test_adafactor() -> None:
    # a matrix of 96 x 40 and a vector of 64: 136 means and 64
    assert (
        opt.adafactor_state_bytes(sides=136, other_params=64, element_bytes=4, shard=1, zero_stage=0) == 800
    )
    assert (
        opt.adafactor_state_bytes(sides=136, other_params=64, element_bytes=4, shard=4, zero_stage=3) == 200
    )


@pytest.mark.parametrize(
    ("rows", "columns", "soap", "shampoo"),
    [(96, 40, 117_248, 101_888), (160, 96, 401_408, 339_968)],
)
def test_states_of_optimizers_that_were_run(rows: int, columns: int, soap: int, shampoo: int) -> None:
    """pytorch_optimizer 4.1.0 on CPU, two steps, bytes of a matrix's states; its Shampoo has one moment."""
    moment = 4 * rows * columns
    squares = opt.soap_preconditioner_elements(rows=rows, columns=columns, limit=10_000)
    assert 2 * moment + opt.preconditioner_bytes(elements=squares, shard=1, zero_stage=0) == soap
    whole = opt.shampoo_preconditioner_elements(rows=rows, columns=columns, block=1024)
    assert moment + opt.preconditioner_bytes(elements=whole, shard=1, zero_stage=0) == shampoo


def test_soap() -> None:
    # sides 30 and 200 of one matrix: 30 x 30 and 200 x 200 elements, or only the first
    assert opt.soap_preconditioner_elements(rows=30, columns=200, limit=1000) == 900 + 40_000
    assert opt.soap_preconditioner_elements(rows=30, columns=200, limit=100) == 900


def test_shampoo() -> None:
    # 64 x 96 in blocks of 32: six blocks of two squares of 32; as many elements in blocks of 16
    assert opt.shampoo_preconditioner_elements(rows=64, columns=96, block=32) == 6 * 2 * 32**2 == 2 * 64 * 96
    assert opt.shampoo_preconditioner_elements(rows=64, columns=96, block=16) == 2 * 64 * 96
    # one block of 64 x 96: two squares
    assert opt.shampoo_preconditioner_elements(rows=64, columns=96, block=128) == 64**2 + 96**2
    assert opt.shampoo_vector_elements(size=64, block=32) == 2 * 32**2
    # each square twice, in fp32: itself and its inverse root
    assert opt.preconditioner_bytes(elements=100, shard=4, zero_stage=0) == 800
    assert opt.preconditioner_bytes(elements=100, shard=4, zero_stage=2) == 200


def test_dora() -> None:
    # peft 0.21.2, a linear of 64 x 160: bytes a token beyond LoRA's, fp32 and bf16 adapters
    assert opt.dora_saved_bytes(outputs=160, base_bytes=2, element_bytes=4) == 320 + 640
    assert opt.dora_saved_bytes(outputs=160, base_bytes=2, element_bytes=2) == 320 + 320
    # with dropout the frozen result is fp32 too, and the weight's fp32 copy stays
    assert opt.dora_saved_bytes(outputs=160, base_bytes=4, element_bytes=4) == 640 + 640
    assert opt.dora_weight_bytes(weight_elements=64 * 160, element_bytes=4) == 40_960
    # identity 64 x 64, weight, product, scaled product, sum
    assert opt.dora_norm_bytes(inputs=64, outputs=160, element_bytes=4, cast=1) == 4 * (4096 + 4 * 10_240)
    assert opt.dora_norm_bytes(inputs=64, outputs=160, element_bytes=2, cast=0) == 2 * (4096 + 3 * 10_240)


# --- plans -------------------------------------------------------------------------------------------------


def test_muon_in_a_plan() -> None:
    states = phases(optimizer="muon")["step"].child("optimizer_states")
    assert states.value == 4 * (MATRICES + 2 * REST)
    adamw = phases(optimizer="adamw")["step"].child("optimizer_states")
    assert adamw.value - states.value == 4 * MATRICES


def test_tables_have_wide_states_under_the_trainer() -> None:
    # 1,000 parameters: two fp32 moments in place of two bytes
    sizes = {"params": 1000, "wide_bytes": 8, "narrow_bytes": 2, "shard": 4}
    assert opt.wide_embedding_state_bytes(**sizes, zero_stage=0) == 6000
    assert opt.wide_embedding_state_bytes(**sizes, zero_stage=2) == 1500
    each = 2 * (1 + 4 / 2048)
    states = phases(framework="hf", optimizer="adamw-8bit")["step"].child("optimizer_states")
    assert states.value == (MATRICES + REST) * each + VOCAB * HIDDEN * (8 - each)
    for other in ({"framework": "ddp"}, {"framework": "hf", "year": 2024}):
        plain = phases(optimizer="adamw-8bit", **other)["step"].child("optimizer_states")
        assert plain.value == (MATRICES + REST) * each


def test_adafactor_in_a_plan() -> None:
    states = phases(optimizer="adafactor")["step"].child("optimizer_states")
    sides = LAYERS * (4 * 2 * HIDDEN + 3 * (HIDDEN + FFN)) + 2 * (HIDDEN + VOCAB)
    norms = (2 * LAYERS + 1) * HIDDEN
    assert states.value == 4 * (sides + norms)


@pytest.mark.parametrize("name", ["adafactor", "muon", "soap", "shampoo"])
def test_networks_known_by_their_totals_have_states_too(name: str) -> None:
    graph = build_graph(open_catalog().model("resnet-50"))
    settled, _ = settle(TrainRun.read({"framework": "ddp", "optimizer": name, "micro_batch": 8}))
    layout, _ = resolve_layout(settled, graph, gpus=1)
    tree = memory_peak(graph, layout, resolve_recipe(settled, graph), hopper_or_later=True).tree
    assert tree.children[0].child("step").child("allocated").child("optimizer_states").value > 0


def test_soap_in_a_plan() -> None:
    states = phases(optimizer="soap")["step"].child("optimizer_states")
    squares = LAYERS * (4 * 2 * HIDDEN**2 + 3 * (HIDDEN**2 + FFN**2)) + 2 * (HIDDEN**2 + VOCAB**2)
    assert states.value == 8 * (MATRICES + REST) + 8 * squares


def test_shampoo_in_a_plan() -> None:
    states = phases(optimizer="shampoo")["step"].child("optimizer_states")
    # sides of 512 are whole, those of 1,024 one block, 2,048 two: 512 x 512 once for each block
    tables = 2 * (HIDDEN**2 * 2 + 2 * 1024**2)
    squares = LAYERS * (8 * HIDDEN**2 + 3 * (HIDDEN**2 + FFN**2)) + tables + 2 * LAYERS * HIDDEN**2
    assert states.value == 8 * (MATRICES + REST) + 8 * squares


def test_sharding_divides_preconditioners() -> None:
    shared = {"framework": "fsdp", "optimizer": "soap"}
    whole = phases(1, **shared)["step"].child("optimizer_states")
    half = phases(2, **shared)["step"].child("optimizer_states")
    assert half.value == pytest.approx(whole.value / 2)


def test_dora_in_a_plan() -> None:
    lora = {"rank": 8, "targets": "all-linear", "dtype": "fp32"}
    shared = {"method": "lora", "precision": "bf16-pure"}
    plain = phases(**shared, lora=lora)
    dora = phases(**shared, lora={**lora, "kind": "dora"})
    outputs = 4 * HIDDEN + 2 * FFN + HIDDEN
    more = dora["forward"].child("activations").value - plain["forward"].child("activations").value
    assert more == LAYERS * 256 * outputs * (2 + 4)
    # magnitudes: a weight, a gradient and two moments of fp32 each
    step = dora["step"].value - plain["step"].value
    assert step == pytest.approx(LAYERS * outputs * 16, rel=0.3)
    assert dora["forward"].child("dora_norm").value == 4 * (FFN**2 + 4 * FFN * HIDDEN)
    dropped = phases(**shared, lora={**lora, "kind": "dora", "dropout": 0.05})["forward"]
    assert dropped.child("activations").child("dora_weights").value == 4 * MATRICES
