"""Published training runs beside their estimates: peak memory, throughput, and whether they fit.

Peak memory is in bytes, as the meter of its source counts it; throughput in the unit its source used.
Runs reported as fitting or as out of memory test the verdict as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpucalc.errors import GpucalcError
from gpucalc.estimate_training import Estimate
from gpucalc.measured import Row, Skip, is_number
from gpucalc.measured_meters import Meter
from gpucalc.measured_runs import Normaliser, Ready
from gpucalc.plan.answer import Level
from gpucalc.plan.evaluate import UNMEASURED_ERROR, ErrorTable, level_of
from gpucalc.points import Point, Skipped
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.train_run import TrainRun

QUANTITIES = ("peak_memory", "throughput")
MOST_HEADROOM = 0.10  # free memory promised to a run that then ran out: never more than this
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
class Comparison:
    """Everything compared, everything that was not, and the verdicts."""

    points: tuple[Point, ...]
    skipped: tuple[Skipped, ...]
    fits: tuple[FitCase, ...]
    undecided: tuple[Skipped, ...]  # known to fit or not, but without a fact the verdict needs


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


def compare_training(
    rows: Iterable[Row],
    *,
    normaliser: Normaliser,
    estimator: Estimator,
    quantities: Sequence[str] = QUANTITIES,
    errors: ErrorTable | None = None,
) -> Comparison:
    """Every row against its estimate. `errors`: the margins of the verdicts."""
    known = errors or ErrorTable()
    points: list[Point] = []
    skipped: list[Skipped] = []
    fits: list[FitCase] = []
    undecided: list[Skipped] = []
    for row in rows:
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
    return Comparison(tuple(points), tuple(skipped), tuple(fits), tuple(undecided))


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
        "gpu": row.gpu,
        "arch": estimate.arch,
        "model": row.model,
        "quality": str(row.data.get("quality") or ""),
        "notes": ready.notes,
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
