"""What is predicted of a published deployment: memory, tokens of cache, whether it starts, and speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpucalc.builders.build import build_graph
from gpucalc.catalog import Catalog
from gpucalc.counts import count
from gpucalc.errors import InputError
from gpucalc.graph import Graph
from gpucalc.line import Line
from gpucalc.measured_deployments import Deployment
from gpucalc.measured_serving import Logged, Rate
from gpucalc.plan.serve_memory import serving_memory
from gpucalc.plan.serve_parts import Logged as MemoryLog
from gpucalc.plan.serve_resolve import serve_layout, serve_recipe
from gpucalc.plan.serve_time import serving_time
from gpucalc.plan.serving_layout import ServeLayout, ServeRecipe, ServingMemory
from gpucalc.spec.engine import EngineEra, EngineSpec
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.job import Job
from gpucalc.spec.model import ModelSpec
from gpucalc.spec.serve_run import ServeRun


@dataclass(frozen=True, slots=True)
class Memory:
    """What is predicted of a deployment's memory: bytes of one GPU, tokens of one cache."""

    weights: float
    activation_peak: float
    kv_cache: float
    kv_tokens: float
    kv_tokens_given: float | None  # with the logged activations, where there are any
    totals: Mapping[str, float]  # over all GPUs, by what a meter counts: held | allocated | device
    needed: float
    capacity: float
    uncertain: float
    refusal: str | None
    arch: str


@dataclass(frozen=True, slots=True)
class _Served:
    """A deployment resolved: what the formulas take."""

    graph: Graph
    layout: ServeLayout
    recipe: ServeRecipe
    engine: EngineSpec
    era: EngineEra
    cluster: Cluster


class ServingPlanner:
    """Estimates deployments with the planner; whatever distinct rows share is worked out once."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._models: dict[str, tuple[ModelSpec, Graph]] = {}
        self._clusters: dict[str, Cluster] = {}
        self._resolved: dict[str, _Served] = {}
        self._memories: dict[tuple[str, MemoryLog, int | None], ServingMemory] = {}

    def memory(self, deployment: Deployment, logged: Logged) -> Memory:
        """The memory of a deployment. Raises GpucalcError."""
        served = self._served(deployment.job)
        stated = MemoryLog(total=deployment.gpu_memory_bytes)
        found = self._memory(deployment.job, stated)
        first = self._memory(deployment.job, stated, stage_index=0)  # the rank whose log is printed
        told = None
        if logged.activation_peak is not None:
            told = replace(stated, activation_peak=logged.activation_peak, non_torch=logged.non_torch)
        elif logged.kv_cache is not None:
            told = replace(stated, pool=logged.kv_cache)
        tokens = None
        if told is not None:
            tokens = float(self._memory(deployment.job, told, stage_index=0).kv_tokens.value)
            if served.layout.pp > 1:  # other ranks may hold fewer
                tokens = min(tokens, float(found.kv_tokens.value))
        each = float(found.kv_bytes_per_token.value)
        # SGLang logs recurrent states apart from the cache of keys and values.
        apart = served.recipe.engine == "sglang" and bool(found.state_bytes.value)
        if apart and logged.kv_cache is not None:
            tokens = logged.kv_cache / each
        parts = {line.name: float(line.value) for line in first.tree.children}
        weights = first.weights
        return Memory(
            weights=float(weights.value),
            activation_peak=_activation_peak(first, parts),
            kv_cache=float(found.kv_tokens.value) * each if apart else parts.get("kv_cache", 0.0),
            kv_tokens=float(found.kv_tokens.value),
            kv_tokens_given=tokens,
            totals={
                "held": (weights.value + parts.get("kv_cache", 0.0)) * served.layout.gpus,
                "allocated": (found.tree.value - parts.get("non_torch", 0.0)) * served.layout.gpus,
                "device": found.tree.value * served.layout.gpus,
            },
            needed=float(found.needed.value),
            capacity=float(found.capacity.value),
            uncertain=float(found.uncertain_bytes),
            refusal=found.refusal,
            arch=served.cluster.pools[0].gpu.arch,
        )

    def speed(self, deployment: Deployment, rate: Rate, logged: Logged) -> tuple[float, str]:
        """The speed a rate counts, and the architecture it is of. Raises GpucalcError."""
        job = deployment.prompt_job if rate.kind == "prefill" else deployment.decode_job
        served = self._served(job)
        arch = served.cluster.pools[0].gpu.arch
        isl, osl, load = rate.isl, rate.osl, rate.concurrency
        if rate.kind == "prefill":
            self._possible(served, rate)
        if rate.kind == "decode":
            isl, osl = 1, 2 * rate.isl + rate.osl  # the same mean context, and no prompt to speak of
        tokens = logged.kv_tokens or self._kv_tokens(job, deployment, logged)
        time = serving_time(
            served.graph,
            served.layout,
            served.recipe,
            served.engine,
            served.cluster,
            concurrency=load,
            isl=isl,
            osl=osl,
            kv_tokens=max(tokens, isl + osl) if load == 1 else tokens,
        )
        if rate.kind == "prefill":
            return rate.isl / float(time.prefill_s.value), arch
        if rate.kind == "decode":
            return load / float(time.decode_step_s.value), arch
        output = float(time.output_tokens_per_s.value)
        return output * ((isl + osl) / osl if rate.kind == "all" else 1.0), arch

    def _possible(self, served: _Served, rate: Rate) -> None:
        """Refuse what no GPU can have computed, and prompts that were timed together."""
        if rate.concurrency > 1:
            raise InputError("a batch of prompts timed together is not planned", key="run.concurrency")
        weights, gpu = served.recipe.weights, served.cluster.pools[0].gpu
        names = [weights.math] if weights.computes_quantised else [served.recipe.dtype, "fp16_fp16acc"]
        peaks = [float(peak.value) for name in names if (peak := gpu.peak(name)) is not None]
        needed = 2 * float(count(served.graph).active.value) * rate.value
        if peaks and needed > max(peaks) * served.cluster.count:
            raise InputError("faster than the GPU multiplies: the prompt was in a cache", key=rate.source)

    def _kv_tokens(self, job: Job, deployment: Deployment, logged: Logged) -> float:
        log = MemoryLog(total=deployment.gpu_memory_bytes, pool=logged.kv_cache)
        return float(self._memory(job, log).kv_tokens.value)

    def _memory(self, job: Job, log: MemoryLog, *, stage_index: int | None = None) -> ServingMemory:
        served = self._served(job)
        if served.layout.pp == 1:
            stage_index = None  # the only stage decides
        key = (repr((job.model, job.gpus, served.layout, served.recipe)), log, stage_index)
        if key not in self._memories:
            self._memories[key] = serving_memory(
                served.graph,
                served.layout,
                served.recipe,
                served.era,
                served.cluster,
                logged=log,
                stage_index=stage_index,
            )
        return self._memories[key]

    def _served(self, job: Job) -> _Served:
        run = job.run
        if not isinstance(run, ServeRun):
            raise InputError("only deployments are compared here", key="run.task", given=run.task)
        key = repr((job.model, job.gpus, run))
        if key not in self._resolved:
            spec, graph = self._model(job)
            cluster = self._cluster(job)
            engine = self.catalog.load("engines", run.framework, EngineSpec)
            layout, _ = serve_layout(run, graph, gpus=cluster.count)
            recipe, era, _ = serve_recipe(run, spec, graph, engine, cluster, layout)
            self._resolved[key] = _Served(graph, layout, recipe, engine, era, cluster)
        return self._resolved[key]

    def _model(self, job: Job) -> tuple[ModelSpec, Graph]:
        key = repr(job.model)
        if key not in self._models:
            spec = self.catalog.model_of(job.model)
            self._models[key] = (spec, build_graph(spec))
        return self._models[key]

    def _cluster(self, job: Job) -> Cluster:
        key = str(job.gpus)
        if key not in self._clusters:
            self._clusters[key] = self.catalog.cluster(job.fleet)
        return self._clusters[key]


def _activation_peak(found: ServingMemory, parts: Mapping[str, float]) -> float:
    """The profiled peak: a part of the tree unless the sampler's dry run is larger."""
    inside = found.pool.inputs.get("activation_peak_bytes")
    if isinstance(inside, Line):
        return float(inside.value)
    return parts.get("activation_peak", 0.0)
