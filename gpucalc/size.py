"""Which GPUs to take: the cheapest, the fastest and the smallest fleet that meets a job's targets.

Every fleet is planned like any job, its layout left to the search, and judged on the estimate and at
both ends of its expected error. Where more GPUs of a kind would do worse than fewer (a degree that does
not divide, a batch too small), the larger fleet leaves some idle: more never turns a yes into a no.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from gpucalc.accuracy import error_table
from gpucalc.advise import open_runs
from gpucalc.catalog import Catalog
from gpucalc.errors import GpucalcError, Infeasible, InputError
from gpucalc.jobs import ResolvedJob
from gpucalc.plan.answer import Level, Plan
from gpucalc.plan.evaluate import ErrorTable, Subject
from gpucalc.plan.serve_resolve import BY_LAYERS
from gpucalc.planner import plan_job
from gpucalc.size_bounds import beaten, hopeless, peak_rate
from gpucalc.size_fleets import Kind
from gpucalc.size_joined import joined, pairs
from gpucalc.size_offers import LEVEL_ORDER, Offer, Sizing, by_price
from gpucalc.size_targets import Targets, latencies_asked, run_asked
from gpucalc.spec.engine import EngineSpec
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.train_run import TrainRun

WORTH = 1.1  # twice the GPUs bring so much more, or a deployment has enough of them


def size(
    job: ResolvedJob,
    catalog: Catalog,
    kinds: Sequence[Kind],
    targets: Targets,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Sizing:
    """The fleets of these kinds planned for the job. Raises UnsupportedModel or InputError.

    `progress` is told how many fleets are looked at, of how many.
    """
    job = _at_rate(job, targets)
    subject = Subject.of(job.model, job.draft)
    errors = error_table(catalog)
    offers: list[Offer] = []
    skipped: list[tuple[str, str]] = []
    network = job.job.network
    if network is not None:  # unlike cards are not sized
        network = network.model_copy(update={"one_host": False})
    rent = job.job.costs.usd_per_gpu_hour if job.job.costs is not None else None
    tried = pairs(kinds) if isinstance(job.run, TrainRun) else ()
    compared = {kind.gpu.id for pair in tried for kind in pair}
    looked, all_fleets = 0, sum(len(kind.counts) for kind in kinds)
    all_fleets += sum(len(one.counts) * len(other.counts) for one, other in tried)
    # The quickest cards first: what they reach lets most fleets of slower ones go unplanned.
    for kind in sorted(kinds, key=lambda kind: -peak_rate(kind.gpu)):
        best: Offer | None = None  # of the kind so far
        for number, count in enumerate(kind.counts):
            if progress is not None:
                progress(looked + number, all_fleets)
            reason: str | None
            found: Offer | None = None
            try:
                cluster = kind.cluster(catalog, count, network)
                hourly = _hourly(kind, cluster, rent)
                reason = hopeless(job.run, subject, cluster, targets, hourly)
                if reason is None and kind.gpu.id not in compared:
                    reason = beaten(job.run, subject, cluster, targets, best, offers, hourly)
                if reason is not None:
                    skipped.append((_where(kind, count), reason))
                    continue
                found = _planned(job, catalog, subject, cluster, kind, targets, errors, rent)
            except GpucalcError as error:
                reason = str(error)
            if best is not None and (found is None or found.works < best.works):
                found = replace(best, gpus=count)
            if found is None:
                skipped.append((_where(kind, count), reason or "no layout is legal"))
                continue
            offers.append(found)
            slow = best is not None and best.holds and (found.rate or 0.0) < WORTH * (best.rate or 0.0)
            if job.run.task == "serve" and slow:
                break  # the requests in flight are given: past this size GPUs only wait for them
            if best is None or found.works >= best.works:
                best = found
        looked += len(kind.counts)
    alone = {(offer.kind.card, offer.gpus): offer for offer in offers}
    apart: list[tuple[str, str]] = []
    for fleet, outcome in joined(
        job, catalog, subject, tried, targets, errors, alone, rent,
        progress=lambda number: progress(looked + number, all_fleets) if progress is not None else None,
    ):  # fmt: skip
        if isinstance(outcome, Offer):
            offers.append(outcome)
            continue
        skipped.append((fleet.fleet(fleet.gpus), outcome))
        if fleet.whole:
            apart.append((fleet.cards(fleet.gpus), outcome))
    offers.sort(key=by_price)
    own = {kind.gpu.id: kind for kind in kinds if kind.own}
    return Sizing(
        job.name,
        job.run.task,
        targets,
        tuple(offers),
        tuple(skipped),
        latencies=latencies_asked(job.run),
        run=run_asked(job.run),
        together="+".join(kind.fleet(kind.most) for kind in own.values()) if len(own) > 1 else None,
        apart=tuple(apart),
    )


def _at_rate(job: ResolvedJob, targets: Targets) -> ResolvedJob:
    """The job under the requests that are to be served, where nobody said how many are in flight."""
    run, key = job.run, "run.concurrency"
    rate = targets.requests_per_s
    if rate is None or not isinstance(run, ServeRun) or all(one.key != key for one in job.defaults):
        return job
    if run.framework in BY_LAYERS:
        return job
    run = run.model_copy(update={"concurrency": None, "request_rate": rate})
    others = tuple(one for one in job.defaults if one.key != key)
    return replace(job, job=job.job.model_copy(update={"run": run}), defaults=others)


def _where(kind: Kind, count: int) -> str:
    return kind.fleet(count) if kind.system is None else f"{kind.fleet(count)} in {kind.system}"


def _hourly(kind: Kind, cluster: Cluster, rent: float | None) -> float | None:
    """Rent of a GPU: the fleet file's, else the job's own for any, else the published one."""
    price = cluster.price_per_gpu_hour
    if rent is not None and kind.usd_per_gpu_hour is None:
        return rent
    return None if price is None else float(price.value)


def _planned(
    job: ResolvedJob,
    catalog: Catalog,
    subject: Subject,
    cluster: Cluster,
    kind: Kind,
    targets: Targets,
    errors: ErrorTable,
    rent: float | None,
) -> Offer:
    """The fleet under the first way of running that surely fits, else the best. Raises Infeasible."""
    best: Plan | None = None
    refused: GpucalcError | None = None
    for run in _ways(job):
        if isinstance(run, TrainRun) and targets.tokens is not None:
            run = run.model_copy(update={"tokens": targets.tokens})
        if isinstance(run, ServeRun):
            from gpucalc.plan.serve import without_kernels  # sizes of training runs do without

            engine = catalog.load("engines", run.framework, EngineSpec)
            lacking = without_kernels(subject.spec, engine, cluster)
            if lacking is not None:
                refused = refused or Infeasible([lacking])
                continue
        changed = job.job.model_copy(
            update={"run": run, "gpus": kind.fleet(cluster.count), "system": kind.system}
        )
        try:
            plan = plan_job(
                replace(job, job=changed),
                catalog,
                subject=subject,
                cluster=cluster,
                errors=errors,
                advice=False,
            )
        except (Infeasible, InputError) as error:
            refused = refused or error
            continue
        if best is None or _better(plan, best):
            best = plan
        if plan.verdict.level is Level.FITS:
            break
    if best is None:
        raise refused or Infeasible(["no layout is legal"])
    return Offer.of(kind, best, job.run, targets, cluster, _hourly(kind, cluster, rent))


def _better(plan: Plan, than: Plan) -> bool:
    """Whether a plan fits more surely; of two that do not fit, the one that lacks less."""
    ours, theirs = plan.verdict, than.verdict
    if ours.level is theirs.level is Level.DOES_NOT_FIT:
        return ours.margin_bytes > theirs.margin_bytes
    return LEVEL_ORDER[ours.level] > LEVEL_ORDER[theirs.level]


def _ways(job: ResolvedJob) -> Iterator[TrainRun | ServeRun]:
    """The run with its layout left open: in its own framework as stated, then as the advice opens it."""
    run = job.run
    if isinstance(run, ServeRun):
        if run.framework in BY_LAYERS:  # these engines divide by layers over all cards themselves
            yield run
            return
        # Attention by data parallel and experts apart are choices of the job: open where it makes them.
        chosen = [key for key in ("dp", "ep") if getattr(run, key) != 1]
        yield run.model_copy(update=dict.fromkeys(("tp", "pp", *chosen), "auto"))
        return
    batch = isinstance(run.global_batch, int)
    open_: dict[str, Any] = {"dp": None, "dp_shard": None}
    if batch:
        open_["grad_accum"] = None
    if batch or any(default.key == "run.micro_batch" for default in job.defaults):
        open_["micro_batch"] = "auto"  # the batch stays, or nobody said one
    if run.framework == "megatron":
        open_ |= {"tp": "auto", "pp": "auto", "ep": "auto", "etp": 1, "vpp": 1, "pipeline_split": "uneven"}
    elif run.framework == "torchtitan":
        open_ |= {"tp": "auto", "pp": "auto", "vpp": 1}
    yield run.model_copy(update=open_)
    yield from open_runs(run)
