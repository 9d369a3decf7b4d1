"""Claims of the planning documents as tables and documents: what is stated, what we find, the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.style import Style
from rich.text import Text

from gpucalc import units
from gpucalc.claims import Claim, Computed, tally
from gpucalc.formula import FORMULAS
from gpucalc.line import Line
from gpucalc.report.json import line as line_document
from gpucalc.report.screen import HEADING, QUIET, clean, columns, grid, heading, indent, quantity, whole
from gpucalc.spec.claims import DOCUMENTS, STATED_UNITS, ClaimVerdict

_STYLE = {
    ClaimVerdict.SOUND: Style(color="green"),
    ClaimVerdict.APPROXIMATE: Style(color="cyan"),
    ClaimVerdict.CONTRADICTORY: Style(bold=True, color="red"),
    ClaimVerdict.WRONG: Style(bold=True, color="red"),
    ClaimVerdict.UNVERIFIABLE: Style(color="yellow"),
}
_SAME = 0.1  # a number within a tenth of the stated one is not called another


def report(found: Sequence[Claim]) -> RenderableType:
    """One row per claim, and how many have which verdict."""
    table = columns("id", "verdict", "stated", "ours", "about", whole=(0, 1))
    for claim in found:
        table.add_row(
            Text(clean(claim.spec.id)),
            Text(claim.spec.verdict.value, style=_STYLE[claim.spec.verdict]),
            Text(stated(claim)),
            Text(ours(claim)),
            Text(clean(claim.spec.quantity)),
        )
    counts = ", ".join(f"{number} {verdict}" for verdict, number in tally(found).items() if number)
    named = ", ".join(
        f"{number} {title}"
        for number, title in DOCUMENTS.items()
        if any(claim.spec.document == number for claim in found)
    )
    parts: list[RenderableType] = [table, Text()]
    parts.append(Text(f"{len(found)} claims: {counts}" if found else "no claim fits these filters"))
    if named:
        parts.append(Text(f"documents: {named}; gpucalc claims ID shows one in full", style=QUIET))
    return Group(*parts)


def detail(claim: Claim) -> RenderableType:
    """A claim with its reason, our numbers and the published evidence."""
    spec = claim.spec
    parts: list[RenderableType] = [
        Text.assemble((clean(spec.id), HEADING), "  ", (spec.verdict.value.upper(), _STYLE[spec.verdict])),
        indent(Text(f'"{clean(spec.statement)}"')),
        indent(
            Text(f'document "{spec.title}" ({spec.document}), section {clean(spec.section)}', style=QUIET)
        ),
        Text(),
        Text(clean(spec.reason)),
    ]
    if spec.stated is not None:
        parts += [Text(), heading("Stated"), indent(Text(stated(claim)))]
    if claim.computed:
        parts += [Text(), heading("Computed here"), indent(_computed(claim))]
        if gap := times(claim):
            parts.append(indent(Text(gap)))
    parts += [Text(), heading("Published evidence")]
    for item in claim.evidence:
        parts.append(indent(Text(f"- {clean(item.says)}")))
        parts.append(indent(Text(clean(item.reference), style=QUIET), 4))
    return Group(*parts)


def document(found: Sequence[Claim]) -> dict[str, Any]:
    """The claims under one key, each with its computations as lines, and the counts of verdicts."""
    return {
        "claims": [
            {**claim.document(), "computed": [_line(item) for item in claim.computed]} for claim in found
        ],
        "verdicts": tally(found),
        "documents": DOCUMENTS,
    }


def stated(claim: Claim) -> str:
    """The stated value as the document has it."""
    value, unit = claim.spec.stated, claim.spec.unit
    if value is None:
        return ""
    return clean(value) if isinstance(value, str) else _with_unit(value, unit)


def ours(claim: Claim) -> str:
    """Our number in the unit the document uses."""
    if claim.ours is None:
        return ""
    unit = claim.spec.unit
    return number(claim.ours.line) if unit is None else _with_unit(in_unit(claim.ours.line, unit), unit)


def in_unit(item: Line, unit: str) -> float:
    """A number of ours in a unit of the documents."""
    return float(item.value) / STATED_UNITS[unit][1]


def times(claim: Claim) -> str:
    """The gap between the stated number and ours in a sentence; empty where they agree."""
    ratio = claim.times_stated
    if ratio is None or abs(ratio - 1) <= _SAME:
        return ""
    if ratio == 0:
        return f"stated {stated(claim)}, here none"
    words = (
        f"{whole(round(ratio, 1 if ratio < 20 else 0))} times"
        if ratio > 1
        else f"{units.percent(ratio, 0)} of"
    )
    return f"here {ours(claim)}: {words} the stated {stated(claim)}"


def number(item: Line) -> str:
    """A number of ours; bytes in decimal units, as the documents have them."""
    value = item.value
    if item.unit == "bytes":
        for scale, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
            if abs(value) >= scale:
                return (
                    f"{value / scale:,.4g} {name}" if value < 1e4 * scale else f"{value / scale:,.0f} {name}"
                )
        return f"{whole(value)} bytes"
    if item.unit == "ratio":
        return f"{value:,.4g}x" if value < 1e6 else f"{value:.3g}x"
    if item.unit in ("days", "h", "GPU h"):
        return f"{value:,.0f} {item.unit}"
    return quantity(value, item.unit)


def _with_unit(value: float, unit: str | None) -> str:
    if unit == "1e9 parameters":
        return f"{value:,.4g}B" if value < 1000 else f"{value / 1000:,.4g}T"
    told = f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if unit in (None, "x"):
        return told + (unit or "")
    return f"{told} {unit.removesuffix('s') if value == 1 and unit != 'us' else unit}"


def _computed(claim: Claim) -> RenderableType:
    """Each number with what it is, and below it the formula it came from."""
    width = max(len(number(item.line)) for item in claim.computed)
    parts: list[RenderableType] = []
    for item, spec in zip(claim.computed, claim.spec.computed, strict=True):
        table = grid("right", "left")
        table.add_row(Text(number(item.line).rjust(width)), Text(clean(item.what)))
        parts.append(table)
        if item.line.formula:
            how = f"{item.line.formula} = {FORMULAS[item.line.formula].expression}"
        else:
            how = f"{clean(spec.figure)} of the catalogue"
        parts.append(indent(Text(how, style=QUIET), width + 2))
    return Group(*parts)


def _line(item: Computed) -> dict[str, Any]:
    return {"what": item.what, **line_document(item.line)}
