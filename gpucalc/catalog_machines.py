"""Which machine a fleet is: its cards, servers, links, network and price, with every guess said."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from gpucalc.catalog_entries import Entries
from gpucalc.errors import InputError
from gpucalc.line import Kind, Line
from gpucalc.spec.costs import NetworkKeys
from gpucalc.spec.figure import Figure, FigureKind
from gpucalc.spec.fleet import FleetPart, FleetSpec
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.hardware import Cluster, CollectiveSpec, Pool
from gpucalc.spec.system import SystemSpec
from gpucalc.units import gb_per_s

# A host nobody described: what a PCIe server usually is. Said in the answer whenever it is used.
_PCIE_HOST_GPUS = 8
_OLDEST_PCIE = 3
# Two tiers of 64-port switches join so many GPUs of one network card each without a bottleneck: 64 x 64 / 2.
POD_GPUS = 2048
PRICE_OF = "price of"  # how an assumption about a published price begins
_HOST_NETWORK_GBIT_S = 100.0


def machine(
    catalog: Entries,
    fleet: FleetSpec | Iterable[FleetPart | tuple[int | None, int, str]],
    system: str | None = None,
    *,
    network: NetworkKeys | None = None,
) -> Cluster:
    """The machine a fleet is, as `Catalog.cluster` describes it."""
    given = fleet.parts if isinstance(fleet, FleetSpec) else fleet
    parts = [part if isinstance(part, FleetPart) else FleetPart(*part) for part in given]
    if not parts:
        raise InputError("a fleet needs at least one GPU")
    if system is not None and len(parts) > 1:
        raise InputError("a system can be named for a fleet of one GPU kind only", key="system", given=system)
    network = network or NetworkKeys()
    if network.one_host and len(parts) < 2:
        raise InputError("says how unlike cards are joined", key="network.one_host", given=True)
    return _Builder(catalog).cluster(parts, system, network)


@dataclass(slots=True)
class _Builder:
    """One machine on its way: the entries it is made of, and what has been assumed so far."""

    catalog: Entries
    assumptions: list[str] = field(default_factory=list)

    def cluster(self, parts: Sequence[FleetPart], system: str | None, network: NetworkKeys) -> Cluster:
        """The cluster of these parts."""
        built = [self._pool(part, system) for part in parts]
        pools = tuple(pool for pool, _ in built)
        hosts = [host for _, host in built]
        if network.one_host:
            return self._one_host(pools, hosts)
        nodes = sum(pool.nodes for pool in pools)
        slowest = min(pools, key=lambda pool: _reach(pool))
        nics = [host.nic_per_node for host in hosts]
        nic = min(nics, key=lambda figure: figure.si)
        joining = hosts[nics.index(nic)].inter
        if len(pools) > 1:
            self.assumptions.append(
                "each GPU kind sits in nodes of its own; they are joined by the slowest of their networks, "
                f"{joining.name} at {gb_per_s(nic.si)} per node"
            )
        islands = sum(math.ceil(pool.count / pool.island) for pool in pools)
        inter = None
        if islands > 1:
            nodes_of_island = slowest.island / slowest.gpus_per_node
            cards = hosts[nics.index(nic)].cards_per_node * nodes_of_island
            per_island = _scaled(nic, nodes_of_island)
            inter = joining.on_network(per_island, slowest.island, slowest.intra, cards=cards)
        one = pools[0] if len(pools) == 1 else None
        return Cluster(
            pools=pools,
            count=sum(pool.count for pool in pools),
            gpus_per_node=min(pool.gpus_per_node for pool in pools),
            nodes=nodes,
            nvlink_domain=min(pool.nvlink_domain for pool in pools),
            intra=slowest.intra,
            inter=inter,
            nic_bandwidth_per_node=nic.line("nic_bandwidth_per_node"),
            host_ram=_smallest([host.host_ram for host in hosts]),
            node_power=hosts[0].power if one else None,
            price_per_gpu_hour=one.price_per_gpu_hour if one else _mean_price(pools),
            system=one.system if one else None,
            assumptions=tuple(dict.fromkeys(self.assumptions)),
            oversubscription=network.oversubscription or 1.0,
            pod_gpus=network.pod_gpus or POD_GPUS,
        )

    def _one_host(self, pools: tuple[Pool, ...], hosts: Sequence[_Host]) -> Cluster:
        """Unlike cards under one operating system: kinds reach each other through the host's memory."""
        generation = min(pool.gpu.pcie_gen or _OLDEST_PCIE for pool in pools)
        intra = self.catalog.collective(f"pcie{min(max(generation, 3), 5)}-no-p2p")
        count = sum(pool.count for pool in pools)
        self.assumptions = [text for text in self.assumptions if "is assumed to sit in" not in text]
        self.assumptions.append(f"the GPU kinds share one host and reach each other over {intra.name}")
        return Cluster(
            pools=tuple(replace(pool, nodes=1, gpus_per_node=pool.count) for pool in pools),
            count=count,
            gpus_per_node=count,
            nodes=1,
            nvlink_domain=1,
            intra=intra,
            inter=None,
            nic_bandwidth_per_node=None,
            host_ram=_smallest([host.host_ram for host in hosts]),
            node_power=None,
            price_per_gpu_hour=_mean_price(pools),
            system=None,
            assumptions=tuple(dict.fromkeys(self.assumptions)),
        )

    def _pool(self, part: FleetPart, system: str | None) -> tuple[Pool, _Host]:
        nodes_given, count = part.nodes, part.count
        if count < 1 or (nodes_given is not None and nodes_given < 1):
            raise InputError("a fleet needs at least one GPU of each kind", key="gpus", given=str(part))
        gpu, said = self.catalog.gpu(part.gpu)
        self.assumptions += said
        kernels = self.catalog.kernels_for(gpu)
        if gpu.id not in kernels.applies_to:
            self.assumptions.append(
                f"kernel rates of {kernels.name} are carried over to {gpu.name}, not measured on it"
            )
        host = self._host(gpu, system, count)
        total = part.total
        nodes = nodes_given if nodes_given is not None else math.ceil(count / host.gpus_per_node)
        per_node = math.ceil(total / nodes)
        if nodes_given is not None and per_node > host.gpus_per_node:
            raise InputError(
                f"{host.name} has {host.gpus_per_node} GPUs per node",
                key="gpus",
                given=f"{nodes_given}x{count}x{gpu.id}",
                near=(f"{math.ceil(total / host.gpus_per_node)}x{host.gpus_per_node}x{gpu.id}",),
            )
        bridged = gpu.nvlink_kind is not None and "bridge" in gpu.nvlink_kind
        if bridged and host.nvlink_domain == 1 and total > 1:
            self.assumptions.append(f"no NVLink bridges between the {gpu.name} cards: traffic goes over PCIe")
        pool = Pool(
            gpu=gpu,
            count=total,
            kernels=kernels,
            nodes=nodes,
            gpus_per_node=per_node,
            nvlink_domain=min(host.nvlink_domain, total if host.spans_nodes else per_node),
            intra=self.catalog.links_for(host.intra, gpu),
            system=host.system,
            price_per_gpu_hour=self._price(gpu, host),
        )
        return pool, host

    def _host(self, gpu: GpuSpec, system: str | None, per_node: int) -> _Host:
        if system is not None:
            found = self.catalog.find("systems", system)
            self.assumptions += found.assumptions
            spec = self.catalog.system(found.stem)
            if spec.gpu != gpu.id:
                raise InputError(
                    f"{spec.id} holds {spec.gpu}",
                    key="system",
                    given=f"{system} with {gpu.id}",
                    legal=[spec.gpu],
                )
            return self._described(spec)
        if gpu.default_systems:
            servers = [self.catalog.system(name) for name in gpu.default_systems]
            spec = next((one for one in servers if one.gpus_per_node >= per_node), servers[-1])
            self.assumptions.append(f"{gpu.name} is assumed to sit in {spec.id} ({spec.intra_node})")
            return self._described(spec)
        return self._undescribed(gpu)

    def _described(self, spec: SystemSpec) -> _Host:
        intra = self.catalog.collective(spec.intra_collectives)
        share = spec.gpus_per_node / spec.gpus
        nic = spec.nic
        per_node = (
            _scaled(
                nic.bandwidth,
                nic.count * share,
                f"{nic.count} x {nic.kind} in {spec.gpus // spec.gpus_per_node} nodes",
            )
            if nic is not None
            else _HOST_NETWORK
        )
        return _Host(
            name=spec.id,
            system=spec,
            gpus_per_node=spec.gpus_per_node,
            nvlink_domain=spec.nvlink_domain if intra.link != "pcie" else 1,
            intra=intra,
            inter=self.catalog.collective(spec.inter_collectives or "ethernet"),
            nic_per_node=per_node,
            cards_per_node=nic.count * share if nic is not None else 1,
            host_ram=_scaled(spec.host_ram, share).line("host_ram") if spec.host_ram else None,
            power=_scaled(spec.max_power, share).line("node_power") if spec.max_power else None,
        )

    def _undescribed(self, gpu: GpuSpec) -> _Host:
        intra = self.catalog.collective(gpu.collectives or "pcie4-no-p2p")
        if intra.link != "pcie":
            per_node = min(gpu.max_nvlink_domain, _PCIE_HOST_GPUS)
        elif gpu.pcie_gen is None or gpu.form_factor == "SoC":  # the chip is the host
            per_node = 1
        else:
            per_node = _PCIE_HOST_GPUS
        self.assumptions.append(
            f"no server is known for {gpu.name}: {per_node} GPUs per node over {intra.name} and one "
            f"{_HOST_NETWORK_GBIT_S:g} Gbit/s Ethernet card are assumed"
        )
        return _Host(
            name="the assumed host",
            system=None,
            gpus_per_node=per_node,
            nvlink_domain=gpu.max_nvlink_domain if intra.link != "pcie" else 1,
            intra=intra,
            inter=self.catalog.collective("ethernet"),
            nic_per_node=_HOST_NETWORK,
            cards_per_node=1,
            host_ram=None,
            power=None,
        )

    def _price(self, gpu: GpuSpec, host: _Host) -> Line | None:
        if host.system is not None and host.system.price is not None:
            price = host.system.price
            line = price.usd_per_gpu_hour.line("price_per_gpu_hour")
            note = f"{host.system.id}, {price.terms or 'list'}, {price.date}"
            self.assumptions.append(f"{PRICE_OF} {gpu.name}: {line.value:.2f} USD per GPU hour ({note})")
            return _noted(line, note)
        offers = self.catalog.prices(gpu)
        if offers is None:
            return None
        figures = [offer.usd_per_gpu_hour for offer in offers.offers]
        middle = _median([figure.si for figure in figures])
        who = ", ".join(sorted({offer.provider or offer.system or "?" for offer in offers.offers}))
        dates = sorted({offer.date for offer in offers.offers})
        days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        count = f"median of {len(figures)} published offers" if len(figures) > 1 else "one published offer"
        note = f"{count} ({who}; {days})"
        self.assumptions.append(f"{PRICE_OF} {gpu.name}: {middle:.2f} USD per GPU hour, {note}")
        return Line(
            "price_per_gpu_hour",
            middle,
            "USD/h",
            Kind.ASSUMED,
            source="; ".join(dict.fromkeys(figure.cited for figure in figures)),
            note=note,
        )


@dataclass(frozen=True, slots=True)
class _Host:
    """Where a pool's GPUs sit: a described system, or an assumed one."""

    name: str
    system: SystemSpec | None
    gpus_per_node: int
    nvlink_domain: int
    intra: CollectiveSpec
    inter: CollectiveSpec
    nic_per_node: Figure
    cards_per_node: float
    host_ram: Line | None
    power: Line | None

    @property
    def spans_nodes(self) -> bool:
        """Whether its NVLink domain reaches past one operating system, as in a rack-scale system."""
        return self.nvlink_domain > self.gpus_per_node


_HOST_NETWORK = Figure.model_construct(
    value=_HOST_NETWORK_GBIT_S / 8,
    unit="GB/s",
    kind=FigureKind.ASSUMED,
    source=("assumption",),
    references=("assumption: one 100 Gbit/s Ethernet card in a host nobody described",),
    note=None,
)


def _scaled(figure: Figure, factor: float, note: str | None = None) -> Figure:
    if factor == 1:
        return figure
    return figure.model_copy(update={"value": figure.value * factor, "note": note or figure.note})


def _reach(pool: Pool) -> float:
    return pool.intra.terms("all_reduce", max(pool.gpus_per_node, 2)).bus_bytes_per_s


def _smallest(lines: Sequence[Line | None]) -> Line | None:
    known = [line for line in lines if line is not None]
    return min(known, key=lambda line: line.value) if len(known) == len(lines) else None


def _mean_price(pools: Sequence[Pool]) -> Line | None:
    known = [(pool.price_per_gpu_hour, pool.count) for pool in pools if pool.price_per_gpu_hour is not None]
    if len(known) != len(pools):
        return None
    mean = sum(line.value * count for line, count in known) / sum(count for _, count in known)
    source = "; ".join(dict.fromkeys(line.source or "" for line, _ in known))
    return Line(
        "price_per_gpu_hour", mean, "USD/h", Kind.ASSUMED, source=source, note="mean over the GPU kinds"
    )


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _noted(line: Line, note: str) -> Line:
    return Line(line.name, line.value, line.unit, line.kind, source=line.source, note=note)
