"""How one expectation compares with a plan: met or not, the value, and the words that say so."""

from __future__ import annotations

from collections.abc import Sequence

from gpucalc import units
from gpucalc.check_findings import Finding, Place, Status, fingerprint_of
from gpucalc.errors import one_line
from gpucalc.explain import equation_of, figure
from gpucalc.formulas import limits
from gpucalc.line import Line, compute
from gpucalc.plan.answer import Level, Plan
from gpucalc.spec.check import FITS, WITHIN, Expectation


def compared(asked: Expectation, plan: Plan, name: str, cell: str, place: Place) -> Finding:
    missed = Status.WARN if asked.level == "warn" else Status.FAIL
    value: float | str | None
    if asked.key == FITS:
        status = _fits(str(asked.limit), plan.verdict.level, missed)
        value, equation, words = plan.verdict.level.value, _verdict_equation(plan), _verdict_words(plan)
        message = f"{words}; expected: {_WORDS[str(asked.limit)]}"
    else:
        line = _measured(plan, asked.unit.measure)
        value = None if line is None else _rounded(float(line.value) / asked.unit.scale)
        if line is None or value is None:
            status, equation = missed, None
            message = f"{asked.key}: not known, {_why_unknown(plan, asked)}; expected {asked.text}"
        else:
            met = asked.met(float(line.value) / asked.unit.scale)
            status, equation = Status.PASS if met else missed, equation_of(line)
            message = f"{asked.key}: {_amounts(value, asked, met)}{_error_words(plan, asked, value)}"
    return Finding(
        rule=asked.key,
        status=status,
        job=name,
        cell=cell,
        file=place.file,
        line=place.line(asked.path),
        message=one_line(message),
        value=value,
        limit=asked.limit,
        comparison=_SAID[str(asked.limit)] if asked.key == FITS else asked.text,
        unit=asked.unit.shown or ("verdict" if asked.key == FITS else "fraction"),
        equation=equation,
        fingerprint=fingerprint_of(place.file, name, cell, asked.level, asked.key, asked.op),
    )


_SAID = {"fits": "true", "marginal": "marginal", "does_not_fit": "false"}
_WORDS = {"fits": "fits", "marginal": "fits or marginal", "does_not_fit": "does not fit"}


def _fits(wanted: str, level: Level, missed: Status) -> Status:
    """A marginal plan is within the expected error of either answer: neither a pass nor a miss."""
    if level.value == wanted or (wanted == "marginal" and level is Level.FITS):
        return Status.PASS
    if level is Level.MARGINAL:
        return Status.WARN
    return missed


def _verdict_words(plan: Plan) -> str:
    verdict = plan.verdict
    if verdict.host_decides and verdict.host is not None and verdict.host.capacity is not None:
        host = verdict.host
        assert host.capacity is not None
        return (
            f"{verdict.level.verb}: a node needs {units.gib(host.needed.value)} of host memory at"
            f" {host.phase}, has {units.gib(host.capacity.value)}"
        )
    needed, capacity = units.gib(verdict.needed.value), units.gib(verdict.capacity.value)
    return (
        f"{verdict.level.verb}: needs {needed} per GPU at {verdict.phase}, has {capacity},"
        f" expected error ±{units.percent(verdict.expected_error)}, largest part {verdict.binds}"
    )


def _verdict_equation(plan: Plan) -> str:
    verdict = plan.verdict
    if verdict.host_decides and verdict.host is not None and verdict.host.capacity is not None:
        sign = "<=" if verdict.host.needed.value <= verdict.host.capacity.value else ">"
        return f"{equation_of(verdict.host.needed)} {sign} {figure(verdict.host.capacity.value)} bytes"
    worst = compute(
        "needed_with_error",
        limits.worst_case_bytes,
        needed_bytes=verdict.needed,
        expected_error=verdict.expected_error,
    )
    sign = "<=" if worst.value <= verdict.capacity.value else ">"
    return f"{equation_of(worst)} {sign} {figure(verdict.capacity.value)} bytes"


def _measured(plan: Plan, measure: str) -> Line | None:
    """The line of a plan that a limit of this measure is held against; None where the plan has none."""
    verdict = plan.verdict
    match measure:
        case "headroom":
            return compute(
                measure, limits.headroom, capacity_bytes=verdict.capacity, needed_bytes=verdict.needed
            )
        case "headroom_bytes":
            return compute(
                measure, limits.headroom_bytes, capacity_bytes=verdict.capacity, needed_bytes=verdict.needed
            )
        case "peak":
            return verdict.needed
        case "step":
            return None if plan.serves else plan.time
        case "samples_per_s":
            return None if plan.serves else plan.throughput
        case "gpus":
            return Line("gpus", plan.gpus, "count", source=f"the fleet, {plan.fleet}")
        case _:
            return _named(plan, _SERVED_AS.get(measure, (measure,)) if plan.serves else (measure,))


# Lines of a deployment that go by another name than in training.
_SERVED_AS = {
    "tokens_per_s": ("output_tokens_per_s", "tokens_per_s"),
    "kv_tokens": ("kv_tokens", "tokens"),
    "max_concurrency": ("max_concurrency", "requests"),
}


def _named(plan: Plan, names: Sequence[str]) -> Line | None:
    groups = (plan.throughput, plan.cost, plan.cache, plan.reliability)
    held = [line for group in groups if group is not None for line in (group, *group.children)]
    return next((line for name in names for line in held if line.name == name), None)


def _why_unknown(plan: Plan, asked: Expectation) -> str:
    if asked.key not in ("kv_tokens", "max_concurrency") and plan.throughput is None:
        fits = plan.verdict.level is not Level.DOES_NOT_FIT
        return "the plan has no speed" if fits else "the plan does not fit and has no speed"
    if asked.key == "goodput":
        return "failures are shown of runs with run.tokens, or on 256 GPUs and more"
    if asked.key == "cost":
        return "no price or power is known for these GPUs"
    return f"a plan of {'serving' if plan.serves else 'training'} has no {asked.unit.measure}"


def _amounts(value: float, asked: Expectation, met: bool) -> str:
    """`22.4 s <= 25 s`, with as many digits as tell the two apart."""
    assert not isinstance(asked.limit, str)
    unit = f" {asked.unit.shown}" if asked.unit.shown else ""
    digits = next((d for d in (4, 5, 6) if f"{value:.{d}g}" != f"{asked.limit:.{d}g}"), 7)
    shown = f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"
    if asked.op == WITHIN:
        return f"{shown}{unit} is {'' if met else 'not '}within {asked.text}"
    return f"{shown}{unit} {'is' if met else 'is not'} {asked.text}"


def _error_words(plan: Plan, asked: Expectation, value: float) -> str:
    """That the limit is nearer than the value is known, where it is."""
    measure = asked.unit.measure
    if asked.op == WITHIN or asked.key == "gpus" or isinstance(asked.limit, str):
        return ""
    error, scale = plan.verdict.expected_error, abs(value)
    if measure in ("headroom", "headroom_bytes"):  # the error is that of the bytes needed
        share = plan.verdict.capacity.value if measure == "headroom" else 1.0
        scale = plan.verdict.needed.value / share / asked.unit.scale
    elif measure != "peak":
        error = plan.speed_error[0] if plan.speed_error is not None else 0.0
    if abs(value - asked.limit) > error * scale:
        return ""
    return f", but the expected error of ±{units.percent(error)} reaches across the limit"


def _rounded(value: float) -> float:
    """Seven significant digits: more would differ between machines."""
    return float(f"{value:.7g}")
