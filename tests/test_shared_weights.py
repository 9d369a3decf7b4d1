"""Weights that serve several layers, state spaces beside attention, and convolutions faster than tokens.

Held once by every stage that runs them, computed at each use; work and saved tensors are held against
transformers 5.24.0 on torch 2.13.0 (FlopCounterMode and saved_tensors_hooks on the CPU, fp32).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpucalc.builders.build import build_graph
from gpucalc.catalog import Catalog
from gpucalc.counts import block_linears, count
from gpucalc.errors import UnsupportedModel
from gpucalc.graph import Graph
from gpucalc.importers.huggingface import from_config
from gpucalc.jobs import resolve_data
from gpucalc.line import Line
from gpucalc.plan.activation import layer_line
from gpucalc.plan.answer import Plan
from gpucalc.plan.rates import sample_flops
from gpucalc.plan.resolve import resolve_recipe, settle
from gpucalc.plan.stages import stages
from gpucalc.planner import plan_job
from gpucalc.spec.train_run import TrainRun

CATALOG = Catalog([Path(__file__).parents[1] / "catalogs"])

ALBERT: dict[str, Any] = {
    "model_type": "albert", "architectures": ["AlbertForMaskedLM"], "hidden_size": 128, "embedding_size": 32,
    "num_hidden_layers": 4, "num_hidden_groups": 1, "inner_group_num": 1, "num_attention_heads": 4,
    "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 512, "type_vocab_size": 2,
    "hidden_act": "gelu_new", "tie_word_embeddings": True,
}  # fmt: skip
ZAMBA2: dict[str, Any] = {
    "model_type": "zamba2", "architectures": ["Zamba2ForCausalLM"], "hidden_size": 128,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4, "attention_head_dim": 64,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
    "vocab_size": 1000, "intermediate_size": 256, "n_mamba_heads": 8, "mamba_expand": 2, "mamba_d_state": 64,
    "mamba_d_conv": 4, "mamba_ngroups": 1, "num_mem_blocks": 2, "use_shared_attention_adapter": True,
    "adapter_rank": 16, "hidden_act": "gelu", "tie_word_embeddings": True,
}  # fmt: skip
FALCON_H1: dict[str, Any] = {
    "model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"], "hidden_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    "intermediate_size": 256, "mamba_d_ssm": 192, "mamba_n_heads": 12, "mamba_d_head": "auto",
    "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_rms_norm": False,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
WAV2VEC2: dict[str, Any] = {
    "model_type": "wav2vec2", "architectures": ["Wav2Vec2Model"], "hidden_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 512, "conv_dim": [64] * 7,
    "conv_kernel": [10, 3, 3, 3, 3, 2, 2], "conv_stride": [5, 2, 2, 2, 2, 2, 2], "conv_bias": False,
    "feat_extract_norm": "group", "do_stable_layer_norm": False, "num_conv_pos_embeddings": 32,
    "num_conv_pos_embedding_groups": 16, "mask_time_prob": 0.05, "hidden_act": "gelu",
}  # fmt: skip


def drawn(config: dict[str, Any], **changed: Any) -> Graph:
    return build_graph(from_config({**config, **changed}).spec)


def plan(config: dict[str, Any], task: str = "train", gpus: str = "1xH100-SXM", **run: Any) -> Plan:
    model = from_config(config).spec.model_dump(exclude_none=True, exclude_defaults=True)
    stated = {"task": task, **({"seq_len": 96, "micro_batch": 1} if task == "train" else {}), **run}
    return plan_job(
        resolve_data({"model": model, "gpus": gpus, "run": stated}, CATALOG, where="job"), CATALOG
    )


def line(tree: Line, name: str) -> Line:
    """The first line of that name in a tree."""
    waiting = [tree]
    while waiting:
        found = waiting.pop(0)
        if found.name == name:
            return found
        waiting += found.children
    raise AssertionError(name)


# -- held once -------------------------------------------------------------------------------


def test_a_layer_that_serves_at_every_depth_is_held_once() -> None:
    layer = 4 * (128 * 128 + 128) + 2 * 128 * 512 + 512 + 128 + 4 * 128
    table = (1000 + 512 + 2) * 32 + 2 * 32 + 32 * 128 + 128
    head = 128 * 32 + 32 + 2 * 32 + 1000
    for depth in (1, 4, 12):
        assert count(drawn(ALBERT, num_hidden_layers=depth)).total.value == layer + table + head
    in_groups = count(drawn(ALBERT, num_hidden_groups=2)).total.value
    assert in_groups == 2 * layer + table + head


def test_every_stage_that_runs_a_shared_layer_holds_it_once() -> None:
    graph = drawn(ALBERT)
    whole, *_ = stages(graph, pp=1, vpp=1)
    first, last = stages(graph, pp=2, vpp=1)
    layer = whole.layers[0].params
    assert whole.layers[0].held == layer == whole.layers[0].shared
    assert [stage.layers[0].count for stage in (first, last)] == [2, 2]
    assert [stage.layers[0].held for stage in (first, last)] == [layer, layer]


def test_a_stage_holds_what_the_counts_say() -> None:
    for config in (ALBERT, ZAMBA2, FALCON_H1, WAV2VEC2):
        graph = drawn(config)
        assert stages(graph, pp=1, vpp=1)[0].params.total == count(graph).total.value


def test_blocks_take_turns_and_layers_add_their_own() -> None:
    graph = drawn(ZAMBA2)
    assert graph.trunk.layers == (0, 1, 0, 2, 1)
    assert [block.name for block in graph.trunk.blocks] == ["mamba2", "full_1+mamba+mlp", "full_2+mamba+mlp"]
    more = count(drawn(ZAMBA2, num_mem_blocks=3)).total.value - count(graph).total.value
    attention, feed, norms = 256 * 256 * 3 + 256 * 128, 128 * 512 + 256 * 128, 256 + 128
    assert more == attention + feed + norms


def test_weights_gradients_and_states_count_shared_weights_once_and_activations_every_use() -> None:
    once, often = (plan({**ALBERT, "num_hidden_layers": n}, framework="ddp") for n in (2, 8))
    for name in ("weights", "shared_gradients", "optimizer_states"):
        assert line(once.memory, name).value == line(often.memory, name).value
        assert line(once.memory.child("stage_0").child("backward"), name).value > 0
    kept = [line(each.memory, "encoder.full+mlp").value for each in (once, often)]
    assert kept[1] == 4 * kept[0]


def test_served_weights_are_held_once_too() -> None:
    once, often = (
        plan({**ZAMBA2, "layers_block_type": ["hybrid"] * n, "num_hidden_layers": n, "num_mem_blocks": 1},
             task="serve", framework="vllm")
        for n in (1, 3)
    )  # fmt: skip
    shared = [line(each.memory, "shared_full+mamba+mlp").value for each in (once, often)]
    assert shared[0] == shared[1] > 0
    own = [line(each.memory, "layers_full+mamba+mlp").value for each in (once, often)]
    assert own[1] == 3 * own[0]


# -- computed at each use --------------------------------------------------------------------

COUNTED = {  # matrix products of one sample's forward pass
    "albert": (ALBERT, 96, 158_711_808, 0.0),
    "zamba2": (ZAMBA2, 96, 353_894_400, 0.0),
    "falcon_h1": (FALCON_H1, 96, 190_611_456, 0.0),
    # 200 frames; convolutions without padding make fewer results at the edges than their rates say
    "wav2vec2": (WAV2VEC2, 200, 495_151_872, 1e-3),
}


@pytest.mark.parametrize("name", COUNTED)
def test_products_are_those_that_torch_counts(name: str) -> None:
    config, tokens, flops, error = COUNTED[name]
    graph = drawn(config)
    run, _ = settle(TrainRun.read({"framework": "ddp", "seq_len": tokens, "micro_batch": 1}))
    linear, _ = sample_flops(graph, resolve_recipe(run, graph))
    assert linear == pytest.approx(flops, rel=error or 1e-12)


def test_time_grows_with_uses() -> None:
    two, eight = (plan({**ALBERT, "num_hidden_layers": n}, framework="ddp") for n in (2, 8))
    assert two.time is not None
    assert eight.time is not None
    assert two.time.value < eight.time.value


# -- a state space beside attention ----------------------------------------------------------


def test_a_layer_of_both_keeps_keys_and_a_state() -> None:
    graph = drawn(FALCON_H1)
    (block,) = graph.trunk.blocks
    assert block.mixer is not None
    assert block.state is not None
    assert {linear.name for linear in block_linears(block)} >= {"q", "in", "out", "down"}
    cache = plan(FALCON_H1, task="serve", framework="vllm").cache
    assert cache is not None
    # three layers: keys and values of two heads of 32 in 16 bits; a state of 12 x 16 x 256 in fp32 and the
    # convolution's last three inputs of 192 + 2 x 256 channels in 16 bits
    assert line(cache, "full_layers").value == 3 * 2 * 2 * 32 * 2
    assert line(cache, "state_layers").value == 3 * (12 * 16 * 256 * 4 + 3 * 704 * 2)


def _every(tree: Line) -> list[Line]:
    below = [*tree.children, *(item for item in tree.inputs.values() if isinstance(item, Line))]
    return [tree, *(each for item in below for each in _every(item))]


def test_attention_beside_a_state_space_keeps_the_inputs_of_both() -> None:
    kept = line(plan(FALCON_H1, framework="ddp").memory, "decoder.full+mamba+mlp")
    names = {item.name for item in _every(kept)}
    assert {"mixer_input", "state_input", "state_mixer", "attention"} <= names


WIDE: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 8}
SAVED: dict[str, tuple[dict[str, Any], float]] = {
    # of 15,016 bytes a token the inputs of four low-rank additions, 16 wide, are left out
    "zamba2": (
        {**ZAMBA2, **WIDE, "num_key_value_heads": 8, "intermediate_size": 512, "num_hidden_layers": 1,
         "layers_block_type": ["hybrid"], "num_mem_blocks": 1}, 15_016 - 4 * 32,
    ),
    # of 9,832 the rotary table is all layers'
    "falcon_h1": (
        {**FALCON_H1, **WIDE, "num_key_value_heads": 4, "intermediate_size": 512, "mamba_d_ssm": 256,
         "mamba_n_heads": 8}, 9_832 - 64,
    ),
    # a mean and a deviation for each norm, kept in bf16 on the CPU and in fp32 by the GPU's kernel
    "wav2vec2": ({**WAV2VEC2, **WIDE, "intermediate_size": 1024}, 8_232 + 8),
}  # fmt: skip


@pytest.mark.parametrize("name", SAVED)
def test_a_layer_keeps_what_torch_saves(name: str) -> None:
    """Bytes a token of one layer in bf16, 96 tokens, the state space apart: its kernels are not the CPU's."""
    config, measured = SAVED[name]
    graph = drawn(config)
    run, _ = settle(TrainRun.read({"framework": "fsdp", "seq_len": 96, "micro_batch": 1}))
    (block,) = graph.trunk.blocks
    kept = layer_line(block, resolve_recipe(run, graph), seq_len=96)
    state = {"state", "state_input", "state_mixer"}
    assert sum(float(part.value) for part in kept.children if part.name not in state) == measured


def test_adapters_sit_once_on_a_weight_that_serves_every_layer() -> None:
    held = [
        line(plan({**ALBERT, "num_hidden_layers": n}, framework="hf", method="lora").memory, "adapters").value
        for n in (2, 8)
    ]
    assert held[0] == held[1] > 0


# -- convolutions over samples ---------------------------------------------------------------


def test_convolutions_run_at_their_own_rates() -> None:
    graph = drawn(WAV2VEC2)
    assert [linear.active for linear in graph.trunk.inputs] == [64, 32, 16, 8, 4, 2, 1, 1, 1]
    assert [linear.name for linear in graph.trunk.convolutions] == [f"conv_{i}" for i in range(7)]
    assert "a token is a frame of 320 samples: 50 a second at 16 kHz" in graph.notes


@pytest.mark.parametrize(("norm", "measured"), [("group", 82_522), ("layer", 99_678)])
def test_convolutions_keep_what_torch_saves(norm: str, measured: int) -> None:
    """Bytes a frame, fp32, by saved tensors of 2 x 200 frames; the samples themselves are left out."""
    config = {**WAV2VEC2, "feat_extract_norm": norm}
    run = {"framework": "ddp", "seq_len": 200, "precision": "fp32", "recompute": "none"}
    kept = line(plan(config, **run).memory, "convolutions")
    assert float(kept.value) / 200 == pytest.approx(measured, rel=0.025)
    again = line(plan(config, **{**run, "recompute": "full"}).memory, "convolutions")
    assert again.value == pytest.approx(200 * 4 * 64 * 127)  # every convolution's result alone


def test_every_matrix_of_a_decoder_is_work() -> None:
    """Dense parts beside experts and the maps between residual streams too: all a token is multiplied by."""
    wrong = []
    for name in sorted(CATALOG.names("models")):
        spec = CATALOG.model(name).model_copy(update={"vision_tower": None})
        if spec.kind not in ("dense_decoder", "moe_decoder", "hybrid_ssm", "ssm"):
            continue
        try:
            graph = build_graph(spec)
        except UnsupportedModel:
            continue
        run, _ = settle(TrainRun.read({"framework": "ddp", "seq_len": 128, "micro_batch": 1}))
        linear, _ = sample_flops(graph, resolve_recipe(run, graph))
        if linear != pytest.approx(2 * 128 * count(graph).matmul_params, rel=1e-6):
            wrong.append(name)
    assert not wrong, wrong
