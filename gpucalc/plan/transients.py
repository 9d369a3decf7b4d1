"""Lines of tensors that live for a moment: loss, gathered weights, the widest point of a layer's backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpucalc.formulas import activations as act
from gpucalc.formulas import losses
from gpucalc.formulas import memory as mem
from gpucalc.formulas import optimizers as opt
from gpucalc.graph import Attention, Mlp, Moe
from gpucalc.line import Kind, Line, choose, compute, largest_of, total
from gpucalc.num import maximum, where
from gpucalc.plan import allowances
from gpucalc.plan.activation import probability_bytes, softmax_bytes
from gpucalc.plan.kept import full_layer, widest_run
from gpucalc.plan.rank import Rank
from gpucalc.plan.stages import LayerRun, block_linears

PARAMETER_SHARDING_YEAR = 2024  # FSDP2 came with torch 2.4 of July 2024; torchtune took it at once


def loss_transients(rank: Rank) -> tuple[Line, ...]:
    """Logits and their copies and gradients while the loss is taken and left, the larger of the two."""
    network = rank.graph.network
    if network is not None and network.head_elements:
        return (
            compute(
                "detection_loss",
                losses.detection_loss_bytes,
                kind=Kind.MODELLED,
                images=rank.layout.micro_batch,
                loss_bytes=network.loss_bytes,
                once_bytes=network.loss_once_bytes,
                head_elements=network.head_elements,
                activation_bytes=rank.recipe.activation_bytes,
            ),
        )
    if not rank.vocab or rank.graph.head is None:
        return ()
    recipe, layout, vocab = rank.recipe, rank.layout, rank.vocab
    if recipe.loss == "chunked":
        line = compute(
            "chunked_loss",
            losses.chunked_loss_bytes,
            tokens=rank.tokens,
            vocab=vocab,
            hidden=rank.graph.head.hidden,
            activation_bytes=recipe.activation_bytes,
            head_trained=int(recipe.adapters is None or recipe.adapters.trained_embeddings),
        )
        return (line, *gathered_root(rank))
    if recipe.loss == "fused":
        line = compute(
            "logits",
            act.layer_saved_bytes,
            bytes_per_token=compute(
                "per_token",
                losses.fused_loss_bytes,
                vocab=vocab,
                activation_bytes=recipe.activation_bytes,
                chunks=recipe.loss_chunks,
            ),
            tokens=rank.tokens,
            tp=layout.tp,
        )
        return (line, *_chunk_gradient(rank), *gathered_root(rank))
    forward = compute(
        "forward",
        losses.loss_forward_bytes,
        vocab=vocab,
        activation_bytes=recipe.activation_bytes,
        loss_bytes=recipe.loss_bytes,
    )
    backward = compute(
        "backward",
        losses.loss_backward_bytes,
        vocab=vocab,
        activation_bytes=recipe.activation_bytes,
        loss_bytes=recipe.loss_bytes,
        logits_kept=0,
    )
    if recipe.gathered_tp_inputs:
        divided = compute("backward", losses.loss_parallel_backward_bytes, vocab=vocab)
        backward = choose(layout.tp > 1, divided, backward)
    worst = choose(forward.value >= backward.value, forward, backward)
    # Megatron's code, under DeepSpeed too: what else runs there in tensor or pipeline parallel.
    piped = recipe.framework == "deepspeed" and layout.pp > 1
    if recipe.framework in ("megatron", "deepspeed"):
        in_place = compute(
            "in_place",
            losses.overwriting_loss_bytes,
            vocab=vocab,
            activation_bytes=recipe.activation_bytes,
            logits_kept=int(piped),
        )
        megatron = piped or recipe.framework == "megatron" or layout.tp > 1
        worst = choose(megatron, in_place, worst)
    line = compute("logits", act.layer_saved_bytes, bytes_per_token=worst, tokens=rank.tokens, tp=layout.tp)
    return (line, *gathered_root(rank))


def _chunk_gradient(rank: Rank) -> tuple[Line, ...]:
    """A loss in chunks makes the output matrix's gradient once a chunk, beside the sum of those before."""
    recipe, head = rank.recipe, rank.graph.head
    frozen = recipe.adapters is not None and not recipe.adapters.trained_embeddings
    if recipe.loss_chunks == 1 or head is None or frozen:
        return ()
    return (
        compute(
            "chunk_gradient",
            mem.weight_bytes,
            params=rank.vocab * head.hidden / rank.layout.tp,
            parameter_bytes=recipe.compute_bytes,
            shard=1,
            zero_stage=0,
        ),
    )


def gathered_root(rank: Rank) -> tuple[Line, ...]:
    """Gathered head (and embedding in the root group) while the loss is taken."""
    if not rank.gathers:
        return ()
    return (
        compute(
            "gathered_root_weights",
            mem.weight_bytes,
            params=rank.root_params(),
            parameter_bytes=rank.recipe.compute_bytes,
            shard=1,
            zero_stage=0,
        ),
    )


def forward_transients(rank: Rank) -> tuple[Line, ...]:
    """Gathered weights at the widest point of forward, under full sharding; what autocast's cache holds."""
    recipe = rank.recipe
    if not rank.gathers:
        # The cache is cleared when forward leaves autocast; without recomputation the graph keeps the copies.
        cached = recipe.autocast and recipe.recompute != "none" and rank.stage.layers
        copies = mem.autocast_weight_bytes
        return (
            (compute("autocast_weights", copies, linear_params=rank.layer_linear_params()),) if cached else ()
        )
    if recipe.framework == "deepspeed":
        return (_deepspeed_live(rank),)
    kept = not recipe.reshard
    formula: Callable[..., Any]
    sizes: dict[str, Any] = {"layer_params": rank.layer_params(), "element_bytes": recipe.compute_bytes}
    if kept:
        sizes["layers"] = rank.stage.depth
    if recipe.wrapped_root:
        sizes["root_params"] = rank.root_params()
        formula = mem.fsdp_forward_unresharded_bytes if kept else mem.fsdp_forward_bytes
    else:
        sizes["table_params"] = rank.root_params()
        formula = mem.fsdp_wrapped_forward_unresharded_bytes if kept else mem.fsdp_wrapped_forward_bytes
    return (compute("gathered_weights", formula, **sizes),)


def _deepspeed_live(rank: Rank) -> Line:
    held = rank.dense + rank.expert
    if rank.recipe.adapters is not None and not rank.recipe.adapters.base_sharded:
        linears = sum(run.held.linear for run in rank.stage.layers) / rank.layout.tp
        held = rank.dense - linears  # the quantised base is whole on every rank
    return compute(
        "gathered_weights",
        mem.deepspeed_live_parameter_bytes,
        live_elements=allowances.stated(
            "max_live_parameters", rank.recipe.live_parameters, allowances.DEEPSPEED_LIVE_PARAMETERS
        ),
        params=held,
        element_bytes=rank.recipe.compute_bytes,
    )


def final_norm_backward(rank: Rank) -> tuple[Line, ...]:
    """What the written-out final RMSNorm holds while its backward runs."""
    recipe, norm = rank.recipe, rank.graph.trunk.final_norm if rank.graph.stacks else None
    if not rank.vocab or norm is None or recipe.fused_norms or "rmsnorm" not in norm.kind:
        return ()
    return (
        compute(
            "final_norm_input",
            act.checkpoint_bytes,
            hidden=norm.width,
            tokens=rank.tokens,
            activation_bytes=4,
            shards=rank.sp,
        ),
        compute(
            "backward_working_set",
            act.rmsnorm_backward_bytes,
            hidden=norm.width,
            tokens=rank.tokens / rank.sp,
        ),
    )


def embedding_gradient_input(rank: Rank) -> tuple[Line, ...]:
    """Gradient of the embedding's output, alive while the table's gradient is made."""
    if not rank.stage.first or rank.graph.embedding is None:
        return ()
    return (
        compute(
            "embedding_output_gradient",
            act.checkpoint_bytes,
            hidden=rank.graph.embedding.width,
            tokens=rank.tokens,
            activation_bytes=rank.recipe.activation_bytes,
            shards=rank.sp,
        ),
    )


def dequantised(rank: Rank) -> tuple[Line, ...]:
    """16-bit weights made from a quantised base: one matrix, or the layer where autograd keeps them."""
    recipe, adapters = rank.recipe, rank.recipe.adapters
    if adapters is None or not adapters.quantised or not rank.stage.layers:
        return ()
    run = max(rank.stage.layers, key=lambda item: item.params.total)
    sizes = [linear.inputs * linear.outputs for linear in block_linears(run.block)]
    kept = sum(sizes) if adapters.keeps_dequantised else max(sizes)
    return (
        compute(
            "dequantised_weights",
            mem.weight_bytes,
            params=kept / rank.layout.tp,
            parameter_bytes=recipe.compute_bytes,
            shard=1,
            zero_stage=0,
        ),
    )


def dora_norm(rank: Rank) -> tuple[Line, ...]:
    """What DoRA makes of the widest weight it sits on while it takes that weight's norm."""
    adapters = rank.recipe.adapters
    if adapters is None or adapters.kind != "dora" or not rank.stage.layers:
        return ()
    lines = [
        compute(
            "dora_norm",
            opt.dora_norm_bytes,
            inputs=linear.inputs,
            outputs=linear.outputs,
            element_bytes=adapters.element_bytes,
            cast=int(adapters.element_bytes != rank.recipe.compute_bytes),
        )
        for run in rank.stage.layers
        for linear in block_linears(run.block)
        if linear.name in adapters.targets
    ]
    return (max(lines, key=lambda line: line.value),) if lines else ()


def backward_working_set(rank: Rank) -> tuple[Line, ...]:
    """Gradients alive at the widest point of the backward of a layer or of the output matrix."""
    recipe, layout = rank.recipe, rank.layout
    if not rank.stage.layers:
        return ()
    run = widest_run(rank)
    ffn = run.block.ffn
    tokens = rank.run_tokens(run)
    hidden = run.stack.hidden
    size = recipe.activation_bytes
    width, gated = _mlp_width(ffn, recipe.expert_imbalance)
    gathered = where(layout.sequence_parallel, where(layout.tp > 1, 1, 0), 0)
    candidates = []
    if recipe.framework == "megatron":
        candidates.append(
            compute(
                "backward_working_set",
                act.megatron_mlp_backward_bytes,
                mlp_width=2 * width if gated else width,
                hidden=hidden,
                tokens=tokens,
                activation_bytes=size,
                tp=layout.tp,
                gathered=gathered,
            )
        )
    else:
        formula = act.gated_mlp_backward_bytes if gated else act.plain_mlp_backward_bytes
        if gated and recipe.kernels == "fused":
            formula = act.overwriting_gated_mlp_backward_bytes
        candidates.append(
            compute(
                "backward_working_set",
                formula,
                ffn=width,
                hidden=hidden,
                tokens=tokens,
                activation_bytes=size,
                tp=layout.tp,
            )
        )
    candidates += _attention_backward(rank, run)
    if recipe.framework == "megatron" and rank.vocab:
        candidates.append(
            compute(
                "backward_working_set",
                act.megatron_head_backward_bytes,
                vocab=rank.vocab,
                hidden=hidden,
                tokens=rank.tokens,
                activation_bytes=size,
                tp=layout.tp,
                gathered=gathered,
            )
        )
    return largest_of(candidates)


_FEED_FORWARD = {
    "mlp", "mlp_input", "moe_input", "experts", "router", "router_input", "shared_experts"
}  # fmt: skip


def _attention_backward(rank: Rank, run: LayerRun) -> tuple[Line, ...]:
    """The widest point of written-out attention's backward, where scores outweigh the feed-forward part."""
    recipe, mixer = rank.recipe, run.block.mixer
    if recipe.attention != "eager" or not isinstance(mixer, Attention) or mixer.kv_lora is not None:
        return ()
    length = run.stack.tokens or recipe.seq_len
    dropped = 1 + recipe.activation_bytes if recipe.dropout else 0
    parts = full_layer(rank, run).children
    return (
        compute(
            "backward_working_set",
            act.eager_attention_backward_bytes,
            heads=mixer.heads,
            span=min(length, mixer.span or length),
            tokens=rank.run_tokens(run),
            softmax_bytes=softmax_bytes(mixer, recipe),
            probability_bytes=probability_bytes(mixer, recipe) + dropped,
            freed_bytes=total(
                "freed", tuple(part for part in parts if part.name in _FEED_FORWARD), unit="bytes"
            ),
            tp=rank.layout.tp,
        ),
    )


def backward_transients(rank: Rank) -> tuple[Line, ...]:
    """Gathered weights and gradients under reduction while a layer's backward runs, under full sharding."""
    if not rank.gathers:
        return ()
    recipe = rank.recipe
    if recipe.framework == "deepspeed":
        return (_deepspeed_live(rank),)
    if _frozen_apart(rank):
        return (_frozen_gathered(rank),)
    formula: Callable[..., Any]
    sizes: dict[str, Any] = {
        "layer_params": rank.layer_params(),
        "element_bytes": recipe.compute_bytes,
        "reduce_bytes": recipe.reduce_bytes,
    }
    if not recipe.reshard:
        sizes["layers"] = rank.stage.depth
    if recipe.wrapped_root:
        sizes["root_params"] = rank.root_params()
        sizes["head_params"] = rank.stage.head.sharded / rank.layout.tp
        formula = mem.fsdp_backward_bytes if recipe.reshard else mem.fsdp_backward_unresharded_bytes
    else:
        sizes["table_params"] = rank.root_params()
        formula = (
            mem.fsdp_wrapped_backward_bytes if recipe.reshard else mem.fsdp_wrapped_backward_unresharded_bytes
        )
    return (compute("gathered_weights_and_gradients", formula, **sizes),)


def _frozen_apart(rank: Rank) -> bool:
    """Whether frozen weights have no gradient: FSDP2 shards each parameter, FSDP1 flattens a layer's."""
    return rank.recipe.adapters is not None and rank.recipe.year >= PARAMETER_SHARDING_YEAR


def _frozen_gathered(rank: Rank) -> Line:
    """Frozen weights gathered while a layer runs backward beside its adapters."""
    recipe, layer, root = rank.recipe, rank.layer_params(), rank.root_params()
    ahead = (root + layer) if recipe.wrapped_root else maximum(root, layer)
    if not recipe.reshard:
        ahead = root + (rank.stage.depth - 1) * layer
    if recipe.adapters is not None and recipe.adapters.trained_embeddings:
        ahead = ahead + rank.stage.head.sharded / rank.layout.tp  # its gradient
    return compute(
        "gathered_weights",
        mem.fsdp_frozen_backward_bytes,
        layer_params=layer,
        other_params=ahead,
        element_bytes=recipe.compute_bytes,
    )


def end_transients(rank: Rank) -> tuple[Line, ...]:
    """The root group's gradients as they are reduced, under full sharding."""
    recipe = rank.recipe
    if not rank.gathers or recipe.framework == "deepspeed":
        return ()
    if _frozen_apart(rank) and recipe.adapters is not None and not recipe.adapters.trained_embeddings:
        return ()
    return (
        compute(
            "root_gradients",
            mem.fsdp_end_bytes,
            root_params=rank.root_params(),
            layer_params=rank.layer_params(),
            element_bytes=recipe.compute_bytes,
            reduce_bytes=recipe.reduce_bytes,
        ),
    )


def _mlp_width(ffn: object, expert_imbalance: float) -> tuple[float, bool]:
    """Width of the gradients in the feed-forward backward, per token, and whether it is gated."""
    if isinstance(ffn, Mlp):
        return ffn.ffn, ffn.gated
    if isinstance(ffn, Moe):
        return expert_imbalance * ffn.top_k * ffn.expert_ffn + ffn.shared_ffn, ffn.gated
    return 0, False
