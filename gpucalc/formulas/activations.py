"""Bytes the forward pass leaves behind for the backward pass, per token of the micro-batch.

Every formula gives bytes per token of one layer part on one rank before any division by tensor
parallelism, unless its name says otherwise. Widths are elements: hidden, query_width = heads x head
width, kv_width = kv heads x head width, ffn. `activation_bytes` is the element size of activations
(2 for bf16 and fp16, 4 for fp32).

Evidence: saved-tensor hooks with storage deduplication on torch 2.13 and transformers 5.24 (CPU, attention
emulated as the GPU kernels save it); 72 architecture x attention x dtype cases within 0.15 %, most to the
byte. TransformerEngine forms: Megatron-Core on B200, eight published peaks within 0.31 %.
"""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.num import Num, maximum, where

SAVED_TENSORS = "saved-tensor measurement, torch 2.13, transformers 5.24"
TE = "Megatron-Core with TransformerEngine, checked against published B200 peaks (SimuMax docs)"


# --- norms -------------------------------------------------------------------------------------


@formula(unit="bytes/token", source=SAVED_TENSORS)
def rmsnorm_saved_bytes(*, width: Num, rows: Num, activation_bytes: Num) -> Num:
    """RMSNorm as transformers' Llama writes it: fp32 copy, rstd, normalised tensor in the input's type.

    rows: vectors of that token that are normalised apart (heads, for a norm per head), together `width`
    wide. 6h + 4 at 16 bit, 8h + 4 at 32 bit. Exact in 40 cases.
    """
    return 4 * width + where(activation_bytes == 2, 2, 4) * width + 4 * rows


@formula(unit="bytes/token", source=SAVED_TENSORS)
def rmsnorm_fp32_weight_saved_bytes(*, width: Num, rows: Num) -> Num:
    """RMSNorm whose weight multiplies in fp32 (Gemma, OLMo-2, gpt-oss): two fp32 tensors and rstd."""
    return 8 * width + 4 * rows


@formula(unit="bytes/token", source=SAVED_TENSORS)
def rmsnorm_keeping_input_saved_bytes(*, width: Num) -> Num:
    """RMSNorm as transformers' T5 writes it: the variance reads an fp32 copy, the product the input itself.

    fp32 copy, input, normalised tensor in the input's type, rstd: 8h + 4 at 16 and at 32 bit, where input
    and copy are one. Measured on T5 blocks in bf16 and fp32, to the byte.
    """
    return 8 * width + 4


@formula(unit="bytes/token", source=SAVED_TENSORS)
def layernorm_saved_bytes(*, width: Num, activation_bytes: Num) -> Num:
    """Fused LayerNorm: its input, mean and rstd in fp32."""
    return activation_bytes * width + 8


@formula(unit="bytes/token", source=SAVED_TENSORS)
def cohere_layernorm_saved_bytes(*, width: Num) -> Num:
    """LayerNorm as transformers' Cohere writes it: three fp32 tensors and rstd."""
    return 12 * width + 4


@formula(unit="bytes/token", source=TE)
def fused_rmsnorm_saved_bytes(*, width: Num, rows: Num, activation_bytes: Num) -> Num:
    """RMSNorm in one kernel (TransformerEngine, Apex, Liger, torch's own): its input and rstd."""
    return activation_bytes * width + 4 * rows


# --- inputs of matrix multiplications --------------------------------------------------------------


@formula(unit="bytes/token", source=SAVED_TENSORS)
def linear_input_saved_bytes(*, width: Num, element_bytes: Num, copies: Num) -> Num:
    """Input kept for the weight gradient, once per distinct tensor.

    copies 1: linears reading the same tensor share it. Under autocast each linear casts its own copy.
    """
    return element_bytes * width * copies


@formula(
    unit="bytes/token",
    source="saved tensors of wav2vec 2.0's feature extractor, transformers 5.24.0 on torch 2.13.0: 322.4 and"
    " 389.4 widths a frame measured, 318 and 381 by this (group norm, layer norm); the rest is the samples"
    " and statistics",
)
def convolution_saved_bytes(*, width: Num, rate: Num, tensors: Num, element_bytes: Num) -> Num:
    """What a convolution at `rate` results a token and its activation keep.

    tensors: the result, the activation's result, and with a norm between them its input; under
    recomputation the activation's result alone, which the next one starts from.
    """
    return rate * tensors * width * element_bytes


# --- attention ---------------------------------------------------------------------------------------


@formula(unit="bytes/token", source=SAVED_TENSORS)
def flash_attention_saved_bytes(*, query_width: Num, kv_width: Num, heads: Num, activation_bytes: Num) -> Num:
    """q, k, v, out and the fp32 log-sum-exp; grouped keys and values are not expanded.

    The output doubles as the input of the output projection, so that is not counted again.
    """
    return activation_bytes * (2 * query_width + 2 * kv_width) + 4 * heads


@formula(unit="bytes/token", source=SAVED_TENSORS)
def fused_qkv_view_saved_bytes(*, query_width: Num, kv_width: Num, activation_bytes: Num) -> Num:
    """Extra kept when v is a view of a fused qkv output and q, k are rotated copies: q and k once more.

    The whole qkv output stays alive for v; rotated q and k are counted with the attention.
    """
    return activation_bytes * (query_width + kv_width)


@formula(unit="bytes/token", source=SAVED_TENSORS)
def partial_rotary_saved_bytes(*, query_width: Num, activation_bytes: Num) -> Num:
    """Extra copy of the attention output where rotation by concatenation fixes its layout (NeoX, Phi-3)."""
    return activation_bytes * query_width


@formula(unit="bytes/token", source=SAVED_TENSORS)
def eager_attention_saved_bytes(
    *,
    query_width: Num,
    heads: Num,
    span: Num,
    activation_bytes: Num,
    probability_bytes: Num,
    dropout: Num,
) -> Num:
    """Unfused attention: q, expanded k and v, out, and score-sized tensors of heads x span per token.

    probability_bytes: 4 + element size where softmax runs in fp32 and casts back (Llama family; 4 alone with
    dropout, which needs no cast result), the element size alone where it does not (GPT-2, BERT, Megatron);
    one element more where scores are capped (Gemma 2). dropout 1 adds the mask (1 byte) and the dropped
    probabilities.
    """
    return (
        4 * activation_bytes * query_width
        + heads * span * probability_bytes
        + dropout * heads * span * (1 + activation_bytes)
    )


@formula(unit="bytes/token", source=SAVED_TENSORS)
def mla_saved_bytes(*, heads: Num, qk_dim: Num, nope_dim: Num, v_dim: Num, activation_bytes: Num) -> Num:
    """Multi-head latent attention with a flash kernel: q, k, kv up-projection (v is a view of it), out, lse.

    Within 0.09 % on DeepSeek V2 and V3.
    """
    return (
        activation_bytes * heads * (2 * qk_dim + nope_dim + v_dim)
        + activation_bytes * heads * v_dim
        + 4 * heads
    )


@formula(
    unit="bytes/token", source="Megatron-Core's multi_latent_attention.py, recompute_up_proj; read, not run"
)
def attention_output_saved_bytes(*, heads: Num, v_dim: Num, activation_bytes: Num) -> Num:
    """A flash kernel's result and log-sum-exps, where queries, keys and values are made again."""
    return activation_bytes * heads * v_dim + 4 * heads


@formula(
    unit="bytes/token", source="fused-kernel form, Mamba-2 and flash-linear-attention sources; not measured"
)
def state_mixer_saved_bytes(
    *,
    projected_width: Num,
    inner: Num,
    conv_width: Num,
    state_per_head: Num,
    heads: Num,
    chunk: Num,
    activation_bytes: Num,
) -> Num:
    """Mamba or linear-attention mixer with fused kernels.

    Projections, convolution output, the mixed stream before and after its gate, and one fp32 state per
    chunk of tokens.
    """
    return activation_bytes * (projected_width + conv_width + 2 * inner) + 4 * heads * state_per_head / chunk


@formula(
    unit="bytes/token",
    source="state-spaces/mamba@01b717ae:mamba_ssm/ops/triton/ssd_combined.py,"
    " MambaSplitConv1dScanCombinedFn.forward, save_for_backward; read, not run",
)
def mamba2_saved_bytes(*, projected_width: Num, inner: Num, activation_bytes: Num) -> Num:
    """Mamba-2 in one function from its input projection on: what that projected, the scan's output, rstd.

    Convolution, chunk states, the gated norm and the output projection's input are made again in backward.
    """
    return activation_bytes * (projected_width + inner) + 4


# --- feed-forward --------------------------------------------------------------------------------------


@formula(unit="bytes/token", source=SAVED_TENSORS)
def gated_mlp_saved_bytes(*, ffn: Num, activation_bytes: Num, tensors: Num) -> Num:
    """SwiGLU or GeGLU written out: gate, activated gate, up, product (the input of down): 4 tensors.

    7 where GELU is written out in Python (gelu_new: T5 v1.1 and FLAN-T5), 3 with ReLU, whose input goes.
    """
    return tensors * activation_bytes * ffn


@formula(unit="bytes/token", source=TE)
def fused_gated_mlp_saved_bytes(*, ffn: Num, activation_bytes: Num, input_bytes: Num) -> Num:
    """SwiGLU in one kernel: gate and up, and the product as the down matrix keeps it (1 byte under fp8).

    torch.compile keeps the same three: inductor's partitioner on whole Llama and Qwen3 layers of torch 2.13,
    to the byte (with fused norms, 8h + 4D + 4K + 6f + 4a + 8 in all).

    Compiled: 9.0 GiB less than written out on Llama-3.2-3B, 8,192 tokens (torchtune's published memory
    ladder); this form gives 9.2.
    """
    return (2 * activation_bytes + input_bytes) * ffn


@formula(unit="bytes/token", source=SAVED_TENSORS)
def plain_mlp_saved_bytes(*, ffn: Num, activation_bytes: Num, tensors: Num) -> Num:
    """Two-matrix MLP: tensors of width ffn kept: ReLU 1, GELU 2, GELU written out in Python (gelu_new) 5."""
    return tensors * activation_bytes * ffn


@formula(unit="bytes/token", source=SAVED_TENSORS)
def moe_saved_bytes(
    *,
    top_k: Num,
    width: Num,
    wide_tensors: Num,
    expert_ffn: Num,
    expert_tensors: Num,
    input_tensors: Num,
    activation_bytes: Num,
    input_bytes: Num,
    imbalance: Num,
    stash_factor: Num,
) -> Num:
    """Routed experts: every chosen expert's input and output, and what its MLP keeps.

    wide_tensors: 2, or 1 where the router's weight joins inside the MLP and no gradient asks for the output
    (Megatron-Core since 2659630721 of April 2025, experts.py and token_dispatcher.py; read).
    expert_tensors: 4 written out (7 for gpt-oss, which clamps gate and up), 3 fused or compiled; of these
    input_tensors are what the last product reads (1, or 0 where it is made again). Products keep their
    inputs in input_bytes, TransformerEngine's in 8 or 4 bits where they multiply so.
    imbalance: the busiest rank's load over the mean. stash_factor: buffers of a step captured whole over
    what an even share of tokens fills.
    """
    return (
        imbalance
        * stash_factor
        * top_k
        * (
            input_bytes * (width + input_tensors * expert_ffn)
            + activation_bytes * ((wide_tensors - 1) * width + (expert_tensors - input_tensors) * expert_ffn)
            + 24
        )
    )


@formula(unit="bytes/token", source=SAVED_TENSORS)
def router_saved_bytes(*, experts: Num, top_k: Num) -> Num:
    """Router logits or probabilities in fp32 and the chosen indexes and weights."""
    return 4 * experts + 16 * top_k


# --- dropout -------------------------------------------------------------------------------------------


@formula(unit="bytes/token", source=SAVED_TENSORS)
def dropout_mask_saved_bytes(*, width: Num, masks: Num) -> Num:
    """One byte per element and mask (CUDA keeps boolean masks)."""
    return width * masks


# --- whole layers --------------------------------------------------------------------------------------


@formula(unit="bytes", source=SAVED_TENSORS)
def layer_saved_bytes(*, bytes_per_token: Num, tokens: Num, tp: Num) -> Num:
    """What one layer keeps for one micro-batch: tokens on this rank, divided over tensor parallel ranks."""
    return bytes_per_token * tokens / tp


@formula(unit="bytes", source="memory timeline, 18 configurations, 16 within 0.001 %")
def checkpoint_bytes(*, hidden: Num, tokens: Num, activation_bytes: Num, shards: Num) -> Num:
    """The layer input kept instead of its activations under full recompute."""
    return activation_bytes * hidden * tokens / shards


PIPELINING = (
    "torch 2.13, distributed/pipelining/stage.py: _setup_backward_recv_info, _create_act_recv_info, fwd_cache"
    " and output_chunks of forward_one_chunk; read"
)


@formula(unit="bytes", source=PIPELINING)
def pipeline_receive_bytes(
    *, message_bytes: Num, micro_batches: Num, in_flight: Num, received: Num, sent: Num
) -> Num:
    """PyTorch's pipelining: a buffer for every micro-batch's input and one for its result's gradient.

    Inputs in flight are counted as the first layer's. received, sent: chunks of layers on the rank that get
    their input from another stage, and that pass their result on.
    """
    return message_bytes * (received * maximum(micro_batches - in_flight, 0) + sent * micro_batches)


@formula(unit="bytes", source=PIPELINING)
def pipeline_output_bytes(*, message_bytes: Num, in_flight: Num, sent: Num) -> Num:
    """Results of stages, kept until their backward, which begins from them."""
    return message_bytes * in_flight * sent


@formula(unit="bytes", source=PIPELINING)
def pipeline_logits_bytes(
    *, tokens: Num, vocab: Num, activation_bytes: Num, micro_batches: Num, tp: Num
) -> Num:
    """Logits of every micro-batch but the one at hand, kept to be returned."""
    return (micro_batches - 1) * tokens * vocab * activation_bytes / tp


@formula(unit="bytes", source=SAVED_TENSORS)
def attention_mask_bytes(*, tokens: Num, span: Num, element_bytes: Num) -> Num:
    """A materialised mask, tokens x span, where the code path builds one."""
    return tokens * span * element_bytes


# --- what backward needs for a moment ------------------------------------------------------------------


@formula(unit="bytes", source="memory timeline, 18 configurations, 16 within 0.001 %")
def gated_mlp_backward_bytes(*, ffn: Num, hidden: Num, tokens: Num, activation_bytes: Num, tp: Num) -> Num:
    """Gradients alive at the widest point of a SwiGLU backward beyond what was saved."""
    return (2 * ffn / tp + hidden) * activation_bytes * tokens


@formula(
    unit="bytes",
    source="Liger-Kernel ops/swiglu.py: the backward kernel writes both gradients over its inputs; read",
)
def overwriting_gated_mlp_backward_bytes(
    *, ffn: Num, hidden: Num, tokens: Num, activation_bytes: Num, tp: Num
) -> Num:
    """The same in one kernel that overwrites gate and up: the product's gradient and the hidden one."""
    return (ffn / tp + hidden) * activation_bytes * tokens


@formula(
    unit="bytes", source="same reasoning as the gated form: one ffn-wide gradient and the hidden gradient"
)
def plain_mlp_backward_bytes(*, ffn: Num, hidden: Num, tokens: Num, activation_bytes: Num, tp: Num) -> Num:
    """Gradients alive at the widest point of a two-matrix MLP backward beyond what was saved."""
    return (ffn / tp + hidden) * activation_bytes * tokens


@formula(
    unit="bytes",
    source="attention written out, torch 2.13 on CPU: live tensors of its backward pass, to the byte",
)
def eager_attention_backward_bytes(
    *,
    heads: Num,
    span: Num,
    tokens: Num,
    softmax_bytes: Num,
    probability_bytes: Num,
    freed_bytes: Num,
    tp: Num,
) -> Num:
    """Scores alive at the widest point of written-out attention's backward beyond what the layer saved.

    Softmax's result, its gradient and that of its input, in softmax's own type. Gone by then: what was kept
    of the probabilities (bytes a score) and what the layer's feed-forward part kept (freed_bytes).
    """
    return maximum((3 * softmax_bytes - probability_bytes) * heads * span * tokens / tp - freed_bytes, 0)


@formula(unit="bytes", source="memory timeline, 18 configurations, 16 within 0.001 %")
def rmsnorm_backward_bytes(*, hidden: Num, tokens: Num) -> Num:
    """Five fp32 copies of the hidden state in the written-out RMSNorm backward."""
    return 20 * hidden * tokens


@formula(unit="bytes", source=TE)
def megatron_mlp_backward_bytes(
    *, mlp_width: Num, hidden: Num, tokens: Num, activation_bytes: Num, tp: Num, gathered: Num
) -> Num:
    """Gradients alive at the widest point of Megatron's MLP backward.

    mlp_width elements (2f gated, f plain), the hidden gradient, and with sequence parallelism the gathered
    input, which is whole on each rank.
    """
    return (
        activation_bytes * (mlp_width + hidden) * tokens / tp + gathered * activation_bytes * hidden * tokens
    )


@formula(unit="bytes", source=TE)
def megatron_head_backward_bytes(
    *, vocab: Num, hidden: Num, tokens: Num, activation_bytes: Num, tp: Num, gathered: Num
) -> Num:
    """Output layer backward in Megatron: logits' and input's gradients, dummy wgrad, gathered input."""
    return (
        activation_bytes * vocab * tokens / tp
        + activation_bytes * vocab * hidden / tp
        + gathered * activation_bytes * hidden * tokens
        + activation_bytes * hidden * tokens
    )


# --- LoRA ------------------------------------------------------------------------------------------------


@formula(unit="bytes/token", source=SAVED_TENSORS + ", peft 0.21")
def lora_saved_bytes(*, inputs: Num, rank: Num, element_bytes: Num, dropout: Num) -> Num:
    """One adapter: its input in the adapter's type and the rank-wide result; with dropout the mask as well.

    fp32 adapters on a bf16 model keep separate fp32 copies of the input per target.
    """
    return element_bytes * (inputs + rank) + dropout * inputs


@formula(unit="bytes", source="pipeline schedules: see formulas.pipeline")
def kept_activation_bytes(*, layer_bytes: Num, layers: Num, in_flight: Num) -> Num:
    """What a run of like layers keeps: one layer's bytes x layers x micro-batches in flight."""
    return layer_bytes * layers * in_flight


@formula(unit="bytes", source="memory timeline, 18 configurations, 16 within 0.001 %")
def recomputed_layer_bytes(*, full_bytes: Num, kept_bytes: Num) -> Num:
    """What rebuilding a layer adds to what was kept of it; a kept layer input counts on its own."""
    return maximum(full_bytes - kept_bytes, 0)


@formula(unit="bytes", source="torchtitan's layer-wise selective recomputation: every second layer")
def every_second_layer_bytes(*, full_bytes: Num, checkpoint_bytes: Num) -> Num:
    """Bytes a layer keeps on average when every second one is recomputed whole."""
    return (full_bytes + checkpoint_bytes) / 2


@formula(unit="bytes", source="saved-tensor trace of the network at its reference image size")
def network_saved_bytes(*, saved_elements: Num, images: Num, activation_bytes: Num) -> Num:
    """What a convolutional network keeps for backward: traced elements per image x images."""
    return saved_elements * images * activation_bytes


@formula(
    unit="bytes",
    source="images handed to a network under autocast, whose first convolution keeps its own 16-bit copy;"
    " MMEngine's and torchvision's training loops hold the batch until the step ends, read",
)
def image_batch_bytes(*, images: Num, side: Num) -> Num:
    """The batch in fp32, three channels."""
    return 12 * images * side * side


@formula(unit="bytes", source=SAVED_TENSORS)
def token_id_bytes(*, tokens: Num, in_flight: Num) -> Num:
    """Token ids, 8 bytes each, of every micro-batch in flight."""
    return 8 * tokens * in_flight


@formula(unit="bytes", source=SAVED_TENSORS)
def rotary_table_bytes(*, seq_len: Num, head_dim: Num, activation_bytes: Num) -> Num:
    """cos and sin of every position, kept once per model."""
    return 2 * seq_len * head_dim * activation_bytes
