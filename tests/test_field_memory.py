"""What public reports of failing runs added to memory: loading, frozen parts, references, the host."""

from __future__ import annotations

from typing import Any

import pytest
from field_cases import CATALOG, biggest, phases

from gpucalc.formulas import memory as mem
from gpucalc.jobs import resolve_data
from gpucalc.plan.answer import Level, Plan
from gpucalc.planner import plan_job

GB = 10**9
N = 6_738_415_616  # parameters of llama-2-7b
JOB: dict[str, Any] = {"model": "llama-2-7b", "gpus": "8xA100-SXM-80GB"}
RUN: dict[str, Any] = {
    "task": "train", "framework": "deepspeed", "zero_stage": 2, "precision": "bf16", "optimizer": "adamw",
    "seq_len": 1024, "micro_batch": 1, "recompute": "full",
}  # fmt: skip


def plan(**run: Any) -> Plan:
    job = {**JOB, **{key: run.pop(key) for key in ("model", "gpus") if key in run}, "run": {**RUN, **run}}
    return plan_job(resolve_data(job, CATALOG, where="job"), CATALOG, advice=False)


def load(answer: Plan) -> dict[str, float]:
    phase = next(phase for phase in phases(answer) if phase.name == "load")
    return {line.name: float(line.value) for line in phase.child("allocated").children}


def keys(answer: Plan) -> set[str]:
    return {item.key for item in answer.assumptions}


def test_loading_formulas_by_hand() -> None:
    assert mem.loaded_weight_bytes(params=1000, loaded_bytes=4) == 4000
    # a quarter of the weights: cloned in 16 bit and turned into fp32
    assert mem.deepspeed_partition_bytes(params=1000, element_bytes=2, shard=4, zero_stage=2) == 250 * 6
    assert mem.deepspeed_partition_bytes(params=1000, element_bytes=2, shard=4, zero_stage=0) == 6000
    assert mem.host_buffer_bytes(offloaded_bytes=1000, buffer_fraction=0.5) == 500


def test_weights_are_read_in_fp32_beside_their_16_bit_copy() -> None:
    held = load(answer := plan())
    assert held["weights"] == 2 * N
    assert held["loaded_weights"] == 4 * N
    assert "run.loaded_as" in keys(answer)
    assert load(plan(loaded_as="16-bit"))["master_partition"] == 6 * N / 8
    assert load(plan(gpus="1xH200"))["master_partition"] == 6 * N  # and on one GPU the whole fp32 copy
    assert "loaded_weights" not in load(plan(zero_stage=3))


def test_only_a_stated_load_refuses_a_plan() -> None:
    assert plan(gpus="8xA100-SXM-40GB").verdict.level is Level.MARGINAL
    v100 = {"gpus": "8xV100-SXM2-32GB", "precision": "fp16"}
    assert plan(**v100).verdict.level is Level.MARGINAL
    assert plan(**v100, loaded_as="fp32").verdict.phase == "load"
    assert plan(**v100, loaded_as="16-bit").verdict.phase != "load"


def test_a_quantised_base_is_whole_on_every_gpu_under_deepspeed() -> None:
    common = {"method": "qlora", "quantization": "nf4", "zero_stage": 3}
    whole, shared = plan(**common), plan(**common, shard_quantised=True)
    assert biggest(whole, "frozen_linears") == pytest.approx(8 * biggest(shared, "frozen_linears"))
    assert "run.shard_quantised" in keys(whole)
    fsdp = plan(method="qlora", quantization="nf4", framework="fsdp", zero_stage=3)
    assert biggest(fsdp, "frozen_linears") == biggest(shared, "frozen_linears")


def test_what_a_quantised_base_leaves_alone_may_be_upcast() -> None:
    common = {"method": "qlora", "quantization": "nf4", "framework": "hf", "zero_stage": 0}
    up, kept = plan(**common), plan(**common, upcast_frozen=False)
    norms = (2 * 32 + 1) * 4096
    tables = 2 * 32_000 * 4096
    assert biggest(up, "other_weights") == 4 * (norms + tables)
    assert biggest(kept, "other_weights") == 2 * (norms + tables)
    # the residual stream is fp32 too: twice the checkpoints
    assert biggest(up, "decoder.layer") >= 2 * biggest(kept, "decoder.layer") * 0.99


def test_a_reference_model_is_held_as_its_stage_divides() -> None:
    assert biggest(plan(reference_model=True), "reference_weights") == 2 * N
    assert biggest(plan(reference_model=True, zero_stage=3), "reference_weights") == 2 * N / 8
    assert biggest(plan(), "reference_weights") == 0


def test_frozen_parts_have_no_gradients_or_states() -> None:
    table = 32_000 * 4096
    answer = plan(frozen=["embedding"], zero_stage=0, gpus="1xH200")
    assert biggest(answer, "frozen_weights") == 2 * table
    assert biggest(answer, "weights") == 2 * (N - table)
    assert biggest(answer, "optimizer_states") == 12 * (N - table)
    assert biggest(answer, "gradients") == 2 * (N - table)


def test_all_gathers_that_are_not_limited_wait_where_memory_ends() -> None:
    fsdp = {"framework": "fsdp", "zero_stage": 3, "seq_len": 512}
    old, new = plan(**fsdp, year=2023), plan(**fsdp)
    assert biggest(old, "gathered_weights") == biggest(new, "gathered_weights")


def test_host_memory_of_loading_and_offloading() -> None:
    every = plan(framework="fsdp", zero_stage=3, year=2023).verdict.host
    assert every is not None
    assert every.needed.value == 8 * 4 * N
    one = plan(framework="fsdp", zero_stage=3).verdict.host
    assert one is not None
    assert one.needed.value == 4 * N
    offloaded = plan(zero_stage=3, offload="params+optimizer-cpu").verdict.host
    assert offloaded is not None
    # 2 weights, 12 states and masters, 4 gradient; half again for buffers
    assert offloaded.needed.value == pytest.approx(18 * N * 1.5)
    nvme = plan(zero_stage=3, offload="params+optimizer-nvme").verdict.host
    assert nvme is not None
    assert nvme.phase == "load"


def test_the_host_decides_where_it_is_too_small() -> None:
    offload = {"zero_stage": 3, "offload": "params+optimizer-cpu"}
    small = plan(**offload, host_ram_gb=64).verdict
    assert small.level is Level.DOES_NOT_FIT
    assert small.host_decides
    assert plan(**offload, host_ram_gb=512).verdict.level is Level.FITS


def test_a_server_nobody_named_makes_marginal_at_most() -> None:
    # 8 x 70B in fp32 on the host of an assumed server
    answer = plan(model="llama-2-70b", zero_stage=3, framework="fsdp", year=2023).verdict
    assert answer.host is not None
    assert answer.host.level is not Level.DOES_NOT_FIT


def test_adaptive_optimizers_cost_what_they_keep() -> None:
    pure = {"framework": "ddp", "zero_stage": 0, "precision": "bf16-pure", "gpus": "1xH200"}
    for name, states in (("prodigy", 4), ("adan", 4), ("adamw-fused", 2), ("adagrad", 1), ("rmsprop", 1)):
        assert biggest(plan(optimizer=name, **pure), "optimizer_states") == states * 2 * N


def test_advice_names_the_load_and_the_host() -> None:
    def titles(gpus: str = "8xA100-SXM-80GB", **run: Any) -> set[str]:
        job = {**JOB, "gpus": gpus, "run": {**RUN, **run}}
        found = plan_job(resolve_data(job, CATALOG, where="job"), CATALOG)
        return {action.title for action in found.actions}

    assert "weights read in 16 bit" in titles("8xV100-SXM2-32GB", precision="fp16")
    assert "offload to NVMe" in titles(
        zero_stage=3, offload="params+optimizer-cpu", host_load="one-rank", host_ram_gb=100
    )


def test_advice_gives_up_graphs_where_it_makes_whole_layers_again() -> None:
    megatron = {"framework": "megatron", "zero_stage": 1, "recompute": "none", "seq_len": 8192}
    run = {**RUN, **megatron, "cuda_graphs": ["attn"]}
    job = {**JOB, "gpus": "8xA100-SXM-80GB", "run": run, "model": "llama-2-13b"}
    found = plan_job(resolve_data(job, CATALOG, where="job"), CATALOG)
    full = [action for action in found.actions if action.changes.get("run.recompute") == "full"]
    assert full
    assert all(action.changes["run.cuda_graphs"] == ("none",) for action in full)


def test_a_reference_model_reads_every_sequence_once_more() -> None:
    one, two = plan().time, plan(reference_model=True).time
    assert one is not None
    assert two is not None
    assert two.child("reference_forward").value == one.child("forward").value
    assert two.value > one.value
