"""NVML read field by field: a value, or the reason there is none. Nothing here raises for a field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from gpucalc.errors import CannotMeasure

# What can still be done without a GPU; said with every refusal.
INSTEAD = "`gpucalc probe --device cpu` measures this machine's CPU, and plans need no device"

# The error's class in pynvml, and what it says about one field of a card.
_REASONS = {
    "NotSupported": "not supported by this card or driver",
    "VgpuEccNotSupported": "not supported on a vGPU",
    "NoPermission": "no permission: needs root, or is withheld from containers",
    "GpuIsLost": "the GPU is lost: it fell off the bus or cannot be reached",
    "FunctionNotFound": "the driver is too old to know it",
    "ArgumentVersionMismatch": "the driver is too old to know it",
    "NotFound": "not present",
    "InvalidArgument": "not present",
    "NoData": "the driver has no data",
    "ResetRequired": "the GPU needs a reset",
    "Timeout": "the driver did not answer in time",
    "Unknown": "the driver gave an unknown error",
}
# The same for NVML as a whole, with what to do.
_ABSENT = {
    "LibraryNotFound": "no NVIDIA driver library (libnvidia-ml) is found",
    "DriverNotLoaded": "the NVIDIA driver is not loaded",
    "NoPermission": "no permission to talk to the NVIDIA driver",
    "LibRmVersionMismatch": "driver and library have different versions: reboot after the driver update",
    "GpuIsLost": "a GPU is lost: it fell off the bus; see the kernel log for its Xid",
}


@dataclass(frozen=True, slots=True)
class Fact:
    """One field of a card: its value in `unit`, or None with the reason."""

    value: Any
    unit: str = ""
    reason: str | None = None


def library() -> Any:
    """The NVML module. Raises CannotMeasure when it is not installed."""
    try:
        pynvml = import_module("pynvml")
    except ImportError:
        raise CannotMeasure(f"pynvml is missing: pip install nvidia-ml-py; {INSTEAD}") from None
    return pynvml


def error_name(error: Exception) -> str:
    """`NotSupported` of an NVMLError_NotSupported."""
    return type(error).__name__.removeprefix("NVMLError_")


@contextmanager
def session(nvml: Any, *, hint: str | None = None) -> Iterator[None]:
    """NVML started and shut down. Raises CannotMeasure, in one line, when it does not start."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        problem = _ABSENT.get(error_name(error), f"the NVIDIA driver does not start: {error}")
        parts = [problem, *([hint] if hint else []), INSTEAD]
        raise CannotMeasure("; ".join(parts)) from None
    try:
        yield
    finally:
        with suppress(nvml.NVMLError):  # a lost GPU may refuse; the answer is already there
            nvml.nvmlShutdown()


def read(nvml: Any, ask: Callable[[], Any], unit: str = "") -> Fact:
    """What the call gives, or why it gives nothing."""
    try:
        value = ask()
    except nvml.NVMLError as error:
        return Fact(None, unit, _REASONS.get(error_name(error), str(error)))
    except AttributeError:
        return Fact(None, unit, "the installed pynvml is too old to ask for it")
    if isinstance(value, bytes):  # before pynvml 11.5
        value = value.decode("utf-8", "replace")
    return Fact(value, unit)


def constant_names(nvml: Any, prefix: str) -> dict[int, str]:
    """The names of NVML's numbers: 9 is `hopper` under NVML_DEVICE_ARCH_."""
    return {
        getattr(nvml, name): name.removeprefix(prefix).lower()
        for name in dir(nvml)
        if name.startswith(prefix) and isinstance(getattr(nvml, name), int)
    }
