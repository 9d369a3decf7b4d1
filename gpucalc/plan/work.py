"""Seconds one GPU computes on one layer: its parts put together, with norms and residuals.

This module and its `work_*` parts choose formulas by the shape of the layer and the code path; the
arithmetic is in `formulas.compute`.
"""

from __future__ import annotations

from gpucalc.graph import Attention, Block, FeedForward, Mixer, Moe, Norm, StateMixer
from gpucalc.num import Num, where
from gpucalc.plan.device import Device
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.work_attention import add_attention
from gpucalc.plan.work_counts import (
    DROPOUT_PASSES,
    LAYER_CALLS,
    LAYERNORM_PASSES,
    NORM_PASSES,
    RESIDUAL_PASSES,
)
from gpucalc.plan.work_ffn import add_feed_forward, fused_experts
from gpucalc.plan.work_linears import add_linears
from gpucalc.plan.work_lines import LayerWork, Shape, add_elementwise
from gpucalc.plan.work_state import add_state_mixer


def layer_work(block: Block, shape: Shape, layout: Layout, recipe: Recipe, device: Device) -> LayerWork:
    """The work of one layer on one rank."""
    work = LayerWork(block)
    code = recipe.kernels
    size = recipe.activation_bytes
    stream = 4 if recipe.autocast else size  # the residual stream stays fp32 under autocast
    outside = where(layout.sequence_parallel, shape.tokens / layout.tp, shape.tokens)
    for norm in block.norms:
        if norm.kind != "none":
            _norm(work, norm, outside, code, stream, device)
    parts = block.parts
    hidden = block.hidden
    for part in parts:  # norms, residuals and hooks
        work.call(LAYER_CALLS[code] / len(parts), _module(part))
    for index, _ in enumerate(parts[: 1 if block.parallel else None], start=1):
        add_elementwise(work, f"residual_{index}", outside, hidden, RESIDUAL_PASSES[code], stream, device)
        if recipe.dropout:
            add_elementwise(work, f"dropout_{index}", outside, hidden, DROPOUT_PASSES[code], stream, device)
    if block.linears:
        add_linears(work, block.linears, shape.tokens, layout, recipe, device, low=False)
    for part in parts:
        work.module = _module(part)
        add_linears(
            work,
            part.linears,
            shape.tokens,
            layout,
            recipe,
            device,
            low=device.low_precision,
            fused=fused_experts(part, recipe),
        )
        if isinstance(part, Attention):
            add_attention(work, part, part is block.cross, shape, layout, recipe, device)
        elif isinstance(part, StateMixer):
            add_state_mixer(work, part, shape, layout, recipe, device)
        else:
            add_feed_forward(work, part, shape, layout, recipe, device)
    return work


def _module(part: Mixer | FeedForward) -> str:
    """What a part is called where Megatron-Core captures it."""
    if isinstance(part, Attention):
        return "attn"
    if isinstance(part, StateMixer):
        return "mamba"
    return "moe_router" if isinstance(part, Moe) else "mlp"


def _norm(work: LayerWork, norm: Norm, tokens: Num, code: str, size: Num, device: Device) -> None:
    single = norm.kind in ("layernorm", "layernorm_nobias")
    passes = LAYERNORM_PASSES if single else NORM_PASSES[code]
    add_elementwise(work, norm.name, tokens, norm.width, passes, size, device)
