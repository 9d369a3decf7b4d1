"""Step time: FLOPs of whole models against the counter, and the laws a step time keeps."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpucalc.builders.build import build_graph
from gpucalc.catalog import open_catalog
from gpucalc.graph import Graph
from gpucalc.line import Line
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.memory import memory_peak
from gpucalc.plan.rates import sample_flops, throughput
from gpucalc.plan.resolve import resolve_recipe, settle
from gpucalc.plan.step_rates import TENSOR_HIDDEN
from gpucalc.plan.time import binding, step_time
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.train_run import TrainRun

CATALOG = open_catalog()
COUNTED = {
    (row["model"], int(row["seq"])): row
    for row in csv.DictReader((Path(__file__).parent / "data" / "flops.csv").read_text().splitlines())
}
# The counter ran these without windows or with another name; the catalogue has the window or the tower.
COUNTED_ELSEWHERE = {"gemma3-4b", "phi-3-mini", "gpt-neox-20b"}


def graph_of(name: str) -> Graph:
    return build_graph(CATALOG.model(name))


def cluster_of(count: int, gpu: str = "h100-sxm-80gb") -> Cluster:
    return CATALOG.cluster([(None, count, gpu)])


def recipe_of(graph: Graph, **run: Any) -> Recipe:
    stated = {"task": "train", "framework": "megatron", "precision": "bf16", "seq_len": 4096} | run
    return resolve_recipe(settle(TrainRun.model_validate(stated))[0], graph)


def layout_of(**degrees: Any) -> Layout:
    base: dict[str, Any] = {
        "tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "etp": 1, "dp": 8, "zero_stage": 1,
        "micro_batch": 1, "micro_batches": 4, "sequence_parallel": False, "schedule": "none",
    } | degrees  # fmt: skip
    return Layout(**({"shard": base["dp"] * base["cp"]} | base))


@pytest.mark.parametrize(
    ("model", "seq_len"),
    [key for key in COUNTED if key[0] not in COUNTED_ELSEWHERE],
    ids=lambda value: str(value),
)
def test_whole_model_flops_equal_the_counter(model: str, seq_len: int) -> None:
    linear, attention = sample_flops(graph_of(model), SimpleNamespace(seq_len=seq_len))  # type: ignore[arg-type]
    # The counter counts the whole square of scores; the convention here is half of it.
    assert linear + 2 * attention == int(COUNTED[model, seq_len]["fwd_flops_measured"])


def test_resnet_50_flops() -> None:
    recipe = recipe_of(graph_of("llama-3-8b"))
    linear, attention = sample_flops(graph_of("resnet-50"), recipe)
    assert linear == pytest.approx(8_178_368_512, rel=1e-6)
    assert attention == 0


def _adds_up(line: Line) -> None:
    if line.children and line.formula is None:
        assert sum(child.value for child in line.children) == pytest.approx(line.value)
    for child in line.children:
        _adds_up(child)


@pytest.mark.parametrize(
    ("model", "degrees", "run"),
    [
        ("llama-3-8b", {}, {"framework": "fsdp"}),
        ("llama-3-8b", {"zero_stage": 3}, {"framework": "fsdp", "recompute": "full"}),
        (
            "llama-3-70b",
            {"tp": 4, "pp": 2, "vpp": 5, "dp": 1, "sequence_parallel": True},
            {"precision": "fp8"},
        ),
        ("mixtral-8x7b", {"tp": 2, "ep": 4, "dp": 4, "sequence_parallel": True}, {}),
        ("deepseek-v3", {"pp": 8, "ep": 8, "dp": 64}, {}),
    ],
)
def test_parts_add_up_and_rates_follow(model: str, degrees: dict[str, Any], run: dict[str, Any]) -> None:
    graph, layout = graph_of(model), layout_of(**degrees)
    recipe, cluster = recipe_of(graph, **run), cluster_of(layout.world)
    step = step_time(graph, layout, recipe, cluster)
    assert step.value > 0
    _adds_up(step)
    rates = throughput(graph, layout, recipe, cluster, step)
    assert rates.value == pytest.approx(layout.global_batch / step.value)
    assert 0.05 < rates.child("mfu").value < 0.9
    assert rates.child("hfu").value >= rates.child("mfu").value
    assert binding(step) in {"compute", "memory bandwidth", "link", "latency", "bubble"}


def _scaled(cluster: Cluster, **factors: float) -> Cluster:
    gpu = cluster.pools[0].gpu
    changes: dict[str, Any] = {}
    if "bandwidth" in factors:
        figure = gpu.memory_bandwidth
        changes["memory_bandwidth"] = figure.model_copy(update={"value": figure.value * factors["bandwidth"]})
    if "peak" in factors:
        changes["peaks"] = {
            key: figure.model_copy(update={"value": figure.value * factors["peak"]})
            for key, figure in gpu.peaks.items()
        }
    return replace(cluster, pools=(replace(cluster.pools[0], gpu=gpu.model_copy(update=changes)),))


@pytest.mark.parametrize("factors", [{"bandwidth": 2.0}, {"peak": 2.0}])
def test_faster_gpus_never_slow_a_step(factors: dict[str, float]) -> None:
    graph, layout = graph_of("llama-3-8b"), layout_of()
    recipe, cluster = recipe_of(graph), cluster_of(8)
    before = step_time(graph, layout, recipe, cluster).value
    assert step_time(graph, layout, recipe, _scaled(cluster, **factors)).value < before


def test_the_slowest_gpu_kind_paces_a_mixed_fleet() -> None:
    graph, layout, recipe = graph_of("llama-3-8b"), layout_of(), recipe_of(graph_of("llama-3-8b"))
    mixed = CATALOG.cluster([(1, 4, "h100-sxm-80gb"), (1, 4, "a100-sxm-80gb")])
    slow = replace(mixed, pools=(mixed.pools[1],))
    assert step_time(graph, layout, recipe, mixed).value == step_time(graph, layout, recipe, slow).value


def test_columns_equal_scalars() -> None:
    graph = graph_of("mixtral-8x7b")
    recipe, cluster = recipe_of(graph), cluster_of(64)
    rows = [(1, 1, 1, 64, 1, 4), (2, 1, 8, 32, 2, 2), (4, 2, 4, 8, 1, 16), (8, 1, 1, 8, 4, 1)]
    names = ("tp", "cp", "ep", "dp", "micro_batch", "micro_batches")
    columns = {name: np.array([row[i] for row in rows], dtype=np.float64) for i, name in enumerate(names)}
    shard = columns["dp"] * columns["cp"]
    column = step_time(graph, layout_of(**columns, shard=shard), recipe, cluster).value
    for i, row in enumerate(rows):
        degrees = dict(zip(names, row, strict=True))
        scalar = step_time(graph, layout_of(**degrees, shard=int(shard[i])), recipe, cluster).value
        assert column[i] == pytest.approx(scalar, rel=1e-9)


def test_the_first_flash_attention_takes_twice_as_long() -> None:
    graph, layout, cluster = graph_of("llama-3-8b"), layout_of(), cluster_of(8, "a100-sxm-80gb")
    of = {
        name: step_time(graph, layout, recipe_of(graph, attention=name, seq_len=65536), cluster).value
        for name in ("flash", "flash-1")
    }
    assert 1.2 < of["flash-1"] / of["flash"] < 2


def test_fused_experts_save_casts_and_launches() -> None:
    graph, layout = graph_of("qwen3-30b-a3b"), layout_of(ep=8, micro_batch=4)
    cluster = cluster_of(8, "gb200")
    steps = {
        year: step_time(graph, layout, recipe_of(graph, precision="mxfp8", year=year), cluster)
        for year in (2025, 2026)
    }
    assert steps[2026].value < 0.9 * steps[2025].value
    assert steps[2026].child("launch").value < steps[2025].child("launch").value


def test_gradients_may_be_reduced_in_16_bits() -> None:
    graph = graph_of("llama-3-8b")
    recipe = recipe_of(graph, reduce_dtype="bf16")
    assert (recipe.gradient_bytes, recipe.reduce_bytes) == (2, 2)
    wide = step_time(graph, layout_of(micro_batches=1), recipe_of(graph), cluster_of(8))
    narrow = step_time(graph, layout_of(micro_batches=1), recipe, cluster_of(8))
    assert narrow.child("data_parallel").value < wide.child("data_parallel").value


def test_a_network_takes_less_from_computation_than_links_inside() -> None:
    graph = graph_of("llama-3-8b")
    recipe = recipe_of(graph, framework="fsdp")
    contention = {
        gpus: step_time(graph, layout_of(dp=gpus, shard=gpus, zero_stage=3), recipe, cluster_of(gpus))
        .child("data_parallel")
        .inputs["contention"]
        .value
        for gpus in (8, 64)
    }
    assert contention[64] < contention[8]


def test_a_copy_per_expert_costs_more_than_one_per_rank() -> None:
    graph, layout = graph_of("deepseek-v3"), layout_of(pp=8, ep=8, dp=8)
    steps = {
        kind: step_time(graph, layout, recipe_of(graph, ep=8, moe_dispatcher=kind), cluster_of(64))
        .child("expert_parallel")
        .value
        for kind in ("alltoall", "deepep")
    }
    # Eight draws among eight ranks reach 5.25 of them.
    assert steps["deepep"] < 0.75 * steps["alltoall"]
    assert recipe_of(graph, ep=8).moe_dispatcher == "alltoall"


def test_without_overlap_every_collective_is_waited_for() -> None:
    graph, layout = graph_of("llama-3-8b"), layout_of(tp=2, dp=4, sequence_parallel=True)
    beside = step_time(graph, layout, recipe_of(graph), cluster_of(8))
    alone = step_time(graph, layout, recipe_of(graph, overlap=False), cluster_of(8))
    data = alone.child("data_parallel")
    assert data.value == pytest.approx(data.inputs["communication_s"].value)
    shown = 1 - TENSOR_HIDDEN.value
    assert beside.child("tensor_parallel").value == pytest.approx(
        shown * alone.child("tensor_parallel").value
    )


def test_optimizers_before_pytorch_2_loop_over_tensors() -> None:
    graph = graph_of("bert-large")
    layout = layout_of(dp=1, shard=1, zero_stage=0)
    parts = {
        year: [
            line.name
            for line in step_time(
                graph,
                layout,
                recipe_of(graph, framework="hf", precision="fp16", seq_len=512, year=year),
                cluster_of(1, "v100-sxm2-16gb"),
            )
            .child("optimizer")
            .children
        ]
        for year in (2022, 2023)
    }
    assert parts == {2022: ["clip", "update", "launch"], 2023: ["clip", "update"]}


def test_deepspeed_hooks_show_on_short_sequences() -> None:
    graph = graph_of("llama-3.2-1b")
    layout = layout_of(dp=1, shard=1, zero_stage=0, micro_batches=8)
    cluster = cluster_of(1, "a100-sxm-80gb")

    def launch(seq_len: int, stage: int) -> float:
        recipe = recipe_of(graph, framework="deepspeed", zero_stage=stage, seq_len=seq_len)
        return float(step_time(graph, layout, recipe, cluster).child("launch").value)

    assert launch(256, 3) > launch(256, 2) > launch(256, 1)
    assert launch(8192, 2) == 0


def test_a_busier_rank_of_experts_slows_a_step_and_needs_memory() -> None:
    graph, layout, cluster = graph_of("mixtral-8x7b"), layout_of(ep=8, dp=8), cluster_of(8)
    even, busy = (recipe_of(graph, ep=8, expert_imbalance=factor) for factor in (1.0, 1.5))
    steps = {recipe: step_time(graph, layout, recipe, cluster) for recipe in (even, busy)}
    assert steps[busy].value > 1.05 * steps[even].value
    assert steps[busy].child("expert_parallel").value == pytest.approx(
        1.5 * steps[even].child("expert_parallel").value, rel=0.05
    )
    kept = {
        recipe: memory_peak(graph, layout, recipe, hopper_or_later=True, nvlink=True).tree.value
        for recipe in (even, busy)
    }
    assert kept[busy] > kept[even]


def test_the_token_table_is_summed_whole_in_every_micro_batch() -> None:
    graph, cluster = graph_of("llama-3-8b"), cluster_of(8)
    table = 128256 * 4096

    def moved(framework: str, micro_batches: int, frozen: tuple[str, ...] = ()) -> float | None:
        recipe = recipe_of(graph, framework=framework, frozen=frozen)
        step = step_time(graph, layout_of(micro_batches=micro_batches), recipe, cluster)
        for line in step.child("backward").child("micro_batch").children:
            if line.name == "embedding":
                return float(line.children[0].inputs["bytes_moved"].value)
        return None

    assert moved("megatron", 4) == table * (2 + 2 + 2 * 4)
    assert moved("megatron", 1) == table * (2 + 2 + 2 * 4)
    assert moved("fsdp", 1) == table * 2
    assert moved("megatron", 4, ("embedding",)) is None


def test_a_power_cap_slows_what_multiplies_and_not_what_moves() -> None:
    graph, layout, cluster = graph_of("llama-3-8b"), layout_of(), cluster_of(8)
    full = step_time(graph, layout, recipe_of(graph), cluster)
    capped = step_time(graph, layout, recipe_of(graph, clock_share=0.5), cluster)
    assert capped.child("optimizer").value == full.child("optimizer").value
    assert 1.7 < capped.child("forward").value / full.child("forward").value < 2
    image = graph_of("resnet-50")
    steps = [
        step_time(image, layout_of(micro_batch=64), recipe_of(image, clock_share=share), cluster).value
        for share in (1.0, 0.8)
    ]
    assert steps[1] > steps[0]


def test_a_slow_host_sets_the_pace() -> None:
    graph, layout, cluster = graph_of("resnet-50"), layout_of(micro_batch=64), cluster_of(8)
    free = step_time(graph, layout, recipe_of(graph), cluster)
    rate = layout.global_batch / free.value
    held = step_time(graph, layout, recipe_of(graph, input_samples_per_s=rate / 3), cluster)
    assert held.value == pytest.approx(3 * free.value)
    assert binding(held) == "data loading"
    fed = step_time(graph, layout, recipe_of(graph, input_samples_per_s=2 * rate), cluster)
    assert fed.value == free.value


def test_image_networks_are_bound_by_what_they_move() -> None:
    graph = graph_of("resnet-50")
    step = step_time(graph, layout_of(micro_batch=256), recipe_of(graph), cluster_of(8, "a100-sxm-80gb"))
    assert binding(step) == "memory bandwidth"


def test_images_that_do_not_lie_channels_last_are_copied_in_16_bits() -> None:
    graph, layout, cluster = graph_of("resnet-50"), layout_of(micro_batch=256), cluster_of(8)

    def step(precision: str, channels_last: bool) -> Line:
        recipe = recipe_of(graph, precision=precision, channels_last=channels_last)
        return step_time(graph, layout, recipe, cluster)

    slow, fast = step("bf16", False), step("bf16", True)
    assert slow.value > 1.2 * fast.value
    copies = slow.child("forward").child("micro_batch").child("forward").children
    assert [line.name for line in copies] == ["convolutions", "elementwise", "layout_copies"]
    assert graph.network is not None
    assert graph.network.saved_elements is not None
    assert copies[2].inputs["bytes_moved"].value == 256 * graph.network.saved_elements * 2 * 2
    assert step("tf32", False).value == step("tf32", True).value


def test_divided_experts_gather_a_copy_of_a_token_for_each_expert_it_chose() -> None:
    graph, cluster = graph_of("mixtral-8x7b"), cluster_of(8)
    degrees = {"tp": 4, "dp": 2, "shard": 2, "sequence_parallel": False}

    def summed(etp: int) -> float:
        step = step_time(graph, layout_of(etp=etp, **degrees), recipe_of(graph), cluster)
        return float(step.child("tensor_parallel").value)

    # Attention sums once a pass; whole experts once more, divided ones once for each of two chosen.
    assert summed(4) == pytest.approx(summed(1) * 3 / 2)


def test_tensor_parallelism_hides_what_is_asked_of_it() -> None:
    graph, cluster = graph_of("llama-3-70b"), cluster_of(8)
    layout = layout_of(tp=8, dp=1, shard=1, sequence_parallel=True)

    def shown(**run: Any) -> float:
        recipe = recipe_of(graph, tp=8, **run)
        return float(step_time(graph, layout, recipe, cluster).child("tensor_parallel").value)

    titan = shown(framework="torchtitan")
    assert shown(framework="torchtitan", tp_overlap=True) == pytest.approx(0.55 * titan)
    assert shown(framework="megatron") == pytest.approx(0.25 * shown(framework="megatron", tp_overlap=False))
    assert shown(framework="megatron", year=2023) == shown(framework="megatron", tp_overlap=False)
    assert shown(framework="megatron", overlap=False) == shown(framework="megatron", tp_overlap=False)


def test_tokens_may_travel_beside_another_micro_batch() -> None:
    graph, layout, cluster = graph_of("mixtral-8x7b"), layout_of(ep=8, dp=8), cluster_of(8)
    waits, hides = (
        step_time(graph, layout, recipe_of(graph, ep=8, ep_overlap=flag), cluster) for flag in (False, True)
    )
    # On NVLink a layer computes far longer than it exchanges: what has a partner shows as contention.
    shown = 0.2 + 0.8 * 0.25
    assert hides.child("expert_parallel").value == pytest.approx(shown * waits.child("expert_parallel").value)


def test_captured_graphs_save_the_host_its_launches() -> None:
    graph, layout, cluster = graph_of("qwen3-30b-a3b"), layout_of(ep=8, micro_batch=1), cluster_of(8)

    def host(*graphs: str) -> float:
        recipe = recipe_of(graph, precision="fp8", cuda_graphs=list(graphs or ("none",)))
        line = step_time(graph, layout, recipe, cluster).child("launch").inputs["each_s"].children[0]
        return float(line.inputs["host_s"].inputs["kernels"]) / 3  # backward is twice forward

    # Three products of 16 local experts, casts too; half a layer's calls each, four products, the router.
    layers, experts = 48, 3 * (22 + 22) + 128 // 8 * 3 * 3 * 2
    attn, router = 45 + 4 * (22 + 22) + 2, 45 + 22
    head = 22 + 8 if graph.linears else 8
    assert host() == layers * (attn + router + experts + 80 + 50 + 90) + head
    assert host("attn") == layers * (10 + router + experts + 80 + 50 + 90) + head
    assert host("attn", "moe_router", "moe_preprocess") == layers * (10 + experts + 90) + head
    assert host("attn", "moe") == layers * 10 + head
    assert host("full") == 0


def test_groups_that_are_part_of_a_rack_have_its_cards() -> None:
    # 128 GPUs, experts on 32: the four that hold the same lie two or three to a rack of 72, with a card each.
    graph = graph_of("qwen3-30b-a3b")
    step = step_time(graph, layout_of(ep=32, dp=128, shard=128), recipe_of(graph), cluster_of(128, "gb300"))
    expert = step.child("data_parallel").children[0].child("expert")
    rate = expert.inputs["all_gather_s"].inputs["bus_bytes_per_s"].value
    assert rate == pytest.approx(0.94 * 72 * 100e9 * (72 / 32) / 72)


def test_hybrid_sharding_gathers_inside_a_copy_and_sums_over_copies() -> None:
    graph = graph_of("llama-3-8b")
    recipe = recipe_of(graph, framework="fsdp", zero_stage=3)
    degrees = {"zero_stage": 3, "micro_batches": 2}

    def sync(gpus: int, shard: int) -> Line:
        layout = layout_of(dp=gpus, shard=shard, **degrees)
        step = step_time(graph, layout, recipe, cluster_of(gpus))
        return step.child("data_parallel").children[0].child("dense")

    node, all_32, copies = sync(8, 8), sync(32, 32), sync(32, 8)
    # Weights travel inside a node as on one node alone; a share of the gradients goes on to the other three.
    assert copies.inputs["all_gather_s"].value == node.inputs["all_gather_s"].value
    inside, across = copies.inputs["reduce_scatter_s"].children
    assert inside.value == node.inputs["reduce_scatter_s"].value
    message = inside.inputs["message_bytes"].value
    assert across.inputs["message_bytes"].value == message / 8
    assert across.inputs["ranks"] == 4
    assert copies.inputs["all_gather_s"].value < all_32.inputs["all_gather_s"].value
    # Summed over copies, a share crosses twice; scattered over all ranks, once.
    assert copies.inputs["reduce_scatter_s"].value > all_32.inputs["reduce_scatter_s"].value


def test_a_step_from_drives_takes_what_they_take_longer() -> None:
    graph, cluster = graph_of("llama-3-8b"), cluster_of(8)
    layout = layout_of(zero_stage=3, micro_batches=1)

    def optimizer(offload: str, **run: Any) -> float:
        stated = {"framework": "deepspeed", "zero_stage": 3, "offload": offload, **run}
        step = step_time(graph, layout, recipe_of(graph, **stated), cluster)
        return float(step.child("optimizer").value)

    params = 8_030_261_248 / 8
    host, drives = optimizer("optimizer-cpu"), optimizer("optimizer-nvme", nvme_gb_per_s=10)
    assert drives - host == pytest.approx(2 * params * 16 * 8 / 10e9, rel=1e-6)
    assert optimizer("optimizer-nvme") < drives


def test_megatron_clears_and_clips_gradients_on_the_gpu_wherever_it_steps() -> None:
    graph, cluster = graph_of("llama-3-8b"), cluster_of(8)

    def parts(offload: str) -> dict[str, float]:
        line = step_time(graph, layout_of(), recipe_of(graph, offload=offload), cluster).child("optimizer")
        return {part.name: float(part.value) for part in line.children}

    own, host = parts("none"), parts("optimizer-cpu")
    assert set(own) == {"gradient_buffer", "clip", "update"}
    assert set(host) == {"gradient_buffer", "clip", "host"}
    assert all(host[name] == own[name] for name in ("gradient_buffer", "clip"))
    assert host["host"] > own["update"]
