"""A server as an offer or a colleague describes it: what is known, and nothing else.

Every key may be left out; what is missing becomes a question to the vendor, never a default.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from gpucalc.spec.base import Spec, refuse
from gpucalc.spec.figure import Figure
from gpucalc.units import parse_bytes

PSU_GRAMMAR = "COUNTxWATTS[:redundant|:shared][:12v=WATTS], such as 2x1600 or 2x1600:redundant:12v=1440"
_PSU = re.compile(r"([1-9][0-9]?)\s*x\s*([1-9][0-9]{2,4})\s*W?((?::[a-z0-9=]+)*)", re.IGNORECASE)


def _size(text: str) -> str:
    try:
        parse_bytes(text)
    except ValueError as error:
        raise refuse(str(error)) from None
    return text


def _version(text: str) -> str:
    if not re.match(r"[0-9]+(\.[0-9]+)+", text):
        raise refuse("not a version", legal='numbers with points, in quotes: "12.1"')
    return text


def _supplies(text: str) -> str:
    parse_psu(text)
    return text


def parse_psu(text: str) -> tuple[int, float, bool | None, float | None]:
    """Supplies, watts each, whether one is spare (None: not said), watts of the 12 V rail. Raises."""
    match = _PSU.fullmatch(text.strip())
    if match is None:
        raise refuse("not a power supply", legal=PSU_GRAMMAR)
    spare: bool | None = None
    rail: float | None = None
    for word in match[3].lower().split(":")[1:]:
        if word in ("redundant", "shared"):
            spare = word == "redundant"
        elif re.fullmatch(r"12v=[1-9][0-9]{1,4}w?", word):
            rail = float(word.removeprefix("12v=").removesuffix("w"))
        else:
            raise refuse(f"not a word of a power supply: {word}", legal=PSU_GRAMMAR)
    if spare and int(match[1]) < 2:
        raise refuse("one supply alone cannot be redundant", legal=PSU_GRAMMAR)
    return int(match[1]), float(match[2]), spare, rail


# An editor is told the same as the reader is held to.
Size = Annotated[str, AfterValidator(_size), Field(json_schema_extra={"examples": ["512 GB", "2 TiB"]})]
Version = Annotated[
    str, AfterValidator(_version), Field(json_schema_extra={"pattern": r"^[0-9]+(\.[0-9]+)+"})
]
Psu = Annotated[
    str,
    AfterValidator(_supplies),
    Field(
        description=PSU_GRAMMAR,
        json_schema_extra={"pattern": f"^[ ]*{_PSU.pattern.replace('x', '[xX]')}[ ]*$"},
    ),
]
Count = Annotated[int, Field(ge=0, le=100_000)]
Watts = Annotated[float, Field(ge=0, le=1_000_000)]


class CardsSpec(Spec):
    """What is said of each card; all are alike."""

    pcie_gen: Annotated[int, Field(ge=1, le=8)] | None = None  # of the slot
    pcie_lanes: Annotated[int, Field(ge=1, le=32)] | None = None  # the slot is wired with
    power_limit_w: Watts | None = None
    bar1: Size | None = None
    ecc_pending: bool | None = None
    slots_wide: Annotated[int, Field(ge=1, le=5)] | None = None
    eight_pins: Count | None = None
    twelve_volts: Count | None = None  # 12V-2x6 (12VHPWR) connectors


class ServerSpec(Spec):
    """One server, described."""

    name: str | None = None
    system: str | None = None  # a system of the catalogue, for what is not said here
    gpus: str | None = None
    driver: Version | None = None
    cuda: Version | None = None  # of the toolkit or the PyTorch build, not of the driver
    torch: Version | None = None
    cards: CardsSpec = CardsSpec()
    placement: tuple[Count, ...] = ()  # cards under each processor
    peer_to_peer: bool | None = None  # over PCIe, as `nvidia-smi topo -p2p r` says
    above_4g: bool | None = None
    sockets: Annotated[int, Field(ge=1, le=16)] | None = None
    lanes: Count | None = None  # PCIe lanes of one processor
    cores: Count | None = None  # of all processors
    cpu_power_w: Watts | None = None  # of one processor
    other_power_w: Watts | None = None  # fans, disks, board, memory
    psu: Psu | None = None
    inlet_c: Annotated[float, Field(ge=-20, le=80)] | None = None
    slots: Count | None = None  # positions for cards, one wide
    host_ram: Size | None = None
    nvme: Size | None = None
    environment: dict[str, str] = Field(default_factory=dict)


class CudaTable(Spec):
    """Which driver, CUDA and PyTorch go together, and from when on an architecture runs."""

    id: str
    name: str
    source: tuple[str, ...]
    min_linux_driver_for_toolkit: dict[str, str]
    minor_version_compat_min_driver: dict[str, str]
    first_cuda_for_sm: dict[str, str]
    cuda13_min_sm: str
    pytorch_cuda: dict[str, tuple[str, ...]]
    pytorch_architectures: dict[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()


class HostRules(Spec):
    """What a host needs around its GPUs."""

    id: str
    name: str
    node_power_over_gpu_tdp: dict[str, Figure]
    heat_per_watt: Figure
    air_cooled_rack: Figure
    psu_margin: Figure
    circuit_120v_15a: Figure
    circuit_240v_30a: Figure
    connector_8pin: Figure
    connector_12v2x6: Figure
    host_ram_over_gpu_memory: Figure
    cores_per_gpu: Figure
    pcie_lanes_per_gpu: Figure
    gpus_per_nic: Figure
