"""How often each code path reads and writes a tensor, and how many calls it makes of the host.

The code paths are eager PyTorch, torch.compile and fused kernels. Pass counts are reads and writes of the
kernels each path launches, counted; calls are fitted.
"""

from __future__ import annotations

# Reads and writes of a tensor, forward and backward, by code path.
NORM_PASSES = {"eager": (18, 28), "compiled": (2, 3), "fused": (2, 3)}  # RMSNorm written out upcasts to fp32
LAYERNORM_PASSES = (2, 4)  # one kernel forward, two backward, in every code path
RESIDUAL_PASSES = {"eager": (3, 3), "compiled": (2, 2), "fused": (3, 3)}
ROPE_PASSES = {"eager": (12, 14), "compiled": (2, 2), "fused": (2, 2)}
GATE_PASSES = {"eager": (5, 9), "compiled": (3, 5), "fused": (3, 5)}  # of width ffn: two inputs, one product
PLAIN_PASSES = {"eager": (2, 3), "compiled": (2, 3), "fused": (2, 3)}
WRITTEN_OUT_GELU_PASSES = (20, 30)  # gelu_new as eight eager kernels
DROPOUT_PASSES = {"eager": (2.5, 2.5), "compiled": (0.5, 0.5), "fused": (0.5, 0.5)}
SCORE_PASSES = {"eager": (9, 9), "compiled": (4, 5), "fused": (4, 5)}  # scale, mask, softmax, dropout
# Autocast runs mask, softmax and dropout in fp32: counted in 16-bit units.
AUTOCAST_SCORE_PASSES = (16.5, 18.5)
# Relative positions: position scores written, shifted by a padded copy and added, masked in fp32.
RELATIVE_PASSES = 14
# Convolution, gates and chunked scan; fitted to the published Nemotron 3 Nano runs on four GPU kinds.
SCAN_PASSES = {"eager": (150, 300), "compiled": (120, 240), "fused": (120, 240)}
# Biases of experts, weighted by the router's fp32 probabilities outside the product, in fp32 passes of the
# output: product, addition, concatenation and cast; backward the same and two reductions.
EXPERT_BIAS_PASSES = (7, 11)
CAST_PASSES = 3  # fp32 read and 16-bit write, in 16-bit units
# Bytes per logit, forward and backward together: written-out fp32 log-softmax, compiled, one kernel.
LOSS_BYTES = {"eager": 28, "compiled": 14, "fused": 10}
# Bytes moved to unpack one 4-bit weight, its own left out: NF4 in one or two kernels; GPTQ's unpacking
# writes and reads 16- and 32-bit temporaries for shift, mask, offset and scale.
DEQUANTISE_BYTES = {False: 9.5, True: 20.5}

# Host time forward, in units of one kernel launch: module hooks, views, casts and autograd bookkeeping cost
# the host as much as launches do. Backward takes twice that. Fitted to runs too short for the GPU to be the
# slower side: Qwen at 256 tokens (eager), mixture-of-experts models on H100 and GB200 (TransformerEngine).
LAYER_CALLS = {"eager": 120, "compiled": 22, "fused": 90}
LINEAR_CALLS = {"eager": 3, "compiled": 2, "fused": 22}
LOW_PRECISION_CALLS = {"eager": 3, "compiled": 3, "fused": 22}
# Router, what is counted before the exchange, and the exchange with its permutations.
MOE_CALLS = {
    "moe_router": {"eager": 30, "compiled": 30, "fused": 80},
    "moe_preprocess": {"eager": 20, "compiled": 20, "fused": 50},
    "experts": {"eager": 40, "compiled": 40, "fused": 90},
}
REPLAY_CALLS = 10  # a layer's graph: copies into its inputs, an autograd node and the launch
EXPERT_CALLS = {"eager": 0, "compiled": 0, "fused": 3}  # per matrix of a local expert; twice with casts
LORA_CALLS = 20  # a wrapped module: dropout, two products, scale, add, casts
