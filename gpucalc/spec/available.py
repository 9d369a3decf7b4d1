"""What GPUs a user can have, in a file: kinds, how many of each, their server and their own price."""

from __future__ import annotations

from pydantic import Field, field_validator

from gpucalc.errors import InputError
from gpucalc.spec.base import Spec, refuse
from gpucalc.spec.fleet import GRAMMAR, FleetPart, parse_fleet

MOST_KINDS = 64


class AvailableGpus(Spec):
    """GPUs of one kind that can be taken, up to `gpus` of them."""

    gpus: str = Field(description="[NODESx]COUNTxGPU, the most there are")
    system: str | None = Field(default=None, description="the server they sit in; unset: the GPU's default")
    usd_per_gpu_hour: float | None = Field(
        default=None, gt=0, description="own price; unset: the catalogue's, where it has one"
    )

    @field_validator("gpus")
    @classmethod
    def _one_kind(cls, value: str) -> str:
        try:
            fleet = parse_fleet(value)
        except InputError as error:
            raise refuse(error.problem, legal=GRAMMAR) from None
        if len(fleet.parts) > 1:
            raise refuse("names several GPU kinds", legal="one entry for each kind")
        return value

    @property
    def part(self) -> FleetPart:
        """The words as a part of a fleet."""
        return parse_fleet(self.gpus).parts[0]


class Available(Spec):
    """A fleet file: everything that can be taken."""

    available: tuple[AvailableGpus, ...] = Field(min_length=1, max_length=MOST_KINDS)
