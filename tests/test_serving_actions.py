"""What would help a deployment that does not start or misses its targets, and does when done."""

from __future__ import annotations

import pytest
from served import planned, served

from gpucalc.plan.answer import Level
from gpucalc.report import json as as_json
from gpucalc.report import table
from gpucalc.report.screen import render
from gpucalc.units import GIB


@pytest.mark.parametrize(
    ("job", "gpus", "sets"),
    [
        ("serve-gpt-oss-20b", None, ("run.gpu_memory_utilization=0.95",)),
        ("deepseek-r1", "8xh100-sxm-80gb", ()),
        ("llama-3.1-70b", "2xh100-sxm-80gb", ()),
        ("llama-3-70b", "1xrtx-3090", ("run.framework=llamacpp", "run.quant=q4_k_m")),
        ("serve-llama-3.3-70b", None, ()),
    ],
)
def test_actions_bring_what_they_say(job: str, gpus: str | None, sets: tuple[str, ...]) -> None:
    task = None if job.startswith("serve-") else "serve"
    plan = planned(job, gpus, *sets, task=task)
    assert plan.actions
    order = list(Level)
    for action in plan.actions:
        changes = {key: str(value).lower() for key, value in action.changes.items()}
        fleet = changes.pop("gpus", gpus)
        found = planned(job, fleet, *sets, *(f"{key}={value}" for key, value in changes.items()), task=task)
        assert found.verdict.level is action.level, action.title
        assert found.verdict.needed.value == pytest.approx(action.needed_bytes), action.title
        better = order.index(action.level) < order.index(plan.verdict.level)
        faster = plan.throughput is not None and (action.tokens_per_s or 0) > plan.throughput.value
        assert better or faster, action.title


def test_missed_targets_bring_what_meets_them() -> None:
    sets = ("run.concurrency=80",)
    plan = planned("serve-llama-3.3-70b", None, *sets)
    assert plan.throughput is not None
    assert plan.throughput.child("tpot").value * 1e3 > plan.recipe.tpot_ms
    keys = [set(action.changes) for action in plan.actions]
    assert {"run.concurrency"} in keys
    assert {"run.quant"} in keys
    assert any("gpus" in changed for changed in keys)
    for action in plan.actions:
        assert action.step_s is not None
        assert action.step_s * 1e3 <= plan.recipe.tpot_ms, action.title
        changes = {key: str(value) for key, value in action.changes.items()}
        fleet = changes.pop("gpus", None)
        again = (f"{key}={value}" for key, value in changes.items())
        found = planned("serve-llama-3.3-70b", fleet, *sets, *again)
        assert found.time is not None
        assert found.time.value == pytest.approx(action.step_s), action.title
    fewer = next(action for action in plan.actions if "run.concurrency" in action.changes)
    most = next(point for point in plan.loads if point.is_most)
    assert fewer.changes["run.concurrency"] == most.concurrency


def test_targets_nothing_meets_still_bring_what_is_faster() -> None:
    plan = planned("serve-llama-3.3-70b", None, "run.tpot_ms=1")
    assert plan.throughput is not None
    assert plan.actions
    assert all((action.tokens_per_s or 0) > plan.throughput.value for action in plan.actions)
    assert "no load meets the targets" in plan.notes


def test_actions_are_shown_with_their_numbers() -> None:
    plan = served("llama-3.1-70b", "1xh100-sxm-80gb")
    assert plan.verdict.level is Level.DOES_NOT_FIT
    assert plan.loads == ()
    text = render(table.plan(plan), color=False)
    shown = text.split("What would help", 1)[1]
    for action in plan.actions:
        row = next(line for line in shown.splitlines() if line.startswith(f"  {action.title}"))
        assert {"FITS", "MARGINAL"} & set(row.split())
        assert f"{action.needed_bytes / GIB:,.2f} GiB" in row
    document = as_json.plan(plan, {})
    assert [action["needed_bytes"] for action in document["actions"]] == [
        pytest.approx(action.needed_bytes) for action in plan.actions
    ]


def test_two_cards_are_named_for_what_one_does_not_hold() -> None:
    plan = served("llama-3-70b", "1xrtx-3090", "run.framework=llamacpp", "run.quant=q4_k_m")
    assert any(action.changes["gpus"] == "2xrtx-3090" for action in plan.actions)
