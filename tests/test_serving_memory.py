"""Memory of deployments: every formula by hand, and the pools and refusals of published start-up logs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from gpucalc.builders.build import build_graph
from gpucalc.catalog import open_catalog
from gpucalc.errors import Infeasible, InputError, UnknownName
from gpucalc.formulas import serving_memory as mem
from gpucalc.line import Line
from gpucalc.plan.answer import Level
from gpucalc.plan.evaluate import Subject
from gpucalc.plan.serve import Deployment, deploy
from gpucalc.plan.serve_cache import CacheKind, paging
from gpucalc.plan.serve_parts import Logged, capture_sizes
from gpucalc.plan.weight_formats import GGML, gguf, weight_format
from gpucalc.search_serving import settle
from gpucalc.spec.engine import EngineSpec
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.version import version_key
from gpucalc.units import GIB, MIB

CATALOG = open_catalog()


@cache
def subject(name: str) -> Subject:
    return Subject.of(CATALOG.model(name))


@cache
def engine(name: str) -> EngineSpec:
    return CATALOG.load("engines", name, EngineSpec)


def deployed(model: str, gpus: tuple[int, str], *, logged: Logged | None = None, **run: object) -> Deployment:
    """A serving run on GPUs, its degrees settled."""
    settings = {"framework": "vllm", "version": "0.19.0", "isl": 512, "osl": 128, **run}
    asked = ServeRun.model_validate(settings)
    cluster = CATALOG.cluster([(None, *gpus)])
    spec = engine(asked.framework)
    settled, _ = settle(subject(model), asked, cluster, spec)
    return deploy(subject(model), settled, cluster, spec, logged=logged or Logged())


def gib(value: float) -> float:
    return value / GIB


# --- formulas by hand --------------------------------------------------------------------------------------


def test_weights_by_hand() -> None:
    assert mem.served_weight_bytes(params=1000, bytes_per_param=0.5625) == 562.5
    # 4 experts of 2 matrices, 2880 x 1440 rounded up to 3072 x 1536
    padded = mem.padded_expert_params(
        experts=4, matrices=2, hidden=2880, width=1440, hidden_multiple=256, width_multiple=128
    )
    assert padded == 4 * 2 * 3072 * 1536
    assert mem.repeated_layer_bytes(layers=32, layer_bytes=10) == 320
    # 50,257 rows in 64s are 50,304; 129,280 are 2,020 of them, which 24 ranks do not share: 85 x 64 x 24
    assert mem.padded_vocab(vocab=50257, tp=1) == 50304
    assert mem.padded_vocab(vocab=128256, tp=8) == 128256
    assert mem.padded_vocab(vocab=129280, tp=24) == 130560
    table = mem.rank_table_params(sharded=100 * 8, replicated=5, vocab=100, padded_vocab=128, tp=4)
    assert table == 128 * 8 / 4 + 5
    # Llama-3.1: 131,072 positions x 128 x 2 bytes
    assert mem.rope_table_bytes(positions=131072, rotary_width=128, element_bytes=2, factor=1) == 32 * MIB
    # DeepSeek-V2-Lite: 27 layers, 512 x 16 heads x 256, in 16 bit
    absorbed = mem.absorbed_projection_bytes(layers=27, latent=512, heads=16, head_width=256, tp=1)
    assert absorbed == 27 * 512 * 16 * 256 * 2


@pytest.mark.parametrize(
    ("mib", "held"),
    [
        (9.0, 9.0),  # below 10 MiB: cut from a shared segment
        (31.5, 32.0),  # half a MiB is left over and stays
        (24.5, 24.5),  # 1.5 MiB are left over and are used otherwise
        (259.0, 260.0),  # a rest of exactly one MiB stays
        (260.0, 260.0),
    ],
)
def test_blocks_of_the_allocator(mib: float, held: float) -> None:
    assert mem.allocated_block_bytes(tensor_bytes=mib * MIB) == held * MIB


def test_cache_per_token_by_hand() -> None:
    # Llama-3.1-8B: 32 layers x 8 heads x (128 + 128) x 2 bytes
    each = {"key_width": 128, "value_width": 128, "element_bytes": 2}
    assert mem.kv_token_bytes(layers=32, kv_heads=8, tp=1, **each) == 131072
    assert mem.kv_token_bytes(layers=32, kv_heads=8, tp=4, **each) == 32768
    assert mem.kv_token_bytes(layers=32, kv_heads=8, tp=16, **each) == 16384  # a head is not divided
    # DeepSeek-R1 with q8_0: 61 layers x 576 x 34/32, 32,768 tokens are 1,166.6 MiB
    token = mem.latent_token_bytes(layers=61, latent=512, rope_width=64, element_bytes=34 / 32)
    assert token * 32768 / MIB == pytest.approx(1166.6, abs=0.1)
    assert mem.index_token_bytes(layers=61, index_width=128, element_bytes=2) == 15616
    # DeepSeek-V4-Flash: 21 layers of one 512 + 128 entry per 4 tokens, 20 of one 512 entry per 128
    sparse = mem.compressed_token_bytes(layers=21, entry_width=512, index_width=128, ratio=4, element_bytes=2)
    heavy = mem.compressed_token_bytes(layers=20, entry_width=512, index_width=0, ratio=128, element_bytes=2)
    assert sparse + heavy == 6720 + 160
    assert mem.window_request_bytes(token_bytes=1024, window=128) == 131072
    assert mem.request_bytes(tokens=10, token_bytes=100, fixed_bytes=7) == 1007


def test_recurrent_state_by_hand() -> None:
    """Qwen3.5-9B on two ranks: 186 slots took 4.38 GiB of states and 0.10 of convolutions."""
    shape = {"layers": 24, "heads": 32, "key_width": 128, "value_width": 128, "tp": 2}
    states = mem.recurrent_state_bytes(**shape, state_bytes=4, conv_width=0, conv_steps=4, element_bytes=2)
    both = mem.recurrent_state_bytes(**shape, state_bytes=4, conv_width=8192, conv_steps=4, element_bytes=2)
    assert states == 24 * 32 * 128 * 128 * 4 / 2
    assert gib(states * 187) == pytest.approx(4.38, abs=0.01)
    assert gib((both - states) * 187) == pytest.approx(0.10, abs=0.005)


def test_what_engines_set_aside_by_hand() -> None:
    assert mem.budget_bytes(total_bytes=80, fraction=0.9) == 72
    # gpt-oss-20b, 1,024 sequences: 14 bytes of 201,088 logits, three streams of 8,192 x 2,880
    sampler = mem.sampler_peak_bytes(
        sequences=1024, vocab=201088, bytes_per_logit=14, tokens=8192, hidden=2880, element_bytes=2,
        stream_copies=3,
    )  # fmt: skip
    assert sampler == 1024 * 201088 * 14 + 3 * 8192 * 2880 * 2
    assert gib(sampler) == pytest.approx(2.87, rel=0.03)  # logged: 2.87
    forward = mem.forward_peak_bytes(
        tokens=8192, widest=11008, tp=1, hidden=4096, element_bytes=2, stream_copies=5
    )
    assert forward == 8192 * (3 * 11008 + 5 * 4096) * 2
    # Qwen3-30B-A3B: 8 experts of 768 at 2,048: both buffers as wide as the stream
    workspace = mem.expert_workspace_bytes(
        tokens=8192, top_k=8, expert_width=768, hidden=2048, ranks=1, element_bytes=2
    )
    assert workspace == 8192 * 8 * (2048 + 2048) * 2
    assert mem.encoder_cache_bytes(tokens=100, hidden=64, element_bytes=2, copies=1) == 12800
    graphs = mem.graph_pool_bytes(
        base_bytes=100, per_layer_bytes=10, layers=32, experts_bytes=40, tp=4, sizes=7, seen_sizes=51
    )
    assert graphs == pytest.approx(430 * 7 / 51)
    assert mem.sampler_warmup_bytes(sequences=1024, vocab=201088, bytes_per_logit=4) == 1024 * 201088 * 4
    # TriLM 4B: 512 tokens of 50,688 words and a stream of 3,072 in fp32 are 105 MiB
    buffer = mem.compute_buffer_bytes(
        tokens=512, vocab=50688, logit_copies=1, hidden=3072, stream_copies=1, score_heads=0, context=512
    )
    assert buffer / MIB == pytest.approx(105, rel=0.01)
    scores = mem.compute_buffer_bytes(
        tokens=512, vocab=0, logit_copies=1, hidden=0, stream_copies=1, score_heads=32, context=8192
    )
    assert scores == 512 * MIB
    # Qwen2.5-7B, a prompt of 30,720: 4.03 GiB were seen beside weights and cache
    prompt = mem.prefill_temporary_bytes(
        tokens=30720, widest=18944, ffn_copies=3, hidden=3584, stream_copies=3.7, element_bytes=2
    )
    assert gib(prompt) == pytest.approx(4.03, rel=0.01)
    # 32 heads, 2,048 x 2,048 pairs, 8 bytes each
    assert gib(mem.eager_score_bytes(sequences=8, heads=32, queries=2048, keys=2048)) == 8


def test_transformers_held_the_scores_of_a_prompt_before_4_36() -> None:
    run = {"framework": "hf", "isl": 8192, "osl": 1, "max_model_len": 8193, "concurrency": 1}
    old, new = (
        deployed("llama-3.1-8b", (1, "h100-sxm-80gb"), **{**run, "version": version}).memory
        for version in ("4.35.0", "4.36.0")
    )
    assert gib(old.tree.child("activation_peak").value) == 16  # 32 heads x 8,192^2 x 8
    assert gib(new.tree.child("activation_peak").value) < 2


def test_pools_by_hand() -> None:
    # CodeLlama-7B on H100 at 0.95: 75.23 - 12.56 - 0.77 - 0.25 = 61.65; the log says 61.66
    pool = mem.vllm_pool_bytes(
        budget_bytes=75.23, weights_bytes=12.56, activation_peak_bytes=0.77, non_torch_bytes=0.25,
        graphs_bytes=0,
    )  # fmt: skip
    assert pool == pytest.approx(61.66, abs=0.02)
    # Qwen3.5-9B on RTX 4090: 22.93 free before, 14.08 after loading, 0.8; 9.48 allocated
    pool = mem.sglang_pool_bytes(free_before_bytes=22.93, weights_bytes=22.93 - 14.08, static_fraction=0.8)
    assert pool == pytest.approx(9.49, abs=0.01)
    assert mem.sglang_cache_share_bytes(pool_bytes=9.48, state_to_cache=0.9) == pytest.approx(5.0, abs=0.02)
    assert mem.trtllm_pool_bytes(free_bytes=100, fraction=0.9) == 90
    assert mem.cache_block_bytes(slots=12, page_bytes=100) == 1200
    assert mem.cache_blocks(pool_bytes=1000, block_bytes=300) == 3
    assert mem.cache_blocks(pool_bytes=-1000, block_bytes=300) == 0
    assert mem.cache_tokens(blocks=7335, groups=2, block_size=16, decode_context=1) == 3667 * 16
    assert mem.full_request_blocks(tokens=8192, block_size=16) == 512
    # min(1023 + 8192, 8192) tokens and one block for the start inside a block
    assert mem.sliding_request_blocks(tokens=8192, window=1024, batched_tokens=8192, block_size=16) == 513
    assert mem.sliding_request_blocks(tokens=16384, window=128, batched_tokens=2048, block_size=16) == 137
    assert mem.chunked_request_blocks(tokens=8192, window=8192, batched_tokens=8192, block_size=16) == 512
    assert mem.concurrent_requests(blocks=100, request_blocks=40) == 2.5
    assert mem.two_pool_tokens(
        pool_bytes=1800, full_token_bytes=10, sliding_token_bytes=10, sliding_share=0.8
    ) == pytest.approx(100)
    assert mem.request_tokens(requests=2.93, longest=131072) == pytest.approx(384041)


def test_capture_sizes() -> None:
    assert capture_sizes(1024) == 51
    assert capture_sizes(256) == 51
    assert capture_sizes(16) == 7  # 1, 2, 4, 8, 16, 24, 32


# --- weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "gpus", "run", "logged_gib"),
    [
        ("llama-3.1-8b", 1, {}, 14.99),
        ("qwen2.5-7b", 1, {}, 14.25),
        ("qwen2.5-7b", 2, {}, 7.12),
        ("qwen2.5-7b", 1, {"quant": "fp8"}, 8.14),
        ("qwen2.5-7b", 1, {"quant": "w8a8-int8"}, 8.14),
        ("qwen2.5-72b", 2, {}, 67.80),
        ("deepseek-v2-lite", 1, {}, 29.43),
        ("qwen3-30b-a3b", 1, {}, 56.88),
        ("gpt-oss-20b", 1, {}, 13.64),
        ("gpt-oss-120b", 4, {"version": "0.10.1.1"}, 17.22),
        ("gemma-2-27b", 1, {}, 50.72),
        ("gemma-3-4b", 1, {}, 8.58),
        ("gemma-3-27b", 1, {}, 51.45),
        ("llama-4-scout", 4, {}, 53.12),
    ],
)
def test_weights_are_those_of_the_log(model: str, gpus: int, run: dict[str, Any], logged_gib: float) -> None:
    found = deployed(model, (gpus, "h100-sxm-80gb"), tp=gpus, **run)
    assert gib(found.memory.weights.value) == pytest.approx(logged_gib, rel=0.01)


@pytest.mark.parametrize(
    ("model", "quant", "file_gib"),
    [
        ("llama-3-8b", "q4_k_m", 4.58),
        ("llama-3-8b", "f16", 14.96),
        ("llama-3-70b", "q4_k_m", 39.59),
        ("llama-3-70b", "f16", 131.42),
    ],
)
def test_gguf_files_have_their_published_size(model: str, quant: str, file_gib: float) -> None:
    """The token table stays on the host; with it the weights are the file."""
    found = deployed(
        model, (8, "h100-sxm-80gb"), framework="llamacpp", quant=quant, pp=1, version="b3000", concurrency=1
    )
    graph = subject(model).graph
    assert graph.embedding is not None
    form = gguf(quant, graph)
    table = graph.embedding.vocab * graph.embedding.width * form.embedding
    assert gib(found.memory.weights.value + table) == pytest.approx(file_gib, rel=0.003)


def test_every_gguf_type_lies_between_its_neighbours() -> None:
    graph = subject("llama-3-8b").graph
    small = ("iq1_s", "iq2_xxs", "iq2_xs", "iq3_xxs", "q3_k_s", "q3_k_m", "q3_k_l")
    order = (*small, "q4_k_s", "q4_k_m", "q5_k_m", "q6_k", "q8_0", "f16")
    sizes = []
    for name in order:
        form = gguf(name, graph)
        down = (form.exceptions or {}).get("down", form.linear)
        sizes.append(2 * form.linear + down)
    assert sizes == sorted(sizes)
    assert GGML["q4_k"] == 0.5625
    with pytest.raises(UnknownName, match="unknown GGUF type"):
        gguf("q9_z", graph)


def test_a_dynamic_mix_is_taken_as_the_plain_one_and_says_so() -> None:
    graph = subject("llama-3-8b").graph
    form = gguf("ud_q4_k_xl", graph)
    assert form.kind == "assumed"
    assert form.linear == gguf("q4_k_m", graph).linear


def test_formats_follow_the_published_checkpoint() -> None:
    def of(model: str, quant: str | None = None) -> tuple[str, float, float, float]:
        form, _ = weight_format(quant, "bf16", CATALOG.model(model), subject(model).graph)
        return form.name, form.linear, form.expert, form.embedding

    assert of("llama-3.1-8b") == ("bf16", 2, 2, 2)
    assert of("gpt-oss-20b") == ("mxfp4", 2, 17 / 32, 2)
    name, linear, expert, table = of("deepseek-v4-flash")
    assert (name, expert, table) == ("fp8+fp4-experts", 17 / 32, 2)
    assert linear == pytest.approx(1, rel=0.001)
    assert of("deepseek-r1")[0] == "fp8"
    assert of("llama-3.1-8b", "nf4")[1] == 0.5625
    assert of("llama-3.1-8b", "awq")[1:] == (0.51953125, 0.51953125, 2)
    assert of("llama-3.1-8b", "nvfp4")[1] == 0.5625


# --- the cache of published starts -------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """One published start: its cache as printed."""

    model: str
    tp: int
    pool_gib: float
    tokens: int
    blocks: int | None
    concurrency: float
    max_model_len: int = 8192
    batched: int = 8192


HYBRID = [
    Start("gemma-2-27b", 1, 20.59, 58672, 7335, 7.16),
    Start("gemma-3-12b", 1, 47.72, 130304, 48867, 15.88),
    Start("gemma-3-27b", 1, 19.53, 36560, 15997, 4.46),
    Start("gemma-3-4b", 1, 62.51, 468144, 204817, 57.05),
    Start("gpt-oss-20b", 2, 59.32, 2591776, 323972, 316.07),
    Start("gpt-oss-120b", 4, 45.32, 2640144, None, 284.25, 16384, 2048),
    Start("llama-4-scout", 4, 16.75, 365968, 91495, 44.68),
]
UNIFORM = [
    Start("qwen2.5-7b", 1, 58.53, 1096000, 68500, 133.79),
    Start("deepseek-v2-lite", 1, 43.61, 1505552, 94097, 183.78),
    Start("qwen3-30b-a3b", 1, 15.41, 168288, 10518, 20.54),
    Start("qwen2.5-72b", 2, 3.04, 19920, 1245, 2.43),
]


@pytest.mark.parametrize("start", HYBRID + UNIFORM, ids=lambda s: s.model)
def test_tokens_blocks_and_requests_are_those_printed(start: Start) -> None:
    """Given the printed pool, what it holds follows to the rounding of the print (0.005 GiB)."""
    found = deployed(
        start.model, (start.tp, "h100-sxm-80gb"), tp=start.tp, max_model_len=start.max_model_len,
        max_num_batched_tokens=start.batched, logged=Logged(pool=start.pool_gib * GIB),
    ).memory  # fmt: skip
    rounding = 0.005 / start.pool_gib + 0.0002
    assert found.kv_tokens.value == pytest.approx(start.tokens, rel=rounding)
    if start.blocks is not None:
        assert found.kv_blocks.value == pytest.approx(start.blocks, rel=rounding)
    assert found.max_concurrency.value == pytest.approx(
        start.concurrency, rel=rounding + 0.005 / start.concurrency
    )


@pytest.mark.parametrize(
    ("model", "tp", "run", "pool_gib"),
    [
        ("qwen2.5-7b", 1, {}, 58.53),
        ("qwen2.5-7b", 4, {}, 67.34),
        ("qwen2.5-7b", 1, {"kv_dtype": "fp8"}, 58.53),
        ("deepseek-v2-lite", 1, {}, 43.61),
        ("qwen3-30b-a3b", 1, {}, 15.41),
        ("gemma-7b", 1, {}, 55.44),
        ("qwen1.5-moe-a2.7b", 1, {}, 45.83),
        ("llama-4-scout", 4, {}, 16.75),
    ],
)
def test_the_pool_is_predicted(model: str, tp: int, run: dict[str, object], pool_gib: float) -> None:
    found = deployed(
        model, (tp, "h100-sxm-80gb"), tp=tp, max_model_len=8192, gpu_memory_utilization=0.95,
        logged=Logged(total=79.19 * GIB), **run,
    )  # fmt: skip
    assert gib(found.memory.pool.value) == pytest.approx(pool_gib, rel=0.02)


def test_an_8_bit_cache_holds_twice_the_tokens_in_the_same_pool() -> None:
    wide = deployed("qwen2.5-7b", (1, "h100-sxm-80gb"), tp=1).memory
    narrow = deployed("qwen2.5-7b", (1, "h100-sxm-80gb"), tp=1, kv_dtype="fp8").memory
    assert narrow.pool.value == wide.pool.value
    assert narrow.kv_tokens.value == pytest.approx(2 * wide.kv_tokens.value, rel=1e-4)


def test_context_parallel_decoding_multiplies_the_tokens() -> None:
    one = deployed("deepseek-r1", (8, "h200-sxm-141gb"), tp=8).memory
    eight = deployed("deepseek-r1", (8, "h200-sxm-141gb"), tp=8, decode_context_parallel=8).memory
    assert eight.kv_tokens.value == 8 * one.kv_tokens.value
    assert eight.max_concurrency.value == pytest.approx(8 * one.max_concurrency.value)


def test_from_0_21_graphs_are_taken_off_and_tokens_are_printed_otherwise() -> None:
    older = deployed("gpt-oss-20b", (1, "h100-sxm-80gb"), tp=1, version="0.20.0").memory
    newer = deployed("gpt-oss-20b", (1, "h100-sxm-80gb"), tp=1, version="0.21.0").memory
    assert older.pool.value - newer.pool.value == pytest.approx(
        next(line.value for line in newer.tree.children if line.name == "graphs")
    )
    assert newer.kv_tokens.value == pytest.approx(newer.max_concurrency.value * 8192)


def test_sglang_keeps_state_beside_the_cache() -> None:
    """Qwen3.5-9B on two RTX 4090: 327,310 tokens in 5.00 GiB."""
    found = deployed(
        "qwen3.5-9b", (2, "rtx-4090"), framework="sglang", version="0.5.6", tp=2, mem_fraction_static=0.8,
        max_model_len=262144, logged=Logged(total=(22.93 + 0.7) * GIB, weights=(22.93 - 14.08) * GIB),
    )  # fmt: skip
    assert gib(found.memory.pool.value) == pytest.approx(9.48, rel=0.01)
    assert found.memory.kv_tokens.value == pytest.approx(327310, rel=0.01)


def test_what_sglang_keeps_back_by_hand() -> None:
    def kept(**changes: float) -> float:
        plain = {
            "base_bytes": 512 * MIB, "tokens": 8192, "token_bytes": 1.5 * MIB, "graph_requests": 256,
            "graph_request_bytes": 2 * MIB, "attention_ranks": 0, "attention_rank_bytes": 3 * MIB, "ranks": 1,
            "rank_bytes": 128 * MIB, "least_bytes": 10 * GIB, "drafting_bytes": 0,
        }  # fmt: skip
        return float(mem.static_reserve_bytes(**{**plain, **changes}) / MIB)

    assert kept() == 512 + 12288 + 512 + 128
    assert kept(tokens=2048, graph_requests=24) == 10240  # the floor of large cards
    assert kept(tokens=2048, graph_requests=24, least_bytes=0) == 512 + 3072 + 48 + 128
    assert kept(attention_ranks=4) == 512 + 12288 + 256 * (2 + 12) + 128
    assert kept(attention_ranks=4, graph_requests=512) == 512 + 12288 + 512 * (2 + 18) + 128
    assert kept(drafting_bytes=2 * GIB) == 512 + 12288 + 512 + 128 + 2048
    assert mem.reserved_static_fraction(memory_bytes=81559, reserve_bytes=13440) == 0.835


@pytest.mark.parametrize(
    ("version", "gpus", "share"),
    [
        # server_args.py by hand: the driver's MiB of the card, 81,559 of an H100, 143,771 of an H200.
        ("0.3.6", (1, "h100-sxm-80gb"), 0.88),
        ("0.4.0", (8, "h200-sxm-141gb"), 0.81),
        ("0.4.6", (8, "h100-sxm-80gb"), 0.81),
        ("0.4.6", (8, "h200-sxm-141gb"), 0.907),  # less 13 GiB
        ("0.4.7", (8, "h200-sxm-141gb"), 0.872),  # less 18 GiB
        ("0.4.8", (1, "h100-sxm-80gb"), 0.874),  # less 10 GiB
        ("0.4.9", (8, "h100-sxm-80gb"), 0.83),  # less 13.5 GiB
        ("0.5.1", (1, "rtx-4090"), 0.879),  # less 2.9 of 24,564 MiB
        ("0.5.6", (1, "h100-sxm-80gb"), 0.835),
        ("0.5.6", (8, "h100-sxm-80gb"), 0.818),
        ("0.5.6", (1, "rtx-4090"), 0.847),
    ],
)
def test_sglangs_default_share_follows_its_release_and_the_card(
    version: str, gpus: tuple[int, str], share: float
) -> None:
    found = deployed("llama-3.1-8b", gpus, framework="sglang", version=version, tp=gpus[0])
    assert found.recipe.mem_fraction_static == pytest.approx(share, abs=0.0011)


@pytest.mark.parametrize(
    ("framework", "version", "card", "seqs", "tokens"),
    [
        ("vllm", "0.7.3", "h100-sxm-80gb", 256, 2048),
        ("vllm", "0.8.4", "a100-sxm-80gb", 256, 2048),
        ("vllm", "0.8.5", "a100-sxm-80gb", 1024, 8192),
        ("vllm", "0.9.0", "a100-sxm-80gb", 256, 2048),
        ("vllm", "0.19.0", "h100-sxm-80gb", 1024, 8192),
        ("vllm", "0.19.0", "rtx-4090", 256, 2048),
        ("vllm", "0.27.0", "b200-sxm", 1024, 8192),
        ("vllm", "0.28.0", "b200-sxm", 1024, 16384),
        ("vllm", "0.28.0", "gb10-spark", 256, 2048),
        ("sglang", "0.4.6", "a100-sxm-40gb", 4096, 8192),
        ("sglang", "0.4.6", "rtx-4090", 4096, 2048),
        ("sglang", "0.5.6", "a100-sxm-40gb", 4096, 4096),
        ("sglang", "0.5.6", "b200-sxm", 4096, 16384),
    ],
)
def test_defaults_follow_the_release_and_the_card(
    framework: str, version: str, card: str, seqs: int, tokens: int
) -> None:
    recipe = deployed("qwen3-0.6b", (1, card), framework=framework, version=version).recipe
    assert (recipe.max_num_seqs, recipe.max_num_batched_tokens) == (seqs, tokens)


def test_vllms_default_share_rose_in_0_20() -> None:
    shares = [
        deployed("qwen3-0.6b", (1, "h100-sxm-80gb"), version=version).recipe.gpu_memory_utilization
        for version in ("0.19.1", "0.20.0", "0.33.0")
    ]
    assert shares == [0.9, 0.92, 0.92]


def test_groups_of_layers_by_hand() -> None:
    def kind(name: str, layers: int, token: float, fixed: float = 0.0) -> CacheKind:
        return CacheKind(name, layers, Line("t", token, "bytes"), Line("f", fixed, "bytes"), None)

    # gemma-3-27b: 10 full and 52 sliding layers take 1 + 6 groups of 10 slots
    cut = paging([kind("full", 10, 8), kind("sliding", 52, 8)], 16)
    assert (cut.slots, cut.groups, cut.page) == (10, 7, 128)
    # within a quarter of each other: padded to the larger
    assert paging([kind("full", 13, 8), kind("sliding", 12, 8)], 16).groups == 2
    # pages are as large as the larger layers need; the smaller hold more tokens in one
    wide = paging([kind("full", 5, 4), kind("sliding", 5, 8)], 16)
    assert wide.block_tokens == {0: 32, 1: 16}
    # a state larger than a page makes attention blocks longer
    tall = paging([kind("full", 8, 10), kind("state", 24, 0, 1000)], 16)
    assert (tall.slots, tall.groups, tall.page) == (8, 4, 1120)
    assert tall.block_tokens == {0: 112, 1: 0}


# --- starting or not ---------------------------------------------------------------------------------------


def test_a_request_that_does_not_fit_is_refused_as_the_engine_does() -> None:
    """Llama-3.1-8B on RTX 3090: 20,000 started, 29,000 did not, 35,000 did (prefill in chunks)."""
    levels = {
        length: deployed(
            "llama-3.1-8b",
            (1, "rtx-3090"),
            version="0.6.4",
            tp=1,
            max_model_len=length,
            gpu_memory_utilization=0.9,
            logged=Logged(total=23.58 * GIB),
        )
        for length in (20000, 29000)
    }
    assert levels[20000].memory.refusal is None
    assert levels[20000].level is Level.FITS
    refusal = levels[29000].memory.refusal
    assert refusal is not None
    assert "one request of max_model_len 29000" in refusal
    assert levels[29000].level is not Level.FITS


def test_the_samplers_dry_run_may_not_fit_beside_the_cache() -> None:
    """gpt-oss-20b on H100: at 0.95 the start fails after the cache is allocated, at 0.90 it runs."""
    tight, loose = (
        deployed(
            "gpt-oss-20b",
            (1, "h100-sxm-80gb"),
            tp=1,
            gpu_memory_utilization=share,
            logged=Logged(total=79.19 * GIB),
        )
        for share in (0.95, 0.90)
    )
    assert tight.memory.refusal is None  # the budget was kept
    assert tight.memory.needed.value > tight.memory.capacity.value
    assert tight.memory.binds == "sampler_warmup"
    assert tight.level is not Level.FITS
    assert loose.level is Level.FITS


@pytest.mark.parametrize(
    ("card", "quant", "fits"),
    [
        ("rtx-3070", "f16", False),
        ("rtx-4080", "q4_k_m", True),
        ("rtx-3090", "f16", True),
        ("rtx-3090", "q4_k_m", True),
    ],
)
def test_llama_cpp_on_one_card(card: str, quant: str, fits: bool) -> None:
    found = deployed(
        "llama-3-8b", (1, card), framework="llamacpp", version="b3000", quant=quant, concurrency=1,
        max_model_len=2048,
    )  # fmt: skip
    assert (found.level is not Level.DOES_NOT_FIT) is fits


def test_llama_cpp_spreads_layers_over_cards() -> None:
    one = deployed("llama-3-70b", (1, "rtx-3090"), framework="llamacpp", version="b3000", quant="q4_k_m")
    four = deployed("llama-3-70b", (4, "rtx-3090"), framework="llamacpp", version="b3000", quant="q4_k_m")
    assert one.level is Level.DOES_NOT_FIT
    assert four.level is Level.FITS
    assert four.layout.pp == 4


def test_transformers_hold_the_requests_at_hand() -> None:
    """Qwen2.5-7B, one prompt token and 2,048 generated: 14.38 GiB were seen, 16 bit."""
    found = deployed(
        "qwen2.5-7b", (1, "a100-sxm-80gb"), framework="hf", version="4.40", isl=1, osl=2048, concurrency=1
    )
    context = next(line.value for line in found.memory.tree.children if line.name == "non_torch")
    assert gib(found.memory.peak.value - context) == pytest.approx(14.38, rel=0.01)


def test_illegal_layouts_are_refused_with_every_rule() -> None:
    with pytest.raises(Infeasible) as caught:
        deployed("llama-3.1-8b", (8, "h100-sxm-80gb"), tp=3, pp=1)
    assert "8 GPUs cannot be divided into engines of tp 3" in str(caught.value)
    assert "tp 3 does not divide 32 attention heads" in str(caught.value)
    with pytest.raises(Infeasible, match="legal ep: 1, 8"):
        deployed("deepseek-r1", (8, "h200-sxm-141gb"), tp=8, ep=4)


def test_a_request_longer_than_max_model_len_is_an_error() -> None:
    with pytest.raises(InputError, match="longer than max_model_len 512"):
        deployed("llama-3.1-8b", (1, "h100-sxm-80gb"), tp=1, max_model_len=512, isl=512, osl=128)


def test_versions_compare_as_numbers() -> None:
    assert version_key("0.10.1.1") == (0, 10, 1, 1)
    assert version_key("b8171") == (8171,)
    assert version_key("v0.6.3.post1") == (0, 6, 3)
    assert version_key("May 2024") is None
    vllm = engine("vllm")
    assert vllm.at("0.9.2").line("sampler_bytes_per_logit").value == 10
    assert vllm.at("0.16.0").line("sampler_bytes_per_logit").value == 38
    assert vllm.at("0.19.0").line("sampler_bytes_per_logit").value == 14


def test_a_graph_without_a_cache_is_not_divided_by_zero() -> None:
    graph = build_graph(CATALOG.model("llama-3.1-8b"))
    assert paging([], 16).groups == 1
    assert graph.stacks


def test_long_prompts_were_profiled_whole_before_prefill_was_chunked() -> None:
    """vLLM issue 6746: 131,072 tokens of a 405B in fp8 did not fit a cache of 79,392 on eight H100."""
    run: dict[str, Any] = {"tp": 8, "quant": "fbgemm-fp8", "max_model_len": 131072}
    before, after = (
        deployed("llama-3.1-405b", (8, "h100-sxm-80gb"), version=version, **run)
        for version in ("0.5.3", "0.5.4")
    )
    assert before.memory.refusal is not None
    assert after.memory.refusal is None
    assert before.memory.kv_tokens.value < 131072 < after.memory.kv_tokens.value
    short = [
        deployed("llama-3.1-8b", (1, "a100-sxm-80gb"), version=version, max_model_len=32768)
        for version in ("0.5.3", "0.5.4")
    ]
    assert short[0].memory.kv_tokens.value == short[1].memory.kv_tokens.value


@pytest.mark.parametrize("tp", [1, 2])
def test_the_first_engine_sorted_whole_logits_on_every_rank(tp: int) -> None:
    """vLLM pull request 10511: 1.26 GiB of activations for Llama-3-8B, on one GPU and on each of two."""
    found = deployed("llama-3-8b", (tp, "a100-sxm-80gb"), version="0.6.4", tp=tp, max_model_len=8192)
    peak = next(line for line in found.memory.tree.children if line.name == "activation_peak")
    assert gib(peak.value) == pytest.approx(1.26, rel=0.02)
