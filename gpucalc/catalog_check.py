"""Whether catalogue files can be used: form, units, sources, names, what they refer to, and plausibility.

    gpucalc catalog check                     every folder that is searched
    gpucalc catalog check mine/               a folder laid out as the catalogue is
    gpucalc catalog check mine/gpus/x1.yaml   one file; its folder says what it holds

A file that stands in no such folder is known by its keys. Every problem is reported, with its line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gpucalc.catalog import Catalog
from gpucalc.catalog_files import SOURCES, File, files_of, most_bytes
from gpucalc.catalog_sanity import dimensions, plausible
from gpucalc.errors import GpucalcError, InputError, UnknownName, UnsupportedModel, nearest, one_line
from gpucalc.spec.base import Spec, as_input_error
from gpucalc.spec.checks import CommandsSpec, LaunchersSpec, MonitorsSpec, SettingsSpec, Severity
from gpucalc.spec.claims import ClaimGroupSpec
from gpucalc.spec.costs import CostDefaults, GridSpec, PublishedRun, ReliabilityDefaults
from gpucalc.spec.engine import EngineSpec
from gpucalc.spec.figure import Figure
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.hardware import CollectiveSpec, KernelSpec
from gpucalc.spec.model import ModelSpec
from gpucalc.spec.server import CudaTable, HostRules
from gpucalc.spec.system import PriceListSpec, SystemSpec
from gpucalc.spec.yamlio import load_yaml, nearest_line

SHORTEST_REFERENCE = 16  # characters: less names no place where a figure can be looked up
NAMED = ("gpus", "systems", "models")  # kinds that users call by aliases

_SPECS: dict[str, type[Spec]] = {
    "gpus": GpuSpec,
    "systems": SystemSpec,
    "models": ModelSpec,
    "kernels": KernelSpec,
    "collectives": CollectiveSpec,
    "prices": PriceListSpec,
    "grids": GridSpec,
    "reliability": PublishedRun,
    "engines": EngineSpec,
    "claims": ClaimGroupSpec,
}
# Files that one part of the program reads by their own name.
_BY_NAME: dict[str, dict[str, type[Spec]]] = {
    "host": {"rules": HostRules, "cuda": CudaTable},
    "costs": {"money": CostDefaults, "failures": ReliabilityDefaults},
    "checks": {
        "nccl": SettingsSpec,
        "torch": SettingsSpec,
        "commands": CommandsSpec,
        "launchers": LaunchersSpec,
        "monitor": MonitorsSpec,
    },
}
# What a measured run has; of a collective, what was read off stands in the row itself.
_ROW = (
    (("id",), "a name of its own"),
    (("measured", "points", "peak_busbw_gb_s", "latency_us"), "what was read off"),
    (("source",), "where it was published"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about one key of a file."""

    file: str
    line: int
    key: str  # dotted; empty: the file itself
    severity: Severity
    message: str

    @property
    def text(self) -> str:
        """As compilers write it, so that editors find the place."""
        place = f"{self.key}: " if self.key else ""
        return one_line(f"{self.file}:{self.line}: {self.severity.value}: {place}{self.message}")

    def document(self) -> dict[str, Any]:
        """The same for a JSON document."""
        return {
            "file": self.file,
            "line": self.line,
            "key": self.key,
            "severity": self.severity.value,
            "message": self.message,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """Every file that was looked at, and every finding in the order of the files."""

    files: tuple[str, ...]
    findings: tuple[Finding, ...]

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """The findings of a severity."""
        return tuple(finding for finding in self.findings if finding.severity is severity)

    @property
    def summary(self) -> str:
        """The counts in words."""
        counts = ((item.value, len(self.of(item))) for item in Severity)
        found = [f"{number} {word}{'s' if number > 1 else ''}" for word, number in counts if number]
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return f"{files}: {', '.join(found) or 'nothing wrong'}"

    def passes(self, *, strict: bool = False) -> bool:
        """Whether there is no error, and with `strict` no warning either."""
        return not self.of(Severity.ERROR) and not (strict and self.of(Severity.WARNING))

    def document(self) -> dict[str, Any]:
        """The same for a JSON document."""
        return {
            "files": len(self.files),
            "counts": {f"{item.value}s": len(self.of(item)) for item in Severity},
            "findings": [finding.document() for finding in self.findings],
        }


def check_files(
    paths: Sequence[str | Path],
    known: Sequence[Path],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """What is wrong with these files and folders, or with the folders `known` themselves.

    `known` are the folders searched for what the files refer to; a checked folder goes before them.
    Raises InputError for a path that is no catalogue file or folder.
    """
    files = tuple(found for path in paths or known for found in files_of(Path(path)))
    ahead = [file.root for file in files if file.root is not None]
    catalog = Catalog(dict.fromkeys(root.resolve() for root in (*ahead, *known)))
    findings: list[Finding] = []
    for done, file in enumerate(files, 1):
        findings += sorted(_file(file, catalog), key=lambda finding: finding.line)
        if progress is not None:
            progress(done, len(files))
    return Report(tuple(str(file.path) for file in files), tuple(findings))


# -- one file -------------------------------------------------------------------------------------


class _Reader:
    """A file being checked: its data, and findings at the lines of its keys."""

    def __init__(self, file: File, catalog: Catalog) -> None:
        self.file, self.catalog = file, catalog
        self.document = load_yaml(
            file.path, mapping=file.kind != "measurements", max_bytes=most_bytes(file.kind)
        )
        self.data: Any = self.document.data
        self._lines: Mapping[str, int] | None = None

    def finding(self, severity: Severity, key: str, message: str) -> Finding:
        if self._lines is None:
            self._lines = self.document.lines()
        return Finding(str(self.file.path), nearest_line(self._lines, key), key, severity, message)

    def error(self, key: str, message: str) -> Finding:
        return self.finding(Severity.ERROR, key, message)

    def refused(self, error: GpucalcError, key: str = "") -> Iterator[Finding]:
        """The findings of an error raised below, each problem of its own."""
        if not isinstance(error, InputError):
            yield self.error(key, str(error))
            return
        own = str(self.file.path)
        for one in (error, *error.also):
            if one.where is None or one.where.startswith(own):
                bare = InputError(one.problem, given=one.given, legal=one.legal, near=one.near)
                yield self.error(one.key or key, str(bare))
            else:  # in a file that this one needs
                yield self.error(key, str(one))


def _file(file: File, catalog: Catalog) -> Iterator[Finding]:
    if file.path.suffix != ".yaml":
        yield Finding(str(file.path), 1, "", Severity.ERROR, "is never read: catalogue files end in .yaml")
        return
    try:
        reader = _Reader(file, catalog)
    except InputError as error:
        place = (error.where or "").removeprefix(str(file.path)).lstrip(":")
        line = int(place) if place.isdigit() else 1
        yield Finding(str(file.path), line, error.key or "", Severity.ERROR, error.problem)
        return
    if file.kind == SOURCES:
        yield from _sources(reader)
        return
    if file.kind == "measurements":
        yield from _measurements(reader)
        return
    if file.kind == "jobs":
        yield from _job(reader)
        return
    bad = tuple(_provenance(reader))
    yield from bad
    yield from (
        reader.finding(Severity.ERROR, key, message)
        for key, message in dimensions(file.kind, _figures(reader.data))
    )
    if file.kind == "interconnects":
        yield from _interconnect(reader)
        return
    by_name = _BY_NAME.get(file.kind, {})
    wanted = _SPECS.get(file.kind) or by_name.get(file.stem)
    if wanted is None and not by_name:
        return  # a kind that its reader alone knows: figures and sources hold
    if wanted is None:
        yield reader.error("", f"is never read: {file.kind} are {', '.join(by_name)}")
        return
    try:
        spec: Any = wanted.model_validate(dict(reader.data))
    except ValidationError as error:
        yield from reader.refused(as_input_error(error, wanted, reader.data))
        return
    yield from _own_name(reader, spec)
    if not bad:
        yield from _entity(reader, spec)


def _provenance(reader: _Reader) -> Iterator[Finding]:
    """Sources of figures and of everything else that cites: known keys, and at least one."""
    known = reader.catalog.sources
    unknown: dict[str, list[str]] = {}
    for key, part in _groups(reader.data):
        is_figure = "unit" in part and "value" in part
        if is_figure and "references" in part:
            yield reader.error(f"{key}.references", "no such key; references are found by the source keys")
        if "source" not in part or (not is_figure and not isinstance(part["source"], list)):
            continue
        stated = part["source"]
        if not isinstance(stated, list) or not stated:
            yield reader.error(f"{key}.source", "needs a list of keys of sources.yaml")
            continue
        for index, name in enumerate(stated):
            if not isinstance(name, str) or name not in known:
                unknown.setdefault(str(name), []).append(f"{key}.source.{index}")
    for name, keys in unknown.items():
        more = f" (and {len(keys) - 1} times more)" if len(keys) > 1 else ""
        legal = "a key of sources.yaml, ours or one beside your folders"
        error = UnknownName(f"unknown source{more}", given=name, legal=legal, near=nearest(name, known))
        yield reader.error(keys[0], str(error))


def _groups(data: Any, key: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every group of keys in data, with its dotted path."""
    if isinstance(data, Mapping):
        yield key, data
        for name, part in data.items():
            yield from _groups(part, f"{key}.{name}" if key else str(name))
    elif isinstance(data, list):
        for index, part in enumerate(data):
            yield from _groups(part, f"{key}.{index}" if key else str(index))


def _figures(data: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((key, part) for key, part in _groups(data) if "unit" in part and "value" in part)


def _own_name(reader: _Reader, spec: Any) -> Iterator[Finding]:
    stem, kind = reader.file.stem, reader.file.kind
    if getattr(spec, "id", stem) != stem:
        yield reader.error("id", f"the file is found as {stem}: both must be the same, got {spec.id}")
    if stem != stem.casefold():
        yield reader.error("", f"the file's name must be lower case: {stem.casefold()}.yaml")
    elif kind in NAMED and reader.file.root is not None:
        for name, other in reader.catalog.clashes(kind, stem).items():
            yield reader.error("aliases", f"{name} is a name of {other} already")


# -- what a file is about -------------------------------------------------------------------------


def _entity(reader: _Reader, spec: Any) -> Iterator[Finding]:
    for key, look_up in _references(reader.catalog, spec):
        try:
            wrong = look_up()
        except GpucalcError as error:
            yield from reader.refused(error, key)
        else:
            if isinstance(wrong, str):
                yield reader.error(key, wrong)
    if isinstance(spec, ModelSpec):
        yield from _model(reader, spec)
    if isinstance(spec, ClaimGroupSpec) and reader.file.root is not None:
        yield from _claims(reader, spec)
    for key, message in plausible(spec, reader.catalog):
        yield reader.finding(Severity.WARNING, key, message)


def _references(catalog: Catalog, spec: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    """Keys that name another file, and how to look it up; text that comes back is what is wrong."""
    match spec:
        case GpuSpec():
            yield "kernels", lambda: catalog.kernels_for(spec)
            if spec.collectives is not None:
                yield "collectives", lambda: _level(catalog, spec.collectives or "", "intra")
            for index, name in enumerate(spec.default_systems):
                yield f"default_systems.{index}", partial(_holds, catalog, name, spec.id)
        case SystemSpec():
            yield "gpu", lambda: catalog.gpu(spec.gpu)
            yield "intra_collectives", lambda: _level(catalog, spec.intra_collectives, "intra")
            if spec.inter_collectives is not None:
                yield "inter_collectives", lambda: _level(catalog, spec.inter_collectives or "", "inter")
            yield "gpus_per_node", lambda: _divides(spec)
        case PriceListSpec():
            yield "id", lambda: catalog.gpu(spec.id)
            for index, offer in enumerate(spec.offers):
                if offer.system is not None:
                    yield f"offers.{index}.system", partial(_holds, catalog, offer.system, spec.id)
        case KernelSpec():
            for index, name in enumerate(spec.applies_to):
                yield f"applies_to.{index}", partial(catalog.gpu, name)


def _level(catalog: Catalog, name: str, level: str) -> str | None:
    found = catalog.collective(name)
    return None if found.level == level else f"{found.id} joins {found.level}, {level} is needed"


def _holds(catalog: Catalog, system: str, gpu: str) -> str | None:
    found = catalog.system(system)
    return None if found.gpu == gpu else f"{found.id} holds {found.gpu}"


def _divides(system: SystemSpec) -> str | None:
    each = system.gpus_per_node
    wrong = each < 1 or system.gpus % each
    return f"{system.gpus} GPUs do not divide into nodes of {each}" if wrong else None


def _model(reader: _Reader, spec: ModelSpec) -> Iterator[Finding]:
    from gpucalc.builders.build import build_graph
    from gpucalc.counts import count

    try:
        counts = count(build_graph(spec))
    except UnsupportedModel as error:
        yield reader.finding(Severity.NOTE, "", f"listed and not planned: {error}")
        return
    except InputError as error:
        yield from reader.refused(error)
        return
    for key, ours in (("params_total", counts.total), ("params_active", counts.active)):
        stated = getattr(spec, key)
        if stated is None or (key == "params_active" and spec.kind in ("cnn", "detector")):
            continue
        counted = int(ours.value)
        if counted != stated:
            off = f"{counted:,} are counted from the shapes, {100 * (counted / stated - 1):+.2f} %"
            severity = Severity.ERROR if abs(counted / stated - 1) > 0.01 else Severity.WARNING
            yield reader.finding(severity, key, f"{off}: a shape or a trait is wrong, or the total is")


def _claims(reader: _Reader, spec: ClaimGroupSpec) -> Iterator[Finding]:
    from gpucalc.claims import claim

    for index, item in enumerate(spec.claims):
        try:
            claim(reader.catalog, item.id)
        except GpucalcError as error:
            yield from reader.refused(error, f"claims.{index}")


def _interconnect(reader: _Reader) -> Iterator[Finding]:
    """A link is a name and figures; the program reads none by key, so any figure may stand there."""
    for key, part in reader.data.items():
        if key in ("id", "name", "notes", "aliases"):
            continue
        try:
            Figure.read(part, key=key)
        except InputError as error:
            yield from reader.refused(error, key)
    if reader.data.get("id") != reader.file.stem:
        yield reader.error("id", f"the file is found as {reader.file.stem}: both must be the same")


def _job(reader: _Reader) -> Iterator[Finding]:
    from gpucalc.jobs import resolve
    from gpucalc.planner import plan_job

    try:
        plan_job(resolve(str(reader.file.path), reader.catalog), reader.catalog, advice=False)
    except GpucalcError as error:
        yield from reader.refused(error)


def _measurements(reader: _Reader) -> Iterator[Finding]:
    """A row names itself, its source and what was measured; whether it compares, `validate` tells."""
    if reader.file.path.parent.name == "measurements":
        return  # the recorded errors and the conventions, which their readers check
    if not isinstance(reader.data, list):
        yield reader.error("", "expected a list of measured runs")
        return
    seen: set[str] = set()
    for index, row in enumerate(reader.data):
        key = str(index)
        if not isinstance(row, Mapping):
            yield reader.error(key, "expected a measured run")
            continue
        for needed, meaning in _ROW:
            if not any(row.get(name) for name in needed):
                yield reader.error(key, f"{' or '.join(needed)} is missing: {meaning}")
        name = str(row.get("id"))
        if name in seen:
            yield reader.error(f"{key}.id", f"{name} is the name of an earlier row")
        seen.add(name)


def _sources(reader: _Reader) -> Iterator[Finding]:
    for key, words in reader.data.items():
        if not isinstance(words, str) or len(words.strip()) < SHORTEST_REFERENCE:
            yield reader.error(str(key), "needs words that say where the figures can be looked up")
