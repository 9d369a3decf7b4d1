"""Many plans, ranked: settles every key a run leaves "auto" by trying all legal values.

Each candidate goes through the same memory and time functions as a single plan. Candidates that
fit come first, fastest first; where none fits, the one that needs least memory per GPU. A small
space is gone through layout by layout; a large one in numpy columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gpucalc.plan.answer import Assumption, Plan
from gpucalc.plan.evaluate import ErrorTable, Subject, Terms, evaluate
from gpucalc.plan.resolve import resolve_layout, resolve_recipe
from gpucalc.plan.time import step_time
from gpucalc.search.found import RIVALS, Candidate, Found, front_place, merit
from gpucalc.search.space import AUTO_KEYS, Space
from gpucalc.search.worth import Scale, weigh
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.train_run import TrainRun

__all__ = (
    "AUTO_KEYS",
    "Candidate",
    "Found",
    "best_run",
    "explore",
    "has_auto",
    "plan_best",
    "with_chosen",
)

# Candidates up to which loading numpy takes longer than weighing them one by one.
SMALL_SPACE = 64
KEPT = 8  # best layouts kept of a search; all of them are run through the pipeline's schedule
MOST_SIMULATED = 24  # layouts run through it, of a space with many ways of dealing out layers

MANY_KEYS = 3  # settled together: the reason is given once

Progress = Callable[[int, int], None]


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
    space = Space(subject.graph, run, cluster)
    found = explore(subject, space, cluster, errors)
    return settle_best(space, found)


def settle_best(space: Space, found: Found) -> tuple[TrainRun, tuple[Assumption, ...]]:
    """The run of the best layout found, and what was chosen with the reason."""
    best = found.best[0]
    why = (
        f"the fastest of {found.fitting:,} that fit, of {found.legal:,} legal layouts"
        if best.fits
        else f"none of {found.legal:,} legal layouts fits; this one needs least"
    )
    run = space.settled(best.values)
    first, *others = space.open
    again = why if len(others) < MANY_KEYS else f"searched with run.{first}"
    reasons = (why, *(again for _ in others))
    chosen = tuple(
        Assumption(f"run.{key}", getattr(run, key), reason)
        for key, reason in zip(space.open, reasons, strict=True)
    )
    return run, chosen + tuple(Assumption(d.key, d.value, d.why) for d in space.followed(best.values))


def explore(
    subject: Subject,
    space: Space,
    cluster: Cluster,
    errors: ErrorTable | None = None,
    *,
    keep: int = KEPT,
    progress: Progress | None = None,
) -> Found:
    """The best layouts of a space, the best first by the schedule's simulation, and the front.

    Raises Infeasible when no candidate is legal.
    """
    scale = Scale(subject, cluster, errors or ErrorTable())
    if space.size() <= SMALL_SPACE:
        found = one_by_one(space, scale, keep=keep)
    else:
        from gpucalc.search.columns import search  # numpy takes longer to load than a small space does

        found = search(space, scale, keep=keep, progress=progress)
    if not found.best:
        raise space.refusal()
    found.best = sorted(_simulated(space, scale, found, keep), key=_simplest)
    return found


def _simplest(one: Candidate) -> tuple[float, ...]:
    """Sorts as `merit`, but of layouts that take the same time, what offloads nothing comes first."""
    tier, pace, needed = merit(one)
    return (tier, float(f"{pace:.9g}"), float(one.fits and one.values["offload"] != "none"), needed)


def one_by_one(space: Space, scale: Scale, *, keep: int) -> Found:
    """The outcome of a search that weighs every layout as a plan of its own."""
    began = time.process_time()
    weighed = [weigh(space, scale, values) for values in space.candidates()]
    weighed.sort(key=merit)
    fitting = [one for one in weighed if one.fits]
    rivals: dict[Any, list[Candidate]] = {}
    for one in fitting:
        rivals.setdefault((one.values["pp"], one.values["vpp"]), []).append(one)
    front: list[Candidate] = []
    for one in sorted(fitting, key=front_place):
        if not front or front_place(one)[1] < front_place(front[-1])[1]:
            front.append(one)
    return Found(
        best=fitting[:keep] or weighed[:1],
        rivals=[one for known in rivals.values() for one in known[:RIVALS]],
        front=front,
        legal=len(weighed),
        fitting=len(fitting),
        timed=len(fitting),
        seconds=time.process_time() - began,
    )


def _simulated(space: Space, scale: Scale, found: Found, keep: int) -> list[Candidate]:
    """The best candidates in the order of their times with stages that differ.

    The closed form takes stages for alike, and says too little where interleaved chunks are not: the best
    of every pp and vpp are run as well, until none is left that could be faster by the closed form.
    """
    if not found.best[0].fits:
        return found.best
    order = sorted([*found.best, *(one for one in found.rivals if one not in found.best)], key=merit)
    done: list[Candidate] = []
    for one in order[:MOST_SIMULATED]:
        if len(done) >= keep and merit(done[keep - 1])[:2] <= merit(one)[:2]:
            break
        done.append(simulated_step(space, scale, one))
        done.sort(key=merit)
    return done[:keep]


def simulated_step(space: Space, scale: Scale, one: Candidate) -> Candidate:
    """The candidate with the time of its pipeline's schedule, run over stages as they are."""
    if not one.fits or one.values["pp"] == 1:
        return one
    run = space.settled(one.values)
    layout, _ = resolve_layout(run, scale.graph, gpus=space.gpus)
    recipe = resolve_recipe(run, scale.graph)
    seconds = float(step_time(scale.graph, layout, recipe, scale.cluster, simulated=True).value)
    return Candidate(one.values, one.tier, one.needed_bytes, seconds, layout.global_batch / seconds)


def with_chosen(
    assumptions: tuple[Assumption, ...], chosen: tuple[Assumption, ...]
) -> tuple[Assumption, ...]:
    """What was assumed before a search, less what it settled, then that."""
    keys = {item.key for item in chosen}
    return (*(item for item in assumptions if item.key not in keys), *chosen)


def plan_best(subject: Subject, run: TrainRun, cluster: Cluster, terms: Terms) -> Plan:
    """The plan of a run, whatever it leaves auto settled first."""
    settled, chosen = best_run(subject, run, cluster, terms.errors)
    said = replace(terms, assumptions=with_chosen(terms.assumptions, chosen))
    return evaluate(subject, settled, cluster, said)
