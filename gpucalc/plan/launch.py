"""The command that starts an engine as planned, from the flags its description lists for the version."""

from __future__ import annotations

import shlex

from gpucalc.plan.serving_layout import ServeLayout, ServeRecipe
from gpucalc.plan.weight_formats import published_formats
from gpucalc.spec.engine import EngineSpec
from gpucalc.spec.model import ModelSpec
from gpucalc.spec.version import version_key


def launch_line(
    engine: EngineSpec,
    layout: ServeLayout,
    recipe: ServeRecipe,
    spec: ModelSpec,
    quant: str | None,
    kv_dtype: str,
) -> tuple[str | None, str | None]:
    """One engine's command, and what has to be put in its place. replicas each run it.

    None where the engine has no server of its own.
    """
    launch = engine.launch_at(recipe.version)
    if launch is None:
        return None, None
    published = quant in (None, "none") or quant in published_formats(spec)
    made = None if published else launch.quantizations.get(quant or "")
    wanting = None
    if not published and made is None:
        wanting = f"the launch line names the published model; put a checkpoint in {quant} in its place"
    slots = recipe.max_num_seqs
    values: dict[str, object] = {
        "tp": layout.tp if layout.tp > 1 else None,
        "pp": layout.pp if layout.pp > 1 else None,
        "dp": layout.dp if layout.dp > 1 else None,
        "ep": layout.ep if layout.ep > 1 else None,
        "expert_parallel": True if layout.ep > 1 else None,
        "decode_context_parallel": layout.decode_context if layout.decode_context > 1 else None,
        "dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[recipe.dtype],
        "quantization": made,
        "kv_dtype": launch.kv_dtypes.get(kv_dtype),
        "max_model_len": recipe.max_model_len,
        "context": recipe.max_model_len * slots,
        "max_num_seqs": slots,
        "max_num_batched_tokens": recipe.max_num_batched_tokens,
        "memory_fraction": recipe.gpu_memory_utilization,
        "static_fraction": recipe.mem_fraction_static,
        "enforce_eager": True if recipe.enforce_eager else None,
        "all_layers": 999,
        "split": "layer" if layout.pp > 1 else None,
    }
    wanted = version_key(recipe.version)
    file = "-".join(word for word in (spec.id or spec.label, recipe.weights.name) if word)
    names = {"model": shlex.quote(spec.hf or spec.label), "file": shlex.quote(file.replace("/", "-"))}
    words = [launch.command.format(**names)]
    for flag in launch.flags:
        value = values[flag.key]
        known = wanted is None or (version_key(flag.since) or ()) <= wanted
        if value is None or not known:
            continue
        words.append(flag.flag if value is True else f"{flag.flag} {_text(value)}")
    return " ".join(words), wanting


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
