"""An accelerator: what it holds, how fast it is, how it is wired.

Peaks are dense (no structured sparsity). `fp16`, `bf16`, `fp8` mean tensor-core products
accumulated in fp32, the mode training uses; the GeForce rate with fp16 accumulation, twice as
high and printed on most boxes, is `fp16_fp16acc`. `fp32` is the CUDA-core rate.
"""

from __future__ import annotations

from gpucalc.errors import UnknownName
from gpucalc.line import Kind, Line
from gpucalc.spec.base import Name, Spec
from gpucalc.spec.figure import PositiveFigure

# What a run calls its precision, and the rate that serves it.
_PEAK_OF = {
    "fp64": "fp64",
    "fp32": "fp32",
    "tf32": "tf32",
    "fp16": "fp16",
    "bf16": "bf16",
    "bf16-pure": "bf16",
    "fp8": "fp8",
    "mxfp8": "fp8",
    "fp6": "fp6",
    "mxfp6": "fp6",
    "fp4": "fp4",
    "mxfp4": "fp4",
    "nvfp4": "fp4",
    "int8": "int8",
    "fp16_fp16acc": "fp16_fp16acc",
    "fp8_fp16acc": "fp8_fp16acc",
}


class GpuSpec(Spec):
    """One accelerator model as the catalogue describes it."""

    id: Name
    name: Name
    vendor: Name
    aliases: tuple[str, ...] = ()
    default_for: tuple[str, ...] = ()  # shorter names that mean this variant when nothing more is said
    arch: str
    compute_capability: str
    form_factor: str
    launch_year: int | None = None
    memory_type: str | None = None
    memory_label: PositiveFigure  # as marketed
    memory_total: PositiveFigure | None = None  # as the driver reports it
    memory_runtime: PositiveFigure | None = None  # what a framework can allocate at most (torch total)
    memory_bandwidth: PositiveFigure
    peaks: dict[str, PositiveFigure]
    tdp: PositiveFigure | None = None
    nvlink_kind: str | None = None  # generation or vendor link; None without one
    nvlink_bandwidth: PositiveFigure | None = None  # per GPU, both directions summed
    max_nvlink_domain: int = 1
    c2c_bandwidth: PositiveFigure | None = None  # to the CPU of a superchip, both directions summed
    pcie_gen: int | None = None
    pcie_lanes: int | None = None
    sm_count: int | None = None
    boost_clock: PositiveFigure | None = None
    kernels: str | None = None  # kernel rates that serve this GPU
    collectives: str | None = None  # collective class of a host with no description
    default_systems: tuple[str, ...] = ()  # reference servers, the smallest first
    notes: tuple[str, ...] = ()
    disagreements: tuple[str, ...] = ()

    @property
    def capability_major(self) -> int:
        """The first number of a compute capability; 0 where the vendor has none."""
        major = self.compute_capability.split(".")[0]
        return int(major) if major.isdigit() else 0

    def usable_memory(self) -> Line:
        """Bytes a process can allocate at most: the runtime's total, else the driver's, else the label."""
        for figure, meaning in (
            (self.memory_runtime, "total a framework sees on this GPU"),
            (self.memory_total, "total the driver reports; a framework sees 0.3 to 1 % less"),
            (self.memory_label, "marketed size; a driver reports up to 8 % less with ECC"),
        ):
            if figure is not None:
                line = figure.line("usable_memory")
                note = meaning if figure.note is None else f"{meaning}; {figure.note}"
                kind = Kind.ASSUMED if figure is self.memory_label else line.kind
                return Line(line.name, line.value, line.unit, kind, source=line.source, note=note)
        raise AssertionError("a GPU always has a memory label")

    def peak(self, precision: str) -> Line | None:
        """The dense rate that serves a precision, or None where the hardware has none.

        Raises UnknownName for a precision nobody knows.
        """
        key = _PEAK_OF.get(precision)
        if key is None:
            raise UnknownName("unknown precision", given=precision, legal=sorted(_PEAK_OF))
        figure = self.peaks.get(key)
        return None if figure is None else figure.line(f"peak_{key}")
