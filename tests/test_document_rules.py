"""The documents' rules and what they are held against, worked by hand."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import gpucalc.formulas.rules as r
import gpucalc.formulas.rules_machine as m
from gpucalc.formula import FORMULAS, formula_of

GB = 1e9
LLM_67B = 67_425_001_472
LLAMA_2_7B = 6_738_415_616
BERT_BASE = {"layers": 12, "seq_len": 512, "batch": 32, "hidden": 768, "heads": 12}

# formula, its inputs, the value worked out by hand
WORKED: list[tuple[Any, dict[str, Any], float]] = [
    # 284 x 4; 13 x 4 x 32; with 284 x 8: 1136 + 1664 + 2272 = 5072; over 8 cards 634
    (r.fp32_rule_bytes, {"params": 284 * GB}, 1136 * GB),
    (r.activation_rule_bytes, {"active_params": 13 * GB, "batch": 32}, 1664 * GB),
    (
        r.memory_rule_bytes,
        {"params": 284 * GB, "active_params": 13 * GB, "batch": 32, "optimizer_bytes": 8},
        5072 * GB,
    ),
    (r.memory_rule_card_bytes, {"memory_rule_bytes": 5072 * GB, "gpus": 8}, 634 * GB),
    # 67 x 4 / 16 = 16.75; 67.425 x 2 / 8 = 16.856
    (r.card_rule_bytes, {"params": 67 * GB, "gpus": 16}, 16.75 * GB),
    (r.weight_shard_bytes, {"params": LLM_67B, "element_bytes": 2, "gpus": 8}, 16_856_250_368),
    (r.stored_weight_bytes, {"params": 277 * GB, "bits": 4}, 138.5 * GB),
    # (277.025390592 / 2 + 7.306839639) / 8
    (
        r.native_shard_bytes,
        {
            "expert_params": 277_025_390_592,
            "expert_bits": 4,
            "other_params": 7_306_839_639,
            "other_bits": 8,
            "gpus": 8,
        },
        18_227_441_866.875,
    ),
    (r.with_margin_bytes, {"needed_bytes": 17 * GB, "margin": 0.2}, 20.4 * GB),
    (r.usable_card_bytes, {"card_bytes": 80 * GB, "margin": 0.2}, 64 * GB),
    # 25,600 / 64 = 400
    (r.cards_needed, {"needed_bytes": 25.6e12, "card_bytes": 80 * GB, "usable_share": 0.8}, 400),
    # 4 x 6.738 + 12 x 6.738 / 8
    (r.adam_state_bytes, {"params": LLAMA_2_7B, "shard": 8, "zero_stage": 1}, 37_061_285_888),
    (r.adam_state_bytes, {"params": LLAMA_2_7B, "shard": 8, "zero_stage": 2}, 25_269_058_560),
    (r.adam_state_bytes, {"params": LLAMA_2_7B, "shard": 8, "zero_stage": 3}, 13_476_831_232),
    # 1 - (4 + 12 / 5) / 16
    (r.zero_saving, {"shard": 5, "zero_stage": 1}, 0.6),
    (r.zero_saving, {"shard": 4, "zero_stage": 3}, 0.75),
    (r.fp32_adam_bytes, {"params": 10}, 160),
    (r.saving, {"before": 240, "after": 31}, 209 / 240),
    (r.quantised_element_bytes, {"bits": 8, "scale_bytes": 2, "group": 128}, 1.015625),
    (r.sparse_kept_share, {"value_bits": 16, "index_bits": 2, "kept": 0.5}, 0.5625),
    (r.sqrt_checkpoint_layers, {"layers": 64}, 16),
    # 12 x 512 x 32 x 768 x (34 + 5 x 12 x 512 / 768) = 150,994,944 x 74
    (r.full_activation_bytes, BERT_BASE, 11_173_625_856),
    # 2 x 150,994,944 + 12,582,912 x 74
    (r.block_checkpoint_bytes, BERT_BASE, 1_233_125_376),
    # 12 x 12 x 768^2 x 16
    (r.transformer_state_bytes, {"layers": 12, "hidden": 768}, 1_358_954_496),
    (r.recompute_overhead, {"backward_over_forward": 2}, 1 / 3),
    (r.effective_batch, {"micro_batch": 32, "accumulation": 4, "ranks": 8}, 1024),
    (r.bubble_share, {"pp": 8, "micro_batches": 4}, 7 / 11),
    (r.largest_stage, {"layers": 61, "pp": 8}, 8),
    (r.warmup_factor, {"epoch": 0, "epochs": 10}, 0.0),
    (r.warmup_factor, {"epoch": 25, "epochs": 10}, 1.0),
    # 1 GB x 2 x 3 / 4 x 1.5
    (r.step_traffic_bytes, {"gradient_bytes": GB, "ranks": 4, "zero3": 1}, 2.25 * GB),
    # 6 x 10^9 x 10^12 / (10 x 10^15 x 0.5) = 1.2 x 10^6 s
    (
        r.pretraining_days,
        {"active_params": 1e9, "tokens": 1e12, "gpus": 10, "peak_flops_per_s": 1e15, "utilisation": 0.5},
        1.2e6 / 86400,
    ),
    # sqrt(2 x 50 x 10,000)
    (r.save_interval_s, {"write_s": 50, "mtbf_s": 10_000}, 1000),
    (r.save_share, {"write_s": 60, "steps": 500, "step_s": 1}, 0.12),
    (r.saved_state_bytes, {"params": 67 * GB}, 938 * GB),
    (r.lost_work_s, {"interval_s": 500, "restart_s": 300}, 550),
    (r.gpus_with_spares, {"gpus": 64, "spare_percent": 10}, 71),
    (r.gpus_with_spares, {"gpus": 10, "spare_percent": 10}, 11),
    (r.proven_gpu_hours, {"hours": 72, "gpus": 8}, 192),
    # 16 x 16 x 128 / 130 / 8
    (m.lane_bytes_per_s, {"transfers_per_s": 16e9, "lanes": 16}, 31.507692307692 * GB),
    (m.both_ways_bytes_per_s, {"one_way_bytes_per_s": 150 * GB}, 300 * GB),
    (m.times_as_much, {"quantity": 600, "reference": 64}, 9.375),
    # 2 x 7 / 8 / 240
    (
        m.all_reduce_transfer_s,
        {"message_bytes": GB, "ranks": 8, "bus_bytes_per_s": 240 * GB},
        1.75 / 240,
    ),
    # 536,870,912 / 4225.9 us x 1.75
    (
        m.measured_bus_bytes_per_s,
        {"message_bytes": 536_870_912, "seconds_s": 4225.9e-6, "ranks": 8},
        222.3252e9,
    ),
    (m.ring_hops, {"ranks": 32}, 62),
    (m.tree_hops, {"ranks": 32, "nodes": 4}, 18),
    # 1.875 / 25; 1.75 / 300 + 1 / 25
    (m.flat_all_reduce_s, {"message_bytes": GB, "ranks": 16, "network_bytes_per_s": 25 * GB}, 0.075),
    (
        m.hierarchical_all_reduce_s,
        {
            "message_bytes": GB,
            "ranks_per_node": 8,
            "nodes": 2,
            "link_bytes_per_s": 300 * GB,
            "network_bytes_per_s": 25 * GB,
        },
        1.75 / 300 + 0.04,
    ),
    (m.share_speedup, {"share_before": 0.35, "share_after": 0.18}, 0.82 / 0.65),
    (m.speedup_efficiency, {"speedup": 7.2, "gpus": 8}, 0.9),
    (m.mixed_speedup, {"fast_cards": 2, "slow_cards": 2, "relative_rate": 0.572}, 3.144),
    (m.implied_relative_rate, {"speedup": 3.1, "fast_cards": 2, "slow_cards": 2}, 0.55),
    # 2 x 71.2 / 383.2
    (m.equal_split_efficiency, {"first_rate": 312, "second_rate": 71.2}, 142.4 / 383.2),
    # 64 x 1582 / 2487
    (m.batch_share, {"batch": 64, "own_rate": 1582, "other_rate": 905}, 40.7109),
    (m.core_flops_per_s, {"cores": 10_496, "clock_hz": 1.695e9}, 35.58144e12),
    (
        m.peak_share,
        {"achieved_flops_per_s": 280e12, "gpus": 4, "peak_flops_per_s": 312e12},
        280 / 1248,
    ),
    (m.phase_s, {"steps": 7038, "batch": 65_536, "samples_per_s": 580}, 795_245.46),
    (m.both_phases_s, {"first_s": 795_245, "second_s": 243_888}, 1_039_133),
    (m.cards_power_w, {"gpus": 4, "tdp_w": 300}, 1200),
    (m.supply_w, {"gpu_power_w": 1200, "other_w": 205, "load_share": 0.8}, 1756.25),
    # (3200 x 0.8 - 750) / 300 = 6.03; (1600 x 0.8 - 750) / 300 = 1.77
    (m.cards_on_supply, {"supply_w": 3200, "load_share": 0.8, "other_w": 750, "tdp_w": 300}, 6),
    (m.cards_on_supply, {"supply_w": 1600, "load_share": 0.8, "other_w": 750, "tdp_w": 300}, 1),
    (m.connector_w, {"slot_w": 75, "eight_pins": 2, "twelve_volts": 0}, 375),
    # 3.16 x 3750 / 36
    (m.airflow_cfm, {"power_w": 3750, "rise_k": 20}, 329.1667),
    (m.lanes_per_card, {"lanes": 16, "gpus": 4}, 4),
    (m.lanes_for_cards, {"gpus": 10, "width": 16}, 160),
    (m.loader_cores, {"gpus": 4, "cores_per_gpu": 8}, 32),
    (m.joint_memory_bytes, {"gpus": 8, "card_bytes": 141 * GB}, 1128 * GB),
    (m.shard_rows, {"outputs": 2048, "tp": 2}, 1024),
    (m.experts_per_rank, {"experts": 384, "ep": 8}, 48),
    # 1.3406 GB / 26,214,400 = 51.1
    (m.buckets, {"gradient_bytes": 1_340_567_552, "bucket_bytes": 26_214_400}, 52),
    # 250,000 / 24.92
    (
        m.break_even_h,
        {"purchase_usd": 250_000, "rent_usd_per_h": 27.92, "running_usd_per_h": 3},
        10_032.1,
    ),
]


@pytest.mark.parametrize(
    ("function", "inputs", "expected"), WORKED, ids=[formula_of(row[0]).name for row in WORKED]
)
def test_worked_by_hand(function: Any, inputs: dict[str, Any], expected: float) -> None:
    assert function(**inputs) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("function", "inputs", "expected"), WORKED)
def test_columns_give_what_numbers_give(function: Any, inputs: dict[str, Any], expected: float) -> None:
    columns = {name: np.array([value, value], dtype=float) for name, value in inputs.items()}
    found = np.broadcast_to(function(**columns), 2)
    assert found == pytest.approx([expected, expected], rel=1e-6)


def test_every_rule_is_worked_out_above() -> None:
    modules = {importlib.import_module(name).__name__ for name in (r.__name__, m.__name__)}
    rules = {name for name, item in FORMULAS.items() if item.function.__module__ in modules}
    assert rules == {formula_of(row[0]).name for row in WORKED}
