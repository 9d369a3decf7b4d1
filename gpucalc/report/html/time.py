"""The time of a step or pass: what it is spent on, one part after another, and where the blocks stand
against the card's roofline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpucalc import units
from gpucalc.line import Line, value_of
from gpucalc.plan.answer import Plan
from gpucalc.report.html.ledger import Ledger
from gpucalc.report.html.pieces import (
    Row,
    Section,
    facts_rows,
    figure,
    legend,
    parts,
    parts_rows,
    section,
    table,
)
from gpucalc.report.markup import text
from gpucalc.report.screen import quantity, whole
from gpucalc.report.svg.axes import logarithmic
from gpucalc.report.svg.bars import Bar, Piece, strip, waterfall
from gpucalc.report.svg.plot import Curve, Note, Point, plot

_SMALLEST = (0.0005, 0.002, 0.03)
# Kinds of time, by what a line's name says, in the order they are shown.
_KINDS = {
    "compute": ("s0", "computation"),
    "recompute": ("s5", "recomputation"),
    "elementwise": ("s5", "elementwise kernels"),
    "optimizer": ("s2", "optimizer"),
    "communication": ("s4", "exposed communication"),
    "bubble": ("rest", "pipeline bubble"),
    "host": ("s3", "host and offload"),
    "overhead": ("g0", "launches and gaps"),
}
_WORDS = (
    ("communication", ("parallel", "message", "all_reduce", "handoff", "gather", "expert_p", "network")),
    ("bubble", ("bubble",)),
    ("host", ("offload", "host", "copies", "cpu")),
    ("overhead", ("launch", "gaps", "between", "engine")),
    ("recompute", ("recompute",)),
    ("elementwise", ("elementwise",)),
    ("optimizer", ("optimizer",)),
)


def kind_of(name: str) -> str:
    """The kind of time a line of that name is."""
    return next((kind for kind, words in _WORDS if any(word in name for word in words)), "compute")


def time(answer: Plan, ledger: Ledger) -> Section | None:
    """The time section; a plan that cannot run has none."""
    if answer.time is None:
        return None
    step = step_of(answer)
    held = [part for part in step.children if part.unit == "s" and part.value > 0]
    total = float(step.value)
    sums: dict[str, float] = {}
    for part in held:
        sums[kind_of(part.name)] = sums.get(kind_of(part.name), 0.0) + float(part.value)
    shares = [Piece(_KINDS[kind][1], sums[kind], _KINDS[kind][0]) for kind in _KINDS if kind in sums]
    what = "One decoding pass" if answer.serves else "One optimizer step"
    told = ", ".join(f"{piece.name} {units.percent(piece.value / total, 0)}" for piece in shares)
    label = f"{what}, {units.seconds(total)}: {told}"
    bars = [
        Bar(part.name, _amount(float(part.value), total), [Piece(part.name, float(part.value), _class(part))])
        for part in held
    ]
    steps = "; ".join(f"{bar.label} {bar.amount}" for bar in bars)
    caption = f"{what} takes {units.seconds(total)}, bound by {answer.binds}: {told}"
    tree = table(
        f"Parts of {'a pass' if answer.serves else 'a step'}",
        ("part", "time", "share"),
        _rows(answer, ledger, step),
        numbers=2,
    )
    return section(
        "time",
        "Time between two tokens" if answer.serves else "Time of a step",
        figure(strip(shares, units.seconds, label), caption, legend((p.class_, p.name) for p in shares)),
        figure(waterfall(bars, _short, f"Parts one after another: {steps}"), "Its parts, one after another"),
        tree,
    )


def step_of(answer: Plan) -> Line:
    """The line whose parts a step's or pass's time is."""
    assert answer.time is not None
    if answer.serves:
        return next((line for line in answer.time.children if line.children), answer.time)
    return answer.time


def _rows(answer: Plan, ledger: Ledger, step: Line) -> Iterator[Row]:
    if answer.time is not step and answer.time is not None:
        ledger.expect([step, *(part for _, part, _ in parts(step, _SMALLEST))])
        yield (ledger.opened(answer.time), ledger.value(answer.time.value, "s"), "")
    yield from parts_rows(ledger, step, _SMALLEST, float(step.value))


def _class(part: Line) -> str:
    return _KINDS[kind_of(part.name)][0]


def _amount(value: float, total: float) -> str:
    return f"{quantity(value, 's')}, {units.percent(value / total, 0)}"


def _short(value: float) -> str:
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if value * scale >= 1:
            return f"{value * scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


# -- roofline -------------------------------------------------------------------------------------

_MOST_BLOCKS = 9
_MARKS = "ABCDEFGHI"
_NAMED = 4


@dataclass(frozen=True, slots=True)
class Block:
    """Kernels that do the same work: their names, what one call does and moves, the time of all calls."""

    names: tuple[str, ...]
    line: Line
    flops: float
    bytes: float
    peak: float
    total_s: float

    @property
    def name(self) -> str:
        """The first names, and how many more there are."""
        more = f" and {len(self.names) - _NAMED} more" if len(self.names) > _NAMED else ""
        return ", ".join(self.names[:_NAMED]) + more

    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved."""
        return self.flops / self.bytes

    @property
    def rate(self) -> float:
        """FLOP/s reached."""
        return self.flops / float(self.line.value)


def blocks(step: Line) -> list[Block]:
    """The kernels of a step that compute, those that take longest first; alike ones are one block."""
    found: dict[tuple[float, float, float], Block] = {}
    for name, line, times in _kernels(step, "", 1.0):
        flops, moved, peak = (_input(line, key) for key in ("flops", "bytes_moved", "peak_flops_per_s"))
        if not (flops and moved and peak and line.value > 0):
            continue
        known = found.get((flops, moved, peak))
        names, total_s = (known.names, known.total_s) if known else ((), 0.0)
        names = names if name in names else (*names, name)
        total_s += times * float(line.value)
        found[flops, moved, peak] = Block(names, line, flops, moved, peak, total_s)
    return sorted(found.values(), key=lambda block: -block.total_s)


def _kernels(line: Line, phase: str, times: float) -> Iterator[tuple[str, Line, float]]:
    """Lines whose inputs say what a kernel does, with how often each runs; named with their phase."""
    repeated = (line.formula or "").startswith("repeated")
    if not repeated and _input(line, "flops") and _input(line, "bytes_moved"):
        yield (f"{phase} {line.name}" if phase and phase not in line.name else line.name), line, times
        return
    if repeated:
        times *= float(value_of(line.inputs.get("times", 1)))
    for part in line.children:
        if part.unit == "s":
            below = part.name if part.name in ("forward", "backward", "recompute") else phase
            yield from _kernels(part, below, times)


def _input(line: Line, key: str, depth: int = 1) -> float:
    """A number that went into a line, or into a line that did; 0 where there is none."""
    item = line.inputs.get(key)
    if item is not None:
        return float(value_of(item))
    if depth:
        for below in line.inputs.values():
            if isinstance(below, Line) and (found := _input(below, key, depth - 1)):
                return found
    return 0.0


def roofline(answer: Plan, ledger: Ledger, bandwidth: Line | None) -> Section | None:
    """Where the blocks that take longest stand under the card's roofs."""
    if answer.time is None or bandwidth is None:
        return None
    every = blocks(step_of(answer))
    if not every:
        return None
    shown = every[:_MOST_BLOCKS]
    rate = float(bandwidth.value)
    roofs = sorted({block.peak for block in shown})
    ridges = [peak / rate for peak in roofs]
    x = logarithmic([*(block.intensity for block in shown), *ridges], start=0.06, end=0.97, room=2.5)
    y = logarithmic([*(block.rate for block in shown), *roofs], start=0.03, room=1.5)
    curves, notes = [], []
    foot = max(x.low, y.low / rate)
    for number, (peak, ridge) in enumerate(zip(roofs, ridges, strict=True)):
        curves.append(Curve([(ridge, peak), (x.high, peak)], "roof"))
        if number == len(roofs) - 1:
            curves.append(Curve([(foot, foot * rate), (ridge, peak)], "roof"))
        notes.append(Note(x.high, peak, quantity(peak, "FLOP/s"), "end"))
    points = [
        Point(block.intensity, block.rate, f"{block.name}: {_told(block)}", _MARKS[n], _side(block, rate))
        for n, block in enumerate(shown)
    ]
    listed = "; ".join(f"{_MARKS[n]} {block.name} {_told(block)}" for n, block in enumerate(shown))
    picture = plot(
        x,
        y,
        label=f"Roofline with memory at {units.gb_per_s(rate)}. {listed}",
        x_title="FLOPs for each byte moved",
        y_title="FLOP/s of one GPU",
        x_shown=whole,
        y_shown=lambda value: quantity(value, "FLOP/s").replace(".0 ", " "),
        points=points,
        curves=curves,
        notes=notes,
    )
    caption = (
        f"The blocks that take longest. Left of the bend memory, {units.gb_per_s(rate)}, holds a block back;"
        " right of it arithmetic does. How far a point is below the roof is what kernels lose."
    )
    marks = legend([("s0", "bound by arithmetic"), ("s3", "bound by memory")])
    total = float(step_of(answer).value)
    rows = (
        (
            ledger.opened(block.line, text(f"{_MARKS[n]}  {block.name}")),
            whole(block.intensity),
            f"{block.rate / 1e12:,.1f}",
            units.percent(block.rate / _roof(block, rate), 0),
            units.percent(block.total_s / total, 0),
        )
        for n, block in enumerate(shown)
    )
    heads = ("block", "FLOP/byte", "TFLOP/s", "of roof", "of time")
    return section(
        "roofline",
        "Roofline",
        figure(picture, caption, marks),
        table("Blocks by time", heads, rows, numbers=4, name="wide"),
        table(
            "The roofs",
            ("roof", "rate", "what it is"),
            facts_rows(ledger, _roofs(shown, bandwidth)),
            numbers=1,
            name="facts",
        ),
    )


def _roofs(shown: list[Block], bandwidth: Line) -> list[Line]:
    peaks: dict[float, Line] = {}
    for block in shown:
        for line in (block.line, *(item for item in block.line.inputs.values() if isinstance(item, Line))):
            peak = line.inputs.get("peak_flops_per_s")
            if isinstance(peak, Line):
                peaks.setdefault(float(peak.value), peak)
    return [bandwidth, *peaks.values()]


def _roof(block: Block, rate: float) -> float:
    return min(block.peak, block.intensity * rate)


def _side(block: Block, rate: float) -> str:
    return "s0" if block.intensity * rate >= block.peak else "s3"


def _told(block: Block) -> str:
    return f"{whole(block.intensity)} FLOP/byte, {quantity(block.rate, 'FLOP/s')}"
