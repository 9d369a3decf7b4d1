"""Keys without which a configuration could be read two ways: their absence is an error, not a default.

A class of transformers fills what a file leaves out with the numbers of one published model. Such a
number is that model's and not this one's. Each row was found by leaving keys out, one at a time, and
counting what the class then builds.
"""

from __future__ import annotations

from gpucalc.errors import InputError
from gpucalc.families import FAMILIES
from gpucalc.importers.config.reader import OF_ITS_CLASS, Reader

_EXPERTS = "num_local_experts|num_experts"
_ROUTED = "n_routed_experts|num_experts|num_local_experts"
_SHARED = "n_shared_experts|num_shared_experts"
_DENSE = "first_k_dense_replace|mlp_layer_types|moe_layer_freq"
_LATENT = ("kv_lora_rank", "q_lora_rank")
NEEDED: dict[str, tuple[str, ...]] = {
    "albert": (
        "embedding_size",
        "num_hidden_groups",
        "inner_group_num",
        "max_position_embeddings",
        "type_vocab_size",
    ),
    "afmoe": ("num_experts", "num_shared_experts", "num_dense_layers"),
    "cohere2_moe": (_EXPERTS,),
    "deepseek_moe": (_ROUTED, _SHARED, "first_k_dense_replace"),
    "deepseek_v2": (*_LATENT, _ROUTED, _SHARED),
    "deepseek_v3": (*_LATENT, _ROUTED, _SHARED, _DENSE),
    "deepseek_v32": (*_LATENT, _ROUTED, _SHARED, _DENSE, "index_topk"),
    "deepseek_v4": ("hc_mult",),
    "dots1": (_ROUTED, _SHARED, _DENSE),
    "ernie4_5": ("head_dim",),
    "ernie4_5_moe": ("moe_num_experts|num_experts", "moe_num_shared_experts", "moe_layer_start_index"),
    "exaone_moe": (_EXPERTS, _SHARED, _DENSE),
    "falcon": ("multi_query", "parallel_attn"),
    "falcon_h1": ("mamba_d_ssm", "mamba_rms_norm"),
    "distilbert": ("max_position_embeddings",),
    "electra": ("embedding_size", "max_position_embeddings", "type_vocab_size"),
    "ernie": ("max_position_embeddings", "type_vocab_size", "use_task_id"),
    "flex_olmo": (_EXPERTS,),
    "gemma": ("head_dim",),
    "gemma2": ("head_dim",),
    "gemma3": ("head_dim",),
    "gemma4": ("head_dim", "layer_types", "hidden_size_per_layer_input"),
    "glm4_moe": (_ROUTED, _SHARED, _DENSE),
    "glm4_moe_lite": (*_LATENT, _ROUTED, _SHARED, _DENSE),
    "glm_moe_dsa": (*_LATENT, _ROUTED, _SHARED, _DENSE, "index_topk"),
    "gpt_bigcode": ("multi_query",),
    "gpt_oss": (_EXPERTS, "head_dim"),
    "granitemoe": (_EXPERTS,),
    "granitemoehybrid": (_EXPERTS, "shared_intermediate_size"),
    "granitemoeshared": (_EXPERTS, "shared_intermediate_size"),
    "hunyuan_v1_moe": (_EXPERTS,),
    "hy_v3": ("head_dim", _EXPERTS, _SHARED, _DENSE),
    "jamba": (_EXPERTS, "expert_layer_period"),
    "kimi_k2": (*_LATENT, _ROUTED, _SHARED, _DENSE),
    "kimi_k25": (*_LATENT, _ROUTED, _SHARED, _DENSE),
    "kimi_vl": (*_LATENT, _ROUTED, _SHARED, _DENSE),
    "kimi_linear": (*_LATENT, _EXPERTS, _SHARED, _DENSE),
    "lfm2": ("block_auto_adjust_ff_dim",),
    "lfm2_moe": (_EXPERTS, "num_dense_layers"),
    "llama4": (_EXPERTS,),
    "mamba2": ("tie_word_embeddings",),
    "mpnet": ("max_position_embeddings",),
    "mt5": ("feed_forward_proj", "d_kv"),
    "umt5": ("feed_forward_proj", "d_kv"),
    "roberta": ("max_position_embeddings", "type_vocab_size"),
    "xlm_roberta_xl": ("max_position_embeddings", "type_vocab_size"),
    "mimo_v2_flash": (_ROUTED, _DENSE),
    "minicpm3": _LATENT,
    "minimax": (_EXPERTS,),
    "minimax_m2": ("head_dim", _EXPERTS),
    "mixtral": (_EXPERTS,),
    "olmoe": (_EXPERTS,),
    "phimoe": (_EXPERTS,),
    "qwen2_moe": (_EXPERTS, "shared_expert_intermediate_size"),
    "qwen3_moe": (_EXPERTS,),
    "qwen3_next": ("head_dim", _EXPERTS, "shared_expert_intermediate_size"),
    "qwen3_5": ("head_dim",),
    "mellum": (_EXPERTS, "head_dim"),
    "sarvam_mla": (*_LATENT, _ROUTED, _SHARED, _DENSE),
    "sarvam_moe": ("head_dim", "use_qk_norm", _ROUTED, _SHARED, _DENSE),
    "solar_open": ("head_dim", _ROUTED, _SHARED),
    "vaultgemma": ("head_dim",),
    "youtu": _LATENT,
    "zamba2": ("num_mem_blocks", "use_shared_attention_adapter", "adapter_rank"),
}
# Families whose class takes one key-value head per query head where the file says none.
_ONE_EACH = frozenset({
    "arcee", "apertus", "baichuan", "chatglm", "cohere", "cohere2", "cohere2_moe", "dbrx", "deepseek_moe",
    "exaone4", "exaone_moe", "falcon", "flex_olmo", "gpt_bigcode", "hyperclovax", "granite", "granitemoe",
    "granitemoehybrid", "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "internlm2", "jais2",
    "llama", "llava", "minicpm", "mpt", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmo_hybrid",
    "olmoe", "persimmon", "phi", "phi3", "qwen", "recurrent_gemma", "stablelm", "yi",
})  # fmt: skip
_NO_KV_KEY = frozenset({
    "gpt2", "biogpt", "opt", "xglm", "bloom", "gpt_neo", "gpt_neox", "gptj", "codegen", "rwkv", "mamba",
    "mamba2", "falcon_mamba", "kimi_linear", "deepseek_v4",
})  # fmt: skip


def check_needed(c: Reader, key: str) -> None:
    """Refuse a configuration that lacks a key its family cannot be read without. Raises InputError."""
    wanted_all = NEEDED.get(key, ())
    if (
        FAMILIES[key].form == "decoder"
        and key not in _ONE_EACH | _NO_KV_KEY
        and "kv_lora_rank" not in c.config
    ):
        wanted_all = ("num_key_value_heads", *wanted_all)
    for wanted in wanted_all:
        names = wanted.split("|")
        if not any(name in c.config for name in names):
            also = f" (or {', '.join(names[1:])})" if names[1:] else ""
            raise InputError(
                f"missing{also}; {key} models differ in it",
                where=c.where,
                key=c.prefix + names[0],
                legal=OF_ITS_CLASS,
            )
