"""One number as its formula, its values, its unit and its source, down to the facts it rests on.

A reader of the plan's lines: it computes nothing and draws nothing. What it shows of a formula
is the source text of the function that ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpucalc.errors import InputError, UnknownName, nearest
from gpucalc.formula import FORMULAS
from gpucalc.line import Line


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
    without a formula is the sum or the largest of its `parts`, or a fact with a `source`. The
    parts of the line asked for carry their paths and nothing below, since each can be asked for.
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
    parts = tuple(_named(part, f"{path}.{part.name}") for part in line.children)
    return _explanation(line, parts, path=path)


def paths(root: Line) -> dict[str, Line]:
    """Every line below the root by its dotted path, the root's own name left out."""
    return {path: line for child in root.children for path, line in child.walk()}


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


def _explanation(line: Line, parts: tuple[Explanation, ...], *, path: str | None = None) -> Explanation:
    formula = FORMULAS.get(line.formula) if line.formula else None
    return Explanation(
        line=line,
        path=path,
        formula=line.formula,
        summary=formula.summary if formula else None,
        expression=formula.expression if formula else None,
        substituted=formula.substituted(_texts(line)) if formula else None,
        source=formula.source if formula else line.source,
        inputs=tuple(_input(name, value) for name, value in line.inputs.items()),
        parts=parts,
    )


def _input(name: str, value: object) -> Input:
    if not isinstance(value, Line):
        return Input(name=name, value=value, explanation=None)
    return Input(name=name, value=value.value, explanation=_whole(value))


def _whole(line: Line) -> Explanation:
    """An input with everything below it: a sum explains its parts, a formula its inputs."""
    return _explanation(line, () if line.formula else tuple(_whole(part) for part in line.children))


def _named(line: Line, path: str) -> Explanation:
    return Explanation(
        line=line,
        path=path,
        formula=line.formula,
        summary=None,
        expression=None,
        substituted=None,
        source=line.source,
        inputs=(),
        parts=(),
    )


def _texts(line: Line) -> dict[str, str]:
    return {
        name: number(value.value if isinstance(value, Line) else value) for name, value in line.inputs.items()
    }
