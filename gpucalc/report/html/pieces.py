"""What sections are made of: headings, tables whose rows open, figures with a legend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpucalc import units
from gpucalc.line import Line
from gpucalc.report.html.ledger import Ledger
from gpucalc.report.markup import Content, Html, join, tag
from gpucalc.report.screen import breakdown

Row = Sequence[Content]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page, under a heading that the list of sections names too."""

    id: str
    title: str
    content: Html
    hidden: bool = False  # its heading is read out, not shown

    @property
    def markup(self) -> Html:
        """The section as an element."""
        heading = tag("h2", self.title, id=f"{self.id}-title", class_="off" if self.hidden else None)
        return tag("section", heading, self.content, id=self.id, aria_labelledby=f"{self.id}-title")


def section(id_: str, title: str, *content: Content) -> Section:
    """A part of the page."""
    return Section(id_, title, join(*content))


def table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Row],
    *,
    numbers: int = 0,
    name: str = "",
    counted: bool = False,
) -> Html:
    """A table: the first cell of a row names it, the `numbers` columns after it are set to the right.

    A `wide` one is laid out as a list where there is little room; its roles are said, since a browser
    may forget what a table is when its display is another. `counted`: its rows are named by numbers.
    """
    wide = name == "wide"
    classes = ["c0", *("cn" if number < numbers else "cw" for number in range(len(heads) - 1))]

    def role(words: str) -> str | None:
        return words if wide else None

    def row(cells: Row) -> Html:
        first, *rest = cells
        named = tag("th", first, scope="row", role=role("rowheader"), data_h=heads[0] if counted else None)
        told = (
            tag("td", cell, class_="n" if n < numbers else None, role=role("cell"), data_h=role(heads[n + 1]))
            for n, cell in enumerate(rest)
        )
        return tag("tr", named, told, role=role("row"))

    top = (
        tag("th", head, scope="col", class_="n" if class_ == "cn" else None, role=role("columnheader"))
        for head, class_ in zip(heads, classes, strict=True)
    )
    parts = (
        tag("caption", caption),
        tag("colgroup", (tag("col", class_=class_) for class_ in classes)),
        tag("thead", tag("tr", top, role=role("row")), role=role("rowgroup")),
        tag("tbody", map(row, rows), role=role("rowgroup")),
    )
    return tag("div", tag("table", parts, role=role("table")), class_=f"tbl {name}".strip())


def figure(picture: Html, caption: str, legend: Content = None) -> Html:
    """A drawing, what its colours mean, and what it shows."""
    return tag("figure", picture, legend, tag("figcaption", caption))


def legend(entries: Iterable[tuple[str, str]]) -> Html:
    """Colours and what they stand for: (class, name)."""
    return tag("ul", (tag("li", _swatch(class_), name) for class_, name in entries), class_="legend")


def _swatch(class_: str) -> Html:
    """A square of a drawing's colour."""
    return Html(f'<svg class="sw" aria-hidden="true"><rect class="{class_}" width="12" height="12"/></svg>')


def parts_rows(
    ledger: Ledger, line: Line, smallest: Sequence[float], whole: float, first: str | None = None
) -> Iterator[Row]:
    """A line, then the parts of its sum worth a row, each with its share of `whole`."""
    rows = parts(line, smallest)
    ledger.expect(part for _, part, _ in rows)
    name = ledger_name(ledger, line, 0, first)
    yield (name, ledger.value(line.value, line.unit), _share(line.value, whole))
    for level, part, amount in rows:
        name = indented(level + 1, ledger.opened(part, amount=amount))
        yield (name, ledger.value(amount, part.unit), _share(amount, whole))


def parts(line: Line, smallest: Sequence[float]) -> list[tuple[int, Line, float]]:
    """The parts of a sum worth a row: level, line and amount; `smallest` are shares of the sum by level."""
    least = abs(float(line.value))
    found = breakdown(line, len(smallest))
    return [row for row in found if row[2] and abs(row[2]) >= smallest[row[0]] * least]


def ledger_name(ledger: Ledger, line: Line, level: int, name: str | None) -> Html:
    """A line's name that opens, under another name where one is given."""
    told = ledger.opened(line, join(name) if name is not None else None)
    return indented(level, told) if level else told


def indented(level: int, content: Html) -> Html:
    """Set in below what it is a part of."""
    return tag("div", content, class_=f"in{min(level, 4)}")


def facts_rows(ledger: Ledger, lines: Iterable[Line]) -> Iterator[Row]:
    """Lines that are no parts of a sum: name, value, what it means."""
    for line in lines:
        yield (ledger.opened(line), ledger.value(line.value, line.unit), line.note or "")


def _share(amount: float, whole: float) -> str:
    return units.percent(amount / whole, 0) if whole else ""
