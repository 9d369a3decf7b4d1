"""Numbers that open into how they came about: the formula, the values put in, the source, what went in.

A line is opened once on a page; where it enters again, a link leads to that place. Formulas and sources
are numbered as they are met and listed at the page's end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from gpucalc.explain import alone, number
from gpucalc.formula import FORMULAS
from gpucalc.line import Line
from gpucalc.report.json import plain
from gpucalc.report.markup import Content, Html, join, tag, text
from gpucalc.report.screen import label, quantity

# How much of an explanation a page holds, from everything to the formula alone. What does not fit in a
# page is left to `gpucalc explain`.
DEPTHS = (64, 5, 4, 3, 2, 1, 0)


BESIDE = 1  # of rows that are plans of their own, beside this one: a page holds many


class Ledger:
    """What has been told on one page, and the formulas and sources it was told with."""

    def __init__(self, depth: int = DEPTHS[0], *, full: bool = True) -> None:
        """`depth`: inputs followed below a number; `full`: the formula beside its values each time."""
        self.depth, self.full = depth, full
        self.formulas: dict[str, None] = {}
        self.sources: dict[str, int] = {}
        self.cut = False
        self._keys: dict[Any, int] = {}
        self._known: dict[int, tuple[Line, int]] = {}
        self._told: set[int] = set()
        self._awaited: set[int] = set()
        self._coming: set[int] = set()

    # -- numbers ----------------------------------------------------------------------------------

    def value(self, amount: Any, unit: str) -> Html:
        """A number for people, with the number itself for programs."""
        if isinstance(amount, bool) or not isinstance(amount, int | float):
            return text(amount)
        return tag("data", quantity(amount, unit), value=repr(plain(amount)))

    def link(self, line: Line, unit: str | None = None) -> Html:
        """A line's number as a link to the place that opens it; that place must follow."""
        mark = self._mark(line)
        self._awaited.add(mark)
        return tag("a", self.value(line.value, unit or line.unit), href=f"#n{mark}")

    def expect(self, lines: Iterable[Line]) -> None:
        """Lines that will have a row of their own: until then what holds them leads there."""
        self._coming |= {self._mark(line) for line in lines if self._opens(line)}

    def opened(
        self, line: Line, name: Html | None = None, *, amount: float | None = None, depth: int | None = None
    ) -> Html:
        """A line's name, which opens into how its number came about; `amount`: of all its repeats."""
        shown = name if name is not None else breakable(label(line))
        mark = self._mark(line)
        if mark in self._told:
            return tag("span", shown, " ", self._above(mark), class_="flat")
        depth = self.depth if depth is None else min(depth, self.depth)
        if not self._opens(line):
            return tag("span", shown, class_="flat")
        return tag("details", tag("summary", shown), self._how(line, mark, depth, amount))

    def several(self, name: Content, lines: Iterable[tuple[str, Line]], *, depth: int) -> Html:
        """The name of a row of several numbers, which opens into them, and each of them as `opened` does."""
        depth = min(depth, self.depth)
        rows = (tag("li", self._entry(called, line, depth + 1)) for called, line in lines)
        return tag("details", tag("summary", name), tag("div", tag("ul", rows), class_="how"))

    @staticmethod
    def _opens(line: Line) -> bool:
        """Whether there is more to say of a line than its number."""
        return bool(line.formula or line.children or line.source or line.note)

    @property
    def unanswered(self) -> set[int]:
        """Links that lead nowhere: lines that were to be opened and were not."""
        return self._awaited - self._told

    def cite(self, source: str) -> Html:
        """A source as its number in the list at the end."""
        place = self.sources.setdefault(source, len(self.sources) + 1)
        return tag("a", f"[{place}]", href=f"#r{place}", class_="cite")

    def formula(self, name: str) -> Html:
        """A formula's name as a link to the list at the end."""
        self.formulas.setdefault(name)
        return tag("a", tag("code", name), href=f"#f-{name}")

    # -- how it came about ------------------------------------------------------------------------

    def _how(self, line: Line, mark: int, depth: int, amount: float | None = None) -> Html:
        self._told.add(mark)
        self._coming.discard(mark)
        pieces: list[Html] = []
        if amount is not None and line.value and not math.isclose(amount, line.value, rel_tol=1e-9):
            times = quantity(amount / line.value, "ratio")
            pieces.append(tag("p", f"{times} times ", self.value(line.value, line.unit)))
        own = alone(line)
        if own.formula is not None and own.formula in FORMULAS:
            pieces.append(tag("p", self.formula(own.formula), ": ", own.summary))
            steps = [f"= {own.expression}", f"= {own.substituted}"]
            pieces += [tag("code", step, class_="eq") for step in (steps if self.full else steps[1:])]
        if line.note:
            pieces.append(tag("p", line.note))
        if line.source:
            pieces.append(tag("p", "source ", self.cite(line.source)))
        pieces += self._below("from", line.inputs.items(), depth)
        if not own.formula or not line.inputs:
            parts = ((part.name, part) for part in line.children)
            pieces += self._below(_together(line), parts, depth)
        return tag("div", tag("p", self._in_full(line)), pieces, class_="how", id=f"n{mark}")

    def _in_full(self, line: Line) -> Html:
        return join(f"{number(line.value)} {line.unit}, ", tag("i", line.kind.value))

    def _below(self, word: str, items: Iterable[tuple[str, Any]], depth: int) -> list[Html]:
        rows = [tag("li", self._entry(name, item, depth)) for name, item in items]
        return [tag("p", word), tag("ul", rows)] if rows else []

    def _entry(self, name: str, item: Any, depth: int) -> Html:
        if not isinstance(item, Line):
            return join(tag("b", name), f" {number(item)}")
        called = name if name == item.name else f"{name}: {item.name}"
        first = join(tag("b", called), " ", self.value(item.value, item.unit))
        mark = self._mark(item)
        if not (item.formula or item.children):
            source = self.cite(item.source) if item.source else ""
            note = f" {item.note}" if item.note and len(item.note) < 90 else ""
            return join(first, " ", tag("i", item.kind.value), " ", source, note)
        if mark in self._told:
            return join(first, " ", self._above(mark))
        if mark in self._coming:
            return join(first, " ", tag("a", "shown below", href=f"#n{mark}", class_="cite"))
        if depth <= 0:
            self.cut |= self.depth < DEPTHS[0]
            return join(first, " ", self.formula(item.formula)) if item.formula else first
        return tag("details", tag("summary", first), self._how(item, mark, depth - 1))

    def _above(self, mark: int) -> Html:
        return tag("a", "shown above", href=f"#n{mark}", class_="cite")

    def _mark(self, line: Line) -> int:
        """One number for all lines that say the same."""
        known = self._known.get(id(line))
        if known is not None:
            return known[1]
        inputs = tuple(
            (name, self._mark(item) if isinstance(item, Line) else ("is", str(item)))
            for name, item in line.inputs.items()
        )
        children = tuple(self._mark(child) for child in line.children)
        facts = (line.name, str(line.value), line.unit, line.formula, line.source, line.note)
        mark = self._keys.setdefault((facts, inputs, children), len(self._keys) + 1)
        self._known[id(line)] = (line, mark)  # the line is kept, so that its id stays its own
        return mark


def breakable(name: str) -> Html:
    """A name that may be broken after its underscores."""
    return Html(text(name).replace("_", "_<wbr>"))


def _together(line: Line) -> str:
    values = [part.value for part in line.children if part.unit == line.unit]
    if values and isinstance(line.value, int | float):
        if math.isclose(sum(values), line.value, rel_tol=1e-6, abs_tol=1e-12):
            return "the sum of"
        if math.isclose(max(values), line.value, rel_tol=1e-9):
            return "the largest of"
    return "with"
