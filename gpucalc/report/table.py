"""A plan and an explanation as text for people: the verdict first, then what it rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from gpucalc import units
from gpucalc.documents import Estimate
from gpucalc.explain import Explanation, assumed_facts, number
from gpucalc.line import Line
from gpucalc.plan.answer import Action, Level, Plan, Verdict
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.memory import meters
from gpucalc.report import documents, mixed, serving
from gpucalc.report.screen import (
    HEADING,
    QUIET,
    bar,
    breakdown,
    clean,
    grid,
    heading,
    indent,
    label,
    quantity,
    set_word,
    whole,
)

_VERDICT = {
    Level.FITS: ("FITS", Style(bold=True, color="green")),
    Level.MARGINAL: ("MARGINAL", Style(bold=True, color="yellow")),
    Level.DOES_NOT_FIT: ("DOES NOT FIT", Style(bold=True, color="red")),
}
_BAR = 22
_FACT_GROUPS = ("costs.", "reliability.", "network.")  # of keys that set a figure, not a choice
# Parts below this share of the whole, by level, are left to --json and explain.
_SMALLEST_SHARE = (0.0005, 0.002, 0.03)


def plan(answer: Plan, rules: Sequence[Estimate] = ()) -> RenderableType:
    """The whole report of a plan; `rules` are the planning documents' estimates, shown when there are any."""
    parts: list[RenderableType] = [_title(answer), Text(), verdict(answer.verdict), Text()]
    parts.append(serving.memory(answer) if answer.serves else _memory(answer))
    parts.append(indent(documents.one_line(answer)))
    if answer.cache is not None:
        parts += [Text(), serving.cache(answer)]
    if answer.launch is not None:
        parts += [Text(), serving.launch(answer)]
    if answer.time is not None:
        shown = serving.decode_pass(answer) if answer.serves else _time(answer.time, answer.binds)
        parts += [Text(), shown]
    if answer.throughput is not None:
        parts += [Text(), heading("Throughput"), indent(_rates(answer, answer.throughput))]
        if answer.speed_error is not None:
            error, basis = answer.speed_error
            parts.append(
                indent(Text(f"expected error of time and rates: ±{units.percent(error)} ({clean(basis)})"))
            )
    if len(answer.loads) > 1:
        parts += [Text(), serving.loads(answer)]
    if answer.reliability is not None:
        parts += [Text(), heading("Reliability"), indent(_facts(answer.reliability))]
    if answer.cost is not None:
        title = f"Cost {answer.cost.note}" if answer.cost.note else "Cost"
        parts += [Text(), heading(title), indent(_facts(answer.cost))]
    if answer.splits:
        parts += [Text(), mixed.table(answer.splits)]
    if answer.actions:
        parts += [Text(), heading("What would help"), indent(_actions(answer.actions))]
    facts = assumed_figures(answer)
    if answer.assumptions:
        parts += [Text(), heading("Assumed; --set KEY=VALUE changes it"), indent(_assumptions(answer))]
    if facts:
        parts += [
            Text(),
            heading("Figures nobody measured or stated here, marked *"),
            indent(_assumed(facts)),
        ]
    if rules:
        parts += [Text(), documents.table(rules)]
    if answer.notes:
        parts += [Text(), heading("Notes"), *(indent(Text("- " + clean(note))) for note in answer.notes)]
    return Group(*parts)


def verdict(decided: Verdict) -> RenderableType:
    """The decision, its margin, the error it was weighed against and where the peak is."""
    word, style = _VERDICT[decided.level]
    held, *rest = verdict_words(decided)
    return Group(Text.assemble((word, style), f"  {held}"), *(indent(Text(words)) for words in rest))


def verdict_words(decided: Verdict) -> tuple[str, ...]:
    """What is held against what, and, a sentence each, what decided."""
    if decided.host_decides:
        return _host_words(decided)
    needed, capacity = decided.needed.value, decided.capacity.value
    margin = decided.margin_bytes
    spare = f"{units.gib(abs(margin))} {'to spare' if margin >= 0 else 'too much'}"
    held = f"needs {units.gib(needed)} per GPU, has {units.gib(capacity)}: {spare}"
    where = f"peak: {decided.phase}, stage {decided.stage}; largest part there: {clean(decided.binds)}"
    if decided.phase == serving.PHASE:
        held, where = serving.verdict_words(decided)
    error = decided.expected_error
    against = {
        Level.FITS: "the margin is larger than",
        Level.MARGINAL: "the margin is within",
        Level.DOES_NOT_FIT: "the excess is larger than",
    }[decided.level]
    why = f"{against} the expected error, ±{units.percent(error)} = ±{units.gib(error * needed)}"
    return held, f"{why} ({clean(decided.error_basis)})", where


def _host_words(decided: Verdict) -> tuple[str, ...]:
    """The decision where the host's memory takes it."""
    host = decided.host
    assert host is not None
    assert host.capacity is not None
    needed, capacity = host.needed.value, host.capacity.value
    held = (
        f"the host needs {units.gib(needed)} per node, has {units.gib(capacity)}; a process that asks for"
        " more is killed (signal 9)"
    )
    gpu = (
        f"each GPU needs {units.gib(decided.needed.value)}, has {units.gib(decided.capacity.value)};"
        f" the host's peak: {host.phase}"
    )
    return held, gpu


def calibrated(words: Sequence[str]) -> RenderableType:
    """What a calibration changed: where it is from, then a line for every constant."""
    first, *others = (Text(clean(line)) for line in words)
    return Group(Text(), first, *map(indent, others))


def explanation(item: Explanation) -> RenderableType:
    """A number as formula, values and result, then the same for what went in."""
    return Group(*_explained(item, 0, set()))


def _title(answer: Plan) -> RenderableType:
    first = Text.assemble(
        (clean(answer.name), HEADING), f" ({size_words(answer.model)}) on ", (clean(answer.fleet), HEADING)
    )
    return Group(first, *(Text(words) for words in run_words(answer)))


def run_words(answer: Plan) -> tuple[str, str]:
    """The recipe and the layout, a line each."""
    if answer.serves:
        return serving.recipe_words(answer.recipe), answer.layout.words
    return _recipe(answer.recipe), _layout(answer.layout)


def size_words(model: Line) -> str:
    """The parameters, and how many of them a token uses."""
    active = next((line for line in model.children if line.name == "active"), model)
    told = f"{units.count(model.value)} parameters"
    return told if active.value == model.value else f"{told}, {units.count(active.value)} active"


def _recipe(recipe: Recipe) -> str:
    words = [recipe.framework, recipe.precision, recipe.optimizer]
    if _of_images(recipe):
        words += [f"recompute {recipe.recompute}"]
    else:
        words += [
            f"attention {recipe.attention}",
            f"recompute {recipe.recompute}",
            f"seq_len {recipe.seq_len}",
        ]
    if recipe.cuda_graphs:
        words += [f"cuda_graphs {' '.join(recipe.cuda_graphs)}"]
    if recipe.method != "full":
        words.insert(1, recipe.method)
    return ", ".join(clean(word) for word in words)


def _of_images(recipe: Recipe) -> bool:
    """Whether a sample is one image to the network, which has neither tokens nor attention."""
    return bool(recipe.seq_len == 1)


def _layout(layout: Layout) -> str:
    degrees = [f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")]
    shown = [text for text in degrees if not text.endswith(" 1")] or ["one GPU"]
    if layout.zero_stage:
        shown.append(f"zero_stage {layout.zero_stage}")
    batch = f"micro_batch {layout.micro_batch} x {layout.micro_batches} = global_batch {layout.global_batch}"
    return ", ".join([*shown, batch])


def _memory(answer: Plan) -> RenderableType:
    decided = answer.verdict
    stages = [line for line in answer.memory.children if line.unit == "bytes"]
    worst = _worst(stages, decided.stage)
    capacity = decided.capacity.value
    scale = max(capacity, decided.needed.value, 1)
    title = (
        "Memory per GPU"
        if len(stages) < 2
        else f"Memory per GPU, {clean(worst.name)} of {len(stages)}, the worst"
    )
    table = grid("left", "right", "right", "left")
    peak = next((line for line in worst.children if line.name == decided.phase), worst)
    table.add_row(
        Text(f"peak: {decided.phase}", style=QUIET), *_amount(decided.needed.value, scale, capacity)
    )
    for level, part, amount in _parts(peak):
        table.add_row(Text("  " * (level + 1) + label(part)), *_amount(amount, scale, capacity))
    others = [line for line in worst.children if line is not peak] if peak is not worst else []
    for phase in others:
        table.add_row(Text(label(phase), style=QUIET), *_amount(phase.value, scale, capacity))
    rest = [line for line in stages if line is not worst]
    parts: list[RenderableType] = [heading(title), indent(table)]
    if rest:
        parts.append(indent(Text(_stages(rest), style=QUIET)))
    read = meters(answer.memory)
    if read is not None:
        told = {name: units.gib(value) for name, value in read.items()}
        words = f"torch allocates {told['allocated']} and reserves {told['reserved']};"
        parts.append(indent(Text(f"{words} nvidia-smi shows {told['device']}", style=QUIET)))
    return Group(*parts)


def _worst(stages: list[Line], stage: int) -> Line:
    named = [line for line in stages if line.name.endswith(str(stage))]
    return named[0] if named else stages[min(stage, len(stages) - 1)]


def _stages(stages: list[Line]) -> str:
    if len(stages) <= 4:
        return "other stages: " + ", ".join(f"{clean(s.name)} {units.gib(s.value)}" for s in stages)
    values = [stage.value for stage in stages]
    return f"{len(stages)} other stages: {units.gib(min(values))} to {units.gib(max(values))}"


def _amount(value: float, scale: float, capacity: float) -> tuple[Text, Text, Text]:
    share = units.percent(value / capacity, 0) if capacity else ""
    return Text(units.gib(value)), Text(share), bar(value / scale, _BAR, limit=capacity / scale)


def _parts(line: Line) -> Iterator[tuple[int, Line, float]]:
    """The parts of a sum worth a row: all at the first level, large ones below it."""
    for level, part, amount in breakdown(line, 3):
        if abs(amount) >= _SMALLEST_SHARE[level] * line.value and amount:
            yield level, part, amount


def _time(step: Line, binds: str) -> RenderableType:
    table = grid("left", "right", "right", "left")
    table.add_row(Text(label(step)), Text(units.seconds(step.value)), Text(""), Text(""))
    for level, part, amount in _parts(step):
        share = amount / step.value if step.value else 0.0
        table.add_row(
            Text("  " * (level + 1) + label(part)),
            Text(units.seconds(amount)),
            Text(units.percent(share, 0)),
            bar(share, _BAR),
        )
    return Group(heading(f"Time, bound by {binds}"), indent(table))


def _rates(answer: Plan, throughput: Line) -> Table:
    lines = (throughput, *throughput.children)
    if not answer.serves and _of_images(answer.recipe):
        lines = tuple(line for line in lines if not line.name.startswith("tokens_"))
    return _facts(throughput, lines)


def _facts(parent: Line, lines: tuple[Line, ...] | None = None) -> Table:
    """The children of a line that are no parts of a sum, one a row, with what they mean."""
    table = grid("left", "right", "left")
    for line in parent.children if lines is None else lines:
        note = clean(line.note) if line.note and line is not parent else ""
        table.add_row(Text(label(line)), Text(quantity(line.value, line.unit)), Text(note, style=QUIET))
    return table


def _assumptions(answer: Plan) -> Table:
    table = grid("left", "left")
    for item in answer.assumptions:
        value = "" if item.value == "" else f" = {set_word(item.value)}"
        table.add_row(Text(clean(item.key) + value), Text(clean(item.why), style=QUIET))
    return table


def assumed_figures(answer: Plan) -> tuple[Line, ...]:
    """The facts nobody stated that no key of costs, failures or network stands for: those are listed with
    their keys."""
    facts = assumed_facts(answer.root)
    keys = [item.key.rpartition(".")[2] for item in answer.assumptions if item.key.startswith(_FACT_GROUPS)]
    return tuple(fact for fact in facts if not any(key.startswith(fact.name) for key in keys))


def _assumed(facts: tuple[Line, ...]) -> Table:
    table = grid("left", "left")
    for line in facts:
        known = line.note or line.source or ""
        table.add_row(
            Text(f"{clean(line.name)} = {quantity(line.value, line.unit)}"), Text(clean(known), style=QUIET)
        )
    return table


def _actions(actions: tuple[Action, ...]) -> RenderableType:
    """One line of numbers per action, and below it the keys to set."""
    rows = [
        (
            clean(action.title),
            _VERDICT[action.level][0],
            units.gib(action.needed_bytes),
            units.seconds(action.step_s) if action.step_s is not None else "",
            whole(action.tokens_per_s) if action.tokens_per_s is not None else "",
        )
        for action in actions
    ]
    heads = ("change", "verdict", "needs", "step", "tokens/s")
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]

    def line(row: tuple[str, ...]) -> str:
        cells = [text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True)]
        return "  ".join([row[0].ljust(widths[0]), row[1].ljust(widths[1]), *cells])

    parts: list[RenderableType] = [Text(line(heads), style=HEADING)]
    for row, action in zip(rows, actions, strict=True):
        parts.append(Text(line(row)))
        settings = " ".join(f"{clean(key)}={set_word(value)}" for key, value in action.changes.items())
        parts.append(indent(Text(settings, style=QUIET)))
    return Group(*parts)


def _explained(item: Explanation, depth: int, shown: set[int]) -> Iterator[RenderableType]:
    line = item.line
    again = id(line) in shown
    shown.add(id(line))
    yield indent(_value(item, bold=depth == 0), 2 * depth)
    if item.formula and item.expression is None:
        return
    if again:
        if item.inputs:
            yield indent(Text("as above", style=QUIET), 2 * depth + 2)
        return
    if item.formula:
        yield indent(Text(f"{item.formula}: {item.summary}", style=QUIET), 2 * depth + 2)
        yield indent(Text(f"= {item.expression}"), 2 * depth + 2)
        yield indent(Text(f"= {item.substituted}"), 2 * depth + 2)
    for name, text in (("source", item.source), ("note", line.note)):
        if text:
            yield indent(Text(f"{name}: {clean(text)}", style=QUIET), 2 * depth + 2)
    for given in item.inputs:
        if given.explanation is None:
            yield indent(Text(f"{clean(given.name)} = {number(given.value)}"), 2 * depth + 2)
            continue
        if given.name != given.explanation.line.name:
            yield indent(Text(f"{clean(given.name)}:", style=QUIET), 2 * depth + 2)
        yield from _explained(given.explanation, depth + 1, shown)
    for part in item.parts:
        yield from _explained(part, depth + 1, shown)


def _value(item: Explanation, *, bold: bool) -> Text:
    line = item.line
    shown = quantity(line.value, line.unit)
    in_full = f"{number(line.value)} {clean(line.unit)}"
    same = in_full.replace("_", ",") == shown or line.unit not in ("bytes", "s", "FLOP")
    exact = "" if same or not line.value else f" = {in_full}"
    name = clean(item.path or line.name)
    return Text.assemble((name, HEADING if bold else ""), f" = {shown}{exact}  ", (line.kind.value, QUIET))
