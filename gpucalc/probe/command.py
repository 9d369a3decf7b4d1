"""What `gpucalc probe` does, from its flags to an answer."""

from __future__ import annotations

from gpucalc.catalog import Catalog
from gpucalc.probe.inventory import Inventory, inventory
from gpucalc.probe.nvml import library


def attached(catalog: Catalog) -> Inventory:
    """The cards of this machine. Raises CannotMeasure without driver or GPU."""
    return inventory(library(), catalog)
