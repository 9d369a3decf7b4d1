"""Rules of three planning documents about memory and training, and what each has to be held against.

The documents: "multi-GPU architectures", "single-machine multi-card deployment" and "task selection and
deployment". A rule is worked out as its document words it, slips included; the docstring says where
it departs from what is needed. The other formulas here are what the same question takes.
"""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.formulas.comm import all_reduce_bus_factor
from gpucalc.formulas.memory import gradient_bytes, optimizer_state_bytes, weight_bytes
from gpucalc.num import Num, ceil_div, minimum, sqrt

_ARCHITECTURES = 'Document "multi-GPU architectures"'
_SINGLE_MACHINE = 'Document "single-machine multi-card deployment"'
_SELECTION = 'Document "task selection and deployment"'
_KORTHIKANTI = "Korthikanti et al. 2022 (arXiv 2205.05198), attention scores kept, 16-bit"
_DEFINITION = "Definition"
_ARITHMETIC = "Arithmetic"

# --- memory of weights and states ------------------------------------------------------------------


@formula(unit="bytes", source=_SELECTION + ", section 1: parameters x 4 (FP32)")
def fp32_rule_bytes(*, params: Num) -> Num:
    """Parameter term of the document's memory rule: four bytes each, whatever they are stored in."""
    return 4 * params


@formula(unit="bytes", source=_SELECTION + ", section 1: activated parameters x 4 x batch size")
def activation_rule_bytes(*, active_params: Num, batch: Num) -> Num:
    """Activation term of the document's memory rule: weights a token meets, once for every sample.

    No sequence length, layers or width enter, which is what activations do depend on.
    """
    return 4 * active_params * batch


@formula(
    unit="bytes",
    source=_SELECTION + ", section 1: parameters x 4 + activated parameters x 4 x batch size + optimizer",
)
def memory_rule_bytes(*, params: Num, active_params: Num, batch: Num, optimizer_bytes: Num) -> Num:
    """Memory of a whole job by the document's rule; `optimizer_bytes` is per parameter.

    Gradients are missing, and nothing says over how many cards it is divided.
    """
    return (
        fp32_rule_bytes(params=params)
        + activation_rule_bytes(active_params=active_params, batch=batch)
        + optimizer_bytes * params
    )


@formula(unit="bytes", source="Arithmetic: the document's rule over the cards its example names")
def memory_rule_card_bytes(*, memory_rule_bytes: Num, gpus: Num) -> Num:
    """Share of one card when the whole sum is divided over all of them."""
    return memory_rule_bytes / gpus


@formula(unit="bytes", source=_SINGLE_MACHINE + ", section 2.1: parameters x 4 (FP16) / cards")
def card_rule_bytes(*, params: Num, gpus: Num) -> Num:
    """Least memory of a card by the document's rule, with parameters counted one by one.

    Four bytes are FP32; the rule says FP16. As printed, with parameters in 1e8, it yields 0.1 GB.
    """
    return params * 4 / gpus


@formula(unit="bytes", source=_DEFINITION + ": FP16 and BF16 take 2 bytes, FP32 4")
def weight_shard_bytes(*, params: Num, element_bytes: Num, gpus: Num) -> Num:
    """Weights of one card when they are divided evenly; nothing else is in it."""
    return params * element_bytes / gpus


@formula(unit="bytes", source=_DEFINITION)
def stored_weight_bytes(*, params: Num, bits: Num) -> Num:
    """Weights at so many bits each, without scales."""
    return params * bits / 8


@formula(unit="bytes", source="DeepSeek-V4 as published: routed experts in FP4, the rest in FP8")
def native_shard_bytes(
    *, expert_params: Num, expert_bits: Num, other_params: Num, other_bits: Num, gpus: Num
) -> Num:
    """Weights of one card when experts and the rest are stored at bits of their own."""
    return (
        stored_weight_bytes(params=expert_params, bits=expert_bits)
        + stored_weight_bytes(params=other_params, bits=other_bits)
    ) / gpus


@formula(unit="bytes", source=_SINGLE_MACHINE + ", section 2.1: keep a 20 % margin on top")
def with_margin_bytes(*, needed_bytes: Num, margin: Num) -> Num:
    """The margin read as part of the need: what the card must then have."""
    return needed_bytes * (1 + margin)


@formula(unit="bytes", source=_SINGLE_MACHINE + ", section 2.1: keep a 20 % margin on top")
def usable_card_bytes(*, card_bytes: Num, margin: Num) -> Num:
    """The margin read as part of the card: what may then be filled."""
    return card_bytes * (1 - margin)


@formula(unit="cards", source=_ARITHMETIC)
def cards_needed(*, needed_bytes: Num, card_bytes: Num, usable_share: Num) -> Num:
    """Cards that hold so many evenly divided bytes."""
    return ceil_div(needed_bytes, card_bytes * usable_share)


@formula(
    unit="bytes", source="Rajbhandari et al. 2020 (ZeRO), section 3.1: mixed precision, Adam, 2 + 2 + 12"
)
def adam_state_bytes(*, params: Num, shard: Num, zero_stage: Num) -> Num:
    """Weights, gradients and optimizer states of one rank: 4P + 12P/n, 2P + 14P/n, 16P/n by stage."""
    return (
        weight_bytes(params=params, parameter_bytes=2, shard=shard, zero_stage=zero_stage)
        + gradient_bytes(params=params, element_bytes=2, shard=shard, zero_stage=zero_stage)
        + optimizer_state_bytes(params=params, bytes_per_param=12, shard=shard, zero_stage=zero_stage)
    )


@formula(unit="fraction", source="Rajbhandari et al. 2020 (ZeRO), section 3.1")
def zero_saving(*, shard: Num, zero_stage: Num) -> Num:
    """Share of the model states a rank is rid of at a ZeRO stage."""
    return 1 - adam_state_bytes(params=1, shard=shard, zero_stage=zero_stage) / 16


@formula(unit="bytes", source="Rajbhandari et al. 2020 (ZeRO), section 3.1: FP32 Adam 4 + 4 + 8")
def fp32_adam_bytes(*, params: Num) -> Num:
    """Weights, gradients and the two moments of Adam, all FP32."""
    return params * (4 + 4 + 8)


@formula(unit="fraction", source=_ARITHMETIC)
def saving(*, before: Num, after: Num) -> Num:
    """Share that is gone."""
    return 1 - after / before


@formula(unit="bytes", source="Group-wise quantisation: one scale for a group of values")
def quantised_element_bytes(*, bits: Num, scale_bytes: Num, group: Num) -> Num:
    """Bytes of a quantised value with its share of the group's scale."""
    return bits / 8 + scale_bytes / group


@formula(unit="fraction", source="NVIDIA structured sparsity: two of four values kept, 2-bit index each")
def sparse_kept_share(*, value_bits: Num, index_bits: Num, kept: Num) -> Num:
    """Share of the dense bytes that are left when a share `kept` of the values is stored with an index."""
    return kept * (value_bits + index_bits) / value_bits


# --- activations -----------------------------------------------------------------------------------


@formula(unit="layers", source="Chen et al. 2016: n/k segments kept and k layers live, least at k = sqrt(n)")
def sqrt_checkpoint_layers(*, layers: Num) -> Num:
    """Layers' worth of activations held when a chain of layers is cut into sqrt(n) segments."""
    return 2 * sqrt(layers)


@formula(unit="bytes", source=_KORTHIKANTI)
def full_activation_bytes(*, layers: Num, seq_len: Num, batch: Num, hidden: Num, heads: Num) -> Num:
    """Activations kept without recomputation: s b h (34 + 5 a s / h) a layer."""
    return layers * seq_len * batch * hidden * (34 + 5 * heads * seq_len / hidden)


@formula(unit="bytes", source=_KORTHIKANTI)
def block_checkpoint_bytes(*, layers: Num, seq_len: Num, batch: Num, hidden: Num, heads: Num) -> Num:
    """Activations when every layer is recomputed: 2 s b h of each, and one layer in full."""
    return 2 * layers * seq_len * batch * hidden + full_activation_bytes(
        layers=1, seq_len=seq_len, batch=batch, hidden=hidden, heads=heads
    )


@formula(unit="bytes", source="12 h^2 weights in a Transformer layer, 16 bytes of states each")
def transformer_state_bytes(*, layers: Num, hidden: Num) -> Num:
    """Model states of a plain Transformer of that width, embeddings left out."""
    return 16 * 12 * layers * hidden**2


@formula(unit="fraction", source="One forward pass more: backward costs twice the forward")
def recompute_overhead(*, backward_over_forward: Num) -> Num:
    """Extra arithmetic when every layer runs forward a second time."""
    return 1 / (1 + backward_over_forward)


# --- batches and pipelines -------------------------------------------------------------------------


@formula(unit="samples", source=_SELECTION + ", section 3.1: accumulation gives an equivalent large batch")
def effective_batch(*, micro_batch: Num, accumulation: Num, ranks: Num) -> Num:
    """Samples of one optimizer step."""
    return micro_batch * accumulation * ranks


@formula(unit="fraction", source="Huang et al. 2019 (GPipe); Narayanan et al. 2021")
def bubble_share(*, pp: Num, micro_batches: Num) -> Num:
    """Idle share of a pipeline's step: (p - 1) / (m + p - 1)."""
    return (pp - 1) / (micro_batches + pp - 1)


@formula(unit="layers", source=_ARITHMETIC)
def largest_stage(*, layers: Num, pp: Num) -> Num:
    """Layers of the largest stage when they are dealt out as evenly as can be."""
    return ceil_div(layers, pp)


@formula(unit="factor", source=_SINGLE_MACHINE + ", section 5.2: min(1.0, epoch / 10)")
def warmup_factor(*, epoch: Num, epochs: Num) -> Num:
    """Share of the learning rate in an epoch by the document's schedule, counted from zero."""
    return minimum(1.0, epoch / epochs)


@formula(unit="bytes", source="Rajbhandari et al. 2020 (ZeRO), section 7.2: stage 3 gathers weights twice")
def step_traffic_bytes(*, gradient_bytes: Num, ranks: Num, zero3: Num) -> Num:
    """Bytes a rank sends in a step of data parallelism; half as much again under ZeRO-3."""
    return gradient_bytes * all_reduce_bus_factor(ranks=ranks) * (1 + 0.5 * zero3)


@formula(unit="days", source="Kaplan et al. 2020: 6 FLOPs a parameter and token")
def pretraining_days(
    *, active_params: Num, tokens: Num, gpus: Num, peak_flops_per_s: Num, utilisation: Num
) -> Num:
    """Days a training run takes at that share of the peak."""
    return 6 * active_params * tokens / (gpus * peak_flops_per_s * utilisation) / 86400


# --- keeping a run alive ---------------------------------------------------------------------------


@formula(unit="s", source="Young 1974; Daly 2006")
def save_interval_s(*, write_s: Num, mtbf_s: Num) -> Num:
    """Time between checkpoints that loses least: sqrt(2 x write time x mean time between failures)."""
    return sqrt(2 * write_s * mtbf_s)


@formula(unit="fraction", source=_ARCHITECTURES + ", section 3.3: save every 500 steps")
def save_share(*, write_s: Num, steps: Num, step_s: Num) -> Num:
    """Time spent on saving, over the time between saves."""
    return write_s / (steps * step_s)


@formula(unit="bytes", source="BF16 weights, FP32 master copy and two moments: 2 + 12 bytes a parameter")
def saved_state_bytes(*, params: Num) -> Num:
    """Size of a checkpoint that training can go on from."""
    return 14 * params


@formula(unit="s", source="Half an interval is lost on average")
def lost_work_s(*, interval_s: Num, restart_s: Num) -> Num:
    """Time one failure costs."""
    return interval_s / 2 + restart_s


@formula(unit="GPUs", source=_ARCHITECTURES + ", section 5: at least 10 % of the GPUs spare")
def gpus_with_spares(*, gpus: Num, spare_percent: Num) -> Num:
    """GPUs to buy for so many in use; the share in percent, so that whole numbers stay whole."""
    return ceil_div(gpus * (100 + spare_percent), 100)


@formula(unit="GPU h", source="Rule of three: 95 % bound after no failure")
def proven_gpu_hours(*, hours: Num, gpus: Num) -> Num:
    """Mean time between failures that a soak without a failure shows, in GPU-hours."""
    return hours * gpus / 3
