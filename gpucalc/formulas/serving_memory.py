"""Bytes one GPU of a deployment holds: weights by format, the cache by kind of attention, the engine's own.

Cache formulas give bytes per token, or per request where nothing grows with the context, on one
tensor-parallel rank.
"""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.num import Num, ceil_div, floor_div, maximum, minimum, where

LLMD = "llm-d-incubation/llm-d-planner pull request 205: vLLM 0.19.0 logs on H100, 40 starts"
VLLM = "vllm-project/vllm v1/core/kv_cache_utils.py"
LLAMACPP = "ggml-org/llama.cpp start-up logs"

# -- weights --------------------------------------------------------------------------------------


@formula(unit="bytes", source="element types and block layouts of the checkpoint formats, scales included")
def served_weight_bytes(*, params: Num, bytes_per_param: Num) -> Num:
    """Bytes of a matrix as a GPU holds it."""
    return params * bytes_per_param


@formula(
    unit="bytes",
    source="a trace on torch's fake tensors without gradients: storages alive at once, at two batch sizes",
)
def network_live_bytes(*, images: Num, live_elements: Num, element_bytes: Num) -> Num:
    """Activations of a network at the moment most of them are alive, inputs included."""
    return images * live_elements * element_bytes


@formula(unit="count", source="vllm-project/vllm layers/quantization/mxfp4.py: expert shapes are rounded up")
def padded_expert_params(
    *, experts: Num, matrices: Num, hidden: Num, width: Num, hidden_multiple: Num, width_multiple: Num
) -> Num:
    """Weights of a rank's experts with both sides rounded up to what the kernel takes."""
    return (
        experts
        * matrices
        * (ceil_div(hidden, hidden_multiple) * hidden_multiple)
        * (ceil_div(width, width_multiple) * width_multiple)
    )


@formula(
    unit="count",
    source="vllm-project/vllm and sgl-project/sglang layers/vocab_parallel_embedding.py: rows in 64s;"
    " sgl-project/sglang issue 31799: in 64s for each rank where tp does not divide those",
)
def padded_vocab(*, vocab: Num, tp: Num) -> Num:
    """Rows of the token table and the head, rounded up so that tensor ranks hold equal shares."""
    return where(
        ceil_div(vocab, 64) * 64 % tp == 0, ceil_div(vocab, 64) * 64, ceil_div(vocab, 64 * tp) * 64 * tp
    )


@formula(unit="parameters", source="arithmetic: tables are divided by rows, the rest is held whole")
def rank_table_params(*, sharded: Num, replicated: Num, vocab: Num, padded_vocab: Num, tp: Num) -> Num:
    """Parameters of a token table or head on one tensor rank, its rows padded."""
    return sharded * padded_vocab / vocab / tp + replicated


@formula(
    unit="bytes",
    source="c10/cuda/CUDACachingAllocator.cpp: above 10 MiB segments come in 2 MiB, a rest of up to 1 MiB"
    " stays in the block; explains 0.44 % of Qwen2.5-7B (logs of vLLM 0.10 and 0.19)",
)
def allocated_block_bytes(*, tensor_bytes: Num) -> Num:
    """What torch's allocator counts for one large tensor."""
    return where(
        (tensor_bytes >= 10 * 2**20)
        * (ceil_div(tensor_bytes, 2 * 2**20) * 2 * 2**20 - tensor_bytes <= 2**20),
        ceil_div(tensor_bytes, 2 * 2**20) * 2 * 2**20,
        tensor_bytes,
    )


@formula(unit="bytes", source="layers of one kind are alike")
def repeated_layer_bytes(*, layers: Num, layer_bytes: Num) -> Num:
    """The same layer held several times."""
    return layers * layer_bytes


@formula(
    unit="bytes",
    source="vllm-project/vllm rotary_embedding: cosines and sines for every position; 32 MiB of Llama-3.1-8B",
)
def rope_table_bytes(*, positions: Num, rotary_width: Num, element_bytes: Num, factor: Num) -> Num:
    """A table of rotary cosines and sines; linear scaling makes it longer by its factor."""
    return positions * rotary_width * element_bytes * factor


@formula(
    unit="bytes",
    source="vllm-project/vllm MLA attention: kv_b is also held as two absorbed 16-bit matrices",
)
def absorbed_projection_bytes(*, layers: Num, latent: Num, heads: Num, head_width: Num, tp: Num) -> Num:
    """Latent attention's up-projection held a second time, in 16 bit, for decoding."""
    return 2 * layers * latent * heads * head_width / tp


# -- cache ----------------------------------------------------------------------------------------


@formula(unit="bytes", source="Ainslie et al. 2023 (GQA); 66 published pools and token counts")
def kv_token_bytes(
    *, layers: Num, kv_heads: Num, tp: Num, key_width: Num, value_width: Num, element_bytes: Num
) -> Num:
    """Keys and values of one token: heads divided over tensor-parallel ranks, at least one on each."""
    return layers * maximum(1, kv_heads / tp) * (key_width + value_width) * element_bytes


@formula(unit="bytes", source="DeepSeek-AI 2024 (V2), section 2.1; DeepSeek-V2-Lite, Kimi-K2 and R1 logs")
def latent_token_bytes(*, layers: Num, latent: Num, rope_width: Num, element_bytes: Num) -> Num:
    """The compressed vector of one token, whole on every tensor-parallel rank."""
    return layers * (latent + rope_width) * element_bytes


@formula(unit="bytes", source="DeepSeek-V3.2 report: the indexer keeps one key a token")
def index_token_bytes(*, layers: Num, index_width: Num, element_bytes: Num) -> Num:
    """Keys of the indexer that picks which tokens attention reads."""
    return layers * index_width * element_bytes


@formula(unit="bytes", source="DeepSeek-V4 configuration: one shared key-value vector per group of tokens")
def compressed_token_bytes(
    *, layers: Num, entry_width: Num, index_width: Num, ratio: Num, element_bytes: Num
) -> Num:
    """Entries of a compressed cache, per token of the context."""
    return layers * (entry_width + index_width) * element_bytes / ratio


@formula(unit="bytes", source="sliding and chunked attention keep the last `window` tokens of a request")
def window_request_bytes(*, token_bytes: Num, window: Num) -> Num:
    """A window's share of one long request."""
    return token_bytes * window


@formula(
    unit="bytes",
    source="Qwen3.5-9B on SGLang: 4.38 GiB of states and 0.10 of convolutions for 186 requests on 2 ranks",
)
def recurrent_state_bytes(
    *,
    layers: Num,
    heads: Num,
    key_width: Num,
    value_width: Num,
    state_bytes: Num,
    conv_width: Num,
    conv_steps: Num,
    element_bytes: Num,
    tp: Num,
) -> Num:
    """State of one request in linear-attention or state-space layers, and the tail its convolution keeps."""
    return (
        layers
        * (
            heads * key_width * value_width * state_bytes
            + conv_width * maximum(conv_steps - 1, 0) * element_bytes
        )
        / tp
    )


# -- what the engine sets aside -------------------------------------------------------------------


@formula(unit="bytes", source="vLLM gpu_memory_utilization: a share of what the driver reports")
def budget_bytes(*, total_bytes: Num, fraction: Num) -> Num:
    """What the engine lets itself use."""
    return total_bytes * fraction


@formula(
    unit="bytes", source=f"{LLMD}: 14 bytes a logit from 0.17 on and 3 x the residual stream, within 7 %"
)
def sampler_peak_bytes(
    *,
    sequences: Num,
    vocab: Num,
    bytes_per_logit: Num,
    tokens: Num,
    hidden: Num,
    element_bytes: Num,
    stream_copies: Num,
) -> Num:
    """The profiled peak where the sampler decides: logits of every sequence in fp32, with their copies."""
    return sequences * vocab * bytes_per_logit + stream_copies * tokens * hidden * element_bytes


@formula(unit="bytes", source=f"{LLMD} with small vocabularies; vllm issue 10517 for V0")
def forward_peak_bytes(
    *, tokens: Num, widest: Num, tp: Num, hidden: Num, element_bytes: Num, stream_copies: Num
) -> Num:
    """The profiled peak inside the widest layer: gate, up and their product, beside the residual stream."""
    return tokens * (3 * widest / tp + stream_copies * hidden) * element_bytes


@formula(
    unit="bytes",
    source="vllm-project/vllm fused_moe: workspaces kept between steps; Qwen3-30B-A3B, Qwen1.5-MoE,"
    " DeepSeek-V2-Lite within 0.1 GiB",
)
def expert_workspace_bytes(
    *, tokens: Num, top_k: Num, expert_width: Num, hidden: Num, ranks: Num, element_bytes: Num
) -> Num:
    """Two buffers of the fused expert kernels, each as wide as the widest thing put in it."""
    return (
        tokens
        * top_k
        * (maximum(2 * expert_width / ranks, hidden) + maximum(expert_width / ranks, hidden))
        * element_bytes
    )


@formula(unit="bytes", source="vllm-project/vllm encoder cache: embeddings of the images of one batch")
def encoder_cache_bytes(*, tokens: Num, hidden: Num, element_bytes: Num, copies: Num) -> Num:
    """Image embeddings kept until the text that follows them has read them."""
    return tokens * hidden * element_bytes * copies


@formula(
    unit="bytes",
    source=f"{LLMD}: 0.5 to 1.9 GiB for 51 capture sizes, half within 15 %;"
    " 0.11 GiB with few on two RTX 3090",
)
def graph_pool_bytes(
    *,
    base_bytes: Num,
    per_layer_bytes: Num,
    layers: Num,
    experts_bytes: Num,
    tp: Num,
    sizes: Num,
    seen_sizes: Num,
) -> Num:
    """Memory pool of the captured CUDA graphs, one for each batch size."""
    return (base_bytes + per_layer_bytes * layers + experts_bytes / tp) * sizes / seen_sizes


@formula(unit="bytes", source=f"{LLMD}: gpt-oss-20b at 0.95 fails in it, at 0.90 passes")
def sampler_warmup_bytes(*, sequences: Num, vocab: Num, bytes_per_logit: Num) -> Num:
    """The sampler's dry run with every sequence, after the cache has been allocated."""
    return sequences * vocab * bytes_per_logit


@formula(unit="bytes", source=f"{LLAMACPP} of two models: 105 MiB and 1,987 MiB")
def compute_buffer_bytes(
    *,
    tokens: Num,
    vocab: Num,
    logit_copies: Num,
    hidden: Num,
    stream_copies: Num,
    score_heads: Num,
    context: Num,
) -> Num:
    """llama.cpp's compute buffer: fp32 logits and stream of a micro-batch, scores unless flash attention."""
    return 4 * tokens * (vocab * logit_copies + hidden * stream_copies + score_heads * context)


@formula(unit="bytes", source="Qwen2.5 speed page: prompts of 30,720 tokens on 0.5B to 14B models")
def prefill_temporary_bytes(
    *, tokens: Num, widest: Num, ffn_copies: Num, hidden: Num, stream_copies: Num, element_bytes: Num
) -> Num:
    """What an unchunked prefill holds beside weights and cache."""
    return tokens * (ffn_copies * widest + stream_copies * hidden) * element_bytes


@formula(
    unit="bytes",
    source="huggingface/transformers v4.35 modeling_llama.py: scores in 16 bit beside their softmax in fp32"
    " and that in 16 bit again; AutoAWQ 0.1.6, whose blocks do so too, within 15 % of what 1B and 7B held",
)
def eager_score_bytes(*, sequences: Num, heads: Num, queries: Num, keys: Num) -> Num:
    """What attention that is not fused holds at once of one layer: 8 bytes for every pair of every head."""
    return sequences * heads * queries * keys * 8


@formula(
    unit="bytes",
    source="vllm-project/vllm pull request 24322 (layers of both models in one cache, blocks in common);"
    " NVIDIA/TensorRT-LLM _torch/pyexecutor/_util.py: bytes of a token of both",
)
def joined_token_bytes(*, own_bytes: Num, draft_bytes: Num, layers: Num) -> Num:
    """Cache of one token and layer where blocks also hold what the model that drafts keeps of it."""
    return own_bytes + draft_bytes / layers


@formula(unit="bytes", source="arithmetic: divided over the tensor group as the model's layers are")
def draft_head_rank_bytes(*, head_bytes: Num, tp: Num) -> Num:
    """Weights of a head that drafts, on one GPU."""
    return head_bytes / tp


@formula(unit="bytes", source="sgl-project/sglang srt/speculative: a second cache for as many tokens")
def draft_cache_bytes(*, tokens: Num, token_bytes: Num) -> Num:
    """Cache of the model that drafts, where it lies outside the pool."""
    return tokens * token_bytes


# -- pools ----------------------------------------------------------------------------------------


@formula(unit="bytes", source=f"{LLMD}: exact to 0.01 GiB on 40 starts")
def vllm_pool_bytes(
    *,
    budget_bytes: Num,
    weights_bytes: Num,
    activation_peak_bytes: Num,
    non_torch_bytes: Num,
    graphs_bytes: Num,
) -> Num:
    """What vLLM leaves for the cache. Memory in use before it started is not taken off."""
    return budget_bytes - weights_bytes - activation_peak_bytes - non_torch_bytes - graphs_bytes


@formula(
    unit="bytes", source="SGLang model_runner.py; Qwen3.5-9B: 14.08 - 22.93 x 0.2 = 9.49, 9.48 allocated"
)
def sglang_pool_bytes(*, free_before_bytes: Num, weights_bytes: Num, static_fraction: Num) -> Num:
    """What SGLang leaves for cache and state: free after loading, less the share it keeps back."""
    return free_before_bytes - weights_bytes - free_before_bytes * (1 - static_fraction)


@formula(
    unit="bytes",
    source="sgl-project/sglang srt/server_args.py: releases 0.4.8 and 0.5.1 (a constant by card and one for"
    " each rank), 0.5.3 to 0.5.14 (by chunk, captured batch and ranks)",
)
def static_reserve_bytes(
    *,
    base_bytes: Num,
    tokens: Num,
    token_bytes: Num,
    graph_requests: Num,
    graph_request_bytes: Num,
    attention_ranks: Num,
    attention_rank_bytes: Num,
    ranks: Num,
    rank_bytes: Num,
    least_bytes: Num,
    drafting_bytes: Num,
) -> Num:
    """What SGLang keeps back for activations of `tokens` at once and graphs of `graph_requests`.

    attention_ranks: ranks with attention of their own, 0 where there is one; they pad their graphs, half
    as much again above 300 requests. `least_bytes` is the floor on large cards; a draft model comes on top.
    """
    return (
        maximum(
            base_bytes
            + tokens * token_bytes
            + graph_requests * graph_request_bytes
            + graph_requests * where(graph_requests > 300, 1.5, 1) * attention_ranks * attention_rank_bytes
            + ranks * rank_bytes,
            least_bytes,
        )
        + drafting_bytes
    )


@formula(unit="fraction", source="sgl-project/sglang srt/server_args.py: rounded to three places")
def reserved_static_fraction(*, memory_bytes: Num, reserve_bytes: Num) -> Num:
    """SGLang's mem_fraction_static where nobody states one."""
    return floor_div(1000 * (memory_bytes - reserve_bytes) / memory_bytes + 0.5, 1) / 1000


@formula(unit="bytes", source="NVIDIA/TensorRT-LLM KvCacheConfig.free_gpu_memory_fraction")
def trtllm_pool_bytes(*, free_bytes: Num, fraction: Num) -> Num:
    """What TensorRT-LLM takes for the cache of what is free once it could run."""
    return free_bytes * fraction


@formula(unit="bytes", source="SGLang: mamba_full_memory_ratio 0.9; Qwen3.5-9B 4.48 of state, 5.00 of cache")
def sglang_cache_share_bytes(*, pool_bytes: Num, state_to_cache: Num) -> Num:
    """The part of the pool that holds keys and values; the rest holds recurrent state."""
    return pool_bytes / (1 + state_to_cache)


@formula(unit="bytes", source=VLLM)
def cache_block_bytes(*, slots: Num, page_bytes: Num) -> Num:
    """One block of the pool: a page of every layer slot of a group."""
    return slots * page_bytes


@formula(unit="count", source=VLLM)
def cache_blocks(*, pool_bytes: Num, block_bytes: Num) -> Num:
    """Whole blocks in the pool."""
    return maximum(floor_div(pool_bytes, block_bytes), 0)


@formula(unit="tokens", source=f"{VLLM}; eleven hybrid models to 0.02 %")
def cache_tokens(*, blocks: Num, groups: Num, block_size: Num, decode_context: Num) -> Num:
    """Tokens an engine prints for its pool: each group of layers takes a block for the same tokens."""
    return floor_div(blocks, groups) * block_size * decode_context


@formula(unit="count", source=VLLM)
def full_request_blocks(*, tokens: Num, block_size: Num) -> Num:
    """Blocks one group of full-attention layers holds for a request."""
    return ceil_div(tokens, block_size)


@formula(unit="count", source=f"{VLLM}: SlidingWindowSpec.max_memory_usage_bytes")
def sliding_request_blocks(*, tokens: Num, window: Num, batched_tokens: Num, block_size: Num) -> Num:
    """Blocks one group of sliding-window layers holds for a request: its window and the tokens at hand."""
    return ceil_div(minimum(window - 1 + batched_tokens, tokens), block_size) + 1


@formula(unit="count", source=f"{VLLM}: ChunkedLocalAttentionSpec.max_memory_usage_bytes")
def chunked_request_blocks(*, tokens: Num, window: Num, batched_tokens: Num, block_size: Num) -> Num:
    """The same for chunked attention, whose window starts on a block."""
    return ceil_div(minimum(window + batched_tokens, tokens), block_size)


@formula(unit="requests", source=VLLM)
def concurrent_requests(*, blocks: Num, request_blocks: Num) -> Num:
    """Requests of the longest context that the pool holds at once."""
    return blocks / request_blocks


@formula(unit="tokens", source="SGLang: sliding layers keep a share of the tokens that full layers keep")
def two_pool_tokens(
    *, pool_bytes: Num, full_token_bytes: Num, sliding_token_bytes: Num, sliding_share: Num
) -> Num:
    """Tokens of a cache split in one pool for full and one for sliding layers."""
    return floor_div(pool_bytes, full_token_bytes + sliding_share * sliding_token_bytes)


@formula(unit="bytes", source="the sum of a request's growing cache and of what does not grow")
def request_bytes(*, tokens: Num, token_bytes: Num, fixed_bytes: Num) -> Num:
    """Cache of one request on one GPU."""
    return tokens * token_bytes + fixed_bytes


@formula(unit="tokens", source="vllm-project/vllm issues 54662 and 51041: what versions from 0.21 on print")
def request_tokens(*, requests: Num, longest: Num) -> Num:
    """Tokens of the requests of the longest context that fit."""
    return requests * longest
