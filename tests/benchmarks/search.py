"""Exhaustive layout searches: layouts a second of one core, wall time with start-up, and memory.

    python tests/benchmarks/search.py

Every layout key is left open. Targets: 1,000,000 layouts a second of one core, memory and time; a model
of 1T parameters on 4,096 GPUs in 3 s of wall time, start-up included, and 500 MB; 16 GPUs in 0.5 s. A
benchmark, not a test.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from gpucalc.catalog import open_catalog
from gpucalc.plan.evaluate import Subject
from gpucalc.plan.resolve import settle
from gpucalc.search import explore
from gpucalc.search.space import AUTO_KEYS, Space
from gpucalc.spec.train_run import TrainRun

ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """One search: a model on GPUs under a framework, with every layout key open."""

    model: str
    gpus: int
    card: str
    run: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("llama-3-8b", 16, "h100-sxm-80gb", {"global_batch": 512, "seq_len": 8192}),
    Case("mixtral-8x7b", 16, "h100-sxm-80gb", {"global_batch": 512, "seq_len": 4096}),
    Case("llama-3-70b", 64, "h100-sxm-80gb", {"global_batch": 1024, "seq_len": 8192}),
    Case("llama-3.1-405b", 16384, "h100-sxm-80gb", {"global_batch": 2048, "seq_len": 8192}),
    Case("megatron-1t", 4096, "h100-sxm-80gb", {"global_batch": 3072, "seq_len": 2048}),
    Case(
        "kimi-k2", 4096, "h100-sxm-80gb",
        {"global_batch": 8192, "seq_len": 4096, "pipeline_split": "uneven"},
    ),
    Case(
        "deepseek-v3", 2048, "h800-sxm-80gb",
        {"global_batch": 15360, "seq_len": 4096, "pipeline_split": "uneven"},
    ),
)  # fmt: skip


def open_run(case: Case) -> TrainRun:
    """The run of a case with every layout key left to the search."""
    stated = {"framework": "megatron", "precision": "bf16", **case.run, **dict.fromkeys(AUTO_KEYS, "auto")}
    return settle(TrainRun.read(stated))[0]


def main() -> None:
    sixteen = "plan models/llama-3-70b --gpus 2x8xH200 --search --json"
    sixteen += " --set run.framework=megatron --set run.global_batch=256"
    for words in (["plan", "megatron-1t", "--json"], sixteen.split()):
        start = time.monotonic()
        program = subprocess.Popen([sys.executable, "-m", "gpucalc", *words], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(program.pid, 0)
        spent = time.monotonic() - start
        program.returncode = os.waitstatus_to_exitcode(status)
        assert program.returncode == 0
        print(
            f"gpucalc {' '.join(words)}: {spent:.2f} s of wall time with start-up,"
            f" {used.ru_maxrss / 1e3:.0f} MB at most"
        )
    catalog = open_catalog()
    for case in CASES:
        subject = Subject.of(catalog.model(case.model))
        cluster = catalog.cluster([(None, case.gpus, case.card)])
        best, legal = float("inf"), 0
        for _ in range(ROUNDS):
            found = explore(subject, Space(subject.graph, open_run(case), cluster), cluster)
            best, legal = min(best, found.seconds), found.legal
        print(
            f"{case.model} on {case.gpus:,} GPUs: {legal:,} layouts in {best:.3f} s of one core,"
            f" {legal / best / 1e6:.2f} million a second"
        )


if __name__ == "__main__":
    main()
