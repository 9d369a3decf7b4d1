"""Lines of what the forward pass of a rank leaves for backward, recomputation taken into account."""

from __future__ import annotations

from gpucalc.formulas import activations as act
from gpucalc.formulas import losses
from gpucalc.formulas import memory as mem
from gpucalc.formulas import optimizers as opt
from gpucalc.line import Kind, Line, compute, total
from gpucalc.num import Num, holds
from gpucalc.plan.activation import layer_line, norm_line
from gpucalc.plan.rank import Rank
from gpucalc.plan.selective import selective_line
from gpucalc.plan.stages import LayerRun, block_linears

# Parts of a layer as wide as the residual stream: whole on each tensor-parallel rank unless sequence
# parallelism splits the tokens.
_RESIDUAL_WIDE = {
    "mixer_input",
    "mlp_input",
    "moe_input",
    "cross_input",
    "dropout_masks",
    "router",
    "router_input",
    "layer_input",
    "kv_lora_norm",
    "kv_lora_input",
    "q_lora_norm",
    "q_lora_input",
}


def _per_layer(rank: Rank, run: LayerRun, per_token: Line) -> Line:
    """Bytes one layer keeps for one micro-batch on this rank."""
    tokens = rank.run_tokens(run)
    parts = tuple(
        compute(
            part.name,
            act.layer_saved_bytes,
            bytes_per_token=part,
            tokens=tokens,
            tp=_shards(rank, part.name, run),
        )
        for part in per_token.children
    )
    return total(run.block.name, parts, unit="bytes")


def _shards(rank: Rank, name: str, run: LayerRun) -> int:
    """Tensor-parallel ranks a saved part is divided over."""
    gathered = rank.recipe.gathered_tp_inputs and name in ("mixer_input", "mlp_input", "moe_input")
    if gathered:
        return 1
    return rank.sp if _residual_wide(name, run) else rank.layout.tp


def _residual_wide(name: str, run: LayerRun) -> bool:
    return name in _RESIDUAL_WIDE or any(name == norm.name for norm in run.block.norms)


def full_layer(rank: Rank, run: LayerRun) -> Line:
    """One layer's activations without recomputation."""
    known = rank.layers.get(("full", id(run.stack), id(run.block)))
    if known is None:
        per_token = layer_line(
            run.block,
            rank.recipe,
            seq_len=run.stack.tokens or rank.recipe.seq_len,
            memory_tokens=rank.memory_ratio(run),
        )
        known = rank.layers["full", id(run.stack), id(run.block)] = _per_layer(rank, run, per_token)
    return known


def checkpoint(rank: Rank, run: LayerRun) -> Line:
    """One layer's input."""
    recipe = rank.recipe
    size = recipe.stream_bytes
    return compute(
        run.block.name,
        act.checkpoint_bytes,
        hidden=run.stack.hidden,
        tokens=rank.run_tokens(run),
        activation_bytes=size,
        shards=rank.sp,
    )


def kept_layer(rank: Rank, run: LayerRun) -> Line:
    """What one layer keeps from forward to backward under the recipe's recomputation."""
    known = rank.layers.get(("kept", id(run.stack), id(run.block)))
    if known is None:
        known = rank.layers["kept", id(run.stack), id(run.block)] = _kept_layer(rank, run)
    return known


def _kept_layer(rank: Rank, run: LayerRun) -> Line:
    recipe = rank.recipe
    if recipe.recompute == "full":
        return checkpoint(rank, run)
    if recipe.recompute == "none":
        return full_layer(rank, run)
    if recipe.recompute_scope == "layer":
        return compute(
            run.block.name,
            act.every_second_layer_bytes,
            full_bytes=full_layer(rank, run),
            checkpoint_bytes=checkpoint(rank, run),
        )
    seq_len = run.stack.tokens or recipe.seq_len
    return _per_layer(rank, run, selective_line(run.block, recipe, seq_len=seq_len))


def activations(rank: Rank, *, one_layer: bool = False) -> tuple[Line, ...]:
    """What is kept for backward; one_layer: when the sweep has come to the first layer."""
    lines: list[Line] = []
    for run in rank.stage.layers:
        if rank.idle(run):
            continue
        if one_layer and lines:
            break
        flight = rank.in_flight if run.in_trunk else 1
        lines.append(
            compute(
                f"{run.stack.name}.{run.block.name}",
                act.kept_activation_bytes,
                kind=Kind.MODELLED,
                layer_bytes=kept_layer(rank, run),
                layers=1 if one_layer else run.count,
                in_flight=flight,
            )
        )
    network = rank.graph.network
    if network is not None and network.saved_elements is not None:
        lines.append(
            compute(
                "network",
                act.network_saved_bytes,
                kind=Kind.MODELLED,
                saved_elements=network.saved_elements,
                images=rank.layout.micro_batch,
                activation_bytes=rank.recipe.activation_bytes,
            )
        )
        if rank.recipe.autocast:
            lines.append(
                compute(
                    "image_batch",
                    act.image_batch_bytes,
                    images=rank.layout.micro_batch,
                    side=network.image,
                )
            )
    if rank.stage.first and rank.graph.embedding is not None:
        lines.append(compute("token_ids", act.token_id_bytes, tokens=rank.tokens, in_flight=rank.in_flight))
        lines += _embedding_saved(rank)
    if rank.stage.first:
        lines += _convolutions_saved(rank)
    rotary = rank.rotary_dim()
    if rotary:
        lines.append(
            compute(
                "rotary_table",
                act.rotary_table_bytes,
                seq_len=rank.recipe.seq_len,
                head_dim=rotary,
                activation_bytes=rank.recipe.activation_bytes,
            )
        )
    if rank.recipe.autocast and rank.recipe.recompute == "none":
        lines.append(
            compute(
                "autocast_weights",
                mem.autocast_weight_bytes,
                linear_params=rank.layer_linear_params(one_layer=one_layer),
            )
        )
    lines += dora_weights(rank, one_layer=one_layer)
    if "activations" in rank.recipe.offload:
        return in_transit(rank)
    return (total("activations", tuple(lines), unit="bytes"),)


def _convolutions_saved(rank: Rank) -> list[Line]:
    """What convolutions over the samples of audio and their activations keep."""
    recipe, trunk = rank.recipe, rank.graph.trunk if rank.graph.stacks else None
    if trunk is None or not trunk.convolutions or recipe.adapters is not None:
        return []
    parts = tuple(
        compute(
            linear.name,
            act.convolution_saved_bytes,
            width=linear.outputs,
            rate=linear.active,
            tensors=1 if recipe.recompute == "full" else 3 if trunk.normed(linear) else 2,
            element_bytes=recipe.activation_bytes,
        )
        for linear in trunk.convolutions
    )
    return [_kept_once(rank, "convolutions", parts, tp=1)]


def _embedding_saved(rank: Rank) -> list[Line]:
    """What a norm and dropout between the table and the first layer keep: BLOOM's, BERT's."""
    recipe, embedding = rank.recipe, rank.graph.embedding
    if embedding is None or recipe.adapters is not None:
        return []
    width, per_token = embedding.width, []
    if any(vector.name == "embedding_norm" for vector in embedding.vectors):
        per_token.append(
            compute("norm", act.layernorm_saved_bytes, width=width, activation_bytes=recipe.stream_bytes)
        )
    if recipe.dropout:
        per_token.append(compute("dropout_mask", act.dropout_mask_saved_bytes, width=width, masks=1))
    if not per_token:
        return []
    return [_kept_once(rank, "embedding", tuple(per_token), tp=rank.sp)]


def _kept_once(rank: Rank, name: str, per_token: tuple[Line, ...], *, tp: Num) -> Line:
    """What a part outside the layers keeps for every micro-batch in flight."""
    kept = total("per_token", per_token, unit="bytes/token")
    layer = compute(name, act.layer_saved_bytes, bytes_per_token=kept, tokens=rank.tokens, tp=tp)
    return compute(
        name,
        act.kept_activation_bytes,
        kind=Kind.MODELLED,
        layer_bytes=layer,
        layers=1,
        in_flight=rank.in_flight,
    )


def in_transit(rank: Rank) -> tuple[Line, ...]:
    """Of activations that live on the host: what one layer keeps, on its way there or back."""
    if not rank.stage.layers:
        return ()
    run = widest_run(rank)
    return (
        compute(
            "activations_in_transit",
            act.kept_activation_bytes,
            kind=Kind.MODELLED,
            layer_bytes=kept_layer(rank, run),
            layers=1,
            in_flight=1,
            note=f"one {run.block.name}",
        ),
    )


def dora_weights(rank: Rank, *, one_layer: bool = False) -> list[Line]:
    """Frozen weights DoRA casts to its own type and, with dropout, multiplies anew."""
    recipe, adapters = rank.recipe, rank.recipe.adapters
    if adapters is None or adapters.kind != "dora" or not adapters.dropout or recipe.recompute != "none":
        return []
    if adapters.element_bytes == recipe.compute_bytes:
        return []
    runs = rank.stage.layers[:1] if one_layer else rank.stage.layers
    elements = sum(
        (1 if one_layer else run.sets(linear)) * linear.inputs * linear.outputs
        for run in runs
        for linear in block_linears(run.block)
        if linear.name in adapters.targets
    )
    return [
        compute(
            "dora_weights",
            opt.dora_weight_bytes,
            weight_elements=elements / rank.layout.tp,
            element_bytes=adapters.element_bytes,
        )
    ]


def rebuilt(rank: Rank) -> Line | None:
    """The layer that is rebuilt while its backward runs, where recomputation drops it."""
    recipe = rank.recipe
    if recipe.recompute == "none" or not rank.stage.layers:
        return None
    run = widest_run(rank)
    return compute(
        "recomputed_layer",
        act.recomputed_layer_bytes,
        kind=Kind.MODELLED,
        full_bytes=full_layer(rank, run),
        kept_bytes=0 if recipe.recompute == "full" else kept_layer(rank, run),
        note=f"one {run.block.name}",
    )


def head_saved(rank: Rank) -> tuple[Line, ...]:
    """What the final norm, the output matrix and the loss keep, on the last stage."""
    if not rank.vocab or rank.graph.head is None:
        return ()
    recipe, head = rank.recipe, rank.graph.head
    per_token = [
        compute(
            "head_input",
            act.linear_input_saved_bytes,
            width=head.hidden,
            element_bytes=recipe.activation_bytes,
            copies=1,
        )
    ]
    norm = rank.graph.trunk.final_norm
    if norm is not None:
        per_token.append(norm_line(norm, recipe, frozen=False))
    lines = [
        compute(line.name, act.layer_saved_bytes, bytes_per_token=line, tokens=rank.tokens, tp=rank.sp)
        for line in per_token
    ]
    if recipe.casts_head:
        lines.append(
            compute(
                "cast_head",
                mem.autocast_weight_bytes,
                linear_params=rank.vocab * head.hidden / rank.layout.tp,
            )
        )
    if recipe.loss == "unfused":
        lines.append(
            compute(
                "log_softmax",
                act.layer_saved_bytes,
                bytes_per_token=compute(
                    "per_token",
                    losses.unfused_loss_saved_bytes,
                    vocab=rank.vocab,
                    loss_bytes=recipe.loss_bytes,
                ),
                tokens=rank.tokens,
                tp=rank.layout.tp,
            )
        )
    return (total("head_and_loss", tuple(lines), unit="bytes"),)


def widest_run(rank: Rank) -> LayerRun:
    """The layer kind that keeps most without recomputation."""
    widest, *others = rank.stage.layers
    for run in others:
        if holds(full_layer(rank, run).value > full_layer(rank, widest).value):
            widest = run
    return widest
