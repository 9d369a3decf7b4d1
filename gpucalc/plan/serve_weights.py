"""Weights of one pipeline stage on one GPU of a deployment, tensor by tensor as the engine holds them.

Engines join matrices that read the same input (query, key and value; gate and up) and torch's allocator
rounds each of the joined tensors; both are followed, since they are worth half a percent.
"""

from __future__ import annotations

from gpucalc.formulas import serving_memory as mem
from gpucalc.graph import Attention, Block, Graph, Linear, Moe, Shard, Vector
from gpucalc.line import Kind, Line, compute, total
from gpucalc.plan.serving_layout import ServeLayout, ServeRecipe, WeightFormat
from gpucalc.plan.stages import LayerRun, Params, Stage
from gpucalc.spec.engine import EngineEra

TORCH = ("vllm", "sglang", "trtllm", "hf")
JOINS = ("vllm", "sglang", "trtllm")
PADS = ("vllm", "sglang")
_JOINED = {
    "q": "qkv", "k": "qkv", "v": "qkv",
    "gate": "gate_up", "up": "gate_up",
    "expert_gate": "expert_gate_up", "expert_up": "expert_gate_up",
    "shared_gate": "shared_gate_up", "shared_up": "shared_gate_up",
    "q_a": "qkv_a", "kv_a": "qkv_a",
}  # fmt: skip


def stage_weights(
    graph: Graph, stage: Stage, layout: ServeLayout, recipe: ServeRecipe, engine: EngineEra
) -> Line:
    """Bytes of weights one GPU of the stage holds, with what loading leaves beside them."""
    held = recipe.weights
    parts: list[Line] = []
    on_host = recipe.engine == "llamacpp"  # the token table stays in host memory
    tied = graph.head is not None and graph.head.tied and graph.head.vocab > 0
    if stage.embedding.total and not on_host:
        rows = graph.embedding.vocab if graph.embedding is not None else 0
        parts.append(_table("embedding", stage.embedding, rows, layout, recipe, held.embedding))
    for run in stage.layers:
        parts += _layers(run, layout, recipe, engine)
    if stage.head.total:
        rows = graph.head.vocab if graph.head is not None else 0
        parts.append(_table("head", stage.head, rows, layout, recipe, held.head))
    if on_host and tied and stage.last and stage.first and graph.embedding is not None:
        table = Params(sharded=graph.embedding.vocab * graph.embedding.width)
        parts.append(_plain("tied_head", table, layout.tp, held.head, held))
    if stage.extra.total:
        parts.append(_plain("towers_and_norms", stage.extra, layout.tp, held.rest, held))
    if recipe.engine in ("vllm", "sglang"):
        parts += _beside(stage, layout, recipe)
    return total("weights", tuple(part for part in parts if part.value), unit="bytes")


def _table(
    name: str, params: Params, rows: int, layout: ServeLayout, recipe: ServeRecipe, each: float
) -> Line:
    """The token table or the head; engines that divide it pad its rows."""
    if recipe.engine not in PADS or not rows:
        return _plain(name, params, layout.tp, each, recipe.weights)
    padded = compute(
        "params",
        mem.rank_table_params,
        sharded=params.sharded,
        replicated=params.replicated,
        vocab=rows,
        padded_vocab=compute("padded_vocab", mem.padded_vocab, vocab=rows, tp=layout.tp),
        tp=layout.tp,
    )
    return _sized(name, padded, each, recipe.weights)


def _plain(name: str, params: Params, tp: int, each: float, held: WeightFormat) -> Line:
    count = params.sharded / tp + params.replicated
    return _sized(name, count, each, held)


def _sized(name: str, params: float | Line, each: float, held: WeightFormat) -> Line:
    """Parameters in a format; how certain the format is, the line is."""
    per_param = Line(
        "bytes_per_param", each, "bytes per parameter", Kind(held.kind), source=held.source or held.name
    )
    return compute(name, mem.served_weight_bytes, params=params, bytes_per_param=per_param)


def _layers(run: LayerRun, layout: ServeLayout, recipe: ServeRecipe, engine: EngineEra) -> list[Line]:
    """One kind of layer: its tensors times how many there are, and what all of them share."""
    lines = [_layer(run, layout, recipe, engine, shared=False)]
    return [*lines, _layer(run, layout, recipe, engine, shared=True)] if run.shared.total else lines


def _layer(
    run: LayerRun, layout: ServeLayout, recipe: ServeRecipe, engine: EngineEra, *, shared: bool
) -> Line:
    """The tensors of one kind of layer as the engine joins them, times how many there are."""
    tensors: dict[str, list[Line]] = {}
    for linear, attention in _linears(run.block):
        if linear.shared is not shared:
            continue
        name = _JOINED.get(linear.name, linear.name) if recipe.engine in JOINS else linear.name
        tensors.setdefault(name, []).append(
            _matrix(linear, attention, run, layout, recipe, engine),
        )
    parts: list[Line] = []
    for name, matrices in tensors.items():
        whole = matrices[0] if len(matrices) == 1 else total(name, tuple(matrices), unit="bytes")
        if recipe.engine in TORCH:
            whole = compute(name, mem.allocated_block_bytes, tensor_bytes=whole)
        parts.append(whole)
    loose = _vectors(run.block, layout, shared=shared)
    if loose:
        parts.append(_sized("norms_and_vectors", loose, recipe.weights.rest, recipe.weights))
    layer = total("layer", tuple(parts), unit="bytes")
    name = run.block.name if run.in_trunk else f"{run.stack.name}_{run.block.name}"
    return compute(
        f"shared_{name}" if shared else f"layers_{name}",
        mem.repeated_layer_bytes,
        layers=1 if shared else run.count,
        layer_bytes=layer,
        children=(layer,),
    )


def _linears(block: Block) -> list[tuple[Linear, Attention | None]]:
    found: list[tuple[Linear, Attention | None]] = [(linear, None) for linear in block.linears]
    for part in block.parts:
        attention = part if isinstance(part, Attention) else None
        found += [(linear, attention) for linear in part.linears]
    return found


def _vectors(block: Block, layout: ServeLayout, *, shared: bool) -> float:
    count = 0.0
    for weight in block.weights:
        if isinstance(weight, Linear) or weight.shared is not shared:
            continue
        divided = isinstance(weight, Vector) and weight.shard is not Shard.REPLICATED
        count += weight.params / layout.tp if divided else weight.params
    return count


def _matrix(
    linear: Linear,
    attention: Attention | None,
    run: LayerRun,
    layout: ServeLayout,
    recipe: ServeRecipe,
    engine: EngineEra,
) -> Line:
    """One matrix of one layer on one rank, bias included."""
    held, tp = recipe.weights, layout.tp
    expert = linear.shard is Shard.EXPERT
    each = held.bytes_of(linear.name, expert=expert) if run.in_trunk else held.rest
    weights, bias = float(linear.inputs * linear.outputs), float(linear.outputs if linear.bias else 0)
    if expert:
        return _experts(linear, weights, bias, each, layout, recipe, engine)
    if linear.shard is Shard.REPLICATED:
        params = linear.copies * (weights + bias)
    elif linear.shard is Shard.ROW:
        params = linear.copies * (weights / tp + bias)
    else:
        params = linear.copies * (weights + bias) / tp
    if attention is not None and linear.name in ("k", "v") and attention.kv_heads < tp:
        params *= tp / attention.kv_heads  # a head is never divided; several ranks hold it
    return _sized(linear.name, params, each, held)


def _experts(
    linear: Linear,
    weights: float,
    bias: float,
    each: float,
    layout: ServeLayout,
    recipe: ServeRecipe,
    engine: EngineEra,
) -> Line:
    """Routed experts of a rank: whole experts spread over ep ranks, sliced among what is left."""
    ranks = layout.expert_ranks
    held = linear.copies / ranks
    if recipe.weights.name != "mxfp4" or engine.mxfp4_hidden_multiple is None:
        return _sized(linear.name, held * (weights + bias), each, recipe.weights)
    slices = ranks // layout.ep if layout.ep > 1 else ranks
    down = linear.name == "expert_down"
    hidden, width = (linear.outputs, linear.inputs) if down else (linear.inputs, linear.outputs)
    padded = compute(
        "padded_params",
        mem.padded_expert_params,
        experts=linear.copies / (ranks // slices),
        matrices=1,
        hidden=hidden,
        width=width / slices,
        hidden_multiple=engine.line("mxfp4_hidden_multiple"),
        width_multiple=engine.line("mxfp4_intermediate_multiple"),
    )
    matrix = compute(linear.name, mem.served_weight_bytes, params=padded, bytes_per_param=each)
    if not bias:
        return matrix
    biases = _sized("bias", held * bias, recipe.dtype_bytes, recipe.weights)
    return total(linear.name, (matrix, biases), unit="bytes")


def _beside(stage: Stage, layout: ServeLayout, recipe: ServeRecipe) -> list[Line]:
    """Tensors engines make of weights or keep beside them: rotary tables, absorbed projections."""
    parts: list[Line] = []
    mixers = [
        (run.block.mixer, run.count)
        for run in stage.layers
        if run.in_trunk and isinstance(run.block.mixer, Attention)
    ]
    turned = {
        (mixer.kind == "sliding", mixer.rope_dim or mixer.qk_dim)
        for mixer, _ in mixers
        if mixer.rope != "none"
    }
    for sliding, width in sorted(turned) if recipe.rope_positions else ():
        parts.append(
            compute(
                "rope_tables_sliding" if sliding else "rope_tables",
                mem.rope_table_bytes,
                positions=recipe.rope_positions,
                rotary_width=width,
                element_bytes=recipe.dtype_bytes,
                factor=1 if sliding else recipe.rope_factor,
            )
        )
    latent = [(mixer, count) for mixer, count in mixers if mixer.kv_lora is not None]
    if latent:
        mixer = latent[0][0]
        parts.append(
            compute(
                "absorbed_projections",
                mem.absorbed_projection_bytes,
                layers=sum(count for _, count in latent),
                latent=mixer.kv_lora,
                heads=mixer.heads,
                head_width=mixer.qk_dim - (mixer.rope_dim or 0) + mixer.v_dim,
                tp=layout.tp,
            )
        )
    return parts


def routed(stage: Stage) -> Moe | None:
    """The mixture of experts with the widest rows in the stage."""
    found = [run.block.ffn for run in stage.layers if isinstance(run.block.ffn, Moe)]
    return max(found, key=lambda moe: moe.top_k * max(2 * moe.expert_ffn, moe.hidden), default=None)
