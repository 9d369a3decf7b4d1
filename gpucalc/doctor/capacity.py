"""What surrounds the cards (host memory, disk, cores, slots), against the job where there is one."""

from __future__ import annotations

from gpucalc.doctor.context import Answers, Context, keys, stated
from gpucalc.doctor.finding import Finding, Question
from gpucalc.formulas import machine as f
from gpucalc.formulas import rules
from gpucalc.formulas import rules_machine as shared
from gpucalc.line import Line, compute
from gpucalc.plan.answer import Level
from gpucalc.spec.checks import Severity
from gpucalc.units import gib as gb


def host_memory(ctx: Context) -> Answers:
    """Memory of the host against what the job's plan needs there, or against the cards' memory."""
    held = ctx.box.host_ram_bytes
    host = ctx.plan.verdict.host if ctx.plan is not None else None
    if held is None:
        needs = f"; the job needs {gb(host.needed.value)}" if host is not None else ""
        return Answers(questions=(Question("host memory", f"how much (host_ram){needs}"),))
    if host is not None:
        short = host.needed.value > held
        return Answers(
            (
                Finding(
                    "host-memory", Severity.ERROR if short else Severity.NOTE, "host memory",
                    f"{'does not hold' if short else 'holds'} the job's {gb(host.needed.value)}",
                    f"{gb(held)} in the host; most is needed in the phase {host.phase}",
                    "more memory, or no offload" if short else None, ("definition",), (),
                    numbers=(host.needed,),
                ),
            )
        )  # fmt: skip
    if ctx.plan is not None:
        return Answers()  # the job holds nothing of note in the host
    ratio = ctx.rules.host_ram_over_gpu_memory
    cards = sum(card.memory_bytes or 0 for card in ctx.box.cards)
    if held < 0.95 * ratio.value * cards:
        return Answers(
            (
                Finding(
                    "host-memory", Severity.WARNING, "host memory", "is smaller than the cards' together",
                    f"{gb(held)} in the host, {gb(cards)} in the cards",
                    "as much as the cards have; a job's own need: gpucalc doctor JOB", keys(ratio), (),
                ),
            )
        )  # fmt: skip
    return Answers()


def disk(ctx: Context) -> Answers:
    """Disk against the weights and two checkpoints of the job."""
    held, plan = ctx.box.nvme_bytes, ctx.plan
    if plan is None:
        return (
            Answers() if held is not None else Answers(questions=(Question("disk", "NVMe (nvme)", ("B19",)),))
        )
    need = _disk_need(ctx)
    if held is None:
        ask = f"NVMe (nvme): the job needs {gb(need.value)} beside its data"
        return Answers(questions=(Question("disk", ask, ("B19",)),))
    short = need.value > held
    what = "weights" if plan.serves else "weights and two checkpoints"
    return Answers(
        (
            Finding(
                "disk", Severity.ERROR if short else Severity.NOTE, "disk",
                f"{'does not hold' if short else 'holds'} the job's {what}",
                f"{gb(held)} of disk, {gb(need.value)} beside the data", "more disk" if short else None,
                ("definition",), ("B19",), numbers=(need,),
            ),
        )
    )  # fmt: skip


def _disk_need(ctx: Context) -> Line:
    assert ctx.plan is not None
    params = ctx.plan.model
    weights = compute("weights", rules.weight_shard_bytes, params=params, element_bytes=2, gpus=1)
    if ctx.plan.serves:
        return weights
    saved = compute("checkpoint", rules.saved_state_bytes, params=params)
    return compute("disk", f.training_disk_bytes, weight_bytes=weights, checkpoint_bytes=saved)


def cores(ctx: Context) -> Answers:
    """Processor cores that feed the cards."""
    held = ctx.box.cores
    per_gpu = ctx.rules.cores_per_gpu
    need = compute("cores", shared.loader_cores, gpus=len(ctx.box.cards), cores_per_gpu=per_gpu.line("each"))
    if held is None:
        ask = f"how many (cores): {need.value:.0f} at least, {per_gpu.value:.0f} a card"
        return Answers(questions=(Question("processor cores", ask, ("B18",)),))
    if held >= need.value:
        return Answers()
    return Answers(
        (
            Finding(
                "cores", Severity.WARNING, "processor cores", f"{held:.0f} for {len(ctx.box.cards)} cards",
                f"{per_gpu.value:.0f} a card for data loading: {need.value:.0f}",
                "more cores, or data prepared before",
                keys(per_gpu), ("B18",), numbers=(need,),
            ),
        )
    )  # fmt: skip


def slots(ctx: Context) -> Answers:
    """Positions for cards against how wide the cards are."""
    box = ctx.box
    if box.live or box.baseboard:
        return Answers()
    wide = box.cards[0].slots_wide
    if box.slots is None or wide is None:
        ask = "positions for cards, full height and length, and how many one card covers (slots, slots_wide)"
        return Answers(questions=(Question("slots and size", ask, ("C38", "C23")),))
    need = stated("slots", len(box.cards) * wide, "slots")
    if need.value <= box.slots:
        return Answers()
    return Answers(
        (
            Finding(
                "slots", Severity.ERROR, "slots", f"{box.slots} for {len(box.cards)} cards {wide} slots wide",
                f"{len(box.cards)} x {wide} = {need.value:.0f}", "narrower cards, risers, or fewer cards",
                ("reasoning",), ("C38", "C23"), numbers=(need,),
            ),
        )
    )  # fmt: skip


def job_fits(ctx: Context) -> Answers:
    """The plan's own verdict on this machine's cards."""
    plan = ctx.plan
    if plan is None:
        return Answers()
    verdict = plan.verdict
    severity = {
        Level.FITS: Severity.NOTE,
        Level.MARGINAL: Severity.WARNING,
        Level.DOES_NOT_FIT: Severity.ERROR,
    }
    words = {Level.FITS: "fits", Level.MARGINAL: "is at the edge", Level.DOES_NOT_FIT: "does not fit"}
    evidence = f"{gb(verdict.needed.value)} needed of {gb(verdict.capacity.value)} a card; "
    evidence += f"expected error {verdict.expected_error:.0%}"
    if plan.recipe.in_use_bytes:
        evidence += f"; {gb(plan.recipe.in_use_bytes)} a card are in use by others"
    return Answers(
        (
            Finding(
                "job", severity[verdict.level], plan.name, f"{words[verdict.level]} on {plan.fleet}",
                evidence,
                None if verdict.level is Level.FITS else "gpucalc plan shows what would fit", ("definition",),
                (), numbers=(verdict.needed, verdict.capacity),
            ),
        )
    )  # fmt: skip
