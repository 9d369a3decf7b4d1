"""Seconds of a layer's attention: query-key pairs, fused kernels, and scores written to memory."""

from __future__ import annotations

from gpucalc.formulas import compute as f
from gpucalc.graph import Attention
from gpucalc.line import Line, compute
from gpucalc.num import Num, maximum
from gpucalc.plan.device import Device
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.work_counts import (
    AUTOCAST_SCORE_PASSES,
    NORM_PASSES,
    RELATIVE_PASSES,
    ROPE_PASSES,
    SCORE_PASSES,
)
from gpucalc.plan.work_lines import LayerWork, Shape, add_elementwise

# Before, PyTorch's context parallelism gave a rank one range: under a causal mask the last has most to do.
BALANCED_CONTEXT_YEAR = 2025


def attention_pairs(part: Attention, cross: bool, shape: Shape) -> Line:
    """Query-key pairs of one head of one sequence."""
    if part.kind == "chunked" and part.span is not None:
        return compute("pairs", f.chunked_attention_pairs, seq_len=shape.seq_len, chunk=part.span)
    keys: Num = shape.memory_len if cross else shape.seq_len
    if part.kind in ("compressed", "heavily_compressed") and part.compress_ratio:
        keys = keys / part.compress_ratio
    span = part.span if part.span is not None else keys
    if part.index_topk is not None:
        span = part.index_topk
    return compute(
        "pairs",
        f.attention_pairs,
        seq_len=shape.seq_len,
        keys=keys,
        span=span,
        causal=part.causal and not cross,
    )


def add_attention(
    work: LayerWork,
    part: Attention,
    cross: bool,
    shape: Shape,
    layout: Layout,
    recipe: Recipe,
    device: Device,
) -> None:
    """Rotary embedding, norms of queries and keys, and attention itself, forward and backward."""
    code = recipe.kernels
    size = recipe.activation_bytes
    heads = maximum(part.heads / layout.tp, 1)
    kv_heads = maximum(part.kv_heads / layout.tp, 1)
    width = heads * part.qk_dim + kv_heads * part.qk_dim
    if part.rope != "none" and not cross:
        add_elementwise(work, "rope", shape.tokens, width, ROPE_PASSES[code], size, device)
    if part.qk_norm != "none":
        add_elementwise(work, "qk_norm", shape.tokens, width, NORM_PASSES[code], size, device)
    pairs = attention_pairs(part, cross, shape)
    uneven = (
        part.causal and not cross and recipe.framework == "torchtitan" and recipe.year < BALANCED_CONTEXT_YEAR
    )
    flops = compute(
        "flops",
        f.attention_core_flops,
        sequences=shape.sequences,
        heads=heads,
        qk_dim=part.qk_dim,
        v_dim=part.v_dim,
        pairs=compute("pairs", f.unbalanced_pairs if uneven else f.shared_pairs, pairs=pairs, cp=layout.cp),
    )
    if recipe.attention == "eager":
        _unfused_attention(work, part, cross, heads, shape, layout, recipe, device)
        return
    work.call(2)
    back_flops = compute("flops", f.attention_backward_flops, forward_flops=flops, recomputes_scores=True)
    moved = compute(
        "bytes",
        f.attention_io_bytes,
        tokens=shape.tokens,
        heads=heads,
        kv_heads=kv_heads,
        qk_dim=part.qk_dim,
        v_dim=part.v_dim,
        element_bytes=size,
    )
    back_moved = compute("bytes", f.attention_backward_bytes, forward_bytes=moved)
    work.attention.append(
        compute("attention", f.attention_s, flops=flops, bytes_moved=moved, **device.attention)
    )
    work.attention_back.append(
        compute(
            "attention_gradient",
            f.attention_s,
            flops=back_flops,
            bytes_moved=back_moved,
            **device.attention_backward,
        )
    )
    if part.index_heads and part.index_dim:
        index = compute(
            "flops",
            f.attention_core_flops,
            sequences=shape.sequences,
            heads=part.index_heads,
            qk_dim=part.index_dim,
            v_dim=0,
            pairs=shape.seq_len * shape.seq_len / 2 / layout.cp,
        )
        work.attention.append(
            compute("indexer", f.attention_s, flops=index, bytes_moved=moved, **device.attention)
        )


def _unfused_attention(
    work: LayerWork,
    part: Attention,
    cross: bool,
    heads: Num,
    shape: Shape,
    layout: Layout,
    recipe: Recipe,
    device: Device,
) -> None:
    """Scores written to memory: whole squares are multiplied, and every pass reads or writes them."""
    keys = shape.memory_len if cross else shape.seq_len
    relative = any(linear.name == "relative" for linear in part.linears)
    if relative:  # Transformer-XL attends over a memory as long as its segment
        keys = 2 * keys
    queries = shape.seq_len / layout.cp
    square = compute(
        "flops",
        f.attention_core_flops,
        sequences=shape.sequences,
        heads=heads,
        qk_dim=part.qk_dim * (2 if relative else 1),  # content and position scores
        v_dim=part.v_dim,
        pairs=queries * keys,
    )
    work.call(6)
    size = recipe.activation_bytes
    mixed = recipe.autocast and recipe.framework == "hf" and recipe.kernels == "eager"
    forward, backward = AUTOCAST_SCORE_PASSES if mixed else SCORE_PASSES[recipe.kernels]
    if relative:
        forward, backward = forward + RELATIVE_PASSES, backward + RELATIVE_PASSES
    for matrix, traffic, passes, products in (
        (work.attention, work.traffic, forward + 2, 1),
        (work.attention_back, work.traffic_back, backward + 4, 2),
    ):
        moved = compute(
            "bytes",
            f.score_traffic_bytes,
            sequences=shape.sequences,
            heads=heads,
            queries=queries,
            keys=keys,
            passes=passes,
            score_bytes=size,
        )
        line = compute("scores", f.gemm_s, flops=square, bytes_moved=0.0, **device.wide)
        matrix.extend([line] * products)
        traffic.append(device.move("score_passes", moved))
