"""Lines of model state: weights, gradients, optimizer states, framework buffers, what the step needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpucalc.formulas import memory as mem
from gpucalc.graph import Shard
from gpucalc.line import Kind, Line, compute, largest_of, total
from gpucalc.num import Num, holds, is_scalar, present
from gpucalc.plan import allowances
from gpucalc.plan.engine_state import deepspeed_buckets, gradient_partition, partitions_at_the_end
from gpucalc.plan.kept import widest_run
from gpucalc.plan.optimizer_state import shaped_states
from gpucalc.plan.rank import Rank


def split(
    rank: Rank,
    name: str,
    function: Callable[..., Any],
    *,
    held: tuple[float, float] | None = None,
    **inputs: Any,
) -> Line:
    """A state line as the sum of its dense and expert parts, each sharded over its own group.

    held: those parts' parameters, the stage's by default.
    """
    layout = rank.layout
    dense, expert = (rank.dense, rank.expert) if held is None else held
    parts = []
    for part, number, whole, shard in (
        ("dense", dense, rank.dense_params, layout.shard),
        ("experts", expert, rank.expert_params, layout.expert_shard),
    ):
        # The line says where the number comes from, where it is all the rank holds.
        params = whole if _same(number, whole.value) else number
        if present(number):
            parts.append(
                compute(
                    part,
                    function,
                    params=params,
                    shard=shard,
                    zero_stage=layout.zero_stage,
                    **inputs,
                )
            )
    return total(name, tuple(parts), unit="bytes")


def _same(number: Num, other: Num) -> bool:
    return number is other or (is_scalar(number) and is_scalar(other) and number == other)


def states(rank: Rank) -> tuple[Line, ...]:
    """Weights and optimizer states between steps; what is offloaded is not here."""
    recipe = rank.recipe
    if recipe.adapters is not None:
        return adapter_states(rank)
    lines: list[Line] = []
    if "parameters" not in recipe.offload:
        trained = split(
            rank, "weights", mem.weight_bytes, held=rank.trained(), parameter_bytes=recipe.parameter_bytes
        )
        lines.append(trained)
        if recipe.frozen:
            lines.append(frozen_weights(rank))
        lines += [*frozen_models(rank), *averaged_weights(rank)]
    if "optimizer" not in recipe.offload:
        alike = split(
            rank,
            "optimizer_states",
            mem.optimizer_state_bytes,
            held=rank.trained(),
            bytes_per_param=recipe.optimizer_bytes,
        )
        lines.append(total("optimizer_states", (*alike.children, *shaped_states(rank)), unit="bytes"))
    return tuple(lines)


def frozen_weights(rank: Rank) -> Line:
    """Weights of the parts the run leaves untrained, held in the compute type."""
    return compute(
        "frozen_weights",
        mem.weight_bytes,
        params=rank.frozen,
        parameter_bytes=rank.recipe.compute_bytes,
        shard=rank.layout.shard,
        zero_stage=rank.layout.zero_stage,
    )


def frozen_models(rank: Rank) -> tuple[Line, ...]:
    """The frozen copy that preference training compares with, and models that score answers.

    Held in the compute type and sharded as the trained weights are.
    """
    recipe = rank.recipe
    copies = (("reference_weights", int(recipe.reference_model)), ("reward_weights", recipe.reward_models))
    return tuple(
        split(
            rank,
            name,
            mem.weight_bytes,
            held=(count * rank.dense, count * rank.expert),
            parameter_bytes=recipe.compute_bytes,
        )
        for name, count in copies
        if count
    )


def averaged_weights(rank: Rank) -> tuple[Line, ...]:
    """A moving average of the trained weights, of the fp32 ones where there are any."""
    recipe = rank.recipe
    if not recipe.ema:
        return ()
    return (
        split(
            rank,
            "averaged_weights",
            mem.averaged_weight_bytes,
            held=rank.trained(),
            element_bytes=4 if recipe.fp32_masters else recipe.parameter_bytes,
        ),
    )


def gradients(rank: Rank) -> tuple[Line, ...]:
    """All gradients of a step, as they stand when the optimizer begins."""
    recipe = rank.recipe
    if "gradients" in recipe.offload:
        return ()
    if recipe.optimizer_in_backward:
        return (
            compute(
                "gradients",
                mem.gradient_bytes,
                params=rank.largest_tensor(),
                element_bytes=recipe.gradient_bytes,
                shard=rank.layout.shard,
                zero_stage=rank.layout.zero_stage,
            ),
        )
    if recipe.adapters is None:
        return (
            split(
                rank,
                "gradients",
                mem.gradient_bytes,
                held=rank.trained(),
                element_bytes=recipe.gradient_bytes,
            ),
        )
    parts = tuple(
        compute(
            name,
            mem.gradient_bytes,
            params=params,
            element_bytes=size,
            shard=rank.layout.shard,
            zero_stage=rank.layout.zero_stage,
        )
        for name, params, size in rank.trained_parts()
    )
    return (total("gradients", parts, unit="bytes"),)


def adapter_states(rank: Rank) -> tuple[Line, ...]:
    """The frozen base, the adapters and their optimizer states."""
    recipe, adapters, layout = rank.recipe, rank.recipe.adapters, rank.layout
    assert adapters is not None
    linear = sum(run.held.linear for run in rank.stage.layers) / layout.tp
    rest = rank.dense - linear
    base_stage = layout.zero_stage if adapters.base_sharded else 0
    frozen = total(
        "weights",
        (
            compute(
                "frozen_linears",
                mem.weight_bytes,
                params=linear + rank.expert,
                parameter_bytes=adapters.base_bytes_per_param,
                shard=layout.shard,
                zero_stage=base_stage,
            ),
            compute(
                "other_weights",
                mem.weight_bytes,
                params=rest,
                parameter_bytes=adapters.rest_bytes if adapters.quantised else recipe.compute_bytes,
                shard=layout.shard,
                zero_stage=layout.zero_stage,
            ),
            *(
                compute(
                    name,
                    mem.weight_bytes,
                    params=params,
                    parameter_bytes=size,
                    shard=layout.shard,
                    zero_stage=layout.zero_stage,
                )
                for name, params, size in rank.trained_parts()
            ),
        ),
        unit="bytes",
    )
    # States take the type of what they belong to; optimizer_bytes is that of the adapters.
    states = tuple(
        compute(
            name,
            mem.optimizer_state_bytes,
            params=params,
            bytes_per_param=recipe.optimizer_bytes * size / adapters.element_bytes,
            shard=layout.shard,
            zero_stage=layout.zero_stage,
        )
        for name, params, size in rank.trained_parts()
    )
    optimizer = total("optimizer_states", (*states, *shaped_states(rank)), unit="bytes")
    weights = (frozen, *frozen_models(rank))
    return (
        *(() if "parameters" in recipe.offload else weights),
        *(() if "optimizer" in recipe.offload else (optimizer,)),
    )


def load_extra(rank: Rank) -> tuple[Line, ...]:
    """Beside the weights while DeepSpeed builds its state: the larger of two moments.

    The weights as read, while they are cast; the clone of the partition that becomes the master
    weights. (Flattening takes a copy too, but moves to the host where the GPU has no room.)
    """
    recipe, layout = rank.recipe, rank.layout
    if recipe.framework != "deepspeed" or recipe.adapters is not None:
        return ()
    if layout.zero_stage >= 3:
        return _undivided(rank) if recipe.whole_load else ()
    moments = []
    if recipe.loaded_bytes != recipe.parameter_bytes:
        moments.append(
            compute(
                "loaded_weights",
                mem.loaded_weight_bytes,
                kind=Kind.ASSUMED if recipe.load_assumed else None,
                params=sum(rank.trained()),
                loaded_bytes=recipe.loaded_bytes,
            )
        )
    if "optimizer" not in recipe.offload and recipe.fp32_masters:
        moments.append(
            split(
                rank,
                "master_partition",
                mem.deepspeed_partition_bytes,
                held=rank.trained(),
                element_bytes=recipe.parameter_bytes,
            )
        )
    return largest_of(moments)


def _undivided(rank: Rank) -> tuple[Line, ...]:
    """The rest of the model that stage 3 takes onto each GPU before it divides it."""
    return (
        compute(
            "undivided_weights",
            mem.undivided_weight_bytes,
            params=rank.dense + rank.expert,
            element_bytes=rank.recipe.compute_bytes,
            shard=rank.layout.shard,
        ),
    )


def buffers(rank: Rank, *, at_step: bool = False) -> tuple[Line, ...]:
    """What frameworks keep beside model state: buckets, dummy gradients, fp8 copies."""
    recipe, layout, lines = rank.recipe, rank.layout, []
    trained = rank.trained_params()
    if recipe.gradient_buckets and holds(layout.dp > 1):
        lines.append(
            compute(
                "ddp_buckets",
                mem.ddp_bucket_bytes,
                params=trained,
                element_bytes=recipe.gradient_bytes,
            )
        )
    if recipe.engine_stage >= 3 or (recipe.engine_stage == 1 and rank.accumulates and not at_step):
        lines += deepspeed_buckets(rank)  # kept from the start, or from the first micro-batch on
    if rank.gathers and not recipe.reshard and layout.pp > 1 and rank.accumulates:
        lines.append(
            compute(
                "unsharded_gradients",
                mem.fsdp_accumulated_gradient_bytes,
                params=trained,
                reduce_bytes=recipe.reduce_bytes,
            )
        )
    if recipe.framework == "megatron" and recipe.adapters is None:  # frozen weights have no gradient
        lines.append(
            compute(
                "dummy_weight_gradients",
                mem.dummy_weight_gradient_bytes,
                matmul_params=rank.distinct_shapes(),
                tp=layout.tp,
            )
        )
    # By rows and by columns a byte each: as much as the 16-bit weights they replace.
    if recipe.cached_fp8_weights and not recipe.fp8_params:
        lines.append(
            compute(
                "fp8_weight_copies",
                mem.quantised_weight_copy_bytes,
                linear_params=rank.layer_linear_params(),
                element_bytes=recipe.low_precision_bytes,
            )
        )
    return tuple(lines)


def step_gradients(rank: Rank) -> tuple[Line, ...]:
    """Gradients when the optimizer begins: all of them, or the partition that stage 1 has left."""
    return (gradient_partition(rank, "gradients"),) if partitions_at_the_end(rank) else gradients(rank)


def step_transients(rank: Rank) -> tuple[Line, ...]:
    """What appears while the optimizer steps."""
    recipe, layout = rank.recipe, rank.layout
    trained = rank.trained_params()
    lines = []
    if "optimizer" in recipe.offload:
        return ()
    sub_group = None  # stage 3 steps one after the other
    if recipe.framework == "deepspeed" and layout.zero_stage >= 3:
        sub_group = allowances.stated("sub_group_size", recipe.sub_group, allowances.DEEPSPEED_SUB_GROUP)
    # With fp32 gradients (bf16 before 2023) their partition is a view of what is there.
    if recipe.framework == "deepspeed" and recipe.fp32_masters and recipe.gradient_bytes != 6:
        group: dict[str, Any] = {
            "params": trained,
            "shard": layout.shard if layout.zero_stage >= 1 else 1,
            "sub_group_elements": sub_group or trained,
        }
        lines.append(compute("fp32_gradient_partition", mem.deepspeed_step_gradient_bytes, **group))
        if recipe.engine_stage >= 1:
            lines.append(
                compute(
                    "flat_gradients",
                    mem.deepspeed_flat_gradient_bytes,
                    element_bytes=recipe.gradient_bytes,
                    **group,
                )
            )
    if recipe.step_temporary_bytes:
        # Tensors are stepped together by element type, one type after the other.
        stepped = [(trained, recipe.step_temporary_bytes)]
        if recipe.adapters is not None:
            stepped = [(params, size) for _, params, size in rank.trained_parts()]
        lines += largest_of(
            [
                compute(
                    "step_temporary",
                    mem.foreach_step_bytes,
                    params=params,
                    state_bytes=size,
                    shard=layout.shard if layout.zero_stage >= 1 else 1,
                    sub_group_elements=sub_group or params,
                )
                for params, size in stepped
            ]
        )
    return tuple(lines)


def head_gradient(rank: Rank) -> tuple[Line, ...]:
    """Gradient of the head, the first to appear."""
    if not rank.vocab or rank.recipe.adapters is not None:
        return ()
    layout = rank.layout
    held = rank.stage.head.sharded or rank.stage.embedding.sharded
    return (
        compute(
            "gradients",
            mem.gradient_bytes,
            params=held / layout.tp,
            element_bytes=rank.recipe.gradient_bytes,
            shard=layout.shard,
            zero_stage=layout.zero_stage,
        ),
    )


def gradients_but_one_layer(rank: Rank) -> tuple[Line, ...]:
    """Gradients there when the sweep reaches its last layer: all but that layer's and the table's."""
    recipe, stage, layout = rank.recipe, rank.stage, rank.layout
    trunk = [run for run in stage.layers if run.in_trunk]
    if recipe.adapters is not None or recipe.optimizer_in_backward or not trunk:
        return ()
    if "gradients" in recipe.offload:
        return ()
    layer = trunk[0].params + trunk[0].shared.times(-1)  # what layers share has had its first gradient
    tied = stage.first and stage.last and rank.graph.head is not None and rank.graph.head.tied
    table = 0 if tied else stage.embedding.sharded
    held = stage.params
    dense = (held.sharded - layer.sharded - table) / layout.tp + held.replicated - layer.replicated
    expert = (held.expert - layer.expert) / (layout.ep * layout.etp)
    return (
        split(
            rank, "gradients", mem.gradient_bytes, held=(dense, expert), element_bytes=recipe.gradient_bytes
        ),
    )


def shared_gradients(rank: Rank) -> tuple[Line, ...]:
    """Gradients of weights that serve several layers: there once the sweep has passed one of them."""
    recipe, layout = rank.recipe, rank.layout
    shared = [run.shared for run in rank.stage.layers if run.shared.total]
    if not shared or recipe.adapters is not None or recipe.optimizer_in_backward:
        return ()
    if "gradients" in recipe.offload:
        return ()
    dense = sum(part.sharded / layout.tp + part.replicated for part in shared)
    expert = sum(part.expert for part in shared) / (layout.ep * layout.etp)
    return (
        split(
            rank,
            "shared_gradients",
            mem.gradient_bytes,
            held=(dense, expert),
            element_bytes=recipe.gradient_bytes,
        ),
    )


def layer_gradient(rank: Rank) -> tuple[Line, ...]:
    """Gradient of the feed-forward output matrix, made at the widest point of a layer's backward.

    Where gradients are reduced layer by layer it is among what is gathered and reduced.
    """
    recipe, layout = rank.recipe, rank.layout
    if recipe.adapters is not None or layout.zero_stage >= 2 or not rank.stage.layers:
        return ()
    ffn = widest_run(rank).block.ffn
    rows = [linear for linear in ffn.linears if linear.outputs == ffn.hidden] if ffn is not None else []
    if not rows:
        return ()
    dense = sum(linear.inputs * linear.outputs for linear in rows if linear.shard is not Shard.EXPERT)
    expert = sum(
        linear.copies * linear.inputs * linear.outputs for linear in rows if linear.shard is Shard.EXPERT
    )
    return (
        compute(
            "layer_gradient",
            mem.gradient_bytes,
            params=dense / layout.tp + expert / (layout.ep * layout.etp),
            element_bytes=recipe.gradient_bytes,
            shard=1,
            zero_stage=0,
        ),
    )
