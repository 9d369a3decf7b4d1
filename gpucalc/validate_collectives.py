"""Published collectives beside their estimates: bus bandwidth at every size that was measured."""

from __future__ import annotations

from collections.abc import Iterable

from gpucalc.measured import Row, Skip
from gpucalc.measured_collectives import CollectivePlanner, Comparison
from gpucalc.points import Point, Skipped


def compare_collectives(
    rows: Iterable[Row], planner: CollectivePlanner
) -> tuple[tuple[Point, ...], tuple[Skipped, ...]]:
    """Every measured collective against its estimate."""
    points: list[Point] = []
    skipped: list[Skipped] = []
    for row in rows:
        found = planner.compare(row)
        if isinstance(found, Skip):
            skipped.append(Skipped(row.id, "collective", found.reason, row.group))
        else:
            points += [_collective_point(row, one) for one in found]
    return tuple(points), tuple(skipped)


def _collective_point(row: Row, one: Comparison) -> Point:
    return Point(
        id=one.id,
        quantity="collective",
        measured=one.measured,
        estimated=one.estimated,
        unit="GB/s",
        group=row.group,
        framework=one.software,
        stack=one.software,
        gpu=one.gpu,
        arch=one.arch,
        model="",
        quality="",
        meter=one.meter,
        notes=one.notes,
        op=one.op,
        link=one.link,
        size=one.size,
    )
