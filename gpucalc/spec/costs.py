"""What a job may say of money, failures and the network, and what the catalogue assumes where it does not."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gpucalc.spec.base import Spec
from gpucalc.spec.figure import Figure

Share = Annotated[float, Field(gt=0, le=1)]
Above = Annotated[float, Field(gt=0, le=1e12)]


class CostKeys(Spec):
    """The `costs:` of a job; what is not said comes from the catalogue and is listed as assumed."""

    grid: str | None = Field(default=None, description="whose electricity: a grid of the catalogue")
    usd_per_kwh: Annotated[float, Field(ge=0, le=1e3)] | None = Field(
        default=None, description="price of electricity"
    )
    carbon_kg_per_kwh: Annotated[float, Field(ge=0, le=10)] | None = Field(
        default=None, description="carbon dioxide of a kWh"
    )
    pue: Annotated[float, Field(ge=1, le=10)] | None = Field(
        default=None, description="power of the building over that of the machines"
    )
    power_utilisation: Annotated[float, Field(gt=0, le=1.5)] | None = Field(
        default=None, description="power of the GPUs over their limit"
    )
    host_power_share: Annotated[float, Field(ge=0, le=10)] | None = Field(
        default=None, description="power of hosts, fans and network over the GPUs' limits"
    )
    usd_per_gpu_hour: Above | None = Field(default=None, description="rent; unset: published offers")
    usd_per_gpu: Above | None = Field(
        default=None, description="price to buy, with its part of server and network"
    )
    years: Above | None = Field(default=None, description="years a bought machine is used")
    busy_share: Share | None = Field(default=None, description="share of those years it works")


class ReliabilityKeys(Spec):
    """The `reliability:` of a job."""

    mtbf_gpu_hours: Above | None = Field(
        default=None, description="GPU-hours between interruptions; unset: those of a published run"
    )
    storage_gb_per_s: Above | None = Field(
        default=None, description="rate at which all ranks together write a checkpoint"
    )
    blocking_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="share of a checkpoint's write for which training stands still"
    )
    checkpoint_steps: Annotated[int, Field(ge=1, le=10**9)] | None = Field(
        default=None, description="steps between checkpoints; unset: the optimum"
    )
    restart_s: Annotated[float, Field(ge=0, le=1e9)] | None = Field(
        default=None, description="from an interruption until training goes on"
    )
    hardware_share: Share | None = Field(
        default=None, description="share of interruptions that take a node away"
    )
    repair_h: Above | None = Field(default=None, description="hours until that node is back or replaced")
    spare_confidence: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="share of the time in which the spare nodes shall suffice"
    )


class NetworkKeys(Spec):
    """The `network:` of a job: what joins its nodes, or that unlike cards share one host."""

    one_host: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="cards of several kinds sit in one host, joined by its PCIe"
    )

    oversubscription: Annotated[float, Field(ge=1, le=1000)] | None = Field(
        default=None, description="bandwidth under the top of the tree over that across it"
    )
    pod_gpus: Annotated[int, Field(ge=1, le=2**20)] | None = Field(
        default=None, description="GPUs that reach each other at full rate, without crossing the top"
    )


class CostDefaults(Spec):
    """What running and owning GPUs takes: catalogs/costs/money.yaml."""

    id: str
    name: str
    grid: str
    pue: Figure
    power_utilisation: Figure
    host_power_share: Figure
    years: Figure
    busy_share: Figure


class GridSpec(Spec):
    """Electricity of one place."""

    id: str
    name: str
    aliases: tuple[str, ...] = ()
    carbon_kg_per_kwh: Figure | None = None
    usd_per_kwh: Figure | None = None


class ReliabilityDefaults(Spec):
    """How runs fail and recover: catalogs/costs/failures.yaml."""

    id: str
    name: str
    published_run: str  # whose rate is taken
    storage_per_gpu: Figure
    storage_most: Figure
    blocking_share: Figure
    restart: Figure
    hardware_share: Figure
    repair: Figure
    spare_confidence: Figure


class PublishedRun(Spec):
    """How often a long run was interrupted."""

    id: str
    name: str
    hardware: str
    gpus: Figure
    hours: Figure
    interruptions: Figure
    goodput_at_least: Figure | None = None
    counted: str  # what an interruption is there
