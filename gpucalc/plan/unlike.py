"""One step on unlike cards: every kind with a batch of its own, or with stages of its own.

Nothing is chosen here; `gpucalc.mixed` tries the ways of dividing a run and compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpucalc.graph import Graph
from gpucalc.line import Line
from gpucalc.plan.device import Device
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.links import Links
from gpucalc.plan.memory import memory_tree
from gpucalc.plan.stage_time import LayerTime, StageTime, micro_batch_time
from gpucalc.plan.stages import held_stages
from gpucalc.plan.time import StageTimes, paced, pool_step, stage_times, step_of
from gpucalc.spec.hardware import Cluster, Pool


def shared_step(graph: Graph, layouts: Sequence[Layout], recipe: Recipe, cluster: Cluster) -> Line:
    """Seconds of a step in which every GPU kind runs its own layout: its own batch, all else alike."""
    steps = [
        pool_step(graph, layout, recipe, cluster, pool, simulated=True, known=None)
        for pool, layout in enumerate(layouts)
    ]
    return paced(steps)


def micro_batch_s(graph: Graph, layout: Layout, recipe: Recipe, cluster: Cluster, pool: int) -> float:
    """Seconds of one micro-batch on a GPU kind, its slowest stage's."""
    found = stage_times(graph, layout, recipe, cluster, pool)
    return max(float(time.micro_batch_s) for time in found.by_stage.values())


def staged_step(
    graph: Graph, layout: Layout, recipe: Recipe, cluster: Cluster, owners: Sequence[int]
) -> tuple[Line, tuple[float, ...]]:
    """Seconds of a step whose pipeline stages sit on the GPU kinds `owners` names, and each stage's work.

    A stage's own groups talk over the links of its kind, stages over what joins the kinds.
    """
    layers: list[dict[int, LayerTime]] = [{} for _ in cluster.pools]
    devices = [Device.of(pool.gpu, pool.kernels, recipe) for pool in cluster.pools]
    links = [Links(alone(cluster, pool)) for pool in cluster.pools]
    held = held_stages(graph, layout)
    times: list[StageTime] = [
        micro_batch_time(graph, stage, layout, recipe, devices[owner], links[owner], layers[owner])
        for stage, owner in zip(held, owners, strict=True)
    ]
    each = tuple(float(time.micro_batch_s) for time in times)
    slowest = max(range(len(each)), key=each.__getitem__)
    found = StageTimes(
        devices[owners[slowest]],
        held,
        {},
        {},
        by_rank=tuple(times),
        rank_layers=tuple(layers[owner] for owner in owners),
    )
    step = step_of(
        graph,
        times[slowest],
        each[slowest],
        found,
        layout,
        recipe,
        cluster,
        simulated=True,
        group_links=links[owners[slowest]],
    )
    return step, each


def alone(cluster: Cluster, pool: Pool) -> Cluster:
    """The cluster as one of its GPU kinds sees it inside its own nodes."""
    return replace(
        cluster,
        pools=(pool,),
        gpus_per_node=pool.gpus_per_node,
        nvlink_domain=pool.nvlink_domain,
        intra=pool.intra,
    )


def needed_bytes(
    graph: Graph, layout: Layout, recipe: Recipe, pool: Pool, only: tuple[int, ...] | None = None
) -> Line:
    """Bytes a GPU of a kind needs at its peak, for the stages it holds."""
    return memory_tree(
        graph,
        layout,
        recipe,
        hopper_or_later=pool.gpu.capability_major >= 9,
        ampere_or_later=not 0 < pool.gpu.capability_major < 8,
        nvlink=pool.nvlink_domain > 1,
        only=tuple(held_stages(graph, layout)[index] for index in only) if only is not None else None,
    )
