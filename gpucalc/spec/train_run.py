"""A training run: its keys, and which of their values contradict each other.

What nobody said is left unset here; `gpucalc.spec.defaults` fills it in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from gpucalc.spec.base import Spec, refuse
from gpucalc.spec.run_keys import STAGES, TRAIN_KEYS, belongs
from gpucalc.spec.run_values import (
    ATTENTION,
    CUDA_GRAPH_NAMES,
    CUDA_GRAPHS,
    FLOAT_NAMES,
    FREEZABLE,
    HOST_LOAD,
    LOADED_AS,
    LOSS_DTYPES,
    MAX_BATCH,
    MAX_TOKENS,
    METHODS,
    OFFLOAD,
    OFFLOAD_NAMES,
    OPTIMIZER_NAMES,
    OPTIMIZERS,
    PRECISION_NAMES,
    PRECISIONS,
    QUANTIZATION_NAMES,
    QUANTIZATIONS,
    RECOMPUTE,
    RECOMPUTE_MODULE_NAMES,
    RECOMPUTE_MODULES,
    RECOMPUTE_NAMES,
    SCHEDULE_NAMES,
    SCHEDULES,
    TRAIN_FRAMEWORKS,
    Auto,
    Batch,
    Degree,
    Flag,
    Listed,
    Tokens,
    ZeroStage,
    named,
    real,
    whole,
)


class Lora(Spec):
    """Low-rank adapters on a frozen base."""

    rank: Annotated[int, whole(65_536)] = 16
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    alpha: Annotated[float, real(0, 1e6, "a positive number")] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    dtype: Annotated[Literal["fp32", "bf16"], named(("fp32", "bf16"), FLOAT_NAMES)] | None = Field(
        default=None,
        description="unset: fp32, as PEFT holds them; 16 bit under DeepSpeed, Megatron and -pure precisions",
    )
    train_embeddings: Flag = False
    trainable: Annotated[int, whole(10**13)] | None = Field(
        default=None,
        description="trainable parameters where known; overrides the count from rank and targets",
    )
    kind: Literal["lora", "dora", "adapter", "adapter_v2"] = "lora"


class TrainRun(Spec):
    """One training run. Unset keys are filled by `with_defaults`."""

    task: Literal["train"] = "train"
    framework: Annotated[
        Literal["ddp", "fsdp", "deepspeed", "megatron", "torchtitan", "hf"], named(TRAIN_FRAMEWORKS)
    ]
    precision: Annotated[str, named(PRECISIONS, PRECISION_NAMES)] = Field(
        default="bf16", description="mixed with fp32 master weights, unless -pure"
    )
    optimizer: Annotated[str, named(OPTIMIZERS, OPTIMIZER_NAMES)] = "adamw"
    seq_len: Tokens | None = Field(
        default=None, description="tokens per sequence; models of images have none"
    )
    micro_batch: Batch = Field(default="auto", description="sequences per GPU and forward pass")
    global_batch: Batch | None = Field(default=None, description="sequences per optimizer step")
    grad_accum: Annotated[int, whole(MAX_BATCH)] | None = Field(
        default=None, description="micro-batches per step"
    )
    tp: Degree = Field(default=1, description="tensor parallel ranks")
    tp_across_nodes: Flag = Field(
        default=False, description="a searched tp may span several NVLink domains; a given one may always"
    )
    pp: Degree = Field(default=1, description="pipeline stages")
    vpp: Degree = Field(default=1, description="virtual stages per pipeline rank (interleaved schedule)")
    schedule: Annotated[str, named((*SCHEDULES, "auto"), SCHEDULE_NAMES)] | None = Field(
        default=None,
        description="order of a pipeline's work: vpp > 1 interleaves 1f1b; zero-bubble is ZB-H1;"
        " dualpipe holds two stages on every rank, from both ends of the model",
    )
    pipeline_split: Literal["even", "uneven"] = Field(
        default="even",
        description="uneven: stages may hold different numbers of layers, the ends fewer, as embedding and"
        " output layer count as one each; DeepSpeed else gives its first stages one more",
    )
    cp: Degree = Field(default=1, description="context parallel ranks")
    ep: Degree = Field(default=1, description="expert parallel ranks")
    etp: Degree | None = Field(default=None, description="tensor parallel ranks inside an expert")
    dp: Degree | None = Field(default=None, description="data parallel ranks; what tp, pp and cp leave")
    dp_shard: Degree | None = Field(
        default=None, description="data parallel ranks that share one sharded copy (hybrid sharding)"
    )
    zero_stage: ZeroStage = Field(
        default=None, description="0 replicated, 1 optimizer, 2 + gradients, 3 + parameters sharded"
    )
    sequence_parallel: Flag | Auto | None = None
    recompute: Annotated[str, named((*RECOMPUTE, "auto"), RECOMPUTE_NAMES)] = "none"
    recompute_modules: (
        Annotated[tuple[Annotated[str, named(RECOMPUTE_MODULES, RECOMPUTE_MODULE_NAMES)], ...], Listed] | None
    ) = Field(
        default=None,
        description="parts of a layer that Megatron's selective recomputation makes again; unset: core_attn",
    )
    cuda_graphs: (
        Annotated[tuple[Annotated[str, named(CUDA_GRAPHS, CUDA_GRAPH_NAMES)], ...], Listed] | None
    ) = Field(
        default=None,
        description="what the GPU replays without its host: full, all of a step; or parts of a layer, as"
        " Megatron-Core names them: attn, mamba, mlp, moe_router, moe_preprocess, moe (of padded experts)",
    )
    attention: Annotated[str, named(ATTENTION)] | None = Field(
        default=None,
        description="flash-1: kernels before FlashAttention-2 of July 2023, Triton's too",
    )
    flash_attention: Flag | None = Field(
        default=None, description="true: attention flash, false: attention eager"
    )
    loss_dtype: Annotated[Literal["fp32", "16-bit"], named(LOSS_DTYPES)] = Field(
        default="fp32",
        description="type an unfused loss is taken in: 16-bit where nothing upcasts the logits",
    )
    fused_loss: Flag | None = Field(
        default=None, description="the loss never holds fp32 logits (Liger, chunked, compiled)"
    )
    loss_chunks: Annotated[int, whole(1024)] = Field(
        default=1, description="pieces of the sequence whose loss is compiled one by one (torchtune: 8)"
    )
    fused_kernels: Flag = Field(
        default=False, description="norms, rotary and gated MLP in one kernel each (Liger, Apex)"
    )
    fused_norms: Flag | None = Field(
        default=None,
        description="RMS norms keep their input alone, as one kernel does, where the rest is written out;"
        " unset: in torchtitan since PyTorch 2.9, whose own norms are fused",
    )
    fused_qkv: Flag = Field(
        default=False,
        description="one matrix gives queries, keys and values whatever the model's own code does (LitGPT)",
    )
    compile: Flag = Field(default=False, description="torch.compile")
    overlap: Flag = Field(default=True, description="false: no communication runs beside computation")
    tp_overlap: Flag | None = Field(
        default=None,
        description="gathers and scatters of sequence parallelism run beside the products they feed"
        " (TransformerEngine's user buffers, asynchronous tensor parallelism)",
    )
    ep_overlap: Flag = Field(
        default=False,
        description="tokens travel to experts beside another micro-batch's computation (Megatron's 1F1B"
        " overlap)",
    )
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
    offload: Annotated[str, named((*OFFLOAD, "auto"), OFFLOAD_NAMES)] = "none"
    nvme_gb_per_s: Annotated[float, real(0, 1e6, "gigabytes a second above 0")] | None = Field(
        default=None, description="what the NVMe drives of one node read or write together; unset: 25.6"
    )
    method: Annotated[Literal["full", "lora", "qlora"], named(METHODS)] = "full"
    quantization: Annotated[str, named(QUANTIZATIONS, QUANTIZATION_NAMES)] | None = Field(
        default=None, description="of the frozen base"
    )
    quantization_block: Annotated[int, whole(4096)] | None = Field(
        default=None, description="weights that share a scale in NF4; unset: 64, as bitsandbytes and torchao"
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
    frozen: tuple[Annotated[str, named(FREEZABLE)], ...] = Field(
        default=(), description="parts of the model that are not trained"
    )
    reference_model: Flag = Field(
        default=False,
        description="a frozen 16-bit copy beside the trained model (DPO, RLHF); a chosen and a rejected"
        " answer are two sequences of the micro-batch",
    )
    reward_models: Annotated[int, whole(16, least=0)] = Field(
        default=0,
        description="frozen 16-bit models of the trained one's size that score its answers (PPO, GRPO)",
    )
    ema: Flag = Field(default=False, description="a moving average of the trained weights beside them (EMA)")
    reduce_bucket_size: Annotated[int | Auto, whole(10**12, auto=True)] | None = Field(
        default=None,
        description="elements of DeepSpeed's gradient bucket, 5e8 when unset; auto: hidden squared, as"
        " Transformers fills it in",
    )
    overlap_comm: Flag | None = Field(
        default=None, description="DeepSpeed stages 1 and 2 reduce one bucket while they fill another"
    )
    max_live_parameters: Annotated[int, whole(10**12)] | None = Field(
        default=None, description="parameters DeepSpeed's stage 3 gathers at most, 1e9 when unset"
    )
    sub_group_size: Annotated[int, whole(10**15)] | None = Field(
        default=None, description="parameters DeepSpeed's stage 3 steps at a time, 1e9 when unset"
    )
    zero_init: Flag | None = Field(
        default=None,
        description="DeepSpeed's stage 3 divides weights as they are made (zero.Init); false: every GPU takes"
        " the whole model first",
    )
    loaded_as: Annotated[str, named(LOADED_AS)] | None = Field(
        default=None, description="element type of trained weights before the engine casts them"
    )
    host_load: Annotated[str, named(HOST_LOAD)] | None = Field(
        default=None, description="which ranks of a node hold a whole copy of the weights in host memory"
    )
    host_ram_gb: Annotated[float, real(0, 1e6, "gigabytes above 0")] | None = Field(
        default=None, description="host memory of one node; unset: the server's, where it is known"
    )
    memory_in_use_gib: Annotated[float, real(0, 1e6, "GiB above 0")] | None = Field(
        default=None, description="memory the display and other processes hold on each card"
    )
    tokens: Annotated[int, whole(MAX_TOKENS, worded=True)] | None = Field(
        default=None, description="training budget; may end in k, M, B or T: 15T"
    )
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
        belongs(key, value, framework, TRAIN_KEYS)
        problem = _TRAIN_RULES[key](value, given) if value is not None and key in _TRAIN_RULES else None
        if problem:
            raise refuse(problem[0], legal=problem[1])
        return value

    @classmethod
    def explain_unknown(cls, key: str) -> str | None:
        """Why a key that is unknown here may have been meant."""
        from gpucalc.spec.serve_run import ServeRun  # error path only: each kind of run knows the other

        return "is a key of serving runs, not of training" if key in ServeRun.model_fields else None


_Rule = Callable[[Any, Mapping[str, Any]], tuple[str, str] | None]


def _stage_rule(value: Any, given: Mapping[str, Any]) -> tuple[str, str] | None:
    framework = given.get("framework")
    if framework is None or value == "auto" or value in STAGES[framework]:
        return None
    return f"{framework} has no such sharding stage", ", ".join(map(str, STAGES[framework]))


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
    if value == "activations-cpu" and set(given.get("cuda_graphs") or ()) - {"none"}:
        return "does not go with cuda_graphs", "cuda_graphs: none, or another offload"
    if value.startswith("params") and framework == "ddp":
        return "does not apply to ddp, which keeps every parameter on every GPU", "none, optimizer-cpu"
    return None


def _modules_rule(_: Any, given: Mapping[str, Any]) -> tuple[str, str] | None:
    if given.get("recompute", "none") in ("selective", "auto"):
        return None
    return "names parts of a selective recomputation", "with recompute: selective"


def _graphs_rule(value: Any, given: Mapping[str, Any]) -> tuple[str, str] | None:
    """What Megatron-Core's TransformerConfig refuses (megatron/core/transformer/transformer_config.py)."""
    if len(value) > 1 and {"none", "full"} & set(value):
        return "names all or nothing beside parts", "none, full, or modules of a layer"
    if "moe_preprocess" in value and "moe_router" not in value:
        return "moe_preprocess is captured with moe_router", "moe_router and moe_preprocess"
    if "moe" in value and "moe_router" in value:
        return "moe_router is a part of moe", "one of the two"
    if set(value) & {"none", "full"} or not value:
        return None
    if given.get("recompute") == "full":
        return "parts of a layer cannot be captured where whole layers are recomputed", "full, none"
    if "moe_router" in value and "moe" in (given.get("recompute_modules") or ()):
        return "a captured router is not recomputed", "without moe in recompute_modules"
    return None


def _quantization_rule(_: Any, given: Mapping[str, Any]) -> tuple[str, str] | None:
    if given.get("method", "full") != "full":
        return None
    return "a quantised base cannot be trained in full", "with method lora or qlora"


def _block_rule(_: Any, given: Mapping[str, Any]) -> tuple[str, str] | None:
    if given.get("method", "full") == "full":
        return "a quantised base cannot be trained in full", "with method lora or qlora"
    if given.get("quantization") in ("nf4", "nf4-double", None):
        return None
    return f"does not apply to quantization: {given['quantization']}", "with quantization nf4 or nf4-double"


def _lora_rule(_: Any, given: Mapping[str, Any]) -> tuple[str, str] | None:
    return ("needs a method that uses it", "method lora or qlora") if given.get("method") == "full" else None


def _fp8_rule(value: Any, given: Mapping[str, Any]) -> tuple[str, str] | None:
    if not value or given.get("precision") in (None, "fp8", "mxfp8"):
        return None
    return f"contradicts precision: {given['precision']}", "with precision fp8 or mxfp8"


def _nvme_rule(_: Any, given: Mapping[str, Any]) -> tuple[str, str] | None:
    if given.get("offload") == "auto" or str(given.get("offload")).endswith("nvme"):
        return None
    return "nothing is offloaded to NVMe", "with offload optimizer-nvme, params+optimizer-nvme or auto"


_TRAIN_RULES: dict[str, _Rule] = {
    "fp8_params": _fp8_rule,
    "zero_stage": _stage_rule,
    "flash_attention": _flash_rule,
    "reshard_after_forward": _reshard_rule,
    "offload": _offload_rule,
    "nvme_gb_per_s": _nvme_rule,
    "quantization": _quantization_rule,
    "quantization_block": _block_rule,
    "recompute_modules": _modules_rule,
    "cuda_graphs": _graphs_rule,
    "lora": _lora_rule,
}
