"""What lies outside the tensors: facts about the runtime that memory plans add as lines of their own.

Each is a leaf line with the evidence it rests on; none is hidden inside another term.
"""

from __future__ import annotations

from gpucalc.line import Kind, Line
from gpucalc.units import GIB, MIB

# What the caching allocator reserves beyond what tensors use, for tensors that stay and for those that come
# and go. Fitted on published peaks where reserved or device memory was read: six sources (torchtitan,
# torchao, transformers' guide, InternEvo, Qwen, BLOOM logs) with equal weight; whichever is left out, the
# other five choose the same constants. They give 0.02 to 0.04 for what stays within a tenth of each other;
# public reports of runs that ran out speak for the most. Megatron's are SimuMax's pairs of both meters.
LASTING_OVERHEAD = Line(
    "lasting_fraction",
    0.04,
    "fraction",
    Kind.MODELLED,
    source="fitted with passing_fraction on published reserved and device peaks of six sources",
)
REGULAR_LASTING_OVERHEAD = Line(
    "lasting_fraction",
    0.05,
    "fraction",
    Kind.MODELLED,
    source="Megatron: SimuMax's nine pairs of allocated and reserved memory on B200",
)
REGULAR_PASSING_OVERHEAD = Line(
    "passing_fraction",
    0.14,
    "fraction",
    Kind.MODELLED,
    source="Megatron's equal micro-batches: SimuMax's nine pairs of allocated and reserved memory on B200",
)
PASSING_OVERHEAD = Line(
    "passing_fraction",
    0.25,
    "fraction",
    Kind.MODELLED,
    source="fitted with lasting_fraction on published reserved and device peaks of six sources",
)
LARGE_BYTES = Line(
    "large_bytes",
    40 * GIB,
    "bytes",
    Kind.MODELLED,
    source="fitted with passing_fraction on published reserved and device peaks of six sources",
)
LARGE_OVERHEAD = Line(
    "large_fraction",
    0.05,
    "fraction",
    Kind.MODELLED,
    source="fitted with passing_fraction on published reserved and device peaks of six sources",
)

# The process's CUDA context and loaded kernels; lazy loading has been the default since CUDA 11.7.
CUDA_CONTEXT = Line(
    "cuda_context_bytes",
    512 * MIB,
    "bytes",
    Kind.ASSUMED,
    source="pytorch issues 107667, 28394, 20532: 0.3 to 0.6 GiB with lazy loading; unsloth-zoo pull 1053,"
    " RTX 6000 Ada and CUDA 13: 426 MiB for a bare context",
)

# With every kernel loaded at start: more on Ampere, of which CUDA 11 brought more kernels.
EAGER_CUDA_CONTEXT = {
    "before_ampere": Line(
        "cuda_context_bytes",
        1343 * MIB,
        "bytes",
        Kind.MEASURED,
        source="transformers performance guide, V100 and PyTorch 1.x: 1,343 MiB for a bare context",
    ),
    "from_ampere": Line(
        "cuda_context_bytes",
        1573 * MIB,
        "bytes",
        Kind.MEASURED,
        source="bigscience's tr11 chronicles, A100 and PyTorch 1.x: 1,573 MiB for a bare context; pytorch"
        " issue 49877, RTX 3090 and PyTorch 1.7: 1,488 MiB beside a tensor",
    ),
}

# One communicator per parallel dimension. NCCL allocates buffers per channel, for every protocol and peer:
# on four A100 with NVLink 544 MB for a group of two and 688 for a larger one, 24 channels either way.
NCCL_CHANNELS = {
    "nvlink": Line("nccl_channels", 24, "count", Kind.ASSUMED, source="NCCL on NVSwitch systems: 24 to 32"),
    "nvlink_before_ampere": Line(
        "nccl_channels",
        12,
        "count",
        Kind.MEASURED,
        source="NCCL 2.7 on 8 V100 meshed by NVLink: channels 00/12 to 11/12, aws/deep-learning-containers"
        " issue 2760",
    ),
    "pcie": Line("nccl_channels", 4, "count", Kind.ASSUMED, source="NCCL on PCIe systems: 2 to 4"),
}
NCCL_CHANNEL_BYTES = {
    "pair": Line(
        "nccl_channel_bytes",
        544 * MIB // 24,
        "bytes",
        Kind.MEASURED,
        source="NCCL issue 964: 544 MB for a group of two A100",
    ),
    "group": Line(
        "nccl_channel_bytes",
        688 * MIB // 24,
        "bytes",
        Kind.MEASURED,
        source="NCCL issue 964: 688 MB for a group of more than two A100; issue 1685: 10 and 2 MiB buffers",
    ),
}

# An all-to-all connects every pair of ranks, over many channels where they share NVLink.
NCCL_PEER_CHANNELS = Line(
    "nccl_peer_channels",
    32,
    "count",
    Kind.MEASURED,
    source="NCCL issue 1685: 32 channels for every pair of 8 H100",
)
NCCL_PEER_CHANNEL_BYTES = Line(
    "nccl_peer_channel_bytes",
    12 * MIB,
    "bytes",
    Kind.MEASURED,
    source="NCCL issue 1685: a block of 10 and one of 2 MiB",
)

CUBLAS_WORKSPACE = {
    "before_hopper": Line(
        "cublas_workspace_bytes",
        8_519_680,
        "bytes",
        Kind.MEASURED,
        source="pytorch forum: 8,519,680 bytes per handle and stream",
    ),
    "from_hopper": Line(
        "cublas_workspace_bytes", 32 * MIB, "bytes", Kind.EXACT, source="pytorch pull request 120925"
    ),
}

# Transformer Engine's own, module/base.py: get_cublas_workspace_size_bytes.
ENGINE_WORKSPACE = {
    age: Line(
        "engine_workspace_bytes",
        size,
        "bytes",
        Kind.EXACT,
        source="TransformerEngine module/base.py: 4 MiB before Hopper, 32 MiB from Hopper on",
    )
    for age, size in (("before_hopper", 4 * MIB), ("from_hopper", 32 * MIB))
}

# Static buffers of captured graphs, and what the allocator cannot use again between them.
CUDA_GRAPHS = {
    "pp 1": Line(
        "cuda_graph_bytes",
        3 * 10**9,
        "bytes",
        Kind.ASSUMED,
        source="NVIDIA-NeMo/Megatron-Bridge@v0.4.2:docs/training/cuda-graphs.md: typically a few GB",
    ),
    "pp > 1": Line(
        "cuda_graph_bytes",
        10 * 10**9,
        "bytes",
        Kind.ASSUMED,
        source="NVIDIA-NeMo/Megatron-Bridge@v0.4.2:docs/training/cuda-graphs.md: over 10 GB with a pipeline",
    ),
}
# Experts of a whole captured step write what backward reads into buffers larger than an even share.
PAGED_STASH = Line(
    "stash_factor",
    1.2,
    "ratio",
    Kind.ASSUMED,
    source="NVIDIA-NeMo/Megatron-Bridge@v0.6.0:src/megatron/bridge/perf_recipes/deepseek/common.py,"
    " moe_paged_stash_buffer_size_factor_cuda",
)

# What FSDP gathers at a time of a network whose layers are not known.
SIZE_BASED_WRAP = Line(
    "min_num_params",
    100_000_000,
    "parameters",
    Kind.ASSUMED,
    source="torch.distributed.fsdp.wrap.size_based_auto_wrap_policy: min_num_params, its default",
)

# DeepSpeed configuration defaults, in elements.
DEEPSPEED_REDUCE_BUCKET = Line(
    "reduce_bucket_elements",
    500_000_000,
    "count",
    Kind.ASSUMED,
    source="DeepSpeed default reduce_bucket_size",
)
DEEPSPEED_LIVE_PARAMETERS = Line(
    "max_live_parameters",
    1_000_000_000,
    "count",
    Kind.ASSUMED,
    source="DeepSpeed default stage3_max_live_parameters",
)
DEEPSPEED_SUB_GROUP = Line(
    "sub_group_elements", 1_000_000_000, "count", Kind.ASSUMED, source="DeepSpeed default sub_group_size"
)

# Sides of weights that preconditioners take whole.
SOAP_LARGEST_SIDE = Line(
    "max_precond_dim", 10_000, "count", Kind.ASSUMED, source="nikhilvyas/SOAP@a1e5535:soap.py, its default"
)
SHAMPOO_BLOCK = Line(
    "max_preconditioner_dim",
    1024,
    "count",
    Kind.ASSUMED,
    source="facebookresearch/optimizers: DistributedShampoo's default; its README advises 1,024 to 8,192",
)

# Beside what is offloaded to the host: buffers and the rounding of pinned blocks to powers of two.
HOST_BUFFER_FRACTION = Line(
    "host_buffer_fraction",
    0.5,
    "fraction",
    Kind.ASSUMED,
    source="DeepSpeed's memory estimators: additional_buffer_factor 1.5",
)


def stated(key: str, value: int | None, default: Line) -> Line:
    """A size the run states, else the default with its source."""
    if value is None:
        return default
    return Line(default.name, value, default.unit, Kind.EXACT, source=f"run.{key}")
