"""All-reduce by algorithm: what a ring, a tree, reduction in the switch and two levels would each take.

A plan's own estimate stands for the library's choice, which is the fastest of these by message size;
this is where that choice, and the rules of thumb about it, can be looked at.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpucalc.formulas import comm
from gpucalc.line import Line, compute, total
from gpucalc.plan.links import Links
from gpucalc.spec.hardware import Cluster, CollectiveSpec


def all_reduce_by_algorithm(cluster: Cluster, message_bytes: float, ranks: int) -> dict[str, Line]:
    """Seconds of an all-reduce over the first `ranks` GPUs, by algorithm that can run there.

    ring; nvls where the switch reduces; over several islands also tree and hierarchical (scatter
    inside, reduce across, gather inside).
    """
    links = Links(cluster)
    islands = int(comm.group_nodes(ranks=ranks, stride=1, domain=links.island))
    if islands <= 1:
        return _inside(links, message_bytes, ranks)
    inter, island = links.inter, links.island
    factor = compute("bus_factor", comm.all_reduce_bus_factor, ranks=ranks)
    plain: dict[str, Any] = {"message_bytes": message_bytes, "ranks": ranks, "bus_factor": factor}
    ring = compute(
        "ring",
        comm.collective_s,
        ramp=cluster.intra.ramp.line("ramp"),
        alpha_s=_ring_latency(cluster.intra, inter, ranks=ranks, islands=islands),
        bus_bytes_per_s=_ring_bandwidth(inter, islands),
        **plain,
    )
    if islands == 2:  # the estimate over two islands is a tree's
        tree = links.collective("tree", "all_reduce", message_bytes, ranks=ranks, stride=1)
    else:
        latency = compute(
            "alpha",
            comm.latency_s,
            alpha0_s=inter.alpha0.line("alpha0"),
            alpha_step_s=inter.alpha_step.line("alpha_step") if inter.alpha_step else 0.0,
            steps=compute("steps", comm.network_steps, nodes=islands),
            alpha_factor=1.0,
            alpha_extra_s=0.0,
        )
        bandwidth = compute(
            "tree_bandwidth", comm.tree_bus_bytes_per_s, ring_bus_bytes_per_s=_ring_bandwidth(inter, islands)
        )
        tree = compute(
            "tree",
            comm.collective_s,
            ramp=inter.ramp.line("ramp"),
            alpha_s=latency,
            bus_bytes_per_s=bandwidth,
            **plain,
        )
    parts = (
        links.collective("scatter_inside", "reduce_scatter", message_bytes, ranks=island, stride=1),
        links.collective("reduce_across", "all_reduce", message_bytes / island, ranks=islands, stride=island),
        links.collective("gather_inside", "all_gather", message_bytes, ranks=island, stride=1),
    )
    return {"ring": ring, "tree": tree, "hierarchical": total("hierarchical", parts, unit="s")}


def fastest(times: dict[str, Line]) -> str:
    """The algorithm that takes least."""
    return min(times, key=lambda name: float(times[name].value))


def _inside(links: Links, message_bytes: float, ranks: int) -> dict[str, Line]:
    intra = links.cluster.intra
    if not intra.ring_bandwidth:
        return {"ring": links.collective("ring", "all_reduce", message_bytes, ranks=ranks, stride=1)}
    without = intra.model_copy(update={"bus_bandwidth": intra.ring_bandwidth})
    rings = Links(replace(links.cluster, intra=without))
    times = {"ring": rings.collective("ring", "all_reduce", message_bytes, ranks=ranks, stride=1)}
    switched = intra.terms("all_reduce", ranks)
    if switched.bus_bytes_per_s > without.terms("all_reduce", ranks).bus_bytes_per_s:
        latency = intra.switch_latency or intra.alpha0
        times["nvls"] = compute(
            "nvls",
            comm.collective_s,
            message_bytes=message_bytes,
            ranks=ranks,
            bus_factor=compute("bus_factor", comm.all_reduce_bus_factor, ranks=ranks),
            alpha_s=latency.line("alpha"),
            ramp=intra.ramp.line("ramp"),
            bus_bytes_per_s=switched.bandwidth.line("bus_bandwidth"),
        )
    return times


def _ring_latency(intra: CollectiveSpec, inter: CollectiveSpec, *, ranks: int, islands: int) -> Line:
    return compute(
        "alpha",
        comm.ring_latency_s,
        alpha0_s=intra.alpha0.line("alpha0"),
        link_step_s=intra.alpha_step.line("alpha_step") if intra.alpha_step else 0.0,
        network_step_s=inter.alpha_step.line("network_step") if inter.alpha_step else 0.0,
        ranks=ranks,
        nodes=islands,
    )


def _ring_bandwidth(inter: CollectiveSpec, islands: int) -> Line:
    ring = inter.ring_bandwidth[2].line("ring_bandwidth")
    if inter.ring_limit is None:
        return ring
    return compute(
        "ring_bandwidth",
        comm.ring_bus_bytes_per_s,
        bus_bytes_per_s=ring,
        ring_bytes_per_s=inter.ring_limit.line("ring_limit"),
        nodes=islands,
    )
