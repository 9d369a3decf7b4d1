"""What a check found: one finding for each comparison, the report of them all, and a baseline's misses.

Findings have a fingerprint that neither their value, their limit nor their line changes, so that a
report of before says which misses are known.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from gpucalc.errors import ExitCode, InputError
from gpucalc.spec.check import FITS, QUANTITIES
from gpucalc.spec.yamlio import nearest_line, read_text

WORSE = 0.01  # a miss that grew by less than this is the one the baseline knows


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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job stands: its file, the lines of its keys, and its own key in the file."""

    file: str
    lines: Mapping[str, int]
    key: str

    def line(self, path: str) -> int:
        """The line of a key of the job, or of the nearest group around it."""
        return nearest_line(self.lines, f"{self.key}.{path}" if self.key and path else self.key or path)


def fingerprint_of(*parts: str) -> str:
    """A name for a check that neither its value, its limit nor its line changes."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:32]


def numbered(findings: Iterable[Finding]) -> list[Finding]:
    """Fingerprints made unique where a job asks the same twice."""
    seen: dict[str, int] = {}
    found: list[Finding] = []
    for finding in findings:
        count = seen.get(finding.fingerprint, 0)
        seen[finding.fingerprint] = count + 1
        if count:
            finding = replace(finding, fingerprint=fingerprint_of(finding.fingerprint, str(count)))
        found.append(finding)
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


def known_before(finding: Finding, before: Recorded | None) -> bool:
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
