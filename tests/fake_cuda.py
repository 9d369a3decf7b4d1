"""torch as it looks with one CUDA card, on a machine without: what is asked of torch.cuda is answered here,
and tensors lie in the host's memory. Time is the fake's own: each event reads a clock that work moves on.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

GIB = 2**30
STEP_S = 1e-3  # of a graph's replay; reading the clock takes half of it


class FakeCuda:
    """torch.cuda. `log` holds the names of what was called; `peak` and `held` are bytes."""

    def __init__(self, cards: int = 2) -> None:
        self.cards, self.now = cards, 0.0
        self.log: list[str] = []
        self.held, self.peak = 10 * GIB, 12 * GIB
        self.nccl = SimpleNamespace(version=lambda: (2, 27, 3))

    def is_available(self) -> bool:
        return self.cards > 0

    def device_count(self) -> int:
        return self.cards

    def set_device(self, index: int) -> None:
        assert 0 <= index < self.cards
        self.log.append(f"set_device {index}")

    def get_device_properties(self, index: int) -> Any:
        assert 0 <= index < self.cards
        name, uuid = "NVIDIA H100 80GB HBM3", f"{index:08x}-aa"
        return SimpleNamespace(name=name, L2_cache_size=1024, uuid=uuid)

    def can_device_access_peer(self, one: int, other: int) -> bool:
        assert one != other
        return True

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def empty_cache(self) -> None:
        self.log.append("empty_cache")

    def reset_peak_memory_stats(self) -> None:
        self.log.append("reset")

    def max_memory_allocated(self) -> int:
        return self.held

    def max_memory_reserved(self) -> int:
        return self.peak

    def memory_stats(self) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.held,
            "reserved_bytes.all.current": self.peak,
            "inactive_split_bytes.all.current": GIB,
            "num_alloc_retries": 0,
        }

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing  # elapsed_time needs it
        cuda = self

        class Event:
            at: float | None = None

            def record(self) -> None:
                cuda.now += STEP_S / 2
                self.at = cuda.now

            def synchronize(self) -> None:
                assert self.at is not None

            def elapsed_time(self, other: Any) -> float:
                assert self.at is not None
                return float(other.at - self.at) * 1e3  # milliseconds, as torch has it

        return Event()

    def Stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda _: self.log.append("wait"))

    current_stream = Stream

    @contextmanager
    def stream(self, _: Any) -> Any:
        yield

    def CUDAGraph(self) -> Any:
        def replay() -> None:
            self.now += STEP_S

        return SimpleNamespace(replay=replay)

    @contextmanager
    def graph(self, _: Any) -> Any:
        self.log.append("captured")
        yield


class FakeTorch:
    """The torch module with another `cuda`, whose cards are the host."""

    def __init__(self, torch: Any, cuda: FakeCuda) -> None:
        self._torch, self.cuda = torch, cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def device(self, kind: str, index: int = 0) -> Any:
        return self._torch.device("cpu", index if kind == "cuda" else None)

    def empty(self, *shape: Any, pin_memory: bool = False, device: Any = None, **more: Any) -> Any:
        assert not (pin_memory and device is not None)
        return self._torch.empty(*shape, device=device and self._torch.device("cpu"), **more)

    def autocast(self, _: str, dtype: Any) -> Any:
        return self._torch.autocast("cpu", dtype=dtype)
