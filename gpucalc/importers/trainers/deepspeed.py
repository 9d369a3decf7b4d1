"""DeepSpeed's JSON, alone or named by another trainer's file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpucalc.errors import InputError
from gpucalc.importers.trainers.common import optimizer_of
from gpucalc.importers.words import AUTO, Draft, ImportedJob, Words, precision_of
from gpucalc.spec.jsonio import load_json
from gpucalc.spec.yamlio import load_yaml


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
    if zero is not None:
        bucket = zero.peek("reduce_bucket_size")
        if isinstance(bucket, str) and bucket.strip().lower() == AUTO:
            zero.skip("reduce_bucket_size")
            put("reduce_bucket_size", AUTO)
        else:
            put("reduce_bucket_size", zero.whole("reduce_bucket_size"))
        put("overlap_comm", zero.flag("overlap_comm"))
        if stage == 3:
            put("max_live_parameters", zero.whole("stage3_max_live_parameters"))
            put("sub_group_size", zero.whole("sub_group_size"))
    put("offload", offload_of(offload, stage))
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


def offload_of(parts: set[str], stage: int) -> str:
    nvme = any(part.endswith("nvme") for part in parts)
    params = any(part.startswith("param") for part in parts)
    if not parts:
        return "none"
    if params:
        return "params+optimizer-nvme" if nvme else "params+optimizer-cpu"
    if nvme:
        return "optimizer-nvme"
    return "optimizer+gradients-cpu" if stage >= 2 else "optimizer-cpu"


def named_deepspeed(named: str, words: Words, draft: Draft, folder: Path | None = None) -> None:
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
        return load_json(path).data
    return load_yaml(path).data
