"""Routed experts: how many, how wide, in which layers."""

from __future__ import annotations

from typing import Any

from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.importers.config.reader import Reader

# Families whose one width, `intermediate_size`, is that of an expert.
_ONE_WIDTH = frozenset({
    "mixtral", "phimoe", "granitemoe", "granitemoeshared", "granitemoehybrid", "olmoe", "flex_olmo",
    "gpt_oss", "llama4", "minimax", "minimax_m2", "jamba", "cohere2_moe", "hunyuan_v1_moe",
})  # fmt: skip
_COUNT = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_k", "moe_topk",
    "num_selected_experts",
)  # fmt: skip
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_SHARED_WIDTH = (
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
)  # fmt: skip


def experts_of(c: Reader, key: str) -> dict[str, Any] | None:
    """The `moe` group of a model description, None for a model without experts."""
    inner = c.group("ffn_config") if key == "dbrx" else None
    if inner is not None:
        return {
            "experts": inner.need("moe_num_experts"),
            "top_k": inner.need("moe_top_k"),
            "expert_ffn": inner.need("ffn_hidden_size"),
        }
    experts = c.even(*_COUNT)
    top_k = c.even(*_TOP_K)
    width = c.even("moe_intermediate_size")
    shared = c.even(*_SHARED)
    shared_width = c.even(*_SHARED_WIDTH)
    latent = c.whole("moe_latent_size")
    layers = _layers(c)
    if not experts or (experts == 1 and key != "hunyuan_v1_moe") or not _has_experts(c, key):
        return None
    if top_k is None:
        c.need(*_TOP_K)
    if width is None:
        width = c.need("intermediate_size") if key in _ONE_WIDTH else c.need("moe_intermediate_size")
    moe: dict[str, Any] = {"experts": experts, "top_k": top_k, "expert_ffn": width}
    if key == "llama4":
        moe["expert_ffn"] = moe["shared_expert_ffn"] = c.need("intermediate_size")
    elif key == "hunyuan_v1_moe":
        moe["shared_expert_ffn"] = (1 if shared is None else shared) * width
    elif key == "hy_v3" and not shared:
        raise UnsupportedModel("no shared expert", where=c.where, key="num_shared_experts")
    elif key == "deepseek_v4":  # the class builds one, whatever the file says
        if shared not in (None, 1):
            raise UnsupportedModel("other than one shared expert", where=c.where, key="n_shared_experts")
        moe |= {"shared_expert_ffn": width, "shared_experts": 1}
    elif key == "qwen3_5" and shared_width is None:
        c.need("shared_expert_intermediate_size")
    elif shared_width:
        moe["shared_expert_ffn"] = shared_width
    elif shared:
        moe |= {"shared_expert_ffn": shared * width, "shared_experts": shared}
    if latent:
        moe["latent"] = latent
    return {**moe, **layers}


def _layers(c: Reader) -> dict[str, int]:
    """Which layers have experts: how many dense ones come first, and every how many after that."""
    dense = c.whole("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    last, count = c.whole("moe_layer_end_index"), c.whole("num_hidden_layers")
    if last is not None and count is not None and 0 <= last < count - 1:
        raise UnsupportedModel(
            "dense layers after the last expert layer", where=c.where, key="moe_layer_end_index"
        )
    listed = c.config.get("moe_layer_freq")
    if isinstance(listed, list):  # 0 or 1 for every layer
        dense = _leading(c, "moe_layer_freq", [not item for item in c.listing("moe_layer_freq")])
    also = () if isinstance(listed, list) else ("moe_layer_freq",)
    step = c.whole("decoder_sparse_step", "moe_layer_interval", *also)
    types = c.listing("mlp_layer_types")
    if types:
        dense = _leading(c, "mlp_layer_types", [kind == "dense" for kind in types])
    only = c.listing("mlp_only_layers")
    if only:
        if sorted(only) != list(range(len(only))):
            raise UnsupportedModel("dense layers among the expert ones", where=c.where, key="mlp_only_layers")
        dense = len(only)
    interleave = c.whole("interleave_moe_layer_step")
    _moe_layers(c, interleave, count)
    period, offset = c.whole("expert_layer_period"), c.whole("expert_layer_offset")
    found = {"dense_layers": dense} if dense and dense > 0 else {}
    if period:
        return {**found, "every": period, "offset": offset or 0}
    every = interleave or step
    if every and every > 1:
        return {**found, "every": every, "offset": every - 1}
    return found


def _leading(c: Reader, key: str, dense: list[bool]) -> int:
    """How many layers are dense before the first expert layer; there may be none after it."""
    count = dense.index(False) if False in dense else len(dense)
    if any(dense[count:]):
        raise UnsupportedModel("dense layers among the expert ones", where=c.where, key=c.prefix + key)
    return count


def _moe_layers(c: Reader, interleave: int | None, count: int | None) -> None:
    """Llama 4 may also list its expert layers: the list must be what the step says."""
    listed = c.listing("moe_layers")
    if not listed or not count:
        return
    step = interleave or 1
    if listed != list(range(step - 1, count, step)):
        raise InputError(
            "lists other layers than interleave_moe_layer_step", where=c.where, key=c.prefix + "moe_layers"
        )


def _has_experts(c: Reader, key: str) -> bool:
    if key == "nemotron_h":
        kinds = c.listing("layers_block_type", "hybrid_override_pattern")
        return "moe" in kinds or "E" in kinds
    return not (key == "gemma4" and c.get("enable_moe_block") is False)
