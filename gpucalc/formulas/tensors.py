"""Single tensors a program asks the GPU for, by what they are: sizes to know an allocation by."""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.num import Num, ceil_div, where


@formula(
    unit="bytes",
    source="a flat copy, or this rank's part of it; LlamaFactory issue 260 failed on exactly 4N",
)
def parameter_copy_bytes(*, params: Num, element_bytes: Num, ranks: Num) -> Num:
    """One copy of parameters in one type, divided over ranks where it is sharded."""
    return params * element_bytes / ranks


@formula(
    unit="bytes", source="the output of the vocabulary projection: a row of the vocabulary for each token"
)
def logits_tensor_bytes(*, tokens: Num, vocab: Num, element_bytes: Num, tp: Num) -> Num:
    """The logits of a micro-batch, or their gradient, in one type."""
    return tokens * vocab * element_bytes / tp


@formula(unit="bytes", source="attention without a fused kernel holds every score of every head")
def score_tensor_bytes(*, sequences: Num, heads: Num, tokens: Num, element_bytes: Num, tp: Num) -> Num:
    """Attention scores of one layer, tokens x tokens for each head."""
    return sequences * heads * tokens * tokens * element_bytes / tp


@formula(unit="bytes", source="an activation: one vector for each token")
def token_tensor_bytes(*, tokens: Num, width: Num, element_bytes: Num, tp: Num) -> Num:
    """One activation of a micro-batch."""
    return tokens * width * element_bytes / tp


@formula(unit="bytes", source="a weight matrix, its gathered copy or its gradient")
def matrix_tensor_bytes(*, rows: Num, columns: Num, copies: Num, element_bytes: Num, ranks: Num) -> Num:
    """A weight matrix in one type; copies: experts stacked in it."""
    return rows * columns * copies * element_bytes / ranks


@formula(
    unit="bytes",
    source="DeepSpeed zero_optimization.reduce_bucket_size and allgather_bucket_size: 5e8 elements",
)
def bucket_tensor_bytes(*, elements: Num, element_bytes: Num) -> Num:
    """A communication bucket of a fixed number of elements."""
    return elements * element_bytes


@formula(unit="bytes", source="the cache of one request at its longest")
def request_cache_bytes(*, tokens: Num, token_bytes: Num) -> Num:
    """Keys and values of so many tokens on one GPU."""
    return tokens * token_bytes


@formula(
    unit="bytes",
    source="c10/cuda/CUDACachingAllocator.cpp get_allocation_size: 2 MiB, 20 MiB, then multiples of 2 MiB",
)
def cuda_request_bytes(*, tensor_bytes: Num) -> Num:
    """What torch asks the driver for, and names in its message, when a tensor finds no free block."""
    return where(
        tensor_bytes <= 2**20,
        2 * 2**20,
        where(tensor_bytes < 10 * 2**20, 20 * 2**20, ceil_div(tensor_bytes, 2 * 2**20) * 2 * 2**20),
    )


@formula(unit="parameters", source="the same, the other way round")
def copied_params(*, copy_bytes: Num, element_bytes: Num) -> Num:
    """Parameters whose one copy has this size."""
    return copy_bytes / element_bytes


@formula(unit="tokens", source="the same, the other way round")
def logits_tokens(*, logits_bytes: Num, vocab: Num, element_bytes: Num, tp: Num) -> Num:
    """Tokens of a micro-batch whose logits have this size."""
    return logits_bytes * tp / (vocab * element_bytes)
