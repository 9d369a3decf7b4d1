"""Trainers' own files to a job.

DeepSpeed, accelerate, Transformers, LLaMA-Factory, axolotl, torchtune and torchtitan.

Where a file says nothing, the trainer's own default holds and is listed as assumed. What cannot be
planned (a kind of parallelism the planner does not know for that trainer) is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpucalc.errors import InputError
from gpucalc.importers.words import AUTO, Draft, ImportedJob, Words, fold, precision_of
from gpucalc.spec.yamlio import load_yaml, read_text

MAX_DEPTH = 3  # of files that name files

_OPTIMIZERS = {
    "adam": "adam", "adamw": "adamw", "fusedadam": "adamw-fused", "cpuadam": "adamw",
    "deepspeedcpuadam": "adamw", "lamb": "lamb", "fusedlamb": "lamb", "sgd": "sgd", "adagrad": "adagrad",
    "rmsprop": "rmsprop", "lion": "lion", "muon": "muon", "adafactor": "adafactor", "onebitadam": "adam",
    "paged_adamw": "paged-adamw", "adamw_torch": "adamw", "adamw_hf": "adamw",
    "adamw_torch_fused": "adamw-fused", "adamw_fused": "adamw-fused", "adamw_apex_fused": "adamw-fused",
    "adamw_anyprecision": "adamw", "paged_adamw_32bit": "paged-adamw", "adamw_bnb_8bit": "adamw-8bit",
    "adamw_8bit": "adamw-8bit", "adamw8bit": "adamw-8bit", "pagedadamw": "paged-adamw",
    "pagedadamw8bit": "paged-adamw-8bit", "paged_adamw_8bit": "paged-adamw-8bit", "lion_8bit": "lion-8bit",
    "lion8bit": "lion-8bit", "adamw_torch_8bit": "adamw-8bit", "adamw_torch_4bit": "adamw-4bit",
    "schedule_free_adamw": "schedulefree-adamw", "prodigy": "prodigy", "adan": "adan",
    "adamwfp32": "adamw",
}  # fmt: skip
_STRATEGIES = {"1": 3, "2": 2, "3": 0, "full_shard": 3, "shard_grad_op": 2, "no_shard": 0}
_HYBRID = ("4", "5", "hybrid_shard", "hybrid_shard_zero2")
_ATTENTION = {
    "flash_attention_2": "flash", "flash_attention_3": "flash", "flash_attention": "flash", "fa2": "flash",
    "fa3": "flash", "sdpa": "sdpa", "eager": "eager", "disabled": "eager",
}  # fmt: skip


def optimizer_of(words: Words, *names: str) -> str | None:
    """Our name of an optimizer; one the planner does not know is an error."""
    named = words.text(*names, sets="run.optimizer")
    if named is None:
        return None
    known = _OPTIMIZERS.get(fold(named.rsplit(".", 1)[-1]))
    if known is None:
        raise words.wrong(names, "is an optimizer whose state is not known", named, ", ".join(_OPTIMIZERS))
    return known


def started(words: Words) -> int | None:
    """Processes a launcher starts, None where a number of nodes or processes is left to a variable."""
    total = words.degree("world_size")
    each = _plain(words.take("nproc_per_node", "num_processes", "num_gpus", "nproc"))
    nodes = _plain(words.take("nnodes", "num_nodes"))
    if total is not None or each is None:
        return total
    open_nodes = nodes is None and any(name in words.words for name in ("nnodes", "num_nodes"))
    return None if open_nodes else each * (nodes or 1)


def _plain(value: Any) -> int | None:
    text = str(value)
    return int(text) if text.isdigit() and len(text) < 8 and int(text) else None


# -- DeepSpeed ------------------------------------------------------------------------------------


def deepspeed(data: Mapping[str, Any], where: str) -> ImportedJob:
    """A DeepSpeed configuration."""
    words = Words(data, where)
    draft = Draft()
    deepspeed_into(words, draft)
    return words.job("deepspeed", draft)


def deepspeed_into(words: Words, draft: Draft) -> None:
    """What a DeepSpeed configuration says; keys already in the draft are kept where it says "auto"."""
    run = draft.run
    run["framework"] = "deepspeed"

    def put(key: str, value: Any) -> None:
        if value is not None:
            run[key] = value

    quiet = "micro_batch" in run  # a trainer's own arguments settle what is automatic here
    sets = (lambda key: f"run.{key}") if not quiet else (lambda _: None)
    put("global_batch", _unless_auto(words, "train_batch_size", sets("global_batch")))
    put("micro_batch", _unless_auto(words, "train_micro_batch_size_per_gpu", sets("micro_batch")))
    put("grad_accum", _unless_auto(words, "gradient_accumulation_steps", sets("grad_accum")))
    zero = words.group("zero_optimization")
    stage = 0
    offload: set[str] = set()
    if zero is not None:
        given = zero.whole("stage")
        stage = 0 if given is None else given
        if given is None:
            zero.assume("zero_optimization.stage not stated: 0, DeepSpeed's default")
        for name in ("optimizer", "param"):
            part = zero.group(f"offload_{name}")
            if part is not None:
                device = part.text("device") or "none"
                part.skip("pin_memory", "buffer_count", "buffer_size", "fast_init", "pipeline_read",
                          "pipeline_write", "max_in_cpu", "nvme_path", "ratio")  # fmt: skip
                if device in ("cpu", "nvme"):
                    offload.add(f"{name}-{device}")
        if zero.flag("cpu_offload"):
            offload.add("optimizer-cpu")
        if zero.flag("cpu_offload_params"):
            offload.add("param-cpu")
    put("zero_stage", stage)
    put("offload", _offload(offload, stage))
    precision = run.get("precision")
    switches = {name: words.group(name, alias) for name, alias in (("fp16", "fp16"), ("bf16", "bfloat16"))}
    said = {
        name: group.flag("enabled", sets=None if precision else "run.precision") if group else None
        for name, group in switches.items()
    }
    for group in switches.values():
        if group is not None:
            group.skip(
                "auto_cast", "loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis",
                "min_loss_scale", "consecutive_hysteresis", "fp16_master_weights_and_grads",
            )  # fmt: skip
    automatic = [n for n, g in switches.items() if g is not None and str(g.peek("enabled")).lower() == AUTO]
    if said["fp16"] or said["bf16"]:
        put("precision", precision_of(words, said["fp16"], said["bf16"]))
    elif precision is None and not automatic:
        put("precision", "fp32")
        words.assume("neither fp16 nor bf16 is enabled: fp32")
    optimizer = words.group("optimizer")
    if optimizer is not None:
        put("optimizer", optimizer_of(optimizer, "type"))
        params = optimizer.group("params")
        if params is not None:
            params.skip("lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode", "momentum")
    tensor = words.group("tensor_parallel")
    put("tp", tensor.degree("autotp_size", "tp_size") if tensor is not None else None)
    put("cp", words.degree("sequence_parallel_size"))
    if words.degree("zero_hpz_partition_size"):
        words.assume("zero_hpz_partition_size is not planned: weights are gathered across all ranks")
    schedule = words.group("scheduler")
    if schedule is not None:
        schedule.skip("type")
        inner = schedule.group("params")
        if inner is not None:
            inner.skip(*inner.words)
    words.skip("gradient_clipping", "steps_per_print", "wall_clock_breakdown", "tensorboard", "wandb",
               "csv_monitor", "dump_state", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
               "flops_profiler", "comms_logger")  # fmt: skip


def _unless_auto(words: Words, name: str, sets: str | None) -> int | None:
    value = words.peek(name)
    if isinstance(value, str) and value.strip().lower() == AUTO and sets is None:
        words.skip(name)
        return None
    return words.whole(name, sets=sets)


def _offload(parts: set[str], stage: int) -> str:
    nvme = any(part.endswith("nvme") for part in parts)
    params = any(part.startswith("param") for part in parts)
    if not parts:
        return "none"
    if params:
        return "params+optimizer-nvme" if nvme else "params+optimizer-cpu"
    if nvme:
        return "optimizer-nvme"
    return "optimizer+gradients-cpu" if stage >= 2 else "optimizer-cpu"


# -- accelerate -----------------------------------------------------------------------------------


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
        _named_deepspeed(named, group, draft)
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
    run["offload"] = _offload(parts, stage)
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


def fsdp_into(group: Words, run: dict[str, Any], strategy: str | None) -> None:
    """What a group of FSDP options says, whatever trainer it stands in."""
    prefixed = {name: f"fsdp_{name}" for name in ("reshard_after_forward", "offload_params", "version",
                "activation_checkpointing", "cpu_ram_efficient_loading", "state_dict_type")}  # fmt: skip

    def flag(name: str) -> bool | None:
        return group.flag(prefixed[name], name)

    named = fold(strategy) if strategy is not None else None
    group.whole("fsdp_version", "version")
    reshard = group.peek("fsdp_reshard_after_forward") or group.peek("reshard_after_forward")
    if named is None and isinstance(reshard, str) and fold(reshard) in (*_STRATEGIES, *_HYBRID):
        named = fold(reshard)  # accelerate 1.6 renamed the strategy before it became a switch
        group.take("fsdp_reshard_after_forward", "reshard_after_forward")
    if named in _HYBRID:
        run["zero_stage"] = 3 if named in ("4", "hybrid_shard") else 2
        group.ask("hybrid sharding does not say over how many GPUs a copy is divided", "run.dp_shard")
    elif named is not None:
        if named not in _STRATEGIES:
            legal = ", ".join((*_STRATEGIES, *_HYBRID))
            raise group.wrong(("fsdp_sharding_strategy",), "is not a sharding strategy", strategy, legal)
        run["zero_stage"] = _STRATEGIES[named]
    else:
        kept = flag("reshard_after_forward")
        run["zero_stage"] = 2 if kept is False else 3
        if kept is None:
            group.assume("sharding strategy not stated: FULL_SHARD, FSDP's default")
    if flag("offload_params"):
        run["offload"] = "params+optimizer-cpu"
    if group.flag("fsdp_activation_checkpointing", "activation_checkpointing"):
        run["recompute"] = "full"
    one = flag("cpu_ram_efficient_loading")
    if one is not None:
        run["host_load"] = "one-rank" if one else "every-rank"
    group.skip(
        "fsdp_sharding_strategy", "fsdp_reshard_after_forward", "reshard_after_forward",
        "fsdp_auto_wrap_policy", "auto_wrap_policy", "fsdp_backward_prefetch",
        "backward_prefetch", "fsdp_forward_prefetch", "forward_prefetch", "fsdp_state_dict_type",
        "state_dict_type", "fsdp_sync_module_states", "sync_module_states", "fsdp_use_orig_params",
        "use_orig_params", "fsdp_transformer_layer_cls_to_wrap", "transformer_layer_cls_to_wrap",
        "fsdp_min_num_params", "min_num_params", "fsdp_backward_prefetch_policy", "limit_all_gathers",
        "final_state_dict_type",
    )  # fmt: skip


# -- Transformers and what is built on its arguments ------------------------------------------------


def transformers(data: Mapping[str, Any], where: str, folder: Path | None = None) -> ImportedJob:
    """TrainingArguments, as JSON, YAML or the flags of a training script, with those of TRL and PEFT."""
    words = Words(data, where)
    draft = Draft()
    arguments_into(words, draft, folder)
    return words.job("transformers", draft)


def llamafactory(data: Mapping[str, Any], where: str, folder: Path | None = None) -> ImportedJob:
    """A LLaMA-Factory YAML: Transformers' arguments and its own."""
    words = Words(data, where)
    draft = Draft()
    run = draft.run
    kind = (words.text("finetuning_type") or "lora").lower()
    if not words.has("finetuning_type"):
        words.assume("finetuning_type not stated: lora, LLaMA-Factory's default")
    if kind not in ("full", "lora"):
        raise words.wrong(("finetuning_type",), "has no plan", kind, "full, lora")
    bits = words.whole("quantization_bit")
    run["method"] = "full" if kind == "full" else "qlora" if bits == 4 else "lora"
    if bits is not None and kind == "lora":
        run["quantization"] = {4: "nf4", 8: "int8"}.get(bits)
    if kind == "lora":
        run["lora"] = _lora(words, "lora_rank", "lora_alpha", "lora_target", rank=8, who="LLaMA-Factory")
    if (words.text("stage") or "sft") in ("dpo", "kto") and kind == "full":
        run["reference_model"] = True
    length = words.whole("cutoff_len")
    if length is None:
        length = 2048
        words.assume("cutoff_len not stated: 2048, LLaMA-Factory's default")
    run["seq_len"] = length
    off = words.flag("disable_gradient_checkpointing")
    if not off and not words.has("gradient_checkpointing"):
        run["recompute"] = "full"
        words.assume("gradient checkpointing is on unless disable_gradient_checkpointing is set")
    if words.flag("enable_liger_kernel"):
        run["fused_loss"] = run["fused_kernels"] = True
    if words.flag("pure_bf16"):
        run["precision"] = "bf16-pure"
    words.skip(
        "dataset",
        "template", "max_samples", "overwrite_cache", "preprocessing_num_workers", "do_train",
        "val_size", "plot_loss", "dataset_dir", "trust_remote_code",
    )  # fmt: skip
    arguments_into(words, draft, folder)
    return words.job("llama-factory", draft)


def arguments_into(words: Words, draft: Draft, folder: Path | None) -> None:
    """What Transformers' TrainingArguments, and the model and PEFT arguments around them, say."""
    run = draft.run
    draft.model = words.text("model_name_or_path", "model_name", "model_id", "base_model") or draft.model
    batch = words.whole("per_device_train_batch_size", "train_batch_size", sets="run.micro_batch")
    if batch is not None:
        run["micro_batch"] = batch
    elif not any("run.micro_batch" in text for text in words.top.asked):
        run["micro_batch"] = 8
        words.assume("per_device_train_batch_size not stated: 8, the Trainer's default")
    accumulated = words.whole("gradient_accumulation_steps", sets="run.grad_accum")
    run["grad_accum"] = 1 if accumulated is None else accumulated
    if words.flag("auto_find_batch_size"):
        words.ask("auto_find_batch_size shrinks the batch until it fits", "run.micro_batch")
    said = precision_of(words, words.flag("fp16"), words.flag("bf16", sets="run.precision"))
    stored = (words.text("torch_dtype", "dtype") or "").removeprefix("torch.")
    if "precision" not in run and not (said is None and str(words.peek("bf16")).lower() == AUTO):
        run["precision"] = said or "fp32"
        if run["precision"] == "fp32" and stored in ("bfloat16", "bf16", "float16", "fp16"):
            run["precision"] = "bf16-pure" if stored.startswith("b") else "fp16-pure"
        elif said is None:
            words.assume("neither fp16 nor bf16 is set: fp32, the Trainer's default")
    if words.flag("tf32") and run.get("precision") == "fp32":
        run["precision"] = "tf32"
    optimizer = optimizer_of(words, "optim", "optimizer")
    if optimizer is not None:
        run["optimizer"] = optimizer
    if str(words.peek("gradient_checkpointing")).lower() in ("offload", "unsloth"):
        run["recompute"], run["offload"] = "full", "activations-cpu"
        words.take("gradient_checkpointing")
        checkpointing = None
    else:
        checkpointing = words.flag("gradient_checkpointing", "use_gradient_checkpointing")
    if words.flag("activation_offloading"):
        run["offload"] = "activations-cpu"
    if checkpointing is not None:
        run["recompute"] = "full" if checkpointing else "none"
    length = words.whole("max_seq_length", "max_length", "block_size", "model_max_length", "sequence_len",
                         "cutoff_len", "seq_length")  # fmt: skip
    if length is not None:
        run["seq_len"] = length
    compiled = words.flag("torch_compile")
    if compiled is not None:
        run["compile"] = compiled
    if words.flag("use_liger_kernel", "use_liger"):
        run["fused_loss"] = run["fused_kernels"] = True
    attention = words.text("attn_implementation", "flash_attn", sets="run.attention")
    if attention is not None:
        if "flash" in attention:  # also names of kernels on the hub
            attention = "flash_attention"
        elif fold(attention) in ("xformers", "flex_attention"):
            words.assume(f"{attention} is planned as PyTorch's fused attention: neither keeps the scores")
            attention = "sdpa"
        if fold(attention) not in _ATTENTION:
            raise words.wrong(("attn_implementation", "flash_attn"), "is not an attention", attention,
                              ", ".join(_ATTENTION))  # fmt: skip
        run["attention"] = _ATTENTION[fold(attention)]
    if words.flag("use_peft") or ("method" not in run and words.has("lora_r", "lora_rank")):
        four = words.flag("load_in_4bit", "use_4bit")
        eight = words.flag("load_in_8bit")
        run["method"] = "qlora" if four else "lora"
        if four or eight:
            run["quantization"] = "nf4" if four else "int8"
        run["lora"] = _lora(words, "lora_r", "lora_alpha", "lora_target_modules", rank=16, who="TRL")
    _sharded(words, draft, folder)
    draft.ranks = started(words)
    words.skip("fsdp_version", "save_only_model", "trust_remote_code", "ddp_find_unused_parameters")
    words.skip(
        "output_dir", "learning_rate", "num_train_epochs", "max_steps", "warmup_ratio", "warmup_steps",
        "lr_scheduler_type", "logging_steps", "save_steps", "save_strategy", "save_total_limit",
        "eval_steps", "eval_strategy", "evaluation_strategy", "report_to", "seed", "weight_decay",
        "overwrite_output_dir", "do_train", "do_eval", "remove_unused_columns", "dataset_name", "run_name",
        "dataloader_num_workers", "ddp_timeout", "max_grad_norm", "logging_dir", "data_seed",
        "master_port", "master_addr", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id",
        "per_device_eval_batch_size", "push_to_hub", "hub_model_id", "logging_strategy", "adam_beta1",
        "adam_beta2", "adam_epsilon", "load_best_model_at_end", "resume_from_checkpoint",
    )  # fmt: skip


def _sharded(words: Words, draft: Draft, folder: Path | None) -> None:
    run = draft.run
    inner = words.group("deepspeed")
    named = None if inner is not None else words.text("deepspeed", "deepspeed_config")
    if inner is not None:
        deepspeed_into(inner, draft)
    elif named:
        _named_deepspeed(named, words, draft, folder)
    else:
        options = words.group("fsdp_config")
        fsdp = words.take("fsdp")
        parts = fsdp.replace(",", " ").split() if isinstance(fsdp, str) else list(fsdp or [])
        if (
            parts
            or (options is not None and fsdp is not None)
            or (options is not None and len(options.words))
        ):
            run["framework"] = "fsdp"
            strategy = next((p for p in parts if fold(p) in (*_STRATEGIES, *_HYBRID)), None)
            empty = Words({}, words.where, "", words.top)
            stated = (
                options.text("fsdp_sharding_strategy", "sharding_strategy") if options is not None else None
            )
            fsdp_into(options if options is not None else empty, run, strategy or stated)
            if "offload" in parts:
                run["offload"] = "params+optimizer-cpu"
    run.setdefault("framework", "hf")


def _lora(
    words: Words, rank_key: str, alpha_key: str, target_key: str, *, rank: int, who: str
) -> dict[str, Any]:
    given = words.whole(rank_key, "lora_r", "lora_rank")
    if given is None:
        words.assume(f"{rank_key} not stated: {rank}, {who}'s default")
    alpha = words.real(alpha_key)
    dropout = words.real("lora_dropout")
    targets = words.take(target_key, "lora_target_modules", "lora_target")
    lora: dict[str, Any] = {"rank": rank if given is None else given}
    if alpha is not None:
        lora["alpha"] = alpha
    if dropout is not None:
        lora["dropout"] = dropout
    if isinstance(targets, str):
        targets = [part for part in targets.replace(",", " ").split() if part]
    if targets and not (len(targets) == 1 and targets[0] in ("all", "all-linear")):
        lora["targets"] = [str(part) for part in targets]
    elif not targets:
        words.assume(f"{target_key} not stated: every linear layer")
    return lora


def _named_deepspeed(named: str, words: Words, draft: Draft, folder: Path | None = None) -> None:
    """The DeepSpeed file a trainer's arguments name, read beside them when it is there."""
    start = folder if folder is not None else Path(words.where).parent
    for path in (Path(named), start / named, start / Path(named).name):
        try:
            there = path.is_file()
        except (OSError, ValueError):
            there = False
        if there:
            data = _structured(path)
            if not isinstance(data, Mapping):
                raise InputError("expected keys and values", where=str(path))
            words.assume(f"DeepSpeed's options read from {path}")
            inner = Words(data, words.where, "deepspeed.", words.top)
            deepspeed_into(inner, draft)
            return
    draft.run["framework"] = "deepspeed"
    stage = next(
        (int(c) for c, before in zip(named[1:], named, strict=False) if c in "0123" and before in "oz"), None
    )
    if stage is not None:
        draft.run["zero_stage"] = stage
        words.assume(f"{named} is not here: stage {stage}, from its name")
    else:
        words.ask(f"{named} is not here, so the sharding stage is not known", "run.zero_stage")


def _structured(path: Path) -> Any:
    if path.suffix.lower() == ".json":
        try:
            return json.loads(read_text(path))
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError(f"not JSON: {error}", where=str(path)) from None
    return load_yaml(path).data


# -- axolotl --------------------------------------------------------------------------------------


def axolotl(data: Mapping[str, Any], where: str, folder: Path | None = None) -> ImportedJob:
    """An axolotl YAML."""
    words = Words(data, where)
    draft = Draft()
    run = draft.run
    batch = words.whole("micro_batch_size", sets="run.micro_batch")
    if batch is None:
        batch = 1
        words.assume("micro_batch_size not stated: 1, axolotl's default")
    words.words["per_device_train_batch_size"] = ("micro_batch_size", batch)
    adapter = (words.text("adapter") or "none").lower()
    if adapter not in ("none", "lora", "qlora"):
        raise words.wrong(("adapter",), "has no plan", adapter, "lora, qlora")
    four, eight = words.flag("load_in_4bit"), words.flag("load_in_8bit")
    run["method"] = "full" if adapter == "none" else adapter
    if adapter != "none":
        if adapter == "qlora" or four or eight:
            run["quantization"] = "int8" if eight and not four else "nf4"
        run["method"] = "qlora" if four and adapter == "lora" else adapter
        linear = words.flag("lora_target_linear")
        if linear:
            words.words["lora_target_modules"] = ("lora_target_linear", "all-linear")
        run["lora"] = _lora(words, "lora_r", "lora_alpha", "lora_target_modules", rank=8, who="axolotl")
    for name, value in (
        ("tensor_parallel_size", "tp"),
        ("context_parallel_size", "cp"),
        ("sequence_parallel_degree", "cp"),
    ):
        if (words.degree(name) or 1) > 1:
            raise words.wrong((name,), f"{value} beside FSDP or DeepSpeed has no plan here", words.peek(name))
    shards = words.degree("dp_shard_size")
    if shards is not None:
        run["dp_shard"] = shards
    attention = words.flag("flash_attention")
    if attention is None and words.flag("sdp_attention"):
        run["attention"] = "sdpa"
    elif attention is not None:
        run["attention"] = "flash" if attention else "sdpa"
    if any("liger" in str(name) for name in (words.take("plugins") or [])):
        run["fused_kernels"] = True
        fused = words.flag("liger_fused_linear_cross_entropy"), words.flag("liger_cross_entropy")
        run["fused_loss"] = any(fused)
        words.skip("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_swiglu", "liger_layer_norm")
    if not words.has("sequence_len"):
        run["seq_len"] = 512
        words.assume("sequence_len not stated: 512, axolotl's default")
    words.skip(
        "datasets",
        "dataset_prepared_path", "val_set_size", "wandb_project", "wandb_entity", "wandb_name",
        "wandb_watch", "wandb_log_model", "num_epochs", "lr_scheduler", "special_tokens", "strict",
        "sample_packing", "pad_to_sequence_len", "eval_sample_packing", "model_type", "tokenizer_type",
        "evals_per_epoch", "saves_per_epoch", "train_on_inputs", "group_by_length",
        "early_stopping_patience", "local_rank", "xformers_attention", "lora_model_dir",
        "loss_watchdog_threshold", "chat_template", "loss_watchdog_patience",
        "gradient_checkpointing_kwargs", "shuffle_merged_datasets",
    )  # fmt: skip
    arguments_into(words, draft, folder)
    return words.job("axolotl", draft)


# -- torchtune ------------------------------------------------------------------------------------

_TUNE_NAMES = (
    ("llama3_1_", "llama-3.1-"), ("llama3_2_", "llama-3.2-"), ("llama3_3_", "llama-3.3-"), ("llama3_",
    "llama-3-"), ("llama2_", "llama-2-"), ("qwen2_5_", "qwen2.5-"), ("qwen2_", "qwen2-"), ("qwen3_",
    "qwen3-"), ("gemma2_", "gemma-2-"), ("gemma_", "gemma-"), ("phi4_", "phi-4"), ("phi3_mini",
    "phi-3-mini-4k"), ("mistral_7b", "mistral-7b-v0.1"),
)  # fmt: skip


def torchtune(data: Mapping[str, Any], where: str) -> ImportedJob:
    """A torchtune YAML."""
    words = Words(data, where)
    draft = Draft()
    run = draft.run
    model = words.group("model")
    component = (model.text("_component_") if model is not None else None) or ""
    name = component.rsplit(".", 1)[-1]
    if model is not None and name:
        adapted = name.startswith(("lora_", "qlora_", "dora_"))
        quantised = name.startswith("qlora_") or bool(model.flag("quantize_base"))
        plain = name.split("_", 1)[1] if adapted else name
        draft.model = _tune_name(plain)
        run["method"] = "qlora" if quantised and adapted else "lora" if adapted else "full"
        if adapted:
            run["lora"] = _tune_lora(model)
            if quantised:
                run["quantization"] = "nf4"
    tokenizer = words.group("tokenizer")
    if tokenizer is not None:
        run["seq_len"] = tokenizer.whole("max_seq_len")
        if run["seq_len"] is None:
            tokenizer.ask("tokenizer.max_seq_len is not stated", "run.seq_len")
        tokenizer.skip("_component_", "path", "merges_file", "prompt_template")
    batch = words.whole("batch_size", sets="run.micro_batch")
    if batch is None:
        raise InputError("missing", where=where, key="batch_size")
    run["micro_batch"] = batch
    run["grad_accum"] = words.whole("gradient_accumulation_steps", sets="run.grad_accum") or 1
    dtype = words.text("dtype") or "fp32"
    run["precision"] = {"bf16": "bf16-pure", "fp16": "fp16-pure"}.get(dtype, dtype)
    optimizer = words.group("optimizer")
    if optimizer is not None:
        run["optimizer"] = optimizer_of(optimizer, "_component_")
        if optimizer.flag("fused") and run["optimizer"] == "adamw":
            run["optimizer"] = "adamw-fused"
        optimizer.skip("lr", "weight_decay", "betas", "eps")
    run["recompute"] = "full" if words.flag("enable_activation_checkpointing") else "none"
    if words.has("ref_checkpointer", "teacher_model"):
        run["reference_model"] = True
        words.take("ref_checkpointer", "teacher_model", "teacher_checkpointer")
        words.assume("the frozen second model is planned as a copy of the trained one")
    if words.flag("enable_activation_offloading"):
        run["offload"] = "activations-cpu"
    if words.flag("fsdp_cpu_offload"):
        run["offload"] = "params+optimizer-cpu"
    compiled = words.take("compile")
    run["compile"] = any(compiled.values()) if isinstance(compiled, Mapping) else bool(compiled)
    run["optimizer_in_backward"] = bool(words.flag("optimizer_in_bwd"))
    loss = words.group("loss")
    if loss is not None:
        run["fused_loss"] = any(part in (loss.text("_component_") or "") for part in ("Chunked", "Linear"))
        if run["fused_loss"]:
            run["loss_chunks"] = loss.whole("num_output_chunks") or 8  # its default
        loss.skip("num_output_chunks", "ignore_index")
    if (words.degree("tensor_parallel_dim") or 1) > 1:
        given = words.peek("tensor_parallel_dim")
        raise words.wrong(("tensor_parallel_dim",), "tensor parallelism under torchtune has no plan", given)
    kept = words.flag("fsdp_reshard_after_forward")
    shards = words.degree("data_parallel_shard_dim")
    if kept is not None or shards is not None or words.has("fsdp_cpu_offload", "custom_sharded_layers"):
        run["framework"] = "fsdp"
        run["zero_stage"] = 2 if kept is False else 3
        run["dp_shard"] = shards
    words.skip(
        "output_dir", "checkpointer", "dataset", "seed", "shuffle", "epochs", "max_steps_per_epoch",
        "resume_from_checkpoint", "save_adapter_weights_only", "lr_scheduler", "clip_grad_norm", "device",
        "metric_logger", "log_every_n_steps", "log_peak_memory_stats", "log_level", "profiler",
        "data_parallel_replicate_dim", "custom_sharded_layers",
    )  # fmt: skip
    return words.job("torchtune", draft)


def _tune_name(name: str) -> str:
    for prefix, ours in _TUNE_NAMES:
        if name.startswith(prefix):
            return (ours + name.removeprefix(prefix)).replace("_", "-").rstrip("-")
    return name


def _tune_lora(model: Words) -> dict[str, Any]:
    targets = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
    named = [targets.get(str(part), str(part)) for part in (model.take("lora_attn_modules") or [])]
    if model.flag("apply_lora_to_mlp"):
        named += ["gate_proj", "up_proj", "down_proj"]
    if model.flag("apply_lora_to_output"):
        named.append("lm_head")
    lora: dict[str, Any] = {"rank": model.whole("lora_rank") or 8, "dtype": "bf16"}
    alpha = model.real("lora_alpha")
    if alpha is not None:
        lora["alpha"] = alpha
    dropout = model.real("lora_dropout")
    if dropout:
        lora["dropout"] = dropout
    if named:
        lora["targets"] = named
    return lora


# -- torchtitan -----------------------------------------------------------------------------------

_TITAN_MODELS = {
    ("llama3", "8b"): "llama-3-8b", ("llama3", "70b"): "llama-3-70b", ("llama3", "405b"): "llama-3.1-405b",
    ("llama2", "7b"): "llama-2-7b", ("llama2", "13b"): "llama-2-13b", ("llama2", "70b"): "llama-2-70b",
    ("deepseek_v3", "671b"): "deepseek-v3", ("deepseek_v3", "16b"): "deepseek-v2-lite",
    ("llama4", "17bx16e"): "llama-4-scout", ("llama4", "17bx128e"): "llama-4-maverick",
    ("qwen3", "0.6b"): "qwen3-0.6b", ("qwen3", "1.7b"): "qwen3-1.7b", ("qwen3", "4b"): "qwen3-4b",
    ("qwen3", "8b"): "qwen3-8b", ("qwen3", "14b"): "qwen3-14b", ("qwen3", "32b"): "qwen3-32b",
}  # fmt: skip


def torchtitan(data: Mapping[str, Any], where: str) -> ImportedJob:
    """A torchtitan TOML, of the releases that had them."""
    words = Words(data, where)
    draft = Draft()
    run = draft.run
    run["framework"] = "torchtitan"
    none = Words({}, where, "", words)

    def group(*names: str) -> Words:
        return words.group(*names) or none

    model, training = group("model"), group("training")
    named = ((model.text("name") or "").lower(), (model.text("flavor") or "").lower())
    draft.model = _TITAN_MODELS.get(named)
    if draft.model is None:
        words.ask(f"model {named[0]} {named[1]} is not one known by that name", "model")
    batch = training.whole("local_batch_size", "batch_size", sets="run.micro_batch")
    if batch is None:
        batch = 8
        words.assume("training.local_batch_size not stated: 8, torchtitan's default")
    run["micro_batch"] = batch
    total = training.whole("global_batch_size")
    run["global_batch"] = total if total is not None and total > 0 else None
    length = training.whole("seq_len")
    if length is None:
        length = 2048
        words.assume("training.seq_len not stated: 2048, torchtitan's default")
    run["seq_len"] = length
    compiled = training.flag("compile")
    switch = group("compile").flag("enable")
    run["compile"] = bool(compiled or switch)
    param = training.text("mixed_precision_param") or "bfloat16"
    run["precision"] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(param, param)
    if (training.text("dtype") or "float32") == "bfloat16":
        run["precision"] = "bf16-pure"
    parallel, older = group("parallelism"), group("experimental")
    degrees = {
        "tp": parallel.degree("tensor_parallel_degree") or training.degree("tensor_parallel_degree"),
        "pp": parallel.degree("pipeline_parallel_degree") or older.degree("pipeline_parallel_degree"),
        "cp": parallel.degree("context_parallel_degree") or older.degree("context_parallel_degree"),
        "ep": parallel.degree("expert_parallel_degree"),
        "etp": parallel.degree("expert_tensor_parallel_degree"),
        "dp_shard": parallel.degree("data_parallel_shard_degree")
        or training.degree("data_parallel_shard_degree"),
    }
    run |= {key: value for key, value in degrees.items() if value is not None}
    copies = parallel.degree("data_parallel_replicate_degree") or training.degree(
        "data_parallel_replicate_degree"
    )
    if degrees["dp_shard"] is None and copies is not None and copies > 1:
        words.ask("data_parallel_shard_degree is -1 beside replicas", "run.dp_shard")
    when = (parallel.text("fsdp_reshard_after_forward") or "default").lower()
    kept = when == "never" or (when == "default" and (degrees["pp"] or 1) > 1)
    run["zero_stage"] = 2 if kept else 3
    if when == "default":
        words.assume(f"fsdp_reshard_after_forward default: {'never' if kept else 'always'}, by pipeline use")
    checkpoint = group("activation_checkpoint")
    mode = (checkpoint.text("mode") or "selective").lower()
    option = (checkpoint.text("selective_ac_option") or "2").lower()
    if not checkpoint.has("mode"):
        words.assume("activation_checkpoint.mode not stated: selective, torchtitan's default")
    if mode == "selective" and option.isdigit() and int(option) != 2:
        raise checkpoint.wrong(("selective_ac_option",), "recomputes other layers than every second", option,
                               "op, 2")  # fmt: skip
    run["recompute"] = (
        mode if mode != "selective" else "selective-op" if option == "op" else "selective-layer"
    )
    run["optimizer"] = optimizer_of(group("optimizer"), "name") or "adamw"
    if (group("optimizer").text("implementation") or "fused") == "fused" and run["optimizer"] == "adamw":
        run["optimizer"] = "adamw-fused"
    eight = group("float8")
    if "float8" in ((model.take("converters") or []) if model.has("converters") else []) or eight.flag(
        "enable_float8_linear"
    ):
        run["precision"] = "fp8"
    for part in (
        "job",
        "profiling",
        "metrics",
        "checkpoint",
        "lr_scheduler",
        "comm",
        "fault_tolerance",
        "validation",
    ):
        if words.group(part) is not None:
            words.inner[-1].skip(*words.inner[-1].words)
    training.skip("steps", "dataset", "warmup_steps", "max_norm", "gc_freq", "seed")
    group("optimizer").skip("lr", "eps")
    return words.job("torchtitan", draft)
