"""Seconds of a million step-time evaluations in columns, and milliseconds of a single plan's formulas.

    python tests/benchmarks/steptime.py [rows]

The layouts differ in tensor, context, expert and data parallelism and in both batch sizes; the rest
of a structure (model, recipe, cluster, pipeline stages) is fixed. Run it on one core:
`taskset -c 0`. Targets: 2 s for a million Llama 3 8B layouts, 5 ms for one plan, memory included.
A benchmark, not a test.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np

from gpucalc.builders.build import build_graph
from gpucalc.catalog import open_catalog
from gpucalc.jobs import resolve
from gpucalc.plan.evaluate import Subject, evaluate
from gpucalc.plan.layout import Layout
from gpucalc.plan.resolve import resolve_recipe, settle
from gpucalc.search import best_run, step_times
from gpucalc.spec.job import TrainRun

GPUS = 64
# Expert parallelism is a column too where there are experts.
MODELS = {"llama-3-8b": False, "llama-3-70b": False, "mixtral-8x7b": True}
JOBS = ("llama-3-8b", "llama-3-70b")
ROUNDS = 30


def layouts(rows: int, experts: bool) -> Layout:
    """Columns of random layouts of the fleet."""
    draw = np.random.default_rng(0)

    def powers(most: int) -> Any:
        return 2.0 ** draw.integers(0, most + 1, rows)

    tp, cp = powers(3), powers(1)
    columns: dict[str, Any] = {"tp": tp, "cp": cp, "dp": GPUS / (tp * cp), "shard": GPUS / tp}
    columns |= {"ep": powers(3) if experts else 1, "micro_batch": powers(2), "micro_batches": powers(6)}
    fixed: dict[str, Any] = {"pp": 1, "vpp": 1, "etp": 1, "zero_stage": 1, "schedule": "none"}
    return Layout(**columns, **fixed, sequence_parallel=True)


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    catalog = open_catalog()
    cluster = catalog.cluster([(None, GPUS, "h100-sxm-80gb")])
    run = TrainRun.model_validate(
        {"task": "train", "framework": "megatron", "precision": "bf16", "seq_len": 4096}
    )
    for model, experts in MODELS.items():
        graph = build_graph(catalog.model(model))
        recipe = resolve_recipe(settle(run)[0], graph)
        columns = layouts(rows, experts)
        step_times(graph, layouts(1000, experts), recipe, cluster)
        start = time.process_time()
        found = step_times(graph, columns, recipe, cluster)
        spent = time.process_time() - start
        assert len(found) == rows
        assert np.isfinite(found).all()
        print(f"{model}: {rows:,} layouts in {spent:.2f} s of one core")
    for name in JOBS:
        job = resolve(name, catalog)
        subject = Subject.of(job.model)
        own = catalog.cluster(job.fleet, job.job.system)
        assert isinstance(job.run, TrainRun)
        settled, _ = best_run(subject, job.run, own)
        each = []
        for _ in range(ROUNDS):
            start = time.process_time()
            evaluate(subject, settled, own, name=name, fleet=str(job.fleet))
            each.append(1e3 * (time.process_time() - start))
        print(f"{name}: one plan's formulas in {statistics.median(each):.2f} ms (median of {ROUNDS})")


if __name__ == "__main__":
    main()
