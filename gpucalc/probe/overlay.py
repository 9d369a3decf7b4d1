"""Measured points to a calibration: constants, how well they describe the points, and what is doubtful."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpucalc.probe import copy
from gpucalc.probe.comm import bus_factor
from gpucalc.probe.fit import MIN_POINTS, GemmFit, GemmPoint, LinkFit, fit_gemm, fit_link
from gpucalc.spec.calibration import (
    CalibrationSpec,
    LinkConstants,
    MatmulConstants,
    MeasuredCollectives,
    MeasuredMachine,
)
from gpucalc.spec.figure import Figure, FigureKind

FIT_ERROR = 0.3  # constants that miss their own points by more describe nothing
_DIGITS = 4
Point = dict[str, Any]


def calibration(
    points: Sequence[Point],
    machine: MeasuredMachine,
    *,
    date: str,
    nodes: int | None = 1,
    busy: str | None = None,
    incomplete: str | None = None,
    ramp_of: Callable[[str], float | None] = lambda _: None,
) -> CalibrationSpec:
    """What the points come to. `busy` says what else ran and puts every constant in doubt.

    `ramp_of` gives the ramp the catalogue holds for an operation over these links.
    """
    general = [f"busy: {busy}"] if busy else []
    elsewhere = [f"busy: {point['why']}" for point in points if point["kind"] == "busy"]
    cut = _series(points[-1]) if incomplete and points else None

    def doubts(name: tuple[str, str]) -> list[str]:
        shared = elsewhere if name[0] == "comm" else []  # a busy card slows what all cards do together
        return [*general, *shared, *(["the measurement ended early"] if name == cut else [])]

    matmul: dict[str, MatmulConstants] = {}
    rates: dict[str, LinkConstants] = {}
    ops: dict[str, LinkConstants] = {}
    for name in dict.fromkeys(_series(point) for point in points if point["kind"] in _NAMES):
        kind, which = name
        own = [point for point in points if _series(point) == name]
        used, why = _usable(own)
        known = [*doubts(name), *why]
        if kind == "matmul":
            fit = fit_gemm([GemmPoint(p["flops"], p["bytes"], p["seconds"]) for p in used])
            if fit is not None:
                matmul[which] = _matmul(fit, known)
            continue
        factor = copy.PASSES.get(which, 1) if kind == "copy" else bus_factor(which, own[0]["ranks"])
        ramp = 0.0 if kind == "copy" else ramp_of(which)
        link = fit_link([(p["bytes"], p["seconds"]) for p in used], bus_factor=factor, ramp=ramp)
        if link is not None:
            (rates if kind == "copy" else ops)[which] = _link(link, known)
    ranks = next((point["ranks"] for point in points if point["kind"] == "comm"), 0)
    return CalibrationSpec(
        kind="calibration",
        date=date,
        machine=machine,
        matmul=matmul,
        copy_rates=rates,
        collectives=MeasuredCollectives(ranks=ranks, nodes=nodes, ops=ops) if ops else None,
        incomplete=incomplete,
        points=tuple(points),
    )


_NAMES = {"matmul": "dtype", "copy": "direction", "comm": "op"}


def _series(point: Point) -> tuple[str, str]:
    """What the point belongs to: (matmul, bf16), (copy, device), (comm, all_reduce)."""
    kind = point["kind"]
    return kind, str(point.get(_NAMES.get(kind, ""), ""))


def _usable(points: Sequence[Point]) -> tuple[list[Point], list[str]]:
    """The points without doubts; all that have a time, and the reason, when too few would be left."""
    timed = [point for point in points if point["seconds"] > 0]
    good = [point for point in timed if not point["doubts"]]
    if len(good) == len(points) or (len(good) >= MIN_POINTS and 2 * len(good) >= len(points)):
        return good, []
    reasons = dict.fromkeys(doubt.split(" ")[0].rstrip(":") for point in points for doubt in point["doubts"])
    bad = len(points) - len(good)
    return timed, [f"{bad} of {len(points)} measurements are doubtful ({', '.join(reasons)})"]


def _matmul(fit: GemmFit, doubts: list[str]) -> MatmulConstants:
    return MatmulConstants(
        rate=_figure(fit.flops_per_s / 1e12, "TFLOP/s"),
        bandwidth=_figure(fit.bytes_per_s / 1e9, "GB/s"),
        overhead=_figure(fit.overhead_s * 1e6, "us"),
        p=_figure(fit.p, "ratio"),
        error=_figure(fit.error, "ratio"),
        points=fit.points,
        doubts=(*doubts, *_poor(fit.error)),
    )


def _link(fit: LinkFit, doubts: list[str]) -> LinkConstants:
    return LinkConstants(
        alpha=_figure(fit.alpha_s * 1e6, "us"),
        bus_bandwidth=_figure(fit.bus_bytes_per_s / 1e9, "GB/s"),
        ramp=_figure(fit.ramp, "ratio"),
        error=_figure(fit.error, "ratio"),
        points=fit.points,
        doubts=(*doubts, *_poor(fit.error)),
    )


def _poor(error: float) -> list[str]:
    return [f"fit error {error:.0%}"] if error > FIT_ERROR else []


def _figure(value: float, unit: str) -> Figure:
    return Figure(
        value=float(f"{value:.{_DIGITS}g}"), unit=unit, kind=FigureKind.MEASURED, source=("gpucalc probe",)
    )
