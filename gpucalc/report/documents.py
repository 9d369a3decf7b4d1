"""The planning documents' estimates beside a plan's own: one line, or all rules that apply."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from gpucalc import units
from gpucalc.documents import Estimate, headline
from gpucalc.line import Line
from gpucalc.plan.answer import Plan
from gpucalc.report.screen import QUIET, clean, grid, heading, indent, quantity, whole


def one_line(plan: Plan) -> RenderableType:
    """The documents' memory rule beside what the plan needs, and the reason for the gap."""
    told = headline(plan)
    gap = _gap(told)
    first = f"documents' rule {units.gib(told.line.value)} per GPU" + (f", {gap}" if gap else "")
    return Text(f"{first}: {told.why}")


def table(estimates: Sequence[Estimate]) -> RenderableType:
    """Every rule that applies: the document's number, ours, and why they differ."""
    parts: list[RenderableType] = [heading("By the documents' rules; gpucalc claims ID tells more")]
    for item in estimates:
        row = grid("left", "left")
        numbers = _number(item.line) + (f", here {_number(item.ours)}" if item.ours is not None else "")
        row.add_row(Text(item.claim), Text(f"{clean(item.rule)}: {numbers}"))
        row.add_row(Text(), Text(clean(item.why), style=QUIET))
        parts.append(indent(row))
    return Group(*parts)


def _gap(item: Estimate) -> str:
    ratio = item.times_ours
    if ratio is None:
        return ""
    if ratio >= 1.95:
        return f"{whole(round(ratio, 1 if ratio < 20 else 0))} times ours"
    return f"{units.percent(ratio, 0 if ratio >= 0.01 else 1)} of ours"


def _number(item: Line) -> str:
    return quantity(item.value, item.unit)
