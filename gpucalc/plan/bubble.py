"""Seconds a pipeline waits: the closed form of each schedule, the simulation, and its messages."""

from __future__ import annotations

from collections.abc import Sequence

from gpucalc.formulas import comm, pipeline
from gpucalc.formulas import compute as f
from gpucalc.graph import Graph
from gpucalc.line import Kind, Line, compute
from gpucalc.num import Num, where
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.links import Links
from gpucalc.plan.pipeline_sim import simulate
from gpucalc.plan.rules import DUAL_PIPES
from gpucalc.plan.stage_time import LayerTime, StageTime, stack_shape, value_of
from gpucalc.plan.stages import chunk_layers
from gpucalc.plan.step_rates import ABOVE

# Schedules that compute weight gradients apart from those of the inputs.
SPLIT_SCHEDULES = ("zero-bubble", "zb-h2", *DUAL_PIPES)


def closed_bubble(layout: Layout, micro_batch: Line) -> Line:
    """Idle time if all stages took as long as the slowest."""
    return compute(
        "bubble",
        pipeline.bubble_s,
        ideal_s=compute("ideal", f.repeated_s, each_s=micro_batch, times=layout.micro_batches),
        overhead=compute(
            "overhead",
            pipeline.bubble_overhead,
            pp=layout.pp,
            vpp=layout.vpp,
            micro_batches=layout.micro_batches,
        ),
    )


def split_bubble(layout: Layout, worst: StageTime) -> Line:
    """Idle time of schedules that compute weight gradients apart, all stages as long as the slowest."""
    weights: Num = 0.0
    for line in worst.backward:
        for part in line.children[0].children:
            products = (p.value for p in part.children if p.name.endswith("_weight_gradient"))
            weights = weights + line.inputs["times"] * sum(products)
    forward = value_of(worst.forward)
    if layout.schedule in DUAL_PIPES:  # every rank has two stages
        return compute(
            "bubble",
            pipeline.dual_pipe_bubble_s,
            pp=layout.pipeline_stages,
            forward_s=_seconds("forward", forward / 2),
            backward_s=_seconds("backward", (worst.micro_batch_s - forward) / 2),
            weight_gradient_s=_seconds("weight_gradient", weights / 2),
        )
    fuller = layout.schedule == "zb-h2"
    return compute(
        "bubble",
        pipeline.fuller_zero_bubble_s if fuller else pipeline.zero_bubble_s,
        pp=layout.pp,
        forward_s=_seconds("forward", forward),
        input_gradient_s=_seconds("input_gradient", worst.micro_batch_s - forward - weights),
        weight_gradient_s=_seconds("weight_gradient", weights),
    )


def _seconds(name: str, value: Num) -> Line:
    return Line(name, value, "s", Kind.MODELLED, source=ABOVE)


def simulated_bubble(
    graph: Graph,
    by_rank: list[StageTime],
    layers: Sequence[dict[int, LayerTime]],
    layout: Layout,
    recipe: Recipe,
    closed: Line,
) -> Line:
    """Idle time of the slowest rank when every stage takes its own time.

    layers: times of the layers of every rank, which differ where the ranks' cards do.
    """
    ahead, back = _chunk_seconds(graph, by_rank, layers, layout, recipe)
    found = simulate(ahead, back, pp=layout.pp, vpp=layout.vpp, micro_batches=layout.micro_batches)
    return Line(
        "bubble",
        found.bubble_s,
        "s",
        closed.kind,
        source="event simulation of the schedule over forward and backward times of every stage",
        note=f"simulated; {closed.value:.4g} s if all stages took as long as the slowest",
    )


def _chunk_seconds(
    graph: Graph,
    by_rank: list[StageTime],
    layers: Sequence[dict[int, LayerTime]],
    layout: Layout,
    recipe: Recipe,
) -> tuple[list[float], list[float]]:
    """Forward and backward seconds of each chunk of layers, what a rank does beside them included.

    Embedding, encoders beside the trunk and their inputs belong to the first chunk, the head to the
    last; time the host adds is spread over the chunks of its rank.
    """
    seconds = {
        id(kinds): {key: layer.seconds(recipe) for key, layer in kinds.items()} for kinds in layers
    }
    each = [seconds[id(kinds)] for kinds in layers]
    counts = chunk_layers(graph, pp=layout.pp, vpp=layout.vpp, sizes=layout.stage_layers)
    ahead = [0.0] * len(counts)
    back = [0.0] * len(counts)
    for chunk, held in enumerate(counts):
        for index, count in held.items():
            forward, backward = each[chunk % layout.pp][id(graph.trunk.blocks[index])]
            ahead[chunk] += count * forward
            back[chunk] += count * backward
    for rank, time in enumerate(by_rank):
        own = range(rank, len(counts), layout.pp)
        beside = [0.0, 0.0]
        for run in time.stage.layers:
            if not run.in_trunk:
                both = each[rank][id(run.block)]
                beside = [b + run.count * s for b, s in zip(beside, both, strict=True)]
        for name in ("inputs", "embedding", "head"):
            beside[0] += sum(line.value for line in time.forward if line.name == name)
            beside[1] += sum(line.value for line in time.backward if line.name == name)
        place = 0 if time.stage.first else len(counts) - 1
        ahead[place] += beside[0]
        back[place] += beside[1]
        busy = sum(ahead[chunk] + back[chunk] for chunk in own)
        slower = time.micro_batch_s / busy if busy else 1.0
        for chunk in own:
            ahead[chunk] *= slower
            back[chunk] *= slower
    return ahead, back


def pipeline_messages(graph: Graph, layout: Layout, recipe: Recipe, links: Links) -> Line:
    """Activations and their gradients handed from stage to stage."""
    shape = stack_shape(graph, graph.trunk, layout, recipe)
    message = compute(
        "message",
        comm.stage_message_bytes,
        tokens=shape.tokens,
        hidden=graph.trunk.hidden,
        element_bytes=recipe.activation_bytes,
        divided_by=where(layout.sequence_parallel, layout.tp, 1),
    )
    send = links.send("message", message, world=layout.world, stage_ranks=layout.world / layout.pp)
    # Interleaving sends vpp times as often but beside computation, as DualPipe does; plain 1F1B waits for
    # both directions.
    each = 1 if layout.schedule in DUAL_PIPES else where(layout.vpp == 1, 2, 1)
    return compute("pipeline_messages", f.repeated_s, each_s=send, times=each * layout.micro_batches)
