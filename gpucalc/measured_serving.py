"""What a published serving run measured: memory as its engine logged it, and speeds with what they count.

Memory figures are those of rank 0, per GPU; totals are summed over the GPUs. Speeds are those of the
whole deployment: what they count is said by their `Rate`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpucalc.measured import Conventions, Row, Skip, is_number, whole
from gpucalc.units import GIB

_POOLED = ("vllm", "sglang", "trtllm")  # engines that give their cache a share of the card
_DOUBTFUL = re.compile(r"DOUBTFUL:? (prefill|printed utilization)")
# A prompt's tokens are computed no faster the more there are of them once all stages are at work.
_LONGER = re.compile(r"pp4096 (\d+(?:\.\d+)?), pp8192\s+(\d+(?:\.\d+)?)")
_FASTER = 1.02
_PACKED = re.compile(r"^GEMV kernel")  # weights laid out to be multiplied with one row
_REQUEST_RATE = re.compile(r"^\d+(?:\.\d+)? requests?/s\b")
_ONLY = re.compile(r"only the (\w+) figure is meaningful")
_NOT_SHOWN = re.compile(r"value of (\w+) not shown")
_DEFAULT_SHARE = re.compile(r"default utili[sz]ation")


@dataclass(frozen=True, slots=True)
class Rate:
    """What a speed counts, and the load it was measured under.

    kind: prefill (prompt tokens up to the first output token), decode (output tokens after the first),
    request (output tokens over whole requests), all (prompt and output tokens over whole requests).
    """

    kind: str
    value: float
    isl: int
    osl: int
    concurrency: int
    source: str  # the row's field


@dataclass(frozen=True, slots=True)
class Logged:
    """What an engine's log says of memory, in bytes of one GPU; None where it says nothing."""

    weights: float | None = None
    activation_peak: float | None = None
    non_torch: float | None = None
    kv_cache: float | None = None
    kv_tokens: float | None = None
    total_memory: float | None = None  # held by the process, over all GPUs

    @classmethod
    def of(cls, row: Row) -> Logged:
        """The figures of a row that are usable."""
        m = row.measured

        def bytes_of(key: str) -> float | None:
            return float(m[key]) * GIB if is_number(m.get(key)) else None

        tokens = m.get("kv_tokens")
        if tokens is None and is_number(m.get("gpu_blocks")) and is_number(m.get("block_size")):
            tokens = m["gpu_blocks"] * m["block_size"]
        return cls(
            weights=bytes_of("weights_gib_per_gpu"),
            activation_peak=bytes_of("activation_peak_gib"),
            non_torch=bytes_of("non_torch_gib"),
            kv_cache=bytes_of("kv_cache_gib_per_gpu"),
            kv_tokens=float(tokens) if tokens is not None and is_number(tokens) else None,
            total_memory=bytes_of("total_mem_gib"),
        )


def is_serving(row: Row) -> bool:
    """Whether a row measured a deployment."""
    return row.run.get("task") == "serve"


def rates_of(row: Row, run: Mapping[str, Any], conventions: Conventions) -> Iterator[tuple[str, Rate | Skip]]:
    """The speeds a row states, by quantity, or why one says nothing.

    `run` is the row's run with documented defaults filled in.
    """
    m, notes = row.measured, str(row.data.get("notes") or "")
    isl, osl, concurrency = (whole(run.get(key)) for key in ("isl", "osl", "concurrency"))
    stated = next((key for key in ("decode_tps", "total_tps") if is_number(m.get(key))), None)
    if stated is not None:
        quantity = "decode_speed" if concurrency == 1 else "batched_speed"
        if _REQUEST_RATE.match(notes):
            yield quantity, Skip("the load is a request rate; requests in flight are not stated")
        elif isl is None or osl is None or concurrency is None:
            unsaid = next(key for key in ("isl", "osl", "concurrency") if whole(run.get(key)) is None)
            yield quantity, Skip(f"run.{unsaid} not stated")
        else:
            kind, context = _kind(row, conventions) if stated == "decode_tps" else ("all", None)
            prompt = isl if context is None else max(1, context)
            yield quantity, Rate(kind, float(m[stated]), prompt, osl, concurrency, stated)
    if is_number(m.get("prefill_tps")):
        unfit = _unfit_prompt(notes)
        if unfit is not None:
            yield "prefill", Skip(unfit)
        elif isl is None:
            yield "prefill", Skip("run.isl not stated")
        else:
            yield "prefill", Rate("prefill", float(m["prefill_tps"]), isl, 1, concurrency or 1, "prefill_tps")
    elif is_number(m.get("ttft_ms")) and concurrency == 1 and isl is not None:
        yield "prefill", Rate("prefill", isl / (m["ttft_ms"] / 1e3), isl, 1, 1, "ttft_ms")


def _unfit_prompt(notes: str) -> str | None:
    """Why a rate of prompts says nothing of the engine, by the row's own notes."""
    doubtful = _DOUBTFUL.search(notes)
    if doubtful is not None and doubtful[1] == "prefill":
        return "measured.prefill_tps is doubtful by the row's own notes"
    longer = _LONGER.search(notes)
    if longer is not None and float(longer[2]) > _FASTER * float(longer[1]):
        return "twice the prompt was faster by the row's own notes: the host still read the weights' file"
    if _PACKED.match(notes):
        return "weights are packed for products with one row: no engine planned multiplies prompts with them"
    return None


def _kind(row: Row, conventions: Conventions) -> tuple[str, int | None]:
    for rule in conventions.rates:
        if rule.applies(row):
            return str(rule.values["rate"]), rule.values.get("context")
    if is_number(row.measured.get("prefill_tps")):
        return "decode", None  # prompt and generation were timed apart
    return "request", None


def meaningless(row: Row, quantity: str) -> str | None:
    """Why a memory figure of a row says nothing, by the row's own notes."""
    only = _ONLY.search(str(row.data.get("notes") or ""))
    if only is None or only[1] == quantity or quantity == "verdict":
        return None
    return f"only the {only[1]} figure is meaningful by the row's own notes"


def undecided(row: Row) -> str | None:
    """Why the bytes an engine leaves for its cache cannot follow from what a row states."""
    notes = str(row.data.get("notes") or "")
    doubtful = _DOUBTFUL.search(notes)
    if doubtful is not None and doubtful[1] != "prefill":
        return f"the {doubtful[1]} is doubtful by the row's own notes"
    hidden = _NOT_SHOWN.search(notes)
    if hidden is not None:
        return f"run.{hidden[1]} not stated"
    stated = row.run.get("gpu_memory_utilization") is not None or _DEFAULT_SHARE.search(notes)
    if not stated and row.run.get("framework") in _POOLED:
        return "run.gpu_memory_utilization not stated"
    return None
