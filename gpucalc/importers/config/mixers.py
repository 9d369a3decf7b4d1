"""Mixers other than softmax attention: state spaces and linear attention."""

from __future__ import annotations

from typing import Any

from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.importers.config.reader import Reader

# The keys of a Mamba-2 layer, by family: state, convolution, heads, head width, groups.
_MAMBA2 = {
    "mamba2": ("state_size", "conv_kernel", "num_heads", "head_dim", "n_groups"),
    "nemotron_h": ("ssm_state_size", "conv_kernel", "mamba_num_heads", "mamba_head_dim", "n_groups"),
    "falcon_h1": ("mamba_d_state", "mamba_d_conv", "mamba_n_heads", "mamba_d_head", "mamba_n_groups"),
    "zamba2": ("mamba_d_state", "mamba_d_conv", "n_mamba_heads", "mamba_headdim", "mamba_ngroups"),
    "bamba": ("mamba_d_state", "mamba_d_conv", "mamba_n_heads", "mamba_d_head", "mamba_n_groups"),
    "granitemoehybrid": ("mamba_d_state", "mamba_d_conv", "mamba_n_heads", "mamba_d_head", "mamba_n_groups"),
}


def state_of(c: Reader, key: str, fields: dict[str, Any]) -> None:
    """Set the `ssm` or `linear_attention` group of a model description."""
    if c.get("use_conv_bias", "mamba_conv_bias") is False or c.get("mamba_proj_bias") is True:
        raise UnsupportedModel(
            "Mamba layers with other biases than the published ones", where=c.where, key="use_conv_bias"
        )
    if key in ("mamba", "falcon_mamba", "jamba", "zamba"):
        fields["ssm"] = _mamba(c, key, fields["hidden"])
    elif key in _MAMBA2:
        state, conv, heads, width, groups = _MAMBA2[key]
        fields["ssm"] = {
            "state": c.need(state),
            "conv": c.need(conv),
            "heads": c.need(heads),
            "head_dim": _head_width(c, key, width, heads, fields["hidden"]),
            "groups": c.need(groups),
        }
        c.get("expand", "mamba_expand")
        if key in ("falcon_h1", "zamba2"):
            _both(c, key, fields)
    else:
        fields["linear_attention"] = _linear(c, key, fields)
    if key in ("zamba", "zamba2"):
        fields["shared"] = _turns(c, key, fields)


def _head_width(c: Reader, key: str, width: str, heads: str, hidden: int) -> int:
    if c.config.get(width) == "auto" or (key == "zamba2" and width not in c.config):
        c.get(width)  # what is expanded, over the heads
        inner = c.whole("mamba_d_ssm") if key == "falcon_h1" else None
        return (inner or c.need("mamba_expand") * hidden) // max(c.need(heads), 1)
    return c.need(width)


def _both(c: Reader, key: str, fields: dict[str, Any]) -> None:
    """Layers of attention and Mamba-2: what their heads come to must be what the projections make."""
    ssm = fields["ssm"]
    inner = c.whole("mamba_d_ssm") or c.need("mamba_expand") * fields["hidden"]
    if ssm["heads"] * ssm["head_dim"] != inner:
        problem = f"{ssm['heads']} heads of {ssm['head_dim']} are not the {inner} channels stated"
        raise InputError(problem, where=c.where, key=c.prefix + "mamba_d_ssm", given=inner)
    if c.get("projectors_bias"):
        raise UnsupportedModel("Falcon-H1 with biased projections", where=c.where, key="projectors_bias")
    if key == "falcon_h1":
        ssm["norm"] = bool(c.get("mamba_rms_norm"))
        c.get("mamba_norm_before_gate")


def _turns(c: Reader, key: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Zamba's shared transformer: how many there are, what they read, what a layer adds of its own."""
    reads = c.whole("attention_hidden_size")
    if reads not in (None, 2 * fields["hidden"]):
        problem = "Zamba whose attention reads other than the stream and the embedding"
        raise UnsupportedModel(problem, where=c.where, key=c.prefix + "attention_hidden_size", given=reads)
    shared: dict[str, Any] = {"blocks": 1, "reads": 2 * fields["hidden"]}
    if key == "zamba2":
        shared["blocks"] = c.need("num_mem_blocks")
        shared["adapter"] = c.need("adapter_rank")
        shared["attention_adapters"] = bool(c.get("use_shared_attention_adapter"))
        fields["position_kind"] = "rope" if c.get("use_mem_rope") else "none"
        kinds, ids = c.config.get("layers_block_type"), c.listing("hybrid_layer_ids")
        if isinstance(kinds, list) and ids and ids != [i for i, kind in enumerate(kinds) if kind == "hybrid"]:
            problem = "are not the hybrid layers of layers_block_type"
            raise InputError(problem, where=c.where, key=c.prefix + "hybrid_layer_ids")
    c.get("kv_channels", "num_query_groups", "n_mamba_heads", "hidden_mamba_act", "use_long_context")
    return shared


def _mamba(c: Reader, key: str, hidden: int) -> dict[str, int]:
    if key in ("jamba", "zamba"):
        ssm = {"state": c.need("mamba_d_state"), "conv": c.need("mamba_d_conv")}
        ssm["expand"] = c.need("mamba_expand")
        rank = c.get("mamba_dt_rank")
    else:
        inner = c.whole("intermediate_size")
        expand = c.whole("expand") or 2
        if inner is not None:
            expand, rest = divmod(inner, hidden)
            if rest:
                raise UnsupportedModel(
                    f"{inner} is no multiple of the width {hidden}", where=c.where, key="intermediate_size"
                )
        ssm = {"state": c.need("state_size"), "conv": c.need("conv_kernel"), "expand": expand}
        rank = c.get("time_step_rank")
    if isinstance(rank, int):
        ssm["dt_rank"] = rank
    return ssm


def _linear(c: Reader, key: str, fields: dict[str, Any]) -> dict[str, Any] | None:
    if key in ("qwen3_next", "qwen3_5", "olmo_hybrid"):
        return {
            "kind": "gated_deltanet",
            "key_heads": c.need("linear_num_key_heads"),
            "value_heads": c.need("linear_num_value_heads"),
            "key_dim": c.need("linear_key_head_dim"),
            "value_dim": c.need("linear_value_head_dim"),
            "conv": c.need("linear_conv_kernel_dim"),
        }
    if key == "kimi_linear":
        inner = c.group("linear_attn_config")  # as published; the library has the keys outside
        part, start = (c, "linear_") if inner is None else (inner, "")
        heads, width = part.need(f"{start}num_heads"), part.need(f"{start}head_dim")
        return {
            "kind": "kda",
            "key_heads": heads,
            "value_heads": heads,
            "key_dim": width,
            "value_dim": width,
            "conv": part.need("linear_conv_kernel_dim" if inner is None else "short_conv_kernel_size"),
        }
    if key == "minimax":
        width = fields["head_dim"] or fields["hidden"] // fields["heads"]
        heads = fields["heads"]
        return {
            "kind": "lightning",
            "key_heads": heads,
            "value_heads": heads,
            "key_dim": width,
            "value_dim": width,
        }
    if key in ("lfm2", "lfm2_moe"):
        if c.get("conv_bias"):
            raise UnsupportedModel("LFM2 with biased convolutions", where=c.where, key="conv_bias")
        return {**_CHANNELS, "kind": "short_conv", "conv": c.need("conv_L_cache")}
    if key == "rwkv":  # numerator, denominator and largest exponent of every channel
        width = c.whole("attention_hidden_size") or fields["hidden"]
        return {**_CHANNELS, "kind": "rwkv", "value_heads": width, "key_dim": 3}
    if key == "recurrent_gemma":
        width = c.whole("lru_width") or fields["hidden"]
        if width % fields["heads"]:
            problem = f"is no multiple of the {fields['heads']} blocks its gates are cut into"
            raise InputError(problem, where=c.where, key=c.prefix + "lru_width", given=width)
        return {
            **_CHANNELS,
            "kind": "rg_lru",
            "key_heads": fields["heads"],
            "value_heads": width,
            "conv": c.need("conv1d_width"),
        }
    return None


_CHANNELS = {"key_heads": 1, "value_heads": 1, "key_dim": 1, "value_dim": 1}
