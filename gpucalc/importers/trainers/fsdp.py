"""The group of FSDP options that accelerate, Transformers and axolotl share."""

from __future__ import annotations

from typing import Any

from gpucalc.importers.words import Words, fold

STRATEGIES = {"1": 3, "2": 2, "3": 0, "full_shard": 3, "shard_grad_op": 2, "no_shard": 0}


HYBRID = ("4", "5", "hybrid_shard", "hybrid_shard_zero2")


def fsdp_into(group: Words, run: dict[str, Any], strategy: str | None) -> None:
    """What a group of FSDP options says, whatever trainer it stands in."""
    prefixed = {name: f"fsdp_{name}" for name in ("reshard_after_forward", "offload_params", "version",
                "activation_checkpointing", "cpu_ram_efficient_loading", "state_dict_type")}  # fmt: skip

    def flag(name: str) -> bool | None:
        return group.flag(prefixed[name], name)

    named = fold(strategy) if strategy is not None else None
    group.whole("fsdp_version", "version")
    reshard = group.peek("fsdp_reshard_after_forward") or group.peek("reshard_after_forward")
    if named is None and isinstance(reshard, str) and fold(reshard) in (*STRATEGIES, *HYBRID):
        named = fold(reshard)  # accelerate 1.6 renamed the strategy before it became a switch
        group.take("fsdp_reshard_after_forward", "reshard_after_forward")
    if named in HYBRID:
        run["zero_stage"] = 3 if named in ("4", "hybrid_shard") else 2
        group.ask("hybrid sharding does not say over how many GPUs a copy is divided", "run.dp_shard")
    elif named is not None:
        if named not in STRATEGIES:
            legal = ", ".join((*STRATEGIES, *HYBRID))
            raise group.wrong(("fsdp_sharding_strategy",), "is not a sharding strategy", strategy, legal)
        run["zero_stage"] = STRATEGIES[named]
    else:
        kept = flag("reshard_after_forward")
        run["zero_stage"] = 2 if kept is False else 3
        if kept is None:
            group.assume("sharding strategy not stated: FULL_SHARD, FSDP's default")
    if flag("offload_params"):
        run["offload"] = "params+optimizer-cpu"
    if group.flag("fsdp_activation_checkpointing", "activation_checkpointing"):
        run["recompute"] = "full"
    one = flag("cpu_ram_efficient_loading")
    if one is not None:
        run["host_load"] = "one-rank" if one else "every-rank"
    group.skip(
        "fsdp_sharding_strategy", "fsdp_reshard_after_forward", "reshard_after_forward",
        "fsdp_auto_wrap_policy", "auto_wrap_policy", "fsdp_backward_prefetch",
        "backward_prefetch", "fsdp_forward_prefetch", "forward_prefetch", "fsdp_state_dict_type",
        "state_dict_type", "fsdp_sync_module_states", "sync_module_states", "fsdp_use_orig_params",
        "use_orig_params", "fsdp_transformer_layer_cls_to_wrap", "transformer_layer_cls_to_wrap",
        "fsdp_min_num_params", "min_num_params", "fsdp_backward_prefetch_policy", "limit_all_gathers",
        "final_state_dict_type",
    )  # fmt: skip
