"""One deployment to one plan: memory as the engine divides it, the verdict, the cache, speed and cost.

Nothing is searched here: every degree is a number. `gpucalc.search_serving` settles what is "auto".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpucalc.errors import GpucalcError
from gpucalc.line import Line
from gpucalc.plan.answer import Assumption, Level, LoadPoint, Plan, Verdict
from gpucalc.plan.economics import cost_line
from gpucalc.plan.evaluate import ErrorTable, Subject, Terms, fleet_notes, model_line
from gpucalc.plan.launch import launch_line
from gpucalc.plan.serve_loads import at_rate, at_targets, keeps_up, pareto
from gpucalc.plan.serve_memory import serving_memory
from gpucalc.plan.serve_parts import ERROR_BASIS, NOTHING_LOGGED, Logged
from gpucalc.plan.serve_resolve import serve_layout, serve_recipe
from gpucalc.plan.serve_time import serving_time
from gpucalc.plan.serving_layout import ServeLayout, ServeRecipe, ServingMemory, ServingTime
from gpucalc.spec.engine import EngineEra, EngineSpec
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.model import ModelSpec
from gpucalc.spec.serve_run import ServeRun

PHASE = "serve"
RIVAL_ROWS = 4  # loads of another layout that are looked at
CLEARLY = 1.01


@dataclass(frozen=True, slots=True)
class Deployment:
    """A settled serving run worked out: its layout, recipe and memory, and the assumptions on the way."""

    layout: ServeLayout
    recipe: ServeRecipe
    era: EngineEra
    memory: ServingMemory
    assumptions: tuple[Assumption, ...]

    @property
    def level(self) -> Level:
        """Whether the engine starts: within the budget and the card, beyond the expected error or not."""
        memory = self.memory
        over = memory.needed.value - memory.capacity.value
        if over + memory.uncertain_bytes <= 0:
            return Level.FITS
        return Level.MARGINAL if over - memory.uncertain_bytes <= 0 else Level.DOES_NOT_FIT

    @property
    def cached_tokens(self) -> float:
        """Tokens one cache holds in requests of the run's own length, windows and states counted."""
        return float(self.memory.seats.value) * self.recipe.context

    @property
    def held_requests(self) -> int:
        """Requests of the run's own length that run at once: in the caches of the copies that decode."""
        caches = self.layout.decoding_caches(self.recipe.traffic.prefill_replicas)
        return int(self.memory.seats.value) * caches


def deploy(
    subject: Subject, run: ServeRun, cluster: Cluster, engine: EngineSpec, *, logged: Logged = NOTHING_LOGGED
) -> Deployment:
    """The memory side of a settled run. Raises Infeasible or InputError."""
    layout, laid = serve_layout(run, subject.graph, gpus=cluster.count)
    draft = subject.draft
    recipe, era, chosen = serve_recipe(
        run,
        subject.spec,
        subject.graph,
        engine,
        cluster,
        layout,
        draft=(draft.spec, draft.graph) if draft is not None else None,
    )
    # Copies of an engine are alike, and fleets of the same card are searched one after another.
    degrees = (layout.tp, layout.pp, layout.dp, layout.ep, layout.decode_context)
    linked = layout.tp == 1 or cluster.nvlink_domain > 1
    cards = (tuple(sorted({pool.gpu.id for pool in cluster.pools})), linked)
    key = (degrees, cards, recipe.memory_key())
    memory = subject.held.get(key) if logged is NOTHING_LOGGED else None
    if memory is None:
        memory = serving_memory(subject.graph, layout, recipe, era, cluster, logged=logged)
        if logged is NOTHING_LOGGED:
            subject.held[key] = memory
    return Deployment(layout, recipe, era, memory, (*laid, *chosen))


def evaluate_serving(
    subject: Subject,
    run: ServeRun,
    cluster: Cluster,
    engine: EngineSpec,
    terms: Terms,
    *,
    loads: bool = False,
    most: bool = True,
    rivals: Sequence[Deployment] = (),
) -> Plan:
    """The plan of a settled serving run; with `loads` its speed at other loads too.

    most: look for the largest load within the run's targets. rivals: other layouts to set beside this one.

    Raises Infeasible or InputError.
    """
    found, most_served, arriving = loaded(subject, deploy(subject, run, cluster, engine), engine, cluster)
    verdict = _verdict(found)
    time: ServingTime | None = None
    told = list(found.memory.notes)
    if terms.always_time or verdict.level is not Level.DOES_NOT_FIT:
        time, why = timed(subject, found, engine, cluster)
        told += [why] if why else []
        told += list(time.notes) if time is not None else []
    told += [*arriving, *_cache_notes(found)]
    nodes = -(-found.layout.engine_gpus // cluster.gpus_per_node)
    launch, wanting = launch_line(engine, found.layout, found.recipe, subject.spec, run, nodes=nodes)
    told += [*wanting, *_not_served(subject.spec, engine, found.recipe.version, cluster)]
    stated = {item.key for item in terms.assumptions}
    own = tuple(item for item in found.assumptions if item.key not in stated)
    known, economics = terms.errors or ErrorTable(), terms.economics
    rates = None
    points: tuple[LoadPoint, ...] = ()
    if time is not None:
        best = _at_targets(subject, found, engine, cluster) if most else None
        rates = _rates(time, found, best, most_served)
        if best is None and most and has_targets(found.recipe):
            told.append("no load meets the targets")
        if loads:
            points = _loads(subject, found, engine, cluster, time, best, rivals)
    return Plan(
        name=terms.name,
        model=model_line(subject.counts),
        fleet=terms.fleet,
        gpus=cluster.count,
        recipe=found.recipe,
        layout=found.layout,
        verdict=verdict,
        memory=found.memory.tree,
        time=time.decode_step_s if time is not None else None,
        throughput=rates,
        cost=cost_line(
            cluster, time.output_tokens_per_s, economics.money if economics is not None else None, serves=True
        )
        if time is not None
        else None,
        speed_error=known.serving_error(found.recipe.engine, alone=found.recipe.concurrency == 1)
        if time is not None
        else None,
        binds=time.binds if time is not None else "memory capacity",
        assumptions=(
            *terms.assumptions,
            *own,
            *(Assumption("gpus", "", text) for text in cluster.assumptions),
            *(economics.assumed(costs=time is not None, failures=False) if economics is not None else ()),
        ),
        actions=(),
        notes=(*subject.graph.notes, *terms.notes, *fleet_notes(cluster), *dict.fromkeys(told)),
        cache=_cache(found),
        loads=points,
        launch=launch,
    )


def loaded(
    subject: Subject, found: Deployment, engine: EngineSpec, cluster: Cluster
) -> tuple[Deployment, Line | None, tuple[str, ...]]:
    """The deployment under the load its run states, the most it serves, and what to say.

    The load of a request rate is looked for; one that is stated is taken as it is.
    """
    rate = found.recipe.request_rate
    if rate is None or found.level is Level.DOES_NOT_FIT:
        return found, None, ()
    try:
        point, most = at_rate(
            subject.graph,
            found.layout,
            found.recipe,
            engine,
            cluster,
            kv_tokens=found.cached_tokens,
            requests_per_s=rate,
        )
    except GpucalcError as error:
        return found, None, (f"how many requests are in flight is not known: {error}",)
    recipe = replace(found.recipe, concurrency=max(point.concurrency, 1))
    if keeps_up(point, rate):
        told = f"{rate:g} requests/s keep {recipe.concurrency:,} in flight"
    else:
        assert most.requests_per_s is not None
        told = f"{rate:g} requests/s arrive, at most {most.requests_per_s.value:,.2f} leave: the queue grows"
    return replace(found, recipe=recipe), most.requests_per_s, (told,)


def timed(
    subject: Subject, found: Deployment, engine: EngineSpec, cluster: Cluster
) -> tuple[ServingTime | None, str | None]:
    """The speed of a deployment, or why there is none to show."""
    try:
        time = serving_time(
            subject.graph,
            found.layout,
            found.recipe,
            engine,
            cluster,
            kv_tokens=found.cached_tokens,
        )
    except GpucalcError as error:
        return None, f"no speed: {error}"
    return time, None


def _verdict(found: Deployment) -> Verdict:
    memory = found.memory
    return Verdict(
        level=found.level,
        needed=memory.needed,
        capacity=memory.capacity,
        margin_bytes=memory.capacity.value - memory.needed.value,
        expected_error=memory.uncertain_bytes / memory.needed.value if memory.needed.value else 0.0,
        error_basis=ERROR_BASIS,
        binds=memory.binds,
        phase=PHASE,
        stage=memory.stage,
    )


def _cache(found: Deployment) -> Line:
    memory = found.memory
    parts = (
        memory.budget,
        memory.pool,
        memory.kv_bytes_per_token,
        memory.state_bytes,
        memory.kv_blocks,
        memory.kv_tokens,
        memory.max_concurrency,
        found.memory.seats,
    )
    shown = tuple(part for part in parts if part.value or part is not memory.state_bytes)
    return Line("cache", memory.pool.value, "bytes", memory.pool.kind, children=shown, note="on one GPU")


def _cache_notes(found: Deployment) -> list[str]:
    """What the engine would say at the start, and what waits for room."""
    memory, recipe = found.memory, found.recipe
    notes = [f"{recipe.engine} would refuse to start: {memory.refusal}"] if memory.refusal else []
    seats = found.held_requests
    if memory.refusal is None and seats < recipe.concurrency:
        notes.append(
            f"the cache holds {seats} requests of {recipe.context} tokens,"
            f" {recipe.concurrency} are in flight: the rest wait"
        )
    return notes


def without_kernels(spec: ModelSpec, engine: EngineSpec, cluster: Cluster) -> str | None:
    """Why no release of the engine read so far serves this kind of model on these cards."""
    for gpu in (pool.gpu for pool in cluster.pools):
        least = engine.needs_capability(spec.architecture, gpu.vendor, gpu.compute_capability)
        if least is not None:
            return (
                f"{engine.name} has kernels for the attention of {spec.architecture} from compute capability"
                f" {least}; {gpu.name} has {gpu.compute_capability}"
            )
    return None


def _not_served(spec: ModelSpec, engine: EngineSpec, version: str, cluster: Cluster) -> list[str]:
    told = []
    first = engine.serves_from(spec.architecture, version)
    if first is not None:
        told.append(
            f"{engine.name} {version} does not know {spec.architecture}: {first} is the first that does"
        )
    lacking = without_kernels(spec, engine, cluster)
    if lacking is not None:
        told.append(f"{lacking}: releases refuse it, the plan is of a build that has such kernels")
    return told


def has_targets(recipe: ServeRecipe) -> bool:
    """Whether the run states how quick it has to be."""
    return recipe.ttft_ms is not None or recipe.tpot_ms is not None


def _at_targets(
    subject: Subject, found: Deployment, engine: EngineSpec, cluster: Cluster
) -> ServingTime | None:
    """The largest load within the run's targets, None without targets or without such a load."""
    recipe = found.recipe
    if not has_targets(recipe):
        return None
    return at_targets(
        subject.graph,
        found.layout,
        recipe,
        engine,
        cluster,
        kv_tokens=found.cached_tokens,
        ttft_ms=recipe.ttft_ms,
        tpot_ms=recipe.tpot_ms,
    )


def _loads(
    subject: Subject,
    found: Deployment,
    engine: EngineSpec,
    cluster: Cluster,
    own: ServingTime,
    best: ServingTime | None,
    rivals: Sequence[Deployment],
) -> tuple[LoadPoint, ...]:
    """Speed against throughput: the job's own load, the largest within its targets, and others around.

    Of other layouts those that none of these and of each other beats.
    """
    recipe = found.recipe
    others = pareto(subject.graph, found.layout, recipe, engine, cluster, kv_tokens=found.cached_tokens)
    points = {point.concurrency: point for point in others}
    if best is not None:
        points[best.concurrency] = best
    points[recipe.concurrency] = own
    listed = [
        replace(
            _load_point(load, point, recipe),
            is_job=load == recipe.concurrency,
            is_most=best is not None and load == best.concurrency,
        )
        for load, point in sorted(points.items())
    ]
    elsewhere: list[LoadPoint] = []
    for rival in rivals:
        try:
            found_points = pareto(
                subject.graph,
                rival.layout,
                rival.recipe,
                engine,
                cluster,
                kv_tokens=rival.cached_tokens,
                rows=RIVAL_ROWS,
            )
        except GpucalcError:
            continue
        elsewhere += [
            replace(_load_point(point.concurrency, point, recipe), layout=rival.layout.words)
            for point in found_points
        ]
    every = [*listed, *elsewhere]
    kept = [point for point in elsewhere if not any(_beats(other, point) for other in every)]
    return tuple(sorted([*listed, *kept], key=lambda point: -point.tokens_per_s_per_user))


def _load_point(load: int, point: ServingTime, recipe: ServeRecipe) -> LoadPoint:
    assert point.queue_s is not None
    rates = (point.tokens_per_s_per_user, point.tokens_per_s_per_gpu)
    times = (point.prefill_s, point.decode_step_s, point.queue_s)
    return LoadPoint(
        concurrency=load,
        line=Line("in_flight", load, "requests", children=(*rates, *times)),
        binds=point.binds,
        meets_targets=meets_targets(point, recipe) if has_targets(recipe) else None,
        is_job=False,
        is_most=False,
    )


def _beats(one: LoadPoint, other: LoadPoint) -> bool:
    """Whether a point is better at both speeds by more than a rounding."""
    return (
        one.tokens_per_s_per_user > CLEARLY * other.tokens_per_s_per_user
        and one.tokens_per_s_per_gpu > CLEARLY * other.tokens_per_s_per_gpu
    )


def _rates(time: ServingTime, found: Deployment, best: ServingTime | None, most_served: Line | None) -> Line:
    """Output tokens per second of the deployment; beneath it what one user and one GPU see."""
    parts: list[Line] = [
        replace(time.prefill_s, name="ttft", note=_against("time to first token", found.recipe.ttft_ms)),
        replace(
            time.decode_step_s, name="tpot", note=_against("time per output token", found.recipe.tpot_ms)
        ),
        time.tokens_per_s_per_user,
        time.tokens_per_s_per_gpu,
    ]
    for extra in (time.requests_per_s, time.request_s, time.queue_s, time.burst_first_token_s):
        if extra is not None:
            parts.append(extra)
    running = Line("running_requests", time.concurrency, "requests", source="requests the cache lets through")
    parts += [running, found.memory.max_concurrency, found.memory.kv_tokens]
    if most_served is not None:
        parts.append(replace(most_served, name="requests_per_s_at_most"))
    if best is not None and best.requests_per_s is not None:
        parts += [
            Line(
                "requests_at_targets",
                best.concurrency,
                "requests",
                source="the most in flight within targets",
            ),
            replace(best.requests_per_s, name="requests_per_s_at_targets"),
            replace(best.output_tokens_per_s, name="tokens_per_s_at_targets"),
        ]
    output = time.output_tokens_per_s
    return replace(output, name="output_tokens_per_s", children=tuple(parts))


def _against(words: str, target_ms: float | None) -> str:
    return words if target_ms is None else f"{words}; the target is {target_ms:g} ms"


def meets_targets(time: ServingTime, recipe: ServeRecipe) -> bool:
    """Whether the mean times are within the run's targets."""
    first = time.prefill_s.value + (time.queue_s.value if time.queue_s is not None else 0.0)
    return (recipe.ttft_ms is None or first * 1e3 <= recipe.ttft_ms) and (
        recipe.tpot_ms is None or time.decode_step_s.value * 1e3 <= recipe.tpot_ms
    )
