"""Units: what the suffixes mean, and how numbers are printed and read at the edges.

Inside: bytes, seconds, FLOPs, watts. At the edges: GiB (2^30) for capacity, GB/s (1e9, one way
unless the name says otherwise) for bandwidth.
"""

from __future__ import annotations

import re

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12

_SCALE = {
    "b": 1,
    "kb": KB,
    "mb": MB,
    "gb": GB,
    "tb": TB,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}
# Thousands may be set apart as `gib` prints them; a comma elsewhere is no decimal point.
_QUANTITY = re.compile(
    r"^\s*([0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]+)\s*$", re.IGNORECASE
)

# Multipliers from a catalogue unit to the unit used inside. A figure in another unit is refused.
CATALOGUE_UNITS: dict[str, tuple[str, float]] = {
    "B": ("bytes", 1),
    "GB": ("bytes", GB),
    "MiB": ("bytes", MIB),
    "GiB": ("bytes", GIB),
    "GB/s": ("bytes/s", GB),
    "Gbit/s": ("bytes/s", GB / 8),
    "TFLOP/s": ("FLOP/s", 1e12),
    "TOP/s": ("OP/s", 1e12),
    "W": ("W", 1),
    "kW": ("W", 1000),
    "MHz": ("Hz", 1e6),
    "us": ("s", 1e-6),
    "s": ("s", 1),
    "h": ("s", 3600),
    "years": ("years", 1),
    "USD": ("USD", 1),
    "USD/h": ("USD/h", 1),
    "USD/kWh": ("USD/kWh", 1),
    "kg/kWh": ("kg/kWh", 1),
    "count": ("count", 1),
    "fraction": ("fraction", 1),
    "ratio": ("ratio", 1),
    "year": ("year", 1),
}


_THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_COUNT = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e\+?[0-9]{1,3})?)\s*([kmbt]?)", re.IGNORECASE)


def parse_count(text: str) -> float | None:
    """The number in words such as 15T, 1.5e12 or 300 B; None for what is none."""
    match = _COUNT.fullmatch(text.strip())
    return None if match is None else float(match[1]) * _THOUSANDS[match[2].lower()]


SIZES = "a number and one of B KB MB GB TB KiB MiB GiB TiB, such as 80GB"


def parse_bytes(text: str) -> float:
    """Bytes in a text such as `80 GiB` or `512MB`. Raises ValueError."""
    match = _QUANTITY.match(text)
    if not match or match[2].lower() not in _SCALE:
        raise ValueError(f"not a size: {text!r}; write {SIZES}")
    return float(match[1].replace(",", "")) * _SCALE[match[2].lower()]


def gib(value: float, digits: int = 2) -> str:
    """Bytes as GiB text."""
    return f"{value / GIB:,.{digits}f} GiB"


def gb_per_s(value: float) -> str:
    """Bytes per second as GB/s text."""
    return f"{value / GB:,.1f} GB/s" if value < 100 * GB else f"{value / GB:,.0f} GB/s"


def seconds(value: float) -> str:
    """A duration in the unit that reads best."""
    if value >= 2 * 86400:
        return f"{value / 86400:,.1f} days"
    if value >= 2 * 3600:
        return f"{value / 3600:,.1f} h"
    if value >= 120:
        return f"{value / 60:,.1f} min"
    if value >= 1:
        return f"{value:,.2f} s"
    if value >= 1e-3:
        return f"{value * 1e3:,.1f} ms"
    return f"{value * 1e6:,.0f} us"


def count(value: float) -> str:
    """A whole number with a decimal prefix: 8.03 B parameters, 128 k tokens."""
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:,.2f}{suffix}"
    return f"{value:,.0f}"


def percent(value: float, digits: int = 1) -> str:
    """A fraction as percent text."""
    return f"{100 * value:.{digits}f} %"
