"""Bytes one rank holds: weights, gradients, optimizer state, framework buffers, and what torch does not see.

params are the parameters this rank holds after tensor, pipeline and expert division; `shard` is the
number of ranks that share one copy of sharded state.
"""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.num import Num, maximum, minimum, where

ZERO = "Rajbhandari et al. 2020 (ZeRO), section 5; DeepSpeed and Megatron-Core sources for element sizes"
DEEPSPEED = (
    "DeepSpeed 0.19.8 run on CPU ranks over gloo, live storages of stages 1 to 3, tests/data/deepspeed.csv;"
    " same lines read at commit 38327e07"
)
FSDP2 = (
    "FSDP2 on torch 2.13 in a fake process group of 8, live storages of 18 passes beyond saved activations"
    " within 0.2 %, tests/data/fsdp_transients.csv"
)
MEGATRON = "Megatron-Core distributed optimizer, checked against published B200 peaks (SimuMax docs)"


@formula(unit="parameters", source="tensor parallelism divides matrices, not norms and routers (Megatron-LM)")
def dense_rank_params(*, sharded: Num, replicated: Num, tp: Num) -> Num:
    """Parameters of a rank outside routed experts: divided matrices, and what every rank holds whole."""
    return sharded / tp + replicated


@formula(
    unit="parameters", source="expert parallelism divides the experts, expert tensor parallelism each one"
)
def expert_rank_params(*, expert: Num, ep: Num, etp: Num) -> Num:
    """Parameters of a rank in routed experts."""
    return expert / (ep * etp)


@formula(unit="bytes", source=ZERO)
def weight_bytes(*, params: Num, parameter_bytes: Num, shard: Num, zero_stage: Num) -> Num:
    """Weights stored between steps; divided over the shard group at stage 3."""
    return params * parameter_bytes / where(zero_stage >= 3, shard, 1)


@formula(
    unit="bytes",
    source="MMEngine's EMAHook, timm's ModelEmaV3 and diffusers' EMAModel copy the model they average, read",
)
def averaged_weight_bytes(*, params: Num, element_bytes: Num, shard: Num, zero_stage: Num) -> Num:
    """A moving average of the weights, kept beside them and divided where they are.

    element_bytes: of the weights that are averaged; trainers copy the fp32 ones, before any cast.
    """
    return params * element_bytes / where(zero_stage >= 3, shard, 1)


@formula(
    unit="bytes",
    source="from_pretrained and trainers that upcast what is trained, before deepspeed.initialize casts it"
    " again: LlamaFactory issue 4549 (out of memory while upcasting), dllm issue 9 (2 bytes a parameter"
    " refused beside 4 on 40 GB)",
)
def loaded_weight_bytes(*, params: Num, loaded_bytes: Num) -> Num:
    """Weights as they were read, beside the 16-bit ones the engine makes of them."""
    return params * loaded_bytes


@formula(
    unit="bytes",
    source="DeepSpeed@edaa7221 engine.py, _configure_distributed_model: module.to(device) of a model that was"
    " not made under zero.Init; ml-engineering's runs of Llama 3.1 8B reserved 16.3 GiB at least, 15.0 so",
)
def undivided_weight_bytes(*, params: Num, element_bytes: Num, shard: Num) -> Num:
    """What a whole model takes beyond its share, before stage 3 divides it."""
    return params * element_bytes * (1 - 1 / shard)


@formula(
    unit="bytes",
    source="DeepSpeed@edaa7221 stage_1_and_2.py: detach().clone().to(fp32) of the partition; LlamaFactory"
    " issue 260 failed on exactly 4 bytes a parameter with 4 in use",
)
def deepspeed_partition_bytes(*, params: Num, element_bytes: Num, shard: Num, zero_stage: Num) -> Num:
    """A clone of this rank's 16-bit partition and the fp32 master weights made of it."""
    return params * (element_bytes + 4) / where(zero_stage >= 1, shard, 1)


@formula(
    unit="bytes/parameter",
    source="bitsandbytes@0.43 functional.py, quantize_blockwise and quantize_4bit: an fp32 absmax a block, or"
    " (compress_statistics) 8 bits of it and an fp32 for 256 of those; read",
)
def nf4_bytes_per_param(*, block: Num, double: Num) -> Num:
    """A weight in NF4: half a byte and its block's scale; double: the scales are quantised again."""
    return 0.5 + where(double, 1 / block + 4 / (256 * block), 4 / block)


@formula(unit="bytes", source=ZERO)
def gradient_bytes(*, params: Num, element_bytes: Num, shard: Num, zero_stage: Num) -> Num:
    """Gradients held when the step starts; divided over the shard group from stage 2."""
    return params * element_bytes / where(zero_stage >= 2, shard, 1)


@formula(unit="bytes", source=ZERO)
def optimizer_state_bytes(*, params: Num, bytes_per_param: Num, shard: Num, zero_stage: Num) -> Num:
    """Optimizer states and master weights; divided over the shard group from stage 1."""
    return params * bytes_per_param / where(zero_stage >= 1, shard, 1)


@formula(unit="bytes", source="torch DistributedDataParallel source: buckets hold every gradient once more")
def ddp_bucket_bytes(*, params: Num, element_bytes: Num) -> Num:
    """Reducer buckets, unless gradient_as_bucket_view makes gradients views of them."""
    return params * element_bytes


@formula(unit="bytes", source="saved-tensor measurement under torch autocast: 2 bytes per linear parameter")
def autocast_weight_bytes(*, linear_params: Num) -> Num:
    """16-bit copies of fp32 weights that autocast makes and the graph keeps until backward is done."""
    return 2 * linear_params


@formula(
    unit="bytes",
    source="TransformerEngine: quantised weights hold their data by rows and by columns, with the scales of"
    " blocks of 32 (MXFP8) or 16 (NVFP4); csrc/quantizer.cpp, tensor/nvfp4_tensor.py, read, not run",
)
def quantised_weight_copy_bytes(*, linear_params: Num, element_bytes: Num) -> Num:
    """Copies of 16-bit weights in the type matrices multiply in, made once a step for all micro-batches.

    element_bytes: of one copy, scales included; the second one is transposed, for gradients of inputs.
    """
    return 2 * element_bytes * linear_params


@formula(unit="bytes", source=DEEPSPEED)
def deepspeed_bucket_bytes(*, bucket_elements: Num, element_bytes: Num, buffers: Num) -> Num:
    """Gradient reduction buckets, allocated whole however small the model is.

    Stages 1 and 2 make them at the first backward pass of a step and free them when it ends
    (stage_1_and_2.py 0.19.8, lines 3255 to 3279; two with overlap_comm), stage 3 makes one at start and
    keeps it (stage3.py, line 782). Measured to the byte.
    """
    return buffers * bucket_elements * element_bytes


@formula(unit="bytes", source=DEEPSPEED)
def deepspeed_scatter_bytes(*, bucket_elements: Num, params: Num, element_bytes: Num) -> Num:
    """Stage 3: a bucket's gradients once more, laid out by rank for the reduce-scatter.

    coalesced_collectives.py 0.19.8, reduce_scatter_coalesced: torch.cat of every tensor's partitions.
    """
    return minimum(bucket_elements, params) * element_bytes


@formula(unit="bytes", source=DEEPSPEED)
def deepspeed_gradient_partition_bytes(*, params: Num, element_bytes: Num, shard: Num) -> Num:
    """This rank's reduced gradients beside what backward still holds.

    Stage 1: beside the whole gradients, when the last micro-batch ends. Stage 2: beside the partition of
    the micro-batches before, whose sum it joins (stage_1_and_2.py 0.19.8, lines 1036 to 1060). Measured
    to the byte.
    """
    return params * element_bytes / shard


@formula(
    unit="bytes",
    source="DeepSpeed@56c52238:deepspeed/runtime/bf16_optimizer.py, update_hp_grads: lp.grad.data.to(fp32) of"
    " one parameter at a time, after every micro-batch",
)
def cast_gradient_bytes(*, params: Num) -> Num:
    """The largest gradient in fp32, on its way into the flat fp32 ones. params: of the largest tensor.

    Counted beside a layer's backward: no tensor of the sweep leaves a free block that large, so the
    allocator takes one for it and keeps it.
    """
    return 4 * params


@formula(unit="bytes", source="DeepSpeed stage 3 source: stage3_max_live_parameters, default 1e9 elements")
def deepspeed_live_parameter_bytes(*, live_elements: Num, params: Num, element_bytes: Num) -> Num:
    """Gathered parameters alive at once under ZeRO-3."""
    return minimum(live_elements, params) * element_bytes


@formula(unit="bytes", source=DEEPSPEED)
def deepspeed_step_gradient_bytes(*, params: Num, shard: Num, sub_group_elements: Num) -> Num:
    """fp32 gradients of the partition (stage 3: of one sub-group) that appear when the optimizer steps."""
    return 4 * minimum(params / shard, sub_group_elements)


@formula(unit="bytes", source=DEEPSPEED)
def deepspeed_flat_gradient_bytes(
    *, params: Num, element_bytes: Num, shard: Num, sub_group_elements: Num
) -> Num:
    """Gradients of the partition (stage 3: of one sub-group) in one flat tensor, until cast to fp32.

    stage_1_and_2.py 0.19.8, lines 3114 to 3118. Measured to the byte at every stage.
    """
    return element_bytes * minimum(params / shard, sub_group_elements)


@formula(unit="bytes", source=FSDP2)
def fsdp_forward_bytes(*, root_params: Num, layer_params: Num, element_bytes: Num) -> Num:
    """Unsharded weights at the widest point of forward: flat buffer and its copy, next layer prefetched."""
    return element_bytes * maximum(2 * root_params + 2 * layer_params, root_params + 3 * layer_params)


@formula(unit="bytes", source=FSDP2)
def fsdp_forward_unresharded_bytes(
    *, root_params: Num, layer_params: Num, layers: Num, element_bytes: Num
) -> Num:
    """The same when gathered layers are kept for backward (reshard_after_forward false, ZeRO-2 like).

    FSDP1 without limit_all_gathers (torch 2.0) may fill a card so, but needs no more than with it: where
    the allocator runs out, it waits for what other streams have freed.
    """
    return element_bytes * (root_params + layers * layer_params + 2 * layer_params)


@formula(unit="bytes", source=FSDP2)
def fsdp_backward_bytes(
    *, root_params: Num, head_params: Num, layer_params: Num, element_bytes: Num, reduce_bytes: Num
) -> Num:
    """What FSDP holds unsharded while a layer runs backward.

    Root weights, head gradient, this layer's weights and gradients, the next layer's weights, the previous
    layer's reduce-scatter input.
    """
    return element_bytes * (root_params + head_params + 3 * layer_params) + reduce_bytes * layer_params


@formula(unit="bytes", source=FSDP2)
def fsdp_backward_unresharded_bytes(
    *,
    root_params: Num,
    head_params: Num,
    layer_params: Num,
    layers: Num,
    element_bytes: Num,
    reduce_bytes: Num,
) -> Num:
    """The same when all layers stayed gathered: at the last layer but one, nothing is gathered ahead.

    Root weights, head gradient, the weights of the layers still to come and this one's gradients, the
    last layer's reduce-scatter input.
    """
    return element_bytes * (root_params + head_params + layers * layer_params) + reduce_bytes * layer_params


@formula(unit="bytes", source=FSDP2)
def fsdp_wrapped_forward_bytes(*, table_params: Num, layer_params: Num, element_bytes: Num) -> Num:
    """Forward where embedding and head are wrapped on their own: three layers, or the head coming in.

    table_params: of the larger table. The embedding is freed before layers are gathered; the head's flat
    buffer and its copy join the last layer.
    """
    return element_bytes * maximum(3 * layer_params, 2 * table_params + layer_params)


@formula(unit="bytes", source=FSDP2)
def fsdp_wrapped_backward_bytes(
    *, table_params: Num, layer_params: Num, element_bytes: Num, reduce_bytes: Num
) -> Num:
    """Backward where embedding and head are wrapped on their own.

    A layer's weights and gradients, the next layer or the embedding gathered ahead, the previous layer's
    reduce-scatter input; or the last layer, or the head's gradient, beside the head's.
    """
    return element_bytes * layer_params + maximum(
        element_bytes * (layer_params + maximum(table_params, layer_params)) + reduce_bytes * layer_params,
        element_bytes * maximum(2 * layer_params, table_params) + reduce_bytes * table_params,
    )


@formula(unit="bytes", source=FSDP2)
def fsdp_wrapped_forward_unresharded_bytes(
    *, table_params: Num, layer_params: Num, layers: Num, element_bytes: Num
) -> Num:
    """Forward with embedding and head wrapped on their own and everything staying gathered."""
    return element_bytes * (
        layers * layer_params + maximum(2 * layer_params + table_params, layer_params + 3 * table_params)
    )


@formula(unit="bytes", source=FSDP2)
def fsdp_wrapped_backward_unresharded_bytes(
    *, table_params: Num, layer_params: Num, layers: Num, element_bytes: Num, reduce_bytes: Num
) -> Num:
    """Backward with embedding and head wrapped on their own and everything gathered at its start.

    All layers and the embedding; a layer's reduce-scatter input, or the head's beside gradients of the
    head or the last layer.
    """
    return element_bytes * (layers * layer_params + table_params) + maximum(
        reduce_bytes * layer_params,
        element_bytes * maximum(layer_params, table_params) + reduce_bytes * table_params,
    )


@formula(
    unit="bytes",
    source="FSDP2 makes and reduces gradients of trained parameters alone (torch 2.13, _fsdp_param_group.py)",
)
def fsdp_frozen_backward_bytes(*, layer_params: Num, other_params: Num, element_bytes: Num) -> Num:
    """Frozen weights gathered while a layer runs backward: its own, and those that stay or come next."""
    return element_bytes * (layer_params + other_params)


@formula(unit="bytes", source=FSDP2)
def fsdp_end_bytes(*, root_params: Num, layer_params: Num, element_bytes: Num, reduce_bytes: Num) -> Num:
    """The end of backward: root gradients copied into their reduce-scatter input."""
    return maximum(
        (element_bytes + reduce_bytes) * root_params,
        2 * element_bytes * root_params + reduce_bytes * layer_params,
    )


@formula(
    unit="bytes",
    source="torchtitan pipeline runs: gradients are reduced once a step, after the last micro-batch",
)
def fsdp_accumulated_gradient_bytes(*, params: Num, reduce_bytes: Num) -> Num:
    """Whole gradients kept over micro-batches while FSDP does not reduce them."""
    return params * reduce_bytes


@formula(unit="bytes", source=MEGATRON)
def dummy_weight_gradient_bytes(*, matmul_params: Num, tp: Num) -> Num:
    """One 16-bit buffer per distinct weight shape, kept by gradient-accumulation fusion."""
    return 2 * matmul_params / tp


@formula(
    unit="bytes",
    source="torch AdamW foreach: measured 1.000 x the parameters stepped together, in state type",
)
def foreach_step_bytes(*, params: Num, state_bytes: Num, shard: Num, sub_group_elements: Num) -> Num:
    """Temporaries of a step that is not one kernel: roots and denominators of the second moment.

    DeepSpeed's stage 3 steps one sub-group after the other.
    """
    return minimum(params / shard, sub_group_elements) * state_bytes


@formula(unit="bytes", source="constants fitted on published reserved, device and allocated peaks")
def allocator_overhead_bytes(
    *,
    lasting_bytes: Num,
    passing_bytes: Num,
    lasting_fraction: Num,
    passing_fraction: Num,
    large_bytes: Num,
    large_fraction: Num,
) -> Num:
    """What the caching allocator reserves beyond what tensors use: rounding and fragments.

    lasting: weights, gradients, optimizer states, buffers; passing: activations and everything else. Beyond
    large_bytes of these, tensors are large and of few sizes, and little of a block is left over:
    ml-engineering reserved 0.00044 GiB a token from 128 to 256 k where tensors alone are 0.00041.
    """
    return (
        lasting_bytes * lasting_fraction
        + minimum(passing_bytes, large_bytes) * passing_fraction
        + maximum(passing_bytes - large_bytes, 0) * large_fraction
    )


@formula(
    unit="bytes",
    source="pytorch issues 107667, 28394, 20532: 300 MB with lazy loading, about 1 GB on eager loading",
)
def cuda_context_bytes(*, context_bytes: Num) -> Num:
    """CUDA context and loaded kernels, outside the allocator."""
    return context_bytes


@formula(
    unit="bytes",
    source="NVIDIA-NeMo/Megatron-Bridge docs/training/cuda-graphs.md, memory impact",
)
def cuda_graph_bytes(*, graph_bytes: Num) -> Num:
    """What captured graphs hold beside the tensors of a step: buffers that keep their addresses."""
    return graph_bytes


@formula(
    unit="bytes",
    source="NCCL issues 964 and 864: linear in channels and communicators; 544 to 688 MB each on A100",
)
def nccl_buffer_bytes(*, communicators: Num, channels: Num, channel_bytes: Num) -> Num:
    """Communicator buffers, outside the allocator: every parallel dimension larger than one has its own.

    channel_bytes: what a channel of one communicator holds, all protocols and peers.
    """
    return communicators * channels * channel_bytes


@formula(
    unit="bytes",
    source="NCCL issue 1685: the first all-to-all of 8 H100 took 3.3 GB, in blocks of 10 and 2 MiB; this"
    " gives 2.8",
)
def nccl_exchange_buffer_bytes(*, peers: Num, peer_channels: Num, channel_bytes: Num) -> Num:
    """Buffers of an all-to-all, which connects every pair of ranks: peers x channels each."""
    return peers * peer_channels * channel_bytes


@formula(
    unit="bytes", source="pytorch pull request 120925: 8,519,680 bytes before Hopper, 32 MiB from Hopper on"
)
def cublas_workspace_bytes(*, workspace_bytes: Num, handles: Num) -> Num:
    """cuBLAS workspace, inside the allocator, one per handle and stream."""
    return workspace_bytes * handles


@formula(
    unit="bytes",
    source="from_pretrained on every rank: FastChat issue 114 saw 25.7 GiB a process where 4 bytes a"
    " parameter are 25.1",
)
def host_load_bytes(*, ranks: Num, params: Num, element_bytes: Num) -> Num:
    """Host memory while every rank of a node reads the whole model."""
    return ranks * params * element_bytes


@formula(
    unit="bytes", source="DeepSpeed ZeRO-Offload and FSDP CPUOffload: what is offloaded lives on the host"
)
def host_offload_bytes(*, params: Num, bytes_per_param: Num) -> Num:
    """Host memory of one node that offloaded weights, gradients or optimizer state take."""
    return params * bytes_per_param


@formula(
    unit="bytes",
    source="DeepSpeed's estimators (estimate_zero3_model_states_mem_needs, additional_buffer_factor 1.5);"
    " torch rounds every pinned block up to a power of two",
)
def host_buffer_bytes(*, offloaded_bytes: Num, buffer_fraction: Num) -> Num:
    """Pinned buffers beside what an offloading run holds on the host."""
    return offloaded_bytes * buffer_fraction
