"""Plans of deployments: shipped jobs, layouts found, the report and the command."""

from __future__ import annotations

import json
from typing import Any

import pytest
from served import CATALOG, ENGINES, SERVING, cache_line, planned, served
from typer.testing import CliRunner

from gpucalc.cli import app
from gpucalc.errors import InputError
from gpucalc.explain import explain
from gpucalc.jobs import resolve
from gpucalc.plan.answer import Level
from gpucalc.plan.serve_memory import serving_memory
from gpucalc.plan.serve_pass import Server
from gpucalc.planner import plan_job
from gpucalc.report import json as as_json
from gpucalc.report import table
from gpucalc.report.screen import render
from gpucalc.spec.engine import EngineSpec
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.serve_run import ServeRun
from gpucalc.units import GB, GIB

# --- shipped jobs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVING)
def test_every_shipped_job_starts_and_says_how_fast(name: str) -> None:
    plan = planned(name)
    assert isinstance(resolve(name, CATALOG).run, ServeRun)
    assert plan.serves
    assert plan.verdict.level is not Level.DOES_NOT_FIT
    assert plan.launch
    assert plan.time is not None
    assert plan.throughput is not None
    for key in (
        "ttft",
        "tpot",
        "tokens_per_s_per_user",
        "tokens_per_s_per_gpu",
        "max_concurrency",
        "kv_tokens",
    ):
        assert plan.throughput.child(key).value > 0, key
    assert plan.memory.value == pytest.approx(sum(line.value for line in plan.memory.children))
    assert 0 < plan.verdict.expected_error < 0.1


def test_seven_jobs_are_shipped() -> None:
    assert len(SERVING) == 7


def test_deepseek_v4_flash_on_eight_24_gb_cards() -> None:
    """The 18.2 GB a card that are quoted leave out scales, 16-bit tables and what every rank holds whole."""
    plan = planned("serve-deepseek-v4-flash")
    weights = next(line.value for line in plan.memory.children if line.name == "weights") / GB
    quoted = (277.03e9 / 2 + 7.31e9) / 8 / GB
    assert quoted == pytest.approx(18.2, abs=0.05)
    assert 19.4 < weights < 21.0
    assert plan.recipe.weights.name == "fp8+fp4-experts"
    # What is left for the cache is less than a tenth of the card, yet holds more than the requests in flight.
    assert 0 < cache_line(plan, "pool") < 0.1 * 24 * GB
    assert cache_line(plan, "requests_in_cache") > plan.recipe.concurrency
    assert cache_line(plan, "kv_bytes_per_token") == 6880


def test_a_release_older_than_the_model_is_said() -> None:
    """vLLM 0.20.0's registry is the first with DeepseekV4ForCausalLM; 0.8.4's the first with Qwen3."""
    older = planned("serve-deepseek-v4-flash", None, "run.version=0.19.0")
    assert "vLLM 0.19.0 does not know deepseek_v4: 0.20.0 is the first that does" in older.notes
    assert not any("does not know" in note for note in planned("serve-deepseek-v4-flash").notes)
    for version, known in (("0.8.3", False), ("0.8.4", True), ("latest", True)):
        plan = planned("serve-llama-3.1-8b", None, "model=qwen3-8b", f"run.version={version}")
        assert any("does not know qwen3" in note for note in plan.notes) is not known, version
    sglang = served("deepseek-v4-flash", "4xh100-sxm-80gb", "run.tp=4", "run.framework=sglang")
    assert sglang.recipe.version == "0.5.12"
    unsaid = served("deepseek-v4-flash", "4xh100-sxm-80gb", "run.tp=4")
    assert unsaid.recipe.version == "0.20.0"
    assert ("run.version", "the first vLLM that knows deepseek_v4") in [
        (item.key, item.why) for item in unsaid.assumptions
    ]


def test_cards_without_kernels_for_sparse_attention_are_told_and_not_advised() -> None:
    """vLLM's sparse latent attention returns capability.major in [9, 10], in 0.20.0 as in 0.33.0."""
    told = "vLLM has kernels for the attention of deepseek_v4 from compute capability 9.0; GeForce RTX 4090"
    assert any(note.startswith(told) for note in planned("serve-deepseek-v4-flash").notes)
    hopper = planned("serve-deepseek-v4-flash", None, "gpus=4xh100-sxm-80gb", "run.tp=4")
    assert not any("has kernels for" in note for note in hopper.notes)
    short = planned("serve-deepseek-v4-flash", None, "gpus=2xrtx-4090", "run.tp=2")
    assert short.verdict.level is Level.DOES_NOT_FIT
    wider = [action.changes["gpus"] for action in short.actions if "gpus" in action.changes]
    assert wider
    for fleet in wider:
        card = CATALOG.load("gpus", fleet.split("x", 1)[1], GpuSpec)
        assert card.vendor != "NVIDIA" or float(card.compute_capability) >= 9, fleet


def test_a_4_bit_70b_on_two_24_gb_cards_fits_only_in_4_bit() -> None:
    assert planned("serve-llama-3.3-70b-4bit").verdict.level is not Level.DOES_NOT_FIT
    wider = planned("serve-llama-3.3-70b-4bit", None, "run.quant=fp8")
    assert wider.verdict.level is Level.DOES_NOT_FIT
    assert wider.time is None
    assert wider.throughput is None
    assert any("would refuse to start" in note for note in wider.notes)


def test_llama_cpp_decodes_near_the_published_rate() -> None:
    """llama-bench of May 2024, RTX 3090, 8B Q4_K_M: 111.7 tokens/s; newer builds launch less."""
    plan = planned("serve-llama-3-8b-llamacpp", None, "run.version=b2900")
    assert plan.throughput is not None
    per_user = plan.throughput.child("tokens_per_s_per_user").value
    assert per_user == pytest.approx(111.7, rel=0.15)
    newest = planned("serve-llama-3-8b-llamacpp")
    assert newest.throughput is not None
    assert newest.throughput.child("tokens_per_s_per_user").value > 1.1 * per_user


def test_gpt_oss_at_95_percent_is_not_sure_to_start() -> None:
    tight = planned("serve-gpt-oss-20b", None, "run.gpu_memory_utilization=0.95")
    assert tight.verdict.level is not Level.FITS
    assert planned("serve-gpt-oss-20b").verdict.level is Level.FITS


# --- layouts -----------------------------------------------------------------------------------------------


def test_auto_takes_the_fewest_gpus_that_hold_the_model() -> None:
    plan = served("llama-3.1-70b", "8xh100-sxm-80gb")
    layout = plan.layout
    assert layout.tp * layout.pp < 8
    assert layout.replicas * layout.engine_gpus == 8
    assert any(item.key == "run.tp" and "of" in item.why for item in plan.assumptions)
    assert served("llama-3.1-8b", "8xh100-sxm-80gb").layout.replicas == 8


def test_a_model_too_large_for_a_node_gets_a_pipeline() -> None:
    plan = served("deepseek-r1", "2x8xh100-sxm-80gb")
    assert plan.layout.pp == 2
    assert plan.verdict.level is not Level.DOES_NOT_FIT


def test_targets_choose_the_layout() -> None:
    relaxed = served("llama-3.1-70b", "8xh100-sxm-80gb", "run.tpot_ms=200")
    quick = served("llama-3.1-70b", "8xh100-sxm-80gb", "run.tpot_ms=16")
    assert quick.layout.tp >= relaxed.layout.tp
    assert quick.throughput is not None
    assert quick.throughput.child("tpot").value * 1e3 < 16 or any(
        "meets the targets" in item.why for item in quick.assumptions
    )


def test_an_auto_layout_over_64_gpus_weighs_each_layout_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second's work: memory once for each layout and recipe, speed for few of them."""
    weighed, passes = [], []
    forward = Server.forward_pass

    def count_memory(*args: Any, **keys: Any) -> Any:
        weighed.append((args[1], args[2].memory_key()))
        return serving_memory(*args, **keys)

    def count_pass(*args: Any, **keys: Any) -> Any:
        passes.append(args)
        return forward(*args, **keys)

    monkeypatch.setattr("gpucalc.plan.serve.serving_memory", count_memory)
    monkeypatch.setattr(Server, "forward_pass", count_pass)
    sets = ("run.pp=auto", "run.dp=auto", "run.ep=auto", "run.tpot_ms=50")
    job = resolve("deepseek-r1", CATALOG, gpus="8x8xh100-sxm-80gb", task="serve", sets=sets)
    plan = plan_job(job, CATALOG)
    assert plan.layout.gpus == 64
    degrees = [(one.tp, one.pp, one.dp, one.ep, key) for one, key in weighed]
    assert len(degrees) == len(set(degrees)) < 350
    assert len(passes) < 300


def test_a_request_rate_is_as_many_in_flight_as_it_keeps() -> None:
    """Little's law: what arrives in a second times what each stays, some two percent above at most."""
    plan = served("llama-3.1-8b", "2xh100-sxm-80gb", "run.request_rate=20")
    assert plan.throughput is not None
    rate = plan.throughput.child("requests_per_s").value
    assert 20 <= rate < 21
    stays = plan.throughput.child("request").value
    assert plan.recipe.concurrency == pytest.approx(20 * stays, rel=0.05)
    assert f"20 requests/s keep {plan.recipe.concurrency:,} in flight" in plan.notes
    assert plan.throughput.child("requests_per_s_at_most").value > rate
    assert any(point.is_job and point.concurrency == plan.recipe.concurrency for point in plan.loads)


def test_a_rate_above_the_most_is_said() -> None:
    plan = served("llama-3.1-8b", "1xrtx-4090", "run.request_rate=1000")
    assert plan.throughput is not None
    most = plan.throughput.child("requests_per_s_at_most").value
    assert most == pytest.approx(plan.throughput.child("requests_per_s").value)
    assert f"1000 requests/s arrive, at most {most:,.2f} leave: the queue grows" in plan.notes
    less = served("llama-3.1-8b", "1xrtx-4090", "run.request_rate=20")
    enough = [action for action in less.actions if "gpus" in action.changes]
    assert enough, "cards that keep up are named"
    again = served("llama-3.1-8b", str(enough[0].changes["gpus"]), "run.request_rate=20")
    assert again.throughput is not None
    assert again.throughput.child("requests_per_s").value >= 20


def test_a_layout_for_a_rate_keeps_up_with_it() -> None:
    sets = ("run.dp=auto", "run.ep=auto")
    slow = served("deepseek-r1", "16xh200-sxm-141gb", *sets, "run.request_rate=2")
    fast = served("deepseek-r1", "16xh200-sxm-141gb", *sets, "run.request_rate=20")
    assert slow.throughput is not None
    assert fast.throughput is not None
    assert fast.throughput.child("requests_per_s").value >= 20
    assert slow.throughput.child("tpot").value < fast.throughput.child("tpot").value


def test_an_engine_is_planned_where_it_runs() -> None:
    with pytest.raises(InputError, match="TensorRT-LLM does not run on Instinct MI300X"):
        served("llama-3.1-8b", "1xmi300x", "run.framework=trtllm")
    with pytest.raises(InputError, match="vLLM does not run on Apple"):
        served("llama-3.1-8b", "1xapple-m4-max")
    assert served("llama-3.1-8b", "1xapple-m4-max", "run.framework=llamacpp", "run.quant=q8_0").time
    assert served("llama-3.1-8b", "1xmi300x").verdict.level is Level.FITS
    with pytest.raises(InputError, match="no kernels for these weights on Tesla V100"):
        served("llama-3.1-8b", "1xv100-sxm2-32gb", "run.quant=awq")
    with pytest.raises(InputError, match=r"on cards of 8\.0 and up"):
        served("llama-3.1-8b", "1xt4", "run.quant=fp8", "run.version=0.6.3")
    assert served("llama-3.1-8b", "1xt4", "run.quant=fp8", "run.version=0.19.0").recipe.dtype == "fp16"


def test_cards_without_bf16_are_served_in_fp16() -> None:
    plan = served("qwen3-0.6b", "1xv100-sxm2-32gb")
    assert plan.recipe.dtype == "fp16"
    assert "--dtype float16" in (plan.launch or "")
    assert any(item.key == "run.dtype" and "no bf16 rate" in item.why for item in plan.assumptions)
    asked = served("qwen3-0.6b", "1xv100-sxm2-32gb", "run.dtype=bf16")
    assert asked.time is None
    assert any("does not multiply in that type" in note for note in asked.notes)


def test_a_version_is_a_release_and_has_a_printed_default() -> None:
    for name in ENGINES:
        spec = CATALOG.load("engines", name, EngineSpec)
        extra = ("run.quant=q8_0",) if name == "llamacpp" else ()
        plan = served("llama-3.1-8b", "1xh100-sxm-80gb", f"run.framework={name}", *extra)
        chosen = next(item for item in plan.assumptions if item.key == "run.version")
        assert (chosen.value, plan.recipe.version) == (spec.default_version, spec.default_version)
    with pytest.raises(InputError, match="is no release of vLLM"):
        served("llama-3.1-8b", "1xh100-sxm-80gb", "run.version=banana")
    later = served("llama-3.1-8b", "1xh100-sxm-80gb", "run.version=0.40.0")
    assert any("newer than 0.33.0, the last release read" in item.why for item in later.assumptions)
    assert served("llama-3.1-8b", "1xh100-sxm-80gb", "run.version=main").recipe.max_num_seqs == 1024


def test_one_load_is_asked_for() -> None:
    both = ("run.request_rate=2", "run.concurrency=4")
    with pytest.raises(InputError, match="one of the two"):
        served("llama-3.1-8b", "1xh100-sxm-80gb", *both)
    with pytest.raises(InputError, match="request_rate"):
        served("llama-3.1-8b", "1xh100-sxm-80gb", "run.framework=llamacpp", "run.request_rate=2")


def test_experts_may_be_spread_over_every_rank() -> None:
    sliced = served("deepseek-r1", "8xh200-sxm-141gb", "run.tp=8")
    spread = served("deepseek-r1", "8xh200-sxm-141gb", "run.tp=8", "run.ep=8")
    assert spread.layout.ep == 8
    assert "--enable-expert-parallel" in (spread.launch or "")
    assert "--enable-expert-parallel" not in (sliced.launch or "")
    weights = [
        next(line.value for line in plan.memory.children if line.name == "weights")
        for plan in (sliced, spread)
    ]
    assert weights[0] == pytest.approx(weights[1], rel=0.001)


def test_data_parallel_ranks_of_a_dense_model_are_copies() -> None:
    plan = served("llama-3.1-8b", "4xh100-sxm-80gb", "run.tp=1", "run.dp=4")
    assert (plan.layout.dp, plan.layout.replicas) == (1, 4)


# --- what is said ------------------------------------------------------------------------------------------


def test_requests_that_wait_are_said() -> None:
    plan = served("llama-3.1-8b", "1xh100-sxm-80gb", "run.isl=7000", "run.osl=1000", "run.concurrency=500")
    assert any("500 are in flight: the rest wait" in note for note in plan.notes)


def test_the_report_shows_verdict_cache_and_launch_line() -> None:
    text = render(table.plan(planned("serve-llama-3.1-8b")), color=False)
    for words in (
        "FITS  needs",
        "Memory per GPU",
        "Cache on one GPU",
        "kv_tokens",
        "vllm serve",
        "Throughput",
    ):
        assert words in text, words
    wide = max(len(line) for line in text.splitlines())
    assert wide <= 120


def test_the_document_has_the_same_numbers() -> None:
    plan = planned("serve-llama-3.1-8b")
    document = as_json.plan(plan, {})
    json.dumps(document, allow_nan=False)
    assert document["launch"] == plan.launch
    assert document["recipe"]["weights"]["name"] == "bf16"
    lines = {line["name"]: line for line in document["lines"]}
    cache_parts = {line["name"]: line for line in lines["cache"]["children"]}
    assert cache_parts["pool"]["value"] == pytest.approx(cache_line(plan, "pool"))


def test_a_pool_is_explained_down_to_its_facts() -> None:
    found = explain(planned("serve-llama-3.1-8b").root, "cache.pool")
    assert found.formula == "vllm_pool_bytes"
    names = {given.name for given in found.inputs}
    assert names == {
        "budget_bytes", "weights_bytes", "activation_peak_bytes", "non_torch_bytes", "graphs_bytes",
    }  # fmt: skip


def test_the_command_plans_a_deployment() -> None:
    found = CliRunner().invoke(app, ["plan", "serve-llama-3-8b-llamacpp"])
    assert found.exit_code == 0, found.output
    assert "llama-server -m llama-3-8b-q4_k_m.gguf" in found.output
    quiet = CliRunner().invoke(app, ["plan", "serve-gpt-oss-20b", "--quiet"])
    assert quiet.output.startswith("FITS")
    strict = CliRunner().invoke(
        app, ["plan", "llama-3.1-70b", "--gpus", "1xRTX4090", "--task", "serve", "--strict"]
    )
    assert strict.exit_code == 1
    assert "DOES NOT FIT" in strict.output


def test_one_card_never_holds_more_than_its_memory_by_budget() -> None:
    for name in SERVING:
        plan = planned(name)
        assert plan.verdict.capacity.value < 141 * GB
        assert cache_line(plan, "pool") / GIB < 141
