"""What trainers share: optimizers by their names, processes a launcher starts."""

from __future__ import annotations

from typing import Any

from gpucalc.importers.words import Words, fold

OPTIMIZERS = {
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


def optimizer_of(words: Words, *names: str) -> str | None:
    """Our name of an optimizer; one the planner does not know is an error."""
    named = words.text(*names, sets="run.optimizer")
    if named is None:
        return None
    known = OPTIMIZERS.get(fold(named.rsplit(".", 1)[-1]))
    if known is None:
        raise words.wrong(names, "is an optimizer whose state is not known", named, ", ".join(OPTIMIZERS))
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
