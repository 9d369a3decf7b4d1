"""Constants of the catalogues' two laws, fitted to measured times.

    matmul      t = overhead + ((FLOPs / rate)^p + (bytes / bandwidth)^p)^(1/p)
    collective  t = alpha + 2 ramp sqrt(alpha S f / B) + S f / B

The laws are the formulas the plans use. Constants minimise the mean squared log error, so that a
small message counts as much as a large one; all are positive because their logarithms are fitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpucalc.formulas import calibration, comm, compute

RAMPS = (0.0, 0.25, 0.5, 0.75, 1.0)  # the values the catalogue's classes have
MIN_POINTS = 5  # fewer cannot show whether three or four constants describe them


@dataclass(frozen=True, slots=True)
class GemmPoint:
    """One product and its time."""

    flops: float
    bytes_moved: float
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class GemmFit:
    """Constants of a matmul; `error` is the mean absolute log error over `points` shapes."""

    flops_per_s: float
    bytes_per_s: float
    overhead_s: float
    p: float
    error: float
    points: int


@dataclass(frozen=True, slots=True)
class LinkFit:
    """Constants of a collective or copy; `error` is the mean absolute log error over `points` sizes."""

    alpha_s: float
    bus_bytes_per_s: float
    ramp: float
    error: float
    points: int


def fit_gemm(points: Sequence[GemmPoint]) -> GemmFit | None:
    """The four constants of the shapes, None when there are too few."""
    if len(points) < MIN_POINTS:
        return None
    smallest = min(point.elapsed_s for point in points)
    start = [
        math.log(max(point.flops / point.elapsed_s for point in points)),
        math.log(max(point.bytes_moved / point.elapsed_s for point in points)),
        math.log(smallest / 2),
        math.log(2.0),
    ]

    def errors(logs: Sequence[float]) -> list[float]:
        rate, bandwidth, overhead, p = (math.exp(value) for value in logs)
        return [
            math.log(
                compute.gemm_s(
                    flops=point.flops,
                    bytes_moved=point.bytes_moved,
                    peak_flops_per_s=rate,
                    mfu_max=1.0,
                    bandwidth_bytes_per_s=bandwidth,
                    hbm_efficiency=1.0,
                    p=p,
                    overhead_s=overhead,
                )
                / point.elapsed_s
            )
            for point in points
        ]

    def loss(logs: Sequence[float]) -> float:
        # Outside 0.5 to 8 the law no longer changes with p; a wall keeps the search from wandering off.
        if not math.log(0.5) <= logs[3] <= math.log(8.0) or max(map(abs, logs)) > 60:
            return math.inf
        return _mean_square(errors(logs))

    best = min((minimise(loss, [*start[:3], math.log(p)]) for p in (1.2, 2.0, 3.5)), key=loss)
    rate, bandwidth, overhead, p = (math.exp(value) for value in best)
    return GemmFit(rate, bandwidth, overhead, p, _mean_absolute(errors(best)), len(points))


def fit_link(
    points: Sequence[tuple[float, float]], *, bus_factor: float = 1.0, ramp: float | None = None
) -> LinkFit | None:
    """Latency and bandwidth of (bytes, seconds) pairs, None when there are too few.

    `ramp` holds the class's own; without it the catalogue's value that fits best is taken. A curve
    does not tell a free ramp from a lower bandwidth, so it is never fitted freely.
    """
    if len(points) < MIN_POINTS:
        return None
    fits = [_fit_link(points, bus_factor, value) for value in (RAMPS if ramp is None else (ramp,))]
    return min(fits, key=lambda found: found[0])[1]


def _fit_link(points: Sequence[tuple[float, float]], bus_factor: float, ramp: float) -> tuple[float, LinkFit]:
    alpha, slope = _line(points)
    smallest = min(seconds for _, seconds in points)
    # A slope or intercept that noise has driven below zero still needs a positive start.
    start = [
        math.log(alpha if alpha > 0 else smallest),
        math.log(1 / slope if slope > 0 else max(size / seconds for size, seconds in points)),
    ]

    def errors(logs: Sequence[float]) -> list[float]:
        return [
            math.log(
                comm.collective_s(
                    message_bytes=size,
                    ranks=2,
                    bus_factor=bus_factor,
                    alpha_s=math.exp(logs[0]),
                    ramp=ramp,
                    bus_bytes_per_s=math.exp(logs[1]) * bus_factor,
                )
                / seconds
            )
            for size, seconds in points
        ]

    def loss(logs: Sequence[float]) -> float:
        return math.inf if max(map(abs, logs)) > 60 else _mean_square(errors(logs))

    best = minimise(loss, start)
    found = LinkFit(
        math.exp(best[0]),
        math.exp(best[1]) * bus_factor,
        ramp,
        _mean_absolute(errors(best)),
        len(points),
    )
    return loss(best), found


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope, in s and s/byte."""
    rows = [(1 / seconds**2, size, seconds) for size, seconds in points]
    weight, x, y = sum(w for w, _, _ in rows), sum(w * a for w, a, _ in rows), sum(w * b for w, _, b in rows)
    slope = calibration.line_slope_s_per_byte(
        weight=weight,
        x_bytes=x,
        y_s=y,
        xx_bytes2=sum(w * a * a for w, a, _ in rows),
        xy_bytes_s=sum(w * a * b for w, a, b in rows),
    )
    return calibration.line_intercept_s(weight=weight, x_bytes=x, y_s=y, slope_s_per_byte=slope), slope


def minimise(
    loss: Callable[[Sequence[float]], float], start: Sequence[float], *, rounds: int = 600
) -> list[float]:
    """The point of least loss near a start (Nelder and Mead 1965): no derivatives, few dimensions."""
    size = len(start)
    simplex = [[v + (0.5 if k == corner else 0.0) for k, v in enumerate(start)] for corner in range(size + 1)]
    scored = sorted(((loss(point), point) for point in simplex), key=lambda item: item[0])
    for _ in range(rounds):
        if scored[-1][0] - scored[0][0] < 1e-12 and math.isfinite(scored[-1][0]):
            break
        worst = scored[-1]
        centre = [sum(point[k] for _, point in scored[:-1]) / size for k in range(size)]

        def along(factor: float, centre: list[float] = centre, worst: list[float] = worst[1]) -> list[float]:
            return [c + factor * (w - c) for c, w in zip(centre, worst, strict=True)]

        tried = along(-1.0)
        value = loss(tried)
        if value < scored[0][0]:
            farther = along(-2.0)
            beyond = loss(farther)
            scored[-1] = (beyond, farther) if beyond < value else (value, tried)
        elif value < scored[-2][0]:
            scored[-1] = (value, tried)
        else:
            nearer = along(-0.5 if value < worst[0] else 0.5)
            inside = loss(nearer)
            if inside < min(value, worst[0]):
                scored[-1] = (inside, nearer)
            else:
                first = scored[0][1]
                shrunk = [[f + (v - f) / 2 for f, v in zip(first, p, strict=True)] for _, p in scored[1:]]
                scored[1:] = [(loss(point), point) for point in shrunk]
        scored.sort(key=lambda item: item[0])
    return scored[0][1]


def _mean_square(values: Sequence[float]) -> float:
    return sum(value * value for value in values) / len(values)


def _mean_absolute(values: Sequence[float]) -> float:
    return sum(map(abs, values)) / len(values)
