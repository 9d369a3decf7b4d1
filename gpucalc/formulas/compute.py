"""FLOPs of a training step and the seconds a GPU needs for them.

FLOPs count 2 per multiply-accumulate. Time follows two rules: matrix work pays a launch, its
FLOPs and its bytes, joined by a p-norm; everything else pays its bytes.
"""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.num import Num, maximum, minimum, where

_FLOPS = "FlopCounterMode on torch 2.13, meta device: 27 model x length points, error 0.00000"
_GEMM = "fit to ai-dynamo/aiconfigurator@095f58a GEMM tables: mean |log error| 0.11-0.17 on SXM parts, bf16"
_ATTENTION = "fit to ai-dynamo/aiconfigurator@095f58a context attention tables: mean |log error| 0.08-0.25"
_BYTES = "counted reads and writes of each kernel; checked by step time only"


# --- FLOPs -----------------------------------------------------------------------------------------


@formula(unit="FLOP", source=_FLOPS)
def linear_flops(*, tokens: Num, inputs: Num, outputs: Num, active: Num) -> Num:
    """Forward FLOPs of `tokens` rows through `active` matrices [inputs, outputs]."""
    return 2 * tokens * inputs * outputs * active


@formula(unit="count", source="Causal convention: half of the square; FlashAttention benchmarks count so")
def attention_pairs(*, seq_len: Num, keys: Num, span: Num, causal: Num) -> Num:
    """Query-key pairs one head of one sequence needs.

    `seq_len` queries over `keys` keys. `span` is the window a query sees (pass `keys` for no window).
    Causal with window w: s w - w^2 / 2, which is s^2 / 2 without a window.
    """
    return where(
        causal,
        seq_len * minimum(span, keys) - minimum(span, keys) * minimum(span, keys) / 2,
        seq_len * minimum(span, keys),
    )


@formula(unit="count", source="Arithmetic: seq_len / chunk triangles of side chunk")
def chunked_attention_pairs(*, seq_len: Num, chunk: Num) -> Num:
    """Query-key pairs of one head when attention is causal inside chunks of `chunk` tokens."""
    return seq_len * minimum(chunk, seq_len) / 2


@formula(unit="FLOP", source=_FLOPS)
def attention_core_flops(*, sequences: Num, heads: Num, qk_dim: Num, v_dim: Num, pairs: Num) -> Num:
    """Forward FLOPs of scores and weighted values: Q K^T and P V over `pairs` of every head."""
    return 2 * sequences * heads * (qk_dim + v_dim) * pairs


@formula(unit="FLOP", source=_FLOPS + "; flash attention multiplies Q K^T once more: 5 matmuls for 2")
def attention_backward_flops(*, forward_flops: Num, recomputes_scores: Num) -> Num:
    """Backward FLOPs of the attention core: 2.5 x forward when scores are recomputed (flash), else 2 x."""
    return forward_flops * where(recomputes_scores, 2.5, 2.0)


@formula(unit="FLOP", source=_FLOPS)
def linear_backward_flops(*, forward_flops: Num, input_gradients: Num, weight_gradients: Num) -> Num:
    """Backward FLOPs of matrices: one product for the input gradient, one for the weight gradient.

    The flags are 1 or 0: a frozen weight (LoRA) has no weight gradient.
    """
    return forward_flops * (input_gradients + weight_gradients)


@formula(unit="FLOP", source=_FLOPS + ", full activation checkpointing, non-reentrant")
def full_recompute_flops(*, layer_forward_flops: Num, last_matmul_flops: Num, stops_early: Num) -> Num:
    """FLOPs of running a checkpointed layer's forward again.

    torch's non-reentrant checkpoint stops once the last saved tensor is rebuilt, so the layer's
    last matrix multiplication (down projection) is not repeated; Megatron repeats all.
    """
    return layer_forward_flops - where(stops_early, last_matmul_flops, 0)


@formula(unit="FLOP", source="Narayanan et al. 2021 without the recompute term; PaLM appendix B for MFU")
def model_flops(*, linear_forward_flops: Num, attention_forward_flops: Num) -> Num:
    """FLOPs a training step needs whatever the code does: 3 x forward, causal attention counted half."""
    return 3 * (linear_forward_flops + attention_forward_flops)


@formula(unit="FLOP", source="Arithmetic: what the device multiplies, recomputation included (HFU)")
def hardware_flops(*, forward_flops: Num, backward_flops: Num, recompute_flops: Num) -> Num:
    """FLOPs a training step carries out: forward, backward and everything computed twice."""
    return forward_flops + backward_flops + recompute_flops


@formula(unit="fraction", source="Chowdhery et al. 2022 (PaLM), appendix B")
def flops_utilisation(*, flops: Num, step_s: Num, gpus: Num, peak_flops_per_s: Num) -> Num:
    """Share of the dense peak: MFU with model FLOPs, HFU with hardware FLOPs."""
    return flops / (step_s * gpus * peak_flops_per_s)


@formula(
    unit="FLOP",
    source="Gu and Dao 2023; Dao and Gu 2024: chunked scan, two products per state element each way",
)
def state_mixer_flops(*, tokens: Num, heads: Num, key_dim: Num, value_dim: Num, chunk: Num) -> Num:
    """Forward FLOPs of a linear-state mixer in chunked form, projections apart.

    Per token and head: state update and read (4 x key_dim x value_dim) and the chunk's own
    triangle (2 x (key_dim + value_dim) x chunk / 2).
    """
    return tokens * heads * (4 * key_dim * value_dim + (key_dim + value_dim) * chunk)


# --- seconds ---------------------------------------------------------------------------------------


@formula(unit="bytes", source="Arithmetic: each operand read once, result written once")
def gemm_bytes(
    *, rows: Num, inputs: Num, outputs: Num, matrices: Num, operand_bytes: Num, result_bytes: Num
) -> Num:
    """HBM bytes of `matrices` products sharing `rows` rows in all: [rows, inputs] x [inputs, outputs]."""
    return (rows * inputs + matrices * inputs * outputs) * operand_bytes + rows * outputs * result_bytes


@formula(
    unit="bytes",
    source="Arithmetic: both operands read once, the gradient read or written `gradient_passes` times",
)
def weight_gradient_bytes(
    *,
    rows: Num,
    inputs: Num,
    outputs: Num,
    matrices: Num,
    operand_bytes: Num,
    gradient_bytes: Num,
    gradient_passes: Num,
) -> Num:
    """HBM bytes of the product that gives a weight's gradient."""
    return (
        rows * (inputs + outputs) * operand_bytes
        + matrices * inputs * outputs * gradient_bytes * gradient_passes
    )


@formula(unit="fraction", source="Arithmetic; both factors say where they come from")
def in_step_efficiency(*, alone: Num, training_efficiency: Num) -> Num:
    """Share of the peak a kernel reaches inside a training step.

    Below the share it reaches alone: clocks drop under sustained load and communication runs beside.
    """
    return alone * training_efficiency


@formula(
    unit="fraction", source="Derived: fp8 and 16-bit products of the same inference stack differ by the casts"
)
def unquantised_efficiency(*, measured: Num, wide: Num, fp8: Num) -> Num:
    """Share of the low-precision peak without the casts that the measured share includes."""
    return measured * wide / fp8


@formula(unit="s", source="Arithmetic")
def repeated_s(*, each_s: Num, times: Num) -> Num:
    """Time of the same work done `times` times."""
    return each_s * times


@formula(unit="FLOP", source="Arithmetic on a network's traced or published forward FLOPs")
def network_flops(*, images: Num, flops_per_image: Num, direct_share: Num) -> Num:
    """Forward FLOPs a batch of images takes; `direct_share` of the counted ones are carried out."""
    return images * flops_per_image * direct_share


@formula(unit="1/s", source="Arithmetic")
def network_rate_per_s(*, images: Num, cards: Num, seconds: Num) -> Num:
    """Images per second where every card answers batches of its own."""
    return images * cards / seconds


@formula(unit="s", source="Arithmetic")
def shared_s(*, whole_s: Num, share: Num) -> Num:
    """A share of a time."""
    return whole_s * share


@formula(unit="count", source="Arithmetic; causal ranges are dealt out in balanced pairs")
def shared_pairs(*, pairs: Num, cp: Num) -> Num:
    """Query-key pairs of one context-parallel rank."""
    return pairs / cp


@formula(
    unit="count",
    source="Arithmetic: the last of cp ranges sees all keys; torchtitan's long-context runs of 2024",
)
def unbalanced_pairs(*, pairs: Num, cp: Num) -> Num:
    """Query-key pairs of the busiest context-parallel rank where causal ranges are not dealt out in pairs."""
    return pairs / cp * (2 - 1 / cp)


@formula(unit="s", source=_GEMM)
def gemm_s(
    *,
    flops: Num,
    bytes_moved: Num,
    peak_flops_per_s: Num,
    mfu_max: Num,
    bandwidth_bytes_per_s: Num,
    hbm_efficiency: Num,
    p: Num,
    overhead_s: Num,
) -> Num:
    """Time of one matrix multiplication: overhead plus the p-norm of compute time and memory time."""
    return overhead_s + (
        (flops / (peak_flops_per_s * mfu_max)) ** p
        + (bytes_moved / (bandwidth_bytes_per_s * hbm_efficiency)) ** p
    ) ** (1 / p)


@formula(unit="s", source=_ATTENTION)
def attention_s(
    *,
    flops: Num,
    bytes_moved: Num,
    peak_flops_per_s: Num,
    efficiency: Num,
    bandwidth_bytes_per_s: Num,
    hbm_efficiency: Num,
    p: Num,
    overhead_s: Num,
) -> Num:
    """Time of a fused attention call, forward or backward: overhead plus p-norm of compute and memory."""
    return overhead_s + (
        (flops / (peak_flops_per_s * efficiency)) ** p
        + (bytes_moved / (bandwidth_bytes_per_s * hbm_efficiency)) ** p
    ) ** (1 / p)


@formula(unit="bytes", source="Arithmetic: q, k, v read, output and log-sum-exp written once")
def attention_io_bytes(
    *, tokens: Num, heads: Num, kv_heads: Num, qk_dim: Num, v_dim: Num, element_bytes: Num
) -> Num:
    """HBM bytes of one fused attention forward."""
    return tokens * ((heads + kv_heads) * (qk_dim + v_dim) * element_bytes + 4 * heads)


@formula(
    unit="bytes", source="Arithmetic: reads q, k, v, the output and its gradient, writes three gradients"
)
def attention_backward_bytes(*, forward_bytes: Num) -> Num:
    """HBM bytes of one fused attention backward."""
    return 2 * forward_bytes


@formula(unit="bytes", source=_BYTES)
def score_traffic_bytes(
    *, sequences: Num, heads: Num, queries: Num, keys: Num, passes: Num, score_bytes: Num
) -> Num:
    """HBM bytes of attention that writes its scores: `passes` reads or writes of the whole score matrix."""
    return sequences * heads * queries * keys * passes * score_bytes


@formula(unit="bytes", source=_BYTES)
def elementwise_bytes(*, tokens: Num, width: Num, passes: Num, element_bytes: Num) -> Num:
    """HBM bytes of an elementwise kernel: `passes` reads or writes of a [tokens, width] tensor."""
    return tokens * width * passes * element_bytes


@formula(unit="s", source="Arithmetic; hbm_efficiency as measured by copies")
def traffic_s(*, bytes_moved: Num, bandwidth_bytes_per_s: Num, hbm_efficiency: Num) -> Num:
    """Time of work bound by device memory."""
    return bytes_moved / (bandwidth_bytes_per_s * hbm_efficiency)


@formula(unit="s", source="Fitted to published convolutional training runs on V100, A100, H100 and RTX 3090")
def image_traffic_s(
    *,
    bytes_moved: Num,
    bandwidth_bytes_per_s: Num,
    hbm_efficiency: Num,
    multiprocessors: Num,
    clock_hz: Num,
    bytes_per_clock: Num,
) -> Num:
    """Time of batch norms, activations and additions over image tensors.

    Bound by device memory or, where memory is fast for the number of multiprocessors (A100, H100), by
    the loads a multiprocessor issues per clock.
    """
    return bytes_moved / minimum(
        bandwidth_bytes_per_s * hbm_efficiency, multiprocessors * clock_hz * bytes_per_clock
    )


@formula(unit="s", source="Arithmetic")
def launch_s(*, kernels: Num, kernel_launch_s: Num) -> Num:
    """Time the host needs to issue that many kernels."""
    return kernels * kernel_launch_s


@formula(
    unit="s", source="The host issues kernels ahead of the device; it shows only when it is the slower one"
)
def exposed_launch_s(*, device_s: Num, host_s: Num) -> Num:
    """Time the device waits for the host to issue kernels."""
    return maximum(host_s - device_s, 0)


@formula(unit="bytes", source=_BYTES)
def optimizer_traffic_bytes(
    *, params: Num, gradient_bytes: Num, state_bytes: Num, parameter_bytes: Num, passes: Num
) -> Num:
    """HBM bytes of an optimizer step over `params` local parameters.

    Gradient read once, states and master copy read and written, working weight written; `passes`
    repeats the state traffic where the update runs as several unfused kernels.
    """
    return params * (gradient_bytes + passes * 2 * state_bytes + parameter_bytes)


@formula(
    unit="FLOP/s",
    source="Cycles times work per cycle: matrix units follow the clock that power and cooling allow",
)
def sustained_flops_per_s(*, peak_flops_per_s: Num, clock_share: Num) -> Num:
    """Peak at the clock a GPU holds under load, as a share of the clock the kernel rates were measured at."""
    return peak_flops_per_s * clock_share


@formula(unit="Hz", source="A power cap or a warm room lowers the clock of every multiprocessor alike")
def sustained_clock_hz(*, clock_hz: Num, clock_share: Num) -> Num:
    """Clock a GPU holds under load."""
    return clock_hz * clock_share


@formula(unit="s", source="Loading runs beside the step; what it takes longer is waited for")
def exposed_input_s(*, samples: Num, input_samples_per_s: Num, step_s: Num) -> Num:
    """Time the GPUs wait for the host to load and decode the next step's samples."""
    return maximum(samples / input_samples_per_s - step_s, 0)


@formula(unit="bytes", source="Arithmetic: the norm reads every gradient, scaling reads and writes it")
def gradient_clip_bytes(*, params: Num, gradient_bytes: Num) -> Num:
    """HBM bytes of clipping the gradients of `params` local parameters by their global norm."""
    return 3 * params * gradient_bytes


@formula(
    unit="bytes",
    source="Megatron-LM core/distributed/distributed_data_parallel.py and param_and_grad_buffer.py: the"
    " buffer is set to zero before a step, and multiplied by one over the ranks before its reduction",
)
def gradient_buffer_bytes(*, params: Num, gradient_bytes: Num) -> Num:
    """HBM bytes of keeping a contiguous gradient buffer over `params` parameters: one write, one scaling."""
    return 3 * params * gradient_bytes


@formula(
    unit="bytes",
    source="PyTorch aten/native/cuda/Embedding.cu: backward fills a table of zeros and adds the tokens' rows"
    " to it; AccumulateGrad, and Megatron-LM's hook on its fp32 buffer, then add the whole table to the sum",
)
def embedding_gradient_bytes(
    *, params: Num, element_bytes: Num, gradient_bytes: Num, accumulates: Num
) -> Num:
    """HBM bytes of the gradient of a table of `params` parameters in a micro-batch, whatever its tokens.

    accumulates: 1 where the table is added to a sum (read, and the sum read and written), else 0.
    """
    return params * (element_bytes + accumulates * (element_bytes + 2 * gradient_bytes))


@formula(
    unit="bytes", source="Quantising reads 16-bit values and writes 8-bit ones twice: as is and transposed"
)
def quantise_bytes(*, elements: Num, source_bytes: Num, stored_bytes: Num) -> Num:
    """HBM bytes of casting a tensor to low precision for the forward and the weight-gradient product."""
    return elements * (source_bytes + 2 * stored_bytes)


@formula(
    unit="bytes/s",
    source="PCI-SIG: 8 GT/s a lane from gen 3, doubling each generation; 0.8 of it reaches copies",
)
def pcie_bytes_per_s(*, generation: Num, lanes: Num) -> Num:
    """One-way rate of copies between a GPU and its host."""
    return 0.8 * lanes * 2 ** (generation - 3) * 0.985e9


@formula(
    unit="s",
    source="Ren et al. 2021 (ZeRO-Offload): gradients out, weights back, update by the host's memory",
)
def host_update_s(
    *,
    params: Num,
    gradient_bytes: Num,
    parameter_bytes: Num,
    state_bytes: Num,
    link_bytes_per_s: Num,
    ranks_per_node: Num,
    host_bytes_per_s: Num,
) -> Num:
    """Time of an optimizer step on the host over one rank's share of `params`.

    All ranks of a node share the memory bandwidth of the host, over which states and gradient are read
    and states written.
    """
    return (
        params * (gradient_bytes + parameter_bytes) / link_bytes_per_s
        + params * (2 * state_bytes + gradient_bytes) * ranks_per_node / host_bytes_per_s
    )


@formula(unit="s", source="Arithmetic")
def host_copy_s(*, bytes_moved: Num, link_bytes_per_s: Num) -> Num:
    """Time to copy between a GPU and its host."""
    return bytes_moved / link_bytes_per_s


@formula(
    unit="s",
    source="deepspeed/runtime/swap_tensor/partitioned_optimizer_swapper.py: masters, moments and fp32"
    " gradients of a sub-group are read, stepped and written back in turn; read, not run",
)
def nvme_update_s(
    *, params: Num, state_bytes: Num, gradient_bytes: Num, ranks_per_node: Num, nvme_bytes_per_s: Num
) -> Num:
    """Time the optimizer states and gradients of `params` take from the drives of a node and back.

    All ranks of a node share the drives.
    """
    return 2 * params * (state_bytes + gradient_bytes) * ranks_per_node / nvme_bytes_per_s


@formula(unit="bytes/s", source="Arithmetic; all ranks of a node read at once")
def nvme_link_bytes_per_s(*, link_bytes_per_s: Num, nvme_bytes_per_s: Num, ranks_per_node: Num) -> Num:
    """Rate at which a GPU gets weights from its node's drives: its share of them, or its own link."""
    return minimum(link_bytes_per_s, nvme_bytes_per_s / ranks_per_node)


@formula(
    unit="bytes",
    source="torch.autograd.graph.save_on_cpu, TransformerEngine's cpu_offload: every saved tensor goes out in"
    " forward and comes back in backward; read, not run",
)
def offloaded_activation_bytes(*, kept_bytes: Num) -> Num:
    """Bytes between a GPU and its host when what forward keeps is offloaded."""
    return 2 * kept_bytes


# --- a step ----------------------------------------------------------------------------------------


@formula(unit="tokens/s", source="Arithmetic")
def tokens_per_s(*, tokens: Num, step_s: Num) -> Num:
    """Tokens one optimizer step consumes per second."""
    return tokens / step_s


@formula(unit="tokens/s", source="Arithmetic")
def tokens_per_s_per_gpu(*, tokens_per_s: Num, gpus: Num) -> Num:
    """Tokens each GPU's share comes to per second."""
    return tokens_per_s / gpus


@formula(unit="samples/s", source="Arithmetic")
def samples_per_s(*, samples: Num, step_s: Num) -> Num:
    """Sequences or images one optimizer step consumes per second."""
    return samples / step_s


@formula(unit="FLOP/s", source="Arithmetic")
def flops_per_s_per_gpu(*, flops: Num, step_s: Num, gpus: Num) -> Num:
    """FLOP/s of each GPU over the whole step."""
    return flops / (step_s * gpus)


@formula(unit="fraction", source="Arithmetic")
def scaling_efficiency(*, rate_per_gpu: Num, smallest_per_gpu: Num) -> Num:
    """Rate of each GPU against that of the smallest fleet that runs the same job."""
    return rate_per_gpu / smallest_per_gpu
