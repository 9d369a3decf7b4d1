"""A calibration: constants fitted to one machine's own measurements, which plans take over the catalogue's.

Rates are absolute, so that the file tells what was measured whatever a datasheet says; the shares
that plans hold are worked out when it is read. Constants with `doubts` are kept and not used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from gpucalc.errors import InputError
from gpucalc.spec.base import Spec
from gpucalc.spec.figure import Figure
from gpucalc.spec.yamlio import load_yaml

MAX_FILE_BYTES = 4 * 2**20  # a full probe of eight GPUs writes under 1 MB


class MatmulConstants(Spec):
    """Constants of one element type's products; `error` is the fit's mean absolute log error."""

    rate: Figure
    bandwidth: Figure
    overhead: Figure
    p: Figure
    error: Figure
    points: int
    doubts: tuple[str, ...] = ()


class LinkConstants(Spec):
    """Constants of one copy or collective: small-message latency, bus bandwidth and the ramp between."""

    alpha: Figure
    bus_bandwidth: Figure
    ramp: Figure
    error: Figure
    points: int
    doubts: tuple[str, ...] = ()


class MeasuredCollectives(Spec):
    """Collectives over all GPUs that took part; `nodes` is None where the starter did not say."""

    ranks: int
    nodes: int | None = None
    ops: dict[str, LinkConstants]


class MeasuredMachine(Spec):
    """What was measured, with which software; `gpu` is the catalogue's name of the card."""

    device: Literal["cpu", "cuda"]
    name: str
    gpu: str | None = None
    gpus: int
    driver: str | None = None
    cuda: str | None = None
    torch: str
    nccl: str | None = None
    backend: str

    @property
    def words(self) -> str:
        """The software in a phrase."""
        parts = [f"driver {self.driver}" if self.driver else "", f"torch {self.torch}"]
        return ", ".join(filter(None, [*parts, f"NCCL {self.nccl}" if self.nccl else self.backend]))


class CalibrationSpec(Spec):
    """One probe's result. `points` are the measurements themselves, for whoever wants to fit again."""

    kind: Literal["calibration"]
    date: str
    machine: MeasuredMachine
    matmul: dict[str, MatmulConstants] = Field(default_factory=dict)
    copy_rates: dict[str, LinkConstants] = Field(default_factory=dict)
    collectives: MeasuredCollectives | None = None
    incomplete: str | None = None  # what ended the measurement early
    points: tuple[dict[str, Any], ...] = ()

    def yaml(self) -> str:
        """The calibration as a file's text."""
        data = self.model_dump(mode="json", exclude_none=True)
        return yaml.safe_dump(_without_references(data), sort_keys=False, allow_unicode=True, width=100)


def read_calibration(path: str | Path) -> CalibrationSpec:
    """The calibration in a file. Raises InputError for anything else."""
    data = load_yaml(path, max_bytes=MAX_FILE_BYTES).data
    if data.get("kind") != "calibration":
        raise InputError(
            "is not a calibration",
            where=str(path),
            key="kind",
            given=data.get("kind"),
            legal="a file written by gpucalc probe",
        )
    return CalibrationSpec.read(data, where=str(path))


def _without_references(data: Any) -> Any:
    """The data without what a catalogue would have put beside its sources."""
    if isinstance(data, dict):
        return {key: _without_references(part) for key, part in data.items() if key != "references"}
    if isinstance(data, list):
        return [_without_references(part) for part in data]
    return data
