"""The command that starts an engine as planned, from the flags its description lists for the version."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from gpucalc.plan.serving_layout import ServeLayout, ServeRecipe
from gpucalc.plan.weight_formats import published_formats
from gpucalc.spec.engine import EngineSpec, Launch
from gpucalc.spec.model import ModelSpec
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.version import version_key

OPTIONS_FILE = "options.yaml"
HALF_BYTES = 2  # of a 16-bit number; a cache below is quantised


def launch_line(
    engine: EngineSpec,
    layout: ServeLayout,
    recipe: ServeRecipe,
    spec: ModelSpec,
    run: ServeRun,
    *,
    nodes: int,
) -> tuple[str | None, tuple[str, ...]]:
    """One engine's command, and what is left to do by hand. replicas each run it, on so many nodes.

    None where the engine has no server of its own.
    """
    launch = engine.launch_at(recipe.version)
    if launch is None:
        return None, ()
    wanting: list[str] = []
    published = run.quant in (None, "none") or run.quant in published_formats(spec)
    made = None if published else launch.quantizations.get(run.quant or "")
    if "{file}" in launch.command:
        wanting.append(f"the launch line names a local file, to be made or fetched in {recipe.weights.name}")
    elif not published and made is None:
        wanting.append(
            f"the launch line names the published model; put a checkpoint in {run.quant} in its place"
        )
    values = _values(layout, recipe, run, launch, made)
    wanted = version_key(recipe.version)
    file = "-".join(word for word in (spec.id or spec.label, recipe.weights.name) if word)
    names = {"model": shlex.quote(spec.hf or spec.label), "file": shlex.quote(file.replace("/", "-"))}
    words = [launch.command.format(**names)]
    said: set[str] = set()
    for flag in launch.flags:
        value = values[flag.key]
        if value is None:
            continue
        setting = flag.says or flag.key
        if flag.known_at(wanted):
            words.append(flag.flag if value is True else f"{flag.flag} {_text(value)}")
            said.add(setting)
        elif flag.until is None and setting not in said:
            lacking = flag.lacking or f"has no {flag.flag} yet, which {flag.key} needs"
            wanting.append(f"{engine.name} {recipe.version} {lacking}")
            said.add(setting)
    command = " ".join(words)
    options = _options({path: values[key] for key, path in launch.options.items()})
    if options is not None and launch.options_flag is not None:
        if launch.options_flag.known_at(wanted):
            made_first = f"echo {shlex.quote(options)} > {OPTIONS_FILE}"
            command = f"{made_first} && {command} {launch.options_flag.flag} {OPTIONS_FILE}"
        else:
            wanting.append(f"{engine.name} {recipe.version} takes no file of options for {options}")
    if nodes > 1 and launch.several_nodes is not None:
        wanting.append(f"a copy spans {nodes} nodes: {launch.several_nodes}")
    return command, (*wanting, *_by_hand(recipe, layout))


def _options(stated: Mapping[str, object]) -> str | None:
    """Settings by their path in a file of options, as one line of YAML; None where none is stated."""
    sections: dict[str, list[str]] = {}
    for path, value in stated.items():
        if value is not None:
            section, _, name = path.rpartition(".")
            sections.setdefault(section, []).append(f"{name}: {_text(value)}")
    if not sections:
        return None
    plain = sections.pop("", [])
    nested = [f"{section}: {{{', '.join(lines)}}}" for section, lines in sections.items()]
    return f"{{{', '.join([*plain, *nested])}}}"


def _by_hand(recipe: ServeRecipe, layout: ServeLayout) -> list[str]:
    """What a plan holds that one command cannot say."""
    told = []
    drafts = recipe.drafter
    if recipe.traffic.drafts and drafts is None:
        told.append(
            "the launch line leaves speculation out, as what drafts is yours to name (run.draft_model,"
            " run.draft_head_gib); its weights and cache are not counted"
        )
    elif drafts is not None and drafts.graph is None:
        told.append("the launch line leaves the head that drafts out: its checkpoint is yours to name")
    if recipe.traffic.prefill_replicas:
        decoding = layout.replicas - recipe.traffic.prefill_replicas
        told.append(
            f"copies that compute prompts: {recipe.traffic.prefill_replicas}, that decode: {decoding};"
            " how they hand the cache over is left out of the launch line"
        )
    return told


def _values(
    layout: ServeLayout, recipe: ServeRecipe, run: ServeRun, launch: Launch, quantization: str | None
) -> dict[str, object]:
    """What each flag's setting comes to, None where the engine's own default is meant."""
    slots = recipe.max_num_seqs
    kv = launch.kv_dtypes.get(run.kv_dtype)
    drafts, named = recipe.traffic.drafts, _draft_names(recipe)
    return {
        "tp": layout.tp if layout.tp > 1 else None,
        "whole_tp": layout.tp * layout.dp if layout.tp * layout.dp > 1 else None,
        "pp": layout.pp if layout.pp > 1 else None,
        "dp": layout.dp if layout.dp > 1 else None,
        "attention_dp": True if layout.dp > 1 else None,
        "ep": layout.ep if layout.ep > 1 else None,
        "expert_parallel": True if layout.ep > 1 else None,
        "decode_context_parallel": layout.decode_context if layout.decode_context > 1 else None,
        "dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[recipe.dtype],
        "quantization": quantization,
        "kv_dtype": kv,
        "quantised_cache": True if kv is not None and recipe.kv_bytes < HALF_BYTES else None,
        "block_size": run.block_size,
        "max_model_len": recipe.max_model_len,
        "context": recipe.max_model_len * slots,
        "max_num_seqs": slots,
        "stated_num_seqs": run.max_num_seqs,
        "max_num_batched_tokens": recipe.max_num_batched_tokens,
        "memory_fraction": recipe.gpu_memory_utilization,
        "static_fraction": recipe.mem_fraction_static,
        "enforce_eager": True if recipe.enforce_eager else None,
        "all_layers": 999,
        "split": "layer" if layout.pp > 1 else None,
        "draft_model": named and shlex.quote(named[0]),
        "draft_file": named and f"{shlex.quote(named[1])}.gguf",
        "draft_settings": named
        and shlex.quote(json.dumps({"model": named[0], "num_speculative_tokens": drafts})),
        "draft_type": "DraftTarget" if named else None,
        "draft_tokens": drafts if named else None,
        "verified_tokens": drafts + 1 if named else None,
        "all_draft_layers": 999 if named else None,
    }


def _draft_names(recipe: ServeRecipe) -> tuple[str, str] | None:
    """The checkpoint that drafts and the local file it would be, None where no model does."""
    found = recipe.drafter
    if found is None or found.graph is None or found.weights is None:
        return None
    file = f"{found.name.rpartition('/')[2]}-{found.weights.name}"
    return found.published, file


def _text(value: object) -> str:
    if value is True:
        return "true"
    return f"{value:g}" if isinstance(value, float) else str(value)
