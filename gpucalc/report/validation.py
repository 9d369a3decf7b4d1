"""Estimates beside measurements: the summary, where the errors are, each value, what was left out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from gpucalc.points import Point, Statistics
from gpucalc.report.screen import QUIET, clean, columns, heading, indent, quantity
from gpucalc.units import percent
from gpucalc.validate import Report
from gpucalc.validate_serving import start_counts
from gpucalc.validate_training import fit_counts

_MOST_REASONS = 10
_SAID = {
    "kv_tokens": "KV tokens, activations as logged",
    "kv_tokens_predicted": "KV tokens, all predicted",
    "kv_cache": "KV cache",
}


def report(found: Report, broken: Sequence[str], *, by: str | None, points: bool) -> RenderableType:
    """The whole comparison; `by` adds a breakdown, `points` one row per value."""
    parts: list[RenderableType] = [heading("Error of the estimates"), indent(_summary(found))]
    parts.append(
        indent(
            Text(
                "error: |estimate / measured - 1|; every group counts once, whatever its number of runs: a"
                " source, or a model on a GPU of a source of deployments",
                QUIET,
            )
        )
    )
    fits = fit_counts(found.fits)
    if fits["rows"]:
        said = (
            f"fits or not: right on {fits['right']} of {fits['rows']} runs, {fits['marginal']} of them"
            f" marginal within the stated margin; said fits and ran out {fits['says_fits_ran_out']},"
            f" said too large and ran {fits['says_too_large_ran']}; {len(found.undecided)} more do not say"
            " what a verdict needs"
        )
        parts.append(indent(Text(said)))
    if found.starts:
        counts = start_counts(found.starts)
        said = (
            f"starts: right on {counts['right']} of {counts['rows']} deployments, {counts['marginal']} of"
            f" them marginal; of {counts['refused']} that were refused or ran out, {counts['refused_right']}"
        )
        parts.append(indent(Text(said)))
    if by is not None:
        for name in found.quantities:
            rows = found.breakdown(name, by)
            if rows:
                parts += [Text(), heading(f"{_words(name)} by {by}"), indent(_breakdown(by, rows))]
    if points:
        for name in found.quantities:
            if held := found.of(name):
                parts += [Text(), heading(f"{_words(name)}, each value"), indent(_points(held))]
    reasons = found.reasons()
    if reasons:
        parts += [
            Text(),
            heading(f"Left out: {found.rows_skipped} of {found.rows} runs"),
            indent(_reasons(reasons)),
        ]
    parts.append(Text())
    if broken:
        parts += [Text("BOUND BROKEN  " + clean(text), Style(bold=True, color="red")) for text in broken]
    else:
        parts.append(Text("within the stated bounds", Style(bold=True, color="green")))
    return Group(*parts)


def _summary(found: Report) -> Table:
    table = _statistics_table("quantity")
    for name in found.quantities:
        summary = found.summary(name)
        if name == "verdict" or not (summary.rows or summary.skipped):
            continue
        _statistics_row(table, _words(name), summary)
        for size, statistics in sorted(found.breakdown(name, "size").items()):
            _statistics_row(table, f"  {size}", statistics)
    return table


def _breakdown(part: str, rows: dict[str, Statistics]) -> Table:
    table = _statistics_table(part)
    for name, statistics in rows.items():
        _statistics_row(table, name, statistics)
    return table


def _statistics_table(first: str) -> Table:
    return columns(first, "values", "groups", "mean", "median", "90th pct", "signed", right=range(1, 7))


def _statistics_row(table: Table, name: str, of: Statistics) -> None:
    table.add_row(
        Text(clean(name)),
        f"{of.rows:,}",
        f"{of.groups:,}",
        _percent(of.mean_abs),
        _percent(of.median_abs),
        _percent(of.p90_abs),
        _percent(of.signed_median, signed=True),
    )


def _points(held: Sequence[Point]) -> Table:
    table = columns("ratio", "measured", "estimate", "run", right=(0, 1, 2), whole=(0, 1, 2))
    for point in sorted(held, key=lambda one: (one.group, one.id)):
        measured, estimated = quantity(point.measured, point.unit), quantity(point.estimated, point.unit)
        table.add_row(f"{point.ratio:.3f}", measured, estimated, Text(clean(point.id)))
    return table


def _reasons(reasons: dict[str, int]) -> Table:
    table = columns("values", "why", right=(0,))
    for why, count in list(reasons.items())[:_MOST_REASONS]:
        table.add_row(f"{count:,}", Text(clean(why)))
    if len(reasons) > _MOST_REASONS:
        rest = sum(list(reasons.values())[_MOST_REASONS:])
        table.add_row(f"{rest:,}", Text(f"{len(reasons) - _MOST_REASONS} other reasons; --json lists them"))
    return table


def _words(name: str) -> str:
    if name in _SAID:
        return _SAID[name]
    return clean(name).replace("_", " ").capitalize()


def _percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "-"
    return ("+" if signed and value > 0 else "") + percent(value)
