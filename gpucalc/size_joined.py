"""A user's own cards of unlike kinds taken together: two kinds at a time, where that beats each alone.

Judged by the planner of mixed fleets in the best way that uses all the cards: equal batches, batches by
speed, or pipeline stages by speed and memory. Every pair of sizes of two kinds is looked at, so that raising
what there is only adds fleets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product

from gpucalc.catalog import Catalog
from gpucalc.errors import GpucalcError
from gpucalc.jobs import ResolvedJob
from gpucalc.plan.answer import Level
from gpucalc.plan.evaluate import ErrorTable, Subject
from gpucalc.planner import plan_together
from gpucalc.size_bounds import hopeless, peak_rate
from gpucalc.size_fleets import Joined, Kind
from gpucalc.size_offers import Offer
from gpucalc.size_targets import Targets
from gpucalc.spec.fleet import FleetPart
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.train_run import TrainRun

MOST_PAIRS = 6  # of kinds, the quickest
WORTH_JOINING = 1.05  # of the better kind alone; what brings less is not worth unequal shares

Alone = Mapping[tuple[str, int], Offer]  # by GPU and count
Outcome = tuple[Joined, Offer | str]  # the fleet, or why it is not offered


def pairs(kinds: Sequence[Kind]) -> tuple[tuple[Kind, Kind], ...]:
    """The pairs of a user's own kinds that are tried, the quickest first; of one card the largest entry."""
    own: dict[str, Kind] = {}
    for kind in kinds:
        if kind.own and kind.system is None and kind.most >= own.get(kind.gpu.id, kind).most:
            own[kind.gpu.id] = kind
    ordered = sorted(own.values(), key=lambda kind: (-peak_rate(kind.gpu) * kind.most, kind.gpu.id))
    return tuple(combinations(ordered, 2))[:MOST_PAIRS]


def joined(
    job: ResolvedJob,
    catalog: Catalog,
    subject: Subject,
    tried: Sequence[tuple[Kind, Kind]],
    targets: Targets,
    errors: ErrorTable,
    alone: Alone,
    rent: float | None,
    *,
    progress: Callable[[int], None],
) -> Iterator[Outcome]:
    """Every fleet of two kinds: an offer where it beats each of them alone, else why not."""
    looked = 0
    for one, other in tried:
        known: list[tuple[Joined, Offer]] = []
        for counts in product(one.counts, other.counts):
            progress(looked)
            looked += 1
            fleet = Joined(((one, counts[0]), (other, counts[1])))
            outcome: Offer | str
            try:
                outcome = _offer(job, catalog, subject, fleet, targets, errors, rent)
            except GpucalcError as error:
                outcome = str(error)
            if isinstance(outcome, Offer):
                outcome = _beaten(outcome, fleet, alone) or _idle(outcome, fleet, known) or outcome
            if isinstance(outcome, Offer):
                known.append((fleet, outcome))
            yield fleet, outcome


def _offer(
    job: ResolvedJob,
    catalog: Catalog,
    subject: Subject,
    fleet: Joined,
    targets: Targets,
    errors: ErrorTable,
    rent: float | None,
) -> Offer | str:
    cluster = catalog.cluster(
        [FleetPart(None, count, kind.gpu.id) for kind, count in fleet.parts], None, network=job.job.network
    )
    hourly = _hourly(catalog, fleet, rent)
    reason = hopeless(job.run, subject, cluster, targets, hourly)
    if reason is not None:
        return reason
    run = _open(job, targets)
    changed = job.job.model_copy(update={"run": run, "gpus": fleet.fleet(cluster.count), "system": None})
    plan = plan_together(replace(job, job=changed), catalog, subject=subject, cluster=cluster, errors=errors)
    if plan.verdict.level is Level.DOES_NOT_FIT or plan.throughput is None:
        return plan.splits[0].why or "does not fit"
    return Offer.of(fleet, plan, job.run, targets, cluster, hourly)


def _beaten(found: Offer, fleet: Joined, alone: Alone) -> str | None:
    """Which of its kinds does about as well without the other; None where neither does."""
    rate = found.rate or 0.0
    for kind, count in fleet.parts:
        single = alone.get((kind.gpu.id, count))
        if single is None and not found.meets:  # bounds ruled it out, and so nobody knows its rate
            return "; ".join(found.missed) or "too dear"
        if single is None or single.level is Level.DOES_NOT_FIT:
            continue
        if single.level is Level.FITS and found.level is Level.MARGINAL:
            return f"only marginal, and {kind.cards(count)} alone surely fit"
        if rate < WORTH_JOINING * (single.rate or 0.0):
            than = "fewer than" if rate < (single.rate or 0.0) else "hardly more than"
            alone_rate = f"{single.rate or 0.0:,.0f} of {kind.cards(count)} alone"
            return f"{rate:,.0f} tokens/s at best ({found.plan.splits[0].how}), {than} the {alone_rate}"
    return None


def _idle(found: Offer, fleet: Joined, known: Sequence[tuple[Joined, Offer]]) -> str | None:
    """Which fewer cards of the same kinds do as much; None where none do."""
    for smaller, offer in known:
        inside = all(few <= many for (_, few), (_, many) in zip(smaller.parts, fleet.parts, strict=True))
        safe = offer.level is Level.FITS or found.level is not Level.FITS
        if inside and safe and (found.rate or 0.0) <= (offer.rate or 0.0):
            return f"{smaller.cards(smaller.gpus)} do as much"
    return None


def _open(job: ResolvedJob, targets: Targets) -> TrainRun:
    """The run with what the way of running decides left to it."""
    run = job.run
    assert isinstance(run, TrainRun)
    update = {"dp": None, "dp_shard": None, "tokens": targets.tokens or run.tokens}
    if isinstance(run.global_batch, int):
        update["grad_accum"] = None
    return run.model_copy(update=update)


def _hourly(catalog: Catalog, fleet: Joined, rent: float | None) -> float | None:
    """Rent of a card on average: the fleet file's, else the job's own, else the published one."""
    total = 0.0
    for kind, count in fleet.parts:
        price = kind.usd_per_gpu_hour or rent
        if price is None:
            published: Cluster = kind.cluster(catalog, count)
            if published.price_per_gpu_hour is None:
                return None
            price = float(published.price_per_gpu_hour.value)
        total += price * count
    return total / sum(count for _, count in fleet.parts)
