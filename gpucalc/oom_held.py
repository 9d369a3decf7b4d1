"""More memory in use than a training plan has: what would have to be whole on every GPU for that.

A division that was asked for and did not happen shows as memory that does not fall as cards are added. The
job is planned again with each division undone; what then comes near the figure is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.errors import GpucalcError
from gpucalc.formulas.serving_memory import served_weight_bytes
from gpucalc.jobs import ResolvedJob
from gpucalc.oom_message import Message
from gpucalc.plan.answer import Plan
from gpucalc.plan.evaluate import Subject
from gpucalc.planner import plan_job
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.train_run import TrainRun
from gpucalc.units import gib

NEAR = 0.2  # of the figure
LOADS = ("init", "load")  # phases that are over once a job runs
STAGES = {
    2: "weights that were not partitioned",
    1: "weights and gradients that were not partitioned",
    0: "weights, gradients and optimizer states that were not partitioned",
}
# What of an offload is left where so much is divided.
OFFLOADS = {
    2: {"params+optimizer-cpu": "optimizer+gradients-cpu"},
    1: {"params+optimizer-cpu": "optimizer-cpu", "optimizer+gradients-cpu": "optimizer-cpu"},
    0: {"params+optimizer-cpu": "none", "optimizer+gradients-cpu": "none", "optimizer-cpu": "none"},
}


@dataclass(frozen=True, slots=True)
class _Undone:
    words: str
    changes: Mapping[str, Any]
    bytes: float


def too_much(
    message: Message, job: ResolvedJob, plan: Plan, subject: Subject, cluster: Cluster, catalog: Catalog
) -> Iterator[str]:
    """Sentences where more is in use than the plan's peak, nothing where the plan has as much."""
    run = job.run
    amount = message.allocated or message.in_use
    if not isinstance(run, TrainRun) or amount is None:
        return
    part = "allocated" if amount is message.allocated else None
    held = amount.bytes + (message.tried.bytes if message.tried is not None else 0.0)
    most = max(_phases(plan, part), default=0.0)
    if held <= most * (1 + plan.verdict.expected_error):
        return
    yield f"{gib(held)} was in use where the plan has at most {gib(most)}"
    found = min(
        _undone(job, run, held, part, subject, cluster, catalog),
        key=lambda one: abs(math.log(one.bytes / held)),
        default=None,
    )
    if found is None:
        return
    settings = ", ".join(f"{key} {value}" for key, value in found.changes.items())
    yield f"that is about what {found.words} would take: {gib(found.bytes)} with {settings}"
    copy = float(served_weight_bytes(params=subject.counts.total.value, bytes_per_param=2))
    yield (
        f"a whole 16-bit copy of the weights is {gib(copy)}; on more cards what is partitioned"
        " shrinks: if the figure stays, it was not"
    )


def _undone(
    job: ResolvedJob,
    run: TrainRun,
    held: float,
    part: str | None,
    subject: Subject,
    cluster: Cluster,
    catalog: Catalog,
) -> Iterator[_Undone]:
    """The job with one division undone, as far as a phase of it comes near what was in use."""
    for words, changes in _divisions(run):
        changed = replace(job, job=job.job.model_copy(update={"run": run.model_copy(update=changes)}))
        try:
            other = plan_job(changed, catalog, subject=subject, cluster=cluster, advice=False)
        except GpucalcError:
            continue
        near = min(_phases(other, part, running=True), key=lambda value: abs(value - held), default=0.0)
        if abs(near - held) <= NEAR * held:
            yield _Undone(words, changes, near)


def _divisions(run: TrainRun) -> Iterator[tuple[str, Mapping[str, Any]]]:
    stage = run.zero_stage if isinstance(run.zero_stage, int) else 0
    for lower in range(stage - 1, -1, -1):
        offload = OFFLOADS[lower].get(run.offload, run.offload)
        moved = {} if offload == run.offload else {"offload": offload}
        yield STAGES[lower], {"zero_stage": lower, **moved}
    if run.offload not in (None, "none"):
        yield "states that stayed on the GPU", {"offload": "none"}
    if run.recompute not in (None, "none"):
        yield "activations that are all kept", {"recompute": "none"}


def _phases(plan: Plan, part: str | None, *, running: bool = False) -> list[float]:
    """What each phase of the plan holds on a GPU: all of it, or what torch counts."""
    return [
        float((phase if part is None else phase.child(part)).value)
        for stage in plan.memory.children
        for phase in stage.children
        if not (running and phase.name in LOADS)
    ]
