"""Host memory of one node: copies of the weights while they load, and what is offloaded for good."""

from __future__ import annotations

from gpucalc.formulas import memory as mem
from gpucalc.graph import Graph
from gpucalc.line import Line, compute, largest, total
from gpucalc.num import Num
from gpucalc.plan import allowances
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.memory import kept_activations
from gpucalc.plan.resolve import PAGED_STATE_BYTES
from gpucalc.plan.stages import Params, block_linears, stages
from gpucalc.plan.step_rates import MASTER_GRADIENT_BYTES


def host_memory(graph: Graph, layout: Layout, recipe: Recipe, *, ranks: int, nodes: int) -> Line | None:
    """Bytes the busiest node's host needs: the larger of load and step. None when it needs none.

    ranks: GPUs of one node; nodes: how many share what is sharded.
    """
    held = sum((stage.params for stage in stages(graph, pp=1, vpp=1)), Params())
    weights = _weights(held, graph, recipe)
    shares = 1 / nodes if layout.zero_stage else ranks  # whole models whose state the node holds
    offloaded: list[Line] = []
    states: list[Line] = []
    if "nvme" not in recipe.offload:
        if "parameters" in recipe.offload:
            offloaded.append(_held("offloaded_weights", weights * shares, 1))
        if "optimizer" in recipe.offload:
            trained = _trained(held, graph, recipe) * shares
            states.append(_held("offloaded_states", trained, _state_bytes(recipe)))
    if recipe.optimizer in PAGED_STATE_BYTES:  # where the GPU is full, all of it
        trained = _trained(held, graph, recipe) * shares
        states.append(_held("paged_states", trained, PAGED_STATE_BYTES[recipe.optimizer]))
    if "activations" in recipe.offload:
        states.append(_held("offloaded_activations", kept_activations(graph, layout, recipe).value, ranks))
    phases = tuple(
        total(name, (*lines, *_buffers(lines, recipe)), unit="bytes")
        for name, lines in (
            ("load", (*_copies(held, weights, recipe, ranks), *offloaded)),
            ("step", (*offloaded, *states)),
        )
        if lines
    )
    return largest("host_memory", phases) if phases else None


def _held(name: str, params: Num, size: float) -> Line:
    return compute(name, mem.host_offload_bytes, params=params, bytes_per_param=size)


def _weights(held: Params, graph: Graph, recipe: Recipe) -> float:
    """Bytes of one whole model as the run stores it between steps."""
    adapters = recipe.adapters
    if adapters is None:
        return held.total * recipe.parameter_bytes
    linears = sum(
        linear.copies * linear.inputs * linear.outputs * stack.sets(index, linear)
        for stack in graph.stacks
        for index, block in enumerate(stack.blocks)
        for linear in block_linears(block)
    )
    rest = adapters.rest_bytes if adapters.quantised else recipe.compute_bytes
    return linears * adapters.base_bytes_per_param + (held.total - linears) * rest


def _trained(held: Params, graph: Graph, recipe: Recipe) -> float:
    """Parameters an optimizer steps."""
    adapters = recipe.adapters
    if adapters is None:
        return held.total
    return sum(
        adapters.rank * (linear.inputs + linear.outputs) * linear.copies * stack.sets(index, linear)
        for stack in graph.stacks
        for index, block in enumerate(stack.blocks)
        for linear in block_linears(block)
        if linear.name in adapters.targets
    )


def _state_bytes(recipe: Recipe) -> float:
    """Per trained parameter: states and masters, the gradient, and where it is stepped there the weight."""
    if recipe.framework == "deepspeed":
        return recipe.optimizer_bytes + MASTER_GRADIENT_BYTES
    weight = 0 if "parameters" in recipe.offload else recipe.parameter_bytes
    return recipe.optimizer_bytes + recipe.gradient_bytes + weight


def _copies(held: Params, weights: float, recipe: Recipe, ranks: int) -> tuple[Line, ...]:
    if recipe.host_load == "none":
        return ()
    quantised = recipe.adapters is not None and recipe.adapters.quantised
    return (
        compute(
            "loaded_copies",
            mem.host_load_bytes,
            ranks=ranks if recipe.host_load == "every-rank" else 1,
            params=held.total,
            element_bytes=weights / held.total if quantised else recipe.loaded_bytes,
        ),
    )


def _buffers(lines: tuple[Line, ...], recipe: Recipe) -> tuple[Line, ...]:
    if not {"parameters", "optimizer"} & set(recipe.offload):
        return ()
    return (
        compute(
            "pinned_buffers",
            mem.host_buffer_bytes,
            offloaded_bytes=sum(line.value for line in lines),
            buffer_fraction=allowances.HOST_BUFFER_FRACTION,
        ),
    )
