"""A card watched while it works: clocks, temperature, power, throttling, memory errors, Xid events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpucalc.probe.inventory import clock_reasons, throttles
from gpucalc.probe.nvml import error_name, read


class Watch:
    """One card of NVML. Every field is read by itself; what cannot be read says why, once."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle
        self.not_read: dict[str, str] = {}
        self._events = self._registered()

    def pace(self) -> dict[str, Any]:
        """Clock and throttling: what a time just taken depends on."""
        nvml, handle = self.nvml, self.handle
        found = self._field("sm_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        return found | self._field("throttled_by", lambda: throttles(clock_reasons(nvml, handle)))

    def health(self) -> dict[str, Any]:
        """The same with temperature, power, memory errors since the driver started, and new Xid events."""
        nvml, handle = self.nvml, self.handle

        def errors(kind: str) -> Callable[[], int]:
            number = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind}")
            return lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, number, nvml.NVML_VOLATILE_ECC))

        found = self.pace()
        found |= self._field(
            "temperature_c", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        )
        found |= self._field("power_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        found |= self._field("ecc_corrected", errors("CORRECTED"))
        found |= self._field("ecc_uncorrected", errors("UNCORRECTED"))
        found |= self._field("remapped_rows", lambda: _remapped(nvml.nvmlDeviceGetRemappedRows(handle)))
        if self._events is not None:
            found["xid"] = self._xids()
        return found

    def _field(self, name: str, ask: Callable[[], Any]) -> dict[str, Any]:
        fact = read(self.nvml, ask)
        if fact.reason is not None:
            self.not_read[name] = fact.reason
            return {}
        return {name: fact.value}

    def _registered(self) -> Any:
        """An event set that hears of critical errors of this card; None where there is none."""
        nvml = self.nvml

        def ask() -> Any:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self.handle, nvml.nvmlEventTypeXidCriticalError, events)
            return events

        fact = read(nvml, ask)
        if fact.reason is not None:
            self.not_read["xid"] = fact.reason
        return fact.value

    def _xids(self) -> list[int]:
        """Numbers of the errors since the last look; never waits."""
        found: list[int] = []
        while len(found) < 100:
            try:
                event = self.nvml.nvmlEventSetWait_v2(self._events, 0)
            except self.nvml.NVMLError as error:
                if error_name(error) != "Timeout":  # a timeout is how NVML says that there is none
                    self.not_read["xid"] = str(error)
                break
            found.append(int(event.eventData))
        return found


def _remapped(rows: Any) -> int:
    """Memory rows replaced, of NVML's correctable, uncorrectable, pending and failed."""
    return int(rows[0]) + int(rows[1])
