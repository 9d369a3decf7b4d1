"""What every check of a machine is given: the machine, the catalogue's rules, the plan of a job."""

from __future__ import annotations

from dataclasses import dataclass

from gpucalc.catalog import Catalog
from gpucalc.doctor.box import Box
from gpucalc.doctor.finding import Finding, Question
from gpucalc.line import Kind, Line
from gpucalc.plan.answer import Plan
from gpucalc.spec.figure import Figure
from gpucalc.spec.server import CudaTable, HostRules


@dataclass(frozen=True, slots=True)
class Context:
    """A machine under examination."""

    box: Box
    catalog: Catalog
    rules: HostRules
    cuda: CudaTable
    host_power_share: Figure  # of hosts and fans over the cards' limits, where nobody says
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class Answers:
    """What a check found, and what it could not see."""

    findings: tuple[Finding, ...] = ()
    questions: tuple[Question, ...] = ()


def stated(name: str, value: float, unit: str) -> Line:
    """A figure of the machine, as told."""
    return Line(name, value, unit, Kind.EXACT, source="the machine, as described or read")


def keys(*figures: Figure) -> tuple[str, ...]:
    """The sources of figures, once each."""
    return tuple(dict.fromkeys(key for figure in figures for key in figure.source))
