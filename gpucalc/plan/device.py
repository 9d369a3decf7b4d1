"""At what rates one GPU multiplies, attends and moves bytes under a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpucalc.errors import InputError
from gpucalc.formulas import compute as f
from gpucalc.line import Kind, Line, compute
from gpucalc.plan.layout import Recipe
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.hardware import KernelRate, KernelSpec

LOW_PRECISION = ("fp8", "fp6", "fp4", "int8")

# On other vendors' GPUs the catalogue carries Hopper's share over, and PyTorch's kernels are no closer to it.
PORTABLE_ATTENTION = Line(
    "portable_attention",
    0.55,
    "fraction",
    Kind.MEASURED,
    source="Shah et al. 2024: FlashAttention-2, PyTorch's kernel, reaches 35 % of an H100, FlashAttention-3"
    " 65 to 75 %",
)
FIRST_FLASH = Line(
    "first_flash",
    0.5,
    "fraction",
    Kind.MEASURED,
    source="Dao 2023: FlashAttention-1 reaches 25 to 40 % of an A100, FlashAttention-2 50 to 73 %",
)
NATIVE_ATTENTION_FROM = 9.0  # compute capability from which the two differ


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU's rates as formula inputs, for the precisions of a recipe."""

    gpu: GpuSpec
    kernels: KernelSpec
    matrix: dict[str, Any]  # inputs of gemm_s at the recipe's precision
    wide: dict[str, Any]  # the same at the precision attention and head run at
    attention: dict[str, Any]
    attention_backward: dict[str, Any]
    traffic: dict[str, Any]
    launch: Line
    low_precision: bool

    @classmethod
    def of(cls, gpu: GpuSpec, kernels: KernelSpec, recipe: Recipe) -> Device:
        """The device for a recipe. Raises InputError for a precision the GPU cannot multiply in."""
        low = recipe.math in LOW_PRECISION
        wide = "bf16" if low else recipe.math
        bandwidth = gpu.memory_bandwidth.line("memory_bandwidth")
        training = kernels.training_efficiency.line("training_efficiency")
        own = kernels.training_efficiency_low if low else None
        training_low = own.line("training_efficiency") if own is not None else training

        def rates(
            rate: KernelRate, math: str, share: str, alone: Line | None = None, inside: Line = training
        ) -> dict[str, Any]:
            return {
                "peak_flops_per_s": _peak(gpu, math, recipe.clock_share),
                share: compute(
                    share,
                    f.in_step_efficiency,
                    alone=alone if alone is not None else rate.mfu_max.line("alone"),
                    training_efficiency=inside,
                ),
                "bandwidth_bytes_per_s": bandwidth,
                "hbm_efficiency": rate.hbm_efficiency.line("hbm_efficiency"),
                "p": rate.p.line("p"),
                "overhead_s": rate.overhead.line("overhead"),
            }

        plain = _gemm(kernels, wide)
        unquantised = _unquantised(kernels, recipe.math, plain) if low else None
        attention_math = wide if wide in ("fp16", "bf16") else recipe.math
        # Fused attention is bound by its own pipeline and not by power: its rate alone holds inside a step.
        attention = rates(kernels.attention, attention_math, "efficiency")
        attention["efficiency"] = _attention_share(gpu, kernels, recipe)
        backward = dict(attention)
        backward["efficiency"] = compute(
            "efficiency",
            f.in_step_efficiency,
            alone=attention["efficiency"],
            training_efficiency=kernels.attention_backward_efficiency.line("attention_backward_efficiency"),
        )
        return cls(
            gpu=gpu,
            kernels=kernels,
            matrix=rates(plain, recipe.math, "mfu_max", unquantised, training_low),
            wide=rates(plain, wide, "mfu_max"),
            attention=attention,
            attention_backward=backward,
            traffic={
                "bandwidth_bytes_per_s": bandwidth,
                "hbm_efficiency": kernels.elementwise_hbm_efficiency.line("hbm_efficiency"),
            },
            launch=kernels.launch_overhead.line("launch_overhead"),
            low_precision=low,
        )

    def move(self, name: str, bytes_moved: Any) -> Line:
        """Time to move bytes through device memory."""
        return compute(name, f.traffic_s, bytes_moved=bytes_moved, **self.traffic)


def _peak(gpu: GpuSpec, math: str, clock_share: float) -> Line:
    peak = gpu.peak(math)
    if peak is None:
        raise InputError(
            "this GPU does not multiply in that precision", where=gpu.id, given=math, legal=sorted(gpu.peaks)
        )
    if clock_share == 1:
        return peak
    return compute(
        "sustained", f.sustained_flops_per_s, peak_flops_per_s=peak, clock_share=stated_share(clock_share)
    )


def stated_share(clock_share: float) -> Line:
    """The share of its clock a GPU holds, as the run states it."""
    return Line("clock_share", clock_share, "fraction", Kind.ASSUMED, source="run.clock_share")


def _gemm(kernels: KernelSpec, math: str) -> KernelRate:
    if math not in kernels.gemm:
        raise InputError(
            "no kernel rate for that precision", where=kernels.id, given=math, legal=sorted(kernels.gemm)
        )
    return kernels.gemm[math]


def _attention_share(gpu: GpuSpec, kernels: KernelSpec, recipe: Recipe) -> Line:
    """Share of the peak attention reaches with the kernel the framework calls."""
    best = kernels.attention.mfu_max.line("alone")
    native = gpu.vendor == "NVIDIA" and float(gpu.compute_capability) < NATIVE_ATTENTION_FROM
    if recipe.framework != "megatron" and not native:
        best = compute("alone", f.in_step_efficiency, alone=best, training_efficiency=PORTABLE_ATTENTION)
    if recipe.first_flash:
        best = compute("efficiency", f.in_step_efficiency, alone=best, training_efficiency=FIRST_FLASH)
    return best


def _unquantised(kernels: KernelSpec, math: str, plain: KernelRate) -> Line:
    """Share of the low-precision peak a product reaches when its operands are already cast.

    The catalogue's low-precision constants include the inference stacks' casts; here casts are counted
    apart, so what they cost is taken out: as much as fp8 loses against 16 bits in the same stack.
    """
    return compute(
        "alone",
        f.unquantised_efficiency,
        measured=_gemm(kernels, math).mfu_max.line("measured"),
        wide=plain.mfu_max.line("wide"),
        fp8=_gemm(kernels, "fp8").mfu_max.line("fp8"),
    )
