"""What is predicted of a published training run: memory by every meter, step time, and the work in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.errors import InputError
from gpucalc.graph import Attention
from gpucalc.measured import on_stated_network
from gpucalc.measured_runs import Ready
from gpucalc.plan.evaluate import Subject, ampere_or_later, hopper_or_later
from gpucalc.plan.memory import allocated_peak, memory_peak, reserved_peak
from gpucalc.plan.rates import sample_flops, sample_tokens
from gpucalc.plan.resolve import resolve_layout, resolve_recipe, settle
from gpucalc.plan.time import step_time
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.job import Job
from gpucalc.spec.train_run import TrainRun


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is predicted for one run. Speed is None when only memory was asked for."""

    allocated_bytes: float
    reserved_bytes: float
    device_bytes: float
    capacity_bytes: float
    arch: str
    gpus: int
    step_s: float | None = None
    samples: float = 0.0  # per step, whole run
    tokens: float = 0.0
    model_flops: float = 0.0  # per step, whole run, attention counted in full
    causal_model_flops: float = 0.0
    hardware_flops: float = 0.0
    peak_flops_per_s: float = 0.0

    def memory(self, meter: str) -> float:
        """The bytes a meter of that kind would show."""
        return {
            "allocated": self.allocated_bytes,
            "reserved": self.reserved_bytes,
            "device": self.device_bytes,
        }[meter]


class TrainingPlanner:
    """Estimates jobs with the planner; models and clusters are built once per distinct value."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._subjects: dict[str, Subject] = {}
        self._clusters: dict[str, Cluster] = {}
        self._done: dict[tuple[str, str, str, bool], Estimate] = {}

    def __call__(self, ready: Ready, speed: bool) -> Estimate:
        """The estimate of a job; `speed` False leaves the step time out. Raises GpucalcError."""
        job = ready.job
        if not isinstance(job.run, TrainRun):
            raise InputError("only training runs are compared", key="run.task", given=job.run.task)
        model, gpus = repr(job.model), f"{job.gpus} {job.system} {ready.network}"
        kept = job.run.model_copy(update={"precision_detail": None, "workload": None, "stack": None})
        key = (model, gpus, repr(kept), speed)
        if key not in self._done:
            self._done[key] = self._estimate(
                self._subject(job, model), self._cluster(ready, gpus), job.run, speed
            )
        return self._done[key]

    def _subject(self, job: Job, key: str) -> Subject:
        if key not in self._subjects:
            self._subjects[key] = Subject.of(self.catalog.model_of(job.model))
        return self._subjects[key]

    def _cluster(self, ready: Ready, key: str) -> Cluster:
        if key not in self._clusters:
            cluster = self.catalog.cluster(ready.job.fleet.parts, ready.job.system)
            if ready.network is not None and cluster.inter is not None:
                kind = self.catalog.collective(ready.network.kind)
                rate = ready.network.gbit_per_s * (cluster.island if ready.network.per_gpu else 1)
                cluster = on_stated_network(cluster, kind, rate)
            self._clusters[key] = cluster
        return self._clusters[key]

    def _estimate(self, subject: Subject, cluster: Cluster, stated: TrainRun, speed: bool) -> Estimate:
        run, _ = settle(stated)
        graph, pool = subject.graph, cluster.pools[0]
        layout, _ = resolve_layout(run, graph, gpus=cluster.count)
        recipe = resolve_recipe(run, graph)
        peak = memory_peak(
            graph,
            layout,
            recipe,
            hopper_or_later=hopper_or_later(cluster),
            ampere_or_later=ampere_or_later(cluster),
            nvlink=cluster.nvlink_domain > 1,
        )
        memory: dict[str, Any] = {
            "allocated_bytes": allocated_peak(peak.tree),
            "reserved_bytes": reserved_peak(peak.tree),
            "device_bytes": float(peak.needed.value),
            "capacity_bytes": float(pool.gpu.usable_memory().value),
            "arch": pool.gpu.arch,
            "gpus": layout.world,
        }
        if not speed:
            return Estimate(**memory)
        rate = pool.gpu.peak(recipe.math)
        if rate is None:
            raise InputError(
                f"{pool.gpu.name} has no {recipe.math} rate", key="run.precision", given=run.precision
            )
        step = step_time(graph, layout, recipe, cluster, simulated=True)
        linear, attention = (float(part) for part in sample_flops(graph, recipe))
        mixer = graph.trunk.blocks[0].mixer if graph.stacks else None
        whole = (
            2.0 if isinstance(mixer, Attention) and mixer.causal else 1.0
        )  # causal halves are counted once
        batch = layout.global_batch
        model = 3.0 * batch * (linear + whole * attention)
        return Estimate(
            **memory,
            step_s=float(step.value),
            samples=float(batch),
            tokens=float(batch * sample_tokens(graph, recipe)),
            model_flops=model,
            causal_model_flops=3.0 * batch * (linear + attention),
            hardware_flops=model * (4.0 / 3.0 if recipe.recompute == "full" else 1.0),
            peak_flops_per_s=float(rate.value),
        )
