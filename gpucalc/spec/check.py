"""What a check expects of a plan: the `expect:` and `matrix:` groups of a job file.

    expect:
      fits: true                      # true | false | marginal
      headroom: ">=10 %"              # of the card; or bytes: ">=8 GiB"
      step_s: "<=25 s, >=10 s"
      mfu: "38 % +-5 %"               # within five percent of 38 %
      warn:                           # the same keys; a miss warns and does not fail
        headroom: ">=20 %"
    matrix:                           # every combination is planned and held to the same expectations
      gpus: [8xH100-SXM, 16xH100-SXM]
      seq_len: [4096, 8192]
      batch: [64, 128]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from gpucalc.errors import InputError, UnknownName, nearest
from gpucalc.units import GB, GIB, MIB, TIB

MAX_CELLS = 4096  # of one matrix: a slip of the pen should not plan for an hour
WARN = "warn"


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit a limit may be written in: what it measures, its size in the inside unit, how it is shown."""

    measure: str
    scale: float
    shown: str


@dataclass(frozen=True, slots=True)
class Quantity:
    """A key of `expect:`: what it is and the units its limit may have; the first one is the default."""

    key: str
    title: str
    units: Mapping[str, Unit]
    bare: bool = True  # a limit without a unit is in the first one
    whole: bool = False  # a plain number is an equality

    @property
    def example(self) -> str:
        """Legal values."""
        shown = [unit.shown for unit in self.units.values() if unit.shown]
        unit = f" {shown[0]}" if shown else ""
        return f'a comparison such as "<=10{unit}" or "10{unit} +-5 %"'


def _bytes(measure: str) -> dict[str, Unit]:
    sizes = {"GiB": GIB, "GB": GB, "MiB": MIB, "TiB": TIB}
    return {name.lower(): Unit(measure, size, name) for name, size in sizes.items()}


def _seconds(measure: str, first: str) -> dict[str, Unit]:
    sizes = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
    names = [first, *(name for name in sizes if name != first)]
    return {name: Unit(measure, sizes[name], name) for name in names}


def _rate(measure: str, what: str) -> dict[str, Unit]:
    return {f"{what}/s": Unit(measure, 1.0, f"{what}/s")}


def _fraction(measure: str) -> dict[str, Unit]:
    return {"": Unit(measure, 1.0, ""), "%": Unit(measure, 0.01, "%")}


def _count(measure: str, *names: str) -> dict[str, Unit]:
    return {name: Unit(measure, 1.0, names[0]) for name in names}


_MONEY = {
    "usd": Unit("rental", 1.0, "USD"),
    "usd/mtok": Unit("rental_per_million_tokens", 1.0, "USD per 1e6 tokens"),
    "usd per 1e6 tokens": Unit("rental_per_million_tokens", 1.0, "USD per 1e6 tokens"),
    "gpu h": Unit("gpu_hours", 1.0, "GPU h"),
    "kwh": Unit("energy", 1.0, "kWh"),
    "days": Unit("days", 1.0, "days"),
    "kg": Unit("carbon", 1.0, "kg"),
}

QUANTITIES: dict[str, Quantity] = {
    item.key: item
    for item in (
        Quantity("fits", "whether the plan fits", {}),
        Quantity(
            "headroom",
            "what the worst GPU, and its share of it, has left at its peak",
            {**_fraction("headroom"), **_bytes("headroom_bytes")},
        ),
        Quantity("peak_gib", "bytes the worst GPU needs at its peak", _bytes("peak")),
        Quantity("step_s", "seconds of one optimizer step", _seconds("step", "s")),
        Quantity("samples_per_s", "sequences or images a second", _rate("samples_per_s", "samples")),
        Quantity("tokens_per_s", "tokens a second of the whole fleet", _rate("tokens_per_s", "tokens")),
        Quantity("tokens_per_s_per_gpu", "tokens a second and GPU", _rate("tokens_per_s_per_gpu", "tokens")),
        Quantity(
            "tokens_per_s_per_user",
            "output tokens a second of one request",
            _rate("tokens_per_s_per_user", "tokens"),
        ),
        Quantity("mfu", "model FLOPs over the dense peak", _fraction("mfu")),
        Quantity("hfu", "FLOPs done, recomputed ones too, over the dense peak", _fraction("hfu")),
        Quantity("cost", "money, GPU hours, energy or carbon; the unit says which", _MONEY, bare=False),
        Quantity("goodput", "share of wall time that failures and checkpoints leave", _fraction("goodput")),
        Quantity("ttft_ms", "time to the first token", _seconds("ttft", "ms")),
        Quantity("tpot_ms", "time per output token", _seconds("tpot", "ms")),
        Quantity("kv_tokens", "tokens the cache holds", _count("kv_tokens", "tokens", "")),
        Quantity(
            "max_concurrency",
            "requests of the longest length the cache holds at once",
            _count("max_concurrency", "requests", ""),
        ),
        Quantity("gpus", "GPUs of the fleet", _count("gpus", "GPUs", ""), whole=True),
    )
}

FITS = "fits"
_FITS_WORDS: dict[Any, str] = {True: "fits", False: "does_not_fit", "marginal": "marginal"}
_COMPARISON = re.compile(
    r"\s*(?P<op>>=|<=|==|!=|>|<|=|≥|≤)?\s*"
    r"(?P<number>[-+]?(?:\d[\d_]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?)\s*"
    r"(?P<unit>[A-Za-z%/][A-Za-z0-9%/ ]*?)?\s*"
    r"(?:(?:±|\+/?-)\s*(?P<within>\d+(?:\.\d+)?)\s*%)?\s*"
)
_OPERATORS = {"=": "==", "≥": ">=", "≤": "<="}
WITHIN = "within"


@dataclass(frozen=True, slots=True)
class Expectation:
    """One comparison a plan is held to. limit is in `unit`; `within` is a fraction of it."""

    key: str
    op: str  # >= <= > < == != within
    limit: float | str
    unit: Unit
    level: str  # fail | warn
    path: str  # dotted key in the job
    within: float = 0.0

    @property
    def text(self) -> str:
        """The comparison as written."""
        if isinstance(self.limit, str):
            return self.limit
        unit = f" {self.unit.shown}" if self.unit.shown else ""
        if self.op == WITHIN:
            return f"{self.limit:.7g}{unit} ±{100 * self.within:.4g} %"
        return f"{self.op} {self.limit:.7g}{unit}"

    def met(self, value: float) -> bool:
        """Whether a value in the limit's unit meets it."""
        assert not isinstance(self.limit, str)
        match self.op:
            case ">=":
                return value >= self.limit
            case "<=":
                return value <= self.limit
            case ">":
                return value > self.limit
            case "<":
                return value < self.limit
            case "==":
                return value == self.limit
            case "!=":
                return value != self.limit
            case _:
                return abs(value - self.limit) <= self.within * abs(self.limit)


def read_expect(data: Any, *, where: str | None = None, key: str = "expect") -> tuple[Expectation, ...]:
    """The expectations of an `expect:` group, in its order, those of `warn:` last. Raises InputError."""
    if not isinstance(data, Mapping):
        raise InputError(
            "must be a group of keys", where=where, key=key, given=data, legal=[*QUANTITIES, WARN]
        )
    found: list[Expectation] = []
    later: list[Expectation] = []
    for name, value in data.items():
        path = f"{key}.{name}"
        if name == WARN and key.rpartition(".")[2] != WARN:
            later += read_expect(value, where=where, key=path)
            continue
        quantity = QUANTITIES.get(name)
        if quantity is None:
            legal = [*QUANTITIES, WARN]
            near = nearest(str(name), legal)
            raise UnknownName("no such expectation", where=where, key=path, legal=legal, near=near)
        level = WARN if key.rpartition(".")[2] == WARN else "fail"
        found += _read_value(quantity, value, level, where, path)
    return (*found, *later)


def _read_value(
    quantity: Quantity, value: Any, level: str, where: str | None, path: str
) -> Iterator[Expectation]:
    if quantity.key == FITS:
        if not isinstance(value, bool) and value != "marginal":
            raise InputError(
                "is not a verdict", where=where, key=path, given=value, legal="true, false, marginal"
            )
        yield Expectation(FITS, "==", _FITS_WORDS[value], Unit("verdict", 1.0, ""), level, path)
        return
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InputError("is not a comparison", where=where, key=path, given=value, legal=quantity.example)
    if isinstance(value, int | float):
        if not quantity.whole:
            words = "a plain number does not say which side is good"
            raise InputError(words, where=where, key=path, given=value, legal=quantity.example)
        yield Expectation(quantity.key, "==", float(value), next(iter(quantity.units.values())), level, path)
        return
    for part in re.split(r",|\band\b", value):
        yield _comparison(quantity, part, level, where, path)


def _comparison(quantity: Quantity, text: str, level: str, where: str | None, path: str) -> Expectation:
    match = _COMPARISON.fullmatch(text)
    op = "" if match is None else match["op"] or ""
    within = None if match is None else match["within"]
    if match is None or (bool(op) == bool(within) and (op or not quantity.whole)):
        raise InputError("is not a comparison", where=where, key=path, given=text, legal=quantity.example)
    limit = float(match["number"].replace("_", ""))
    unit = _unit(quantity, match["unit"], limit, where, path, text)
    if within:
        return Expectation(quantity.key, WITHIN, limit, unit, level, path, float(within) / 100)
    return Expectation(quantity.key, _OPERATORS.get(op, op) or "==", limit, unit, level, path)


def _unit(
    quantity: Quantity, written: str | None, limit: float, where: str | None, path: str, text: str
) -> Unit:
    if written is None and quantity.bare:
        unit = next(iter(quantity.units.values()))
        if "%" in quantity.units and abs(limit) > 1:
            problem = "is more than the whole"
            raise InputError(problem, where=where, key=path, given=text.strip(), legal="such as 10 %")
        return unit
    folded = " ".join((written or "").lower().split())
    unit_found = quantity.units.get(folded)
    if unit_found is None:
        legal = list(dict.fromkeys(item.shown for item in quantity.units.values() if item.shown))
        problem = "has no unit" if written is None else "has a unit of something else"
        raise InputError(problem, where=where, key=path, given=text.strip(), legal=legal)
    return unit_found


# -- matrix ---------------------------------------------------------------------------------------

# Short keys and where they go, by task.
_AXES = {
    "gpus": {"train": "gpus", "serve": "gpus"},
    "seq_len": {"train": "run.seq_len", "serve": "run.max_model_len"},
    "batch": {"train": "run.global_batch", "serve": "run.concurrency"},
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of a matrix: its label and the keys it sets."""

    label: str
    changes: Mapping[str, Any]


def read_matrix(data: Any, task: str, *, where: str | None = None, key: str = "matrix") -> tuple[Cell, ...]:
    """Every combination of a `matrix:` group; one empty cell when there is none. Raises InputError."""
    if data is None:
        return (Cell("", {}),)
    legal = [*_AXES, "run.KEY", "model"]
    if not isinstance(data, Mapping) or not data:
        raise InputError("must be a group of lists", where=where, key=key, given=data, legal=legal)
    axes: list[tuple[str, str, list[Any]]] = []
    cells = 1
    for name, values in data.items():
        path = f"{key}.{name}"
        if name not in _AXES and name != "model" and not str(name).startswith("run."):
            near = nearest(str(name), _AXES)
            raise UnknownName("cannot be varied", where=where, key=path, legal=legal, near=near)
        if not isinstance(values, list) or not values:
            raise InputError("must be a list of values", where=where, key=path, given=values)
        if len({repr(value) for value in values}) < len(values):
            raise InputError("holds a value twice", where=where, key=path, given=values)
        target = _AXES[name].get(task, "gpus") if name in _AXES else str(name)
        axes.append((str(name), target, values))
        cells *= len(values)
    if cells > MAX_CELLS:
        raise InputError(
            "has too many combinations", where=where, key=key, given=cells, legal=f"at most {MAX_CELLS:,}"
        )
    return tuple(
        Cell(
            ", ".join(f"{name}={value}" for (name, _, _), value in zip(axes, values, strict=True)),
            {target: value for (_, target, _), value in zip(axes, values, strict=True)},
        )
        for values in product(*(values for _, _, values in axes))
    )
