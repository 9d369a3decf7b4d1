"""What a probe found, as tables and documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpucalc.probe.inventory import Inventory, shown
from gpucalc.probe.peers import Pair
from gpucalc.report.screen import QUIET, clean, columns, heading, indent
from gpucalc.spec.calibration import CalibrationSpec, LinkConstants, MatmulConstants
from gpucalc.spec.figure import Figure
from gpucalc.units import percent


def inventory(found: Inventory) -> RenderableType:
    """Driver, then every card field by field; cards that agree on a field share its row."""
    cuda = found.cuda.value or found.cuda.reason
    parts: list[RenderableType] = [
        heading(f"{len(found.cards)} GPUs, driver {found.driver.value or found.driver.reason}, CUDA {cuda}")
    ]
    if found.surroundings:
        parts.append(indent(Text(f"inside {found.surroundings}: some fields may be withheld", QUIET)))
    table = columns("field", "GPU", "value", whole=(0, 1))
    entries: dict[str, list[int]] = {}
    for card in found.cards:
        entry = f"{card.entry or 'none'}{f' ({card.entry_note})' if card.entry_note else ''}"
        entries.setdefault(entry, []).append(card.index)
    _rows(table, "catalogue", entries, len(found.cards))
    for name in found.cards[0].facts:
        values: dict[str, list[int]] = {}
        for card in found.cards:
            values.setdefault(shown(name, card.facts[name]), []).append(card.index)
        _rows(table, name.replace("_", " "), values, len(found.cards))
    for words, cards in _joined(found):
        table.add_row("reach each other", cards, clean(words))
    parts.append(indent(table))
    if len(found.visible) != len(found.cards):
        seen = ", ".join(map(str, found.visible)) or "none"
        parts.append(indent(Text(f"CUDA programs see: {seen}")))
    parts += [indent(Text(clean(note))) for note in found.notes]
    return Group(*parts)


def _joined(found: Inventory) -> Iterator[tuple[str, str]]:
    """What lies between cards and how they reach each other, with the pairs it is true of."""
    kinds: dict[str, list[Pair]] = {}
    for pair in found.pairs:
        words = f"{pair.path.value or pair.path.reason}, {pair.access.value or pair.access.reason}"
        kinds.setdefault(words, []).append(pair)
    for words, held in kinds.items():
        if len(held) == len(found.pairs):
            yield words, "all"
            continue
        partners: dict[str, list[int]] = {}
        for first in sorted({pair.first for pair in held}):
            others = _ranges([pair.second for pair in held if pair.first == first])
            partners.setdefault(others, []).append(first)
        yield words, "; ".join(f"{_ranges(cards)} to {others}" for others, cards in partners.items())


def _rows(table: Table, name: str, values: dict[str, list[int]], count: int) -> None:
    for value, cards in values.items():
        which = "all" if len(cards) == count else _ranges(cards)
        table.add_row(name, which, clean(value))


def _ranges(numbers: list[int]) -> str:
    """0-3,6 for 0 1 2 3 6."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def calibration(found: CalibrationSpec) -> RenderableType:
    """The fitted constants with the quality of each fit, and what is doubtful."""
    machine = found.machine
    honest = " (a CPU: no plan takes these for a GPU)" if machine.device == "cpu" else ""
    entry = f", {machine.gpu} in the catalogue" if machine.gpu else ""
    parts: list[RenderableType] = [heading(f"{machine.name}{entry}, {machine.words}{honest}")]
    if found.matmul:
        titles = ("matmul", "rate", "bandwidth", "overhead", "p", "fit error", "points", "used")
        table = columns(*titles, right=range(1, 7))
        for name, one in found.matmul.items():
            cells = [_cell(figure) for figure in (one.rate, one.bandwidth, one.overhead, one.p)]
            cells += [percent(one.error.value, 0), str(one.points), _used(one.doubts)]
            table.add_row(name, *cells)
        parts.append(indent(table))
    for title, links in (
        ("copy", found.copy_rates),
        (f"{found.collectives.ranks} ranks", found.collectives.ops) if found.collectives else ("", {}),
    ):
        if links:
            names = (title, "latency", "bandwidth", "ramp", "fit error", "points", "used")
            table = columns(*names, right=range(1, 6))
            for name, link in links.items():
                cells = [_cell(figure) for figure in (link.alpha, link.bus_bandwidth, link.ramp)]
                cells += [percent(link.error.value, 0), str(link.points), _used(link.doubts)]
                table.add_row(name, *cells)
            parts.append(indent(table))
    parts += [indent(Text(clean(text))) for text in _doubts(found)]
    skipped = [point for point in found.points if point["kind"] == "skipped"]
    parts += [indent(Text(clean(f"{point['what']}: {point['why']}"), QUIET)) for point in skipped]
    return Group(*parts)


def progress(point: dict[str, Any]) -> str | None:
    """A measured point in a few words, for whoever waits."""
    doubts = f"  doubtful: {', '.join(point['doubts'])}" if point.get("doubts") else ""
    match point["kind"]:
        case "matmul":
            shape = "x".join(map(str, point["shape"]))
            return f"matmul {point['dtype']} {shape}: {point['tflops_per_s']:.3g} TFLOP/s{doubts}"
        case "copy":
            return f"copy {point['direction']} {point['bytes']} bytes: {point['gb_per_s']:.3g} GB/s{doubts}"
        case "comm":
            rate = f"{point['busbw_gb_per_s']:.3g} GB/s bus"
            return f"{point['op']} {point['bytes']} bytes: {rate}{doubts}"
    return None


def _cell(figure: Figure) -> str:
    return f"{figure.value:.3g}" if figure.unit == "ratio" else f"{figure.value:.3g} {figure.unit}"


def _used(doubts: tuple[str, ...]) -> str:
    return "no" if doubts else "yes"


def _doubts(found: CalibrationSpec) -> Iterator[str]:
    """Why constants are not used, one reason a line with all it holds for."""
    every: dict[str, MatmulConstants | LinkConstants] = {**found.matmul}
    every |= {f"{name} copy": one for name, one in found.copy_rates.items()}
    every |= found.collectives.ops if found.collectives else {}
    reasons: dict[str, list[str]] = {}
    for name, one in every.items():
        for reason in one.doubts:
            reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        which = "nothing is used" if len(names) == len(every) else f"{', '.join(names)} not used"
        yield f"{which}: {reason}"
