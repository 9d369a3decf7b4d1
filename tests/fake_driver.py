"""The driver's own library below pynvml: C functions that fill C structures, for the cards of `fake_nvml`.

pynvml's real wrappers run on top of it, so that a wrong signature, structure or version shows. A function the
library does not have is missing here too, as it is in an old driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pynvml

OK = pynvml.NVML_SUCCESS
# C functions with one result after the handle: the field of the card, and what precedes the result.
_NUMBERS = {
    "nvmlDeviceGetArchitecture": "Architecture",
    "nvmlDeviceGetPowerUsage": "PowerUsage",
    "nvmlDeviceGetEnforcedPowerLimit": "EnforcedPowerLimit",
    "nvmlDeviceGetPowerManagementDefaultLimit": "PowerManagementDefaultLimit",
    "nvmlDeviceGetCurrentClocksEventReasons": "CurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons": "CurrentClocksThrottleReasons",
    "nvmlDeviceGetCurrPcieLinkGeneration": "CurrPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkGeneration": "MaxPcieLinkGeneration",
    "nvmlDeviceGetCurrPcieLinkWidth": "CurrPcieLinkWidth",
    "nvmlDeviceGetMaxPcieLinkWidth": "MaxPcieLinkWidth",
    "nvmlDeviceGetNumaNodeId": "NumaNodeId",
    "nvmlDeviceGetPersistenceMode": "PersistenceMode",
    "nvmlDeviceGetVirtualizationMode": "VirtualizationMode",
    "nvmlDeviceGetFanSpeed": "FanSpeed",
    "nvmlDeviceGetClockInfo": "ClockInfo",
    "nvmlDeviceGetMaxClockInfo": "MaxClockInfo",
    "nvmlDeviceGetTemperature": "Temperature",
    "nvmlDeviceGetTotalEccErrors": "TotalEccErrors",
}
_SEVERAL = {
    "nvmlDeviceGetCudaComputeCapability": "CudaComputeCapability",
    "nvmlDeviceGetEccMode": "EccMode",
    "nvmlDeviceGetMigMode": "MigMode",
    "nvmlDeviceGetRemappedRows": "RemappedRows",
}
_TEXTS = {"nvmlDeviceGetName": "Name", "nvmlDeviceGetUUID": "UUID"}


def code(name: str) -> int:
    """NVML's number of an error by its class in pynvml."""
    kind = getattr(pynvml, f"NVMLError_{name}")
    return int(kind().value)


class Driver:
    """libnvidia-ml.so.1. `init` is the error it starts with; `lost` cards have no handle."""

    def __init__(
        self, cards: list[Mapping[str, Any]], *, init: str | None = None, lost: tuple[int, ...] = ()
    ) -> None:
        named = [{"UUID": f"GPU-{index:08x}-aa", **card} for index, card in enumerate(cards)]
        self.init, self.lost = init, lost
        self.cards: list[Mapping[str, Any]] = list(named)
        self.count = len(cards)
        self.handles: dict[int, tuple[Any, Mapping[str, Any]]] = {}
        self.events: dict[int, list[int]] = {}
        self.open = 0

    # -- what pynvml asks for by name

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name in _NUMBERS:
            return lambda handle, *rest: self._fill(handle, _NUMBERS[name], rest[-1:])
        if name in _SEVERAL:
            return lambda handle, *rest: self._fill(handle, _SEVERAL[name], rest)
        if name in _TEXTS:
            return lambda handle, buffer, size: self._text(handle, _TEXTS[name], buffer, size)
        raise AttributeError(name)

    def nvmlInitWithFlags(self, flags: int) -> int:
        assert flags == 0
        if self.init:
            return code(self.init)
        self.open += 1
        return OK

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return OK

    def nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> int:
        buffer.value = b"570.124.06"
        assert len(buffer.value) < size.value
        return OK

    def nvmlSystemGetCudaDriverVersion_v2(self, out: Any) -> int:
        out._obj.value = 12080
        return OK

    def nvmlDeviceGetCount_v2(self, out: Any) -> int:
        out._obj.value = self.count
        return OK

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, out: Any) -> int:
        if index.value in self.lost:
            return code("GpuIsLost")
        return self._handle(self.cards[index.value], out)

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, out: Any) -> int:
        fits = [card for card in self.cards if card["UUID"].encode() == uuid.value]
        return self._handle(fits[0], out) if fits else code("NotFound")

    def nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> int:
        return self._structure(handle, "MemoryInfo", out._obj, ("total", "used", "free"))

    def nvmlDeviceGetMemoryInfo_v2(self, handle: Any, out: Any) -> int:
        assert out._obj.version == pynvml.nvmlMemory_v2  # the driver refuses a structure it does not know
        return self._structure(handle, "MemoryInfo_v2", out._obj, ("total", "used", "reserved", "free"))

    def nvmlDeviceGetBAR1MemoryInfo(self, handle: Any, out: Any) -> int:
        return self._structure(handle, "BAR1MemoryInfo", out._obj, ("bar1Total", "bar1Used", "bar1Free"))

    def nvmlDeviceGetUtilizationRates(self, handle: Any, out: Any) -> int:
        return self._structure(handle, "UtilizationRates", out._obj, ("gpu", "memory"))

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, out: Any) -> int:
        value = self._value(handle, "PciInfo")
        if isinstance(value, int):
            return value
        out._obj.busId = value.busId.encode()
        return OK

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, out: Any) -> int:
        value = self._value(handle, "MigMode")
        if isinstance(value, int):
            return value
        out._obj.value = 7
        return OK

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, slot: Any, out: Any) -> int:
        parts = self._card(handle)["instances"]
        return self._handle(parts[slot.value], out) if slot.value < len(parts) else code("NotFound")

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int, out: Any) -> int:
        links = self._card(handle)["links"]
        if isinstance(links, str):
            return code(links)
        if link >= links:
            return code("InvalidArgument")
        out._obj.value = 1
        return OK

    def nvmlDeviceGetNvLinkRemotePciInfo_v2(self, _: Any, link: int, out: Any) -> int:
        out._obj.busId = f"00000000:0{link % 4}:00.0".encode()
        return OK

    def nvmlDeviceGetTopologyCommonAncestor(self, one: Any, other: Any, out: Any) -> int:
        if isinstance(self._card(one)["topology"], str):
            return code(self._card(one)["topology"])
        out._obj.value = 30 if self._card(one)["socket"] == self._card(other)["socket"] else 50
        return OK

    def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, index: Any, out: Any) -> int:
        asked = int(getattr(index, "value", index))
        status = self._card(one)["p2p"]
        if isinstance(status, str):
            return code(status)
        linked = all(isinstance(self._card(card)["links"], int) for card in (one, other))
        out._obj.value = 0 if linked else 5 if asked == 2 else status
        return OK

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, array: Any) -> int:
        running = self._card(handle)["ComputeRunningProcesses"]
        if isinstance(running, str):
            return code(running)
        if array is None:
            count._obj.value = len(running)
            return code("InsufficientSize") if running else OK
        for place, process in enumerate(running):
            array[place].pid, array[place].usedGpuMemory = process.pid, process.usedGpuMemory
        count._obj.value = len(running)
        return OK

    def nvmlEventSetCreate(self, out: Any) -> int:
        self._point(out)
        self.events[ctypes.addressof(out._obj.contents)] = []
        return OK

    def nvmlDeviceRegisterEvents(self, handle: Any, kinds: Any, events: Any) -> int:
        assert kinds.value == pynvml.nvmlEventTypeXidCriticalError
        xid = self._card(handle)["xid"]
        if isinstance(xid, str):
            return code(xid)
        self.events[ctypes.addressof(events.contents)] += xid
        return OK

    def nvmlEventSetWait_v2(self, events: Any, out: Any, timeout: Any) -> int:
        assert timeout.value == 0  # nobody waits in a training step
        held = self.events[ctypes.addressof(events.contents)]
        if not held:
            return code("Timeout")
        out._obj.eventType, out._obj.eventData = pynvml.nvmlEventTypeXidCriticalError, held.pop(0)
        return OK

    # -- how it answers

    def _point(self, out: Any) -> int:
        """A pointer to something of our own, as a handle is."""
        kind = type(out._obj)._type_
        memory = ctypes.create_string_buffer(16)
        out._obj.contents = kind.from_buffer(memory)
        address = ctypes.addressof(out._obj.contents)
        self.handles[address] = (memory, {})
        return address

    def _handle(self, card: Mapping[str, Any], out: Any) -> int:
        address = self._point(out)
        self.handles[address] = (self.handles[address][0], card)
        return OK

    def _card(self, handle: Any) -> Mapping[str, Any]:
        return self.handles[ctypes.addressof(handle.contents)][1]

    def _value(self, handle: Any, field: str) -> Any:
        """The field's value, or the number of its error."""
        value = self._card(handle).get(field, "NotSupported")
        if isinstance(value, str) and hasattr(pynvml, f"NVMLError_{value}"):
            return code(value)
        return (value,) if isinstance(value, int) else value

    def _fill(self, handle: Any, field: str, outs: tuple[Any, ...]) -> int:
        value = self._value(handle, field)
        if isinstance(value, int):
            return value
        for out, one in zip(outs, value, strict=True):
            out._obj.value = one
        return OK

    def _text(self, handle: Any, field: str, buffer: Any, size: Any) -> int:
        value = self._value(handle, field)
        if isinstance(value, int):
            return value
        assert len(value) < size.value
        buffer.value = value.encode()
        return OK

    def _structure(self, handle: Any, field: str, out: Any, names: tuple[str, ...]) -> int:
        value = self._value(handle, field)
        if isinstance(value, int):
            return value
        for name in names:
            setattr(out, name, getattr(value, name, 0))
        return OK


@contextmanager
def installed(driver: Driver) -> Iterator[Any]:
    """pynvml on top of this driver."""
    cache, library = dict(pynvml._nvmlGetFunctionPointer_cache), pynvml.nvmlLib
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml.nvmlLib = driver
    try:
        yield pynvml
    finally:
        pynvml.nvmlLib = library
        pynvml._nvmlGetFunctionPointer_cache.clear()
        pynvml._nvmlGetFunctionPointer_cache.update(cache)
