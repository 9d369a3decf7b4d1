"""Pieces every table is made of: quantities as text, bars, label-and-value rows, the console.

Whatever comes from files (names, notes, sources) is shown with control characters made visible,
so that a file cannot drive the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from gpucalc import units
from gpucalc.errors import one_line
from gpucalc.line import Kind, Line

WIDEST = 120  # wider lines are hard to read; a wider terminal stays empty on the right
_EIGHTHS = " ▏▎▍▌▋▊▉"

HEADING = Style(bold=True)
QUIET = Style(dim=True)
_KIND_MARK = {Kind.ASSUMED: "*"}


def render(item: RenderableType, *, color: bool = True) -> str:
    """The item as text for standard output: plain when piped, NO_COLOR is set or color is off."""
    console = Console(highlight=False, no_color=None if color else True, soft_wrap=False)
    console.width = min(console.width, WIDEST)
    if not color:
        console = Console(highlight=False, color_system=None, width=console.width)
    with console.capture() as capture:
        console.print(item)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return "\n".join(lines)


def clean(value: object) -> str:
    """Text from outside, on one line, control characters made visible."""
    return one_line(str(value))


def quantity(value: Any, unit: str) -> str:
    """A value in the unit a reader expects: GiB, TFLOP/s, percent, dollars."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return clean(value)
    match unit:
        case "bytes":
            return units.gib(value)
        case "bytes/s" | "bytes_per_s":
            return units.gb_per_s(value)
        case "s":
            return units.seconds(value) if value else "0 s"
        case "fraction":
            return units.percent(value)
        case "FLOP/s" | "flops/s" | "flops_per_s":
            return f"{value / 1e12:,.1f} TFLOP/s"
        case "OP/s":
            return f"{value / 1e12:,.1f} TOP/s"
        case "FLOP" | "flops":
            return f"{units.count(value)} FLOP"
        case "params" | "parameters":
            return f"{units.count(value)} parameters"
        case "USD":
            return f"${value:,.2f}"
        case "USD/h":
            return f"${value:,.2f}/h"
        case "Hz":
            return f"{value / 1e6:,.0f} MHz"
        case "count" | "1" | "":
            return whole(value)
        case "year":
            return f"{value:.0f}"
        case _:
            return f"{whole(value)} {clean(unit)}"


def whole(value: float) -> str:
    """A number with four significant digits, whole numbers in full."""
    if float(value).is_integer() and abs(value) < 1e12:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def bar(fraction: float, width: int, *, limit: float | None = None) -> Text:
    """A bar of eighth blocks; `limit` puts a mark where the card ends."""
    eighths = max(0, min(width * 8, round(fraction * width * 8)))
    full, rest = divmod(eighths, 8)
    cells = "█" * full + (_EIGHTHS[rest] if rest else "")
    if eighths == 0 and fraction > 0:
        cells = "▏"
    if limit is not None:
        mark = round(limit * width)
        cells = cells.ljust(width + 1)
        cells = cells[:mark] + "│" + cells[mark + 1 :]
    return Text(cells.rstrip())


def grid(*justify: str) -> Table:
    """A table without lines; the first column takes what the others leave."""
    table = Table.grid(padding=(0, 2, 0, 0), expand=False)
    for side in justify:
        table.add_column(justify="right" if side == "right" else "left", overflow="fold")
    return table


def columns(*names: str, right: Iterable[int] = ()) -> Table:
    """A table with headings and no lines; columns in `right` hold numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=HEADING)
    numeric = set(right)
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index in numeric else "left", overflow="fold")
    return table


def heading(text: str) -> Text:
    """A section's title."""
    return Text(clean(text), style=HEADING)


def indent(item: RenderableType, cells: int = 2) -> Padding:
    """The item moved to the right."""
    return Padding(item, (0, 0, 0, cells))


def breakdown(line: Line, depth: int, value: float | None = None) -> Iterator[tuple[int, Line, float]]:
    """The parts of a line, `depth` levels down, each with its level and its amount of the whole.

    A line that repeats another (layers, micro-batches) shows that one's parts, as often as it does.
    """
    amount = float(line.value if value is None else value)
    held = [part for part in line.children if part.unit == line.unit]
    while len(held) == 1 and held[0].children:
        line = held[0]
        held = [part for part in line.children if part.unit == line.unit]
    factor = amount / line.value if line.value else 0.0
    for part in held:
        yield 0, part, part.value * factor
        if depth > 1:
            for level, below, share in breakdown(part, depth - 1, part.value * factor):
                yield level + 1, below, share


def label(line: Line) -> str:
    """A line's name as shown; an asterisk marks what rests on an assumption."""
    return clean(line.name) + _KIND_MARK.get(line.kind, "")
