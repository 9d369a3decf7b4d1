"""How every two cards of a machine reach each other: `nvidia-smi topo -m` and `-p2p r`, through NVML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpucalc.probe.nvml import Fact, read

# nvidia-smi's words for what lies between two cards, by NVML's level.
_PATHS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_STATUS = {
    0: "direct",
    1: "not supported by the chipset",
    2: "not supported by the GPU",
    3: "not supported across these PCIe roots",
    4: "switched off in the driver",
    5: "not supported",
}
_READ, _NVLINK = 0, 2  # NVML's P2P capabilities; pynvml spells the first as a tuple by mistake
ACROSS = "SYS"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two cards by index: what lies between them, and whether one reads the other's memory directly."""

    first: int
    second: int
    path: Fact  # NV (NVLink), PIX, PXB, PHB, NODE or SYS
    access: Fact  # direct, or why not

    def document(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "cards": [self.first, self.second],
            "path": self.path.value if self.path.reason is None else {"not_read": self.path.reason},
            "access": self.access.value if self.access.reason is None else {"not_read": self.access.reason},
        }


def pairs(nvml: Any, handles: Sequence[Any]) -> tuple[Pair, ...]:
    """Every two cards; None stands for a card without a handle."""
    return tuple(
        _pair(nvml, first, second, handles[first], handles[second])
        for first in range(len(handles))
        for second in range(first + 1, len(handles))
        if handles[first] is not None and handles[second] is not None
    )


def _pair(nvml: Any, first: int, second: int, one: Any, other: Any) -> Pair:
    joined = read(nvml, lambda: int(nvml.nvmlDeviceGetP2PStatus(one, other, _NVLINK)))
    path = read(
        nvml, lambda: _PATHS.get(int(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)), "unknown")
    )
    status = read(nvml, partial(_access, nvml, one, other))
    return Pair(first, second, Fact("NV") if joined.value == 0 else path, status)


def _access(nvml: Any, one: Any, other: Any) -> str:
    return _STATUS.get(int(nvml.nvmlDeviceGetP2PStatus(one, other, _READ)), "unknown")
