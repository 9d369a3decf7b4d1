"""Commands to run beside a job, those that tell something on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.doctor.box import Box
from gpucalc.spec.checks import MonitorSpec, MonitorsSpec


@dataclass(frozen=True, slots=True)
class Monitor:
    """The commands for a machine, and those left out with what it lacks."""

    subject: str
    commands: tuple[MonitorSpec, ...]
    left_out: tuple[tuple[MonitorSpec, str], ...]

    @property
    def severe(self) -> bool:
        """Commands find nothing wrong."""
        return False

    def document(self) -> dict[str, Any]:
        """The same for a JSON document."""
        return {
            "subject": self.subject,
            "monitor": [
                {
                    "id": item.id,
                    "command": item.command,
                    "shows": item.shows,
                    "sources": list(item.source),
                    "claims": list(item.claims),
                }
                for item in self.commands
            ],
            "left_out": [{"id": item.id, "lacks": lacks} for item, lacks in self.left_out],
        }


def monitor(box: Box, catalog: Catalog) -> Monitor:
    """The commands of the catalogue that fit a machine."""
    held = abilities(box)
    kept: list[MonitorSpec] = []
    left: list[tuple[MonitorSpec, str]] = []
    for item in catalog.load("checks", "monitor", MonitorsSpec).commands:
        lacks = [need for need in item.needs if need not in held]
        if lacks:
            left.append((item, " and ".join(_LACKS[need] for need in lacks)))
        else:
            kept.append(item)
    return Monitor(box.subject, tuple(kept), tuple(left))


_LACKS = {
    "several": "a second card",
    "nvlink": "NVLink",
    "ecc": "ECC memory",
    "profiling": "cards with profiling counters (data centre)",
}


def abilities(box: Box) -> set[str]:
    """What a machine has that commands need."""
    held: set[str] = set()
    specs = [card.spec for card in box.cards if card.spec is not None]
    # GeForce and TITAN cards have neither ECC that reports nor profiling counters for DCGM.
    professional = [spec for spec in specs if not any(word in spec.name for word in ("GeForce", "TITAN"))]
    if len(box.cards) > 1:
        held.add("several")
        linked = any((spec.max_nvlink_domain or 1) > 1 for spec in specs)
        if any(card.nvlinks_up for card in box.cards) or (not box.live and linked):
            held.add("nvlink")
    if professional:
        held |= {"ecc", "profiling"}
    return held
