"""Markup that cannot be broken by what stands in it: every text is escaped where it enters."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from gpucalc.errors import one_line

LONGEST = 4000  # characters of one text: launch lines and sources are shorter, a hostile note is not
_VOID = {"meta", "link", "br", "col", "rect", "line", "circle", "path"}
# Tags whose end a reader of HTML knows without being told; they are most of a long page.
_OPEN_END = {"td", "th", "tr", "li", "dt", "dd"}


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Content = Html | str | int | None | Iterable[Any]


def text(value: object) -> Html:
    """A text from anywhere, on one line, with nothing left in it that a browser or a reader obeys."""
    line = one_line(str(value))
    if len(line) > LONGEST:
        line = line[: LONGEST - 1] + "…"
    return Html(escape(line))


def short(value: object, most: int = 120) -> str:
    """A name, cut where it is longer than a name is."""
    line = one_line(str(value))
    return line if len(line) <= most else line[: most - 1] + "…"


def tag(name: str, /, *content: Content, **attributes: object) -> Html:
    """An element. `class_` is class, underscores are hyphens; None and False leave an attribute out."""
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        spelt = key.rstrip("_").replace("_", "-")
        written = value if isinstance(value, Html) else text(value)
        words.append(spelt if value is True else f'{spelt}="{written}"')
    start = f"<{' '.join(words)}>"
    if name in _VOID:
        return Html(start)
    end = "" if name in _OPEN_END else f"</{name}>"
    return Html(f"{start}{join(*content)}{end}")


def join(*content: Content) -> Html:
    """Pieces one after another; what is not markup yet is escaped."""
    return Html("".join(_flat(content)))


def _flat(content: Iterable[Any]) -> Iterable[str]:
    for piece in content:
        if piece is None:
            continue
        if isinstance(piece, Html):
            yield piece
        elif isinstance(piece, str | int | float):
            yield text(piece)
        else:
            yield from _flat(piece)
