"""The documents' estimates beside a plan: one line always, every rule that applies with --rules."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from gpucalc.__main__ import main
from gpucalc.catalog import open_catalog
from gpucalc.claims import claim, claims
from gpucalc.documents import Estimate, estimates, headline
from gpucalc.errors import ExitCode
from gpucalc.jobs import resolve
from gpucalc.plan.answer import Plan
from gpucalc.planner import plan_job

CATALOG = open_catalog()
Capture = pytest.CaptureFixture[str]
LLAMA = 6_738_415_616


def planned(name: str, gpus: str, *sets: str, task: str = "train") -> tuple[Plan, dict[str, Estimate]]:
    job = resolve(name, CATALOG, gpus=gpus, task=task, sets=sets)
    plan = plan_job(job, CATALOG, advice=False)
    return plan, {item.claim: item for item in estimates(plan, CATALOG.cluster(job.fleet))}


def test_headline_by_hand() -> None:
    """(4 + 4 x 8 + 8) x 6.738 GB over 8 cards: 37.06 GB."""
    plan, _ = planned("llama-2-7b", "8xA100-80GB")
    assert plan.layout.global_batch == 8
    told = headline(plan)
    assert told.line.value == pytest.approx(44 * LLAMA / 8)
    assert told.ours is plan.verdict.needed
    assert told.times_ours == pytest.approx(44 * LLAMA / 8 / plan.verdict.needed.value)


def test_the_gap_names_its_cause() -> None:
    sharded, _ = planned("llama-2-7b", "8xA100-80GB")
    assert headline(sharded).why == "it leaves out gradients and activations"
    whole, _ = planned("bert-large-uncased", "8xA100-80GB", "run.framework=ddp", "run.micro_batch=1")
    assert headline(whole).why.endswith("divides by all cards what each of them holds whole")
    large, _ = planned("llama-2-7b", "8xA100-80GB", "run.micro_batch=1", "run.global_batch=1024")
    assert "the active weights anew for each of 1024 samples" in headline(large).why
    served, _ = planned("deepseek-v4-flash", "8xRTX-4090", task="serve")
    assert headline(served).why == "it counts 4 bytes a weight, whatever the weights are stored in"


def test_rules_of_a_sharded_run_by_hand() -> None:
    plan, told = planned("llama-2-7b", "8xA100-SXM-80GB")
    assert told["B09"].line.value == pytest.approx(LLAMA * 4 / 8 * 1.2)
    assert told["B11"].line.value == pytest.approx(0.8 * plan.verdict.capacity.value)
    assert told["B38"].line.value == 0.6
    assert told["B38"].ours is not None
    assert told["B38"].ours.value == 0.875
    assert told["C18"].ours is not None
    assert told["C18"].ours.value == 0
    assert plan.time is not None
    assert told["A32"].line.value == pytest.approx(500 * plan.time.value)
    assert told["B19"].ours is not None
    assert told["B19"].ours.value == 14 * LLAMA
    assert told["B15"].line.value == 2400
    assert told["B15"].ours is not None
    assert told["B15"].ours.value == 3200
    assert "4,000 W of supply" in told["B15"].why
    assert told["B17"].ours is not None
    assert told["B17"].ours.value == 128
    assert told["A47"].line.value == 9
    assert not {"A12", "C36"} & set(told)


def test_rules_apply_where_the_run_does_what_they_speak_of() -> None:
    _, told = planned(
        "llama-2-7b",
        "8xA100-80GB",
        "run.framework=megatron",
        "run.pp=4",
        "run.recompute=full",
        "run.global_batch=32",
    )
    assert told["A12"].ours is not None
    assert told["A12"].ours.value == pytest.approx(1 / 3)
    assert told["C36"].ours is not None
    _, served = planned("llama-2-7b", "1xA100-80GB", task="serve")
    assert not {"B38", "C18", "A12", "A32", "B19"} & set(served)


def test_every_rule_is_a_judged_claim_with_one_sentence() -> None:
    for name, task in (("gpt3-175b-full", None), ("serve-deepseek-v4-flash", None)):
        job = resolve(name, CATALOG, task=task)
        plan = plan_job(job, CATALOG, advice=False)
        for item in estimates(plan, CATALOG.cluster(job.fleet)):
            assert claim(CATALOG, item.claim).spec.id == item.claim
            assert 20 < len(item.why) < 130
            assert "\n" not in item.why


# -- the command ------------------------------------------------------------------------------------


def plan_json(capsys: Capture, *words: str) -> list[dict[str, Any]]:
    assert main(["plan", "llama-2-7b", "--gpus", "8xA100-80GB", "--json", *words]) == ExitCode.ANSWERED
    told: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["documents"]
    return told


def test_json_has_the_headline_always_and_all_with_rules(capsys: Capture) -> None:
    told = plan_json(capsys)
    assert [item["claim"] for item in told] == ["C06"]
    assert told[0]["by_rule"]["formula"] == "memory_rule_card_bytes"
    assert told[0]["by_rule"]["value"] == pytest.approx(44 * LLAMA / 8)
    everything = plan_json(capsys, "--rules")
    assert everything[0] == told[0]
    assert len(everything) > 8


@pytest.mark.parametrize("width", [80, 120])
def test_one_line_in_the_report_and_a_section_with_rules(
    width: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    words = ["plan", "llama-2-7b", "--gpus", "8xA100-80GB"]
    assert main(words) == ExitCode.ANSWERED
    shown = capsys.readouterr().out
    assert shown.count("documents' rule") == 1
    assert "documents' rule 34.52 GiB per GPU" in shown
    assert main([*words, "--rules"]) == ExitCode.ANSWERED
    shown = capsys.readouterr().out
    assert "By the documents' rules" in shown
    assert "ZeRO saves up to 60 %: 60.0 %, here 87.5 %" in " ".join(shown.split())
    assert max(len(line) for line in shown.splitlines()) <= width


def test_a_plan_reads_no_claims_and_no_rules_of_machines() -> None:
    """The one line is cheap: neither the claims nor what --rules needs is loaded for it."""
    code = (
        "import sys; from gpucalc.__main__ import main; "
        "main(['plan', 'llama-2-7b', '--gpus', '8xA100-80GB', '--json']); "
        "print([n for n in ('gpucalc.claims', 'gpucalc.spec.claims', 'gpucalc.formulas.rules_machine')"
        " if n in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "plan models/deepseek-v4-flash --gpus 8xRTX4090 --task train",
            ["uses about 18.2 GB", "claim C07, contradictory", "634 GB a card", "claim C08, contradictory"],
        ),
        (
            "plan models/deepseek-v4-pro --gpus 16xH200 --task serve",
            ["19B activated", "claim C04, wrong", "claim C09, contradictory"],
        ),
        ("plan models/deepseek-r1 --gpus 16xH200 --task serve", ["claim B02, wrong", "67B is DeepSeek LLM"]),
        (
            "plan llama-3-8b --gpus 8xA100 --rules",
            ["TF32 compute 19.5 TFLOPs", "claim A14, wrong", "eight times"],
        ),
        ("plan llama-3-8b --gpus 4xRTX4090 --rules", ["850 W", "claim B16, contradictory", "1,200 W"]),
    ],
)
def test_a_plan_says_what_documents_have_wrong_about_its_model_and_gpus(
    words: str, said: list[str], capsys: Capture
) -> None:
    assert main([*words.split(), "--json"]) == ExitCode.ANSWERED
    notes = " ".join(json.loads(capsys.readouterr().out)["notes"])
    assert [part for part in said if part not in notes] == []


def test_other_plans_carry_no_such_note(capsys: Capture) -> None:
    assert main(["plan", "llama-3-8b", "--gpus", "8xA100", "--json"]) == ExitCode.ANSWERED
    assert "planning document" not in " ".join(json.loads(capsys.readouterr().out)["notes"])


def test_every_claim_about_an_entry_fails_and_the_entry_exists() -> None:
    listed = [(item.spec, entity) for item in claims(CATALOG) for entity in item.spec.about]
    assert len(listed) > 10
    for spec, entity in listed:
        assert spec.verdict.value in ("wrong", "contradictory"), spec.id
        kind, _, name = entity.partition("/")
        assert name in CATALOG.names(kind), spec.id
