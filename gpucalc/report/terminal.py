"""A report as a picture of a terminal, for a README: no network, letters kept as letters."""

from __future__ import annotations

import io
from html import escape

from rich.console import Console, RenderableType
from rich.terminal_theme import TerminalTheme

WIDTH = 100  # cells; wider pictures are hard to read in a column of text

# Ours, not the terminal's: AA contrast on the background for every colour the reports use.
THEME = TerminalTheme(
    (22, 25, 29),
    (238, 240, 244),
    [
        (22, 25, 29), (255, 138, 128), (126, 211, 160), (240, 200, 110),
        (128, 184, 245), (221, 150, 210), (120, 205, 215), (238, 240, 244),
    ],
)  # fmt: skip

# As rich's own, without its fonts from the network: cells keep their width by textLength in any font.
_FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" role="img" aria-label="%s" \
xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; \
font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font: bold 18px system-ui, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>"""


def picture(item: RenderableType, title: str, *, width: int = WIDTH) -> str:
    """The report as an SVG document of so many cells a line, under the command that makes it."""
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="standard",
        highlight=False, legacy_windows=False, no_color=False,
    )  # fmt: skip
    console.print(item)
    label = escape(f"Terminal: {title}").replace("{", "{{").replace("}", "}}")
    return console.export_svg(
        title=title, theme=THEME, code_format=_FORMAT.replace("%s", label), unique_id="gpucalc"
    )
