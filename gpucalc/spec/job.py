"""A job: a model, GPUs and a run; what a job file, a measured run and a CI check have in common.

A run says what was chosen. What nobody said is left unset here; `with_defaults` fills it in and
returns every value it chose with the reason, so that each can be printed and set by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from gpucalc.errors import InputError, nearest
from gpucalc.spec.base import Spec, refuse
from gpucalc.spec.costs import CostKeys, NetworkKeys, ReliabilityKeys
from gpucalc.spec.fleet import GRAMMAR, FleetSpec, parse_fleet

# -- the words a value may be ---------------------------------------------------------------------

THIS_YEAR = 2026  # the releases a run is taken to use when nobody says
FUSED_ATTENTION_YEAR = 2023  # PyTorch 2.0, Megatron-LM and Transformers gained fused attention
MAX_DEGREE = 2**17  # ranks along one parallel axis
MAX_TOKENS_PER_SEQUENCE = 2**27
MAX_BATCH = 10**9
MAX_TOKENS = 10**17  # of a whole training budget


def _whole(limit: int, *, least: int = 1, auto: bool = False) -> BeforeValidator:
    legal = f"a whole number from {least:,} to {limit:,}" + (", or auto" if auto else "")

    def check(value: Any) -> Any:
        if auto and value == "auto":
            return value
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value <= limit:
            raise refuse(_wrong_number(value), legal=legal)
        return value

    return BeforeValidator(check)


def _real(low: float, high: float, words: str) -> BeforeValidator:
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


def _named(legal: tuple[str, ...], aliases: Mapping[str, str] | None = None) -> BeforeValidator:
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


def _folded(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


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

_FLOAT_NAMES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "f16": "fp16", "float32": "fp32", "f32": "fp32",
    "float": "fp32", "float8": "fp8",
}  # fmt: skip
_PRECISION_NAMES = _FLOAT_NAMES | {"bf16-true": "bf16-pure", "fp16-true": "fp16-pure", "bf16-mixed": "bf16",
                                   "fp16-mixed": "fp16", "fp4": "nvfp4"}  # fmt: skip
_OPTIMIZER_NAMES = {
    "adamw-torch": "adamw", "adamw-torch-fused": "adamw-fused", "adamw-hf": "adamw",
    "fused-adam": "adam", "fusedadam": "adam",
    "adam8bit": "adamw-8bit", "adamw8bit": "adamw-8bit", "adam-8bit": "adamw-8bit", "bnb-8bit": "adamw-8bit",
    "adamw-bnb-8bit": "adamw-8bit", "ao-8bit": "adamw-8bit", "ao-4bit": "adamw-4bit",
    "paged-adamw-32bit": "paged-adamw", "momentum": "sgd-momentum",
}  # fmt: skip
_SCHEDULE_NAMES = {
    "zb-h1": "zero-bubble", "zb1p": "zero-bubble", "dualpipev": "dualpipe-v", "dual-pipe": "dualpipe",
    "dual-pipe-v": "dualpipe-v",
}  # fmt: skip
_RECOMPUTE_MODULE_NAMES = {"norm": "layernorm", "act": "moe_act", "shared-expert": "shared_experts"}
_RECOMPUTE_NAMES = {"no": "none", "off": "none", "selective-block": "selective-layer"}
_OFFLOAD_NAMES = {
    "no": "none", "cpu": "params+optimizer-cpu", "optimizer": "optimizer-cpu",
    "activations": "activations-cpu",
    "params-optimizer-cpu": "params+optimizer-cpu", "optimizer-gradients-cpu": "optimizer+gradients-cpu",
}  # fmt: skip
_QUANTIZATION_NAMES = {"bnb.nf4": "nf4", "bnb.nf4-dq": "nf4-double", "nf4-dq": "nf4-double", "4bit": "nf4",
                       "gptq": "int4-gptq", "8bit": "int8"}  # fmt: skip
_STAGE_NAMES = {
    "no-shard": 0, "full-shard": 3, "fsdp-full-shard": 3, "shard-grad-op": 2, "fsdp-shard-grad-op": 2,
}  # fmt: skip
_GGUF = re.compile(r"(?:ud-)?(?:i?q[1-8](?:-[a-z0-9]{1,3}){0,2}|f16|bf16|f32)")
_QUANTS = (
    "none", "fp8", "fbgemm-fp8", "int8", "int4", "awq", "gptq-int4", "gptq-int8", "nvfp4", "mxfp4", "mxfp8",
    "nf4", "w8a8-int8",
)  # fmt: skip


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
Degree = Annotated[int | Auto, _whole(MAX_DEGREE, auto=True)]
Batch = Annotated[int | Auto, _whole(MAX_BATCH, auto=True)]
Tokens = Annotated[int, _whole(MAX_TOKENS_PER_SEQUENCE)]
Flag = Annotated[bool, Field(strict=True)]

# -- which key means something where --------------------------------------------------------------

# Keys only some frameworks have; a value that switches nothing on (1, 0, false, none) is legal anywhere.
_MODEL_PARALLEL = ("megatron", "torchtitan", "deepspeed")
_TRAIN_KEYS: dict[str, tuple[str, ...]] = {
    "tp": _MODEL_PARALLEL,
    "tp_across_nodes": _MODEL_PARALLEL,
    "pp": _MODEL_PARALLEL,
    "vpp": ("megatron", "torchtitan"),
    "pipeline_split": _MODEL_PARALLEL,
    "schedule": _MODEL_PARALLEL,
    "cp": _MODEL_PARALLEL,
    "ep": _MODEL_PARALLEL,
    "etp": ("megatron", "torchtitan"),
    "recompute_modules": ("megatron",),
    "fp8_params": ("megatron",),
    "reduce_bucket_size": ("deepspeed",),
    "overlap_comm": ("deepspeed",),
    "max_live_parameters": ("deepspeed",),
    "sub_group_size": ("deepspeed",),
    "sequence_parallel": _MODEL_PARALLEL,
    "dp_shard": ("fsdp", "torchtitan", "megatron"),
    "reshard_after_forward": ("fsdp", "torchtitan"),
    "wrap_tables": ("fsdp", "torchtitan"),
    "optimizer_in_backward": ("ddp", "hf", "fsdp"),
    "gradient_as_bucket_view": ("ddp", "hf"),
}
_STAGES: dict[str, tuple[int, ...]] = {
    "ddp": (0,),
    "hf": (0,),
    "fsdp": (0, 2, 3),
    "torchtitan": (0, 2, 3),
    "deepspeed": (0, 1, 2, 3),
    "megatron": (0, 1, 2, 3),
}
_SERVE_KEYS: dict[str, tuple[str, ...]] = {
    "gpu_memory_utilization": ("vllm", "trtllm"),
    "mem_fraction_static": ("sglang",),
    "enforce_eager": ("vllm", "sglang"),
    "max_num_batched_tokens": ("vllm", "sglang", "trtllm", "llamacpp"),
    "max_num_seqs": ("vllm", "sglang", "trtllm", "llamacpp"),
    "ep": ("vllm", "sglang", "trtllm"),
    "dp": ("vllm", "sglang", "trtllm"),
    "decode_context_parallel": ("vllm",),
    "block_size": ("vllm", "trtllm"),
    "request_rate": ("vllm", "sglang", "trtllm"),
    "prefix_hit_rate": ("vllm", "sglang", "trtllm"),
    "num_speculative_tokens": ("vllm", "sglang", "trtllm"),
    "prefill_replicas": ("vllm", "sglang", "trtllm"),
}
_IDLE: tuple[Any, ...] = (None, 1, 0, False, "none", "even")


def _belongs(key: str, value: Any, framework: str | None, table: Mapping[str, tuple[str, ...]]) -> None:
    where = table.get(key)
    if where is None or framework is None or framework in where:
        return
    if any(type(value) is type(idle) and value == idle for idle in _IDLE):  # True is not 1
        return
    raise refuse(f"does not apply to {framework}", legal=f"with framework {', '.join(where)}")


class Lora(Spec):
    """Low-rank adapters on a frozen base."""

    rank: Annotated[int, _whole(65_536)] = 16
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    alpha: Annotated[float, _real(0, 1e6, "a positive number")] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    dtype: Annotated[Literal["fp32", "bf16"], _named(("fp32", "bf16"), _FLOAT_NAMES)] | None = Field(
        default=None,
        description="unset: fp32, as PEFT holds them; 16 bit under DeepSpeed, Megatron and -pure precisions",
    )
    train_embeddings: Flag = False
    trainable: Annotated[int, _whole(10**13)] | None = Field(
        default=None,
        description="trainable parameters where known; overrides the count from rank and targets",
    )
    kind: Literal["lora", "dora", "adapter", "adapter_v2"] = "lora"


class TrainRun(Spec):
    """One training run. Unset keys are filled by `with_defaults`."""

    task: Literal["train"] = "train"
    framework: Annotated[
        Literal["ddp", "fsdp", "deepspeed", "megatron", "torchtitan", "hf"], _named(TRAIN_FRAMEWORKS)
    ]
    precision: Annotated[str, _named(PRECISIONS, _PRECISION_NAMES)] = Field(
        default="bf16", description="mixed with fp32 master weights, unless -pure"
    )
    optimizer: Annotated[str, _named(OPTIMIZERS, _OPTIMIZER_NAMES)] = "adamw"
    seq_len: Tokens | None = Field(
        default=None, description="tokens per sequence; models of images have none"
    )
    micro_batch: Batch = Field(default="auto", description="sequences per GPU and forward pass")
    global_batch: Batch | None = Field(default=None, description="sequences per optimizer step")
    grad_accum: Annotated[int, _whole(MAX_BATCH)] | None = Field(
        default=None, description="micro-batches per step"
    )
    tp: Degree = Field(default=1, description="tensor parallel ranks")
    tp_across_nodes: Flag = Field(
        default=False, description="a searched tp may span several NVLink domains; a given one may always"
    )
    pp: Degree = Field(default=1, description="pipeline stages")
    vpp: Degree = Field(default=1, description="virtual stages per pipeline rank (interleaved schedule)")
    schedule: Annotated[str, _named((*SCHEDULES, "auto"), _SCHEDULE_NAMES)] | None = Field(
        default=None,
        description="order of a pipeline's work: vpp > 1 interleaves 1f1b; zero-bubble is ZB-H1;"
        " dualpipe holds two stages on every rank, from both ends of the model",
    )
    pipeline_split: Literal["even", "uneven"] = Field(
        default="even", description="uneven: stages may hold different numbers of layers"
    )
    cp: Degree = Field(default=1, description="context parallel ranks")
    ep: Degree = Field(default=1, description="expert parallel ranks")
    etp: Degree | None = Field(default=None, description="tensor parallel ranks inside an expert")
    dp: Degree | None = Field(default=None, description="data parallel ranks; what tp, pp and cp leave")
    dp_shard: Annotated[int, _whole(MAX_DEGREE)] | None = Field(
        default=None, description="data parallel ranks that share one sharded copy (hybrid sharding)"
    )
    zero_stage: Annotated[int | Auto | None, BeforeValidator(_zero_stage)] = Field(
        default=None, description="0 replicated, 1 optimizer, 2 + gradients, 3 + parameters sharded"
    )
    sequence_parallel: Flag | Auto | None = None
    recompute: Annotated[str, _named((*RECOMPUTE, "auto"), _RECOMPUTE_NAMES)] = "none"
    recompute_modules: (
        tuple[Annotated[str, _named(RECOMPUTE_MODULES, _RECOMPUTE_MODULE_NAMES)], ...] | None
    ) = Field(
        default=None,
        description="parts of a layer that Megatron's selective recomputation makes again; unset: core_attn",
    )
    attention: Annotated[str, _named(ATTENTION)] | None = Field(
        default=None,
        description="flash-1: kernels before FlashAttention-2 of July 2023, Triton's too",
    )
    flash_attention: Flag | None = Field(
        default=None, description="true: attention flash, false: attention eager"
    )
    loss_dtype: Annotated[Literal["fp32", "16-bit"], _named(LOSS_DTYPES)] = Field(
        default="fp32",
        description="type an unfused loss is taken in: 16-bit where nothing upcasts the logits",
    )
    fused_loss: Flag | None = Field(
        default=None, description="the loss never holds fp32 logits (Liger, chunked, compiled)"
    )
    loss_chunks: Annotated[int, _whole(1024)] = Field(
        default=1, description="pieces of the sequence whose loss is compiled one by one (torchtune: 8)"
    )
    fused_kernels: Flag = Field(
        default=False, description="norms, rotary and gated MLP in one kernel each (Liger, Apex)"
    )
    fused_qkv: Flag = Field(
        default=False,
        description="one matrix gives queries, keys and values whatever the model's own code does (LitGPT)",
    )
    compile: Flag = Field(default=False, description="torch.compile")
    overlap: Flag = Field(default=True, description="false: no communication runs beside computation")
    moe_dispatcher: Literal["alltoall", "deepep"] | None = Field(
        default=None,
        description="how tokens reach experts: a copy per expert, or one per rank (DeepEP, HybridEP)",
    )
    expert_imbalance: Annotated[float, Field(ge=1, le=1024)] | None = Field(
        default=None,
        description="tokens of the busiest expert-parallel rank over the mean;"
        " where experts are padded, their capacity factor",
    )
    channels_last: Flag | None = Field(
        default=None, description="image networks: tensors lie as tensor cores read them (NHWC)"
    )
    clock_share: Annotated[float, Field(gt=0, le=1.5)] | None = Field(
        default=None,
        description="clock the GPUs hold under load over that of the runs the rates come from;"
        " a power cap lowers it",
    )
    input_samples_per_s: Annotated[float, Field(gt=0)] | Literal["enough"] | None = Field(
        default=None,
        description="samples a second the host loads and decodes for all GPUs; enough: never waited for",
    )
    reduce_dtype: Literal["fp32", "bf16"] | None = Field(
        default=None,
        description="type gradients are reduced in, and kept in under Megatron; unset: the framework's own",
    )
    state_dtype: Literal["fp32", "bf16", "fp8"] | None = Field(
        default=None, description="type of the optimizer's moments; unset: that of the trained weights"
    )
    fp8_params: Flag = Field(
        default=False, description="weights are held in fp8 alone, without 16-bit ones (fp8-param-gather)"
    )
    year: Annotated[int, Field(ge=2016, le=2100)] | None = Field(
        default=None, description="release year of the software; older releases keep and compute more"
    )
    dropout: Flag | None = Field(
        default=None, description="whether dropout is active; unset: as the model says"
    )
    gradient_as_bucket_view: Flag = False
    optimizer_in_backward: Flag = Field(
        default=False, description="each gradient is stepped and freed as soon as it is made"
    )
    wrap_tables: Flag = Field(
        default=False, description="FSDP: embedding and output layer are wrapped on their own"
    )
    reshard_after_forward: Flag | None = Field(default=None, description="false: as zero_stage 2")
    offload: Annotated[str, _named((*OFFLOAD, "auto"), _OFFLOAD_NAMES)] = "none"
    method: Annotated[Literal["full", "lora", "qlora"], _named(METHODS)] = "full"
    quantization: Annotated[str, _named(QUANTIZATIONS, _QUANTIZATION_NAMES)] | None = Field(
        default=None, description="of the frozen base"
    )
    lora: Lora | None = None
    shard_quantised: Flag | None = Field(
        default=None, description="stage 3 divides a quantised base too; false: every GPU holds all of it"
    )
    upcast_frozen: Flag | None = Field(
        default=None,
        description="embeddings, norms and head of a quantised base held in fp32"
        " (peft's prepare_model_for_kbit_training)",
    )
    frozen: tuple[Annotated[str, _named(FREEZABLE)], ...] = Field(
        default=(), description="parts of the model that are not trained"
    )
    reference_model: Flag = Field(
        default=False,
        description="a frozen 16-bit copy beside the trained model (DPO, RLHF); a chosen and a rejected"
        " answer are two sequences of the micro-batch",
    )
    reward_models: Annotated[int, _whole(16, least=0)] = Field(
        default=0,
        description="frozen 16-bit models of the trained one's size that score its answers (PPO, GRPO)",
    )
    ema: Flag = Field(default=False, description="a moving average of the trained weights beside them (EMA)")
    reduce_bucket_size: Annotated[int | Auto, _whole(10**12, auto=True)] | None = Field(
        default=None,
        description="elements of DeepSpeed's gradient bucket, 5e8 when unset; auto: hidden squared, as"
        " Transformers fills it in",
    )
    overlap_comm: Flag | None = Field(
        default=None, description="DeepSpeed stages 1 and 2 reduce one bucket while they fill another"
    )
    max_live_parameters: Annotated[int, _whole(10**12)] | None = Field(
        default=None, description="parameters DeepSpeed's stage 3 gathers at most, 1e9 when unset"
    )
    sub_group_size: Annotated[int, _whole(10**15)] | None = Field(
        default=None, description="parameters DeepSpeed's stage 3 steps at a time, 1e9 when unset"
    )
    loaded_as: Annotated[str, _named(LOADED_AS)] | None = Field(
        default=None, description="element type of trained weights before the engine casts them"
    )
    host_load: Annotated[str, _named(HOST_LOAD)] | None = Field(
        default=None, description="which ranks of a node hold a whole copy of the weights in host memory"
    )
    host_ram_gb: Annotated[float, _real(0, 1e6, "gigabytes above 0")] | None = Field(
        default=None, description="host memory of one node; unset: the server's, where it is known"
    )
    memory_in_use_gib: Annotated[float, _real(0, 1e6, "GiB above 0")] | None = Field(
        default=None, description="memory the display and other processes hold on each card"
    )
    tokens: Annotated[int, _whole(MAX_TOKENS)] | None = Field(default=None, description="training budget")
    precision_detail: str | None = Field(
        default=None, description="the source's own words; kept for the record"
    )
    workload: str | None = Field(default=None, description="kept for the record")
    stack: str | None = Field(default=None, description="kept for the record")

    @field_validator("*", mode="after")
    @classmethod
    def _agrees(cls, value: Any, info: ValidationInfo) -> Any:
        key, given = info.field_name or "", info.data
        framework = given.get("framework")
        _belongs(key, value, framework, _TRAIN_KEYS)
        problem = _TRAIN_RULES[key](value, given) if value is not None and key in _TRAIN_RULES else None
        if problem:
            raise refuse(problem[0], legal=problem[1])
        return value

    @classmethod
    def explain_unknown(cls, key: str) -> str | None:
        """Why a key that is unknown here may have been meant."""
        return "is a key of serving runs, not of training" if key in ServeRun.model_fields else None


_Rule = Callable[[Any, Mapping[str, Any]], tuple[str, str] | None]


def _stage_rule(value: Any, given: Mapping[str, Any]) -> tuple[str, str] | None:
    framework = given.get("framework")
    if framework is None or value == "auto" or value in _STAGES[framework]:
        return None
    return f"{framework} has no such sharding stage", ", ".join(map(str, _STAGES[framework]))


def _flash_rule(value: Any, given: Mapping[str, Any]) -> tuple[str, str] | None:
    attention = given.get("attention")
    if attention is None or value == (attention in ("flash", "flash-1")):
        return None
    return f"contradicts attention: {attention}", "one of the two keys"


def _reshard_rule(value: Any, given: Mapping[str, Any]) -> tuple[str, str] | None:
    stage = given.get("zero_stage")
    if stage in (None, "auto") or stage == (3 if value else 2):
        return None
    return f"contradicts zero_stage: {stage}", "one of the two keys"


def _offload_rule(value: Any, given: Mapping[str, Any]) -> tuple[str, str] | None:
    framework = given.get("framework")
    if value.endswith("nvme") and framework not in ("deepspeed", None):
        return f"does not apply to {framework}", "NVMe offload with framework deepspeed"
    if value.startswith("params") and framework == "ddp":
        return "does not apply to ddp, which keeps every parameter on every GPU", "none, optimizer-cpu"
    return None


def _modules_rule(_: Any, given: Mapping[str, Any]) -> tuple[str, str] | None:
    if given.get("recompute", "none") in ("selective", "auto"):
        return None
    return "names parts of a selective recomputation", "with recompute: selective"


def _quantization_rule(_: Any, given: Mapping[str, Any]) -> tuple[str, str] | None:
    if given.get("method", "full") != "full":
        return None
    return "a quantised base cannot be trained in full", "with method lora or qlora"


def _lora_rule(_: Any, given: Mapping[str, Any]) -> tuple[str, str] | None:
    return ("needs a method that uses it", "method lora or qlora") if given.get("method") == "full" else None


def _fp8_rule(value: Any, given: Mapping[str, Any]) -> tuple[str, str] | None:
    if not value or given.get("precision") in (None, "fp8", "mxfp8"):
        return None
    return f"contradicts precision: {given['precision']}", "with precision fp8 or mxfp8"


_TRAIN_RULES: dict[str, _Rule] = {
    "fp8_params": _fp8_rule,
    "zero_stage": _stage_rule,
    "flash_attention": _flash_rule,
    "reshard_after_forward": _reshard_rule,
    "offload": _offload_rule,
    "quantization": _quantization_rule,
    "recompute_modules": _modules_rule,
    "lora": _lora_rule,
}


class ServeRun(Spec):
    """One serving deployment."""

    task: Literal["serve"] = "serve"
    framework: Annotated[
        Literal["vllm", "sglang", "trtllm", "llamacpp", "hf"],
        _named(SERVE_FRAMEWORKS, {"llama.cpp": "llamacpp", "tensorrt-llm": "trtllm", "transformers": "hf"}),
    ]
    version: str | None = None
    dtype: Annotated[str, _named(SERVE_DTYPES, _FLOAT_NAMES)] = "bf16"
    quant: Annotated[str, BeforeValidator(_quant)] | None = None
    kv_dtype: Annotated[str, _named(KV_DTYPES, _FLOAT_NAMES)] = "auto"
    tp: Degree = 1
    pp: Degree = 1
    dp: Degree = 1
    ep: Degree = 1
    decode_context_parallel: Annotated[int, _whole(MAX_DEGREE)] = Field(
        default=1, description="ranks of a tensor group that share one sequence's cache"
    )
    max_model_len: Tokens | None = None
    block_size: Annotated[int, _whole(4096)] | None = Field(
        default=None, description="tokens per cache block"
    )
    max_num_seqs: Annotated[int, _whole(10**6)] | None = None
    max_num_batched_tokens: Tokens | None = None
    gpu_memory_utilization: (
        Annotated[float, _real(0, 1, "a fraction above 0, at most 1: 0.9 is 90 %")] | None
    ) = None
    mem_fraction_static: Annotated[float, _real(0, 1, "a fraction above 0, at most 1")] | None = None
    enforce_eager: Flag = False
    memory_in_use_gib: Annotated[float, _real(0, 1e6, "GiB above 0")] | None = Field(
        default=None, description="memory the display and other processes hold on each card"
    )
    isl: Tokens | None = Field(default=None, description="input tokens per request")
    osl: Tokens | None = Field(default=None, description="output tokens per request")
    concurrency: Annotated[int, _whole(10**6)] | None = Field(default=None, description="requests in flight")
    request_rate: Annotated[float, _real(0, 1e6, "requests per second above 0")] | None = Field(
        default=None, description="requests per second that arrive; how many are in flight follows"
    )
    ttft_ms: Annotated[float, _real(0, 1e9, "milliseconds above 0")] | None = Field(
        default=None, description="target: time to first token"
    )
    tpot_ms: Annotated[float, _real(0, 1e9, "milliseconds above 0")] | None = Field(
        default=None, description="target: time per output token"
    )
    prefix_hit_rate: Annotated[float, _real(0, 1, "a share above 0, at most 1")] | None = Field(
        default=None, description="share of prompt tokens found in the prefix cache"
    )
    num_speculative_tokens: Annotated[int, _whole(64)] | None = Field(
        default=None, description="tokens drafted per pass of the model"
    )
    acceptance_rate: Annotated[float, _real(0, 1, "a share above 0, at most 1")] | None = Field(
        default=None, description="probability that a drafted token is accepted, those before it being so"
    )
    draft_cost: Annotated[float, _real(0, 1, "a share above 0, at most 1")] | None = Field(
        default=None, description="time of one draft pass over that of a pass of the model"
    )
    prefill_replicas: Annotated[int, _whole(10**6)] | None = Field(
        default=None, description="copies of the engine that only compute prompts; the others only decode"
    )

    @field_validator("*", mode="after")
    @classmethod
    def _agrees(cls, value: Any, info: ValidationInfo) -> Any:
        _belongs(info.field_name or "", value, info.data.get("framework"), _SERVE_KEYS)
        return value

    @model_validator(mode="after")
    def _one_load(self) -> ServeRun:
        if self.concurrency is not None and self.request_rate is not None:
            raise refuse("concurrency and request_rate each say how much is asked", legal="one of the two")
        return self

    @model_validator(mode="after")
    def _speculation(self) -> ServeRun:
        given = [self.num_speculative_tokens, self.acceptance_rate]
        if any(item is not None for item in given) and None in given:
            raise refuse(
                "num_speculative_tokens and acceptance_rate say together what speculation brings",
                legal="both, or neither",
            )
        if self.draft_cost is not None and self.num_speculative_tokens is None:
            raise refuse("draft_cost says nothing without num_speculative_tokens", legal="both, or neither")
        return self

    @classmethod
    def explain_unknown(cls, key: str) -> str | None:
        """Why a key that is unknown here may have been meant."""
        return "is a key of training runs, not of serving" if key in TrainRun.model_fields else None


Run = Annotated[TrainRun | ServeRun, Field(discriminator="task")]


def _fleet_words(value: Any) -> Any:
    try:
        parse_fleet(value)
    except InputError as error:
        raise refuse(error.problem, legal=GRAMMAR) from None
    return value


def _model_words(value: Any) -> Any:
    if isinstance(value, Mapping):
        if not value:
            raise refuse("is empty", legal="a catalogue id, a path, or the model's own keys")
        return dict(value)
    if not isinstance(value, str) or not value.strip() or len(value) > 4096:
        raise refuse("is not a model", legal="a catalogue id, a path, or the model's own keys")
    return value


def _expect_words(value: Any) -> Any:
    from gpucalc.spec.check import read_expect  # only for jobs that are checks

    try:
        read_expect(value)
    except InputError as error:
        raise refuse(str(error).removeprefix("expect: "), near=error.near) from None
    return value


class Job(Spec):
    """A model on GPUs doing a run. `measured` and `source` make it a measured run, `expect` a check."""

    name: str | None = None
    model: Annotated[str | dict[str, Any], BeforeValidator(_model_words)]
    gpus: Annotated[str, BeforeValidator(_fleet_words)] | None = None
    system: str | None = None
    run: Run
    network: NetworkKeys | None = None
    costs: CostKeys | None = None
    reliability: ReliabilityKeys | None = None
    expect: Annotated[dict[str, Any], BeforeValidator(_expect_words)] | None = None
    matrix: dict[str, Any] | None = Field(default=None, description="lists of values a check is made over")
    measured: dict[str, Any] | None = None
    source: dict[str, Any] | str | None = None
    notes: str | None = None

    @property
    def fleet(self) -> FleetSpec:
        """The GPUs as parts. Raises InputError when the job names none."""
        if self.gpus is None:
            raise InputError("no GPUs given", key="gpus", legal=f"--gpus or a gpus: key, {GRAMMAR}")
        return parse_fleet(self.gpus, key="gpus")


# -- defaults -------------------------------------------------------------------------------------

_Choose = Callable[[str, Any, str], None]


@dataclass(frozen=True, slots=True)
class Default:
    """A value nobody stated: the dotted key that sets it, the value taken and why."""

    key: str
    value: Any
    why: str


_DEFAULT_STAGE = {
    "ddp": (0, "DDP replicates everything"),
    "hf": (0, "one replica per GPU"),
    "fsdp": (3, "FSDP's own default, FULL_SHARD"),
    "torchtitan": (3, "torchtitan shards over all data parallel ranks by default"),
    "deepspeed": (0, "DeepSpeed's own default"),
    "megatron": (1, "the published Megatron recipes use the distributed optimizer"),
}
_TRAIN_DEFAULTS = {
    "precision": "the usual choice since 2020: bf16 compute, fp32 master weights",
    "optimizer": "the usual choice for Transformers",
    "micro_batch": "searched: the largest that fits",
    "recompute": "off in every framework until asked for",
    "method": "all parameters are trained",
    "compile": "off in every framework until asked for",
    "offload": "off in every framework until asked for",
}
_DEGREES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}


def with_defaults(run: TrainRun) -> tuple[TrainRun, tuple[Default, ...]]:
    """The run with every unstated key filled that does not depend on the layout, and what was filled.

    Set afterwards: zero_stage, attention, sequence_parallel, reshard_after_forward; `lora` when the
    method uses it; `etp` when `tp` is a number. Left to the plan: dp, grad_accum, global_batch,
    seq_len of a model that needs one, and every value that is "auto".
    """
    said, chosen = run.model_fields_set, {}
    listed: list[Default] = []

    def choose(key: str, value: Any, why: str) -> None:
        chosen[key] = value
        listed.append(Default(f"run.{key}", value, why))

    for key, why in _TRAIN_DEFAULTS.items():
        if key not in said:
            choose(key, getattr(run, key), why)
    for key, words in _DEGREES.items():
        if key not in said and run.framework in _TRAIN_KEYS[key]:
            choose(key, 1, f"no {words} parallelism until asked for")
    if run.zero_stage is None:
        if run.reshard_after_forward is not None:
            chosen["zero_stage"] = 3 if run.reshard_after_forward else 2  # said in other words
        elif run.dp_shard is not None:
            chosen["zero_stage"] = 3 if run.framework != "megatron" else 1
        else:
            choose("zero_stage", *_DEFAULT_STAGE[run.framework])
    stage = chosen.get("zero_stage", run.zero_stage)
    shards = run.framework in _TRAIN_KEYS["reshard_after_forward"]
    if shards and run.reshard_after_forward is None and stage in (2, 3):
        chosen["reshard_after_forward"] = stage == 3
    if run.year is None:
        choose("year", THIS_YEAR, "today's releases; older ones hold more memory and run slower")
    year = run.year if run.year is not None else THIS_YEAR
    if run.clock_share is None:
        choose("clock_share", 1.0, "the GPUs hold the clocks they had in published runs, no power cap below")
    if run.input_samples_per_s is None:
        choose("input_samples_per_s", "enough", "the host loads the next step's samples in time")
    if run.attention is None:
        if run.flash_attention is not None:
            chosen["attention"] = "flash" if run.flash_attention else "eager"  # said in other words
        elif year < FUSED_ATTENTION_YEAR:
            choose("attention", "eager", f"releases before {FUSED_ATTENTION_YEAR} had no fused attention")
        elif run.framework in ("megatron", "torchtitan"):
            choose("attention", "flash", f"{run.framework} uses fused attention")
        else:
            choose("attention", "sdpa", "PyTorch's and Transformers' default")
    if run.fused_loss is None:
        attention = chosen.get("attention", run.attention)
        if run.framework == "megatron" and attention == "flash" and year >= 2024:
            choose("fused_loss", True, "the published Megatron-Core recipes fuse cross entropy")
        elif run.framework == "torchtitan" and run.compile and run.tp in (1, "auto") and year >= 2025:
            if run.tp == 1:  # of a searched tp, each degree has its own
                choose("fused_loss", True, "torchtitan compiles the loss with the model since April 2025")
        else:
            choose("fused_loss", False, f"off in {run.framework} until asked for")
    if run.tp == "auto" and "tp_across_nodes" not in said:
        choose("tp_across_nodes", False, "a searched tp stays inside an NVLink domain")
    if run.sequence_parallel is None:
        beside_tp = run.tp == "auto" or run.tp > 1
        if beside_tp and run.framework in ("megatron", "torchtitan"):
            choose("sequence_parallel", True, f"the published {run.framework} recipes use it with tp")
        elif beside_tp:
            choose("sequence_parallel", False, f"off in {run.framework} until asked for")
        else:
            chosen["sequence_parallel"] = False  # means nothing without tp
    if run.etp is None and run.ep != 1 and run.tp != "auto" and run.framework == "megatron":
        choose("etp", run.tp, "Megatron's own default: experts are divided like the rest")
    elif run.etp is None and run.tp != "auto":
        chosen["etp"] = 1
    if run.moe_dispatcher is None and run.ep != 1:
        choose("moe_dispatcher", "alltoall", "the default of every framework until asked for DeepEP")
    if run.expert_imbalance is None and run.ep != 1:
        choose("expert_imbalance", 1.0, "the router spreads tokens evenly, as training drives it to")
    if run.method != "full" and run.lora is None:
        choose("lora", Lora(), "PEFT's usual choice: rank 16 on every linear layer")
    if run.method == "qlora" and run.quantization is None:
        choose("quantization", "nf4", "the QLoRA paper's format")
    if run.method == "qlora" or run.quantization is not None:
        _quantised_base(run, stage, chosen, choose)
    _loading(run, stage, year, chosen, choose, listed)
    return run.model_copy(update=chosen), tuple(listed)


def _quantised_base(run: TrainRun, stage: Any, chosen: dict[str, Any], choose: _Choose) -> None:
    """What stacks do with the frozen weights of a quantised model."""
    if run.shard_quantised is None:
        if run.framework == "deepspeed" and stage == 3:
            choose("shard_quantised", False, "DeepSpeed's stages do not divide bitsandbytes weights")
        else:
            chosen["shard_quantised"] = run.framework != "deepspeed"  # FSDP does, where it shards at all
    if run.upcast_frozen is None:
        # Where peft prepares the model; FSDP needs one element type for all and takes 16 bit.
        prepared = (
            run.framework in ("hf", "ddp", "deepspeed")
            and run.quantization != "int4-gptq"
            and not run.precision.endswith("-pure")  # everything in 16 bit, as LitGPT and torchtune do
        )
        if prepared:
            choose("upcast_frozen", True, "peft's prepare_model_for_kbit_training holds them in fp32")
        else:
            chosen["upcast_frozen"] = False


def default_loaded_as(run: TrainRun, stage: Any = None) -> str:
    """The element type weights are read in where the run does not say."""
    stage = run.zero_stage if stage is None else stage
    if run.method != "full" or run.precision.endswith("-pure") or run.framework == "megatron":
        return "16-bit"
    if run.framework == "deepspeed":  # partitioned as they are made, or split by Megatron
        return "16-bit" if stage == 3 or run.tp != 1 or run.pp != 1 else "fp32"
    return "fp32"


def _loading(
    run: TrainRun,
    stage: Any,
    year: int,
    chosen: dict[str, Any],
    choose: _Choose,
    listed: list[Default],
) -> None:
    """In which type weights are read, and how many copies of them a host holds meanwhile."""
    if run.loaded_as is None and run.framework == "deepspeed" and default_loaded_as(run, stage) == "fp32":
        # Listed, not filled in: a plan that only this makes too large is marginal.
        why = "trainers upcast what is trained before DeepSpeed casts it again"
        listed.append(Default("run.loaded_as", "fp32", why))
    if run.host_load is None:
        if run.framework in ("megatron", "torchtitan"):
            chosen["host_load"] = "none"
        elif run.framework == "fsdp" and year >= 2024:
            choose("host_load", "one-rank", "Accelerate loads on one rank and broadcasts since 2024")
        elif run.framework == "deepspeed" and stage == 3 and year >= 2024:
            choose("host_load", "one-rank", "Transformers reads on one rank under stage 3 since 2024")
        elif run.quantization is not None or run.method == "qlora":
            chosen["host_load"] = "none"  # quantised on the GPU, tensor by tensor
        else:
            choose("host_load", "every-rank", "from_pretrained runs on every rank")
