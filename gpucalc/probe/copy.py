"""Copies: inside the device's memory, to and from the host, and to another GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gpucalc.formulas import calibration
from gpucalc.probe.device import Device, doubtful, sample
from gpucalc.probe.sweeps import Sweep

PASSES = {"device": 2}  # inside one memory each byte is read and written; a link carries it once


def measure(device: Device, plan: Sweep) -> Iterator[dict[str, Any]]:
    """One point per direction and size."""
    for direction in _directions(device):
        for size in plan.copy_bytes:
            try:
                step = _step(device, direction, size)
                taken = sample(device, step, target_s=plan.target_s, samples=plan.samples)
            except RuntimeError as error:
                what = f"copy {direction} of {size} bytes"
                yield {"kind": "skipped", "what": what, "why": str(error).split("\n")[0]}
                break
            state = device.conditions()
            rate = (
                calibration.achieved_bus_bytes_per_s(
                    message_bytes=size, bus_factor=PASSES.get(direction, 1), elapsed_s=taken.median_s
                )
                if taken.median_s
                else 0.0
            )
            yield {
                "kind": "copy",
                "direction": direction,
                "bytes": size,
                "seconds": taken.median_s,
                "gb_per_s": rate / 1e9,
                "spread": taken.spread,
                **({"peer_access": _peer_access(device)} if direction == "peer" else {}),
                **state,
                "doubts": [*taken.doubts(), *doubtful(state)],
            }


def _directions(device: Device) -> tuple[str, ...]:
    if device.kind == "cpu":
        return ("device",)
    peer = ("peer",) if device.torch.cuda.device_count() > 1 else ()
    return ("device", "host_to_device", "device_to_host", *peer)


def _other(device: Device) -> int:
    """The neighbour a card copies to."""
    return int((device.place.index + 1) % device.torch.cuda.device_count())


def _peer_access(device: Device) -> bool:
    """Whether the copy goes straight to the neighbour; else it passes through the host."""
    return bool(device.torch.cuda.can_device_access_peer(device.place.index, _other(device)))


def _step(device: Device, direction: str, size: int) -> Callable[[int], None]:
    torch = device.torch
    here = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device.place)
    if direction == "device":
        there = torch.empty_like(here)
    elif direction == "peer":
        there = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", _other(device)))
    else:
        there = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    source, target = (there, here) if direction == "host_to_device" else (here, there)

    def step(_: int) -> None:
        target.copy_(source, non_blocking=True)

    return step
