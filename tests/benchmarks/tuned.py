"""Published layouts that their authors tuned, against the best layout the search finds.

Of rows that differ in layout alone the fastest is the tuned one; the others are what its authors
compared it with. What a release's own recipe says of a row (modules made again, captured CUDA graphs,
overlap) is taken from there and holds for both layouts. Where nothing says how a row recomputed or
offloaded, the search completes its layout to say whether it fits; its time is taken without
recomputation, the least it can have been.

    python tests/benchmarks/tuned.py [every NTH row] [--shares]

Rows of Megatron's papers and tables, NeMo's and Megatron Bridge's recipes and torchtitan's tables.
Targets: the published layout is legal and fits in 95 % of them, and its predicted step is within 15 %
of the best one's in 85 %. A benchmark, not a test; `test_tuned_layouts.py` runs a part of it. --shares
leaves out the rows that miss.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpucalc.accuracy import error_table
from gpucalc.catalog import Catalog, open_catalog
from gpucalc.errors import GpucalcError, Infeasible
from gpucalc.estimate_training import TrainingPlanner
from gpucalc.layouts import opened
from gpucalc.measured import TRAINING, Row, Skip, read_rows, shipped
from gpucalc.measured_runs import Normaliser, Ready, conventions_of
from gpucalc.plan.evaluate import ErrorTable, Subject
from gpucalc.plan.resolve import resolve_layout, resolve_recipe, settle
from gpucalc.plan.time import step_time
from gpucalc.search import explore, simulated_step
from gpucalc.search.space import Space
from gpucalc.search.worth import Scale
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.train_run import TrainRun
from gpucalc.validate_training import Reading, speed_of

GROUPS = ("korthikanti", "megatronlm", "nemo", "nemo2407", "mbridge", "torchtitan")
WITHIN = 0.15
SHARES = "--shares"
# Weak scaling at one batch per GPU with every layer checkpointed: a table of scaling, not of tuned layouts.
SCALING_TABLES = ("megatronlm-2020-",)


@dataclass(frozen=True, slots=True)
class Compared:
    """A published layout beside the best one: steps in seconds, of the simulated schedule."""

    row: str
    group: str
    legal: bool
    fits: bool
    own_s: float | None
    best_s: float | None
    own: dict[str, Any] | None
    best: dict[str, Any] | None
    why: str = ""

    @property
    def near(self) -> bool:
        """Whether the published layout is within the bound of the best."""
        return self.own_s is not None and self.best_s is not None and self.own_s <= (1 + WITHIN) * self.best_s


def rows_of(catalog: Catalog) -> Iterator[tuple[Row, Ready]]:
    """The fastest row of those groups for each model, fleet, precision, length and batch."""
    normaliser = Normaliser(catalog, conventions_of(catalog))
    fastest: dict[Any, tuple[float, Row, Ready]] = {}
    for row in read_rows(path for path in shipped(catalog, TRAINING) if path.stem in GROUPS):
        ready, speed = normaliser.job_of(row), speed_of(row)
        if isinstance(ready, Skip) or ready.memory_only is not None or not isinstance(speed, Reading):
            continue
        job, run = ready.job, ready.job.run
        if not isinstance(run, TrainRun) or row.measured.get("oom"):
            continue
        key = (row.group, str(job.model), job.gpus, run.precision, run.seq_len, run.method, speed.source)
        key += (run.global_batch, run.grad_accum if run.global_batch is None else None)
        if key not in fastest or speed.value > fastest[key][0]:
            fastest[key] = (speed.value, row, ready)
    yield from ((row, ready) for _, row, ready in fastest.values())


def compare(row: Row, subject: Subject, cluster: Cluster, stated: TrainRun, errors: ErrorTable) -> Compared:
    """One row."""
    run, assumed = settle(stated)
    try:
        layout, _ = resolve_layout(run, subject.graph, gpus=cluster.count)
    except Infeasible as error:
        return Compared(row.id, row.group, False, False, None, None, None, None, "; ".join(error.rules))
    unsaid = {key: "auto" for key in ("recompute", "offload") if key not in stated.model_fields_set}
    space = Space(subject.graph, run.model_copy(update=unsaid), cluster)
    found = explore(subject, space, cluster, errors)
    # It ran, so that it may be as close to the card's memory as a plan calls marginal.
    own = simulated_step(space, Scale(subject, cluster, errors), (found.front or found.best)[-1])
    own_s = own.step_s if own.fits else None
    if "recompute" in unsaid:
        recipe = resolve_recipe(run, subject.graph)
        bare = float(step_time(subject.graph, layout, recipe, cluster, simulated=True).value)
        own_s = min(bare, own.step_s)
    free, _ = opened(run, layout, unstated={item.key for item in assumed})
    space = Space(subject.graph, free, cluster)
    best = explore(subject, space, cluster, errors).best[0]
    return Compared(
        row.id,
        row.group,
        True,
        own.fits,
        own_s,
        best.step_s if best.fits else None,
        dict(own.values),
        dict(best.values),
        "" if own.fits else f"needs {own.needed_bytes / 2**30:.1f} GiB",
    )


def compared(every: int = 1, only: Sequence[str] = ()) -> list[Compared]:
    """Every nth row of the groups, or those named."""
    catalog = open_catalog()
    planner = TrainingPlanner(catalog)
    errors = error_table(catalog)
    found = []
    for number, (row, ready) in enumerate(rows_of(catalog)):
        if number % every or (only and row.id not in only):
            continue
        job = ready.job
        assert isinstance(job.run, TrainRun)
        try:
            subject = planner._subject(job, repr(job.model))
            cluster = planner._cluster(ready, f"{job.gpus} {job.system} {ready.network}")
            found.append(compare(row, subject, cluster, job.run, errors))
        except GpucalcError as error:
            print(f"left out: {row.id}: {error}")
    return found


def shares(rows: Sequence[Compared]) -> tuple[float, float]:
    """Shares of rows whose layout is legal and fits, and whose step is near the best one's."""
    return (
        sum(row.legal and row.fits for row in rows) / len(rows),
        sum(row.near for row in rows) / len(rows),
    )


def main() -> None:
    numbers = [int(word) for word in sys.argv[1:] if word != SHARES]
    rows = compared(*numbers)
    for row in rows:
        if row.near or SHARES in sys.argv:
            continue
        if row.own_s is None or row.best_s is None or row.own is None or row.best is None:
            print(f"{row.row}: {'does not fit' if row.legal else 'is not legal'}: {row.why}")
            continue
        changed = {key: (row.own[key], row.best[key]) for key in row.best if row.own[key] != row.best[key]}
        words = ", ".join(f"{key} {own} -> {best}" for key, (own, best) in changed.items())
        print(
            f"{row.row}: {row.own_s:.3g} s, best {row.best_s:.3g} s ({row.own_s / row.best_s:.2f}): {words}"
        )
    for group in dict.fromkeys(row.group for row in rows):
        part = [row for row in rows if row.group == group]
        fit, near = shares(part)
        print(f"{group}: {len(part)} layouts, {fit:.0%} legal and fitting, {near:.0%} within {WITHIN:.0%}")
    tuned = [row for row in rows if not row.row.startswith(SCALING_TABLES)]
    for name, part in (("tuned", tuned), ("all, a table of weak scaling too", rows)):
        fit, near = shares(part)
        print(f"{name}: {len(part)} layouts, {fit:.1%} legal and fitting, {near:.1%} within {WITHIN:.0%}")


if __name__ == "__main__":
    main()
