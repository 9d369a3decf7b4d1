"""torchtune's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpucalc.errors import InputError
from gpucalc.importers.trainers.common import optimizer_of
from gpucalc.importers.words import Draft, ImportedJob, Words

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
