"""Every formula of kept activations and of memory against arithmetic done by hand.

Small round sizes; the sums on the right are written from what the formula says it holds, not from its code.
"""

from __future__ import annotations

import numpy as np
import pytest

from gpucalc.formulas import activations as act
from gpucalc.formulas import losses
from gpucalc.formulas import memory as mem

MIB = 2**20


# --- norms -----------------------------------------------------------------------------------------------


def test_rmsnorm() -> None:
    # fp32 copy 4 x 10, normalised tensor 2 x 10 (or 4 x 10), one fp32 rstd
    assert act.rmsnorm_saved_bytes(width=10, rows=1, activation_bytes=2) == 40 + 20 + 4
    assert act.rmsnorm_saved_bytes(width=10, rows=1, activation_bytes=4) == 40 + 40 + 4
    # five heads of width 2: a rstd each
    assert act.rmsnorm_saved_bytes(width=10, rows=5, activation_bytes=2) == 40 + 20 + 20


def test_rmsnorm_with_an_fp32_weight() -> None:
    # two fp32 tensors and a rstd
    assert act.rmsnorm_fp32_weight_saved_bytes(width=10, rows=1) == 2 * 40 + 4
    assert act.rmsnorm_fp32_weight_saved_bytes(width=10, rows=5) == 2 * 40 + 5 * 4


def test_rmsnorm_that_keeps_its_input() -> None:
    # T5 in 16 bit: fp32 copy 40, input 20, normalised tensor 20, one fp32 rstd; in 32 bit 40, 40 and 4
    assert act.rmsnorm_keeping_input_saved_bytes(width=10) == 40 + 20 + 20 + 4 == 40 + 40 + 4


def test_layernorm() -> None:
    # input, mean, rstd
    assert act.layernorm_saved_bytes(width=10, activation_bytes=2) == 20 + 4 + 4
    # Cohere's: three fp32 tensors and a rstd
    assert act.cohere_layernorm_saved_bytes(width=10) == 3 * 40 + 4


def test_fused_rmsnorm() -> None:
    # input and rstd
    assert act.fused_rmsnorm_saved_bytes(width=10, rows=1, activation_bytes=2) == 20 + 4


def test_linear_input() -> None:
    # q, k and v under autocast: three 16-bit copies of a tensor 10 wide
    assert act.linear_input_saved_bytes(width=10, element_bytes=2, copies=3) == 60


def test_convolution() -> None:
    # 64 results a frame, 10 wide: the norm's input, the activation's, and its result, in 16 bits
    assert act.convolution_saved_bytes(width=10, rate=64, tensors=3, element_bytes=2) == 64 * 3 * 20


# --- attention ---------------------------------------------------------------------------------------------


def test_flash_attention() -> None:
    # 4 heads of 8 over 2 KV heads: q 32, k 16, v 16, out 32 elements; 4 log-sum-exps
    saved = act.flash_attention_saved_bytes(query_width=32, kv_width=16, heads=4, activation_bytes=2)
    assert saved == 2 * (32 + 16 + 16 + 32) + 4 * 4


def test_fused_qkv_view() -> None:
    # v keeps the whole qkv output, 32 + 16 + 16, alive: q and k beyond v itself
    saved = act.fused_qkv_view_saved_bytes(query_width=32, kv_width=16, activation_bytes=2)
    assert saved == 2 * (32 + 16 + 16) - 2 * 16


def test_partial_rotary() -> None:
    assert act.partial_rotary_saved_bytes(query_width=32, activation_bytes=2) == 64


def test_eager_attention() -> None:
    rest = {"query_width": 32, "heads": 4, "span": 100, "activation_bytes": 2}
    # q, k and v repeated to all heads, out: 4 x 32 elements; scores 4 heads x 100 keys
    tensors = 4 * 32 * 2
    fp32_softmax = 4 * 100 * (4 + 2)  # fp32 probabilities and their 16-bit cast
    assert act.eager_attention_saved_bytes(probability_bytes=6, dropout=0, **rest) == tensors + fp32_softmax
    # softmax in 16 bit, with dropout: probabilities, mask, dropped probabilities: the paper's 5 a s
    five = 5 * 4 * 100
    assert act.eager_attention_saved_bytes(probability_bytes=2, dropout=1, **rest) == tensors + five


def test_latent_attention() -> None:
    # 2 heads; q and k 12 wide, kv up-projection 8 + 6 per head (v is a view), out 6; log-sum-exp
    saved = act.mla_saved_bytes(heads=2, qk_dim=12, nope_dim=8, v_dim=6, activation_bytes=2)
    assert saved == 2 * (24 + 24 + 28 + 12) + 8


def test_mamba2() -> None:
    # projections 50 and the scan's output 20 in 16 bit, one rstd
    assert act.mamba2_saved_bytes(projected_width=50, inner=20, activation_bytes=2) == 100 + 40 + 4


def test_state_mixer() -> None:
    # projections 50, convolution output 30, inner stream 20 before and after the gate, in 16 bit;
    # 4 heads x 64 states in fp32 once per 16 tokens
    saved = act.state_mixer_saved_bytes(
        projected_width=50,
        inner=20,
        conv_width=30,
        state_per_head=64,
        heads=4,
        chunk=16,
        activation_bytes=2,
    )
    assert saved == 2 * (50 + 30 + 20 + 20) + 4 * 4 * 64 / 16


# --- feed-forward ------------------------------------------------------------------------------------------


def test_feed_forward() -> None:
    # gate, activated gate, up, product
    assert act.gated_mlp_saved_bytes(ffn=10, activation_bytes=2, tensors=4) == 20 + 20 + 20 + 20
    # gate, up, product
    assert act.fused_gated_mlp_saved_bytes(ffn=10, activation_bytes=2, input_bytes=2) == 20 + 20 + 20
    assert act.fused_gated_mlp_saved_bytes(ffn=10, activation_bytes=2, input_bytes=1) == 20 + 20 + 10
    # GELU: before and after
    assert act.plain_mlp_saved_bytes(ffn=10, activation_bytes=2, tensors=2) == 20 + 20


def test_graphs() -> None:
    assert mem.cuda_graph_bytes(graph_bytes=3e9) == 3e9


def test_experts() -> None:
    # two experts per token: input and output 8 wide, four tensors 10 wide, 24 bytes of indexes
    rest = {"top_k": 2, "width": 8, "expert_ffn": 10, "activation_bytes": 2, "imbalance": 1.0}
    wide = {**rest, "expert_tensors": 4, "input_tensors": 1, "input_bytes": 2, "stash_factor": 1}
    assert act.moe_saved_bytes(**wide, wide_tensors=2) == 2 * (16 + 16 + 80 + 24)
    assert act.moe_saved_bytes(**wide, wide_tensors=1) == 2 * (16 + 80 + 24)
    assert act.moe_saved_bytes(**wide | {"imbalance": 1.5}, wide_tensors=2) == 3 * (16 + 16 + 80 + 24)
    # Inputs of products in a byte: 8 and 10 wide; gate and up stay in two. Made again, the last is not kept.
    eight = {**rest, "wide_tensors": 1, "input_bytes": 1, "stash_factor": 1}
    assert act.moe_saved_bytes(**eight, expert_tensors=3, input_tensors=1) == 2 * (8 + 10 + 40 + 24)
    assert act.moe_saved_bytes(**eight, expert_tensors=2, input_tensors=0) == 2 * (8 + 40 + 24)
    half_more = {**eight, "stash_factor": 1.5}
    assert act.moe_saved_bytes(**half_more, expert_tensors=2, input_tensors=0) == 3 * (8 + 40 + 24)


def test_router() -> None:
    # 8 fp32 logits; for each of 2 experts an index of 8 bytes and two fp32 weights
    assert act.router_saved_bytes(experts=8, top_k=2) == 8 * 4 + 2 * (8 + 4 + 4)


# --- head and loss -----------------------------------------------------------------------------------------


def test_dropout_masks() -> None:
    assert act.dropout_mask_saved_bytes(width=10, masks=2) == 20


def test_unfused_loss() -> None:
    # fp32 log-softmax over 100 words and a label of 8 bytes
    assert losses.unfused_loss_saved_bytes(vocab=100, loss_bytes=4) == 400 + 8
    # forward: 16-bit logits and their fp32 copy; fp32 logits need no copy
    assert losses.loss_forward_bytes(vocab=100, activation_bytes=2, loss_bytes=4) == 200 + 400
    assert losses.loss_forward_bytes(vocab=100, activation_bytes=4, loss_bytes=4) == 400
    # backward: two fp32 gradients; the caller's 16-bit logits where it keeps them
    common = {"vocab": 100, "activation_bytes": 2}
    assert losses.loss_backward_bytes(**common, loss_bytes=4, logits_kept=0) == 400 + 400
    assert losses.loss_backward_bytes(**common, loss_bytes=4, logits_kept=1) == 400 + 400 + 200
    assert losses.loss_backward_bytes(**common, loss_bytes=2, logits_kept=0) == 200 + 200


def test_fused_loss() -> None:
    # logits and gradient, both 16 bit
    assert losses.fused_loss_bytes(vocab=100, activation_bytes=2, chunks=1) == 200 + 200
    assert losses.fused_loss_bytes(vocab=100, activation_bytes=2, chunks=8) == 200 + 25


def test_chunked_loss() -> None:
    # 64 tokens, 100 words, hidden 30: ceil(100 / 30) = 4 chunks of 16 rows
    rest = {"tokens": 64, "vocab": 100, "hidden": 30, "activation_bytes": 2}
    inputs, weights, chunk = 2 * 30 * 64, 2 * 100 * 30, 16 * 100 * (2 + 4)
    assert losses.chunked_loss_bytes(head_trained=1, **rest) == inputs + weights + chunk
    assert losses.chunked_loss_bytes(head_trained=0, **rest) == inputs + chunk


# --- whole layers ------------------------------------------------------------------------------------------


def test_layer_and_checkpoint() -> None:
    assert act.layer_saved_bytes(bytes_per_token=34, tokens=100, tp=2) == 1700
    # the 16-bit input of 10 elements, tokens divided over two ranks
    assert act.checkpoint_bytes(hidden=10, tokens=100, activation_bytes=2, shards=2) == 1000
    # three layers of 1,700 bytes, four micro-batches under way
    assert act.kept_activation_bytes(layer_bytes=1700, layers=3, in_flight=4) == 20_400


def test_mask() -> None:
    assert act.attention_mask_bytes(tokens=10, span=100, element_bytes=2) == 2000


def test_network() -> None:
    # 11.1 million elements per image, 32 images, fp32
    saved = act.network_saved_bytes(saved_elements=11_100_000, images=32, activation_bytes=4)
    assert saved == 1_420_800_000


def test_ids_and_rotation_tables() -> None:
    assert act.token_id_bytes(tokens=100, in_flight=3) == 2400
    # cos and sin, 100 positions, 8 wide, 16 bit
    assert act.rotary_table_bytes(seq_len=100, head_dim=8, activation_bytes=2) == 2 * 100 * 8 * 2


# --- what backward needs for a moment ----------------------------------------------------------------------


def test_feed_forward_backward() -> None:
    rest = {"ffn": 40, "hidden": 10, "tokens": 100, "activation_bytes": 2}
    # gradients of gate and up, and of the input
    assert act.gated_mlp_backward_bytes(tp=1, **rest) == (40 + 40 + 10) * 2 * 100
    assert act.gated_mlp_backward_bytes(tp=4, **rest) == (10 + 10 + 10) * 2 * 100
    assert act.overwriting_gated_mlp_backward_bytes(tp=4, **rest) == (10 + 10) * 2 * 100
    assert act.plain_mlp_backward_bytes(tp=4, **rest) == (10 + 10) * 2 * 100


def test_rmsnorm_backward() -> None:
    # five fp32 copies
    assert act.rmsnorm_backward_bytes(hidden=10, tokens=100) == 5 * 4 * 10 * 100


def test_megatron_backward() -> None:
    rest = {"hidden": 10, "tokens": 100, "activation_bytes": 2, "tp": 4}
    divided = 2 * (80 + 10) * 100 / 4
    assert act.megatron_mlp_backward_bytes(mlp_width=80, gathered=0, **rest) == divided
    assert act.megatron_mlp_backward_bytes(mlp_width=80, gathered=1, **rest) == divided + 2 * 10 * 100
    # logits' gradient and the weight buffer, divided; the input's gradient and the gathered input, whole
    logits, weight, whole = 2 * 400 * 100 / 4, 2 * 400 * 10 / 4, 2 * 10 * 100
    assert act.megatron_head_backward_bytes(vocab=400, gathered=1, **rest) == logits + weight + 2 * whole
    assert act.megatron_head_backward_bytes(vocab=400, gathered=0, **rest) == logits + weight + whole


def test_lora() -> None:
    # fp32: a copy of the input, 10 wide, and the result of rank 4; dropout adds a mask of bytes
    assert act.lora_saved_bytes(inputs=10, rank=4, element_bytes=4, dropout=0) == 40 + 16
    assert act.lora_saved_bytes(inputs=10, rank=4, element_bytes=4, dropout=1) == 40 + 16 + 10


# --- state -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "sharded"), [(0, ""), (1, "o"), (2, "og"), (3, "ogw")])
def test_state_of_a_mixed_precision_model(stage: int, sharded: str) -> None:
    """1,000 parameters on 4 ranks, 2 + 2 + 12 bytes each (Rajbhandari et al. 2020)."""
    rest = {"params": 1000, "shard": 4, "zero_stage": stage}
    weights, gradients, states = 2000, 2000, 12_000
    assert mem.weight_bytes(parameter_bytes=2, **rest) == (weights / 4 if "w" in sharded else weights)
    assert mem.gradient_bytes(element_bytes=2, **rest) == (gradients / 4 if "g" in sharded else gradients)
    assert mem.optimizer_state_bytes(bytes_per_param=12, **rest) == (states / 4 if "o" in sharded else states)


def test_zero_paper_example() -> None:
    """7.5 billion parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB (figure 1 of the paper)."""
    for stage, gigabytes in ((0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)):
        rest = {"params": 7_500_000_000, "shard": 64, "zero_stage": stage}
        total = (
            mem.weight_bytes(parameter_bytes=2, **rest)
            + mem.gradient_bytes(element_bytes=2, **rest)
            + mem.optimizer_state_bytes(bytes_per_param=12, **rest)
        )
        assert total / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_copies_of_gradients_and_weights() -> None:
    assert mem.ddp_bucket_bytes(params=1000, element_bytes=4) == 4000
    assert mem.autocast_weight_bytes(linear_params=1000) == 2000


# --- framework buffers -------------------------------------------------------------------------------------


def test_deepspeed() -> None:
    # two buckets of 500 elements, whole though the model has 100; what lies in one, laid out by rank
    assert mem.deepspeed_bucket_bytes(bucket_elements=500, element_bytes=2, buffers=2) == 2 * 500 * 2
    assert mem.deepspeed_scatter_bytes(bucket_elements=500, params=100, element_bytes=2) == 200
    assert mem.deepspeed_scatter_bytes(bucket_elements=500, params=1000, element_bytes=2) == 1000
    assert mem.cast_gradient_bytes(params=100) == 400
    assert mem.undivided_weight_bytes(params=1000, element_bytes=2, shard=4) == 1500
    # a quarter of 1,000 16-bit gradients: reduced, and once more in one flat tensor
    assert mem.deepspeed_gradient_partition_bytes(params=1000, element_bytes=2, shard=4) == 500
    flat = {"params": 1000, "element_bytes": 2, "shard": 4}
    assert mem.deepspeed_flat_gradient_bytes(**flat, sub_group_elements=1000) == 500
    assert mem.deepspeed_flat_gradient_bytes(**flat, sub_group_elements=100) == 200
    assert mem.deepspeed_live_parameter_bytes(live_elements=500, params=1000, element_bytes=2) == 1000
    # fp32 gradients of this rank's quarter, or of one sub-group of it
    assert mem.deepspeed_step_gradient_bytes(params=1000, shard=4, sub_group_elements=1000) == 4 * 250
    assert mem.deepspeed_step_gradient_bytes(params=1000, shard=4, sub_group_elements=100) == 4 * 100


def test_fsdp() -> None:
    # root 100, layer 30 parameters in 16 bit
    # forward: root and layer in the flat buffer and its copy, or root and three layers
    forward = mem.fsdp_forward_bytes(root_params=100, layer_params=30, element_bytes=2)
    assert forward == 2 * (100 + 100 + 30 + 30)
    assert mem.fsdp_forward_bytes(root_params=10, layer_params=30, element_bytes=2) == 2 * (10 + 90)
    # all 5 layers stay gathered, two more in buffers
    kept = mem.fsdp_forward_unresharded_bytes(root_params=100, layer_params=30, layers=5, element_bytes=2)
    assert kept == 2 * (100 + 5 * 30 + 60)
    # root, head gradient 60, a layer's weights and gradients, the next layer's weights: 16 bit; the
    # previous layer on its way to the reduction: 32 bit
    backward = mem.fsdp_backward_bytes(
        root_params=100, head_params=60, layer_params=30, element_bytes=2, reduce_bytes=4
    )
    assert backward == 2 * (100 + 60 + 30 + 30 + 30) + 4 * 30
    # all 5 layers there, one of them with gradients instead of the last one's weights
    stayed = mem.fsdp_backward_unresharded_bytes(
        root_params=100, head_params=60, layer_params=30, layers=5, element_bytes=2, reduce_bytes=4
    )
    assert stayed == 2 * (100 + 60 + 5 * 30) + 4 * 30
    # end: root gradients in 16 bit and their fp32 copy; or root weights, gradients and a layer's reduction
    assert mem.fsdp_end_bytes(root_params=100, layer_params=30, element_bytes=2, reduce_bytes=4) == 600
    assert mem.fsdp_end_bytes(root_params=10, layer_params=30, element_bytes=2, reduce_bytes=4) == 40 + 120
    assert mem.fsdp_accumulated_gradient_bytes(params=1000, reduce_bytes=4) == 4000


def test_fsdp_with_tables_wrapped_on_their_own() -> None:
    small, large = {"table_params": 10}, {"table_params": 100}
    sizes = {"layer_params": 30, "element_bytes": 2}
    # three layers, or the head in the flat buffer and its copy beside one
    assert mem.fsdp_wrapped_forward_bytes(**small, **sizes) == 2 * 90
    assert mem.fsdp_wrapped_forward_bytes(**large, **sizes) == 2 * (200 + 30)
    # a layer, its gradients and the next one, the previous layer's reduction in 32 bit
    assert mem.fsdp_wrapped_backward_bytes(**small, **sizes, reduce_bytes=4) == 2 * 90 + 4 * 30
    # the head's gradient and its reduction beside the last layer
    assert mem.fsdp_wrapped_backward_bytes(**large, **sizes, reduce_bytes=4) == 2 * (100 + 30) + 4 * 100
    # five layers stay: two more in buffers and the embedding; or the embedding and the head twice
    kept = mem.fsdp_wrapped_forward_unresharded_bytes
    assert kept(**small, **sizes, layers=5) == 2 * (150 + 60 + 10)
    assert kept(**large, **sizes, layers=5) == 2 * (150 + 30 + 300)
    # five layers, the embedding and a layer's reduction; or the head's gradient and its reduction
    back = mem.fsdp_wrapped_backward_unresharded_bytes
    assert back(**small, **sizes, layers=5, reduce_bytes=4) == 2 * (150 + 10) + 4 * 30
    assert back(**large, **sizes, layers=5, reduce_bytes=4) == 2 * (150 + 200) + 4 * 100


def test_megatron() -> None:
    assert mem.dummy_weight_gradient_bytes(matmul_params=1000, tp=4) == 500


def test_optimizer_step() -> None:
    # 1,000 parameters, a temporary of 4 bytes each, over 4 ranks
    step = {"params": 1000, "state_bytes": 4, "shard": 4}
    assert mem.foreach_step_bytes(**step, sub_group_elements=1000) == 1000
    assert mem.foreach_step_bytes(**step, sub_group_elements=100) == 400


# --- outside the allocator ---------------------------------------------------------------------------------


def test_runtime() -> None:
    # 1,000 bytes that stay at 4 % and 500 that pass at 20 %: 40 + 100; beyond 300 of them at 5 %
    shares = {"lasting_fraction": 0.04, "passing_fraction": 0.2, "large_fraction": 0.05}
    used = {"lasting_bytes": 1000, "passing_bytes": 500}
    assert mem.allocator_overhead_bytes(**used, **shares, large_bytes=9000) == 140
    assert mem.allocator_overhead_bytes(**used, **shares, large_bytes=300) == 40 + 60 + 10
    assert mem.cuda_context_bytes(context_bytes=512 * MIB) == 536_870_912
    # two groups x 16 channels x 8 MiB
    assert mem.nccl_exchange_buffer_bytes(peers=7, peer_channels=32, channel_bytes=12 * MIB) == 2688 * MIB
    assert mem.nccl_buffer_bytes(communicators=2, channels=16, channel_bytes=8 * MIB) == 256 * MIB
    assert mem.cublas_workspace_bytes(workspace_bytes=32 * MIB, handles=2) == 64 * MIB


def test_host_memory() -> None:
    assert mem.host_load_bytes(ranks=8, params=1000, element_bytes=2) == 16_000
    assert mem.host_offload_bytes(params=1000, bytes_per_param=12) == 12_000


# --- columns -----------------------------------------------------------------------------------------------


def test_columns_equal_scalars() -> None:
    stages = np.array([0.0, 1.0, 2.0, 3.0])
    params = np.array([1e9, 7e9, 70e9, 405e9])
    column = mem.weight_bytes(params=params, parameter_bytes=2, shard=8, zero_stage=stages)
    assert list(column) == [
        mem.weight_bytes(params=float(params[i]), parameter_bytes=2, shard=8, zero_stage=float(stages[i]))
        for i in range(4)
    ]
    assert list(column) == [2e9, 14e9, 140e9, 405e9 * 2 / 8]
    sizes = np.array([2.0, 4.0])
    norms = act.rmsnorm_saved_bytes(width=10.0, rows=1.0, activation_bytes=sizes)
    assert list(norms) == [64.0, 84.0]
    loss = losses.loss_forward_bytes(vocab=100.0, activation_bytes=sizes, loss_bytes=4)
    assert list(loss) == [600.0, 400.0]


def test_loss_parallel_backward_bytes() -> None:
    # Gradient, exponential, sum: 3 fp32 tensors of 32,000 logits = 12 x 32,000 bytes a token.
    assert losses.loss_parallel_backward_bytes(vocab=32_000) == 384_000


def test_parameters_of_a_rank() -> None:
    # 800 in matrices over 4 ranks, 10 in norms on each; 6,400 in experts over 8 x 2 ranks
    assert mem.dense_rank_params(sharded=800, replicated=10, tp=4) == 210
    assert mem.expert_rank_params(expert=6_400, ep=8, etp=2) == 400


def test_recomputed_layers() -> None:
    # 100 bytes, of which 30 were kept; every second layer whole, the other as its 10-byte input
    assert act.recomputed_layer_bytes(full_bytes=100, kept_bytes=30) == 70
    assert act.recomputed_layer_bytes(full_bytes=100, kept_bytes=130) == 0
    assert act.every_second_layer_bytes(full_bytes=100, checkpoint_bytes=10) == 55


def test_copies_beside_trained_weights() -> None:
    shared = {"params": 1000, "element_bytes": 4, "shard": 8}
    assert mem.averaged_weight_bytes(**shared, zero_stage=2) == 4000  # copied whole, as the weights are held
    assert mem.averaged_weight_bytes(**shared, zero_stage=3) == 500


def test_frozen_weights_gathered_beside_adapters() -> None:
    # a layer of 100 and the tables and the next layer, 350, in 16 bit: no gradients
    assert mem.fsdp_frozen_backward_bytes(layer_params=100, other_params=350, element_bytes=2) == 900


def test_what_stays_where_latents_are_projected_again() -> None:
    # 8 heads of 64: the result in 16 bit, and log-sum-exps
    assert act.attention_output_saved_bytes(heads=8, v_dim=64, activation_bytes=2) == 1024 + 32


def test_scores_in_written_out_attention_backward() -> None:
    # 2 heads x 8 keys x 8 tokens: three in fp32 less 4 + 2 kept, 6 bytes each
    sizes = {"heads": 2, "span": 8, "tokens": 8, "softmax_bytes": 4, "probability_bytes": 6}
    assert act.eager_attention_backward_bytes(**sizes, freed_bytes=0, tp=1) == 6 * 128
    assert act.eager_attention_backward_bytes(**sizes, freed_bytes=0, tp=2) == 3 * 128
    assert act.eager_attention_backward_bytes(**sizes, freed_bytes=700, tp=1) == 68
    assert act.eager_attention_backward_bytes(**sizes, freed_bytes=9000, tp=1) == 0


def test_weights_of_transformer_engine() -> None:
    # by rows and by columns, a byte each; 4 bits and a byte of scale for 16 elements
    assert mem.quantised_weight_copy_bytes(linear_params=1600, element_bytes=1) == 3200
    assert mem.quantised_weight_copy_bytes(linear_params=1600, element_bytes=0.5 + 1 / 16) == 1800


def test_weights_in_four_bits() -> None:
    # half a byte; an fp32 scale for 64, or a byte for 64 and an fp32 for 256 of those
    assert mem.nf4_bytes_per_param(block=64, double=0) == 0.5625
    assert mem.nf4_bytes_per_param(block=64, double=1) == 0.5 + 1 / 64 + 1 / 4096
    assert mem.nf4_bytes_per_param(block=128, double=0) == 0.53125


def test_losses_of_detectors() -> None:
    # 8 images of 100 bytes and 50 of the fullest; results and gradients of 60 elements in 16 bit
    sizes = {"images": 8, "loss_bytes": 100, "once_bytes": 50, "head_elements": 60}
    assert losses.detection_loss_bytes(**sizes, activation_bytes=1) == 850
    assert losses.detection_loss_bytes(**sizes, activation_bytes=2) == 960
    assert act.image_batch_bytes(images=2, side=640) == 2 * 3 * 640 * 640 * 4


def test_a_loss_that_overwrites_what_it_read() -> None:
    # 16-bit logits, or their gradient; with the logits beside it in a DeepSpeed pipeline
    assert losses.overwriting_loss_bytes(vocab=100, activation_bytes=2, logits_kept=0) == 200
    assert losses.overwriting_loss_bytes(vocab=100, activation_bytes=2, logits_kept=1) == 400


def test_what_pipelining_keeps_between_stages() -> None:
    # 8 micro-batches, 3 of them in flight, two chunks that receive and one that sends
    message = {"message_bytes": 100, "in_flight": 3}
    assert act.pipeline_receive_bytes(**message, micro_batches=8, received=2, sent=1) == 2 * 500 + 800
    assert act.pipeline_receive_bytes(**message, micro_batches=2, received=1, sent=0) == 0
    assert act.pipeline_output_bytes(**message, sent=1) == 300
    assert act.pipeline_output_bytes(**message, sent=2) == 600
    logits = {"tokens": 10, "vocab": 100, "activation_bytes": 2, "tp": 2}
    assert act.pipeline_logits_bytes(**logits, micro_batches=4) == 3 * 1000
