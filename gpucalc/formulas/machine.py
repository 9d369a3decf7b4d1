"""What a machine has left when a supply fails or a port is taken; the rest is in `rules_machine`."""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.num import Num


@formula(unit="W", source="Redundant supplies: the machine has to run with the spare ones gone")
def standing_supply_w(*, supplies: Num, spare: Num, each_w: Num, load_share: Num) -> Num:
    """Power the supplies that stay give, each at that share of its label."""
    return (supplies - spare) * each_w * load_share


@formula(unit="lanes", source="Arithmetic; a network or storage card takes lanes of the same processor")
def lanes_left(*, lanes: Num, gpus: Num, width: Num) -> Num:
    """Lanes of a processor that its cards at that width leave; negative where they do not suffice."""
    return lanes - gpus * width


@formula(
    unit="bytes", source="Weights once, and two checkpoints: the last whole one and the one being written"
)
def training_disk_bytes(*, weight_bytes: Num, checkpoint_bytes: Num) -> Num:
    """Disk a training run needs at least, beside its data."""
    return weight_bytes + 2 * checkpoint_bytes
