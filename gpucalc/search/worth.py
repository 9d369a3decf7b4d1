"""What one layout is worth, and the peak memory of layouts by the stages that can have it."""

from __future__ import annotations

from typing import Any

from gpucalc.graph import Graph
from gpucalc.line import Line
from gpucalc.num import Num
from gpucalc.plan.evaluate import (
    ErrorTable,
    Subject,
    ampere_or_later,
    hopper_or_later,
    host_rank,
    memory_rank,
)
from gpucalc.plan.host import host_memory
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.memory import Known, memory_tree
from gpucalc.plan.resolve import resolve_layout, resolve_recipe
from gpucalc.plan.stages import Stage, stages
from gpucalc.plan.time import step_time
from gpucalc.search.found import Candidate, tier_of
from gpucalc.search.space import Space
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.train_run import TrainRun


class Scale:
    """The cluster and the errors layouts are weighed with."""

    def __init__(self, subject: Subject, cluster: Cluster, errors: ErrorTable) -> None:
        self.graph, self.cluster = subject.graph, cluster
        self.errors = errors
        self.workspace, self.context = hopper_or_later(cluster), ampere_or_later(cluster)
        self.ranks = min(cluster.gpus_per_node, cluster.count)
        self.nodes = max(1, cluster.count // self.ranks)
        self.telling: dict[Any, tuple[Stage, ...]] = {}

    def memory(self, layout: Layout, recipe: Recipe, known: Known | None = None) -> Line:
        """The memory tree of the stages one of which has the peak."""
        split = (layout.pp, layout.chunks_per_rank, layout.schedule, layout.stage_layers)
        if split not in self.telling:
            self.telling[split] = telling_stages(self.graph, *split)
        return memory_tree(
            self.graph,
            layout,
            recipe,
            hopper_or_later=self.workspace,
            ampere_or_later=self.context,
            nvlink=self.cluster.nvlink_domain > 1,
            only=self.telling[split],
            known=known,
        )

    def ranks_of(self, tree: Line, layout: Layout, recipe: Recipe, run: TrainRun) -> tuple[Num, Num]:
        """The levels of the GPU's memory and of the host's, as places among the levels.

        The host is asked where a layout offloads to it; what loading takes is the same for all.
        """
        error, _ = self.errors.memory_error(recipe.framework)
        held = None
        if recipe.offload:
            held = host_memory(self.graph, layout, recipe, ranks=self.ranks, nodes=self.nodes)
        return (
            memory_rank(tree, self.cluster.usable_memory(recipe.in_use_bytes).value, error, recipe),
            host_rank(held, run, self.cluster) if held is not None else 0,
        )


def weigh(space: Space, scale: Scale, values: dict[str, Any]) -> Candidate:
    """One layout. Raises Infeasible where it is not legal."""
    run = space.settled(values)
    layout, _ = resolve_layout(run, scale.graph, gpus=space.gpus)
    recipe = resolve_recipe(run, scale.graph)
    tree = scale.memory(layout, recipe)
    tier = tier_of(*scale.ranks_of(tree, layout, recipe, run))
    needed = float(tree.value)
    one = Candidate(values, tier, needed, float("inf"), 0.0)
    if not one.fits:
        return one
    seconds = float(step_time(scale.graph, layout, recipe, scale.cluster).value)
    return Candidate(values, tier, needed, seconds, layout.global_batch / seconds)


def telling_stages(
    graph: Graph, pp: int, vpp: int, schedule: str, sizes: tuple[int, ...] = ()
) -> tuple[Stage, ...]:
    """Stages one of which has the peak: those that hold more of some layer than every one before, the last.

    A stage holds no more micro-batches in flight than those before it, and what the first and the last
    one hold beside their layers only adds to them.
    """
    chosen: list[Stage] = []
    for stage in stages(graph, pp=pp, vpp=vpp, schedule=schedule, sizes=sizes):
        if stage.last or not any(_covers(before, stage) for before in chosen):
            chosen.append(stage)
    return tuple(chosen)


def _covers(one: Stage, other: Stage) -> bool:
    held = {id(run.block): run.count for run in one.layers}
    return all(held.get(id(run.block), 0) >= run.count for run in other.layers)
