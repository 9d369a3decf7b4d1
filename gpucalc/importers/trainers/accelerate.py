"""The YAML that `accelerate config` writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpucalc.errors import InputError
from gpucalc.importers.trainers.deepspeed import named_deepspeed, offload_of
from gpucalc.importers.trainers.fsdp import fsdp_into
from gpucalc.importers.words import Draft, ImportedJob, Words


def accelerate(data: Mapping[str, Any], where: str) -> ImportedJob:
    """The YAML that `accelerate config` writes."""
    words = Words(data, where)
    draft = Draft()
    accelerate_into(words, draft)
    return words.job("accelerate", draft)


def accelerate_into(words: Words, draft: Draft) -> None:
    """What an accelerate configuration says."""
    run = draft.run
    axes = words.group("parallelism_config")
    if axes is not None:
        for axis in ("tp", "cp", "sp"):
            name = f"parallelism_config_{axis}_size"
            if (axes.degree(name) or 1) > 1:
                raise axes.wrong((name,), f"{axis} under accelerate has no plan", axes.peek(name))
        run["dp_shard"] = axes.degree("parallelism_config_dp_shard_size")
        axes.degree("parallelism_config_dp_replicate_size")
    kind = (words.text("distributed_type") or "NO").upper().removeprefix("DISTRIBUTEDTYPE.")
    mixed = (words.text("mixed_precision") or "no").lower()
    if not words.has("mixed_precision"):
        words.assume("mixed_precision not stated: no, accelerate's default")
    precision = {"no": "fp32", "false": "fp32", "fp32": "fp32"}.get(mixed, mixed)
    if precision not in ("fp32", "fp16", "bf16", "fp8"):
        raise words.wrong(("mixed_precision",), "is not a precision", mixed, "no, fp16, bf16, fp8")
    run.setdefault("precision", precision)
    draft.ranks = words.degree("num_processes")
    machines = words.degree("num_machines")
    if draft.ranks is None and machines is not None and machines > 1:
        words.ask("num_processes is not stated", "gpus")
    accumulated = words.whole("gradient_accumulation_steps", sets="run.grad_accum")
    if accumulated is not None:
        run["grad_accum"] = accumulated
    if kind == "DEEPSPEED":
        _accelerate_deepspeed(words, draft)
    elif kind == "FSDP":
        run["framework"] = "fsdp"
        group = words.group("fsdp_config")
        if group is None:
            raise InputError("missing", where=words.where, key="fsdp_config")
        fsdp_into(group, run, group.text("fsdp_sharding_strategy"))
    elif kind == "MEGATRON_LM":
        _accelerate_megatron(words, run)
    elif kind in ("MULTI_GPU", "NO"):
        run["framework"] = "hf" if kind == "NO" else "ddp"
    else:
        legal = "NO, MULTI_GPU, FSDP, DEEPSPEED, MEGATRON_LM"
        raise words.wrong(("distributed_type",), "has no plan", kind, legal)
    dynamo = words.group("dynamo_config")
    if dynamo is not None:
        backend = (dynamo.text("dynamo_backend") or "no").lower()
        dynamo.skip("dynamo_mode", "dynamo_use_dynamic", "dynamo_use_fullgraph")
        run["compile"] = backend not in ("no", "eager")
    words.skip("compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "machine_rank",
               "main_process_ip", "main_process_port", "main_training_function", "rdzv_backend",
               "same_network", "use_cpu", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "gpu_ids",
               "tpu_name", "tpu_zone", "commands", "command_file")  # fmt: skip


def _accelerate_deepspeed(words: Words, draft: Draft) -> None:
    group = words.group("deepspeed_config")
    if group is None:
        raise InputError("missing", where=words.where, key="deepspeed_config")
    named = group.text("deepspeed_config_file")
    if named is not None:
        named_deepspeed(named, group, draft)
        return
    run = draft.run
    run["framework"] = "deepspeed"
    stage = group.whole("zero_stage")
    if stage is None:
        stage = 2
        group.assume("deepspeed_config.zero_stage not stated: 2, accelerate's default")
    run["zero_stage"] = stage
    parts = {
        f"{name}-{device}"
        for name in ("optimizer", "param")
        if (device := (group.text(f"offload_{name}_device") or "none").lower()) in ("cpu", "nvme")
    }
    run["offload"] = offload_of(parts, stage)
    accumulated = group.whole("gradient_accumulation_steps", sets="run.grad_accum")
    if accumulated is not None:
        run["grad_accum"] = accumulated
    group.skip(
        "gradient_clipping",
        "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher",
        "deepspeed_hostfile", "offload_optimizer_nvme_path", "offload_param_nvme_path",
    )  # fmt: skip


def _accelerate_megatron(words: Words, run: dict[str, Any]) -> None:
    run["framework"] = "megatron"
    group = words.group("megatron_lm_config")
    if group is None:
        raise InputError("missing", where=words.where, key="megatron_lm_config")
    run["tp"] = group.degree("megatron_lm_tp_degree") or 1
    run["pp"] = group.degree("megatron_lm_pp_degree") or 1
    run["sequence_parallel"] = group.flag("megatron_lm_sequence_parallelism")
    if group.flag("megatron_lm_recompute_activations"):
        run["recompute"] = "selective"
    run["zero_stage"] = 1 if group.flag("megatron_lm_use_distributed_optimizer") else 0
    run["grad_accum"] = group.degree("megatron_lm_num_micro_batches")
