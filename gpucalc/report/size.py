"""Which fleets to take, as a table and as a document: the best three, then all that were planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from gpucalc.plan.answer import Level, Plan
from gpucalc.report.json import record
from gpucalc.report.mixed import below
from gpucalc.report.screen import QUIET, clean, columns, dollars, grid, heading, indent, whole
from gpucalc.size_offers import ORDERS, PRICE_SPREAD, Offer, Sizing
from gpucalc.units import percent, seconds

MOST_ROWS = 16
MOST_REASONS = 3
NO_PRICE = "no price"
_VERDICTS = {Level.FITS: "fits", Level.MARGINAL: "marginal", Level.DOES_NOT_FIT: "does not fit"}


def report(found: Sizing, *, every: bool = False, order: str = "price") -> RenderableType:
    """The answer first, then the fleets behind it, in the order of one of size.ORDERS."""
    run = "run: " + ", ".join(clean(word) for word in found.run)
    parts: list[RenderableType] = [heading(f"{found.name}: which GPUs to take")]
    parts += [Text(run, QUIET), Text(_asked(found), QUIET)]
    if not found.meeting:
        parts += [Text(), Text("No fleet looked at meets this."), *_why_none(found)]
    else:
        parts += [Text(), indent(_picks(found)), *_sure(found)]
    shown = _shown(found, every, order)
    if shown:
        title = "Fleets planned" if every else "Fleets that meet it" if found.meeting else "Nearest fleets"
        parts += [Text(), heading(title), indent(_table(shown, order))]
        left = len(found.offers) - len(shown)
        if left:
            parts.append(indent(Text(f"--all lists {left} more", QUIET)))
    return Group(*parts, *_skipped(found), *_together(found))


def _together(found: Sizing) -> list[RenderableType]:
    if found.together is None or found.task != "train":
        return []
    lines = [f"not offered, {cards}: {why}" for cards, why in found.apart]
    lines.append(f"gpucalc plan with --gpus {found.together} compares every way of using them")
    return [Text(clean(line), QUIET) for line in lines]


def _asked(found: Sizing) -> str:
    targets = found.targets
    asked = []
    if targets.tokens is not None:
        asked.append(f"{targets.tokens:,} tokens")
    if targets.by_s is not None:
        asked.append(f"within {seconds(targets.by_s)}")
    if targets.per_s is not None:
        asked.append(f"{targets.per_s:,.0f} tokens/s")
    if targets.requests_per_s is not None:
        asked.append(f"{targets.requests_per_s:g} requests/s")
    if targets.budget_usd is not None:
        asked.append(f"for at most {dollars(targets.budget_usd)}")
    if targets.usd_per_hour is not None:
        asked.append(f"at most {dollars(targets.usd_per_hour)} an hour")
    asked += found.latencies
    return "asked: " + (", ".join(asked) or "that it fits")


def _picks(found: Sizing) -> RenderableType:
    table = grid("left", "left")
    told: dict[int, str] = {}
    for name, offer in (
        ("cheapest", found.cheapest),
        ("fastest", found.fastest),
        ("smallest", found.smallest),
        ("least energy", found.leanest),
    ):
        if offer is None:
            lacking = {"fastest": "speed", "least energy": "power"}.get(name, "price")
            table.add_row(name, f"of no fleet that meets it a {lacking} is known")
            continue
        before = told.setdefault(id(offer), name)
        if before != name:
            table.add_row(Text(name), Text(f"the same as the {before}: {_place(offer)}", style="bold"))
            continue
        table.add_row(Text(name), Text(_place(offer), style="bold"))
        for line in _facts(offer):
            table.add_row("", line)
    return table


def _facts(offer: Offer) -> Iterator[str]:
    """Verdict, headroom, speed, money and how far the answer holds, a line each."""
    verdict, plan = offer.plan.verdict, offer.plan
    spare = percent(verdict.margin_bytes / verdict.capacity.value, 0)
    yield f"{_VERDICTS[offer.level]}, {spare} of a GPU to spare; bound by {clean(plan.binds)}"
    yield _layout(plan) if offer.way is None else f"{offer.way.how}: {next(below(offer.way))}"
    yield f"{_speed(offer)}; {_money(offer)}"
    if offer.way is not None:
        yield from (clean(text) for text in offer.cluster.assumptions if " joined by " in text)
    if offer.owned_usd is not None:
        yield f"{dollars(offer.owned_usd)} on machines of one's own: depreciation and power"
    if (energy := _energy(offer)) is not None:
        yield energy
    yield _holds(offer)


def _speed(offer: Offer) -> str:
    if offer.rate is None:
        return "speed not known"
    unit = f"output {_unit(offer)}" if offer.plan.serves else _unit(offer)
    said = f"{whole(round(offer.rate))} {unit} ± {percent(offer.error, 0)}"
    wall = offer.wall_s()
    return (
        said
        if wall is None
        else f"{seconds(wall)} ± {percent(offer.error, 0)} at {whole(round(offer.rate))} {unit}"
    )


def _unit(offer: Offer) -> str:
    """What is counted: tokens, or samples of a model that reads none."""
    rates = offer.plan.throughput
    if offer.plan.serves or rates is None or rates.child("tokens_per_s").value != rates.value:
        return "tokens/s"
    return "samples/s"


def _money(offer: Offer) -> str:
    if offer.usd_per_hour is None:
        return NO_PRICE
    said = f"{dollars(offer.usd_per_hour)}/h"
    total = offer.total_usd()
    if total is None:
        return said
    low, high = offer.total_usd(1, 1 - PRICE_SPREAD), offer.total_usd(1, 1 + PRICE_SPREAD)
    return (
        f"{said}, {dollars(total)} in all"
        f" ({dollars(low or 0.0)} to {dollars(high or 0.0)} with prices ± 20 %)"
    )


def _energy(offer: Offer) -> str | None:
    if offer.kwh_per_million is None:
        return None
    unit = _unit(offer).removesuffix("/s")
    said = f"{offer.kwh_per_million:.3g} kWh per million {unit}"
    if offer.total_kwh is not None:
        said += f", {_kwh(offer.total_kwh)} in all"
    if offer.total_carbon_kg is not None:
        said += f": {_tonnes(offer.total_carbon_kg)} of CO2"
    return said


def _kwh(value: float) -> str:
    return f"{value / 1000:,.4g} MWh" if value >= 1000 else f"{value:,.3g} kWh"


def _tonnes(kilograms: float) -> str:
    return f"{kilograms / 1000:,.4g} t" if kilograms >= 1000 else f"{kilograms:,.3g} kg"


def _holds(offer: Offer) -> str:
    if offer.way is not None:
        said = "not surely: no published run on unlike cards tells how far such an estimate is off"
    elif offer.holds:
        said = "holds at the far end of the expected error"
    elif offer.level is Level.MARGINAL:
        said = "may not fit: the margin is within the expected error of memory"
    else:
        why = "; ".join(offer.missed_far) or f"costs {dollars(offer.total_usd(1 + offer.error) or 0.0)}"
        said = f"not at the far end of the expected error: {why}"
    if offer.targets.asks_money and offer.too_dear(1, 1 + PRICE_SPREAD):
        said += "; not with prices 20 % up"
    return said


def _sure(found: Sizing) -> Iterator[RenderableType]:
    sure, cheapest = found.cheapest_that_holds, found.cheapest
    if cheapest is not None and not cheapest.holds:
        words = "nothing looked at with a price" if sure is None else f"{_place(sure)}, {_money(sure)}"
        yield indent(Text(f"to be sure of it: {words}"))
    others = found.as_cheap
    if others:
        names = ", ".join(_place(offer) for offer in others[:MOST_REASONS])
        yield indent(Text(f"as cheap should prices differ by 20 %: {names}"))


def _shown(found: Sizing, every: bool, order: str = "price") -> Sequence[Offer]:
    key = ORDERS[order]
    if every:
        return sorted(found.offers, key=key)
    if found.meeting:
        rows = sorted(found.meeting, key=lambda offer: (not offer.holds, *key(offer)))[:MOST_ROWS]
        for offer in (found.cheapest, found.fastest, found.smallest, found.leanest):
            if offer is not None and all(offer is not row for row in rows):
                rows.append(offer)
        return rows
    # Nothing does: what fits and comes nearest in speed.
    near = sorted(found.offers, key=lambda o: (o.level is Level.DOES_NOT_FIT, -(o.rate or 0.0)))
    return near[:MOST_ROWS]


def _table(offers: Sequence[Offer], order: str) -> RenderableType:
    total = any(offer.wall_s() is not None for offer in offers)
    units = {_unit(offer) for offer in offers if offer.rate is not None}
    names = ["fleet", "fits", "spare", " ".join(units) or "tokens/s", "±"]
    names += ["time", "$/h", "$ in all", "meets"] if total else ["$/h", "meets"]
    energy = order == "energy"
    if energy:  # takes the place of the hourly price, to keep eighty columns
        names[names.index("$/h")] = "kWh/M"
    right = range(2, len(names) - 1)
    table = columns(*names, right=right, whole=range(1, len(names)), gap=1 if total else 2)
    for offer in offers:
        verdict = offer.plan.verdict
        row = [
            _place(offer),
            {Level.FITS: "yes", Level.MARGINAL: "maybe", Level.DOES_NOT_FIT: "no"}[offer.level],
            percent(verdict.margin_bytes / verdict.capacity.value, 0),
            "" if offer.rate is None else whole(round(offer.rate)),
            "" if offer.rate is None else percent(offer.error, 0),
        ]
        hourly = NO_PRICE if offer.usd_per_hour is None else _hourly(offer.usd_per_hour)
        if energy:
            hourly = "" if offer.kwh_per_million is None else f"{offer.kwh_per_million:.3g}"
        if total:
            wall, cost = offer.wall_s(), offer.total_usd()
            row += [
                "" if wall is None else seconds(wall).replace(" days", " d"),
                hourly,
                "" if cost is None else f"{cost:,.0f}",
            ]
        else:
            row.append(hourly)
        row.append("surely" if offer.holds else "yes" if offer.meets else "no")
        table.add_row(*row)
    return table


def _hourly(value: float) -> str:
    """Dollars without their sign, in cents while a column has room for them."""
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _why_none(found: Sizing) -> Iterator[RenderableType]:
    """What the nearest fleets miss, and why larger ones were not even planned."""
    planned = _shown(found, every=False)
    largest = max((offer.gpus for offer in planned), default=0)
    lines = [f"{_place(offer)}: {_missed(offer)}" for offer in planned]
    for fleet, why in sorted(found.skipped, key=lambda item: -int(item[0].partition("x")[0])):
        if int(fleet.partition("x")[0]) > largest:
            lines.append(f"{fleet}: {why}")
    for line in lines[:MOST_REASONS]:
        yield indent(Text(clean(line), QUIET))


def _missed(offer: Offer) -> str:
    if offer.missed:
        return "; ".join(offer.missed)
    if offer.usd_per_hour is None:
        return "no price is known"
    return f"costs {_money(offer)}"


def _skipped(found: Sizing) -> Iterator[RenderableType]:
    """How many fleets were not planned."""
    if found.skipped:
        yield Text()
        yield Text(f"not planned or cannot run: {len(found.skipped)}; --json says why for each", QUIET)


def _place(offer: Offer) -> str:
    where = "" if offer.kind.system is None else f" in {offer.kind.system}"
    idle = "" if offer.used == offer.gpus else f", {offer.gpus - offer.used} idle"
    return clean(f"{offer.kind.cards(offer.gpus)}{where}{idle}")


def _layout(plan: Plan) -> str:
    if plan.splits:  # every kind has its own
        return f"{plan.splits[0].framework}, {plan.splits[0].how}"
    layout, recipe = plan.layout, plan.recipe
    degrees = [
        f"{key} {getattr(layout, key)}" for key in ("tp", "pp", "cp", "ep", "dp") if _above(layout, key)
    ]
    engine = recipe.engine if plan.serves else recipe.framework
    rest = [] if plan.serves else [f"micro_batch {layout.micro_batch}"]
    if not plan.serves and recipe.recompute != "none":
        rest.append(f"recompute {recipe.recompute}")
    return clean(", ".join([engine, *degrees, *rest]))


def _above(layout: Any, key: str) -> bool:
    return bool(getattr(layout, key, 1) > 1)


# -- for programs ---------------------------------------------------------------------------------


def document(found: Sizing) -> dict[str, Any]:
    """The same for a JSON document."""
    picks = {"cheapest": found.cheapest, "fastest": found.fastest, "smallest": found.smallest}
    picks["least_energy"] = found.leanest
    picks["cheapest_that_holds"] = found.cheapest_that_holds
    return {
        "name": found.name,
        "task": found.task,
        "run": list(found.run),
        "targets": found.targets.document(),
        "met": bool(found.meeting),
        **{key: None if offer is None else _offer(offer) for key, offer in picks.items()},
        "as_cheap_if_prices_move": [_where(offer) for offer in found.as_cheap],
        "fleets": [_offer(offer) for offer in found.offers],
        "kinds_together": found.together,
        "not_joined": [{"fleet": cards, "why": why} for cards, why in found.apart],
        "not_planned": [{"fleet": fleet, "why": why} for fleet, why in found.skipped],
    }


def _where(offer: Offer) -> dict[str, Any]:
    return {"fleet": offer.fleet, "system": offer.kind.system}


def _offer(offer: Offer) -> dict[str, Any]:
    verdict, far, near = offer.plan.verdict, 1 + offer.error, max(0.1, 1 - offer.error)
    return {
        **_where(offer),
        "gpus": offer.gpus,
        "gpus_used": offer.used,
        "level": offer.level.value,
        "needed_bytes": float(verdict.needed.value),
        "margin_bytes": float(verdict.margin_bytes),
        "headroom_fraction": float(verdict.margin_bytes / verdict.capacity.value),
        "binds": offer.plan.binds,
        "layout": _layout(offer.plan),
        "way": None if offer.way is None else record(offer.way),
        "tokens_per_s": offer.rate,
        "expected_error_fraction": offer.error if offer.rate is not None else None,
        "wall_s": offer.wall_s(),
        "usd_per_hour": offer.usd_per_hour,
        "total_usd": offer.total_usd(),
        "owned_usd": offer.owned_usd,
        "kwh_per_million_tokens": offer.kwh_per_million,
        "total_kwh": offer.total_kwh,
        "total_carbon_kg": offer.total_carbon_kg,
        "meets": offer.meets,
        "missed": list(offer.missed),
        "far_end": {
            "holds": offer.holds,
            "missed": list(offer.missed_far),
            "wall_s": offer.wall_s(far),
            "total_usd": offer.total_usd(far),
        },
        "near_end": {
            "missed": list(offer.missed_near),
            "wall_s": offer.wall_s(near),
            "total_usd": offer.total_usd(near),
        },
        "prices_up": {
            "total_usd": offer.total_usd(1, 1 + PRICE_SPREAD),
            "too_dear": offer.too_dear(1, 1 + PRICE_SPREAD),
        },
        "prices_down": {
            "total_usd": offer.total_usd(1, 1 - PRICE_SPREAD),
            "too_dear": offer.too_dear(1, 1 - PRICE_SPREAD),
        },
    }
