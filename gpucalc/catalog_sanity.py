"""Whether a catalogue figure means what its place says: its dimension, and values no device has had.

Dimensions are rules. Plausibility is a warning: its ranges hold for every entry of the shipped
catalogue with room to spare, and what a vendor's next card does may lie outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.errors import GpucalcError
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.system import PriceListSpec, SystemSpec
from gpucalc.units import CATALOGUE_UNITS, GIB

# Kind of file and key of a figure -> what it may be measured in.
_RATES = ("FLOP/s", "OP/s")
_DIMENSIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "gpus": {
        "memory_bandwidth": ("bytes/s",),
        "memory_*": ("bytes",),
        "peaks.*": _RATES,
        "tdp": ("W",),
        "nvlink_bandwidth": ("bytes/s",),
        "c2c_bandwidth": ("bytes/s",),
        "boost_clock": ("Hz",),
    },
    "systems": {
        "nic.bandwidth": ("bytes/s",),
        "cpu_cores": ("count",),
        "host_ram": ("bytes",),
        "max_power": ("W",),
        "price.usd_*": ("USD/h",),
    },
    "prices": {"offers.*.usd_*": ("USD/h",), "purchase.usd_*": ("USD",)},
    "costs": {
        "pue": ("ratio",),
        "years": ("years",),
        "restart": ("s",),
        "repair": ("s",),
        "storage_*": ("bytes/s",),
        "*": ("fraction",),
    },
    "grids": {"carbon_*": ("kg/kWh",), "usd_*": ("USD/kWh",)},
    "reliability": {"hours": ("s",), "goodput_*": ("fraction",), "*": ("count",)},
    "kernels": {"*overhead": ("s",), "*": ("ratio", "fraction")},
    "collectives": {
        "alpha*": ("s",),
        "*.alpha_extra": ("s",),
        "switch_latency": ("s",),
        "bus_bandwidth.*": ("bytes/s",),
        "ops.*.bandwidth.*": ("bytes/s", "ratio"),
    },
    "interconnects": {"one_way": ("bytes/s",)},
}


def dimensions(kind: str, figures: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, str]]:
    """Figures in a unit of another quantity, each with what is wrong. Unknown units are not ours to say."""
    rules = _DIMENSIONS.get(kind, {})
    for key, figure in figures:
        wanted = next((units for pattern, units in rules.items() if fnmatchcase(key, pattern)), None)
        known = CATALOGUE_UNITS.get(figure["unit"]) if isinstance(figure["unit"], str) else None
        if wanted is None or known is None or known[0] in wanted:
            continue
        legal = ", ".join(unit for unit, (inside, _) in CATALOGUE_UNITS.items() if inside in wanted)
        yield f"{key}.unit", f"{figure['unit']} does not measure this; legal: {legal}"


def plausible(spec: Any, catalog: Catalog) -> Iterator[tuple[str, str]]:
    """Keys whose values are likely mistakes, each with the reason."""
    match spec:
        case GpuSpec():
            yield from _ratios(spec)
            yield from _beside_relatives(spec, catalog)
        case SystemSpec():
            if spec.host_ram is not None and spec.host_ram.si < GIB:
                yield "host_ram", f"{spec.host_ram.si / GIB:.2g} GiB for a whole system"
            if spec.price is not None:
                yield from _price("price.usd_per_gpu_hour", spec.price.usd_per_gpu_hour.si)
        case PriceListSpec():
            for index, offer in enumerate(spec.offers):
                yield from _price(f"offers.{index}.usd_per_gpu_hour", offer.usd_per_gpu_hour.si)


# Two figures of a GPU, the least and the most their quotient may be, and what is likely wrong outside.
_QUOTIENTS = (
    ("memory_total", "memory_label", 0.9, 1.05, "a driver reports 0 to 8 % less than is marketed"),
    ("memory_runtime", "memory_label", 0.7, 1.05, "a framework sees at most what is marketed"),
    ("memory_runtime", "memory_total", 0.94, 1.001, "a framework sees a little less than the driver"),
    ("peaks.tf32", "peaks.bf16", 0.2, 1.01, "TF32 runs at half the 16-bit rate: one is with sparsity"),
    ("peaks.bf16", "peaks.fp16", 0.45, 4.0, "both 16-bit rates are alike: one is with sparsity"),
    ("peaks.fp32", "peaks.bf16", 0.0, 1.01, "plain FP32 is never faster than 16-bit products"),
    ("peaks.fp64", "peaks.fp32", 0.0, 2.01, "FP64 is at most twice FP32"),
    ("peaks.fp8", "peaks.bf16", 0.9, 4.5, "FP8 runs at twice the 16-bit rate"),
    ("peaks.fp4", "peaks.fp8", 0.9, 4.1, "FP4 runs at twice the FP8 rate"),
    ("peaks.fp16_fp16acc", "peaks.fp16", 0.99, 2.1, "FP16 accumulation is at most twice as fast"),
    ("peaks.fp8_fp16acc", "peaks.fp8", 0.99, 2.1, "FP16 accumulation is at most twice as fast"),
)
# FLOPs of 16-bit products for each byte of memory traffic, and in GFLOP/s for each watt.
_BALANCE = (10.0, 600.0)
_PER_WATT = (30.0, 2600.0)
_USD_PER_GPU_HOUR = (0.02, 60.0)


def _ratios(gpu: GpuSpec) -> Iterator[tuple[str, str]]:
    figures = {f"peaks.{name}": figure for name, figure in gpu.peaks.items()} | {
        name: figure
        for name in ("memory_label", "memory_total", "memory_runtime")
        if (figure := getattr(gpu, name)) is not None
    }
    for above, below, least, most, why in _QUOTIENTS:
        if above in figures and below in figures and figures[below].si:
            quotient = figures[above].si / figures[below].si
            if not least <= quotient <= most:
                yield above, f"{quotient:.3g} times {below}; {why}"
    top = gpu.peaks.get("bf16") or gpu.peaks.get("fp16")
    if top is None:
        return
    balance = top.si / gpu.memory_bandwidth.si
    if not _BALANCE[0] <= balance <= _BALANCE[1]:
        yield (
            "memory_bandwidth",
            f"{balance:,.0f} FLOPs of 16-bit products per byte: known cards have 25 to 560",
        )
    if gpu.tdp is not None and not _PER_WATT[0] <= (rate := top.si / gpu.tdp.si / 1e9) <= _PER_WATT[1]:
        yield "tdp", f"{rate:,.0f} GFLOP/s per watt: known cards have 70 to 2,500; is the rate with sparsity?"


def _beside_relatives(gpu: GpuSpec, catalog: Catalog) -> Iterator[tuple[str, str]]:
    """A rate per multiprocessor and clock far above every card of the same architecture: a sparse rate."""
    if not gpu.sm_count or gpu.boost_clock is None:
        return
    own_kind = (gpu.arch, gpu.compute_capability)
    kin = [
        one
        for one in _readable(catalog)
        if one.id != gpu.id and (one.arch, one.compute_capability) == own_kind
    ]
    for name, figure in gpu.peaks.items():
        known = {one.id: rate for one in kin if (rate := _per_clock(one, name)) is not None}
        own = _per_clock(gpu, name)
        if not known or own is None:
            continue
        fastest = max(known, key=lambda card: known[card])
        if own > 1.6 * known[fastest]:
            yield (
                f"peaks.{name}",
                f"{own / known[fastest]:.2g} times {fastest}'s for each multiprocessor and clock, both"
                f" {gpu.arch}; is {figure.value:g} the rate with sparsity?",
            )


def _readable(catalog: Catalog) -> Iterator[GpuSpec]:
    """The GPUs whose files hold; what is wrong with the others, their own check says."""
    for name in catalog.names("gpus"):
        with suppress(GpucalcError):
            yield catalog.gpu(name)[0]


def _per_clock(gpu: GpuSpec, peak: str) -> float | None:
    figure = gpu.peaks.get(peak)
    if figure is None or not gpu.sm_count or gpu.boost_clock is None:
        return None
    return figure.si / gpu.sm_count / gpu.boost_clock.si


def _price(key: str, usd_per_hour: float) -> Iterator[tuple[str, str]]:
    least, most = _USD_PER_GPU_HOUR
    if not least <= usd_per_hour <= most:
        yield key, f"{usd_per_hour:g} USD for one GPU and hour; is it the price of the whole machine?"
