"""Public reports of deployments, and other tools' faults with counting and caches: what our plans say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from field_cases import CATALOG, cases, job_of

from gpucalc.errors import GpucalcError
from gpucalc.jobs import resolve_data
from gpucalc.plan.answer import Plan
from gpucalc.planner import plan_job
from gpucalc.units import GB, GIB

FILE = "field_serving.yaml"
CASES = cases(FILE)
CHECKS = [
    pytest.param(case, check, id=f"{case['id']}-{number}")
    for case in CASES
    for number, check in enumerate(case["checks"])
]
UNITS = {"bytes": 1, "gb": GB, "gib": GIB, "parameters": 1}


def plan_of(case: Mapping[str, Any], changes: Mapping[str, Any], *, always_time: bool = False) -> Plan:
    job = job_of(case, {"set": {"run.task": "serve", **changes}})
    found = resolve_data(job, CATALOG, where=case["id"])
    return plan_job(found, CATALOG, advice=not always_time, always_time=always_time)


def figure(plan: Plan, name: str) -> float:
    """A figure of the plan by the name the data give it."""
    assert plan.cache is not None
    held = {line.name: float(line.value) for line in plan.cache.children}
    weights = next(line for line in plan.memory.children if line.name == "weights")
    match name:
        case "total":
            return float(plan.model.value)
        case "active":
            return float(plan.model.child("active").value)
        case "weights":
            return float(weights.value)
        case "head_params":
            return float(weights.child("head").inputs["params"].value)
        case "per_token":
            return held["kv_bytes_per_token"]
        case _:
            assert name == "one_request"
            return held["kv_bytes_per_token"] * int(plan.recipe.max_model_len) + held.get("state_bytes", 0)


def per_user(plan: Plan) -> float:
    assert plan.throughput is not None
    return float(plan.throughput.child("tokens_per_s_per_user").value)


@pytest.mark.parametrize(("case", "check"), CHECKS)
def test_a_public_report_is_answered(case: dict[str, Any], check: dict[str, Any]) -> None:
    changes = check.get("set", {})
    if "refused" in check:
        with pytest.raises(GpucalcError) as caught:
            plan_of(case, changes)
        assert caught.value.exit_code == 2
        assert all(words in str(caught.value) for words in check["refused"]), str(caught.value)
        return
    plan = plan_of(case, changes)
    assert plan.verdict.level.value in check.get("verdict", [plan.verdict.level.value])
    for wanted in check.get("figures", ()):
        unit = next(key for key in UNITS if key in wanted)
        answer = wanted[unit] * UNITS[unit]
        assert figure(plan, wanted["line"]) == pytest.approx(answer, rel=wanted["within"] or 1e-12), wanted
    chosen = (f"{item.key} {item.value} {item.why}" for item in plan.assumptions)
    said = " | ".join((*plan.notes, *chosen))
    assert all(words in said for words in check.get("says", ())), said
    if check.get("speed") is False:
        assert (plan.time, plan.throughput, plan.loads) == (None, None, ())
    if "binds" in check:
        assert plan.verdict.binds == check["binds"]
    if "changes" in check:
        action = next(one for one in plan.actions if dict(one.changes) == check["changes"])
        assert action.level.value == "fits"
    if "advises" in check:
        advised(plan, check["advises"])
    if "per_user_below" in check:
        bound = dict(check["per_user_below"])
        times = bound.pop("times")
        own = plan_of(case, changes, always_time=True)
        other = plan_of(case, {**changes, **bound}, always_time=True)
        assert per_user(own) < times * per_user(other)


def advised(plan: Plan, wanted: Mapping[str, Any]) -> None:
    """An action names the fleet, with the verdict and speed it is worth."""
    action = next(one for one in plan.actions if one.changes.get("gpus") == wanted["gpus"])
    assert action.level.value == wanted.get("level", "fits")
    assert action.tokens_per_s is not None
    if wanted.get("faster"):
        assert plan.throughput is not None
        assert action.tokens_per_s > plan.throughput.value


def test_what_others_hold_is_taken_off_a_trainers_card_too() -> None:
    """The same report asked of training: the card is as large as what is free, and the plan says so."""
    run = {"task": "train", "framework": "ddp", "seq_len": 512, "micro_batch": 1}
    job = {"name": "shared-box", "model": "qwen3-0.6b", "gpus": "1xRTXA6000", "run": run}
    alone = plan_job(resolve_data(job, CATALOG, where="job"), CATALOG, advice=False)
    run["memory_in_use_gib"] = 15.94
    beside = plan_job(resolve_data(job, CATALOG, where="job"), CATALOG, advice=False)
    taken = alone.verdict.capacity.value - beside.verdict.capacity.value
    assert taken == pytest.approx(15.94 * GIB)
    assert alone.verdict.needed.value == beside.verdict.needed.value
    assert beside.verdict.capacity.note == "beside what others hold"
    run["memory_in_use_gib"] = 60
    with pytest.raises(GpucalcError, match="is all the smallest card has"):
        plan_job(resolve_data(job, CATALOG, where="job"), CATALOG, advice=False)
