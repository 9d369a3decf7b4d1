"""What a run costs and how often it stops: the facts these rest on, and the lines they give.

The facts come from a job and the catalogue (`gpucalc.economics`); here they are lines already.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from gpucalc.formulas import cost as money
from gpucalc.formulas import reliability as f
from gpucalc.formulas.compute import repeated_s
from gpucalc.formulas.rules import save_interval_s
from gpucalc.graph import Graph
from gpucalc.line import Kind, Line, compute, total, worst_kind
from gpucalc.plan.answer import Assumption
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.model_state import states
from gpucalc.plan.rank import Rank
from gpucalc.plan.stages import stages
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.train_run import TrainRun

DAY_S = Line("day_s", 86400.0, "s", Kind.EXACT, source="one day, as no token budget was given")
FAILING_GPUS = 256  # from so many on a run of days is interrupted more often than not
RULE_STEPS = 500  # the documents' checkpoint cadence,
RULE_SPARES_PERCENT = 10  # and their spare GPUs
ABOUT_RIGHT = 0.005  # of the time lost beside the optimum: no cadence is worth arguing about below this
_NORMAL = 500.0  # Poisson means from here on are normal to a part in a thousand


@dataclass(frozen=True, slots=True)
class Money:
    """Prices, power and carbon of the hours a fleet works. None where nobody knows."""

    pue: Line
    power_utilisation: Line
    host_power_share: Line
    years: Line
    busy_share: Line
    usd_per_kwh: Line | None = None
    carbon_kg_per_kwh: Line | None = None
    usd_per_gpu_hour: Line | None = None  # the job's own; else the cluster's
    usd_per_gpu: Line | None = None


@dataclass(frozen=True, slots=True)
class Failures:
    """How often GPUs stop a run, and what it takes to go on."""

    mtbf_gpu_hours: Line
    blocking_share: Line
    restart_s: Line
    hardware_share: Line
    repair_s: Line
    spare_confidence: Line
    storage: Line | None  # the job's own; else the least of these two
    storage_per_gpu: Line
    storage_most: Line
    checkpoint_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Economics:
    """The facts of a job. `assumed` lists what nobody stated, by topic."""

    money: Money
    failures: Failures
    money_assumed: tuple[Assumption, ...] = field(default=())
    failures_assumed: tuple[Assumption, ...] = field(default=())

    def assumed(self, *, costs: bool, failures: bool) -> tuple[Assumption, ...]:
        """What a plan that shows these topics has to list."""
        return (*(self.money_assumed if costs else ()), *(self.failures_assumed if failures else ()))


# -- reliability ------------------------------------------------------------------------------------


def is_long(run: TrainRun, cluster: Cluster) -> bool:
    """Whether failures are worth showing: a run with a budget of tokens, or a fleet that often fails."""
    return run.tokens is not None or cluster.count >= FAILING_GPUS


def reliability_line(
    graph: Graph,
    layout: Layout,
    recipe: Recipe,
    cluster: Cluster,
    failures: Failures,
    *,
    step: Line,
    training: Line | None,
) -> Line:
    """Goodput of a long run and what it rests on; `training` is its time without failures."""
    mtbf = compute(
        "time_between_interruptions",
        f.run_mtbf_s,
        mtbf_gpu_hours=failures.mtbf_gpu_hours,
        gpus=layout.world,
        note=f"{layout.world:,} GPUs at {failures.mtbf_gpu_hours.value:,.0f} GPU-hours each",
    )
    size = checkpoint_size(graph, recipe)
    storage = failures.storage or compute(
        "storage",
        f.storage_bytes_per_s,
        gpus=layout.world,
        per_gpu_bytes_per_s=failures.storage_per_gpu,
        most_bytes_per_s=failures.storage_most,
    )
    write = compute(
        "checkpoint_write",
        f.write_s,
        checkpoint_bytes=size,
        storage_bytes_per_s=storage,
    )
    stall = compute(
        "checkpoint_stall",
        f.stall_s,
        write_s=write,
        blocking_share=failures.blocking_share,
        note="for which training waits",
    )
    best = compute("optimal_interval", f.daly_interval_s, write_s=stall, mtbf_s=mtbf, note="Daly 2006")
    young = compute("young_interval", save_interval_s, write_s=stall, mtbf_s=mtbf, note="Young 1974")
    steps = compute("optimal_steps", f.interval_steps, interval_s=best, step_s=step)
    often = compute("interval_steps", f.interval_steps, interval_s=best, step_s=step)
    if failures.checkpoint_steps is not None:
        stated = "reliability.checkpoint_steps"
        often = Line("interval_steps", failures.checkpoint_steps, "steps", source=stated)
    chosen = _interval(often, step)
    reached = _goodput("goodput", chosen, stall, mtbf, failures)
    losses = (
        compute("saving_share", f.saving_share, write_s=stall, interval_s=chosen),
        compute(
            "interrupted_share",
            f.interrupted_share,
            interval_s=chosen,
            write_s=stall,
            restart_s=failures.restart_s,
            mtbf_s=mtbf,
            note="work done again, restarts; to first order",
        ),
    )
    parts: list[Line] = [replace(reached, note="share of wall time that makes progress"), mtbf]
    if training is not None:
        wall = compute("wall_time", money.wall_clock_s, training_s=training, goodput=reached)
        expected = compute("interruptions", f.expected_interruptions, wall_s=wall, mtbf_s=mtbf)
        parts.append(replace(expected, note="expected over the run"))
    parts += [size, write, stall, best, young, steps]
    if failures.checkpoint_steps is not None:
        parts.append(often)
    parts += [*losses, _rule_of_steps(step, stall, mtbf, steps, failures)]
    parts += _spares(layout, cluster, mtbf, failures)
    return Line("reliability", reached.value, reached.unit, _doubt(parts), children=tuple(parts))


def checkpoint_size(graph: Graph, recipe: Recipe) -> Line:
    """Bytes training can go on from: trained weights and all optimizer states, of the whole model once."""
    one = Layout(
        tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1, dp=1, shard=1, zero_stage=0, micro_batch=1, micro_batches=1,
        sequence_parallel=False, schedule="none",
    )  # fmt: skip
    kept = replace(recipe, offload=(), reference_model=False, reward_models=0)
    rank = Rank(graph, stages(graph, pp=1, vpp=1)[0], one, kept, hopper_or_later=False)
    lines = [line for line in states(rank) if line.name != "frozen_weights"]
    if recipe.adapters is not None:  # the base is on the disk already
        trained = {name for name, _, _ in rank.trained_parts()}
        own = tuple(part for part in lines[0].children if part.name in trained)
        lines[0] = total("weights", own, unit="bytes")
    return total("checkpoint", tuple(lines), unit="bytes", note="trained weights, optimizer states, once")


def _interval(steps: Any, step: Line) -> Line:
    return compute("interval", repeated_s, each_s=step, times=steps)


def _goodput(name: str, interval: Line, write: Line, mtbf: Line, failures: Failures) -> Line:
    # Far beyond what can be survived the exponentials overflow: nothing gets done there.
    if (interval.value + write.value + failures.restart_s.value) / mtbf.value > 500:
        return Line(name, 0.0, "fraction", mtbf.kind, source="interrupted before the next checkpoint, always")
    return compute(
        name,
        f.goodput,
        interval_s=interval,
        write_s=write,
        restart_s=failures.restart_s,
        mtbf_s=mtbf,
    )


def _rule_of_steps(step: Line, write: Line, mtbf: Line, steps: Line, failures: Failures) -> Line:
    """Goodput under the documents' cadence, and whether it is too rare or too often here."""
    found = _goodput("goodput_every_500_steps", _interval(RULE_STEPS, step), write, mtbf, failures)
    best = _goodput("goodput", _interval(steps, step), write, mtbf, failures)
    lost = float(best.value) - float(found.value)
    if lost < ABOUT_RIGHT:
        said = f"about right: it loses {100 * max(lost, 0):.2f} % beside the optimum"
    else:
        way = "rare" if steps.value < RULE_STEPS else "often"
        said = f"too {way}: {100 * lost:.1f} % of the time more is lost"
    return replace(found, note=f"the documents' rule is {said}")


def _spares(layout: Layout, cluster: Cluster, mtbf: Line, failures: Failures) -> Iterator[Line]:
    """Nodes in repair on average, those that suffice with the stated confidence, and the documents' rule."""
    mean = compute(
        "nodes_in_repair",
        f.nodes_in_repair,
        mtbf_s=mtbf,
        hardware_share=failures.hardware_share,
        repair_s=failures.repair_s,
    )
    confidence = failures.spare_confidence
    count = poisson_quantile(float(mean.value), float(confidence.value))
    nodes = Line(
        "spare_nodes",
        count,
        "nodes",
        worst_kind([mean, confidence]),
        source="smallest number that a Poisson distribution of that mean stays within, so often",
        inputs={"nodes_in_repair": mean, "spare_confidence": confidence},
        note=f"suffice {100 * float(confidence.value):g} % of the time",
    )
    per_node = min(cluster.gpus_per_node, layout.world)
    spare = compute("spare_gpus", f.spare_gpus, nodes=nodes, gpus_per_node=per_node)
    yield mean
    yield nodes
    yield spare
    yield compute(
        "spare_gpus_by_rule",
        f.spare_gpus_by_rule,
        gpus=layout.world,
        spare_percent=RULE_SPARES_PERCENT,
        note="the documents' rule, 10 % of the GPUs",
    )


def poisson_quantile(mean: float, confidence: float) -> int:
    """The smallest k with P(N <= k) >= confidence for a Poisson distributed N."""
    if mean > _NORMAL:
        from statistics import NormalDist  # slow to import, and rarely needed

        return max(0, math.ceil(mean + NormalDist().inv_cdf(confidence) * math.sqrt(mean) - 0.5))
    term = reached = math.exp(-mean)
    k = 0
    while reached < confidence and k < 100_000:
        k += 1
        term *= mean / k
        reached += term
        if term < 1e-18 and k > mean:  # rounding keeps the sum below a confidence of almost one
            break
    return k


def _doubt(parts: list[Line]) -> Kind:
    return Kind.ASSUMED if worst_kind(parts) is Kind.ASSUMED else Kind.MODELLED


# -- cost -------------------------------------------------------------------------------------------


def training_line(run: TrainRun, step: Line, rates: Line) -> Line | None:
    """Time of the token budget in whole steps, without failures; None without a budget."""
    if run.tokens is None:
        return None
    per_step = rates.child("tokens_per_s").inputs["tokens"]
    return compute(
        "training_time", money.training_s, tokens=run.tokens, tokens_per_step=per_step, step_s=step
    )


def cost_line(
    cluster: Cluster,
    rates: Line,
    basis: Money | None,
    *,
    training: Line | None = None,
    goodput: Line | None = None,
    serves: bool = False,
) -> Line:
    """GPU-hours, energy, carbon and money of the token budget, or of one day where none is given.

    `rates` has the tokens per second; without a basis only hours and rent are known.
    """
    parts: list[Line] = []
    if training is None:
        wall, note = DAY_S, "of one day" if serves else "of one day; run.tokens gives a budget"
    else:
        wall, note = training, "of the token budget"
        if goodput is not None:
            wall = compute("wall_time", money.wall_clock_s, training_s=training, goodput=goodput)
        days = compute("days", money.training_days, training_s=wall)
        said = "" if wall is training else f"with interruptions; {training.value / DAY_S.value:,.4g} without"
        parts.append(replace(days, note=said or None))
    hours = compute("gpu_hours", money.gpu_hours, gpus=cluster.count, training_s=wall)
    parts.append(hours)
    power = _power(cluster, basis) if basis is not None else None
    if basis is not None and power is not None:
        energy = compute("energy", money.energy_kwh, power_w=power, training_s=wall, pue=basis.pue)
        parts += [power, energy]
        if basis.carbon_kg_per_kwh is not None:
            parts.append(
                compute(
                    "carbon",
                    money.carbon_kg,
                    energy_kwh=energy,
                    carbon_kg_per_kwh=basis.carbon_kg_per_kwh,
                    note="CO2 of the energy alone",
                )
            )
        if basis.usd_per_kwh is not None:
            parts.append(
                compute(
                    "electricity", money.electricity_usd, energy_kwh=energy, usd_per_kwh=basis.usd_per_kwh
                )
            )
    price = hourly_price(cluster, basis)
    if price is not None:
        lasting = rates
        if goodput is not None:
            lasting = compute(
                "lasting_tokens_per_s", money.lasting_tokens_per_s, tokens_per_s=rates, goodput=goodput
            )
        rental = compute("rental", money.rental_usd, gpu_hours=hours, usd_per_gpu_hour=price)
        parts.append(replace(rental, note=f"at ${price.value:,.2f} a GPU-hour"))
        parts.append(
            compute(
                "rental_per_million_tokens",
                money.usd_per_million_tokens,
                usd_per_gpu_hour=price,
                gpus=cluster.count,
                tokens_per_s=lasting,
            )
        )
    if basis is not None and basis.usd_per_gpu is not None and power is not None:
        parts += _owned(cluster, basis, hours, power, price)
    return Line("cost", hours.value, hours.unit, Kind.MODELLED, children=tuple(parts), note=note)


def hourly_price(cluster: Cluster, basis: Money | None) -> Line | None:
    """Rent of a GPU: the job's own, else the published one."""
    own = basis.usd_per_gpu_hour if basis is not None else None
    return own or cluster.price_per_gpu_hour


def _power(cluster: Cluster, basis: Money) -> Line | None:
    """Power of GPUs and hosts; None where a card's limit is not known."""
    limits = [(pool.count, pool.gpu.tdp) for pool in cluster.pools]
    watts = sum(count * limit.si for count, limit in limits if limit is not None)
    if any(limit is None for _, limit in limits):
        return None
    limit = Line("gpu_power_limit", watts / cluster.count, "W", source="board power limits of the fleet")
    host = compute("host_power", money.host_power_w, gpu_power_w=watts, share=basis.host_power_share)
    return compute(
        "power",
        money.fleet_power_w,
        gpus=cluster.count,
        gpu_power_w=limit,
        utilisation=basis.power_utilisation,
        host_power_w=host,
        note="of GPUs and hosts",
    )


def _owned(cluster: Cluster, basis: Money, hours: Line, power: Line, price: Line | None) -> Iterator[Line]:
    """The same hours on bought machines, and how busy they must be to be cheaper than rented ones."""
    assert basis.usd_per_gpu is not None
    if basis.usd_per_kwh is None:
        return
    capital = compute(
        "capital_per_gpu_hour",
        money.capital_usd_per_gpu_hour,
        usd_per_gpu=basis.usd_per_gpu,
        years=basis.years,
        busy_share=basis.busy_share,
    )
    drawn = compute(
        "power_per_gpu_hour",
        money.power_usd_per_gpu_hour,
        power_w=power,
        gpus=cluster.count,
        pue=basis.pue,
        usd_per_kwh=basis.usd_per_kwh,
    )
    each = capital.value + drawn.value
    owned = compute(
        "owned",
        money.owned_usd,
        gpu_hours=hours,
        capital_usd_per_gpu_hour=capital,
        power_usd_per_gpu_hour=drawn,
        note=f"bought: ${each:,.2f} a GPU-hour, without staff, space, network, interest",
    )
    yield owned
    if price is not None and price.value > drawn.value:
        yield compute(
            "break_even",
            money.break_even_share,
            usd_per_gpu=basis.usd_per_gpu,
            years=basis.years,
            usd_per_gpu_hour=price,
            power_usd_per_gpu_hour=drawn,
            note="share of its years a bought GPU must work to cost less than rent",
        )
