"""The ways of running on unlike cards, as a table: what each does, what every kind does in it, which wins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from gpucalc.plan.answer import Level, PoolShare, Split
from gpucalc.report.screen import HEADING, QUIET, clean, heading, indent, whole
from gpucalc.units import GIB, seconds

_FITS = {Level.FITS: "yes", Level.MARGINAL: "maybe", Level.DOES_NOT_FIT: "no"}


def table(splits: Sequence[Split]) -> RenderableType:
    """The best way first; below each, what its cards do and what holds it back."""
    rows = [cells(split) for split in splits]
    heads = ("way", "fits", "batch", "step", "tokens/s", "of best")
    best = max(
        (split.tokens_per_s or 0.0 for split in splits if split.level is not Level.DOES_NOT_FIT), default=0
    )
    rows = [
        (*row, f"{100 * split.tokens_per_s / best:.0f} %" if split.tokens_per_s and best else "")
        for row, split in zip(rows, splits, strict=True)
    ]
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        cells = [text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True)]
        return "  ".join([row[0].ljust(widths[0]), row[1].ljust(widths[1]), *cells])

    parts: list[RenderableType] = [
        heading("How to use unlike cards"),
        indent(Text(line(heads), style=HEADING)),
    ]
    for row, split in zip(rows, splits, strict=True):
        parts.append(indent(Text(line(row), style="bold" if split.wins else "")))
        parts += [indent(Text(text, style=QUIET), 4) for text in below(split)]
    return Group(*parts)


def cells(split: Split) -> tuple[str, ...]:
    """A way in a row: its name, whether it fits, batch, step, tokens/s."""
    how = split.how.partition(", ")[0]
    name = how if split.left_out is None else f"{how} {split.left_out}"
    return (
        clean(name),
        _FITS[split.level] if split.parts else "",
        "" if split.global_batch is None else whole(split.global_batch),
        "" if split.step_s is None else seconds(split.step_s),
        "" if split.tokens_per_s is None else whole(round(split.tokens_per_s)),
    )


def below(split: Split) -> Iterator[str]:
    """What each kind of card does in it, and what holds it back."""
    if not split.parts:
        yield clean(f"not possible: {split.why}")
        return
    rest = split.how.partition(", ")[2]
    words = f"{rest}; " * bool(rest) + f"{split.framework}, {split.precision}"
    if split.recompute != "none":
        words += f", recompute {split.recompute}"
    yield clean(f"{words}: " + "; ".join(_share(part) for part in split.parts))
    if split.why:
        yield clean(split.why)


def _share(part: PoolShare) -> str:
    said = f"{part.gpus} x {part.gpu} micro_batch {part.micro_batch} x {part.micro_batches}"
    if part.layers:
        said += f", {_layers(part.layers)} layers"
    return f"{said}, {part.needed_bytes / GIB:.1f} of {part.capacity_bytes / GIB:.1f} GiB"


def _layers(layers: Sequence[int]) -> str:
    """Layers of the stages, equal neighbours together: 2 x 14 + 13."""
    runs: list[tuple[int, int]] = []
    for count in layers:
        if runs and runs[-1][1] == count:
            runs[-1] = (runs[-1][0] + 1, count)
        else:
            runs.append((1, count))
    return " + ".join(f"{times} x {count}" if times > 1 else str(count) for times, count in runs)
