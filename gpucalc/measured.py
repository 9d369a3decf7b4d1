"""Published measurements: reading the rows, and what a row's stack documents where it is silent.

A row says what somebody ran and what they read off. Sources write the same thing in many ways, so a
row is normalised by rules on its fields (`measured_runs`, `measured_deployments`). What it does not
say is filled only from its own arithmetic, from the catalogue model it names, or from a documented
default of the stack it names (`conventions.yaml`, each with its source).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import cache
from pathlib import Path
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.errors import InputError
from gpucalc.spec.figure import Figure, FigureKind
from gpucalc.spec.hardware import Cluster, CollectiveSpec
from gpucalc.spec.yamlio import load_yaml

MAX_FILE_BYTES = 64 * 2**20
# Folders of the catalogue's measurements.
TRAINING, COLLECTIVES, SERVING = "train", "collectives", "inference"
ANY_GPU = "h100-sxm-80gb"  # stands for a GPU that is not named, where only tensors are counted


@dataclass(frozen=True, slots=True)
class Row:
    """One published run as its file states it, and the file."""

    data: Mapping[str, Any]
    where: str

    @property
    def id(self) -> str:
        """The row's own name."""
        return str(self.data.get("id") or self.where)

    @property
    def group(self) -> str:
        """The family of sources it belongs to; rows of one group are not independent."""
        source = self.data.get("source")
        known = self.data.get("group")
        if not known and isinstance(source, Mapping):
            stated = (source.get(key) for key in ("repo_or_paper", "repo", "issue_or_path"))
            known = next((words for words in stated if words), None)
        return str(known or "ungrouped")

    @property
    def gpu(self) -> str:
        """The GPU's name in the row's words, without counts; empty when it names none."""
        return re.sub(r"^(?:\d+x)+", "", str(self.data.get("gpus") or self.data.get("gpu") or ""))

    @property
    def model(self) -> str:
        """The model's name in the row's words."""
        model = self.data.get("model")
        return str(model.get("name") or "unnamed") if isinstance(model, Mapping) else str(model)

    @property
    def run(self) -> Mapping[str, Any]:
        """The `run` group, empty when the row has none."""
        run = self.data.get("run")
        return run if isinstance(run, Mapping) else {}

    @property
    def measured(self) -> Mapping[str, Any]:
        """The `measured` group, empty when the row has none."""
        measured = self.data.get("measured")
        return measured if isinstance(measured, Mapping) else {}

    def get(self, path: str) -> Any:
        """The value at a dotted path, None when any part of it is absent."""
        here: Any = self.data
        for part in _steps(path):
            if not isinstance(here, Mapping):
                return None
            here = here.get(part)
        return here


@dataclass(frozen=True, slots=True)
class Skip:
    """Why a row is left out of a comparison."""

    reason: str


class Lacking(Exception):
    """Something a row would have to say."""


@dataclass(frozen=True, slots=True)
class Convention:
    """A documented default: the rows it speaks of, the values it gives, and where it is documented."""

    when: Mapping[str, Any]
    values: Mapping[str, Any]
    why: str
    source: str
    replaces: bool = False  # the stack's word means something else here

    def applies(self, row: Row) -> bool:
        """Whether every condition holds for the row."""
        return all(_holds(row.get(path), wanted) for path, wanted in self.when.items())


@dataclass(frozen=True, slots=True)
class Conventions:
    """The documented defaults, meters and rates of the stacks measurements come from."""

    defaults: tuple[Convention, ...] = ()
    meters: tuple[Convention, ...] = ()
    rates: tuple[Convention, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Conventions:
        """The conventions in a file. Raises InputError."""
        document = load_yaml(path).data

        def entries(key: str) -> tuple[Convention, ...]:
            found = document.get(key, [])
            if not isinstance(found, list):
                raise InputError("expected a list", where=str(path), key=key)
            out = []
            for index, entry in enumerate(found):
                values = entry.get("set", entry.get("replace"))
                missing = [name for name in ("when", "why", "source") if name not in entry]
                if missing or values is None:
                    lacks = ", ".join(missing or ["set"])
                    raise InputError(f"lacks {lacks}", where=str(path), key=f"{key}.{index}")
                told = (entry["when"], values, entry["why"], entry["source"])
                out.append(Convention(*told, replaces="replace" in entry))
            return tuple(out)

        return cls(entries("defaults"), entries("meters"), entries("rates"))

    def fill(self, row: Row, run: dict[str, Any]) -> list[str]:
        """Give a run what its row leaves out and a stack documents; the sentences that say so."""
        said = []
        for convention in self.defaults:
            if not convention.applies(row):
                continue
            for path, value in convention.values.items():
                *parts, key = path.removeprefix("run.").split(".")
                into = run
                for part in parts:  # a part of what the row says, such as run.lora.dropout
                    into[part] = dict(into.get(part) or {})
                    into = into[part]
                if key not in into or convention.replaces:
                    into[key] = value
                    said.append(f"{path} {_words(value)}: {convention.why} ({convention.source})")
        return said


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_words(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return str(value)


def _holds(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return any(_holds(value, one) for one in wanted)
    if wanted is None or value is None:
        return value is wanted
    if isinstance(wanted, str):
        return bool(_pattern(wanted)(str(value).casefold()))
    return bool(value == wanted)


@cache
def _pattern(wanted: str) -> Callable[[str], object]:
    """What tells whether a folded text is as wanted; most conditions hold no *, and there are many."""
    folded = wanted.casefold()
    return re.compile(translate(folded)).match if set("*?[") & set(folded) else folded.__eq__


@cache
def _steps(path: str) -> tuple[str, ...]:
    return tuple(path.split("."))


def read_rows(paths: Iterable[str | Path]) -> list[Row]:
    """The rows of measurement files, in order. Raises InputError.

    A file is a list of rows; a folder stands for the files in it.
    """
    rows: list[Row] = []
    for path in _files(paths):
        data = load_yaml(path, max_bytes=MAX_FILE_BYTES, mapping=False).data
        if not isinstance(data, list):
            raise InputError("expected a list of measured runs", where=str(path))
        for index, entry in enumerate(data):
            if not isinstance(entry, dict):
                raise InputError("expected a measured run", where=str(path), key=str(index), given=entry)
            rows.append(Row(entry, f"{path}#{index}"))
    return rows


def _files(paths: Iterable[str | Path]) -> list[Path]:
    out: list[Path] = []
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside = sorted(path.glob("*.yaml"))
            if not inside:
                raise InputError("holds no measurement files (*.yaml)", where=str(path))
            out.extend(inside)
        else:
            out.append(path)
    return out


def shipped(catalog: Catalog, folder: str) -> tuple[Path, ...]:
    """The catalogue's measurements in one of its folders, one file for each family of sources."""
    path = in_catalog(catalog, folder)
    return () if path is None else tuple(sorted(path.glob("*.yaml")))


def in_catalog(catalog: Catalog, name: str) -> Path | None:
    """The first file or folder of that name beside the catalogue's measurements, None without one."""
    paths = (Path(root) / "measurements" / name for root in catalog.roots)
    return next((path for path in paths if path.exists()), None)


def gpus_in(fleet: object) -> int:
    """How many GPUs a row's fleet has, `8xh100` or `2x8xh100`. Raises Lacking where it states no count."""
    match = re.match(r"^\s*(?:(\d+)x)?(\d+)x\S", str(fleet))
    if match is None:
        raise Lacking(f"gpus {fleet!r} states no count")
    return int(match[1] or 1) * int(match[2])


def on_stated_network(
    cluster: Cluster, kind: CollectiveSpec, gbit_per_s: float, *, cards: int | None = None
) -> Cluster:
    """The cluster with the network its source names, of that rate an island, in place of the server's."""
    rate = Figure(
        value=gbit_per_s, unit="Gbit/s", kind=FigureKind.DATASHEET, source=("the measured run's own words",)
    )
    inter = kind.on_network(rate, cluster.island, cluster.intra, cards=cards)
    return replace(cluster, inter=inter, nic_bandwidth_per_node=rate.line("nic_bandwidth_per_node"))


def is_number(value: Any) -> bool:
    """A usable measured value: a positive finite number."""
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def whole(value: Any) -> int | None:
    """A count that is one: a whole number from 1; None for anything else."""
    return value if type(value) is int and value >= 1 else None
