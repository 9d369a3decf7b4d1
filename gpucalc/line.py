"""The atom of an answer: a named number with unit, kind, formula, inputs and children.

A plan is a tree of lines. The tables, the JSON document, `explain`, `diff`, the page and the
checks all read this one tree, so a number has one origin and one spelling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from gpucalc.formula import formula_of
from gpucalc.num import is_scalar, maximum, where


class Kind(StrEnum):
    """How a number is known."""

    EXACT = "exact"  # arithmetic on stated facts
    MODELLED = "modelled"  # a model with an error
    MEASURED = "measured"  # read off a device or a published measurement
    ASSUMED = "assumed"  # a default nobody stated


# The most doubtful kind wins when a number is made from several.
_DOUBT = {Kind.EXACT: 0, Kind.MEASURED: 1, Kind.MODELLED: 2, Kind.ASSUMED: 3}


@dataclass(slots=True)
class Line:
    """A named number. Never changed once made; frozen, it would take four times as long to make.

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
        for place, line in self.walk():
            if place == path or place.endswith("." + path):
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
    values = {}
    worst = Kind.EXACT  # as worst_kind would say, in the same pass: this is called for every line there is
    for key, item in inputs.items():
        if isinstance(item, Line):
            values[key] = item.value
            if item.kind is not worst and _DOUBT[item.kind] > _DOUBT[worst]:
                worst = item.kind
        else:
            values[key] = item
    return Line(
        name=name,
        value=function(**values),
        unit=info.unit,
        kind=kind if kind is not None else worst,
        formula=info.name,
        inputs=inputs,
        children=children,
        note=note,
    )


def total(
    name: str, parts: tuple[Line, ...], *, unit: str, kind: Kind | None = None, note: str | None = None
) -> Line:
    """The sum of the parts, as a line that holds them."""
    first, *rest = [part.value for part in parts] or [0]
    return Line(
        name=name,
        value=sum(rest, first),  # a column is not added to nothing first
        unit=unit,
        kind=kind if kind is not None else worst_kind(parts),
        children=parts,
        note=note,
    )


def largest(name: str, parts: Sequence[Line]) -> Line:
    """A line whose value is the largest of its parts."""
    top = max(parts, key=_size)
    value = top.value
    if not all(is_scalar(part.value) for part in parts):
        for part in parts:
            value = maximum(value, part.value)
    return Line(
        name=name,
        value=value,
        unit=top.unit,
        kind=top.kind,
        children=tuple(parts),
        note="largest of its parts",
    )


def largest_of(lines: Sequence[Line]) -> tuple[Line, ...]:
    """The line with the largest value; of columns all of them, each zero where another is larger."""
    if all(is_scalar(line.value) for line in lines):
        return (max(lines, key=lambda line: line.value),) if lines else ()
    found: list[Line] = []
    top: Any = None  # the largest of those before: of equals the first stays
    for index, line in enumerate(lines):
        value = line.value if top is None else where(line.value > top, line.value, 0.0)
        for later in lines[index + 1 :]:
            value = where(later.value > line.value, 0.0, value)
        found.append(replace(line, value=value))
        top = line.value if top is None else maximum(top, line.value)
    return tuple(found)


def choose(condition: Any, then: Line, otherwise: Line) -> Line:
    """One line or the other; of a column, a line with each one's value where its condition is met."""
    if is_scalar(condition):
        return then if condition else otherwise
    return replace(then, value=where(condition, then.value, otherwise.value))


def _size(line: Line) -> float:
    return line.value if is_scalar(line.value) else float(line.value.max())


def worst_kind(items: Any) -> Kind:
    """The most doubtful kind among lines; exact when there are none."""
    worst = Kind.EXACT
    for item in items:
        if isinstance(item, Line) and item.kind is not worst and _DOUBT[item.kind] > _DOUBT[worst]:
            worst = item.kind
    return worst
