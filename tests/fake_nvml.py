"""A machine at the NVML boundary: the names of pynvml, its own errors and numbers, cards of our making.

A field is a value, or the name of the error the driver answers with. Defaults are those of an idle
H100 SXM in a DGX: 18 links up, ECC on, no MIG.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 2**30
H100 = {
    "Name": "NVIDIA H100 80GB HBM3",
    "Architecture": pynvml.NVML_DEVICE_ARCH_HOPPER,
    "CudaComputeCapability": (9, 0),
    "PciInfo": SimpleNamespace(busId="00000000:18:00.0"),
    "MemoryInfo": SimpleNamespace(total=85520809984, used=542 * 2**20, free=0),
    "MemoryInfo_v2": SimpleNamespace(total=85520809984, used=3 * 2**20, reserved=539 * 2**20, free=0),
    "BAR1MemoryInfo": SimpleNamespace(bar1Total=128 * GIB, bar1Used=2**20, bar1Free=127 * GIB),
    "EccMode": [1, 1],
    "TotalEccErrors": 0,
    "MigMode": [0, 0],
    "ClockInfo": 345,
    "MaxClockInfo": 1980,
    "PowerUsage": 71500,
    "EnforcedPowerLimit": 700000,
    "PowerManagementDefaultLimit": 700000,
    "Temperature": 31,
    "CurrentClocksEventReasons": 1,
    "CurrPcieLinkGeneration": 5,
    "MaxPcieLinkGeneration": 5,
    "CurrPcieLinkWidth": 16,
    "MaxPcieLinkWidth": 16,
    "NumaNodeId": "NotSupported",
    "PersistenceMode": 1,
    "UtilizationRates": SimpleNamespace(gpu=0, memory=0),
    "ComputeRunningProcesses": [],
    "RemappedRows": (0, 0, 0, 0),
    "VirtualizationMode": 0,
    "FanSpeed": "NotSupported",
    "socket": 0,
    "topology": 0,
    "p2p": 0,
    "links": 18,
    "instances": [],
    "xid": [],
}
# What a GeForce driver does not answer.
RTX4090 = {
    **H100,
    "Name": "NVIDIA GeForce RTX 4090",
    "Architecture": pynvml.NVML_DEVICE_ARCH_ADA,
    "CudaComputeCapability": (8, 9),
    "MemoryInfo": SimpleNamespace(total=25757220864, used=2**20, free=0),
    "EccMode": "NotSupported",
    "TotalEccErrors": "NotSupported",
    "MigMode": "NotSupported",
    "BAR1MemoryInfo": SimpleNamespace(bar1Total=256 * 2**20, bar1Used=0, bar1Free=0),
    "RemappedRows": "NotSupported",
    "FanSpeed": 30,
    "p2p": pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED,
    "links": "NotSupported",
}


class FakeNvml:
    """Stands for the pynvml module. `init` is the error nvmlInit raises; `lost` cards have no handle."""

    def __init__(
        self, cards: list[Mapping[str, Any]], *, init: str | None = None, lost: tuple[int, ...] = ()
    ) -> None:
        self.cards, self.init, self.lost = cards, init, lost
        self.open = 0

    def nvmlInit(self) -> None:
        if self.init:
            raise error(self.init)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.124.06"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        if index in self.lost:
            raise error("GpuIsLost")
        return {**self.cards[index], "UUID": self.cards[index].get("UUID", f"GPU-{index:08x}-aa")}

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        for index in range(len(self.cards)):
            handle = self.nvmlDeviceGetHandleByIndex(index)
            if handle["UUID"] == uuid:
                return handle
        raise error("NotFound")

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        return answered(handle, "MemoryInfo" if version is None else "MemoryInfo_v2")

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        answered(handle, "MigMode")
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, slot: int) -> Any:
        if slot >= len(handle["instances"]):
            raise error("NotFound")
        return handle["instances"][slot]

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int) -> int:
        if link >= answered(handle, "links"):
            raise error("InvalidArgument")
        return 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, _: Any, link: int) -> Any:
        return SimpleNamespace(busId=f"00000000:0{link % 4}:00.0")

    def nvmlDeviceGetTopologyCommonAncestor(self, one: Any, other: Any) -> int:
        """Cards of one number in `socket` share a root; 50 is SYS."""
        answered(one, "topology")
        return int(pynvml.NVML_TOPOLOGY_HOSTBRIDGE if one["socket"] == other["socket"] else 50)

    def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, index: int) -> int:
        """Index 2 asks for NVLink, 0 for reads of the other's memory."""
        assert isinstance(index, int)
        linked = isinstance(one["links"], int) and isinstance(other["links"], int)
        status = answered(one, "p2p")
        return 0 if linked else 5 if index == 2 else int(status)

    def nvmlEventSetCreate(self) -> list[int]:
        return []

    def nvmlDeviceRegisterEvents(self, handle: Any, _: int, events: list[int]) -> None:
        events.extend(answered(handle, "xid"))

    def nvmlEventSetWait_v2(self, events: list[int], _: int) -> Any:
        if not events:
            raise error("Timeout")
        return SimpleNamespace(eventData=events.pop(0))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvmlDeviceGet"):
            if not hasattr(pynvml, name):
                raise AttributeError(name)
            field = name.removeprefix("nvmlDeviceGet")
            ask: Callable[..., Any] = lambda handle, *_: answered(handle, field)  # noqa: E731
            return ask
        return getattr(pynvml, name)

    def __dir__(self) -> list[str]:
        return dir(pynvml)


def error(name: str) -> Exception:
    """The pynvml error of that name, as the driver's number makes it."""
    kind = getattr(pynvml, f"NVMLError_{name}")
    raised: Exception = kind()
    return raised


def answered(handle: Any, field: str) -> Any:
    """The field's value, or its error raised; a field a card does not know is not supported."""
    value = handle.get(field, "NotSupported")
    if isinstance(value, str) and hasattr(pynvml, f"NVMLError_{value}"):
        raise error(value)
    return value
