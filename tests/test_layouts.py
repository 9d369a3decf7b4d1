"""`plan --search`: the best layouts, what the job's own loses, smaller fleets, and the words for it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from gpucalc.__main__ import main
from gpucalc.catalog import open_catalog
from gpucalc.errors import InputError, UnknownName
from gpucalc.jobs import ResolvedJob, resolve
from gpucalc.layouts import Layouts, best_layouts
from gpucalc.plan.answer import Level
from gpucalc.planner import plan_job
from gpucalc.report.layouts import report
from gpucalc.report.schemas import schema
from gpucalc.report.screen import render, set_word

CATALOG = open_catalog()
SETS = ("run.cp=1", "run.offload=none", "run.micro_batch=1")
HELD = tuple(text.partition("=")[0] for text in SETS)
RUN = {
    "task": "train", "framework": "megatron", "precision": "bf16", "seq_len": 4096, "global_batch": 64,
    "micro_batch": 1, "tp": 8, "recompute": "full",
}  # fmt: skip


def job_of(**changes: Any) -> ResolvedJob:
    return resolve({"model": "llama-3-8b", "gpus": "16xH100-SXM", "run": {**RUN, **changes}}, CATALOG)


@pytest.fixture(scope="module")
def found() -> Layouts:
    return best_layouts(job_of(), CATALOG, held=HELD)


def test_the_best_is_faster_and_says_on_what_keys(found: Layouts) -> None:
    assert found.own_option is not None
    assert found.own_option.step_s is not None
    steps = [option.step_s for option in found.options]
    assert steps == sorted(steps)
    assert steps[0] is not None
    assert steps[0] < found.own_option.step_s
    assert found.differing()["recompute"] == ("full", found.options[0].keys["recompute"])
    assert found.best.time is not None
    assert found.best.time.value == pytest.approx(steps[0])
    lost = sum(own - best for _, own, best in found.terms())
    assert lost == pytest.approx(found.own_option.step_s - steps[0])


def test_the_batch_stays_and_held_keys_too(found: Layouts) -> None:
    assert found.best.layout.global_batch == 64
    assert found.held == {"cp": 1, "micro_batch": 1, "offload": "none"}
    assert all(option.keys["cp"] == 1 for option in found.options)


def test_the_settings_turn_the_job_into_the_best_layout(found: Layouts) -> None:
    sets = [f"run.{key}={set_word(value)}" for key, value in found.settings().items()]
    again = resolve({"model": "llama-3-8b", "gpus": "16xH100-SXM", "run": RUN}, CATALOG, sets=[*SETS, *sets])
    same = best_layouts(again, CATALOG, held=HELD)
    assert same.differing() == {}
    assert "is the best" in render(report(same, "gpucalc plan JOB"))


def test_less_memory_costs_time(found: Layouts) -> None:
    needed = [option.needed_bytes for option in found.front]
    rates = [option.samples_per_s or 0.0 for option in found.front]
    assert needed == sorted(needed)
    assert rates == sorted(rates)


def test_an_own_layout_that_is_not_legal_is_told_why() -> None:
    answer = best_layouts(job_of(pp=3), CATALOG, held=HELD)
    assert answer.own is None
    assert "pp" in " ".join(answer.own_broken)
    assert "is not legal" in render(report(answer, "gpucalc plan JOB"))


def test_rankings_look_at_smaller_fleets() -> None:
    fewest = best_layouts(job_of(), CATALOG, held=HELD, rank="gpus")
    assert fewest.best.gpus == min(size.gpus for size in fewest.sizes if size.option is not None)
    assert fewest.best.gpus < 16
    cheapest = best_layouts(job_of(), CATALOG, held=HELD, rank="cost")
    paid = {size.gpus: size.gpu_s_per_sample for size in cheapest.sizes if size.gpu_s_per_sample}
    assert paid[cheapest.best.gpus] == min(paid.values())
    # What a million tokens cost on the best is what its plan says, failures apart.
    best = next(size for size in cheapest.sizes if size.gpus == cheapest.best.gpus)
    assert cheapest.best.cost is not None
    told = {line.name: line for line in cheapest.best.cost.children}
    assert best.usd_per_million == pytest.approx(told["rental_per_million_tokens"].value, rel=0.02)
    tokens = cheapest.best.throughput.child("tokens_per_s").value  # type: ignore[union-attr]
    per_million = told["energy"].value / (told["gpu_hours"].value / best.gpus * 3600 * tokens) * 1e6
    assert best.kwh_per_million == pytest.approx(per_million)
    assert "of a million tokens" in render(report(cheapest, "gpucalc plan JOB"))


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(UnknownName, match="ranking"):
        best_layouts(job_of(), CATALOG, rank="tim")
    with pytest.raises(InputError, match="training"):
        best_layouts(resolve("serve-llama-3.1-8b", CATALOG), CATALOG)


def test_the_report_reads_in_eighty_columns(found: Layouts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = render(report(found, "gpucalc plan JOB"))
    assert "layouts/s" in text
    assert "of one core" in text
    assert " yours" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_document_holds_the_plan_and_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3-8b", "--gpus", "8xH100-SXM", "--search", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, schema("plan"))
    search = document["search"]
    assert search["legal_layouts"] >= search["fitting_layouts"] > 0
    assert search["layouts_per_s_per_core"] > 0
    assert search["options"][0]["step_s"] == pytest.approx(
        next(line["value"] for line in document["lines"] if line["name"] == "step")
    )


def test_what_hangs_on_the_stage_follows_the_stage_searched() -> None:
    """DeepSpeed's default is stage 0, under which every rank loads a copy; at stage 3 one rank does."""
    run = {
        "task": "train",
        "framework": "deepspeed",
        "precision": "bf16",
        "seq_len": 4096,
        "global_batch": 64,
    }
    data = {"model": "llama-3-70b", "gpus": "8xA100-SXM-80GB", "run": {**run, "host_ram_gb": 1000}}
    answer = best_layouts(resolve(data, CATALOG), CATALOG)
    best = answer.options[0]
    assert best.level is Level.FITS
    assert (best.keys["zero_stage"], best.keys["offload"]) == (3, "params+optimizer-nvme")
    assert {item.key: item.value for item in answer.best.assumptions}["run.host_load"] == "one-rank"
    # The plan of the settings says the same, loading in it.
    sets = [f"run.{key}={set_word(value)}" for key, value in answer.settings().items()]
    plan = plan_job(resolve(data, CATALOG, sets=sets), CATALOG, advice=False)
    assert plan.verdict.level is Level.FITS
    assert plan.verdict.needed.value == pytest.approx(best.needed_bytes)
    assert plan.time is not None
    assert plan.time.value == pytest.approx(best.step_s)
    stated = best_layouts(resolve(data, CATALOG, sets=["run.host_load=every-rank"]), CATALOG)
    assert stated.fitting == 0
    text = render(report(stated, "gpucalc plan JOB"))
    assert "a node's host needs" in text
