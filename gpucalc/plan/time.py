"""Seconds of one optimizer step: what the slowest stage computes, waits for and sends.

`step_time` gives a tree whose parts add up; `binding` says which kind of part is largest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpucalc.formulas import compute as f
from gpucalc.graph import Graph
from gpucalc.line import Kind, Line, compute, total, worst_kind
from gpucalc.num import Num, maximum
from gpucalc.plan.bubble import closed_bubble, pipeline_messages, simulated_bubble, zero_bubble
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.links import Links, is_scalar
from gpucalc.plan.network_time import whole_network
from gpucalc.plan.stage_time import LayerTime, StageTime, composition, micro_batch_time
from gpucalc.plan.stages import Stage, stages
from gpucalc.plan.step_end import data_parallel_lines, offload_lines, optimizer_line
from gpucalc.plan.step_rates import ABOVE
from gpucalc.plan.work import Device
from gpucalc.spec.hardware import Cluster


def step_time(
    graph: Graph, layout: Layout, recipe: Recipe, cluster: Cluster, *, simulated: bool = False
) -> Line:
    """Seconds of one optimizer step; the children add up to it.

    `simulated` runs the pipeline's schedule over its stages as they are; otherwise the bubble is the
    closed form, which takes all stages for the slowest one (what a search and columns use).
    With several GPU kinds every micro-batch waits for the slowest, so the slowest pool gives the time.
    """
    steps = [
        _pool_step(graph, layout, recipe, cluster, index, simulated=simulated)
        for index in range(len(cluster.pools))
    ]
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
    """The item with the largest time; of columns, the one with the largest sum."""
    weights = [value if is_scalar(value) else float(value.sum()) for value in values]
    return items[max(range(len(items)), key=weights.__getitem__)]


def _pool_step(
    graph: Graph, layout: Layout, recipe: Recipe, cluster: Cluster, pool: int, *, simulated: bool
) -> Line:
    device = Device.of(cluster.pools[pool].gpu, cluster.pools[pool].kernels, recipe)
    links = Links(cluster)
    held: tuple[Stage, ...] = ()
    layers: dict[int, LayerTime] = {}
    by_stage: dict[Any, StageTime] = {}
    if graph.network is not None and not graph.stacks:
        times = [whole_network(graph, layout, recipe, device)]
    else:
        held = stages(graph, pp=layout.pp, vpp=layout.vpp)
        for stage in held:
            key = composition(stage)
            if key not in by_stage:
                by_stage[key] = micro_batch_time(graph, stage, layout, recipe, device, links, layers)
        times = list(by_stage.values())
    worst: StageTime = _slowest(times, [time.micro_batch_s for time in times])
    count = layout.micro_batches
    parts = [
        compute(name, f.repeated_s, each_s=total("micro_batch", tuple(lines), unit="s"), times=count)
        for name, lines in worst.parts().items()
        if lines
    ]
    parts = [_with_children(part) for part in parts]
    if recipe.reference_model:  # the frozen copy reads every sequence too
        parts += [replace(part, name="reference_forward") for part in parts if part.name == "forward"]
    micro_batch: Num = times[0].micro_batch_s
    for time in times[1:]:
        micro_batch = maximum(micro_batch, time.micro_batch_s)
    if not is_scalar(layout.pp) or layout.pp > 1:
        ideal = Line("micro_batch", micro_batch, "s", Kind.MODELLED, source=ABOVE)
        bubble = (
            closed_bubble(layout, ideal) if layout.schedule != "zero-bubble" else zero_bubble(layout, worst)
        )
        if simulated and layout.schedule != "zero-bubble":
            by_rank = [by_stage[composition(stage)] for stage in held]
            bubble = simulated_bubble(graph, by_rank, layers, layout, recipe, bubble)
        parts += [bubble, pipeline_messages(graph, layout, recipe, links)]
    parts.extend(data_parallel_lines(worst, layout, recipe, links))
    parts.extend(offload_lines(graph, worst, layout, recipe, device))
    parts.append(optimizer_line(worst.stage, layout, recipe, device, cluster.gpus_per_node))
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
    """What takes most of the step: compute, memory bandwidth, link, latency or bubble."""
    sums: dict[str, float] = {
        "compute": 0.0,
        "memory bandwidth": 0.0,
        "link": 0.0,
        "latency": 0.0,
        "bubble": 0.0,
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
        elif part.name == "launch":
            sums["latency"] += part.value
        elif part.name == "optimizer":
            sums["memory bandwidth"] += part.value
        else:
            moved = sum(
                line.value * _repeats(part, run)
                for run in _runs(part)
                for line in run.children[0].children
                if line.name == "elementwise"
            )
            sums["memory bandwidth"] += moved
            sums["compute"] += part.value - moved
    return max(sums, key=sums.__getitem__)


def _runs(part: Line) -> tuple[Line, ...]:
    return tuple(run for run in part.children[0].children if run.children)


def _repeats(part: Line, run: Line) -> float:
    """How often a run's single layer counts in the whole step."""
    return float(part.inputs["times"] * run.inputs.get("times", 1))
