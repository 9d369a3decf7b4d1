"""Changes of a deployment worth making, each planned again so that it comes with its numbers.

Where the engine may not start: a shorter context, another share of the card, fewer sequences, smaller
weights or cache, more or larger cards. Where it starts but misses the run's targets: what meets them.
Otherwise, and where nothing does: what serves faster by a twentieth or more. Always: fewer cards that do
as well, since a card that only adds waiting is best left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from gpucalc.errors import GpucalcError
from gpucalc.plan.answer import Action, Level, Plan
from gpucalc.plan.evaluate import ErrorTable, Subject, Terms
from gpucalc.plan.serve import without_kernels
from gpucalc.plan.serve_resolve import BY_LAYERS
from gpucalc.search_serving import plan_serving
from gpucalc.spec.engine import EngineSpec
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.serve_run import ServeRun

MOST = 6
WORTH = 1.05  # a change has to serve this much faster
FEWER_SEQUENCES = (256, 64, 16)
SHARES = (0.97, 0.95, 0.92, 0.9, 0.85, 0.8)
MORE_CARDS = (2, 4, 8, 16, 32)
WIDE = ("bf16", "fp16", "fp32")


def advised_serving(
    plan: Plan,
    subject: Subject,
    run: ServeRun,
    cluster: Cluster,
    engine: EngineSpec,
    *,
    clusters: Callable[[str, int], Cluster],
    larger: tuple[str, ...] = (),
    errors: ErrorTable | None = None,
) -> Plan:
    """The plan with its actions. `clusters` opens a fleet of one card; `larger` names cards to try."""
    helps = _helps(plan)

    def tried(changes: Mapping[str, Any], where: Cluster) -> Plan | None:
        if where is not cluster and without_kernels(subject.spec, engine, where) is not None:
            return None
        try:
            changed = run.model_copy(update=dict(changes))
            terms = Terms(plan.name, "", errors=errors)
            return plan_serving(subject, changed, where, engine, terms, most=False)
        except GpucalcError:
            return None

    found: list[Action] = []
    faster: list[Action] = []
    seen: set[str] = set()
    for kind, title, changes in _changes(plan, run, cluster):
        if kind in seen:
            continue
        answer = tried(changes, cluster)
        if answer is None:
            continue
        action = Action.of(title, {f"run.{key}": value for key, value in changes.items()}, answer)
        if helps(answer):
            seen.add(kind)
            found.append(action)
        elif _faster(plan, answer):
            faster.append(action)
    fleets = _Fleets(run, tried, clusters)
    if wanting(plan) and len(cluster.pools) == 1:
        found += fleets.larger(cluster, larger, helps)
    if cluster.count > 1 and (plan.verdict.level is not Level.DOES_NOT_FIT or len(cluster.pools) > 1):
        found += fleets.smaller(cluster, lambda after: _no_worse(plan, after))
    return replace(plan, actions=tuple((found or faster)[:MOST]))


def wanting(plan: Plan) -> bool:
    """Whether a plan may not start or misses its run's targets."""
    return plan.verdict.level is not Level.FITS or not _on_target(plan)


def _on_target(plan: Plan) -> bool:
    """Whether a plan's mean times are within its run's targets, waiting included, and as many requests
    leave as arrive; a run may state none of these.
    """
    recipe, rates = plan.recipe, plan.throughput
    if rates is None:
        return recipe.ttft_ms is None and recipe.tpot_ms is None and recipe.request_rate is None
    if recipe.request_rate is not None and rates.child("requests_per_s").value < recipe.request_rate:
        return False
    first = sum(line.value for line in rates.children if line.name in ("ttft", "queue"))
    return (recipe.ttft_ms is None or first * 1e3 <= recipe.ttft_ms) and (
        recipe.tpot_ms is None or rates.child("tpot").value * 1e3 <= recipe.tpot_ms
    )


def _changes(plan: Plan, run: ServeRun, cluster: Cluster) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Single changes, mildest first; of one kind the first that helps is kept."""
    recipe = plan.recipe
    pooled = run.framework in ("vllm", "sglang", "trtllm")
    if plan.verdict.level is not Level.FITS:
        length = recipe.max_model_len // 2
        while length >= max(recipe.context, 512):
            yield "length", f"max_model_len {length}", {"max_model_len": length}
            length //= 2
        if run.framework == "vllm":
            for share in (*_free_share(plan), *SHARES):
                if share != recipe.gpu_memory_utilization:
                    yield "share", f"gpu_memory_utilization {share}", {"gpu_memory_utilization": share}
        for count in FEWER_SEQUENCES if pooled else ():
            if count < recipe.max_num_seqs:
                yield "sequences", f"max_num_seqs {count}", {"max_num_seqs": count}
        if run.framework in ("vllm", "sglang") and not run.enforce_eager:
            yield "graphs", "no CUDA graphs", {"enforce_eager": True}
    elif run.request_rate is None:
        for most in (point.concurrency for point in plan.loads if point.is_most):
            if most < recipe.concurrency:
                yield "load", f"at most {most} requests in flight", {"concurrency": most}
    if run.framework in ("vllm", "sglang") and recipe.kv_bytes > 1:
        yield "cache", "8-bit cache", {"kv_dtype": "fp8"}
    if run.framework == "llamacpp" and recipe.kv_bytes > 1.1:
        yield "cache", "q8_0 cache", {"kv_dtype": "q8_0"}
    if recipe.weights.name in WIDE:
        if run.framework == "llamacpp":
            yield "weights", "weights in q8_0", {"quant": "q8_0"}
            yield "weights4", "weights in q4_k_m", {"quant": "q4_k_m"}
        elif all(pool.gpu.peak("fp8") is not None for pool in cluster.pools):
            yield "weights", "weights in fp8", {"quant": "fp8"}
        if pooled:
            yield "weights4", "weights in 4 bit (AWQ)", {"quant": "awq"}
    if plan.layout.replicas > 1 and plan.layout.pp == 1:
        tp = plan.layout.tp * 2
        yield "tensor", f"tp {tp}: fewer, faster copies", {"tp": tp}


def _free_share(plan: Plan) -> tuple[float, ...]:
    """The share of the card that others leave, where an engine asks for more than is free."""
    verdict = plan.verdict
    if verdict.needed.name != "asked_for":
        return ()
    in_use = sum(part.value for part in plan.memory.children if part.name in ("pre_existing", "in_use"))
    outside = max(plan.memory.value - in_use - verdict.needed.value, 0.0)
    room = verdict.capacity.value - outside - verdict.expected_error * verdict.needed.value
    share = math.floor(100 * room / verdict.capacity.children[0].value)
    return tuple(percent / 100 for percent in (share, share - 1, share - 2) if percent > 0)


class _Fleets:
    """Other fleets for the same run, their degrees left to the search."""

    def __init__(
        self,
        run: ServeRun,
        tried: Callable[[Mapping[str, Any], Cluster], Plan | None],
        clusters: Callable[[str, int], Cluster],
    ) -> None:
        # Engines that divide by layers take all cards by themselves.
        self.degrees = {} if run.framework in BY_LAYERS else {"tp": "auto", "pp": "auto"}
        self.tried = tried
        self.clusters = clusters

    def larger(
        self, cluster: Cluster, cards: tuple[str, ...], helps: Callable[[Plan], bool]
    ) -> Iterator[Action]:
        """The smallest fleet of the own card that starts within the targets, and of larger cards."""
        own = cluster.pools[0].gpu.id
        starts = 2 ** max(cluster.count - 1, 0).bit_length()
        yield from self._first([(own, cluster.count * times) for times in MORE_CARDS], helps)
        for card in cards:
            yield from self._first([(card, count) for count in (1, 2, 4, 8) if count <= starts], helps)

    def smaller(self, cluster: Cluster, as_good: Callable[[Plan], bool]) -> Iterator[Action]:
        """The fewest of the own cards that do as well; of a mixed fleet one kind alone."""
        for pool in cluster.pools:
            sizes = [2**power for power in range(pool.count.bit_length()) if 2**power < cluster.count]
            if len(cluster.pools) > 1 and pool.count not in sizes:
                sizes.append(pool.count)
            yield from self._first([(pool.gpu.id, count) for count in sizes], as_good)

    def _first(self, fleets: list[tuple[str, int]], helps: Callable[[Plan], bool]) -> Iterator[Action]:
        for card, count in fleets:
            where = self.clusters(card, count)
            answer = self.tried(self.degrees, where)
            if answer is not None and answer.verdict.level is Level.FITS and helps(answer):
                changes = {"gpus": f"{count}x{card}", **{f"run.{key}": v for key, v in self.degrees.items()}}
                yield Action.of(f"{count} x {where.pools[0].gpu.name}", changes, answer)
                return


def _helps(before: Plan) -> Callable[[Plan], bool]:
    """What a change has to bring: a start, then the targets, then speed."""
    order = list(Level)
    if before.verdict.level is not Level.FITS:
        return lambda after: order.index(after.verdict.level) < order.index(before.verdict.level)
    if not _on_target(before):
        return lambda after: after.verdict.level is Level.FITS and _on_target(after)
    return lambda after: _faster(before, after) and _on_target(after)


def _no_worse(before: Plan, after: Plan) -> bool:
    """Whether a smaller fleet starts where the plan's does not, or serves as much as fast."""
    if before.verdict.level is not Level.FITS:
        return _on_target(after)
    if after.throughput is None or before.throughput is None or before.time is None or after.time is None:
        return False
    kept = _on_target(after) or not _on_target(before)
    return bool(kept and after.throughput.value >= before.throughput.value)


def _faster(before: Plan, after: Plan) -> bool:
    if after.verdict.level is not Level.FITS or before.throughput is None or after.throughput is None:
        return False
    return bool(after.throughput.value > WORTH * before.throughput.value)
