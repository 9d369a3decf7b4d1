"""Which GPUs to take: answers worked out again from plans, and what must never happen."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpucalc import size as sizing
from gpucalc import size_bounds
from gpucalc.__main__ import main
from gpucalc.catalog import open_catalog
from gpucalc.jobs import ResolvedJob, resolve
from gpucalc.plan.answer import Level, Plan
from gpucalc.plan.evaluate import Subject
from gpucalc.planner import plan_job
from gpucalc.size import size
from gpucalc.size_bounds import BEATEN
from gpucalc.size_fleets import Kind, kinds
from gpucalc.size_offers import ORDERS, Offer, Sizing
from gpucalc.size_targets import Targets

CATALOG = open_catalog()
Capture = pytest.CaptureFixture[str]
JOB = "models/llama-3-8b"
FEW = ("a100-sxm-80gb", "h100-sxm-80gb", "l40s")
TOKENS = 10_000_000_000


def job_of(name: str = JOB, *sets: str, task: str | None = None) -> ResolvedJob:
    return resolve(name, CATALOG, sets=sets, task=task, need_gpus=False)


def alone(*gpus: str, most: int = 8) -> tuple[Kind, ...]:
    """The GPUs in their default servers, without the clouds' instances."""
    return tuple(kind for kind in kinds(CATALOG, gpus=gpus, most=most) if kind.system is None)


def found_for(*gpus: str, most: int = 8, sets: tuple[str, ...] = (), **targets: Any) -> Sizing:
    return size(job_of(JOB, *sets), CATALOG, alone(*gpus, most=most), Targets(**targets))


def planned(gpu: str, count: int, *sets: str) -> Plan:
    """The same fleet planned the way `plan` does, with the micro-batch left open."""
    job = resolve(JOB, CATALOG, gpus=f"{count}x{gpu}", sets=("run.micro_batch=auto", *sets))
    return plan_job(job, CATALOG, advice=False)


# -- the answers ----------------------------------------------------------------------------------


def test_the_best_three_of_a_small_catalogue_worked_out_from_plans() -> None:
    by_s = 10 * 86400.0
    rows = []
    for gpu in FEW:
        for count in (1, 2, 4, 8):
            plan = planned(gpu, count, f"run.tokens={TOKENS}")
            if plan.verdict.level is not Level.FITS:
                continue
            assert plan.throughput is not None
            rate = float(plan.throughput.child("tokens_per_s").value)
            assert plan.reliability is not None
            kept = float(plan.reliability.child("goodput").value)
            wall = TOKENS / rate / kept  # the last step is a part in 10^5 of it
            hourly = float(CATALOG.cluster([(None, count, gpu)]).price_per_gpu_hour.value) * count  # type: ignore[union-attr]
            if wall <= by_s:
                rows.append((f"{count}x{gpu}", count, rate, wall / 3600 * hourly))
    assert len(rows) > 3
    found = found_for(*FEW, tokens=TOKENS, by_s=by_s)
    assert {o.fleet for o in found.meeting if o.level is Level.FITS} == {row[0] for row in rows}
    cheapest = min(rows, key=lambda row: row[3])
    assert found.cheapest is not None
    assert found.cheapest.fleet == cheapest[0]
    assert found.cheapest.total_usd() == pytest.approx(cheapest[3], rel=1e-4)
    assert found.fastest is not None
    assert found.fastest.fleet == max(rows, key=lambda row: row[2])[0]
    assert found.smallest is not None
    assert found.smallest.gpus == min(row[1] for row in rows)
    # Two cards of 80 GB may hold it: with time enough that is said, but never put before what surely fits.
    patient = found_for(*FEW, tokens=TOKENS, by_s=3 * by_s).meeting
    doubtful = {o.fleet for o in patient if o.level is Level.MARGINAL}
    assert doubtful == {"2xa100-sxm-80gb", "2xh100-sxm-80gb"}
    assert patient[-1].level is Level.MARGINAL


@pytest.mark.parametrize(("gpu", "gib"), [("b200-sxm", 178.0), ("l40s", 44.4)])
def test_the_smallest_fleet_is_what_sixteen_bytes_a_parameter_need(gpu: str, gib: float) -> None:
    # 8.03e9 parameters x 16 bytes of weights, gradients and Adam = 119.7 GiB; sizes are doublings.
    least = math.ceil(8.03e9 * 16 / (gib * 2**30))
    found = found_for(gpu)
    assert found.smallest is not None
    assert found.smallest.gpus == 2 ** math.ceil(math.log2(least))


def test_without_a_budget_of_tokens_the_cheapest_is_by_the_hour() -> None:
    found = found_for(*FEW)
    assert found.cheapest is not None
    hourly = [
        offer.usd_per_hour
        for offer in found.meeting
        if offer.usd_per_hour is not None and offer.level is Level.FITS
    ]
    assert found.cheapest.usd_per_hour == min(hourly)
    assert found.cheapest.total_usd() is None


def test_wall_time_is_whole_steps_and_decides_at_the_deadline() -> None:
    offer = next(o for o in found_for("h100-sxm-80gb", tokens=TOKENS).offers if o.gpus == 8)
    plan = offer.plan
    assert plan.time is not None
    per_step = plan.layout.global_batch * 4096
    assert plan.reliability is not None
    kept = float(plan.reliability.child("goodput").value)
    wall = math.ceil(TOKENS / per_step) * float(plan.time.value) / kept
    assert 0.99 < kept < 1  # eight GPUs are interrupted every nine months
    assert offer.wall_s() == pytest.approx(wall, rel=1e-12)
    for by_s, meets, holds in (
        (wall * 0.999, False, False),
        (wall * 1.001, True, False),  # within the expected error
        (wall * (1 + offer.error) * 1.001, True, True),
    ):
        again = next(o for o in found_for("h100-sxm-80gb", tokens=TOKENS, by_s=by_s).offers if o.gpus == 8)
        assert (again.meets, again.holds) == (meets, holds)


def test_a_doubtful_answer_comes_with_one_that_holds() -> None:
    first = found_for("h100-sxm-80gb", tokens=TOKENS)
    four = next(offer for offer in first.offers if offer.gpus == 4)
    wall = four.wall_s()
    assert wall is not None
    found = found_for("h100-sxm-80gb", most=4, tokens=TOKENS, by_s=wall * 1.01)
    assert found.cheapest is not None
    assert (found.cheapest.gpus, found.cheapest.holds) == (4, False)
    assert found.cheapest_that_holds is None
    wider = found_for("h100-sxm-80gb", tokens=TOKENS, by_s=wall * 1.01)
    assert wider.cheapest_that_holds is not None
    assert wider.cheapest_that_holds.gpus == 8


def test_a_budget_counts_at_the_price_of_every_gpu() -> None:
    eight = next(o for o in found_for("h100-sxm-80gb", tokens=TOKENS).offers if o.gpus == 8)
    total = eight.total_usd()
    assert total is not None
    assert eight.total_usd(1, 1.2) == pytest.approx(1.2 * total)
    tight = replace(eight, targets=Targets(tokens=TOKENS, budget_usd=total * 1.1))
    assert not tight.too_dear()
    assert tight.too_dear(1, 1.2)
    assert replace(eight, targets=Targets(tokens=TOKENS, budget_usd=total * 0.9)).too_dear()
    assert replace(eight, gpus=16).total_usd() == pytest.approx(2 * total)  # idle GPUs are paid for


def test_a_deployment_is_sized_by_its_latencies() -> None:
    fleets = alone("l4", "h100-sxm-80gb")
    loose = size(job_of(JOB, task="serve"), CATALOG, fleets, Targets())
    tight = size(job_of(JOB, "run.tpot_ms=12", task="serve"), CATALOG, fleets, Targets())
    assert loose.cheapest is not None
    assert loose.cheapest.kind.gpu.id == "l4"
    assert tight.cheapest is not None
    assert tight.cheapest.kind.gpu.id == "h100-sxm-80gb"
    assert tight.cheapest.plan.time is not None
    assert float(tight.cheapest.plan.time.value) <= 0.012
    missed = [words for offer in tight.offers for words in offer.missed]
    assert any("ms a token, 12 allowed" in words for words in missed)


def test_requests_per_second_want_more_gpus() -> None:
    job = job_of(JOB, "run.tpot_ms=30", task="serve")
    counts = []
    for requests in (1.0, 60.0, 1e6):
        found = size(job, CATALOG, alone("h100-sxm-80gb"), Targets(requests_per_s=requests))
        counts.append(found.smallest.gpus if found.smallest else None)
    assert counts[0] is not None
    assert counts[1] is not None
    assert counts[0] < counts[1]
    assert counts[2] is None


# -- energy, failures, the job's own prices ---------------------------------------------------------


def test_energy_of_a_token_worked_out_from_the_plan() -> None:
    offer = next(o for o in found_for("h100-sxm-80gb", tokens=TOKENS).offers if o.gpus == 8)
    # Eight at 0.9 of 700 W and 0.4 x 5,600 W of hosts: 7.28 kW, at PUE 1.3 9.464 kW.
    assert offer.rate is not None
    per_million = 9.464 * 1e6 / offer.rate / 3600
    assert offer.kwh_per_million == pytest.approx(per_million)
    wall = offer.wall_s()
    assert wall is not None
    assert offer.total_kwh == pytest.approx(9.464 * wall / 3600)
    assert offer.total_carbon_kg == pytest.approx(9.464 * wall / 3600 * 0.366)
    # Bought: 33,750 USD over 35,040 hours, and 1.183 kW at 8.06 cents.
    assert offer.owned_usd == pytest.approx(8 * wall / 3600 * (33_750 / 35_040 + 1.183 * 0.0806))
    without = next(o for o in found_for("h100-sxm-80gb").offers if o.gpus == 8)
    assert without.owned_usd is None
    assert without.total_kwh is None
    assert without.kwh_per_million == pytest.approx(per_million)


def test_the_leanest_needs_least_energy_and_the_order_is_that_of_its_key() -> None:
    found = found_for(*FEW, tokens=TOKENS)
    known = [o.kwh_per_million for o in found.meeting if o.kwh_per_million and o.level is Level.FITS]
    assert found.leanest is not None
    assert found.leanest.kwh_per_million == min(known)
    by_energy = sorted(found.offers, key=ORDERS["energy"])
    values = [offer.kwh_per_million for offer in by_energy if offer.kwh_per_million is not None]
    assert values == sorted(values)


def test_the_jobs_own_rent_goes_for_every_card_without_a_price_of_its_own(tmp_path: Path) -> None:
    found = found_for("rtx-4090", "h100-sxm-80gb", sets=("costs.usd_per_gpu_hour=0.5",))
    assert {offer.usd_per_gpu_hour for offer in found.offers} == {0.5}
    path = tmp_path / "fleet.yaml"
    path.write_text("available:\n- {gpus: 4xH100-SXM, usd_per_gpu_hour: 2.1}\n- {gpus: 4xL40S}\n", "utf-8")
    own = size(job_of(JOB, "costs.usd_per_gpu_hour=0.5"), CATALOG, kinds(CATALOG, fleet=path), Targets())
    assert {o.usd_per_gpu_hour for o in own.offers if o.kind.card == "h100-sxm-80gb"} == {2.1}


def test_unlike_cards_of_ones_own_are_named_to_be_tried_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("available:\n- {gpus: 4xH100-SXM}\n- {gpus: 4xL40S}\n", "utf-8")
    main(["size", JOB, "--fleet", str(path), "--set", "run.seq_len=2048"])
    said = " ".join(capsys.readouterr().out.split())
    assert "--gpus 4xh100-sxm-80gb+4xl40s compares every way of using them" in said
    assert "run: train," in said
    assert "seq_len 2048" in said
    path.write_text("available:\n- {gpus: 4xH100-SXM}\n", "utf-8")
    main(["size", JOB, "--fleet", str(path)])
    assert "compares every way" not in capsys.readouterr().out


def test_failing_machines_take_longer_and_cost_more() -> None:
    sound = found_for("h100-sxm-80gb", tokens=TOKENS)
    failing = found_for("h100-sxm-80gb", tokens=TOKENS, sets=("reliability.mtbf_gpu_hours=40",))
    for one, other in zip(sound.offers, failing.offers, strict=True):
        assert (one.total_usd() or 0.0) < (other.total_usd() or 0.0)


def test_a_network_of_the_job_is_that_of_every_fleet() -> None:
    sets = ("network.oversubscription=100", "network.pod_gpus=8")
    wide = found_for("h100-sxm-80gb", most=32)
    narrow = found_for("h100-sxm-80gb", most=32, sets=sets)
    rates = [{offer.gpus: offer.rate or 0.0 for offer in found.offers} for found in (wide, narrow)]
    assert rates[0][8] == rates[1][8]
    assert rates[0][32] > rates[1][32]


# -- prices ---------------------------------------------------------------------------------------


def test_a_missing_price_is_no_price() -> None:
    found = found_for("rtx-4090", "h100-sxm-80gb", tokens=TOKENS)
    unpriced = [offer for offer in found.offers if offer.kind.gpu.id == "rtx-4090"]
    assert unpriced
    assert all(offer.usd_per_hour is None and offer.total_usd() is None for offer in unpriced)
    assert found.offers[-len(unpriced) :] == tuple(unpriced)  # last in the order of money
    assert found.cheapest is not None
    assert found.cheapest.kind.gpu.id == "h100-sxm-80gb"
    only = found_for("rtx-4090", tokens=TOKENS)
    assert only.meeting
    assert only.cheapest is None
    assert not found_for("rtx-4090", tokens=TOKENS, budget_usd=1e9).meeting


def test_gpus_without_a_price_are_looked_at_when_asked_for() -> None:
    usual = {kind.gpu.id for kind in kinds(CATALOG)}
    assert "rtx-4090" not in usual
    assert "rtx-4090" in {kind.gpu.id for kind in kinds(CATALOG, unpriced=True)}
    assert "rtx-4090" in {kind.gpu.id for kind in kinds(CATALOG, arch="ada")}


def test_instances_are_taken_whole_at_their_own_price() -> None:
    by_system = {kind.system: kind for kind in kinds(CATALOG, cloud="AWS", gpus=("h100-sxm-80gb",), most=32)}
    assert by_system["aws-p5.48xlarge"].counts == (8, 16, 32)
    assert by_system["aws-p5.4xlarge"].counts == (1, 2, 4, 8, 16, 32)
    price = by_system["aws-p5.48xlarge"].cluster(CATALOG, 8).price_per_gpu_hour
    assert price is not None
    assert price.value == 6.88
    assert kinds(CATALOG, cloud="AWS", gpus=("h200-sxm-141gb",))[0].system == "aws-p5e.48xlarge"
    # Nobody knows what this instance costs; what others ask for the card is not its price.
    assert (
        kinds(CATALOG, cloud="AWS", gpus=("h200-sxm-141gb",))[0].cluster(CATALOG, 8).price_per_gpu_hour
        is None
    )


# -- what must never happen -----------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    gpu=st.sampled_from(["a100-sxm-40gb", "h100-sxm-80gb", "l40s", "rtx-4090"]),
    batch=st.sampled_from([None, 1, 3, 12, 64]),
    days=st.sampled_from([None, 2.0, 20.0]),
    framework=st.sampled_from(["fsdp", "deepspeed", "megatron"]),
    method=st.sampled_from(["full", "lora"]),
)
def test_more_gpus_of_a_kind_never_turn_a_yes_into_a_no(
    gpu: str, batch: int | None, days: float | None, framework: str, method: str
) -> None:
    sets = [f"run.framework={framework}", "run.seq_len=2048"]
    sets += [f"run.global_batch={batch}"] if batch else []
    sets += ["run.method=lora"] if method == "lora" and framework != "megatron" else []
    targets = Targets(tokens=10**9, by_s=None if days is None else days * 86400)
    found = size(job_of(JOB, *sets), CATALOG, alone(gpu, most=16), targets)
    offers = sorted(found.offers, key=lambda offer: offer.gpus)
    works = [offer.works for offer in offers]
    assert works == sorted(works)
    first = next((offer.gpus for offer in offers if offer.meets), None)
    assert all(offer.meets for offer in offers if first is not None and offer.gpus >= first)
    # A larger limit only adds fleets: what met the targets before still does.
    smaller = size(job_of(JOB, *sets), CATALOG, alone(gpu, most=4), targets)
    assert {offer.fleet for offer in smaller.meeting} <= {offer.fleet for offer in found.meeting}


@settings(max_examples=10, deadline=None)
@given(
    days=st.floats(0.5, 20),
    later=st.floats(1, 5),
    budget=st.floats(500, 5000),
    more=st.floats(1, 5),
)
def test_more_time_or_money_never_gives_a_worse_answer(
    days: float, later: float, budget: float, more: float
) -> None:
    def answers(by_days: float, usd: float) -> Sizing:
        return found_for("h100-sxm-80gb", "l40s", tokens=TOKENS, by_s=by_days * 86400, budget_usd=usd)

    tight = answers(days, budget)
    for loose in (answers(days * later, budget), answers(days, budget * more)):
        if not tight.meeting:
            continue
        assert loose.meeting
        for name, value in (
            ("cheapest", lambda offer: offer.total_usd()),
            ("fastest", lambda offer: -(offer.rate or 0.0)),
            ("smallest", lambda offer: offer.gpus),
            ("leanest", lambda offer: offer.kwh_per_million),
        ):
            before, after = getattr(tight, name), getattr(loose, name)
            if before is None or after.level is not before.level:  # what surely fits goes before what may
                continue
            assert value(after) <= value(before)


def test_a_batch_that_does_not_divide_leaves_gpus_idle() -> None:
    # Adapters under FSDP: nothing but data parallelism, and four sequences keep four GPUs busy.
    sets = ("run.global_batch=4", "run.framework=fsdp", "run.method=lora")
    found = found_for("h100-sxm-80gb", sets=sets)
    four = next(offer for offer in found.offers if offer.gpus == 4)
    eight = next(offer for offer in found.offers if offer.gpus == 8)
    assert four.used == eight.used == 4
    assert eight.meets
    assert eight.rate == four.rate
    assert four.usd_per_hour is not None
    assert eight.usd_per_hour == pytest.approx(2 * four.usd_per_hour)
    assert found.smallest is not None
    assert found.smallest.gpus < 8


@pytest.mark.parametrize("sets", [(), ("run.framework=megatron",), ("run.optimizer=adamw-8bit",)], ids=str)
def test_no_plan_goes_below_the_bounds_fleets_are_left_out_by(
    sets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(JOB, *sets)
    subject = Subject.of(job.model)
    targets = Targets(tokens=10**9, by_s=86400.0)
    fleets = alone("l4", "h100-sxm-80gb", most=8)
    hopeless = {
        (kind.gpu.id, count)
        for kind in fleets
        for count in kind.counts
        if size_bounds.hopeless(job.run, subject, kind.cluster(CATALOG, count), targets, None)
    }
    assert hopeless
    monkeypatch.setattr(sizing, "hopeless", lambda *_: None)
    every = size(job, CATALOG, fleets, targets)
    for offer in every.offers:
        if (offer.kind.gpu.id, offer.gpus) in hopeless:
            assert not offer.meets
        most = size_bounds.most_per_s(job.run, subject, offer.kind.cluster(CATALOG, offer.used))
        assert most is not None
        assert offer.rate is None or offer.rate < most


@pytest.mark.parametrize("tokens", [None, TOKENS])
def test_fleets_left_unplanned_would_not_have_been_the_answer(
    tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ("b200-sxm", "l4", "a10g-24gb", "a100-sxm-80gb")
    quick = found_for(*few, most=32, tokens=tokens)
    assert any(reason == BEATEN for _, reason in quick.skipped)
    monkeypatch.setattr(sizing, "beaten", lambda *_: None)
    slow = found_for(*few, most=32, tokens=tokens)
    for name in ("cheapest", "fastest", "smallest", "leanest"):
        one: Offer = getattr(quick, name)
        assert one.fleet == getattr(slow, name).fleet
