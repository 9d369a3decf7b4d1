"""A machine to be judged, from a description or from what the driver tells: the same record either way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpucalc.catalog import Catalog
from gpucalc.errors import InputError
from gpucalc.line import Line
from gpucalc.spec.fleet import parse_fleet
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.server import ServerSpec, parse_psu
from gpucalc.units import parse_bytes

SLOTTED = ("PCIe", "PCIe LP")  # form factors that go into a slot


@dataclass(frozen=True, slots=True)
class BoxCard:
    """One card; None is what nobody said or the driver does not tell."""

    name: str
    spec: GpuSpec | None
    index: int
    capability: str | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_lanes: int | None = None
    pcie_lanes_max: int | None = None
    memory_bytes: float | None = None
    in_use_bytes: float | None = None  # by whoever is on it now, the driver's own share left out
    bar1_bytes: float | None = None
    ecc_pending: bool | None = None  # another state than now after the next reboot
    ecc_uncorrected: int | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    temperature_c: float | None = None
    throttled_by: tuple[str, ...] = ()
    persistence: bool | None = None
    numa_node: int | None = None
    nvlinks_up: int | None = None
    nvlinks_down: int | None = None
    slots_wide: int | None = None
    eight_pins: int | None = None
    twelve_volts: int | None = None


@dataclass(frozen=True, slots=True)
class Supply:
    """The power supplies: how many, watts each, whether one is spare, watts of each 12 V rail."""

    count: int
    each_w: float
    redundant: bool | None
    rail_w: float | None

    def __str__(self) -> str:
        words = {None: "", True: ", one of them spare", False: ", sharing the load"}[self.redundant]
        rail = "" if self.rail_w is None else f", {self.rail_w:g} W at 12 V"
        return f"{self.count} x {self.each_w:g} W{rail}{words}"


@dataclass(frozen=True, slots=True)
class Box:
    """A machine: its cards and what surrounds them."""

    subject: str
    cards: tuple[BoxCard, ...]
    live: bool = False
    driver: str | None = None
    driver_cuda: str | None = None  # the newest CUDA the driver serves
    cuda: str | None = None  # what PyTorch or the toolkit was built with
    torch: str | None = None
    nvlink_domain: int | None = None
    peer_to_peer: bool | None = None
    peer_evidence: str | None = None  # what was read of it
    across: int | None = None  # pairs of cards whose path crosses between processors
    placement: tuple[int, ...] = ()
    above_4g: bool | None = None
    max_power: Line | None = None  # of the whole machine, where its maker states it
    sockets: int | None = None
    lanes: int | None = None
    cores: float | None = None
    cpu_power_w: float | None = None
    other_power_w: float | None = None
    supply: Supply | None = None
    inlet_c: float | None = None
    slots: int | None = None
    host_ram_bytes: float | None = None
    nvme_bytes: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()  # fields the driver did not tell, and why

    @property
    def baseboard(self) -> bool:
        """Whether the cards sit on a baseboard that powers and joins them, not in slots."""
        return all(card.spec is not None and card.spec.form_factor not in SLOTTED for card in self.cards)

    @property
    def nvidia(self) -> bool:
        """Whether any card is one of NVIDIA's, or may be."""
        return any(card.spec is None or card.spec.vendor == "NVIDIA" for card in self.cards)


class CardRecord(Protocol):
    """What doctor needs of a card the driver describes."""

    @property
    def index(self) -> int: ...
    @property
    def entry(self) -> str | None: ...
    @property
    def entry_note(self) -> str | None: ...
    @property
    def facts(self) -> Mapping[str, FactRecord]: ...
    def value(self, field: str) -> Any: ...


class FactRecord(Protocol):
    """A value, or the reason there is none."""

    @property
    def value(self) -> Any: ...
    @property
    def reason(self) -> str | None: ...


class Attached(Protocol):
    """What doctor needs of an inventory."""

    @property
    def driver(self) -> FactRecord: ...
    @property
    def cuda(self) -> FactRecord: ...
    @property
    def cards(self) -> tuple[CardRecord, ...]: ...
    @property
    def surroundings(self) -> str | None: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    @property
    def pairs(self) -> tuple[PairRecord, ...]: ...


class PairRecord(Protocol):
    """What doctor needs to know of two cards."""

    @property
    def first(self) -> int: ...
    @property
    def second(self) -> int: ...
    @property
    def path(self) -> FactRecord: ...
    @property
    def access(self) -> FactRecord: ...


DIRECT, ACROSS = "direct", "SYS"  # the words for peer access, and for a path between processors


def supply(text: str | None) -> Supply | None:
    """The supplies in words such as 2x1600:redundant."""
    return None if text is None else Supply(*parse_psu(text))


def described(server: ServerSpec, catalog: Catalog, *, where: str) -> Box:
    """The machine of a description. Raises InputError."""
    known = catalog.system(server.system) if server.system is not None else None
    if server.gpus is None and known is None:
        raise InputError("names no GPUs", where=where, key="gpus", legal="gpus: 8xRTX4090, or system: NAME")
    told = server.gpus
    fleet = parse_fleet(told, where=f"{where}: gpus").parts if told is not None else ()
    if any((part.nodes or 1) > 1 for part in fleet):
        raise InputError("names several machines; doctor judges one", where=where, key="gpus", given=told)
    parts = (
        [(part.total, part.gpu) for part in fleet]
        if told is not None
        else [(known.gpus_per_node, known.gpu)]
        if known is not None
        else []
    )
    cards: list[BoxCard] = []
    said = server.cards
    for count, name in parts:
        spec = catalog.gpu(name)[0]
        if len(cards) + count > 64:
            raise InputError("is one machine, with 64 cards at most", where=where, key="gpus", given=told)
        cards += [
            BoxCard(
                name=spec.name,
                spec=spec,
                index=len(cards) + index,
                capability=spec.compute_capability,
                pcie_gen=said.pcie_gen if said.pcie_gen is not None else (known.pcie_gen if known else None),
                pcie_gen_max=spec.pcie_gen,
                pcie_lanes=said.pcie_lanes,
                pcie_lanes_max=spec.pcie_lanes,
                memory_bytes=spec.memory_label.si,
                bar1_bytes=None if said.bar1 is None else parse_bytes(said.bar1),
                ecc_pending=said.ecc_pending,
                power_limit_w=said.power_limit_w,
                power_default_w=spec.tdp.si if spec.tdp else None,
                slots_wide=said.slots_wide,
                eight_pins=said.eight_pins,
                twelve_volts=said.twelve_volts,
            )
            for index in range(count)
        ]
    if server.placement and sum(server.placement) != len(cards):
        raise InputError(
            f"places {sum(server.placement)} cards of {len(cards)}",
            where=where,
            key="placement",
            given=list(server.placement),
        )
    machines = known.gpus / known.gpus_per_node if known else 1
    ram = known.host_ram if known else None
    maker = known.max_power.line("max_power") if known and known.max_power and told is None else None
    cores = known.cpu_cores if known else None
    return Box(
        subject=server.name or (known.name if known else where),
        cards=tuple(cards),
        driver=server.driver,
        cuda=server.cuda,
        torch=server.torch,
        nvlink_domain=known.nvlink_domain if known and told is None else None,
        peer_to_peer=server.peer_to_peer,
        placement=server.placement,
        above_4g=server.above_4g,
        max_power=None if maker is None or machines > 1 else maker,
        sockets=server.sockets or (len(server.placement) or None),
        lanes=server.lanes,
        cores=server.cores if server.cores is not None else (cores.si if cores else None),
        cpu_power_w=server.cpu_power_w,
        other_power_w=server.other_power_w,
        supply=supply(server.psu),
        inlet_c=server.inlet_c,
        slots=server.slots,
        host_ram_bytes=parse_bytes(server.host_ram)
        if server.host_ram
        else (ram.si / machines if ram else None),
        nvme_bytes=parse_bytes(server.nvme) if server.nvme else None,
        environment=server.environment,
    )


def attached(
    found: Attached, catalog: Catalog, *, environment: Mapping[str, str], host: Mapping[str, Any]
) -> Box:
    """The machine at hand. `host`: what the system tells beside the driver (torch, cuda, host_ram_bytes)."""
    # NVML's own NUMA node is that of a GPU's memory on Grace machines; the processor's is the system's.
    near: Mapping[str, int] = host.get("numa_nodes", {})
    cards = tuple(_card(card, catalog, near) for card in found.cards)
    nodes = [card.numa_node for card in cards if card.numa_node is not None]
    placed = tuple(nodes.count(node) for node in sorted(set(nodes))) if len(nodes) == len(cards) else ()
    return Box(
        subject="this machine" + (f" ({found.surroundings})" if found.surroundings else ""),
        cards=cards,
        live=True,
        driver=found.driver.value,
        driver_cuda=found.cuda.value,
        cuda=host.get("cuda"),
        torch=host.get("torch"),
        peer_to_peer=_direct(found.pairs),
        peer_evidence=_access_words(found.pairs),
        across=_across(found.pairs),
        placement=placed,
        cores=host.get("cores"),
        host_ram_bytes=host.get("host_ram_bytes"),
        nvme_bytes=host.get("nvme_bytes"),
        environment=environment,
        notes=(*found.notes, *_entry_notes(found)),
        unread=_unread(found),
    )


def _direct(pairs: tuple[PairRecord, ...]) -> bool | None:
    """Whether every two cards read each other's memory; None where the driver does not say."""
    known = [pair.access.value for pair in pairs if pair.access.value is not None]
    return all(value == DIRECT for value in known) if known and len(known) == len(pairs) else None


def _access_words(pairs: tuple[PairRecord, ...]) -> str | None:
    counts = Counter(str(pair.access.value) for pair in pairs if pair.access.value is not None)
    told = [f"{words} between {many} {'pair' if many == 1 else 'pairs'}" for words, many in counts.items()]
    return ", ".join(told) or None


def _across(pairs: tuple[PairRecord, ...]) -> int | None:
    known = [pair.path.value for pair in pairs if pair.path.value is not None]
    return sum(value == ACROSS for value in known) if known else None


# Fields a check needs; what else the driver keeps to itself changes nothing here.
_NEEDED = ("compute_capability", "pcie_gen", "pcie_lanes", "bar1_total", "power_limit", "ecc", "throttled_by")


def _entry_notes(found: Attached) -> tuple[str, ...]:
    return tuple(f"GPU {card.index}: {card.entry_note}" for card in found.cards if card.entry_note)


def _unread(found: Attached) -> tuple[tuple[str, str], ...]:
    """Fields that could not be read, each with its reason and the cards it is true of."""
    reasons: dict[tuple[str, str], list[int]] = {}
    for card in found.cards:
        for name in _NEEDED:
            if reason := card.facts[name].reason:
                reasons.setdefault((name, reason), []).append(card.index)
    return tuple(
        (name.replace("_", " "), f"{reason} (GPU {', '.join(map(str, cards))})")
        for (name, reason), cards in reasons.items()
    )


def _in_use(card: CardRecord) -> float | None:
    used, reserved = card.value("memory_used"), card.value("memory_reserved")
    return None if used is None else max(float(used) - float(reserved or 0), 0.0)


def _card(card: CardRecord, catalog: Catalog, near: Mapping[str, int]) -> BoxCard:
    spec = catalog.gpu(card.entry)[0] if card.entry is not None else None
    links = card.value("nvlink") or {}
    return BoxCard(
        name=str(card.value("name") or f"GPU {card.index}"),
        spec=spec,
        index=card.index,
        capability=card.value("compute_capability") or (spec.compute_capability if spec else None),
        pcie_gen=card.value("pcie_gen"),
        pcie_gen_max=card.value("pcie_gen_max"),
        pcie_lanes=card.value("pcie_lanes"),
        pcie_lanes_max=card.value("pcie_lanes_max"),
        memory_bytes=card.value("memory_total"),
        in_use_bytes=_in_use(card),
        bar1_bytes=card.value("bar1_total"),
        ecc_pending=_differs(card.value("ecc"), card.value("ecc_pending")),
        ecc_uncorrected=card.value("ecc_uncorrected"),
        power_limit_w=card.value("power_limit"),
        power_default_w=card.value("power_default"),
        temperature_c=card.value("temperature"),
        throttled_by=tuple(card.value("throttled_by") or ()),
        persistence=card.value("persistence"),
        numa_node=near.get(pci_address(str(card.value("pci_bus_id")))),
        nvlinks_up=links.get("up"),
        nvlinks_down=links.get("down"),
    )


def pci_address(bus_id: str) -> str:
    """The address of a card as the system writes it: four digits of domain, lower case."""
    return bus_id.lower()[-12:]


def _differs(now: bool | None, pending: bool | None) -> bool | None:
    return None if now is None or pending is None else now != pending
