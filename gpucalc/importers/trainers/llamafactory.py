"""LLaMA-Factory's YAML: Transformers' arguments and its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpucalc.importers.trainers.arguments import arguments_into, lora_of
from gpucalc.importers.words import Draft, ImportedJob, Words


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
        run["lora"] = lora_of(words, "lora_rank", "lora_alpha", "lora_target", rank=8, who="LLaMA-Factory")
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
