"""Command lines and YAML of serving engines to a job: vLLM, SGLang and llama.cpp's server.

The engine's own defaults hold where a line says nothing; requests (lengths, how many at once) are
never on such a line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpucalc.importers.drafts import llama_drafts, sglang_drafts, vllm_drafts
from gpucalc.importers.launchers import with_config
from gpucalc.importers.shell import parse_flags
from gpucalc.importers.words import Draft, ImportedJob, Words

VLLM_SHORT = {
    "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size",
    "q": "quantization",
}  # fmt: skip
SGLANG_SHORT = {"tp": "tp_size", "dp": "dp_size", "ep": "ep_size", "pp": "pp_size"}
LLAMA_SHORT = {
    "m": "model", "c": "ctx_size", "ngl": "gpu_layers", "b": "batch_size",
    "ub": "ubatch_size", "np": "parallel", "ctk": "cache_type_k", "ctv": "cache_type_v",
    "fa": "flash_attn", "sm": "split_mode", "ts": "tensor_split", "hf": "hf_repo", "hfr": "hf_repo",
    "t": "threads", "tb": "threads_batch", "mg": "main_gpu", "n": "predict", "cb": "cont_batching",
    "md": "model_draft", "ngld": "gpu_layers_draft",
    "hff": "hf_file", "ncmoe": "n_cpu_moe", "cmoe": "cpu_moe", "ot": "override_tensor",
}  # fmt: skip
_QUANTS = {
    "fp8": "fp8", "awq": "awq", "awq_marlin": "awq", "gptq": "gptq-int4", "gptq_marlin": "gptq-int4",
    "modelopt_fp4": "nvfp4", "modelopt_fp8": "fp8", "modelopt": "fp8", "mxfp4": "mxfp4",
    "bitsandbytes": "nf4", "w8a8_int8": "w8a8-int8", "w8a8_fp8": "fp8", "nvfp4": "nvfp4",
    "fbgemm_fp8": "fbgemm-fp8", "ptpc_fp8": "fp8",
}  # fmt: skip
_GGUF_NAME = re.compile(
    r"(?i)(?:^|[-._:])((?:ud-)?(?:i?q[1-8](?:_[a-z0-9]{1,3}){0,2}|f16|bf16|f32))(?:[-.]|$)"
)
_SWITCHES = frozenset({
    "enforce_eager", "enable_expert_parallel", "trust_remote_code", "enable_prefix_caching",
    "no_enable_prefix_caching", "enable_chunked_prefill", "disable_log_requests", "disable_log_stats",
    "enable_auto_tool_choice", "disable_cuda_graph", "enable_dp_attention", "enable_metrics",
    "disable_radix_cache", "enable_torch_compile", "cont_batching", "mlock", "no_mmap", "jinja", "metrics",
    "cpu_moe", "verbose", "enable_lora", "async_scheduling", "no_webui", "enable_ep_moe",
    "enable_deepep_moe", "kv_unified", "swa_full",
})  # fmt: skip


def vllm_line(words: Sequence[str], where: str) -> ImportedJob:
    """`vllm serve MODEL --flags`, or the older api_server module."""
    flags, loose = parse_flags(words, VLLM_SHORT, _SWITCHES)
    positional = loose[loose.index("serve") + 1 :] if "serve" in loose else []
    if not positional and loose[:1] and "vllm-openai" in loose[0]:  # an image that starts the server
        positional = [word for word in loose[1:] if "/" in word]
    if positional:
        flags.setdefault("model", positional[0])
    flags, missing = with_config(flags, "config", where)
    job = vllm(flags, where)
    return replace(job, asked=(*job.asked, missing)) if missing else job


def vllm(flags: Mapping[str, Any], where: str) -> ImportedJob:
    """vLLM's engine arguments, from a line or a `--config` YAML."""
    words = Words(flags, where)
    run: dict[str, Any] = {"task": "serve", "framework": "vllm"}
    draft = Draft(run, words.text("model", "model_tag"), engine_length=True)
    run["tp"] = _one(words, "tensor_parallel_size", "vLLM")
    run["pp"] = words.degree("pipeline_parallel_size") or 1
    run["dp"] = words.degree("data_parallel_size") or 1
    if words.flag("enable_expert_parallel"):
        run["ep"] = run["tp"] * run["dp"]
    draft.ranks = run["tp"] * run["pp"] * run["dp"]
    _dtype(words, run)
    run["max_model_len"] = words.whole("max_model_len", sets="run.max_model_len")
    run["max_num_seqs"] = words.whole("max_num_seqs")
    run["max_num_batched_tokens"] = words.whole("max_num_batched_tokens")
    run["gpu_memory_utilization"] = words.real("gpu_memory_utilization")
    run["enforce_eager"] = bool(words.flag("enforce_eager"))
    run["kv_dtype"] = _cache(words, "kv_cache_dtype")
    _quant(words, run, "quantization")
    vllm_drafts(words)
    words.skip(
        "host", "port",
        "served_model_name", "api_key", "trust_remote_code", "seed", "chat_template",
        "disable_log_requests", "disable_log_stats", "uvicorn_log_level", "tool_call_parser",
        "enable_auto_tool_choice", "reasoning_parser", "revision", "download_dir", "generation_config",
        "distributed_executor_backend", "enable_prefix_caching", "no_enable_prefix_caching", "tokenizer",
        "tokenizer_mode", "allowed_origins", "root_path", "load_format",
    )  # fmt: skip
    return words.job("vllm", draft)


def sglang_line(words: Sequence[str], where: str) -> ImportedJob:
    """`python -m sglang.launch_server --flags`."""
    flags, _ = parse_flags(words, SGLANG_SHORT, _SWITCHES)
    return sglang(flags, where)


def sglang(flags: Mapping[str, Any], where: str) -> ImportedJob:
    """SGLang's server arguments."""
    words = Words({key: value for key, value in flags.items() if key != "m"}, where)
    run: dict[str, Any] = {"task": "serve", "framework": "sglang"}
    draft = Draft(run, words.text("model_path", "model"), engine_length=True)
    run["tp"] = _one(words, "tp_size", "SGLang", "tensor_parallel_size", "tp")
    run["pp"] = words.degree("pp_size", "pipeline_parallel_size") or 1
    copies = words.degree("dp_size", "data_parallel_size", "dp") or 1
    ep = words.degree("ep_size", "expert_parallel_size", "ep")
    if words.flag("enable_ep_moe", "enable_deepep_moe") and ep is None:
        ep = run["tp"]
    run["ep"] = ep
    draft.ranks = run["tp"] * run["pp"] * copies
    if words.flag("enable_dp_attention") and copies > 1:
        # SGLang counts attention replicas inside its tp ranks: tp/dp ranks divide each.
        if run["tp"] % copies:
            raise words.wrong(("dp_size",), f"does not divide the {run['tp']} tensor-parallel ranks", copies)
        draft.ranks = run["tp"] * run["pp"]
        run["tp"] //= copies
        run["dp"] = copies
        words.assume(
            f"data-parallel attention: {copies} replicas of {run['tp']} ranks each inside the tensor group"
        )
    elif copies > 1:
        words.assume(f"dp-size {copies}: independent replicas, filled from the GPUs that --gpus names")
    _dtype(words, run)
    run["max_model_len"] = words.whole("context_length")
    run["max_num_seqs"] = words.whole("max_running_requests")
    chunk = words.whole("chunked_prefill_size")
    run["max_num_batched_tokens"] = chunk if chunk is not None and chunk > 0 else None
    run["mem_fraction_static"] = words.real("mem_fraction_static")
    run["enforce_eager"] = bool(words.flag("disable_cuda_graph"))
    run["kv_dtype"] = _cache(words, "kv_cache_dtype")
    _quant(words, run, "quantization")
    sglang_drafts(words)
    words.skip(
        "host", "port", "served_model_name", "api_key", "trust_remote_code", "random_seed", "log_level",
        "nnodes", "node_rank", "dist_init_addr", "tool_call_parser", "reasoning_parser", "chat_template",
        "enable_metrics", "tokenizer_path", "load_format", "watchdog_timeout",
    )  # fmt: skip
    return words.job("sglang", draft)


def llama_line(words: Sequence[str], where: str) -> ImportedJob:
    """`llama-server -m FILE --flags`."""
    flags, _ = parse_flags(words, LLAMA_SHORT, _SWITCHES)
    keys = Words(flags, where)
    run: dict[str, Any] = {"task": "serve", "framework": "llamacpp"}
    draft = Draft(run, keys.text("model", "hf_repo"), engine_length=True)
    file = draft.model if isinstance(draft.model, str) else ""
    if keys.has("hf_repo") and not keys.has("model"):
        file = keys.text("hf_file") or file
        draft.model = str(draft.model).split(":", 1)[0]
    match = _GGUF_NAME.search(file.rsplit("/", 1)[-1])
    if match:
        run["quant"] = match[1].lower()
        keys.assume(f"weights as {match[1]}, from the file's name")
    context = keys.whole("ctx_size")
    slots = keys.degree("parallel") or 1
    if context:
        run["max_model_len"] = context // slots
    run["max_num_seqs"] = slots
    run["max_num_batched_tokens"] = keys.degree("ubatch_size")
    key, value = keys.text("cache_type_k") or "f16", keys.text("cache_type_v") or "f16"
    if key != value:
        raise keys.wrong(
            ("cache_type_v",), f"keys are {key} and values {value}: one type for both is planned", value
        )
    run["kv_dtype"] = {"f16": "fp16", "f32": "fp32"}.get(key, key)
    layers = keys.text("gpu_layers", "n_gpu_layers")
    if keys.has("n_cpu_moe", "cpu_moe", "override_tensor"):
        raise keys.wrong(
            ("n_cpu_moe", "cpu_moe", "override_tensor"), "weights computed on the host have no plan", True
        )
    if layers is None:
        keys.assume("gpu-layers not given: every layer is taken to be on the GPU")
    elif layers not in ("all", "auto", "-1") and layers.isdigit() and int(layers) < 90:
        keys.ask(
            f"gpu-layers {layers}: planned with every layer on the GPU; a smaller model or quant", "run.quant"
        )
    llama_drafts(keys)
    if keys.text("split_mode") == "row":
        keys.ask("split-mode row divides each matrix over the GPUs", "run.tp")
    keys.skip(
        "host", "port", "threads", "threads_batch", "batch_size", "jinja", "flash_attn", "cont_batching",
        "alias", "api_key", "no_mmap", "mlock", "main_gpu", "metrics", "temp", "top_p", "top_k", "min_p",
        "predict", "n_predict", "verbose", "no_webui", "chat_template",
    )  # fmt: skip
    return keys.job("llama-server", draft)


def _one(words: Words, name: str, engine: str, *others: str) -> int:
    given = words.degree(name, *others)
    if given is None:
        words.assume(f"{name.replace('_', '-')} not given: 1, {engine}'s default")
    return given or 1


def _dtype(words: Words, run: dict[str, Any]) -> None:
    dtype = words.text("dtype")
    if dtype is not None and dtype != "auto":
        run["dtype"] = dtype


def _cache(words: Words, name: str) -> str | None:
    kind = words.text(name)
    if kind is None:
        return None
    return "fp8" if kind.startswith("fp8") else {"bfloat16": "bf16", "float16": "fp16"}.get(kind, kind)


def _quant(words: Words, run: dict[str, Any], name: str) -> None:
    kind = words.text(name)
    if kind is None or kind in ("none", "auto"):
        return
    if kind in (
        "compressed-tensors",
        "compressed_tensors",
        "gguf",
        "torchao",
        "quark",
        "auto-round",
        "modelopt_mixed",
    ):
        words.ask(f"{name} {kind} does not say the element type", "run.quant")
        return
    folded = kind.lower().replace("-", "_")
    run["quant"] = _QUANTS.get(folded, kind)
