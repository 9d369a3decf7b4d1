"""Findings of doctor as tables: what is wrong, what was seen, what to write, and where that is known from."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.style import Style
from rich.text import Text

from gpucalc.doctor.finding import Finding, Report
from gpucalc.doctor.monitor import Monitor
from gpucalc.report.screen import QUIET, clean, grid, heading, indent
from gpucalc.spec.checks import Severity

_STYLE = {
    Severity.ERROR: Style(bold=True, color="red"),
    Severity.WARNING: Style(color="yellow"),
    Severity.NOTE: Style(color="cyan"),
}


def drawn(answer: Report | Monitor) -> RenderableType:
    """Whatever doctor answered."""
    return report(answer) if isinstance(answer, Report) else monitor(answer)


def report(found: Report) -> RenderableType:
    """Every finding with its evidence, then what nobody but the vendor can say."""
    parts: list[RenderableType] = []
    if found.facts:
        table = grid("left", "left")
        for name, value in found.facts:
            table.add_row(Text(clean(name), style=QUIET), Text(clean(value)))
        parts += [heading(f"Looked at: {found.subject}"), indent(table), Text()]
    for item in found.findings:
        parts += [_finding(item), Text()]
    if found.questions:
        parts.append(heading("Not visible from here: ask the vendor, or look at the machine"))
        for question in found.questions:
            table = grid("left", "left")
            asked = question.ask + (f" (item {', '.join(question.claims)})" if question.claims else "")
            table.add_row(Text(f"- {clean(question.about)}:"), Text(clean(asked)))
            parts.append(indent(table))
        parts.append(Text())
    counts = ", ".join(
        f"{number} {kind}{'' if number == 1 else 's'}" for kind, number in found.counts().items() if number
    )
    parts.append(Text(counts or "nothing wrong found"))
    if any(item.claims for item in found.findings):
        parts.append(Text("items are the planning documents' own: gpucalc claims ID", style=QUIET))
    return Group(*parts)


def _finding(item: Finding) -> RenderableType:
    place = "" if item.line is None else f"line {item.line}: "
    title = Text.assemble(
        place, (item.severity.value, _STYLE[item.severity]), f": {clean(item.about)}: {clean(item.problem)}"
    )
    rows = grid("left", "left")
    for name, value in (
        ("seen", item.evidence),
        ("instead" if item.line is not None else "do", item.right),
        ("item", ", ".join(item.claims)),
        ("source", ", ".join(item.sources)),
    ):
        if value:
            rows.add_row(Text(name, style=QUIET), Text(clean(value), style=QUIET if name == "source" else ""))
    return Group(title, indent(rows))


def monitor(found: Monitor) -> RenderableType:
    """Each command on a line of its own, to be copied, with what it shows."""
    parts: list[RenderableType] = [heading(f"Beside a job on {found.subject}"), Text()]
    for item in found.commands:
        # A command that is broken over lines by the terminal's width cannot be copied.
        parts += [Text(clean(item.command), no_wrap=True, overflow="ignore")]
        about = f"{item.shows} (item {', '.join(item.claims)})" if item.claims else item.shows
        parts += [indent(Text(clean(about), style=QUIET)), Text()]
    if found.left_out:
        parts.append(Text("left out, for want of what they show:", style=QUIET))
        parts += [indent(Text(f"{item.id}: no {lacks}", style=QUIET)) for item, lacks in found.left_out]
    return Group(*parts)
