"""The facts behind cost and reliability: what a job says of them, else the catalogue, every default listed.

The one place that opens the catalogue's costs, grids, published runs and purchase prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.errors import UnknownName
from gpucalc.formulas import reliability as f
from gpucalc.line import Kind, Line, compute
from gpucalc.plan.answer import Assumption
from gpucalc.plan.economics import Economics, Failures, Money
from gpucalc.spec.costs import (
    CostDefaults,
    CostKeys,
    GridSpec,
    PublishedRun,
    ReliabilityDefaults,
    ReliabilityKeys,
)
from gpucalc.spec.figure import Figure
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.job import Job
from gpucalc.units import GB


def economics(job: Job, catalog: Catalog, cluster: Cluster) -> Economics:
    """Prices, power, failures and recovery of a job on a cluster. Raises UnknownName for a grid."""
    money, money_assumed = _money(job.costs or CostKeys(), catalog, cluster)
    failures, failures_assumed = _failures(job.reliability or ReliabilityKeys(), catalog)
    return Economics(money, failures, tuple(money_assumed), tuple(failures_assumed))


def published_mtbf(run: PublishedRun) -> Line:
    """GPU-hours between the interruptions of a published run."""
    parts = {name: getattr(run, name) for name in ("gpus", "interruptions")}
    return compute(
        "mtbf_gpu_hours",
        f.mtbf_gpu_hours,
        hours=_plain("hours", run.hours),
        note=f"{run.name}, {run.hardware}; {run.counted}",
        **{name: figure.line(name) for name, figure in parts.items()},
    )


def published_runs(catalog: Catalog) -> tuple[PublishedRun, ...]:
    """Every published run whose interruptions were counted."""
    return tuple(catalog.load("reliability", name, PublishedRun) for name in catalog.names("reliability"))


def _plain(name: str, figure: Figure) -> Line:
    """A figure in its own unit, where that is how formulas count it."""
    line = figure.line(name)
    return Line(name, figure.value, figure.unit, line.kind, source=line.source, note=line.note)


class _Chosen:
    """Lines made from a job's keys or the catalogue's figures; what nobody stated is written down."""

    def __init__(self, group: str, keys: Any) -> None:
        self.group, self.keys = group, keys
        self.assumed: list[Assumption] = []

    def stated(self, key: str, unit: str, *, name: str | None = None, scale: float = 1.0) -> Line | None:
        """The job's own number, None where it has none."""
        value = getattr(self.keys, key)
        if value is None:
            return None
        return Line(name or key, value * scale, unit, Kind.EXACT, source=f"{self.group}.{key}")

    def line(
        self, key: str, unit: str, figure: Figure, *, name: str | None = None, scale: float = 1.0
    ) -> Line:
        """The job's own number, else the catalogue's."""
        own = self.stated(key, unit, name=name, scale=scale)
        if own is not None:
            return own
        self.assume(key, figure.si / scale, figure.note or figure.cited)
        return figure.line(name or key)

    def assume(self, key: str, value: Any, why: str) -> None:
        """Write a default down."""
        self.assumed.append(Assumption(f"{self.group}.{key}", value, why))


def _money(keys: CostKeys, catalog: Catalog, cluster: Cluster) -> tuple[Money, list[Assumption]]:
    defaults = catalog.load("costs", "money", CostDefaults)
    chosen = _Chosen("costs", keys)
    own_power = (keys.usd_per_kwh, keys.carbon_kg_per_kwh)
    grid = None
    if keys.grid is not None or None in own_power:
        grid = _grid(catalog, keys.grid or defaults.grid)
    if keys.grid is None and grid is not None and None in own_power:
        chosen.assume(
            "grid",
            grid.id,
            f"{grid.name}; {len(catalog.names('grids')) - 1} others, such as world, france or us-texas",
        )
    power: dict[str, Line | None] = {}
    for key, unit in (("usd_per_kwh", "USD/kWh"), ("carbon_kg_per_kwh", "kg/kWh")):
        own = chosen.stated(key, unit)
        figure: Figure | None = getattr(grid, key) if grid is not None else None
        if own is None and figure is not None:
            own = figure.line(key)
            chosen.assume(key, figure.value, figure.note or figure.cited)
        power[key] = own
    shares = {
        key: chosen.line(key, unit, getattr(defaults, key))
        for key, unit in (
            ("pue", "ratio"),
            ("power_utilisation", "fraction"),
            ("host_power_share", "fraction"),
        )
    }
    bought = chosen.stated("usd_per_gpu", "USD") or _purchase(catalog, cluster, chosen)
    use = chosen if bought is not None else _Chosen("costs", keys)  # means nothing without a price to buy
    years = use.line("years", "years", defaults.years)
    busy = use.line("busy_share", "fraction", defaults.busy_share)
    money = Money(
        **shares,
        years=years,
        busy_share=busy,
        usd_per_kwh=power["usd_per_kwh"],
        carbon_kg_per_kwh=power["carbon_kg_per_kwh"],
        usd_per_gpu_hour=chosen.stated("usd_per_gpu_hour", "USD/h", name="price_per_gpu_hour"),
        usd_per_gpu=bought,
    )
    return money, chosen.assumed


def _grid(catalog: Catalog, name: str) -> GridSpec:
    try:
        return catalog.load("grids", name, GridSpec)
    except UnknownName as error:
        raise UnknownName(
            error.problem,
            key="costs.grid",
            given=name,
            legal=error.legal or catalog.names("grids"),
            near=error.near,
        ) from None


def _purchase(catalog: Catalog, cluster: Cluster, chosen: _Chosen) -> Line | None:
    """What the fleet's GPUs cost to buy, the mean of its kinds; None where one kind's price is not known."""
    found: list[tuple[int, Figure, str]] = []
    for pool in cluster.pools:
        prices = catalog.prices(pool.gpu)
        if prices is None or prices.purchase is None:
            return None
        bought = prices.purchase
        found.append((pool.count, bought.usd_per_gpu, f"{bought.includes}, {bought.date}"))
    mean = sum(count * figure.value for count, figure, _ in found) / sum(count for count, _, _ in found)
    words = "; ".join(dict.fromkeys(said for _, _, said in found))
    chosen.assume("usd_per_gpu", mean, words)
    return Line(
        "usd_per_gpu",
        mean,
        "USD",
        Kind.ASSUMED,
        source="; ".join(dict.fromkeys(figure.cited for _, figure, _ in found)),
        note=words,
    )


def _failures(keys: ReliabilityKeys, catalog: Catalog) -> tuple[Failures, list[Assumption]]:
    defaults = catalog.load("costs", "failures", ReliabilityDefaults)
    chosen = _Chosen("reliability", keys)
    mtbf = chosen.stated("mtbf_gpu_hours", "GPU h")
    if mtbf is None:
        run = catalog.load("reliability", defaults.published_run, PublishedRun)
        mtbf = published_mtbf(run)
        chosen.assume(
            "mtbf_gpu_hours",
            round(mtbf.value),
            f"{run.name}, {run.hardware}{_others(catalog, defaults.published_run)}",
        )
    storage = chosen.stated("storage_gb_per_s", "bytes/s", name="storage", scale=GB)
    if storage is None:
        each, most = defaults.storage_per_gpu, defaults.storage_most
        words = f"{each.value:g} GB/s for each GPU, {each.note}; at most {most.value:,g}, {most.note}"
        chosen.assumed.append(Assumption("reliability.storage_gb_per_s", "", words))
    return (
        Failures(
            mtbf_gpu_hours=mtbf,
            blocking_share=chosen.line("blocking_share", "fraction", defaults.blocking_share),
            restart_s=chosen.line("restart_s", "s", defaults.restart),
            hardware_share=chosen.line("hardware_share", "fraction", defaults.hardware_share),
            repair_s=chosen.line("repair_h", "s", defaults.repair, name="repair", scale=3600),
            spare_confidence=chosen.line("spare_confidence", "fraction", defaults.spare_confidence),
            storage=storage,
            storage_per_gpu=defaults.storage_per_gpu.line("storage"),
            storage_most=defaults.storage_most.line("storage"),
            checkpoint_steps=keys.checkpoint_steps,
        ),
        chosen.assumed,
    )


def _others(catalog: Catalog, own: str) -> str:
    """What other published runs say, so that one figure is not taken for a law."""
    rates: Sequence[float] = sorted(
        float(published_mtbf(run).value) for run in published_runs(catalog) if run.id != own
    )
    return f"; other runs: {rates[0]:,.0f} to {rates[-1]:,.0f}" if rates else ""
