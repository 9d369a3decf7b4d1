"""A claim of a planning document: what it says, what can be computed of it, and how it was judged.

A claim's file holds inputs and names of formulas, never results: those are worked out when somebody
asks, so that they follow the catalogue and the formulas.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from gpucalc.spec.base import Spec, refuse

# The documents by the number they carry, with their titles.
DOCUMENTS = {
    "000": "multi-GPU architectures",
    "003": "single-machine multi-card deployment",
    "004": "task selection and deployment",
}

# Units a document may state a value in: the unit used inside, and the factor to it.
STATED_UNITS: dict[str, tuple[str, float]] = {
    "GB": ("bytes", 1e9),
    "TB": ("bytes", 1e12),
    "MB": ("bytes", 1e6),
    "GB/s": ("bytes/s", 1e9),
    "TFLOP/s": ("FLOP/s", 1e12),
    "W": ("W", 1),
    "us": ("s", 1e-6),
    "h": ("s", 3600),
    "x": ("ratio", 1),
    "%": ("fraction", 0.01),
    "1e9 parameters": ("parameters", 1e9),
    **{
        word: (word, 1)
        for word in ("GPUs", "cards", "lanes", "cores", "rows", "layers", "samples", "steps", "epochs", "C")
    },
}


class ClaimVerdict(StrEnum):
    """How a claim stands against arithmetic and published evidence."""

    SOUND = "sound"  # both agree
    APPROXIMATE = "approximate"  # right in kind, or under conditions the reason names
    CONTRADICTORY = "contradictory"  # against itself, another of the documents, or its own numbers
    WRONG = "wrong"  # against a definition, a datasheet, a measurement or a run
    UNVERIFIABLE = "unverifiable"  # no source, and nothing to compute it from


def _known_unit(unit: str) -> str:
    if unit not in STATED_UNITS:
        raise refuse(f"unknown unit {unit}", legal=", ".join(STATED_UNITS))
    return unit


class EvidenceSpec(Spec):
    """What a published source says on the matter; `source` is a key of the catalogue's sources."""

    source: str
    says: str


class ComputationSpec(Spec):
    """One number of ours: a formula and what goes in, or a fact of the catalogue.

    An input is a number, `=name` for an earlier computation of the same claim, or a fact: `models/ID:total`,
    `gpus/ID:peaks.tf32`, `fleets/8xID:all_reduce` (the rate of an all-reduce, as plans take it).
    """

    name: str
    what: str
    formula: str | None = None
    inputs: dict[str, float | str] = Field(default_factory=dict)
    figure: str | None = None
    compare: bool = False  # the number to hold the stated one against

    @model_validator(mode="after")
    def _one_way(self) -> ComputationSpec:
        if (self.formula is None) == (self.figure is None):
            raise refuse(f"{self.name} needs a formula or a figure, and not both")
        return self


class ClaimSpec(Spec):
    """One claim, where it stands, its verdict and the reason for it."""

    id: str
    document: Literal["000", "003", "004"]
    section: str
    kind: Literal["rule", "figure", "technique", "config", "check", "formula"]
    quantity: str
    statement: str  # as the document has it, in English
    stated: float | str | None = None
    unit: Annotated[str, AfterValidator(_known_unit)] | None = None
    # Catalogue entries whose plans mention it, as it does not hold of them; in brackets on one line.
    about: tuple[str, ...] = ()
    verdict: ClaimVerdict
    reason: str
    evidence: Annotated[tuple[EvidenceSpec, ...], Field(min_length=1)]
    computed: tuple[ComputationSpec, ...] = ()

    @property
    def title(self) -> str:
        """Title of the document."""
        return DOCUMENTS[self.document]

    @property
    def stated_value(self) -> float | None:
        """The stated number in the unit used inside; None for words."""
        if isinstance(self.stated, str) or self.stated is None or self.unit is None:
            return None
        return self.stated * STATED_UNITS[self.unit][1]


class ClaimGroupSpec(Spec):
    """The claims about one topic, a file each."""

    id: str
    name: str
    claims: tuple[ClaimSpec, ...]
