"""Unlike cards as stages of one pipeline: each kind holds as many layers as its speed and memory allow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

from gpucalc.errors import Infeasible
from gpucalc.mixed.case import Case, near, order_of, split_of
from gpucalc.plan.answer import Level, Split
from gpucalc.plan.layout import Layout
from gpucalc.plan.resolve import resolve_recipe
from gpucalc.plan.rules import divisors
from gpucalc.plan.unlike import needed_bytes, staged_step

PIPELINING = ("megatron", "torchtitan", "deepspeed")
STAGE_BATCHES = (1, 2, 4)
MOST_MOVES = 12  # layers moved from stage to stage


def pipeline(case: Case) -> Split | None:
    """The fastest pipeline whose stages are each of one kind: the order of the kinds, replicas, layers."""
    case = _pipelining(case)
    pools = case.cluster.pools
    if not case.subject.graph.stacks:
        raise Infeasible(["the network is no stack of layers"])
    layers = len(case.subject.graph.trunk.layers)
    best: Split | None = None
    tp = _tensor_ranks(case)
    for replicas in sorted(divisors(math.gcd(*(pool.count // tp for pool in pools))), reverse=True):
        depth = sum(pool.count // tp // replicas for pool in pools)
        if depth > layers:
            continue
        for order in permutations(range(len(pools))):
            owners = tuple(pool for pool in order for _ in range(pools[pool].count // tp // replicas))
            for size in STAGE_BATCHES:
                found = _staged(case, owners, replicas, size)
                if found is not None and (best is None or order_of(found) < order_of(best)):
                    best = found
    return best


def _pipelining(case: Case) -> Case:
    """The run under a framework that has pipelines. Raises Infeasible."""
    run = case.run
    if run.framework in PIPELINING:
        return case
    if run.method != "full":
        raise Infeasible([f"adapters under {run.framework} have no pipeline"])
    changed: dict[str, Any] = {
        "framework": "megatron", "optimizer": "adam", "attention": "flash", "zero_stage": 1,
        "offload": "none", "dp_shard": None, "reshard_after_forward": None, "pipeline_split": "uneven",
    }  # fmt: skip
    moved = run.model_copy(update=changed)
    return replace(case, run=moved, recipe=resolve_recipe(moved, case.subject.graph))


def _tensor_ranks(case: Case) -> int:
    """The run's own tensor parallelism, which stays inside a kind. Raises Infeasible."""
    tp = case.run.tp if isinstance(case.run.tp, int) else 1
    for pool in case.cluster.pools:
        if pool.count % tp:
            raise Infeasible([f"{pool.count} x {pool.gpu.name} are not a multiple of tp {tp}"])
    return tp


def _staged(case: Case, owners: tuple[int, ...], replicas: int, size: int) -> Split | None:
    count = near(case, replicas * size)
    if count is None or (case.exact and case.batch % (replicas * size)):
        return None
    stage = case.run.zero_stage if isinstance(case.run.zero_stage, int) else 0
    layers = len(case.subject.graph.trunk.layers)
    even = tuple(layers // len(owners) + (index < layers % len(owners)) for index in range(len(owners)))
    layout = Layout(
        tp=_tensor_ranks(case), pp=len(owners), vpp=1, cp=1, ep=1, etp=1, dp=replicas, shard=replicas,
        zero_stage=stage if replicas > 1 else 0, micro_batch=size, micro_batches=count,
        sequence_parallel=bool(case.run.sequence_parallel is True and case.run.tp != 1), schedule="1f1b",
        stage_layers=even,
    )  # fmt: skip
    best: Split | None = None
    for sizes in _divided(case, layout, owners):
        found = _stage_split(case, replace(layout, stage_layers=sizes), owners)
        if best is None or order_of(found) < order_of(best):
            best = found
    return best


def _divided(case: Case, layout: Layout, owners: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Layers by stage: by speed, then moved away from where memory or time is shortest."""
    graph = case.subject.graph
    _, each = staged_step(graph, layout, case.recipe, case.cluster, owners)
    layer_s = [seconds / count for seconds, count in zip(each, layout.stage_layers, strict=True)]
    sizes = by_weight(sum(layout.stage_layers), [1 / seconds for seconds in layer_s])
    seen: set[tuple[int, ...]] = set()
    for _ in range(MOST_MOVES):
        if sizes in seen:
            return
        seen.add(sizes)
        yield sizes
        tried = replace(layout, stage_layers=sizes)
        over = _overfull(case, tried, owners)
        _, each = staged_step(graph, tried, case.recipe, case.cluster, owners)
        giver = max(over, key=over.__getitem__) if over else max(range(len(each)), key=each.__getitem__)
        takers = [index for index in range(len(each)) if index != giver and index not in over]
        if not takers or sizes[giver] < 2:
            return
        taker = min(takers, key=lambda index: each[index])
        moved = list(sizes)
        moved[giver] -= 1
        moved[taker] += 1
        sizes = tuple(moved)


def _overfull(case: Case, layout: Layout, owners: tuple[int, ...]) -> dict[int, float]:
    """Stages that do not fit, with the bytes they lack."""
    found = {}
    for stage, owner in enumerate(owners):
        pool = case.cluster.pools[owner]
        needed = float(needed_bytes(case.subject.graph, layout, case.recipe, pool, (stage,)).value)
        if case.level(needed, pool) is Level.DOES_NOT_FIT:
            found[stage] = needed - case.capacity(pool)
    return found


def by_weight(layers: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole layers in proportion, one at the least; the largest remainders get what is left."""
    total = sum(weights)
    shares = [layers * weight / total for weight in weights]
    sizes = [max(1, math.floor(share)) for share in shares]
    order = sorted(range(len(shares)), key=lambda index: sizes[index] - shares[index])
    for index in range(abs(layers - sum(sizes))):
        if layers > sum(sizes):
            sizes[order[index % len(order)]] += 1
        else:
            sizes[max(range(len(sizes)), key=sizes.__getitem__)] -= 1
    return tuple(sizes)


def _stage_split(case: Case, layout: Layout, owners: tuple[int, ...]) -> Split:
    graph = case.subject.graph
    step, each = staged_step(graph, layout, case.recipe, case.cluster, owners)
    parts = []
    for index in dict.fromkeys(owners):
        pool = case.cluster.pools[index]
        own = tuple(stage for stage, owner in enumerate(owners) if owner == index)
        layers = tuple(layout.stage_layers[stage] for stage in own)
        slowest = max(each[stage] for stage in own)
        parts.append(case.share(pool, layout, layers=layers, stages=own, micro_batch_s=slowest))
    return split_of(case, "pipeline", parts, layout.global_batch, lambda: float(step.value))
