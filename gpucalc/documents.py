"""What three planning documents would say of a job, beside what its plan says.

The rules are worked out as the documents word them (`gpucalc claims` judges each); every estimate carries
one sentence on why the two numbers differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpucalc import units
from gpucalc.formulas.reliability import total_gpus
from gpucalc.formulas.rules import (
    bubble_share,
    card_rule_bytes,
    fp32_adam_bytes,
    gpus_with_spares,
    memory_rule_bytes,
    memory_rule_card_bytes,
    recompute_overhead,
    saved_state_bytes,
    saving,
    usable_card_bytes,
    with_margin_bytes,
    zero_saving,
)
from gpucalc.line import Kind, Line, compute
from gpucalc.plan.answer import Plan
from gpucalc.plan.economics import RULE_SPARES_PERCENT, RULE_STEPS

if TYPE_CHECKING:
    from gpucalc.spec.hardware import Cluster

# What the documents count for the states of Adam; they name no other optimizer.
ADAM_BYTES = 8
ADAM = ("adam", "adamw", "adamw-fused")  # in full precision, without an 8-bit or fused-master variant
MARGIN = 0.2  # "single-machine multi-card deployment", section 2.1
_SAME = 0.1


@dataclass(frozen=True, slots=True)
class Estimate:
    """One rule applied to a job: its number, ours where the plan has one, and why they differ.

    `claim` is the id under which `gpucalc claims` judges the rule.
    """

    claim: str
    rule: str
    line: Line
    ours: Line | None
    why: str

    @property
    def times_ours(self) -> float | None:
        """The rule's number over ours."""
        return float(self.line.value) / self.ours.value if self.ours is not None and self.ours.value else None


def headline(plan: Plan) -> Estimate:
    """The memory of a GPU by the documents' rule: parameters, active parameters x batch, optimizer state."""
    batch = plan.recipe.concurrency if plan.serves else plan.layout.global_batch
    whole = compute(
        "memory_rule",
        memory_rule_bytes,
        params=plan.model,
        active_params=_active(plan),
        batch=batch,
        optimizer_bytes=_optimizer_bytes(plan),
    )
    card = compute("memory_rule_per_gpu", memory_rule_card_bytes, memory_rule_bytes=whole, gpus=plan.gpus)
    rule = "P x 4 + active x 4 x batch + optimizer, over all cards"
    return Estimate("C06", rule, card, plan.verdict.needed, _why_memory(plan, batch, card.value))


def estimates(plan: Plan, cluster: Cluster) -> tuple[Estimate, ...]:
    """Every rule of the documents that says something of this job, memory first."""
    common = (headline(plan), *_memory_rules(plan))
    task = () if plan.serves else tuple(_training_rules(plan))
    return (*common, *task, *_machine_rules(plan, cluster))


def _active(plan: Plan) -> Line:
    return next((line for line in plan.model.children if line.name == "active"), plan.model)


def _optimizer_bytes(plan: Plan) -> float:
    if plan.serves:
        return 0
    return ADAM_BYTES if "adam" in plan.recipe.optimizer else float(plan.recipe.optimizer_bytes)


def _why_memory(plan: Plan, batch: int, ruled: float) -> str:
    """Why the memory rule differs: which of its terms is too large, or what it leaves out."""
    if abs(ruled / plan.verdict.needed.value - 1) <= _SAME:
        return "close by chance: what it leaves out and what it counts too often are as large"
    if ruled < plan.verdict.needed.value:
        left_out = (
            "it leaves out gradients and activations"
            if not plan.serves
            else "it leaves out cache and engine"
            if plan.cache is not None
            else "it leaves out activations"
        )
        divided = ", and divides by all cards what each of them holds whole" if _copies(plan) > 1 else ""
        return left_out + divided
    if _active(plan).value * batch >= plan.model.value:
        instead = "cache" if plan.cache is not None else "activations"
        return f"it counts the active weights anew for each of {batch} samples, in place of {instead}"
    return "it counts 4 bytes a weight, whatever the weights are stored in"


def _copies(plan: Plan) -> int:
    """How many GPUs hold the same weights."""
    layout = plan.layout
    if plan.serves:
        return int(layout.caches)
    return 1 if layout.zero_stage == 3 else int(layout.dp * layout.cp)


def _memory_rules(plan: Plan) -> Iterator[Estimate]:
    needed, capacity = plan.verdict.needed, plan.verdict.capacity
    weights = compute("card_rule", card_rule_bytes, params=plan.model, gpus=plan.gpus)
    yield Estimate(
        "B09",
        "P x 4 (FP16) / cards and a 20 % margin",
        compute("card_rule_with_margin", with_margin_bytes, needed_bytes=weights, margin=MARGIN),
        needed,
        "it is weights alone, at four bytes though FP16 takes two, over all cards however they are used",
    )
    error = units.percent(plan.verdict.expected_error)
    yield Estimate(
        "B11",
        "keep 20 % of the card free",
        compute("usable_by_rule", usable_card_bytes, card_bytes=capacity, margin=MARGIN),
        capacity,
        f"no fixed share is kept here: a plan fits beyond the estimate's own error, {error}",
    )


def _training_rules(plan: Plan) -> Iterator[Estimate]:
    recipe, layout = plan.recipe, plan.layout
    if layout.zero_stage and layout.shard > 1:
        yield Estimate(
            "B38",
            "ZeRO saves up to 60 %",
            _stated("zero_saving_by_rule", 0.6, "fraction"),
            compute("zero_saving", zero_saving, shard=layout.shard, zero_stage=layout.zero_stage),
            f"of model states, stage {layout.zero_stage} on {layout.shard} ranks; 60 % is stage 1 on five",
        )
    if recipe.recompute == "full":
        yield Estimate(
            "A12",
            "checkpointing costs 20 % (or 15 %) more computation",
            _stated("recompute_by_rule", 0.2, "fraction"),
            compute("recompute_overhead", recompute_overhead, backward_over_forward=2),
            "a second forward pass is a third of forward and backward; measured steps take 29 to 32 % longer",
        )
    if recipe.precision not in ("fp32", "tf32") and recipe.optimizer in ADAM and recipe.method == "full":
        held = recipe.parameter_bytes + recipe.gradient_bytes + recipe.optimizer_bytes
        before = compute("fp32_states", fp32_adam_bytes, params=1)
        after = Line("states", held, "bytes", source="what this run holds of each parameter")
        yield Estimate(
            "C18",
            "mixed precision saves 50 % of memory",
            _stated("mixed_precision_by_rule", 0.5, "fraction"),
            compute("saved_of_states", saving, before=before, after=after),
            f"states take {held:g} bytes a parameter here and 16 in FP32; half is saved of activations",
        )
    if layout.pp > 1:
        yield Estimate(
            "C36",
            "bubble (p - 1) / (m + p - 1) of the step",
            compute("bubble_by_rule", bubble_share, pp=layout.pp, micro_batches=layout.micro_batches),
            _share(plan.time, "bubble"),
            f"ours is of the {layout.schedule} schedule, with the stages' own times",
        )
    size = compute("checkpoint", saved_state_bytes, params=plan.model)
    if plan.time is not None:
        interval = RULE_STEPS * plan.time.value
        ours = plan.reliability.child("optimal_interval") if plan.reliability is not None else None
        why = f"right is sqrt(2 x write time x time between failures); a checkpoint is {_decimal(size.value)}"
        if plan.reliability is not None:
            why = f"{plan.reliability.child('goodput_every_500_steps').note}"
        yield Estimate(
            "A32",
            f"save every {RULE_STEPS} steps",
            _stated("time_between_saves", interval, "s"),
            ours,
            why,
        )
    yield Estimate(
        "B19",
        "an SSD of 1 TB at least",
        _stated("disk_by_rule", 1e12, "bytes"),
        size,
        "ours is one checkpoint; the data set and earlier checkpoints come on top",
    )


def _machine_rules(plan: Plan, cluster: Cluster) -> Iterator[Estimate]:
    from gpucalc.formulas.rules_machine import cards_power_w, lanes_for_cards, loader_cores, supply_w

    cards = min(cluster.gpus_per_node, plan.gpus)
    gpu = cluster.pools[0].gpu
    if gpu.tdp is not None and len(cluster.pools) == 1 and cards > 1:
        power = compute("cards_power", cards_power_w, gpus=cards, tdp_w=gpu.tdp.line("tdp"))
        supply = compute("supply", supply_w, gpu_power_w=power, other_w=0, load_share=0.8)
        yield Estimate(
            "B15",
            "300 W a card, and 850 W of supply for four of them",
            compute("cards_power_by_rule", cards_power_w, gpus=cards, tdp_w=300),
            power,
            f"one {gpu.name} draws {gpu.tdp.value:,.0f} W; {cards} of them alone take "
            f"{supply.value:,.0f} W of supply at 80 % load",
        )
    if gpu.pcie_lanes is not None and cards > 1:
        yield Estimate(
            "B17",
            "16 PCIe lanes at least",
            _stated("lanes_by_rule", 16, "lanes"),
            compute("lanes", lanes_for_cards, gpus=cards, width=gpu.pcie_lanes),
            f"16 lanes are one card's; ours is full width for each of a machine's {cards}",
        )
    if cards > 1:
        yield Estimate(
            "B18",
            "16 processor cores at least",
            _stated("cores_by_rule", 16, "cores"),
            compute("cores", loader_cores, gpus=cards, cores_per_gpu=4),
            "ours is four cores for each of a machine's GPUs, the low end of practice",
        )
    spares = ours = None
    if plan.reliability is not None:
        spares = plan.reliability.child("spare_gpus")
        ours = compute("gpus_with_spares", total_gpus, gpus=plan.gpus, spare_gpus=spares)
    yield Estimate(
        "A47",
        "10 % of the GPUs spare",
        compute("gpus_with_spares", gpus_with_spares, gpus=plan.gpus, spare_percent=RULE_SPARES_PERCENT),
        ours,
        "in line with practice against failures; a plan counts the GPUs in use"
        if spares is None
        else f"{spares.value:,.0f} spares suffice for the failures to expect; a plan counts the GPUs in use",
    )


def _stated(name: str, value: float, unit: str) -> Line:
    return Line(name, value, unit, Kind.ASSUMED, source="the document's own figure")


def _share(whole: Line | None, part: str) -> Line | None:
    """A part of a sum as a share of it; None where the sum has no such part."""
    found = next((line for line in whole.children if line.name == part), None) if whole else None
    if whole is None or found is None or not whole.value:
        return None
    return Line(f"{part}_share", found.value / whole.value, "fraction", found.kind, inputs={part: found})


def _decimal(value: float) -> str:
    return f"{value / units.TB:,.2f} TB" if value >= units.TB else f"{value / units.GB:,.1f} GB"
