"""One measuring process: `python -m gpucalc.probe.worker CONFIG RANK`, started by `launch` or in place.

It writes what it measures as JSON lines while it goes, so that nothing is lost when a rank is, and
before every piece of work what it is about to do, so that a rank that stops can be named.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from gpucalc.probe import comm, copy, matmul, rehearsal
from gpucalc.probe.device import Device
from gpucalc.probe.inject import Fault
from gpucalc.probe.sweeps import sweep

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Config:
    """What the processes of one start share; `folder` holds their files."""

    device: str
    tasks: tuple[str, ...]
    quick: bool
    ranks: int
    rendezvous: str
    timeout_s: float
    folder: str
    inject: str | None = None
    stages: dict[str, Any] | None = None  # what is trained, and what is done already

    def write(self) -> Path:
        """The configuration as a file in its folder."""
        path = Path(self.folder) / "config.json"
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path


def points(
    config: Config, rank: int, local_rank: int, say: Callable[[str], None] = lambda _: None
) -> Iterator[dict[str, Any]]:
    """Everything one rank measures; the first point says with which software on which device."""
    if config.inject is not None:
        say = Fault.parse(config.inject, config.ranks).into(say, rank)
    device = Device(config.device, local_rank)
    plan = sweep(config.device, quick=config.quick)
    yield {"kind": "software", **_software(device), "busy": device.busy()}
    for task, module in (("matmul", matmul), ("copy", copy)):
        if task in config.tasks:
            device.beat = partial(say, task)
            yield from module.measure(device, plan)
    device.beat = lambda: None  # collectives and training steps say for themselves what they do
    if config.ranks > 1 and config.device == "cpu":
        device.torch.set_num_threads(1)  # ranks on one CPU would only get in each other's way
    if "stages" in config.tasks:
        yield from _stages(config, device, rank, say)
    if "comm" in config.tasks:
        with _met(config, device, rank, say) as group:
            for one in rehearsal.gathered(group, {"busy": device.busy()}):
                if one["busy"] is not None and config.device == "cuda":  # all ranks share a CPU's load
                    yield {"kind": "busy", "why": f"rank {one['rank']}: {one['busy']}"}
            yield from comm.measure(group, plan)


def _stages(
    config: Config, device: Device, rank: int, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """The stages that are still to be done; one card needs no meeting of ranks."""
    asked = config.stages
    assert asked is not None
    steps = rehearsal.QUICK_STEPS if config.quick else rehearsal.STEPS
    own = asked["done"].get("alone")
    if own is None:
        own = rehearsal.alone(device, asked["alone"], say, steps)
        yield own
    with _met(config, device, rank, say) as group:
        # The record lies with the first rank, which knows what is done already.
        known = {"done": list(asked["done"]), "over_s": asked["done_s"], "windows": asked["windows"]}
        first = rehearsal.gathered(group, known)[0]
        if asked["together"] is not None and "together" not in first["done"]:
            yield from rehearsal.together(group, asked["together"], own, steps)
        if asked["soak_s"] > first["over_s"]:
            last = asked["together"] or asked["alone"]
            span = rehearsal.Span(asked["soak_s"], first["over_s"], first["windows"], config.timeout_s)
            yield from rehearsal.soak(group, last, span)


@contextmanager
def _met(config: Config, device: Device, rank: int, say: Callable[[str], None]) -> Iterator[comm.Group]:
    """The ranks as one process group, left again in good order; a single rank is one by itself."""
    group = comm.Group(device, rank, config.ranks, say)
    if config.ranks == 1:
        yield group
        return
    distributed = device.torch.distributed
    say("the meeting of the ranks")
    distributed.init_process_group(
        "nccl" if config.device == "cuda" else "gloo",
        init_method=config.rendezvous,
        rank=rank,
        world_size=config.ranks,
        timeout=timedelta(seconds=config.timeout_s),
        **({"device_id": device.place} if config.device == "cuda" else {}),
    )
    yield group
    distributed.destroy_process_group()  # after a failure it could wait for ranks that are gone


def _software(device: Device) -> dict[str, Any]:
    torch = device.torch
    found: dict[str, Any] = {"torch": torch.__version__, "device": device.kind, "threads": None}
    if device.kind == "cpu":
        return {**found, "name": cpu_name(), "threads": torch.get_num_threads(), "backend": "gloo"}
    version = torch.cuda.nccl.version()
    return {
        **found,
        "name": device.properties.name,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, version)) if isinstance(version, tuple) else str(version),
        "backend": "nccl",
    }


def cpu_name() -> str:
    """The processor's own name for itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return "CPU"


def _die_with_parent() -> None:
    """Have the kernel end this process with the one that started it, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Measure as one rank; exit 1 with the reason in the rank's file when it cannot."""
    parent = os.getppid()
    _die_with_parent()
    if os.getppid() != parent:  # it ended before the kernel was told
        return 1
    config = Config(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    rank = int(arguments[1])
    folder = Path(config.folder)
    progress = folder / f"rank-{rank}"
    count = 0

    def say(what: str) -> None:
        nonlocal count
        count += 1
        fresh = folder / f"rank-{rank}.new"
        fresh.write_text(json.dumps([count, what]), encoding="utf-8")
        fresh.replace(progress)  # a reader sees the old or the new, never half

    try:
        with (folder / "points").open("a", encoding="utf-8") as out:
            for point in points(config, rank, rank, say):
                if rank == 0:
                    out.write(json.dumps(point) + "\n")
                    out.flush()
                if point["kind"] == "software":
                    say("the first measurement")
    except Exception as error:
        (folder / f"rank-{rank}.error").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    sys.stdout = sys.stderr
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a library's thread that waits for a lost peer must not keep the process
