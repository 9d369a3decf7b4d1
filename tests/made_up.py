"""A published training run as its file would state it, of which tests change what they are about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpucalc.measured import Row


def row(**changes: Any) -> Row:
    """A complete row; a dotted key changes one value, None removes it."""
    data: dict[str, Any] = {
        "id": "made-up",
        "quality": "A",
        "model": "llama-2-7b",
        "gpus": "8xa100-sxm-80gb",
        "hardware": {"nodes": 1},
        "run": {
            "task": "train",
            "framework": "fsdp",
            "precision": "bf16",
            "seq_len": 4096,
            "micro_batch": 2,
            "global_batch": 32,
            "grad_accum": 2,
            "dp": 8,
            "zero_stage": 3,
            "recompute": "full",
            "optimizer": "adamw",
        },
        "measured": {"tokens_per_s_per_gpu": 3000, "oom": False},
        "group": "made up",
    }
    return changed(data, changes)


def changed(data: dict[str, Any], changes: Mapping[str, Any]) -> Row:
    """A row with values of dotted keys changed, or removed by None."""
    for key, value in changes.items():
        *groups, last = key.split(".")
        inside = data
        for group in groups:
            inside = inside.setdefault(group, {})
        if value is None:
            inside.pop(last, None)
        else:
            inside[last] = value
    return Row(data, "test")
