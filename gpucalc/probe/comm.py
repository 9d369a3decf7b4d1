"""Collectives over all ranks: time, bus bandwidth as nccl-tests define it, and whether results are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from gpucalc.formulas import calibration, comm
from gpucalc.probe.device import Device, doubtful, summary
from gpucalc.probe.lag import LATE_S, RUNNING, Streak, latest
from gpucalc.probe.sweeps import Sweep

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "send_recv")
_ITEM = 4  # fp32
_MOST_STEPS = 50


def bus_factor(op: str, ranks: int) -> float:
    """Bytes over the busiest link per byte of the message, as nccl-tests count them."""
    if op == "send_recv":
        return 1.0
    rule = comm.all_reduce_bus_factor if op == "all_reduce" else comm.gather_bus_factor
    return float(rule(ranks=ranks))


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of a started process group, and the device of this one."""

    device: Device
    rank: int
    ranks: int
    say: Callable[[str], None]  # told what is about to run, so that a rank that stops can be named
    behind: Streak = field(default_factory=Streak)  # how often one rank came late


class _Late(Exception):
    """One rank keeps the others waiting: what is measured is its delay."""


def measure(group: Group, plan: Sweep) -> Iterator[dict[str, Any]]:
    """One point per operation and size, the same on every rank; one that says why where it ends early."""
    try:
        for op in OPERATIONS:
            for size in plan.message_bytes:
                yield _point(group, op, size, plan)
    except _Late as late:
        yield {"kind": "failure", "why": str(late)}


def _point(group: Group, op: str, wanted: int, plan: Sweep) -> dict[str, Any]:
    """The slowest rank's time. Every rank takes the same steps, or they would wait for each other."""
    device = group.device
    each = max(1, wanted // _ITEM // group.ranks)  # elements of one rank's part
    size = each * group.ranks * _ITEM
    what = f"{op} of {size} bytes"
    group.say(what)
    run, right = _operation(group, op, each)
    run()
    device.synchronize()
    correct = _agreed(group, right())
    once = _slowest(group, [device.timed(run)])[0]
    steps = min(_MOST_STEPS, max(1, round(plan.target_s / max(once, 1e-7))))

    def several() -> None:
        for _ in range(steps):
            run()

    times = []
    for number in range(plan.samples):
        group.say(f"{what}, sample {number + 1} of {plan.samples}")
        _meet(group, what)
        times.append(device.timed(several))
    taken = summary(_slowest(group, times), steps)
    state = device.conditions()
    rate = (
        calibration.achieved_bus_bytes_per_s(
            message_bytes=size, bus_factor=bus_factor(op, group.ranks), elapsed_s=taken.median_s
        )
        if taken.median_s
        else 0.0
    )
    return {
        "kind": "comm",
        "op": op,
        "ranks": group.ranks,
        "bytes": size,
        "seconds": taken.median_s,
        "busbw_gb_per_s": rate / 1e9,
        "correct": correct,
        "spread": taken.spread,
        **state,
        "doubts": [*taken.doubts(), *([] if correct else ["wrong result"]), *doubtful(state)],
    }


def _operation(group: Group, op: str, each: int) -> tuple[Callable[[], None], Callable[[], bool]]:
    """The operation on a buffer of `each` elements per rank, and a check of its first result.

    Every element tells its rank and place in small whole numbers, which fp32 adds exactly.
    """
    torch, ranks, rank = group.device.torch, group.ranks, group.rank
    dist = torch.distributed
    cpu_or_gpu = group.device.place
    places = torch.arange(each * ranks, device=cpu_or_gpu, dtype=torch.float32) % 7 + 1
    everyone = ranks * (ranks + 1) // 2
    own = slice(rank * each, (rank + 1) * each)
    if op == "all_reduce":
        # In place, as nccl-tests and training do; sums of later runs overflow, which costs no time.
        buffer = places * (rank + 1)
        return (lambda: dist.all_reduce(buffer)), lambda: bool(torch.equal(buffer, places * everyone))
    if op == "all_gather":
        part, whole = (places * (rank + 1))[own].clone(), torch.zeros_like(places)
        expected = torch.cat([places[r * each : (r + 1) * each] * (r + 1) for r in range(ranks)])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return (lambda: gather(whole, part)), lambda: bool(torch.equal(whole, expected))
    if op == "reduce_scatter":
        source, part = places * (rank + 1), torch.zeros(each, device=cpu_or_gpu)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return (lambda: scatter(part, source)), lambda: bool(torch.equal(part, places[own] * everyone))
    if op == "alltoall":
        source, target = places * (rank + 1), torch.zeros_like(places)
        expected = torch.cat([places[own] * (r + 1) for r in range(ranks)])
        return (lambda: dist.all_to_all_single(target, source)), lambda: bool(torch.equal(target, expected))
    source, target = places * (rank + 1), torch.zeros_like(places)
    before, after = (rank - 1) % ranks, (rank + 1) % ranks

    def ring() -> None:
        pair = [dist.P2POp(dist.isend, source, after), dist.P2POp(dist.irecv, target, before)]
        for request in dist.batch_isend_irecv(pair):
            request.wait()

    return ring, lambda: bool(torch.equal(target, places * (before + 1)))


def _meet(group: Group, what: str) -> None:
    """All start together. Raises _Late on every rank when one keeps coming after the others."""
    torch, device = group.device.torch, group.device
    device.synchronize()
    start = perf_counter()
    _slowest(group, [0.0])
    device.synchronize()
    waits = torch.zeros(group.ranks, dtype=torch.float64, device=device.place)
    waits[group.rank] = perf_counter() - start
    torch.distributed.all_reduce(waits)
    rank, late_s = latest([float(value) for value in waits.tolist()])
    if group.behind.add(rank, late_s, LATE_S):
        raise _Late(
            f"rank {rank} is slow: {late_s:.1f} s after the others {RUNNING} times in a row during {what}"
        )
    device.synchronize()


def _slowest(group: Group, times: list[float]) -> list[float]:
    """The longest of the ranks' times, one by one."""
    torch = group.device.torch
    shared = torch.tensor(times, dtype=torch.float64, device=group.device.place)
    torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
    return [float(value) for value in shared.tolist()]


def _agreed(group: Group, right: bool) -> bool:
    """Whether the result was right on every rank."""
    torch = group.device.torch
    shared = torch.tensor([1.0 if right else 0.0], device=group.device.place)
    torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MIN)
    return bool(shared.item())
