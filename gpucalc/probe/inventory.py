"""What NVML knows of the attached cards, field by field, and the catalogue entry each card is."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.doctor.box import pci_address
from gpucalc.doctor.host import numa_nodes
from gpucalc.errors import CannotMeasure, UnknownName
from gpucalc.probe.nvml import INSTEAD, Fact, constant_names, read, session
from gpucalc.probe.peers import Pair, pairs
from gpucalc.probe.visible import visible
from gpucalc.units import GB, MB

# How far a card's memory may lie off the catalogue's label when its name alone fits several entries.
_MEMORY_TOLERANCE = 0.1
# Bits of the current clock reasons that mean the card is slowed; idle and user settings are none.
_THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU: `facts` by field, its catalogue entry or why there is none."""

    index: int
    facts: Mapping[str, Fact]
    entry: str | None
    entry_note: str | None

    def value(self, field: str) -> Any:
        """The field's value, None when it could not be read."""
        return self.facts[field].value


@dataclass(frozen=True, slots=True)
class Inventory:
    """The machine's cards and driver; `visible` are the indexes a CUDA program sees, in its order."""

    driver: Fact
    cuda: Fact
    cards: tuple[Card, ...]
    visible: tuple[int, ...]
    surroundings: str | None
    notes: tuple[str, ...]
    pairs: tuple[Pair, ...] = ()

    def document(self) -> dict[str, Any]:
        """The inventory as plain values; a field that could not be read says why."""
        return {
            "driver": _plain(self.driver),
            "cuda": _plain(self.cuda),
            "surroundings": self.surroundings,
            "visible": list(self.visible),
            "cards": [
                {
                    "index": card.index,
                    "catalogue": card.entry,
                    **({"catalogue_note": card.entry_note} if card.entry_note else {}),
                    **{_keyed(name, fact): _plain(fact) for name, fact in card.facts.items()},
                }
                for card in self.cards
            ],
            "pairs": [pair.document() for pair in self.pairs],
            "notes": list(self.notes),
        }


def inventory(
    nvml: Any, catalog: Catalog, environment: Mapping[str, str] | None = None, root: Path = Path("/")
) -> Inventory:
    """Everything NVML tells. Raises CannotMeasure without driver, permission or GPU.

    `nvml` is the pynvml module; `root` is where the system's marker files lie.
    """
    env = os.environ if environment is None else environment
    where = surroundings(root)
    with session(nvml, hint=_hint(where)):
        driver = read(nvml, lambda: nvml.nvmlSystemGetDriverVersion())
        cuda = read(nvml, lambda: _cuda(nvml.nvmlSystemGetCudaDriverVersion_v2()))
        count = read(nvml, lambda: nvml.nvmlDeviceGetCount())
        if not count.value:
            problem = "the NVIDIA driver sees no GPU" if count.reason is None else count.reason
            hint = _hint(where)
            raise CannotMeasure("; ".join([problem, *([hint] if hint else []), INSTEAD]))
        handles = [_handle(nvml, index) for index in range(count.value)]
        near = numa_nodes(root)
        cards = tuple(_card(nvml, index, handle, near, catalog) for index, handle in enumerate(handles))
        joined = pairs(nvml, [handle.value for handle in handles])
    parts = {part["uuid"]: card.index for card in cards for part in card.value("mig_instances") or ()}
    seen, said = visible(env.get("CUDA_VISIBLE_DEVICES"), [card.value("uuid") for card in cards], parts)
    notes = [said] if said else []
    names = {card.value("name") for card in cards}
    order = env.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    if len(names) > 1 and order != "PCI_BUS_ID":
        notes.append("the cards differ: CUDA numbers the fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID")
    shares = [str(card.index) for card in cards if card.value("virtualization") == "vGPU"]
    if shares:
        notes.append(f"GPU {', '.join(shares)}: a vGPU, whose host keeps some fields to itself")
    return Inventory(driver, cuda, cards, seen, where, tuple(notes), joined)


def surroundings(root: Path = Path("/")) -> str | None:
    """container, WSL or Jetson, where fields go missing; None on a plain host."""
    if (root / "etc/nv_tegra_release").exists():
        return "Jetson"
    try:
        kernel = (root / "proc/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        kernel = ""
    if "microsoft" in kernel.lower():
        return "WSL"
    marks = (".dockerenv", "run/.containerenv", "var/run/secrets/kubernetes.io")
    return "container" if any((root / mark).exists() for mark in marks) else None


def _hint(where: str | None) -> str | None:
    return {
        "container": "in a container: start it with its GPUs (--gpus all, or nvidia.com/gpu in its limits)",
        "WSL": "under WSL the driver is that of Windows",
        "Jetson": "Jetson boards have no NVML for most fields",
    }.get(where or "")


def throttles(bits: int) -> list[str]:
    """The reasons in NVML's bit field that slow a card down."""
    return [text for bit, text in _THROTTLES.items() if bits & bit]


def _handle(nvml: Any, index: int) -> Fact:
    return read(nvml, lambda: nvml.nvmlDeviceGetHandleByIndex(index))


def _card(nvml: Any, index: int, handle: Fact, near: Mapping[str, int], catalog: Catalog) -> Card:
    if handle.reason is not None:
        facts = {name: Fact(None, unit, handle.reason) for name, unit, _ in _fields(nvml, None)}
        return Card(index, facts, None, handle.reason)
    facts = {name: read(nvml, ask, unit) for name, unit, ask in _fields(nvml, handle.value)}
    if facts["numa_node"].reason is not None:  # NVML knows it of Grace machines; the system of any
        node = near.get(pci_address(str(facts["pci_bus_id"].value)))
        facts["numa_node"] = Fact(node) if node is not None else facts["numa_node"]
    entry, note = _entry(catalog, facts["name"], facts["memory_total"])
    return Card(index, facts, entry, note)


def _fields(nvml: Any, handle: Any) -> list[tuple[str, str, Callable[[], Any]]]:
    """Name, unit and question of every field; asking is left to the reader, one by one."""
    archs = constant_names(nvml, "NVML_DEVICE_ARCH_")
    return [
        ("name", "", lambda: nvml.nvmlDeviceGetName(handle)),
        ("uuid", "", lambda: nvml.nvmlDeviceGetUUID(handle)),
        ("architecture", "", lambda: archs.get(nvml.nvmlDeviceGetArchitecture(handle), "unknown")),
        (
            "compute_capability",
            "",
            lambda: ".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(handle))),
        ),
        ("pci_bus_id", "", lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        ("memory_total", "bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total),
        ("memory_used", "bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
        (
            "memory_reserved",
            "bytes",
            lambda: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).reserved,
        ),
        ("bar1_total", "bytes", lambda: nvml.nvmlDeviceGetBAR1MemoryInfo(handle).bar1Total),
        ("ecc", "", lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0])),
        ("ecc_pending", "", lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[1])),
        (
            "ecc_uncorrected",
            "count",
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        ),
        ("mig", "", lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0])),
        ("mig_instances", "", lambda: _instances(nvml, handle)),
        ("sm_clock", "MHz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        ("sm_clock_max", "MHz", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
        ("memory_clock", "MHz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        ("power", "W", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        ("power_limit", "W", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
        ("power_default", "W", lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000),
        ("temperature", "C", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        ("throttled_by", "", lambda: throttles(clock_reasons(nvml, handle))),
        ("pcie_gen", "", lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
        ("pcie_gen_max", "", lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        ("pcie_lanes", "", lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        ("pcie_lanes_max", "", lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        ("nvlink", "", lambda: _nvlink(nvml, handle)),
        ("numa_node", "", lambda: nvml.nvmlDeviceGetNumaNodeId(handle)),
        ("virtualization", "", lambda: _virtual(nvml.nvmlDeviceGetVirtualizationMode(handle))),
        ("fan", "percent", lambda: nvml.nvmlDeviceGetFanSpeed(handle)),
        ("persistence", "", lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle))),
        ("utilization", "percent", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        ("processes", "", lambda: _processes(nvml, handle)),
    ]


def _virtual(mode: int) -> str:
    """Whose the card is: this machine's own, passed through to it, or a share of one."""
    words = {0: "none", 1: "passed through", 2: "vGPU", 3: "host of vGPUs", 4: "host of vSGA"}
    return words.get(int(mode), "unknown")


def clock_reasons(nvml: Any, handle: Any) -> int:
    """The reasons under their new name, or the old one that drivers before R535 know."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except (nvml.NVMLError_FunctionNotFound, AttributeError):
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _instances(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    """The MIG instances of a card; empty slots are passed over."""
    if not nvml.nvmlDeviceGetMigMode(handle)[0]:
        return []
    found = []
    for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except (nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument):
            continue
        memory = read(nvml, partial(_memory, nvml, part))
        found.append(
            {
                "name": nvml.nvmlDeviceGetName(part),
                "uuid": nvml.nvmlDeviceGetUUID(part),
                "memory_bytes": memory.value,
            }
        )
    return found


def _nvlink(nvml: Any, handle: Any) -> dict[str, Any]:
    """Links that are up and down, and the PCI addresses of what they lead to."""
    up = down = 0
    peers: dict[str, int] = {}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active = nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError_InvalidArgument:  # past the card's last link
            break
        except nvml.NVMLError_NotSupported:
            if link == 0:
                raise
            break
        if not active:
            down += 1
            continue
        up += 1
        peer = read(nvml, partial(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link))
        if peer.value is not None:
            address = _text(peer.value.busId)
            peers[address] = peers.get(address, 0) + 1
    return {"up": up, "down": down, "peers": peers}


def _memory(nvml: Any, handle: Any) -> int:
    return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _processes(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    return [
        {"pid": process.pid, "memory_bytes": process.usedGpuMemory}
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    ]


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _entry(catalog: Catalog, name: Fact, memory: Fact) -> tuple[str | None, str | None]:
    """The catalogue's GPU of that name; of several, the one with this memory."""
    if name.value is None:
        return None, name.reason
    try:
        gpu, said = catalog.gpu(name.value)
    except UnknownName as error:
        fits = error.legal if isinstance(error.legal, tuple) else ()
        sized = [stem for stem in fits if _sized(catalog, str(stem), memory.value)]
        if len(sized) == 1:
            return str(sized[0]), f"of {', '.join(map(str, fits))} the one with this memory"
        return None, str(error)
    if memory.value and not _sized(catalog, gpu.id, memory.value):
        label = gpu.memory_label.si / GB
        return gpu.id, f"reports {memory.value / GB:.1f} GB where the catalogue has {label:.0f} GB"
    return gpu.id, "; ".join(said) or None


def _sized(catalog: Catalog, stem: str, memory: int | None) -> bool:
    """Whether the card's memory is the entry's, as the driver reports it or as it is sold."""
    if memory is None:
        return False
    gpu = catalog.gpu(stem)[0]
    known = gpu.memory_total or gpu.memory_label
    return abs(memory / known.si - 1) <= _MEMORY_TOLERANCE


def _keyed(name: str, fact: Fact) -> str:
    """The name with its unit, as JSON keys have it."""
    return f"{name}_{fact.unit}" if fact.unit and fact.unit != "count" else name


def _plain(fact: Fact) -> Any:
    return fact.value if fact.reason is None else {"not_read": fact.reason}


def shown(name: str, fact: Fact) -> str:
    """A fact as text for a table."""
    value = fact.value
    if fact.reason is not None:
        return fact.reason
    if fact.unit == "bytes":
        return f"{value / GB:.1f} GB" if value >= GB else f"{value / MB:.0f} MB"
    if fact.unit == "count":
        return str(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    if name == "nvlink":
        return f"{value['up']} up, {value['down']} down, {len(value['peers'])} peers"
    if name == "processes":
        return ", ".join(f"pid {one['pid']}" for one in value) or "none"
    if name == "mig_instances":
        return ", ".join(one["name"] for one in value) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    return f"{value:g} {fact.unit}".strip() if isinstance(value, int | float) else str(value)
