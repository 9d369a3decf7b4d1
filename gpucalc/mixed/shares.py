"""Unlike cards that share the batch: the same for every rank, or a share for each kind by its speed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpucalc.errors import Infeasible
from gpucalc.mixed.case import Case, near, order_of, split_of
from gpucalc.plan.answer import Level, Split
from gpucalc.plan.layout import Layout
from gpucalc.plan.resolve import resolve_layout
from gpucalc.plan.unlike import micro_batch_s, needed_bytes, shared_step

MOST_MICRO_BATCH = 64
MOST_COUNTS = 16  # micro-batches of a step that are tried where all ranks run as many
POWERS = tuple(2**power for power in range(MOST_MICRO_BATCH.bit_length()))


def equal(case: Case) -> Split | None:
    layout = _data_parallel(case)
    sizes = [case.run.micro_batch] if isinstance(case.run.micro_batch, int) else POWERS
    best: Split | None = None
    for size in sizes:
        micro_batches = near(case, size * layout.dp)
        if micro_batches is None:
            continue
        changed = replace(layout, micro_batch=size, micro_batches=micro_batches)
        found = _shared(case, "equal", [changed] * len(case.cluster.pools))
        if best is None or order_of(found) < order_of(best):
            best = found
        if found.level is Level.DOES_NOT_FIT:
            break  # nor does a larger one
    return best


def _data_parallel(case: Case) -> Layout:
    """The run's layout, without its batch. Raises Infeasible."""
    run = case.run
    size = run.micro_batch if isinstance(run.micro_batch, int) else 1
    free = {"micro_batch": size, "global_batch": None, "grad_accum": 1}
    layout, _ = resolve_layout(run.model_copy(update=free), case.subject.graph, gpus=case.cluster.count)
    group = layout.tp * layout.cp * layout.pp
    for pool in case.cluster.pools:
        if pool.count % group:
            raise Infeasible([f"{pool.count} x {pool.gpu.name} are not a multiple of {group} GPUs a replica"])
    return layout


def _shared(case: Case, how: str, layouts: Sequence[Layout]) -> Split:
    """The split in which every kind runs its own batch."""
    graph, pools = case.subject.graph, case.cluster.pools
    parts = [
        case.share(
            pool,
            layout,
            micro_batch_s=micro_batch_s(graph, layout, case.recipe, case.cluster, pools.index(pool)),
        )
        for pool, layout in zip(pools, layouts, strict=True)
    ]
    group = layouts[0].tp * layouts[0].cp * layouts[0].pp
    samples = sum(part.gpus // group * part.micro_batch * part.micro_batches for part in parts)
    return split_of(
        case, how, parts, samples, lambda: float(shared_step(graph, layouts, case.recipe, case.cluster).value)
    )


def proportional(case: Case) -> Split | None:
    """The fastest shares of the batch: another micro-batch for each kind, or more of them.

    Sharded gradients and weights (stages 2 and 3) are reduced and gathered with every micro-batch, so
    that all ranks run the same number of them; there only their sizes differ.
    """
    layout = _data_parallel(case)
    pools = case.cluster.pools
    times = [_Times(case, layout, index) for index in range(len(pools))]
    group = layout.tp * layout.cp * layout.pp
    ranks = [pool.count // group for pool in pools]
    best: Split | None = None
    tried: set[tuple[tuple[int, int], ...]] = set()
    for shares in _shares(case, layout, times, ranks):
        if shares in tried:
            continue
        tried.add(shares)
        layouts = [replace(layout, micro_batch=size, micro_batches=count) for size, count in shares]
        found = _shared(case, "proportional", layouts)
        if best is None or order_of(found) < order_of(best):
            best = found
    return best


class _Times:
    """Seconds of a micro-batch of a kind by its size, and the largest that fits."""

    def __init__(self, case: Case, layout: Layout, pool: int) -> None:
        self.case, self.layout, self.pool = case, layout, pool
        self._known: dict[int, float] = {}
        self.most = 0  # the largest that may fit; one where none does, to say by how much
        for size in POWERS:
            if not self.fits(size):
                break
            self.most = size
        step = self.most // 2
        while step and self.most < MOST_MICRO_BATCH:  # between two powers
            if self.fits(self.most + step):
                self.most += step
            step //= 2
        self.most = max(self.most, 1)

    def fits(self, size: int) -> bool:
        """Whether a micro-batch of that size may fit."""
        case = self.case
        pool = case.cluster.pools[self.pool]
        needed = needed_bytes(case.subject.graph, replace(self.layout, micro_batch=size), case.recipe, pool)
        return case.level(float(needed.value), pool) is not Level.DOES_NOT_FIT

    def of(self, size: int) -> float:
        """Seconds of a micro-batch."""
        if size not in self._known:
            case = self.case
            layout = replace(self.layout, micro_batch=size)
            self._known[size] = micro_batch_s(
                case.subject.graph, layout, case.recipe, case.cluster, self.pool
            )
        return self._known[size]

    def best_size(self) -> int:
        """The power of two with the most samples a second."""
        fitting = (size for size in POWERS if size <= self.most)
        best: int = max(fitting, key=lambda size: size / self.of(size))
        return best


def _shares(
    case: Case, layout: Layout, times: Sequence[_Times], ranks: Sequence[int]
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Micro-batch and number of them for each kind, near to equal times and to the batch."""
    for size in POWERS:  # equal shares are shares too
        count = near(case, size * sum(ranks))
        if count is not None and all(size <= one.most for one in times):
            yield ((size, count),) * len(times)
    for count in range(1, max(2, case.batch // sum(ranks) + 1)):
        if case.exact and case.batch % count:
            continue
        sizes = _balanced(times, ranks, case.batch // count, exact=case.exact)
        if sizes is not None and near(case, sum(r * s for r, s in zip(ranks, sizes, strict=True))) == count:
            yield tuple((size, count) for size in sizes)
        if count >= MOST_COUNTS:
            break
    if layout.zero_stage >= 2:
        return
    fastest = min(range(len(times)), key=lambda index: times[index].of(1))
    # Each kind at the size it is quickest with, as many of them as it gets done.
    sizes = [one.best_size() for one in times]
    speeds = [rank * size / one.of(size) for rank, size, one in zip(ranks, sizes, times, strict=True)]
    per_second = sum(speeds)
    whole = [
        case.batch * speed / per_second / rank / size
        for speed, rank, size in zip(speeds, ranks, sizes, strict=True)
    ]
    for down in (math.floor, round, math.ceil):
        counts = [max(1, int(down(count))) for count in whole]
        rest = case.batch - sum(
            rank * size * count
            for index, (rank, size, count) in enumerate(zip(ranks, sizes, counts, strict=True))
            if index != fastest
        )
        unit = ranks[fastest] * sizes[fastest]
        if rest >= unit and (not case.exact or rest % unit == 0):
            counts[fastest] = round(rest / unit)
            yield tuple(zip(sizes, counts, strict=True))


def _balanced(
    times: Sequence[_Times], ranks: Sequence[int], samples: int, *, exact: bool
) -> list[int] | None:
    """Micro-batches that make so many samples in the shortest time; None where memory or rounding forbids.

    Each further sample a rank goes to the kind that is done with it first.
    """
    sizes = [1] * len(times)
    left = samples - sum(ranks)
    while left > 0:
        able = [
            index
            for index, one in enumerate(times)
            if sizes[index] < one.most and (not exact or ranks[index] <= left)
        ]
        if not able:
            return None if exact else sizes
        given = min(able, key=lambda index: times[index].of(sizes[index] + 1))
        sizes[given] += 1
        left -= ranks[given]
    return sizes if left == 0 or not exact else None
