"""The product's own error: every published run against its estimate, per point and in summary.

A point is one quantity of one run: peak memory in bytes, as the meter of its source counts it, or
throughput in the unit its source used. A point's ratio is estimated over measured; its error is the
ratio less one. Rows of a group (one source) are not independent, so the headline statistics give
every group the same weight; row-weighted ones stand beside them. Runs reported as fitting or as
out of memory test the verdict as well. Measured collectives are points too: bus bandwidth by size.
Deployments are compared in `validate_serving`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.errors import GpucalcError, InputError
from gpucalc.graph import Attention
from gpucalc.measured import (
    COLLECTIVES,
    SERVING,
    TRAINING,
    Conventions,
    Row,
    Skip,
    is_number,
    read_rows,
    shipped,
)
from gpucalc.measured_collectives import LARGE, SMALL, CollectivePlanner, Comparison, is_collective
from gpucalc.measured_deployments import ServingNormaliser
from gpucalc.measured_meters import Meter
from gpucalc.measured_runs import Network, Normaliser, Ready, conventions_of
from gpucalc.measured_serving import is_serving
from gpucalc.plan.answer import Level
from gpucalc.plan.evaluate import UNMEASURED_ERROR, ErrorTable, Subject, hopper_or_later, level_of
from gpucalc.plan.memory import allocated_peak, memory_peak, reserved_peak
from gpucalc.plan.rates import sample_flops, sample_tokens
from gpucalc.plan.resolve import resolve_layout, resolve_recipe, settle
from gpucalc.plan.time import step_time
from gpucalc.points import Point, Skipped, Statistics, statistics, tally
from gpucalc.spec.figure import Figure, FigureKind
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.job import Job, ServeRun, TrainRun
from gpucalc.spec.model import ModelSpec
from gpucalc.validate_serving import QUANTITIES as SERVING_QUANTITIES
from gpucalc.validate_serving import ServingPlanner, Start, compare_serving, promises_broken, start_counts

SCHEMA_VERSION = 1
RUN_QUANTITIES = ("peak_memory", "throughput")  # of training runs
QUANTITIES = (*RUN_QUANTITIES, "collective", *SERVING_QUANTITIES)
MOST_HEADROOM = 0.10  # free memory promised to a run that then ran out: never more than this
PARTS = ("group", "framework", "arch", "gpu", "model", "quant", "op", "link", "size")
_SUMMARY_PARTS = {
    "collective": ("size", "op", "link", "arch", "group"),
    **dict.fromkeys(SERVING_QUANTITIES, ("framework", "arch", "gpu", "quant", "group")),
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the estimates promise over groups of equal weight; `skipped` is a share of all rows.

    Collectives promise a mean, over groups and over values alike: 1 MB and more, and below.
    """

    peak_memory_median: float = 0.08
    throughput_median: float = 0.10
    collective_large_mean: float = 0.10
    collective_small_mean: float = 0.20
    skipped: float = 0.20


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


Estimator = Callable[[Ready, bool], Estimate]


@dataclass(frozen=True, slots=True)
class FitCase:
    """A run known to fit or not, and what the estimate says of the memory it needs."""

    id: str
    group: str
    fitted: bool
    needed_bytes: float
    capacity_bytes: float
    expected_error: float = UNMEASURED_ERROR  # the margin within which a plan says marginal

    @property
    def level(self) -> Level:
        """What a plan would say."""
        return level_of(self.needed_bytes, self.capacity_bytes, self.expected_error)

    @property
    def right(self) -> bool:
        """Whether the estimate agrees; marginal, within the stated margin, agrees with either."""
        return self.level is (Level.FITS if self.fitted else Level.DOES_NOT_FIT) or self.marginal

    @property
    def marginal(self) -> bool:
        """Whether the estimate is too close to tell."""
        return self.level is Level.MARGINAL

    @property
    def headroom(self) -> float:
        """Share of the memory the estimate leaves free."""
        return 1.0 - self.needed_bytes / self.capacity_bytes


@dataclass(frozen=True, slots=True)
class Report:
    """Every comparison made, every one that was not, and the statistics of both."""

    rows: int  # read and selected
    points: tuple[Point, ...]
    skipped: tuple[Skipped, ...]
    fits: tuple[FitCase, ...]
    quantities: tuple[str, ...] = QUANTITIES
    files: tuple[str, ...] = field(default=())
    undecided: tuple[Skipped, ...] = ()  # known to fit or not, but without a fact the verdict needs
    starts: tuple[Start, ...] = ()  # deployments known to have started or not

    def of(self, quantity: str) -> tuple[Point, ...]:
        """The points of one quantity."""
        return tuple(point for point in self.points if point.quantity == quantity)

    def summary(self, quantity: str) -> Statistics:
        """The statistics of one quantity over everything."""
        left_out = sum(1 for one in self.skipped if one.quantity == quantity)
        return statistics(self.of(quantity), skipped=left_out)

    def breakdown(self, quantity: str, part: str) -> dict[str, Statistics]:
        """The statistics by one of PARTS, the largest error first; empty where it says nothing."""
        cells: dict[str, list[Point]] = {}
        for point in self.of(quantity):
            if name := getattr(point, part):
                cells.setdefault(name, []).append(point)
        found = {name: statistics(points) for name, points in cells.items()}
        return dict(sorted(found.items(), key=lambda item: -(item[1].median_abs or 0.0)))

    def reasons(self, quantity: str | None = None) -> dict[str, int]:
        """How many rows were skipped for each reason, the commonest first."""
        return tally(one for one in self.skipped if quantity is None or one.quantity == quantity)

    @property
    def rows_skipped(self) -> int:
        """Rows with something measured of which nothing was compared."""
        compared = {point.id for point in self.points} | {start.id for start in self.starts}
        return len({one.id for one in self.skipped} - compared)

    def broken(self, bounds: Bounds | None = None) -> tuple[str, ...]:
        """The promises these comparisons break, as sentences."""
        promised = bounds or Bounds()
        out = []
        for quantity, limit in (
            ("peak_memory", promised.peak_memory_median),
            ("throughput", promised.throughput_median),
        ):
            median = self.summary(quantity).median_abs
            if quantity in self.quantities and median is not None and median > limit:
                out.append(f"{quantity}: median error {median:.1%} is above {limit:.0%}")
        if "collective" in self.quantities:
            by_size = self.breakdown("collective", "size")
            for size, limit in (
                (LARGE, promised.collective_large_mean),
                (SMALL, promised.collective_small_mean),
            ):
                found = by_size.get(size)
                mean = max(found.mean_abs or 0.0, found.mean_abs_rows or 0.0) if found else 0.0
                if mean > limit:
                    out.append(f"collective {size}: mean error {mean:.1%} is above {limit:.0%}")
        out += promises_broken({name: self.summary(name) for name in self.quantities}, self.starts)
        if self.rows and self.rows_skipped > promised.skipped * self.rows:
            out.append(f"{self.rows_skipped} of {self.rows} rows skipped, above {promised.skipped:.0%}")
        return tuple(out)

    def document(self) -> dict[str, Any]:
        """The report as a JSON document. Ratios and errors are fractions."""
        summary: dict[str, Any] = {}
        for quantity in self.quantities:
            summary[quantity] = self.summary(quantity).document() | {
                f"by_{part}": {
                    name: found.document() for name, found in sorted(self.breakdown(quantity, part).items())
                }
                for part in _SUMMARY_PARTS.get(quantity, ("framework", "arch", "group"))
            }
        if "verdict" in summary:
            summary["verdict"] = start_counts(self.starts) | {"skipped": self.summary("verdict").skipped}
        return {
            "schema_version": SCHEMA_VERSION,
            "rows": self.rows,
            "rows_skipped": self.rows_skipped,
            "summary": summary,
            "fits": fit_counts(self.fits),
            "skip_reasons": {quantity: self.reasons(quantity) for quantity in self.quantities},
            "undecided_reasons": tally(self.undecided),
            "points": [point.document() for point in self.points],
            "starts": [start.document() for start in self.starts],
            "skipped": [
                {"id": one.id, "quantity": one.quantity, "reason": one.reason, "group": one.group}
                for one in self.skipped
            ],
        }


# -- statistics -----------------------------------------------------------------------------------


def fit_counts(cases: Sequence[FitCase]) -> dict[str, int]:
    """How often the verdict agrees with what happened."""
    return {
        "rows": len(cases),
        "right": sum(case.right for case in cases),
        "marginal": sum(case.marginal for case in cases),
        "says_fits_ran_out": sum(not case.right and not case.fitted for case in cases),
        "says_too_large_ran": sum(not case.right and case.fitted for case in cases),
        "ran_out": sum(not case.fitted for case in cases),
        "says_room_ran_out": sum(
            not case.fitted and case.level is Level.FITS and case.headroom > MOST_HEADROOM for case in cases
        ),
    }


# -- what a row measured --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reading:
    """A measured speed: its value, unit, and how an estimate is expressed the same way."""

    value: float
    unit: str
    of: Callable[[Estimate], float]
    source: str


_OTHER_LENGTHS = re.compile(r"sequences are shorter\s+than")


def speed_of(row: Row) -> Reading | Skip | None:
    """The speed a row states. Where it states several: tokens, then samples, step time, TFLOPs, MFU.

    None when the row states none.
    """
    m = row.measured
    if is_number(m.get("tokens_per_s_per_gpu")):
        return Reading(m["tokens_per_s_per_gpu"], "tokens/s/GPU", _tokens_rate, "tokens_per_s_per_gpu")
    if is_number(m.get("samples_per_s")):
        return Reading(m["samples_per_s"], "samples/s", _samples_rate, "samples_per_s")
    if is_number(m.get("step_time_s")):
        return Reading(1.0 / m["step_time_s"], "steps/s", _steps_rate, "step_time_s")
    if is_number(m.get("tflops_per_gpu")):
        rate = _FLOPS.get(str(m.get("tflops_kind")))
        if rate is None:
            return Skip("measured.tflops_kind not stated")
        return Reading(m["tflops_per_gpu"], "TFLOP/s/GPU", rate, "tflops_per_gpu")
    for key in ("mfu", "hfu"):
        if is_number(m.get(key)):
            return Reading(m[key], "fraction of peak", _UTILISATION[key], key)
    if m.get("microbatch_iter_time_s") is not None:
        return Skip("measured.microbatch_iter_time_s is at the mean sample length, not at run.seq_len")
    if m.get("wall_hours") is not None or m.get("gpu_hours") is not None:
        return Skip("run.tokens not stated, so hours give no speed")
    return None


def _per_second(amount: float, e: Estimate) -> float:
    assert e.step_s is not None
    return amount / e.step_s


def _tokens_rate(e: Estimate) -> float:
    return _per_second(e.tokens, e) / e.gpus


def _samples_rate(e: Estimate) -> float:
    return _per_second(e.samples, e)


def _steps_rate(e: Estimate) -> float:
    return _per_second(1.0, e)


def _flops_rate(name: str, scale: float) -> Callable[[Estimate], float]:
    def rate(e: Estimate) -> float:
        return _per_second(float(getattr(e, name)), e) / e.gpus / scale

    return rate


_FLOPS = {
    "model": _flops_rate("model_flops", 1e12),
    "model-causal": _flops_rate("causal_model_flops", 1e12),
    "hardware": _flops_rate("hardware_flops", 1e12),
}


def _utilisation(name: str) -> Callable[[Estimate], float]:
    rate = _flops_rate(name, 1.0)

    def share(e: Estimate) -> float:
        return rate(e) / e.peak_flops_per_s

    return share


_UTILISATION = {"mfu": _utilisation("model_flops"), "hfu": _utilisation("hardware_flops")}


# -- estimating -----------------------------------------------------------------------------------


class Planner:
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
            stated = job.model
            spec = (
                self.catalog.model(stated) if isinstance(stated, str) else ModelSpec.read(stated, key="model")
            )
            self._subjects[key] = Subject.of(spec)
        return self._subjects[key]

    def _cluster(self, ready: Ready, key: str) -> Cluster:
        if key not in self._clusters:
            cluster = self.catalog.cluster(ready.job.fleet.parts, ready.job.system)
            if ready.network is not None and cluster.inter is not None:
                cluster = self._on_network(cluster, ready.network)
            self._clusters[key] = cluster
        return self._clusters[key]

    def _on_network(self, cluster: Cluster, network: Network) -> Cluster:
        """The cluster with the network its source names in place of the default server's."""
        rate = network.gbit_per_s * (cluster.island if network.per_gpu else 1)
        card = Figure(
            value=rate, unit="Gbit/s", kind=FigureKind.DATASHEET, source=("the measured run's own words",)
        )
        return replace(
            cluster,
            inter=self.catalog.collective(network.kind).on_network(card, cluster.island, cluster.intra),
            nic_bandwidth_per_node=card.line("nic_bandwidth_per_node"),
        )

    def _estimate(self, subject: Subject, cluster: Cluster, stated: TrainRun, speed: bool) -> Estimate:
        run, _ = settle(stated)
        graph, pool = subject.graph, cluster.pools[0]
        layout, _ = resolve_layout(run, graph, gpus=cluster.count)
        recipe = resolve_recipe(run, graph)
        peak = memory_peak(
            graph, layout, recipe, hopper_or_later=hopper_or_later(cluster), nvlink=cluster.nvlink_domain > 1
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


# -- the comparison -------------------------------------------------------------------------------


def validate(
    paths: Iterable[str | Path] = (),
    *,
    catalog: Catalog,
    quantities: Sequence[str] = QUANTITIES,
    where: Mapping[str, str] | None = None,
    estimator: Estimator | None = None,
    conventions: Conventions | None = None,
    errors: ErrorTable | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Compare what was measured in these files, by default in the shipped ones, with its estimate.

    `where` keeps the rows whose field has the value (text may hold *): group, framework, gpu, model,
    quality, or any dotted path. `errors`: the margins of the verdicts, a cautious one where none is given.
    `progress` is told how many rows are done, of how many.
    Raises InputError for files or filters that cannot be used.
    """
    for quantity in quantities:
        if quantity not in QUANTITIES:
            raise InputError("no such quantity", where="--quantity", given=quantity, legal=QUANTITIES)
    files = [Path(path) for path in paths] or _shipped(catalog, quantities)
    if not files:
        raise InputError("the catalogue holds no measurements", legal="files of measured runs")
    read = [row for row in read_rows(files) if _selected(row, where or {})]
    rows = [row for row in read if not is_collective(row) and not is_serving(row)]
    served = [row for row in read if is_serving(row)] if set(quantities) & set(SERVING_QUANTITIES) else []
    curves = [row for row in read if is_collective(row)] if "collective" in quantities else []
    done = 0

    def each(rows: Sequence[Row]) -> Iterator[Row]:
        nonlocal done
        for row in rows:
            yield row
            done += 1
            if progress is not None:
                progress(done, len(compared))

    compared = (*rows, *served, *curves)
    known = conventions if conventions is not None else conventions_of(catalog)
    report = compare(
        each(rows),
        normaliser=Normaliser(catalog, known),
        estimator=estimator or Planner(catalog),
        quantities=tuple(quantities),
        errors=errors,
    )
    points, skipped = compare_collectives(each(curves), CollectivePlanner(catalog))
    serving = compare_serving(
        each(served), ServingNormaliser.of(catalog), ServingPlanner(catalog), quantities
    )
    return Report(
        len(compared),
        report.points + points + serving.points,
        report.skipped + skipped + serving.skipped,
        report.fits,
        report.quantities,
        tuple(str(path) for path in files),
        report.undecided,
        serving.starts,
    )


def _shipped(catalog: Catalog, quantities: Sequence[str]) -> list[Path]:
    runs = shipped(catalog, TRAINING) if any(name in RUN_QUANTITIES for name in quantities) else ()
    curves = shipped(catalog, COLLECTIVES) if "collective" in quantities else ()
    served = shipped(catalog, SERVING) if any(name in SERVING_QUANTITIES for name in quantities) else ()
    return [*runs, *curves, *served]


def compare_collectives(
    rows: Iterable[Row], planner: CollectivePlanner
) -> tuple[tuple[Point, ...], tuple[Skipped, ...]]:
    """Every measured collective against its estimate."""
    points: list[Point] = []
    skipped: list[Skipped] = []
    for row in rows:
        found = planner.compare(row)
        if isinstance(found, Skip):
            skipped.append(Skipped(row.id, "collective", found.reason, row.group))
        else:
            points += [_collective_point(row, one) for one in found]
    return tuple(points), tuple(skipped)


def _collective_point(row: Row, one: Comparison) -> Point:
    return Point(
        id=one.id,
        quantity="collective",
        measured=one.measured,
        estimated=one.estimated,
        unit="GB/s",
        group=row.group,
        framework=one.software,
        stack=one.software,
        gpu=one.gpu,
        arch=one.arch,
        model="",
        quality="",
        meter=one.meter,
        notes=one.notes,
        op=one.op,
        link=one.link,
        size=one.size,
    )


def parse_where(texts: Iterable[str]) -> dict[str, str]:
    """The filters in `--where key=value` flags. Raises InputError."""
    out: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise InputError("is not KEY=VALUE", where="--where", given=text, legal="such as group=lfoundry")
        out[key.strip()] = value.strip()
    return out


_SHORT = {key: f"run.{key}" for key in ("framework", "precision", "stack", "quant")}


def _selected(row: Row, where: Mapping[str, str]) -> bool:
    return all(fnmatchcase(_field(row, key).casefold(), value.casefold()) for key, value in where.items())


def _field(row: Row, key: str) -> str:
    if key == "group":
        return row.group
    if key == "gpu":
        return _gpu(row)
    if key == "model":
        return _model(row)
    value = row.get(_SHORT.get(key, key))
    return "" if value is None else str(value)


def _gpu(row: Row) -> str:
    return str(row.data.get("gpus") or row.data.get("gpu") or "").lstrip("0123456789").removeprefix("x")


def _model(row: Row) -> str:
    model = row.data.get("model")
    return str(model.get("name") or "unnamed") if isinstance(model, Mapping) else str(model)


def compare(
    rows: Iterable[Row],
    *,
    normaliser: Normaliser,
    estimator: Estimator,
    quantities: Sequence[str] = QUANTITIES,
    errors: ErrorTable | None = None,
) -> Report:
    """Every row against its estimate. `errors`: the margins of the verdicts."""
    known = errors or ErrorTable()
    points: list[Point] = []
    skipped: list[Skipped] = []
    fits: list[FitCase] = []
    undecided: list[Skipped] = []
    read = 0
    for read, row in enumerate(rows, 1):  # noqa: B007  # their number, once all are read
        meter = normaliser.meter_of(row) if "peak_memory" in quantities else None
        speed = speed_of(row) if "throughput" in quantities else None
        asked = [name for name, found in (("peak_memory", meter), ("throughput", speed)) if found is not None]
        verdict = "peak_memory" in quantities and isinstance(row.measured.get("oom"), bool)
        if not asked and not verdict:
            continue

        def skip(quantity: str, reason: str, row: Row = row) -> None:
            skipped.append(Skipped(row.id, quantity, reason, row.group))

        if isinstance(speed, Skip):
            skip("throughput", speed.reason)
            asked.remove("throughput")
        if _OTHER_LENGTHS.search(str(row.data.get("notes") or "")):
            for quantity in asked:
                skip(quantity, "samples are shorter than run.seq_len by the row's own notes")
            continue
        ready = normaliser.job_of(row)
        if isinstance(ready, Skip):
            for quantity in asked:
                skip(quantity, ready.reason)
            continue
        if ready.memory_only is not None:
            if isinstance(speed, Reading):
                skip("throughput", ready.memory_only)
                speed = None
            verdict = False
            if meter is None or meter.kind == "device":
                if meter is not None:
                    skip("peak_memory", ready.memory_only)
                continue
        try:
            estimate = estimator(ready, isinstance(speed, Reading))
        except GpucalcError as error:
            for quantity in asked:
                skip(quantity, f"not estimated: {error}")
            continue
        lacking = _unstated(row, ready.job.run) if verdict else None
        if lacking is not None:
            undecided.append(Skipped(row.id, "fits", lacking, row.group))
        elif verdict:
            fits.append(
                FitCase(
                    row.id,
                    row.group,
                    not row.measured["oom"],
                    estimate.device_bytes,
                    estimate.capacity_bytes,
                    known.memory_error(ready.job.run.framework)[0],
                )
            )
        if meter is not None:
            points.append(_memory_point(row, ready, meter, estimate))
        if isinstance(speed, Reading):
            points.append(_speed_point(row, ready, speed, estimate))
    found = (tuple(points), tuple(skipped), tuple(fits))
    return Report(read, *found, tuple(quantities), undecided=tuple(undecided))


# Stacks whose documentation names the optimizer a run has unless told otherwise.
_USUAL_OPTIMIZER = frozenset({"megatron", "torchtitan", "hf", "deepspeed"})


def _unstated(row: Row, run: TrainRun | ServeRun) -> str | None:
    """Which fact a verdict needs that neither the row nor its stack's documentation states.

    A length is the row's own or nothing: what a script defaults to is not what somebody ran.
    """
    if isinstance(run, ServeRun):
        return "a serving run"
    if "recompute" not in run.model_fields_set:
        return "run.recompute not stated"
    if "optimizer" not in run.model_fields_set and run.framework not in _USUAL_OPTIMIZER:
        return "run.optimizer not stated"
    if run.framework in ("deepspeed", "fsdp") and not {"zero_stage", "dp_shard"} & run.model_fields_set:
        return "run.zero_stage not stated"
    if run.seq_len is not None and row.run.get("seq_len") is None:
        return "run.seq_len not stated"
    return None


def _memory_point(row: Row, ready: Ready, meter: Meter, estimate: Estimate) -> Point:
    return Point(
        quantity="peak_memory",
        measured=meter.bytes,
        estimated=estimate.memory(meter.kind),
        unit="bytes",
        meter=f"{meter.kind} ({meter.why})",
        **_facts(row, ready, estimate),
    )


def _speed_point(row: Row, ready: Ready, reading: Reading, estimate: Estimate) -> Point:
    return Point(
        quantity="throughput",
        measured=float(reading.value),
        estimated=reading.of(estimate),
        unit=reading.unit,
        meter=reading.source,
        **_facts(row, ready, estimate),
    )


def _facts(row: Row, ready: Ready, estimate: Estimate) -> dict[str, Any]:
    return {
        "id": row.id,
        "group": row.group,
        "framework": ready.job.run.framework,
        "stack": str(row.run.get("stack") or row.run.get("framework")),
        "gpu": _gpu(row),
        "arch": estimate.arch,
        "model": _model(row),
        "quality": str(row.data.get("quality") or ""),
        "notes": ready.notes,
    }
