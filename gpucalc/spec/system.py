"""A server or cloud instance: how many GPUs, how they are wired, what the host and the network are."""

from __future__ import annotations

from gpucalc.spec.base import Spec
from gpucalc.spec.figure import Figure


class NicSpec(Spec):
    """The network cards that serve the GPUs of a system."""

    kind: str
    count: int  # of the whole system; a rack-scale system counts all its trays
    bandwidth: Figure  # one card, one way


class PriceSpec(Spec):
    """What a provider asks, with the day it was read."""

    usd_per_gpu_hour: Figure
    usd_per_hour: Figure | None = None
    date: str
    region: str | None = None
    terms: str | None = None  # on-demand list, spot, reserved
    provider: str | None = None
    system: str | None = None


class SystemSpec(Spec):
    """One server, instance type or rack."""

    id: str
    name: str
    aliases: tuple[str, ...] = ()
    default_for: tuple[str, ...] = ()
    provider: str
    gpu: str
    gpus: int
    gpus_per_node: int  # GPUs under one operating system
    intra_node: str  # how the GPUs are wired, in words
    nvlink_domain: int  # GPUs that reach each other over NVLink, NVSwitch or xGMI; 1 for PCIe only
    intra_collectives: str
    inter_collectives: str | None = None
    nic: NicSpec | None = None
    pcie_gen: int | None = None
    cpu: str | None = None
    cpu_cores: Figure | None = None
    host_ram: Figure | None = None  # of the whole system
    max_power: Figure | None = None  # of the whole system
    price: PriceSpec | None = None
    confidence: str | None = None
    notes: tuple[str, ...] = ()


class PurchaseSpec(Spec):
    """What a GPU costs to own: its part of the price of the server it is sold in."""

    usd_per_gpu: Figure
    date: str
    includes: str


class PriceListSpec(Spec):
    """What a GPU costs by the hour, provider by provider, and to buy."""

    id: str
    offers: tuple[PriceSpec, ...] = ()
    purchase: PurchaseSpec | None = None
