"""Time of deployments: every formula by hand, and the laws that speed keeps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from gpucalc.catalog import open_catalog
from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.formulas import serving_time as f
from gpucalc.plan.evaluate import Subject
from gpucalc.plan.serve import Deployment, deploy
from gpucalc.plan.serve_loads import at_targets, pareto
from gpucalc.plan.serve_pass import Server, since
from gpucalc.plan.serve_rates import Load
from gpucalc.plan.serve_time import binding, serving_time
from gpucalc.plan.serving_layout import ServingTime, Traffic
from gpucalc.search_serving import settle
from gpucalc.spec.engine import EngineSpec
from gpucalc.spec.engine_speed import weight_class
from gpucalc.spec.figure import Figure, FigureKind
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.serve_run import ServeRun

CATALOG = open_catalog()


@cache
def subject(name: str) -> Subject:
    return Subject.of(CATALOG.model(name))


@cache
def engine(name: str) -> EngineSpec:
    return CATALOG.load("engines", name, EngineSpec)


def cluster_of(count: int, gpu: str) -> Cluster:
    return CATALOG.cluster([(None, count, gpu)])


def deployed(model: str, gpus: tuple[int, str], **run: object) -> tuple[Deployment, EngineSpec, Cluster]:
    settings = {"framework": "vllm", "isl": 1024, "osl": 256, "max_model_len": 16384, **run}
    asked = ServeRun.model_validate(settings)
    cluster = cluster_of(*gpus)
    spec = engine(asked.framework)
    settled, _ = settle(subject(model), asked, cluster, spec)
    return deploy(subject(model), settled, cluster, spec), spec, cluster


def timed(model: str, gpus: tuple[int, str], kv_tokens: float | None = None, **run: Any) -> ServingTime:
    found, spec, cluster = deployed(model, gpus, **run)
    room = found.cached_tokens if kv_tokens is None else kv_tokens
    return serving_time(subject(model).graph, found.layout, found.recipe, spec, cluster, kv_tokens=room)


ONE = ("llama-3.1-8b", (1, "h100-sxm-80gb"))


# --- formulas by hand --------------------------------------------------------------------------------------


def test_reading_weights_by_hand() -> None:
    rates = {"bandwidth_bytes_per_s": 2e12, "kernel_share": 0.8, "read_share": 0.9, "multiprocessors": 100}
    assert f.weight_read_bytes_per_s(**rates, each_bytes_per_s=20e9) == 1.6e12  # the kernel's share binds
    assert f.weight_read_bytes_per_s(**rates, each_bytes_per_s=10e9) == 1e12  # the multiprocessors do
    assert f.read_s(bytes_moved=3e9, rate_bytes_per_s=1.5e12) == 0.002


def test_experts_touched_by_hand() -> None:
    assert f.experts_touched(experts=8, top_k=2, tokens=1) == 2
    # 8 (1 - 0.75^4)
    assert f.experts_touched(experts=8, top_k=2, tokens=4) == pytest.approx(5.46875)
    assert f.experts_touched(experts=128, top_k=8, tokens=10_000) == pytest.approx(128)


def test_products_by_hand() -> None:
    # 2 matrices of 100 x 50 in 4.5 bits, 3 rows read in 16 bits and written in 16 bits
    moved = f.product_bytes(
        matrices=2, inputs=100, outputs=50, bytes_per_param=0.5625, rows=3, operand_bytes=2, result_bytes=2
    )
    assert moved == 2 * 100 * 50 * 0.5625 + 3 * (200 + 100)
    assert f.multiply_s(flops=4e12, peak_flops_per_s=1e15, mfu_max=0.8, compute_share=0.5) == 0.01
    assert f.product_s(multiply_s=3.0, read_s=4.0, p=2, kernel_share=1.0) == 5.0
    assert f.product_s(multiply_s=3.0, read_s=4.0, p=2, kernel_share=0.8) == 6.25


def test_tiles_by_hand() -> None:
    # 4,096 rows over 128 experts, and half a tile of 128 more for each
    assert f.tiled_rows(rows=4096, experts=128, tokens=512, tile=128) == 12_288
    assert f.tiled_rows(rows=256, experts=82, tokens=32, tile=128) == 256 + 82 * 16


# ggml-org/llama.cpp pull request 22298: a prompt of 2,048 tokens, by tokens a pass.
@pytest.mark.parametrize(("tokens", "published"), [(128, 1768.79), (256, 2552.34), (512, 3487.80)])
def test_experts_compute_whole_tiles(tokens: int, published: float) -> None:
    run = {"framework": "llamacpp", "quant": "q4_k_m", "version": "b8900", "isl": 2048, "osl": 1}
    run |= {"max_model_len": 4096, "max_num_batched_tokens": tokens}
    time = timed("gemma-4-26b-a4b", (1, "rtx-3090"), concurrency=1, **run)
    assert 2048 / time.prefill_s.value == pytest.approx(published, rel=0.2)


def test_attention_by_hand() -> None:
    assert f.cache_read_bytes(requests=4, context=1000, token_bytes=4096) == 16_384_000
    # read once, copied (2), written and read for each of 4 query heads
    assert f.rewritten_cache_bytes(cache_bytes=10, heads_per_kv=4) == 110
    assert f.ungrouped_cache_bytes(cache_bytes=10, heads_per_kv=8) == 80
    assert f.decode_attention_flops(requests=2, heads=32, context=100, qk_dim=128, v_dim=128) == 3_276_800
    assert f.chunk_pairs(tokens=100, before=400, span=10_000) == 45_000
    assert f.chunk_pairs(tokens=100, before=400, span=128) == 12_800
    assert f.state_bytes(requests=3, heads=16, key_dim=128, value_dim=64, element_bytes=4) == 3_145_728


def test_gaps_by_hand() -> None:
    assert f.gaps_s(layers=32, layer_s=70e-6) == pytest.approx(2.24e-3)
    assert f.expert_launches_s(experts=6, matrices=3, launch_s=38e-6) == pytest.approx(684e-6)
    assert f.requests_in_flight(requests_per_s=20, request_s=8.5) == 170
    assert f.widened_bytes(matrices=2, inputs=4096, outputs=1024, bytes_per_param=0.5625) == 21_495_808
    assert f.between_passes_s(step_s=800e-6, requests=100, request_s=25e-6) == pytest.approx(3.3e-3)
    assert f.engine_all_reduce_s(collective_s=30e-6, alpha_s=10e-6, latency_share=0.5) == pytest.approx(25e-6)
    assert f.handoffs_s(boundaries=3, send_s=20e-6, handoff_s=100e-6) == pytest.approx(360e-6)


def test_prompts_by_hand() -> None:
    assert f.computed_tokens(isl=1000, prefix_hit=0.9) == pytest.approx(100)
    assert f.computed_tokens(isl=1000, prefix_hit=1.0) == 1
    assert f.prefill_s(chunks=4, chunk_s=0.1, pp=1) == pytest.approx(0.4)
    assert f.prefill_s(chunks=4, chunk_s=0.1, pp=3) == pytest.approx(0.2)
    assert f.prompts_per_s(caches=2, pp=1, prefill_s=0.1) == 20


def test_a_full_queue_of_launches_by_hand() -> None:
    # 81 layers with the output layer, 21 on the fullest of 4 GPUs, 7 x 4 + 22 kernels each
    assert f.stage_launches(layers=80, pp=4, products=7, product_launches=4, layer_launches=22) == 1050
    assert f.stage_launches(layers=79, pp=4, products=7, product_launches=4, layer_launches=22) == 1000
    assert f.chunks_queued(launches=2000, queue=1000, copies=4) == 0.5
    assert f.chunks_queued(launches=100, queue=1000, copies=4) == 4

    def stages(chunks: int, queued: float, pp: int = 4) -> float:
        return float(f.queued_prefill_s(chunks=chunks, chunk_s=pp, pp=pp, queued=queued))

    # One chunk takes the four stages. Of half a chunk queued the next starts as the last stage is half done.
    assert stages(1, 0.5) == 4
    assert stages(2, 0.5) == 4 + 3.5
    assert stages(3, 0.5) == 4 + 2 * 3.5
    # One and a quarter: pairs a stage apart; the next pair starts when the last stage has done three quarters
    # of the first chunk, 3.75 after that began.
    assert stages(2, 1.25) == 5
    assert stages(3, 1.25) == 3.75 + 4
    assert stages(4, 1.25) == 3.75 + 5
    assert stages(5, 1.25) == 7.5 + 4
    assert stages(8, 4) == 4 + 7  # never idle: as prefill_s
    assert stages(3, 0.5, pp=1) == 3


def test_many_requests_by_hand() -> None:
    assert f.held_tokens(isl=1000, osl=200, reserves=False) == 1100
    assert f.held_tokens(isl=1000, osl=200, reserves=True) == 1200
    assert f.cache_requests(kv_tokens=55_000, held=1100) == 50
    assert f.running_requests(offered=64, cache=50, limit=256) == 50
    assert f.running_requests(offered=64, cache=500, limit=32) == 32
    # 100 requests end every 250 passes; their prompts of 1000 tokens come in chunks of 2000
    assert f.chunk_passes(requests=100, computed=1000, osl=250, chunk=2000) == 0.2
    assert f.mixed_period_s(decode_s=0.01, mixed_s=0.06, chunk_passes=0.2) == pytest.approx(0.02)
    assert f.mixed_period_s(decode_s=0.01, mixed_s=0.06, chunk_passes=2) == pytest.approx(0.12)
    assert f.alternating_period_s(decode_s=0.01, chunk_s=0.05, chunk_passes=0.2) == pytest.approx(0.02)
    assert f.request_s(first_token_s=0.5, period_s=0.02, osl=101) == pytest.approx(2.5)
    assert f.output_tokens_per_s(requests=50, osl=101, request_s=2.5) == pytest.approx(2020)
    assert f.repeated_rate_tokens_per_s(each_tokens_per_s=2500, times=4) == 10_000
    assert f.tokens_per_s_per_user(period_s=0.02) == 50
    assert f.requests_per_s(tokens_per_s=2020, osl=101) == 20
    # Little: 80 offered at 20 a second stay 4 s, 2.5 s of them served
    assert f.queue_s(offered=80, running=50, request_s=2.5) == pytest.approx(1.5)
    assert f.queue_s(offered=40, running=40, request_s=2.5) == 0
    assert f.burst_first_token_s(requests=9, prefill_s=0.1) == pytest.approx(0.5)


def test_speculation_and_two_pools_by_hand() -> None:
    # 1 + 0.5 + 0.25
    assert f.accepted_tokens(acceptance=0.5, drafts=2) == pytest.approx(1.75)
    assert f.accepted_tokens(acceptance=1.0, drafts=4) == 5
    assert f.accepted_tokens(acceptance=0.0, drafts=4) == 1
    assert f.speculative_period_s(verify_s=0.03, draft_s=0.001, drafts=5, accepted=3.5) == pytest.approx(0.01)
    assert f.paced_tokens_per_s(decoded=2500, prompts=20, caches=2, osl=200) == 2000
    assert f.paced_tokens_per_s(decoded=1500, prompts=20, caches=2, osl=200) == 1500
    assert f.cache_transfer_bytes(isl=1000, token_bytes=131_072) == 131_072_000


def test_columns_give_what_numbers_give() -> None:
    loads = np.array([0.2, 2.0])
    both = f.mixed_period_s(decode_s=0.01, mixed_s=0.06, chunk_passes=loads)
    assert both == pytest.approx([0.02, 0.12])
    assert f.accepted_tokens(acceptance=np.array([0.5, 1.0]), drafts=2) == pytest.approx([1.75, 3])


def test_classes_of_weights() -> None:
    assert weight_class(2.0, quantised=False) == "w16"
    assert weight_class(1.0, quantised=True) == "w8a8"
    assert weight_class(1.03, quantised=False) == "w8a16"
    assert weight_class(0.53, quantised=False, name="awq") == "w4a16"
    assert weight_class(0.5625, quantised=True, name="nvfp4") == "w4a4"
    assert weight_class(0.2, quantised=False, name="iq1_s") == "w2a16"


# --- a stream by hand --------------------------------------------------------------------------------------


def test_one_stream_reads_every_weight_once() -> None:
    found, spec, cluster = deployed(*ONE, version="0.10.0")
    server = Server(subject("llama-3.1-8b").graph, found.layout, found.recipe, spec, cluster)
    line = server.forward_pass(Load(requests=1, context=1000))
    assert line.value == pytest.approx(sum(part.value for part in line.children))
    assert spec.speed is not None
    wide = spec.speed.weights["w16"]
    # 7.50 billion parameters without the token table, 16 bit, at what H100's kernels reach
    read = 7.5e9 * 2 / (3350e9 * min(wide.read_share.si, 0.815))
    assert line.child("products").value == pytest.approx(read, rel=0.02)
    # 32 layers of 8 heads of 128, keys and values in 16 bit
    cache_s = 1000 * 131_072 / (3350e9 * 0.808 * spec.speed.attention_share.si)
    assert line.child("attention").value == pytest.approx(cache_s, rel=0.02)
    assert line.child("gaps").value == pytest.approx(32 * wide.layer_gap.si)


def test_figures_by_version() -> None:
    def figure(value: float) -> Figure:
        return Figure(value=value, unit="us", kind=FigureKind.MEASURED, source=("x",))

    table = {"0": figure(870), "4.48": figure(610)}
    assert since(table, "4.46.0").value == 870
    assert since(table, "4.51.3").value == 610
    assert since(table, "main").value == 610
    with pytest.raises(InputError):
        since({}, "1")


def test_older_kernels_are_slower() -> None:
    run: dict[str, Any] = {"max_model_len": 4096, "concurrency": 1}
    old = timed("llama-2-7b", (1, "a100-sxm-80gb"), quant="awq", version="0.3.3", **run)
    new = timed("llama-2-7b", (1, "a100-sxm-80gb"), quant="awq", version="0.6.3", **run)
    assert old.decode_step_s.value > 1.2 * new.decode_step_s.value


# --- laws --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 8, 64])
@pytest.mark.parametrize("framework", ["vllm", "sglang", "trtllm"])
def test_more_bandwidth_is_never_slower(framework: str, concurrency: int) -> None:
    found, spec, cluster = deployed(*ONE, framework=framework, concurrency=concurrency)
    pool = cluster.pools[0]
    bandwidth = pool.gpu.memory_bandwidth
    faster = pool.gpu.model_copy(
        update={"memory_bandwidth": bandwidth.model_copy(update={"value": 1.5 * bandwidth.value})}
    )
    better = replace(cluster, pools=(replace(pool, gpu=faster),))
    before, after = (
        serving_time(subject("llama-3.1-8b").graph, found.layout, found.recipe, spec, one, kv_tokens=4e5)
        for one in (cluster, better)
    )
    assert after.decode_step_s.value < before.decode_step_s.value
    assert after.prefill_s.value <= before.prefill_s.value
    assert after.output_tokens_per_s.value > before.output_tokens_per_s.value


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v2-lite"])
@pytest.mark.parametrize("framework", ["vllm", "sglang", "trtllm"])
def test_more_requests_never_lower_the_total_and_never_speed_up_a_user(model: str, framework: str) -> None:
    found, spec, cluster = deployed(model, (1, "h200-sxm-141gb"), framework=framework, max_num_seqs=512)
    points = pareto(
        subject(model).graph, found.layout, found.recipe, spec, cluster, kv_tokens=found.cached_tokens
    )
    assert len(points) > 5
    for less, more in pairwise(points):
        assert more.output_tokens_per_s.value >= 0.999 * less.output_tokens_per_s.value
        assert more.decode_step_s.value >= 0.999 * less.decode_step_s.value


@pytest.mark.parametrize("framework", ["vllm", "trtllm"])
def test_a_full_cache_caps_the_total_and_queues_the_rest(framework: str) -> None:
    kv_tokens = 40_000.0
    at = [timed(*ONE, kv_tokens, framework=framework, concurrency=load) for load in (8, 200, 400)]
    assert at[0].binds != "cache"
    assert at[0].queue_s is not None
    assert at[0].queue_s.value == 0
    held = 1024 + 256 * (1 if framework == "trtllm" else 0.5)
    for point in at[1:]:
        assert point.binds == "cache"
        assert point.concurrency == int(kv_tokens / held)
        assert point.notes
    assert at[2].output_tokens_per_s.value == pytest.approx(at[1].output_tokens_per_s.value)
    assert at[1].queue_s is not None
    assert at[2].queue_s is not None
    assert at[2].queue_s.value > at[1].queue_s.value > 0


def test_a_request_that_does_not_fit_the_cache_is_refused() -> None:
    with pytest.raises(InputError, match="does not fit the cache"):
        timed(*ONE, kv_tokens=1000.0)


def test_a_model_that_generates_nothing_is_refused() -> None:
    found, spec, cluster = deployed(*ONE)
    graph = subject("bert-base-uncased").graph
    with pytest.raises(UnsupportedModel):
        serving_time(graph, found.layout, found.recipe, spec, cluster, kv_tokens=1e6)


def test_weights_an_engine_has_no_kernels_for_have_no_known_speed() -> None:
    with pytest.raises(InputError, match="is not known"):
        timed("llama-3-8b", (1, "rtx-4090"), framework="vllm", quant="iq2_xs", max_model_len=4096)


@pytest.mark.parametrize(
    ("model", "gpu", "quant", "published"),
    [
        # Tables of ggml-org/llama.cpp pull requests: 8215 (July 2024, one row at a time) and 19053 (2026).
        ("llama-3-8b", "rtx-3090", "iq3_xxs", 143.5),
        ("llama-3-8b", "rtx-4090", "iq3_xxs", 235.6),
        ("llama-3-8b", "rtx-6000-ada", "q4_0", 168.9),
        ("llama-3.2-3b", "rtx-6000-ada", "q4_k_m", 315.1),
        ("gpt-oss-20b", "rtx-6000-ada", "mxfp4", 253.9),
        ("gpt-oss-20b", "rtx-pro-6000-maxq", "mxfp4", 353.2),
    ],
)
def test_newer_builds_of_llama_cpp_are_within_three_tenths(
    model: str, gpu: str, quant: str, published: float
) -> None:
    run = {"framework": "llamacpp", "quant": quant, "isl": 1, "osl": 128, "max_model_len": 4096}
    assert 1 / timed(model, (1, gpu), **run).decode_step_s.value == pytest.approx(published, rel=0.3)


@pytest.mark.parametrize(
    ("model", "gpus", "run", "tpot_ms"),
    [
        # vllm-project/vllm pull request 43232: 847 tokens/s at 64 in flight, prompts of 30,000 tokens.
        (
            "qwen3-235b-a22b",
            (4, "b200-sxm"),
            {"version": "0.21.0", "quant": "fp8", "kv_dtype": "fp8", "tp": 4, "isl": 30000, "osl": 1000,
             "concurrency": 64, "max_model_len": 32768, "gpu_memory_utilization": 0.85},
            64 / 847 * 1e3,
        ),
        # ai-bot-pro/achatbot pull request 183: 1,024 tokens take 8.43 s, 2.73 of them to the first.
        (
            "gpt-oss-20b",
            (1, "h100-sxm-80gb"),
            {"framework": "sglang", "isl": 512, "osl": 1024, "concurrency": 4},
            (8432 - 2731) / 1023,
        ),
    ],
)  # fmt: skip
def test_runs_no_constant_was_fitted_to_are_within_a_quarter(
    model: str, gpus: tuple[int, str], run: dict[str, Any], tpot_ms: float
) -> None:
    assert 1e3 * timed(model, gpus, **run).decode_step_s.value == pytest.approx(tpot_ms, rel=0.25)


# llama-bench of May 2024 (XiongjieDai/GPU-Benchmarks-on-LLM-Inference@aa72e0e).
@pytest.mark.parametrize(
    ("model", "quant", "published"),
    [
        ("llama-3-8b", "f16", {512: 1175.40, 4096: 1194.21}),
        ("llama-3-8b", "q4_k_m", {512: 994.04, 4096: 979.47}),
        ("llama-3-70b", "f16", {512: 147.58, 4096: 133.75}),
        ("llama-3-70b", "q4_k_m", {512: 118.79, 4096: 109.53}),
    ],
)
def test_metal_multiplies_with_weights_as_they_are_stored(
    model: str, quant: str, published: dict[int, float]
) -> None:
    run = {"framework": "llamacpp", "version": "b2900", "quant": quant, "osl": 1, "max_model_len": 8200}
    for prompt, speed in published.items():
        time = timed(model, (1, "apple-m2-ultra"), isl=prompt, concurrency=1, **run)
        assert prompt / time.prefill_s.value == pytest.approx(speed, rel=0.2), prompt


def test_experts_were_started_one_by_one_before_april_2025() -> None:
    run = {"framework": "llamacpp", "quant": "q4_k_m", "isl": 512, "osl": 128, "max_model_len": 4096}
    old = timed("deepseek-v2-lite", (1, "rtx-4090"), version="b5000", **run)
    new = timed("deepseek-v2-lite", (1, "rtx-4090"), version="b6000", **run)
    # 26 layers with six experts of three matrices, 38 us each.
    gap = old.decode_step_s.value - new.decode_step_s.value
    assert gap == pytest.approx(26 * 18 * 38e-6, rel=1e-6)


def test_prompts_widened_their_weights_before_june_2024() -> None:
    run = {"framework": "llamacpp", "quant": "q4_k_m", "isl": 512, "osl": 16, "max_model_len": 4096}
    old = timed("llama-3-8b", (1, "rtx-4090"), version="b2900", **run)
    new = timed("llama-3-8b", (1, "rtx-4090"), version="b3300", **run)
    assert old.prefill_s.value > 1.2 * new.prefill_s.value
    wide = timed("llama-3-8b", (1, "rtx-4090"), version="b2900", **{**run, "quant": "f16"})
    assert wide.prefill_s.value < old.prefill_s.value  # nothing to widen


# ggml-org/llama.cpp b2824 and b2833, llama-bench (XiongjieDai/GPU-Benchmarks-on-LLM-Inference@aa72e0e).
@pytest.mark.parametrize(
    ("cards", "quant", "published"),
    [
        (4, "q4_k_m", {512: 834.74, 1024: 898.17, 4096: 839.97, 8192: 718.01}),
        (8, "q4_k_m", {512: 812.95, 1024: 1336.26, 4096: 1488.36, 8192: 1320.36}),
        (8, "f16", {512: 1183.87, 1024: 1890.48, 4096: 2311.43, 8192: 1995.85}),
    ],
)
def test_one_host_thread_cannot_keep_many_cards_at_work(
    cards: int, quant: str, published: dict[int, float]
) -> None:
    run = {"framework": "llamacpp", "version": "b2833", "quant": quant, "osl": 1, "max_model_len": 8200}
    for prompt, speed in published.items():
        time = timed("llama-3-70b", (cards, "rtx-4090"), pp=cards, isl=prompt, concurrency=1, **run)
        assert prompt / time.prefill_s.value == pytest.approx(speed, rel=0.2), prompt


@pytest.mark.parametrize(("quant", "gpu"), [("fp8", "h100-sxm-80gb"), ("awq", "a100-sxm-80gb")])
def test_smaller_weights_make_a_stream_faster(quant: str, gpu: str) -> None:
    wide = timed("llama-3.1-8b", (1, gpu), concurrency=1)
    small = timed("llama-3.1-8b", (1, gpu), quant=quant, concurrency=1)
    assert small.decode_step_s.value < wide.decode_step_s.value


def test_tensor_parallelism_is_faster_for_a_stream_but_not_by_its_degree() -> None:
    one = timed("llama-3.1-8b", (1, "h100-sxm-80gb"), tp=1, concurrency=1)
    four = timed("llama-3.1-8b", (4, "h100-sxm-80gb"), tp=4, concurrency=1)
    assert one.decode_step_s.value / 4 < four.decode_step_s.value < one.decode_step_s.value


def test_layers_over_several_cards_never_speed_up_a_stream() -> None:
    run: dict[str, Any] = {
        "framework": "llamacpp",
        "quant": "q4_k_m",
        "max_model_len": 4096,
        "concurrency": 1,
    }
    one = timed("llama-3-8b", (1, "rtx-4090"), **run)
    four = timed("llama-3-8b", (4, "rtx-4090"), **run)
    assert four.decode_step_s.value > one.decode_step_s.value
    assert four.prefill_s.value < one.prefill_s.value


def test_llama_cpp_hands_fp32_over_through_the_host_where_cards_have_no_access() -> None:
    run = {"framework": "llamacpp", "quant": "f16", "version": "b2833", "pp": 8, "max_model_len": 4096}
    found, spec, cluster = deployed("llama-3-8b", (8, "rtx-4090"), **run)
    server = Server(subject("llama-3-8b").graph, found.layout, found.recipe, spec, cluster)
    line = server.forward_pass(Load(chunk=512, prompts=1)).child("pipeline")
    each = line.inputs["send_s"]
    assert each.inputs["times"] == 2
    assert each.inputs["each_s"].inputs["message_bytes"].value == 512 * 4096 * 4
    # llama-bench of May 2024: 64.9 ms on eight cards, 54.6 on one, seven boundaries
    assert line.value / 7 == pytest.approx(1.47e-3, rel=0.4)


def test_few_tokens_read_few_experts() -> None:
    found, spec, cluster = deployed("qwen3-30b-a3b", (1, "h200-sxm-141gb"))
    server = Server(subject("qwen3-30b-a3b").graph, found.layout, found.recipe, spec, cluster)
    reads = [server.forward_pass(Load(requests=n, context=100)).child("products").value for n in (1, 4, 64)]
    assert reads[0] < reads[1] < reads[2] < 16 * reads[0]


def test_the_host_sets_the_pace_without_graphs() -> None:
    small, large = (
        timed(model, (1, "a100-sxm-80gb"), framework="hf", version="4.46", isl=1, concurrency=1)
        for model in ("qwen2.5-0.5b", "qwen2.5-7b")
    )
    # 24 and 28 layers at the same host time each, whatever their width
    assert large.decode_step_s.value / small.decode_step_s.value == pytest.approx(28 / 24, rel=0.01)


@pytest.mark.parametrize("model", ["gpt-oss-20b", "llama-3.1-8b", "qwen3-0.6b"])
@pytest.mark.parametrize("concurrency", [1, 64])
def test_launching_kernels_one_by_one_is_never_faster(model: str, concurrency: int) -> None:
    graphs, eager = (
        timed(model, (1, "h100-sxm-80gb"), concurrency=concurrency, enforce_eager=eager)
        for eager in (False, True)
    )
    assert eager.decode_step_s.value >= graphs.decode_step_s.value
    assert eager.prefill_s.value >= graphs.prefill_s.value


def test_prompts_found_in_the_cache_are_not_computed() -> None:
    cold = timed(*ONE, concurrency=32)
    warm = timed(*ONE, concurrency=32, prefix_hit_rate=0.9)
    assert warm.prefill_s.value < cold.prefill_s.value
    assert warm.output_tokens_per_s.value > cold.output_tokens_per_s.value


def test_accepted_drafts_speed_up_a_stream_and_refused_ones_slow_it() -> None:
    plain = timed(*ONE)
    good = timed(*ONE, num_speculative_tokens=4, acceptance_rate=0.8, draft_cost=0.05)
    bad = timed(*ONE, num_speculative_tokens=4, acceptance_rate=0.01, draft_cost=0.2)
    assert good.decode_step_s.value < plain.decode_step_s.value < bad.decode_step_s.value


def test_copies_for_prompts_leave_decoding_alone() -> None:
    gpus = (4, "h100-sxm-80gb")
    both = timed("llama-3.1-8b", gpus, tp=1, concurrency=60)
    apart = timed("llama-3.1-8b", gpus, tp=1, concurrency=60, prefill_replicas=1)
    paced = timed("llama-3.1-8b", gpus, tp=1, concurrency=60, prefill_replicas=1, isl=8192, osl=64)
    assert apart.decode_step_s.value < both.decode_step_s.value
    assert any("set the pace" in note for note in paced.notes)
    with pytest.raises(InputError, match="no copy of the engine is left"):
        deployed("llama-3.1-8b", (1, "h100-sxm-80gb"), tp=1, prefill_replicas=1)


def test_speculation_is_stated_whole() -> None:
    with pytest.raises(ValueError, match="say together"):
        ServeRun.model_validate({"framework": "vllm", "num_speculative_tokens": 4})


def test_targets_give_the_largest_load_within_them() -> None:
    found, spec, cluster = deployed(*ONE)
    graph = subject("llama-3.1-8b").graph
    args = (graph, found.layout, found.recipe, spec, cluster)
    best = at_targets(*args, kv_tokens=found.cached_tokens, tpot_ms=20.0)
    assert best is not None
    assert best.decode_step_s.value <= 0.020
    beyond = serving_time(*args, kv_tokens=found.cached_tokens, concurrency=best.concurrency + 1)
    assert beyond.decode_step_s.value > 0.020
    assert at_targets(*args, kv_tokens=found.cached_tokens, tpot_ms=1.0) is None


def test_a_load_counts_over_the_caches_that_decode() -> None:
    run = {"tp": 1, "prefill_replicas": 1, "isl": 512, "osl": 1024}
    found, spec, cluster = deployed("llama-3.1-8b", (4, "h100-sxm-80gb"), **run)
    assert found.layout.caches == 4
    args = (subject("llama-3.1-8b").graph, found.layout, found.recipe, spec, cluster)
    room = found.cached_tokens
    # Four copies, of which one computes prompts: three caches decode, each as many as the others.
    best = at_targets(*args, kv_tokens=room, tpot_ms=12.0)
    assert best is not None
    assert best.concurrency % 3 == 0
    again = serving_time(*args, kv_tokens=room, concurrency=best.concurrency)
    assert again.decode_step_s.value == best.decode_step_s.value <= 0.012
    beyond = serving_time(*args, kv_tokens=room, concurrency=best.concurrency + 3)
    assert beyond.decode_step_s.value > 0.012
    points = pareto(*args, kv_tokens=room)
    assert points[0].concurrency == 3
    assert all(point.concurrency % 3 == 0 for point in points)
    assert found.held_requests == 3 * int(found.memory.seats.value)


def test_requests_wait_for_the_copies_that_compute_prompts() -> None:
    # 30 in flight, 2 leave a second: each stays 15 s, of which 4 are its own
    assert f.paced_queue_s(offered=30, requests_per_s=2, request_s=4) == 11
    assert f.paced_queue_s(offered=6, requests_per_s=2, request_s=4) == 0
    run = {"tp": 1, "prefill_replicas": 1, "isl": 8192, "osl": 64}
    many = timed("llama-3.1-8b", (4, "h100-sxm-80gb"), concurrency=120, **run)
    assert any("set the pace" in note for note in many.notes)
    assert many.binds == "prompts"
    assert many.queue_s is not None
    assert many.requests_per_s is not None
    assert many.request_s is not None
    stay = 120 / many.requests_per_s.value
    assert many.queue_s.value == pytest.approx(stay - many.request_s.value)
    few = timed("llama-3.1-8b", (4, "h100-sxm-80gb"), concurrency=3, **run)
    assert few.queue_s is not None
    assert few.queue_s.value == 0
    found, spec, cluster = deployed("llama-3.1-8b", (4, "h100-sxm-80gb"), **run)
    args = (subject("llama-3.1-8b").graph, found.layout, found.recipe, spec, cluster)
    most = at_targets(*args, kv_tokens=found.cached_tokens, tpot_ms=100.0)
    assert most is not None
    assert most.queue_s is not None
    assert most.queue_s.value == 0  # more would only wait


def test_what_binds() -> None:
    assert timed("qwen2.5-0.5b", (1, "a100-sxm-80gb"), concurrency=1).binds == "latency"
    assert timed("llama-3.1-8b", (1, "a100-sxm-80gb")).binds == "memory bandwidth"
    assert (
        timed("llama-3.1-70b", (4, "h100-sxm-80gb"), isl=8192, osl=64, concurrency=8, tp=4).binds == "compute"
    )
    found, spec, cluster = deployed(*ONE)
    line = Server(subject("llama-3.1-8b").graph, found.layout, found.recipe, spec, cluster).forward_pass(
        Load(requests=1, context=10)
    )
    assert binding([(line, 1.0)]) == "memory bandwidth"


def test_traffic_is_plain_unless_said() -> None:
    found, _, _ = deployed(*ONE)
    assert found.recipe.traffic == Traffic()


def test_every_line_ends_in_a_source() -> None:
    time = timed("qwen3-30b-a3b", (2, "h100-sxm-80gb"), tp=2, concurrency=16)

    def leaves(line: object) -> None:
        inputs = getattr(line, "inputs", {})
        children = getattr(line, "children", ())
        if not inputs and not children:
            assert line.source, line  # type: ignore[attr-defined]
        for item in (*inputs.values(), *children):
            if hasattr(item, "unit"):
                leaves(item)

    leaves(time.output_tokens_per_s)
    leaves(time.decode_step_s)
