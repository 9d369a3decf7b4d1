"""Headline numbers of every catalogue model on representative fleets, for a table that shows what moved."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpucalc.catalog import Catalog
from gpucalc.errors import GpucalcError
from gpucalc.jobs import resolve
from gpucalc.plan.answer import Plan
from gpucalc.plan.evaluate import ErrorTable
from gpucalc.planner import plan_job

# name -> fleet, task, settings: sharded and recomputed, model-parallel, one card's adapters, served.
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "fsdp": ("8xH100-SXM", "train", ("run.recompute=full",)),
    "megatron": (
        "8x8xA100-SXM-80GB",
        "train",
        ("run.framework=megatron", "run.tp=4", "run.pp=2", "run.global_batch=128"),
    ),
    "qlora": ("1xRTX4090", "train", ("run.method=qlora",)),
    "serve": ("8xH200-SXM", "serve", ()),
}
FIELDS = ("model", "case", "verdict", "needed_gib", "time_s", "rate_per_s")
# What arithmetic alone may move between machines and library releases.
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Moved:
    """One headline number that is not what the table says."""

    model: str
    case: str
    field: str
    before: str
    after: str

    @property
    def ratio(self) -> float | None:
        """After over before, None where either is a word or missing."""
        try:
            return float(self.after) / float(self.before)
        except (ValueError, ZeroDivisionError):
            return None

    def __str__(self) -> str:
        change = "" if self.ratio is None else f" ({100 * (self.ratio - 1):+.3g} %)"
        return f"{self.model} {self.case} {self.field}: {self.before or '-'} -> {self.after or '-'}{change}"


def predict(catalog: Catalog) -> list[dict[str, str]]:
    """One row per model and case that can be planned, sorted; a case a model has no use for is left out."""
    errors = ErrorTable()  # verdicts that do not move with the recorded accuracy
    rows = []
    for model in sorted(catalog.names("models")):
        for case, (fleet, task, sets) in CASES.items():
            row = _row(catalog, errors, model, fleet, task, sets)
            if row is not None:
                rows.append({"model": model, "case": case, **row})
    return rows


def _row(
    catalog: Catalog, errors: ErrorTable, model: str, fleet: str, task: str, sets: tuple[str, ...]
) -> dict[str, str] | None:
    try:
        job = resolve(f"models/{model}", catalog, gpus=fleet, task=task, sets=sets)
        plan = plan_job(job, catalog, errors=errors, advice=False, always_time=True)
    except GpucalcError:
        return None
    return {
        "verdict": plan.verdict.level.value,
        "needed_gib": _digits(plan.verdict.needed.value / 2**30),
        "time_s": _digits(_seconds(plan)),
        "rate_per_s": _digits(plan.throughput.value if plan.throughput is not None else None),
    }


def _seconds(plan: Plan) -> float | None:
    return float(plan.time.value) if plan.time is not None else None


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.9g}"


def written(rows: Iterable[Mapping[str, str]]) -> str:
    """The table as CSV."""
    text = io.StringIO()
    table = csv.DictWriter(text, FIELDS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def moved(before: Iterable[Mapping[str, str]], after: Iterable[Mapping[str, str]]) -> list[Moved]:
    """Every number, verdict and row that differs, largest change first."""
    old = {(row["model"], row["case"]): row for row in before}
    new = {(row["model"], row["case"]): row for row in after}
    found = []
    for key in sorted(old.keys() | new.keys()):
        for name in FIELDS[2:]:
            a, b = old.get(key, {}).get(name, ""), new.get(key, {}).get(name, "")
            one = Moved(*key, name, a, b)
            if a != b and (one.ratio is None or abs(one.ratio - 1) > TOLERANCE):
                found.append(one)
    return sorted(found, key=lambda one: -abs((one.ratio or 1e9) - 1))
