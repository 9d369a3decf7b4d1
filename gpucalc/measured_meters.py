"""What the memory figure of a training run counts: the meter a source read, and the bytes it states."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpucalc.measured import Convention, Row
from gpucalc.units import GB, GIB, MIB


@dataclass(frozen=True, slots=True)
class Meter:
    """Which number of the memory system a row's figure is, and the bytes it states."""

    kind: str  # allocated | reserved | device
    bytes: float
    why: str


_METERS = (
    ("reserved", re.compile(r"\breserved\b", re.I)),
    (
        "allocated",
        re.compile(r"max_memory_allocated|memory allocated|max allocated|memory active", re.I),
    ),
    ("device", re.compile(r"nvidia-smi|\bNVML\b|device usage", re.I)),
)


# What a source's "GB" is: nvidia-smi's MiB are mostly read with the point three places to the left.
_GB_IS = {"GB": GB, "GiB": GIB, "1000 MiB": 1000 * MIB}


def meter_of(row: Row, rules: Sequence[Convention]) -> Meter | None:
    """What a row's memory figure counts, or None when it has no per-GPU figure."""
    measured, notes = row.measured, str(row.data.get("notes") or "")
    value, unit = measured.get("peak_mem_gib"), GIB
    if value is None:
        value, unit = measured.get("peak_mem_gb"), GB
    kind, why = None, ""
    if value is None and measured.get("peak_reserved_gib") is not None:
        return Meter("reserved", measured["peak_reserved_gib"] * GIB, "the row's own word")
    if value is None:
        return None
    if measured.get("peak_reserved_gib") is not None:
        kind, why = "allocated", "reserved memory is given beside it"
    for name, pattern in _METERS:
        if kind is None and pattern.search(notes):
            kind, why = name, "the row's notes"
    for rule in rules:
        if not rule.applies(row):
            continue
        if kind is None and "meter" in rule.values:
            kind, why = str(rule.values["meter"]), rule.why
        if unit == GB and "gb_is" in rule.values:
            unit = _GB_IS[str(rule.values["gb_is"])]
    if kind is None:
        kind, why = "device", "not stated: taken as what nvidia-smi shows"
    return Meter(kind, float(value) * unit, why)
