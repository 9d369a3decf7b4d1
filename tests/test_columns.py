"""Columns of layouts through the formulas: the same numbers as one layout at a time."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpucalc.builders.build import build_graph
from gpucalc.catalog import open_catalog
from gpucalc.line import Line, largest, largest_of
from gpucalc.num import Mixed, holds
from gpucalc.plan.host import host_memory
from gpucalc.plan.layout import Layout
from gpucalc.plan.memory import memory_tree, running_peak
from gpucalc.plan.resolve import resolve_recipe, settle
from gpucalc.plan.time import step_time
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.train_run import TrainRun

CATALOG = open_catalog()
MODELS = (
    "llama-3.2-1b", "deepseek-v2-lite", "gpt2", "nemotron-3-nano-30b-a3b", "flan-t5-xl", "qwen2.5-vl-7b",
)  # fmt: skip
GRAPHS = {name: build_graph(CATALOG.model(name)) for name in MODELS}
CLUSTER: Cluster = CATALOG.cluster([(None, 64, "h100-sxm-80gb")])

RUNS: dict[str, dict[str, Any]] = {
    "megatron": {"framework": "megatron"},
    "megatron-fp8": {"framework": "megatron", "precision": "fp8"},
    "megatron-old": {"framework": "megatron", "year": 2021, "optimizer": "lamb"},
    "torchtitan": {"framework": "torchtitan", "compile": True},
    "torchtitan-muon": {"framework": "torchtitan", "optimizer": "muon"},
    "fsdp": {"framework": "fsdp", "zero_stage": 3},
    "fsdp-2": {"framework": "fsdp", "zero_stage": 2, "optimizer": "shampoo"},
    "deepspeed-0": {"framework": "deepspeed", "zero_stage": 0},
    "deepspeed-1": {"framework": "deepspeed", "zero_stage": 1, "optimizer": "adamw-unfused"},
    "deepspeed-2": {"framework": "deepspeed", "zero_stage": 2},
    "deepspeed-3": {"framework": "deepspeed", "zero_stage": 3},
    "ddp": {"framework": "ddp"},
    "lora": {"framework": "fsdp", "method": "lora"},
    "qlora": {"framework": "hf", "method": "qlora"},
    "reference": {"framework": "deepspeed", "zero_stage": 3, "reference_model": True},
}
ONE_AXIS = {"fsdp", "ddp", "hf"}


def columns_of(run: TrainRun, pp: int, micro_batches: int | None) -> Layout:
    """Broadcast columns of every axis the framework has; `micro_batches` None: a column too."""
    parallel = run.framework not in ONE_AXIS
    tp = np.array([1.0, 2.0, 4.0] if parallel else [1.0]).reshape(-1, 1, 1, 1, 1)
    cp = np.array([1.0, 2.0] if parallel else [1.0]).reshape(1, -1, 1, 1, 1)
    ep = np.array([1.0, 2.0, 4.0] if parallel else [1.0]).reshape(1, 1, -1, 1, 1)
    micro_batch = np.array([1.0, 3.0]).reshape(1, 1, 1, -1, 1)
    counts = np.array([2.0, 8.0]).reshape(1, 1, 1, 1, -1) if micro_batches is None else micro_batches
    dp = 64 / (tp * cp * pp)
    return Layout(
        tp=tp,
        pp=pp,
        vpp=1,
        cp=cp,
        ep=ep,
        etp=np.where(ep > 2, 1.0, tp),
        dp=dp,
        shard=dp * cp,
        zero_stage=run.zero_stage,
        micro_batch=micro_batch,
        micro_batches=counts,
        sequence_parallel=run.framework in ("megatron", "torchtitan"),
        schedule="1f1b" if pp > 1 else "none",
    )  # type: ignore[arg-type]


def cells(layout: Layout) -> list[tuple[tuple[int, ...], Layout]]:
    """Each layout of columns as numbers, with its place."""
    held = {field.name: getattr(layout, field.name) for field in fields(layout)}
    columns = {name: value for name, value in held.items() if isinstance(value, np.ndarray)}
    shape = np.broadcast_shapes(*(value.shape for value in columns.values()))
    wide = {name: np.broadcast_to(value, shape) for name, value in columns.items()}
    return [
        (place, replace(layout, **{name: _number(value[place]) for name, value in wide.items()}))
        for place in product(*(range(size) for size in shape))
    ]


def _number(value: Any) -> Any:
    return bool(value) if isinstance(value, np.bool_) else int(value)


def at(value: Any, place: tuple[int, ...]) -> float:
    """The number of one layout in a column of any shape that broadcasts."""
    if not isinstance(value, np.ndarray):
        return float(value)
    return float(value[tuple(min(index, size - 1) for index, size in zip(place, value.shape, strict=True))])


def test_a_condition_of_structure_holds_for_a_whole_column_or_none() -> None:
    assert holds(True)
    assert holds(np.array([True, True]))
    assert not holds(np.array([False, False]))
    with pytest.raises(Mixed):
        holds(np.array([True, False]))


def test_the_largest_of_lines_is_taken_in_every_place() -> None:
    lines = tuple(
        Line(name, value, "bytes")
        for name, value in (("a", np.array([3.0, 1.0, 2.0])), ("b", np.array([2.0, 5.0, 2.0])), ("c", 1.0))
    )
    assert largest("all", lines).value.tolist() == [3, 5, 2]
    a, b, c = (np.broadcast_to(line.value, 3).tolist() for line in largest_of(lines))
    assert (a, b, c) == ([3, 0, 2], [0, 5, 0], [0, 0, 0])
    assert largest_of([Line("a", 1, "bytes"), Line("b", 2, "bytes")])[0].name == "b"


@pytest.mark.parametrize("name", sorted(RUNS))
@pytest.mark.parametrize("key", MODELS)
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_columns_give_what_each_layout_gives(name: str, key: str, data: st.DataObject) -> None:
    graph = GRAPHS[key]
    stated = {
        "precision": "bf16",
        "seq_len": 1024,
        "recompute": data.draw(st.sampled_from(["none", "selective", "full"])),
        **RUNS[name],
    }
    run, _ = settle(TrainRun.read(stated))
    parallel = run.framework not in ONE_AXIS
    pp = data.draw(st.sampled_from([1, 2, 4])) if parallel and len(graph.trunk.layers) >= 4 else 1
    # Lists of tensors differ by accumulation: one at a time, except where a framework has them alike.
    counts = data.draw(st.sampled_from([1, None]))
    offloads = ["none", "activations-cpu", "optimizer-cpu"]
    offload = data.draw(st.sampled_from(offloads))
    run = run.model_copy(update={"offload": offload})
    recipe = resolve_recipe(run, graph)
    layout = columns_of(run, pp, counts)
    known = {"hopper_or_later": True, "nvlink": True}
    tree = memory_tree(graph, layout, recipe, **known)
    step = step_time(graph, layout, recipe, CLUSTER)
    host = host_memory(graph, layout, recipe, ranks=8, nodes=8)
    for place, one in cells(layout)[data.draw(st.integers(0, 6)) :: 7]:
        single = memory_tree(graph, one, recipe, **known)
        assert at(tree.value, place) == pytest.approx(single.value, rel=1e-12), (place, one)
        assert at(running_peak(tree), place) == pytest.approx(running_peak(single), rel=1e-12)
        time = step_time(graph, one, recipe, CLUSTER).value
        assert at(step.value, place) == pytest.approx(time, rel=1e-9), (place, one)
        if host is not None:
            held = host_memory(graph, one, recipe, ranks=8, nodes=8)
            assert held is not None
            assert at(host.value, place) == pytest.approx(held.value, rel=1e-12)
