"""Seconds of a layer's feed-forward part beside its matrices: activations, and the routing of experts."""

from __future__ import annotations

from gpucalc.graph import Block, FeedForward, Mixer, Mlp, Moe, Shard
from gpucalc.plan.device import Device
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.work_counts import (
    EXPERT_BIAS_PASSES,
    GATE_PASSES,
    MOE_CALLS,
    PLAIN_PASSES,
    WRITTEN_OUT_GELU_PASSES,
)
from gpucalc.plan.work_lines import LayerWork, Shape, add_elementwise

# From the containers of mid-2026 on TransformerEngine runs gated experts in Blackwell's block-scaled formats
# as one grouped kernel: activation and casts in its epilogues.
FUSED_EXPERTS_YEAR = 2026
BLOCK_SCALED = ("mxfp8", "nvfp4")


def has_experts(block: Block) -> bool:
    """Whether the block routes tokens to experts."""
    return isinstance(block.ffn, Moe)


def fused_experts(part: Mixer | FeedForward, recipe: Recipe) -> bool:
    """Whether experts run as one kernel with their activation and casts."""
    if not isinstance(part, Moe) or not part.gated or any(linear.bias for linear in part.linears):
        return False
    known = recipe.framework == "megatron" and recipe.precision in BLOCK_SCALED
    return known and recipe.year >= FUSED_EXPERTS_YEAR


def add_feed_forward(
    work: LayerWork, part: FeedForward, shape: Shape, layout: Layout, recipe: Recipe, device: Device
) -> None:
    """Activations, and what routing moves: permutations, the router's own tensors, biases of experts."""
    code = recipe.kernels
    size = recipe.activation_bytes
    if part.gated:
        passes: tuple[float, float] = GATE_PASSES[code]
    elif part.activation == "gelu_new" and code == "eager":
        passes = WRITTEN_OUT_GELU_PASSES
    else:
        passes = PLAIN_PASSES[code]
    if isinstance(part, Mlp):
        add_elementwise(work, "activation", shape.tokens, part.ffn / layout.tp, passes, size, device)
        return
    routed = recipe.expert_imbalance * shape.tokens * part.top_k / layout.tp
    for module, calls in MOE_CALLS.items():
        work.call(calls[code], module)
    if not fused_experts(part, recipe):
        add_elementwise(work, "expert_activation", routed, part.expert_ffn, passes, size, device)
    biased = sum(linear.outputs for linear in part.linears if linear.shard is Shard.EXPERT and linear.bias)
    if biased and recipe.year < FUSED_EXPERTS_YEAR:
        add_elementwise(work, "expert_bias", routed, biased / layout.etp, EXPERT_BIAS_PASSES, 4, device)
    if part.shared_ffn:
        add_elementwise(
            work, "shared_activation", shape.tokens, part.shared_ffn / layout.tp, passes, size, device
        )
    width = part.latent or part.hidden
    # Permuted, sorted by expert, sorted back and unpermuted, some of it fused.
    add_elementwise(work, "permute", routed, width, (6, 6), size, device)
    add_elementwise(work, "router", shape.tokens / layout.tp, part.experts, (6, 6), 4, device)
