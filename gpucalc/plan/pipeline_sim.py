"""A pipeline step, event by event: what the stages wait when they are not alike.

The closed form (`formulas.pipeline`) is exact for stages of equal time. An embedding, a loss over a
large vocabulary, layers that do not divide evenly or two kinds of layer make stages unequal; then
the slowest one sets the pace only once the pipeline has filled. Every rank runs its operations in
the fixed order of its schedule, each as soon as its input is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A schedule longer than this is run for its first rounds (pp micro-batches each), from which on the slowest
# rank is taken to be busy all the time. Chunks that differ by a quarter leave an error of up to 1 %.
MOST_OPERATIONS = 2000
FEWEST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Simulation:
    """Seconds of a step's forward and backward passes, and of each rank's own work in them."""

    total_s: float
    busy_s: tuple[float, ...]

    @property
    def slowest_s(self) -> float:
        """Work of the busiest rank."""
        return max(self.busy_s)

    @property
    def bubble_s(self) -> float:
        """What the busiest rank waits."""
        return self.total_s - self.slowest_s


def simulate(
    forward_s: Sequence[float], backward_s: Sequence[float], *, pp: int, vpp: int, micro_batches: int
) -> Simulation:
    """One step of pp ranks of vpp chunks; chunk c runs on rank c mod pp.

    `forward_s` and `backward_s` are seconds of one micro-batch by chunk, in the order of the layers.
    1F1B for vpp = 1, interleaved as Megatron orders it otherwise.
    """
    each = [sum(forward_s[r::pp]) + sum(backward_s[r::pp]) for r in range(pp)]
    rounds = max(FEWEST_ROUNDS, MOST_OPERATIONS // (2 * pp * pp * vpp))
    run = min(micro_batches, rounds * pp + micro_batches % pp)
    total = _run(_orders(forward_s, backward_s, pp, run))
    return Simulation(
        total + (micro_batches - run) * max(each),
        tuple(micro_batches * one for one in each),
    )


# An operation: its own place among all, the place of the one it waits for (-1: none), its seconds.
Operation = tuple[int, int, float]


def _orders(
    forward_s: Sequence[float], backward_s: Sequence[float], pp: int, micro_batches: int
) -> list[list[Operation]]:
    """The operations of every rank in the order it runs them."""
    chunks = len(forward_s)
    vpp = chunks // pp
    last = chunks - 1
    back_at = chunks * micro_batches  # backward operations are numbered behind the forward ones
    if vpp == 1:
        slots = [(0, micro_batch) for micro_batch in range(micro_batches)]
    else:  # pp micro-batches through one chunk, then through the next
        slots = [
            (local, micro_batch)
            for first in range(0, micro_batches, pp)
            for local in range(vpp)
            for micro_batch in range(first, min(first + pp, micro_batches))
        ]
    orders = []
    for rank in range(pp):
        ahead: list[Operation] = []
        back: list[Operation] = []
        for local, micro_batch in slots:
            chunk = local * pp + rank
            place = chunk * micro_batches + micro_batch
            ahead.append((place, place - micro_batches if chunk else -1, forward_s[chunk]))
            chunk = (vpp - 1 - local) * pp + rank
            place = chunk * micro_batches + micro_batch
            waits = back_at + place + micro_batches if chunk < last else place
            back.append((back_at + place, waits, backward_s[chunk]))
        warm_up = 2 * (pp - rank - 1) + (vpp - 1) * pp if vpp > 1 else pp - rank - 1
        warm_up = min(warm_up, len(ahead))
        order = ahead[:warm_up]
        for pair in zip(ahead[warm_up:], back, strict=False):
            order += pair
        orders.append(order + back[len(ahead) - warm_up :])
    return orders


def _run(orders: list[list[Operation]]) -> float:
    """The time at which the last operation is done."""
    left = sum(len(order) for order in orders)
    # Two places more: what a rank that is through waits for, and an operation without a predecessor.
    done: list[float | None] = [None] * (left + 1)
    done.append(0.0)
    clock = [0.0] * len(orders)
    waiting = [iter(order) for order in orders]
    now = [next(order) for order in waiting]
    while left:
        before = left
        for rank, order in enumerate(waiting):
            if not left:
                break
            place, waits, spent = now[rank]
            at = clock[rank]
            while (ready := done[waits]) is not None:
                at = (ready if ready > at else at) + spent
                done[place] = at
                left -= 1
                following = next(order, None)
                if following is None:
                    now[rank] = (-2, -2, 0.0)
                    break
                place, waits, spent = now[rank] = following
            clock[rank] = at
        assert left < before, "a schedule waits for itself"
    return max(clock)
