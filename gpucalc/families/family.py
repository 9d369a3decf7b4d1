"""What a row of the table of families says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """Traits of an architecture.

    form: which builder draws it: decoder | bert | t5 | bart | whisper | wav2vec2 | vit | clip |
    transformer_xl | totals.
    norm: see `gpucalc.graph.Norm`. norms_per_block: 1 shared or single, 2 before (or after) each part,
    4 before and after. qkv: split | fused | packed (fused, no rotation). positions: entries of a learned
    table when the file says none (a family constant, such as BERT's 512); position_offset: entries
    added to those asked for. ffn_ratio, vocab: what papers of the family leave unsaid; using one is noted.
    """

    form: str = "decoder"
    norm: str = "rmsnorm"
    norms_per_block: int = 2
    parallel_block: bool = False
    post_norm: bool = False
    qk_norm: str = "none"
    qkv: str = "split"
    fused_gate_up: bool = False
    position_kind: str = "rope"
    positions: int | None = None
    position_offset: int = 0
    activation: str = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    embedding_norm: bool = False
    tied_embeddings: bool = False
    head_bias: bool = False
    softcap: bool = False
    query_gate: bool = False  # the query projection also yields a gate on the attention output
    sinks: str = "none"  # none | all | sliding: one learned logit per head
    router_bias: bool = False
    fp32_router: bool = False  # the router casts its input and multiplies in fp32
    clamped_experts: bool = False  # gate and up are clamped before the product
    expert_bias: bool = False
    shared_expert_gate: bool = False
    dense_beside_moe: bool = False  # a dense part runs next to the experts in every layer
    layer_scale: bool = False  # a learned factor per channel on each part's output
    mask_token: bool = False
    final_norm: bool = True  # a norm after the last layer
    router_correction: bool = False  # a learned number per expert that only the choice of experts sees
    mlp_scalars: int = 0  # learned numbers of the activation itself
    receptance: bool = False  # a gate on the part's output, and its inputs mixed with the token before
    ssm_norms: bool = False  # norms on dt, B and C (Jamba)
    ffn_ratio: int | None = None
    vocab: int | None = None
    token_types: int = 0
    head: str = "lm"
    vision: str = ""  # which vision tower goes with it
    refused: str = ""  # why it is refused, for those known and not drawn
