"""Rates of a step that are neither a kernel's nor a link's: overlap, contention, host time, passes."""

from __future__ import annotations

from gpucalc.line import Kind, Line
from gpucalc.spec.defaults import NVME_GB_PER_S
from gpucalc.units import GB

_STREAMS = "design of the framework: gathers and reductions run on streams of their own"
ABOVE = "one micro-batch of the slowest stage: the sum of this step's other lines"
_RUNS = "fitted to the published training runs, groups of equal weight"
_SET = "set, and checked on the published training runs"
# Each constant was sought again with every source left out in turn (mean |log error|, sources of equal
# weight). The optimum stays for the efficiencies inside a step on A100 (0.82) and on B200 in fp8 (0.8), the
# direct share (0.65), host calls of experts (280) and GPTQ's unpacking. It lies at 0.65 to 0.7 on H100,
# 0.95 to 1.0 on V100, 0.7 to 0.85 on GB200 and GB300, 0.65 to 0.82 on Ada, 0.5 to 0.55 for portable
# attention and 5 to 6 image bytes a clock, whichever source is missing; the values here are in or next to
# these ranges. V100's launch (4.5 to 6 us), the calls per tensor (0 to 40) and eager calls per layer (120
# to 200) lean on Transformers' BERT runs, whose median error is 0.3 when they are left out. One source
# alone knows B200 in 16 bits (0.52 without it), MI300X, the first FlashAttention, experts' biases, state
# mixers and DeepSpeed's hooks.


def _known(name: str, value: float, unit: str, source: str, kind: Kind = Kind.MODELLED) -> Line:
    return Line(name, value, unit, kind, source=source)


# Share of the computation beside which a framework runs its data-parallel communication.
OVERLAP = {
    framework: _known("overlap", share, "fraction", _STREAMS)
    for framework, share in {
        "ddp": 0.9,
        "hf": 0.9,
        "fsdp": 1.0,
        "torchtitan": 1.0,
        "megatron": 0.9,
        "deepspeed": 0.7,
    }.items()
}
NO_OVERLAP = _known("overlap", 0.0, "fraction", "run.overlap false: every collective is waited for")
RING_OVERLAP = _known(
    "overlap", 1.0, "fraction", "ring attention sends the next block beside the current one"
)
# Share of the exchange of tokens that finds another micro-batch's layer to run beside.
EXCHANGE_PAIRED = _known(
    "paired_share",
    0.8,
    "fraction",
    "NVIDIA-NeMo/Megatron-Bridge@v0.6.0:skills/nemo-mbridge-perf-expert-parallel-overlap, Qwen3 30B on 16"
    " H100 with and without: 24.71 and 20.99 s are 0.76; its recipes of 26.06 lie at 0.4 to 1",
)
# Share of hidden communication that still shows, as multiprocessors and memory bandwidth it takes away.
CONTENTION = _known(
    "contention",
    0.25,
    "fraction",
    f"{_SET}; NCCL takes 16 to 32 of an H100's 132 multiprocessors",
)
NETWORK_CONTENTION = _known(
    "contention", 0.05, "fraction", f"{_SET}: 0 to 0.1 do as well; over a network NCCL opens fewer channels"
)
COPY_CONTENTION = _known("contention", 0.0, "fraction", "copy engines take no multiprocessor")
# Share of sequence-parallel gathers and scatters that runs beside the products they feed.
TENSOR_HIDDEN = _known(
    "hidden_share", 0.75, "fraction", f"{_SET}: TransformerEngine's chunked overlap, in recipes from 2024 on"
)
ASYNC_HIDDEN = _known(
    "hidden_share",
    0.45,
    "fraction",
    "fitted to torchtitan's pairs of runs with and without asynchronous tensor parallelism: 0.15 to 0.5",
)
TENSOR_EXPOSED = _known("hidden_share", 0.0, "fraction", "gathers and scatters wait for one another")
HOST_BANDWIDTH = _known(
    "host_memory_bandwidth",
    250e9,
    "bytes/s",
    "two sockets of eight DDR4 or DDR5 channels, what an optimizer step reaches of them",
    Kind.ASSUMED,
)
NVME_BANDWIDTH = _known(
    "nvme_bandwidth",
    NVME_GB_PER_S * GB,
    "bytes/s",
    "Rajbhandari et al. 2021 (ZeRO-Infinity): a DGX-2's 16 drives give each of 16 GPUs 1.6 GB/s",
    Kind.ASSUMED,
)
MASTER_GRADIENT_BYTES = 4  # DeepSpeed's optimizer on the host steps fp32 gradients
DEFAULT_PCIE_GENERATION = 4
# Winograd and FFT convolutions multiply less than the direct form counts; tensor cores run the direct form.
DIRECT_SHARE = _known("direct_share", 0.68, "fraction", f"{_RUNS}: fp32 convolutions on V100")
WHOLE_SHARE = _known("direct_share", 1.0, "fraction", "tensor-core convolutions take the direct form")
# Passes of the optimizer over its states: for-each kernels read and write them several times. Fitted to
# runs on small batches; 1 without NVIDIA's examples, 4 without DeepSpeed's.
OPTIMIZER_PASSES = {"eager": 1.75, "compiled": 1.75, "fused": 1.0}
# Host time of the update of one tensor, in units of a kernel launch: kernels, casts, unscaling and clipping.
FOREACH_YEAR = 2023
TENSOR_CALLS = {
    "adamw": 20, "adamw-unfused": 20, "adam": 20, "adafactor": 40, "adamw-8bit": 12,
    "sgd-momentum": 8, "sgd": 6,
}  # fmt: skip
# DeepSpeed's Python hooks per tensor, in kernel launches; set to Qwen's stage 3 runs at 256 to 1,024 tokens,
# whose steps take the same time whatever their length. Only the sum of the two is seen in them.
GRADIENT_HOOK_CALLS = 40
WEIGHT_HOOK_CALLS = 40
# What one multiprocessor moves per clock in image networks' elementwise kernels.
IMAGE_BYTES_PER_CLOCK = _known(
    "bytes_per_clock",
    6.0,
    "bytes",
    f"{_RUNS}: on image networks A100 and H100 gain less over V100 and RTX 3090 than their memory does",
)
# Tensor cores read channels last: cuDNN copies both tensors of a 16-bit product that lie otherwise, in and
# out, which are half of what backward keeps (the other half are inputs of norms).
CONTIGUOUS_PASSES = 2
# Image networks: passes over the tensors of the layers that multiply nothing, backward to forward.
NETWORK_BACKWARD = 2.0
