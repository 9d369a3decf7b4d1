"""The words for a set of GPUs: `[NODESx]COUNTxGPU`, several joined by `+`.

8xH100-SXM        eight in one machine
2x8xH100          two nodes of eight
4xA100+4xRTX3090  a mixed fleet
a100-sxm4-80gb:8  the count last, as some schedulers write it
H100              one
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpucalc.errors import InputError

GRAMMAR = "[NODESx]COUNTxGPU, joined by +: 8xH100, 2x8xA100-80GB, 4xA100+4xRTX3090"
MAX_GPUS = 2**20  # no machine built has had a million
MAX_TEXT = 1000

_LEADING = re.compile(r"([0-9]+)\s*[x×*]\s*(?=.)", re.IGNORECASE)  # noqa: RUF001  # the sign people paste
_TRAILING = re.compile(r"\s*:\s*([0-9]+)$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._/()-]*")
_NO_NAME = re.compile(r"[0-9]{0,2}\s*[x×*]?", re.IGNORECASE)  # noqa: RUF001
_BAD_COUNT = re.compile(r"[-+.]?[0-9]+(\.[0-9]*)?(e[0-9]+)?\s*[x×*]", re.IGNORECASE)  # noqa: RUF001
_FORGOT_X = re.compile(r"([0-9]{1,3})[ -]+([A-Za-z].*)")
_COUNT_LAST = re.compile(r"(.*\S)\s+[x×*]\s*([0-9]+)", re.IGNORECASE)  # noqa: RUF001


@dataclass(frozen=True, slots=True)
class FleetPart:
    """GPUs of one name. `count` is per node when `nodes` is given, else the total (nodes to be derived)."""

    nodes: int | None
    count: int
    gpu: str

    @property
    def total(self) -> int:
        """GPUs in the part."""
        return self.count * (self.nodes or 1)

    def __str__(self) -> str:
        return f"{f'{self.nodes}x' if self.nodes is not None else ''}{self.count}x{self.gpu}"


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """The parts of a fleet in the order written; `str` gives the words back in one spelling."""

    parts: tuple[FleetPart, ...]

    @property
    def count(self) -> int:
        """GPUs in the fleet."""
        return sum(part.total for part in self.parts)

    @property
    def mixed(self) -> bool:
        """More than one GPU name."""
        return len({part.gpu.casefold() for part in self.parts}) > 1

    def __str__(self) -> str:
        return "+".join(str(part) for part in self.parts)


def parse_fleet(text: str, *, where: str | None = None, key: str | None = None) -> FleetSpec:
    """The fleet a text describes; names are not looked up here. Raises InputError."""
    if not isinstance(text, str):
        raise InputError("is not a GPU list", where=where, key=key, given=text, legal=GRAMMAR)
    if not text.strip():
        raise InputError("no GPUs given", where=where, key=key, legal=GRAMMAR)
    if len(text) > MAX_TEXT:
        raise InputError("the GPU list is too long", where=where, key=key, given=text, legal=GRAMMAR)
    try:
        fleet = FleetSpec(tuple(_part(part.strip()) for part in text.split("+")))
        if fleet.count > MAX_GPUS:
            raise ValueError(f"{fleet.count:,} GPUs are more than the {MAX_GPUS:,} that can be planned for")
    except ValueError as error:
        raise InputError(str(error), where=where, key=key, given=text, legal=GRAMMAR) from None
    return fleet


def _part(text: str) -> FleetPart:
    if not text:
        raise ValueError("a part of the GPU list is empty")
    numbers, rest = [], text
    while match := _LEADING.match(rest):
        numbers.append(match[1])
        rest = rest[match.end() :]
    if match := _TRAILING.search(rest):
        numbers.append(match[1])
        rest = rest[: match.start()]
    if len(numbers) > 2:
        raise ValueError("too many numbers before the GPU name")
    name = rest.strip()
    if problem := _what_is_wrong(name):
        raise ValueError(problem)
    counts = [_count(number) for number in numbers]
    return FleetPart(
        nodes=counts[0] if len(counts) == 2 else None, count=counts[-1] if counts else 1, gpu=name
    )


def _count(digits: str) -> int:
    value = int(digits) if len(digits) < 12 else MAX_GPUS + 1
    if value < 1:
        raise ValueError("a count must be at least 1")
    if value > MAX_GPUS:
        raise ValueError(f"a count must be at most {MAX_GPUS:,}")
    return value


def _what_is_wrong(name: str) -> str | None:
    if not name or _NO_NAME.fullmatch(name):
        return "the GPU name is missing"
    if _BAD_COUNT.match(name):
        return "a count must be a whole number of at least 1"
    if match := _FORGOT_X.fullmatch(name):
        return f"write {match[1]}x{match[2]} for {match[1]} of {match[2]}"
    if match := _COUNT_LAST.fullmatch(name):
        return f"write {match[2]}x{match[1]} for {match[2]} of {match[1]}"
    return None if _NAME.fullmatch(name) else f"{name[:40]!r} is not a GPU name"
