"""Many plans, ranked: settles every key a run leaves "auto" by trying all legal values.

Each candidate goes through the same memory and time functions as a single plan. Candidates that
fit come first, fastest first; where none fits, the one that needs least memory per GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from gpucalc.errors import Infeasible, InputError
from gpucalc.graph import Attention, Graph, Moe
from gpucalc.plan.answer import Assumption, Plan
from gpucalc.plan.evaluate import ErrorTable, Subject, evaluate, hopper_or_later, judge
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.memory import memory_peak
from gpucalc.plan.resolve import resolve_layout, resolve_recipe
from gpucalc.plan.rules import divisors
from gpucalc.plan.stages import split_layers
from gpucalc.plan.time import step_time
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.job import TrainRun

AUTO_KEYS = ("tp", "pp", "cp", "ep", "vpp", "zero_stage", "micro_batch")
MAX_TP_BEYOND_DOMAIN = 1  # tensor parallelism stays inside the NVLink domain unless its degree is given
MAX_MICRO_BATCH = 64
MOST_CANDIDATES = 4000


@dataclass(frozen=True, slots=True)
class Candidate:
    """One legal layout and its headline numbers."""

    run: TrainRun
    layout: Layout
    level_rank: int  # 0 fits, 1 marginal, 2 does not fit
    needed_bytes: float
    samples_per_s: float  # 0 where it does not fit


def has_auto(run: TrainRun) -> bool:
    """Whether anything is left to the search."""
    return any(getattr(run, key) == "auto" for key in AUTO_KEYS)


def best_run(
    subject: Subject, run: TrainRun, cluster: Cluster, errors: ErrorTable | None = None
) -> tuple[TrainRun, tuple[Assumption, ...]]:
    """The run with every "auto" settled, and what was chosen with the reason.

    Raises Infeasible when no candidate is legal.
    """
    if not has_auto(run):
        return run, ()
    ranked = rank(subject, run, cluster, errors)
    best = ranked[0]
    fitting = sum(1 for candidate in ranked if candidate.level_rank < 2)
    why = (
        f"the fastest of {fitting} that fit, of {len(ranked)} legal layouts"
        if best.level_rank < 2
        else f"none of {len(ranked)} legal layouts fits; this one needs least"
    )
    chosen = tuple(
        Assumption(f"run.{key}", getattr(best.run, key), why)
        for key in AUTO_KEYS
        if getattr(run, key) == "auto"
    )
    return best.run, chosen


def rank(
    subject: Subject, run: TrainRun, cluster: Cluster, errors: ErrorTable | None = None
) -> list[Candidate]:
    """Every legal candidate, best first. Raises Infeasible when there is none."""
    errors = errors or ErrorTable()
    found: list[Candidate] = []
    refused: Infeasible | None = None
    for settled in candidates(subject, run, cluster):
        try:
            layout, _ = resolve_layout(settled, subject.graph, gpus=cluster.count)
        except Infeasible as error:
            refused = refused or error
            continue
        found.append(_weigh(subject, settled, layout, cluster, errors))
        if len(found) >= MOST_CANDIDATES:
            break
    if not found:
        raise refused or Infeasible(["no legal value for the keys left auto"])
    found.sort(key=_merit)
    return found


def _merit(candidate: Candidate) -> tuple[Any, ...]:
    if candidate.level_rank == 2:
        return (2, candidate.needed_bytes, 0.0)
    return (candidate.level_rank, -candidate.samples_per_s, candidate.needed_bytes)


def _weigh(
    subject: Subject, run: TrainRun, layout: Layout, cluster: Cluster, errors: ErrorTable
) -> Candidate:
    recipe = resolve_recipe(run, subject.graph)
    ends = _telling_stages(subject, layout)
    peak = memory_peak(
        subject.graph,
        layout,
        recipe,
        hopper_or_later=hopper_or_later(cluster),
        nvlink=cluster.nvlink_domain > 1,
        only=ends,
    )
    verdict = judge(peak, cluster, recipe, errors)
    level = ("fits", "marginal", "does_not_fit").index(verdict.level.value)
    speed = 0.0
    if level < 2:
        speed = layout.global_batch / step_time(subject.graph, layout, recipe, cluster).value
    return Candidate(run, layout, level, float(verdict.needed.value), speed)


def _telling_stages(subject: Subject, layout: Layout) -> tuple[int, ...]:
    """Stages one of which has the peak: the first two, the last, and the first of the deepest.

    In-flight micro-batches fall with the stage's number, so a later stage needs more only by its depth
    or by what the last one holds.
    """
    if layout.pp == 1 or not subject.graph.stacks:
        return (0,)
    sizes = split_layers(len(subject.graph.trunk.layers), layout.pp * layout.vpp)
    depths = [sum(sizes[rank :: layout.pp]) for rank in range(layout.pp)]
    return tuple(sorted({0, 1, layout.pp - 1, depths.index(max(depths))}))


# Layouts evaluated at a time: their columns stay in a core's cache.
ROWS_AT_A_TIME = 16384


def step_times(graph: Graph, layouts: Layout, recipe: Recipe, cluster: Cluster) -> Any:
    """Seconds of a step for columns of layouts: any of tp, cp, ep, etp, dp, shard and the batches.

    The fields that are columns are float64 arrays of one length; pp, vpp, zero_stage and the schedule
    are numbers, since they decide which stages and formulas there are.
    """
    import numpy as np

    columns: dict[str, Any] = {
        field.name: column
        for field in fields(layouts)
        if isinstance(column := getattr(layouts, field.name), np.ndarray)
    }
    if not columns:
        return step_time(graph, layouts, recipe, cluster).value
    rows = len(next(iter(columns.values())))
    parts = []
    for start in range(0, rows, ROWS_AT_A_TIME):
        rows_now = slice(start, start + ROWS_AT_A_TIME)
        cut: dict[str, Any] = {name: column[rows_now] for name, column in columns.items()}
        parts.append(step_time(graph, replace(layouts, **cut), recipe, cluster).value)
    return np.concatenate(parts)


def candidates(subject: Subject, run: TrainRun, cluster: Cluster) -> Iterator[TrainRun]:
    """The run with each combination of values for its auto keys; legality is checked later."""
    options = {key: _options(key, subject, run, cluster) for key in AUTO_KEYS if getattr(run, key) == "auto"}
    for values in product(*options.values()):
        update: dict[str, Any] = dict(zip(options, values, strict=True))
        degrees = {key: update.get(key, getattr(run, key)) for key in ("tp", "pp", "cp")}
        model_parallel = degrees["tp"] * degrees["pp"] * degrees["cp"]
        if cluster.count % model_parallel:
            continue
        if update.get("vpp", 1) > 1 and degrees["pp"] == 1:
            continue
        if "tp" in update:
            update["sequence_parallel"] = (
                update["tp"] > 1 and run.framework in ("megatron", "torchtitan")
                if "sequence_parallel" not in run.model_fields_set
                else run.sequence_parallel
            )
        if run.etp in (None, "auto"):
            update["etp"] = 1
        yield run.model_copy(update=update)


def _options(key: str, subject: Subject, run: TrainRun, cluster: Cluster) -> list[int]:
    graph = subject.graph
    gpus = cluster.count
    if key == "micro_batch":
        most = MAX_MICRO_BATCH
        if isinstance(run.global_batch, int):
            most = min(most, run.global_batch)
        return [2**power for power in range(most.bit_length()) if 2**power <= most]
    if key == "zero_stage":
        return {"deepspeed": [0, 1, 2, 3], "megatron": [0, 1]}.get(run.framework, [2, 3])
    if not graph.stacks:
        return [1]
    blocks = [block for stack in graph.stacks for block in stack.blocks]
    if key == "tp":
        heads = [block.mixer.heads for block in blocks if isinstance(block.mixer, Attention)]
        limit = max(cluster.nvlink_domain, MAX_TP_BEYOND_DOMAIN)
        return [t for t in divisors(gpus) if t <= limit and all(head % t == 0 for head in heads)]
    if key == "ep":
        experts = [block.ffn.experts for block in blocks if isinstance(block.ffn, Moe)]
        return [e for e in divisors(gpus) if all(count % e == 0 for count in experts)] if experts else [1]
    layers = len(graph.trunk.layers)
    if key == "pp":
        return [p for p in divisors(gpus) if p <= layers]
    if key == "vpp":
        return [v for v in (1, 2, 3, 4, 5, 6, 8) if v <= layers]
    if key == "cp":
        return [c for c in divisors(gpus) if c <= 16]
    raise InputError("cannot be searched", key=f"run.{key}")


def with_chosen(
    assumptions: tuple[Assumption, ...], chosen: tuple[Assumption, ...]
) -> tuple[Assumption, ...]:
    """What was assumed before a search, less what it settled, then that."""
    keys = {item.key for item in chosen}
    return (*(item for item in assumptions if item.key not in keys), *chosen)


def plan_best(
    subject: Subject,
    run: TrainRun,
    cluster: Cluster,
    *,
    name: str,
    fleet: str,
    assumptions: tuple[Assumption, ...] = (),
    notes: tuple[str, ...] = (),
    errors: ErrorTable | None = None,
    always_time: bool = False,
) -> Plan:
    """The plan of a run, whatever it leaves auto settled first."""
    settled, chosen = best_run(subject, run, cluster, errors)
    return evaluate(
        subject,
        settled,
        cluster,
        name=name,
        fleet=fleet,
        assumptions=with_chosen(assumptions, chosen),
        notes=notes,
        errors=errors,
        always_time=always_time,
    )
