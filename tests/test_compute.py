"""FLOPs and kernel times against hand arithmetic and against counted FLOPs.

tests/data/flops.csv: FlopCounterMode on torch 2.13, meta device (full attention counted).
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucalc.formulas import compute as f

COUNTED = list(csv.DictReader((Path(__file__).parent / "data" / "flops.csv").read_text().splitlines()))

positive = st.floats(min_value=1e3, max_value=1e15)


def test_linear_flops_by_hand() -> None:
    # 10 tokens x [4, 6] through 2 of the experts: 2 x 10 x 24 x 2
    assert f.linear_flops(tokens=10, inputs=4, outputs=6, active=2) == 960


@pytest.mark.parametrize(
    ("seq_len", "span", "causal", "pairs"),
    [(8, 8, False, 64), (8, 8, True, 32), (8, 2, True, 14), (8, 2, False, 16), (8, 100, True, 32)],
)
def test_attention_pairs_by_hand(seq_len: int, span: int, causal: bool, pairs: float) -> None:
    assert f.attention_pairs(seq_len=seq_len, keys=seq_len, span=span, causal=causal) == pairs


def test_chunked_attention_pairs_by_hand() -> None:
    assert f.chunked_attention_pairs(seq_len=16, chunk=4) == 32  # 4 triangles of 8
    assert f.chunked_attention_pairs(seq_len=4, chunk=16) == 8


def test_attention_flops_by_hand() -> None:
    forward = f.attention_core_flops(sequences=2, heads=3, qk_dim=4, v_dim=4, pairs=64)
    assert forward == 2 * 2 * 3 * 8 * 64
    assert f.attention_backward_flops(forward_flops=forward, recomputes_scores=True) == 2.5 * forward
    assert f.attention_backward_flops(forward_flops=forward, recomputes_scores=False) == 2 * forward


def test_backward_and_recompute_by_hand() -> None:
    assert f.linear_backward_flops(forward_flops=10, input_gradients=1, weight_gradients=1) == 20
    assert f.linear_backward_flops(forward_flops=10, input_gradients=1, weight_gradients=0) == 10
    assert f.full_recompute_flops(layer_forward_flops=100, last_matmul_flops=22, stops_early=True) == 78
    assert f.full_recompute_flops(layer_forward_flops=100, last_matmul_flops=22, stops_early=False) == 100
    assert f.model_flops(linear_forward_flops=10, attention_forward_flops=2) == 36
    assert f.hardware_flops(forward_flops=1, backward_flops=2, recompute_flops=1) == 4


@pytest.mark.parametrize("row", COUNTED, ids=lambda row: f"{row['model']}-s{row['seq']}")
def test_forward_flops_equal_the_counter(row: dict[str, str]) -> None:
    tokens = int(row["batch"]) * int(row["seq"])
    linear = f.linear_flops(tokens=tokens, inputs=int(row["matmul_params"]), outputs=1, active=1)
    assert linear + int(row["attn_fwd_full"]) == int(row["fwd_flops_measured"])


@pytest.mark.parametrize("row", COUNTED, ids=lambda row: f"{row['model']}-s{row['seq']}")
def test_backward_flops_equal_the_counter(row: dict[str, str]) -> None:
    tokens = int(row["batch"]) * int(row["seq"])
    linear = f.linear_flops(tokens=tokens, inputs=int(row["matmul_params"]), outputs=1, active=1)
    flash = row["model"] != "deepseek-v3"  # latent attention took the unfused path there
    backward = f.linear_backward_flops(
        forward_flops=linear, input_gradients=1, weight_gradients=1
    ) + f.attention_backward_flops(forward_flops=int(row["attn_fwd_full"]), recomputes_scores=flash)
    assert backward == int(row["bwd_flops_measured"])


def test_llama_3_8b_attention_core() -> None:
    core = f.attention_core_flops(sequences=1, heads=32, qk_dim=128, v_dim=128, pairs=1024**2)
    assert 32 * core == 549_755_813_888
    assert 2 * 1024 * 7_504_658_432 + 32 * core == 15_919_296_282_624


def test_gemm_time_by_hand() -> None:
    kwargs = {"flops": 3e12, "bytes_moved": 4e9, "peak_flops_per_s": 2e12, "mfu_max": 0.5}
    time = f.gemm_s(
        **kwargs, bandwidth_bytes_per_s=2e9, hbm_efficiency=0.5, p=2.0, overhead_s=0.25
    )  # 3 s of compute, 4 s of memory
    assert time == pytest.approx(5.25)
    same = f.attention_s(
        flops=3e12,
        bytes_moved=4e9,
        peak_flops_per_s=2e12,
        efficiency=0.5,
        bandwidth_bytes_per_s=2e9,
        hbm_efficiency=0.5,
        p=1.0,
        overhead_s=0.0,
    )
    assert same == pytest.approx(7.0)


def test_bytes_by_hand() -> None:
    assert (
        f.gemm_bytes(rows=10, inputs=4, outputs=6, matrices=2, operand_bytes=2, result_bytes=4)
        == (40 + 48) * 2 + 240
    )
    assert f.attention_io_bytes(tokens=10, heads=4, kv_heads=2, qk_dim=8, v_dim=8, element_bytes=2) == 10 * (
        6 * 16 * 2 + 16
    )
    assert (
        f.score_traffic_bytes(sequences=2, heads=3, queries=4, keys=5, passes=6, score_bytes=2)
        == 2 * 3 * 4 * 5 * 12
    )
    assert f.elementwise_bytes(tokens=5, width=7, passes=3, element_bytes=2) == 210
    assert (
        f.optimizer_traffic_bytes(params=10, gradient_bytes=4, state_bytes=12, parameter_bytes=2, passes=1)
        == 300
    )
    assert f.gradient_clip_bytes(params=10, gradient_bytes=4) == 120  # read; read, written
    assert f.gradient_buffer_bytes(params=10, gradient_bytes=4) == 120  # zeroed; read, written
    assert f.sustained_flops_per_s(peak_flops_per_s=1000, clock_share=0.8) == 800
    assert f.sustained_clock_hz(clock_hz=2000, clock_share=0.75) == 1500
    # 100 samples at 20 a second take 5 s, of which 2 lie beside the step.
    assert f.exposed_input_s(samples=100, input_samples_per_s=20, step_s=2) == 3
    assert f.exposed_input_s(samples=100, input_samples_per_s=20, step_s=9) == 0
    # A table of ten: zeros written; then read, and a sum of four bytes each read and written.
    assert f.embedding_gradient_bytes(params=10, element_bytes=2, gradient_bytes=4, accumulates=0) == 20
    assert f.embedding_gradient_bytes(params=10, element_bytes=2, gradient_bytes=4, accumulates=1) == 120
    assert f.quantise_bytes(elements=10, source_bytes=2, stored_bytes=1) == 40


def test_other_times_by_hand() -> None:
    assert f.traffic_s(bytes_moved=8e9, bandwidth_bytes_per_s=2e9, hbm_efficiency=0.8) == pytest.approx(5.0)
    assert f.launch_s(kernels=100, kernel_launch_s=5e-6) == pytest.approx(5e-4)
    assert f.exposed_launch_s(device_s=3.0, host_s=5.0) == 2.0
    assert f.exposed_launch_s(device_s=6.0, host_s=5.0) == 0
    assert f.state_mixer_flops(tokens=2, heads=3, key_dim=4, value_dim=5, chunk=8) == 6 * (80 + 72)


def test_in_step_rates_by_hand() -> None:
    assert f.in_step_efficiency(alone=0.8, training_efficiency=0.9) == pytest.approx(0.72)
    # fp8 reached 0.6 with casts where 16 bits reached 0.8: casts cost a quarter, fp4 loses as much
    assert f.unquantised_efficiency(measured=0.3, wide=0.8, fp8=0.6) == pytest.approx(0.4)
    assert f.repeated_s(each_s=0.5, times=6) == 3
    assert f.shared_s(whole_s=4.0, share=0.25) == 1
    assert f.shared_pairs(pairs=64, cp=4) == 16
    assert f.network_flops(images=3, flops_per_image=10.0, direct_share=0.5) == 15
    # 2e9 bytes: 1 s of memory at 2e9 B/s; 2 processors x 1e8 Hz x 5 B issue 1e9 B/s, so 2 s
    slow = {"bandwidth_bytes_per_s": 2e9, "hbm_efficiency": 1.0, "multiprocessors": 2, "clock_hz": 1e8}
    assert f.image_traffic_s(bytes_moved=2e9, bytes_per_clock=5, **slow) == pytest.approx(2.0)
    assert f.image_traffic_s(bytes_moved=2e9, bytes_per_clock=50, **slow) == pytest.approx(1.0)


def test_gradient_bytes_by_hand() -> None:
    moved = f.weight_gradient_bytes(
        rows=10, inputs=4, outputs=6, matrices=2, operand_bytes=2, gradient_bytes=4, gradient_passes=2
    )
    assert moved == 10 * 10 * 2 + 2 * 24 * 4 * 2
    assert f.attention_backward_bytes(forward_bytes=100) == 200
    assert f.tokens_per_s_per_gpu(tokens_per_s=100.0, gpus=4) == 25


def test_host_times_by_hand() -> None:
    assert f.pcie_bytes_per_s(generation=4, lanes=16) == pytest.approx(25.2e9, rel=0.01)
    assert f.pcie_bytes_per_s(generation=5, lanes=16) == pytest.approx(50.4e9, rel=0.01)
    # 10 parameters: 60 bytes over a 20 B/s link, then 10 x 28 x 2 ranks over 70 B/s of host memory
    time = f.host_update_s(
        params=10,
        gradient_bytes=4,
        parameter_bytes=2,
        state_bytes=12,
        link_bytes_per_s=20.0,
        ranks_per_node=2,
        host_bytes_per_s=70.0,
    )
    assert time == pytest.approx(3.0 + 8.0)
    assert f.host_copy_s(bytes_moved=100, link_bytes_per_s=50.0) == 2
    # Llama 3 8B over 8 ranks: 10^9 parameters of 12 + 4 bytes, read and written by all 8 at 25.6 GB/s
    drives = {"ranks_per_node": 8, "nvme_bytes_per_s": 25.6e9}
    assert f.nvme_update_s(params=10**9, state_bytes=12, gradient_bytes=4, **drives) == pytest.approx(10.0)
    assert f.nvme_link_bytes_per_s(link_bytes_per_s=50e9, **drives) == pytest.approx(3.2e9)
    assert f.nvme_link_bytes_per_s(link_bytes_per_s=2e9, **drives) == 2e9


def test_rates_by_hand() -> None:
    assert f.flops_utilisation(flops=8e12, step_s=2.0, gpus=4, peak_flops_per_s=2e12) == 0.5
    assert f.tokens_per_s(tokens=100, step_s=4.0) == 25
    assert f.samples_per_s(samples=100, step_s=4.0) == 25
    assert f.flops_per_s_per_gpu(flops=100.0, step_s=5.0, gpus=4) == 5


@given(
    flops=positive,
    bytes_moved=positive,
    peak=positive,
    bandwidth=positive,
    p=st.floats(min_value=1.0, max_value=8.0),
)
def test_faster_hardware_never_slows_a_gemm(
    flops: float, bytes_moved: float, peak: float, bandwidth: float, p: float
) -> None:
    rest = {"mfu_max": 0.8, "hbm_efficiency": 0.8, "p": p, "overhead_s": 3e-6}
    base = f.gemm_s(
        flops=flops, bytes_moved=bytes_moved, peak_flops_per_s=peak, bandwidth_bytes_per_s=bandwidth, **rest
    )
    for faster in ({"peak_flops_per_s": 2 * peak}, {"bandwidth_bytes_per_s": 2 * bandwidth}):
        given_ = {
            "flops": flops,
            "bytes_moved": bytes_moved,
            "peak_flops_per_s": peak,
            "bandwidth_bytes_per_s": bandwidth,
        } | faster
        assert f.gemm_s(**given_, **rest) <= base * (1 + 1e-12)
    # the p-norm lies between the larger part and the sum
    larger = max(flops / (peak * 0.8), bytes_moved / (bandwidth * 0.8))
    assert larger * (1 - 1e-9) <= base <= 2 * larger + 3e-6


@given(st.lists(st.tuples(st.integers(1, 4096), st.integers(1, 4096)), min_size=1, max_size=5))
def test_columns_equal_scalars(rows: list[tuple[int, int]]) -> None:
    seq = np.array([row[0] for row in rows], dtype=np.float64)
    span = np.array([row[1] for row in rows], dtype=np.float64)
    pairs = f.attention_pairs(seq_len=seq, keys=seq, span=span, causal=True)
    for i, (s, w) in enumerate(rows):
        assert pairs[i] == f.attention_pairs(seq_len=s, keys=s, span=w, causal=True)


def test_offloaded_activations_go_out_and_come_back() -> None:
    # 32 layers of 4,096 tokens x 4,096 wide in 16 bit: 1 GiB kept, 2 GiB over the link.
    assert f.offloaded_activation_bytes(kept_bytes=32 * 4096 * 4096 * 2) == 2 * 2**30
