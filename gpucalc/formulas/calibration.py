"""From seconds measured on a device to rates, and to the two constants of a straight line."""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.num import Num

_ARITHMETIC = "Arithmetic on measured times"
_LINE = "Weighted least squares of a straight line (Gauss 1809), weights 1/t^2: every error is relative"


@formula(unit="FLOP/s", source=_ARITHMETIC)
def achieved_flops_per_s(*, flops: Num, elapsed_s: Num) -> Num:
    """Rate at which a product ran."""
    return flops / elapsed_s


@formula(unit="bytes/s", source="NVIDIA nccl-tests, doc/PERFORMANCE.md: busbw = size / time x factor")
def achieved_bus_bytes_per_s(*, message_bytes: Num, bus_factor: Num, elapsed_s: Num) -> Num:
    """Bytes per second over the busiest link; for a plain copy the factor is the times each byte moves."""
    return message_bytes * bus_factor / elapsed_s


@formula(unit="fraction", source=_ARITHMETIC)
def sample_spread(*, upper_s: Num, lower_s: Num, median_s: Num) -> Num:
    """How far the middle half of repeated times lies apart, over their median."""
    return (upper_s - lower_s) / median_s


@formula(unit="fraction", source=_ARITHMETIC)
def share_of_rate(*, measured_per_s: Num, stated_per_s: Num) -> Num:
    """A measured rate as a share of the datasheet's, which is how catalogues hold it."""
    return measured_per_s / stated_per_s


@formula(unit="s/byte", source=_LINE)
def line_slope_s_per_byte(*, weight: Num, x_bytes: Num, y_s: Num, xx_bytes2: Num, xy_bytes_s: Num) -> Num:
    """Slope of time over bytes, from the weighted sums of 1, x, y, x^2 and x y."""
    return (weight * xy_bytes_s - x_bytes * y_s) / (weight * xx_bytes2 - x_bytes**2)


@formula(unit="s", source=_LINE)
def line_intercept_s(*, weight: Num, x_bytes: Num, y_s: Num, slope_s_per_byte: Num) -> Num:
    """Time of an empty message, from the weighted sums of 1, x and y."""
    return (y_s - slope_s_per_byte * x_bytes) / weight


@formula(unit="tokens/s", source=_ARITHMETIC)
def achieved_tokens_per_s(*, tokens: Num, elapsed_s: Num) -> Num:
    """Rate at which tokens were trained on."""
    return tokens / elapsed_s


@formula(
    unit="fraction", source="PyTorch, CUDA semantics: memory_reserved is what the caching allocator holds"
)
def idle_share(*, reserved_bytes: Num, allocated_bytes: Num) -> Num:
    """Share of the allocator's memory that no tensor uses: how fragmented, or how idle, it is."""
    return (reserved_bytes - allocated_bytes) / reserved_bytes


@formula(unit="fraction", source=_ARITHMETIC)
def exposed_share(*, exposed_s: Num, step_s: Num) -> Num:
    """Share of a step that communication adds to it."""
    return exposed_s / step_s


@formula(unit="fraction", source=_ARITHMETIC)
def drift(*, first: Num, last: Num) -> Num:
    """Change of a rate between the first and the last part of a run."""
    return last / first - 1


@formula(unit="fraction", source=_ARITHMETIC)
def deviation(*, measured: Num, predicted: Num) -> Num:
    """How far a measurement lies above what was predicted."""
    return measured / predicted - 1


@formula(
    unit="GPU h", source="Rule of three (Hanley and Lippman-Hand 1983): no event in n gives a rate below 3/n"
)
def mtbf_bound_gpu_h(*, hours: Num, gpus: Num) -> Num:
    """Mean time between failures that a run without any failure shows at 95 %."""
    return hours * gpus / 3
