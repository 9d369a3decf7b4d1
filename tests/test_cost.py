"""Cost arithmetic by hand."""

from __future__ import annotations

import pytest

from gpucalc.formulas import cost as f


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


def test_host_power_by_hand() -> None:
    assert f.host_power_w(gpu_power_w=700, share=0.5) == 350
