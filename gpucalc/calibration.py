"""A catalogue with a machine's own constants in place of the published ones, and what that changed.

Only the card that was measured is changed, only constants without doubts are taken, and each that is
not says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.formulas.calibration import share_of_rate
from gpucalc.spec.calibration import CalibrationSpec, LinkConstants, MatmulConstants, read_calibration
from gpucalc.spec.figure import Figure, FigureKind
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.hardware import CollectiveSpec, KernelRate, KernelSpec, OpSpec
from gpucalc.units import GB, gb_per_s, percent, seconds

_ABOVE = 1.05  # a share of the datasheet's rate beyond this is another card's, or a mistake


@dataclass(frozen=True, slots=True)
class Change:
    """One constant, as the catalogue has it and as this machine showed it, in inside units."""

    name: str
    old: float
    new: float
    unit: str

    @property
    def words(self) -> str:
        """The change on one line."""
        moved = f" ({100 * (self.new / self.old - 1):+.0f} %)" if self.old else ""
        return f"{self.name}: {_shown(self.old, self.unit)} -> {_shown(self.new, self.unit)}{moved}"


class CalibratedCatalog(Catalog):
    """The catalogue of these folders, with the constants of a calibration for the card it measured.

    `changes` and `unused` fill as plans ask for hardware.
    """

    def __init__(self, roots: Iterable[str | Path], path: str | Path) -> None:
        super().__init__(roots)
        self.path = str(path)
        self.calibration: CalibrationSpec = read_calibration(path)
        self.changes: list[Change] = []
        self.unused: list[str] = []
        self._others: list[str] = []  # GPUs plans asked for that are not the measured one
        self._kernels_of: dict[str, KernelSpec] = {}
        self._links_of: dict[str, CollectiveSpec] = {}
        machine = self.calibration.machine
        self._reference = f"gpucalc probe of {machine.name} on {self.calibration.date}, {machine.words}"

    def document(self) -> dict[str, Any]:
        """What the calibration changed, as plain values."""
        return {
            "file": self.path,
            "measured_on": self._reference,
            "changes": [
                {"name": one.name, "old": one.old, "new": one.new, "unit": one.unit} for one in self.changes
            ],
            "not_used": self._not_used(),
        }

    def words(self) -> tuple[str, ...]:
        """One line for every constant changed or left out."""
        left = [f"not used: {text}" for text in self._not_used()]
        lines = [*(change.words for change in self.changes), *left]
        return (f"calibrated by {self.path} ({self._reference})", *(lines or ["nothing changed"]))

    def kernels_for(self, gpu: GpuSpec) -> KernelSpec:
        """Kernel rates of a GPU, those measured here in place of the catalogue's."""
        known = super().kernels_for(gpu)
        if not self._is_measured(gpu):
            return known
        if gpu.id not in self._kernels_of:
            self._kernels_of[gpu.id] = self._with_kernels(known, gpu)
        return self._kernels_of[gpu.id]

    def links_for(self, kind: CollectiveSpec, gpu: GpuSpec) -> CollectiveSpec:
        """The links inside a host, with what was measured over them."""
        known = super().links_for(kind, gpu)
        if self.calibration.collectives is None or not self._is_measured(gpu):
            return known
        if kind.id not in self._links_of:
            self._links_of[kind.id] = self._with_links(known)
        return self._links_of[kind.id]

    def _is_measured(self, gpu: GpuSpec) -> bool:
        measured = self.calibration.machine
        if measured.gpu == gpu.id:
            return True
        self._others.append(gpu.id)
        return False

    def _not_used(self) -> list[str]:
        """Why constants were left out; another card than the plan's leaves out all of them."""
        if self._kernels_of or self._links_of or not self._others:
            return list(dict.fromkeys(self.unused))
        measured = self.calibration.machine
        kind = "CPU" if measured.device == "cpu" else "GPU outside the catalogue"
        what = measured.gpu or f"a {kind} ({measured.name})"
        return [f"everything: measured on {what}, and this plan is for {self._others[0]}"]

    def _with_kernels(self, known: KernelSpec, gpu: GpuSpec) -> KernelSpec:
        gemm = dict(known.gemm)
        for precision, found in self.calibration.matmul.items():
            rate = self._matmul(precision, found, gpu)
            if rate is None:
                continue
            old = gemm.get(precision)
            if old is not None:
                for field in ("mfu_max", "hbm_efficiency", "overhead", "p"):
                    self._note(f"{precision} matmul {field}", getattr(old, field), getattr(rate, field))
            gemm[precision] = rate
        update: dict[str, Any] = {"gemm": gemm}
        copy = self.calibration.copy_rates.get("device")
        if copy is not None and self._trusted("device copy", copy.doubts):
            share = self._share("device copy", copy.bus_bandwidth, gpu.memory_bandwidth)
            if share is not None:
                self._note("elementwise_hbm_efficiency", known.elementwise_hbm_efficiency, share)
                update["elementwise_hbm_efficiency"] = share
        return known.model_copy(update=update)

    def _matmul(self, precision: str, found: MatmulConstants, gpu: GpuSpec) -> KernelRate | None:
        name = f"{precision} matmul"
        peak = gpu.peaks.get(precision)
        if peak is None:
            self.unused.append(f"{name}: the catalogue has no {precision} rate of {gpu.id}")
            return None
        if not self._trusted(name, found.doubts):
            return None
        rate = self._share(name, found.rate, peak)
        bandwidth = self._share(name, found.bandwidth, gpu.memory_bandwidth)
        if rate is None or bandwidth is None:
            return None
        return KernelRate.model_construct(
            mfu_max=rate,
            hbm_efficiency=bandwidth,
            overhead=self._cited(found.overhead),
            p=self._cited(found.p),
            error=self._cited(found.error),
        )

    def _with_links(self, known: CollectiveSpec) -> CollectiveSpec:
        measured = self.calibration.collectives
        assert measured is not None
        if measured.nodes != 1:
            over = f"{measured.nodes} nodes" if measured.nodes else "an unknown number of nodes"
            self.unused.append(f"collectives: measured over {over}; only those inside one are taken")
            return known
        ranks = measured.ranks
        link = known
        reduce = measured.ops.get("all_reduce")
        if reduce is not None and self._trusted(f"all_reduce on {ranks} GPUs", reduce.doubts):
            link = self._all_reduce(link, reduce, ranks)
        ops = dict(link.ops)
        for op, found in measured.ops.items():
            name = f"{op} on {ranks} GPUs"
            if op == "all_reduce" or op not in ops or not self._trusted(name, found.doubts):
                continue
            old = known.terms(op, ranks)
            # The latency as a multiple of the all-reduce's, which is how the class holds it.
            alpha = found.alpha.si / link.terms("all_reduce", ranks).alpha_s
            extra = ops[op].alpha_extra
            ops[op] = OpSpec.model_construct(
                alpha_factor=self._made(alpha, "ratio", "measured latency over that of all_reduce"),
                alpha_extra=extra.model_copy(update={"value": 0.0, "note": "inside alpha_factor"}),
                bandwidth={**ops[op].bandwidth, ranks: self._cited(found.bus_bandwidth)},
                ramp=self._cited(found.ramp),
            )
            self._moved(name, old.alpha_s, found.alpha.si, old.bus_bytes_per_s, found.bus_bandwidth.si)
        return link.model_copy(update={"ops": ops})

    def _all_reduce(self, known: CollectiveSpec, found: LinkConstants, ranks: int) -> CollectiveSpec:
        old = known.terms("all_reduce", ranks)
        # Latency was seen at one group size: the class's growth with the size is scaled by it.
        factor = found.alpha.si / old.alpha_s

        def scaled(figure: Figure) -> Figure:
            return self._made(figure.value * factor, figure.unit, f"{figure.value:g} times {factor:.2f}")

        name = f"all_reduce on {ranks} GPUs"
        self._moved(name, old.alpha_s, found.alpha.si, old.bus_bytes_per_s, found.bus_bandwidth.si)
        return known.model_copy(
            update={
                "alpha0": scaled(known.alpha0),
                "alpha_step": scaled(known.alpha_step) if known.alpha_step else None,
                "ramp": self._cited(found.ramp),
                "bus_bandwidth": {**known.bus_bandwidth, ranks: self._cited(found.bus_bandwidth)},
                # Other operations keep the rings' rate until they are measured themselves.
                "ring_bandwidth": known.ring_bandwidth or known.bus_bandwidth,
            }
        )

    def _trusted(self, name: str, doubts: tuple[str, ...]) -> bool:
        if doubts:
            self.unused.append(f"{name}: {', '.join(doubts)}")
        return not doubts

    def _share(self, name: str, found: Figure, stated: Figure) -> Figure | None:
        share = float(share_of_rate(measured_per_s=found.si, stated_per_s=stated.si))
        if share > _ABOVE:
            self.unused.append(f"{name}: {percent(share, 0)} of the datasheet's rate, so of another card")
            return None
        return self._made(share, "ratio", f"{found.value:g} of {stated.value:g} {stated.unit}")

    def _made(self, value: float, unit: str, note: str) -> Figure:
        return Figure.model_construct(
            value=value,
            unit=unit,
            kind=FigureKind.MEASURED,
            source=("gpucalc probe",),
            references=(self._reference,),
            note=note,
        )

    def _cited(self, figure: Figure) -> Figure:
        return figure.model_copy(update={"references": (self._reference,)})

    def _note(self, name: str, old: Figure, new: Figure) -> None:
        unit = "s" if old.unit == "us" else "ratio"
        self.changes.append(Change(name, old.si, new.si, unit))

    def _moved(self, name: str, old_s: float, new_s: float, old_rate: float, new_rate: float) -> None:
        self.changes.append(Change(f"{name}, latency", old_s, new_s, "s"))
        self.changes.append(Change(f"{name}, bus bandwidth", old_rate, new_rate, "bytes/s"))


def _shown(value: float, unit: str) -> str:
    if unit == "s":
        return seconds(value) if value >= 1e-5 else f"{value * 1e6:.1f} us"
    if unit == "bytes/s":
        return gb_per_s(value) if value >= GB / 10 else f"{value / GB:.3f} GB/s"
    return f"{value:.3g}"
