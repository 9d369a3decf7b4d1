"""Pieces every table is made of: quantities as text, bars, label-and-value rows, the console.

Whatever comes from files (names, notes, sources) is shown with control characters made visible,
so that a file cannot drive the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from gpucalc import units
from gpucalc.errors import one_line
from gpucalc.line import Line

USUAL = 80
WIDEST = 120  # wider lines are hard to read; a wider terminal stays empty on the right
_EIGHTHS = " ▏▎▍▌▋▊▉"

HEADING = Style(bold=True)
QUIET = Style(dim=True)


def render(item: RenderableType, *, color: bool = True) -> str:
    """The item as text for standard output: plain when piped, NO_COLOR is set or color is off."""
    console = Console(highlight=False, no_color=None if color else True, soft_wrap=False)
    console.width = min(console.width or USUAL, WIDEST)  # COLUMNS=0 says that nobody knows
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
            return _bytes(value)
        case "bytes/s":
            return units.gb_per_s(value)
        case "s":
            return _seconds(value)
        case "fraction":
            return units.percent(value)
        case "FLOP/s":
            return f"{value / 1e12:,.1f} TFLOP/s"
        case "OP/s":
            return f"{value / 1e12:,.1f} TOP/s"
        case "FLOP":
            return _prefixed(value, "FLOP")
        case "parameters":
            return f"{units.count(value)} parameters"
        case "USD":
            return dollars(value)
        case "USD/h":
            return f"${value:,.2f}/h"
        case "USD per 1e6 tokens":
            return f"${value:,.3f} per 1e6 tokens"
        case "Hz":
            return f"{value / 1e6:,.0f} MHz"
        case "count" | "ratio":
            return whole(value)
        case "year":
            return f"{value:.0f}"
        case _:
            return f"{whole(value)} {clean(unit)}"


def set_word(value: object) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{','.join(map(set_word, value))}]"
    return "null" if value is None else clean(value)


def dollars(value: float) -> str:
    """Money, in cents while they matter."""
    return f"${value:,.2f}" if abs(value) < 1000 else f"${value:,.0f}"


def _bytes(value: float) -> str:
    if abs(value) >= units.GIB / 10:
        return units.gib(value)
    return f"{value / units.MIB:,.2f} MiB" if abs(value) >= units.MIB / 10 else f"{value:,.0f} bytes"


def _seconds(value: float) -> str:
    if value == 0:
        return "0 s"
    return units.seconds(value) if value >= 1e-4 else f"{value * 1e6:.3g} us"


def _prefixed(value: float, unit: str) -> str:
    for scale, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G")):
        if abs(value) >= scale:
            return f"{value / scale:,.2f} {prefix}{unit}"
    return f"{value:,.0f} {unit}"


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


def columns(*names: str, right: Iterable[int] = (), whole: Iterable[int] = (), gap: int = 2) -> Table:
    """A table with headings and no lines. Columns in `right` hold numbers, those in `whole` never wrap."""
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style=HEADING)
    numeric, kept = set(right), set(whole)
    for index, name in enumerate(names):
        justify: Literal["left", "right"] = "right" if index in numeric else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=index in kept)
    return table


def heading(text: str) -> Text:
    """A section's title."""
    return Text(clean(text), style=HEADING)


def indent(item: RenderableType, cells: int = 2) -> Padding:
    """The item moved to the right."""
    return Padding(item, (0, 0, 0, cells))


def breakdown(line: Line, depth: int, value: float | None = None) -> Iterator[tuple[int, Line, float]]:
    """The parts of a sum, `depth` levels down, each with its level and its amount of the whole.

    A line that repeats another (layers, micro-batches) shows that one's parts, as often as it does;
    a single part with nothing below it says no more than the line itself and is left out.
    """
    amount = float(line.value if value is None else value)
    held = _same_unit(line)
    while len(held) == 1 and (line.formula or "").startswith("repeated"):
        line, held = held[0], _same_unit(held[0])
    if (len(held) == 1 and not held[0].children) or not math.isclose(
        sum(part.value for part in held), line.value, rel_tol=1e-6
    ):
        return
    factor = amount / line.value if line.value else 0.0
    for part in held:
        yield 0, part, part.value * factor
        if depth > 1:
            for level, below, share in breakdown(part, depth - 1, part.value * factor):
                yield level + 1, below, share


def _same_unit(line: Line) -> list[Line]:
    return [part for part in line.children if part.unit == line.unit]


def label(line: Line) -> str:
    """A line's name as shown; an asterisk marks where something nobody stated enters."""
    return clean(line.name) + ("*" if _assumed_here(line) else "")


def _assumed_here(line: Line) -> bool:
    entering = [line, *(item for item in line.inputs.values() if isinstance(item, Line))]
    return any(item.is_assumption for item in entering)
