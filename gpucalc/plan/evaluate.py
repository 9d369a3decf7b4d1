"""One job on one cluster to one plan: the wiring of memory, time and cost, and the verdict.

Nothing is searched here: every degree is a number. What is left "auto" is settled by
`gpucalc.search`, which calls the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpucalc.builders.build import build_graph
from gpucalc.counts import Counts, count
from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.formulas.params import padded_table_rows
from gpucalc.graph import Graph
from gpucalc.line import Kind, Line
from gpucalc.num import Num, maximum, minimum, where
from gpucalc.plan.answer import HOST, Assumption, HostFit, Level, Plan, Verdict
from gpucalc.plan.economics import Economics, cost_line, is_long, reliability_line, training_line
from gpucalc.plan.host import host_memory
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.memory import MemoryPeak, memory_peak, running_peak
from gpucalc.plan.rates import throughput
from gpucalc.plan.resolve import LOW_PRECISION, resolve_layout, resolve_recipe
from gpucalc.plan.time import binding, step_time
from gpucalc.spec.hardware import Cluster, Pool
from gpucalc.spec.model import ModelSpec
from gpucalc.spec.run_values import PRECISIONS
from gpucalc.spec.train_run import TrainRun
from gpucalc.units import GB, GIB, percent

# Until a class of runs has been measured: the band in which a plan is called marginal.
UNMEASURED_ERROR = 0.10
# Equal runs differ by this much between machines: reserved over allocated memory spans 1.03 to 1.09.
LEAST_ERROR = 0.05
VOCAB_MULTIPLE = 128  # Megatron's make-vocab-size-divisible-by


@dataclass(frozen=True, slots=True)
class ClassError:
    """How far published runs of one class were from their estimates: fractions."""

    rows: int
    groups: int
    median_abs: float
    p90_abs: float
    signed_median: float

    @property
    def basis(self) -> str:
        """The evidence in words."""
        runs = "run" if self.rows == 1 else "runs"
        sources = "source" if self.groups == 1 else "sources"
        return (
            f"median over {self.rows} published {runs} of {self.groups} {sources};"
            f" nine in ten within {percent(self.p90_abs, 1 if self.p90_abs < 0.01 else 0)}"
        )


@dataclass(frozen=True, slots=True)
class ErrorTable:
    """Expected errors by framework, recorded by `gpucalc validate`."""

    memory: Mapping[str, ClassError] = field(default_factory=dict)
    time: Mapping[str, ClassError] = field(default_factory=dict)
    decode: Mapping[str, ClassError] = field(default_factory=dict)  # serving, one request at a time
    batched: Mapping[str, ClassError] = field(default_factory=dict)  # serving, many requests in flight

    def memory_error(self, framework: str) -> tuple[float, str]:
        """The expected error of a peak as a fraction, and where it comes from."""
        return self._expected(self.memory, framework)

    def time_error(self, framework: str) -> tuple[float, str]:
        """The expected error of a step time as a fraction, and where it comes from."""
        error, basis = self._expected(self.time, framework)
        return error, f"{basis}; equal runs differ by 10 to 30 % between software releases, see run.year"

    def serving_error(self, engine: str, *, alone: bool) -> tuple[float, str]:
        """The expected error of a deployment's rates as a fraction, and where it comes from."""
        return self._expected(self.decode if alone else self.batched, engine)

    def _expected(self, table: Mapping[str, ClassError], framework: str) -> tuple[float, str]:
        found = table.get(framework)
        if found is None or found.groups < 1:
            return UNMEASURED_ERROR, "no published run of this class; a cautious band"
        if found.median_abs < LEAST_ERROR:
            return LEAST_ERROR, f"the spread of allocators and clocks; {found.basis}"
        return found.median_abs, found.basis


@dataclass(frozen=True, slots=True)
class Subject:
    """A model ready to be planned: its graph and counts, made once for many plans."""

    spec: ModelSpec
    graph: Graph
    counts: Counts
    draft: Subject | None = None  # of the model that drafts for it
    held: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)  # by layout and recipe

    @classmethod
    def of(cls, spec: ModelSpec, draft: ModelSpec | None = None) -> Subject:
        """The graph and counts of a description. Raises UnsupportedModel or InputError."""
        graph = build_graph(spec)
        return cls(spec, graph, count(graph), draft=cls.of(draft) if draft is not None else None)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a plan is called, and what it rests on beside its model, run and cards.

    always_time: give time and rates even where memory says no (comparing with a run that did fit).
    economics: what energy, money and failures rest on; without it cost is GPU-hours and rent alone.
    """

    name: str
    fleet: str
    assumptions: tuple[Assumption, ...] = ()
    notes: tuple[str, ...] = ()
    errors: ErrorTable | None = None
    always_time: bool = False
    economics: Economics | None = None


def evaluate(subject: Subject, run: TrainRun, cluster: Cluster, terms: Terms) -> Plan:
    """The plan of a settled run whose degrees are all numbers.

    Raises Infeasible for an illegal layout, InputError for what the hardware cannot do.
    """
    layout, chosen = resolve_layout(run, subject.graph, gpus=cluster.count)
    recipe = resolve_recipe(run, subject.graph)
    peak = memory_peak(
        subject.graph,
        layout,
        recipe,
        hopper_or_later=hopper_or_later(cluster),
        ampere_or_later=ampere_or_later(cluster),
        nvlink=cluster.nvlink_domain > 1,
    )
    known, economics = terms.errors or ErrorTable(), terms.economics
    verdict = judge(peak, cluster, recipe, known)
    _known_well_enough(subject, verdict)
    verdict = with_host(verdict, run, subject.graph, layout, recipe, cluster)
    for pool in cluster.pools:
        if pool.gpu.peak(recipe.math) is None:
            raise InputError(
                f"{pool.gpu.name} has no {recipe.math} rate",
                key="run.precision",
                given=run.precision,
                legal=[name for name in PRECISIONS if _all_have(cluster, name)],
            )
    time = rates = cost = reliability = None
    binds = "host memory" if verdict.host_decides else "memory capacity"
    if terms.always_time or verdict.level is not Level.DOES_NOT_FIT:
        time = step_time(subject.graph, layout, recipe, cluster, simulated=True)
        rates = throughput(subject.graph, layout, recipe, cluster, time)
        training = training_line(run, time, rates)
        if economics is not None and is_long(run, cluster):
            reliability = reliability_line(
                subject.graph, layout, recipe, cluster, economics.failures, step=time, training=training
            )
        cost = cost_line(
            cluster,
            rates.child("tokens_per_s"),
            economics.money if economics is not None else None,
            training=training,
            goodput=reliability.child("goodput") if reliability is not None else None,
        )
        binds = binding(time)
    listed = [*terms.assumptions, *chosen]
    listed += [Assumption("gpus", "", text) for text in cluster.assumptions]
    if economics is not None:
        listed += economics.assumed(costs=cost is not None, failures=reliability is not None)
    return Plan(
        name=terms.name,
        model=model_line(subject.counts),
        fleet=terms.fleet,
        gpus=cluster.count,
        recipe=recipe,
        layout=layout,
        verdict=verdict,
        memory=peak.tree,
        time=time,
        throughput=rates,
        cost=cost,
        reliability=reliability,
        speed_error=known.time_error(recipe.framework) if time is not None else None,
        binds=binds,
        assumptions=tuple(listed),
        actions=(),
        notes=(
            *subject.graph.notes,
            *network_notes(subject.graph, recipe),
            *terms.notes,
            *_padding_notes(subject.graph, recipe, layout),
            *fleet_notes(cluster),
        ),
    )


def _padding_notes(graph: Graph, recipe: Recipe, layout: Layout) -> tuple[str, ...]:
    """What Megatron adds to a vocabulary so that tensor ranks hold equal shares of its tables."""
    if recipe.framework != "megatron" or graph.embedding is None:
        return ()
    vocab, width = graph.embedding.vocab, graph.embedding.width
    rows = int(padded_table_rows(vocab=vocab, multiple=VOCAB_MULTIPLE, tp=layout.tp))
    if rows == vocab:
        return ()
    tables = 1 if graph.head is None or graph.head.tied else 2
    return (
        f"Megatron pads the vocabulary of {vocab:,} to {rows:,} rows ({VOCAB_MULTIPLE} x tp {layout.tp}):"
        f" {tables * (rows - vocab) * width:,} parameters that are not counted here",
    )


def _all_have(cluster: Cluster, precision: str) -> bool:
    """Whether every GPU kind has a rate for a run's precision."""
    base = precision.removesuffix("-pure")
    math = LOW_PRECISION.get(base, base)
    return all(pool.gpu.peak(math) is not None for pool in cluster.pools)


def _known_well_enough(subject: Subject, verdict: Verdict) -> None:
    """Raises UnsupportedModel where only parameters are known, unless they alone are too much."""
    network = subject.graph.network
    if network is None or subject.graph.stacks:
        return
    missing = [
        name
        for name, value in (
            ("forward FLOPs", network.forward_flops),
            ("elements saved for backward", network.saved_elements),
        )
        if not value
    ]
    if missing and verdict.level is not Level.DOES_NOT_FIT:
        alone = verdict.needed.value / GIB
        raise UnsupportedModel(
            f"{subject.graph.name} is known by its parameters alone: {' and '.join(missing)} are not known;"
            f" without them a GPU holds {alone:.1f} GiB of {verdict.capacity.value / GIB:.1f}",
            key="model",
        )


def judge(peak: MemoryPeak, cluster: Cluster, recipe: Recipe, errors: ErrorTable) -> Verdict:
    """Whether the peak fits the smallest card, beyond the expected error or within it.

    A peak that rests on how weights are assumed to be loaded makes a plan marginal at most.
    """
    capacity = cluster.usable_memory(recipe.in_use_bytes)
    needed = peak.needed
    error, basis = errors.memory_error(recipe.framework)
    level = tuple(Level)[memory_rank(peak.tree, capacity.value, error, recipe)]
    parts = needed.child("allocated").children
    return Verdict(
        level=level,
        needed=needed,
        capacity=capacity,
        margin_bytes=capacity.value - needed.value,
        expected_error=error,
        error_basis=basis,
        binds=max(parts, key=lambda line: line.value).name,
        phase=peak.phase,
        stage=peak.stage,
    )


def memory_rank(tree: Line, capacity_bytes: float, error: float, recipe: Recipe) -> Num:
    """The level a memory tree leads to, by its place among the levels; also of columns."""
    rank = level_rank(tree.value, capacity_bytes, error)
    if not recipe.load_assumed:
        return rank
    running = level_rank(running_peak(tree), capacity_bytes, error)
    return maximum(running, minimum(rank, 1))


def with_host(
    verdict: Verdict, run: TrainRun, graph: Graph, layout: Layout, recipe: Recipe, cluster: Cluster
) -> Verdict:
    """The verdict with the host's memory weighed in.

    The memory of a server nobody named makes a plan marginal at most.
    """
    ranks = min(cluster.gpus_per_node, cluster.count)
    needed = host_memory(graph, layout, recipe, ranks=ranks, nodes=max(1, cluster.count // ranks))
    if needed is None:
        return verdict
    capacity = _host_ram(run, cluster)
    level = tuple(Level)[host_rank(needed, run, cluster)]
    phase = max(needed.children, key=lambda line: line.value).name
    host = HostFit(needed, capacity, level, phase)
    order = list(Level)
    if order.index(level) <= order.index(verdict.level):
        return replace(verdict, host=host)
    return replace(verdict, host=host, level=level, binds=HOST)


def host_rank(needed: Line, run: TrainRun, cluster: Cluster) -> Num:
    """The level that a node's host memory leads to, by its place among the levels; also of columns."""
    capacity = _host_ram(run, cluster)
    if capacity is None:
        return 0
    rank = level_rank(needed.value, capacity.value, UNMEASURED_ERROR)
    return rank if run.host_ram_gb is not None else minimum(rank, 1)


def _host_ram(run: TrainRun, cluster: Cluster) -> Line | None:
    if run.host_ram_gb is None:
        return cluster.host_ram
    return Line("host_ram", run.host_ram_gb * GB, "bytes", Kind.EXACT, source="run.host_ram_gb")


def level_rank(needed_bytes: Num, capacity_bytes: float, error: float) -> Num:
    """0 fits, 1 marginal, 2 does not, as `level_of`; of numbers or columns."""
    return where(
        needed_bytes * (1 + error) <= capacity_bytes,
        0,
        where(needed_bytes * (1 - error) <= capacity_bytes, 1, 2),
    )


def level_of(needed: float, capacity: float, error: float) -> Level:
    """Fits or not beyond the expected error, a fraction of what is needed; marginal within it."""
    return tuple(Level)[level_rank(needed, capacity, error)]


def hopper_or_later(cluster: Cluster) -> bool:
    """Whether cuBLAS takes its large workspace on any of the GPUs (compute capability 9.0 and up)."""
    return any(pool.gpu.capability_major >= 9 for pool in cluster.pools)


def ampere_or_later(cluster: Cluster) -> bool:
    """Whether any of the GPUs is of compute capability 8.0 and up, or of none that is known."""
    return any(not 0 < pool.gpu.capability_major < 8 for pool in cluster.pools)


def model_line(counts: Counts) -> Line:
    """Parameters of the model, active ones and parts beneath."""
    tree = counts.total
    return Line(
        "model",
        tree.value,
        tree.unit,
        tree.kind,
        children=(counts.active, Line("total", tree.value, tree.unit, tree.kind, children=tree.children)),
        note="parameters, counted from the architecture",
    )


def network_notes(graph: Graph, recipe: Recipe) -> tuple[str, ...]:
    """What memory leaves out of a network that is known by its totals."""
    if graph.stacks:
        return ()
    told = [
        "cuDNN's workspaces are not counted; with torch.backends.cudnn.benchmark = True they have tripled a"
        " peak (open-mmlab/mmsegmentation issues 1184 and 1215)"
    ]
    if recipe.recompute != "none":
        told.append(
            f"recompute {recipe.recompute} changes nothing here: what it would keep of a network known by its"
            " totals is not known"
        )
    return tuple(told)


def fleet_notes(cluster: Cluster) -> tuple[str, ...]:
    """What a mixed fleet means: the smallest card sizes it, the slowest paces it."""
    if len(cluster.pools) < 2:
        return ()
    smallest = min(cluster.pools, key=lambda pool: pool.gpu.usable_memory().value)
    slowest = min(cluster.pools, key=lambda pool: _rate(pool))
    return (
        f"mixed fleet: {smallest.gpu.name} has the least memory and sizes every rank;"
        f" {slowest.gpu.name} is the slowest and paces every step",
    )


def _rate(pool: Pool) -> float:
    peak = pool.gpu.peak("bf16") or pool.gpu.peak("fp16") or pool.gpu.peak("fp32")
    return float(peak.value) if peak is not None else 0.0
