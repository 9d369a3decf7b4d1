"""Why a fleet need not be planned: bounds no layout goes below, and fleets that could win nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpucalc.plan.evaluate import Subject
from gpucalc.size_offers import PRICE_SPREAD, Offer
from gpucalc.size_targets import HOUR_S, Targets
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.train_run import TrainRun

BEATEN = "cannot be the cheapest, the fastest, the smallest or the one of least energy"
LEAST_WEIGHT_BYTES = 0.25  # per parameter: no served format is below two bits


def hopeless(
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
    needed, most = targets.required_per_s, most_per_s(run, subject, cluster)
    if needed is not None and most is not None and needed > most:
        return f"{needed / most:.1f} times what its peak could do is asked"
    return None


def beaten(
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
    most = most_per_s(run, subject, cluster)
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


def most_per_s(run: TrainRun | ServeRun, subject: Subject, cluster: Cluster) -> float | None:
    """Tokens per second that no layout exceeds, None where a token's work is not known beforehand."""
    if len(subject.graph.stacks) != 1:  # an encoder and a decoder share the tokens
        return None
    full = isinstance(run, TrainRun) and run.method == "full" and not run.frozen
    flops = (6 if full else 2) * float(subject.counts.matmul_params)
    peak = sum(pool.count * peak_rate(pool.gpu, run) for pool in cluster.pools)
    return peak / flops if peak and flops else None


def peak_rate(gpu: GpuSpec, run: TrainRun | ServeRun | None = None) -> float:
    """The dense rate of a card in the run's precision; where that says nothing, the highest in any."""
    own = gpu.peak(run.precision) if isinstance(run, TrainRun) and run.precision in gpu.peaks else None
    return float(own.value) if own is not None else max((f.si for f in gpu.peaks.values()), default=0.0)


def _joules_per_token(cluster: Cluster, rate: float | None) -> float | None:
    """Energy of a token at the GPUs' limits, which comparisons of one job's fleets need no more of."""
    limits = [pool.gpu.tdp for pool in cluster.pools]
    if not rate or any(limit is None for limit in limits):
        return None
    watts = sum(pool.count * limit.si for pool, limit in zip(cluster.pools, limits, strict=True) if limit)
    return watts / rate
