"""A fleet of unlike cards: the ways of dividing a run over them, each planned, and which one wins.

    equal         every rank takes the same batch; the slowest kind sets the pace
    proportional  every kind takes a batch by its speed (dynamic load balance)
    pipeline      every kind holds as many layers as its speed and memory allow
    leave out     one kind stands idle

All are compared at about the same number of samples a step, so that none looks better by a larger batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace

from gpucalc.errors import GpucalcError, Infeasible, InputError
from gpucalc.formulas import compute as f
from gpucalc.formulas.rules_machine import batch_share
from gpucalc.line import Kind, Line, compute
from gpucalc.mixed.case import LEVELS, Case, fleet_of, order_of
from gpucalc.mixed.shares import equal, proportional
from gpucalc.mixed.stages import PIPELINING, pipeline
from gpucalc.plan.answer import Level, Plan, PoolShare, Split
from gpucalc.plan.economics import Economics, cost_line, is_long, reliability_line, training_line
from gpucalc.plan.evaluate import ErrorTable, Subject, Terms
from gpucalc.plan.rates import sample_tokens
from gpucalc.plan.resolve import resolve_layout, resolve_recipe
from gpucalc.plan.unlike import micro_batch_s
from gpucalc.search import plan_best
from gpucalc.spec.hardware import Cluster, Pool
from gpucalc.spec.train_run import TrainRun

Clusters = Callable[[str, int], Cluster]

# Micro-batches of a rank that the ways are compared at where the job states no batch: enough for
# shares of one to eight to be whole numbers.
SHARED_MICRO_BATCHES = 8
SHARED = (equal, proportional, pipeline)  # ways in which every kind takes part
EXAMPLE_BATCH = 64
EXAMPLE_MICRO_BATCH = 8


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
    ordered = _ordered(cluster)
    run, batch, stated = _to_share(run, plan.layout.global_batch, unstated)
    found = [_best_of(how, subject, run, ordered, errors, batch, stated) for how in SHARED]
    for left in ordered.pools:
        rest = tuple(pool for pool in ordered.pools if pool is not left)
        if len(rest) == 1:
            # Where nobody states the batch it is the nearest that the kind's cards share evenly.
            own = batch if stated else max(1, round(batch / rest[0].count)) * rest[0].count
            free = "run.precision" in unstated
            found.append(_alone(subject, run, rest[0], left, clusters, errors, own, free))
        else:
            found.append(_without(subject, run, ordered, left, errors, batch, stated))
    found.sort(key=lambda split: (LEVELS[split.level], -(split.tokens_per_s or 0.0), split.how, split.fleet))
    return _with_reasons(found)


def shared_way(
    batch: int, subject: Subject, run: TrainRun, cluster: Cluster, *, errors: ErrorTable, unstated: Set[str]
) -> Split:
    """The best way of running on all kinds of a mixed cluster at once, by the batch of one plan on it."""
    run, batch, stated = _to_share(run, batch, unstated)
    ways = [_best_of(how, subject, run, _ordered(cluster), errors, batch, stated) for how in SHARED]
    return _with_reasons(sorted(ways, key=order_of))[0]


def way_plan(
    plan: Plan,
    way: Split,
    subject: Subject,
    run: TrainRun,
    cluster: Cluster,
    *,
    errors: ErrorTable,
    facts: Economics,
) -> Plan:
    """The plan of a mixed fleet turned into that of one way of running on it.

    The kind with the least to spare gives the verdict; step, rates, failures and cost are the way's.
    """
    tight = max(way.parts, key=lambda part: part.needed_bytes / part.capacity_bytes, default=None)
    if tight is None or way.step_s is None or way.global_batch is None:
        return replace(plan, time=None, throughput=None, cost=None, reliability=None, splits=(way,))
    source = f"{tight.gpu} in the way of running called {way.how}"
    verdict = replace(
        plan.verdict,
        level=way.level,
        needed=Line("needed", tight.needed_bytes, "bytes", Kind.MODELLED, source=source),
        capacity=Line("capacity", tight.capacity_bytes, "bytes", Kind.MODELLED, source=source),
        margin_bytes=tight.capacity_bytes - tight.needed_bytes,
    )
    step = Line("step", way.step_s, "s", Kind.MODELLED, source=f"all kinds together: {way.how}")
    tokens = way.global_batch * sample_tokens(subject.graph, plan.recipe)
    rate = compute("tokens_per_s", f.tokens_per_s, tokens=tokens, step_s=step)
    rates = compute("throughput", f.samples_per_s, samples=way.global_batch, step_s=step, children=(rate,))
    training, failures = training_line(run, step, rates), None
    if is_long(run, cluster):
        failures = reliability_line(
            subject.graph, plan.layout, plan.recipe, cluster, facts.failures, step=step, training=training
        )
    slowest = max(way.parts, key=lambda part: part.busy_s or 0.0)
    return replace(
        plan,
        verdict=verdict,
        time=step,
        throughput=rates,
        reliability=failures,
        cost=cost_line(
            cluster,
            rate,
            facts.money,
            training=training,
            goodput=failures.child("goodput") if failures is not None else None,
        ),
        speed_error=errors.time_error(way.framework),
        binds=f"the pace of the {slowest.gpu}",
        splits=(way,),
    )


def _to_share(run: TrainRun, batch: int, unstated: Set[str]) -> tuple[TrainRun, int, bool]:
    """The run as kinds share it, its batch from that of one plan, and whether somebody stated that."""
    stated = isinstance(run.global_batch, int)
    if "run.micro_batch" in unstated:
        run = run.model_copy(update={"micro_batch": "auto"})
    return run, batch * (1 if stated else SHARED_MICRO_BATCHES), stated


def _ordered(cluster: Cluster) -> Cluster:
    """The cluster with its kinds in one order, however they were written."""
    return replace(cluster, pools=tuple(sorted(cluster.pools, key=lambda pool: (pool.gpu.id, pool.count))))


def _case(
    subject: Subject, run: TrainRun, cluster: Cluster, errors: ErrorTable, batch: int, exact: bool
) -> Case:
    for pool in cluster.pools:
        recipe = resolve_recipe(run, subject.graph)
        if pool.gpu.peak(recipe.math) is None:
            raise InputError(f"{pool.gpu.name} has no {recipe.math} rate")
    error, _ = errors.memory_error(run.framework)
    return Case(subject, run, cluster, resolve_recipe(run, subject.graph), error, batch, exact)


def _best_of(
    how: Callable[[Case], Split | None],
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
        if found is not None and (best is None or order_of(found) < order_of(best)):
            best = found
        if best is not None and best.level is Level.FITS:
            break
    if best is not None:
        return best
    fleet = fleet_of(cluster.pools)
    return Split(how.__name__, fleet, run.framework, run.precision, run.recompute, why=why)


def _recomputing(run: TrainRun) -> Iterator[TrainRun]:
    yield run
    if run.recompute != "full":
        yield run.model_copy(update={"recompute": "full"})


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
            alone = clusters(kept.gpu.id, kept.count)
            found = plan_best(subject, changed, alone, Terms(fleet, fleet, errors=errors))
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
    return LEVELS[plan.verdict.level], float(plan.verdict.needed.value)


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
    ways = [_best_of(how, subject, run, fewer, errors, batch, exact) for how in (equal, proportional)]
    best = min(ways, key=order_of)
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
