"""What every drawing is made of. Places along the width are shares of it, heights are pixels.

A drawing so made fills whatever width it is given while its letters stay as large as the text around
it: one drawing serves a telephone and a wide screen, without a script.
"""

from __future__ import annotations

from gpucalc.report.markup import Content, Html, join, tag, text


def percent(share: float) -> Html:
    """A share of the width, as an attribute."""
    return Html(f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%")


def pixels(value: float) -> Html:
    """A length in pixels."""
    return Html(f"{value:.1f}".rstrip("0").rstrip("."))


def drawing(height: float, label: str, *shapes: Content, class_: str = "chart") -> Html:
    """A picture that is read out as `label`; the table beside it holds its numbers."""
    return tag(
        "svg",
        *shapes,
        class_=class_,
        role="img",
        width=Html("100%"),
        height=pixels(height),
        aria_label=label,
        xmlns=Html("http://www.w3.org/2000/svg"),
    )


def box(x: float, y: float, width: float, height: float, class_: str, title: str = "") -> Html:
    """A rectangle; `title` is shown where the pointer rests on it."""
    return Html(
        f'<rect x="{percent(x)}" y="{pixels(y)}" width="{percent(max(width, 0.0))}"'
        f' height="{pixels(height)}" class="{class_}">{_title(title)}</rect>'
    )


def segment(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
    """A straight line."""
    return Html(
        f'<line x1="{percent(x1)}" y1="{pixels(y1)}" x2="{percent(x2)}" y2="{pixels(y2)}" class="{class_}"/>'
    )


def dot(x: float, y: float, radius: float, class_: str, title: str = "") -> Html:
    """A filled circle."""
    return Html(
        f'<circle cx="{percent(x)}" cy="{pixels(y)}" r="{pixels(radius)}" class="{class_}">'
        f"{_title(title)}</circle>"
    )


def words(x: float, y: float, *content: Content, class_: str = "t", anchor: str = "", dx: float = 0) -> Html:
    """Text whose baseline starts, or with `anchor` ends or is centred, at that place."""
    more = f' text-anchor="{anchor}"' if anchor else ""
    moved = f' dx="{pixels(dx)}"' if dx else ""
    return Html(
        f'<text x="{percent(x)}" y="{pixels(y)}" class="{class_}"{more}{moved}>{join(*content)}</text>'
    )


def _title(title: str) -> Html:
    return Html(f"<title>{text(title)}</title>") if title else Html("")
