"""axolotl's YAML: Transformers' arguments and its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpucalc.importers.trainers.arguments import arguments_into, lora_of
from gpucalc.importers.words import Draft, ImportedJob, Words


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
        run["lora"] = lora_of(words, "lora_r", "lora_alpha", "lora_target_modules", rank=8, who="axolotl")
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
