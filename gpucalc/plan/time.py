"""Seconds of one optimizer step: what the slowest stage computes, waits for and sends.

`step_time` gives a tree whose parts add up; `throughput` turns it into rates and utilisation;
`binding` says which kind of part is largest.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from gpucalc.errors import UnsupportedModel
from gpucalc.formulas import comm, pipeline
from gpucalc.formulas import compute as f
from gpucalc.graph import Attention, Block, Graph, Linear, Moe, Shard, Stack, StateMixer
from gpucalc.line import Kind, Line, compute, total, worst_kind
from gpucalc.num import Num, maximum, where
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.links import Links, is_scalar
from gpucalc.plan.pipeline_sim import simulate
from gpucalc.plan.stages import LayerRun, Params, Stage, block_tensors, chunk_layers, stages
from gpucalc.plan.work import (
    SCAN_CHUNK,
    WHOLE_RECOMPUTE,
    Device,
    LayerWork,
    Shape,
    attention_pairs,
    has_experts,
    head_work,
    layer_work,
)
from gpucalc.spec.hardware import Cluster

_STREAMS = "design of the framework: gathers and reductions run on streams of their own"
_ABOVE = "one micro-batch of the slowest stage: the sum of this step's other lines"
_RUNS = "fitted to the published training runs, groups of equal weight"
_SET = "set, and checked on the published training runs"
# Each constant was sought again with every source left out in turn (mean |log error|, sources of equal
# weight). The optimum stays for the efficiencies inside a step on A100 (0.82) and on B200 in fp8 (0.8), the
# direct share (0.65), host calls of experts (280) and GPTQ's unpacking. It lies at 0.65 to 0.7 on H100,
# 0.95 to 1.0 on V100, 0.7 to 0.85 on GB200 and GB300, 0.65 to 0.82 on Ada, 0.5 to 0.55 for portable
# attention and 5 to 6 image bytes a clock, whichever source is missing; the values here are in or next to
# these ranges. V100's launch (4.5 to 6 us), the calls per tensor (0 to 40) and eager calls per layer (120
# to 200) lean on Transformers' BERT runs, whose median error is 0.3 when they are left out. One source
# alone knows B200 in 16 bits (0.52 without it), MI300X, the first FlashAttention, experts' biases, state
# mixers and DeepSpeed's hooks.


def _known(name: str, value: float, unit: str, source: str, kind: Kind = Kind.MODELLED) -> Line:
    return Line(name, value, unit, kind, source=source)


# Share of the computation beside which a framework runs its data-parallel communication.
OVERLAP = {
    framework: _known("overlap", share, "fraction", _STREAMS)
    for framework, share in {
        "ddp": 0.9,
        "hf": 0.9,
        "fsdp": 1.0,
        "torchtitan": 1.0,
        "megatron": 0.9,
        "deepspeed": 0.7,
    }.items()
}
NO_OVERLAP = _known("overlap", 0.0, "fraction", "run.overlap false: every collective is waited for")
RING_OVERLAP = _known(
    "overlap", 1.0, "fraction", "ring attention sends the next block beside the current one"
)
# Share of hidden communication that still shows, as multiprocessors and memory bandwidth it takes away.
CONTENTION = _known(
    "contention",
    0.25,
    "fraction",
    f"{_SET}; NCCL takes 16 to 32 of an H100's 132 multiprocessors",
)
NETWORK_CONTENTION = _known(
    "contention", 0.05, "fraction", f"{_SET}: 0 to 0.1 do as well; over a network NCCL opens fewer channels"
)
COPY_CONTENTION = _known("contention", 0.0, "fraction", "copy engines take no multiprocessor")
# Share of sequence-parallel gathers and scatters that runs beside the products they feed.
TENSOR_HIDDEN = _known(
    "hidden_share", 0.75, "fraction", f"{_SET}: TransformerEngine's chunked overlap, in recipes from 2024 on"
)
TENSOR_EXPOSED = _known("hidden_share", 0.0, "fraction", "gathers and scatters wait for one another")
HOST_BANDWIDTH = _known(
    "host_memory_bandwidth",
    250e9,
    "bytes/s",
    "two sockets of eight DDR4 or DDR5 channels, what an optimizer step reaches of them",
    Kind.ASSUMED,
)
DEFAULT_PCIE_GENERATION = 4
# Winograd and FFT convolutions multiply less than the direct form counts; tensor cores run the direct form.
DIRECT_SHARE = _known("direct_share", 0.68, "fraction", f"{_RUNS}: fp32 convolutions on V100")
WHOLE_SHARE = _known("direct_share", 1.0, "fraction", "tensor-core convolutions take the direct form")
# Passes of the optimizer over its states: for-each kernels read and write them several times. Fitted to
# runs on small batches; 1 without NVIDIA's examples, 4 without DeepSpeed's.
OPTIMIZER_PASSES = {"eager": 1.75, "compiled": 1.75, "fused": 1.0}
# Host time of the update of one tensor, in units of a kernel launch: kernels, casts, unscaling and clipping.
FOREACH_YEAR = 2023
TENSOR_CALLS = {
    "adamw": 20, "adamw-unfused": 20, "adam": 20, "adafactor": 40, "adamw-8bit": 12,
    "sgd-momentum": 8, "sgd": 6,
}  # fmt: skip
# DeepSpeed's Python hooks per tensor, in kernel launches; set to Qwen's stage 3 runs at 256 to 1,024 tokens,
# whose steps take the same time whatever their length. Only the sum of the two is seen in them.
GRADIENT_HOOK_CALLS = 40
WEIGHT_HOOK_CALLS = 40
# What one multiprocessor moves per clock in image networks' elementwise kernels.
IMAGE_BYTES_PER_CLOCK = _known(
    "bytes_per_clock",
    6.0,
    "bytes",
    f"{_RUNS}: on image networks A100 and H100 gain less over V100 and RTX 3090 than their memory does",
)
# Image networks: passes over the tensors of the layers that multiply nothing, backward to forward.
NETWORK_BACKWARD = 2.0


@dataclass(slots=True)
class _StageTime:
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
        return _value(self.forward) + _value(self.backward) + _value(self.recompute)

    @property
    def busy_s(self) -> Num:
        """Seconds the device computes or waits for other ranks."""
        return self.device_s + _value(self.tensor) + _value(self.context) + _value(self.expert)

    @property
    def micro_batch_s(self) -> Num:
        """Seconds of one micro-batch."""
        result: Num = 0.0
        for lines in self.parts().values():
            result = result + _value(lines)
        return result


def _value(lines: list[Line]) -> Num:
    result: Num = 0.0
    for line in lines:
        result = result + line.value
    return result


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
    layers: dict[int, _LayerTime] = {}
    by_stage: dict[Any, _StageTime] = {}
    if graph.network is not None and not graph.stacks:
        times = [_network_time(graph, layout, recipe, device)]
    else:
        held = stages(graph, pp=layout.pp, vpp=layout.vpp)
        for stage in held:
            key = _composition(stage)
            if key not in by_stage:
                by_stage[key] = _stage_time(graph, stage, layout, recipe, device, links, layers)
        times = list(by_stage.values())
    worst: _StageTime = _slowest(times, [time.micro_batch_s for time in times])
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
        ideal = Line("micro_batch", micro_batch, "s", Kind.MODELLED, source=_ABOVE)
        bubble = _bubble(layout, ideal) if layout.schedule != "zero-bubble" else _zero_bubble(layout, worst)
        if simulated and layout.schedule != "zero-bubble":
            by_rank = [by_stage[_composition(stage)] for stage in held]
            bubble = _simulated_bubble(graph, by_rank, layers, layout, recipe, bubble)
        parts += [bubble, _messages(graph, layout, recipe, links)]
    parts.extend(_data_parallel(worst, layout, recipe, links))
    parts.extend(_offload(graph, worst, layout, recipe, device))
    parts.append(_optimizer(worst.stage, layout, recipe, device, cluster.gpus_per_node))
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


def _composition(stage: Stage) -> Any:
    """What two stages of the same time have in common."""
    return tuple((id(run.block), run.count) for run in stage.layers), stage.first, stage.last


def _shape(graph: Graph, stack: Stack, layout: Layout, recipe: Recipe) -> Shape:
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
class _LayerTime:
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
) -> _LayerTime:
    shape = _shape(graph, run.stack, layout, recipe)
    work = layer_work(run.block, shape, layout, recipe, device)
    return _LayerTime(
        work,
        _tensor_parallel(run.block, shape, layout, recipe, links),
        _context_parallel(run.block, work, shape, layout, recipe, links),
        _expert_parallel(run.block, shape, layout, recipe, links),
    )


def _stage_time(
    graph: Graph,
    stage: Stage,
    layout: Layout,
    recipe: Recipe,
    device: Device,
    links: Links,
    layers: dict[int, _LayerTime],
) -> _StageTime:
    """One stage's micro-batch; `layers` keeps the times of layers between stages."""
    time = _StageTime(stage)
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
    trunk = _shape(graph, graph.trunk, layout, recipe)
    if stage.first:
        inputs = tuple(graph.linears) + tuple(lin for stack in graph.stacks for lin in stack.inputs)
        if graph.embedding is not None:
            inputs += tuple(graph.embedding.projection)
        if inputs:
            work = head_work(0, 0, inputs, trunk.tokens, layout, recipe, device)
            _add(time, work, "inputs", 1, recipe, checkpointed=False)
    if stage.last and graph.head is not None and (graph.head.vocab or graph.head.linears):
        head = graph.head
        rows = trunk.tokens if head.vocab else layout.micro_batch
        work = head_work(head.hidden, head.vocab, head.linears, rows, layout, recipe, device)
        _add(time, work, "head", 1, recipe, checkpointed=False)
    kernels = _all_calls(time.launched, recipe) + _hook_calls(stage, recipe)
    host = compute("host", f.launch_s, kernels=kernels, kernel_launch_s=device.launch)
    time.launch = compute("launch", f.exposed_launch_s, device_s=time.busy_s, host_s=host)
    return time


def _all_calls(forward: Num, recipe: Recipe) -> Num:
    """Kernels of a micro-batch: backward launches twice what forward does, recomputation once more."""
    return forward * (4 if recipe.recompute == "full" else 3)


def _hook_calls(stage: Stage, recipe: Recipe) -> int:
    """Host time of DeepSpeed's hooks over a micro-batch, in kernel launches.

    Stage 2 handles every gradient as it comes, stage 3 also fetches and frees every weight each way.
    """
    if recipe.hook_stage < 2:
        return 0
    tensors = sum(run.count * block_tensors(run.block) for run in stage.layers)
    each = GRADIENT_HOOK_CALLS if recipe.adapters is None else 0
    if recipe.hook_stage == 3:
        each += WEIGHT_HOOK_CALLS * (3 if recipe.recompute == "full" else 2)
    return tensors * each


def _add(
    time: _StageTime, work: LayerWork, name: str, count: int, recipe: Recipe, *, checkpointed: bool = True
) -> None:
    time.forward.append(_times(name, work.forward(), count))
    time.backward.append(_times(name, work.backward(), count))
    again = work.recompute(recipe) if checkpointed else None
    if again is not None:
        time.recompute.append(_times(name, again, count))
    time.launched = time.launched + work.calls * count


def _times(name: str, each: Line, count: int) -> Line:
    line = compute(name, f.repeated_s, each_s=each, times=count)
    return Line(name, line.value, "s", line.kind, formula=line.formula, inputs=line.inputs, children=(each,))


# --- communication of a layer ----------------------------------------------------------------------


def _tensor_parallel(block: Block, shape: Shape, layout: Layout, recipe: Recipe, links: Links) -> Line | None:
    """Activations summed over tensor-parallel ranks: once per mixer and feed-forward part, each way."""
    if is_scalar(layout.tp) and layout.tp == 1:
        return None
    parts = [part for part in (block.mixer, block.cross, block.ffn) if part is not None]
    hidden = parts[0].hidden
    reductions: Num = 0
    for part in parts[: 1 if block.parallel else None]:
        # Experts of whole width receive their tokens by exchange, not by gathering.
        reductions = reductions + (
            where(layout.etp > 1, 1, where(layout.sequence_parallel, 0, 1)) if isinstance(part, Moe) else 1
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
        hidden_share=(
            TENSOR_HIDDEN
            if recipe.framework == "megatron" and recipe.year >= 2024 and recipe.overlap
            else TENSOR_EXPOSED
        ),
    )


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


def _expert_parallel(block: Block, shape: Shape, layout: Layout, recipe: Recipe, links: Links) -> Line | None:
    """Tokens sent to their experts and back, forward and backward."""
    part = block.ffn
    if not isinstance(part, Moe) or (is_scalar(layout.ep) and layout.ep == 1):
        return None
    load: dict[str, Any] = {
        "tokens": shape.tokens / layout.tp * layout.etp,
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
    return compute("expert_parallel", f.repeated_s, each_s=exchange, times=4 + again)


# --- communication of a step -----------------------------------------------------------------------


def _bubble(layout: Layout, micro_batch: Line) -> Line:
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


def _zero_bubble(layout: Layout, worst: _StageTime) -> Line:
    """Idle time when weight gradients wait for the pipeline to drain, all stages as long as the slowest."""
    weights: Num = 0.0
    for line in worst.backward:
        for part in line.children[0].children:
            products = (p.value for p in part.children if p.name.endswith("_weight_gradient"))
            weights = weights + line.inputs["times"] * sum(products)
    forward = _value(worst.forward)
    return compute(
        "bubble",
        pipeline.zero_bubble_s,
        pp=layout.pp,
        forward_s=Line("forward", forward, "s", Kind.MODELLED, source=_ABOVE),
        input_gradient_s=Line(
            "input_gradient", worst.micro_batch_s - forward - weights, "s", Kind.MODELLED, source=_ABOVE
        ),
        weight_gradient_s=Line("weight_gradient", weights, "s", Kind.MODELLED, source=_ABOVE),
    )


def _simulated_bubble(
    graph: Graph,
    by_rank: list[_StageTime],
    layers: dict[int, _LayerTime],
    layout: Layout,
    recipe: Recipe,
    closed: Line,
) -> Line:
    """Idle time of the slowest rank when every stage takes its own time."""
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
    graph: Graph, by_rank: list[_StageTime], layers: dict[int, _LayerTime], layout: Layout, recipe: Recipe
) -> tuple[list[float], list[float]]:
    """Forward and backward seconds of each chunk of layers, what a rank does beside them included.

    Embedding, encoders beside the trunk and their inputs belong to the first chunk, the head to the
    last; time the host adds is spread over the chunks of its rank.
    """
    each = {key: layer.seconds(recipe) for key, layer in layers.items()}
    counts = chunk_layers(graph, pp=layout.pp, vpp=layout.vpp)
    ahead = [0.0] * len(counts)
    back = [0.0] * len(counts)
    for chunk, held in enumerate(counts):
        for index, count in held.items():
            forward, backward = each[id(graph.trunk.blocks[index])]
            ahead[chunk] += count * forward
            back[chunk] += count * backward
    for rank, time in enumerate(by_rank):
        own = range(rank, len(counts), layout.pp)
        beside = [0.0, 0.0]
        for run in time.stage.layers:
            if not run.in_trunk:
                beside = [b + run.count * s for b, s in zip(beside, each[id(run.block)], strict=True)]
        for name in ("inputs", "head"):
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


def _messages(graph: Graph, layout: Layout, recipe: Recipe, links: Links) -> Line:
    """Activations and their gradients handed from stage to stage."""
    shape = _shape(graph, graph.trunk, layout, recipe)
    message = compute(
        "message",
        comm.stage_message_bytes,
        tokens=shape.tokens,
        hidden=graph.trunk.hidden,
        element_bytes=recipe.activation_bytes,
        divided_by=where(layout.sequence_parallel, layout.tp, 1),
    )
    send = links.send("message", message, world=layout.world)
    # Interleaving sends vpp times as often but beside computation; plain 1F1B waits for both directions.
    each = where(layout.vpp == 1, 2, 1)
    return compute("pipeline_messages", f.repeated_s, each_s=send, times=each * layout.micro_batches)


def rank_params(params: Params, layout: Layout) -> tuple[Num, Num]:
    """Dense and expert parameters one rank holds before any sharding over data-parallel ranks."""
    return (
        params.sharded / layout.tp + params.replicated,
        params.expert / (layout.ep * layout.etp),
    )


def _expert_replicas(layout: Layout) -> Num:
    """Ranks that hold the same experts."""
    return maximum(layout.world / (layout.pp * layout.ep * layout.etp), 1)


def _trained(stage: Stage, layout: Layout, recipe: Recipe) -> tuple[Num, Num]:
    """Trained parameters of a rank, dense and expert."""
    if recipe.adapters is None:
        return rank_params(stage.params, layout)
    trained: Num = 0
    for run in stage.layers:
        for part in (run.block.mixer, run.block.cross, run.block.ffn):
            for linear in part.linears if part is not None else ():
                if linear.name in recipe.adapters.targets:
                    each = recipe.adapters.rank * (linear.inputs + linear.outputs)
                    trained = trained + run.count * each
    return trained / layout.tp, 0


def _data_parallel(time: _StageTime, layout: Layout, recipe: Recipe, links: Links) -> list[Line]:
    """Gradients reduced and weights gathered over the ranks that hold the same parameters."""
    replicas = layout.dp * layout.cp
    if is_scalar(replicas) and replicas == 1:
        return []
    dense, expert = _trained(time.stage, layout, recipe)
    held_dense, held_expert = _gathered(time.stage, dense, expert, layout, recipe)
    groups = [("dense", dense, held_dense, replicas, layout.tp)]
    if any(has_experts(run.block) for run in time.stage.layers):
        groups.append(("expert", expert, held_expert, _expert_replicas(layout), layout.ep * layout.etp))
    units = max(time.stage.depth, 1)
    lines: list[Line] = []
    for name, trained, held, ranks, stride in groups:
        if is_scalar(ranks) and ranks == 1:
            continue
        lines.append(_group_sync(name, trained, held, ranks, stride, units, layout, recipe, links))
    if not lines:
        return []
    communication = total("communication", tuple(lines), unit="s")
    device = Line("micro_batch_compute", time.device_s, "s", Kind.MODELLED, source=_ABOVE)
    if layout.zero_stage >= 2:
        beside = compute("beside", f.repeated_s, each_s=device, times=layout.micro_batches)
    else:
        # Gradients travel beside the last backward; gathered weights beside the first forward.
        beside = compute("beside", f.shared_s, whole_s=device, share=0.67 if layout.zero_stage == 0 else 1.0)
    return [
        compute(
            "data_parallel",
            comm.exposed_s,
            communication_s=communication,
            compute_s=beside,
            overlap=OVERLAP[recipe.framework] if recipe.overlap else NO_OVERLAP,
            contention=_contention(replicas, layout, links),
            children=(communication,),
        )
    ]


def _contention(ranks: Num, layout: Layout, links: Links) -> Line:
    """What hidden data-parallel communication costs: less where the network sets its pace."""
    nodes = comm.group_nodes(ranks=ranks, stride=layout.tp, domain=links.island)
    if is_scalar(nodes):
        return NETWORK_CONTENTION if nodes > 1 else CONTENTION
    return replace(CONTENTION, value=where(nodes > 1, NETWORK_CONTENTION.value, CONTENTION.value))


def _gathered(stage: Stage, dense: Num, expert: Num, layout: Layout, recipe: Recipe) -> tuple[Num, Num]:
    """Parameters a rank gathers, dense and expert: all at stage 3, else what the optimizer stepped.

    A base that no stage divides (quantised, under DeepSpeed) is never gathered.
    """
    if layout.zero_stage < 3:
        return dense, expert
    if recipe.adapters is not None and not recipe.adapters.base_sharded:
        tables, _ = rank_params(stage.embedding + stage.head, layout)
        return tables + dense, expert
    return rank_params(stage.params, layout)


def _group_sync(
    name: str,
    trained: Num,
    held: Num,
    ranks: Num,
    stride: Num,
    units: int,
    layout: Layout,
    recipe: Recipe,
    links: Links,
) -> Line:
    """Data-parallel traffic of one group of parameters over a step, unit by unit."""
    group = {"ranks": ranks, "stride": stride}
    gradient = compute(
        "gradients", comm.gradient_message_bytes, params=trained / units, element_bytes=recipe.reduce_bytes
    )
    if layout.zero_stage == 0:
        reduce = links.collective("all_reduce", "all_reduce", gradient, **group)
        return compute(name, f.repeated_s, each_s=reduce, times=units)
    weights = compute(
        "weights", comm.weight_message_bytes, params=held / units, element_bytes=recipe.compute_bytes
    )
    scatter = links.collective("reduce_scatter", "reduce_scatter", gradient, **group)
    gather = links.collective("all_gather", "all_gather", weights, **group)
    # Stage 3 gathers for forward and again for backward; from stage 2 on gradients are divided, so every
    # micro-batch reduces them. Stage 1 does both once per step.
    gathers, scatters = 1, 1
    if layout.zero_stage >= 2:
        scatters = layout.micro_batches
    if layout.zero_stage >= 3:
        gathers = layout.micro_batches * (2 if recipe.reshard else 1)
    return compute(
        name,
        comm.sharded_sync_s,
        all_gather_s=gather,
        reduce_scatter_s=scatter,
        gathers=gathers,
        scatters=scatters,
        units=units,
    )


def _host_link(device: Device) -> Line:
    """One-way rate between a GPU and its host: the superchip's link, else PCIe."""
    gpu = device.gpu
    if gpu.c2c_bandwidth is not None:
        both = gpu.c2c_bandwidth.line("host_link")
        return Line("host_link", both.value / 2, both.unit, both.kind, source=both.source, note="one way")
    known = gpu.pcie_gen is not None
    line = compute(
        "host_link",
        f.pcie_bytes_per_s,
        generation=gpu.pcie_gen if known else DEFAULT_PCIE_GENERATION,
        lanes=gpu.pcie_lanes or 16,
    )
    return line if known else replace(line, kind=Kind.ASSUMED, note="PCIe generation not known")


def _offload(graph: Graph, time: _StageTime, layout: Layout, recipe: Recipe, device: Device) -> list[Line]:
    """Copies of offloaded parameters and activations that computation cannot hide."""
    copies: list[Line] = []
    link = _host_link(device) if recipe.offload else None
    if "parameters" in recipe.offload:
        dense, expert = rank_params(time.stage.params, layout)
        moved = compute(
            "bytes",
            comm.weight_message_bytes,
            params=dense / layout.shard + expert / _expert_replicas(layout),
            element_bytes=recipe.compute_bytes,
        )
        copy = compute("parameters", f.host_copy_s, bytes_moved=moved, link_bytes_per_s=link)
        copies.append(compute("parameters", f.repeated_s, each_s=copy, times=2 * layout.micro_batches))
    if "activations" in recipe.offload and time.stage.depth:
        shape = _shape(graph, graph.trunk, layout, recipe)
        moved = compute(
            "bytes",
            f.elementwise_bytes,
            tokens=shape.tokens,
            width=graph.trunk.hidden,
            passes=2 * time.stage.depth,
            element_bytes=recipe.activation_bytes,
        )
        copy = compute("activations", f.host_copy_s, bytes_moved=moved, link_bytes_per_s=link)
        copies.append(compute("activations", f.repeated_s, each_s=copy, times=layout.micro_batches))
    if not copies:
        return []
    computed = compute(
        "compute",
        f.repeated_s,
        each_s=Line("micro_batch_compute", time.device_s, "s", Kind.MODELLED, source=_ABOVE),
        times=layout.micro_batches,
    )
    copied = total("copies", tuple(copies), unit="s")
    return [
        compute(
            "offload",
            comm.exposed_s,
            communication_s=copied,
            compute_s=computed,
            overlap=OVERLAP[recipe.framework],
            contention=COPY_CONTENTION,
            children=(copied,),
        )
    ]


def _optimizer(stage: Stage, layout: Layout, recipe: Recipe, device: Device, ranks_per_node: int) -> Line:
    """Clipping and the update of this rank's share of the parameters."""
    dense, expert = _trained(stage, layout, recipe)
    sharded = layout.zero_stage >= 1
    local = dense / (layout.shard if sharded else 1) + expert / (_expert_replicas(layout) if sharded else 1)
    if "optimizer" in recipe.offload:
        return compute(
            "optimizer",
            f.host_update_s,
            params=local,
            gradient_bytes=recipe.gradient_bytes,
            parameter_bytes=recipe.parameter_bytes,
            state_bytes=recipe.optimizer_bytes,
            link_bytes_per_s=_host_link(device),
            ranks_per_node=ranks_per_node,
            host_bytes_per_s=HOST_BANDWIDTH,
        )
    clip = compute(
        "clip_bytes",
        f.gradient_clip_bytes,
        params=local,
        gradient_bytes=recipe.gradient_bytes,
        passes=6 if recipe.framework == "megatron" else 3,
    )
    update = compute(
        "update_bytes",
        f.optimizer_traffic_bytes,
        params=local,
        gradient_bytes=recipe.gradient_bytes,
        state_bytes=recipe.optimizer_bytes,
        parameter_bytes=recipe.parameter_bytes,
        passes=OPTIMIZER_PASSES[recipe.kernels],
    )
    parts = [device.move("clip", clip), device.move("update", update)]
    calls = _optimizer_calls(stage, recipe)
    if calls:
        # The host is the slower side on the many small tensors of the layers, not on the tables.
        in_layers = sum(run.count * run.params.total for run in stage.layers) / stage.params.total
        device_s = total("device", tuple(parts), unit="s")
        parts.append(
            compute(
                "launch",
                f.exposed_launch_s,
                device_s=compute("layers", f.shared_s, whole_s=device_s, share=in_layers),
                host_s=compute("host", f.launch_s, kernels=calls, kernel_launch_s=device.launch),
            )
        )
    return total("optimizer", tuple(parts), unit="s")


def _optimizer_calls(stage: Stage, recipe: Recipe) -> int:
    """Host time of an optimizer that goes from tensor to tensor, in kernel launches.

    It shows under loss scaling alone, which reads a flag back before every step; otherwise the host is
    ahead. PyTorch updates all tensors at once since 2.0.
    """
    loops = recipe.framework in ("ddp", "hf") and recipe.year < FOREACH_YEAR and recipe.math == "fp16"
    each = TENSOR_CALLS.get(recipe.optimizer, 0)
    if not loops or not each:
        return 0
    return each * sum(run.count * block_tensors(run.block) for run in stage.layers)


# --- networks known by their totals ----------------------------------------------------------------


def _network_time(graph: Graph, layout: Layout, recipe: Recipe, device: Device) -> _StageTime:
    network = graph.network
    assert network is not None
    if not network.forward_flops:
        raise UnsupportedModel(f"{graph.name} is known by its parameters alone, which say nothing of time")
    time = _StageTime(stages(graph, pp=1, vpp=1)[0])
    images = layout.micro_batch
    saved = network.saved_elements or 0.0
    traffic = network.traffic_elements if network.traffic_elements is not None else 3 * saved
    size = recipe.activation_bytes if not recipe.autocast else 2
    for name, lines, products, factor in (
        ("forward", time.forward, 1, 1.0),
        ("backward", time.backward, 2, NETWORK_BACKWARD),
    ):
        flops = compute(
            "flops",
            f.network_flops,
            images=images,
            flops_per_image=network.forward_flops,
            direct_share=DIRECT_SHARE if recipe.math == "fp32" else WHOLE_SHARE,
        )
        # A convolution reads what the one before wrote.
        moved = compute(
            "bytes", f.elementwise_bytes, tokens=images, width=saved, passes=1, element_bytes=size
        )
        convolutions = compute("convolutions", f.gemm_s, flops=flops, bytes_moved=moved, **device.matrix)
        rest = compute(
            "bytes", f.elementwise_bytes, tokens=images, width=traffic, passes=factor, element_bytes=size
        )
        elementwise = _image_traffic("elementwise", rest, device)
        lines.append(total(name, (*(convolutions for _ in range(products)), elementwise), unit="s"))
    kernels = network.layers or 0
    host = compute("host", f.launch_s, kernels=3 * kernels, kernel_launch_s=device.launch)
    time.launch = compute("launch", f.exposed_launch_s, device_s=time.device_s, host_s=host)
    return time


def _image_traffic(name: str, moved: Line, device: Device) -> Line:
    """Elementwise layers of image networks; bound by memory alone where the GPU's clock is not known."""
    gpu = device.gpu
    if gpu.sm_count is None or gpu.boost_clock is None:
        return device.move(name, moved)
    return compute(
        name,
        f.image_traffic_s,
        bytes_moved=moved,
        multiprocessors=gpu.sm_count,
        clock_hz=gpu.boost_clock.line("boost_clock"),
        bytes_per_clock=IMAGE_BYTES_PER_CLOCK,
        **device.traffic,
    )


# --- rates -----------------------------------------------------------------------------------------


def sample_flops(graph: Graph, recipe: Recipe) -> tuple[Num, Num]:
    """Forward FLOPs of one sample, whole model: matrices, attention (causal counted half)."""
    if graph.network is not None and not graph.stacks:
        return graph.network.forward_flops, 0.0
    linear: Num = 0.0
    attention: Num = 0.0
    one = Layout(
        tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1, dp=1, shard=1, zero_stage=0, micro_batch=1, micro_batches=1,
        sequence_parallel=False, schedule="none",
    )  # fmt: skip
    for stack in graph.stacks:
        shape = _shape(graph, stack, one, recipe)
        for index, block in enumerate(stack.blocks):
            layers = stack.count(index)
            for part in (block.mixer, block.cross, block.ffn):
                if part is None:
                    continue
                linear = linear + layers * _linear_flops(part.linears, shape.tokens)
                if isinstance(part, Attention):
                    attention = attention + layers * f.attention_core_flops(
                        sequences=1,
                        heads=part.heads,
                        qk_dim=part.qk_dim,
                        v_dim=part.v_dim,
                        pairs=attention_pairs(part, part is block.cross, shape).value,
                    )
                elif isinstance(part, StateMixer):
                    attention = attention + layers * f.state_mixer_flops(
                        tokens=shape.tokens,
                        heads=part.heads,
                        key_dim=part.key_dim,
                        value_dim=part.value_dim,
                        chunk=SCAN_CHUNK,
                    )
        linear = linear + _linear_flops(stack.inputs, shape.tokens)
    trunk = _shape(graph, graph.trunk, one, recipe).tokens
    linear = linear + _linear_flops(graph.linears, trunk)
    if graph.embedding is not None:
        linear = linear + _linear_flops(graph.embedding.projection, trunk)
    if graph.head is not None:
        rows = trunk if graph.head.vocab else 1
        linear = linear + _linear_flops(graph.head.linears, rows)
        linear = linear + 2 * rows * graph.head.vocab * graph.head.hidden
    return linear, attention


def _linear_flops(linears: tuple[Linear, ...], tokens: Num) -> Num:
    result: Num = 0.0
    for linear in linears:
        result = result + f.linear_flops(
            tokens=tokens,
            inputs=linear.inputs,
            outputs=linear.outputs,
            # `active` of the copies for experts; every copy of a matrix tokens pass through one after another
            active=linear.active if linear.shard is Shard.EXPERT else linear.copies * linear.active,
        )
    return result


def _layer_flops(graph: Graph, recipe: Recipe) -> tuple[Num, Num]:
    """Forward FLOPs of one sample in the matrices of layers, and in each layer's last one."""
    layers: Num = 0.0
    last: Num = 0.0
    for stack in graph.stacks:
        tokens = stack.tokens if stack.tokens is not None else recipe.seq_len
        for index, block in enumerate(stack.blocks):
            parts = [part for part in (block.mixer, block.cross, block.ffn) if part is not None]
            count = stack.count(index)
            layers = layers + count * sum(_linear_flops(part.linears, tokens) for part in parts)
            if parts and parts[-1].linears:
                last = last + count * _linear_flops(parts[-1].linears[-1:], tokens)
    return layers, last


def sample_tokens(graph: Graph, recipe: Recipe) -> Num:
    """Tokens of the trunk in one sample."""
    if not graph.stacks:
        return 1
    trunk = graph.trunk
    return trunk.tokens if trunk.tokens is not None else recipe.seq_len


def _mean_peak(cluster: Cluster, math: str) -> Line:
    """Peak rate of a GPU of the fleet; of several kinds the mean, so that utilisation is the fleet's."""
    peaks = []
    for pool in cluster.pools:
        peak = pool.gpu.peak(math)
        assert peak is not None  # refused before, where a kind has no such rate
        peaks.append(peak)
    if len(peaks) == 1:
        return peaks[0]
    summed = sum(pool.count * peak.value for pool, peak in zip(cluster.pools, peaks, strict=True))
    return Line(
        "peak",
        summed / cluster.count,
        peaks[0].unit,
        worst_kind(peaks),
        source="mean of the fleet's GPU kinds, by count",
    )


def throughput(graph: Graph, layout: Layout, recipe: Recipe, cluster: Cluster, step: Line) -> Line:
    """Rates of a step: the value is samples per second of the whole run, the children say the rest.

    Conventions: model FLOPs are 3 x forward with causal attention counted half; hardware FLOPs add
    what is computed twice. MFU and HFU divide by the dense peak of the recipe's matrix precision.
    """
    batch = layout.global_batch
    linear, attention = sample_flops(graph, recipe)
    layers, last = _layer_flops(graph, recipe)
    again: Num = 0.0
    if recipe.recompute == "full":
        again = compute(
            "recompute_flops",
            f.full_recompute_flops,
            layer_forward_flops=batch * (layers + attention),
            last_matmul_flops=batch * last,
            stops_early=recipe.framework not in WHOLE_RECOMPUTE,
        )
    elif recipe.recompute == "selective" and recipe.recompute_scope == "core":
        again = batch * attention
    model = compute(
        "model_flops",
        f.model_flops,
        linear_forward_flops=batch * linear,
        attention_forward_flops=batch * attention,
        note="3 x forward, causal attention counted half",
    )
    backward = (
        compute(
            "matrices",
            f.linear_backward_flops,
            forward_flops=batch * linear,
            input_gradients=1,
            weight_gradients=1 if recipe.adapters is None else 0,
        ),
        compute(
            "attention",
            f.attention_backward_flops,
            forward_flops=batch * attention,
            recomputes_scores=recipe.attention != "eager",
        ),
    )
    hardware = compute(
        "hardware_flops",
        f.hardware_flops,
        forward_flops=batch * (linear + attention),
        backward_flops=total("backward_flops", backward, unit="FLOP"),
        recompute_flops=again,
        note="forward, backward with scores recomputed, and recomputed layers",
    )
    peak = _mean_peak(cluster, recipe.math)
    gpus = layout.world
    shared: dict[str, Any] = {"step_s": step, "gpus": gpus}
    tokens = compute("tokens_per_s", f.tokens_per_s, tokens=batch * sample_tokens(graph, recipe), step_s=step)
    children = (
        tokens,
        compute("tokens_per_s_per_gpu", f.tokens_per_s_per_gpu, tokens_per_s=tokens, gpus=gpus),
        model,
        compute("model_flops_per_s_per_gpu", f.flops_per_s_per_gpu, flops=model, **shared),
        compute("mfu", f.flops_utilisation, flops=model, peak_flops_per_s=peak, **shared),
        hardware,
        compute("hfu", f.flops_utilisation, flops=hardware, peak_flops_per_s=peak, **shared),
    )
    return compute("throughput", f.samples_per_s, samples=batch, step_s=step, children=children)


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
