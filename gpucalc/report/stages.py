"""The three-stage feasibility test as tables: what was trained, planned against measured, findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.style import Style
from rich.text import Text

from gpucalc.formulas.calibration import deviation
from gpucalc.probe.verdict import Row, Soak, Summary
from gpucalc.report.screen import QUIET, clean, columns, grid, heading, indent, quantity
from gpucalc.units import percent

_TITLES = {"alone": "One card", "together": "All cards", "soak": "Soak"}
_VERDICTS = {
    "passed": ("passed", "green"),
    "look": ("passed, with findings", "yellow"),
    "incomplete": ("incomplete", "yellow"),
    "failed": ("failed", "red"),
}


def summary(found: Summary) -> RenderableType:
    """The whole test, verdict first."""
    words, colour = _VERDICTS[found.verdict]
    cards = f"{found.ranks} processes of a CPU" if found.device == "cpu" else f"{found.ranks} GPUs"
    parts: list[RenderableType] = [
        Text.assemble(
            (words, Style(bold=True, color=colour)), f": {clean(found.job)} on {cards} ({clean(found.card)})"
        )
    ]
    if found.device == "cpu":
        parts.append(indent(Text("a CPU in place of GPUs: only the bytes of tensors are planned", QUIET)))
    if found.changes:
        parts += [Text(), heading("Not as the job has it")]
        parts += [indent(Text(clean(text))) for text in found.changes]
    for name, trained, rows in found.stages:
        parts += [Text(), heading(f"{_TITLES[name]}: {trained}"), indent(_rows(rows, "FSDP" in trained))]
    if found.soak is not None:
        parts += [
            Text(),
            heading(f"Soak: {found.soak.windows} windows"),
            indent(_soak(found.soak, found.verdict == "failed")),
        ]
        parts += [
            indent(Text(f"{name} not read: {clean(why)}", QUIET)) for name, why in found.soak.not_read.items()
        ]
    if found.findings or found.missing:
        parts += [Text(), heading("Findings")]
        style = {"fail": Style(bold=True, color="red"), "look": Style(color="yellow")}
        for item in found.findings:
            title = _TITLES.get(item.stage, "Run")
            parts.append(
                indent(Text.assemble((item.level, style[item.level]), f"  {title}: {clean(item.text)}"))
            )
        parts += [indent(Text(f"not done: {text}")) for text in found.missing]
    parts.append(Text())
    return Group(*parts)


def progress(point: Mapping[str, Any]) -> str | None:
    """A stage's outcome in a few words, for whoever waits."""
    if point["kind"] != "stage":
        return None
    peak, step = quantity(point["peak_allocated_bytes"], "bytes"), quantity(point["step_s"], "s")
    return f"{_TITLES[point['stage']].lower()}: loss {point['last_loss']:.3g}, {step} a step, {peak} at most"


def _rows(rows: tuple[Row, ...], sharded: bool) -> RenderableType:
    """Planned against measured. FSDP cannot run a step without its gathers, so what they add is not told."""
    absent = "not separable" if sharded else "not measured"
    table = columns("", "planned", "measured", "off by", "plan's error", right=range(1, 5), whole=range(1, 5))
    for row in rows:
        table.add_row(
            row.name,
            _value(row.predicted, row.unit, "not planned"),
            _value(row.measured, row.unit, absent),
            "" if row.deviation is None else f"{100 * row.deviation:+.0f} %",
            "" if row.expected_error is None or row.deviation is None else percent(row.expected_error, 0),
        )
    return table


def _value(value: float | None, unit: str, absent: str) -> str:
    return absent if value is None else quantity(value, unit)


def _soak(found: Soak, failed: bool) -> RenderableType:
    table = grid("left", "left")
    for name, text in _lines(found, failed):
        table.add_row(name, Text(clean(text)))
    return table


def _lines(found: Soak, failed: bool) -> Iterator[tuple[str, str]]:
    yield "time", f"{quantity(found.hours * 3600, 's')} of {quantity(found.asked_hours * 3600, 's')}"
    drift = "too short to show a drift" if found.drift is None else f"drift {100 * found.drift:+.1f} %"
    rate, planned = found.tokens_per_s, found.planned_tokens_per_s
    held = ""
    if planned is not None:
        off = float(deviation(measured=rate, predicted=planned))
        held = f" against {quantity(planned, 'tokens/s')} planned ({100 * off:+.0f} %)"
    yield "throughput", f"{quantity(rate, 'tokens/s')} in the median{held}, {drift}"
    if found.fragmentation_last is not None and found.fragmentation_first is not None:
        first, last = percent(found.fragmentation_first), percent(found.fragmentation_last)
        yield "reserved, not allocated", f"{first} at first, {last} at last"
    if found.process_growth_bytes is not None:
        yield "memory of processes", f"changed by {quantity(found.process_growth_bytes, 'bytes')}"
    if found.temperature_max_c is not None:
        apart = found.temperature_apart_c or 0
        yield "temperature", f"{found.temperature_max_c:.0f} C at most, cards {apart:.0f} C apart"
    if found.power_mean_w is not None:
        yield "power", f"{found.power_mean_w:,.0f} W a card in the mean, {found.power_max_w:,.0f} W at most"
    for reason, count in found.throttled.items():
        yield "slowed by", f"{reason} in {count} windows"
    for name, value in (
        ("corrected memory errors", found.ecc_corrected),
        ("uncorrected memory errors", found.ecc_uncorrected),
        ("rows remapped", found.remapped_rows),
    ):
        if value is not None:
            yield name, str(value)
    if found.xid is not None:
        yield "Xid", ", ".join(map(str, found.xid)) or "none"
    if found.failure_free_gpu_h is not None and not failed:
        bound = f"{found.failure_free_gpu_h:,.3g} GPU hours"
        yield "without a failure", f"which shows, at 95 %, one in {bound} at most"
