"""torchtitan's TOML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpucalc.importers.trainers.common import optimizer_of
from gpucalc.importers.words import Draft, ImportedJob, Words

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
    if parallel.flag("enable_async_tensor_parallel"):
        run["tp_overlap"] = True
    _schedule(parallel, run)
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


# What torch.distributed.pipelining calls the schedules that have a plan; 1F1B is the default.
_SCHEDULES = {"1f1b": None, "gpipe": "gpipe", "dualpipev": "dualpipe-v", "zbvzerobubble": "zero-bubble"}


def _schedule(parallel: Words, run: dict[str, Any]) -> None:
    """The pipeline's schedule, by torch's own names."""
    named = parallel.text("pipeline_parallel_schedule")
    if named is None or run.get("pp", 1) == 1:
        return
    folded = named.lower()
    if folded == "interleaved1f1b":
        run["vpp"] = 2
        parallel.assume("Interleaved1F1B: two stages a rank, as torchtitan cuts them by default")
        return
    if folded not in _SCHEDULES:
        raise parallel.wrong(("pipeline_parallel_schedule",), "has no plan", named,
                             "1F1B, Interleaved1F1B, GPipe, DualPipeV, ZBVZeroBubble")  # fmt: skip
    if folded == "zbvzerobubble":
        parallel.assume("ZBVZeroBubble is planned as ZB-H1, which holds as many micro-batches")
    if _SCHEDULES[folded] is not None:
        run["schedule"] = _SCHEDULES[folded]
