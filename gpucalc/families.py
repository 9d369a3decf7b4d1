"""What a family implies beyond the shapes: the one table to extend when a new architecture appears.

A row is named by the `model_type` of a public config.json and says what transformers 5.24.0 builds
for it, checked by instantiating on the meta device. A trait written in a model file wins.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """Traits of an architecture.

    form: which builder draws it: decoder | bert | t5 | bart | whisper | vit | clip | transformer_xl | totals.
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
    ssm_norms: bool = False  # norms on dt, B and C (Jamba)
    ffn_ratio: int | None = None
    vocab: int | None = None
    token_types: int = 0
    head: str = "lm"
    vision: str = ""  # which vision tower goes with it
    refused: str = ""  # why it is refused, for those known and not drawn


_GPT2 = Family(
    norm="layernorm",
    qkv="packed",
    position_kind="learned",
    positions=1024,
    activation="gelu_new",
    gated_mlp=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    tied_embeddings=True,
    ffn_ratio=4,
    vocab=50257,
)
_LLAMA = Family()
_BERT = Family(
    form="bert",
    norm="layernorm",
    post_norm=True,
    position_kind="learned",
    positions=512,
    activation="gelu",
    gated_mlp=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    embedding_norm=True,
    tied_embeddings=True,
    ffn_ratio=4,
    vocab=30522,
    token_types=2,
    head="pooler",
)
_GEMMA = Family(norm="rmsnorm_fp32_weight", activation="gelu_tanh", tied_embeddings=True)
_MOE = Family()
_DEEPSEEK = Family(position_kind="rope_partial", fp32_router=True)
_QWEN_HYBRID = Family(
    norm="rmsnorm_fp32_weight",
    qk_norm="head",
    position_kind="rope_partial",
    query_gate=True,
    shared_expert_gate=True,
)
_MAMBA = Family(norms_per_block=1, position_kind="none", tied_embeddings=True)
_VIT = Family(
    form="vit",
    norm="layernorm",
    position_kind="learned",
    activation="gelu",
    gated_mlp=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    head="classifier",
)
_TOTALS = Family(form="totals", norm="none", head="body")
_SEQ2SEQ = Family(
    form="bart",
    norm="layernorm",
    post_norm=True,
    position_kind="learned",
    positions=1024,
    position_offset=2,
    activation="gelu",
    gated_mlp=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    embedding_norm=True,
    tied_embeddings=True,
)

FAMILIES: dict[str, Family] = {
    # Decoders with layer norms and biases.
    "gpt2": _GPT2,
    "opt": Family(
        norm="layernorm",
        position_kind="learned",
        positions=2048,
        position_offset=2,
        activation="relu",
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tied_embeddings=True,
        ffn_ratio=4,
    ),
    "bloom": Family(
        norm="layernorm",
        qkv="packed",
        position_kind="alibi",
        activation="gelu_tanh",
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        embedding_norm=True,
        tied_embeddings=True,
        ffn_ratio=4,
    ),
    "gpt_neox": Family(
        norm="layernorm",
        parallel_block=True,
        qkv="fused",
        position_kind="rope_partial",
        activation="gelu",
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        ffn_ratio=4,
    ),
    "gptj": Family(
        norm="layernorm",
        norms_per_block=1,
        parallel_block=True,
        position_kind="rope_partial",
        activation="gelu_new",
        gated_mlp=False,
        mlp_bias=True,
        head_bias=True,
        ffn_ratio=4,
    ),
    "gpt_bigcode": Family(
        norm="layernorm",
        qkv="packed",
        position_kind="learned",
        positions=1024,
        activation="gelu_tanh",
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tied_embeddings=True,
        ffn_ratio=4,
    ),
    "starcoder2": Family(
        norm="layernorm",
        activation="gelu_tanh",
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tied_embeddings=True,
    ),
    "phi": Family(
        norm="layernorm",
        norms_per_block=1,
        parallel_block=True,
        position_kind="rope_partial",
        activation="gelu_new",
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
    ),
    "falcon": Family(
        norm="layernorm",
        norms_per_block=1,
        parallel_block=True,
        qkv="fused",
        activation="gelu",
        gated_mlp=False,
        tied_embeddings=True,
        ffn_ratio=4,
    ),
    "mpt": Family(
        norm="layernorm_nobias",
        qkv="packed",
        position_kind="alibi",
        activation="gelu",
        gated_mlp=False,
        tied_embeddings=True,
        ffn_ratio=4,
    ),
    "stablelm": Family(norm="layernorm", position_kind="rope_partial"),
    "nemotron": Family(norm="layernorm", position_kind="rope_partial", activation="relu2", gated_mlp=False),
    "cohere": Family(norm="layernorm_cohere", norms_per_block=1, parallel_block=True, tied_embeddings=True),
    # The llama shape and its variations.
    "llama": _LLAMA,
    "llava": Family(vision="clip"),
    "mistral": _LLAMA,
    "mistral3": Family(vision="pixtral"),
    "seed_oss": Family(qkv_bias=True),
    "qwen2_5_vl": Family(qkv_bias=True, vision="qwen2_5_vl"),
    "granite": _LLAMA,
    "smollm3": Family(tied_embeddings=True),
    "internlm2": _LLAMA,
    "baichuan": _LLAMA,
    "yi": _LLAMA,
    "qwen": Family(qkv_bias=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm="head"),
    "phi3": Family(qkv="fused", fused_gate_up=True, position_kind="rope_partial"),
    "glm": Family(qkv_bias=True, fused_gate_up=True, position_kind="rope_partial"),
    "glm4": Family(norms_per_block=4, qkv_bias=True, fused_gate_up=True, position_kind="rope_partial"),
    "gemma": _GEMMA,
    "gemma2": Family(
        norm="rmsnorm_fp32_weight",
        norms_per_block=4,
        activation="gelu_tanh",
        tied_embeddings=True,
        softcap=True,
    ),
    "gemma3": Family(
        norm="rmsnorm_fp32_weight",
        norms_per_block=4,
        qk_norm="head",
        activation="gelu_tanh",
        tied_embeddings=True,
        vision="gemma3",
    ),
    "gemma4": Family(
        norm="rmsnorm_fp32_weight",
        norms_per_block=4,
        qk_norm="head",
        activation="gelu_tanh",
        tied_embeddings=True,
        dense_beside_moe=True,
        vision="gemma4",
    ),
    "olmo2": Family(norm="rmsnorm_fp32_weight", post_norm=True, qk_norm="width"),
    # Mixture of experts.
    "mixtral": _MOE,
    "qwen2_moe": Family(qkv_bias=True, shared_expert_gate=True),
    "qwen3_moe": Family(qk_norm="head"),
    "qwen3_vl": Family(qk_norm="head", vision="qwen3_vl"),
    "qwen3_vl_moe": Family(qk_norm="head", vision="qwen3_vl"),
    "olmoe": Family(qk_norm="width"),
    "dbrx": Family(norm="layernorm_nobias", qkv="fused"),
    "gpt_oss": Family(
        norm="rmsnorm_fp32_weight",
        position_kind="rope_partial",
        qkv_bias=True,
        o_bias=True,
        sinks="all",
        router_bias=True,
        expert_bias=True,
        clamped_experts=True,
    ),
    "llama4": Family(vision="llama4"),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "deepseek_v4": Family(norm="rmsnorm_fp32_weight", position_kind="rope_partial", sinks="all"),
    "kimi_k2": _DEEPSEEK,
    "kimi_k25": Family(position_kind="rope_partial", fp32_router=True, vision="moonvit"),
    "kimi_vl": Family(position_kind="rope_partial", fp32_router=True, vision="moonvit"),
    "glm4_moe": Family(qk_norm="none", position_kind="rope_partial"),
    "glm_moe_dsa": _DEEPSEEK,
    "minimax": Family(position_kind="rope_partial"),
    "minimax_m2": Family(qk_norm="width", position_kind="rope_partial"),
    "mimo_v2_flash": Family(position_kind="rope_partial", sinks="sliding"),
    # Hybrids and state-space models.
    "qwen3_next": _QWEN_HYBRID,
    "qwen3_5": Family(
        norm="rmsnorm_fp32_weight",
        qk_norm="head",
        position_kind="rope_partial",
        query_gate=True,
        shared_expert_gate=True,
        vision="qwen3_5",
    ),
    "kimi_linear": Family(position_kind="none"),
    "jamba": Family(position_kind="none", ssm_norms=True),
    "bamba": Family(position_kind="rope_partial"),
    "nemotron_h": Family(
        norms_per_block=1,
        norm="rmsnorm_fp32_weight",
        position_kind="none",
        activation="relu2",
        gated_mlp=False,
    ),
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "falcon_mamba": _MAMBA,
    # Encoders and encoder-decoders.
    "bert": _BERT,
    "roberta": Family(
        form="bert",
        norm="layernorm",
        post_norm=True,
        position_kind="learned",
        positions=514,
        activation="gelu",
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        embedding_norm=True,
        tied_embeddings=True,
        ffn_ratio=4,
        vocab=50265,
        token_types=1,
        head="pooler",
    ),
    "deberta_v2": Family(
        form="bert",
        norm="layernorm",
        post_norm=True,
        position_kind="relative",
        positions=512,
        activation="gelu",
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        embedding_norm=True,
        tied_embeddings=True,
        head="body",
    ),
    "modernbert": Family(
        form="bert",
        norm="layernorm_nobias",
        qkv="fused",
        fused_gate_up=True,
        activation="gelu",
        embedding_norm=True,
        tied_embeddings=True,
        head="mlm",
    ),
    "t5": Family(
        form="t5",
        norm="rmsnorm_keeps_input",
        position_kind="relative",
        activation="relu",
        gated_mlp=False,
        tied_embeddings=True,
    ),
    "bart": _SEQ2SEQ,
    "whisper": Family(
        form="whisper",
        norm="layernorm",
        position_kind="learned",
        positions=448,
        activation="gelu",
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tied_embeddings=True,
    ),
    "transformer_xl": Family(
        form="transformer_xl",
        norm="layernorm",
        post_norm=True,
        qkv="fused",
        position_kind="relative",
        activation="relu",
        gated_mlp=False,
        mlp_bias=True,
        tied_embeddings=True,
        ffn_ratio=4,
    ),
    # Images.
    "vit": _VIT,
    "dinov2": Family(
        form="vit",
        norm="layernorm",
        position_kind="learned",
        activation="gelu",
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        layer_scale=True,
        mask_token=True,
        head="body",
    ),
    "clip": Family(
        form="clip",
        norm="layernorm",
        position_kind="learned",
        positions=77,
        activation="gelu",
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head="body",
    ),
    "siglip": Family(
        form="clip",
        norm="layernorm",
        position_kind="learned",
        positions=64,
        activation="gelu_tanh",
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head="body",
    ),
    "resnet": _TOTALS,
    "yolov7": _TOTALS,
    "yolov8": _TOTALS,
    "diffusion": _TOTALS,
    # Known by name and not drawn: better a plain word than a number that is near.
    "zamba2": Family(refused="one attention block shared by many layers: weights and work differ in count"),
    "rwkv": Family(refused="RWKV's time-mix layers have no drawing yet"),
    "swin": Family(refused="hierarchical windows over image stages have no drawing yet"),
    "convnext": Family(refused="convolutional stages are described by a trace or by totals"),
    "wav2vec2": Family(refused="the convolutional audio front end has no drawing yet"),
}

# Other names people use for a row: names in papers and logs, nested model types, renamed classes.
SYNONYMS: dict[str, str] = {
    "gpt": "gpt2",
    "gpt3": "gpt2",
    "megatron_gpt": "gpt2",
    "command_r": "cohere",
    "deepseek": "deepseek_v3",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "internlm": "internlm2",
    "kimi": "deepseek_v3",
    "llama4_text": "llama4",
    "mimo": "mimo_v2_flash",
    "olmo": "olmo2",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "xlm_roberta": "roberta",
}


def canonical(name: str) -> str:
    """The table's spelling of a family or model type."""
    key = name.strip().lower().replace("-", "_").replace(".", "_").replace(" ", "_")
    return SYNONYMS.get(key, key)
