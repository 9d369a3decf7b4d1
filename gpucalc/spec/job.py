"""A job: a model, GPUs and a run; what a job file, a measured run and a CI check have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from gpucalc.errors import InputError
from gpucalc.spec.base import Name, Spec, refuse
from gpucalc.spec.costs import CostKeys, NetworkKeys, ReliabilityKeys
from gpucalc.spec.fleet import GRAMMAR, FleetSpec, parse_fleet
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.train_run import TrainRun

Run = Annotated[TrainRun | ServeRun, Field(discriminator="task")]


def _fleet_words(value: Any) -> Any:
    try:
        parse_fleet(value)
    except InputError as error:
        raise refuse(error.problem, legal=GRAMMAR) from None
    return value


def _model_words(value: Any) -> Any:
    if isinstance(value, Mapping):
        if not value:
            raise refuse("is empty", legal="a catalogue id, a path, or the model's own keys")
        return dict(value)
    if not isinstance(value, str) or not value.strip() or len(value) > 4096:
        raise refuse("is not a model", legal="a catalogue id, a path, or the model's own keys")
    return value


def _expect_words(value: Any) -> Any:
    from gpucalc.spec.check import read_expect  # only for jobs that are checks

    try:
        read_expect(value)
    except InputError as error:
        raise refuse(str(error).removeprefix("expect: "), near=error.near) from None
    return value


class Job(Spec):
    """A model on GPUs doing a run. `measured` and `source` make it a measured run, `expect` a check."""

    name: Name | None = None
    model: Annotated[str | dict[str, Any], BeforeValidator(_model_words)]
    gpus: Annotated[str, BeforeValidator(_fleet_words)] | None = None
    system: str | None = None
    run: Run
    network: NetworkKeys | None = None
    costs: CostKeys | None = None
    reliability: ReliabilityKeys | None = None
    expect: Annotated[dict[str, Any], BeforeValidator(_expect_words)] | None = None
    matrix: dict[str, Any] | None = Field(default=None, description="lists of values a check is made over")
    measured: dict[str, Any] | None = None
    source: dict[str, Any] | str | None = None
    notes: str | None = None

    @property
    def fleet(self) -> FleetSpec:
        """The GPUs as parts. Raises InputError when the job names none."""
        if self.gpus is None:
            raise InputError("no GPUs given", key="gpus", legal=f"--gpus or a gpus: key, {GRAMMAR}")
        return parse_fleet(self.gpus, key="gpus")
