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
