"""Which keys of a run mean something under which framework, and which sharding stages each has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpucalc.spec.base import refuse

# Keys only some frameworks have; a value that switches nothing on (1, 0, false, none) is legal anywhere.
_MODEL_PARALLEL = ("megatron", "torchtitan", "deepspeed")
TRAIN_KEYS: dict[str, tuple[str, ...]] = {
    "tp": _MODEL_PARALLEL,
    "tp_across_nodes": _MODEL_PARALLEL,
    "pp": _MODEL_PARALLEL,
    "vpp": ("megatron", "torchtitan"),
    "pipeline_split": _MODEL_PARALLEL,
    "schedule": _MODEL_PARALLEL,
    "cp": _MODEL_PARALLEL,
    "ep": _MODEL_PARALLEL,
    "etp": ("megatron", "torchtitan"),
    "recompute_modules": ("megatron",),
    "cuda_graphs": ("megatron",),
    "fp8_params": ("megatron",),
    "reduce_bucket_size": ("deepspeed",),
    "overlap_comm": ("deepspeed",),
    "tp_overlap": ("megatron", "torchtitan"),
    "ep_overlap": ("megatron", "torchtitan"),
    "max_live_parameters": ("deepspeed",),
    "nvme_gb_per_s": ("deepspeed",),
    "sub_group_size": ("deepspeed",),
    "zero_init": ("deepspeed",),
    "sequence_parallel": _MODEL_PARALLEL,
    "dp_shard": ("fsdp", "torchtitan", "megatron"),
    "reshard_after_forward": ("fsdp", "torchtitan"),
    "wrap_tables": ("fsdp", "torchtitan"),
    "optimizer_in_backward": ("ddp", "hf", "fsdp"),
    "gradient_as_bucket_view": ("ddp", "hf"),
}
STAGES: dict[str, tuple[int, ...]] = {
    "ddp": (0,),
    "hf": (0,),
    "fsdp": (0, 2, 3),
    "torchtitan": (0, 2, 3),
    "deepspeed": (0, 1, 2, 3),
    "megatron": (0, 1, 2, 3),
}
SERVE_KEYS: dict[str, tuple[str, ...]] = {
    "gpu_memory_utilization": ("vllm", "trtllm"),
    "mem_fraction_static": ("sglang",),
    "enforce_eager": ("vllm", "sglang"),
    "max_num_batched_tokens": ("vllm", "sglang", "trtllm", "llamacpp"),
    "max_num_seqs": ("vllm", "sglang", "trtllm", "llamacpp"),
    "ep": ("vllm", "sglang", "trtllm"),
    "dp": ("vllm", "sglang", "trtllm"),
    "decode_context_parallel": ("vllm",),
    "block_size": ("vllm", "trtllm"),
    "request_rate": ("vllm", "sglang", "trtllm"),
    "prefix_hit_rate": ("vllm", "sglang", "trtllm"),
    "num_speculative_tokens": ("vllm", "sglang", "trtllm", "llamacpp"),
    "draft_model": ("vllm", "sglang", "trtllm", "llamacpp"),
    "draft_head_gib": ("vllm", "sglang", "trtllm"),
    "prefill_replicas": ("vllm", "sglang", "trtllm"),
}
_IDLE: tuple[Any, ...] = (None, 1, 0, False, "none", "even", ("none",))


def belongs(key: str, value: Any, framework: str | None, table: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse a key that its run's framework has no use for."""
    where = table.get(key)
    if where is None or framework is None or framework in where:
        return
    if any(type(value) is type(idle) and value == idle for idle in _IDLE):  # True is not 1
        return
    raise refuse(f"does not apply to {framework}", legal=f"with framework {', '.join(where)}")
