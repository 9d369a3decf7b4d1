"""Estimates beside measurements: one value of one quantity, and the statistics of many.

A point's ratio is estimated over measured; its error is the ratio less one. Rows of a group are not
independent, so statistics give every group the same weight; row-weighted ones stand beside them. A group is
one source of training runs and collectives, and one model on one GPU of one source of deployments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Point:
    """One measured quantity beside its estimate, both in `unit`."""

    id: str
    quantity: str
    measured: float
    estimated: float
    unit: str
    group: str
    framework: str
    stack: str
    gpu: str
    arch: str
    model: str
    quality: str
    meter: str
    notes: tuple[str, ...] = ()
    op: str = ""  # of a collective: the operation, the class of link that decides, the message's size
    link: str = ""
    size: str = ""
    quant: str = ""  # of a deployment: the number format of its weights
    cell: str = ""  # what shares one weight in statistics; the group where empty

    @property
    def ratio(self) -> float:
        """Estimated over measured."""
        return self.estimated / self.measured

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.ratio - 1.0

    def document(self) -> dict[str, Any]:
        """The same for a JSON document."""
        return {
            "id": self.id,
            "quantity": self.quantity,
            "measured": self.measured,
            "estimated": self.estimated,
            "ratio": round(self.ratio, 6),
            "unit": self.unit,
            "group": self.group,
            "framework": self.framework,
            "stack": self.stack,
            "gpu": self.gpu,
            "arch": self.arch,
            "model": self.model,
            "quality": self.quality,
            "meter": self.meter,
            "notes": list(self.notes),
            **({"op": self.op, "link": self.link, "size": self.size} if self.op else {}),
            **({"quant": self.quant, "cell": self.cell} if self.cell else {}),
        }


@dataclass(frozen=True, slots=True)
class Skipped:
    """A measured quantity that was not compared, and why."""

    id: str
    quantity: str
    reason: str
    group: str


@dataclass(frozen=True, slots=True)
class Statistics:
    """Errors of a set of points: over groups of equal weight, and over rows."""

    rows: int
    groups: int
    median_abs: float | None
    p90_abs: float | None
    signed_median: float | None
    median_abs_rows: float | None
    p90_abs_rows: float | None
    signed_median_rows: float | None
    skipped: int = 0
    mean_abs: float | None = None
    mean_abs_rows: float | None = None
    p95_abs: float | None = None
    p95_abs_rows: float | None = None

    def document(self) -> dict[str, Any]:
        """The same for a JSON document."""
        return {
            "rows": self.rows,
            "groups": self.groups,
            "median_abs": _rounded(self.median_abs),
            "p90_abs": _rounded(self.p90_abs),
            "signed_median": _rounded(self.signed_median),
            "median_abs_rows": _rounded(self.median_abs_rows),
            "p90_abs_rows": _rounded(self.p90_abs_rows),
            "signed_median_rows": _rounded(self.signed_median_rows),
            "mean_abs": _rounded(self.mean_abs),
            "mean_abs_rows": _rounded(self.mean_abs_rows),
            "p95_abs": _rounded(self.p95_abs),
            "p95_abs_rows": _rounded(self.p95_abs_rows),
            "skipped": self.skipped,
        }


def tally(skipped: Iterable[Skipped]) -> dict[str, int]:
    """How often each reason is given, the commonest first."""
    counts: dict[str, int] = {}
    for one in skipped:
        counts[one.reason] = counts.get(one.reason, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def weighted_quantile(values: Sequence[float], weights: Sequence[float], q: float) -> float:
    """The value at which the cumulated weight passes q of the whole; halfway where it falls on an edge."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    goal = q * sum(weights)
    reached = 0.0
    for place, i in enumerate(order):
        reached += weights[i]
        if abs(reached - goal) <= 1e-9 * max(goal, 1.0) and place + 1 < len(order):
            return (values[i] + values[order[place + 1]]) / 2
        if reached > goal:
            return values[i]
    return values[order[-1]]


def statistics(points: Sequence[Point], *, skipped: int = 0) -> Statistics:
    """Median and high percentiles of the absolute error, and the signed median, both ways of weighing."""
    if not points:
        return Statistics(0, 0, None, None, None, None, None, None, skipped)
    cells = [point.cell or point.group for point in points]
    sizes: dict[str, int] = {}
    for cell in cells:
        sizes[cell] = sizes.get(cell, 0) + 1
    signed = [point.error for point in points]
    absolute = [abs(error) for error in signed]
    equal = [1.0 / sizes[cell] for cell in cells]
    mean = sum(error * weight for error, weight in zip(absolute, equal, strict=True)) / len(sizes)
    each = [1.0] * len(points)
    return Statistics(
        rows=len(points),
        groups=len(sizes),
        median_abs=weighted_quantile(absolute, equal, 0.5),
        p90_abs=weighted_quantile(absolute, equal, 0.9),
        signed_median=weighted_quantile(signed, equal, 0.5),
        median_abs_rows=weighted_quantile(absolute, each, 0.5),
        p90_abs_rows=weighted_quantile(absolute, each, 0.9),
        signed_median_rows=weighted_quantile(signed, each, 0.5),
        skipped=skipped,
        mean_abs=mean,
        mean_abs_rows=sum(absolute) / len(absolute),
        p95_abs=weighted_quantile(absolute, equal, 0.95),
        p95_abs_rows=weighted_quantile(absolute, each, 0.95),
    )
