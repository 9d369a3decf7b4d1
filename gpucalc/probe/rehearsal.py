"""The three stages on one rank: alone, together, soak. Every rank takes the same steps.

What is yielded on the first rank is the record; the others' part comes to it by gathering.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from gpucalc.formulas import calibration
from gpucalc.probe.comm import Group
from gpucalc.probe.device import Device, summary
from gpucalc.probe.lag import HOPELESS, LEAST_S, RUNNING, SLOW, Streak, slowest
from gpucalc.probe.training import Peak, Trainer, finite

Point = dict[str, Any]
STEPS, QUICK_STEPS, WARM_UP = 10, 4, 2
_WINDOWS = 20  # a soak is logged so often at least,
_LONGEST_S = 60.0  # and every so many seconds
_LOOKS = 10  # at who lags within the time a rank may take to answer
_SIDE = {"cuda": 4096, "cpu": 256}  # of the matrices in it
_PACE_S = 0.03  # of work each rank does by itself for that


def alone(device: Device, settings: Mapping[str, Any], say: Callable[[str], None], steps: int) -> Point:
    """One card by itself: loss, peak memory and time of training steps."""
    say("one card: making the model")
    with Peak(device) as most:
        trainer = Trainer(device, settings, partial(say, "one card: a training step"))
        most.restart()
        losses = [trainer.step() for _ in range(WARM_UP)]
    times, more = _timed(trainer, steps)  # counting tensors would take longer than a small step
    losses += more
    taken = summary(times, 1)
    found = {
        "kind": "stage",
        "stage": "alone",
        "steps": len(losses),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "finite": finite(losses),
        "peak_allocated_bytes": most.allocated,
        "peak_reserved_bytes": most.reserved,
        "step_s": taken.median_s,
        "spread": taken.spread,
        "tokens_per_s": calibration.achieved_tokens_per_s(
            tokens=trainer.tokens_per_step, elapsed_s=taken.median_s
        ),
        **device.conditions(),
    }
    del trainer
    _freed(device)
    return found


def together(
    group: Group, settings: Mapping[str, Any], own: Mapping[str, Any], steps: int
) -> Iterator[Point]:
    """All cards: the step with gradient sums, the same without, and the collectives by themselves."""
    device = group.device
    apart = gathered(group, {key: own[key] for key in ("finite", "step_s", "peak_allocated_bytes")})
    yield {"kind": "cards", "stage": "alone", "ranks": apart}
    group.say("all cards: making the model")
    with Peak(device) as most:
        trainer = Trainer(device, settings, partial(group.say, "all cards: a training step"))
        most.restart()
        losses = [trainer.step() for _ in range(WARM_UP)]
    times, more = _timed(trainer, steps)
    losses += more
    allocated, reserved = most.allocated, most.reserved
    bare = None
    if trainer.strategy == "ddp":
        trainer.step(synchronise=False)
        bare, _ = _timed(trainer, steps, synchronise=False)
    exchanges = _exchanges(trainer, group, steps)
    here = {
        "finite": finite(losses),
        "step_s": summary(times, 1).median_s,
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": reserved,
        "bare_s": summary(bare, 1).median_s if bare else None,
        "sync_s": summary(exchanges, 1).median_s,
    }
    ranks = gathered(group, here)
    step_s = max(one["step_s"] for one in ranks)
    tokens = trainer.tokens_per_step * group.ranks
    exposed = None if bare is None else float(max(0.0, step_s - max(one["bare_s"] for one in ranks)))
    yield {
        "kind": "stage",
        "stage": "together",
        "steps": len(losses),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "finite": all(one["finite"] for one in ranks),
        "peak_allocated_bytes": max(one["peak_allocated_bytes"] for one in ranks),
        "peak_reserved_bytes": max(one["peak_reserved_bytes"] or 0 for one in ranks) or None,
        "step_s": step_s,
        "spread": summary(times, 1).spread,
        "tokens_per_s": calibration.achieved_tokens_per_s(tokens=tokens, elapsed_s=step_s),
        "sync_s": max(one["sync_s"] for one in ranks),
        "sync_exposed_s": exposed,
        "sync_share": None
        if exposed is None
        else float(calibration.exposed_share(exposed_s=exposed, step_s=step_s)),
        "strategy": trainer.strategy,
        **device.conditions(),
    }
    yield {"kind": "cards", "stage": "together", "ranks": ranks}
    del trainer
    _freed(device)


@dataclass(frozen=True, slots=True)
class Span:
    """How long a soak is to be, and what earlier runs have done of it."""

    length_s: float
    done_s: float
    windows: int
    timeout_s: float  # within which a rank that lags is to be named


def soak(group: Group, settings: Mapping[str, Any], span: Span) -> Iterator[Point]:
    """Training steps until the time is over; a line a window, and looks at who lags in between."""
    device = group.device
    group.say("soak: making the model")
    number = 0

    def beat() -> None:
        group.say(f"soak, step {number}")

    trainer = Trainer(device, settings, beat)
    for _ in range(WARM_UP):
        trainer.step()
    work, streak = _Work(group), Streak()
    window_s = min(_LONGEST_S, span.length_s / _WINDOWS)
    look_s = min(window_s, span.timeout_s / _LOOKS)
    start, window = monotonic(), span.windows
    over, lagged = span.done_s, []
    while over < span.length_s:
        steps, spent, losses = 0, 0.0, []
        ends = min(span.length_s, over + window_s)
        while over < ends:
            pace = work.timed(group.say, number)
            begun = perf_counter()
            while True:
                number, steps = number + 1, steps + 1
                losses.append(trainer.step())
                if _any(group, perf_counter() - begun >= min(look_s, ends - over)):
                    break  # all ranks after the same step
            device.synchronize()
            spent += perf_counter() - begun
            looks = gathered(group, {"pace_s": pace, "since_s": monotonic() - start})
            over = span.done_s + looks[0]["since_s"]
            rank, times = slowest([one["pace_s"] for one in looks], LEAST_S[device.kind])
            if times > SLOW:
                lagged.append(rank)
            if streak.add(rank, times, HOPELESS):
                why = f"rank {rank} is slow: {times:.1f} times the others' time for the same work"
                yield {"kind": "failure", "why": f"{why} {RUNNING} times in a row during soak, step {number}"}
                return
        window += 1
        here = {"loss": losses[-1], "finite": finite(losses), "pace_s": pace, **memory(device)}
        if device.watch is not None:
            here |= device.watch.health()
            here["not_read"] = dict(device.watch.not_read)
        ranks = gathered(group, {**here, "spent_s": spent})
        spent = max(one.pop("spent_s") for one in ranks)
        tokens = trainer.tokens_per_step * group.ranks * steps
        yield {
            "kind": "window",
            "window": window,
            "elapsed_s": over,
            "steps": steps,
            "step_s": spent / steps,
            "tokens_per_s": calibration.achieved_tokens_per_s(tokens=tokens, elapsed_s=spent),
            "slow_ranks": sorted(set(lagged)),
            "ranks": ranks,
        }
        lagged = []


def _any(group: Group, mine: bool) -> bool:
    """Whether it is so on any rank; the same answer on every one."""
    if group.ranks == 1:
        return mine
    torch = group.device.torch
    flag = torch.tensor([1.0 if mine else 0.0], device=group.device.place)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag.item())


def gathered(group: Group, own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What every rank has to say, by rank, on every rank."""
    if group.ranks == 1:
        return [{"rank": 0, **own}]
    found: list[Any] = [None] * group.ranks
    group.device.torch.distributed.all_gather_object(found, {"rank": group.rank, **own})
    return found


def memory(device: Device) -> dict[str, Any]:
    """Bytes torch's allocator has handed out and holds; of a CPU what the process has."""
    if device.kind == "cuda":
        stats = device.torch.cuda.memory_stats()
        allocated = stats["allocated_bytes.all.current"]
        reserved = stats["reserved_bytes.all.current"]
        return {
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "fragmentation": float(calibration.idle_share(reserved_bytes=reserved, allocated_bytes=allocated))
            if reserved
            else 0.0,
            "inactive_split_bytes": stats["inactive_split_bytes.all.current"],
            "allocator_retries": stats["num_alloc_retries"],
        }
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmRSS:"):
                return {"process_bytes": int(line.split()[1]) * 1024}
    except (OSError, ValueError):
        pass
    return {}


class _Work:
    """A fixed product that each rank times by itself: whose takes longest, lags."""

    def __init__(self, group: Group) -> None:
        self.device = device = group.device
        torch, side = device.torch, _SIDE[device.kind]
        self.left = torch.randn(side, side, device=device.place)
        self.right = torch.randn(side, side, device=device.place)
        self.times = 1
        self._run()
        wanted = max(1, round(_PACE_S / max(self._run(), 1e-6)))
        self.times = max(one["times"] for one in gathered(group, {"times": wanted}))

    def timed(self, say: Callable[[str], None], step: int) -> float:
        """Seconds of the work, with what this rank does before it."""
        start = perf_counter()
        say(f"soak, step {step}, by itself")
        self._run()
        return perf_counter() - start

    def _run(self) -> float:
        start = perf_counter()
        for _ in range(self.times):
            self.device.torch.mm(self.left, self.right)
        self.device.synchronize()
        return perf_counter() - start


def _timed(trainer: Trainer, steps: int, *, synchronise: bool = True) -> tuple[list[float], list[float]]:
    taken = [trainer.timed_step(synchronise=synchronise) for _ in range(steps)]
    return [seconds for seconds, _ in taken], [loss for _, loss in taken]


def _exchanges(trainer: Trainer, group: Group, steps: int) -> list[float]:
    """Seconds of one step's collectives without computation."""
    trainer.communicate()
    times = []
    for _ in range(steps):
        gathered(group, {})  # all start together
        group.device.synchronize()
        start = perf_counter()
        trainer.communicate()
        group.device.synchronize()
        times.append(perf_counter() - start)
    return times


def _freed(device: Device) -> None:
    gc.collect()  # a model and its hooks hold each other
    if device.kind == "cuda":
        device.torch.cuda.empty_cache()
