"""A deployment at other loads than its own, beside rivals, and in every reader of a plan."""

from __future__ import annotations

from itertools import pairwise

import pytest
from served import CATALOG, planned, served

from gpucalc.jobs import resolve
from gpucalc.plan.serve_loads import ladder
from gpucalc.planner import plan_job
from gpucalc.report import json as as_json
from gpucalc.report import table
from gpucalc.report.screen import render


def test_other_loads_stand_beside_the_job_s_own() -> None:
    plan = planned("serve-llama-3.3-70b")
    assert plan.throughput is not None
    assert len(plan.loads) <= 8
    own = next(point for point in plan.loads if point.is_job)
    assert own.concurrency == plan.recipe.concurrency
    assert own.tokens_per_s_per_gpu == plan.throughput.child("tokens_per_s_per_gpu").value
    most = next(point for point in plan.loads if point.is_most)
    assert most.concurrency == plan.throughput.child("requests_at_targets").value
    for less, more in pairwise(plan.loads):
        assert less.concurrency < more.concurrency
        assert more.tokens_per_s_per_gpu > less.tokens_per_s_per_gpu
        assert more.tokens_per_s_per_user < less.tokens_per_s_per_user
    met = [point.concurrency for point in plan.loads if point.meets_targets]
    missed = [point.concurrency for point in plan.loads if not point.meets_targets]
    assert max(met) == most.concurrency < min(missed)


def test_the_last_load_is_what_runs_at_once() -> None:
    roomy = planned("serve-llama-3.1-8b")
    assert roomy.loads[-1].concurrency == roomy.recipe.max_num_seqs
    assert all(point.meets_targets is None for point in roomy.loads)
    full = served("llama-3.1-8b", "1xh100-sxm-80gb", "run.isl=7000", "run.osl=1000", "run.concurrency=500")
    own = full.loads[-1]
    assert (own.concurrency, own.is_job, own.binds) == (500, True, "cache")
    assert own.queue_s > 0
    assert full.loads[-2].queue_s == 0
    assert full.loads[-2].concurrency < full.recipe.max_num_seqs


@pytest.mark.parametrize(
    ("most", "rows", "wanted"),
    [(1, 6, (1,)), (2, 6, (1, 2)), (15, 6, (1, 2, 4, 8, 15)), (16, 6, (1, 2, 4, 8, 16)),
     (256, 6, (1, 4, 8, 32, 64, 256)), (100, 3, (1, 16, 100))],
)  # fmt: skip
def test_a_ladder_of_loads_by_hand(most: int, rows: int, wanted: tuple[int, ...]) -> None:
    assert ladder(most, rows) == wanted


@pytest.mark.parametrize("width", [80, 120])
def test_loads_are_one_row_each(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    plan = planned("serve-llama-3.3-70b")
    text = render(table.plan(plan), color=False)
    rows = text.split("Speed against throughput", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    assert " ".join(rows[0].split()) == "in flight per user per GPU ttft tpot bound by targets"
    assert len(rows) == 1 + len(plan.loads)
    assert max(map(len, rows)) <= width
    assert [row.split()[0] for row in rows[1:]] == [str(point.concurrency) for point in plan.loads]
    assert any(row.endswith("this job, meets") for row in rows)
    assert any(row.endswith("most that meet") for row in rows)


def test_layouts_an_auto_one_was_chosen_from_stand_beside_it_where_none_beats_them() -> None:
    plan = served("llama-3.3-70b", "8xh100-sxm-80gb")
    others = [point for point in plan.loads if point.layout]
    assert others
    assert {point.layout for point in others} == {"tp 8"}
    for one in others:
        assert not any(
            other.tokens_per_s_per_user > 1.01 * one.tokens_per_s_per_user
            and other.tokens_per_s_per_gpu > 1.01 * one.tokens_per_s_per_gpu
            for other in plan.loads
        )
    speeds = [point.tokens_per_s_per_user for point in plan.loads]
    assert speeds == sorted(speeds, reverse=True)
    assert "tp 8" in render(table.plan(plan), color=False).split("Speed against throughput")[1]
    stated = served("llama-3.3-70b", "8xh100-sxm-80gb", "run.tp=8")
    assert not any(point.layout for point in stated.loads)


def test_loads_are_in_the_document_and_plans_of_training_have_none() -> None:
    document = as_json.plan(planned("serve-llama-3.3-70b"), {})
    assert document["loads"][0]["concurrency"] == 1
    assert {point["meets_targets"] for point in document["loads"]} == {True, False}
    assert planned("llama-3-8b").loads == ()
    assert plan_job(resolve("serve-llama-3.1-8b", CATALOG), CATALOG, advice=False).loads == ()
