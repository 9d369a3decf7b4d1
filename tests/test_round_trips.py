"""What is written down and read again says the same: jobs as JSON and YAML, figures in their units."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpucalc.catalog import Catalog
from gpucalc.jobs import ResolvedJob, resolve, resolve_data
from gpucalc.planner import plan_job
from gpucalc.spec.figure import Figure
from gpucalc.units import CATALOGUE_UNITS, GIB, gib, parse_bytes

CATALOG = Catalog([Path(__file__).parents[1] / "catalogs"])
JOBS = sorted(CATALOG.names("jobs"))
FORMATS: dict[str, Callable[[Any], Any]] = {
    "json": lambda data: json.loads(json.dumps(data)),
    "yaml": lambda data: yaml.safe_load(yaml.safe_dump(data)),
}


def headline(job: ResolvedJob) -> tuple[Any, ...]:
    """What a plan answers: verdict, bytes, seconds, rate."""
    plan = plan_job(job, CATALOG, advice=False, always_time=True)
    rates = [line.value if line is not None else None for line in (plan.time, plan.throughput)]
    return plan.verdict.level, plan.verdict.needed.value, *rates


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("form", FORMATS)
def test_a_job_written_and_read_again_is_the_same_plan(name: str, form: str) -> None:
    job = resolve(name, CATALOG)
    written = job.job.model_dump(mode="json", exclude_unset=True)
    again = resolve_data(FORMATS[form](written), CATALOG, where="again")
    assert headline(again) == headline(job)


@pytest.mark.parametrize("unit", sorted(CATALOGUE_UNITS))
@given(value=st.floats(1e-6, 1e9))
def test_a_figure_keeps_its_value_through_its_unit(unit: str, value: float) -> None:
    figure = Figure(value=value, unit=unit, kind="datasheet", source=("a source",))
    inside, scale = CATALOGUE_UNITS[unit]
    assert figure.si / scale == pytest.approx(value)
    line = figure.line("quantity")
    assert (line.value, line.unit) == (figure.si, inside)


@given(size=st.floats(1, 1e6))
def test_printed_capacity_is_read_back(size: float) -> None:
    assert parse_bytes(gib(size * GIB)) == pytest.approx(size * GIB, abs=0.005 * GIB)
    assert parse_bytes(gib(size * GIB, 6)) == pytest.approx(size * GIB, abs=1e-6 * GIB)


@given(size=st.integers(1, 10**6), prefix=st.sampled_from("kmgt"))
def test_binary_and_decimal_suffixes_are_told_apart(size: int, prefix: str) -> None:
    power = "kmgt".index(prefix) + 1
    assert parse_bytes(f"{size} {prefix}iB") == size * 1024**power
    assert parse_bytes(f"{size}{prefix.upper()}B") == size * 1000**power
