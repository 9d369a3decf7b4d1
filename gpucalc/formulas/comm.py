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


@formula(unit="s", source=_LAW)
def link_latency_s(*, alpha0_s: Num, alpha_step_s: Num, ranks: Num) -> Num:
    """Small-message latency inside a node: grows with every rank beyond two."""
    return alpha0_s + alpha_step_s * maximum(ranks - 2, 0)


@formula(unit="s", source=_LAW + "; about 10 us per doubling of nodes on InfiniBand or RoCE")
def network_latency_s(*, alpha0_s: Num, alpha_step_s: Num, nodes: Num) -> Num:
    """Small-message latency over several nodes: grows with every doubling beyond two."""
    return alpha0_s + alpha_step_s * (log2(maximum(nodes, 2)) - 1)


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


@formula(unit="bytes/s", source=_LAW + "; tree over two nodes reaches 1.7-1.9 x, rings 0.9-0.97 x the NICs")
def network_bus_bytes_per_s(
    *,
    intra_bus_bytes_per_s: Num,
    node_nic_bytes_per_s: Num,
    nodes: Num,
    ranks_per_node: Num,
    gpus_per_node: Num,
    two_node_factor: Num,
    ring_factor: Num,
) -> Num:
    """Bus bandwidth of a group over several nodes: its share of the node's NICs, or the links inside.

    The node's NICs are shared by the gpus_per_node / ranks_per_node groups that work at the same time.
    """
    return minimum(
        intra_bus_bytes_per_s,
        where(nodes > 2, ring_factor, two_node_factor)
        * node_nic_bytes_per_s
        * minimum(ranks_per_node / gpus_per_node, 1),
    )


@formula(unit="s", source="Arithmetic: inside and outside traffic run side by side, the slower one counts")
def all_to_all_s(
    *,
    message_bytes: Num,
    ranks: Num,
    ranks_per_node: Num,
    alpha_s: Num,
    intra_bytes_per_s: Num,
    nic_bytes_per_s: Num,
) -> Num:
    """Time of an all-to-all in which every rank sends `message_bytes` in equal parts to `ranks` ranks.

    `intra_bytes_per_s` and `nic_bytes_per_s` are per rank and one way.
    """
    return where(
        ranks > 1,
        alpha_s
        + maximum(
            message_bytes * (minimum(ranks_per_node, ranks) - 1) / ranks / intra_bytes_per_s,
            message_bytes * (ranks - minimum(ranks_per_node, ranks)) / ranks / nic_bytes_per_s,
        ),
        0.0,
    )


# --- what shows ------------------------------------------------------------------------------------


@formula(unit="s", source="Arithmetic: what runs beside computation shows only where it is longer")
def exposed_s(*, communication_s: Num, compute_s: Num, overlap: Num) -> Num:
    """Communication that computation cannot hide; `overlap` is the share of the compute it runs beside."""
    return maximum(communication_s - overlap * compute_s, 0)


# --- what is sent ----------------------------------------------------------------------------------


@formula(unit="bytes", source="Shoeybi et al. 2019; Korthikanti et al. 2022: gather and scatter move as much")
def tensor_parallel_message_bytes(*, tokens: Num, hidden: Num, element_bytes: Num) -> Num:
    """Buffer of one tensor-parallel all-reduce: the whole activation of a micro-batch."""
    return tokens * hidden * element_bytes


@formula(unit="bytes", source="Liu et al. 2023 (ring attention); keys and values of one rank's tokens")
def ring_step_bytes(*, tokens: Num, kv_width: Num, element_bytes: Num) -> Num:
    """Keys and values one rank hands on at each step of a context-parallel ring."""
    return tokens * kv_width * element_bytes


@formula(unit="bytes", source="Lepikhin et al. 2020 (GShard): every token goes to top_k experts")
def dispatch_bytes(*, tokens: Num, top_k: Num, hidden: Num, element_bytes: Num) -> Num:
    """Activations one rank sends to the experts of other ranks, and later takes back."""
    return tokens * top_k * hidden * element_bytes


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
