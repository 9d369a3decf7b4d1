"""Framework buffers against frameworks that were run: DeepSpeed and FSDP2 on CPU ranks.

tests/data/deepspeed.csv: DeepSpeed 0.19.8 on its CPU accelerator, gloo, eight layers of two matrices, bf16,
fused AdamW; live storages of one rank after start, at the peak of the last backward pass and of the second
step (dispatch mode with weak references on storages; what gloo's reduce-scatter copies is left out).
tests/data/fsdp_transients.csv: FSDP2 of torch 2.13 in a fake process group of eight, two matrices a layer,
four tokens; largest sum of live storages beyond the shards. mixed: bf16 weights and fp32 reduction.
wrapped: embedding and head are groups of their own.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from gpucalc.formulas import memory as mem

DATA = Path(__file__).parent / "data"
DEEPSPEED = list(csv.DictReader((DATA / "deepspeed.csv").read_text().splitlines()))
FSDP = list(csv.DictReader((DATA / "fsdp_transients.csv").read_text().splitlines()))


def name(row: dict[str, str]) -> str:
    return "-".join(row.values())


# --- DeepSpeed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", DEEPSPEED, ids=name)
def test_deepspeed(row: dict[str, str]) -> None:
    stage, world, params = int(row["stage"]), int(row["world"]), int(row["params"])
    shards = {"shard": world, "zero_stage": stage}
    weights = mem.weight_bytes(params=params, parameter_bytes=2, **shards)
    masters = mem.optimizer_state_bytes(params=params, bytes_per_param=4, **shards)
    adam = mem.optimizer_state_bytes(params=params, bytes_per_param=8, **shards)
    bucket = mem.deepspeed_bucket_bytes(
        bucket_elements=int(row["bucket"]), element_bytes=2, buffers=1 + (int(row["overlap"]) and stage < 3)
    )
    partition = mem.deepspeed_gradient_partition_bytes(params=params, element_bytes=2, shard=world)
    group = {"params": params, "shard": world, "sub_group_elements": 1e9}
    flat = mem.deepspeed_flat_gradient_bytes(**group, element_bytes=2)
    fp32 = mem.deepspeed_step_gradient_bytes(**group)
    accumulates = int(row["micro_batches"]) > 1
    states = weights + masters + adam
    if row["grad_accum_dtype"] == "fp32":  # stage 1's bf16 optimizer: 16-bit and fp32 gradients, whole
        start = weights + masters + 4 * params
        whole = states + mem.gradient_bytes(params=params, element_bytes=6, shard=1, zero_stage=0)
        in_transit = mem.deepspeed_gradient_partition_bytes(params=params, element_bytes=2, shard=1)
        backward, step = whole + in_transit, whole
    elif stage == 1:
        start = weights + masters
        whole = mem.gradient_bytes(params=params, element_bytes=2, **shards)
        # Either whole gradients and the bucket, or the partition instead of what the bucket holds.
        backward = states + whole + max(bucket, partition)
        step = states + partition + flat + fp32
    elif stage == 2:
        start = weights + masters
        layer = 2 * int(row["layer_params"]) // 2  # gradient of one matrix of two
        backward = states + partition * (1 + accumulates) + bucket + layer
        step = states + partition + flat + fp32
    else:
        start = weights + masters + partition + bucket
        gathered = mem.deepspeed_live_parameter_bytes(live_elements=1e9, params=params, element_bytes=2)
        scattered = mem.deepspeed_scatter_bytes(
            bucket_elements=int(row["bucket"]), params=params, element_bytes=2
        )
        backward = states + partition + bucket + gathered + scattered
        step = states + partition + bucket + flat + fp32
    assert start == pytest.approx(int(row["start_bytes"]), rel=1e-6)
    assert step == pytest.approx(int(row["step_bytes"]), rel=1e-3)
    # Whole layers enter and leave the bucket, of eight layers here.
    bound = {1: 0.05, 2: 0.02, 3: 0.07}[stage]
    assert backward == pytest.approx(int(row["backward_bytes"]), rel=bound)


# --- FSDP2 -------------------------------------------------------------------------------------------------

WORLD, TOKENS = 8, 4


def fsdp_sizes(row: dict[str, str]) -> dict[str, int]:
    hidden, size = int(row["hidden"]), 2 if int(row["mixed"]) else 4
    return {
        "layer": 8 * hidden**2,
        "table": int(row["vocab"]) * hidden,
        "layers": int(row["layers"]),
        "element": size,
        "saved": size * TOKENS * hidden * (1 + 5 * int(row["layers"])),  # ReLU's output and each sum
    }


def fsdp_forward(row: dict[str, str]) -> float:
    z = fsdp_sizes(row)
    sizes = {"layer_params": z["layer"], "element_bytes": z["element"]}
    kept = {} if int(row["reshard"]) else {"layers": z["layers"]}
    if int(row["wrapped"]):
        wrapped = mem.fsdp_wrapped_forward_unresharded_bytes if kept else mem.fsdp_wrapped_forward_bytes
        return wrapped(table_params=z["table"], **sizes, **kept)
    plain = mem.fsdp_forward_unresharded_bytes if kept else mem.fsdp_forward_bytes
    return plain(root_params=2 * z["table"], **sizes, **kept)


def fsdp_backward(row: dict[str, str]) -> float:
    """The largest of the moments of the sweep, each with the shards of gradients made by then."""
    z = fsdp_sizes(row)
    layer, table, layers, size = z["layer"], z["table"], z["layers"], z["element"]
    sizes = {"layer_params": layer, "element_bytes": size, "reduce_bytes": 4}
    kept = {} if int(row["reshard"]) else {"layers": layers}
    if not int(row["wrapped"]):
        plain = mem.fsdp_backward_unresharded_bytes if kept else mem.fsdp_backward_bytes
        sweep = plain(root_params=2 * table, head_params=table, **sizes, **kept)
        made = layer if kept else (layers - 2) * layer
        end = mem.fsdp_end_bytes(root_params=2 * table, **sizes) + 4 * layers * layer / WORLD
        return max(sweep + 4 * made / WORLD + (z["saved"] if kept else 0), end)
    wrapped = mem.fsdp_wrapped_backward_unresharded_bytes if kept else mem.fsdp_wrapped_backward_bytes
    sweep = wrapped(table_params=table, **sizes, **kept)
    end = mem.fsdp_end_bytes(root_params=table, **sizes) + 4 * (layers * layer + 2 * table) / WORLD
    if kept:  # the head's moment, or the last layer's
        last = 4 * layer > size * max(layer, table) + 4 * table
        return max(sweep + 4 * (table + layer * last) / WORLD + z["saved"], end)
    # The first layer has the embedding gathered ahead, the second the first layer.
    first = size * (2 * layer + table) + 4 * layer + 4 * (table + (layers - 1) * layer) / WORLD
    second = size * 3 * layer + 4 * layer + 4 * (table + (layers - 2) * layer) / WORLD
    assert sweep >= max(size * (2 * layer + table), size * 3 * layer) + 4 * layer
    return max(first, second, end)


@pytest.mark.parametrize("row", FSDP, ids=name)
def test_fsdp_transients(row: dict[str, str]) -> None:
    # Gathering the root comes before any activation is saved, the widest layer after most.
    measured, forward = int(row["forward_bytes"]), fsdp_forward(row)
    assert forward * 0.99 < measured < (forward + fsdp_sizes(row)["saved"]) * 1.01
    assert fsdp_backward(row) == pytest.approx(int(row["backward_bytes"]), rel=0.01)
