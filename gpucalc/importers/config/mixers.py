"""Mixers other than softmax attention: state spaces and linear attention."""

from __future__ import annotations

from typing import Any

from gpucalc.errors import UnsupportedModel
from gpucalc.importers.config.reader import Reader


def state_of(c: Reader, key: str, fields: dict[str, Any]) -> None:
    if c.get("use_conv_bias", "mamba_conv_bias") is False or c.get("mamba_proj_bias") is True:
        raise UnsupportedModel(
            "Mamba layers with other biases than the published ones", where=c.where, key="use_conv_bias"
        )
    if key in ("mamba", "falcon_mamba", "mamba2"):
        inner = c.whole("intermediate_size")
        expand = c.whole("expand") or 2
        if inner is not None and key != "mamba2":
            expand = inner // fields["hidden"]
        fields["ssm"] = {"state": c.need("state_size"), "conv": c.need("conv_kernel"), "expand": expand}
        rank = c.get("time_step_rank")
        if key == "mamba2":
            fields["ssm"] |= {
                "heads": c.need("num_heads"),
                "head_dim": c.need("head_dim"),
                "groups": c.need("n_groups"),
            }
        elif isinstance(rank, int):
            fields["ssm"]["dt_rank"] = rank
    elif key in ("nemotron_h", "bamba"):
        fields["ssm"] = {
            "state": c.need("ssm_state_size", "mamba_d_state"),
            "conv": c.need("conv_kernel", "mamba_d_conv"),
            "heads": c.need("mamba_num_heads", "mamba_n_heads"),
            "head_dim": c.need("mamba_head_dim", "mamba_d_head"),
            "groups": c.need("n_groups", "mamba_n_groups"),
        }
    elif key == "jamba":
        fields["ssm"] = {
            "state": c.need("mamba_d_state"),
            "conv": c.need("mamba_d_conv"),
            "expand": c.need("mamba_expand"),
        }
        rank = c.get("mamba_dt_rank")
        if isinstance(rank, int):
            fields["ssm"]["dt_rank"] = rank
    elif key in ("qwen3_next", "qwen3_5"):
        fields["linear_attention"] = {
            "kind": "gated_deltanet",
            "key_heads": c.need("linear_num_key_heads"),
            "value_heads": c.need("linear_num_value_heads"),
            "key_dim": c.need("linear_key_head_dim"),
            "value_dim": c.need("linear_value_head_dim"),
            "conv": c.need("linear_conv_kernel_dim"),
        }
    elif key == "kimi_linear":
        heads, width = c.need("linear_num_heads"), c.need("linear_head_dim")
        fields["linear_attention"] = {
            "kind": "kda",
            "key_heads": heads,
            "value_heads": heads,
            "key_dim": width,
            "value_dim": width,
            "conv": c.need("linear_conv_kernel_dim"),
        }
    elif key == "minimax":
        width = fields["head_dim"] or fields["hidden"] // fields["heads"]
        fields["linear_attention"] = {
            "kind": "lightning",
            "key_heads": fields["heads"],
            "value_heads": fields["heads"],
            "key_dim": width,
            "value_dim": width,
        }
