"""Catalogue entries as tables: every figure with its unit, kind and source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpucalc.line import Line
from gpucalc.report.json import figures
from gpucalc.report.screen import QUIET, bar, breakdown, clean, columns, grid, heading, indent, whole
from gpucalc.spec.base import Spec
from gpucalc.spec.figure import Figure
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.system import SystemSpec
from gpucalc.units import count, percent

_MARK = "* typed from memory or carried over, not confirmed."


def gpus(entries: Sequence[GpuSpec]) -> RenderableType:
    """One accelerator a row."""
    heads = ("GPU", "arch", "memory", "GB/s", "bf16", "fp8", "link", "W")
    table = columns(*heads, right=range(2, 8), whole=range(8), gap=1)
    for gpu in entries:
        table.add_row(
            clean(gpu.id),
            clean(gpu.arch),
            _short(gpu.memory_label),
            _in(gpu.memory_bandwidth, 1e9),
            _in(gpu.peaks.get("bf16") or gpu.peaks.get("fp16"), 1e12),
            _in(gpu.peaks.get("fp8"), 1e12),
            _in(gpu.nvlink_bandwidth, 1e9),
            _in(gpu.tdp, 1),
        )
    said = f"{len(entries)} GPUs. {_MARK} bf16, fp8: dense TFLOP/s; link: GB/s, both directions."
    return Group(table, Text(said, style=QUIET))


def systems(entries: Sequence[SystemSpec]) -> RenderableType:
    """One system a row."""
    heads = ("system", "GPUs", "domain", "network Gbit/s", "RAM GB", "USD/GPU h")
    table = columns(*heads, right=range(2, 6), whole=(0, 1), gap=1)
    for system in entries:
        nic = f"{system.nic.count}x{_in(system.nic.bandwidth, 1e9 / 8)}" if system.nic else ""
        table.add_row(
            clean(system.id),
            clean(f"{system.gpus}x{system.gpu}"),
            str(system.nvlink_domain),
            nic,
            _in(system.host_ram, 1e9),
            f"{system.price.usd_per_gpu_hour.value:,.2f}" if system.price else "",
        )
    said = f"{len(entries)} systems. {_MARK} Domain: GPUs that reach each other without PCIe."
    return Group(table, Text(said, style=QUIET))


def models(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One model a row, with the parameters counted from its architecture."""
    heads = ("model", "family", "kind", "params", "active", "context")
    table = columns(*heads, right=(3, 4, 5), whole=(0, 2, 3, 4, 5), gap=1)
    for row in rows:
        total, active, context = row["params_total"], row["params_active"], row["max_context_tokens"]
        table.add_row(
            clean(row["id"]),
            clean(row["family"] or ""),
            clean(row["kind"] or ""),
            "unknown" if total is None else count(total),
            "" if active == total else count(active),
            "" if context is None else f"{context:,}" if context < 1e6 else count(context),
        )
    return Group(
        table, Text(f"{len(rows)} models; parameters are counted from the architecture", style=QUIET)
    )


def model(
    spec: Spec,
    total: Line,
    active: Line,
    shapes: Mapping[str, object],
    stated: Mapping[str, object],
    notes: Sequence[str],
    origin: str,
) -> RenderableType:
    """A model's architecture and where its parameters are."""
    table = grid("left", "right", "right", "left")
    for level, part, amount in breakdown(total, 3):
        share = amount / total.value if total.value else 0.0
        repeated = f" x {part.inputs['layers']}" if "layers" in part.inputs else ""
        table.add_row(
            Text("  " * level + clean(part.name) + repeated),
            Text(f"{amount:,.0f}"),
            Text(percent(share)),
            bar(share, 20),
        )
    head = f"{total.value:,.0f} parameters"
    if active.value != total.value:
        head += f", {active.value:,.0f} of them active for a token"
    parts: list[RenderableType] = [heading(str(getattr(spec, "label", ""))), Text(head), Text()]
    parts += [heading("Parameters, counted"), indent(table)]
    for title, known in (("Architecture", shapes), ("Stated by the source", stated)):
        if known:
            parts += [Text(), heading(title), indent(_facts(known))]
    if notes:
        parts += [Text(), heading("Notes"), *(indent(Text("- " + clean(note))) for note in notes)]
    return Group(*parts, Text(), Text(f"from {clean(origin)}", style=QUIET))


def entry(spec: Spec, facts: Mapping[str, object], origin: str | None = None) -> RenderableType:
    """One entry: its plain facts, its figures, what is said about them and the sources in full."""
    found = dict(figures(spec))
    sources = list(dict.fromkeys(ref for figure in found.values() for ref in _references(figure)))
    parts: list[RenderableType] = [heading(str(getattr(spec, "name", None) or getattr(spec, "id", "")))]
    parts.append(indent(_facts(facts)))
    if found:
        table = columns("figure", "value", "kind", "source", right=(1,))
        for key, figure in found.items():
            marks = " ".join(f"[{sources.index(ref) + 1}]" for ref in _references(figure))
            note = f" {clean(figure.note)}" if figure.note else ""
            table.add_row(
                Text(clean(key)), Text(stated_value(figure)), Text(figure.kind.value), Text(marks + note)
            )
        parts += [Text(), heading("Figures"), indent(table)]
    for title in ("disagreements", "notes"):
        said = getattr(spec, title, ())
        if said:
            lines = (said,) if isinstance(said, str) else said
            parts += [
                Text(),
                heading(title.capitalize()),
                *(indent(Text("- " + clean(text))) for text in lines),
            ]
    if sources:
        table = grid("right", "left")
        for index, ref in enumerate(sources, 1):
            table.add_row(Text(f"[{index}]"), Text(clean(ref)))
        parts += [Text(), heading("Sources"), indent(table)]
    if origin:
        parts += [Text(), Text(f"from {clean(origin)}", style=QUIET)]
    return Group(*parts)


def comparison(first: Spec, second: Spec) -> RenderableType:
    """Two entries side by side, with the second's figure over the first's."""
    left, right = dict(figures(first)), dict(figures(second))
    table = columns("figure", _id(first), _id(second), "ratio", right=(1, 2, 3))
    for key in dict.fromkeys([*left, *right]):
        a, b = left.get(key), right.get(key)
        table.add_row(Text(clean(key)), Text(_shown(a)), Text(_shown(b)), Text(_ratio(a, b)))
    return Group(table, Text(f"Ratio: second over first. {_MARK}", style=QUIET))


def facts_comparison(
    first: Mapping[str, object], second: Mapping[str, object], names: tuple[str, str]
) -> RenderableType:
    """Two sets of plain facts side by side."""
    table = columns("", *names, "ratio", right=(1, 2, 3))
    for key in dict.fromkeys([*first, *second]):
        a, b = first.get(key), second.get(key)
        ratio = f"{b / a:.2f}" if _is_number(a) and _is_number(b) and a else ""  # type: ignore[operator]
        table.add_row(Text(clean(key)), Text(clean(_fact(a))), Text(clean(_fact(b))), Text(ratio))
    return table


def folders(found: Mapping[Path, Mapping[str, int]], shipped: Path) -> RenderableType:
    """Catalogue folders in the order they are searched, with the files of each kind."""
    parts: list[RenderableType] = [heading("Catalogue folders, the first that has a name wins")]
    for path, kinds in found.items():
        # A path is shown whole, to be copied.
        parts.append(indent(Text(clean(path) + (" (shipped)" if path == shipped else ""), overflow="fold")))
        held = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
        parts.append(indent(Text(held or "nothing", QUIET), 4))
    return Group(*parts)


def _facts(known: Mapping[str, object]) -> Table:
    table = grid("left", "left")
    for key, fact in known.items():
        table.add_row(Text(clean(key), style=QUIET), Text(clean(_fact(fact))))
    return table


def stated_value(figure: Figure) -> str:
    """A figure as the catalogue states it, with its unit."""
    return f"{whole(figure.value)} {clean(figure.unit)}"


def _references(figure: Figure) -> tuple[str, ...]:
    return figure.references or figure.source


def _short(figure: Figure | None) -> str:
    return "" if figure is None else stated_value(figure) + ("*" if figure.kind == "assumed" else "")


def _in(figure: Figure | None, scale: float) -> str:
    """A figure in the unit its column's heading names."""
    return "" if figure is None else whole(figure.si / scale) + ("*" if figure.kind == "assumed" else "")


def _shown(figure: Figure | None) -> str:
    return _short(figure) or "-"


def _ratio(a: Figure | None, b: Figure | None) -> str:
    return f"{b.si / a.si:.2f}" if a is not None and b is not None and a.si else ""


def _fact(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_fact(item)}" for key, item in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(_fact(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return "" if value is None else str(value)


def _is_number(item: object) -> bool:
    return isinstance(item, int | float) and not isinstance(item, bool)


def _id(spec: Spec) -> str:
    return clean(getattr(spec, "id", None) or getattr(spec, "name", ""))
