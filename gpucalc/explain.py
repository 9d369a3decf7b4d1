"""One number as its formula, its values, its unit and its source, down to the facts it rests on.

A reader of the plan's lines: it computes nothing and draws nothing. What it shows of a formula
is the source text of the function that ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpucalc.errors import InputError, UnknownName, nearest
from gpucalc.formula import FORMULAS
from gpucalc.line import Line, value_of


@dataclass(frozen=True, slots=True)
class Input:
    """A parameter of a formula: another explanation, or a number the job states."""

    name: str
    value: object
    explanation: Explanation | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """How one line came to its value.

    `expression` is the formula's text and `substituted` the same with the values put in. A line
    without a formula is the sum or the largest of its `parts`, or a fact with a `source`. Parts
    below a sum are named with their values only: each can be asked for in turn.
    """

    line: Line
    path: str | None
    formula: str | None
    summary: str | None
    expression: str | None
    substituted: str | None
    source: str | None
    inputs: tuple[Input, ...]
    parts: tuple[Explanation, ...]


def explain(root: Line, wanted: str, *, prefer: Sequence[str] = ()) -> Explanation:
    """The explanation of the line that `wanted` names below `root`.

    `prefer`: parts of a path, strongest first, that decide between lines of the same name.
    """
    path, line = find(root, wanted, prefer=prefer)
    return _asked(line, path)


def paths(root: Line) -> dict[str, Line]:
    """Every line below the root by its dotted path, the root's own name left out."""
    return {path: line for child in root.children for path, line in child.walk()}


def assumed_facts(root: Line) -> tuple[Line, ...]:
    """The facts nobody stated that the lines below the root rest on, each once, in reading order."""
    found: dict[tuple[str, object, str | None], Line] = {}
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        line = waiting.pop()
        if id(line) in seen:
            continue
        seen.add(id(line))
        if line.is_assumption:
            found.setdefault((line.name, line.value, line.source), line)
        below = (*line.children, *(item for item in line.inputs.values() if isinstance(item, Line)))
        waiting += reversed(below)
    return tuple(found.values())


def find(root: Line, wanted: str, *, prefer: Sequence[str] = ()) -> tuple[str, Line]:
    """The line with that dotted path, or the only one whose path ends with it.

    Raises UnknownName with the nearest paths, or InputError when several lines could be meant.
    """
    known = paths(root)
    if wanted in known:
        return wanted, known[wanted]
    matches = [path for path in known if path.endswith("." + wanted)]
    for part in prefer:
        narrowed = [path for path in matches if part in path.split(".")]
        matches = narrowed or matches
    if not matches:
        near = nearest(wanted, known) or nearest(wanted, {path.rsplit(".", 1)[-1] for path in known})
        raise UnknownName("no line of that name in this plan", key="LINE", given=wanted, near=near)
    first = matches[0]
    if any(known[path] != known[first] for path in matches):
        raise InputError(
            "several lines have that name; write more of the path",
            key="LINE",
            given=wanted,
            legal=matches[:8],
        )
    return first, known[first]


def number(value: object) -> str:
    """A number as it can stand in an expression: digits grouped by underscores, seven significant."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):_}"
    return f"{value:.7g}"


def equation_of(line: Line) -> str:
    """How a line came to its value, as one line of text with the numbers in it."""
    if line.formula and line.formula in FORMULAS:
        values = {name: figure(value_of(item)) for name, item in line.inputs.items()}
        put_in = FORMULAS[line.formula].substituted(values)
        return f"{line.name} = {put_in} = {figure(line.value)} {line.unit}"
    parts = [part for part in line.children if part.unit == line.unit]
    if parts and abs(sum(part.value for part in parts) - line.value) <= 1e-6 * abs(line.value):
        terms = " + ".join(f"{figure(part.value)} ({part.name})" for part in parts if part.value)
        return f"{line.name} = {terms} = {figure(line.value)} {line.unit}"
    return f"{line.name} = {figure(line.value)} {line.unit}" + (f", {line.source}" if line.source else "")


def figure(value: object) -> str:
    """A number in an equation; large ones whole, as bytes and FLOPs are read."""
    if isinstance(value, float) and 1e6 <= abs(value) < 1e15:
        return f"{round(value):_}"
    return number(value)


def _asked(line: Line, path: str) -> Explanation:
    """The line asked for: of a sum, each part that a formula gave is explained too."""
    if line.formula:
        return _formula(line, path)
    parts = [(part, f"{path}.{part.name}") for part in line.children]
    return _plain(line, path, tuple(_formula(p, at) if p.formula else _plain(p, at) for p, at in parts))


def _below(line: Line) -> Explanation:
    """An input: formulas are followed down to facts, a sum names its parts."""
    return _formula(line) if line.formula else _plain(line, None, tuple(map(_plain, line.children)))


def alone(line: Line, path: str | None = None) -> Explanation:
    """The line with its own formula and values; what went in is named with its value alone."""
    if not line.formula:
        return _plain(line, path)
    formula = FORMULAS[line.formula]
    return Explanation(
        line=line,
        path=path,
        formula=formula.name,
        summary=formula.summary,
        expression=formula.expression,
        substituted=formula.substituted(_texts(line)),
        source=formula.source,
        inputs=tuple(Input(name, value_of(item), None) for name, item in line.inputs.items()),
        parts=(),
    )


def _formula(line: Line, path: str | None = None) -> Explanation:
    inputs = tuple(
        Input(name, value_of(item), _below(item) if isinstance(item, Line) else None)
        for name, item in line.inputs.items()
    )
    return replace(alone(line, path), inputs=inputs)


def _plain(line: Line, path: str | None = None, parts: tuple[Explanation, ...] = ()) -> Explanation:
    return Explanation(
        line=line,
        path=path,
        formula=line.formula,
        summary=None,
        expression=None,
        substituted=None,
        source=line.source,
        inputs=(),
        parts=parts,
    )


def _texts(line: Line) -> dict[str, str]:
    return {name: number(value_of(value)) for name, value in line.inputs.items()}
