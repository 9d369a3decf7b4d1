"""Expectations held against plans: one finding for each, with its place, value, limit and equation.

A file holds a job, or several under `jobs:`. Each is planned, once for every combination of its
`matrix:`, and each comparison of its `expect:` becomes a finding; a job that cannot be read or
planned becomes one too, and the others still run. Nothing here is drawn or written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpucalc.accuracy import error_table
from gpucalc.catalog import Catalog
from gpucalc.check_compare import compared
from gpucalc.check_findings import (
    BROKEN,
    INTERNAL,
    Finding,
    Place,
    Recorded,
    Report,
    Status,
    fingerprint_of,
    known_before,
    numbered,
)
from gpucalc.errors import GpucalcError, Infeasible, InputError, one_line
from gpucalc.jobs import ResolvedJob, resolve_data
from gpucalc.plan.answer import Plan
from gpucalc.plan.evaluate import ErrorTable, Subject
from gpucalc.planner import plan_job
from gpucalc.spec.check import FITS, Cell, read_expect, read_matrix
from gpucalc.spec.costs import NetworkKeys
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.yamlio import Document, load_yaml

MAX_JOBS = 10_000  # in one run
DEFAULT = {FITS: True}  # what a job without `expect:` is held to


def check(
    files: Sequence[str | Path], catalog: Catalog, *, baseline: Mapping[str, Recorded] | None = None
) -> Report:
    """Every expectation of every job in the files, held against its plan."""
    plans = _Plans(catalog)
    findings: list[Finding] = []
    for file in dict.fromkeys(map(str, files)):
        findings += numbered(_file(file, plans))
    if baseline is not None:
        findings = [replace(f, known=known_before(f, baseline.get(f.fingerprint))) for f in findings]
    return Report(tuple(findings))


# -- planning -------------------------------------------------------------------------------------


class _Plans:
    """Plans jobs one after another; what they share is built once."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._errors: ErrorTable | None = None
        # The description is kept beside what was made of it, so that its identity stays its own.
        self._subjects: dict[tuple[int, int], tuple[Any, Subject]] = {}
        self._clusters: dict[tuple[str, str | None, NetworkKeys | None], Cluster] = {}

    def plan(self, job: ResolvedJob) -> Plan:
        if self._errors is None:
            self._errors = error_table(self.catalog)
        models = (id(job.model), id(job.draft))
        if models not in self._subjects:
            self._subjects[models] = ((job.model, job.draft), Subject.of(job.model, job.draft))
        fleet = (str(job.fleet), job.job.system, job.job.network)
        if fleet not in self._clusters:
            self._clusters[fleet] = self.catalog.cluster(job.fleet, job.job.system, network=job.job.network)
        return plan_job(
            job,
            self.catalog,
            subject=self._subjects[models][1],
            cluster=self._clusters[fleet],
            errors=self._errors,
            advice=False,
        )


def _file(file: str, plans: _Plans) -> Iterator[Finding]:
    shown = _shown(file)
    try:
        document = _load(file, plans.catalog)
        jobs = _jobs(document)
    except GpucalcError as error:
        yield _broken(error, Path(file).stem, "", Place(shown, {}, ""))
        return
    lines = document.lines()
    several = len(jobs) > 1
    for index, (key, data) in enumerate(jobs):
        place = Place(shown, lines, key)
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


def _job(name: str, data: Any, place: Place, folder: Path, plans: _Plans) -> Iterator[Finding]:
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
            finding = compared(expectation, plan, name, cell.label, place)
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


def _broken(error: GpucalcError, name: str, cell: str, place: Place) -> Finding:
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


def _internal(error: Exception, name: str, cell: str, place: Place) -> Finding:
    message = f"internal error: {type(error).__name__}: {error}; plan it with --debug and report it"
    return _unread(INTERNAL, message, name, cell, place, place.line(""))


def _unread(rule: str, message: str, name: str, cell: str, place: Place, line: int) -> Finding:
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
        fingerprint=fingerprint_of(place.file, name, cell, "fail", rule, ""),
    )


def _shown(file: str) -> str:
    """The file as reports name it: relative to where the run started, with forward slashes."""
    path = os.path.normpath(file)
    if os.path.isabs(path):
        inside = os.path.relpath(path)
        path = path if inside.startswith(os.pardir) else inside
    return one_line(path.replace(os.sep, "/"))
