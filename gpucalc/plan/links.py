"""Communication of a layout on a cluster: which group talks over which links, and for how long.

Ranks are laid out as Megatron does: tp fastest, then cp, dp, pp slowest; the expert-parallel group
takes neighbouring ranks. `stride` is the distance between two neighbours of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpucalc.errors import InputError
from gpucalc.formulas import comm
from gpucalc.line import Line, compute, value_of
from gpucalc.num import Num, is_scalar, maximum, where
from gpucalc.spec.figure import Figure
from gpucalc.spec.hardware import Cluster, CollectiveSpec

# GPUs on one board, and network cards beside it: what the network classes were measured with.
BOARD = 8


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a cluster as formula inputs."""

    cluster: Cluster

    @property
    def island(self) -> int:
        """GPUs that reach each other without the network."""
        return max(self.cluster.nvlink_domain, min(self.cluster.gpus_per_node, self.cluster.count))

    @property
    def inter(self) -> CollectiveSpec:
        """The network class. Raises InputError on a cluster described as one node."""
        if self.cluster.inter is None:
            raise InputError(
                "a group spans several nodes but the cluster has no network",
                key="system",
                given=f"{self.cluster.count} GPUs in {self.cluster.nodes} node(s)",
            )
        return self.cluster.inter

    def collective(self, name: str, op: str, message: Any, *, ranks: Num, stride: Num) -> Line:
        """Time of one collective over a group; op: all_reduce | all_gather | reduce_scatter."""
        factor = (
            compute("bus_factor", comm.all_reduce_bus_factor, ranks=ranks)
            if op == "all_reduce"
            else compute("bus_factor", comm.gather_bus_factor, ranks=ranks)
        )
        nodes = comm.group_nodes(ranks=ranks, stride=stride, domain=self.island)
        inside = _terms(self.cluster.intra, op, ranks)
        if self.cluster.inter is None or (is_scalar(nodes) and nodes <= 1):
            self._check(nodes)
            terms = inside
        else:
            across = self._across(op, ranks=ranks, stride=stride, nodes=nodes, inside=inside.bandwidth)
            terms = across if is_scalar(nodes) else _either(nodes, inside, across)
        return compute(
            name,
            comm.collective_s,
            message_bytes=message,
            ranks=ranks,
            bus_factor=factor,
            alpha_s=terms.alpha,
            ramp=terms.ramp,
            bus_bytes_per_s=terms.bandwidth,
        )

    def dispatch(
        self, name: str, *, tokens: Num, top_k: Num, hidden: Num, element_bytes: Num, ranks: Num, stride: Num
    ) -> Line:
        """Time to send every token to its experts: one copy per destination rank, one per other node."""
        nodes = comm.group_nodes(ranks=ranks, stride=stride, domain=self.island)
        per_node = comm.group_ranks_per_node(ranks=ranks, stride=stride, domain=self.island)
        load = {"tokens": tokens, "hidden": hidden, "element_bytes": element_bytes}
        # Copies that arrive from other nodes are handed on inside, so the links inside carry them all.
        copies = compute("copies", comm.distinct_destinations, places=ranks, top_k=top_k)
        crossing = compute("copies", comm.distinct_destinations, places=nodes, top_k=top_k)
        return self._exchange(
            name,
            compute("inside", comm.dispatch_bytes, copies=copies, away=(per_node - 1) / per_node, **load),
            compute("outside", comm.dispatch_bytes, copies=crossing, away=(nodes - 1) / nodes, **load),
            nodes=nodes,
            per_node=per_node,
            stride=stride,
        )

    def all_to_all(self, name: str, message: Any, *, ranks: Num, stride: Num) -> Line:
        """Time of an exchange in which every rank sends an equal part of its buffer to each rank."""
        nodes = comm.group_nodes(ranks=ranks, stride=stride, domain=self.island)
        per_node = comm.group_ranks_per_node(ranks=ranks, stride=stride, domain=self.island)
        return self._exchange(
            name,
            compute("inside", comm.exchanged_bytes, message_bytes=message, away=(per_node - 1) / ranks),
            compute("outside", comm.exchanged_bytes, message_bytes=message, away=(ranks - per_node) / ranks),
            nodes=nodes,
            per_node=per_node,
            stride=stride,
        )

    def _exchange(
        self, name: str, inside: Line, outside: Line, *, nodes: Num, per_node: Num, stride: Num
    ) -> Line:
        links = _terms(self.cluster.intra, "alltoall", per_node)
        if self.cluster.inter is None or (is_scalar(nodes) and nodes <= 1):
            self._check(nodes)
            card, terms = links.bandwidth, links
        else:
            card = _terms(self.inter, "send_recv", nodes).bandwidth
            if self.cluster.oversubscription > 1:
                card = compute(
                    "card",
                    comm.crossing_nic_bytes_per_s,
                    nic_bytes_per_s=card,
                    nodes=nodes,
                    nodes_per_pod=maximum(self.cluster.pod_gpus / (stride * per_node), 1),
                    oversubscription=self.cluster.oversubscription,
                )
            across = _terms(self.inter, "alltoall", nodes)
            terms = across if is_scalar(nodes) else _either(nodes, links, across)
        transfer = compute(
            "transfer",
            comm.transfer_s,
            inside_bytes=inside,
            outside_bytes=outside,
            intra_bytes_per_s=links.bandwidth,
            nic_bytes_per_s=card,
        )
        return compute(name, comm.all_to_all_s, transfer_s=transfer, alpha_s=terms.alpha, ramp=terms.ramp)

    def send(self, name: str, message: Any, *, world: Num, stage_ranks: Num = 1) -> Line:
        """Time of one message between pipeline neighbours; across nodes when the run needs several.

        stage_ranks: GPUs of one stage, all of which send.
        """
        inside = _terms(self.cluster.intra, "send_recv", 2)
        if self.cluster.inter is None or (is_scalar(world) and world <= self.island):
            terms = inside
        else:
            across = _terms(self.inter, "send_recv", 2)
            terms = across if is_scalar(world) else _either(where(world > self.island, 2, 1), inside, across)
            if self.cluster.oversubscription > 1:
                crossing = compute(
                    "link",
                    comm.crossing_link_bytes_per_s,
                    link_bytes_per_s=terms.bandwidth,
                    stage_ranks=stage_ranks,
                    pod_gpus=where(world > self.cluster.pod_gpus, self.cluster.pod_gpus, world * 1e3),
                    oversubscription=self.cluster.oversubscription,
                )
                terms = _Terms(terms.alpha, crossing, terms.ramp)
        return compute(
            name,
            comm.point_to_point_s,
            message_bytes=message,
            alpha_s=terms.alpha,
            link_bytes_per_s=terms.bandwidth,
        )

    def _check(self, nodes: Num) -> None:
        if is_scalar(nodes) and nodes > 1:
            _ = self.inter

    def _across(self, op: str, *, ranks: Num, stride: Num, nodes: Num, inside: Line) -> _Terms:
        terms = _terms(self.inter, op, nodes)
        per_island = comm.group_ranks_per_node(ranks=ranks, stride=stride, domain=self.island)
        cards = self.inter.all_cards
        bandwidth = compute(
            "group_bandwidth",
            comm.group_bus_bytes_per_s,
            node_bus_bytes_per_s=terms.bandwidth,
            all_cards_bytes_per_s=0 if cards is None else cards.line("all_cards"),
            intra_bus_bytes_per_s=inside,
            ranks_per_node=per_island,
            gpus_per_node=self.island,
        )
        if self.cluster.oversubscription > 1:
            share = compute(
                "share",
                comm.pod_crossing_share,
                ranks=ranks,
                ranks_per_pod=comm.group_ranks_per_node(
                    ranks=ranks, stride=stride, domain=self.cluster.pod_gpus
                ),
                oversubscription=self.cluster.oversubscription,
            )
            bandwidth = compute(
                "group_bandwidth", comm.crossing_bus_bytes_per_s, bus_bytes_per_s=bandwidth, share=share
            )
        hop = self.cluster.intra.alpha_step
        if self.island <= BOARD or hop is None:
            return _Terms(terms.alpha, bandwidth, terms.ramp)
        alpha = compute(
            "alpha",
            comm.network_latency_s,
            alpha_s=terms.alpha,
            hop_s=hop.line("alpha_step"),
            hop_factor=1.0
            if op == "all_reduce"
            else self.cluster.intra.ops[op].alpha_factor.line("alpha_factor"),
            ranks_per_node=per_island,
        )
        if op == "all_reduce" and self.inter.ring_limit is not None:  # not measured for the others
            bandwidth = compute(
                "group_bandwidth",
                comm.ring_bus_bytes_per_s,
                bus_bytes_per_s=bandwidth,
                ring_bytes_per_s=self.inter.ring_limit.line("ring_limit"),
                nodes=nodes,
            )
        return _Terms(alpha, bandwidth, terms.ramp)


@dataclass(frozen=True, slots=True)
class _Terms:
    """Latency, bus bandwidth and ramp of one operation over one group."""

    alpha: Line
    bandwidth: Line
    ramp: Line


def _terms(spec: CollectiveSpec, op: str, size: Num) -> _Terms:
    other = None if op == "all_reduce" else spec.ops.get(op)
    if op != "all_reduce" and other is None:
        raise InputError(
            "this link has no such operation", where=spec.id, given=op, legal=["all_reduce", *spec.ops]
        )
    steps: Num = 0
    if spec.alpha_step is not None:
        steps = (
            compute("steps", comm.link_steps, ranks=size)
            if spec.step == "n-2"
            else compute("steps", comm.network_steps, nodes=size)
        )
    alpha = compute(
        "alpha",
        comm.latency_s,
        alpha0_s=spec.alpha0.line("alpha0"),
        alpha_step_s=spec.alpha_step.line("alpha_step") if spec.alpha_step is not None else 0.0,
        steps=steps,
        alpha_factor=other.alpha_factor.line("alpha_factor") if other is not None else 1.0,
        alpha_extra_s=other.alpha_extra.line("alpha_extra") if other is not None else 0.0,
    )
    if other is None:
        return _Terms(alpha, _by_size(spec.bus_bandwidth, size, "bus_bandwidth"), spec.ramp.line("ramp"))
    own = _by_size(other.bandwidth, size, "bandwidth")
    if next(iter(other.bandwidth.values())).unit == "ratio":
        ring = _by_size(spec.ring_bandwidth or spec.bus_bandwidth, size, "ring_bandwidth")
        own = compute("bandwidth", comm.operation_bus_bytes_per_s, ring_bus_bytes_per_s=ring, share=own)
    return _Terms(alpha, own, other.ramp.line("ramp"))


def _by_size(table: dict[int, Figure], size: Num, name: str) -> Line:
    """The figure of the largest listed size not above the given one, else the smallest."""
    sizes = sorted(table)
    if is_scalar(size):
        below = [key for key in sizes if key <= size]
        return table[below[-1] if below else sizes[0]].line(name)
    value: Num = table[sizes[0]].si
    for key in sizes[1:]:
        value = where(size >= key, table[key].si, value)
    leaf = table[sizes[0]].line(name)
    return Line(name, value, leaf.unit, leaf.kind, source=leaf.source)


def _either(nodes: Num, inside: _Terms, across: _Terms) -> _Terms:
    def pick(a: Line, b: Line) -> Line:
        return Line(b.name, where(nodes > 1, value_of(b), value_of(a)), b.unit, b.kind, source=b.source)

    return _Terms(
        pick(inside.alpha, across.alpha),
        pick(inside.bandwidth, across.bandwidth),
        pick(inside.ramp, across.ramp),
    )
