"""The claims of three planning documents, each with our own number beside it and a verdict.

`gpucalc claims` reads the catalogue's claims and works their computations out with the same formulas and
figures plans use; no result is stored.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucalc.builders.build import build_graph
from gpucalc.catalog import Catalog
from gpucalc.counts import count
from gpucalc.errors import InputError, UnknownName, nearest
from gpucalc.formula import FORMULAS
from gpucalc.line import Kind, Line, compute
from gpucalc.spec.claims import (
    DOCUMENTS,
    STATED_UNITS,
    ClaimGroupSpec,
    ClaimSpec,
    ClaimVerdict,
    ComputationSpec,
)
from gpucalc.spec.figure import Figure
from gpucalc.spec.fleet import parse_fleet

# Where the formulas a claim may name are written.
_FAMILIES = ("rules", "rules_machine", "comm", "compute", "memory")
# What a fact of a model may be, beside the fields of its file.
_COUNTS = ("total", "active", "routed_experts", "outside_experts", "input_embedding")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a source says, with the reference its key stands for."""

    key: str
    reference: str
    says: str


@dataclass(frozen=True, slots=True)
class Computed:
    """One number of ours and what it is, in words."""

    what: str
    line: Line


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim with its computations worked out."""

    spec: ClaimSpec
    topic: str  # the file it stands in
    topic_name: str
    computed: tuple[Computed, ...]
    ours: Computed | None  # the one to hold against the stated value
    evidence: tuple[Evidence, ...]

    @property
    def times_stated(self) -> float | None:
        """Our number over the stated one; None where either is missing."""
        stated = self.spec.stated_value
        if self.ours is None or not stated:
            return None
        return float(self.ours.line.value) / stated

    def document(self) -> dict[str, Any]:
        """The same for a JSON document."""
        spec, ours = self.spec, self.ours
        return {
            "id": spec.id,
            "topic": self.topic,
            "document": {"number": spec.document, "title": spec.title, "section": spec.section},
            "kind": spec.kind,
            "quantity": spec.quantity,
            "statement": spec.statement,
            "stated": spec.stated,
            "unit": spec.unit,
            "ours": None if ours is None else ours.line.value / STATED_UNITS[spec.unit or "x"][1],
            "ours_over_stated": self.times_stated,
            "verdict": spec.verdict.value,
            "reason": spec.reason,
            "evidence": [{"key": e.key, "source": e.reference, "says": e.says} for e in self.evidence],
        }


def claims(
    catalog: Catalog,
    *,
    verdict: str | None = None,
    document: str | None = None,
    topic: str | None = None,
) -> tuple[Claim, ...]:
    """Every claim that passes the filters, in the order of the documents. Raises UnknownName."""
    topics = catalog.names("claims")
    wanted = _one_of(verdict, [item.value for item in ClaimVerdict], "--verdict")
    number = None if document is None else _document(document)
    chosen = topics if topic is None else (_one_of(topic, topics, "--topic"),)
    _load_formulas()
    found = [
        _worked_out(catalog, group, index, path)
        for name in chosen
        for group, path in [_group(catalog, str(name))]
        for index, spec in enumerate(group.claims)
        if wanted in (None, spec.verdict.value) and number in (None, spec.document)
    ]
    return tuple(sorted(found, key=lambda claim: (claim.spec.document, claim.spec.id)))


def claim(catalog: Catalog, name: str) -> Claim:
    """The claim of that id, case free. Raises UnknownName with near ids."""
    ids: list[str] = []
    for topic in catalog.names("claims"):
        group, path = _group(catalog, topic)
        for index, spec in enumerate(group.claims):
            if spec.id.casefold() == name.strip().casefold():
                _load_formulas()
                return _worked_out(catalog, group, index, path)
            ids.append(spec.id)
    legal = "`gpucalc claims` lists them"
    raise UnknownName("unknown claim", where="ID", given=name, legal=legal, near=nearest(name, sorted(ids)))


def about(catalog: Catalog, entities: Iterable[str]) -> tuple[Claim, ...]:
    """The claims about these entries of the catalogue, such as `models/deepseek-v4-pro`."""
    wanted = set(entities)
    if not catalog.claimed(wanted):
        return ()
    return tuple(item for item in claims(catalog) if wanted.intersection(item.spec.about))


def warnings(catalog: Catalog, entities: Iterable[str]) -> tuple[str, ...]:
    """What planning documents say of these entries and why it does not hold, one text each."""
    specs = (item.spec for item in about(catalog, entities))
    return tuple(
        f'a planning document says "{spec.statement}" (claim {spec.id}, {spec.verdict.value}): {spec.reason}'
        for spec in specs
    )


def tally(found: Iterable[Claim]) -> dict[str, int]:
    """How many claims have each verdict."""
    counts = {verdict.value: 0 for verdict in ClaimVerdict}
    for item in found:
        counts[item.spec.verdict.value] += 1
    return counts


def _group(catalog: Catalog, topic: str) -> tuple[ClaimGroupSpec, Path]:
    return catalog.load("claims", topic, ClaimGroupSpec), catalog.path_of("claims", topic)


def _one_of(name: str | None, legal: Sequence[str], where: str) -> str | None:
    if name is None or name in legal:
        return name
    raise UnknownName("unknown choice", where=where, given=name, legal=legal, near=nearest(name, legal))


def _document(name: str) -> str:
    """The number of a document given by number or by words of its title."""
    fits = [
        number for number, title in DOCUMENTS.items() if name == number or name.casefold() in title.casefold()
    ]
    if len(fits) != 1:
        raise UnknownName(
            "no one document has this number or title",
            where="--document",
            given=name,
            legal=[f"{number} ({title})" for number, title in DOCUMENTS.items()],
        )
    return fits[0]


def _load_formulas() -> None:
    for family in _FAMILIES:
        importlib.import_module(f"gpucalc.formulas.{family}")


# -- working out ------------------------------------------------------------------------------------


def _worked_out(catalog: Catalog, group: ClaimGroupSpec, index: int, path: Path) -> Claim:
    spec = group.claims[index]
    where, key = str(path), f"claims.{index}"
    known: dict[str, Line] = {}
    computed: list[Computed] = []
    ours: Computed | None = None
    for place, item in enumerate(spec.computed):
        line = _line(catalog, item, known, where, f"{key}.computed.{place}")
        known[item.name] = line
        computed.append(Computed(item.what, line))
        if item.compare:
            ours = computed[-1]
    if ours is not None and spec.unit is not None and STATED_UNITS[spec.unit][0] != ours.line.unit:
        raise InputError(
            f"what is compared is in {ours.line.unit}, what is stated in {spec.unit}", where=where, key=key
        )
    evidence = tuple(
        Evidence(said.source, _reference(catalog, said.source, where, f"{key}.evidence.{place}"), said.says)
        for place, said in enumerate(spec.evidence)
    )
    return Claim(spec, group.id, group.name, tuple(computed), ours, evidence)


def _reference(catalog: Catalog, key: str, where: str, place: str) -> str:
    if key not in catalog.sources:
        raise UnknownName(
            "unknown source",
            where=where,
            key=f"{place}.source",
            given=key,
            near=nearest(key, catalog.sources),
        )
    return catalog.sources[key]


def _line(catalog: Catalog, item: ComputationSpec, known: dict[str, Line], where: str, key: str) -> Line:
    if item.figure is not None:
        return _named(_fact(catalog, item.figure, where, f"{key}.figure"), item.name)
    formula = FORMULAS.get(item.formula or "")
    if formula is None:
        raise UnknownName(
            "unknown formula",
            where=where,
            key=f"{key}.formula",
            given=item.formula,
            near=nearest(item.formula or "", FORMULAS),
        )
    legal = list(inspect.signature(formula.function).parameters)
    if set(item.inputs) != set(legal):
        raise InputError(
            f"{formula.name} takes other inputs",
            where=where,
            key=f"{key}.inputs",
            given=sorted(item.inputs),
            legal=legal,
        )
    inputs = {
        name: _input(catalog, value, known, where, f"{key}.inputs.{name}")
        for name, value in item.inputs.items()
    }
    return compute(item.name, _callable(formula.name), **inputs)


def _callable(name: str) -> Any:
    """The decorated function of a formula: calls through it can be recorded."""
    function = FORMULAS[name].function
    return getattr(importlib.import_module(function.__module__), name)


def _input(catalog: Catalog, value: float | str, known: dict[str, Line], where: str, key: str) -> Any:
    if not isinstance(value, str):
        # Written numbers are read as floats; whole ones count things.
        return int(value) if float(value).is_integer() else value
    if not value.startswith("="):
        return _fact(catalog, value, where, key)
    if value[1:] not in known:
        raise UnknownName(
            "no earlier number of this name", where=where, key=key, given=value, legal=list(known)
        )
    return known[value[1:]]


def _fact(catalog: Catalog, reference: str, where: str, key: str) -> Line:
    """The line of a fact of the catalogue, such as `gpus/a100-sxm-80gb:peaks.tf32`."""
    entity, _, path = reference.partition(":")
    kind, _, name = entity.partition("/")
    if kind == "fleets" and path == "all_reduce":
        fleet = parse_fleet(name)
        cluster = catalog.cluster(fleet)
        rate = cluster.intra.terms("all_reduce", cluster.count).bus_bytes_per_s
        return Line(path, rate, "bytes/s", Kind.MEASURED, source=cluster.intra.name)
    if kind == "models":
        spec = catalog.model(name)
        if path in _COUNTS:
            counts = count(build_graph(spec))
            total, active = int(counts.total.value), int(counts.active.value)
            held = (
                total,
                active,
                counts.routed_experts,
                total - counts.routed_experts,
                counts.input_embedding,
            )
            source = f"counted from the architecture of {spec.label}"
            return Line(path, held[_COUNTS.index(path)], "parameters", source=source)
        value = getattr(spec, path, None)
        if isinstance(value, int):
            return Line(path, value, path, source=spec.config_source)
    elif kind == "gpus":
        item: Any = catalog.gpu(name)[0]
        for part in path.split("."):
            item = item.get(part) if isinstance(item, dict) else getattr(item, part, None)
        if isinstance(item, Figure):
            return item.line(path.rpartition(".")[2])
    raise UnknownName(
        "no such fact",
        where=where,
        key=key,
        given=reference,
        legal="gpus/ID:FIGURE, models/ID:COUNT or FIELD, fleets/NxID:all_reduce",
    )


def _named(line: Line, name: str) -> Line:
    return Line(name, line.value, line.unit, line.kind, source=line.source, note=line.note)
