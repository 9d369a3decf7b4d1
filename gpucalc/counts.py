"""How many parameters a graph holds, part by part, and how many of them a token meets.

`total` is what instantiating the public class gives: tied tables once, no buffers, no multi-token
prediction layers. `active` leaves out the routed experts a token does not pass and keeps both
vocabulary tables; publishers' own active counts sometimes leave tables out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from gpucalc.formulas.params import (
    active_params,
    embedding_params,
    linear_active_params,
    linear_matmul_params,
    linear_params,
    repeated_params,
    vocabulary_head_params,
)
from gpucalc.graph import Attention, Block, Graph, Linear, Norm, Shard, Stack, Vector
from gpucalc.line import Kind, Line, compute, total

UNIT = "parameters"
W = TypeVar("W", Linear, Vector, Norm)


@dataclass(frozen=True, slots=True)
class Counts:
    """Parameter counts of one model.

    total: tree of embedding, stacks (per kind of layer, per linear), projectors and head.
    active: met by one token. routed_experts: held in routed experts. input_embedding: the token
    table. vocabulary: token table plus an untied head. matmul_params: weights one token is
    multiplied by in a forward pass, the vocabulary projection included, biases not.
    """

    total: Line
    active: Line
    routed_experts: int
    input_embedding: int
    vocabulary: int
    matmul_params: float

    @property
    def without_embedding(self) -> int:
        """Total less the input table (less nothing more: a tied table serves the head too)."""
        return int(self.total.value) - self.input_embedding


def count(graph: Graph) -> Counts:
    """The parameter counts of a graph."""
    if graph.network is not None:
        known = Line("total", graph.network.params, UNIT, source="totals stated in the model file")
        return Counts(known, known, 0, 0, 0, float(graph.network.params))
    parts: list[Line] = []
    vocabulary = embedding = 0
    matmul = 0.0
    if graph.embedding is not None:
        table = compute("table", embedding_params, vocab=graph.embedding.vocab, width=graph.embedding.width)
        embedding = vocabulary = int(table.value)
        rest = (*_linears(graph.embedding.projection), *_vectors(graph.embedding.vectors))
        parts.append(total("embedding", (table, *rest), unit=UNIT))
    parts += [_stack(stack) for stack in graph.stacks]
    between = (*_linears(graph.linears), *_vectors(graph.vectors))
    if between:
        parts.append(total("between", between, unit=UNIT))
    head = graph.head
    if head is not None:
        lines = [*_linears(head.linears), *_vectors(head.vectors)]
        if head.vocab:
            projection = compute(
                "vocabulary",
                vocabulary_head_params,
                vocab=head.vocab,
                width=head.hidden,
                tied=head.tied,
                bias=head.bias,
            )
            lines.append(projection)
            vocabulary += 0 if head.tied else head.vocab * head.hidden
            matmul += head.vocab * head.hidden
        if lines:
            parts.append(total("head", tuple(lines), unit=UNIT))
    everything = total("total", tuple(parts), unit=UNIT)

    routed, idle = 0, 0.0
    for linear, times in linears_of(graph):
        matmul += times * linear_matmul_params(
            inputs=linear.inputs, outputs=linear.outputs, active=linear.active
        )
        if linear.shard is Shard.EXPERT:
            held = times * params_of(linear)
            routed += held
            idle += held - times * linear_active_params(
                inputs=linear.inputs, outputs=linear.outputs, active=linear.active, bias=linear.bias
            )
    met = compute("active", active_params, total=everything, idle_routed=_exact(idle))
    return Counts(everything, met, routed, embedding, vocabulary, _exact(matmul))


def params_of(linear: Linear) -> int:
    """Parameters of a linear layer, all copies and biases."""
    return int(
        linear_params(inputs=linear.inputs, outputs=linear.outputs, copies=linear.copies, bias=linear.bias)
    )


def block_linears(block: Block) -> Iterator[Linear]:
    """Every linear layer of one layer, in the order a token meets them."""
    yield from block.linears
    for part in block.parts:
        yield from part.linears


def linears_of(graph: Graph) -> Iterator[tuple[Linear, int]]:
    """Every linear layer of a graph and how many layers have it, vocabulary matrices aside."""
    for stack in graph.stacks:
        for linear in stack.inputs:
            yield linear, 1
        for index, block in enumerate(stack.blocks):
            times = stack.count(index)
            for linear in block_linears(block):
                yield linear, times
    for linear in graph.linears:
        yield linear, 1
    if graph.embedding is not None:
        for linear in graph.embedding.projection:
            yield linear, 1
    if graph.head is not None:
        for linear in graph.head.linears:
            yield linear, 1


def block_params(block: Block, *, shared: bool = False) -> Line:
    """Parameters of one layer, part by part: its own, or what it shares with all of its kind."""
    parts: list[Line] = []
    mixer = "attention" if isinstance(block.mixer, Attention) else "mixer"
    named = (
        (mixer, block.mixer),
        ("state", block.state),
        ("cross", block.cross),
        ("ffn", block.ffn),
        ("dense", block.beside),
    )
    for name, part in named:
        if part is not None:
            inside = (*_linears(_of(part.linears, shared)), *_vectors(_of(part.vectors, shared)))
            if inside or not (part.linears or part.vectors):
                parts.append(total(name, inside, unit=UNIT))
    rest = (
        *_linears(_of(block.linears, shared)),
        *_norms(_of(block.norms, shared)),
        *_vectors(_of(block.vectors, shared)),
    )
    if rest:
        parts.append(total("norms" if not block.linears else "residual", rest, unit=UNIT))
    return total("layer", tuple(parts), unit=UNIT)


def _stack(stack: Stack) -> Line:
    parts: list[Line] = [*_linears(stack.inputs)]
    for index, block in enumerate(stack.blocks):
        layer, shared = block_params(block), block_params(block, shared=True)
        if layer.children or not shared.children:
            parts.append(
                compute(
                    block.name or "layer",
                    repeated_params,
                    layers=stack.count(index),
                    params_per_layer=layer,
                    children=(layer,),
                )
            )
        if shared.children:
            parts.append(total(f"{block.name}, shared", shared.children, unit=UNIT))
    parts += _vectors(stack.vectors)
    if stack.final_norm is not None:
        parts += _norms((stack.final_norm,))
    return total(stack.name, tuple(parts), unit=UNIT)


def _of(weights: Iterable[W], shared: bool) -> list[W]:
    return [weight for weight in weights if weight.shared is shared]


def _linears(linears: Iterable[Linear]) -> list[Line]:
    return [
        compute(
            linear.name,
            linear_params,
            inputs=linear.inputs,
            outputs=linear.outputs,
            copies=linear.copies,
            bias=linear.bias,
        )
        for linear in linears
    ]


def _vectors(vectors: Iterable[Vector]) -> list[Line]:
    return [Line(v.name, v.params, UNIT, Kind.EXACT, source="the architecture") for v in vectors]


def _norms(norms: Iterable[Norm]) -> list[Line]:
    return [Line(f"{n.name}_norm", n.params, UNIT, Kind.EXACT, source="the architecture") for n in norms]


def _exact(value: float) -> float:
    """Whole numbers stay Python integers: floats lose parameters above 2^53."""
    return int(value) if float(value).is_integer() else value
