"""Points and lines between two scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpucalc.report.markup import Html
from gpucalc.report.svg.axes import Axis
from gpucalc.report.svg.draw import dot, drawing, segment, words

_HEIGHT = 320.0
_TOP, _FOOT = 34.0, 40.0


@dataclass(frozen=True, slots=True)
class Point:
    """A point with the mark written in it and what the pointer is told."""

    x: float
    y: float
    title: str
    mark: str = ""
    class_: str = "s0"
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Curve:
    """Points joined by straight lines; `class_` is the stroke's."""

    points: Sequence[tuple[float, float]]
    class_: str = "l0"


@dataclass(frozen=True, slots=True)
class Note:
    """Words at a place of the plot."""

    x: float
    y: float
    text: str
    anchor: str = ""
    dy: float = -6.0


def plot(
    x: Axis,
    y: Axis,
    *,
    label: str,
    x_title: str,
    y_title: str,
    x_shown: Callable[[float], str],
    y_shown: Callable[[float], str],
    points: Sequence[Point] = (),
    curves: Sequence[Curve] = (),
    notes: Sequence[Note] = (),
    x_ticks: Sequence[float] = (),
) -> Html:
    """A plot: grid and tick words, curves, then points above them."""
    foot = _HEIGHT - _FOOT

    def up(value: float) -> float:
        return foot - (foot - _TOP) * y.at(value)

    shapes: list[Html] = []
    for tick in y.ticks(5):
        shapes.append(segment(0, up(tick), 1, up(tick), "grid"))
        shapes.append(words(0, up(tick) - 4, y_shown(tick), class_="t quiet halo"))
    for tick in x_ticks or x.ticks(5):
        at = x.at(tick)
        shapes.append(segment(at, foot, at, foot + 5, "axis"))
        anchor = "" if at < 0.05 else "end" if at > 0.95 else "middle"
        shapes.append(words(at, foot + 19, x_shown(tick), class_="t quiet", anchor=anchor))
    shapes.append(segment(0, foot, 1, foot, "axis"))
    shapes.append(words(0, 12, y_title, class_="t"))
    shapes.append(words(1, _HEIGHT - 5, x_title, class_="t", anchor="end"))
    for curve in curves:
        for (x1, y1), (x2, y2) in zip(curve.points, curve.points[1:], strict=False):
            shapes.append(segment(x.at(x1), up(y1), x.at(x2), up(y2), curve.class_))
    for note in notes:
        shapes.append(
            words(x.at(note.x), up(note.y) + note.dy, note.text, class_="t halo", anchor=note.anchor)
        )
    for point in reversed(points):  # the first lies on top
        px, py = x.at(point.x), up(point.y)
        radius = 10.0 if point.mark else 6.0 if point.strong else 4.5
        class_ = f"{point.class_} mark strong" if point.strong else f"{point.class_} mark"
        shapes.append(dot(px, py, radius, class_, point.title))
        if point.mark:
            shapes.append(words(px, py + 4, point.mark, class_="t in", anchor="middle"))
    return drawing(_HEIGHT, label, shapes)
