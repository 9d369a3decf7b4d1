"""A fleet of unlike cards: the ways of dividing a run over them, each planned, and which one wins.

    equal         every rank takes the same batch; the slowest kind sets the pace
    proportional  every kind takes a batch by its speed (dynamic load balance)
    pipeline      every kind holds as many layers as its speed and memory allow
    leave out     one kind stands idle

All are compared at about the same number of samples a step, so that none looks better by a larger batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

from gpucalc.errors import GpucalcError, Infeasible, InputError
from gpucalc.formulas import compute as f
from gpucalc.formulas.rules_machine import batch_share
from gpucalc.plan.answer import Level, Plan, PoolShare, Split
from gpucalc.plan.evaluate import ErrorTable, Subject, level_of
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.rates import sample_tokens
from gpucalc.plan.resolve import resolve_layout, resolve_recipe
from gpucalc.plan.rules import divisors
from gpucalc.plan.unlike import micro_batch_s, needed_bytes, shared_step, staged_step
from gpucalc.search import plan_best
from gpucalc.spec.hardware import Cluster, Pool
from gpucalc.spec.job import TrainRun

Clusters = Callable[[str, int], Cluster]

# Micro-batches of a rank that the ways are compared at where the job states no batch: enough for
# shares of one to eight to be whole numbers.
SHARED_MICRO_BATCHES = 8
MOST_MICRO_BATCH = 64
EXAMPLE_BATCH = 64
EXAMPLE_MICRO_BATCH = 8
BATCH_OFF = 0.2  # shares that miss the batch by more are another run
STAGE_BATCHES = (1, 2, 4)
PIPELINING = ("megatron", "torchtitan", "deepspeed")
_POWERS = tuple(2**power for power in range(MOST_MICRO_BATCH.bit_length()))
MOST_MOVES = 12  # layers moved from stage to stage
_RANK = {Level.FITS: 0, Level.MARGINAL: 1, Level.DOES_NOT_FIT: 2}


@dataclass(frozen=True, slots=True)
class _Case:
    """One run on one cluster, its recipe made."""

    subject: Subject
    run: TrainRun
    cluster: Cluster
    recipe: Recipe
    error: float
    batch: int  # samples a step to come near to
    exact: bool  # the job states them

    def level(self, needed: float, pool: Pool) -> Level:
        """Whether a kind holds so much."""
        return level_of(needed, float(pool.gpu.usable_memory().value), self.error)

    def rate(self, samples: int, step_s: float) -> float:
        """Tokens a second, samples of models without tokens."""
        tokens = samples * sample_tokens(self.subject.graph, self.recipe)
        return float(f.tokens_per_s(tokens=tokens, step_s=step_s))


def splits(
    plan: Plan,
    subject: Subject,
    run: TrainRun,
    cluster: Cluster,
    *,
    clusters: Clusters,
    errors: ErrorTable,
    unstated: Set[str],
) -> tuple[Split, ...]:
    """Every way of running on a mixed cluster, the best first; `run` is the settled run of the plan.

    unstated: keys nobody set. A precision among them is each kind's own best where it is left alone, and
    a micro-batch the best that fits.
    """
    ordered = replace(cluster, pools=tuple(sorted(cluster.pools, key=lambda pool: (pool.gpu.id, pool.count))))
    stated = isinstance(run.global_batch, int)
    batch = plan.layout.global_batch * (1 if stated else SHARED_MICRO_BATCHES)
    if "run.micro_batch" in unstated:
        run = run.model_copy(update={"micro_batch": "auto"})
    found: list[Split] = []
    for how in (_equal, _proportional, _pipeline):
        found.append(_best_of(how, subject, run, ordered, errors, batch, stated))
    for left in ordered.pools:
        rest = tuple(pool for pool in ordered.pools if pool is not left)
        if len(rest) == 1:
            found.append(
                _alone(subject, run, rest[0], left, clusters, errors, batch, "run.precision" in unstated)
            )
        else:
            found.append(_without(subject, run, ordered, left, errors, batch, stated))
    found.sort(key=lambda split: (_RANK[split.level], -(split.tokens_per_s or 0.0), split.how, split.fleet))
    return _with_reasons(found)


def _case(
    subject: Subject, run: TrainRun, cluster: Cluster, errors: ErrorTable, batch: int, exact: bool
) -> _Case:
    for pool in cluster.pools:
        recipe = resolve_recipe(run, subject.graph)
        if pool.gpu.peak(recipe.math) is None:
            raise InputError(f"{pool.gpu.name} has no {recipe.math} rate")
    error, _ = errors.memory_error(run.framework)
    return _Case(subject, run, cluster, resolve_recipe(run, subject.graph), error, batch, exact)


def _best_of(
    how: Callable[[_Case], Split | None],
    subject: Subject,
    run: TrainRun,
    cluster: Cluster,
    errors: ErrorTable,
    batch: int,
    exact: bool,
) -> Split:
    """A way with the run's recomputation, and with all of it where that is not enough."""
    best: Split | None = None
    why = "no whole shares of the batch"
    for changed in _recomputing(run):
        try:
            found = how(_case(subject, changed, cluster, errors, batch, exact))
        except (Infeasible, InputError) as error:
            why = "; ".join(error.rules) if isinstance(error, Infeasible) else str(error)
            continue
        if found is not None and (best is None or _order(found) < _order(best)):
            best = found
        if best is not None and best.level is Level.FITS:
            break
    if best is not None:
        return best
    fleet = _fleet(cluster.pools)
    return Split(how.__name__.strip("_"), fleet, run.framework, run.precision, run.recompute, why=why)


def _order(split: Split) -> tuple[int, float]:
    """What fits first, then the fastest; of what does not fit, what lacks least."""
    if split.tokens_per_s is not None:
        return _RANK[split.level], -split.tokens_per_s
    return _RANK[split.level], max(
        (part.needed_bytes / part.capacity_bytes for part in split.parts), default=0.0
    )


def _recomputing(run: TrainRun) -> Iterator[TrainRun]:
    yield run
    if run.recompute != "full":
        yield run.model_copy(update={"recompute": "full"})


def _fleet(pools: Sequence[Pool]) -> str:
    return "+".join(f"{pool.count}x{pool.gpu.id}" for pool in pools)


# -- the same batch on every rank -----------------------------------------------------------------


def _equal(case: _Case) -> Split | None:
    layout = _data_parallel(case)
    sizes = [case.run.micro_batch] if isinstance(case.run.micro_batch, int) else _POWERS
    best: Split | None = None
    for size in sizes:
        micro_batches = _near(case, size * layout.dp)
        if micro_batches is None:
            continue
        changed = replace(layout, micro_batch=size, micro_batches=micro_batches)
        found = _shared(case, "equal", [changed] * len(case.cluster.pools))
        if best is None or _order(found) < _order(best):
            best = found
        if found.level is Level.DOES_NOT_FIT:
            break  # nor does a larger one
    return best


def _data_parallel(case: _Case) -> Layout:
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


def _near(case: _Case, at_once: int) -> int | None:
    """How often so many samples make the batch, None where they do not come near."""
    times = max(1, round(case.batch / at_once))
    off = abs(times * at_once / case.batch - 1)
    return None if off > (0 if case.exact else BATCH_OFF) else times


def _shared(case: _Case, how: str, layouts: Sequence[Layout]) -> Split:
    """The split in which every kind runs its own batch."""
    graph, pools = case.subject.graph, case.cluster.pools
    parts = []
    for pool, layout in zip(pools, layouts, strict=True):
        needed = float(needed_bytes(graph, layout, case.recipe, pool).value)
        parts.append(
            PoolShare(
                gpu=pool.gpu.id,
                gpus=pool.count,
                micro_batch=layout.micro_batch,
                micro_batches=layout.micro_batches,
                layers=(),
                needed_bytes=needed,
                capacity_bytes=float(pool.gpu.usable_memory().value),
                level=case.level(needed, pool),
                busy_s=layout.micro_batches
                * micro_batch_s(graph, layout, case.recipe, case.cluster, pools.index(pool)),
            )
        )
    group = layouts[0].tp * layouts[0].cp * layouts[0].pp
    samples = sum(part.gpus // group * part.micro_batch * part.micro_batches for part in parts)
    return _split(
        case, how, parts, samples, lambda: float(shared_step(graph, layouts, case.recipe, case.cluster).value)
    )


def _split(
    case: _Case, how: str, parts: Sequence[PoolShare], samples: int, step: Callable[[], float]
) -> Split:
    level = max((part.level for part in parts), key=_RANK.__getitem__)
    seconds = step() if level is not Level.DOES_NOT_FIT else None
    return Split(
        how,
        _fleet(case.cluster.pools),
        case.run.framework,
        case.run.precision,
        case.run.recompute,
        parts=tuple(parts),
        level=level,
        global_batch=samples,
        step_s=seconds,
        tokens_per_s=None if seconds is None else case.rate(samples, seconds),
    )


# -- batches by speed -----------------------------------------------------------------------------


def _proportional(case: _Case) -> Split | None:
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
        if best is None or _order(found) < _order(best):
            best = found
    return best


class _Times:
    """Seconds of a micro-batch of a kind by its size, and the largest that fits."""

    def __init__(self, case: _Case, layout: Layout, pool: int) -> None:
        self.case, self.layout, self.pool = case, layout, pool
        self._known: dict[int, float] = {}
        self.most = 0  # the largest that may fit; one where none does, to say by how much
        for size in _POWERS:
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

    def largest_within(self, seconds: float) -> int:
        """The largest micro-batch done in that time, one at the least."""
        low, high = 1, self.most
        while low < high:  # the time grows with the size
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.of(middle) <= seconds else (low, middle - 1)
        return low

    def best_size(self) -> int:
        """The power of two with the most samples a second."""
        fitting = (size for size in _POWERS if size <= self.most)
        best: int = max(fitting, key=lambda size: size / self.of(size))
        return best


def _shares(
    case: _Case, layout: Layout, times: Sequence[_Times], ranks: Sequence[int]
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Micro-batch and number of them for each kind, near to equal times and to the batch."""
    together = layout.zero_stage >= 2
    fastest = min(range(len(times)), key=lambda index: times[index].of(1))
    for size in range(1, times[fastest].most + 1):
        if size > 8 and size % 2:
            continue
        pace = times[fastest].of(size) * 1.02
        sizes = [one.largest_within(pace) for one in times]
        sizes[fastest] = size
        at_once = sum(rank * own for rank, own in zip(ranks, sizes, strict=True))
        count = _near(case, at_once)
        if count is not None:
            yield tuple((own, count) for own in sizes)
    if together:
        return
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


# -- layers by speed and memory -------------------------------------------------------------------


def _pipeline(case: _Case) -> Split | None:
    """The fastest pipeline whose stages are each of one kind: the order of the kinds, replicas, layers."""
    case = _pipelining(case)
    pools = case.cluster.pools
    if not case.subject.graph.stacks:
        raise Infeasible(["the network is no stack of layers"])
    layers = len(case.subject.graph.trunk.layers)
    best: Split | None = None
    tp = _tensor_ranks(case)
    for replicas in sorted(divisors(math.gcd(*(pool.count // tp for pool in pools))), reverse=True):
        depth = sum(pool.count // tp // replicas for pool in pools)
        if depth > layers:
            continue
        for order in permutations(range(len(pools))):
            owners = tuple(pool for pool in order for _ in range(pools[pool].count // tp // replicas))
            for size in STAGE_BATCHES:
                found = _staged(case, owners, replicas, size)
                if found is not None and (best is None or _order(found) < _order(best)):
                    best = found
    return best


def _pipelining(case: _Case) -> _Case:
    """The run under a framework that has pipelines. Raises Infeasible."""
    run = case.run
    if run.framework in PIPELINING:
        return case
    if run.method != "full":
        raise Infeasible([f"adapters under {run.framework} have no pipeline"])
    changed: dict[str, Any] = {
        "framework": "megatron", "optimizer": "adam", "attention": "flash", "zero_stage": 1,
        "offload": "none", "dp_shard": None, "reshard_after_forward": None, "pipeline_split": "uneven",
    }  # fmt: skip
    moved = run.model_copy(update=changed)
    return replace(case, run=moved, recipe=resolve_recipe(moved, case.subject.graph))


def _tensor_ranks(case: _Case) -> int:
    """The run's own tensor parallelism, which stays inside a kind. Raises Infeasible."""
    tp = case.run.tp if isinstance(case.run.tp, int) else 1
    for pool in case.cluster.pools:
        if pool.count % tp:
            raise Infeasible([f"{pool.count} x {pool.gpu.name} are not a multiple of tp {tp}"])
    return tp


def _staged(case: _Case, owners: tuple[int, ...], replicas: int, size: int) -> Split | None:
    count = _near(case, replicas * size)
    if count is None or (case.exact and case.batch % (replicas * size)):
        return None
    stage = case.run.zero_stage if isinstance(case.run.zero_stage, int) else 0
    layers = len(case.subject.graph.trunk.layers)
    even = tuple(layers // len(owners) + (index < layers % len(owners)) for index in range(len(owners)))
    layout = Layout(
        tp=_tensor_ranks(case), pp=len(owners), vpp=1, cp=1, ep=1, etp=1, dp=replicas, shard=replicas,
        zero_stage=stage if replicas > 1 else 0, micro_batch=size, micro_batches=count,
        sequence_parallel=bool(case.run.sequence_parallel is True and case.run.tp != 1), schedule="1f1b",
        stage_layers=even,
    )  # fmt: skip
    best: Split | None = None
    for sizes in _divided(case, layout, owners):
        found = _stage_split(case, replace(layout, stage_layers=sizes), owners)
        if best is None or _order(found) < _order(best):
            best = found
    return best


def _divided(case: _Case, layout: Layout, owners: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Layers by stage: by speed, then moved away from where memory or time is shortest."""
    graph = case.subject.graph
    _, each = staged_step(graph, layout, case.recipe, case.cluster, owners)
    layer_s = [seconds / count for seconds, count in zip(each, layout.stage_layers, strict=True)]
    sizes = _by_weight(sum(layout.stage_layers), [1 / seconds for seconds in layer_s])
    seen: set[tuple[int, ...]] = set()
    for _ in range(MOST_MOVES):
        if sizes in seen:
            return
        seen.add(sizes)
        yield sizes
        tried = replace(layout, stage_layers=sizes)
        over = _overfull(case, tried, owners)
        _, each = staged_step(graph, tried, case.recipe, case.cluster, owners)
        giver = max(over, key=over.__getitem__) if over else max(range(len(each)), key=each.__getitem__)
        takers = [index for index in range(len(each)) if index != giver and index not in over]
        if not takers or sizes[giver] < 2:
            return
        taker = min(takers, key=lambda index: each[index])
        moved = list(sizes)
        moved[giver] -= 1
        moved[taker] += 1
        sizes = tuple(moved)


def _overfull(case: _Case, layout: Layout, owners: tuple[int, ...]) -> dict[int, float]:
    """Stages that do not fit, with the bytes they lack."""
    found = {}
    for stage, owner in enumerate(owners):
        pool = case.cluster.pools[owner]
        needed = float(needed_bytes(case.subject.graph, layout, case.recipe, pool, (stage,)).value)
        if case.level(needed, pool) is Level.DOES_NOT_FIT:
            found[stage] = needed - float(pool.gpu.usable_memory().value)
    return found


def _by_weight(layers: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole layers in proportion, one at the least; the largest remainders get what is left."""
    total = sum(weights)
    shares = [layers * weight / total for weight in weights]
    sizes = [max(1, math.floor(share)) for share in shares]
    order = sorted(range(len(shares)), key=lambda index: sizes[index] - shares[index])
    for index in range(abs(layers - sum(sizes))):
        if layers > sum(sizes):
            sizes[order[index % len(order)]] += 1
        else:
            sizes[max(range(len(sizes)), key=sizes.__getitem__)] -= 1
    return tuple(sizes)


def _stage_split(case: _Case, layout: Layout, owners: tuple[int, ...]) -> Split:
    graph = case.subject.graph
    step, each = staged_step(graph, layout, case.recipe, case.cluster, owners)
    parts = []
    for index in dict.fromkeys(owners):
        pool = case.cluster.pools[index]
        own = tuple(stage for stage, owner in enumerate(owners) if owner == index)
        needed = float(needed_bytes(graph, layout, case.recipe, pool, own).value)
        parts.append(
            PoolShare(
                gpu=pool.gpu.id,
                gpus=pool.count,
                micro_batch=layout.micro_batch,
                micro_batches=layout.micro_batches,
                layers=tuple(layout.stage_layers[stage] for stage in own),
                needed_bytes=needed,
                capacity_bytes=float(pool.gpu.usable_memory().value),
                level=case.level(needed, pool),
                busy_s=layout.micro_batches * max(each[stage] for stage in own),
            )
        )
    return _split(case, "pipeline", parts, layout.global_batch, lambda: float(step.value))


# -- without a kind -------------------------------------------------------------------------------


def _alone(
    subject: Subject,
    run: TrainRun,
    kept: Pool,
    left: Pool,
    clusters: Clusters,
    errors: ErrorTable,
    batch: int,
    free_precision: bool,
) -> Split:
    """One kind by itself, its micro-batch searched, in the best precision it has."""
    fleet = f"{kept.count}x{kept.gpu.id}"
    precision = run.precision
    if free_precision and kept.gpu.peak("bf16") is not None:
        precision = "bf16"
    open_run = run.model_copy(
        update={
            "dp": None, "dp_shard": None, "grad_accum": None, "global_batch": batch, "precision": precision,
        }
    )  # fmt: skip
    best: Plan | None = None
    used = run
    why = ""
    ways = [*_recomputing(open_run)]
    if run.framework in PIPELINING:  # a kind alone may be cut into stages too
        ways.append(ways[-1].model_copy(update={"pp": "auto", "pipeline_split": "uneven"}))
    for changed in ways:
        try:
            found = plan_best(
                subject, changed, clusters(kept.gpu.id, kept.count), name=fleet, fleet=fleet, errors=errors
            )
        except GpucalcError as error:
            why = "; ".join(error.rules) if isinstance(error, Infeasible) else str(error)
            continue
        if best is None or _need(found) < _need(best):
            best, used = found, changed
        if best.verdict.level is Level.FITS:
            break
    how = "leave out"
    if best is None:
        return Split(how, fleet, run.framework, precision, run.recompute, why=why, left_out=left.gpu.id)
    verdict, layout = best.verdict, best.layout
    share = PoolShare(
        gpu=kept.gpu.id,
        gpus=kept.count,
        micro_batch=layout.micro_batch,
        micro_batches=layout.micro_batches,
        layers=(),
        needed_bytes=float(verdict.needed.value),
        capacity_bytes=float(verdict.capacity.value),
        level=verdict.level,
        busy_s=None,
    )
    rates = best.throughput
    return Split(
        how,
        fleet,
        used.framework,
        precision,
        used.recompute,
        parts=(share,),
        level=verdict.level,
        global_batch=layout.global_batch,
        step_s=None if best.time is None else float(best.time.value),
        tokens_per_s=None if rates is None else float(rates.child("tokens_per_s").value),
        left_out=left.gpu.id,
    )


def _need(plan: Plan) -> tuple[int, float]:
    return _RANK[plan.verdict.level], float(plan.verdict.needed.value)


def _without(
    subject: Subject,
    run: TrainRun,
    cluster: Cluster,
    left: Pool,
    errors: ErrorTable,
    batch: int,
    exact: bool,
) -> Split:
    """The other kinds of a fleet of three or more, in the better of their shared ways."""
    pools = tuple(pool for pool in cluster.pools if pool is not left)
    fewer = replace(cluster, pools=pools, count=sum(pool.count for pool in pools))
    ways = [_best_of(how, subject, run, fewer, errors, batch, exact) for how in (_equal, _proportional)]
    best = min(ways, key=_order)
    return replace(best, how=f"leave out, {best.how}", left_out=left.gpu.id)


def peak_note(subject: Subject, run: TrainRun, cluster: Cluster) -> tuple[str, ...]:
    """How a batch of 64 over one card of each kind divides: by peak rates, and by the times of this run."""
    recipe = resolve_recipe(run, subject.graph)
    layout = replace(
        resolve_layout(run, subject.graph, gpus=cluster.count)[0], micro_batch=EXAMPLE_MICRO_BATCH
    )
    pools = sorted(cluster.pools, key=lambda pool: pool.gpu.id)
    peaks = [pool.gpu.peak(recipe.math) for pool in pools]
    if any(peak is None for peak in peaks):
        return ()
    rates = [float(peak.value) for peak in peaks if peak is not None]
    times = [
        micro_batch_s(subject.graph, layout, recipe, cluster, cluster.pools.index(pool)) for pool in pools
    ]
    names = ", ".join(f"{pool.gpu.id} {rate / 1e12:,.0f}" for pool, rate in zip(pools, rates, strict=True))
    by_times = _divide([1 / seconds for seconds in times])
    return (
        f"a batch of {EXAMPLE_BATCH} over one card of each kind divides {_divide(rates)} by peak rates"
        f" ({names} TFLOP/s) and {by_times} by the times worked out here",
        "the ways are not checked against a published run on unlike cards; with unequal shares the training"
        " code must weight gradients by samples",
    )


def _divide(rates: Sequence[float]) -> str:
    total = sum(rates)
    shares = [batch_share(batch=EXAMPLE_BATCH, own_rate=rate, other_rate=total - rate) for rate in rates]
    return " : ".join(f"{share:.0f}" for share in shares)


# -- which wins, and why --------------------------------------------------------------------------


def _with_reasons(found: Sequence[Split]) -> tuple[Split, ...]:
    """The splits with a reason each: what it gains or what holds it back."""
    best = found[0]
    out = []
    for split in found:
        wins = split is best and split.level is not Level.DOES_NOT_FIT
        out.append(replace(split, wins=wins, why=split.why or _why(split)))
    return tuple(out)


def _why(split: Split) -> str:
    if split.level is Level.DOES_NOT_FIT:
        short = max(split.parts, key=lambda part: part.needed_bytes / part.capacity_bytes)
        return f"{short.gpu} needs {short.needed_bytes / short.capacity_bytes:.1f} times its memory"
    busy = [part.busy_s for part in split.parts if part.busy_s is not None]
    if len(busy) > 1 and split.step_s is not None:
        slow = max(split.parts, key=lambda part: part.busy_s or 0.0)
        idle = 1 - min(busy) / max(busy)
        waits = (
            f"the others wait {100 * idle:.0f} % of its time" if idle >= 0.01 else "all are as long at work"
        )
        beside = max(0.0, 1 - max(busy) / split.step_s)
        words = f"{slow.gpu} is the slowest: {waits}"
        return words + (
            f"; links and bubbles take {100 * beside:.0f} % of the step" if beside >= 0.05 else ""
        )
    if split.left_out is not None:
        return f"without {split.left_out}"
    return ""
