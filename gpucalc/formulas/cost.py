"""What a run costs: GPU-hours, days, energy, money, carbon."""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.num import Num, ceil_div

_ARITHMETIC = "Arithmetic"


@formula(unit="s", source=_ARITHMETIC)
def training_s(*, tokens: Num, tokens_per_step: Num, step_s: Num) -> Num:
    """Wall time of whole steps until the token budget is spent."""
    return ceil_div(tokens, tokens_per_step) * step_s


@formula(
    unit="s", source="Goodput: share of wall time that makes progress; restarts and failures take the rest"
)
def wall_clock_s(*, training_s: Num, goodput: Num) -> Num:
    """Wall time with interruptions."""
    return training_s / goodput


@formula(unit="days", source=_ARITHMETIC)
def training_days(*, training_s: Num) -> Num:
    """Wall time in days."""
    return training_s / 86400


@formula(unit="GPU h", source=_ARITHMETIC)
def gpu_hours(*, gpus: Num, training_s: Num) -> Num:
    """GPU-hours of that wall time."""
    return gpus * training_s / 3600


@formula(
    unit="W",
    source="Board power times utilisation, plus the host's share; utilisation 0.8-0.95 in training logs",
)
def fleet_power_w(*, gpus: Num, gpu_power_w: Num, utilisation: Num, host_power_w: Num) -> Num:
    """Power drawn by `gpus` boards at `utilisation` of their limit and the hosts around them."""
    return gpus * gpu_power_w * utilisation + host_power_w


@formula(unit="kWh", source="PUE: facility power over equipment power")
def energy_kwh(*, power_w: Num, training_s: Num, pue: Num) -> Num:
    """Energy taken from the grid."""
    return power_w * training_s * pue / 3.6e6


@formula(unit="USD", source=_ARITHMETIC)
def rental_usd(*, gpu_hours: Num, usd_per_gpu_hour: Num) -> Num:
    """Price of renting the GPUs."""
    return gpu_hours * usd_per_gpu_hour


@formula(unit="USD", source=_ARITHMETIC)
def electricity_usd(*, energy_kwh: Num, usd_per_kwh: Num) -> Num:
    """Price of the energy."""
    return energy_kwh * usd_per_kwh


@formula(unit="kg", source=_ARITHMETIC)
def carbon_kg(*, energy_kwh: Num, carbon_kg_per_kwh: Num) -> Num:
    """Carbon dioxide of the energy at the grid's intensity."""
    return energy_kwh * carbon_kg_per_kwh


@formula(unit="tokens/s", source=_ARITHMETIC)
def lasting_tokens_per_s(*, tokens_per_s: Num, goodput: Num) -> Num:
    """Tokens per second over the whole wall time, what failures take included."""
    return tokens_per_s * goodput


@formula(unit="USD per 1e6 tokens", source=_ARITHMETIC)
def usd_per_million_tokens(*, usd_per_gpu_hour: Num, gpus: Num, tokens_per_s: Num) -> Num:
    """Rental price of a million tokens at that rate."""
    return usd_per_gpu_hour * gpus / 3600 / tokens_per_s * 1e6


@formula(
    unit="W",
    source="Published node maxima over their GPUs' limits: DGX A100 2.03, H100 1.82, GB200 rack 1.46",
)
def host_power_w(*, gpu_power_w: Num, share: Num) -> Num:
    """Power of hosts, fans and network around boards of that power."""
    return gpu_power_w * share


@formula(unit="USD/h", source="Straight-line depreciation over the hours the machine is in use")
def capital_usd_per_gpu_hour(*, usd_per_gpu: Num, years: Num, busy_share: Num) -> Num:
    """Price of a bought GPU, its part of the server included, spread over the hours it works."""
    return usd_per_gpu / (years * 8760 * busy_share)


@formula(unit="USD/h", source=_ARITHMETIC)
def power_usd_per_gpu_hour(*, power_w: Num, gpus: Num, pue: Num, usd_per_kwh: Num) -> Num:
    """Price of an hour's energy of one GPU with its part of the host and the building."""
    return power_w / gpus * pue / 1000 * usd_per_kwh


@formula(unit="USD", source=_ARITHMETIC + "; without staff, space, network and interest")
def owned_usd(*, gpu_hours: Num, capital_usd_per_gpu_hour: Num, power_usd_per_gpu_hour: Num) -> Num:
    """Price of the same hours on machines of one's own: depreciation and power."""
    return gpu_hours * (capital_usd_per_gpu_hour + power_usd_per_gpu_hour)


@formula(unit="fraction", source="Where renting by the hour and owning cost the same")
def break_even_share(
    *, usd_per_gpu: Num, years: Num, usd_per_gpu_hour: Num, power_usd_per_gpu_hour: Num
) -> Num:
    """Share of the years a bought GPU must work to be cheaper than a rented one; above one: never."""
    return usd_per_gpu / (years * 8760) / (usd_per_gpu_hour - power_usd_per_gpu_hour)
