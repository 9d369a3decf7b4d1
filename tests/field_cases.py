"""Cases of public reports: a job, the plan it gets, and the figures a report's answer names."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.jobs import resolve_data
from gpucalc.line import Line
from gpucalc.plan.answer import Plan
from gpucalc.planner import plan_job
from gpucalc.spec.yamlio import load_yaml

ROOT = Path(__file__).parent
CATALOG = Catalog([ROOT.parent / "catalogs"])


def cases(file: str) -> list[dict[str, Any]]:
    """The cases in a data file."""
    data = load_yaml(ROOT / "data" / file, mapping=False).data
    assert isinstance(data, list)
    return data


def job_of(case: Mapping[str, Any], check: Mapping[str, Any]) -> dict[str, Any]:
    """The case's job with the check's changes."""
    job = deepcopy(case["job"])
    job["run"] = {"task": "train", **job["run"]}
    for key, value in check.get("set", {}).items():
        *path, last = key.split(".")
        here = job
        for part in path:
            here = here[part]
        here[last] = value
    return {"name": case["id"], **job}


@cache
def _plan(case_file: str, index: int, check: int, always_time: bool) -> Plan:
    case = cases(case_file)[index]
    job = resolve_data(job_of(case, case["checks"][check]), CATALOG, where=case["id"])
    return plan_job(job, CATALOG, advice=False, always_time=always_time)


def plan_of(file: str, index: int, check: int, *, always_time: bool = False) -> Plan:
    """The plan of one check."""
    return _plan(file, index, check, always_time)


def phases(plan: Plan) -> tuple[Line, ...]:
    """The phases of the worst stage."""
    return plan.memory.child(f"stage_{plan.verdict.stage}").children


def parts(line: Line, name: str) -> list[Line]:
    """Every line of that name at or below this one."""
    found = [line] if line.name == name else []
    return found + [deep for child in line.children for deep in parts(child, name)]


def biggest(plan: Plan, name: str) -> float:
    """The largest line of that name in any phase; 0 where there is none."""
    return max((float(line.value) for phase in phases(plan) for line in parts(phase, name)), default=0.0)
