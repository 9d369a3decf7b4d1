"""Plans, explanations and catalogue entries as plain documents for programs.

Keys are part of the contract: they change only with `SCHEMA_VERSION`. A number stands beside
its unit, in the key's ending or in a `unit` key of the same object.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from gpucalc.documents import Estimate, headline
from gpucalc.explain import Explanation, assumed_facts
from gpucalc.line import Line
from gpucalc.plan.answer import HostFit, Plan
from gpucalc.plan.memory import meters
from gpucalc.spec.base import Spec
from gpucalc.spec.figure import Figure

SCHEMA_VERSION = 1

Document = dict[str, Any]


def text(body: Mapping[str, Any], *, indent: int | None = None) -> str:
    """One document, `schema_version` first. NaN and infinity are refused: they are not JSON.

    Without an indent it is one line, written by the C encoder in a sixth of the time.
    """
    document = {"schema_version": SCHEMA_VERSION, **body}
    return json.dumps(document, indent=indent, allow_nan=False)


def plan(answer: Plan, provenance: Mapping[str, Any], rules: Sequence[Estimate] = ()) -> Document:
    """The whole plan: the verdict first, then the tree of lines it was taken on.

    `rules` are the planning documents' estimates; without any, their memory rule alone is told.
    """
    verdict = answer.verdict
    return {
        "name": answer.name,
        "verdict": {
            "level": verdict.level.value,
            "needed_bytes": plain(verdict.needed.value),
            "capacity_bytes": plain(verdict.capacity.value),
            "margin_bytes": plain(verdict.margin_bytes),
            "expected_error_fraction": verdict.expected_error,
            "expected_error_basis": verdict.error_basis,
            "binds": verdict.binds,
            "phase": verdict.phase,
            "stage": verdict.stage,
            "host": _host(verdict.host),
        },
        "meters": _meters(answer.memory),
        "binds": answer.binds,
        "fleet": answer.fleet,
        "gpus": answer.gpus,
        "layout": record(answer.layout),
        "recipe": record(answer.recipe),
        "lines": [line(child) for child in answer.root.children],
        "assumptions": [record(item) for item in answer.assumptions],
        "assumed_figures": [_leaf(item) for item in assumed_facts(answer.root)],
        "speed_error": None
        if answer.speed_error is None
        else {"expected_error_fraction": answer.speed_error[0], "basis": answer.speed_error[1]},
        "actions": [plain(item.document()) for item in answer.actions],
        "splits": [record(item) for item in answer.splits],
        "loads": [plain(item.document()) for item in answer.loads],
        "launch": answer.launch,
        "documents": [_estimate(item) for item in rules or (headline(answer),)],
        "notes": list(answer.notes),
        "provenance": dict(provenance),
    }


def _meters(memory: Line) -> Document | None:
    """What torch's counters and nvidia-smi would show of a training run."""
    read = meters(memory)
    return None if read is None else {f"{name}_bytes": plain(value) for name, value in read.items()}


def _host(host: HostFit | None) -> Document | None:
    if host is None:
        return None
    return {
        "level": host.level.value,
        "needed_bytes": plain(host.needed.value),
        "capacity_bytes": None if host.capacity is None else plain(host.capacity.value),
        "phase": host.phase,
    }


def _estimate(item: Estimate) -> Document:
    return {
        "claim": item.claim,
        "rule": item.rule,
        "by_rule": line(item.line),
        "ours": None if item.ours is None else _leaf(item.ours),
        "by_rule_over_ours": item.times_ours,
        "why": item.why,
    }


def line(item: Line) -> Document:
    """A line and everything below it; an input that is itself a line is named, not repeated."""
    document = _leaf(item)
    if item.formula:
        document["formula"] = item.formula
    if item.inputs:
        document["inputs"] = {
            name: _leaf(value) if isinstance(value, Line) else plain(value)
            for name, value in item.inputs.items()
        }
    if item.children:
        document["children"] = [line(child) for child in item.children]
    return document


def explanation(item: Explanation) -> Document:
    """An explanation with its inputs, down to the facts."""
    document = _leaf(item.line)
    if item.path:
        document["path"] = item.path
    for key in ("formula", "summary", "expression", "substituted", "source"):
        if (value := getattr(item, key)) is not None:
            document[key] = value
    if item.inputs:
        document["inputs"] = {
            given.name: explanation(given.explanation) if given.explanation else plain(given.value)
            for given in item.inputs
        }
    if item.parts:
        document["parts"] = [explanation(part) for part in item.parts]
    return document


def entries(kind: str, specs: Sequence[Spec]) -> Document:
    """Catalogue entries of a kind, and the references their source keys stand for."""
    sources = {key: text for spec in specs for _, figure in figures(spec) for key, text in _cited(figure)}
    return {kind: [_written(spec) for spec in specs], "sources": dict(sorted(sources.items()))}


def entry(spec: Spec, **more: Any) -> Document:
    """One catalogue entry, with the references its source keys stand for."""
    sources = {key: text for _, figure in figures(spec) for key, text in _cited(figure)}
    return {**_written(spec), "sources": sources, **more}


def comparison(first: Spec, second: Spec) -> Document:
    """Two entries' figures; `ratio` is the second over the first, in equal units."""
    left, right = dict(figures(first)), dict(figures(second))
    rows: list[Document] = []
    for key in dict.fromkeys([*left, *right]):
        a, b = left.get(key), right.get(key)
        rows.append(
            {
                "figure": key,
                "a": None if a is None else _written(a),
                "b": None if b is None else _written(b),
                "ratio": b.si / a.si if a is not None and b is not None and a.si else None,
            }
        )
    names = [getattr(spec, "id", None) for spec in (first, second)]
    return {"a": names[0], "b": names[1], "figures": rows}


def figures(spec: Spec) -> Iterator[tuple[str, Figure]]:
    """Every figure of an entry with its dotted key."""
    for name in type(spec).model_fields:
        yield from figures_in(getattr(spec, name), name)


def figures_in(item: object, path: str) -> Iterator[tuple[str, Figure]]:
    """Every figure in a field of an entry."""
    if isinstance(item, Figure):
        yield path, item
    elif isinstance(item, Spec):
        for key, figure in figures(item):
            yield f"{path}.{key}", figure
    elif isinstance(item, Mapping):
        for key, inner in item.items():
            yield from figures_in(inner, f"{path}.{key}")


def facts(spec: Spec) -> Document:
    """The fields of an entry that are set and hold no figure."""
    told_apart = {"name", "notes", "disagreements"}
    found: Document = {}
    for name in type(spec).model_fields:
        item = getattr(spec, name)
        if name in told_apart or item is None or item == ():
            continue
        if next(figures_in(item, name), None) is None:
            found[name] = item.model_dump(mode="json", exclude_none=True) if isinstance(item, Spec) else item
    return found


def _written(spec: Spec) -> Document:
    """A spec as its file has it, without what the catalogue filled in."""
    return _without_references(spec.model_dump(mode="json", exclude_none=True))  # type: ignore[no-any-return]


def _without_references(item: Any) -> Any:
    if isinstance(item, dict):
        return {key: _without_references(part) for key, part in item.items() if key != "references"}
    if isinstance(item, list):
        return [_without_references(part) for part in item]
    return item


def _cited(figure: Figure) -> Iterator[tuple[str, str]]:
    """Source keys with their references; the catalogue writes each as `key: reference`."""
    for key, text in zip(figure.source, figure.references, strict=False):
        yield key, text.removeprefix(f"{key}: ")


def record(item: object) -> Document:
    """A dataclass as a mapping of its fields, in their order; what its repr leaves out is no answer."""
    shown = (field for field in fields(item) if field.repr)  # type: ignore[arg-type]
    return {field.name: plain(getattr(item, field.name)) for field in shown}


def plain(value: Any) -> Any:
    """A value as JSON knows it. Whole floats of exact counts become whole numbers."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Line):
        return _leaf(value)
    if is_dataclass(value):
        return record(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return str(value)


def _leaf(item: Line) -> Document:
    document: Document = {
        "name": item.name,
        "value": plain(item.value),
        "unit": item.unit,
        "kind": item.kind.value,
    }
    if item.source:
        document["source"] = item.source
    if item.note:
        document["note"] = item.note
    return document
