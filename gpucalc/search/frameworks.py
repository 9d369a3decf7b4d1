"""What each training framework can be told of a layout, since when, and what it refuses together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpucalc.graph import Attention, Graph, Mlp, Moe
from gpucalc.spec.train_run import TrainRun

# What each framework can be told, the usual first.
ZERO_STAGES = {
    "deepspeed": (0, 1, 2, 3), "megatron": (0, 1, 2, 3), "fsdp": (0, 2, 3), "torchtitan": (0, 2, 3),
}  # fmt: skip
RECOMPUTE = {
    "megatron": ("none", "selective", "full"),
    "torchtitan": ("none", "selective-op", "selective-layer", "full"),
}
OFFLOAD = {
    "ddp": ("none", "activations-cpu"),
    "hf": ("none", "activations-cpu"),
    "fsdp": ("none", "params+optimizer-cpu", "activations-cpu"),
    "torchtitan": ("none", "params+optimizer-cpu"),
    "deepspeed": (
        "none", "optimizer-cpu", "optimizer+gradients-cpu", "params+optimizer-cpu", "optimizer-nvme",
        "params+optimizer-nvme",
    ),
    "megatron": ("none", "optimizer-cpu", "activations-cpu"),
}  # fmt: skip
# torchao's CPUOffloadOptimizer, "for single-GPU training", which frees gradients where none are accumulated.
OFFLOAD_ALONE = ("optimizer-cpu", "optimizer+gradients-cpu")
# Megatron-FSDP, which divides gradients and weights as well, has these optimizers.
MEGATRON_FSDP = ("adam", "adamw", "adamw-fused", "adamw-unfused", "sgd", "sgd-momentum")
# PyTorch's schedules, which torchtitan runs, split backward; Megatron-Core and DeepSpeed do not. GPipe holds
# more than 1F1B and waits as long, so it is never better.
SCHEDULES = {"torchtitan": ("1f1b", "zero-bubble", "dualpipe-v")}


# The year from whose releases on a framework has something; a run of older software does without. Release
# notes of Megatron-LM and Megatron-Core (interleaving April 2021; sequence parallelism, selective
# recomputation and the distributed optimizer 2022; offloaded activations with TransformerEngine 2023;
# context and expert parallelism in Core 0.5, 2024; their own tp for experts in 0.10, December 2024; an
# offloaded optimizer, its own FSDP and copies of the distributed optimizer in 0.11, 2025), of torchtitan
# (context parallelism and zero bubble end of 2024, experts and DualPipeV 2025) and of PyTorch 2.0 (hybrid
# sharding, 2023).
_SINCE = {
    ("megatron", "vpp"): 2021,
    ("megatron", "sequence_parallel"): 2022,
    ("megatron", "selective"): 2022,
    ("megatron", "zero_stage"): 2022,
    ("megatron", "activations-cpu"): 2023,
    ("megatron", "cp"): 2024,
    ("megatron", "ep"): 2024,
    ("megatron", "etp"): 2025,
    ("megatron", "optimizer-cpu"): 2025,
    ("megatron", "fsdp"): 2025,
    ("megatron", "modules"): 2025,
    ("megatron", "dp_shard"): 2025,
    ("fsdp", "dp_shard"): 2023,
    ("torchtitan", "cp"): 2025,
    ("torchtitan", "zero-bubble"): 2025,
    ("torchtitan", "ep"): 2025,
    ("torchtitan", "dualpipe-v"): 2026,
}


@dataclass(frozen=True, slots=True)
class Structure:
    """What decides which tensors and operations there are."""

    pp: int
    zero_stage: Any
    schedule: str | None
    recompute: str
    offload: str
    modules: tuple[str, ...] | None = None  # of a selective recomputation; None: the run's own


def knows(framework: str, what: str, year: int) -> bool:
    """Whether the releases of a year have it."""
    return year >= _SINCE.get((framework, what), 0)


def module_sets(run: TrainRun, graph: Graph) -> tuple[tuple[str, ...], ...]:
    """Modules of Megatron-Core's selective recomputation: what costs next to nothing, and all there are.

    Norms, activations and the maps from latents are made again in a few percent of the time; a feed-forward
    part in about half of that of the whole layer. Attention's scores are among them where a kernel keeps
    them: with a fused one there is nothing to free, as TransformerConfig warns.
    """
    blocks = [block for stack in graph.stacks for block in stack.blocks]
    moe = any(isinstance(block.ffn, Moe) for block in blocks)
    dense = any(isinstance(block.ffn, Mlp) for block in blocks)
    latent = any(isinstance(b.mixer, Attention) and b.mixer.kv_lora is not None for b in blocks)
    every = (["core_attn"] if run.attention == "eager" else []) + ["layernorm"]
    every += ["mla_up_proj"] if latent else []
    cheap = (*every, *(["moe_act"] if moe else []))
    # Tokens that travel to experts beside another micro-batch cannot be sent again, nor a captured router.
    fixed = run.ep_overlap or "moe_router" in (run.cuda_graphs or ())
    whole = ["moe"] if moe and not fixed else ["moe_act"] if moe else []
    most = (*every, *(["mlp"] if dense else []), *whole)
    return (cheap,) if cheap == most else (cheap, most)


def clash(run: TrainRun, one: Structure) -> tuple[str, ...]:
    """The keys of a structure that a framework refuses together; none where it takes them.

    DeepSpeed: a pipeline engine asserts stages below 2; an offloaded optimizer needs stage 1 and takes the
    gradients along from stage 2 on, offloaded parameters and NVMe need stage 3. Megatron-Core's
    TransformerConfig refuses offloaded activations with a pipeline, with recomputation or with CUDA graphs,
    and full recomputation with graphs of parts of a layer; its optimizer is offloaded by the distributed
    optimizer alone. What its FSDP divides is published without a pipeline, with offloaded activations
    (Megatron-Bridge's Llama 3 70B) and without graphs, whose addresses its allocator does not keep
    (docs/user-guide/features/megatron_fsdp.md, double buffering). PyTorch's FSDP offloads what it divides.
    """
    framework, graphs = run.framework, set(run.cuda_graphs or ()) - {"none"}
    sharded = one.zero_stage if isinstance(one.zero_stage, int) else 0
    if framework == "deepspeed":
        if one.pp > 1 and sharded > 1:
            return ("pp", "zero_stage")
        if (one.offload.startswith("params") or one.offload.endswith("nvme")) and sharded < 3:
            return ("zero_stage", "offload")
        if one.offload == "optimizer-cpu" and sharded != 1:
            return ("zero_stage", "offload")
        if one.offload == "optimizer+gradients-cpu" and sharded < 2:
            return ("zero_stage", "offload")
    if framework in ("fsdp", "torchtitan"):
        if one.offload.startswith("params") and sharded < 2:
            return ("zero_stage", "offload")
        if framework == "torchtitan" and one.pp > 1 and sharded < 2:
            return ("pp", "zero_stage")
    if framework == "megatron":
        if sharded > 1 and one.pp > 1:
            return ("pp", "zero_stage")
        if sharded > 1 and one.offload == "optimizer-cpu":
            return ("zero_stage", "offload")
        if sharded > 1 and graphs:
            return ("zero_stage",)
        if one.offload == "activations-cpu" and one.pp > 1:
            return ("pp", "offload")
        if one.offload == "activations-cpu" and one.recompute != "none":
            return ("recompute", "offload")
        if one.offload == "activations-cpu" and graphs:
            return ("offload",)
        if one.recompute == "full" and graphs - {"full"}:
            return ("recompute",)
        if one.offload == "optimizer-cpu" and sharded < 1:
            return ("zero_stage", "offload")
    if one.schedule not in (None, "1f1b") and one.pp == 1:
        return ("schedule",)
    return ()
