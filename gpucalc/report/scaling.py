"""A job over sizes as a table: rate, efficiency, cost and what binds at each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from gpucalc.plan.answer import Plan
from gpucalc.report.screen import QUIET, clean, columns, heading, indent, whole
from gpucalc.scale import Scaling, Size, rental_price
from gpucalc.units import percent, seconds


def report(found: Scaling) -> RenderableType:
    """Weak scaling, and strong scaling where the job states a global batch."""
    parts: list[RenderableType] = [
        heading(f"{found.name}: every GPU keeps its batch (weak scaling)"),
        *_sizes(found.weak),
    ]
    if found.strong is not None:
        parts += [Text(), heading("The global batch stays (strong scaling)"), *_sizes(found.strong)]
    parts += [Text(), Text("efficiency: rate per GPU against the smallest size that runs", QUIET)]
    if any(size.goodput is not None for size in (*found.weak, *(found.strong or ()))):
        words = "goodput: share of wall time that failures and checkpoints leave, by its reliability: keys"
        parts.append(Text(words, QUIET))
    return Group(*parts)


def _sizes(sizes: Sequence[Size]) -> Iterator[RenderableType]:
    """The sizes that run as a table, and why the others do not."""
    ran = [size.plan for size in sizes if size.runs and size.plan is not None]
    unit = "samples" if any(_rate(plan, "tokens_per_s") == _rate(plan) for plan in ran) else "tokens"
    failing = any(size.goodput is not None for size in sizes)
    names = ["GPUs", "batch", "step", f"{unit}/s", "per GPU", "efficiency", f"$/M {unit}", "bound by"]
    if failing:  # one column more: the others' names are cut to keep eighty columns
        names[5:] = ["eff.", "goodput", "$/M", "bound by"]
    table = columns(*names, right=range(len(names) - 1), whole=range(len(names)), gap=1 if failing else 2)
    reasons: dict[str, list[str]] = {}
    for size in sizes:
        plan = size.plan
        if plan is None:
            reasons.setdefault("; ".join(size.why_not), []).append(whole(size.gpus))
        elif size.efficiency is None or plan.time is None:
            largest = f"does not fit; {clean(plan.verdict.binds)} largest"
            reasons.setdefault(largest, []).append(whole(size.gpus))
        else:
            price = rental_price(plan)
            lost = [percent(size.goodput, 1) if size.goodput is not None else ""] if failing else []
            table.add_row(
                whole(size.gpus),
                whole(plan.layout.global_batch),
                seconds(plan.time.value),
                whole(_rate(plan, "tokens_per_s")),
                whole(_rate(plan, "tokens_per_s_per_gpu")),
                percent(size.efficiency.value, 1),
                *lost,
                "" if price is None else f"{price.value:.3g}",
                clean(plan.binds),
            )
    if ran:
        yield indent(table)
    for reason, counts in reasons.items():
        yield indent(Text(f"{', '.join(counts)} GPUs: {clean(reason)}", QUIET))


def _rate(plan: Plan, name: str | None = None) -> float:
    assert plan.throughput is not None
    line = plan.throughput if name is None else plan.throughput.child(name)
    return float(line.value)
