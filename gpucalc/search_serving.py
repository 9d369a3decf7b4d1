"""Layouts of a deployment, ranked: settles every degree a serving run leaves "auto".

Of the layouts whose engine starts, those that hold the requests in flight come first; with targets the
fastest that meets them, without the one with the fewest GPUs per copy of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from gpucalc.errors import Infeasible, InputError
from gpucalc.plan.answer import Assumption, Level, Plan
from gpucalc.plan.evaluate import Subject, Terms
from gpucalc.plan.rules import divisors
from gpucalc.plan.serve import (
    Deployment,
    deploy,
    evaluate_serving,
    has_targets,
    loaded,
    meets_targets,
    timed,
)
from gpucalc.plan.serve_loads import keeps_up
from gpucalc.plan.serve_resolve import BY_LAYERS, has_experts
from gpucalc.plan.serving_layout import ServingTime
from gpucalc.spec.engine import EngineSpec
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.serve_run import ServeRun

DEGREES = ("tp", "pp", "dp", "ep")
MOST_TIMED = 16  # layouts whose speed is worked out,
MOST_RIVALS = 4  # layouts set beside the one that was chosen
MOST_LOADED = 5  # layouts whose load at a request rate is looked for
TIMED_PER_SIZE = 3  # so many of each number of GPUs per copy
_LEVELS = {Level.FITS: 0, Level.MARGINAL: 1, Level.DOES_NOT_FIT: 2}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One legal layout with its memory worked out."""

    run: ServeRun
    found: Deployment

    @property
    def level(self) -> int:
        """0 starts, 1 perhaps, 2 does not."""
        return _LEVELS[self.found.level]

    @property
    def holds(self) -> bool:
        """Whether the caches have room for the requests in flight."""
        return self.found.held_requests >= self.found.recipe.concurrency

    @property
    def size(self) -> tuple[int, int, int]:
        """Smaller engines first; of equal ones those that divide layers least, then experts least."""
        layout = self.found.layout
        return layout.engine_gpus, layout.pp, layout.ep


def left_open(run: ServeRun) -> tuple[str, ...]:
    """The degrees to be searched: those set to auto, and pp beside an auto tp when nobody set it."""
    return tuple(key for key in DEGREES if getattr(run, key) == "auto")


def settle(
    subject: Subject, run: ServeRun, cluster: Cluster, engine: EngineSpec
) -> tuple[ServeRun, tuple[Assumption, ...]]:
    """The run with every degree a number, and what was chosen with the reason.

    Raises Infeasible when no layout is legal.
    """
    if run.framework in BY_LAYERS:
        return _by_layers(run, cluster)
    searched = left_open(run)
    if not searched:
        return run, ()
    ranked = rank(subject, run, cluster, engine)
    if ranked[0].level == 2 and "pp" not in searched and "pp" not in run.model_fields_set:
        # Nobody asked for a pipeline, but nothing starts without one.
        deeper = rank(subject, run.model_copy(update={"pp": "auto"}), cluster, engine)
        if deeper[0].level < 2:
            ranked, searched = deeper, (*searched, "pp")
    best, why = _best(subject, ranked, cluster, engine)
    chosen = tuple(Assumption(f"run.{key}", getattr(best.run, key), why) for key in searched)
    return best.run, chosen


def _best(
    subject: Subject, ranked: list[Candidate], cluster: Cluster, engine: EngineSpec
) -> tuple[Candidate, str]:
    starting = [one for one in ranked if one.level < 2]
    of = f"of {len(ranked)} legal layouts"
    if not starting:
        return ranked[0], f"none {of} starts; this one lacks least"
    recipe = ranked[0].found.recipe
    if recipe.request_rate is not None:
        return _for_rate(subject, starting, cluster, engine, of)
    if recipe.ttft_ms is None and recipe.tpot_ms is None:
        return ranked[0], f"the fewest GPUs per copy that hold the model and the requests, {of}"
    timings = [(one, timed(subject, one.found, engine, cluster)[0]) for one in _spread(starting)]
    known = [(one, time) for one, time in timings if time is not None]
    meeting = [(one, time) for one, time in known if meets_targets(time, one.found.recipe)]
    if meeting:
        best, _ = max(meeting, key=lambda pair: float(pair[1].output_tokens_per_s.value))
        return best, f"the fastest of {len(meeting)} that meet the targets, {of}"
    if known:
        best, _ = min(known, key=lambda pair: float(pair[1].decode_step_s.value))
        return best, f"none {of} meets the targets; this one is quickest per token"
    return ranked[0], f"the fewest GPUs per copy that hold the model, {of}; speed is not known"


def _for_rate(
    subject: Subject, starting: list[Candidate], cluster: Cluster, engine: EngineSpec, of: str
) -> tuple[Candidate, str]:
    """Of the layouts whose engine starts: quickest per token of those that keep up with the rate within the
    targets; where none does, the one that serves most.
    """
    known: list[tuple[Candidate, ServingTime]] = []
    for one in _spread(starting)[:MOST_LOADED]:
        found, _, _ = loaded(subject, one.found, engine, cluster)
        time, _ = timed(subject, found, engine, cluster)
        if time is not None:
            known.append((one, time))
    if not known:
        return starting[0], f"the fewest GPUs per copy that hold the model, {of}; speed is not known"
    recipe = starting[0].found.recipe
    assert recipe.request_rate is not None
    able = [pair for pair in known if keeps_up(pair[1], recipe.request_rate)]
    meeting = [pair for pair in able if meets_targets(pair[1], recipe)]
    if meeting or able:
        best, _ = min(meeting or able, key=lambda pair: float(pair[1].decode_step_s.value))
        within = " within the targets" if meeting and has_targets(recipe) else ""
        return best, f"quickest per token of {len(meeting or able)} that keep up with the rate{within}, {of}"
    best, _ = max(known, key=lambda pair: float(pair[1].output_tokens_per_s.value))
    return best, f"none {of} keeps up with the rate; this one serves most"


def _spread(starting: list[Candidate]) -> list[Candidate]:
    """The first few of every size, so that large engines are looked at beside small ones."""
    by_size: dict[int, int] = {}
    kept: list[Candidate] = []
    for one in starting:
        size = one.found.layout.engine_gpus
        by_size[size] = by_size.get(size, 0) + 1
        if by_size[size] <= TIMED_PER_SIZE:
            kept.append(one)
    return kept[:MOST_TIMED]


def _rivals(
    subject: Subject, run: ServeRun, settled: ServeRun, cluster: Cluster, engine: EngineSpec
) -> tuple[Deployment, ...]:
    """The first layout of every other size that an auto one was chosen from, the smallest engines first."""
    if run.framework in BY_LAYERS or not left_open(run):
        return ()
    own = tuple(getattr(settled, key) for key in DEGREES)
    size = math.prod(int(degree) for degree in own[:3])
    by_size: dict[int, Deployment] = {}
    for one in rank(subject, run, cluster, engine):
        if one.level < 2 and one.found.layout.engine_gpus != size:
            by_size.setdefault(one.found.layout.engine_gpus, one.found)
    return tuple(by_size[gpus] for gpus in sorted(by_size))[:MOST_RIVALS]


def rank(subject: Subject, run: ServeRun, cluster: Cluster, engine: EngineSpec) -> list[Candidate]:
    """Every legal candidate, best first by memory. Raises Infeasible when there is none."""
    found: list[Candidate] = []
    refused: Infeasible | None = None
    for settled in candidates(subject, run, cluster):
        try:
            found.append(Candidate(settled, deploy(subject, settled, cluster, engine)))
        except Infeasible as error:
            refused = refused or error
    if not found:
        raise refused or Infeasible(["no legal value for the degrees left auto"])
    found.sort(key=_merit)
    return found


def _merit(one: Candidate) -> tuple[object, ...]:
    if one.level == 2:
        memory = one.found.memory
        return 2, False, (memory.needed.value - memory.capacity.value,)
    return one.level, not one.holds, one.size


def candidates(subject: Subject, run: ServeRun, cluster: Cluster) -> Iterator[ServeRun]:
    """The run with each combination of values for its auto degrees; legality is checked later."""
    gpus = cluster.count
    experts = has_experts(subject.graph)
    inside = max(cluster.nvlink_domain, min(cluster.gpus_per_node, gpus))  # tensor groups stay in a node
    options = {
        "tp": [d for d in divisors(gpus) if d <= inside],
        "pp": divisors(gpus),
        "dp": divisors(gpus) if experts else [1],
        "ep": [1, 0] if experts else [1],  # 0: over all tp x dp ranks
    }
    chosen = [options[key] if getattr(run, key) == "auto" else [getattr(run, key)] for key in DEGREES]
    seen: set[tuple[int, ...]] = set()
    for tp, pp, dp, ep in product(*chosen):
        if gpus % (tp * pp * dp):
            continue
        degrees = (tp, pp, dp, ep or tp * dp)
        if degrees in seen:
            continue
        seen.add(degrees)
        yield run.model_copy(update=dict(zip(DEGREES, degrees, strict=True)))


def _by_layers(run: ServeRun, cluster: Cluster) -> tuple[ServeRun, tuple[Assumption, ...]]:
    """llama.cpp and Transformers give each GPU a run of layers; all GPUs hold one copy."""
    update: dict[str, int] = {key: 1 for key in DEGREES if getattr(run, key) == "auto"}
    stated = "pp" in run.model_fields_set and run.pp != "auto"
    chosen: list[Assumption] = []
    if not stated and cluster.count > 1:
        update["pp"] = cluster.count
        chosen.append(
            Assumption("run.pp", cluster.count, "each GPU holds a run of layers, the engine's default")
        )
    return run.model_copy(update=update), tuple(chosen)


def plan_serving(
    subject: Subject,
    run: ServeRun,
    cluster: Cluster,
    engine: EngineSpec,
    terms: Terms,
    *,
    loads: bool = False,
    most: bool = True,
) -> Plan:
    """The plan of a serving run, whatever it leaves auto settled first.

    Raises Infeasible, or InputError where the engine does not run on the cards.
    """
    for pool in cluster.pools:
        if not engine.runs_on(pool.gpu.vendor, pool.gpu.compute_capability):
            raise InputError(
                f"{engine.name} does not run on {pool.gpu.name}",
                key="run.framework",
                given=run.framework,
                legal=[f"{name} {least}".strip() for name, least in engine.hardware.items()],
            )
    settled, chosen = settle(subject, run, cluster, engine)
    rivals = _rivals(subject, run, settled, cluster, engine) if loads else ()
    keys = {item.key for item in chosen}
    by_engine = run.framework in BY_LAYERS and "run.tp" not in keys
    stated = tuple(
        item
        for item in terms.assumptions
        if item.key not in keys and not (by_engine and item.key == "run.tp")
    )
    return evaluate_serving(
        subject,
        settled,
        cluster,
        engine,
        replace(terms, assumptions=(*stated, *chosen)),
        loads=loads,
        most=most,
        rivals=rivals,
    )
