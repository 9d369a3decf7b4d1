"""Sizes of single tensors, worked by hand."""

from __future__ import annotations

import pytest

from gpucalc.formulas.tensors import (
    bucket_tensor_bytes,
    copied_params,
    cuda_request_bytes,
    logits_tensor_bytes,
    logits_tokens,
    matrix_tensor_bytes,
    parameter_copy_bytes,
    request_cache_bytes,
    score_tensor_bytes,
    token_tensor_bytes,
)

MIB = 2**20


def test_copies_of_parameters() -> None:
    # 7.0B in fp32: 28.0 GB = 26.08 GiB, LlamaFactory issue 260
    size = parameter_copy_bytes(params=7_000_559_616, element_bytes=4, ranks=1)
    assert size / 2**30 == pytest.approx(26.08, abs=0.005)
    assert parameter_copy_bytes(params=8, element_bytes=4, ranks=4) == 8
    assert copied_params(copy_bytes=size, element_bytes=4) == 7_000_559_616


def test_logits() -> None:
    # 1,024 tokens x 32,000 words x 4 bytes over two ranks
    size = logits_tensor_bytes(tokens=1024, vocab=32_000, element_bytes=4, tp=2)
    assert size == 65_536_000
    assert logits_tokens(logits_bytes=size, vocab=32_000, element_bytes=4, tp=2) == 1024


def test_scores_activations_and_matrices() -> None:
    assert score_tensor_bytes(sequences=2, heads=8, tokens=16, element_bytes=2, tp=4) == 2 * 2 * 256 * 2
    assert token_tensor_bytes(tokens=16, width=64, element_bytes=2, tp=2) == 1024
    assert matrix_tensor_bytes(rows=4, columns=8, copies=3, element_bytes=2, ranks=2) == 96


def test_buckets_and_caches() -> None:
    assert bucket_tensor_bytes(elements=5e8, element_bytes=2) == 1e9
    assert request_cache_bytes(tokens=131_072, token_bytes=131_072) == 16 * 2**30


@pytest.mark.parametrize(
    ("tensor", "asked"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 1, 20), (10 * MIB, 10), (11 * MIB, 12), (953.7 * MIB, 954)],
)
def test_what_torch_asks_the_driver_for(tensor: float, asked: int) -> None:
    assert cuda_request_bytes(tensor_bytes=tensor) == asked * MIB
