"""Which shapes and sizes a probe measures."""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, int, int]  # rows, inputs, outputs


@dataclass(frozen=True, slots=True)
class Sweep:
    """One plan of measurement. Times in seconds, sizes in bytes."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    copy_bytes: tuple[int, ...]
    message_bytes: tuple[int, ...]
    target_s: float  # how long one sample lasts at least, where a step is shorter
    samples: int
    longest_s: float  # a step slower than this is passed over


def _powers(first: int, last: int, step: int = 1) -> tuple[int, ...]:
    return tuple(2**power for power in range(first, last + 1, step))


def _between(first: int, last: int) -> tuple[int, ...]:
    """Powers of two and the sizes half-way: twice the points halve the variance of the constants."""
    return tuple(size for power in _powers(first, last) for size in (power, power * 3 // 2))[:-1]


_LAYERS = ((4096, 4096), (8192, 8192), (4096, 14336), (28672, 8192))
# Squares show the rate, few rows the bandwidth, small ones the overhead, the rest where they meet.
GPU_SHAPES: tuple[Shape, ...] = (
    *((side, side, side) for side in _powers(6, 14)),
    *((rows, *layer) for rows in (1, 16, 64, 128, 256, 512, 1024, 4096) for layer in _LAYERS),
    *((rows, side, side) for rows in (1, 8, 64, 256) for side in (256, 512, 1024)),
)
CPU_SHAPES: tuple[Shape, ...] = (
    *((side, side, side) for side in _powers(5, 10)),
    *((rows, side, side) for rows in (1, 4, 16, 64) for side in (1024, 2048)),
)


def sweep(device: str, *, quick: bool) -> Sweep:
    """What to measure on `cpu` or `cuda`; quick ones end within a minute on two cores."""
    if device == "cpu":
        return Sweep(
            shapes=CPU_SHAPES if quick else (*CPU_SHAPES, (2048, 2048, 2048), (1, 4096, 4096)),
            dtypes=("fp32",) if quick else ("fp32", "bf16"),
            copy_bytes=_powers(12, 26, 2),
            message_bytes=_powers(10, 24, 2) if quick else _between(10, 28),
            target_s=0.01 if quick else 0.05,
            samples=5 if quick else 9,
            longest_s=0.5 if quick else 2.0,
        )
    return Sweep(
        shapes=GPU_SHAPES[::2] if quick else GPU_SHAPES,
        dtypes=("bf16", "tf32") if quick else ("fp32", "tf32", "fp16", "bf16", "fp8"),
        copy_bytes=_powers(16, 28, 2) if quick else _powers(12, 30),
        message_bytes=_powers(10, 28, 2) if quick else _between(10, 30),
        target_s=0.005 if quick else 0.05,
        samples=5 if quick else 9,
        longest_s=0.5 if quick else 2.0,
    )
