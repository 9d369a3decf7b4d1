"""Transformers' TrainingArguments, and the model and PEFT arguments around them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpucalc.importers.launchers import beside, structured
from gpucalc.importers.trainers.accelerate import accelerate_into
from gpucalc.importers.trainers.common import optimizer_of, started
from gpucalc.importers.trainers.deepspeed import deepspeed_into, named_deepspeed
from gpucalc.importers.trainers.fsdp import HYBRID, STRATEGIES, fsdp_into
from gpucalc.importers.words import AUTO, Draft, ImportedJob, Words, fold, precision_of

_ATTENTION = {
    "flash_attention_2": "flash", "flash_attention_3": "flash", "flash_attention": "flash", "fa2": "flash",
    "fa3": "flash", "sdpa": "sdpa", "eager": "eager", "disabled": "eager",
}  # fmt: skip


def transformers(data: Mapping[str, Any], where: str, folder: Path | None = None) -> ImportedJob:
    """TrainingArguments, as JSON, YAML or the flags of a training script, with those of TRL and PEFT."""
    words = Words(data, where)
    draft = Draft()
    named = words.text("config_file")
    if named is not None:  # of accelerate launch
        path = beside(named, where)
        if path is None:
            words.ask(f"{named} is not here, so what it starts is not known", "run.framework")
        else:
            words.assume(f"accelerate's options read from {path}")
            accelerate_into(Words(structured(path), where, "config_file.", words), draft)
    mixed = words.text("mixed_precision")
    if mixed in ("bf16", "fp16", "fp8"):
        draft.run["precision"] = mixed
    arguments_into(words, draft, folder)
    return words.job("transformers", draft)


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
    run["grad_accum"] = run.get("grad_accum", 1) if accumulated is None else accumulated
    if words.flag("auto_find_batch_size"):
        words.ask("auto_find_batch_size shrinks the batch until it fits", "run.micro_batch")
    said = precision_of(words, words.flag("fp16"), words.flag("bf16", sets="run.precision"))
    stored = (words.text("torch_dtype", "dtype") or "").removeprefix("torch.")
    if said in ("fp16", "bf16"):
        run["precision"] = said  # the script's own arguments win over what it is started with
    elif "precision" not in run and not (said is None and str(words.peek("bf16")).lower() == AUTO):
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
        run["lora"] = lora_of(words, "lora_r", "lora_alpha", "lora_target_modules", rank=16, who="TRL")
    _sharded(words, draft, folder)
    draft.ranks = started(words) or draft.ranks
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
        named_deepspeed(named, words, draft, folder)
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
            strategy = next((p for p in parts if fold(p) in (*STRATEGIES, *HYBRID)), None)
            empty = Words({}, words.where, "", words.top)
            stated = (
                options.text("fsdp_sharding_strategy", "sharding_strategy") if options is not None else None
            )
            fsdp_into(options if options is not None else empty, run, strategy or stated)
            if "offload" in parts:
                run["offload"] = "params+optimizer-cpu"
    run.setdefault("framework", "hf")


def lora_of(
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
