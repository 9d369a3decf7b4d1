"""What a fleet offers and costs, and which of the fleets planned is best by price, speed, size or energy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpucalc.formulas import cost as money
from gpucalc.line import Line
from gpucalc.plan.answer import Level, Plan, Split
from gpucalc.size_fleets import Joined, Kind
from gpucalc.size_targets import Targets, misses, rate_of, wall_s
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.train_run import TrainRun

PRICE_SPREAD = 0.2  # list prices of one card differ by this and more between providers
LEVEL_ORDER = {Level.FITS: 2, Level.MARGINAL: 1, Level.DOES_NOT_FIT: 0}


@dataclass(frozen=True, slots=True)
class Offer:
    """One fleet: its plan, what it misses on the estimate and at the ends of the error, what it costs."""

    kind: Kind | Joined
    gpus: int
    used: int  # fewer than gpus where the rest stand idle
    plan: Plan
    targets: Targets
    missed: tuple[str, ...]  # speed targets, on the estimate
    missed_far: tuple[str, ...]  # with everything slower by the expected error
    missed_near: tuple[str, ...]  # with everything faster by it
    usd_per_gpu_hour: float | None  # None: no price is known
    cluster: Cluster  # the GPUs in use

    @classmethod
    def of(
        cls, kind: Kind | Joined, plan: Plan, run: TrainRun | ServeRun, targets: Targets, cluster: Cluster,
        usd_per_gpu_hour: float | None,
    ) -> Offer:  # fmt: skip
        """All the GPUs of a cluster, against what the run is asked for."""
        spread = plan.speed_error[0] if plan.speed_error is not None else 0.0
        return cls(
            kind=kind,
            gpus=cluster.count,
            used=cluster.count,
            plan=plan,
            targets=targets,
            missed=misses(plan, run, targets),
            missed_far=misses(plan, run, targets, 1 + spread),
            missed_near=misses(plan, run, targets, max(0.1, 1 - spread)),
            cluster=cluster,
            usd_per_gpu_hour=usd_per_gpu_hour,
        )

    @property
    def fleet(self) -> str:
        """The words that plan it."""
        return self.kind.fleet(self.gpus)

    @property
    def way(self) -> Split | None:
        """How unlike cards share the run; None of one kind."""
        return self.plan.splits[0] if self.plan.splits else None

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
        """Whether it still does with memory and time worse by the expected error, where that is known.

        No published run on unlike cards says how far the ways of running on them are off.
        """
        if self.way is not None:
            return False
        return self.level is Level.FITS and not self.missed_far and not self.too_dear(1 + self.error)

    @property
    def works(self) -> tuple[int, int]:
        """How well it answers, money apart; never falls with more GPUs of a kind."""
        fits = self.level is not Level.DOES_NOT_FIT
        safe = self.level is Level.FITS and not self.missed_far
        return (2 if safe else 1 if fits and not self.missed else 0, LEVEL_ORDER[self.level])


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
    together: str | None = None  # all of the user's own unlike cards, in the words that plan them
    apart: tuple[tuple[str, str], ...] = ()  # all cards of two of them that are not offered together, why

    @property
    def meeting(self) -> tuple[Offer, ...]:
        """The fleets that meet every target, those that surely fit before those that may."""
        found = [offer for offer in self.offers if offer.meets]
        return tuple(sorted(found, key=lambda offer: offer.level is not Level.FITS))

    @property
    def cheapest(self) -> Offer | None:
        """The least money for the tokens, else per hour; None when none that meets them has a price."""
        return self._best([offer for offer in self.meeting if offer.usd_per_gpu_hour is not None], by_price)

    @property
    def fastest(self) -> Offer | None:
        """The highest rate; of equal ones the smaller."""
        return self._best(
            [o for o in self.meeting if o.rate is not None], lambda o: (-(o.rate or 0.0), o.gpus)
        )

    @property
    def smallest(self) -> Offer | None:
        """The fewest GPUs; of equal ones the cheaper."""
        return self._best(self.meeting, lambda offer: (offer.gpus, *by_price(offer)))

    @property
    def leanest(self) -> Offer | None:
        """The least energy a token; None when none that meets them has a known power."""
        known = [offer for offer in self.meeting if offer.kwh_per_million is not None]
        return self._best(known, lambda offer: (offer.kwh_per_million, offer.gpus))

    @property
    def cheapest_that_holds(self) -> Offer | None:
        """The cheapest at the far end of the error: what to take to be sure."""
        priced = [offer for offer in self.meeting if offer.holds and offer.usd_per_gpu_hour is not None]
        return min(priced, key=by_price, default=None)

    @property
    def as_cheap(self) -> tuple[Offer, ...]:
        """Other kinds that would be cheapest with prices a fifth off: theirs lower, the cheapest's higher."""
        best = self.cheapest
        if best is None:
            return ()
        limit = by_price(best)[1] * (1 + PRICE_SPREAD) / (1 - PRICE_SPREAD)
        others: dict[str, Offer] = {}
        for offer in sorted((o for o in self.meeting if o.level is best.level), key=by_price):
            if offer.usd_per_gpu_hour is not None and offer.kind != best.kind and by_price(offer)[1] < limit:
                others.setdefault(offer.kind.card, offer)
        return tuple(others.values())

    @staticmethod
    def _best(offers: Sequence[Offer], key: Any) -> Offer | None:
        # What surely fits goes before what may: a marginal fleet is an answer only where no other is.
        return min(offers, key=lambda offer: (offer.level is not Level.FITS, *key(offer)), default=None)


def _cost_line(plan: Plan, name: str) -> Line | None:
    """A part of a plan's cost, None where the plan has none."""
    return next((line for line in plan.cost.children if line.name == name), None) if plan.cost else None


def by_price(offer: Offer) -> tuple[bool, float, int]:
    """Order by money: of the token budget where there is one, else per hour; no price comes last."""
    cost = offer.usd_per_hour if offer.targets.tokens is None else offer.total_usd()
    return cost is None, cost or 0.0, offer.gpus


ORDERS: dict[str, Callable[[Offer], tuple[Any, ...]]] = {
    "price": by_price,
    "speed": lambda offer: (-(offer.rate or 0.0), offer.gpus),
    "gpus": lambda offer: (offer.gpus, *by_price(offer)),
    "energy": lambda offer: (offer.kwh_per_million is None, offer.kwh_per_million or 0.0, offer.gpus),
}
