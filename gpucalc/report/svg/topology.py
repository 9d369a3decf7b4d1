"""The machine as boxes: nodes, the GPUs in them, and what joins them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpucalc.report.markup import Html
from gpucalc.report.svg.draw import box, drawing, segment, words

_GPU_ROWS = 4  # rows of GPUs a node's box is divided into at most
_ACROSS = 8  # GPUs beside each other
_SHOWN = 4  # nodes drawn; the rest are counted
_ROW, _HEAD, _GAP = 30.0, 24.0, 16.0


@dataclass(frozen=True, slots=True)
class Node:
    """A node: its words, and for each GPU the mark in it, its class and what the pointer is told."""

    name: str
    link: str
    gpus: Sequence[tuple[str, str, str]]


def topology(nodes: Sequence[Node], network: str, label: str) -> Html:
    """Nodes below one another along the network that joins them."""
    shown = list(nodes) if len(nodes) <= _SHOWN else [*nodes[: _SHOWN - 1], nodes[-1]]
    left = 0.05 if network else 0.0
    y = _HEAD if network else 4.0
    shapes: list[Html] = []
    middles = []
    for number, node in enumerate(shown):
        if len(nodes) > _SHOWN and number == _SHOWN - 1:
            more = f"… {len(nodes) - _SHOWN:,} more nodes …"
            shapes.append(words(left + 0.02, y + 6, more, class_="t quiet"))
            y += _ROW
        height = _box(shapes, node, left, y)
        middles.append(y + height / 2)
        y += height + _GAP
    if network:
        spine = 0.015
        shapes.append(segment(spine, _HEAD, spine, middles[-1], "wire"))
        shapes += [segment(spine, middle, left, middle, "wire") for middle in middles]
        shapes.append(words(0, 13, network, class_="t"))
    return drawing(y, label, shapes)


def _box(shapes: list[Html], node: Node, left: float, y: float) -> float:
    """Draws one node; gives its height."""
    most = _GPU_ROWS * _ACROSS
    rest = max(0, len(node.gpus) - most)
    gpus = node.gpus[:most]
    across = min(_ACROSS, max(1, len(gpus)))
    rows = -(-len(gpus) // across)
    height = _HEAD + rows * (_ROW + 6) + 6
    width = 1 - left
    shapes.append(box(left, y, width, height, "node"))
    more = f", {rest} more not drawn" if rest else ""
    shapes.append(words(left + 0.012, y + 16, node.name, class_="t strong"))
    shapes.append(words(0.988, y + 16, node.link + more, class_="t quiet", anchor="end"))
    cell = (width - 0.024) / across
    for number, (mark, class_, title) in enumerate(gpus):
        row, column = divmod(number, across)
        x = left + 0.012 + cell * column
        top = y + _HEAD + row * (_ROW + 6)
        shapes.append(box(x + cell * 0.05, top, cell * 0.9, _ROW, f"{class_} gpu", title))
        shapes.append(words(x + cell / 2, top + 19, mark, class_="t in", anchor="middle"))
    return height
