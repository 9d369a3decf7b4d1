"""Every shipped training job gives the answer it is shipped for; serving jobs: test_serving_plan.py."""

from __future__ import annotations

import re
from functools import cache

import pytest

from gpucalc.catalog import open_catalog, shipped
from gpucalc.jobs import resolve
from gpucalc.plan.answer import Action, Level, Plan
from gpucalc.planner import plan_job
from gpucalc.report.screen import set_word
from gpucalc.spec.train_run import TrainRun

CATALOG = open_catalog()
SHIPPED = sorted(
    path.stem for path in (shipped() / "jobs").glob("*.yaml") if not path.stem.startswith("serve-")
)
TOO_LARGE = {"deepseek-v4-flash"}
FLEET = re.compile(r"(?P<count>\d+) x (?P<card>.+), (?P<framework>\w+)$")


@cache
def plan(name: str) -> Plan:
    """The plan of a shipped job, with advice."""
    return plan_job(resolve(f"jobs/{name}", CATALOG), CATALOG)


@cache
def changed(name: str, gpus: str | None, *sets: str) -> Plan:
    """The plan of a shipped job on other GPUs or with other keys, without advice."""
    return plan_job(resolve(f"jobs/{name}", CATALOG, gpus=gpus, sets=sets), CATALOG, advice=False)


def fleets(of: Plan) -> dict[str, Action]:
    """The actions that name a fleet, by card."""
    found = {}
    for action in of.actions:
        if match := FLEET.match(action.title):
            found[match["card"]] = action
    return found


@pytest.mark.parametrize("name", SHIPPED)
def test_it_plans(name: str) -> None:
    answer = plan(name)
    assert answer.verdict.needed.value > 0
    assert answer.verdict.capacity.value > 0
    assert answer.verdict.margin_bytes == answer.verdict.capacity.value - answer.verdict.needed.value
    if name in TOO_LARGE:
        assert answer.verdict.level is Level.DOES_NOT_FIT
        assert answer.time is None
        assert answer.throughput is None
        assert answer.binds == "memory capacity"
        return
    assert answer.verdict.level is not Level.DOES_NOT_FIT
    assert answer.time is not None
    assert answer.throughput is not None
    assert answer.time.value > 0
    assert 0 < answer.throughput.child("mfu").value < 1
    assert answer.cost is not None


@pytest.mark.parametrize("name", SHIPPED)
def test_every_action_helps(name: str) -> None:
    """An action brings speed to a plan that fits, memory or a verdict to one that does not."""
    answer = plan(name)
    order = [Level.FITS, Level.MARGINAL, Level.DOES_NOT_FIT]
    speed = answer.throughput.child("tokens_per_s").value if answer.throughput is not None else 0
    for action in answer.actions:
        assert action.changes, action.title
        better = order.index(action.level) < order.index(answer.verdict.level)
        smaller = action.needed_bytes < answer.verdict.needed.value
        faster = action.level is Level.FITS and (action.tokens_per_s or 0) > speed
        assert faster if answer.verdict.level is Level.FITS else better or smaller, action.title


@pytest.mark.parametrize("name", SHIPPED)
def test_actions_can_be_done(name: str) -> None:
    """What an action says it would bring is what the plan with its changes says."""
    for action in plan(name).actions[:2]:
        gpus = action.changes.get("gpus")
        keys = {key: value for key, value in action.changes.items() if key != "gpus"}
        if gpus is not None and "drop" not in action.title:
            continue  # a fleet found by search: its layout is more than the keys it names
        sets = tuple(f"{key}={set_word(value)}" for key, value in keys.items())
        found = changed(name, gpus, *sets)
        assert found.verdict.level is action.level, action.title
        assert found.verdict.needed.value == pytest.approx(action.needed_bytes), action.title


# --- does it fit -------------------------------------------------------------------------------------------


def test_deepseek_v4_flash_on_eight_24_gb_cards_is_refused_with_what_would_hold_it() -> None:
    answer = plan("deepseek-v4-flash")
    assert answer.verdict.binds == "optimizer_states"
    # Mixed precision with Adam: 16 bytes for each of 284 billion parameters, over eight cards.
    states = answer.model.value * 16 / 8
    assert answer.verdict.needed.value > states > 20 * answer.verdict.capacity.value
    named = fleets(answer)
    assert len(named) == 3
    assert next(iter(named)) == "GeForce RTX 4090"
    # The cards hold it; the host of a workstation card is nobody's word, which makes it marginal.
    assert all(action.level is not Level.DOES_NOT_FIT for action in named.values())
    counts = [int(str(action.changes["gpus"]).split("x")[0]) for action in named.values()]
    assert counts == sorted(counts, reverse=True)  # larger cards, fewer of them
    assert counts[0] > 8


def test_the_smallest_fleet_is_the_smallest() -> None:
    """Half of the fleet named does not hold the run under the same search."""
    answer = plan("llama-2-7b-zero2")
    for card, action in fleets(answer).items():
        count, stem = str(action.changes["gpus"]).split("x", 1)
        if card == "A100 SXM4 40GB" or int(count) == 1:
            continue  # of the own card only larger fleets are looked at
        half = f"{int(count) // 2}x{stem}"
        smaller = changed(
            "llama-2-7b-zero2", half, "run.zero_stage=3", "run.micro_batch=1", "run.recompute=full"
        )
        assert smaller.verdict.level is not Level.FITS


def test_zero_2_is_tightest_while_it_loads_and_zero_3_is_not() -> None:
    second, third = plan("llama-2-7b-zero2"), plan("llama-2-7b-zero3")
    assert second.verdict.phase == "load"
    assert second.verdict.level is Level.MARGINAL
    assert third.verdict.level is Level.FITS
    assert third.verdict.phase != "load"
    assert any("ZeRO stage 3" in action.title for action in second.actions)


# --- how fast ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "published_s"), [("gpt3-175b-full", 18.13), ("gpt3-175b-selective", 13.75)])
def test_gpt3_steps_are_near_the_published_ones(name: str, published_s: float) -> None:
    job = resolve(f"jobs/{name}", CATALOG)
    assert job.job.measured == {"step_time_s": published_s}
    answer = plan(name)
    assert answer.time is not None
    assert answer.time.value == pytest.approx(published_s, rel=0.15)
    assert answer.layout.global_batch == 64


def test_selective_recompute_is_faster_than_full() -> None:
    full, selective = plan("gpt3-175b-full").time, plan("gpt3-175b-selective").time
    assert full is not None
    assert selective is not None
    assert selective.value < full.value


@pytest.mark.parametrize("name", ["llama-3-70b", "llama-3-8b-torchtitan"])
def test_published_rates(name: str) -> None:
    job = resolve(f"jobs/{name}", CATALOG)
    assert job.job.measured is not None
    answer = plan(name)
    assert answer.throughput is not None
    rate = answer.throughput.child("tokens_per_s_per_gpu").value
    assert rate == pytest.approx(job.job.measured["tokens_per_s_per_gpu"], rel=0.25)


# --- mixed fleets ------------------------------------------------------------------------------------------


def test_a_mixed_fleet_names_who_sizes_who_paces_and_what_to_drop() -> None:
    answer = plan("llama-2-7b-mixed")
    (note,) = (text for text in answer.notes if text.startswith("mixed fleet"))
    assert "GeForce RTX 3090 has the least memory and sizes every rank" in note
    assert "GeForce RTX 3090 is the slowest and paces every step" in note
    first = answer.actions[0]
    assert first.title == "4 x A100 SXM4 80GB alone"
    assert first.changes == {"gpus": "4xa100-sxm-80gb"}
    assert answer.throughput is not None
    assert first.tokens_per_s is not None
    assert first.tokens_per_s > answer.throughput.child("tokens_per_s").value
    # It is what the job gives on those cards.
    alone = changed("llama-2-7b-mixed", "4xa100-sxm-80gb")
    assert alone.time is not None
    assert alone.time.value == first.step_s


def test_size_and_pace_can_be_different_cards() -> None:
    """40 GB at 312 TFLOP/s beside 48 GB at 150: one sizes, the other paces."""
    answer = changed("llama-2-7b-mixed", "4xa100-sxm-40gb+4xa40")
    (note,) = (text for text in answer.notes if text.startswith("mixed fleet"))
    assert "A100 SXM4 40GB has the least memory" in note
    assert "A40 is the slowest" in note


def test_jobs_say_training_and_their_gpus() -> None:
    for name in SHIPPED:
        job = resolve(f"jobs/{name}", CATALOG)
        assert isinstance(job.run, TrainRun)
        assert job.fleet.parts
