"""A device behind one face: make tensors, run steps, take their time. torch is imported only here.

The CPU is measured by the same code as a GPU, so that tests need none; its figures are labelled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from time import perf_counter
from typing import Any

from gpucalc.errors import CannotMeasure
from gpucalc.formulas import calibration
from gpucalc.probe.nvml import INSTEAD, library, read
from gpucalc.probe.watch import Watch

SPREAD = 0.3  # a middle half of the samples wider than this share of the median is not trusted
BUSY_LOAD = 0.5  # load average per core above which a CPU has other work
# A power cap is how current GPUs run flat out; these are not.
DOUBTFUL_THROTTLES = {
    *("hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "power brake")
}
_MOST_STEPS = 2000  # of one sample; a graph of more takes longer to record than to measure
_CPU_CACHE_BYTES = 64 * 2**20  # assumed: last-level caches of servers are about this large


def torch_module() -> Any:
    """torch. Raises CannotMeasure when it is not installed."""
    try:
        return import_module("torch")
    except ImportError:
        raise CannotMeasure(
            "torch is missing: pip install 'gpucalc[probe]'; without it --inventory works, and plans do"
        ) from None


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds of one step: the median, and the middle half's width over it."""

    median_s: float
    spread: float
    count: int

    def doubts(self) -> list[str]:
        """Why the time should not be trusted; empty when it may be."""
        if self.median_s <= 0:
            return ["no time measured"]
        return [f"spread {self.spread:.0%}"] if self.spread > SPREAD else []


class Device:
    """One CPU or CUDA device. Raises CannotMeasure when torch sees no such GPU."""

    def __init__(self, kind: str, index: int = 0) -> None:
        self.torch = torch_module()
        self.kind, self.index = kind, index
        if kind == "cuda":
            if not self.torch.cuda.is_available():
                raise CannotMeasure(f"torch sees no CUDA GPU; {INSTEAD}")
            self.torch.cuda.set_device(index)
            self.properties = self.torch.cuda.get_device_properties(index)
            self.place = self.torch.device("cuda", index)
            self.cache_bytes = 2 * int(self.properties.L2_cache_size)
        else:
            self.place = self.torch.device("cpu")
            self.cache_bytes = _CPU_CACHE_BYTES
        self.beat: Callable[[], None] = lambda: None  # called before each timed run: a sign of life
        self.watch = self._watched()

    def _watched(self) -> Watch | None:
        """NVML's account of a CUDA device, for clocks and health; none when it cannot be had."""
        if self.kind != "cuda":
            return None
        try:
            nvml = library()
            nvml.nvmlInit()
            found = read(nvml, lambda: nvml.nvmlDeviceGetHandleByUUID(f"GPU-{self.properties.uuid}"))
            return None if found.value is None else Watch(nvml, found.value)
        except Exception:  # a measurement without clocks is still one
            return None

    def synchronize(self) -> None:
        """Wait until everything handed over has run."""
        if self.kind == "cuda":
            self.torch.cuda.synchronize()

    def timed(self, run: Callable[[], None]) -> float:
        """Seconds of one run, by the device's own clock where it has one."""
        self.beat()
        if self.kind != "cuda":
            start = perf_counter()
            run()
            return perf_counter() - start
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def repeated(self, step: Callable[[int], None], times: int, *, graph: bool) -> Callable[[], None]:
        """One call that runs the step so many times. A CUDA graph takes the launching CPU's pace out."""
        if self.kind != "cuda" or not graph:

            def loop() -> None:
                for number in range(times):
                    step(number)

            return loop
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries set themselves up outside the graph
            step(0)
        torch.cuda.current_stream().wait_stream(side)
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            for number in range(times):
                step(number)
        return lambda: recorded.replay()

    def conditions(self) -> dict[str, Any]:
        """Clock and throttling right after a measurement; nothing for a CPU."""
        return self.watch.pace() if self.watch is not None else {}

    def busy(self) -> str | None:
        """What else runs on the device, before anything is measured."""
        if self.kind == "cpu":
            load, cores = os.getloadavg()[0], os.cpu_count() or 1
            return f"load {load:.1f} on {cores} cores" if load > BUSY_LOAD * cores else None
        if self.watch is None:
            return None
        nvml, handle = self.watch.nvml, self.watch.handle
        self.torch.empty(1, device=self.place)  # from here on this process is among those NVML lists
        others = read(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)).value or []
        pids = [process.pid for process in others]
        if os.getpid() in pids:
            pids.remove(os.getpid())
        elif unseen := [pid for pid in pids if not os.path.exists(f"/proc/{pid}")]:
            pids.remove(unseen[0])  # a container's process has another number outside, where NVML counts
        return f"processes {', '.join(map(str, pids))} run on it" if pids else None


def doubtful(conditions: dict[str, Any]) -> list[str]:
    """Throttling that makes a time worthless."""
    bad = [reason for reason in conditions.get("throttled_by", ()) if reason in DOUBTFUL_THROTTLES]
    return [f"throttled: {', '.join(bad)}"] if bad else []


def summary(times: Sequence[float], steps: int) -> Samples:
    """Samples of runs of so many steps each."""
    ordered = sorted(value / steps for value in times)
    middle, quarter = ordered[len(ordered) // 2], len(ordered) // 4
    spread = (
        calibration.sample_spread(upper_s=ordered[-1 - quarter], lower_s=ordered[quarter], median_s=middle)
        if middle > 0
        else 0.0
    )
    return Samples(middle, float(spread), len(ordered))


def sample(
    device: Device, step: Callable[[int], None], *, target_s: float, samples: int, graph: bool = False
) -> Samples:
    """Medians of runs that last about `target_s` each, after a warm-up."""
    for number in range(2):
        step(number)
    device.synchronize()
    once = device.timed(lambda: step(0))
    steps = min(_MOST_STEPS, max(1, round(target_s / max(once, 1e-7))))
    run = device.repeated(step, steps, graph=graph)
    run()
    device.synchronize()
    return summary([device.timed(run) for _ in range(samples)], steps)
