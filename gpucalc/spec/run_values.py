"""What the value of a run's key may be: numbers and their limits, words and the other names they go by."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gpucalc.errors import nearest
from gpucalc.spec.base import refuse
from gpucalc.units import parse_count

MAX_DEGREE = 2**17  # ranks along one parallel axis
MAX_TOKENS_PER_SEQUENCE = 2**27
MAX_BATCH = 10**9
MAX_TOKENS = 10**17  # of a whole training budget

TRAIN_FRAMEWORKS = ("ddp", "fsdp", "deepspeed", "megatron", "torchtitan", "hf")
SERVE_FRAMEWORKS = ("vllm", "sglang", "trtllm", "llamacpp", "hf")
PRECISIONS = (
    "fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4", "bf16-pure", "fp16-pure",
)  # fmt: skip
OPTIMIZERS = (
    "adamw", "adamw-fused", "adamw-unfused", "adam", "sgd", "sgd-momentum", "adafactor", "lion", "lamb",
    "muon", "soap", "shampoo", "adamw-8bit", "adamw-4bit", "paged-adamw", "paged-adamw-8bit", "lion-8bit",
    "prodigy", "adan", "schedulefree-adamw", "adagrad", "rmsprop",
)  # fmt: skip
RECOMPUTE = ("none", "selective", "selective-op", "selective-layer", "full")
RECOMPUTE_MODULES = (  # of Megatron-Core's --recompute-modules
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts",
)  # fmt: skip
# What of a step Megatron-Core replays from CUDA graphs: all of it, or modules of a layer
# (--cuda-graph-impl local with full_iteration; --cuda-graph-scope).
CUDA_GRAPHS = ("none", "full", "attn", "mamba", "mlp", "moe", "moe_router", "moe_preprocess")
METHODS = ("full", "lora", "qlora")
LOSS_DTYPES = ("fp32", "16-bit")
LOADED_AS = ("fp32", "16-bit")
HOST_LOAD = ("every-rank", "one-rank", "none")
FREEZABLE = ("vision_tower", "embedding", "head")
ATTENTION = ("flash", "flash-1", "sdpa", "eager")
SCHEDULES = ("1f1b", "gpipe", "zero-bubble", "zb-h2", "dualpipe", "dualpipe-v")
OFFLOAD = (
    "none", "optimizer-cpu", "optimizer+gradients-cpu", "params+optimizer-cpu", "activations-cpu",
    "optimizer-nvme", "params+optimizer-nvme",
)  # fmt: skip
QUANTIZATIONS = ("nf4", "nf4-double", "int4-gptq", "int8")
SERVE_DTYPES = ("bf16", "fp16", "fp32")
KV_DTYPES = ("auto", "bf16", "fp16", "fp32", "fp8", "int8", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1")

FLOAT_NAMES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "f16": "fp16", "float32": "fp32", "f32": "fp32",
    "float": "fp32", "float8": "fp8",
}  # fmt: skip
PRECISION_NAMES = FLOAT_NAMES | {"bf16-true": "bf16-pure", "fp16-true": "fp16-pure", "bf16-mixed": "bf16",
                                 "fp16-mixed": "fp16", "fp4": "nvfp4"}  # fmt: skip
OPTIMIZER_NAMES = {
    "adamw-torch": "adamw", "adamw-torch-fused": "adamw-fused", "adamw-hf": "adamw",
    "fused-adam": "adam", "fusedadam": "adam",
    "adam8bit": "adamw-8bit", "adamw8bit": "adamw-8bit", "adam-8bit": "adamw-8bit", "bnb-8bit": "adamw-8bit",
    "adamw-bnb-8bit": "adamw-8bit", "ao-8bit": "adamw-8bit", "ao-4bit": "adamw-4bit",
    "paged-adamw-32bit": "paged-adamw", "momentum": "sgd-momentum",
}  # fmt: skip
SCHEDULE_NAMES = {
    "zb-h1": "zero-bubble", "zb1p": "zero-bubble", "dualpipev": "dualpipe-v", "dual-pipe": "dualpipe",
    "dual-pipe-v": "dualpipe-v",
}  # fmt: skip
RECOMPUTE_MODULE_NAMES = {"norm": "layernorm", "act": "moe_act", "shared-expert": "shared_experts"}
CUDA_GRAPH_NAMES = {"full-iteration": "full", "no": "none", "off": "none"}
RECOMPUTE_NAMES = {"no": "none", "off": "none", "selective-block": "selective-layer"}
OFFLOAD_NAMES = {
    "no": "none", "cpu": "params+optimizer-cpu", "optimizer": "optimizer-cpu",
    "activations": "activations-cpu",
    "params-optimizer-cpu": "params+optimizer-cpu", "optimizer-gradients-cpu": "optimizer+gradients-cpu",
}  # fmt: skip
QUANTIZATION_NAMES = {"bnb.nf4": "nf4", "bnb.nf4-dq": "nf4-double", "nf4-dq": "nf4-double", "4bit": "nf4",
                      "gptq": "int4-gptq", "8bit": "int8"}  # fmt: skip
_STAGE_NAMES = {
    "no-shard": 0, "full-shard": 3, "fsdp-full-shard": 3, "shard-grad-op": 2, "fsdp-shard-grad-op": 2,
}  # fmt: skip
_GGUF = re.compile(r"(?:ud-)?(?:i?q[1-8](?:-[a-z0-9]{1,3}){0,2}|f16|bf16|f32)")
_QUANTS = (
    "none", "fp8", "fbgemm-fp8", "int8", "int4", "awq", "gptq-int4", "gptq-int8", "nvfp4", "mxfp4", "mxfp8",
    "nf4", "w8a8-int8",
)  # fmt: skip


def whole(limit: int, *, least: int = 1, auto: bool = False, worded: bool = False) -> BeforeValidator:
    """A check for whole numbers between two limits; worded: which may end in k, M, B or T."""
    legal = f"a whole number from {least:,} to {limit:,}" + (", or auto" if auto else "")
    if worded:
        legal += ", which may end in k, M, B or T: 15T"

    def check(value: Any) -> Any:
        if worded and isinstance(value, str) and value.strip()[-1:].isalpha():
            value = parse_count(value) or value
        if auto and value == "auto":
            return value
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value <= limit:
            raise refuse(_wrong_number(value), legal=legal)
        return value

    return BeforeValidator(check)


def real(low: float, high: float, words: str) -> BeforeValidator:
    """A check for numbers above `low`, at most `high`; `words` say so to the user."""

    def check(value: Any) -> Any:
        if type(value) not in (int, float) or not low < value <= high:
            raise refuse(_wrong_number(value), legal=words)
        return float(value)

    return BeforeValidator(check)


def _wrong_number(value: Any) -> str:
    if isinstance(value, str):
        return "must be a number, not text"
    if type(value) not in (int, float):
        return "must be a number"
    if math.isnan(value):
        return "must be a number, not NaN"
    if value <= 0:
        return "must be positive" if value < 0 else "must not be zero"
    return "is out of range"


def named(legal: tuple[str, ...], aliases: Mapping[str, str] | None = None) -> BeforeValidator:
    """A check for one of a few words, however it is spelt or by another name it has."""
    known = dict(aliases or {}) | {_folded(name): name for name in legal}

    def check(value: Any) -> Any:
        name = known.get(_folded(value)) if isinstance(value, str) else None
        if name is None:
            near = nearest(_folded(value), known) if isinstance(value, str) else ()
            raise refuse(
                "is not a legal value",
                legal=", ".join(legal),
                near=tuple(dict.fromkeys(known[name] for name in near)),
            )
        return name

    return BeforeValidator(check)


def _listed(value: Any) -> Any:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


Listed = BeforeValidator(_listed)  # words with commas between them are a list, one word too


def _folded(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def _zero_stage(value: Any) -> Any:
    if isinstance(value, str):
        value = _STAGE_NAMES.get(_folded(value), value)
    if type(value) is float and value.is_integer():
        value = int(value)
    if value != "auto" and (type(value) is not int or not 0 <= value <= 3):
        raise refuse(
            "is not a sharding stage", legal="0, 1, 2, 3, auto, or full-shard, shard-grad-op, no-shard"
        )
    return value


def _quant(value: Any) -> Any:
    near: tuple[str, ...] = ()
    if isinstance(value, str):
        name = _folded(value)
        if name in _QUANTS:
            return name
        if _GGUF.fullmatch(name):
            return name.replace("-", "_")
        near = nearest(name, _QUANTS)
    raise refuse(
        "is not a legal value", legal=f"{', '.join(_QUANTS)}, or a GGUF type such as q4_k_m", near=near
    )


Auto = Literal["auto"]
Degree = Annotated[int | Auto, whole(MAX_DEGREE, auto=True)]
Batch = Annotated[int | Auto, whole(MAX_BATCH, auto=True)]
Tokens = Annotated[int, whole(MAX_TOKENS_PER_SEQUENCE)]
Flag = Annotated[bool, Field(strict=True)]
ZeroStage = Annotated[int | Auto | None, BeforeValidator(_zero_stage)]
Quant = Annotated[str, BeforeValidator(_quant)]
