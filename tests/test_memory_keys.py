"""What single keys of a run add to its memory, line by line, on one small model."""

from __future__ import annotations

from typing import Any

import pytest

from gpucalc.builders.build import build_graph
from gpucalc.catalog import open_catalog
from gpucalc.errors import InputError
from gpucalc.line import Line
from gpucalc.plan.evaluate import ampere_or_later, hopper_or_later, network_notes
from gpucalc.plan.host import host_memory
from gpucalc.plan.memory import memory_peak, meters
from gpucalc.plan.resolve import resolve_layout, resolve_recipe, settle
from gpucalc.plan.stages import fuller_first
from gpucalc.plan.time import step_time
from gpucalc.spec.model import ModelSpec
from gpucalc.spec.train_run import TrainRun

HIDDEN, FFN, VOCAB, LAYERS = 512, 1024, 2048, 4
SPEC = {
    "name": "model", "architecture": "llama", "layers": LAYERS, "hidden": HIDDEN, "heads": 8, "kv_heads": 8,
    "ffn": FFN, "vocab": VOCAB,
}  # fmt: skip
GRAPH = build_graph(ModelSpec.read(SPEC))
PARAMS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * FFN + 2 * HIDDEN) + 2 * VOCAB * HIDDEN + HIDDEN
CATALOG = open_catalog()


def phases(gpus: int = 1, graph: Any = GRAPH, **run: Any) -> dict[str, Line]:
    """The allocated lines of every phase of the only stage."""
    base = {"framework": "ddp", "precision": "bf16", "seq_len": 256, "micro_batch": 1}
    settled, _ = settle(TrainRun.read({**base, **run}))
    layout, _ = resolve_layout(settled, graph, gpus=gpus)
    (stage,) = memory_peak(graph, layout, resolve_recipe(settled, graph), hopper_or_later=True).tree.children
    return {phase.name: phase.child("allocated") for phase in stage.children}


def names(line: Line) -> set[str]:
    return {child.name for child in line.children}


# --- copies of the model -----------------------------------------------------------------------------------


def test_models_that_are_not_trained() -> None:
    held = phases(reference_model=True, reward_models=2)
    for phase in ("load", "forward", "backward", "step"):
        assert held[phase].child("reference_weights").value == 2 * PARAMS
        assert held[phase].child("reward_weights").value == 2 * 2 * PARAMS
    assert "reward_weights" not in names(phases()["step"])
    sharded = phases(4, framework="fsdp", reward_models=1)["step"]
    assert sharded.child("reward_weights").value == 2 * PARAMS / 4
    adapters = phases(method="lora", reward_models=1)["step"]
    assert adapters.child("reward_weights").value == 2 * PARAMS


def test_models_that_are_not_trained_read_every_sequence() -> None:
    cluster = CATALOG.cluster([(None, 1, "h100")])

    def step(**run: Any) -> Line:
        base = {"framework": "ddp", "seq_len": 256, "micro_batch": 1, "grad_accum": 4}
        settled, _ = settle(TrainRun.read({**base, **run}))
        layout, _ = resolve_layout(settled, GRAPH, gpus=1)
        return step_time(GRAPH, layout, resolve_recipe(settled, GRAPH), cluster)

    found = step(reference_model=True, reward_models=2)
    once = found.child("forward").value
    assert found.child("reference_forward").value == pytest.approx(once)
    assert found.child("reward_forward").value == pytest.approx(2 * once)
    assert found.value - step().value == pytest.approx(3 * once)


@pytest.mark.parametrize(
    ("run", "gpus", "bytes_held"),
    [
        ({}, 1, 4 * PARAMS),
        ({"precision": "bf16-pure"}, 1, 2 * PARAMS),
        ({"framework": "fsdp"}, 4, 4 * PARAMS / 4),
        ({"framework": "deepspeed", "zero_stage": 2}, 4, 4 * PARAMS),  # copied before the engine casts
    ],
)
def test_averaged_weights(run: dict[str, Any], gpus: int, bytes_held: float) -> None:
    for phase in ("load", "backward", "step"):
        assert phases(gpus, **run, ema=True)[phase].child("averaged_weights").value == bytes_held


# --- 16 bit through and through ----------------------------------------------------------------------------


def test_deepspeed_makes_no_fp32_of_what_is_all_in_16_bit() -> None:
    shared = {"framework": "deepspeed", "zero_stage": 2}
    mixed, pure = phases(2, **shared), phases(2, **shared, precision="bf16-pure")
    assert {"fp32_gradient_partition", "flat_gradients"} <= names(mixed["step"])
    assert not {"fp32_gradient_partition", "flat_gradients"} & names(pure["step"])
    assert "master_partition" not in names(pure["load"])
    assert pure["step"].child("optimizer_states").value == 4 * PARAMS / 2


def test_megatron_keeps_no_gradient_buffers_of_frozen_weights() -> None:
    assert "dummy_weight_gradients" in names(phases(framework="megatron")["step"])
    assert "dummy_weight_gradients" not in names(phases(framework="megatron", method="lora")["step"])


# --- networks known by their totals ------------------------------------------------------------------------


def test_fsdp_gathers_a_network_by_size() -> None:
    def gathered(model: str) -> float:
        found = phases(8, build_graph(CATALOG.model(model)), framework="fsdp")["forward"]
        return float(found.child("gathered_weights").value)

    # the flat buffer of a unit, its copy, and the unit that is gathered ahead
    assert gathered("flux.1-dev") == 3 * 2 * 100_000_000
    assert gathered("resnet-50") == 3 * 2 * 25_557_032


# --- meters ------------------------------------------------------------------------------------------------


def test_three_meters_show_three_numbers() -> None:
    settled, _ = settle(TrainRun.read({"framework": "ddp", "seq_len": 256, "micro_batch": 1}))
    layout, _ = resolve_layout(settled, GRAPH, gpus=2)
    peak = memory_peak(GRAPH, layout, resolve_recipe(settled, GRAPH), hopper_or_later=True)
    read = meters(peak.tree)
    assert read is not None
    phase = peak.needed
    outside = phase.child("cuda_context").value + phase.child("nccl_buffers").value
    assert read["device"] == phase.value
    assert read["reserved"] == pytest.approx(phase.value - outside)
    assert read["allocated"] == pytest.approx(read["reserved"] - phase.child("allocator_overhead").value)
    assert meters(Line("memory", 1.0, "bytes")) is None


def test_frameworks_open_more_communicators() -> None:
    spec = {**SPEC, "tied_embeddings": True}

    def opened(framework: str, gpus: int = 16, **run: int) -> list[int]:
        graph = build_graph(ModelSpec.read(spec))
        base = {"framework": framework, "zero_stage": 1, "seq_len": 256, "micro_batch": 1, "pp": 4}
        settled, _ = settle(TrainRun.read({**base, **run}))
        layout, _ = resolve_layout(settled, graph, gpus=gpus)
        tree = memory_peak(graph, layout, resolve_recipe(settled, graph), hopper_or_later=True).tree
        return [stage.children[0].child("nccl_buffers").inputs["communicators"] for stage in tree.children]

    # data, tensor, pipeline; all ranks twice, for barriers and norms; the ends' tied table
    assert opened("megatron", tp=2) == [3 + 2 + 1, 3 + 2, 3 + 2, 3 + 2 + 1]
    assert opened("megatron", tp=2, zero_stage=0) == [3 + 2 + 1, 3 + 2, 3 + 2, 3 + 2 + 1]
    assert opened("megatron", pp=1) == [1 + 2]
    assert opened("megatron", pp=1, zero_stage=0) == [1 + 1]  # norms ask tensor and pipeline ranks
    assert opened("torchtitan", pp=1, zero_stage=3) == [1 + 1]  # the loss has a mesh of its own
    # all ranks, tensor x pipeline, neighbours (one at the ends, two between), and the ends' tied table
    assert opened("deepspeed", tp=2) == [3 + 1 + 1 + 1 + 1, 3 + 1 + 1 + 2, 3 + 1 + 1 + 2, 3 + 1 + 1 + 1 + 1]
    assert opened("deepspeed") == [2 + 1 + 1 + 1, 2 + 1 + 2, 2 + 1 + 2, 2 + 1 + 1 + 1]
    assert opened("deepspeed", pp=1) == [1 + 1]  # its data-parallel group is a clone of all ranks
    assert opened("deepspeed", gpus=1, pp=1) == [0]


# --- frozen weights under FSDP -----------------------------------------------------------------------------


def test_fsdp2_has_no_gradients_of_frozen_weights() -> None:
    layer, tables = 4 * HIDDEN**2 + 3 * HIDDEN * FFN + 2 * HIDDEN, 2 * VOCAB * HIDDEN
    shared: dict[str, Any] = {"framework": "fsdp", "method": "lora", "fused_kernels": True}
    held = phases(4, **shared)
    # the root's tables, this layer and the next, in 16 bit
    assert held["backward"].child("gathered_weights").value == 2 * (tables + 2 * layer)
    wrapped = phases(4, **shared, wrap_tables=True)
    assert wrapped["backward"].child("gathered_weights").value == 2 * (layer + max(layer, tables // 2))
    older = phases(4, **shared, year=2023)["backward"]  # one flat parameter a layer, adapters among it
    assert older.child("gathered_weights_and_gradients").value > 2 * (tables + 2 * layer)


# --- the host ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "each"), [("paged-adamw", 8), ("paged-adamw-8bit", 2 * (1 + 4 / 2048))])
def test_paged_states_are_the_hosts(name: str, each: float) -> None:
    assert "optimizer_states" not in names(phases(optimizer=name)["step"])
    settled, _ = settle(
        TrainRun.read({"framework": "ddp", "seq_len": 256, "micro_batch": 1, "optimizer": name})
    )
    layout, _ = resolve_layout(settled, GRAPH, gpus=4)
    host = host_memory(GRAPH, layout, resolve_recipe(settled, GRAPH), ranks=4, nodes=1)
    assert host is not None
    assert host.child("step").child("paged_states").value == 4 * PARAMS * each  # every rank has its own


# --- DeepSpeed's own sizes ---------------------------------------------------------------------------------


def test_deepspeeds_sizes_are_keys() -> None:
    shared: dict[str, Any] = {"framework": "deepspeed", "zero_stage": 2}
    backward = phases(2, **shared)["backward"]
    assert backward.child("reduce_buckets").value == 2 * 500_000_000
    stated = phases(2, **shared, reduce_bucket_size=1_000_000, overlap_comm=True)["backward"]
    assert stated.child("reduce_buckets").value == 2 * 2 * 1_000_000
    filled = phases(2, **shared, reduce_bucket_size="auto")["backward"]
    assert filled.child("reduce_buckets").value == 2 * HIDDEN**2
    third = {**shared, "zero_stage": 3, "overlap_comm": True, "reduce_bucket_size": 1_000_000}
    sized = phases(2, **third, max_live_parameters=2_000_000, sub_group_size=3_000_000)
    assert sized["forward"].child("gathered_weights").value == 2 * 2_000_000
    assert sized["forward"].child("reduce_buckets").value == 2 * 1_000_000  # stage 3 has one
    assert sized["step"].child("fp32_gradient_partition").value == 4 * 3_000_000
    with pytest.raises(InputError, match="does not apply to fsdp"):
        TrainRun.read({"framework": "fsdp", "sub_group_size": 1000})


@pytest.mark.parametrize(
    ("run", "copies"),
    [
        ({"framework": "deepspeed", "zero_stage": 3}, 1),
        ({"framework": "deepspeed", "zero_stage": 3, "year": 2023}, 4),
        ({"framework": "deepspeed", "zero_stage": 2}, 4),
        ({"framework": "fsdp"}, 1),
        ({"framework": "ddp"}, 4),
    ],
)
def test_ranks_that_read_the_weights(run: dict[str, Any], copies: int) -> None:
    settled, _ = settle(TrainRun.read({"seq_len": 256, "micro_batch": 1, **run}))
    layout, _ = resolve_layout(settled, GRAPH, gpus=4)
    recipe = resolve_recipe(settled, GRAPH)
    host = host_memory(GRAPH, layout, recipe, ranks=4, nodes=1)
    assert host is not None
    assert host.child("load").child("loaded_copies").value == copies * PARAMS * recipe.loaded_bytes


def test_a_layer_of_offloaded_activations_is_on_its_way() -> None:
    kept = phases(seq_len=2048, framework="fsdp", fused_kernels=True)["backward"].child("activations")
    one = kept.children[0].value / LAYERS
    moved = phases(seq_len=2048, framework="fsdp", fused_kernels=True, offload="activations-cpu")
    for phase in ("forward", "backward"):
        assert moved[phase].child("activations_in_transit").value == one
        assert "activations" not in names(moved[phase])
    rebuilt = phases(2, seq_len=2048, framework="fsdp", offload="activations-cpu", recompute="full")
    assert rebuilt["forward"].child("activations_in_transit").value == 2 * HIDDEN * 2048  # a layer's input


# --- autocast ----------------------------------------------------------------------------------------------


def test_autocast_caches_weights_while_forward_runs() -> None:
    copies = 2 * LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * FFN)
    full = phases(framework="hf", recompute="full")
    assert full["forward"].child("autocast_weights").value == copies
    assert "autocast_weights" not in names(full["backward"]) | names(full["step"])
    kept = phases(framework="hf")  # without recomputation the graph keeps them
    assert kept["backward"].child("activations").child("autocast_weights").value == copies
    assert "autocast_weights" not in names(kept["forward"])
    assert "autocast_weights" not in names(phases(framework="hf", precision="fp32")["forward"])


def test_autocast_copies_the_output_matrix() -> None:
    copies = 2 * VOCAB * HIDDEN
    assert phases(framework="hf")["loss"].child("head_and_loss").child("cast_head").value == copies
    # peft's preparation holds what it leaves unquantised in fp32
    quantised: dict[str, Any] = {"framework": "hf", "method": "qlora"}
    upcast = phases(**quantised)["loss"].child("head_and_loss")
    assert upcast.child("cast_head").value == copies
    assert "cast_head" not in names(phases(**quantised, upcast_frozen=False)["loss"].child("head_and_loss"))
    assert "cast_head" not in names(phases(framework="fsdp")["loss"].child("head_and_loss"))


def test_the_block_of_a_quantised_base() -> None:
    def linears(**run: Any) -> float:
        held = phases(method="qlora", **run)["step"].child("weights").child("frozen_linears")
        return held.value

    count = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * FFN)
    assert linears() == count * 0.5625
    assert linears(quantization_block=128) == count * (0.5 + 4 / 128)
    assert linears(quantization="nf4-double", quantization_block=128) == count * (0.5 + 1 / 128 + 1 / 8192)


def test_whether_a_quantised_base_is_divided_is_said() -> None:
    def said(**run: Any) -> dict[str, Any]:
        job = {"seq_len": 256, "micro_batch": 1, "precision": "bf16", "method": "qlora", **run}
        return {assumed.key: assumed.value for assumed in settle(TrainRun.read(job))[1]}

    assert said(framework="fsdp")["run.shard_quantised"] is True
    assert said(framework="deepspeed", zero_stage=3)["run.shard_quantised"] is False
    assert "run.shard_quantised" not in said(framework="hf")


# --- low precision -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "each"), [("fp8", 1), ("mxfp8", 1 + 1 / 32), ("nvfp4", 0.5 + 1 / 16)])
def test_what_transformer_engine_keeps_in_low_precision(precision: str, each: float) -> None:
    linears = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * FFN)
    held = phases(framework="megatron", precision=precision)
    assert held["step"].child("fp8_weight_copies").value == 2 * each * linears
    plain = phases(framework="megatron")
    # both inputs and the product of gate and up are kept quantised
    less = plain["forward"].child("activations").value - held["forward"].child("activations").value
    assert less == pytest.approx(LAYERS * 256 * (2 * HIDDEN + FFN) * (2 - each))


def test_types_of_moments_and_of_weights_are_keys() -> None:
    for name, each in (("fp32", 4), ("bf16", 2), ("fp8", 1)):
        states = phases(framework="megatron", state_dtype=name)["step"].child("optimizer_states")
        assert states.value == PARAMS * (2 * each + 4)  # and masters
    plain, alone = (phases(framework="megatron", precision="fp8", fp8_params=on) for on in (False, True))
    assert "fp8_weight_copies" in names(plain["step"])
    assert "fp8_weight_copies" not in names(alone["step"])
    assert alone["step"].child("weights").value == 2 * PARAMS
    with pytest.raises(InputError, match="contradicts precision: bf16"):
        TrainRun.read({"framework": "megatron", "precision": "bf16", "fp8_params": True})


# --- before the first layer --------------------------------------------------------------------------------


def test_what_lies_between_the_table_and_the_first_layer() -> None:
    def kept(family: str, pp: int = 1, **run: Any) -> dict[str, float]:
        spec = {**SPEC, "architecture": family, "gated_mlp": False}
        graph = build_graph(ModelSpec.read(spec | ({"positions": 1024} if family == "gpt2" else {})))
        base = {"framework": "megatron", "seq_len": 256, "micro_batch": 1, "pp": pp}
        settled, _ = settle(TrainRun.read({**base, **run}))
        layout, _ = resolve_layout(settled, graph, gpus=pp)
        tree = memory_peak(graph, layout, resolve_recipe(settled, graph), hopper_or_later=True).tree
        forward = tree.children[0].child("forward").child("allocated").child("activations")
        return {line.name: float(line.value) for line in forward.children}

    norm = 256 * (2 * HIDDEN + 8)  # its input in 16 bit, mean and rstd
    assert kept("bloom", dropout=False)["embedding"] == norm
    assert kept("bloom", dropout=False, pp=4)["embedding"] == 4 * norm  # of four micro-batches in flight
    assert kept("gpt2", dropout=True)["embedding"] == 256 * HIDDEN  # a byte of mask
    assert "embedding" not in kept("gpt2", dropout=False)


def test_a_networks_notes_say_what_is_left_out() -> None:
    network = build_graph(CATALOG.model("resnet-50"))

    def told(graph: Any, **run: Any) -> str:
        settled, _ = settle(TrainRun.read({"framework": "ddp", "micro_batch": 1, "seq_len": 64, **run}))
        return " ".join(network_notes(graph, resolve_recipe(settled, graph)))

    assert "cudnn.benchmark" in told(network)
    assert "recompute" not in told(network)
    assert "recompute full changes nothing" in told(network, recompute="full")
    assert not told(GRAPH, recompute="full")


def test_a_context_takes_what_version_and_architecture_load() -> None:
    def context(year: int, **known: bool) -> float:
        run = TrainRun.read({"framework": "ddp", "seq_len": 256, "micro_batch": 1, "year": year})
        settled, _ = settle(run)
        layout, _ = resolve_layout(settled, GRAPH, gpus=1)
        recipe = resolve_recipe(settled, GRAPH)
        tree = memory_peak(GRAPH, layout, recipe, hopper_or_later=False, **known).tree
        return float(tree.children[0].children[0].child("cuda_context").value)

    assert context(2022, ampere_or_later=True) == 1573 * 2**20
    assert context(2022, ampere_or_later=False) == 1343 * 2**20
    assert context(2024, ampere_or_later=True) == context(2024, ampere_or_later=False) == 512 * 2**20


def test_architectures_are_told_by_compute_capability() -> None:
    def told(gpu: str) -> tuple[bool, bool]:
        cluster = CATALOG.cluster([(None, 1, gpu)])
        return ampere_or_later(cluster), hopper_or_later(cluster)

    assert told("rtx-2080ti") == (False, False)
    assert told("a100-sxm-80gb") == (True, False)
    assert told("h100-sxm-80gb") == (True, True)
    assert told("mi300x") == (True, False)  # not known: as today's


# --- detectors ---------------------------------------------------------------------------------------------


def test_what_a_detector_holds_while_its_loss_is_taken() -> None:
    totals = {
        "name": "detector", "kind": "detector", "image_size": 64, "gflops_forward": 1.0, "params_total": 1000,
        "saved_elements": 5000, "layers": 10,
    }  # fmt: skip
    loss = {"loss_bytes": 700, "loss_once_bytes": 300, "head_elements": 200}
    run = {"framework": "ddp", "seq_len": None, "micro_batch": 2}
    plain = phases(graph=build_graph(ModelSpec.read(totals)), **run)
    found = phases(graph=build_graph(ModelSpec.read(totals | loss)), **run)
    assert found["loss"].child("detection_loss").value == 2 * 700 + 300
    assert found["loss"].value - plain["loss"].value == 1700
    assert found["backward"].value == plain["backward"].value
    kept = plain["loss"].child("activations")
    assert kept.child("image_batch").value == 2 * 12 * 64 * 64  # beside autocast's 16-bit copy
    wide = phases(graph=build_graph(ModelSpec.read(totals)), **run, precision="fp32")
    assert "image_batch" not in names(wide["loss"].child("activations"))


# --- what DeepSpeed does of its own ------------------------------------------------------------------------


def test_layers_deepspeed_deals_out() -> None:
    # partition_balanced of 0.19.8 over layers alike, run; the old one as BLOOM's chronicles tell
    assert fuller_first(78, 12, filled=False) == (7,) * 6 + (6,) * 6
    assert fuller_first(10, 4, filled=False) == (3, 3, 2, 2)
    assert fuller_first(78, 12, filled=True) == (7,) * 11 + (1,)
    assert fuller_first(80, 8, filled=True) == (10,) * 8
    assert fuller_first(10, 8, filled=True) == (2, 2, 1, 1, 1, 1, 1, 1)  # none is left without layers

    def dealt(framework: str = "deepspeed", **run: Any) -> tuple[int, ...]:
        base = {"framework": framework, "precision": "fp16", "seq_len": 256, "micro_batch": 1, "pp": 3}
        settled, _ = settle(TrainRun.read({**base, **run}))
        return resolve_layout(settled, GRAPH, gpus=3)[0].stage_layers

    assert dealt() == (2, 1, 1)
    assert dealt(year=2022) == (2, 1, 1)  # 2, 2 and nothing would leave a stage empty
    assert dealt(pipeline_split="uneven") == ()  # the ends get fewer
    assert dealt("torchtitan") == ()


def test_stage_3_takes_a_model_whole_that_was_not_made_divided() -> None:
    third: dict[str, Any] = {"framework": "deepspeed", "zero_stage": 3}
    whole = phases(4, **third, zero_init=False)["load"]
    assert whole.child("weights").value + whole.child("undivided_weights").value == 2 * PARAMS
    assert "undivided_weights" not in names(phases(4, **third)["load"])
    assert "undivided_weights" not in names(phases(4, framework="deepspeed", zero_init=False)["load"])
    with pytest.raises(InputError, match="does not apply to fsdp"):
        TrainRun.read({"framework": "fsdp", "zero_init": True})


def test_bf16_of_old_deepspeed_casts_one_gradient_at_a_time() -> None:
    old: dict[str, Any] = {"framework": "deepspeed", "zero_stage": 1, "year": 2022}
    cast = phases(2, **old, grad_accum=2)["backward"].child("cast_gradient")
    assert cast.value == 4 * VOCAB * HIDDEN  # the table's
    assert "cast_gradient" not in names(phases(2, framework="deepspeed", zero_stage=1)["backward"])


def test_channels_of_a_mesh_of_v100s() -> None:
    def channels(**cards: bool) -> float:
        settled, _ = settle(TrainRun.read({"framework": "ddp", "seq_len": 256, "micro_batch": 1}))
        layout, _ = resolve_layout(settled, GRAPH, gpus=4)
        recipe = resolve_recipe(settled, GRAPH)
        tree = memory_peak(GRAPH, layout, recipe, hopper_or_later=False, **cards).tree
        return float(tree.children[0].children[0].child("nccl_buffers").inputs["channels"].value)

    assert channels() == 24
    assert channels(ampere_or_later=False) == 12
    assert channels(ampere_or_later=False, nvlink=False) == 4


def test_megatrons_loss_is_taken_in_place() -> None:
    def logits(framework: str, **run: Any) -> float:
        base = {"framework": framework, "precision": "bf16", "seq_len": 256, "micro_batch": 1, **run}
        settled, _ = settle(TrainRun.read({**base, "fused_loss": False}))
        gpus = settled.tp * settled.pp  # type: ignore[operator]
        layout, _ = resolve_layout(settled, GRAPH, gpus=gpus)
        tree = memory_peak(GRAPH, layout, resolve_recipe(settled, GRAPH), hopper_or_later=True).tree
        return float(tree.children[-1].child("loss").child("allocated").child("logits").value)

    tokens = 256 * VOCAB
    assert logits("deepspeed") == 8 * tokens  # transformers' own: two gradients in fp32
    assert logits("megatron") == 2 * tokens
    assert logits("deepspeed", tp=2) == 2 * tokens / 2  # Megatron's code is what runs so
    assert logits("deepspeed", pp=2) == 4 * tokens


def test_tokens_for_experts_take_buffers_of_their_own() -> None:
    moe = {"experts": 8, "top_k": 2, "expert_ffn": 256}
    graph = build_graph(ModelSpec.read({**SPEC, "architecture": "mixtral", "moe": moe}))

    def buffers(**run: Any) -> float:
        base = {"framework": "megatron", "seq_len": 256, "micro_batch": 1, "ep": 8, "precision": "bf16"}
        settled, _ = settle(TrainRun.read({**base, **run}))
        layout, _ = resolve_layout(settled, graph, gpus=8)
        tree = memory_peak(graph, layout, resolve_recipe(settled, graph), hopper_or_later=True).tree
        found = {line.name: line.value for line in tree.children[0].children[0].children}
        return float(found.get("nccl_exchange_buffers", 0))

    assert buffers() == 7 * 32 * 12 * 2**20
    assert buffers(ep=2) == 32 * 12 * 2**20
    assert buffers(ep=1) == 0
    assert buffers(moe_dispatcher="deepep") == 0


# --- PyTorch's pipelining ----------------------------------------------------------------------------------


def test_what_stays_between_stages_in_torchtitan() -> None:
    def stages(framework: str = "torchtitan", **run: Any) -> list[dict[str, float]]:
        base = {"framework": framework, "precision": "bf16", "seq_len": 256, "micro_batch": 1, "pp": 2}
        settled, _ = settle(TrainRun.read({**base, "grad_accum": 8, **run}))
        layout, _ = resolve_layout(settled, GRAPH, gpus=2)
        tree = memory_peak(GRAPH, layout, resolve_recipe(settled, GRAPH), hopper_or_later=True).tree
        return [
            {line.name: line.value for line in stage.child("backward").child("allocated").children}
            for stage in tree.children
        ]

    message = 2 * 256 * HIDDEN
    first, last = stages()
    assert first["receive_buffers"] == 8 * message  # gradients of every micro-batch's result
    assert last["receive_buffers"] == (8 - 1) * message  # inputs, but the one in flight
    assert (first["stage_outputs"], last.get("stage_outputs", 0)) == (2 * message, 0)
    assert "kept_logits" not in last
    assert stages(year=2025)[1]["kept_logits"] == 7 * 2 * 256 * VOCAB
    assert "receive_buffers" not in stages("megatron")[0]


# --- what Megatron's graphs hold ---------------------------------------------------------------------------


def reserved(graph: Any, **run: Any) -> float:
    """What torch reserves under Megatron."""
    base = {"framework": "megatron", "precision": "bf16", "seq_len": 256, "micro_batch": 1}
    settled, _ = settle(TrainRun.read({**base, **run}))
    layout, _ = resolve_layout(settled, graph, gpus=1)
    told = meters(memory_peak(graph, layout, resolve_recipe(settled, graph), hopper_or_later=True).tree)
    assert told is not None
    return told["reserved"]


def test_captured_graphs_hold_buffers_of_their_own() -> None:
    def held(gpus: int = 1, **run: Any) -> float:
        base = {"framework": "megatron", "precision": "bf16", "seq_len": 256, "micro_batch": 1}
        settled, _ = settle(TrainRun.read({**base, **run}))
        layout, _ = resolve_layout(settled, GRAPH, gpus=gpus)
        recipe = resolve_recipe(settled, GRAPH)
        stage = memory_peak(GRAPH, layout, recipe, hopper_or_later=True).tree.children[0]
        return float(sum(line.value for line in stage.children[0].children if line.name == "cuda_graphs"))

    assert held() == 0
    assert held(cuda_graphs="attn,mlp") == 3e9
    assert held(2, cuda_graphs="full", pp=2) == 10e9
    plain, captured = (reserved(GRAPH, cuda_graphs=what) for what in ("none", "attn"))
    assert captured == plain + 3e9  # torch's own pools, which nvidia-smi sees through it
