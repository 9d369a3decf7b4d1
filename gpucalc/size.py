"""Which GPUs to take: the cheapest, the fastest and the smallest fleet that meets a job's targets.

Every fleet is planned like any job, its layout left to the search, and judged on the estimate and at
both ends of its expected error. Where more GPUs of a kind would do worse than fewer (a degree that does
not divide, a batch too small), the larger fleet leaves some idle: more never turns a yes into a no.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpucalc.accuracy import error_table
from gpucalc.advise import open_runs
from gpucalc.catalog import Catalog
from gpucalc.errors import GpucalcError, Infeasible, InputError
from gpucalc.formulas import cost as money
from gpucalc.jobs import ResolvedJob
from gpucalc.line import Line
from gpucalc.plan.answer import Level, Plan
from gpucalc.plan.evaluate import ErrorTable, Subject
from gpucalc.plan.serve_resolve import BY_LAYERS
from gpucalc.planner import plan_job
from gpucalc.size_fleets import Kind
from gpucalc.size_targets import HOUR_S, Targets, latencies_asked, misses, rate_of, run_asked, wall_s
from gpucalc.spec.engine import EngineSpec
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.train_run import TrainRun

WORTH = 1.1  # twice the GPUs bring so much more, or a deployment has enough of them
BEATEN = "cannot be the cheapest, the fastest, the smallest or the one of least energy"
PRICE_SPREAD = 0.2  # list prices of one card differ by this and more between providers
LEAST_WEIGHT_BYTES = 0.25  # per parameter: no served format is below two bits
_ORDER = {Level.FITS: 2, Level.MARGINAL: 1, Level.DOES_NOT_FIT: 0}


@dataclass(frozen=True, slots=True)
class Offer:
    """One fleet: its plan, what it misses on the estimate and at the ends of the error, what it costs."""

    kind: Kind
    gpus: int
    used: int  # fewer than gpus where the rest stand idle
    plan: Plan
    targets: Targets
    missed: tuple[str, ...]  # speed targets, on the estimate
    missed_far: tuple[str, ...]  # with everything slower by the expected error
    missed_near: tuple[str, ...]  # with everything faster by it
    usd_per_gpu_hour: float | None  # None: no price is known
    cluster: Cluster  # the GPUs in use

    @property
    def fleet(self) -> str:
        """The words that plan it."""
        return self.kind.fleet(self.gpus)

    @property
    def level(self) -> Level:
        """Whether memory suffices."""
        return self.plan.verdict.level

    @property
    def error(self) -> float:
        """Expected error of times and rates, a fraction."""
        return self.plan.speed_error[0] if self.plan.speed_error is not None else 0.0

    @property
    def rate(self) -> float | None:
        """Tokens per second, None where the speed is not known."""
        return rate_of(self.plan) if self.plan.throughput is not None else None

    @property
    def usd_per_hour(self) -> float | None:
        """Of the whole fleet, idle GPUs too."""
        return None if self.usd_per_gpu_hour is None else self.usd_per_gpu_hour * self.gpus

    def wall_s(self, slower: float = 1.0) -> float | None:
        """Wall time of the token budget, None without one."""
        if self.targets.tokens is None or self.plan.time is None or self.plan.throughput is None:
            return None
        return wall_s(self.plan, self.targets.tokens, slower)

    def total_usd(self, slower: float = 1.0, dearer: float = 1.0) -> float | None:
        """Rental for the token budget, None without a budget or a price."""
        wall = self.wall_s(slower)
        if wall is None or self.usd_per_gpu_hour is None:
            return None
        hours = money.gpu_hours(gpus=self.gpus, training_s=wall)
        return float(money.rental_usd(gpu_hours=hours, usd_per_gpu_hour=self.usd_per_gpu_hour * dearer))

    @property
    def kwh_per_million(self) -> float | None:
        """Energy from the grid for a million tokens, None where power or speed is not known."""
        energy = _cost_line(self.plan, "energy")
        if energy is None or not self.rate:
            return None
        power, pue = (float(energy.inputs[name].value) for name in ("power_w", "pue"))
        return float(money.energy_kwh(power_w=power, training_s=1e6 / self.rate, pue=pue))

    @property
    def total_kwh(self) -> float | None:
        """Energy from the grid for the token budget, interruptions in it; None without one."""
        return self._of_budget("energy")

    @property
    def total_carbon_kg(self) -> float | None:
        """Carbon dioxide of that energy."""
        return self._of_budget("carbon")

    @property
    def owned_usd(self) -> float | None:
        """The token budget on bought machines, idle ones too; None where no price to buy is known."""
        owned = self._of_budget("owned")
        return None if owned is None else owned * self.gpus / self.used

    def _of_budget(self, name: str) -> float | None:
        line = _cost_line(self.plan, name) if self.targets.tokens is not None else None
        return None if line is None else float(line.value)

    def too_dear(self, slower: float = 1.0, dearer: float = 1.0) -> bool:
        """Whether it costs more than allowed, or nobody knows what it costs."""
        pairs = (
            (self.total_usd(slower, dearer), self.targets.budget_usd),
            (None if self.usd_per_hour is None else self.usd_per_hour * dearer, self.targets.usd_per_hour),
        )
        return any(limit is not None and (cost is None or cost > limit) for cost, limit in pairs)

    @property
    def meets(self) -> bool:
        """Whether it may fit and meets every target on the estimate."""
        return self.level is not Level.DOES_NOT_FIT and not self.missed and not self.too_dear()

    @property
    def holds(self) -> bool:
        """Whether it still does with memory and time worse by the expected error."""
        return self.level is Level.FITS and not self.missed_far and not self.too_dear(1 + self.error)

    @property
    def works(self) -> tuple[int, int]:
        """How well it answers, money apart; never falls with more GPUs of a kind."""
        fits = self.level is not Level.DOES_NOT_FIT
        safe = self.level is Level.FITS and not self.missed_far
        return (2 if safe else 1 if fits and not self.missed else 0, _ORDER[self.level])


@dataclass(frozen=True, slots=True)
class Sizing:
    """Every fleet that was planned, the best three, and why others were not planned."""

    name: str
    task: str
    targets: Targets
    offers: tuple[Offer, ...]  # cheapest first, those without a price last
    skipped: tuple[tuple[str, str], ...]  # fleet, reason
    latencies: tuple[str, ...] = ()  # what the job itself asks of a deployment, in words
    run: tuple[str, ...] = ()  # what is run, in words
    together: str | None = None  # the user's own unlike cards, each kind of which was sized alone

    @property
    def meeting(self) -> tuple[Offer, ...]:
        """The fleets that meet every target, those that surely fit before those that may."""
        found = [offer for offer in self.offers if offer.meets]
        return tuple(sorted(found, key=lambda offer: offer.level is not Level.FITS))

    @property
    def cheapest(self) -> Offer | None:
        """The least money for the tokens, else per hour; None when none that meets them has a price."""
        return self._best([offer for offer in self.meeting if offer.usd_per_gpu_hour is not None], _price)

    @property
    def fastest(self) -> Offer | None:
        """The highest rate; of equal ones the smaller."""
        return self._best(
            [o for o in self.meeting if o.rate is not None], lambda o: (-(o.rate or 0.0), o.gpus)
        )

    @property
    def smallest(self) -> Offer | None:
        """The fewest GPUs; of equal ones the cheaper."""
        return self._best(self.meeting, lambda offer: (offer.gpus, *_price(offer)))

    @property
    def leanest(self) -> Offer | None:
        """The least energy a token; None when none that meets them has a known power."""
        known = [offer for offer in self.meeting if offer.kwh_per_million is not None]
        return self._best(known, lambda offer: (offer.kwh_per_million, offer.gpus))

    @property
    def cheapest_that_holds(self) -> Offer | None:
        """The cheapest at the far end of the error: what to take to be sure."""
        priced = [offer for offer in self.meeting if offer.holds and offer.usd_per_gpu_hour is not None]
        return min(priced, key=_price, default=None)

    @property
    def as_cheap(self) -> tuple[Offer, ...]:
        """Other kinds that would be cheapest with prices a fifth off: theirs lower, the cheapest's higher."""
        best = self.cheapest
        if best is None:
            return ()
        limit = _price(best)[1] * (1 + PRICE_SPREAD) / (1 - PRICE_SPREAD)
        others: dict[str, Offer] = {}
        for offer in sorted((o for o in self.meeting if o.level is best.level), key=_price):
            if offer.usd_per_gpu_hour is not None and offer.kind != best.kind and _price(offer)[1] < limit:
                others.setdefault(offer.kind.gpu.id, offer)
        return tuple(others.values())

    @staticmethod
    def _best(offers: Sequence[Offer], key: Any) -> Offer | None:
        # What surely fits goes before what may: a marginal fleet is an answer only where no other is.
        return min(offers, key=lambda offer: (offer.level is not Level.FITS, *key(offer)), default=None)


def _cost_line(plan: Plan, name: str) -> Line | None:
    """A part of a plan's cost, None where the plan has none."""
    return next((line for line in plan.cost.children if line.name == name), None) if plan.cost else None


def _joules_per_token(cluster: Cluster, rate: float | None) -> float | None:
    """Energy of a token at the GPUs' limits, which comparisons of one job's fleets need no more of."""
    limits = [pool.gpu.tdp for pool in cluster.pools]
    if not rate or any(limit is None for limit in limits):
        return None
    watts = sum(pool.count * limit.si for pool, limit in zip(cluster.pools, limits, strict=True) if limit)
    return watts / rate


ORDERS: dict[str, Callable[[Offer], tuple[Any, ...]]] = {
    "price": lambda offer: _price(offer),
    "speed": lambda offer: (-(offer.rate or 0.0), offer.gpus),
    "gpus": lambda offer: (offer.gpus, *_price(offer)),
    "energy": lambda offer: (offer.kwh_per_million is None, offer.kwh_per_million or 0.0, offer.gpus),
}


def _price(offer: Offer) -> tuple[bool, float, int]:
    """Order by money: of the token budget where there is one, else per hour; no price comes last."""
    cost = offer.usd_per_hour if offer.targets.tokens is None else offer.total_usd()
    return cost is None, cost or 0.0, offer.gpus


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
    subject = Subject.of(job.model)
    errors = error_table(catalog)
    offers: list[Offer] = []
    skipped: list[tuple[str, str]] = []
    network = job.job.network
    if network is not None:  # unlike cards are not sized
        network = network.model_copy(update={"one_host": False})
    rent = job.job.costs.usd_per_gpu_hour if job.job.costs is not None else None
    looked, all_fleets = 0, sum(len(kind.counts) for kind in kinds)
    # The quickest cards first: what they reach lets most fleets of slower ones go unplanned.
    for kind in sorted(kinds, key=lambda kind: -_peak(kind.gpu)):
        best: Offer | None = None  # of the kind so far
        for number, count in enumerate(kind.counts):
            if progress is not None:
                progress(looked + number, all_fleets)
            reason: str | None
            found: Offer | None = None
            try:
                cluster = kind.cluster(catalog, count, network)
                reason = _hopeless(
                    job.run, subject, cluster, targets, _hourly(kind, cluster, rent)
                ) or _beaten(job.run, subject, cluster, targets, best, offers, _hourly(kind, cluster, rent))
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
    offers.sort(key=_price)
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
    spread = best.speed_error[0] if best.speed_error is not None else 0.0
    return Offer(
        kind=kind,
        gpus=cluster.count,
        used=cluster.count,
        plan=best,
        targets=targets,
        missed=misses(best, job.run, targets),
        missed_far=misses(best, job.run, targets, 1 + spread),
        missed_near=misses(best, job.run, targets, max(0.1, 1 - spread)),
        cluster=cluster,
        usd_per_gpu_hour=_hourly(kind, cluster, rent),
    )


def _better(plan: Plan, than: Plan) -> bool:
    """Whether a plan fits more surely; of two that do not fit, the one that lacks less."""
    ours, theirs = plan.verdict, than.verdict
    if ours.level is theirs.level is Level.DOES_NOT_FIT:
        return ours.margin_bytes > theirs.margin_bytes
    return _ORDER[ours.level] > _ORDER[theirs.level]


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


def _hopeless(
    run: TrainRun | ServeRun,
    subject: Subject,
    cluster: Cluster,
    targets: Targets,
    hourly: float | None,
) -> str | None:
    """Why no layout can do, by bounds no plan goes below; None where one may. Spares most of the plans.

    Memory: the fewest bytes a parameter takes, over all GPUs together. Speed: every GPU
    at its dense rate, two FLOPs a weight forward and four backward. Money is not a bound
    here but exact: the price of an hour is known before planning.
    """
    limit = targets.usd_per_hour
    if limit is not None and (hourly is None or hourly * cluster.count > limit):
        return "no price is known" if hourly is None else f"${hourly * cluster.count:,.2f} an hour"
    least = float(subject.counts.total.value) * _least_bytes(run)
    memory = sum(pool.count * float(pool.gpu.usable_memory().value) for pool in cluster.pools)
    if least > memory:
        return f"what it must hold is {least / memory:.1f} times its memory"
    needed, most = targets.required_per_s, _most_per_s(run, subject, cluster)
    if needed is not None and most is not None and needed > most:
        return f"{needed / most:.1f} times what its peak could do is asked"
    return None


def _least_bytes(run: TrainRun | ServeRun) -> float:
    """Bytes a parameter takes at the least, wherever it lies and however it is divided."""
    if isinstance(run, ServeRun):
        return LEAST_WEIGHT_BYTES
    if run.offload != "none" or run.method == "qlora" or run.precision not in ("bf16", "fp16", "fp32"):
        return 0.0
    if run.method != "full" or run.frozen:
        return 2.0  # 16-bit weights
    adam = run.optimizer in ("adamw", "adamw-fused", "adamw-unfused", "adam")
    return 12.0 if adam else 4.0  # an fp32 copy and two fp32 moments; else 16-bit weights and gradients


def _most_per_s(run: TrainRun | ServeRun, subject: Subject, cluster: Cluster) -> float | None:
    """Tokens per second that no layout exceeds, None where a token's work is not known beforehand."""
    if len(subject.graph.stacks) != 1:  # an encoder and a decoder share the tokens
        return None
    full = isinstance(run, TrainRun) and run.method == "full" and not run.frozen
    flops = (6 if full else 2) * float(subject.counts.matmul_params)
    peak = sum(pool.count * _peak(pool.gpu, run) for pool in cluster.pools)
    return peak / flops if peak and flops else None


def _peak(gpu: GpuSpec, run: TrainRun | ServeRun | None = None) -> float:
    """The dense rate of a card in the run's precision; where that says nothing, the highest in any."""
    own = gpu.peak(run.precision) if isinstance(run, TrainRun) and run.precision in gpu.peaks else None
    return float(own.value) if own is not None else max((f.si for f in gpu.peaks.values()), default=0.0)


def _beaten(
    run: TrainRun | ServeRun,
    subject: Subject,
    cluster: Cluster,
    targets: Targets,
    smaller: Offer | None,
    offers: Sequence[Offer],
    hourly: float | None,
) -> str | None:
    """Why a training fleet need not be planned: fewer of its kind do, and at its peak it would be neither
    the fastest nor the one of least energy nor, prices a fifth off, the cheapest. Leaves the answers as
    they are.
    """
    most = _most_per_s(run, subject, cluster)
    if not isinstance(run, TrainRun) or most is None or smaller is None:
        return None
    if not (smaller.meets and smaller.holds):
        return None
    holding = [offer for offer in offers if offer.meets and offer.holds]
    if most > max(offer.rate or 0.0 for offer in holding):
        return None
    drawn = _joules_per_token(cluster, most)
    spent = [joules for offer in holding if (joules := _joules_per_token(offer.cluster, offer.rate))]
    if drawn is not None and drawn < min(spent, default=math.inf):
        return None
    if hourly is None or targets.tokens is None:
        return BEATEN
    least = hourly * cluster.count * targets.tokens / most / HOUR_S
    totals = [total for offer in holding if (total := offer.total_usd()) is not None]
    return BEATEN if totals and least * (1 - PRICE_SPREAD) > min(totals) * (1 + PRICE_SPREAD) else None
