"""The formulas as a page, as tables and as a document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from gpucalc.reference import Entry, Module
from gpucalc.report.screen import HEADING, QUIET, clean, columns, grid, heading, indent

_INTRODUCTION = """\
# Formulas

Every number of an answer comes from one of these {count} formulas. `gpucalc explain JOB LINE` shows one with
the values put in, `gpucalc formulas NAME` shows it alone; this page is `gpucalc formulas --markdown`.

A formula is named after what it yields. Bytes, seconds, FLOPs and watts are whole units; a parameter without
a unit is a count, a share or a choice (0 or 1). `where(condition, a, b)` is `a` where the condition holds,
else `b`; `ceil_div(a, b)` is `a / b` rounded up.
"""


def markdown(modules: Sequence[Module]) -> str:
    """The whole reference as a page."""
    count = sum(len(module.entries) for module in modules)
    lines = [_INTRODUCTION.format(count=count), "| module | formulas | what it holds |", "|---|---|---|"]
    for module in modules:
        first = " ".join(module.text.split("\n\n")[0].split())
        lines.append(f"| [{module.name}](#{module.name}) | {len(module.entries)} | {_escaped(first)} |")
    for module in modules:
        lines += ["", f"## {module.name}", "", _prose(module.text), ""]
        lines += [" · ".join(f"[{entry.name}](#{entry.name})" for entry in module.entries)]
        for entry in module.entries:
            lines += _section(entry)
    return "\n".join(lines)


def _section(entry: Entry) -> Iterator[str]:
    yield from ("", f"### {entry.name}", "", _prose(entry.text), "", "```python", entry.expression, "```", "")
    if entry.parameters:
        yield f"- of {', '.join(_parameter(name, unit) for name, unit in entry.parameters)}"
    yield f"- in {entry.formula.unit}"
    yield f"- source: {_escaped(entry.formula.source)}"
    used = [f"[{path}](../{path})" for path in entry.used_by]
    if entry.claims:
        used.append(f"{'claim' if len(entry.claims) == 1 else 'claims'} {', '.join(entry.claims)}")
    yield f"- used by {', '.join(used)}" if used else "- used by nothing yet"


def _parameter(name: str, unit: str | None) -> str:
    return f"`{name}`" if unit is None else f"`{name}` ({unit})"


def _prose(text: str) -> str:
    """A docstring as markdown: paragraphs stay, indented lines are code."""
    return "\n".join(line if line.startswith("    ") else _escaped(line) for line in text.splitlines())


def _escaped(text: str) -> str:
    """Text in which no sign means markdown; what stands between backticks is code already."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"[\\*<\[|]", r"\\\g<0>", part) for part in parts[::2]]
    return "`".join(parts)


def table(modules: Iterable[Module]) -> RenderableType:
    """One row per formula, by module."""
    parts: list[RenderableType] = []
    number = 0
    for module in modules:
        rows = columns("formula", "unit", "what it is", whole=(1,))
        for entry in module.entries:
            summary = entry.formula.summary.rstrip(".")
            rows.add_row(Text(entry.name), Text(entry.formula.unit), Text(clean(summary), QUIET))
        parts += [heading(module.name), indent(rows), Text()]
        number += len(module.entries)
    parts.append(Text(f"{number} formulas; gpucalc formulas NAME shows one in full", QUIET))
    return Group(*parts)


def detail(entry: Entry) -> RenderableType:
    """A formula in full."""
    facts = grid("left", "left")
    parameters = ", ".join(name if unit is None else f"{name} ({unit})" for name, unit in entry.parameters)
    used = ", ".join((*entry.used_by, *(f"claim {name}" for name in entry.claims)))
    for label, text in (
        ("of", parameters),
        ("in", entry.formula.unit),
        ("source", entry.formula.source),
        ("used by", used or "nothing"),
        ("written in", f"gpucalc/formulas/{entry.module}.py:{entry.line}"),
    ):
        facts.add_row(Text(label, style=QUIET), Text(clean(text)))
    return Group(
        Text(entry.name, style=HEADING),
        indent(Text(entry.text)),
        Text(),
        indent(Text(entry.expression, no_wrap=False, overflow="fold"), 4),
        Text(),
        indent(facts),
    )
