"""What doctor says: findings with evidence, and questions nobody but the vendor can answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.errors import UnknownName, nearest
from gpucalc.line import Line
from gpucalc.spec.checks import Severity

_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong or worth knowing."""

    check: str  # short name of the rule
    severity: Severity
    about: str  # the setting, command or part
    problem: str
    evidence: str  # what was read or computed
    right: str | None = None  # what to write or do
    sources: tuple[str, ...] = ()  # keys of the catalogue's sources
    claims: tuple[str, ...] = ()  # the planning documents' items it answers
    line: int | None = None  # of the text, from 1
    numbers: tuple[Line, ...] = field(default=())  # what was computed


@dataclass(frozen=True, slots=True)
class Question:
    """What cannot be seen from here, and whom or what to ask."""

    about: str
    ask: str
    claims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Everything found about one script or machine."""

    subject: str
    findings: tuple[Finding, ...]
    questions: tuple[Question, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()  # what was looked at, in words
    references: dict[str, str] = field(default_factory=dict)  # the sources of the findings, in full

    @property
    def severe(self) -> bool:
        """Whether anything found is an error."""
        return any(item.severity is Severity.ERROR for item in self.findings)

    def counts(self) -> dict[str, int]:
        """How many findings of each severity."""
        return {kind.value: sum(f.severity is kind for f in self.findings) for kind in Severity}

    def document(self) -> dict[str, Any]:
        """The same for a JSON document."""
        return {
            "subject": self.subject,
            "facts": dict(self.facts),
            "findings": [
                {
                    "check": item.check,
                    "severity": item.severity.value,
                    "line": item.line,
                    "about": item.about,
                    "problem": item.problem,
                    "evidence": item.evidence,
                    "right": item.right,
                    "sources": list(item.sources),
                    "claims": list(item.claims),
                    "numbers": {f"{number.name} {number.unit}": number.value for number in item.numbers},
                }
                for item in self.findings
            ],
            "ask_the_vendor": [
                {"about": item.about, "ask": item.ask, "claims": list(item.claims)} for item in self.questions
            ],
            "counts": self.counts(),
            "references": self.references,
        }


def report(
    subject: str,
    findings: Iterable[Finding],
    catalog: Catalog,
    *,
    questions: Iterable[Question] = (),
    facts: Iterable[tuple[str, str]] = (),
) -> Report:
    """The findings in order: of a text by line, else the worst first. Raises UnknownName for a source."""
    held = list(findings)
    held.sort(key=lambda item: (item.line or 0, _ORDER[item.severity]))
    if not any(item.line for item in held):
        held.sort(key=lambda item: _ORDER[item.severity])
    references: dict[str, str] = {}
    for key in (key for item in held for key in item.sources):
        if key not in catalog.sources:
            near = nearest(key, catalog.sources)
            raise UnknownName("unknown source", where="catalogue checks", given=key, near=near)
        references[key] = catalog.sources[key]
    return Report(subject, tuple(held), tuple(questions), tuple(facts), references)


def once(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """The first finding of each wording, with how many cards it is true of."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for item in found:
        alike.setdefault((item.check, item.problem), []).append(item)
    return tuple(
        items[0]
        if len(items) == 1
        else replace(items[0], about=f"{items[0].about} and {len(items) - 1} more")
        for items in alike.values()
    )
