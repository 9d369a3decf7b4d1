"""Expectations held against plans: one finding for each, with its place, value, limit and equation.

A file holds a job, or several under `jobs:`. Each is planned, once for every combination of its
`matrix:`, and each comparison of its `expect:` becomes a finding; a job that cannot be read or
planned becomes one too, and the others still run. Nothing here is drawn or written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpucalc import units
from gpucalc.accuracy import error_table
from gpucalc.catalog import Catalog
from gpucalc.errors import ExitCode, GpucalcError, Infeasible, InputError, one_line
from gpucalc.explain import equation_of, figure
from gpucalc.formulas import limits
from gpucalc.jobs import ResolvedJob, resolve_data
from gpucalc.line import Line, compute
from gpucalc.plan.answer import Level, Plan
from gpucalc.plan.evaluate import ErrorTable, Subject
from gpucalc.planner import plan_job
from gpucalc.spec.check import FITS, QUANTITIES, WITHIN, Cell, Expectation, read_expect, read_matrix
from gpucalc.spec.costs import NetworkKeys
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.yamlio import Document, load_yaml, nearest_line, read_text

MAX_JOBS = 10_000  # in one run
WORSE = 0.01  # a miss that grew by less than this is the one the baseline knows
DEFAULT = {FITS: True}  # what a job without `expect:` is held to


class Status(StrEnum):
    """What came of a comparison."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Rule:
    """What a finding's rule id stands for. Ids are stable: pipelines filter by them."""

    id: str
    title: str
    help: str


BROKEN = "job"
INTERNAL = "internal"
RULES: dict[str, Rule] = {
    **{
        key: Rule(key, quantity.title, f"`expect: {key}` compares this with the plan of the job")
        for key, quantity in QUANTITIES.items()
    },
    BROKEN: Rule(BROKEN, "the job can be read and planned", "the message names the key and what is legal"),
    INTERNAL: Rule(INTERNAL, "the job is planned without an internal error", "rerun with --debug and report"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison and what came of it.

    value and limit are in `unit`, as the job wrote it. `equation` is how the value came about, with
    its numbers. `known`: missed before, by the baseline, and no worse now.
    """

    rule: str
    status: Status
    job: str
    cell: str  # the combination of the matrix, empty without one
    file: str
    line: int
    message: str
    value: float | str | None
    limit: float | str | None
    comparison: str  # as written: "<= 70 GiB"; empty for a broken job
    unit: str
    equation: str | None
    fingerprint: str
    known: bool = False

    @property
    def failed(self) -> bool:
        """Whether it counts against the run."""
        return self.status is Status.FAIL and not self.known

    @property
    def subject(self) -> str:
        """The job and its combination, in words."""
        return f"{self.job} [{self.cell}]" if self.cell else self.job

    @property
    def title(self) -> str:
        """What was asked, on one line."""
        return f"{self.rule} {self.comparison}".strip()


@dataclass(frozen=True, slots=True)
class Report:
    """Every finding of a run, in the order of the files."""

    findings: tuple[Finding, ...]

    def of(self, status: Status, *, known: bool = False) -> tuple[Finding, ...]:
        """The findings of a status."""
        return tuple(f for f in self.findings if f.status is status and f.known is known)

    @property
    def known(self) -> tuple[Finding, ...]:
        """Misses that the baseline lists."""
        return tuple(f for f in self.findings if f.known)

    @property
    def summary(self) -> str:
        """The counts in words."""
        jobs = len({(f.file, f.job, f.cell) for f in self.findings})
        parts = [f"{len(self.of(Status.PASS))} passed"]
        if warned := len(self.of(Status.WARN)):
            parts.append(f"{warned} warned")
        if failed := len(self.of(Status.FAIL)):
            parts.append(f"{failed} failed")
        if self.known:
            parts.append(f"{len(self.known)} known from the baseline")
        plans = "1 plan" if jobs == 1 else f"{jobs} plans"
        checks = "1 check" if len(self.findings) == 1 else f"{len(self.findings)} checks"
        return f"{checks} of {plans}: {', '.join(parts)}"

    def exit_code(self, *, strict: bool = False) -> ExitCode:
        """What the process says: 2 when no job at all could be read, 3 when we broke one."""
        if any(f.rule == INTERNAL for f in self.findings):
            return ExitCode.INTERNAL
        if all(f.rule == BROKEN and f.failed for f in self.findings):
            return ExitCode.USAGE
        bad = any(f.failed for f in self.findings) or (strict and bool(self.of(Status.WARN)))
        return ExitCode.NO if bad else ExitCode.ANSWERED


def check(
    files: Sequence[str | Path], catalog: Catalog, *, baseline: Mapping[str, Recorded] | None = None
) -> Report:
    """Every expectation of every job in the files, held against its plan."""
    plans = _Plans(catalog)
    findings: list[Finding] = []
    for file in dict.fromkeys(map(str, files)):
        findings += _numbered(_file(file, plans))
    if baseline is not None:
        findings = [replace(f, known=_known(f, baseline.get(f.fingerprint))) for f in findings]
    return Report(tuple(findings))


# -- planning -------------------------------------------------------------------------------------


class _Plans:
    """Plans jobs one after another; what they share is built once."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._errors: ErrorTable | None = None
        # The description is kept beside what was made of it, so that its identity stays its own.
        self._subjects: dict[int, tuple[Any, Subject]] = {}
        self._clusters: dict[tuple[str, str | None, NetworkKeys | None], Cluster] = {}

    def plan(self, job: ResolvedJob) -> Plan:
        if self._errors is None:
            self._errors = error_table(self.catalog)
        if id(job.model) not in self._subjects:
            self._subjects[id(job.model)] = (job.model, Subject.of(job.model))
        fleet = (str(job.fleet), job.job.system, job.job.network)
        if fleet not in self._clusters:
            self._clusters[fleet] = self.catalog.cluster(job.fleet, job.job.system, network=job.job.network)
        return plan_job(
            job,
            self.catalog,
            subject=self._subjects[id(job.model)][1],
            cluster=self._clusters[fleet],
            errors=self._errors,
            advice=False,
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a job stands: its file, the lines of its keys, and its own key in the file."""

    file: str
    lines: Mapping[str, int]
    key: str

    def line(self, path: str) -> int:
        """The line of a key of the job, or of the nearest group around it."""
        return nearest_line(self.lines, f"{self.key}.{path}" if self.key and path else self.key or path)


def _file(file: str, plans: _Plans) -> Iterator[Finding]:
    shown = _shown(file)
    try:
        document = _load(file, plans.catalog)
        jobs = _jobs(document)
    except GpucalcError as error:
        yield _broken(error, Path(file).stem, "", _Place(shown, {}, ""))
        return
    lines = document.lines()
    several = len(jobs) > 1
    for index, (key, data) in enumerate(jobs):
        place = _Place(shown, lines, key)
        stem = Path(file).stem
        name = data.get("name") if isinstance(data, Mapping) else None
        name = name if isinstance(name, str) and name.strip() else f"{stem}[{index}]" if several else stem
        yield from _job(one_line(name), data, place, Path(document.where).parent, plans)


def _load(file: str, catalog: Catalog) -> Document:
    path = Path(file)
    if "/" not in file and not path.suffix and not os.path.exists(path) and file in catalog.names("jobs"):
        path = catalog.path_of("jobs", file)
    return load_yaml(path, mapping=False)


def _jobs(document: Document) -> list[tuple[str, Any]]:
    """The jobs in a file, each with its key in it. Raises InputError."""
    data = document.data
    if isinstance(data, Mapping) and "jobs" in data:
        if len(data) > 1:
            others = [str(key) for key in data if key != "jobs"]
            raise InputError("stands beside jobs:", where=document.where, key=others[0], legal="jobs: alone")
        data, prefix = data["jobs"], "jobs."
    elif isinstance(data, Mapping):
        return [("", data)]
    else:
        prefix = ""
    if not isinstance(data, list) or not data:
        raise InputError("holds no job", where=document.where, legal="a job, or jobs: with a list of them")
    if len(data) > MAX_JOBS:
        raise InputError(
            "holds too many jobs", where=document.where, given=len(data), legal=f"at most {MAX_JOBS:,}"
        )
    return [(f"{prefix}{index}", item) for index, item in enumerate(data)]


def _job(name: str, data: Any, place: _Place, folder: Path, plans: _Plans) -> Iterator[Finding]:
    try:
        if not isinstance(data, Mapping):
            raise InputError("is not a job", given=data, legal="model:, gpus:, run:, expect:")
        expectations = read_expect(data.get("expect", DEFAULT))
        run = data.get("run")
        task = str(run.get("task", "train")) if isinstance(run, Mapping) else "train"
        cells = read_matrix(data.get("matrix"), task)
    except GpucalcError as error:
        yield _broken(error, name, "", place)
        return
    bare = {key: value for key, value in data.items() if key != "matrix"}
    for cell in cells:
        try:
            words = {"name": name, **_set(bare, cell)}
            plan = plans.plan(resolve_data(words, plans.catalog, where=place.file, folder=folder))
        except GpucalcError as error:
            yield _broken(error, name, cell.label, place)
            continue
        except Exception as error:  # one job must not take the others with it
            yield _internal(error, name, cell.label, place)
            continue
        for expectation in expectations:
            finding = _compared(expectation, plan, name, cell.label, place)
            said = "expect" in data
            yield finding if said else replace(finding, message=f"{finding.message}; the job has no expect:")


def _set(data: Mapping[str, Any], cell: Cell) -> dict[str, Any]:
    changed: dict[str, Any] = deepcopy(dict(data)) if cell.changes else dict(data)
    for key, value in cell.changes.items():
        *groups, last = key.split(".")
        inside = changed
        for group in groups:
            part = inside.setdefault(group, {})
            if not isinstance(part, dict):
                raise InputError("is not a group of keys", key=group, given=part)
            inside = part
        inside[last] = value
        if key == "gpus" and value != data.get("gpus"):  # the job's server is that of the job's GPUs
            changed.pop("system", None)
    return changed


# -- findings -------------------------------------------------------------------------------------


def _compared(asked: Expectation, plan: Plan, name: str, cell: str, place: _Place) -> Finding:
    missed = Status.WARN if asked.level == "warn" else Status.FAIL
    value: float | str | None
    if asked.key == FITS:
        status = _fits(str(asked.limit), plan.verdict.level, missed)
        value, equation, words = plan.verdict.level.value, _verdict_equation(plan), _verdict_words(plan)
        message = f"{words}; expected: {_WORDS[str(asked.limit)]}"
    else:
        line = measured(plan, asked.unit.measure)
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
        fingerprint=_fingerprint(place.file, name, cell, asked.level, asked.key, asked.op),
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
    word = {"fits": "fits", "marginal": "is marginal", "does_not_fit": "does not fit"}[verdict.level.value]
    if verdict.host_decides and verdict.host is not None and verdict.host.capacity is not None:
        host = verdict.host
        assert host.capacity is not None
        return (
            f"{word}: a node needs {units.gib(host.needed.value)} of host memory at {host.phase}, has"
            f" {units.gib(host.capacity.value)}"
        )
    needed, capacity = units.gib(verdict.needed.value), units.gib(verdict.capacity.value)
    return (
        f"{word}: needs {needed} per GPU at {verdict.phase}, has {capacity},"
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


def measured(plan: Plan, measure: str) -> Line | None:
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


def _broken(error: GpucalcError, name: str, cell: str, place: _Place) -> Finding:
    key = getattr(error, "key", None) or ""
    where = getattr(error, "where", None) or ""
    file, _, at = where.rpartition(":")
    by_parser = bool(file) and at.isdigit()  # a parser knows the line itself
    here = bool(where) and _shown(file if by_parser else where) == place.file
    if by_parser and here:
        line = int(at)
    elif isinstance(error, Infeasible):
        line = place.line("run")
    else:
        line = place.line(key)
    message = str(error).removeprefix(where).removeprefix(": ") if here else str(error)
    return _unread(BROKEN, message, name, cell, place, line)


def _internal(error: Exception, name: str, cell: str, place: _Place) -> Finding:
    message = f"internal error: {type(error).__name__}: {error}; plan it with --debug and report it"
    return _unread(INTERNAL, message, name, cell, place, place.line(""))


def _unread(rule: str, message: str, name: str, cell: str, place: _Place, line: int) -> Finding:
    return Finding(
        rule=rule,
        status=Status.FAIL,
        job=name,
        cell=cell,
        file=place.file,
        line=line,
        message=one_line(message),
        value=None,
        limit=None,
        comparison="",
        unit="",
        equation=None,
        fingerprint=_fingerprint(place.file, name, cell, "fail", rule, ""),
    )


def _shown(file: str) -> str:
    """The file as reports name it: relative to where the run started, with forward slashes."""
    path = os.path.normpath(file)
    if os.path.isabs(path):
        inside = os.path.relpath(path)
        path = path if inside.startswith(os.pardir) else inside
    return one_line(path.replace(os.sep, "/"))


def _rounded(value: float) -> float:
    """Seven significant digits: more would differ between machines."""
    return float(f"{value:.7g}")


def _fingerprint(*parts: str) -> str:
    """A name for a check that neither its value, its limit nor its line changes."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:32]


def _numbered(findings: Iterator[Finding]) -> list[Finding]:
    """Fingerprints made unique where a job asks the same twice."""
    seen: dict[str, int] = {}
    found: list[Finding] = []
    for finding in findings:
        count = seen.get(finding.fingerprint, 0)
        seen[finding.fingerprint] = count + 1
        found.append(
            replace(finding, fingerprint=_fingerprint(finding.fingerprint, str(count))) if count else finding
        )
    return found


# -- baseline -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a baseline knows of a check."""

    status: str
    value: float | str | None


def read_baseline(path: str | Path) -> dict[str, Recorded]:
    """The misses in a report written with `--format json`. Raises InputError."""
    where = str(path)
    try:
        data = json.loads(read_text(path, max_bytes=64 * 2**20))
        findings = data["findings"]
        return {
            str(item["fingerprint"]): Recorded(str(item["status"]), item.get("value"))
            for item in findings
            if item["status"] != Status.PASS.value
        }
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            "is not a report of `gpucalc check --format json`", where=where, key="--baseline"
        ) from None


def _known(finding: Finding, before: Recorded | None) -> bool:
    """Whether a miss was missed before and is no worse now."""
    if finding.status is Status.PASS or before is None or before.status == Status.PASS.value:
        return False
    if finding.rule == FITS:
        return before.status == finding.status.value
    now, then = finding.value, before.value
    if not isinstance(now, int | float) or not isinstance(then, int | float):
        return now is None and then is None
    limit = finding.limit
    if isinstance(limit, int | float):
        return abs(now - limit) <= abs(then - limit) + WORSE * abs(then)
    return False
