"""A catalogue figure: a number that says its unit, how it is known and where it comes from.

    memory_bandwidth: {value: 2039, unit: GB/s, kind: datasheet, source: [nv_ds]}

`source` holds keys of the catalogue's `sources.yaml`; the catalogue puts the full references
beside them when it loads a file, and refuses a key it does not know.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from gpucalc.line import Kind, Line
from gpucalc.spec.base import Spec, refuse
from gpucalc.units import CATALOGUE_UNITS


class FigureKind(StrEnum):
    """How a catalogue figure is known."""

    DATASHEET = "datasheet"  # a vendor's or provider's published figure, read
    MEASURED = "measured"  # reported by a device, or fitted to published measurements
    DERIVED = "derived"  # arithmetic on other stated figures
    ASSUMED = "assumed"  # typed from memory, or carried over from a relative


_LINE_KIND = {
    FigureKind.DATASHEET: Kind.EXACT,
    FigureKind.DERIVED: Kind.EXACT,
    FigureKind.MEASURED: Kind.MEASURED,
    FigureKind.ASSUMED: Kind.ASSUMED,
}


def _known_unit(unit: str) -> str:
    if unit not in CATALOGUE_UNITS:
        raise refuse(f"unknown unit {unit}", legal=", ".join(CATALOGUE_UNITS))
    return unit


class Figure(Spec):
    """A number with unit, kind and source."""

    value: float
    unit: Annotated[str, AfterValidator(_known_unit)]
    kind: FigureKind
    source: Annotated[tuple[str, ...], Field(min_length=1)]
    note: str | None = None
    references: tuple[str, ...] = ()  # what the source keys stand for; filled by the catalogue, never written

    @property
    def si(self) -> float:
        """The value in the unit used inside: bytes, bytes/s, FLOP/s, s, W."""
        return self.value * CATALOGUE_UNITS[self.unit][1]

    @property
    def cited(self) -> str:
        """The references in full, or the source keys of a figure made outside a catalogue."""
        return "; ".join(self.references or self.source)

    def line(self, name: str) -> Line:
        """The figure as a leaf of an answer."""
        return Line(
            name=name,
            value=self.si,
            unit=CATALOGUE_UNITS[self.unit][0],
            kind=_LINE_KIND[self.kind],
            source=self.cited,
            note=self.note,
        )


def _positive(figure: Figure) -> Figure:
    if figure.value <= 0:
        legal = "a number above 0; what is not known is left out"
        raise refuse(f"is not above 0, got {figure.value:g}", legal=legal)
    return figure


PositiveFigure = Annotated[Figure, AfterValidator(_positive)]
