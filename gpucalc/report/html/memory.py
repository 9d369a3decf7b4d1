"""The memory of a GPU: a stack per stage and phase against the card's limit, and its parts as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from gpucalc import units
from gpucalc.line import Line, value_of
from gpucalc.plan.answer import Plan
from gpucalc.plan.memory import meters
from gpucalc.report.html.ledger import Ledger
from gpucalc.report.html.pieces import Row, Section, figure, ledger_name, legend, parts_rows, section, table
from gpucalc.report.markup import Html, tag
from gpucalc.report.svg.bars import Bar, Piece, stacks

_SMALLEST = (0.0005, 0.002, 0.03)
_SMALL = 0.012  # of the longest bar: smaller parts are drawn together
_HUES = ("s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7")
_GREYS = ("g0", "g1", "g2")
REST = "rest"

# Parts that many plans have keep their colour; the others take what is left.
_COLOURS = {
    "weights": "s0",
    "gradients": "s1",
    "optimizer_states": "s2",
    "kv_cache": "s2",
    "activations": "s3",
    "activation_peak": "s3",
    "logits": "s4",
    "graphs": "s4",
    "gathered_weights": "s5",
    "head_and_loss": "s6",
    "backward_working_set": "s7",
    "allocator_overhead": "g0",
    "cuda_context": "g1",
    "non_torch": "g1",
    "nccl_buffers": "g2",
    "nccl_exchange_buffers": "g2",
    "pre_existing": "g2",
}


def memory(answer: Plan, ledger: Ledger) -> Section:
    """The memory section."""
    if answer.serves:
        return _serving(answer, ledger)
    stages = stages_of(answer.memory)
    worst = _worst(stages, answer.verdict.stage)
    peak = next((phase for phase in _phases(worst) if phase.name == answer.verdict.phase), worst)
    title = f"{worst.name} at its peak, {peak.name}" if peak is not worst else worst.name
    rows = parts_rows(ledger, peak, _SMALLEST, float(answer.verdict.capacity.value), f"peak: {peak.name}")
    return section(
        "memory",
        "Memory per GPU",
        pictures(answer),
        table(f"Parts of {title}", ("part", "memory", "of limit"), rows, numbers=2),
        table(
            "Every phase and stage",
            ("peak of", "memory", "of limit"),
            _others(answer, ledger, stages),
            numbers=2,
        ),
        _meters(answer),
    )


def pictures(answer: Plan) -> list[Html]:
    """The stacks alone: a training run's stages and the worst one's phases, a deployment's GPU."""
    if answer.serves:
        return [_whole_card(answer)]
    stages = stages_of(answer.memory)
    worst = _worst(stages, answer.verdict.stage)
    drawn: list[Html] = []
    if len(stages) > 1:
        bars = [
            Bar(name, units.gib(stage.value), pieces_of(_peak_of(stage)), strong=stage is worst)
            for name, stage in grouped(stages)
        ]
        drawn.append(_stacks(answer, bars, f"Peak of each pipeline stage against the {_limit(answer)}"))
    phases = [
        Bar(phase.name, units.gib(phase.value), pieces_of(phase), strong=phase.name == answer.verdict.phase)
        for phase in _phases(worst)
    ] or [Bar(worst.name, units.gib(worst.value), pieces_of(worst))]
    words = f"Memory of {worst.name} in each phase of a step against the {_limit(answer)}"
    return [*drawn, _stacks(answer, phases, words)]


def _phases(stage: Line) -> list[Line]:
    return [line for line in stage.children if line.unit == "bytes"]


def stages_of(tree: Line) -> list[Line]:
    """The pipeline stages of a training run's memory."""
    return [line for line in tree.children if line.unit == "bytes"] or [tree]


def grouped(stages: Sequence[Line]) -> list[tuple[str, Line]]:
    """Stages that follow one another and need the same, under one name."""
    runs: list[list[Line]] = []
    for stage in stages:
        if runs and _alike(runs[-1][0], stage):
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return [(_run_name(run), run[0]) for run in runs]


def _alike(one: Line, other: Line) -> bool:
    return one.value == other.value and [c.value for c in one.children] == [c.value for c in other.children]


def _run_name(run: Sequence[Line]) -> str:
    first = run[0].name.replace("_", " ")
    return first if len(run) == 1 else f"{first} to {run[-1].name.rsplit('_', 1)[-1]}"


def pieces_of(peak: Line) -> list[Piece]:
    """The parts a stack is made of; what the allocator hands out is told apart."""
    parts: list[Line] = []
    for part in peak.children:
        if part.unit == "bytes":
            parts += part.children if part.name == "allocated" and part.children else [part]
    if not parts:
        return [Piece(peak.name, float(peak.value), "s0")]
    return [Piece(part.name, float(part.value), "") for part in parts]


def coloured(bars: Sequence[Bar]) -> tuple[list[Bar], list[tuple[str, str]]]:
    """Bars whose parts have a colour each, the small ones drawn together, and the legend."""
    longest = max((bar.total for bar in bars), default=0.0)
    largest: dict[str, float] = {}
    for bar in bars:
        for piece in bar.pieces:
            largest[piece.name] = max(largest.get(piece.name, 0.0), piece.value)
    ranked = [name for name in largest if largest[name] >= _SMALL * longest]
    kept = sorted(ranked, key=lambda name: -largest[name])[: len(_HUES) + len(_GREYS)]
    classes: dict[str, str] = {}
    free = [*_HUES, *_GREYS]
    for name in (*(name for name in kept if name in _COLOURS), *kept):
        wanted = _COLOURS.get(name, "")
        if name not in classes:
            classes[name] = wanted if wanted in free else free[0]
            free.remove(classes[name])
    order = sorted((name for name in largest if name in classes), key=lambda name: classes[name] in _GREYS)
    drawn = [_drawn(bar, order, classes) for bar in bars]
    entries = [(classes[name], name) for name in order]
    if any(piece.class_ == REST for bar in drawn for piece in bar.pieces):
        entries.append((REST, "the rest"))
    return drawn, entries


def _drawn(bar: Bar, order: Sequence[str], classes: dict[str, str]) -> Bar:
    held = {piece.name: piece for piece in bar.pieces}
    pieces = [Piece(name, held[name].value, classes[name]) for name in order if name in held]
    rest = sum(piece.value for piece in bar.pieces if piece.name not in classes)
    if rest > 0:
        pieces.append(Piece("the rest", rest, REST))
    return Bar(bar.label, bar.amount, pieces, bar.strong)


def _stacks(answer: Plan, bars: Sequence[Bar], caption: str) -> Html:
    drawn, entries = coloured(bars)
    limit = float(answer.verdict.capacity.value)
    told = "; ".join(f"{bar.label} {bar.amount}" for bar in bars[:12])
    label = f"{caption}, {units.gib(limit)}. {told}"
    picture = stacks(drawn, limit, f"{_limit(answer)} {units.gib(limit)}", _gib, label, units.GIB)
    return figure(picture, caption, legend(entries))


def _limit(answer: Plan) -> str:
    return "engine's limit" if answer.verdict.needed.name == "needed_to_start" else "card's limit"


def _gib(value: float) -> str:
    return units.gib(value, 0 if value >= 10 * units.GIB else 1)


def _peak_of(stage: Line) -> Line:
    """The phase a stage needs most in."""
    return max(_phases(stage), key=lambda line: float(line.value), default=stage)


def _others(answer: Plan, ledger: Ledger, stages: Sequence[Line]) -> Iterator[Row]:
    capacity = float(answer.verdict.capacity.value)
    worst = _worst(stages, answer.verdict.stage)
    for phase in _phases(worst):
        yield _row(ledger, phase, f"{worst.name}, {phase.name}", capacity)
    if len(stages) > 1:
        for name, stage in grouped(stages):
            yield _row(ledger, stage, name, capacity)
        yield _row(ledger, answer.memory, "worst GPU", capacity)
    yield _row(ledger, answer.verdict.needed, "needed", capacity)
    yield _row(ledger, answer.verdict.capacity, "limit", capacity)
    host = answer.verdict.host
    if host is not None:
        whole = float(host.capacity.value) if host.capacity is not None else 0.0
        yield _row(ledger, host.needed, f"host, {host.phase}", whole)
        if host.capacity is not None:
            yield _row(ledger, host.capacity, "host has", whole)


def _row(ledger: Ledger, line: Line, name: str, whole: float) -> Row:
    share = units.percent(float(line.value) / whole, 0) if whole else ""
    return (ledger_name(ledger, line, 0, name), ledger.value(line.value, line.unit), share)


def _worst(stages: Sequence[Line], stage: int) -> Line:
    named = [line for line in stages if line.name.endswith(f"_{stage}")]
    return named[0] if named else stages[min(stage, len(stages) - 1)]


def _meters(answer: Plan) -> Html | None:
    """What the usual meters would show at the peak."""
    read = meters(answer.memory)
    if read is None:
        return None
    told = {name: units.gib(value) for name, value in read.items()}
    words = f"torch allocates {told['allocated']} and reserves {told['reserved']};"
    return tag("p", f"{words} nvidia-smi shows {told['device']}.")


def _serving(answer: Plan, ledger: Ledger) -> Section:
    card = _card(answer)
    decided = answer.verdict
    named = ((decided.needed, f"decides: {decided.needed.name}"), (decided.capacity, "limit"))
    rows = chain(
        parts_rows(ledger, answer.memory, (0.0005, 0.004, 0.02), card, "everything allocated"),
        (_row(ledger, line, name, card) for line, name in named),
    )
    heads = ("part", "memory", "of card")
    parts = table("Parts of one GPU's memory", heads, rows, numbers=2)
    return section("memory", "Memory per GPU", pictures(answer), parts)


def _whole_card(answer: Plan) -> Html:
    card = _card(answer)
    bar = Bar("everything allocated", units.gib(answer.memory.value), pieces_of(answer.memory), strong=True)
    drawn, entries = coloured([bar])
    caption = f"One GPU with everything allocated against the whole card, {units.gib(card)}"
    if answer.layout.pp > 1:
        caption += f"; stage {answer.verdict.stage} of {answer.layout.pp}, which decides"
    label = f"{caption}: {bar.amount}"
    picture = stacks(drawn, card, f"whole card {units.gib(card)}", _gib, label, units.GIB)
    return figure(picture, caption, legend(entries))


def _card(answer: Plan) -> float:
    """What the whole card holds, of which an engine may use a share."""
    total = answer.verdict.capacity.inputs.get("total_bytes")
    return float(value_of(total) if total is not None else answer.verdict.capacity.value)
