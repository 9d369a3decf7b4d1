"""One job on more and more GPUs: what each size brings, what it costs and what holds it back.

The model stays divided as it is and the rest of the GPUs go to data parallelism. Weak scaling keeps
the batch of every GPU, so the global batch grows; strong scaling keeps the global batch the job states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpucalc.accuracy import error_table
from gpucalc.catalog import Catalog
from gpucalc.errors import Infeasible, InputError
from gpucalc.formulas import compute as f
from gpucalc.jobs import ResolvedJob
from gpucalc.line import Line, compute
from gpucalc.plan.answer import Level, Plan
from gpucalc.plan.evaluate import Subject
from gpucalc.plan.resolve import resolve_layout
from gpucalc.planner import plan_job
from gpucalc.search import best_run
from gpucalc.spec.fleet import MAX_GPUS, FleetPart
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.train_run import TrainRun

MOST_SIZES = 32


@dataclass(frozen=True, slots=True)
class Size:
    """One size: its plan, or why it has none, and its rate per GPU against the smallest that runs."""

    gpus: int
    plan: Plan | None
    efficiency: Line | None
    why_not: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether the layout is legal here and may fit."""
        return self.plan is not None and self.plan.verdict.level is not Level.DOES_NOT_FIT

    @property
    def goodput(self) -> float | None:
        """Share of wall time left by failures, None of a fleet too small to speak of them."""
        if self.plan is None or self.plan.reliability is None:
            return None
        return float(self.plan.reliability.child("goodput").value)

    def document(self) -> dict[str, Any]:
        """The same for a JSON document."""
        out: dict[str, Any] = {"gpus": self.gpus, "level": None, "why_not": list(self.why_not)}
        plan = self.plan
        if plan is None:
            return out
        out |= {"level": plan.verdict.level.value, "binds": plan.binds, "fleet": plan.fleet}
        out |= {"needed_bytes": plan.verdict.needed.value, "dp": plan.layout.dp}
        out["global_batch"] = plan.layout.global_batch
        if plan.time is None or plan.throughput is None or self.efficiency is None:
            return out
        price = rental_price(plan)
        return out | {
            "step_s": float(plan.time.value),
            "samples_per_s": float(plan.throughput.value),
            "tokens_per_s": float(plan.throughput.child("tokens_per_s").value),
            "tokens_per_s_per_gpu": float(_per_gpu(plan).value),
            "mfu_fraction": float(plan.throughput.child("mfu").value),
            "efficiency_fraction": float(self.efficiency.value),
            "goodput_fraction": self.goodput,
            "time_between_interruptions_s": None
            if plan.reliability is None
            else float(plan.reliability.child("time_between_interruptions").value),
            "usd_per_million_tokens": None if price is None else float(price.value),
        }


@dataclass(frozen=True, slots=True)
class Scaling:
    """A job over sizes. `strong` is None where the job states no global batch."""

    name: str
    fleet: str  # of the job itself
    weak: tuple[Size, ...]
    strong: tuple[Size, ...] | None

    @property
    def runs(self) -> bool:
        """Whether any size runs."""
        return any(size.runs for size in (*self.weak, *(self.strong or ())))

    def document(self) -> dict[str, Any]:
        """The same for a JSON document. Efficiencies are fractions."""
        return {
            "name": self.name,
            "fleet": self.fleet,
            "weak": [size.document() for size in self.weak],
            "strong": None if self.strong is None else [size.document() for size in self.strong],
        }


def parse_sizes(text: str) -> tuple[int, ...]:
    """GPU counts separated by commas. Raises InputError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    legal = f"GPU counts such as 1,2,4,8, at most {MOST_SIZES} of them"
    if not words or len(words) > MOST_SIZES:
        raise InputError("is not a list of sizes", where="--scale", given=text, legal=legal)
    for word in words:
        if not word.isascii() or not word.isdigit() or not 1 <= int(word) <= MAX_GPUS:
            raise InputError("is not a number of GPUs", where="--scale", given=word, legal=legal)
    return tuple(sorted({int(word) for word in words}))


def scale(job: ResolvedJob, catalog: Catalog, sizes: Sequence[int]) -> Scaling:
    """Plans of the job on each number of GPUs of its own kind. Raises InputError or Infeasible."""
    run = job.run
    if not isinstance(run, TrainRun):
        raise InputError("only training runs are scaled", where=job.where, key="run.task", given="serve")
    parts = job.fleet.parts
    if len(parts) > 1:
        raise InputError("only a fleet of one GPU kind is scaled", key="gpus", given=str(job.fleet))
    subject = Subject.of(job.model, job.draft)
    errors = error_table(catalog)
    own = catalog.cluster(job.fleet, job.job.system, network=job.job.network)
    settled, _ = best_run(subject, run, own, errors)
    layout, _ = resolve_layout(settled, subject.graph, gpus=own.count)
    divided = layout.tp * layout.pp * layout.cp
    stated = run.global_batch if isinstance(run.global_batch, int) else None
    weak, strong = [], []
    for gpus in sizes:
        dp = gpus // divided
        if dp < 1 or gpus % divided:
            names = ("tp", "pp", "cp")
            degrees = " x ".join(
                f"{name} {getattr(layout, name)}" for name in names if getattr(layout, name) > 1
            )
            product = f"{degrees} = {divided}" if " x " in degrees else degrees
            nothing = Size(gpus, None, None, (f"not a multiple of {product}",))
            weak.append(nothing)
            strong.append(nothing)
            continue
        cluster = catalog.cluster([_part(parts[0], gpus)], job.job.system, network=job.job.network)
        kept: dict[str, Any] = {"dp": dp, "grad_accum": None}
        if settled.dp_shard is not None:
            kept["dp_shard"] = min(settled.dp_shard, dp)
        grown = layout.micro_batch * layout.micro_batches * dp
        weak.append(_size(job, settled, kept | {"global_batch": grown}, cluster, subject, catalog))
        if stated is not None:
            strong.append(_size(job, settled, kept | {"global_batch": stated}, cluster, subject, catalog))
    return Scaling(
        job.name, str(job.fleet), _compared(weak), _compared(strong) if stated is not None else None
    )


def _part(part: FleetPart, gpus: int) -> FleetPart:
    """So many GPUs, in nodes as full as the job's own."""
    if part.nodes is not None and gpus % part.count == 0:
        return FleetPart(gpus // part.count, part.count, part.gpu)
    return FleetPart(None, gpus, part.gpu)


def _size(
    job: ResolvedJob,
    run: TrainRun,
    changes: dict[str, Any],
    cluster: Cluster,
    subject: Subject,
    catalog: Catalog,
) -> Size:
    changed = job.job.model_copy(update={"run": run.model_copy(update=changes)})
    try:
        plan = plan_job(replace(job, job=changed), catalog, subject=subject, cluster=cluster, advice=False)
    except Infeasible as error:
        return Size(cluster.count, None, None, tuple(error.rules))
    return Size(cluster.count, plan, None)


def _compared(sizes: list[Size]) -> tuple[Size, ...]:
    """The sizes with their efficiency against the smallest that runs."""
    first = next((size for size in sizes if size.runs), None)
    if first is None or first.plan is None:
        return tuple(sizes)
    basis = _per_gpu(first.plan)
    return tuple(
        replace(
            size,
            efficiency=compute(
                "efficiency", f.scaling_efficiency, rate_per_gpu=_per_gpu(size.plan), smallest_per_gpu=basis
            ),
        )
        if size.runs and size.plan is not None
        else size
        for size in sizes
    )


def _per_gpu(plan: Plan) -> Line:
    assert plan.throughput is not None
    return plan.throughput.child("tokens_per_s_per_gpu")


def rental_price(plan: Plan) -> Line | None:
    """Dollars per million tokens, None where no price is known."""
    if plan.cost is None:
        return None
    return next((line for line in plan.cost.children if line.name == "rental_per_million_tokens"), None)
