"""Cost arithmetic by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpucalc.__main__ import main
from gpucalc.catalog import Catalog, open_catalog
from gpucalc.errors import UnknownName
from gpucalc.formulas import cost as f
from gpucalc.jobs import resolve
from gpucalc.line import Line
from gpucalc.plan.answer import Plan
from gpucalc.planner import plan_job

CATALOG = open_catalog()
Capture = pytest.CaptureFixture[str]


def planned(name: str, *sets: str, gpus: str | None = None, task: str | None = None) -> Plan:
    return plan_job(resolve(name, CATALOG, gpus=gpus, sets=sets, task=task), CATALOG, advice=False)


def costs(plan: Plan) -> dict[str, Line]:
    assert plan.cost is not None
    return {line.name: line for line in plan.cost.children}


def test_time_by_hand() -> None:
    # 1e9 tokens at 3e6 per step: 334 whole steps of 2 s
    assert f.training_s(tokens=10**9, tokens_per_step=3 * 10**6, step_s=2.0) == 668
    assert f.wall_clock_s(training_s=900.0, goodput=0.9) == pytest.approx(1000.0)
    assert f.training_days(training_s=172_800.0) == 2
    assert f.gpu_hours(gpus=8, training_s=7200.0) == 16


def test_energy_and_money_by_hand() -> None:
    power = f.fleet_power_w(gpus=8, gpu_power_w=700, utilisation=0.9, host_power_w=1000)
    assert power == pytest.approx(6040)
    energy = f.energy_kwh(power_w=6000, training_s=3600.0, pue=1.5)
    assert energy == pytest.approx(9.0)
    assert f.rental_usd(gpu_hours=16, usd_per_gpu_hour=2.5) == 40
    assert f.electricity_usd(energy_kwh=9.0, usd_per_kwh=0.1) == pytest.approx(0.9)
    assert f.carbon_kg(energy_kwh=9.0, carbon_kg_per_kwh=0.4) == pytest.approx(3.6)
    # 8 GPUs at 3.60 USD/h: 0.008 USD/s; 20,000 tokens/s: 0.4 USD per million
    assert f.usd_per_million_tokens(usd_per_gpu_hour=3.6, gpus=8, tokens_per_s=20_000) == pytest.approx(0.4)
    assert f.lasting_tokens_per_s(tokens_per_s=20_000, goodput=0.8) == pytest.approx(16_000)


def test_host_power_by_hand() -> None:
    assert f.host_power_w(gpu_power_w=700, share=0.5) == 350


def test_the_energy_and_carbon_told_of_bloom_come_out() -> None:
    # Luccioni et al. 2023 (JMLR 24-253): 1,082,990 GPU-hours at 400 W are 433,196 kWh, at 57 g 24.7 t.
    hours = 1_082_990
    board = f.energy_kwh(power_w=400, training_s=hours * 3600.0, pue=1)
    assert board == pytest.approx(433_196)
    assert f.carbon_kg(energy_kwh=board, carbon_kg_per_kwh=0.057) == pytest.approx(24_692, abs=1)
    # With the cluster's idle draw 256,646 kWh more. Our defaults: 0.9 of the limit, hosts 0.4 of it, PUE 1.3.
    power = f.fleet_power_w(gpus=1, gpu_power_w=400, utilisation=0.9, host_power_w=0.4 * 400)
    ours = f.energy_kwh(power_w=power, training_s=hours * 3600.0, pue=1.3)
    assert ours == pytest.approx(433_196 + 256_646, rel=0.07)


def test_owning_by_hand() -> None:
    # 33,750 USD over 5 years at 80 %: 35,040 hours, 0.963 USD each
    capital = f.capital_usd_per_gpu_hour(usd_per_gpu=33_750, years=5, busy_share=0.8)
    assert capital == pytest.approx(33_750 / 35_040)
    # 7,280 W of eight GPUs at PUE 1.3 and 8.06 cents: 1.183 kW x 0.0806
    power = f.power_usd_per_gpu_hour(power_w=7280, gpus=8, pue=1.3, usd_per_kwh=0.0806)
    assert power == pytest.approx(0.0953498)
    owned = f.owned_usd(gpu_hours=192, capital_usd_per_gpu_hour=capital, power_usd_per_gpu_hour=power)
    assert owned == pytest.approx(192 * (0.9631849 + 0.0953498), rel=1e-6)
    # Rented at 3.97: 33,750 / 43,800 h = 0.7705 against 3.8747 saved an hour
    share = f.break_even_share(
        usd_per_gpu=33_750, years=5, usd_per_gpu_hour=3.97, power_usd_per_gpu_hour=power
    )
    assert share == pytest.approx(0.198870, rel=1e-4)


# -- plans ----------------------------------------------------------------------------------------


def test_a_day_of_eight_h100_worked_out_from_the_assumptions() -> None:
    lines = costs(planned("llama-3-8b"))
    # 8 x 700 W x 0.9 and 0.4 x 5,600 W of hosts: 7.28 kW; a day at PUE 1.3: 227.1 kWh
    assert lines["power"].value == pytest.approx(8 * 700 * 0.9 + 0.4 * 5600)
    assert lines["energy"].value == pytest.approx(7.28 * 24 * 1.3)
    assert lines["carbon"].value == pytest.approx(7.28 * 24 * 1.3 * 0.366)
    assert lines["electricity"].value == pytest.approx(7.28 * 24 * 1.3 * 0.0806)
    assert lines["rental"].value == pytest.approx(192 * 3.97)
    assert "$3.97" in (lines["rental"].note or "")
    assert lines["owned"].value == pytest.approx(192 * (33_750 / 35_040 + 0.0953498))


def test_every_assumption_of_a_cost_is_listed_and_can_be_set() -> None:
    plan = planned("llama-3-8b")
    assumed = {item.key: item.value for item in plan.assumptions if item.key.startswith("costs.")}
    assert assumed == {
        "costs.grid": "us", "costs.usd_per_kwh": 0.0806, "costs.carbon_kg_per_kwh": 0.366, "costs.pue": 1.3,
        "costs.power_utilisation": 0.9, "costs.host_power_share": 0.4, "costs.usd_per_gpu": 33_750.0,
        "costs.years": 5.0, "costs.busy_share": 0.8,
    }  # fmt: skip
    sets = (
        "costs.usd_per_kwh=0.2", "costs.carbon_kg_per_kwh=0.1", "costs.pue=1.5", "costs.power_utilisation=1",
        "costs.host_power_share=0", "costs.usd_per_gpu=26280", "costs.years=3", "costs.busy_share=1",
        "costs.usd_per_gpu_hour=2",
    )  # fmt: skip
    plan = planned("llama-3-8b", *sets)
    assert not any(item.key.startswith("costs.") for item in plan.assumptions)
    assert not any("price of" in item.why for item in plan.assumptions)
    lines = costs(plan)
    assert lines["energy"].value == pytest.approx(5.6 * 24 * 1.5)
    assert lines["carbon"].value == pytest.approx(5.6 * 24 * 1.5 * 0.1)
    assert lines["rental"].value == pytest.approx(192 * 2)
    assert lines["owned"].value == pytest.approx(192 * (1.0 + 0.7 * 1.5 * 0.2))


def test_a_grid_says_carbon_price_or_both() -> None:
    france = costs(planned("llama-3-8b", "costs.grid=france"))
    assert france["carbon"].value == pytest.approx(7.28 * 24 * 1.3 * 0.056)
    assert "electricity" not in france  # nobody said what a kWh costs there
    assert "owned" not in france
    texas = costs(planned("llama-3-8b", "costs.grid=texas"))
    assert texas["electricity"].value == pytest.approx(7.28 * 24 * 1.3 * 0.066)
    assert "carbon" not in texas


def test_an_unknown_grid_is_refused_with_near_ones() -> None:
    with pytest.raises(UnknownName, match=r"costs\.grid") as error:
        planned("llama-3-8b", "costs.grid=frence")
    assert "france" in error.value.near


def test_what_nobody_sells_at_a_known_price_is_not_owned() -> None:
    lines = costs(planned("models/resnet-50", gpus="8xL40S"))
    assert "owned" not in lines
    assert "rental" in lines
    lines = costs(planned("models/resnet-50", "costs.usd_per_gpu=9000", gpus="8xL40S"))
    assert lines["owned"].value > 0


def test_a_deployments_day_has_energy_too() -> None:
    lines = costs(planned("models/llama-3-8b", gpus="1xH100-SXM", task="serve"))
    assert lines["energy"].value == pytest.approx((0.7 * 0.9 + 0.28) * 24 * 1.3)
    assert lines["rental_per_million_tokens"].value > 0


def test_a_million_tokens_cost_their_share_of_the_budget_with_failures() -> None:
    plan = planned(
        "models/llama-3-8b", "run.tokens=1e12", "reliability.mtbf_gpu_hours=1000", gpus="64x8xH100"
    )
    assert plan.reliability is not None
    assert plan.reliability.child("goodput").value < 0.95
    lines = costs(plan)
    share = lines["rental"].value / 1e6
    assert lines["rental_per_million_tokens"].value == pytest.approx(share, rel=1e-3)


def test_the_users_own_catalogue_replaces_a_grid(tmp_path: Path) -> None:
    (tmp_path / "grids").mkdir()
    text = (
        "id: us\nname: own plant\n"
        "carbon_kg_per_kwh: {value: 0.0, unit: kg/kWh, kind: assumed, source: [assumption]}\n"
    )
    (tmp_path / "grids" / "us.yaml").write_text(text, "utf-8")
    known = Catalog([tmp_path, *CATALOG.roots])
    plan = plan_job(resolve("llama-3-8b", known), known, advice=False)
    assert costs(plan)["carbon"].value == 0


def test_costs_are_printed_and_in_the_document(capsys: Capture) -> None:
    words = ["plan", "llama-3-8b", "--set", "run.tokens=1e12", "--set", "costs.grid=germany"]
    assert main(words) == 0
    out = capsys.readouterr().out
    for said in (
        "Cost of the token budget",
        "carbon",
        "costs.grid",
        "at $3.97 a GPU-hour",
        "costs.pue = 1.3",
    ):
        assert (said in out) == (said != "costs.grid")  # stated, not assumed
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    cost = next(item for item in document["lines"] if item["name"] == "cost")
    carbon = next(item for item in cost["children"] if item["name"] == "carbon")
    assert carbon["inputs"]["carbon_kg_per_kwh"]["value"] == 0.381
    assert "Ember" in carbon["inputs"]["carbon_kg_per_kwh"]["source"]


@pytest.mark.parametrize("text", ["costs.pue=0.9", "costs.years=-1", "costs.busy_share=2", "costs.tariff=1"])
def test_wrong_keys_are_one_line_and_exit_2(text: str, capsys: Capture) -> None:
    assert main(["plan", "llama-3-8b", "--set", text]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert text.partition("=")[0] in err
