"""Which changes would let a job that ran out of memory fit, cheapest first; each is planned.

Of training, the planner's own advice for a job that does not fit. Of serving, single settings that
take less, then other GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpucalc.advise import advised
from gpucalc.catalog import Catalog
from gpucalc.errors import GpucalcError
from gpucalc.jobs import ResolvedJob
from gpucalc.oom_message import Message
from gpucalc.plan.answer import Action, Level, Plan
from gpucalc.plan.evaluate import Subject
from gpucalc.planner import LARGER_CARDS, plan_job
from gpucalc.search import best_run
from gpucalc.spec.fleet import FleetSpec
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.train_run import TrainRun

CHANGES = 3


@dataclass(frozen=True, slots=True)
class Change:
    """A change that would fit, found by planning with it."""

    title: str
    changes: Mapping[str, Any]
    level: Level
    needed_bytes: float
    capacity_bytes: float
    tokens_per_s: float | None
    kv_tokens: float | None
    usd_per_hour: float | None


def cheapest(
    message: Message, job: ResolvedJob, plan: Plan, subject: Subject, cluster: Cluster, catalog: Catalog
) -> Iterator[Change]:
    """Changes that fit, cheapest first: what keeps the GPUs and the speed, then other GPUs by price."""
    if isinstance(job.run, TrainRun):
        found = _trained(job.run, plan, subject, cluster, catalog)
    else:
        found = list(_served(message, job, plan, subject, cluster, catalog))
    rank = list(Level)
    kept = [change for change in found if change.level is not Level.DOES_NOT_FIT]
    kept.sort(
        key=lambda change: (
            rank.index(change.level),
            "gpus" in change.changes,
            _price(change),
            -(change.tokens_per_s or 0.0),
            change.needed_bytes,
        )
    )
    yield from kept[:CHANGES]


def _price(change: Change) -> float:
    """Dollars an hour of other GPUs; those without a known price come last."""
    if "gpus" not in change.changes:
        return 0.0
    return math.inf if change.usd_per_hour is None else change.usd_per_hour


def _trained(run: TrainRun, plan: Plan, subject: Subject, cluster: Cluster, catalog: Catalog) -> list[Change]:
    settled, _ = best_run(subject, run, cluster)
    # The run did not fit, whatever the plan says: ask for what saves memory.
    verdict = plan.verdict
    refused = replace(plan, verdict=replace(verdict, level=Level.DOES_NOT_FIT))
    found = advised(
        refused if verdict.level is Level.FITS else plan,
        subject,
        settled,
        cluster,
        clusters=lambda card, count: catalog.cluster([(None, count, card)]),
        larger=_larger(cluster, catalog),
    )
    return [_change(action, cluster, catalog) for action in found.actions]


def _change(action: Action, cluster: Cluster, catalog: Catalog) -> Change:
    fleet = action.changes.get("gpus")
    if isinstance(fleet, str):
        count, _, card = fleet.partition("x")
        cluster = catalog.cluster([(None, int(count), card)])
    price = cluster.price_per_gpu_hour
    return Change(
        title=action.title,
        changes=action.changes,
        level=action.level,
        needed_bytes=action.needed_bytes,
        capacity_bytes=_capacity(cluster),
        tokens_per_s=action.tokens_per_s,
        kv_tokens=None,
        usd_per_hour=None if price is None else float(price.value) * cluster.count,
    )


def _larger(cluster: Cluster, catalog: Catalog) -> tuple[str, ...]:
    own = _capacity(cluster)
    sizes = {card: float(catalog.gpu(card)[0].usable_memory().value) for card in LARGER_CARDS}
    return tuple(card for card, memory in sizes.items() if memory > 1.2 * own)[:2]


def _capacity(cluster: Cluster) -> float:
    return float(min(pool.gpu.usable_memory().value for pool in cluster.pools))


def _served(
    message: Message, job: ResolvedJob, plan: Plan, subject: Subject, cluster: Cluster, catalog: Catalog
) -> Iterator[Change]:
    run = job.run
    assert isinstance(run, ServeRun)
    for title, changes, fleet in _serving_changes(message, run, plan, cluster, catalog):
        try:
            other = catalog.cluster(fleet) if fleet is not None else cluster
            written = {key.removeprefix("run."): value for key, value in changes.items() if key != "gpus"}
            stated = run.model_dump(exclude_none=True)
            changed = ServeRun.read({**stated, **written})
            asked = replace(job, job=job.job.model_copy(update={"run": changed}))
            if fleet is not None:
                asked = replace(
                    asked, job=asked.job.model_copy(update={"gpus": changes["gpus"], "system": None})
                )
            found = plan_job(asked, catalog, subject=subject, cluster=other, advice=False)
        except GpucalcError:
            continue
        price = other.price_per_gpu_hour
        rates = found.throughput
        speed = None if rates is None else rates.find("output_tokens_per_s") or rates
        tokens = None if found.cache is None else found.cache.find("kv_tokens")
        yield Change(
            title=title,
            changes=changes,
            level=found.verdict.level,
            needed_bytes=float(found.verdict.needed.value),
            capacity_bytes=float(found.verdict.capacity.value),
            tokens_per_s=None if speed is None else float(speed.value),
            kv_tokens=None if tokens is None else float(tokens.value),
            usd_per_hour=None if price is None else float(price.value) * other.count,
        )


def _serving_changes(
    message: Message, run: ServeRun, plan: Plan, cluster: Cluster, catalog: Catalog
) -> Iterator[tuple[str, dict[str, Any], FleetSpec | list[tuple[int | None, int, str]] | None]]:
    """Single changes that could help a deployment, in words and keys."""
    recipe, layout = plan.recipe, plan.layout
    held = message.longest or message.tokens_held
    if held is None and plan.cache is not None:
        tokens = plan.cache.find("kv_tokens")
        held = int(tokens.value) if tokens is not None and 0 < tokens.value < recipe.max_model_len else None
    if held is not None and 64 <= held < recipe.max_model_len:
        yield f"max_model_len {held}", {"run.max_model_len": held, **_shorter(run, held)}, None
    if recipe.max_model_len >= 2048:
        half = recipe.max_model_len // 2
        yield f"max_model_len {half}", {"run.max_model_len": half, **_shorter(run, half)}, None
    if run.kv_dtype in ("auto", "bf16", "fp16"):
        kind = "q8_0" if run.framework == "llamacpp" else "fp8"
        yield f"{kind} cache", {"run.kv_dtype": kind}, None
    if run.quant is None or run.quant == "none":
        for kind in ("q4_k_m",) if run.framework == "llamacpp" else ("fp8", "awq"):
            yield f"{kind} weights", {"run.quant": kind}, None
    if recipe.gpu_memory_utilization is not None and recipe.gpu_memory_utilization < 0.95:
        yield "gpu_memory_utilization 0.95", {"run.gpu_memory_utilization": 0.95}, None
    if run.framework in ("vllm", "sglang") and not run.enforce_eager:
        yield "no CUDA graphs", {"run.enforce_eager": True}, None
    if recipe.max_num_seqs > 32:
        yield "max_num_seqs 32", {"run.max_num_seqs": 32}, None
    if len(cluster.pools) > 1:
        for pool in cluster.pools:
            fleet = f"{pool.count}x{pool.gpu.id}"
            parts: list[tuple[int | None, int, str]] = [(None, pool.count, pool.gpu.id)]
            yield f"{pool.count} x {pool.gpu.name} alone", {"gpus": fleet, "run.tp": pool.count}, parts
        return
    card = cluster.pools[0].gpu.id
    twice: list[tuple[int | None, int, str]] = [(None, 2 * cluster.count, card)]
    changes = {"gpus": f"{2 * cluster.count}x{card}", "run.tp": 2 * layout.tp}
    yield f"{2 * cluster.count} x {cluster.pools[0].gpu.name}, tp {2 * layout.tp}", changes, twice
    for other in _larger(cluster, catalog):
        same: list[tuple[int | None, int, str]] = [(None, cluster.count, other)]
        yield f"{cluster.count} x {other}", {"gpus": f"{cluster.count}x{other}"}, same


def _shorter(run: ServeRun, length: int) -> dict[str, Any]:
    """Prompts and answers that still fit a shorter context."""
    isl, osl = run.isl or 1, run.osl or 1
    if isl + osl <= length:
        return {}
    return {"run.isl": max(1, length * isl // (isl + osl)), "run.osl": max(1, length * osl // (isl + osl))}
