"""What a probe found, as tables and documents."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpucalc.probe.inventory import Inventory, shown
from gpucalc.report.screen import QUIET, clean, columns, heading, indent


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
    parts.append(indent(table))
    if len(found.visible) != len(found.cards):
        seen = ", ".join(map(str, found.visible)) or "none"
        parts.append(indent(Text(f"CUDA programs see: {seen}")))
    parts += [indent(Text(clean(note))) for note in found.notes]
    return Group(*parts)


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
