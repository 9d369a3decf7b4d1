"""What the system tells without the driver: PyTorch's version, memory, disk, cores, NUMA nodes."""

from __future__ import annotations

import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any


def facts(root: Path = Path("/"), *, where: str = ".") -> dict[str, Any]:
    """Facts by name; what cannot be read is left out."""
    found: dict[str, Any] = {"cores": os.cpu_count(), "numa_nodes": numa_nodes(root)}
    try:
        version = metadata.version("torch")  # read, not imported
    except metadata.PackageNotFoundError:
        version = None
    if version is not None:
        number, _, build = version.partition("+")
        found["torch"] = number
        if build.startswith("cu") and build[2:].isdigit() and len(build) > 4:
            found["cuda"] = f"{build[2:-1]}.{build[-1]}"
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemTotal:"):
                found["host_ram_bytes"] = float(line.split()[1]) * 1024
        found["nvme_bytes"] = float(shutil.disk_usage(where).free)
    except (OSError, ValueError, IndexError):
        pass
    return found


def numa_nodes(root: Path = Path("/")) -> dict[str, int]:
    """The processor's node of every PCI device that has one, by address."""
    nodes: dict[str, int] = {}
    for path in (root / "sys/bus/pci/devices").glob("*/numa_node"):
        try:
            node = int(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        if node >= 0:  # -1: the firmware does not say
            nodes[path.parent.name] = node
    return nodes
