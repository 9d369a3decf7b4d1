"""Which matrices have biases, and norms on queries and keys: switches that mean other things elsewhere."""

from __future__ import annotations

from typing import Any

from gpucalc.errors import UnsupportedModel
from gpucalc.families import FAMILIES
from gpucalc.importers.config.reader import Reader

# `attention_bias` reaches the output projection as well, but for these.
_NOT_OUTPUT = frozenset(
    {
        "glm",
        "glm4",
        "glm4_moe",
        "stablelm",
        "seed_oss",
        "mimo_v2_flash",
        "helium",
        "recurrent_gemma",
        "solar_open",
        "sarvam_moe",
    }
)
_NO_ATTENTION_BIAS = frozenset({"afmoe", "nemotron_h"})
# Families whose dense and shared parts have matrices that `mlp_bias` is not known to reach.
_NO_MLP_BIAS = frozenset({"deepseek_v32", "deepseek_v4", "glm_moe_dsa", "nemotron_h"})
# `use_bias` (or `bias`) of these is on attention and feed-forward parts alike.
_ALL = frozenset({"starcoder2", "ernie4_5", "internlm2", "internlm3", "jais2", "falcon"})
_QK_NORMS = {
    "cohere": "width",
    "stablelm": "width",  # a norm of its own for each head
    "phi": "head_layernorm",
    "persimmon": "head_layernorm",
    "llama4": "head_l2",
    "minimax_m2": "width",
}


def biases(c: Reader, key: str, fields: dict[str, Any]) -> None:
    """Set the biases and query norms that the configuration switches."""
    attention = c.get("attention_bias")
    if attention is True and key in _NO_ATTENTION_BIAS:
        raise UnsupportedModel(
            f"{key} with biases on its attention has no drawing",
            where=c.where,
            key=c.prefix + "attention_bias",
        )
    if isinstance(attention, bool) and FAMILIES[key].position_kind != "learned":
        fields["qkv_bias"] = attention
        if key not in _NOT_OUTPUT:
            fields["o_bias"] = attention
    queries = c.get("use_qkv_bias", "qkv_bias", "add_qkv_bias")
    if isinstance(queries, bool) and FAMILIES[key].position_kind != "learned":
        fields["qkv_bias"] = queries
    output = c.get("attention_out_bias")
    if isinstance(output, bool):
        fields["o_bias"] = output
    everywhere = c.get("use_bias", "bias", "add_bias_linear")
    if isinstance(everywhere, bool) and key in _ALL:
        fields["o_bias"] = fields["mlp_bias"] = everywhere
        fields["qkv_bias"] = everywhere or bool(queries)
    elif everywhere is True:
        raise UnsupportedModel(
            f"{key} with biases on every matrix has no drawing", where=c.where, key=c.prefix + "use_bias"
        )
    mlp = c.get("mlp_bias")
    if mlp is True and (fields.get("moe") is not None or key in _NO_MLP_BIAS):
        raise UnsupportedModel(
            f"{key} with biases on its feed-forward parts has no drawing",
            where=c.where,
            key=c.prefix + "mlp_bias",
        )
    if isinstance(mlp, bool):
        fields["mlp_bias"] = mlp
    head = c.get("lm_head_bias")
    if isinstance(head, bool):
        fields["head_bias"] = head
    norms = c.get("use_qk_norm", "qk_layernorm")
    if isinstance(norms, bool):
        fields["qk_norm"] = _QK_NORMS.get(key, "head") if norms else "none"
    _own(c, key, fields)


def _own(c: Reader, key: str, fields: dict[str, Any]) -> None:
    """Switches that one family alone has."""
    if key == "falcon":
        c.get("no_bias")
        new, norms = c.get("new_decoder_architecture"), c.whole("num_ln_in_parallel_attn")
        fields["parallel_block"] = bool(new or c.get("parallel_attn"))
        if not fields["parallel_block"] or norms == 2 or (new and norms is None):
            fields["norms_per_block"] = 2
        if c.get("alibi"):
            fields["position_kind"] = "alibi"
    elif key == "mpt":
        c.get("no_bias", "norm_type", "learned_pos_emb", "attn_config")
        if c.whole("expansion_ratio") not in (None, 4):
            raise UnsupportedModel(
                "MPT as transformers builds it has an expansion of 4", where=c.where, key="expansion_ratio"
            )
    elif key == "gpt_neox" and c.get("use_parallel_residual") is False:
        fields["parallel_block"] = False
    elif key == "stablelm" and c.get("use_parallel_residual"):
        fields["parallel_block"], fields["norms_per_block"] = True, 1
    elif key == "opt":
        _opt(c, fields)
    elif key == "apertus" and c.config.get("hidden_act") not in (None, "xielu"):
        problem = "Apertus with another activation than its own, which has weights"
        raise UnsupportedModel(problem, where=c.where, key=c.prefix + "hidden_act")
    elif key == "hyperclovax" and c.get("use_post_norm") is False:
        fields["norms_per_block"] = 2
    elif key == "helium":
        if fields["head_dim"] and fields["head_dim"] * fields["heads"] != fields["hidden"]:
            problem = "heads that are not as wide together as the model have no drawing"
            raise UnsupportedModel(problem, where=c.where, key=c.prefix + "head_dim")
    elif key == "chatglm":
        fields["o_bias"] = fields["mlp_bias"] = bool(c.get("add_bias_linear"))
        if c.get("rmsnorm") is False or c.get("post_layer_norm") is False:
            raise UnsupportedModel("ChatGLM with other norms has no drawing", where=c.where, key="rmsnorm")
        if c.get("apply_residual_connection_post_layernorm"):
            raise UnsupportedModel(
                "ChatGLM with residuals after the norm has no drawing",
                where=c.where,
                key="apply_residual_connection_post_layernorm",
            )


def _opt(c: Reader, fields: dict[str, Any]) -> None:
    if c.get("enable_bias") is False:
        fields["qkv_bias"] = fields["o_bias"] = fields["mlp_bias"] = False
    if c.get("layer_norm_elementwise_affine") is False:
        fields["norm"] = "layernorm_noweight"
    after = c.get("do_layer_norm_before") is False
    if after:  # OPT 350M
        fields["post_norm"] = True
    if after or c.get("_remove_final_layer_norm"):
        fields["final_norm"] = False
