"""How many NCCL communicators a rank opens: one a parallel dimension, and those its framework adds.

Each holds buffers of its own, made when its group first communicates.
"""

from __future__ import annotations

from gpucalc.num import Num, maximum, minimum, where
from gpucalc.plan.rank import Rank

DOMAIN = 8  # GPUs that reach each other over NVLink in most servers; larger domains open fewer channels each


def communicators(rank: Rank) -> tuple[Num, Num]:
    """Communicators of a rank, and the ranks of the largest group."""
    layout, framework = rank.layout, rank.recipe.framework
    found, group = 0, 1
    for size in (layout.dp, layout.tp, layout.cp, layout.pp, layout.ep):
        found, group = found + _one(size > 1), maximum(group, size)
    added = {"deepspeed": _deepspeed, "megatron": _megatron, "torchtitan": _torchtitan}
    if framework not in added:
        return found, group
    return found + added[framework](rank), group if framework == "torchtitan" else layout.world


def token_peers(rank: Rank) -> Num:
    """Ranks of its NVLink domain a rank hands tokens for experts to through NCCL, each over many channels."""
    if rank.recipe.moe_dispatcher != "alltoall" or not rank.nvlink:
        return 0
    return minimum(rank.layout.ep, DOMAIN) - 1


def _one(opened: Num) -> Num:
    return where(opened, 1, 0)


def _tied_ends(rank: Rank) -> int:
    """The first and the last stage of a pipeline reduce a tied table between them."""
    head = rank.graph.head
    return int((rank.stage.first or rank.stage.last) and head is not None and head.tied)


def _deepspeed(rank: Rank) -> Num:
    """What DeepSpeed opens besides.

    All ranks, for barriers: its data-parallel group is another (utils/groups.py, _clone_world_group). Under
    pipeline parallelism tensor and pipeline ranks together (norms); one with every neighbouring stage, as
    activations are sent between two ranks; the two ends (runtime/pipe: engine.py, p2p.py, topology.py).
    """
    layout, stage = rank.layout, rank.stage
    world = _one(layout.world > 1)
    if layout.pp == 1:
        return world
    return world + _one(layout.tp > 1) + 2 - (int(stage.first) + int(stage.last)) + _tied_ends(rank)


def _megatron(rank: Rank) -> Num:
    """What Megatron-Core opens besides, read at d98e8a64.

    verl pull 6408 freed 7 GB of 8 H100 at tp 2, pp 2 and dp 2 by suspending them all, 9.5 with experts: this
    counts 3.4.

    All ranks, for barriers and timers (training.py). Norms of gradients: all ranks once more under the
    distributed optimizer, else tensor and pipeline ranks together (optimizer/__init__.py,
    grad_stats_parallel_group). Interleaved, a communicator with each neighbouring stage instead of one for
    all (overlap_p2p_comm sends singly, p2p_communication.py). Experts: counts of tokens over tensor and
    expert ranks (token_dispatcher.py, tp_ep_group) and the gradients of those that hold the same experts.
    """
    layout = rank.layout
    world = _one(layout.world > 1)
    norms = world if layout.zero_stage else _one(layout.tp * layout.pp > 1)
    experts = where(layout.ep > 1, 1 + _one(layout.expert_shard > 1), 0)
    pipeline = _one(layout.vpp > 1) + _tied_ends(rank) if layout.pp > 1 else 0
    return world + norms + experts + pipeline


def _torchtitan(rank: Rank) -> Num:
    """What torchtitan opens besides: the loss is summed over a mesh of its own (parallel_dims.py)."""
    return _one(rank.layout.dp * rank.layout.cp > 1)
