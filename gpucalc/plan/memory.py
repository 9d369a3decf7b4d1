"""Per-GPU memory of a training run: a tree of stages, phases and the tensors alive in each.

    memory (largest stage)
      stage_0 (largest phase)
        load, forward, loss, backward, step (sums)
          allocated (sum): weights, gradients, optimizer_states, activations, ...
          allocator_overhead, cuda_context, nccl_buffers

What is alive when follows a timeline measured tensor by tensor; see the formulas' sources.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gpucalc.formulas import memory as mem
from gpucalc.graph import Graph
from gpucalc.line import Line, choose, compute, largest, total
from gpucalc.num import Num, is_scalar, maximum, present, where
from gpucalc.plan import allowances, engine_state, kept, model_state, pipeline_state, transients
from gpucalc.plan.communicators import communicators, token_peers
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.rank import Rank
from gpucalc.plan.stages import Stage, held_stages

# Tensors made once and kept: the caching allocator adds little to them.
_LASTING = frozenset(
    {
        "weights",
        "frozen_weights",
        "reference_weights",
        "reward_weights",
        "averaged_weights",
        "loaded_weights",
        "undivided_weights",
        "flat_copy",
        "optimizer_states",
        "gradients",
        "ddp_buckets",
        "reduce_buckets",
        "unsharded_gradients",
        "receive_buffers",
    }
)

ENGINE_WORKSPACE_YEAR = 2024  # Megatron-Core builds its layers of Transformer Engine's by default
ENGINE_STREAMS = 4  # over which Transformer Engine's grouped GEMM spreads experts, each with a workspace

# What layers keep under a recipe, kept by a search between layouts that differ elsewhere alone.
Known = dict[Any, dict[Any, Line]]


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Where the peak is."""

    tree: Line
    stage: int
    phase: str

    @property
    def needed(self) -> Line:
        """The phase line that decides."""
        return self.tree.child(f"stage_{self.stage}").child(self.phase)


_RESERVED = ("allocated", "allocator_overhead", "cuda_graphs")  # graphs have pools of the allocator's


def allocated_peak(tree: Line) -> float:
    """Largest sum of tensors over stages and phases, as torch's max_memory_allocated counts it."""
    return max(float(phase.child("allocated").value) for stage in tree.children for phase in stage.children)


def reserved_peak(tree: Line) -> float:
    """The same with what the caching allocator adds and graphs keep, as max_memory_reserved counts it."""
    return max(
        float(sum(part.value for part in phase.children if part.name in _RESERVED))
        for stage in tree.children
        for phase in stage.children
    )


def meters(tree: Line) -> dict[str, float] | None:
    """The peak as three meters show it: max_memory_allocated, max_memory_reserved, nvidia-smi.

    None for a tree that is not made of a training run's phases.
    """
    phases = [phase for stage in tree.children for phase in stage.children]
    if not phases or any("allocator_overhead" not in {part.name for part in p.children} for p in phases):
        return None
    return {
        "allocated": allocated_peak(tree),
        "reserved": reserved_peak(tree),
        "device": max(float(phase.value) for phase in phases),
    }


def memory_peak(
    graph: Graph,
    layout: Layout,
    recipe: Recipe,
    *,
    hopper_or_later: bool,
    ampere_or_later: bool = True,
    nvlink: bool = True,
) -> MemoryPeak:
    """The memory tree of a run and its peak.

    nvlink: GPUs reach each other over NVLink, for which NCCL opens many channels; false: over PCIe.
    """
    tree = memory_tree(
        graph,
        layout,
        recipe,
        hopper_or_later=hopper_or_later,
        ampere_or_later=ampere_or_later,
        nvlink=nvlink,
    )
    lines = tree.children
    worst = max(lines, key=lambda line: line.value)
    phase = max(worst.children, key=lambda line: line.value)
    return MemoryPeak(tree=tree, stage=int(worst.name.removeprefix("stage_")), phase=phase.name)


def memory_tree(
    graph: Graph,
    layout: Layout,
    recipe: Recipe,
    *,
    hopper_or_later: bool,
    ampere_or_later: bool = True,
    nvlink: bool = True,
    only: tuple[Stage, ...] | None = None,
    known: Known | None = None,
) -> Line:
    """The memory tree alone, whose value is the peak: of one layout, or of columns of them.

    `only` these stages are looked at, all by default. `known` is kept between calls whose layouts have tp,
    cp, ep, etp and the micro-batch in common.
    Raises num.Mixed for columns that do not hold the same tensors.
    """
    layers: dict[Any, Line] = {}
    if known is not None:
        layers = known.setdefault(replace(recipe, offload=()), layers)
    chosen = only or held_stages(graph, layout)
    return largest(
        "memory",
        tuple(
            _stage_line(
                Rank(
                    graph,
                    stage,
                    layout,
                    recipe,
                    hopper_or_later=hopper_or_later,
                    ampere_or_later=ampere_or_later,
                    nvlink=nvlink,
                    layers=layers,
                )
            )
            for stage in chosen
        ),
    )


def running_peak(tree: Line) -> Num:
    """The largest phase once the weights are loaded."""
    lines = [phase for stage in tree.children for phase in stage.children if phase.name != "load"]
    return largest("running", lines).value


def kept_activations(graph: Graph, layout: Layout, recipe: Recipe) -> Line:
    """Bytes the first stage keeps for backward, wherever they are kept."""
    here = replace(recipe, offload=())
    first = held_stages(graph, layout)[0]
    return kept.activations(Rank(graph, first, layout, here))[0]


def _stage_line(rank: Rank) -> Line:
    """The phases of one stage."""
    recipe = rank.recipe
    states = model_state.states(rank)
    received, returned = pipeline_state.receive_buffers(rank), pipeline_state.kept_logits(rank)
    buffers = (*model_state.buffers(rank), *received)
    gradients = model_state.gradients(rank)
    activations = (*kept.activations(rank), *pipeline_state.stage_outputs(rank))
    weights = tuple(line for line in states if line.name != "optimizer_states")
    # Gradients that outlive the step or add up over micro-batches are there in every phase.
    # DeepSpeed's stage 3 has one flat tensor for its partition of them from the start.
    partitioned = recipe.engine_stage >= 2
    persistent = (
        recipe.framework == "megatron"
        or recipe.keeps_gradients
        or recipe.engine_stage == 3
        or rank.accumulates
    )
    always = (*states, *(gradients if persistent else ()), *buffers)
    phases = [
        _phase(rank, "load", (*weights, *model_state.load_extra(rank))),
        _phase(
            rank,
            "forward",
            (*always, *activations, *transients.forward_transients(rank), *transients.dora_norm(rank)),
        ),
    ]
    if rank.stage.last:
        loss = (*kept.head_saved(rank), *transients.loss_transients(rank), *returned)
        phases.append(_phase(rank, "loss", (*always, *activations, *loss)))
    held = (*states, *buffers, *engine_state.sweep_buffers(rank), *returned)
    # Stage 2 allocates the whole partition when the first bucket is reduced.
    from_start = persistent or partitioned
    moments = _backward_moments(rank, held, activations, gradients, persistent=from_start)
    phases.append(_widest(rank, "backward", moments))
    step = (
        *states,
        *model_state.step_gradients(rank),
        *model_state.buffers(rank, at_step=True),
        *received,
        *model_state.step_transients(rank),
    )
    phases.append(_phase(rank, "step", step))
    return largest(f"stage_{rank.stage.index}", tuple(phases))


def _backward_moments(
    rank: Rank,
    held: tuple[Line, ...],
    activations: tuple[Line, ...],
    gradients: tuple[Line, ...],
    *,
    persistent: bool,
) -> list[tuple[Line, ...]]:
    """What is alive at the moments of the sweep one of which is its peak.

    The final norm; the first layer, with most activations; the last one, with most gradients beside a
    layer's activations; the end, with all gradients.
    """
    rebuilt = kept.rebuilt(rank)
    layer = (
        *((rebuilt,) if rebuilt is not None else ()),
        *transients.backward_working_set(rank),
        *transients.dequantised(rank),
        *(transients.dora_norm(rank) if rebuilt is not None else ()),
        *transients.backward_transients(rank),
        *engine_state.cast_gradient(rank),
        *(() if persistent else model_state.layer_gradient(rank)),
    )
    early = (*model_state.head_gradient(rank), *model_state.shared_gradients(rank))
    present = gradients if persistent else early
    end = (*transients.end_transients(rank), *transients.embedding_gradient_input(rank))
    moments = [
        (*held, *activations, *layer, *present),
        (*_without_full_bucket(rank, held), *gradients, *end, *engine_state.reduced_gradients(rank)),
    ]
    norm = transients.final_norm_backward(rank)
    if norm:
        moments.append((*held, *activations, *norm, *transients.gathered_root(rank), *present))
    made = model_state.gradients_but_one_layer(rank)
    if made and not persistent:
        moments.append((*held, *kept.activations(rank, one_layer=True), *layer, *made))
    return moments


def _widest(rank: Rank, name: str, moments: list[tuple[Line, ...]]) -> Line:
    """The phase at the moment when most is alive; of columns the phase's value at each one's own."""
    sums = [sum(line.value for line in lines) for lines in moments]
    if all(is_scalar(value) for value in sums):
        return _phase(rank, name, moments[sums.index(max(sums))])
    phase, most = _phase(rank, name, moments[0]), sums[0]
    value = phase.value
    for lines, alive in zip(moments[1:], sums[1:], strict=True):
        more = alive > most
        if present(more):
            value = where(more, _phase(rank, name, lines).value, value)
            most = maximum(most, alive)
    return replace(phase, value=value, children=())


def _without_full_bucket(rank: Rank, held: tuple[Line, ...]) -> tuple[Line, ...]:
    """What is held at the end of backward: in stage 1 gradients counted already lie in the bucket."""
    if rank.recipe.engine_stage != 1:
        return held
    return tuple(line for line in held if line.name != "reduce_buckets")


def _phase(rank: Rank, name: str, parts: tuple[Line, ...]) -> Line:
    """A phase: its tensors, and what the allocator, CUDA and NCCL hold beside them."""
    parts = tuple(part for part in parts if present(part.value))
    rank.beside = rank.beside or _beside(rank)
    workspace, *processes = rank.beside
    allocated = total("allocated", (*parts, workspace), unit="bytes")
    lasting = total("lasting", tuple(part for part in parts if part.name in _LASTING), unit="bytes")
    regular = rank.recipe.framework == "megatron"
    passing = allowances.REGULAR_PASSING_OVERHEAD if regular else allowances.PASSING_OVERHEAD
    overhead = compute(
        "allocator_overhead",
        mem.allocator_overhead_bytes,
        lasting_bytes=lasting,
        passing_bytes=allocated.value - lasting.value,
        lasting_fraction=allowances.REGULAR_LASTING_OVERHEAD if regular else allowances.LASTING_OVERHEAD,
        passing_fraction=passing,
        large_bytes=allowances.LARGE_BYTES,
        large_fraction=allowances.LARGE_OVERHEAD,
    )
    return total(name, (allocated, overhead, *processes), unit="bytes")


def _beside(rank: Rank) -> tuple[Line, ...]:
    """cuBLAS's workspace, which torch allocates, and what it does not: CUDA's context, NCCL's buffers."""
    opened, group = communicators(rank)
    return (
        _workspace(rank),
        *_graphs(rank),
        compute(
            "cuda_context",
            mem.cuda_context_bytes,
            context_bytes=allowances.EAGER_CUDA_CONTEXT[
                "from_ampere" if rank.ampere_or_later else "before_ampere"
            ]
            if rank.recipe.eager_context
            else allowances.CUDA_CONTEXT,
        ),
        compute(
            "nccl_buffers",
            mem.nccl_buffer_bytes,
            communicators=opened,
            channels=allowances.NCCL_CHANNELS[_fabric(rank)],
            channel_bytes=choose(
                group > 2, allowances.NCCL_CHANNEL_BYTES["group"], allowances.NCCL_CHANNEL_BYTES["pair"]
            ),
        ),
        *_exchange(rank),
    )


def _graphs(rank: Rank) -> tuple[Line, ...]:
    """What captured graphs keep."""
    if not rank.recipe.cuda_graphs:
        return ()
    held = choose(rank.layout.pp > 1, allowances.CUDA_GRAPHS["pp > 1"], allowances.CUDA_GRAPHS["pp 1"])
    return (compute("cuda_graphs", mem.cuda_graph_bytes, graph_bytes=held),)


def _workspace(rank: Rank) -> Line:
    """cuBLAS's workspace, and Transformer Engine's own beside it, five with experts in one grouped GEMM."""
    age = "from_hopper" if rank.hopper_or_later else "before_hopper"
    name, formula = "cublas_workspace", mem.cublas_workspace_bytes
    recipe = rank.recipe
    if recipe.framework != "megatron" or recipe.year < ENGINE_WORKSPACE_YEAR:
        return compute(name, formula, workspace_bytes=allowances.CUBLAS_WORKSPACE[age], handles=1)
    handles = 1 + ENGINE_STREAMS if rank.stage.params.expert else 1
    engine = allowances.ENGINE_WORKSPACE[age]
    return total(
        name,
        (
            compute("pytorch", formula, workspace_bytes=allowances.CUBLAS_WORKSPACE[age], handles=1),
            compute("transformer_engine", formula, workspace_bytes=engine, handles=handles),
        ),
        unit="bytes",
    )


def _fabric(rank: Rank) -> str:
    """What GPUs of a server reach each other over, by which NCCL chooses its channels."""
    if not rank.nvlink:
        return "pcie"
    return "nvlink" if rank.ampere_or_later else "nvlink_before_ampere"


def _exchange(rank: Rank) -> tuple[Line, ...]:
    """Buffers through which tokens reach experts on other ranks."""
    peers = token_peers(rank)
    if not present(peers):
        return ()
    return (
        compute(
            "nccl_exchange_buffers",
            mem.nccl_exchange_buffer_bytes,
            peers=peers,
            peer_channels=allowances.NCCL_PEER_CHANNELS,
            channel_bytes=allowances.NCCL_PEER_CHANNEL_BYTES,
        ),
    )
