"""Lines of what DeepSpeed's engine keeps beside model state: reduction buckets and gradient partitions."""

from __future__ import annotations

from gpucalc.formulas import memory as mem
from gpucalc.line import Line, compute
from gpucalc.plan import allowances
from gpucalc.plan.rank import Rank


def bucket_elements(rank: Rank) -> Line:
    """Elements of DeepSpeed's reduction bucket."""
    return allowances.stated(
        "reduce_bucket_size", rank.recipe.reduce_bucket, allowances.DEEPSPEED_REDUCE_BUCKET
    )


def deepspeed_buckets(rank: Rank) -> tuple[Line, ...]:
    """DeepSpeed's reduction buffer, made on one rank too. bf16 of stage 1 before 2023 has none."""
    recipe = rank.recipe
    if recipe.engine_stage == 0 or recipe.gradient_bytes == 6:
        return ()
    return (
        compute(
            "reduce_buckets",
            mem.deepspeed_bucket_bytes,
            bucket_elements=bucket_elements(rank),
            element_bytes=recipe.compute_bytes,
            buffers=2 if recipe.two_buckets else 1,
        ),
    )


def sweep_buffers(rank: Rank) -> tuple[Line, ...]:
    """What DeepSpeed holds during a backward pass only.

    Stages 1 and 2: the bucket. Stage 2, accumulating: the new partition beside the sum so far. Stage 3:
    the bucket's gradients laid out by rank.
    """
    recipe = rank.recipe
    buckets = deepspeed_buckets(rank)
    if not buckets:
        return ()
    trained = rank.trained_params()
    if recipe.engine_stage >= 3:
        return (
            compute(
                "scattered_gradients",
                mem.deepspeed_scatter_bytes,
                bucket_elements=bucket_elements(rank),
                params=trained,
                element_bytes=recipe.compute_bytes,
            ),
        )
    if recipe.engine_stage == 2 and rank.accumulates and "gradients" not in recipe.offload:
        return (*buckets, gradient_partition(rank))
    return () if rank.accumulates else buckets


def gradient_partition(rank: Rank, name: str = "gradient_partition") -> Line:
    """This rank's share of the reduced gradients, in the type they are made in."""
    return compute(
        name,
        mem.deepspeed_gradient_partition_bytes,
        params=rank.trained_params(),
        element_bytes=rank.recipe.compute_bytes,
        shard=rank.layout.shard,
    )


def partitions_at_the_end(rank: Rank) -> bool:
    """DeepSpeed's stage 1 since 2023: whole 16-bit gradients until the step's backward is done."""
    recipe = rank.recipe
    return (
        recipe.engine_stage == 1 and recipe.gradient_bytes == recipe.compute_bytes == 2 and not recipe.offload
    )


def cast_gradient(rank: Rank) -> tuple[Line, ...]:
    """bf16 of stage 1 before 2023: the largest gradient while it is added to the fp32 ones."""
    if rank.recipe.framework != "deepspeed" or rank.recipe.gradient_bytes != 6:
        return ()
    return (compute("cast_gradient", mem.cast_gradient_bytes, params=rank.largest_tensor()),)


def reduced_gradients(rank: Rank) -> tuple[Line, ...]:
    """The end of backward: stage 1 has the reduced partition beside the whole gradients.

    bf16 before 2023 casts its flat fp32 gradients to 16 bit for the reduction (engine.py, allreduce_bucket
    of BF16_Optimizer's get_grads_for_reduction; measured to the byte).
    """
    if rank.recipe.framework == "deepspeed" and rank.recipe.gradient_bytes == 6:
        return (
            compute(
                "gradients_in_transit",
                mem.deepspeed_gradient_partition_bytes,
                params=rank.trained_params(),
                element_bytes=rank.recipe.compute_bytes,
                shard=1,
            ),
        )
    return (gradient_partition(rank),) if partitions_at_the_end(rank) else ()
