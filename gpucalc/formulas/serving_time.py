"""Seconds of serving: a forward pass over a batch, the steady state of many requests, what a user sees.

A pass reads the weights it touches once, whatever the batch; each product takes the p-norm of that read
and of its FLOPs. Attention reads every request's cache. What remains, kernel gaps and small kernels, is
one time per layer that an engine's kernels and graphs decide.
"""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.num import Num, ceil_div, floor_div, maximum, minimum, where

_STEADY = "Little's law; arithmetic on an engine that always has work"


# --- reading weights -------------------------------------------------------------------------------


@formula(
    unit="bytes/s",
    source="Little's law for one multiprocessor: bytes in flight over latency; fitted by engine",
)
def weight_read_bytes_per_s(
    *,
    bandwidth_bytes_per_s: Num,
    kernel_share: Num,
    read_share: Num,
    multiprocessors: Num,
    each_bytes_per_s: Num,
) -> Num:
    """Rate at which a thin product reads its weights.

    Bound by a share of device memory bandwidth, what the GPU's kernels reach or what the engine does, or by
    what each multiprocessor can have in flight.
    """
    return minimum(
        bandwidth_bytes_per_s * minimum(kernel_share, read_share), multiprocessors * each_bytes_per_s
    )


@formula(
    unit="count",
    source="Expected number of distinct experts that `tokens` draws of top_k reach, all alike",
)
def experts_touched(*, experts: Num, top_k: Num, tokens: Num) -> Num:
    """Experts whose weights a batch reads: E (1 - (1 - k / E)^B)."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


@formula(
    unit="count",
    source="Arithmetic: an expert's rows end anywhere in their last tile; ggml-org/llama.cpp pull request"
    " 22298, gemma 4 26B-A4B on RTX 3090: passes of 128 to 512 tokens within 14 %",
)
def tiled_rows(*, rows: Num, experts: Num, tokens: Num, tile: Num) -> Num:
    """Rows that grouped products compute: half a tile more for each expert reached.

    The tile is as wide as the pass has tokens, up to `tile`.
    """
    return rows + experts * minimum(tile, tokens) / 2


@formula(unit="bytes", source="Arithmetic: every matrix read once for all rows, activations read and written")
def product_bytes(
    *,
    matrices: Num,
    inputs: Num,
    outputs: Num,
    bytes_per_param: Num,
    rows: Num,
    operand_bytes: Num,
    result_bytes: Num,
) -> Num:
    """Bytes of `rows` rows through `matrices` matrices, together.

    Each row is read once, in the type products are made in, and its result written once.
    """
    return matrices * inputs * outputs * bytes_per_param + rows * (
        inputs * operand_bytes + outputs * result_bytes
    )


@formula(unit="s", source="Arithmetic; the rate is what this engine's kernels reach")
def read_s(*, bytes_moved: Num, rate_bytes_per_s: Num) -> Num:
    """Time to read so many bytes."""
    return bytes_moved / rate_bytes_per_s


@formula(unit="s", source="Arithmetic; shares by kernel and engine, see their files")
def multiply_s(*, flops: Num, peak_flops_per_s: Num, mfu_max: Num, compute_share: Num) -> Num:
    """Time of a product's arithmetic at the rate its kernel reaches in this engine."""
    return flops / (peak_flops_per_s * mfu_max * compute_share)


@formula(
    unit="s",
    source="as gemm_s: fit to ai-dynamo/aiconfigurator@095f58a GEMM tables, mean |log error| 0.11-0.17, bf16",
)
def product_s(*, multiply_s: Num, read_s: Num, p: Num, kernel_share: Num) -> Num:
    """Time of one product in a pass: p-norm of arithmetic and reading; gaps are counted by layer.

    `kernel_share`: of these rates that products of many small groups reach, 1 for a plain product.
    """
    return (multiply_s**p + read_s**p) ** (1 / p) / kernel_share


# --- attention -------------------------------------------------------------------------------------


@formula(unit="bytes", source="Arithmetic: keys and values of every request, one layer")
def cache_read_bytes(*, requests: Num, context: Num, token_bytes: Num) -> Num:
    """Cache one layer reads to give each of `requests` one token after `context` tokens."""
    return requests * context * token_bytes


@formula(
    unit="bytes",
    source="huggingface/transformers v4.46 modeling_qwen2.py: DynamicCache concatenates (read and write),"
    " repeat_kv writes keys and values once per query head and attention reads those",
)
def rewritten_cache_bytes(*, cache_bytes: Num, heads_per_kv: Num) -> Num:
    """Bytes moved where each step copies the cache and widens it to the query heads."""
    return cache_bytes * (3 + 2 * heads_per_kv)


@formula(
    unit="bytes", source="Arithmetic: before kernels shared them, each query head read keys and values anew"
)
def ungrouped_cache_bytes(*, cache_bytes: Num, heads_per_kv: Num) -> Num:
    """Bytes read where the query heads of a group do not share their keys and values."""
    return cache_bytes * heads_per_kv


@formula(
    unit="FLOP", source="Arithmetic: scores and weighted values of one query token against `context` tokens"
)
def decode_attention_flops(*, requests: Num, heads: Num, context: Num, qk_dim: Num, v_dim: Num) -> Num:
    """FLOPs of one layer's attention for one new token of each request."""
    return 2 * requests * heads * context * (qk_dim + v_dim)


@formula(unit="bytes", source="Arithmetic: read as stored, written in 16 bit")
def widened_bytes(*, matrices: Num, inputs: Num, outputs: Num, bytes_per_param: Num) -> Num:
    """Bytes moved to write out matrices in 16 bit before they are multiplied with."""
    return matrices * inputs * outputs * (bytes_per_param + 2)


@formula(unit="count", source="Arithmetic: causal, over what came before and half of the chunk itself")
def chunk_pairs(*, tokens: Num, before: Num, span: Num) -> Num:
    """Query-key pairs of one head: `tokens` prompt tokens after `before` others, at most `span` keys each."""
    return tokens * minimum(before + tokens / 2, span)


@formula(unit="bytes", source="Dao and Gu 2024: the recurrent form reads and writes its state each token")
def state_bytes(*, requests: Num, heads: Num, key_dim: Num, value_dim: Num, element_bytes: Num) -> Num:
    """Bytes of recurrent state one layer reads and writes for one token of each request."""
    return 2 * requests * heads * key_dim * value_dim * element_bytes


# --- gaps and hosts --------------------------------------------------------------------------------


@formula(
    unit="s", source="Fitted by engine, see its file: kernel gaps, norms, rotations, casts of captured graphs"
)
def gaps_s(*, layers: Num, layer_s: Num) -> Num:
    """Time between and in the small kernels of a pass, which no batch makes shorter."""
    return layers * layer_s


@formula(unit="s", source="Fitted by engine, see its file: a launch and a wait of the host for each matrix")
def expert_launches_s(*, experts: Num, matrices: Num, launch_s: Num) -> Num:
    """Time a layer's experts take beyond their products where the host starts them one by one."""
    return experts * matrices * launch_s


@formula(unit="s", source="Fitted by engine, see its file: scheduling, input preparation, sampling")
def between_passes_s(*, step_s: Num, requests: Num, request_s: Num) -> Num:
    """Time of a step that is no forward pass: a constant and a part for every request."""
    return step_s + requests * request_s


@formula(unit="s", source="Fitted by engine: its own reduction kernels have less latency than NCCL's")
def engine_all_reduce_s(*, collective_s: Num, alpha_s: Num, latency_share: Num) -> Num:
    """Time of an all-reduce whose latency is a share of NCCL's."""
    return collective_s - (1 - latency_share) * alpha_s


@formula(unit="s", source="Arithmetic: one message and one wait at each boundary")
def handoffs_s(*, boundaries: Num, send_s: Num, handoff_s: Num) -> Num:
    """Time a pass spends at pipeline boundaries."""
    return boundaries * (send_s + handoff_s)


# --- prompts ---------------------------------------------------------------------------------------


@formula(unit="count", source="Arithmetic: what the prefix cache holds is not computed again")
def computed_tokens(*, isl: Num, prefix_hit: Num) -> Num:
    """Prompt tokens that must be computed; the last one always is."""
    return maximum(isl * (1 - prefix_hit), 1)


@formula(unit="s", source="Arithmetic: chunks one after another; stages work on several at once")
def prefill_s(*, chunks: Num, chunk_s: Num, pp: Num) -> Num:
    """Time to compute a prompt in equal chunks: the first passes all stages, the others follow."""
    return chunk_s * (1 + (chunks - 1) / pp)


@formula(
    unit="count",
    source="ggml-org/llama.cpp b2833 ggml-cuda.cu and llama.cpp: a product converts its input, multiplies and"
    " converts back; layers and the output layer are dealt to the GPUs evenly",
)
def stage_launches(*, layers: Num, pp: Num, products: Num, product_launches: Num, layer_launches: Num) -> Num:
    """Kernels the host starts on the fullest stage for one chunk."""
    return ceil_div(layers + 1, pp) * (products * product_launches + layer_launches)


@formula(
    unit="count",
    source="ggml-org/llama.cpp pull requests 19042 (the host stalls where a GPU's queue of launches is full)"
    " and 6017 (inputs of four chunks are kept)",
)
def chunks_queued(*, launches: Num, queue: Num, copies: Num) -> Num:
    """Chunks of which the host can have started kernels on a stage that has not run them."""
    return minimum(queue / launches, copies)


@formula(
    unit="s",
    source="Arithmetic on one host thread; llama-bench of May 2024, Llama 3 70B on 4 and 8 RTX 4090, prompts"
    " of 512 to 8,192 tokens: within 13 %",
)
def queued_prefill_s(*, chunks: Num, chunk_s: Num, pp: Num, queued: Num) -> Num:
    """Time to compute a prompt in equal chunks where one host thread starts the kernels of all stages.

    It starts a chunk on one stage after another and waits at each until all but `queued` chunks of what it
    has started there are done. So floor(queued) + 1 chunks follow each other a stage apart, and the next
    such group starts when the last stage has run as many as that, less `queued`.
    """
    return (chunk_s / pp) * (
        pp
        + floor_div(chunks - 1, queued // 1 + 1) * maximum(queued // 1 + 1, pp + queued // 1 - queued)
        + (chunks - 1) % (queued // 1 + 1)
    )


# --- many requests ---------------------------------------------------------------------------------


@formula(
    unit="count",
    source="A request holds its prompt and what it has generated, half on average; an engine that never"
    " evicts reserves all of it",
)
def held_tokens(*, isl: Num, osl: Num, reserves: Num) -> Num:
    """Cache tokens one running request takes."""
    return isl + osl * where(reserves, 1.0, 0.5)


@formula(unit="count", source="Arithmetic")
def cache_requests(*, kv_tokens: Num, held: Num) -> Num:
    """Requests one cache keeps running."""
    return kv_tokens / held


@formula(unit="count", source="Arithmetic: what is offered, what the cache holds, what the engine allows")
def running_requests(*, offered: Num, cache: Num, limit: Num) -> Num:
    """Requests one cache has in flight; the others queue."""
    return minimum(minimum(offered, cache), limit)


@formula(unit="count", source=_STEADY)
def chunk_passes(*, requests: Num, computed: Num, osl: Num, chunk: Num) -> Num:
    """Passes with a prompt chunk for every pass needed to give all requests a token.

    Each request that ends after osl passes makes room for a prompt of `computed` tokens.
    """
    return requests * computed / (osl * chunk)


@formula(unit="s", source=_STEADY + "; chunks ride on passes that decode anyway")
def mixed_period_s(*, decode_s: Num, mixed_s: Num, chunk_passes: Num) -> Num:
    """Mean time between two tokens of a request when prompt chunks share the passes.

    Above one chunk a pass the prompts set the pace.
    """
    return chunk_passes * mixed_s + maximum(1 - chunk_passes, 0) * decode_s


@formula(unit="s", source=_STEADY + "; decoding waits while a prompt is computed")
def alternating_period_s(*, decode_s: Num, chunk_s: Num, chunk_passes: Num) -> Num:
    """Mean time between two tokens of a request when prompts are computed in passes of their own."""
    return decode_s + chunk_passes * chunk_s


@formula(unit="tokens/s", source=_STEADY)
def output_tokens_per_s(*, requests: Num, osl: Num, request_s: Num) -> Num:
    """Tokens all running requests receive per second, each with its own time to first token."""
    return requests * osl / request_s


@formula(unit="tokens/s", source="Arithmetic")
def repeated_rate_tokens_per_s(*, each_tokens_per_s: Num, times: Num) -> Num:
    """Tokens per second of several caches that are alike."""
    return each_tokens_per_s * times


@formula(unit="tokens/s", source="Arithmetic")
def tokens_per_s_per_user(*, period_s: Num) -> Num:
    """Tokens one request receives per second while it decodes."""
    return 1 / period_s


@formula(unit="requests/s", source="Arithmetic")
def requests_per_s(*, tokens_per_s: Num, osl: Num) -> Num:
    """Requests finished per second."""
    return tokens_per_s / osl


@formula(unit="s", source="Arithmetic: the first token, then one period for each of the others")
def request_s(*, first_token_s: Num, period_s: Num, osl: Num) -> Num:
    """Time from a request's admission to its last token."""
    return first_token_s + (osl - 1) * period_s


@formula(unit="requests", source="Little's law: arrivals per second times the time each stays")
def requests_in_flight(*, requests_per_s: Num, request_s: Num) -> Num:
    """Requests in flight at a rate the engine keeps up with."""
    return requests_per_s * request_s


@formula(unit="s", source="Little's law: offered = rate x (wait + service)")
def queue_s(*, offered: Num, running: Num, request_s: Num) -> Num:
    """Mean wait of a request for room, at a constant number offered."""
    return maximum(offered / running - 1, 0) * request_s


@formula(unit="s", source="Arithmetic: prompts sent together are computed one after another")
def burst_first_token_s(*, requests: Num, prefill_s: Num) -> Num:
    """Mean time to first token when all requests arrive at once."""
    return (requests + 1) / 2 * prefill_s


# --- speculation, disaggregation -------------------------------------------------------------------


@formula(unit="count", source="Leviathan et al. 2023 (speculative decoding), equation 1")
def accepted_tokens(*, acceptance: Num, drafts: Num) -> Num:
    """Tokens a verified pass yields on average: (1 - a^(k + 1)) / (1 - a) for k drafts."""
    return where(
        acceptance < 1, (1 - acceptance ** (drafts + 1)) / maximum(1 - acceptance, 1e-12), drafts + 1
    )


@formula(unit="s", source="Leviathan et al. 2023: k draft passes and one pass over k + 1 tokens")
def speculative_period_s(*, verify_s: Num, draft_s: Num, drafts: Num, accepted: Num) -> Num:
    """Mean time per token when `drafts` tokens are proposed and verified together."""
    return (verify_s + drafts * draft_s) / accepted


@formula(unit="requests/s", source="Arithmetic: pipeline stages work on prompts in turn")
def prompts_per_s(*, caches: Num, pp: Num, prefill_s: Num) -> Num:
    """Prompts per second of engines that compute nothing else."""
    return caches * pp / prefill_s


@formula(unit="tokens/s", source="Arithmetic: the slower of two pools in a row sets the pace")
def paced_tokens_per_s(*, decoded: Num, prompts: Num, caches: Num, osl: Num) -> Num:
    """Tokens per second of one of `caches` engines that decode what other engines hand them."""
    return minimum(decoded, prompts * osl / caches)


@formula(unit="s", source="Little's law: what is in flight over what leaves is how long each stays")
def paced_queue_s(*, offered: Num, requests_per_s: Num, request_s: Num) -> Num:
    """Mean wait of a request where the copies that compute prompts, or room in the cache, set the pace."""
    return maximum(offered / requests_per_s - request_s, 0)


@formula(unit="bytes", source="Arithmetic: the prompt's cache moves from one pool to the other")
def cache_transfer_bytes(*, isl: Num, token_bytes: Num) -> Num:
    """Bytes of cache one prompt hands over."""
    return isl * token_bytes
