"""Deployments that tests plan: shipped jobs, or a model on cards with some keys set."""

from __future__ import annotations

import re
from functools import cache

from gpucalc.catalog import open_catalog, shipped
from gpucalc.jobs import resolve
from gpucalc.plan.answer import Plan
from gpucalc.planner import plan_job

CATALOG = open_catalog()
SERVING = sorted(path.stem for path in (shipped() / "jobs").glob("serve-*.yaml"))
ENGINES = sorted(path.stem for path in (shipped() / "engines").glob("*.yaml"))
FLAG = re.compile(r"^-{1,2}[a-z][a-z0-9_-]*$")


@cache
def planned(job: str, gpus: str | None = None, *sets: str, task: str | None = None) -> Plan:
    return plan_job(resolve(job, CATALOG, gpus=gpus, task=task, sets=sets), CATALOG)


def served(model: str, gpus: str, *sets: str) -> Plan:
    return planned(model, gpus, *sets, task="serve")


def cache_line(plan: Plan, name: str) -> float:
    assert plan.cache is not None
    return float(plan.cache.child(name).value)
