"""Seconds of collectives and messages between GPUs.

One law for every operation and level: latency, transfer, and a ramp between them,
    t(S) = alpha + 2 c sqrt(alpha S / beta) + S / beta,   beta = bus bandwidth / bus factor.
c = 0 is plain latency plus bandwidth. Fitted to published nccl-tests curves: mean error 9.3 %
over 45 all-reduce curves, 6.2 % on 20 points held out (256 MB and up).
"""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.num import Num, ceil_div, log2, maximum, minimum, sqrt, where

_LAW = "fit to published nccl-tests curves: mean error 9.3 % over 45 curves, 6.2 % on 20 held-out points"
_FACTORS = "NVIDIA nccl-tests, doc/PERFORMANCE.md"


# --- how much travels ------------------------------------------------------------------------------


@formula(unit="count", source=_FACTORS)
def all_reduce_bus_factor(*, ranks: Num) -> Num:
    """Bytes over the busiest link per byte of an all-reduced buffer."""
    return 2 * (ranks - 1) / ranks


@formula(unit="count", source=_FACTORS)
def gather_bus_factor(*, ranks: Num) -> Num:
    """Bytes over the busiest link per byte of the whole gathered, scattered or exchanged buffer."""
    return (ranks - 1) / ranks


# --- how fast --------------------------------------------------------------------------------------


@formula(unit="count", source=_LAW)
def link_steps(*, ranks: Num) -> Num:
    """Latency steps beyond the first inside a node: one for every rank beyond two."""
    return maximum(ranks - 2, 0)


@formula(unit="count", source=_LAW + "; about 10 us per doubling of nodes on InfiniBand or RoCE")
def network_steps(*, nodes: Num) -> Num:
    """Latency steps beyond the first over several nodes: one for every doubling beyond two."""
    return log2(maximum(nodes, 2)) - 1


@formula(unit="s", source=_LAW)
def latency_s(*, alpha0_s: Num, alpha_step_s: Num, steps: Num, alpha_factor: Num, alpha_extra_s: Num) -> Num:
    """Time of a small message: the all-reduce latency of the link, changed for the operation."""
    return (alpha0_s + alpha_step_s * steps) * alpha_factor + alpha_extra_s


@formula(unit="bytes/s", source=_LAW)
def operation_bus_bytes_per_s(*, ring_bus_bytes_per_s: Num, share: Num) -> Num:
    """Bus bandwidth of an operation as a share of what rings reach on the same links."""
    return ring_bus_bytes_per_s * share


@formula(unit="s", source=_LAW)
def collective_s(
    *, message_bytes: Num, ranks: Num, bus_factor: Num, alpha_s: Num, ramp: Num, bus_bytes_per_s: Num
) -> Num:
    """Time of one collective; nothing for a group of one."""
    return where(
        ranks > 1,
        alpha_s
        + 2 * ramp * sqrt(alpha_s * message_bytes * bus_factor / bus_bytes_per_s)
        + message_bytes * bus_factor / bus_bytes_per_s,
        0.0,
    )


@formula(unit="s", source="Arithmetic; NCCL send and receive reach the link's one-way bandwidth")
def point_to_point_s(*, message_bytes: Num, alpha_s: Num, link_bytes_per_s: Num) -> Num:
    """Time of one message between two ranks."""
    return alpha_s + message_bytes / link_bytes_per_s


# --- who talks to whom -----------------------------------------------------------------------------


@formula(unit="count", source="Megatron-LM rank order: tp fastest, then cp, dp, pp slowest")
def group_nodes(*, ranks: Num, stride: Num, domain: Num) -> Num:
    """NVLink domains a group of `ranks` spans when neighbours lie `stride` ranks apart."""
    return where(stride >= domain, ranks, ceil_div(ranks * stride, domain))


@formula(unit="count", source="Arithmetic on the rank order")
def group_ranks_per_node(*, ranks: Num, stride: Num, domain: Num) -> Num:
    """Ranks of one group that share an NVLink domain."""
    return maximum(minimum(ranks, domain / stride), 1)


@formula(
    unit="s",
    source="NVIDIA/nccl 2.30.7 src/graph/tuning.cc: a ring's latency is a hop for every rank, longer across "
    "nodes; 20 racks of 72 GPUs show 4.5 ms where this gives 3.9 (coreweave/nccl-tests)",
)
def ring_latency_s(*, alpha0_s: Num, link_step_s: Num, network_step_s: Num, ranks: Num, nodes: Num) -> Num:
    """Latency of one ring through every rank of several nodes: each adds a step, each node a network one."""
    return alpha0_s + link_step_s * maximum(ranks - 2, 0) + network_step_s * nodes


@formula(
    unit="bytes/s", source="NVIDIA/nccl 2.30.7 src/graph/tuning.cc: a tree reaches 0.92 of the ring's rate"
)
def tree_bus_bytes_per_s(*, ring_bus_bytes_per_s: Num) -> Num:
    """Bus bandwidth of a double binary tree over three nodes and more."""
    return 0.92 * ring_bus_bytes_per_s


@formula(
    unit="s",
    source="NVIDIA/nccl 2.30.7 src/graph/tuning.cc: a tree's latency grows by a hop for every rank inside a "
    "node; network latencies were measured with nodes of eight",
)
def network_latency_s(*, alpha_s: Num, hop_s: Num, hop_factor: Num, ranks_per_node: Num) -> Num:
    """Latency over several islands: the network's, and a hop for every rank of an island beyond eight.

    `hop_factor` is the operation's share of the all-reduce hop, as inside an island.
    """
    return alpha_s + hop_s * hop_factor * maximum(ranks_per_node - 8, 0)


@formula(
    unit="bytes/s",
    source="coreweave/nccl-tests: one all-reduce over 20 racks of 72 GPUs leaves each rack at the rate of "
    "about eight network cards; over two racks a tree is not bound by them",
)
def ring_bus_bytes_per_s(*, bus_bytes_per_s: Num, ring_bytes_per_s: Num, nodes: Num) -> Num:
    """Bus bandwidth of a group over several islands, whose rings cross the network from three on."""
    return where(nodes > 2, minimum(bus_bytes_per_s, ring_bytes_per_s), bus_bytes_per_s)


@formula(unit="bytes/s", source="Arithmetic: groups that work at the same time share a node's network cards")
def group_bus_bytes_per_s(
    *,
    node_bus_bytes_per_s: Num,
    all_cards_bytes_per_s: Num,
    intra_bus_bytes_per_s: Num,
    ranks_per_node: Num,
    gpus_per_node: Num,
) -> Num:
    """Bus bandwidth of a group over several nodes that has `ranks_per_node` GPUs in each.

    `node_bus_bytes_per_s` is what a group of whole nodes reaches, `all_cards_bytes_per_s` what a node's
    cards carry: more where the links inside hold a whole node back, as in racks of 72 GPUs with a card
    each. Groups that run side by side share the latter; none exceeds the links inside.
    """
    return minimum(
        maximum(node_bus_bytes_per_s, all_cards_bytes_per_s) * ranks_per_node / gpus_per_node,
        intra_bus_bytes_per_s,
    )


@formula(unit="s", source="Arithmetic: inside and outside traffic run side by side, the slower one counts")
def transfer_s(*, inside_bytes: Num, outside_bytes: Num, intra_bytes_per_s: Num, nic_bytes_per_s: Num) -> Num:
    """Time at full rate to send so many bytes inside the node and to other nodes, per rank and one way."""
    return maximum(inside_bytes / intra_bytes_per_s, outside_bytes / nic_bytes_per_s)


@formula(unit="s", source=_LAW)
def all_to_all_s(*, transfer_s: Num, alpha_s: Num, ramp: Num) -> Num:
    """Time of an exchange in which every rank sends to every other: latency, ramp and transfer."""
    return alpha_s + 2 * ramp * sqrt(alpha_s * transfer_s) + transfer_s


# --- above the nodes -------------------------------------------------------------------------------


@formula(
    unit="fraction",
    source="Arithmetic on a fat tree whose top is narrower than its bottom by `oversubscription`: the rings"
    " and trees of rails cross it once for each group, so those of a pod share what is there",
)
def pod_crossing_share(*, ranks: Num, ranks_per_pod: Num, oversubscription: Num) -> Num:
    """Share of its rate that a group's ring keeps where it leaves the pods; all of it inside one.

    Every rank of a pod is in one of the groups that cross: ranks / ranks_per_pod of them at a time.
    """
    return where(ranks > ranks_per_pod, minimum(1, ranks_per_pod / oversubscription), 1)


@formula(unit="bytes/s", source="Arithmetic")
def crossing_bus_bytes_per_s(*, bus_bytes_per_s: Num, share: Num) -> Num:
    """Bus bandwidth of a group that spans several pods."""
    return bus_bytes_per_s * share


@formula(
    unit="bytes/s",
    source="Arithmetic: all GPUs of a pod exchange with other pods at once, the rest stays below the top",
)
def crossing_nic_bytes_per_s(
    *, nic_bytes_per_s: Num, nodes: Num, nodes_per_pod: Num, oversubscription: Num
) -> Num:
    """Rate of a GPU's network card in an exchange among nodes, some of them in other pods."""
    return nic_bytes_per_s / maximum(
        1, (nodes - minimum(nodes, nodes_per_pod)) / maximum(nodes - 1, 1) * oversubscription
    )


@formula(
    unit="bytes/s",
    source="Arithmetic: a stage sends to the next, and where a pod ends all its ranks do so across the top",
)
def crossing_link_bytes_per_s(
    *, link_bytes_per_s: Num, stage_ranks: Num, pod_gpus: Num, oversubscription: Num
) -> Num:
    """Rate of a message between pipeline neighbours of which some pair lies in two pods."""
    return link_bytes_per_s * minimum(1, pod_gpus / minimum(stage_ranks, pod_gpus) / oversubscription)


# --- what shows ------------------------------------------------------------------------------------


@formula(unit="s", source="Arithmetic; hidden communication still takes multiprocessors and bandwidth away")
def exposed_s(*, communication_s: Num, compute_s: Num, overlap: Num, contention: Num) -> Num:
    """Communication that computation cannot hide, and what the hidden part costs.

    `overlap` is the share of the computation it runs beside, `contention` the share of hidden
    communication that shows as slower computation.
    """
    return maximum(communication_s - overlap * compute_s, 0) + contention * minimum(
        communication_s, overlap * compute_s
    )


@formula(unit="s", source="Arithmetic: as exposed_s, of the part that has a partner")
def paired_exchange_s(*, communication_s: Num, compute_s: Num, paired_share: Num, contention: Num) -> Num:
    """Exchange of tokens beside another micro-batch's computation: what has none beside it shows whole."""
    return communication_s - (1 - contention) * minimum(paired_share * communication_s, compute_s)


@formula(
    unit="s", source="Shoeybi et al. 2019; Korthikanti et al. 2022; TransformerEngine overlaps chunks of it"
)
def tensor_parallel_s(
    *,
    all_reduce_s: Num,
    all_gather_s: Num,
    reduce_scatter_s: Num,
    sequence_parallel: Num,
    reductions: Num,
    passes: Num,
    hidden_share: Num,
) -> Num:
    """Tensor-parallel communication of one layer that shows on the critical path.

    `reductions` per pass; `passes` are forward, backward and forward again when recomputed. Under
    sequence parallelism a gather and a scatter take the place of each reduction, and `hidden_share` of
    them runs beside the products they feed.
    """
    return (
        reductions
        * passes
        * where(sequence_parallel, (all_gather_s + reduce_scatter_s) * (1 - hidden_share), all_reduce_s)
    )


@formula(
    unit="s",
    source="Rajbhandari et al. 2020; Zhao et al. 2023: weights gathered and gradients scattered by unit",
)
def sharded_sync_s(
    *, all_gather_s: Num, reduce_scatter_s: Num, gathers: Num, scatters: Num, units: Num
) -> Num:
    """Data-parallel communication of a step with sharded state, `units` pieces one after another."""
    return units * (gathers * all_gather_s + scatters * reduce_scatter_s)


# --- what is sent ----------------------------------------------------------------------------------


@formula(
    unit="bytes",
    source="Zhao et al. 2023 (hybrid sharding): scattered in a copy, then summed over copies; read in pytorch"
    " fsdp/_fully_shard/_fsdp_collectives.py (foreach_reduce) and Megatron-LM d98e8a64"
    " param_and_grad_buffer.py (start_grad_sync)",
)
def gradient_share_bytes(*, message_bytes: Num, shard: Num) -> Num:
    """The share of scattered gradients a rank sums with its like in the other copies of sharded state."""
    return message_bytes / shard


@formula(unit="bytes", source="Shoeybi et al. 2019; Korthikanti et al. 2022: gather and scatter move as much")
def tensor_parallel_message_bytes(*, tokens: Num, hidden: Num, element_bytes: Num) -> Num:
    """Buffer of one tensor-parallel all-reduce: the whole activation of a micro-batch."""
    return tokens * hidden * element_bytes


@formula(
    unit="bytes", source="Liu et al. 2023 (ring attention): every rank sees every rank's keys and values once"
)
def ring_bytes(*, tokens: Num, kv_width: Num, element_bytes: Num, cp: Num) -> Num:
    """Keys and values of all ranks, which a context-parallel ring passes by each of them."""
    return tokens * kv_width * element_bytes * cp


@formula(
    unit="bytes", source="Lepikhin et al. 2020 (GShard); one copy per destination as DeepEP and HybridEP send"
)
def dispatch_bytes(*, tokens: Num, copies: Num, hidden: Num, element_bytes: Num, away: Num) -> Num:
    """Activations one rank sends to the experts of other ranks, and later takes back.

    `copies` of every token leave for `away`, the share of destinations that are not the sender's own.
    """
    return tokens * copies * hidden * element_bytes * away


@formula(unit="bytes", source="Arithmetic: every rank keeps one part of its buffer and sends the others")
def exchanged_bytes(*, message_bytes: Num, away: Num) -> Num:
    """Bytes one rank sends of its buffer; `away` is the share whose destinations lie there."""
    return message_bytes * away


@formula(
    unit="count", source="Expected number of distinct places among `places` that `top_k` even draws reach"
)
def distinct_destinations(*, places: Num, top_k: Num) -> Num:
    """Ranks or nodes a token is sent to when experts that share one get a single copy (DeepEP, HybridEP)."""
    return places * (1 - (1 - 1 / places) ** top_k)


@formula(unit="bytes", source="Rajbhandari et al. 2020")
def gradient_message_bytes(*, params: Num, element_bytes: Num) -> Num:
    """Gradients one model replica reduces per step."""
    return params * element_bytes


@formula(unit="bytes", source="Rajbhandari et al. 2020; Zhao et al. 2023 (FSDP)")
def weight_message_bytes(*, params: Num, element_bytes: Num) -> Num:
    """Weights one gather puts together."""
    return params * element_bytes


@formula(
    unit="bytes",
    source="Arithmetic: hidden states of one micro-batch, divided by tp under sequence parallelism",
)
def stage_message_bytes(*, tokens: Num, hidden: Num, element_bytes: Num, divided_by: Num) -> Num:
    """Activations a pipeline stage hands to the next for one micro-batch."""
    return tokens * hidden * element_bytes / divided_by
