"""What runs on hardware and how fast: kernel rates, collective classes, and a cluster made of them.

Rates are constants of two formulas (see `formulas.compute` and `formulas.comm`):

    kernel      t = overhead + ((FLOPs / (peak mfu_max))^p + (bytes / (hbm hbm_efficiency))^p)^(1/p)
    collective  t = alpha + 2 ramp sqrt(alpha S / beta) + S / beta,   beta = bus bandwidth / factor(n)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from gpucalc.errors import InputError
from gpucalc.line import Line, total
from gpucalc.spec.base import Spec
from gpucalc.spec.figure import Figure, FigureKind
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.system import SystemSpec
from gpucalc.units import GB, GIB


class KernelRate(Spec):
    """Constants of one kernel family; `mfu_max` is a share of the GPU's own dense peak."""

    mfu_max: Figure
    hbm_efficiency: Figure
    overhead: Figure  # per call, the kernel's own
    p: Figure  # 1 adds compute and memory time, large takes the larger
    error: Figure | None = None  # mean absolute log error over the measured shapes


class KernelSpec(Spec):
    """How fast a GPU's kernels are.

    `applies_to` lists the GPUs the constants were measured on; on any other GPU they are
    carried over, and the catalogue says so.
    """

    id: str
    name: str
    applies_to: tuple[str, ...] = ()
    transfers_to: tuple[str, ...] = ()  # architectures served when a GPU names no kernels
    gemm: dict[str, KernelRate]  # by precision: fp32 tf32 fp16 bf16 fp8 fp6 fp4 int8
    attention: KernelRate  # prefill and training forward; causal FLOPs count half the square
    attention_decode: KernelRate  # one query token per sequence: bound by reading K and V
    attention_backward_flops: Figure  # of the forward FLOPs
    attention_backward_efficiency: Figure  # of the forward rate
    elementwise_hbm_efficiency: Figure  # norms, activations, optimizer: bytes moved over bandwidth
    launch_overhead: Figure  # per kernel started from eager Python, when the GPU waits for it
    training_efficiency: Figure  # rate inside a training step over the rate of the kernel alone
    training_efficiency_low: Figure | None = None  # the same for fp8 and below, where it was seen to differ
    transfer_error: Figure  # mean absolute log error to expect on a GPU these were not measured on
    notes: tuple[str, ...] = ()

    def carried_over(self) -> KernelSpec:
        """The same constants marked as assumed: they serve a GPU nobody measured."""

        def rate(old: KernelRate) -> KernelRate:
            return KernelRate.model_construct(
                mfu_max=_assumed(old.mfu_max, self.name),
                hbm_efficiency=_assumed(old.hbm_efficiency, self.name),
                overhead=_assumed(old.overhead, self.name),
                p=_assumed(old.p, self.name),
                error=self.transfer_error,
            )

        return self.model_copy(
            update={
                "gemm": {key: rate(old) for key, old in self.gemm.items()},
                "attention": rate(self.attention),
                "attention_decode": rate(self.attention_decode),
                **{
                    name: _assumed(getattr(self, name), self.name)
                    for name in (
                        "attention_backward_flops",
                        "attention_backward_efficiency",
                        "elementwise_hbm_efficiency",
                        "launch_overhead",
                        "training_efficiency",
                    )
                },
            }
        )


def _assumed(figure: Figure, origin: str) -> Figure:
    note = f"carried over from {origin}" + (f"; {figure.note}" if figure.note else "")
    return figure.model_copy(update={"kind": FigureKind.ASSUMED, "note": note})


class OpSpec(Spec):
    """How another operation differs from all-reduce on the same links.

    Its latency is `alpha_factor` of the all-reduce latency plus `alpha_extra`. `bandwidth`, by
    group size from that size up, is a share (unit `ratio`) of the ring bandwidth or, in GB/s,
    the bus bandwidth itself.
    """

    alpha_factor: Figure
    alpha_extra: Figure
    bandwidth: dict[int, Figure]
    ramp: Figure


@dataclass(frozen=True, slots=True)
class CollectiveTerms:
    """The constants one operation over one group needs, as figures for a formula's inputs.

    alpha = (alpha0 + alpha_step * steps) * alpha_factor + alpha_extra
    bus bandwidth = bandwidth * share
    """

    alpha0: Figure
    alpha_step: Figure | None
    steps: float
    alpha_factor: Figure | None
    alpha_extra: Figure | None
    bandwidth: Figure
    share: Figure | None
    ramp: Figure

    @property
    def alpha_s(self) -> float:
        """Latency of a small message, in seconds."""
        base = self.alpha0.si + (self.alpha_step.si * self.steps if self.alpha_step else 0.0)
        factor = self.alpha_factor.si if self.alpha_factor else 1.0
        return base * factor + (self.alpha_extra.si if self.alpha_extra else 0.0)

    @property
    def bus_bytes_per_s(self) -> float:
        """Asymptotic bus bandwidth."""
        return self.bandwidth.si * (self.share.si if self.share else 1.0)


class CollectiveSpec(Spec):
    """Time of collectives over one kind of link, by group size: ranks inside, islands across.

    An island is what the intra links join: a node, or the NVLink domain of a rack.

    A class without a fitted bandwidth states a rule instead: `link_share` of the GPU's one-way
    link bandwidth, or `node_share` of the node's network bandwidth; `on_gpu` and `on_network`
    turn the rule into figures for a given machine.
    """

    id: str
    name: str
    level: Literal["intra", "inter"]
    link: Literal["nvlink", "xgmi", "fabric", "pcie", "network"]
    peer_to_peer: bool = True
    applies_to: tuple[str, ...] = ()
    alpha0: Figure
    alpha_step: Figure | None = None
    step: Literal["n-2", "log2(k)-1"] | None = None
    ramp: Figure
    bus_bandwidth: dict[int, Figure] = Field(default_factory=dict)  # all-reduce, from this group size up
    # What other operations start from; empty: the same as all-reduce.
    ring_bandwidth: dict[int, Figure] = Field(default_factory=dict)
    switch_latency: Figure | None = None  # of a reduction in the switch, whatever the group's size
    link_share: Figure | None = None
    node_share: dict[int, Figure] = Field(default_factory=dict)  # by nodes, from this count up
    # Two nodes beat their network's rate by a tree only where each GPU has a card of its own.
    tree_needs_rails: bool = False
    ring_cards: Figure | None = None  # cards one group's rings use at most in an island of many
    ring_limit: Figure | None = None  # the rate of so many cards, once the network is known
    all_cards: Figure | None = None  # what an island's cards carry together, whatever its links inside
    ops: dict[str, OpSpec] = Field(default_factory=dict)
    error: Figure | None = None  # mean absolute relative error over the fitted curves
    error_large: Figure | None = None  # the same for messages of 1 MB and more
    notes: tuple[str, ...] = ()

    @property
    def resolved(self) -> bool:
        """Whether bandwidths are stated rather than a rule for them."""
        return bool(self.bus_bandwidth)

    def terms(self, op: str, size: int) -> CollectiveTerms:
        """The constants of an operation over `size` ranks (intra) or islands (inter)."""
        steps = 0.0
        if self.step == "n-2":
            steps = float(max(size - 2, 0))
        elif self.step == "log2(k)-1":
            steps = math.log2(max(size, 2)) - 1
        if op == "all_reduce":
            bandwidth = _at(self.bus_bandwidth, size)
            return CollectiveTerms(
                self.alpha0, self.alpha_step, steps, None, None, bandwidth, None, self.ramp
            )
        if op not in self.ops:
            raise InputError(
                "this link has no such operation", where=self.id, given=op, legal=["all_reduce", *self.ops]
            )
        other = self.ops[op]
        figure = _at(other.bandwidth, size)
        relative = figure.unit == "ratio"
        return CollectiveTerms(
            self.alpha0,
            self.alpha_step,
            steps,
            other.alpha_factor,
            other.alpha_extra,
            _at(self.ring_bandwidth or self.bus_bandwidth, size) if relative else figure,
            figure if relative else None,
            other.ramp,
        )

    def on_gpu(self, gpu: GpuSpec) -> CollectiveSpec:
        """The class with its bandwidth worked out from the GPU's link."""
        if self.resolved or self.link_share is None:
            return self
        link = gpu.nvlink_bandwidth
        if link is None:
            raise InputError(
                "the collective class needs a GPU with a link bandwidth", where=self.id, given=gpu.id
            )
        share = self.link_share
        figure = _share(share, link, share.value * link.si / 2, "the GPU's one-way link bandwidth")
        return self.model_copy(update={"bus_bandwidth": {2: figure}})

    def on_network(
        self, nic_per_island: Figure, island: int, intra: CollectiveSpec, *, cards: float | None = None
    ) -> CollectiveSpec:
        """The class with its bandwidths worked out for an island's network cards, `cards` of them.

        Two islands may exceed the network's rate (a tree sends each byte across once), never the
        rate inside; from three on the ring crosses the network at every hop.
        """
        inside = _at(intra.bus_bandwidth, island) if island > 1 else None
        ring_inside = _at(intra.ring_bandwidth or intra.bus_bandwidth, island) if inside else None

        def network(share: Figure) -> Figure:
            return _share(share, nic_per_island, share.value * nic_per_island.si, "the island's network")

        ring_share = self.node_share[max(self.node_share)]
        shares = self.node_share
        if self.tree_needs_rails and cards is not None and cards < island:
            shares = {min(shares): ring_share}
        bus = {size: _least(network(share), inside) for size, share in shares.items()}
        limit = None
        if self.ring_cards is not None and cards is not None and cards > self.ring_cards.value:
            per_card = self.ring_cards.value * nic_per_island.si / cards
            of_cards = f"{self.ring_cards.value:g} of the island's network cards"
            limit = _share(ring_share, nic_per_island, ring_share.value * per_card, of_cards)
        of_all = network(ring_share)
        ring = _least(of_all, ring_inside)
        per_gpu = ring_share.value * nic_per_island.si / island
        of_card = "one GPU's share of the island's network cards"
        ops = dict(self.ops)
        if "alltoall" in ops:
            # Of the n - 1 parts a GPU sends, those for the other nodes cross its network card.
            crossing = {k: (k * island - 1) / (island * (k - 1)) for k in (2, 3, 4, 8, 16)}
            bandwidth = {
                k: _share(ring_share, nic_per_island, per_gpu * factor, of_card)
                for k, factor in crossing.items()
            }
            ops["alltoall"] = ops["alltoall"].model_copy(update={"bandwidth": bandwidth})
        if "send_recv" in ops:
            bandwidth = {2: _share(ring_share, nic_per_island, per_gpu, of_card)}
            ops["send_recv"] = ops["send_recv"].model_copy(update={"bandwidth": bandwidth})
        return self.model_copy(
            update={
                "bus_bandwidth": bus,
                "ring_bandwidth": {2: ring},
                "ops": ops,
                "ring_limit": limit,
                "all_cards": of_all,
            }
        )


def _at(by_size: dict[int, Figure], size: int) -> Figure:
    """The figure of the largest listed size not above the given one, else the smallest."""
    below = [key for key in by_size if key <= size]
    return by_size[max(below) if below else min(by_size)]


def _least(figure: Figure, ceiling: Figure | None) -> Figure:
    if ceiling is None or figure.si <= ceiling.si:
        return figure
    return ceiling.model_copy(update={"note": "bound by the links inside the node"})


def _share(share: Figure, of: Figure, bytes_per_s: float, what: str) -> Figure:
    doubtful = FigureKind.ASSUMED in (share.kind, of.kind)
    return Figure.model_construct(
        value=bytes_per_s / GB,
        unit="GB/s",
        kind=FigureKind.ASSUMED if doubtful else FigureKind.DERIVED,
        source=(*share.source, *of.source),
        references=(*share.references, *of.references),
        note=f"{share.value:g} of {what}",
    )


@dataclass(frozen=True, slots=True)
class Pool:
    """GPUs of one kind, and the nodes they sit in."""

    gpu: GpuSpec
    count: int
    kernels: KernelSpec
    nodes: int
    gpus_per_node: int
    nvlink_domain: int
    intra: CollectiveSpec
    system: SystemSpec | None
    price_per_gpu_hour: Line | None

    @property
    def island(self) -> int:
        """GPUs joined by the intra links."""
        return max(self.gpus_per_node, self.nvlink_domain)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machine a job runs on, resolved to figures.

    With several pools the cluster-wide figures are those of the slowest: the pools sit in nodes
    of their own, joined by the network.
    """

    pools: tuple[Pool, ...]
    count: int
    gpus_per_node: int
    nodes: int
    nvlink_domain: int  # GPUs that reach each other over NVLink, NVSwitch or xGMI; 1 for PCIe only
    intra: CollectiveSpec
    inter: CollectiveSpec | None  # None when all GPUs are joined by the intra links
    nic_bandwidth_per_node: Line | None
    host_ram: Line | None  # of one node
    node_power: Line | None  # of one node
    price_per_gpu_hour: Line | None
    system: SystemSpec | None
    assumptions: tuple[str, ...]
    # Above the nodes: bandwidth between pods of so many GPUs is this many times smaller than inside them.
    oversubscription: float = 1.0
    pod_gpus: int = 0  # 0: all are in one

    @property
    def island(self) -> int:
        """GPUs joined by the intra links: a node's, or those of an NVLink domain that spans nodes."""
        return max(self.gpus_per_node, self.nvlink_domain)

    def usable_memory(self, in_use_bytes: float = 0.0) -> Line:
        """Bytes a process can allocate on the smallest card beside what others hold on each.

        Raises InputError where they hold all of it.
        """
        card = min((pool.gpu.usable_memory() for pool in self.pools), key=lambda line: line.value)
        if not in_use_bytes:
            return card
        if in_use_bytes >= card.value:
            raise InputError(
                "is all the smallest card has",
                key="run.memory_in_use_gib",
                given=round(in_use_bytes / GIB, 2),
                legal=f"below {card.value / GIB:.2f}",
            )
        taken = Line("in_use", -in_use_bytes, "bytes", source="run.memory_in_use_gib")
        whole = Line("card", card.value, card.unit, card.kind, source=card.source, note=card.note)
        return total("usable_memory", (whole, taken), unit="bytes", note="beside what others hold")

    @property
    def gpu(self) -> GpuSpec:
        """The GPU of a cluster of one kind. Raises ValueError for a mixed one."""
        if len(self.pools) != 1:
            raise ValueError("a mixed cluster has several GPU kinds")
        return self.pools[0].gpu
