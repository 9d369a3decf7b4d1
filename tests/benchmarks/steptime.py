"""Milliseconds of a single plan's formulas, memory included.

    python tests/benchmarks/steptime.py

Target: 5 ms for one plan. Columns of layouts are timed by `search.py` beside this file. A benchmark,
not a test.
"""

from __future__ import annotations

import statistics
import time

from gpucalc.catalog import open_catalog
from gpucalc.jobs import resolve
from gpucalc.plan.evaluate import Subject, Terms, evaluate
from gpucalc.search import best_run
from gpucalc.spec.train_run import TrainRun

JOBS = ("llama-3-8b", "llama-3-70b")
ROUNDS = 30


def main() -> None:
    catalog = open_catalog()
    for name in JOBS:
        job = resolve(name, catalog)
        subject = Subject.of(job.model)
        own = catalog.cluster(job.fleet, job.job.system)
        assert isinstance(job.run, TrainRun)
        settled, _ = best_run(subject, job.run, own)
        each = []
        for _ in range(ROUNDS):
            start = time.process_time()
            evaluate(subject, settled, own, Terms(name, str(job.fleet)))
            each.append(1e3 * (time.process_time() - start))
        print(f"{name}: one plan's formulas in {statistics.median(each):.2f} ms (median of {ROUNDS})")


if __name__ == "__main__":
    main()
