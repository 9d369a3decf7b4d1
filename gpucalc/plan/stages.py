"""Which layers each pipeline stage holds, and the parameters they bring to one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gpucalc.graph import Block, Graph, Linear, Moe, Norm, Shard, Stack, Vector
from gpucalc.plan.layout import Layout


@dataclass(frozen=True, slots=True)
class Params:
    """Parameters of a part, by how tensor and expert parallelism hold them.

    sharded is divided by tp, replicated is whole on every rank, expert is divided by ep x etp.
    linear: the part of sharded and replicated that matrices multiply with.
    """

    sharded: int = 0
    replicated: int = 0
    expert: int = 0
    linear: int = 0

    def __add__(self, other: Params) -> Params:
        return Params(
            self.sharded + other.sharded,
            self.replicated + other.replicated,
            self.expert + other.expert,
            self.linear + other.linear,
        )

    def times(self, count: int) -> Params:
        """The same part held `count` times."""
        return Params(self.sharded * count, self.replicated * count, self.expert * count, self.linear * count)

    @property
    def total(self) -> int:
        """All parameters, undivided."""
        return self.sharded + self.replicated + self.expert


@dataclass(frozen=True, slots=True)
class LayerRun:
    """`count` layers of one kind in one stage. in_trunk: pipelined, several micro-batches in flight."""

    stack: Stack
    block: Block
    count: int
    params: Params  # of one layer
    in_trunk: bool
    shared: Params = Params()  # those of one layer that serve all of the kind

    @property
    def held(self) -> Params:
        """Parameters of all its layers: what they share once."""
        return self.params.times(self.count) + self.shared.times(1 - self.count)

    def sets(self, weight: Linear | Norm) -> int:
        """How many of a layer's weight there are."""
        return 1 if weight.shared else self.count


@dataclass(frozen=True, slots=True)
class Stage:
    """What one pipeline rank holds."""

    index: int
    layers: tuple[LayerRun, ...]
    embedding: Params  # token table and what is added to it
    head: Params  # vocabulary matrix and output transforms; the tied matrix counts where it is used
    extra: Params  # towers' inputs, projectors, final norms, positions
    first: bool
    last: bool

    @property
    def params(self) -> Params:
        """Everything the stage holds."""
        result = self.embedding + self.head + self.extra
        for run in self.layers:
            result = result + run.held
        return result

    @property
    def depth(self) -> int:
        """Layers in the stage."""
        return sum(run.count for run in self.layers)

    @property
    def widest(self) -> LayerRun | None:
        """The layer kind with the most parameters."""
        return max(self.layers, key=lambda run: run.params.total, default=None)


def block_linears(block: Block) -> tuple[Linear, ...]:
    """Every matrix of a block."""
    return (*block.linears, *(linear for part in block.parts for linear in part.linears))


def block_params(block: Block, *, shared: bool = False) -> Params:
    """Parameters of one layer of that kind; shared: those alone that serve every layer of it."""
    weights = [weight for weight in block.weights if weight.shared or not shared]
    return _params(
        tuple(weight for weight in weights if isinstance(weight, Linear)),
        tuple(
            Vector(weight.name, weight.params) if isinstance(weight, Norm) else weight
            for weight in weights
            if not isinstance(weight, Linear)
        ),
    )


def _run(
    stack: Stack, block: Block, count: int, kinds: dict[int, tuple[Params, Params]], trunk: bool
) -> LayerRun:
    params, shared = kinds[id(block)]
    return LayerRun(stack, block, count, params, trunk, shared)


def block_tensors(block: Block) -> int:
    """How many tensors the parameters of a layer are kept in."""
    vectors = len(block.vectors) + sum(len(part.vectors) for part in block.parts)
    norms = sum(2 if norm.kind == "layernorm" else 1 for norm in block.norms if norm.params)
    return vectors + norms + sum(linear.copies * (2 if linear.bias else 1) for linear in block_linears(block))


def split_layers(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers per pipeline chunk, as even as possible; ends get fewer, they also hold embedding and head."""
    base, extra = divmod(layers, chunks)
    sizes = [base] * chunks
    middle_out = sorted(range(chunks), key=lambda c: abs(c - (chunks - 1) / 2))
    for chunk in middle_out[:extra]:
        sizes[chunk] += 1
    return tuple(sizes)


def fuller_first(layers: int, stages: int, *, filled: bool) -> tuple[int, ...]:
    """Layers per stage where the first stages get the remainder; filled: all they can take of it.

    DeepSpeed deals out so (runtime/utils.py, partition_balanced, over layers alike): since December 2023
    (2bdf061f) one more to each of the first stages, before it the rounded-up share to every stage while
    layers last: 78 over 12 as eleven times 7 and 1, as BLOOM's chronicles say.
    """
    base, extra = divmod(layers, stages)
    if filled and extra:
        sizes = tuple(min(base + 1, layers - stage * (base + 1)) for stage in range(stages))
        if min(sizes) > 0:
            return sizes
    return tuple(base + (stage < extra) for stage in range(stages))


def chunk_layers(
    graph: Graph, *, pp: int, vpp: int, sizes: tuple[int, ...] = ()
) -> tuple[dict[int, int], ...]:
    """How many layers of each kind of the trunk the chunks hold, first to last.

    sizes: layers of each chunk, where they are not dealt out as evenly as can be.
    """
    kinds = graph.trunk.layers
    held: list[dict[int, int]] = []
    start = 0
    for size in sizes or split_layers(len(kinds), pp * vpp):
        counts: dict[int, int] = {}
        for index in kinds[start : start + size]:
            counts[index] = counts.get(index, 0) + 1
        held.append(counts)
        start += size
    return tuple(held)


def owned_chunks(*, pp: int, vpp: int, schedule: str = "1f1b") -> tuple[tuple[int, ...], ...]:
    """Which chunks of layers every rank runs: c mod pp; under DualPipe one from each end of the model."""
    if schedule == "dualpipe":
        return tuple((rank, pp - 1 - rank) for rank in range(pp))
    if schedule == "dualpipe-v":
        return tuple((rank, 2 * pp - 1 - rank) for rank in range(pp))
    return tuple(tuple(range(rank, pp * vpp, pp)) for rank in range(pp))


def stages(
    graph: Graph, *, pp: int, vpp: int, schedule: str = "1f1b", sizes: tuple[int, ...] = ()
) -> tuple[Stage, ...]:
    """What the ranks of a pipeline hold; stacks beside the trunk sit where its first chunk is.

    sizes: layers of each chunk, where they are not dealt out as evenly as can be.
    """
    if not graph.stacks:
        network = graph.network
        held = Params(sharded=network.params, linear=network.params) if network else Params()
        return (Stage(0, (), Params(), Params(), held, True, True),)
    trunk = graph.trunk
    kinds = {
        id(block): (block_params(block), block_params(block, shared=True))
        for stack in graph.stacks
        for block in stack.blocks
    }
    owned = owned_chunks(pp=pp, vpp=vpp, schedule=schedule)
    last = max(chunk for chunks in owned for chunk in chunks)
    in_chunk = chunk_layers(graph, pp=last + 1, vpp=1, sizes=sizes)
    found = []
    alike: dict[Any, Stage] = {}  # most stages of a long pipeline hold what others do
    for rank, chunks in enumerate(owned):
        counts: dict[int, int] = {}
        for chunk in chunks:
            for index, layers in in_chunk[chunk].items():
                counts[index] = counts.get(index, 0) + layers
        dealt = sorted(counts.items())
        key = (tuple(dealt), 0 in chunks, last in chunks)
        if key not in alike:
            alike[key] = _stage(graph, trunk, kinds, dealt, rank=rank, first=key[1], last=key[2])
        found.append(replace(alike[key], index=rank))
    return tuple(found)


def held_stages(graph: Graph, layout: Layout) -> tuple[Stage, ...]:
    """The stages of a layout."""
    return stages(
        graph,
        pp=layout.pp,
        vpp=layout.chunks_per_rank,
        schedule=layout.schedule,
        sizes=layout.stage_layers,
    )


def _stage(
    graph: Graph,
    trunk: Stack,
    kinds: dict[int, tuple[Params, Params]],
    dealt: list[tuple[int, int]],
    *,
    rank: int,
    first: bool,
    last: bool,
) -> Stage:
    runs = [_run(trunk, trunk.blocks[index], count, kinds, True) for index, count in dealt]
    extra = _params((), graph.vectors) + _params(graph.linears, ()) if first else Params()
    for stack in graph.stacks:
        if stack is trunk:
            if first:
                extra = extra + _params(stack.inputs, stack.vectors)
            if last and stack.final_norm is not None:
                extra = extra + Params(replicated=stack.final_norm.params)
            continue
        if first:
            runs.extend(
                _run(stack, block, stack.count(index), kinds, False)
                for index, block in enumerate(stack.blocks)
            )
            norm = stack.final_norm.params if stack.final_norm is not None else 0
            extra = extra + _params(stack.inputs, stack.vectors) + Params(replicated=norm)
    embedding = Params()
    table = 0
    if graph.embedding is not None:
        table = graph.embedding.vocab * graph.embedding.width
        if first:
            embedding = Params(sharded=table) + _params(graph.embedding.projection, graph.embedding.vectors)
    head = Params()
    if graph.head is not None and last:
        head = _params(graph.head.linears, graph.head.vectors)
        matrix = graph.head.vocab * graph.head.hidden
        bias = graph.head.vocab if graph.head.bias else 0
        if not graph.head.tied:
            head = head + Params(sharded=matrix + bias, linear=matrix)
        elif not first and matrix:  # the last stage keeps its own copy of the tied matrix
            head = head + Params(sharded=table + bias, linear=table)
        else:
            head = head + Params(sharded=bias)
    return Stage(rank, tuple(runs), embedding, head, extra, first, last)


def frozen_params(graph: Graph, stage: Stage, names: tuple[str, ...]) -> Params:
    """Parameters of the parts named (vision_tower, embedding, head) that sit in the stage."""
    held = Params()
    if "vision_tower" in names and stage.first:
        for stack in graph.stacks:
            if stack.role != "vision" or stack is graph.trunk:
                continue
            held = held + _params(stack.inputs, stack.vectors)
            if stack.final_norm is not None:
                held = held + Params(replicated=stack.final_norm.params)
            for index, block in enumerate(stack.blocks):
                held = held + block_params(block).times(stack.count(index))
    if "embedding" in names:
        held = held + stage.embedding
    return held + stage.head if "head" in names else held


def _params(linears: tuple[Linear, ...], vectors: tuple[Vector, ...]) -> Params:
    sharded = replicated = expert = linear = 0
    for matrix in linears:
        weights = matrix.inputs * matrix.outputs
        bias = matrix.outputs if matrix.bias else 0
        if matrix.shard is Shard.EXPERT:
            expert += matrix.copies * (weights + bias)
            continue
        linear += matrix.copies * weights
        if matrix.shard is Shard.REPLICATED:
            replicated += matrix.copies * (weights + bias)
        elif matrix.shard is Shard.ROW:  # a row-split matrix adds its bias after the reduction
            sharded += matrix.copies * weights
            replicated += matrix.copies * bias
        else:
            sharded += matrix.copies * (weights + bias)
    for vector in vectors:
        if vector.shard is Shard.REPLICATED:
            replicated += vector.params
        elif vector.shard is Shard.EXPERT:
            expert += vector.params
        else:
            sharded += vector.params
    return Params(sharded, replicated, expert, linear)


def is_moe(block: Block) -> bool:
    """Whether the block routes tokens to experts."""
    return isinstance(block.ffn, Moe)
