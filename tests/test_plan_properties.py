"""What must hold for any plan: laws of sharding, sums, monotonicity, and order that does not matter."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpucalc.builders.build import build_graph
from gpucalc.catalog import open_catalog
from gpucalc.counts import count
from gpucalc.errors import UnsupportedModel
from gpucalc.graph import Graph
from gpucalc.jobs import resolve
from gpucalc.line import Line
from gpucalc.plan.answer import Plan
from gpucalc.plan.layout import Layout
from gpucalc.plan.memory import MemoryPeak, memory_peak
from gpucalc.plan.resolve import resolve_layout, resolve_recipe, settle
from gpucalc.plan.stages import block_params, chunk_layers, stages
from gpucalc.planner import plan_job
from gpucalc.spec.model import ModelSpec
from gpucalc.spec.train_run import TrainRun

CATALOG = open_catalog()
few = settings(max_examples=25, deadline=None)

BASE = {"layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 4, "ffn": 2816, "vocab": 32_000}
SSM = {"state": 64, "heads": 32, "head_dim": 64, "groups": 1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", **BASE},
    "tied": {"architecture": "gemma2", "head_dim": 64, **BASE},
    "gpt2": {"architecture": "gpt2", **BASE, "kv_heads": 16, "ffn": 4096},
    "mixtral": {"architecture": "mixtral", **BASE, "moe": {"experts": 8, "top_k": 2, "expert_ffn": 2816}},
    "deepseek": {
        "architecture": "deepseek_v3",
        **BASE,
        "kv_heads": 16,
        "moe": {"experts": 16, "top_k": 4, "expert_ffn": 704, "shared_expert_ffn": 704, "dense_layers": 1},
        "mla": {"q_lora": 256, "kv_lora": 128, "qk_nope": 64, "qk_rope": 32, "v_head": 64},
    },
    "albert": {
        "architecture": "albert",
        **BASE,
        "kv_heads": 16,
        "embedding_width": 128,
        "shared": {"blocks": 2},
    },
    "zamba2": {
        "architecture": "zamba2",
        **BASE,
        "kv_heads": 16,
        "pattern": "MBMBMMBB",
        "shared": {"blocks": 2, "reads": 2048, "adapter": 64},
        "ssm": SSM,
    },
    "falcon-h1": {"architecture": "falcon_h1", **BASE, "pattern": "B8", "ssm": {**SSM, "norm": False}},
    "wav2vec2": {
        "architecture": "wav2vec2",
        **BASE,
        "kv_heads": 16,
        "audio": {
            "widths": [512] * 3,
            "kernels": [10, 3, 2],
            "strides": [5, 8, 8],
            "norm": "group",
            "position_kernel": 128,
            "position_groups": 16,
        },
    },
}
GRAPHS = {key: build_graph(ModelSpec.read({"name": key, **spec})) for key, spec in MODELS.items()}
FRAMEWORKS = ("ddp", "fsdp", "deepspeed", "megatron", "torchtitan")

graphs = st.sampled_from(sorted(GRAPHS))
frameworks = st.sampled_from(FRAMEWORKS)
recomputes = st.sampled_from(["none", "selective", "full"])


def memory(graph: Graph, gpus: int, **run: Any) -> tuple[MemoryPeak, Layout]:
    """The memory tree of a run and its layout."""
    stated = {"precision": "bf16", "seq_len": 1024, "micro_batch": 1, "grad_accum": 4, **run}
    settled, _ = settle(TrainRun.read(stated))
    layout, _ = resolve_layout(settled, graph, gpus=gpus)
    return memory_peak(graph, layout, resolve_recipe(settled, graph), hopper_or_later=False), layout


def parts(peak: MemoryPeak, phase: str, *names: str, stage: int = 0) -> float:
    """Bytes of these lines among what a phase of a stage allocates."""
    lines = peak.tree.child(f"stage_{stage}").child(phase).child("allocated").children
    return float(sum(line.value for line in lines if line.name in names))


STATE = ("weights", "gradients", "optimizer_states")


# --- sharding ----------------------------------------------------------------------------------------------


@few
@given(key=graphs, framework=frameworks, doublings=st.integers(0, 6))
def test_more_data_parallel_never_raises_optimizer_bytes(key: str, framework: str, doublings: int) -> None:
    few_ranks, _ = memory(GRAPHS[key], 2**doublings, framework=framework)
    more_ranks, _ = memory(GRAPHS[key], 2 ** (doublings + 1), framework=framework)
    assert parts(more_ranks, "step", "optimizer_states") <= parts(few_ranks, "step", "optimizer_states")


@few
@given(key=graphs, framework=st.sampled_from(["deepspeed", "megatron"]), ranks=st.sampled_from([2, 8, 64]))
def test_a_higher_stage_never_raises_model_state(key: str, framework: str, ranks: int) -> None:
    states = [
        parts(memory(GRAPHS[key], ranks, framework=framework, zero_stage=stage)[0], "step", *STATE)
        for stage in range(4)
    ]
    assert states == sorted(states, reverse=True)
    # DeepSpeed's stage 1 holds whole gradients only until backward is done.
    assert states[3] < states[2] <= states[1] < states[0]


@pytest.mark.parametrize("key", sorted(GRAPHS))
def test_full_sharding_divides_every_state_by_the_ranks(key: str) -> None:
    alone, _ = memory(GRAPHS[key], 1, framework="deepspeed", zero_stage=3)
    shared, _ = memory(GRAPHS[key], 16, framework="deepspeed", zero_stage=3)
    whole = parts(alone, "step", *STATE)
    # Expert weights of one rank are sharded over the same 16 ranks when ep is 1.
    assert parts(shared, "step", *STATE) == pytest.approx(whole / 16)


# --- parameters over stages and ranks ----------------------------------------------------------------------


def catalogue_graphs() -> list[str]:
    return sorted(CATALOG.names("models"))


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("key", sorted(GRAPHS))
def test_stages_hold_every_parameter_once(key: str, pp: int) -> None:
    graph = GRAPHS[key]
    held = sum(stage.params.total for stage in stages(graph, pp=pp, vpp=1))
    assert held == count(graph).total.value + _copied(graph, pp)


def _copied(graph: Graph, pp: int) -> int:
    """A tied table is held by the first stage and, once there are more, by the last as well; weights that
    serve several layers by every stage that has one of them.
    """
    copies = 0
    for index, block in enumerate(graph.trunk.blocks if graph.stacks else ()):
        having = sum(index in chunk for chunk in chunk_layers(graph, pp=pp, vpp=1))
        copies += (having - 1) * block_params(block, shared=True).total
    if pp == 1 or graph.head is None or graph.embedding is None or not graph.head.tied:
        return copies
    return copies + (graph.embedding.vocab * graph.embedding.width if graph.head.vocab else 0)


def test_stages_of_every_catalogue_model_hold_every_parameter_once() -> None:
    wrong = []
    for name in catalogue_graphs():
        try:
            graph = build_graph(CATALOG.model(name))
        except UnsupportedModel:
            continue
        for pp in (1, 2) if graph.stacks and len(graph.trunk.layers) > 1 else (1,):
            held = sum(stage.params.total for stage in stages(graph, pp=pp, vpp=1))
            if held != count(graph).total.value + _copied(graph, pp):
                wrong.append((name, pp, held, count(graph).total.value))
    assert not wrong, wrong


@few
@given(key=graphs, tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]))
def test_tensor_ranks_divide_what_they_do_not_replicate(key: str, tp: int, pp: int) -> None:
    graph = GRAPHS[key]
    peak, _ = memory(graph, tp * pp, framework="megatron", tp=tp, pp=pp, etp=tp)
    stored = 2 * tp * sum(parts(peak, "step", "weights", stage=index) for index in range(pp))
    replicated = sum(stage.params.replicated for stage in stages(graph, pp=pp, vpp=1))
    total = count(graph).total.value + _copied(graph, pp)
    assert stored / 4 == pytest.approx(total + (tp - 1) * replicated)


# --- monotone in the work ----------------------------------------------------------------------------------


@few
@given(
    key=graphs,
    framework=frameworks,
    recompute=recomputes,
    micro_batch=st.integers(1, 8),
    seq_len=st.integers(1, 16),
    fused=st.booleans(),
)
def test_more_tokens_never_lower_the_peak(
    key: str, framework: str, recompute: str, micro_batch: int, seq_len: int, fused: bool
) -> None:
    shared = {"framework": framework, "recompute": recompute, "fused_loss": fused}
    graph = GRAPHS[key]
    base, _ = memory(graph, 4, **shared, micro_batch=micro_batch, seq_len=128 * seq_len)
    batch, _ = memory(graph, 4, **shared, micro_batch=micro_batch + 1, seq_len=128 * seq_len)
    length, _ = memory(graph, 4, **shared, micro_batch=micro_batch, seq_len=128 * (seq_len + 1))
    assert batch.tree.value >= base.tree.value
    assert length.tree.value >= base.tree.value


@few
@given(
    key=graphs,
    framework=frameworks,
    compiled=st.booleans(),
    attention=st.sampled_from(["flash", "eager"]),
    seq_len=st.sampled_from([128, 1024, 8192]),
)
def test_full_recompute_never_raises_kept_activations(
    key: str, framework: str, compiled: bool, attention: str, seq_len: int
) -> None:
    shared = {"framework": framework, "compile": compiled, "attention": attention, "seq_len": seq_len}
    kept = [
        parts(memory(GRAPHS[key], 4, **shared, recompute=recompute)[0], "forward", "activations")
        for recompute in ("full", "selective", "none")
    ]
    assert kept[0] <= kept[1] <= kept[2]
    assert kept[0] < kept[2]


# --- trees -------------------------------------------------------------------------------------------------


def is_sum(line: Line) -> bool:
    return line.formula is None and not (line.note or "").startswith("largest")


def check(line: Line) -> None:
    """Every line made of parts is their sum, or the largest of them where it says so."""
    for path, inner in line.walk():
        if not inner.children or inner.formula is not None:
            continue  # a leaf, or a formula shown with what it was fed
        values = [part.value for part in inner.children]
        expected = sum(values) if is_sum(inner) else max(values)
        assert math.isclose(inner.value, expected, rel_tol=1e-9), path


@few
@given(
    key=graphs,
    framework=frameworks,
    recompute=recomputes,
    optimizer=st.sampled_from(["adamw", "adamw-8bit", "sgd-momentum"]),
    micro_batch=st.integers(1, 4),
)
def test_parts_of_memory_sum_to_the_whole(
    key: str, framework: str, recompute: str, optimizer: str, micro_batch: int
) -> None:
    run = {"framework": framework, "recompute": recompute, "optimizer": optimizer, "micro_batch": micro_batch}
    peak, _ = memory(GRAPHS[key], 8, **run)
    check(peak.tree)
    assert peak.needed.value == peak.tree.value
    assert all(inner.value >= 0 for _, inner in peak.tree.walk())


@pytest.mark.parametrize("job", ["llama-3-8b", "mixtral-8x7b", "gpt3-175b-selective", "bert-large"])
def test_parts_of_a_plan_sum_to_the_whole(job: str) -> None:
    plan = plan_job(resolve(f"jobs/{job}", CATALOG), CATALOG, advice=False)
    check(plan.memory)
    check(plan.model.child("total"))
    assert plan.time is not None
    check(plan.time)
    names = [path for path, _ in plan.root.walk()]
    assert all(part for path in names for part in path.split("."))


# --- fleets ------------------------------------------------------------------------------------------------


def fleet_plan(gpus: str) -> Plan:
    job = resolve("jobs/llama-2-7b-mixed", CATALOG, gpus=gpus)
    return plan_job(job, CATALOG, advice=False)


@pytest.mark.parametrize(
    ("first", "second"),
    [("4xa100-sxm-80gb", "4xrtx-3090"), ("4xh100-sxm-80gb", "4xa100-sxm-40gb"), ("2xrtx-4090", "6xl40s")],
)
def test_the_order_of_a_mixed_fleet_changes_nothing(first: str, second: str) -> None:
    one, other = fleet_plan(f"{first}+{second}"), fleet_plan(f"{second}+{first}")
    assert one.verdict == other.verdict
    assert one.memory == other.memory
    assert one.time == other.time
    assert one.throughput == other.throughput
    assert one.cost is not None
    assert other.cost is not None
    assert one.cost.value == other.cost.value
    assert [line.value for line in one.cost.children] == [line.value for line in other.cost.children]
    assert one.notes == other.notes
    assert {(a.key, str(a.value)) for a in one.assumptions} == {
        (a.key, str(a.value)) for a in other.assumptions
    }


def test_a_mixed_fleet_is_as_small_as_its_smallest_card_and_as_slow_as_its_slowest() -> None:
    mixed = fleet_plan("4xa100-sxm-80gb+4xrtx-3090")
    small = fleet_plan("8xrtx-3090")
    assert mixed.verdict.capacity == small.verdict.capacity
    assert mixed.time is not None
    assert mixed.time.value >= fleet_plan("8xa100-sxm-80gb").time.value  # type: ignore[union-attr]
