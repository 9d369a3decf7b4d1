"""Bars along the width: stacks against a limit, and the parts of a time one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpucalc.report.markup import Html, tag
from gpucalc.report.svg.axes import Axis
from gpucalc.report.svg.draw import box, drawing, segment, words

_ROW = 46.0  # a label and its bar
_BAR = 20.0
_TOP = 26.0
_FOOT = 24.0
_THIN = 0.015  # of the width: a piece so narrow has no edge of its own


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a bar: its name, its amount, and the class that colours it."""

    name: str
    value: float
    class_: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: what it is, its amount in words, and its parts."""

    label: str
    amount: str
    pieces: Sequence[Piece]
    strong: bool = False

    @property
    def total(self) -> float:
        """The parts together."""
        return sum(piece.value for piece in self.pieces)


def stacks(
    bars: Sequence[Bar],
    limit: float,
    limit_words: str,
    shown: Callable[[float], str],
    label: str,
    unit: float,
) -> Html:
    """Stacked bars against a limit, a line through all of them; what is beyond it has a broken outline."""
    axis = Axis(0.0, max([limit, *(bar.total for bar in bars)]) * 1.02 or 1.0)
    foot = _TOP + _ROW * len(bars)
    shapes = [_grid(axis, _TOP, foot, shown, unit)]
    for number, bar in enumerate(bars):
        top = _TOP + _ROW * number
        shapes.append(_pieces(bar.pieces, axis, 0.0, top + 18, shown))
        if bar.total > limit:
            over = axis.at(bar.total) - axis.at(limit)
            shapes.append(box(axis.at(limit), top + 18, over, _BAR, "over", f"{bar.label}: beyond the limit"))
    at = axis.at(limit)
    shapes.append(segment(at, _TOP - 8, at, foot - 4, "limit"))
    shapes += [_label(bar, _TOP + _ROW * number) for number, bar in enumerate(bars)]  # above the limit's line
    shapes.append(words(at, 12, limit_words, class_="t limit-t", anchor="end" if at > 0.5 else ""))
    return drawing(foot + _FOOT, label, shapes)


def waterfall(bars: Sequence[Bar], shown: Callable[[float], str], label: str) -> Html:
    """Parts of a time, each bar beginning where the one before ends."""
    axis = Axis(0.0, sum(bar.total for bar in bars) or 1.0)
    top = 4.0
    foot = top + _ROW * len(bars)
    shapes = [_grid(axis, top, foot, shown)]
    start = 0.0
    for number, bar in enumerate(bars):
        row = top + _ROW * number
        shapes.append(_label(bar, row))
        shapes.append(_pieces(bar.pieces, axis, start, row + 18, shown))
        start += bar.total
    return drawing(foot + _FOOT, label, shapes)


def strip(pieces: Sequence[Piece], shown: Callable[[float], str], label: str) -> Html:
    """One bar of the whole width, divided by share."""
    axis = Axis(0.0, sum(piece.value for piece in pieces) or 1.0)
    return drawing(28.0, label, _pieces(pieces, axis, 0.0, 0.0, shown, height=28.0))


def _label(bar: Bar, top: float) -> Html:
    class_ = "t halo strong" if bar.strong else "t halo"
    return words(0, top + 13, bar.label, " ", tag("tspan", bar.amount, class_="quiet", dx=4), class_=class_)


def _pieces(
    pieces: Sequence[Piece],
    axis: Axis,
    start: float,
    top: float,
    shown: Callable[[float], str],
    height: float = _BAR,
) -> Html:
    drawn = []
    for piece in pieces:
        if piece.value > 0:
            x, end = axis.at(start), axis.at(start + piece.value)
            wide = max(end - x, 0.004)  # what is there can be seen
            class_ = piece.class_ if wide > _THIN else f"{piece.class_} thin"
            drawn.append(box(x, top, wide, height, class_, f"{piece.name}: {shown(piece.value)}"))
        start += piece.value
    return Html("".join(drawn))


def _grid(axis: Axis, top: float, foot: float, shown: Callable[[float], str], unit: float = 1.0) -> Html:
    drawn = []
    for tick in axis.ticks(4, unit):
        x = axis.at(tick)
        drawn.append(segment(x, top, x, foot, "grid"))
        anchor = "" if x < 0.04 else "end" if x > 0.96 else "middle"
        drawn.append(words(x, foot + 16, shown(tick) if tick else "0", class_="t quiet", anchor=anchor))
    return Html("".join(drawn))
