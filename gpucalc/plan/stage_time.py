"""Seconds of one stage's micro-batch: its layers, head, launches and the waits inside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpucalc.formulas import comm
from gpucalc.formulas import compute as f
from gpucalc.formulas import memory as mem
from gpucalc.graph import Attention, Block, Graph, Moe, Stack
from gpucalc.line import Line, compute, total
from gpucalc.num import Num, is_scalar, maximum, where
from gpucalc.plan.device import Device
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.links import Links
from gpucalc.plan.stages import LayerRun, Params, Stage, block_tensors
from gpucalc.plan.step_rates import (
    ASYNC_HIDDEN,
    CONTENTION,
    EXCHANGE_PAIRED,
    GRADIENT_HOOK_CALLS,
    RING_OVERLAP,
    TENSOR_EXPOSED,
    TENSOR_HIDDEN,
    WEIGHT_HOOK_CALLS,
)
from gpucalc.plan.work import layer_work
from gpucalc.plan.work_head import head_work
from gpucalc.plan.work_inputs import convolution_traffic
from gpucalc.plan.work_lines import LayerWork, Shape


@dataclass(slots=True)
class StageTime:
    """One stage's micro-batch, in seconds by kind of work."""

    stage: Stage
    forward: list[Line] = field(default_factory=list)
    backward: list[Line] = field(default_factory=list)
    recompute: list[Line] = field(default_factory=list)
    tensor: list[Line] = field(default_factory=list)
    context: list[Line] = field(default_factory=list)
    expert: list[Line] = field(default_factory=list)
    launched: Num = 0
    launch: Line | None = None
    gather: Line | None = None

    def parts(self) -> dict[str, list[Line]]:
        """The parts of a micro-batch, by name."""
        return {
            "forward": self.forward,
            "backward": self.backward,
            "recompute": self.recompute,
            "launch": [self.launch] if self.launch is not None else [],
            "tensor_parallel": self.tensor,
            "context_parallel": self.context,
            "expert_parallel": self.expert,
        }

    @property
    def device_s(self) -> Num:
        """Seconds of computation."""
        return value_of(self.forward) + value_of(self.backward) + value_of(self.recompute)

    @property
    def busy_s(self) -> Num:
        """Seconds the device computes or waits for other ranks."""
        return self.device_s + value_of(self.tensor) + value_of(self.context) + value_of(self.expert)

    @property
    def micro_batch_s(self) -> Num:
        """Seconds of one micro-batch."""
        result: Num = 0.0
        for lines in self.parts().values():
            result = result + value_of(lines)
        return result


def value_of(lines: list[Line]) -> Num:
    """Seconds of these lines together."""
    result: Num = 0.0
    for line in lines:
        result = result + line.value
    return result


def rank_params(params: Params, layout: Layout) -> tuple[Num, Num]:
    """Dense and expert parameters one rank holds before any sharding over data-parallel ranks."""
    return (
        mem.dense_rank_params(sharded=params.sharded, replicated=params.replicated, tp=layout.tp),
        mem.expert_rank_params(expert=params.expert, ep=layout.ep, etp=layout.etp),
    )


def composition(stage: Stage) -> Any:
    """What two stages of the same time have in common."""
    return tuple((id(run.block), run.count) for run in stage.layers), stage.first, stage.last


def stack_shape(graph: Graph, stack: Stack, layout: Layout, recipe: Recipe) -> Shape:
    """Tokens, widths and types that a stack of layers computes with on one rank."""
    length: Num = stack.tokens if stack.tokens is not None else recipe.seq_len
    memory = length
    for other in graph.stacks:
        if other.role == "encoder" and other is not stack:
            memory = other.tokens if other.tokens is not None else recipe.seq_len
    cp = layout.cp if stack.tokens is None else 1
    return Shape(
        tokens=layout.micro_batch * length / cp,
        sequences=layout.micro_batch,
        seq_len=length,
        memory_len=memory,
    )


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One layer of a kind: its work, and its communication over each kind of link."""

    work: LayerWork
    tensor: Line | None
    context: Line | None
    expert: Line | None

    def seconds(self, recipe: Recipe) -> tuple[Num, Num]:
        """Forward and backward of one micro-batch, recomputation with backward."""
        again = self.work.recompute(recipe)
        ahead = self.work.forward().value
        back = self.work.backward().value + (again.value if again is not None else 0)
        runs = 3 if recipe.recompute == "full" else 2
        for line, share in ((self.tensor, 1 / runs), (self.context, 1 / 3), (self.expert, 1 / runs)):
            if line is not None:
                ahead = ahead + line.value * share
                back = back + line.value * (1 - share)
        return ahead, back


def _layer_time(
    graph: Graph, run: LayerRun, layout: Layout, recipe: Recipe, device: Device, links: Links
) -> LayerTime:
    shape = stack_shape(graph, run.stack, layout, recipe)
    work = layer_work(run.block, shape, layout, recipe, device)
    return LayerTime(
        work,
        _tensor_parallel(run.block, shape, layout, recipe, links),
        _context_parallel(run.block, work, shape, layout, recipe, links),
        _expert_parallel(run.block, work, shape, layout, recipe, links),
    )


def micro_batch_time(
    graph: Graph,
    stage: Stage,
    layout: Layout,
    recipe: Recipe,
    device: Device,
    links: Links,
    layers: dict[int, LayerTime],
) -> StageTime:
    """One stage's micro-batch; `layers` keeps the times of layers between stages."""
    time = StageTime(stage)
    for run in stage.layers:
        layer = layers.get(id(run.block))
        if layer is None:
            layer = layers[id(run.block)] = _layer_time(graph, run, layout, recipe, device, links)
        _add(time, layer.work, run.block.name, run.count, recipe)
        for lines, line in (
            (time.tensor, layer.tensor),
            (time.context, layer.context),
            (time.expert, layer.expert),
        ):
            if line is not None:
                lines.append(compute(run.block.name, f.repeated_s, each_s=line, times=run.count))
    trunk = stack_shape(graph, graph.trunk, layout, recipe)
    if stage.first:
        inputs = tuple(graph.linears) + tuple(lin for stack in graph.stacks for lin in stack.inputs)
        if graph.embedding is not None:
            inputs += tuple(graph.embedding.projection)
        if inputs:
            work = head_work(0, 0, inputs, trunk.tokens, layout, recipe, device)
            convolution_traffic(work, graph.trunk, trunk.tokens, recipe, device)
            _add(time, work, "inputs", 1, recipe, checkpointed=bool(graph.trunk.convolutions))
        if stage.embedding.total and recipe.adapters is None and "embedding" not in recipe.frozen:
            time.backward.append(_embedding_gradient(stage, layout, recipe, device))
    if stage.last and graph.head is not None and (graph.head.vocab or graph.head.linears):
        head = graph.head
        rows = trunk.tokens if head.vocab else layout.micro_batch
        work = head_work(head.hidden, head.vocab, head.linears, rows, layout, recipe, device)
        _add(time, work, "head", 1, recipe, checkpointed=False)
    kernels = 0 if "full" in recipe.cuda_graphs else _all_calls(time.launched, recipe)
    kernels = kernels + _hook_calls(stage, recipe)
    host = compute("host", f.launch_s, kernels=kernels, kernel_launch_s=device.launch)
    time.launch = compute("launch", f.exposed_launch_s, device_s=time.busy_s, host_s=host)
    return time


def _embedding_gradient(stage: Stage, layout: Layout, recipe: Recipe, device: Device) -> Line:
    """The token table's gradient, as large as the table however few tokens a micro-batch has."""
    table, _ = rank_params(stage.embedding, layout)
    added = 1 if recipe.framework == "megatron" else where(layout.micro_batches > 1, 1, 0)
    moved = compute(
        "bytes",
        f.embedding_gradient_bytes,
        params=table,
        element_bytes=recipe.compute_bytes,
        gradient_bytes=recipe.gradient_bytes,
        accumulates=added,
    )
    return _times("embedding", device.move("embedding_gradient", moved), 1)


def _all_calls(forward: Num, recipe: Recipe) -> Num:
    """Kernels of a micro-batch: backward launches twice what forward does, recomputation once more."""
    return forward * (4 if recipe.recompute == "full" else 3)


def _hook_calls(stage: Stage, recipe: Recipe) -> int:
    """Host time of DeepSpeed's hooks over a micro-batch, in kernel launches.

    Stage 2 handles every gradient as it comes, stage 3 also fetches and frees every weight each way.
    """
    if recipe.engine_stage < 2:
        return 0
    tensors = sum(run.count * block_tensors(run.block) for run in stage.layers)
    each = GRADIENT_HOOK_CALLS if recipe.adapters is None else 0
    if recipe.engine_stage == 3:
        each += WEIGHT_HOOK_CALLS * (3 if recipe.recompute == "full" else 2)
    return tensors * each


def _add(
    time: StageTime, work: LayerWork, name: str, count: int, recipe: Recipe, *, checkpointed: bool = True
) -> None:
    time.forward.append(_times(name, work.forward(), count))
    time.backward.append(_times(name, work.backward(), count))
    again = work.recompute(recipe) if checkpointed else None
    if again is not None:
        time.recompute.append(_times(name, again, count))
    time.launched = time.launched + work.launched(recipe.cuda_graphs) * count


def _times(name: str, each: Line, count: int) -> Line:
    line = compute(name, f.repeated_s, each_s=each, times=count)
    return Line(name, line.value, "s", line.kind, formula=line.formula, inputs=line.inputs, children=(each,))


def _tensor_parallel(block: Block, shape: Shape, layout: Layout, recipe: Recipe, links: Links) -> Line | None:
    """Activations summed over tensor-parallel ranks: once per mixer and feed-forward part, each way."""
    if is_scalar(layout.tp) and layout.tp == 1:
        return None
    parts = block.parts
    hidden = block.hidden
    reductions: Num = 0
    for part in parts[: 1 if block.parallel else None]:
        # Experts of whole width receive their tokens by exchange, not by gathering; divided ones gather
        # them after it, a copy for each expert a token chose.
        reductions = reductions + (
            where(layout.etp > 1, part.top_k, where(layout.sequence_parallel, 0, 1))
            if isinstance(part, Moe)
            else 1
        )
    message = compute(
        "message",
        comm.tensor_parallel_message_bytes,
        tokens=shape.tokens,
        hidden=hidden,
        element_bytes=4 if recipe.autocast else recipe.activation_bytes,
    )
    group = {"ranks": layout.tp, "stride": 1}
    reduce = links.collective("all_reduce", "all_reduce", message, **group)
    gather = links.collective("all_gather", "all_gather", message, **group)
    scatter = links.collective("reduce_scatter", "reduce_scatter", message, **group)
    again = 1 if recipe.recompute == "full" else 0
    return compute(
        "tensor_parallel",
        comm.tensor_parallel_s,
        all_reduce_s=reduce,
        all_gather_s=gather,
        reduce_scatter_s=scatter,
        sequence_parallel=layout.sequence_parallel,
        reductions=reductions,
        passes=2 + again,
        hidden_share=_tensor_hidden(recipe),
    )


def _tensor_hidden(recipe: Recipe) -> Line:
    """Share of tensor-parallel gathers and scatters that runs beside the products they feed."""
    if not recipe.tp_overlap:
        return TENSOR_EXPOSED
    return TENSOR_HIDDEN if recipe.framework == "megatron" else ASYNC_HIDDEN


def _context_parallel(
    block: Block, work: LayerWork, shape: Shape, layout: Layout, recipe: Recipe, links: Links
) -> Line | None:
    """Keys and values passed around the context-parallel ring, beside attention."""
    part = block.mixer
    if not isinstance(part, Attention) or (is_scalar(layout.cp) and layout.cp == 1):
        return None
    width = maximum(part.kv_heads / layout.tp, 1) * (part.qk_dim + part.v_dim)
    message = compute(
        "message",
        comm.ring_bytes,
        tokens=shape.tokens,
        kv_width=width,
        element_bytes=recipe.activation_bytes,
        cp=layout.cp,
    )
    ring = links.collective("ring", "all_gather", message, ranks=layout.cp, stride=layout.tp)
    attention = total("attention", (*work.attention, *work.attention_back), unit="s")
    # Forward passes keys and values once; backward passes them and their gradients.
    return compute(
        "context_parallel",
        comm.exposed_s,
        communication_s=compute("ring", f.repeated_s, each_s=ring, times=3),
        compute_s=attention,
        overlap=RING_OVERLAP,
        contention=CONTENTION,
    )


def _expert_parallel(
    block: Block, work: LayerWork, shape: Shape, layout: Layout, recipe: Recipe, links: Links
) -> Line | None:
    """Tokens sent to their experts and back, forward and backward."""
    part = block.ffn
    if not isinstance(part, Moe) or (is_scalar(layout.ep) and layout.ep == 1):
        return None
    load: dict[str, Any] = {
        "tokens": recipe.expert_imbalance * shape.tokens / layout.tp * layout.etp,
        "hidden": part.latent or part.hidden,
        "element_bytes": recipe.activation_bytes,
    }
    group: dict[str, Any] = {"ranks": layout.ep, "stride": layout.etp}
    if recipe.moe_dispatcher == "deepep":
        exchange = links.dispatch("dispatch", top_k=part.top_k, **load, **group)
    else:
        message = compute("message", comm.dispatch_bytes, copies=part.top_k, away=1, **load)
        exchange = links.all_to_all("dispatch", message, **group)
    if not is_scalar(layout.ep):
        exchange = compute("dispatch", f.repeated_s, each_s=exchange, times=where(layout.ep > 1, 1, 0))
    again = 2 if recipe.recompute == "full" else 0
    exchanges = compute("expert_parallel", f.repeated_s, each_s=exchange, times=4 + again)
    if not recipe.ep_overlap:
        return exchanges
    return compute(
        "expert_parallel",
        comm.paired_exchange_s,
        communication_s=exchanges,
        compute_s=total("beside", (work.forward(), work.backward()), unit="s"),
        paired_share=EXCHANGE_PAIRED,
        contention=CONTENTION,
    )
