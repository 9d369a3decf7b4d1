"""Public reports of training runs that fitted or ran out of memory: verdicts and the figures they name.

The answers are those of the reports' threads and of arithmetic on the recipe; a case may accept two
verdicts where people with the same setup saw both. Deployments (fit-042) are in test_field_serving.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from field_cases import CATALOG, biggest, cases, job_of, phases, plan_of

from gpucalc.errors import UnsupportedModel
from gpucalc.jobs import resolve_data
from gpucalc.plan.answer import Level, Plan
from gpucalc.plan.memory import allocated_peak, reserved_peak
from gpucalc.planner import plan_job
from gpucalc.units import GB, GIB

FILE = "field_training.yaml"
CASES = cases(FILE)
CHECKS = [
    pytest.param(index, check, id=f"{case['id']}-{check}")
    for index, case in enumerate(CASES)
    for check in range(len(case["checks"]))
]
UNITS = {"gib": GIB, "gb": GB}
MOST_HEADROOM = 0.10  # a verdict of "fits" may leave at most this to something that ran out


def states(plan: Plan) -> float:
    """Weights, gradients whole as the step finds them, optimizer states, a reference."""
    return sum(
        biggest(plan, name)
        for name in ("weights", "frozen_weights", "reference_weights", "gradients", "optimizer_states")
    )


def weights_and_optimizer(plan: Plan) -> float:
    return biggest(plan, "weights") + biggest(plan, "optimizer_states")


def logits_and_loss(plan: Plan) -> float:
    """What the vocabulary costs at its widest: logits, their fp32 copies, what the loss keeps."""
    return biggest(plan, "log_softmax") + biggest(plan, "logits")


def adapters_and_gradients(plan: Plan) -> float:
    return biggest(plan, "adapters") + biggest(plan, "gradients")


def trained_tables(plan: Plan) -> float:
    """A trained copy of the embedding: weights, gradients and states, each a line named tables."""
    step = next(phase for phase in phases(plan) if phase.name == "step").child("allocated")
    held = [part for line in step.children for part in line.children if part.name == "tables"]
    return sum(float(line.value) for line in held)


def host(plan: Plan) -> float:
    assert plan.verdict.host is not None
    return float(plan.verdict.host.needed.value)


NAMED: dict[str, Callable[[Plan], float]] = {
    "states": states,
    "weights_and_optimizer": weights_and_optimizer,
    "logits_and_loss": logits_and_loss,
    "adapters_and_gradients": adapters_and_gradients,
    "base_weights": lambda plan: biggest(plan, "frozen_linears") + biggest(plan, "other_weights"),
    "trained_tables": trained_tables,
    "host": host,
    "needed": lambda plan: float(plan.verdict.needed.value),
    "reserved": lambda plan: reserved_peak(plan.memory),
    "allocated": lambda plan: allocated_peak(plan.memory),
    "activations": lambda plan: biggest(plan, "activations"),
}


def figure(plan: Plan, name: str) -> float:
    """A named figure, a path below the worst stage, or below the host's memory."""
    if name in NAMED:
        return NAMED[name](plan)
    top, *path = name.split("/")
    if top == "host":
        assert plan.verdict.host is not None
        line = plan.verdict.host.needed
    else:
        line = next(phase for phase in phases(plan) if phase.name == top)
    for part in path:
        line = line.child(part)
    return float(line.value)


@pytest.mark.parametrize(("index", "check"), CHECKS)
def test_a_public_report_is_answered(index: int, check: int) -> None:
    wanted = CASES[index]["checks"][check]
    plan = plan_of(FILE, index, check)
    wrong = [text for one in wanted.get("figures", ()) if (text := off(plan, one)) is not None]
    level = plan.verdict.level.value
    if "verdict" in wanted and level not in wanted["verdict"]:
        wrong.append(f"{level}, not {' or '.join(wanted['verdict'])}")
    if "binds" in wanted and plan.verdict.binds != wanted["binds"]:
        wrong.append(f"{plan.verdict.binds} binds, not {wanted['binds']}")
    assert not wrong, "; ".join([*wrong, told(plan)])


def off(plan: Plan, wanted: dict[str, Any]) -> str | None:
    """How a figure misses its answer, or None."""
    unit = next(key for key in UNITS if key in wanted)
    answer, found = wanted[unit], figure(plan, wanted["line"]) / UNITS[unit]
    low, high = (
        answer
        if isinstance(answer, list)
        else (answer * (1 - wanted["within"]), answer * (1 + wanted["within"]))
    )
    return None if low <= found <= high else f"{wanted['line']} {found:.2f}, not {answer} {unit}"


def told(plan: Plan) -> str:
    """The decision in figures, for a failing test."""
    verdict = plan.verdict
    peak = max(phases(plan), key=lambda phase: phase.value)
    held = {line.name: round(line.value / GIB, 2) for line in peak.child("allocated").children}
    return (
        f"needs {verdict.needed.value / GIB:.1f} of {verdict.capacity.value / GIB:.1f} GiB at {peak.name}"
        f" +-{verdict.expected_error:.0%}: {held}"
    )


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case["id"] for case in CASES])
def test_what_ran_out_never_fits_with_room(index: int) -> None:
    for check, wanted in enumerate(CASES[index]["checks"]):
        if "fits" in wanted.get("verdict", ["fits"]):
            continue
        verdict = plan_of(FILE, index, check).verdict
        room = 1 - verdict.needed.value / verdict.capacity.value
        said = verdict.level is Level.FITS and room > MOST_HEADROOM
        assert not said, f"check {check}: {room:.0%} left"


def test_memory_stays_level_when_sequence_and_context_ranks_double() -> None:
    index = next(i for i, case in enumerate(CASES) if case["id"] == "fit-044")
    peaks = [reserved_peak(plan_of(FILE, index, check).memory) for check in range(4)]
    assert max(peaks) <= 1.03 * min(peaks)


def test_a_larger_vocabulary_needs_more_beyond_the_states() -> None:
    index = next(i for i, case in enumerate(CASES) if case["id"] == "fit-029")
    large, small = (plan_of(FILE, index, check) for check in (0, 1))
    assert large.verdict.needed.value - states(large) > small.verdict.needed.value - states(small)


def test_a_network_known_by_its_parameters_is_not_said_to_fit() -> None:
    index = next(i for i, case in enumerate(CASES) if case["id"] == "fit-034")
    job = job_of(CASES[index], {"set": {"run.optimizer": "adamw-8bit"}})
    with pytest.raises(UnsupportedModel, match=r"without them a GPU holds 1\d\.\d GiB"):
        plan_job(resolve_data(job, CATALOG, where="fit-034"), CATALOG, advice=False)
