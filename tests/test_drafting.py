"""Speculative decoding with a model or a head that drafts: what it holds and takes, and how it is started."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gpucalc.catalog import open_catalog
from gpucalc.errors import Infeasible, InputError, UnknownName
from gpucalc.formulas import serving_memory as mem
from gpucalc.formulas import serving_time as times
from gpucalc.jobs import resolve
from gpucalc.plan.answer import Plan
from gpucalc.plan.evaluate import Subject
from gpucalc.plan.serve import Deployment, deploy
from gpucalc.planner import plan_job
from gpucalc.report import json as as_json
from gpucalc.search_serving import settle
from gpucalc.spec.engine import EngineSpec
from gpucalc.spec.serve_run import ServeRun
from gpucalc.units import GIB

CATALOG = open_catalog()
DRAFTS = {"num_speculative_tokens": 4, "acceptance_rate": 0.75}
FOUR = (4, "h100-sxm-80gb")


def deployed(model: str, gpus: tuple[int, str], draft: str | None = None, **run: Any) -> Deployment:
    asked = ServeRun.model_validate(
        {"framework": "vllm", "isl": 512, "osl": 128, "draft_model": draft, **run}
    )
    subject = Subject.of(CATALOG.model(model), CATALOG.model(draft) if draft is not None else None)
    cluster = CATALOG.cluster([(None, *gpus)])
    engine = CATALOG.load("engines", asked.framework, EngineSpec)
    settled, _ = settle(subject, asked, cluster, engine)
    return deploy(subject, settled, cluster, engine)


def planned(model: str, gpus: str, **run: Any) -> Plan:
    keys = {"task": "serve", "isl": 1024, "osl": 1024, "concurrency": 1, **run}
    return plan_job(resolve({"model": model, "gpus": gpus, "run": keys}, CATALOG), CATALOG, advice=False)


def test_what_drafts_holds_by_hand() -> None:
    # 80 layers of 1,024 bytes with 16 of 512 beside them: 8,192 more over 80
    assert mem.joined_token_bytes(own_bytes=1024, draft_bytes=16 * 512, layers=80) == 1126.4
    assert mem.draft_head_rank_bytes(head_bytes=8 * GIB, tp=4) == 2 * GIB
    assert mem.draft_cache_bytes(tokens=1000, token_bytes=8192) == 8_192_000


def test_a_model_that_drafts_takes_weights_and_cache_from_the_pool() -> None:
    run = {"tp": 4, "max_model_len": 8192}
    alone = deployed("llama-3.1-70b", FOUR, **run).memory
    small = deployed("llama-3.2-1b", FOUR, **run).memory
    both = deployed("llama-3.1-70b", FOUR, "llama-3.2-1b", **DRAFTS, **run).memory
    assert both.weights.value == alone.weights.value + small.weights.value
    # 80 layers of 2 heads x 128 x 2 sides x 2 bytes on each of four GPUs, and 16 of 2 x 64
    assert alone.kv_bytes_per_token.value == 80 * 2 * 2 * 128 * 2
    assert both.kv_bytes_per_token.value == alone.kv_bytes_per_token.value + 16 * 2 * 2 * 64 * 2
    pool = alone.pool.value - small.weights.value
    assert both.pool.value == pytest.approx(pool)
    assert both.kv_tokens.value == pytest.approx(pool / both.kv_bytes_per_token.value, rel=1e-3)


def test_sglang_loads_what_drafts_into_what_it_keeps_back() -> None:
    run = {"framework": "sglang", "tp": 4}
    head = deployed("llama-3.1-70b", FOUR, draft_head_gib=2.0, **DRAFTS, **run)
    model = deployed("llama-3.1-70b", FOUR, "llama-3.2-1b", **DRAFTS, **run)
    assert model.memory.weights.value == head.memory.weights.value
    fractions = [found.recipe.mem_fraction_static or 0.0 for found in (head, model)]
    kept = (fractions[0] - fractions[1]) * 80 * GIB  # 6 GiB are kept back for a model, 2 for a head
    assert kept == pytest.approx(4 * GIB, rel=0.03)
    tokens = model.memory.kv_tokens.value
    assert model.memory.tree.child("draft_cache").value == tokens * 16 * 2 * 2 * 64 * 2


def test_llama_cpp_spreads_what_drafts_as_the_model() -> None:
    run = {"framework": "llamacpp", "quant": "q4_k_m", "version": "b8171", "max_model_len": 4096}
    two = (2, "rtx-3090")
    alone = deployed("llama-3.3-70b", two, **run).memory
    both = deployed("llama-3.3-70b", two, "llama-3.2-1b", **DRAFTS, **run).memory
    small = deployed("llama-3.2-1b", two, **run).memory
    more = both.tree.value - alone.tree.value
    context = small.tree.child("non_torch").value  # one CUDA context serves both
    assert more == pytest.approx(small.tree.value - context, rel=0.01)


def test_a_head_that_drafts_is_divided_and_caches_one_layer() -> None:
    alone = deployed("llama-3.1-70b", FOUR, tp=4).memory
    head = deployed("llama-3.1-70b", FOUR, tp=4, draft_head_gib=2.0, **DRAFTS).memory
    assert head.weights.value == alone.weights.value + GIB / 2
    assert head.kv_bytes_per_token.value == alone.kv_bytes_per_token.value * 81 / 80


def test_a_model_with_other_words_cannot_draft() -> None:
    with pytest.raises(InputError, match="151,936 words, the model 128,256"):
        deployed("llama-3.1-70b", FOUR, "qwen3-0.6b", tp=4, **DRAFTS)
    # The tables of Qwen2.5 are padded to 152,064 and 151,936: llama.cpp takes 128 words more or less.
    with pytest.raises(InputError, match="a model with the same vocabulary, such as"):
        deployed("qwen2.5-72b", FOUR, "qwen2.5-0.5b", tp=2, **DRAFTS)
    assert deployed("qwen2.5-72b", FOUR, "qwen2.5-0.5b", framework="llamacpp", quant="q4_k_m", **DRAFTS)


def test_a_model_that_does_not_divide_into_the_layout_cannot_draft() -> None:
    with pytest.raises(Infeasible, match=r"qwen2\.5-7b, which drafts: tp 8"):
        deployed("qwen2.5-72b", (8, "h100-sxm-80gb"), "qwen2.5-7b", tp=8, **DRAFTS)


def test_what_drafts_is_stated_whole() -> None:
    for keys, said in (
        ({"draft_model": "llama-3.2-1b"}, "draft_model says nothing without"),
        ({"draft_model": "llama-3.2-1b", "draft_head_gib": 1, **DRAFTS}, "each say what drafts"),
        ({"draft_model": "llama-3.2-1b", "draft_cost": 0.1, **DRAFTS}, "worked out from draft_model"),
        ({"framework": "hf", "draft_model": "llama-3.2-1b"}, "does not apply to hf"),
    ):
        with pytest.raises(ValueError, match=said):
            ServeRun.model_validate({"framework": "vllm", **keys})
    with pytest.raises(UnknownName, match=r"run\.draft_model.*llama-3\.2-1b"):
        planned(
            "llama-3.1-70b", "4xh100-sxm-80gb", framework="vllm", tp=4, draft_model="llama-3.2-1bb", **DRAFTS
        )


def test_a_cycle_is_one_pass_of_the_model_and_one_of_the_other_for_each_draft() -> None:
    run = {"framework": "vllm", "tp": 4, "draft_model": "llama-3.2-1b", **DRAFTS}
    time = planned("llama-3.1-70b", "4xh100-sxm-80gb", **run).time
    assert time is not None
    cycle = time.children[0].children[0]
    assert cycle.name == "verify_and_draft"
    assert [part.name for part in cycle.children] == ["decode", "drafting"]
    # 1 + 0.75 + 0.75^2 + 0.75^3 + 0.75^4
    assert time.children[0].value == pytest.approx(cycle.value / 3.05078125)


def test_the_published_gain_of_a_small_llama() -> None:
    # sgl-project/sglang pull request 10090: Llama 3.1 70B over four GPUs, 63.87 tokens/s alone, 173.38 with
    # Llama 3.2 1B, 3.85 of its five drafts and the model's own token accepted a pass.
    run = {"framework": "sglang", "version": "0.5.3", "tp": 4}
    kept = times.accepted_tokens(acceptance=0.818, drafts=5)
    assert kept == pytest.approx(3.85, rel=0.01)
    drafts = {"draft_model": "llama-3.2-1b", "num_speculative_tokens": 5, "acceptance_rate": 0.818}
    alone = planned("llama-3.1-70b", "4xh100-sxm-80gb", **run).throughput
    both = planned("llama-3.1-70b", "4xh100-sxm-80gb", **run, **drafts).throughput
    assert alone is not None
    assert both is not None
    assert alone.child("tokens_per_s_per_user").value == pytest.approx(63.87, rel=0.2)
    assert both.child("tokens_per_s_per_user").value == pytest.approx(173.38, rel=0.2)


CONFIG = """--speculative-config '{"model": "meta-llama/Llama-3.2-1B", "num_speculative_tokens": 4}'"""


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("0.6.4", "--speculative-model meta-llama/Llama-3.2-1B --num-speculative-tokens 4"),
        ("0.10.0", CONFIG),
        ("0.13.0", None),
        ("0.19.0", CONFIG),
    ],
)
def test_vllm_is_told_what_drafts_in_the_words_of_its_version(version: str, line: str | None) -> None:
    run = {"framework": "vllm", "version": version, "tp": 4, "draft_model": "llama-3.2-1b", **DRAFTS}
    plan = planned("llama-3.1-70b", "4xh100-sxm-80gb", **run)
    assert plan.launch is not None
    if line is None:
        assert "specul" not in plan.launch
        assert sum("lets no model draft" in note for note in plan.notes) == 1
    else:
        assert plan.launch.endswith(line)
        assert not any("draft" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("run", "pattern"),
    [
        (
            {"framework": "sglang", "tp": 4},
            r"STANDALONE --speculative-draft-model-path meta-llama/Llama-3\.2-1B"
            r" --speculative-eagle-topk 1 --speculative-num-steps 4 --speculative-num-draft-tokens 5$",
        ),
        (
            {"framework": "trtllm", "tp": 4},
            r"speculative_config: \{decoding_type: DraftTarget, max_draft_len: 4,"
            r" speculative_model_dir: meta-llama/Llama-3\.2-1B\}",
        ),
        (
            {"framework": "llamacpp", "quant": "q4_k_m"},
            r"-md llama-3\.2-1b-q4_k_m\.gguf -ngld 999 --draft-max 4$",
        ),
    ],
)
def test_other_engines_are_told_what_drafts(run: dict[str, Any], pattern: str) -> None:
    plan = planned("llama-3.1-70b", "4xh100-sxm-80gb", draft_model="llama-3.2-1b", **DRAFTS, **run)
    assert re.search(pattern, plan.launch or "")


def test_a_head_is_named_by_hand() -> None:
    plan = planned("llama-3.1-70b", "4xh100-sxm-80gb", framework="vllm", tp=4, draft_head_gib=2.0, **DRAFTS)
    assert any("its checkpoint is yours to name" in note for note in plan.notes)
    assert "specul" not in (plan.launch or "")


def test_the_document_names_what_drafts_without_its_whole_shape() -> None:
    run = {"framework": "vllm", "tp": 4, "draft_model": "llama-3.2-1b", **DRAFTS}
    plan = planned("llama-3.1-70b", "4xh100-sxm-80gb", **run)
    drafter = as_json.plan(plan, {})["recipe"]["drafter"]
    assert drafter["name"] == "llama-3.2-1b"
    assert "graph" not in drafter
    assert len(json.dumps(drafter)) < 1000


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"vllm serve meta-llama/Llama-3.1-70B -tp 4 {CONFIG}", "run.draft_model=meta-llama/Llama-3.2-1B"),
        (
            "vllm serve meta-llama/Llama-3.1-70B -tp 4 --speculative-model meta-llama/Llama-3.2-1B"
            " --num-speculative-tokens 4",
            "run.draft_model=meta-llama/Llama-3.2-1B",
        ),
        (
            """vllm serve meta-llama/Llama-3.1-70B -tp 4 --speculative-config"""
            """ '{"method": "eagle3", "model": "head", "num_speculative_tokens": 4}'""",
            "run.draft_head_gib=GIB",
        ),
        (
            "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-70B --tp 4"
            " --speculative-algorithm STANDALONE --speculative-draft-model-path small"
            " --speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5",
            "run.draft_model=small",
        ),
        (
            "llama-server -hf meta-llama/Llama-3.1-70B -md small.gguf --draft-max 4",
            "run.draft_model=small.gguf",
        ),
    ],
)
def test_lines_that_draft_ask_for_what_is_accepted(line: str, said: str) -> None:
    notes = [note for note in resolve(line, CATALOG, gpus="4xh100-sxm-80gb").notes if "drafting" in note]
    assert len(notes) == 1
    assert said in notes[0]
    assert "run.num_speculative_tokens=4" in notes[0]


def test_settings_that_are_no_json_are_refused() -> None:
    with pytest.raises(InputError, match="is not a JSON object"):
        resolve(
            "vllm serve meta-llama/Llama-3.1-70B --speculative-config eagle", CATALOG, gpus="4xh100-sxm-80gb"
        )
