"""Routed experts: how many, how wide, in which layers."""

from __future__ import annotations

from typing import Any

from gpucalc.errors import UnsupportedModel
from gpucalc.importers.config.reader import Reader


def experts_of(c: Reader, key: str) -> dict[str, Any] | None:
    inner = c.group("ffn_config") if key == "dbrx" else None
    if inner is not None:
        return {
            "experts": inner.need("moe_num_experts"),
            "top_k": inner.need("moe_top_k"),
            "expert_ffn": inner.need("ffn_hidden_size"),
        }
    experts = c.whole("n_routed_experts", "num_local_experts", "num_experts")
    top_k = c.whole("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k")
    width = c.whole("moe_intermediate_size")
    shared = c.whole("n_shared_experts", "num_shared_experts")
    shared_width = c.whole("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    dense = c.whole("first_k_dense_replace")
    listed = c.config.get("moe_layer_freq")
    if isinstance(listed, list):  # 0 or 1 for every layer
        c.get("moe_layer_freq")
        dense = listed.index(1) if 1 in listed else len(listed)
        if 0 in listed[dense:]:
            raise UnsupportedModel("dense layers among the expert ones", where=c.where, key="moe_layer_freq")
    sparse_step = c.whole("decoder_sparse_step", *(() if isinstance(listed, list) else ("moe_layer_freq",)))
    only = c.listing("mlp_only_layers")
    types = c.listing("mlp_layer_types")
    interleave = c.whole("interleave_moe_layer_step")
    c.get("moe_layers")
    period, offset = c.whole("expert_layer_period"), c.whole("expert_layer_offset")
    latent = c.whole("moe_latent_size")
    if not experts or experts == 1 or (key == "nemotron_h" and not _has_experts(c)):
        return None
    if key == "gemma4" and c.get("enable_moe_block") is False:
        return None
    if top_k is None:
        c.need("num_experts_per_tok")
    if width is None:
        width = c.need("intermediate_size")  # Mixtral and its kin: the only width is the experts'
    moe: dict[str, Any] = {"experts": experts, "top_k": top_k, "expert_ffn": width}
    if key == "llama4":
        moe["expert_ffn"] = moe["shared_expert_ffn"] = c.need("intermediate_size")
        if interleave and interleave > 1:
            moe |= {"every": interleave, "offset": interleave - 1}
    elif shared_width:
        moe["shared_expert_ffn"] = shared_width
    elif shared:
        moe |= {"shared_expert_ffn": shared * width, "shared_experts": shared}
    if types:
        dense = sum(1 for kind in types if kind == "dense")
        if any(kind == "dense" for kind in types[dense:]):
            raise UnsupportedModel(
                "dense layers after the first expert layer", where=c.where, key="mlp_layer_types"
            )
    if only:
        if sorted(only) != list(range(len(only))):
            raise UnsupportedModel("dense layers among the expert ones", where=c.where, key="mlp_only_layers")
        dense = len(only)
    if dense:
        moe["dense_layers"] = dense
    if period:
        moe |= {"every": period, "offset": offset or 0}
    elif sparse_step and sparse_step > 1:
        moe |= {"every": sparse_step, "offset": sparse_step - 1}
    if latent:
        moe["latent"] = latent
    return moe


def _has_experts(c: Reader) -> bool:
    kinds = c.listing("layers_block_type", "hybrid_override_pattern")
    return "moe" in kinds or "E" in kinds
