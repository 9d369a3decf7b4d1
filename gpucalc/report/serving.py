"""What the report of a deployment shows where it differs from a training run's."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpucalc import units
from gpucalc.line import Line
from gpucalc.plan.answer import LoadPoint, Plan, Verdict
from gpucalc.plan.serving_layout import ServeRecipe
from gpucalc.report.screen import (
    QUIET,
    bar,
    breakdown,
    clean,
    columns,
    grid,
    heading,
    indent,
    label,
    quantity,
    whole,
)

_BAR = 22
_SMALLEST_SHARE = (0.0005, 0.004, 0.02)
PHASE = "serve"


def recipe_words(recipe: ServeRecipe) -> str:
    """The engine and what it is told, in one line."""
    if recipe.of_images:
        return f"forward alone, {clean(recipe.dtype)}, batch {recipe.concurrency} on every GPU"
    words = [
        f"{recipe.engine} {recipe.version}",
        f"weights {recipe.weights.name}",
        f"cache {recipe.kv_dtype}",
        f"max_model_len {recipe.max_model_len}",
        f"max_num_seqs {recipe.max_num_seqs}",
    ]
    return ", ".join(clean(word) for word in words)


def verdict_words(decided: Verdict) -> tuple[str, str]:
    """What is held against what, and what decided, in words."""
    needed, capacity = units.gib(decided.needed.value), units.gib(decided.capacity.value)
    margin = decided.margin_bytes
    spare = f"{units.gib(abs(margin))} {'to spare' if margin >= 0 else 'too much'}"
    if decided.needed.name == "needed_to_start":
        return (
            f"needs {needed} per GPU to start and hold one longest request, may use {capacity}: {spare}",
            f"stage {decided.stage} decides; largest part there: {clean(decided.binds)}",
        )
    if decided.needed.name == "asked_for":
        return (
            f"asks for {needed} per GPU, where {capacity} are free: {spare}",
            f"what may not fit: {clean(decided.binds)}",
        )
    return (
        f"takes {needed} per GPU with everything allocated, has {capacity}: {spare}",
        f"stage {decided.stage} decides; what may not fit: {clean(decided.binds)}",
    )


def memory(answer: Plan) -> RenderableType:
    """One GPU with everything allocated, the cache as large as the engine makes it."""
    tree = answer.memory
    card = _card(answer)
    scale = max(card, float(tree.value), 1.0)
    table = grid("left", "right", "right", "left")

    def row(text: Text, value: float) -> None:
        table.add_row(
            text,
            Text(units.gib(value)),
            Text(units.percent(value / card, 0) if card else ""),
            bar(value / scale, _BAR, limit=card / scale),
        )

    row(Text("everything allocated", style=QUIET), float(tree.value))
    for level, part, amount in breakdown(tree, 3):
        if amount and abs(amount) >= _SMALLEST_SHARE[level] * tree.value:
            row(Text("  " * (level + 1) + label(part)), amount)
    title = "Memory per GPU"
    if answer.layout.pp > 1:
        title += f", stage {answer.verdict.stage} of {answer.layout.pp}, which decides"
    return Group(heading(title), indent(table))


def _card(answer: Plan) -> float:
    """What the whole card holds."""
    capacity = answer.verdict.capacity
    total = capacity.inputs.get("total_bytes")
    whole = total if isinstance(total, Line) else capacity
    # What is free is a sum whose first part is the card.
    return float(whole.children[0].value if whole.children else whole.value)


def cache(answer: Plan) -> RenderableType:
    """What the cache costs and holds."""
    assert answer.cache is not None
    table: Table = grid("left", "right", "left")
    for line in answer.cache.children:
        note = clean(line.note) if line.note else ""
        table.add_row(Text(label(line)), Text(_amount(line)), Text(note, style=QUIET))
    return Group(heading("Cache on one GPU"), indent(table))


def _amount(line: Line) -> str:
    if line.unit == "tokens":
        return f"{line.value:,.0f} tokens"
    return quantity(line.value, line.unit)


def decode_pass(answer: Plan) -> RenderableType:
    """Where the time between two tokens goes: the parts of a pass that only decodes."""
    assert answer.time is not None
    step = next((line for line in answer.time.children if line.children), answer.time)
    while len(step.children) == 1 and step.children[0].children:  # the pass that verifies drafts
        step = step.children[0]
    if answer.recipe.of_images:
        step = answer.time
    table = grid("left", "right", "right", "left")
    for level, part, amount in ((-1, step, float(step.value)), *breakdown(step, 2)):
        share = amount / step.value if step.value else 0.0
        if level < 0:
            table.add_row(Text(label(part)), Text(units.seconds(amount)), Text(""), Text(""))
        elif amount and share >= _SMALLEST_SHARE[level + 1]:
            table.add_row(
                Text("  " * (level + 1) + label(part)),
                Text(units.seconds(amount)),
                Text(units.percent(share, 0)),
                bar(share, _BAR),
            )
    words = f"One decoding pass at {answer.recipe.concurrency} requests in flight, bound by {answer.binds}"
    if answer.recipe.of_images:
        words = f"One forward pass of {answer.recipe.concurrency} a GPU, bound by {answer.binds}"
    return Group(heading(words), indent(table))


def loads(answer: Plan) -> RenderableType:
    """Speed of a user against throughput of a GPU, one row for each number of requests in flight.

    Those of other layouts that an auto one was chosen from are shown where nothing here beats them.
    """
    targets = any(point.meets_targets is not None for point in answer.loads)
    heads = ("in flight", "per user", "per GPU", "ttft", "tpot", "bound by", "targets" if targets else "")
    table = columns(*heads, right=range(5), whole=range(6))
    for point in answer.loads:
        table.add_row(
            f"{point.concurrency:,}",
            whole(point.tokens_per_s_per_user),
            whole(point.tokens_per_s_per_gpu),
            units.seconds(point.ttft_s),
            units.seconds(point.tpot_s),
            clean(point.binds.removesuffix(" bandwidth")),
            _load_words(point),
        )
    return Group(heading("Speed against throughput, output tokens/s"), indent(table))


def _load_words(point: LoadPoint) -> str:
    """What there is to say of one load: whose it is, whether it meets the targets, what waits."""
    words = ["this job"] if point.is_job else []
    if point.layout:
        words.append(point.layout)
    if point.meets_targets is not None:
        met = "most that meet" if point.is_most else "meets"
        words.append(met if point.meets_targets else "misses")
    if point.queue_s > 0:
        words.append(f"waits {units.seconds(point.queue_s)}")
    return ", ".join(words)


def launch(answer: Plan) -> RenderableType:
    """The engine's own command, on a line of its own so that it can be copied."""
    copies = answer.layout.replicas
    title = "Start it with" if copies == 1 else f"Start each of the {copies} copies with"
    return Group(heading(title), indent(Text(clean(answer.launch))))
