"""Hand-worked numbers where a formula turns: at its bounds, beyond them, with every factor apart from 1."""

from __future__ import annotations

import math

import pytest

from gpucalc.formulas import activations as act
from gpucalc.formulas import (
    calibration,
    comm,
    memory,
    optimizers,
    pipeline,
    reliability,
    rules,
    rules_machine,
    serving_time,
)
from gpucalc.formulas import compute as f
from gpucalc.formulas import serving_memory as serving

MIB = 2**20


def test_activations() -> None:
    # 100 values of 2 bytes and a root mean square of 4 bytes for each of 8 heads
    assert act.fused_rmsnorm_saved_bytes(width=100, rows=8, activation_bytes=2) == 232


def test_calibration() -> None:
    assert calibration.sample_spread(upper_s=14, lower_s=8, median_s=10) == 0.6


def test_collectives() -> None:
    assert comm.network_steps(nodes=8) == 2
    assert comm.network_steps(nodes=2) == 0
    assert comm.network_steps(nodes=1) == 0
    # One rank per domain of eight is one rank per node, at a stride of eight and above it.
    assert comm.group_nodes(ranks=6, stride=8, domain=8) == 6
    assert comm.group_nodes(ranks=3, stride=4, domain=8) == 2
    assert comm.group_nodes(ranks=3, stride=12, domain=8) == 3
    assert comm.ring_latency_s(alpha0_s=1, link_step_s=2, network_step_s=5, ranks=6, nodes=3) == 24
    assert comm.ring_latency_s(alpha0_s=1, link_step_s=2, network_step_s=5, ranks=1, nodes=3) == 16
    assert comm.ring_bus_bytes_per_s(bus_bytes_per_s=9, ring_bytes_per_s=4, nodes=3) == 4
    assert comm.ring_bus_bytes_per_s(bus_bytes_per_s=9, ring_bytes_per_s=4, nodes=2) == 9
    # 9 nodes, 5 in a pod, 4:1 above it: 4 of 8 neighbours lie beyond, so half the traffic pays four times.
    pods = {"nodes": 9, "nodes_per_pod": 5}
    assert comm.crossing_nic_bytes_per_s(nic_bytes_per_s=50, oversubscription=4, **pods) == 25
    assert comm.crossing_nic_bytes_per_s(nic_bytes_per_s=50, oversubscription=1, **pods) == 50
    assert comm.crossing_nic_bytes_per_s(
        nic_bytes_per_s=50, nodes=1, nodes_per_pod=5, oversubscription=4
    ) == pytest.approx(50)
    link = {"link_bytes_per_s": 60, "pod_gpus": 32}
    assert comm.crossing_link_bytes_per_s(stage_ranks=16, oversubscription=4, **link) == 30
    assert comm.crossing_link_bytes_per_s(stage_ranks=64, oversubscription=4, **link) == 15
    assert comm.crossing_link_bytes_per_s(stage_ranks=8, oversubscription=1, **link) == 60


def test_times() -> None:
    # 3 s of computing and 4 s of reading, joined as the sides of a right triangle, after 1 s of overhead
    both = {"peak_flops_per_s": 10, "efficiency": 0.5, "bandwidth_bytes_per_s": 8, "hbm_efficiency": 0.5}
    assert f.attention_s(flops=15, bytes_moved=16, p=2, overhead_s=1, **both) == pytest.approx(6)
    memory_bound = {"multiprocessors": 100, "clock_hz": 10, "bytes_per_clock": 10}
    assert f.image_traffic_s(
        bytes_moved=800, bandwidth_bytes_per_s=200, hbm_efficiency=0.5, **memory_bound
    ) == pytest.approx(8)
    assert f.quantise_bytes(elements=10, source_bytes=2, stored_bytes=0.5) == 30


def test_sharded_states_divide_from_stage_1() -> None:
    for stage, ranks in ((0, 1), (1, 8), (2, 8)):
        shard = {"shard": 8, "zero_stage": stage}
        assert memory.deepspeed_partition_bytes(params=80, element_bytes=2, **shard) == 480 / ranks
        assert optimizers.adafactor_state_bytes(sides=30, other_params=10, element_bytes=4, **shard) == (
            160 / ranks
        )
        assert optimizers.wide_embedding_state_bytes(params=40, wide_bytes=8, narrow_bytes=2, **shard) == (
            240 / ranks
        )
        assert optimizers.preconditioner_bytes(elements=20, **shard) == 160 / ranks


def test_transients_of_wrapped_tables() -> None:
    # Layers of 100, a table of 150: a layer and the table are gathered, 4-byte gradients beside.
    sizes = {"element_bytes": 2, "reduce_bytes": 4}
    layers = memory.fsdp_wrapped_backward_bytes(layer_params=100, table_params=10, **sizes)
    assert layers == 2 * 100 + max(2 * (100 + 100) + 4 * 100, 2 * 200 + 4 * 10)
    table = memory.fsdp_wrapped_backward_bytes(layer_params=100, table_params=150, **sizes)
    assert table == 2 * 100 + max(2 * (100 + 150) + 4 * 100, 2 * 200 + 4 * 150)


def test_soap_keeps_a_preconditioner_up_to_its_limit() -> None:
    assert optimizers.soap_preconditioner_elements(rows=10, columns=6, limit=10) == 136
    assert optimizers.soap_preconditioner_elements(rows=11, columns=6, limit=10) == 36
    assert optimizers.soap_preconditioner_elements(rows=11, columns=12, limit=11) == 121
    assert optimizers.soap_preconditioner_elements(rows=13, columns=12, limit=11) == 0
    assert optimizers.soap_preconditioner_elements(rows=6, columns=10, limit=10) == 136


def test_pipelines() -> None:
    each = {"forward_s": 5, "weight_gradient_s": 2}
    assert pipeline.zero_bubble_s(pp=4, input_gradient_s=6, **each) == 27
    assert pipeline.zero_bubble_s(pp=4, input_gradient_s=1, forward_s=1, weight_gradient_s=9) == 0
    assert pipeline.fuller_zero_bubble_s(pp=4, input_gradient_s=6, **each) == 21
    assert pipeline.fuller_zero_bubble_s(pp=4, input_gradient_s=1, forward_s=1, weight_gradient_s=9) == 0
    assert pipeline.dual_pipe_bubble_s(pp=8, forward_s=5, backward_s=8, weight_gradient_s=2) == 45
    assert pipeline.dual_pipe_bubble_s(pp=8, forward_s=1, backward_s=1, weight_gradient_s=9) == 0
    # 1F1B: the ranks that follow and itself, never more than there are
    assert pipeline.in_flight_micro_batches(pp=4, vpp=1, rank=1, micro_batches=16) == 3
    assert pipeline.in_flight_micro_batches(pp=4, vpp=1, rank=0, micro_batches=2) == 2
    # interleaved: 2 (4 - 1 - 1) + 4 + 1 chunks of half a stage each
    assert pipeline.in_flight_micro_batches(pp=4, vpp=2, rank=1, micro_batches=16) == 4.5


def test_rules_of_documents() -> None:
    assert rules.warmup_factor(epoch=3, epochs=5) == 0.6
    assert rules.warmup_factor(epoch=9, epochs=5) == 1
    assert rules.step_traffic_bytes(gradient_bytes=100, ranks=4, zero3=1) == 225
    assert rules.step_traffic_bytes(gradient_bytes=100, ranks=4, zero3=0) == 150
    assert rules.save_share(write_s=30, steps=500, step_s=2) == 0.03
    assert rules_machine.connector_w(slot_w=75, eight_pins=2, twelve_volts=1) == 975


def test_intervals_between_saves() -> None:
    # x = 2 / 8 = 1/4: sqrt(2 x 2 x 4) (1 + 1/6 + 1/36) - 2
    assert reliability.daly_interval_s(write_s=2, mtbf_s=4) == pytest.approx(4 * (1 + 1 / 6 + 1 / 36) - 2)
    assert reliability.daly_interval_s(write_s=8, mtbf_s=4) == 4
    assert reliability.daly_interval_s(write_s=8.1, mtbf_s=4) == 4
    nearly = reliability.daly_interval_s(write_s=7.999, mtbf_s=4)
    assert nearly == pytest.approx(8 * (1 + 1 / 3 + 1 / 9) - 8, abs=0.01)
    assert reliability.interval_steps(interval_s=26, step_s=10) == 3
    assert reliability.interval_steps(interval_s=4, step_s=10) == 1


def test_serving_memory() -> None:
    assert serving.padded_vocab(vocab=100, tp=2) == 128
    assert serving.padded_vocab(vocab=100, tp=3) == 192
    assert serving.padded_vocab(vocab=128, tp=2) == 128
    assert serving.padded_vocab(vocab=65, tp=1) == 128
    assert serving.allocated_block_bytes(tensor_bytes=10 * MIB) == 10 * MIB
    assert serving.allocated_block_bytes(tensor_bytes=11.5 * MIB) == 12 * MIB
    assert serving.allocated_block_bytes(tensor_bytes=10.5 * MIB) == 10.5 * MIB  # 1.5 MiB would be split off
    assert serving.allocated_block_bytes(tensor_bytes=9.5 * MIB) == 9.5 * MIB
    assert serving.absorbed_projection_bytes(layers=3, latent=5, heads=8, head_width=7, tp=2) == 840
    state = {"heads": 2, "key_width": 3, "value_width": 5, "state_bytes": 4, "element_bytes": 2, "tp": 2}
    assert serving.recurrent_state_bytes(layers=10, conv_width=7, conv_steps=4, **state) == 810
    assert serving.recurrent_state_bytes(layers=10, conv_width=7, conv_steps=0, **state) == 600
    wide = {"tokens": 10, "top_k": 2, "ranks": 2, "element_bytes": 2}
    assert serving.expert_workspace_bytes(expert_width=30, hidden=10, **wide) == 40 * (30 + 15)
    assert serving.expert_workspace_bytes(expert_width=3, hidden=10, **wide) == 40 * 20
    assert serving.encoder_cache_bytes(tokens=10, hidden=4, element_bytes=2, copies=3) == 240
    assert (
        serving.compute_buffer_bytes(
            tokens=2, vocab=10, logit_copies=3, hidden=5, stream_copies=4, score_heads=6, context=7
        )
        == 4 * 2 * (30 + 20 + 42)
    )
    assert serving.sliding_request_blocks(tokens=100, window=17, batched_tokens=16, block_size=16) == 3
    assert serving.sliding_request_blocks(tokens=10, window=17, batched_tokens=16, block_size=16) == 2


def test_sglang_reserve() -> None:
    sizes = {
        "base_bytes": 100, "tokens": 10, "token_bytes": 3, "graph_request_bytes": 2, "attention_ranks": 4,
        "attention_rank_bytes": 5, "ranks": 6, "rank_bytes": 7, "drafting_bytes": 1,
    }  # fmt: skip
    assert serving.static_reserve_bytes(graph_requests=300, least_bytes=0, **sizes) == (
        100 + 30 + 600 + 300 * 20 + 42 + 1
    )
    assert serving.static_reserve_bytes(graph_requests=310, least_bytes=0, **sizes) == (
        100 + 30 + 620 + 310 * 1.5 * 20 + 42 + 1
    )
    assert serving.static_reserve_bytes(graph_requests=1, least_bytes=9000, **sizes) == 9001
    # Shares are kept to a thousandth, rounded: 0.87654 and 0.8764.
    assert serving.reserved_static_fraction(memory_bytes=100_000, reserve_bytes=12_346) == 0.877
    assert serving.reserved_static_fraction(memory_bytes=100_000, reserve_bytes=12_360) == 0.876
    assert serving.reserved_static_fraction(memory_bytes=100_000, reserve_bytes=12_351) == 0.876


def test_serving_rates() -> None:
    assert serving_time.accepted_tokens(acceptance=0.5, drafts=2) == pytest.approx(1.75)
    assert serving_time.accepted_tokens(acceptance=1, drafts=2) == 3
    assert math.isfinite(serving_time.accepted_tokens(acceptance=1 - 1e-16, drafts=2))
    assert serving_time.prompts_per_s(caches=3, pp=4, prefill_s=2) == 6
