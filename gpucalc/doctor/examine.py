"""A machine held against every check, with or without a job: one report."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpucalc.catalog import Catalog
from gpucalc.doctor import capacity, links, power, software
from gpucalc.doctor.box import Box
from gpucalc.doctor.context import Answers, Context
from gpucalc.doctor.finding import Finding, Question, Report, report
from gpucalc.plan.answer import Plan
from gpucalc.spec.checks import Severity
from gpucalc.spec.costs import CostDefaults
from gpucalc.spec.server import CudaTable, HostRules
from gpucalc.units import gib

CHECKS: tuple[Callable[[Context], Answers], ...] = (
    capacity.job_fits,
    software.versions,
    software.state,
    software.environment,
    links.slot,
    links.lanes,
    links.peers,
    links.windows,
    power.power,
    power.limits,
    power.connectors,
    power.cooling,
    capacity.host_memory,
    capacity.disk,
    capacity.cores,
    capacity.slots,
)


def examine(box: Box, catalog: Catalog, plan: Plan | None = None) -> Report:
    """What every check says about a machine."""
    context = Context(
        box,
        catalog,
        catalog.load("host", "rules", HostRules),
        catalog.load("host", "cuda", CudaTable),
        catalog.load("costs", "money", CostDefaults).host_power_share,
        plan,
    )
    answers = [check(context) for check in CHECKS]
    findings: list[Finding] = [item for answer in answers for item in answer.findings]
    findings += [_note(text) for text in box.notes]
    questions = [item for answer in answers for item in answer.questions]
    questions += [Question(name, why) for name, why in box.unread]
    return report(box.subject, findings, catalog, questions=questions, facts=facts(box))


def _note(text: str) -> Finding:
    return Finding("inventory", Severity.NOTE, "cards", text, "the driver's own account", None, ("nvml_doc",))


def facts(box: Box) -> Iterable[tuple[str, str]]:
    """What is known of a machine, in words."""
    names = [card.name for card in box.cards]
    yield "cards", ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    for name, value in (
        ("driver", box.driver),
        ("newest CUDA the driver serves", box.driver_cuda),
        ("CUDA", box.cuda),
        ("PyTorch", box.torch),
        ("cards under each processor", " + ".join(map(str, box.placement)) or None),
        ("host memory", None if box.host_ram_bytes is None else gib(box.host_ram_bytes, 0)),
        ("supplies", None if box.supply is None else str(box.supply)),
    ):
        if value is not None:
            yield name, value
