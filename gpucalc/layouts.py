"""A job's best layout among all: the winner, what comes close, memory against time, and the job's own.

Every layout key is left to the search, whatever the job says, save those that are set on the command
line; the global batch stays the job's. On a fleet that is given, cost and energy follow time, so a
ranking by them, or by the fewest GPUs, also looks at smaller fleets of the same GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpucalc.accuracy import error_table
from gpucalc.catalog import Catalog
from gpucalc.errors import Infeasible, InputError, UnknownName, nearest
from gpucalc.jobs import ResolvedJob
from gpucalc.plan.answer import Level, Plan
from gpucalc.plan.evaluate import ErrorTable, Subject
from gpucalc.plan.layout import Layout
from gpucalc.plan.resolve import resolve_layout
from gpucalc.plan.rules import divisors
from gpucalc.planner import plan_job
from gpucalc.search import AUTO_KEYS, explore, settle_best, simulated_step, with_chosen
from gpucalc.search.found import Candidate, Found
from gpucalc.search.space import Space
from gpucalc.search.worth import Scale
from gpucalc.spec.defaults import STAGE_KEYS
from gpucalc.spec.fleet import FleetPart
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.train_run import TrainRun

RANKS = ("time", "cost", "energy", "gpus")
SHOWN = 8  # layouts listed, and at most so many of the front
SAID_BY_DEGREES = ("none", "1f1b", "interleaved")  # schedules that pp and vpp say
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Option:
    """A layout by its keys, and its headline numbers.

    run: the job's with this layout. plan: where these numbers come from, of layouts that were planned whole.
    """

    keys: Mapping[str, Any]
    level: Level
    needed_bytes: float
    step_s: float | None
    samples_per_s: float | None
    run: TrainRun | None = field(default=None, compare=False, repr=False)
    plan: Plan | None = field(default=None, compare=False, repr=False)

    def document(self) -> dict[str, Any]:
        """The same for a JSON document."""
        return {
            "layout": dict(self.keys),
            "level": self.level.value,
            "needed_bytes": self.needed_bytes,
            "step_s": self.step_s,
            "samples_per_s": self.samples_per_s,
        }


@dataclass(frozen=True, slots=True)
class Size:
    """The best layout on so many GPUs."""

    gpus: int
    option: Option | None  # None: no layout is legal, or none fits
    usd_per_gpu_hour: float | None = None  # None: no price is known
    kilowatts_per_gpu: float | None = None  # from the grid, hosts and cooling in it; None: not known
    sample_tokens: int = 1  # samples of models that read none

    @property
    def gpu_s_per_sample(self) -> float | None:
        """GPU-seconds of a sample, which rental and energy follow."""
        if self.option is None or not self.option.samples_per_s:
            return None
        return self.gpus / self.option.samples_per_s

    @property
    def gpu_hour_known(self) -> bool:
        """Whether the money or the energy of a GPU-hour is known."""
        return self.usd_per_gpu_hour is not None or self.kilowatts_per_gpu is not None

    @property
    def usd_per_million(self) -> float | None:
        """Rental of a million tokens, samples of models that read none; without what failures take."""
        return self._per_million(self.usd_per_gpu_hour)

    @property
    def kwh_per_million(self) -> float | None:
        """Energy of them."""
        return self._per_million(self.kilowatts_per_gpu)

    def _per_million(self, of_gpu_hour: float | None) -> float | None:
        paid = self.gpu_s_per_sample
        return (
            None
            if paid is None or of_gpu_hour is None
            else 1e6 * paid / 3600 * of_gpu_hour / self.sample_tokens
        )


@dataclass(frozen=True, slots=True)
class Layouts:
    """What the search over a job's layouts found."""

    name: str
    ranked_by: str
    searched: tuple[str, ...]  # keys left to the search
    held: Mapping[str, Any]  # those set on the command line
    best: Plan
    options: tuple[Option, ...]  # the best first
    front: tuple[Option, ...]  # least memory first, each faster than those before
    own: Plan | None
    own_option: Option | None
    own_broken: tuple[str, ...]  # rules the job's own layout breaks
    own_states_dp: bool
    states_batch: bool  # the job's own words give the global batch
    accumulates: bool  # the job's own words give it by accumulation
    sizes: tuple[Size, ...]  # of a ranking that looks at smaller fleets
    legal: int
    fitting: int
    timed: int
    seconds: float  # of one core
    in_columns: bool

    @property
    def per_second(self) -> float:
        """Layouts a second on one core."""
        return self.legal / max(self.seconds, 1e-9)

    def differing(self) -> dict[str, tuple[Any, Any]]:
        """Keys on which the job's own layout and the best differ, with both values."""
        if self.own_option is None or not self.options:
            return {}
        best, own = self.options[0].keys, self.own_option.keys
        return {key: (own[key], best[key]) for key in best if not same(key, own, best)}

    def terms(self) -> tuple[tuple[str, float, float], ...]:
        """Parts of the step in which the two differ, the largest difference first: name, own, best."""
        if self.own is None or self.own.time is None or self.best.time is None:
            return ()
        own = {line.name: float(line.value) for line in self.own.time.children}
        best = {line.name: float(line.value) for line in self.best.time.children}
        rows = [(name, own.get(name, 0.0), best.get(name, 0.0)) for name in {**own, **best}]
        return tuple(sorted(rows, key=lambda row: -abs(row[1] - row[2])))

    def settings(self) -> dict[str, Any]:
        """Keys and values that turn the job into the best layout: those that differ from its own."""
        best = self.options[0].keys
        own = self.own_option.keys if self.own_option is not None else {}
        changed = {key: best[key] for key in self.searched if not same(key, own, best)}
        if "recompute" in self.searched and best["recompute_modules"] not in (
            None,
            own.get("recompute_modules"),
        ):
            changed["recompute_modules"] = best["recompute_modules"]
        if self.own is None or not self.own_states_dp:
            changed.pop("dp", None)
        if best["schedule"] in SAID_BY_DEGREES:
            changed.pop("schedule", None)
        if self.accumulates:
            return changed | {"grad_accum": self.best.layout.micro_batches}
        return changed if self.states_batch else changed | {"global_batch": self.best.layout.global_batch}

    def document(self) -> dict[str, Any]:
        """The same for a JSON document, beside the plan of the best layout."""
        return {
            "ranked_by": self.ranked_by,
            "searched": list(self.searched),
            "held": dict(self.held),
            "legal_layouts": self.legal,
            "fitting_layouts": self.fitting,
            "timed_layouts": self.timed,
            "core_s": self.seconds,
            "layouts_per_s_per_core": self.per_second,
            "in_columns": self.in_columns,
            "settings": {f"run.{key}": value for key, value in self.settings().items()},
            "options": [option.document() for option in self.options],
            "memory_against_time": [option.document() for option in self.front],
            "own": None if self.own_option is None else self.own_option.document(),
            "own_broken_rules": list(self.own_broken),
            "differing_keys": {
                key: {"own": own, "best": best} for key, (own, best) in self.differing().items()
            },
            "differing_terms": [
                {"name": name, "own_s": own, "best_s": best} for name, own, best in self.terms()
            ],
            "sizes": [
                {
                    "gpus": size.gpus,
                    "best": None if size.option is None else size.option.document(),
                    "gpu_s_per_sample": size.gpu_s_per_sample,
                    "usd_per_million_tokens": size.usd_per_million,
                    "kwh_per_million_tokens": size.kwh_per_million,
                }
                for size in self.sizes
            ],
        }


def one_copy(keys: Mapping[str, Any]) -> bool:
    """Whether all data-parallel ranks share one copy of sharded state: dp_shard says no more than dp."""
    return bool(keys["dp_shard"] == keys["dp"])


def same(key: str, own: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
    """Whether two layouts say the same by a key."""
    if key == "dp_shard" and own and one_copy(best):
        return one_copy(own)
    return bool(own.get(key) == best[key])


def best_layouts(
    job: ResolvedJob,
    catalog: Catalog,
    *,
    held: Iterable[str] = (),
    rank: str = "time",
    progress: Progress | None = None,
) -> Layouts:
    """The best layouts of a job with every layout key open but those held.

    Raises InputError for what is no training run, Infeasible where no layout is legal.
    """
    if rank not in RANKS:
        raise UnknownName(
            "unknown ranking", where="--rank", given=rank, legal=RANKS, near=nearest(rank, RANKS)
        )
    run = job.run
    if not isinstance(run, TrainRun):
        raise InputError("only layouts of training runs are searched", where=job.where, key="run.task")
    subject = Subject.of(job.model, job.draft)
    cluster = catalog.cluster(job.fleet, job.job.system, network=job.job.network)
    errors = error_table(catalog)
    own, broken = _own(job, catalog, subject, cluster)
    kept = {key.removeprefix("run.") for key in held}
    free, searched = opened(
        run,
        own.layout if own is not None else None,
        kept=kept,
        unstated={item.key for item in job.defaults},
    )
    fleets = [(job, cluster)] if rank == "time" else _smaller(job, catalog, cluster)
    explored: list[tuple[ResolvedJob, Cluster, Space, Found]] = []
    sizes: list[Size] = []
    for part, there in fleets:
        space = Space(subject.graph, free, there)
        try:
            found = explore(subject, space, there, errors, keep=SHOWN, progress=progress)
        except Infeasible:
            if len(fleets) == 1:
                raise
            sizes.append(Size(there.count, None))
            continue
        explored.append((part, there, space, found))
        first = found.best[0]
        sizes.append(Size(there.count, _option(space, subject, there, first) if first.fits else None))
        if rank == "gpus" and first.fits:
            break
    if not explored:
        raise Infeasible(["no layout is legal on any number of these GPUs"])
    part, there, space, found = _winner(explored, sizes, rank)
    settled, chosen = settle_best(space, found)
    plan = plan_job(
        replace(part, job=part.job.model_copy(update={"run": settled})),
        catalog,
        subject=subject,
        cluster=there,
        errors=errors,
        advice=False,
    )
    return Layouts(
        name=job.name,
        ranked_by=rank,
        searched=searched,
        held={key: getattr(run, key) for key in sorted(kept & set(AUTO_KEYS))},
        best=replace(plan, assumptions=with_chosen(plan.assumptions, chosen)),
        options=tuple(_option(space, subject, there, one) for one in found.best[:SHOWN]),
        front=tuple(
            _option(space, subject, there, one) for one in _front(space, subject, there, errors, found)
        ),
        own=own,
        own_option=_plan_option(own) if own is not None else None,
        own_broken=broken,
        own_states_dp=isinstance(run.dp, int),
        states_batch=isinstance(run.global_batch, int),
        accumulates=run.grad_accum is not None,
        sizes=_paid(sizes, plan) if rank != "time" else (),
        legal=sum(item[3].legal for item in explored),
        fitting=sum(item[3].fitting for item in explored),
        timed=sum(item[3].timed for item in explored),
        seconds=sum(item[3].seconds for item in explored),
        in_columns=any(item[3].in_columns for item in explored),
    )


def planned_whole(found: Layouts, job: ResolvedJob, catalog: Catalog) -> Layouts:
    """What a search found, with the plan of every layout it lists.

    A search works out numbers alone; a report that opens them needs the lines they come from. job: the one
    that was searched, on the fleet of the best layout.
    """
    subject = Subject.of(job.model, job.draft)
    cluster = catalog.cluster(job.fleet, job.job.system, network=job.job.network)
    errors = error_table(catalog)

    def whole(option: Option) -> Option:
        if option.run is None or option.plan is not None:
            return option
        settled = replace(job, job=job.job.model_copy(update={"run": option.run}))
        plan = plan_job(settled, catalog, subject=subject, cluster=cluster, errors=errors, advice=False)
        return replace(option, plan=plan)

    return replace(
        found,
        options=tuple(whole(option) for option in found.options),
        front=tuple(whole(option) for option in found.front),
    )


def _paid(sizes: Iterable[Size], best: Plan) -> tuple[Size, ...]:
    """The sizes with what a GPU-hour costs in money and energy, as the plan of the best has it."""
    if best.cost is None or best.throughput is None:
        return tuple(sizes)
    lines = {line.name: line for line in best.cost.children}
    money, energy = lines.get("rental"), lines.get("energy")
    watts = None if energy is None else float(energy.inputs["power_w"].value * energy.inputs["pue"].value)
    tokens = best.throughput.child("tokens_per_s").value / best.throughput.value
    price = None if money is None else float(money.inputs["usd_per_gpu_hour"].value)
    drawn = None if watts is None else watts / 1000 / best.gpus
    return tuple(
        replace(size, usd_per_gpu_hour=price, kilowatts_per_gpu=drawn, sample_tokens=round(float(tokens)))
        for size in sizes
    )


def _own(
    job: ResolvedJob, catalog: Catalog, subject: Subject, cluster: Cluster
) -> tuple[Plan | None, tuple[str, ...]]:
    """The plan of the job as it stands, timed whether it fits or not; or the rules it breaks."""
    try:
        plan = plan_job(job, catalog, subject=subject, cluster=cluster, advice=False, always_time=True)
    except Infeasible as error:
        return None, tuple(error.rules)
    return plan, ()


def opened(
    run: TrainRun, own: Layout | None, *, kept: Collection[str] = (), unstated: Collection[str] = ()
) -> tuple[TrainRun, tuple[str, ...]]:
    """The run with its layout keys left to the search, save those kept, and which those are.

    The batch stays that of its own layout. unstated: keys of the run that a default filled.
    """
    update: dict[str, Any] = {}
    for key in AUTO_KEYS:
        if key in kept:
            continue
        try:
            TrainRun.read({"framework": run.framework, key: "auto"})
        except InputError:
            continue  # not a key of this framework
        update[key] = "auto"
    searched = tuple(update)
    if "zero_stage" in update:
        update["reshard_after_forward"] = None
        update |= {key: None for key in STAGE_KEYS if f"run.{key}" in unstated}
    if "dp_shard" not in kept:
        update.setdefault("dp_shard", None)
    if run.framework == "torchtitan" and run.compile and "run.fused_loss" in unstated:
        update["fused_loss"] = None  # follows tp
    if "grad_accum" not in kept:
        update["grad_accum"] = None
        if own is not None:
            update["global_batch"] = own.global_batch
    return run.model_copy(update=update), searched


def _smaller(job: ResolvedJob, catalog: Catalog, cluster: Cluster) -> list[tuple[ResolvedJob, Cluster]]:
    """The job on every part of its fleet that is made of whole nodes or lies in one, smallest first."""
    parts = job.fleet.parts
    if len(parts) > 1:
        raise InputError(
            "smaller fleets of several GPU kinds are not searched", key="gpus", given=str(job.fleet),
            legal="--rank time",
        )  # fmt: skip
    node = cluster.gpus_per_node
    found = []
    for count in divisors(cluster.count):
        if count > node and count % node:
            continue
        part = parts[0]
        fleet = (
            FleetPart(count // node, node, part.gpu)
            if part.nodes is not None and count % node == 0
            else FleetPart(None, count, part.gpu)
        )
        there = catalog.cluster([fleet], job.job.system, network=job.job.network)
        named = replace(job, job=job.job.model_copy(update={"gpus": str(fleet)}))
        found.append((named, there))
    return found


def _winner(
    explored: list[tuple[ResolvedJob, Cluster, Space, Found]], sizes: list[Size], rank: str
) -> tuple[ResolvedJob, Cluster, Space, Found]:
    fitting = [item for item in explored if item[3].best[0].fits]
    if not fitting:
        return explored[-1]
    if rank in ("time", "gpus"):
        return fitting[0]
    paid = {size.gpus: size.gpu_s_per_sample for size in sizes}
    return min(fitting, key=lambda item: (paid[item[1].count], -item[1].count))


def _option(space: Space, subject: Subject, cluster: Cluster, one: Candidate) -> Option:
    run = space.settled(one.values)
    layout, _ = resolve_layout(run, subject.graph, gpus=cluster.count)
    level = Level.DOES_NOT_FIT if not one.fits else Level.MARGINAL if one.tier else Level.FITS
    timed = one.fits
    return Option(
        _keys(
            layout,
            run.recompute,
            run.recompute_modules if run.recompute == "selective" else None,
            run.offload,
        ),
        level,
        one.needed_bytes,
        one.step_s if timed else None,
        one.samples_per_s if timed else None,
        run,
    )


def _plan_option(plan: Plan) -> Option:
    recipe = plan.recipe
    recompute, modules = recipe.recompute, None
    if recompute == "selective" and recipe.recompute_scope == "modules":
        modules = recipe.recompute_modules
    elif recompute == "selective" and recipe.recompute_scope != "core":
        recompute = f"selective-{recipe.recompute_scope}"
    return Option(
        _keys(plan.layout, recompute, modules, _offload(recipe.offload)),
        plan.verdict.level,
        float(plan.verdict.needed.value),
        None if plan.time is None else float(plan.time.value),
        None if plan.throughput is None else float(plan.throughput.value),
        plan=plan,
    )


def _offload(parts: tuple[str, ...]) -> str:
    """The word for what is offloaded."""
    if not parts:
        return "none"
    where = "nvme" if "nvme" in parts else "cpu"
    if "activations" in parts:
        return "activations-cpu"
    if "parameters" in parts:
        return f"params+optimizer-{where}"
    return "optimizer+gradients-cpu" if "gradients" in parts else f"optimizer-{where}"


def _keys(layout: Layout, recompute: str, modules: tuple[str, ...] | None, offload: str) -> dict[str, Any]:
    """A layout by the keys that say it."""
    return {
        "tp": layout.tp,
        "pp": layout.pp,
        "vpp": layout.vpp,
        "cp": layout.cp,
        "ep": layout.ep,
        "etp": layout.etp,
        "dp": layout.dp,
        "dp_shard": layout.shard // layout.cp if layout.zero_stage else layout.dp,
        "zero_stage": layout.zero_stage,
        "micro_batch": layout.micro_batch,
        "recompute": recompute,
        "recompute_modules": modules,
        "sequence_parallel": layout.sequence_parallel,
        "offload": offload,
        "schedule": layout.schedule,
    }


def _front(
    space: Space, subject: Subject, cluster: Cluster, errors: ErrorTable, found: Found
) -> list[Candidate]:
    """Some of the front by their schedules' own times, with the best; those that these leave on it."""
    scale = Scale(subject, cluster, errors)
    run = [simulated_step(space, scale, one) for one in _thinned(found.front)]
    kept: list[Candidate] = []
    for one in sorted([*run, found.best[0]], key=lambda one: (one.needed_bytes, -one.samples_per_s)):
        if one.fits and (not kept or one.samples_per_s > kept[-1].samples_per_s):
            kept.append(one)
    return kept


def _thinned(front: list[Candidate]) -> list[Candidate]:
    """At most so many of the front: the ends, and between them about evenly spread over memory."""
    if len(front) <= SHOWN:
        return front
    low, high = front[0].needed_bytes, front[-1].needed_bytes
    chosen: dict[int, Candidate] = {}
    for number in range(SHOWN):
        wanted = low + (high - low) * number / (SHOWN - 1)
        place = min(range(len(front)), key=lambda index: abs(front[index].needed_bytes - wanted))
        chosen[place] = front[place]
    return [chosen[place] for place in sorted(chosen)]
