"""Achieved FLOP/s of matrix products by element type and shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from gpucalc.formulas import calibration, compute
from gpucalc.probe.device import Device, doubtful, sample
from gpucalc.probe.sweeps import Shape, Sweep

_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_RESULT_BYTES = {**_BYTES, "fp8": 2}  # an fp8 product writes bf16
_MOST_COPIES = 64


def measure(device: Device, plan: Sweep) -> Iterator[dict[str, Any]]:
    """One point per element type and shape; a type the device refuses gives one that says why."""
    for dtype in plan.dtypes:
        for shape in plan.shapes:
            try:
                point = _point(device, dtype, shape, plan)
            except RuntimeError as error:  # an unsupported type, or no memory left
                yield {"kind": "skipped", "what": f"matmul {dtype} {shape}", "why": str(error).split("\n")[0]}
                if "out of memory" in str(error).lower():
                    continue
                break
            if point is not None:
                yield point


def _point(device: Device, dtype: str, shape: Shape, plan: Sweep) -> dict[str, Any] | None:
    rows, inputs, outputs = shape
    flops = 2.0 * rows * inputs * outputs
    moved = compute.gemm_bytes(
        rows=rows,
        inputs=inputs,
        outputs=outputs,
        matrices=1,
        operand_bytes=_BYTES[dtype],
        result_bytes=_RESULT_BYTES[dtype],
    )
    # Operands take turns, so that none is found in the cache where a model's weights would not be.
    copies = min(_MOST_COPIES, math.ceil(device.cache_bytes / moved) + 1)
    step = _step(device, dtype, shape, copies)
    step(0)
    device.synchronize()
    if device.timed(lambda: step(0)) > plan.longest_s:
        return None
    taken = sample(device, step, target_s=plan.target_s, samples=plan.samples, graph=True)
    state = device.conditions()
    rate = calibration.achieved_flops_per_s(flops=flops, elapsed_s=taken.median_s) if taken.median_s else 0.0
    return {
        "kind": "matmul",
        "dtype": dtype,
        "shape": list(shape),
        "flops": flops,
        "bytes": moved,
        "seconds": taken.median_s,
        "tflops_per_s": rate / 1e12,
        "spread": taken.spread,
        **state,
        "doubts": [*taken.doubts(), *doubtful(state)],
    }


def _step(device: Device, dtype: str, shape: Shape, copies: int) -> Callable[[int], None]:
    """A product of random matrices: zeros would draw less power and run at a higher clock."""
    torch = device.torch
    rows, inputs, outputs = shape
    if dtype == "fp8":
        return _fp8_step(device, shape, copies)
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32)
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    a = [torch.randn(rows, inputs, device=device.place).to(kind) for _ in range(copies)]
    b = [torch.randn(inputs, outputs, device=device.place).to(kind) for _ in range(copies)]
    out = torch.empty(rows, outputs, device=device.place, dtype=kind)

    def step(number: int) -> None:
        torch.mm(a[number % copies], b[number % copies], out=out)

    return step


def _fp8_step(device: Device, shape: Shape, copies: int) -> Callable[[int], None]:
    torch = device.torch
    rows, inputs, outputs = shape
    kind = torch.float8_e4m3fn
    one = torch.ones((), device=device.place)
    a = [torch.randn(rows, inputs, device=device.place).to(kind) for _ in range(copies)]
    # The library wants the second operand by columns.
    b = [torch.randn(outputs, inputs, device=device.place).to(kind).t() for _ in range(copies)]

    def step(number: int) -> None:
        torch._scaled_mm(
            a[number % copies],
            b[number % copies],
            scale_a=one,
            scale_b=one,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,  # as forward passes and inference run it
        )

    return step
