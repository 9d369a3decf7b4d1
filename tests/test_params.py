"""Counts are exact: against instantiated models, by hand for each formula, and refusals by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpucalc.builders.build import build_graph
from gpucalc.counts import count, linears_of
from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.formulas import params as formulas
from gpucalc.graph import Attention, Graph, ImageNetwork, Moe
from gpucalc.importers.huggingface import from_config
from gpucalc.spec.model import ModelSpec, layer_letters
from gpucalc.spec.yamlio import load_yaml

ROOT = Path(__file__).parents[1]
# Counts by instantiation on torch's meta device, transformers 5.24.0.
INSTANTIATED: list[dict[str, Any]] = json.loads((ROOT / "tests/data/params.json").read_text())["models"]
MODELS = sorted((ROOT / "catalogs" / "models").glob("*.yaml"))


def _read(path: Path) -> ModelSpec:
    loaded = load_yaml(path)
    return ModelSpec.read(getattr(loaded, "data", loaded), where=str(path))


def _graph(**fields: Any) -> Graph:
    return build_graph(ModelSpec.read(fields))


LLAMA_3_8B = {
    "name": "llama-3-8b",
    "family": "llama",
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 128256,
}


# -- against instantiated models -------------------------------------------------------------


@pytest.mark.parametrize("model", INSTANTIATED, ids=lambda m: m["name"])
def test_a_config_counts_as_the_instantiated_model(model: dict[str, Any]) -> None:
    counts = count(build_graph(from_config(model["config"]).spec))
    assert counts.total.value == model["total"]
    assert counts.active.value == model["active"]
    assert counts.routed_experts == model["routed_experts"]
    if model["config"]["model_type"] != "clip":  # that class names no input embedding
        assert counts.input_embedding == model["input_embedding"]


@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.stem)
def test_a_catalogue_model_counts_as_its_source(path: Path) -> None:
    spec = _read(path)
    assert spec.id == path.stem
    if spec.id == "deepseek-v4.1-flash":  # announced, architecture not published
        with pytest.raises(UnsupportedModel, match="deepseek_v41"):
            build_graph(spec)
        return
    graph = build_graph(spec)
    counts = count(graph)
    if spec.params_total is None:
        return
    assert counts.total.value == spec.params_total
    if graph.network is not None:
        return
    if spec.params_active is not None:
        assert counts.active.value == spec.params_active
    if spec.params_input_embedding is not None:
        assert counts.input_embedding == spec.params_input_embedding
    if spec.params_routed_experts is not None:
        assert counts.routed_experts == spec.params_routed_experts
    if spec.vision_tower is not None and spec.vision_tower.params_incl_projector is not None:
        between = counts.total.child("between").value
        assert counts.total.child("vision").value + between == spec.vision_tower.params_incl_projector


def test_a_graph_takes_few_calls_to_build() -> None:
    """About eight hundred for the longest pattern of layers: a millisecond or two."""
    spec = _read(ROOT / "catalogs/models/nemotron-3-ultra-550b-a55b.yaml")
    build_graph(spec)
    calls = [0]

    def count(_frame: object, event: str, _what: object) -> None:
        calls[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        build_graph(spec)
    finally:
        sys.setprofile(None)
    assert 100 < calls[0] < 2000


# -- by hand ---------------------------------------------------------------------------------


def test_llama_3_8b() -> None:
    counts = count(_graph(**LLAMA_3_8B))
    assert counts.total.value == 8_030_261_248
    assert counts.active.value == 8_030_261_248
    assert counts.matmul_params == 7_504_658_432
    assert counts.input_embedding == 128256 * 4096
    assert counts.vocabulary == 2 * 128256 * 4096
    layer = counts.total.child("decoder").child("full+mlp").child("layer")
    assert layer.child("attention").value == 2 * 4096 * 4096 + 2 * 4096 * 1024
    assert layer.child("ffn").value == 3 * 4096 * 14336
    assert layer.child("norms").value == 2 * 4096


def test_qwen3_30b_a3b_active() -> None:
    counts = count(build_graph(_read(ROOT / "catalogs/models/qwen3-30b-a3b.yaml")))
    assert counts.active.value == 3_353_032_704
    assert counts.routed_experts == 48 * 128 * 3 * 2048 * 768


def test_tied_tables_count_once_and_serve_twice() -> None:
    tied = count(_graph(**{**LLAMA_3_8B, "tied_embeddings": True}))
    assert tied.total.value == 8_030_261_248 - 128256 * 4096
    assert tied.matmul_params == 7_504_658_432


def test_linear_formulas() -> None:
    assert formulas.linear_params(inputs=3, outputs=5, copies=2, bias=True) == 2 * (15 + 5)
    assert formulas.linear_params(inputs=3, outputs=5, copies=1, bias=False) == 15
    assert formulas.linear_active_params(inputs=3, outputs=5, active=4, bias=True) == 4 * 20
    assert formulas.linear_matmul_params(inputs=3, outputs=5, active=4) == 60
    assert formulas.repeated_params(layers=7, params_per_layer=11) == 77


def test_vocabulary_formulas() -> None:
    assert formulas.embedding_params(vocab=100, width=8) == 800
    assert formulas.vocabulary_head_params(vocab=100, width=8, tied=False, bias=True) == 900
    assert formulas.vocabulary_head_params(vocab=100, width=8, tied=True, bias=False) == 0
    assert formulas.active_params(total=1000, idle_routed=600) == 400


def test_mla_by_hand() -> None:
    # 2 layers, low-rank queries: q 64->16->4x(8+4), kv 64->(12+4), 12->4x(8+8), o 32->64.
    graph = _graph(
        name="tiny",
        family="deepseek",
        layers=2,
        hidden=64,
        heads=4,
        ffn=96,
        vocab=10,
        mla={"q_lora": 16, "kv_lora": 12, "qk_nope": 8, "qk_rope": 4, "v_head": 8},
    )
    attention = 64 * 16 + 16 + 16 * 48 + 64 * 16 + 12 + 12 * 64 + 32 * 64
    assert count(graph).total.value == 2 * (attention + 3 * 64 * 96 + 2 * 64) + 2 * 10 * 64 + 64


def test_moe_by_hand() -> None:
    graph = _graph(
        name="tiny",
        family="qwen2_moe",
        layers=3,
        hidden=32,
        heads=4,
        kv_heads=2,
        ffn=50,
        vocab=10,
        moe={"experts": 6, "top_k": 2, "expert_ffn": 20, "shared_expert_ffn": 40, "dense_layers": 1},
    )
    attention = 32 * (32 + 16 + 16) + 64 + 32 * 32
    dense, expert = 3 * 32 * 50, 3 * 32 * 20
    sparse = 6 * expert + 3 * 32 * 40 + 32 * 6 + 32
    counts = count(graph)
    assert counts.total.value == 3 * (attention + 64) + dense + 2 * sparse + 2 * 320 + 32
    assert counts.active.value == counts.total.value - 2 * 4 * expert


def test_mamba_2_by_hand() -> None:
    graph = _graph(
        name="tiny",
        family="mamba2",
        layers=1,
        hidden=16,
        vocab=10,
        ssm={"state": 4, "conv": 4, "heads": 8, "head_dim": 4, "groups": 2},
    )
    inner, mixed = 32, 32 + 2 * 2 * 4
    block = 16 * (inner + mixed + 8) + mixed * 5 + 3 * 8 + inner + inner * 16 + 16
    assert count(graph).total.value == block + 160 + 16


# -- structure -------------------------------------------------------------------------------


def test_layer_patterns() -> None:
    assert layer_letters("[S5 F]*2 S2") == "SSSSSFSSSSSFSS"
    assert layer_letters("D2 [F3 D]*2") == "DDFFFDFFFD"
    for bad in ("Q3", "[F", "F*", "F*99999"):
        with pytest.raises(ValueError, match=r"layer (pattern|letter)"):
            layer_letters(bad)


def test_a_window_reaches_only_the_sliding_layers() -> None:
    graph = build_graph(_read(ROOT / "catalogs/models/gemma-3-27b.yaml"))
    spans = {
        (block.mixer.kind, block.mixer.span)
        for block in graph.trunk.blocks
        if isinstance(block.mixer, Attention)
    }
    assert spans == {("sliding", 1024), ("full", None)}
    assert graph.trunk.count(1) == 10


def test_experts_say_how_many_work() -> None:
    graph = build_graph(_read(ROOT / "catalogs/models/deepseek-v3.yaml"))
    part = graph.trunk.blocks[1].ffn
    assert isinstance(part, Moe)
    assert (part.experts, part.top_k, part.shared_ffn) == (256, 8, 2048)
    experts = [(linear, times) for linear, times in linears_of(graph) if linear.copies == 256]
    assert [(linear.name, times) for linear, times in experts] == [
        ("expert_gate", 58),
        ("expert_up", 58),
        ("expert_down", 58),
    ]


def test_an_image_network_keeps_its_totals() -> None:
    graph = build_graph(
        ModelSpec(name="net", kind="cnn", params_total=10, image_size=224, gflops_forward=2.5)
    )
    assert graph.network == ImageNetwork(params=10, image=224, forward_flops=2.5e9)
    assert count(graph).total.value == 10


# -- refusals --------------------------------------------------------------------------------


def test_missing_shapes_are_named_together() -> None:
    with pytest.raises(InputError, match="without layers, hidden"):
        _graph(name="x", family="llama", params=7e9)


def test_an_unknown_family_gets_near_names() -> None:
    with pytest.raises(UnsupportedModel, match=r"did you mean .*llama"):
        _graph(name="x", family="lama", layers=1)
    with pytest.raises(InputError, match="neither architecture nor family"):
        _graph(name="x", layers=1)


def test_what_is_assumed_is_said() -> None:
    graph = _graph(name="x", family="gpt", layers=2, hidden=256, heads=2, vocab=100)
    assert any("4 x hidden" in note for note in graph.notes)


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="evenly"):
        _graph(**{**LLAMA_3_8B, "kv_heads": 7})
    with pytest.raises(InputError, match="not a multiple"):
        _graph(**{**LLAMA_3_8B, "heads": 7, "kv_heads": 7})
    with pytest.raises(InputError, match="more experts"):
        _graph(**{**LLAMA_3_8B, "moe": {"experts": 2, "top_k": 4, "expert_ffn": 8}})
