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
MOST_OPERATIONS = 4000
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
    total = _run(forward_s, backward_s, pp, [_order(r, pp, vpp, run) for r in range(pp)])
    return Simulation(
        total + (micro_batches - run) * max(each),
        tuple(micro_batches * one for one in each),
    )


# An operation: whether it goes forward, its chunk, its micro-batch.
Operation = tuple[bool, int, int]


def _order(rank: int, pp: int, vpp: int, micro_batches: int) -> list[Operation]:
    """The operations of a rank in the order it runs them."""
    slots = range(-(-micro_batches // pp) * pp * vpp) if vpp > 1 else range(micro_batches)
    ahead: list[Operation] = []
    back: list[Operation] = []
    for slot in slots:
        # Interleaved: pp micro-batches through one chunk, then through the next.
        local = slot % (pp * vpp) // pp if vpp > 1 else 0
        micro_batch = slot // (pp * vpp) * pp + slot % pp if vpp > 1 else slot
        if micro_batch < micro_batches:
            ahead.append((True, local * pp + rank, micro_batch))
            back.append((False, (vpp - 1 - local) * pp + rank, micro_batch))
    warm_up = 2 * (pp - rank - 1) + (vpp - 1) * pp if vpp > 1 else pp - rank - 1
    warm_up = min(warm_up, len(ahead))
    order = ahead[:warm_up]
    for one, other in zip(ahead[warm_up:], back, strict=False):
        order += [one, other]
    return order + back[len(ahead) - warm_up :]


def _run(
    forward_s: Sequence[float], backward_s: Sequence[float], pp: int, orders: list[list[Operation]]
) -> float:
    """The time at which the last operation is done."""
    last = len(forward_s) - 1
    done: dict[Operation, float] = {}
    clock = [0.0] * pp
    place = [0] * pp
    left = sum(len(order) for order in orders)
    while left:
        before = left
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                operation = order[place[rank]]
                ahead, chunk, micro_batch = operation
                if ahead:
                    ready = done.get((True, chunk - 1, micro_batch)) if chunk else 0.0
                else:
                    ready = done.get(
                        (False, chunk + 1, micro_batch) if chunk < last else (True, chunk, micro_batch)
                    )
                if ready is None:
                    break
                spent = forward_s[chunk] if ahead else backward_s[chunk]
                clock[rank] = done[operation] = max(clock[rank], ready) + spent
                place[rank] += 1
                left -= 1
        assert left < before, "a schedule waits for itself"
    return max(clock)
