"""The atom of an answer: a named number with unit, kind, formula, inputs and children.

A plan is a tree of lines. The tables, the JSON document, `explain`, `diff`, the page and the
checks all read this one tree, so a number has one origin and one spelling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gpucalc.formula import formula_of


class Kind(StrEnum):
    """How a number is known."""

    EXACT = "exact"  # arithmetic on stated facts
    MODELLED = "modelled"  # a model with an error
    MEASURED = "measured"  # read off a device or a published measurement
    ASSUMED = "assumed"  # a default nobody stated


# The most doubtful kind wins when a number is made from several.
_DOUBT = {Kind.EXACT: 0, Kind.MEASURED: 1, Kind.MODELLED: 2, Kind.ASSUMED: 3}


@dataclass(frozen=True, slots=True)
class Line:
    """A named number.

    `inputs` maps the formula's parameter names to numbers or to the lines they came from;
    `children` are the parts that sum (or whose maximum gives) the value. `source` is set on
    leaves: where a fact comes from.
    """

    name: str
    value: Any
    unit: str
    kind: Kind = Kind.EXACT
    formula: str | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    children: tuple[Line, ...] = ()
    source: str | None = None
    note: str | None = None

    @property
    def is_assumption(self) -> bool:
        """Whether this is a fact nobody stated, rather than something worked out from one."""
        return self.kind is Kind.ASSUMED and not self.inputs and not self.children

    def child(self, name: str) -> Line:
        """The direct child of that name. Raises KeyError."""
        for line in self.children:
            if line.name == name:
                return line
        raise KeyError(name)

    def walk(self, path: str = "") -> Iterator[tuple[str, Line]]:
        """Every line below and including this one, with its dotted path."""
        here = f"{path}.{self.name}" if path else self.name
        yield here, self
        for line in self.children:
            yield from line.walk(here)

    def find(self, path: str) -> Line | None:
        """The first line whose dotted path equals or ends with the given one."""
        for where, line in self.walk():
            if where == path or where.endswith("." + path):
                return line
        return None


def value_of(item: Any) -> Any:
    """The number in a line, or the number itself."""
    return item.value if isinstance(item, Line) else item


def compute(
    name: str,
    function: Callable[..., Any],
    /,
    *,
    kind: Kind | None = None,
    children: tuple[Line, ...] = (),
    note: str | None = None,
    **inputs: Any,
) -> Line:
    """The line a formula gives for these inputs; the inputs may themselves be lines.

    The kind defaults to the most doubtful kind among the inputs that are lines.
    """
    info = formula_of(function)
    value = function(**{key: value_of(item) for key, item in inputs.items()})
    return Line(
        name=name,
        value=value,
        unit=info.unit,
        kind=kind if kind is not None else worst_kind(inputs.values()),
        formula=info.name,
        inputs=inputs,
        children=children,
        note=note,
    )


def total(
    name: str, parts: tuple[Line, ...], *, unit: str, kind: Kind | None = None, note: str | None = None
) -> Line:
    """The sum of the parts, as a line that holds them."""
    return Line(
        name=name,
        value=sum(part.value for part in parts),
        unit=unit,
        kind=kind if kind is not None else worst_kind(parts),
        children=parts,
        note=note,
    )


def worst_kind(items: Any) -> Kind:
    """The most doubtful kind among lines; exact when there are none."""
    kinds = [item.kind for item in items if isinstance(item, Line)]
    return max(kinds, key=_DOUBT.__getitem__, default=Kind.EXACT)
