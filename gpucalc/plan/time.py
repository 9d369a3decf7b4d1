"""Seconds of one optimizer step: what the slowest stage computes, waits for and sends.

`step_time` gives a tree whose parts add up; `binding` says which kind of part is largest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gpucalc.formulas import compute as f
from gpucalc.graph import Graph
from gpucalc.line import Kind, Line, compute, total, worst_kind
from gpucalc.num import Num, is_scalar, maximum, where
from gpucalc.plan.bubble import (
    SPLIT_SCHEDULES,
    closed_bubble,
    pipeline_messages,
    simulated_bubble,
    split_bubble,
)
from gpucalc.plan.device import Device
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.links import Links
from gpucalc.plan.network_time import whole_network
from gpucalc.plan.stage_time import LayerTime, StageTime, composition, micro_batch_time
from gpucalc.plan.stages import Stage, held_stages
from gpucalc.plan.step_end import data_parallel_lines, offload_lines, optimizer_line
from gpucalc.plan.step_rates import ABOVE
from gpucalc.spec.hardware import Cluster

# Times of the stages of layouts that differ in sharding, schedule and offload alone, kept by a search.
Known = dict[Any, Any]


def step_time(
    graph: Graph,
    layout: Layout,
    recipe: Recipe,
    cluster: Cluster,
    *,
    simulated: bool = False,
    known: Known | None = None,
) -> Line:
    """Seconds of one optimizer step; the children add up to it.

    `simulated` runs the pipeline's schedule over its stages as they are; otherwise the bubble is the
    closed form, which takes all stages for the slowest one (what a search and columns use).
    `known` is kept between calls whose layouts have tp, pp, cp, ep, etp and both batches in common.
    With several GPU kinds every micro-batch waits for the slowest, so the slowest pool gives the time.
    """
    steps = [
        pool_step(graph, layout, recipe, cluster, index, simulated=simulated, known=known)
        for index in range(len(cluster.pools))
    ]
    return paced(steps)


def paced(steps: list[Line]) -> Line:
    """The step of GPU kinds that wait for one another."""
    slowest: Line = _slowest(steps, [step.value for step in steps])
    if len(steps) == 1:
        return slowest
    value = steps[0].value
    for step in steps[1:]:
        value = maximum(value, step.value)
    return Line(
        "step",
        value,
        "s",
        worst_kind(steps),
        formula=slowest.formula,
        inputs=slowest.inputs,
        children=slowest.children,
        note="the slowest GPU kind sets the pace",
    )


def _slowest(items: list[Any], values: list[Num]) -> Any:
    """The item with the largest time; of columns, the one with the largest mean."""
    weights = [value if is_scalar(value) else float(value.mean()) for value in values]
    return items[max(range(len(items)), key=weights.__getitem__)]


@dataclass(slots=True)
class StageTimes:
    """The times of pipeline stages: by composition, and of the layers they are made of."""

    device: Device
    held: tuple[Stage, ...]
    by_stage: dict[Any, StageTime]
    layers: dict[int, LayerTime]
    # Of stages on unlike cards, rank by rank: its time, and those of its card's layers.
    by_rank: tuple[StageTime, ...] = ()
    rank_layers: tuple[dict[int, LayerTime], ...] = ()


def stage_times(
    graph: Graph,
    layout: Layout,
    recipe: Recipe,
    cluster: Cluster,
    pool: int,
    layers: dict[int, LayerTime] | None = None,
) -> StageTimes:
    """The stages of a layout on the GPUs of one pool; `layers` has times of layers that are known already."""
    device = Device.of(cluster.pools[pool].gpu, cluster.pools[pool].kernels, recipe)
    if graph.network is not None and not graph.stacks:
        return StageTimes(device, (), {"network": whole_network(graph, layout, recipe, device)}, {})
    links = Links(cluster)
    held = held_stages(graph, layout)
    found = StageTimes(device, held, {}, {} if layers is None else layers)
    for stage in held:
        key = composition(stage)
        if key not in found.by_stage:
            found.by_stage[key] = micro_batch_time(graph, stage, layout, recipe, device, links, found.layers)
    return found


def pool_step(
    graph: Graph,
    layout: Layout,
    recipe: Recipe,
    cluster: Cluster,
    pool: int,
    *,
    simulated: bool,
    known: Known | None,
) -> Line:
    """Seconds of a step on the GPUs of one pool."""
    key = (pool, replace(recipe, offload=())) if known is not None else None
    found = known.get(key) if known is not None else None
    if found is None:
        layers: dict[int, LayerTime] = {}
        if known is not None:  # what is made again of a layer changes its time only where that is all of it
            again = "full" if recipe.recompute == "full" else "none"
            alike = replace(recipe, offload=(), recompute=again, recompute_scope="", recompute_modules=())
            layers = known.setdefault((pool, alike, "layers"), layers)
        found = stage_times(graph, layout, recipe, cluster, pool, layers)
        if known is not None:
            known[key] = found
    times = list(found.by_stage.values())
    each = [time.micro_batch_s for time in times]
    micro_batch: Num = each[0]
    for seconds in each[1:]:
        micro_batch = maximum(micro_batch, seconds)
    if is_scalar(micro_batch):
        worst = times[each.index(micro_batch)]
        return step_of(graph, worst, micro_batch, found, layout, recipe, cluster, simulated=simulated)
    # Of columns, another stage may be the slowest in each layout: first ones win where several are.
    step: Line | None = None
    left: Num = True
    for time, seconds in zip(times, each, strict=True):
        here = left & (seconds >= micro_batch)
        if not here.any():
            continue
        one = step_of(graph, time, micro_batch, found, layout, recipe, cluster, simulated=False)
        step = one if step is None else replace(one, value=where(here, one.value, step.value))
        left = left & ~here
    assert step is not None
    return step


def step_of(
    graph: Graph,
    worst: StageTime,
    micro_batch: Num,
    found: StageTimes,
    layout: Layout,
    recipe: Recipe,
    cluster: Cluster,
    *,
    simulated: bool,
    group_links: Links | None = None,
) -> Line:
    """The step of layouts whose slowest stage is `worst`, which takes `micro_batch` seconds.

    group_links: what joins the ranks of one stage, where stages lie on other links.
    """
    links, device = Links(cluster), found.device
    count = layout.passes
    parts = [
        compute(name, f.repeated_s, each_s=total("micro_batch", tuple(lines), unit="s"), times=count)
        for name, lines in worst.parts().items()
        if lines
    ]
    parts = [_with_children(part) for part in parts]
    # Frozen models read every sequence too.
    read = (("reference_forward", int(recipe.reference_model)), ("reward_forward", recipe.reward_models))
    parts += [
        _with_children(compute(name, f.repeated_s, each_s=part.inputs["each_s"], times=models * count))
        for part in parts
        if part.name == "forward"
        for name, models in read
        if models
    ]
    if layout.pp > 1:
        ideal = Line("micro_batch", micro_batch, "s", Kind.MODELLED, source=ABOVE)
        split = layout.schedule in SPLIT_SCHEDULES
        bubble = split_bubble(layout, worst) if split else closed_bubble(layout, ideal)
        if simulated and not split:
            by_rank = list(found.by_rank) or [found.by_stage[composition(stage)] for stage in found.held]
            kinds = found.rank_layers or (found.layers,) * layout.pp
            bubble = simulated_bubble(graph, by_rank, kinds, layout, recipe, bubble)
        parts += [bubble, pipeline_messages(graph, layout, recipe, links)]
    parts.extend(data_parallel_lines(worst, layout, recipe, group_links or links))
    ranks = cluster.gpus_per_node
    parts.extend(offload_lines(graph, worst, layout, recipe, device, ranks))
    parts.append(optimizer_line(worst.stage, layout, recipe, device, ranks))
    if recipe.input_samples_per_s is not None:
        parts.append(
            compute(
                "input_wait",
                f.exposed_input_s,
                samples=layout.global_batch,
                input_samples_per_s=recipe.input_samples_per_s,
                step_s=total("busy", tuple(parts), unit="s"),
            )
        )
    return total("step", tuple(parts), unit="s", kind=_modelled(parts))


def _modelled(parts: list[Line]) -> Kind:
    return Kind.ASSUMED if worst_kind(parts) is Kind.ASSUMED else Kind.MODELLED


def _with_children(line: Line) -> Line:
    inner = line.inputs["each_s"]
    return Line(
        line.name,
        line.value,
        line.unit,
        Kind.ASSUMED if line.kind is Kind.ASSUMED else Kind.MODELLED,
        formula=line.formula,
        inputs=line.inputs,
        children=(inner,),
    )


def binding(step: Line) -> str:
    """What takes most of the step: compute, memory bandwidth, link, latency, bubble or data loading."""
    sums: dict[str, float] = {
        "compute": 0.0,
        "memory bandwidth": 0.0,
        "link": 0.0,
        "latency": 0.0,
        "bubble": 0.0,
        "data loading": 0.0,
    }
    links = {
        "tensor_parallel",
        "context_parallel",
        "expert_parallel",
        "pipeline_messages",
        "data_parallel",
        "offload",
    }
    for part in step.children:
        if part.name in links:
            sums["link"] += part.value
        elif part.name == "bubble":
            sums["bubble"] += part.value
        elif part.name == "input_wait":
            sums["data loading"] += part.value
        elif part.name == "launch":
            sums["latency"] += part.value
        elif part.name == "optimizer":
            sums["memory bandwidth"] += part.value
        else:
            moved = sum(line.value * _repeats(part, run) for run in _runs(part) for line in _moves(run))
            sums["memory bandwidth"] += moved
            sums["compute"] += part.value - moved
    return max(sums, key=sums.__getitem__)


def _runs(part: Line) -> tuple[Line, ...]:
    return tuple(run for run in part.children[0].children if run.children)


def _moves(run: Line) -> list[Line]:
    """The lines of a run of layers, of the token table or of a whole network that move bytes alone."""
    if run.name == "embedding":
        return [run.children[0]]
    network = any(line.name == "elementwise" for line in run.children)
    lines = run.children if network else run.children[0].children
    return [line for line in lines if line.name in ("elementwise", "layout_copies")]


def _repeats(part: Line, run: Line) -> float:
    """How often a run's single layer counts in the whole step."""
    return float(part.inputs["times"] * run.inputs.get("times", 1))
