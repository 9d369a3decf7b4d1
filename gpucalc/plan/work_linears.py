"""Seconds a layer's matrices take: products and gradients, casts, adapters, unpacking of 4-bit weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpucalc.formulas import compute as f
from gpucalc.graph import Linear, Shard
from gpucalc.line import Line, compute
from gpucalc.num import Num, ceil_div, maximum, where
from gpucalc.plan.device import Device
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.work_counts import (
    CAST_PASSES,
    DEQUANTISE_BYTES,
    EXPERT_CALLS,
    LINEAR_CALLS,
    LORA_CALLS,
    LOW_PRECISION_CALLS,
)
from gpucalc.plan.work_lines import LayerWork, add_elementwise

TILE_ROWS = 128  # rows of a matrix tile; an expert's last tile is padded to it


def local_shape(
    linear: Linear, tokens: Num, layout: Layout, *, imbalance: float
) -> tuple[Num, Num, Num, Num]:
    """Rows, inputs, outputs and matrices of a linear on one rank.

    imbalance: tokens of the busiest rank's experts over the mean, which the others wait for.
    """
    if linear.shard is Shard.EXPERT:
        # Every rank computes top_k / tp of its tokens' expert work, in tiles of whole rows.
        matrices = maximum(linear.copies / layout.ep, 1)
        rows = imbalance * tokens * linear.active * layout.etp / layout.tp
        padded = ceil_div(rows / matrices, TILE_ROWS) * TILE_ROWS * matrices
        return where(rows > 0, padded, rows), linear.inputs, linear.outputs / layout.etp, matrices
    rows = tokens * linear.active
    if linear.shard is Shard.ROW:
        return rows, linear.inputs / layout.tp, linear.outputs, linear.copies
    if linear.shard is Shard.REPLICATED:
        rows = where(layout.sequence_parallel, rows / layout.tp, rows)
        return rows, linear.inputs, linear.outputs, linear.copies
    return rows, linear.inputs, linear.outputs / layout.tp, linear.copies


def linear_lines(
    linear: Linear,
    tokens: Num,
    layout: Layout,
    recipe: Recipe,
    device: Device,
    *,
    low: bool,
    fused: bool = False,
) -> tuple[Line, list[Line]]:
    """Forward time of a linear, and backward times of its input and weight gradients.

    fused: the experts of a rank are one kernel.
    """
    rows, inputs, outputs, matrices = local_shape(linear, tokens, layout, imbalance=recipe.expert_imbalance)
    low = low and linear.shard is not Shard.REPLICATED
    rates = device.matrix if low else device.wide
    operand = _stored_bytes(recipe.math) if low else where(recipe.activation_bytes == 4, 4, 2)
    result = recipe.activation_bytes
    flops = compute("flops", f.linear_flops, tokens=rows, inputs=inputs, outputs=outputs, active=1)
    shape = {"rows": rows, "inputs": inputs, "outputs": outputs, "matrices": matrices}
    if linear.shard is Shard.EXPERT and not fused:  # every expert's product is a call of its own
        rates = rates | {
            "overhead_s": compute("overhead", f.repeated_s, each_s=rates["overhead_s"], times=matrices)
        }
    moved = compute("bytes", f.gemm_bytes, operand_bytes=operand, result_bytes=result, **shape)
    forward = compute(linear.name, f.gemm_s, flops=flops, bytes_moved=moved, **rates)
    back_moved = compute(
        "bytes",
        f.gemm_bytes,
        operand_bytes=operand,
        result_bytes=result,
        rows=rows,
        inputs=outputs,
        outputs=inputs,
        matrices=matrices,
    )
    backward = [
        compute(f"{linear.name}_input_gradient", f.gemm_s, flops=flops, bytes_moved=back_moved, **rates)
    ]
    if recipe.adapters is None:
        weight_moved = compute(
            "bytes",
            f.weight_gradient_bytes,
            operand_bytes=operand,
            gradient_bytes=recipe.gradient_bytes,
            # fused accumulation reads and writes the sum; a separate addition moves the gradient 3 times more
            gradient_passes=where(layout.micro_batches > 1, 2 if recipe.framework == "megatron" else 4, 1),
            **shape,
        )
        backward.append(
            compute(
                f"{linear.name}_weight_gradient", f.gemm_s, flops=flops, bytes_moved=weight_moved, **rates
            )
        )
    return forward, backward


def _stored_bytes(math: str) -> float:
    return {"fp4": 0.5625, "fp6": 0.75}.get(math, 1.0)  # fp4 with one fp8 scale per 16 values


def add_linears(
    work: LayerWork,
    linears: tuple[Linear, ...],
    tokens: Num,
    layout: Layout,
    recipe: Recipe,
    device: Device,
    *,
    low: bool,
    fused: bool = False,
) -> None:
    """Every product of these linears, with the casts and adapters the recipe puts beside them.

    low: in the recipe's low precision; fused: the experts of a rank are one kernel.
    """
    seen: set[tuple[int, float]] = set()
    made: dict[Any, tuple[Line, list[Line]]] = {}  # keys and values, gate and up have one shape
    for linear in linears:
        inside = fused and linear.shard is Shard.EXPERT
        key = (linear.inputs, linear.outputs, linear.shard, linear.active, linear.copies)
        if key not in made:
            made[key] = linear_lines(linear, tokens, layout, recipe, device, low=low, fused=inside)
        forward, backward = made[key]
        work.matrix.append(forward if forward.name == linear.name else replace(forward, name=linear.name))
        work.matrix_back.extend(backward)
        module = "experts" if linear.shard is Shard.EXPERT else None
        work.call(LINEAR_CALLS[recipe.kernels], module)
        rows, inputs, outputs, matrices = local_shape(
            linear, tokens, layout, imbalance=recipe.expert_imbalance
        )
        if linear.shard is Shard.EXPERT and not fused:
            work.call(matrices * EXPERT_CALLS[recipe.kernels] * (2 if low else 1), module)
        fresh = (linear.inputs, linear.active) not in seen
        seen.add((linear.inputs, linear.active))
        if low and linear.shard is not Shard.REPLICATED and not inside:
            # The forward input once per distinct tensor, the gradient of every output.
            work.call(LOW_PRECISION_CALLS[recipe.kernels], module)
            stored = _stored_bytes(recipe.math)
            # TransformerEngine keeps scales and cast weights; elsewhere each use finds its maximum first.
            cached = recipe.cached_fp8_weights
            source = 2 if cached else 4
            casts = [(work.traffic_back, f"{linear.name}_gradient_cast", rows * outputs)]
            if fresh:
                casts.append((work.traffic, f"{linear.name}_input_cast", rows * inputs))
            if not cached:
                casts.append((work.traffic, f"{linear.name}_weight_cast", matrices * inputs * outputs))
            for lines, name, elements in casts:
                moved = compute(
                    "bytes", f.quantise_bytes, elements=elements, source_bytes=source, stored_bytes=stored
                )
                lines.append(device.move(name, moved))
        if recipe.autocast:
            work.call(2, module)
            add_elementwise(work, f"{linear.name}_cast", rows, inputs, (CAST_PASSES, CAST_PASSES), 2, device)
            add_elementwise(
                work,
                f"{linear.name}_weight_cast",
                inputs * linear.copies,
                outputs,
                (CAST_PASSES, CAST_PASSES),
                2,
                device,
            )
        if recipe.adapters is not None and linear.name in recipe.adapters.targets:
            work.call(LORA_CALLS, module)
            _adapter(work, linear, rows, inputs, outputs, recipe, device)
        if recipe.method == "qlora" and recipe.adapters is not None:
            adapters = recipe.adapters
            base = adapters.base_bytes_per_param
            for lines in (work.traffic, work.traffic_back):
                moved = compute(
                    "bytes",
                    f.elementwise_bytes,
                    tokens=inputs * linear.copies,
                    width=outputs,
                    passes=1,
                    element_bytes=base + DEQUANTISE_BYTES[adapters.keeps_dequantised],
                )
                lines.append(device.move(f"{linear.name}_dequantise", moved))


def _adapter(
    work: LayerWork, linear: Linear, rows: Num, inputs: Num, outputs: Num, recipe: Recipe, device: Device
) -> None:
    adapters = recipe.adapters
    assert adapters is not None
    # Fused stacks keep adapters in the compute type; PEFT's are fp32 copies.
    size = recipe.activation_bytes if recipe.kernels == "fused" else adapters.element_bytes
    for name, a, b in (
        (f"{linear.name}_lora_a", inputs, adapters.rank),
        (f"{linear.name}_lora_b", adapters.rank, outputs),
    ):
        flops = compute("flops", f.linear_flops, tokens=rows, inputs=a, outputs=b, active=1)
        moved = compute(
            "bytes",
            f.gemm_bytes,
            rows=rows,
            inputs=a,
            outputs=b,
            matrices=1,
            operand_bytes=size,
            result_bytes=size,
        )
        line = compute(name, f.gemm_s, flops=flops, bytes_moved=moved, **device.wide)
        work.matrix.insert(0, line)  # before the last product, which a checkpoint may skip
        work.matrix_back.extend((line, line))
    # input cast or dropout, and the addition to the layer's output
    if recipe.kernels == "eager":
        add_elementwise(
            work, f"{linear.name}_lora_input", rows, inputs, (2, 3), adapters.element_bytes, device
        )
    add_elementwise(work, f"{linear.name}_lora_add", rows, outputs, (3, 2), recipe.activation_bytes, device)
