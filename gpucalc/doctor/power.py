"""Power and heat: what the cards draw against what the supplies, connectors, slots and air can carry."""

from __future__ import annotations

from gpucalc.doctor.box import Box, Supply
from gpucalc.doctor.context import Answers, Context, keys, stated
from gpucalc.doctor.finding import Finding, Question, once
from gpucalc.formulas import cost as money
from gpucalc.formulas import machine as f
from gpucalc.formulas import rules_machine as rules
from gpucalc.line import Kind, Line, compute, total
from gpucalc.spec.checks import Severity
from gpucalc.spec.figure import Figure

SLOT_W = 75  # what a PCIe slot delivers to a card
INLET_LIMIT_C = 35  # upper inlet of the class air-cooled servers are built for
RISE_K = 20  # from inlet to outlet, for the airflow shown


def power(ctx: Context) -> Answers:
    """The supplies against full load, with and without one of them, the label derated."""
    box = ctx.box
    need = load_w(box, ctx.host_power_share)
    supply = box.supply
    if need is None:
        return Answers(questions=(Question("card power", "the power limit of each card", ("C24",)),))
    asked = [Question("supply derating", _derating(box), ("C24",))]
    if (box.cpu_power_w is None or box.other_power_w is None) and box.max_power is None:
        ask = "power of the processors, fans, disks and board (cpu_power_w, other_power_w); "
        ask += f"{ctx.host_power_share.value:.0%} of the cards assumed"
        asked.append(Question("rest of the machine", ask))
    if supply is None:
        asked.insert(
            0, Question("power supplies", "how many, watts each, one spare or not (--psu)", ("C24",))
        )
        note = Finding(
            "power-need", Severity.NOTE, "power", f"the machine draws {need.value:,.0f} W at full load",
            _parts(need), "hold the supplies against it: --psu 2x1600:redundant",
            ctx.host_power_share.source[:1],
            ("B15", "C24"), numbers=(need,),
        )  # fmt: skip
        return Answers((note,), tuple(asked))
    found = [*_supplies(ctx, need, supply)]
    if supply.rail_w is None:
        asked.append(Question("12 V", "watts of each supply's 12 V rail, which feeds cards and processors"))
    return Answers(tuple(found), tuple(asked))


def load_w(box: Box, host_share: Figure) -> Line | None:
    """Power at full load: the cards at their limits and the rest; None where a card's limit is not known."""
    limits = [card.power_limit_w or card.power_default_w for card in box.cards]
    if not limits or any(limit is None for limit in limits):
        return None
    parts: list[Line] = []
    for limit in dict.fromkeys(limits):
        count = stated("gpus", limits.count(limit), "count")
        each = stated("tdp", float(limit or 0), "W")
        parts.append(compute("cards", rules.cards_power_w, gpus=count, tdp_w=each))
    cards = total("cards", tuple(parts), unit="W") if len(parts) > 1 else parts[0]
    if (box.cpu_power_w is None or box.other_power_w is None) and box.max_power is not None:
        rest = max(0.0, box.max_power.value - cards.value)
        line = Line("rest", rest, "W", box.max_power.kind, source=box.max_power.source)
        return total("full_load", (cards, line), unit="W")
    if box.cpu_power_w is None or box.other_power_w is None:
        share = host_share.line("host_power_share")
        rest = compute("rest", money.host_power_w, gpu_power_w=cards, share=share)
        return total("full_load", (cards, rest), unit="W")
    processors = stated("processors", box.cpu_power_w * (box.sockets or 1), "W")
    return total("full_load", (cards, processors, stated("other", box.other_power_w, "W")), unit="W")


def _parts(need: Line) -> str:
    said = {part.name: " (assumed)" if part.kind is Kind.ASSUMED else "" for part in need.children}
    parts = [f"{part.name} {part.value:,.0f} W{said[part.name]}" for part in need.children]
    return " + ".join(parts) + f" = {need.value:,.0f} W"


def _supplies(ctx: Context, need: Line, supply: Supply) -> list[Finding]:
    """Every way the supplies may run: the worst that was asked for is an error, the others a warning."""
    margin = ctx.rules.psu_margin
    share = 1 / margin.value
    source = keys(margin)
    found: list[Finding] = []
    ways = {None: (0, 1), True: (1,), False: (0,)}[supply.redundant] if supply.count > 1 else (0,)
    for spare in ways:
        words = "one of them gone" if spare else "all of them up" if supply.count > 1 else "one supply"
        label = _standing("label", supply, spare, supply.each_w, 1)
        usable = _standing("usable", supply, spare, supply.each_w, share)
        cards = _cards_carried(ctx.box, need, label.value, share)
        evidence = (
            f"{_parts(need)}; {supply}: {words}, {label.value:,.0f} W by the label, {usable.value:,.0f} W "
        )
        evidence += f"at {share:.0%}"
        optional = supply.redundant is None and spare == 1
        if need.value > label.value:
            severity = Severity.WARNING if optional else Severity.ERROR
            problem = f"{need.value:,.0f} W at full load exceed {label.value:,.0f} W with {words}"
        elif need.value > usable.value:
            severity = Severity.WARNING
            problem = (
                f"{need.value:,.0f} W leave no margin: {usable.value:,.0f} W at {share:.0%} of the label"
            )
        else:
            continue
        found.append(
            Finding(
                "psu-redundancy" if spare else "psu", severity, "power supplies", problem, evidence,
                f"{cards:.0f} of the {len(ctx.box.cards)} cards at most, or lower power limits", source,
                ("B16", "C24"), numbers=(need, label, usable),
            )
        )  # fmt: skip
    if supply.rail_w is not None:
        spare = 1 if supply.redundant else 0
        rail = _standing("rail", supply, spare, supply.rail_w, 1)
        if need.value > rail.value:
            found.append(
                Finding(
                    "psu-12v", Severity.ERROR, "12 V rail",
                    f"{need.value:,.0f} W at full load exceed the {rail.value:,.0f} W at 12 V",
                    f"{_parts(need)}; {supply}", "larger supplies, or fewer cards", source, ("C39",),
                    numbers=(need, rail),
                )
            )  # fmt: skip
    if not found:
        found.append(
            Finding(
                "psu", Severity.NOTE, "power supplies", "carry full load", f"{_parts(need)}; {supply}", None,
                source, ("C24",), numbers=(need,),
            )
        )  # fmt: skip
    return found


def _standing(name: str, supply: Supply, spare: int, each: float, share: float) -> Line:
    return compute(
        name, f.standing_supply_w, supplies=supply.count, spare=spare, each_w=each, load_share=share
    )


def _cards_carried(box: Box, need: Line, label_w: float, share: float) -> float:
    limits = [card.power_limit_w or card.power_default_w or 0.0 for card in box.cards]
    other = need.value - sum(limits)
    return max(
        0.0,
        float(rules.cards_on_supply(supply_w=label_w, load_share=share, other_w=other, tdp_w=max(limits))),
    )


def _derating(box: Box) -> str:
    at = "the inlet temperature" if box.inlet_c is None else f"{box.inlet_c:g} C inlet"
    return f"what a supply delivers at {at} and your mains: many give less below 200 V, and when hot"


def connectors(ctx: Context) -> Answers:
    """Slot and plugs of each card against its power limit."""
    found: list[Finding] = []
    if ctx.box.baseboard:
        return Answers()
    card = ctx.box.cards[0]
    if card.eight_pins is None and card.twelve_volts is None:
        ask = "which plugs each card has, and one cable per plug from the supply (no splitters)"
        return Answers(questions=(Question("connectors", ask, ("C39",)),))
    eight, twelve = card.eight_pins or 0, card.twelve_volts or 0
    limit = card.power_limit_w or card.power_default_w
    able = compute("connectors", rules.connector_w, slot_w=SLOT_W, eight_pins=eight, twelve_volts=twelve)
    if limit is not None and limit > able.value:
        found.append(
            Finding(
                "connectors", Severity.ERROR, card.name,
                f"may draw {limit:,.0f} W, and slot and plugs carry {able.value:,.0f} W",
                f"{SLOT_W} W slot, {eight} x 8-pin, {twelve} x 12V-2x6", "the plugs the card is made for",
                keys(ctx.rules.connector_8pin, ctx.rules.connector_12v2x6), ("C39",), numbers=(able,),
            )
        )  # fmt: skip
    return Answers(tuple(found))


def cooling(ctx: Context) -> Answers:
    """Inlet temperature and the air full load needs; hot cards of a live machine."""
    box, need = ctx.box, load_w(ctx.box, ctx.host_power_share)
    found: list[Finding] = []
    asked: list[Question] = []
    air = ""
    numbers: tuple[Line, ...] = ()
    if need is not None:
        flow = compute("airflow", rules.airflow_cfm, power_w=need, rise_k=RISE_K)
        air = f"{need.value:,.0f} W take {flow.value:,.0f} CFM at {RISE_K} K of rise"
        numbers = (flow,)
    if box.inlet_c is None:
        asked.append(Question("inlet temperature", f"hottest intake in summer (inlet_c); {air}", ("C25",)))
    elif box.inlet_c > INLET_LIMIT_C:
        found.append(
            Finding(
                "inlet", Severity.ERROR, "cooling",
                f"{box.inlet_c:g} C intake exceed the {INLET_LIMIT_C} C air-cooled servers are built for",
                air or f"{box.inlet_c:g} C", "cooler intake, or lower power limits", ("ashrae",), ("C25",),
                numbers=numbers,
            )
        )  # fmt: skip
    else:
        found.append(
            Finding(
                "inlet", Severity.NOTE, "cooling", f"{box.inlet_c:g} C intake is within {INLET_LIMIT_C} C",
                air or f"{box.inlet_c:g} C", None, ("ashrae",), ("C25",), numbers=numbers,
            )
        )  # fmt: skip
    slowed = [card for card in box.cards if card.throttled_by]
    for card in slowed:
        thermal = any("thermal" in why or "hardware" in why for why in card.throttled_by)
        heat = "" if card.temperature_c is None else f" at {card.temperature_c:g} C"
        found.append(
            Finding(
                "throttled", Severity.ERROR if thermal else Severity.WARNING, f"GPU {card.index}",
                f"is slowed down: {', '.join(card.throttled_by)}", f"{card.name}{heat}",
                "airflow and power limit" if thermal else "raise the power limit where supplies allow",
                ("nvml_doc",), ("C25", "C40"),
            )
        )  # fmt: skip
    if not box.live:
        asked.append(Question("hot spots", "card temperatures side by side under full load", ("C40",)))
    return Answers(tuple(found), tuple(asked))


def limits(ctx: Context) -> Answers:
    """Cards held below the power they are sold with."""
    found: list[Finding] = []
    for card in ctx.box.cards:
        usual = card.power_default_w
        if card.power_limit_w is not None and usual is not None and card.power_limit_w < 0.99 * usual:
            found.append(
                Finding(
                    "power-limit", Severity.WARNING, f"GPU {card.index}",
                    f"is held to {card.power_limit_w:g} W of {usual:g} W", card.name,
                    f"nvidia-smi -i {card.index} -pl {usual:g}, where supplies and cooling allow",
                    ("smi_man",), ("C24",),
                )
            )  # fmt: skip
    return Answers(once(found))
