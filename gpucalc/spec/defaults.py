"""What a training run takes for keys nobody stated, and why.

Every value chosen is returned with its reason, so that each can be printed and set by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpucalc.spec.run_keys import TRAIN_KEYS
from gpucalc.spec.train_run import Lora, TrainRun

THIS_YEAR = 2026  # the releases a run is taken to use when nobody says
NVME_GB_PER_S = 25.6  # of a node's drives together, when nobody says
FUSED_ATTENTION_YEAR = 2023  # PyTorch 2.0, Megatron-LM and Transformers gained fused attention

_Choose = Callable[[str, Any, str], None]


@dataclass(frozen=True, slots=True)
class Default:
    """A value nobody stated: the dotted key that sets it, the value taken and why."""

    key: str
    value: Any
    why: str


STAGE_KEYS = ("host_load", "shard_quantised")  # whose defaults hang on the sharding stage
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


def year_of(run: TrainRun) -> int:
    """The year of a run's software."""
    return run.year if run.year is not None else THIS_YEAR


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
        if key not in said and run.framework in TRAIN_KEYS[key]:
            choose(key, 1, f"no {words} parallelism until asked for")
    if run.zero_stage is None:
        if run.reshard_after_forward is not None:
            chosen["zero_stage"] = 3 if run.reshard_after_forward else 2  # said in other words
        elif run.dp_shard is not None:
            chosen["zero_stage"] = 3 if run.framework != "megatron" else 1
        else:
            choose("zero_stage", *_DEFAULT_STAGE[run.framework])
    stage = chosen.get("zero_stage", run.zero_stage)
    shards = run.framework in TRAIN_KEYS["reshard_after_forward"]
    if shards and run.reshard_after_forward is None and stage in (2, 3):
        chosen["reshard_after_forward"] = stage == 3
    if run.year is None:
        choose("year", THIS_YEAR, "today's releases; older ones hold more memory and run slower")
    year = year_of(run)
    if run.clock_share is None:
        choose("clock_share", 1.0, "the GPUs hold the clocks they had in published runs, no power cap below")
    if run.nvme_gb_per_s is None and run.offload.endswith("nvme"):
        why = "ZeRO-Infinity's DGX-2 of 16 drives; one PCIe 4.0 drive reads about 7"
        choose("nvme_gb_per_s", NVME_GB_PER_S, why)
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
    if run.cuda_graphs is None and run.framework in TRAIN_KEYS["cuda_graphs"]:
        choose("cuda_graphs", ("none",), "off in Megatron-Core until asked for")
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


def stage_defaults(run: TrainRun) -> tuple[TrainRun, tuple[Default, ...]]:
    """A run whose sharding stage was left open, with what follows from the stage it was given."""
    chosen: dict[str, Any] = {}
    listed: list[Default] = []

    def choose(key: str, value: Any, why: str) -> None:
        chosen[key] = value
        listed.append(Default(f"run.{key}", value, why))

    if run.quantization is not None:
        _quantised_base(run, run.zero_stage, chosen, choose)
    _loading(run, run.zero_stage, year_of(run), chosen, choose, listed)
    found = {key: value for key, value in chosen.items() if key in STAGE_KEYS}
    return run.model_copy(update=found), tuple(d for d in listed if d.key.removeprefix("run.") in found)


def _quantised_base(run: TrainRun, stage: Any, chosen: dict[str, Any], choose: _Choose) -> None:
    """What stacks do with the frozen weights of a quantised model."""
    if run.shard_quantised is None and stage != "auto":
        if run.framework == "deepspeed" and stage == 3:
            choose("shard_quantised", False, "DeepSpeed's stages do not divide bitsandbytes weights")
        elif run.framework in ("fsdp", "torchtitan") and stage == 3:
            choose("shard_quantised", True, "FSDP divides a quantised base like any other weight")
        else:
            chosen["shard_quantised"] = run.framework != "deepspeed"
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
    if run.zero_init is None and run.framework == "deepspeed" and stage == 3:
        choose("zero_init", True, "Transformers' Trainer builds models under zero.Init at stage 3")
    if run.host_load is None and not (run.framework == "deepspeed" and stage == "auto"):
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
