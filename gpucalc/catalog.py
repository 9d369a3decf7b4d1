"""The catalogue: GPUs, systems, kernels, collectives, prices and models, one file each, by name.

Roots are searched in order and the first that has the file wins: `--catalog`, `$GPUCALC_CATALOG`, the
user's folder, the shipped catalogue.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from gpucalc.catalog_entries import Entries
from gpucalc.catalog_machines import machine
from gpucalc.errors import InputError, UnknownName, nearest
from gpucalc.spec.costs import NetworkKeys
from gpucalc.spec.fleet import FleetPart, FleetSpec
from gpucalc.spec.hardware import Cluster

ENVIRONMENT = "GPUCALC_CATALOG"
MOST_NAMED = 40  # values that an error lists where it can say which was meant

T = TypeVar("T")


class Catalog(Entries):
    """Catalogue folders, their entries, and the machines these make up."""

    def cluster(
        self,
        fleet: FleetSpec | Iterable[FleetPart | tuple[int | None, int, str]],
        system: str | None = None,
        *,
        network: NetworkKeys | None = None,
    ) -> Cluster:
        """The machine a fleet is, with every figure resolved and every guess said.

        `fleet` is a parsed fleet, or its parts (as tuples: nodes or None, count, GPU name).
        `system` names the server for a fleet of one GPU kind; `network` says what joins the nodes.
        """
        return machine(self, fleet, system, network=network)


def roots(
    catalog: str | Path | None = None, environment: Mapping[str, str] | None = None
) -> tuple[Path, ...]:
    """The catalogue folders in lookup order. `catalog` is the `--catalog` flag.

    A folder named by flag or variable must exist; the user's own folder need not.
    """
    env = os.environ if environment is None else environment
    found: list[Path] = []
    for named, where in ((catalog, "--catalog"), (env.get(ENVIRONMENT) or None, f"${ENVIRONMENT}")):
        if named is not None:
            path = Path(named)
            if not path.is_dir():
                raise InputError("no such catalogue folder", where=where, given=str(named))
            found.append(path)
    home = env.get("XDG_CONFIG_HOME") or None
    if home is None and env.get("HOME"):
        home = os.path.join(env["HOME"], ".config")
    if home is not None and (Path(home) / "gpucalc").is_dir():
        found.append(Path(home) / "gpucalc")
    found.append(shipped())
    return tuple(found)


def shipped() -> Path:
    """The catalogue that came with the program: inside the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "_catalogs"
    return inside if inside.is_dir() else package.parent / "catalogs"


def open_catalog(catalog: str | Path | None = None) -> Catalog:
    """The catalogue over the folders `roots` finds."""
    return Catalog(roots(catalog))


def entries_with(entries: Iterable[T], flag: str, wanted: str | None, of: Callable[[T], str]) -> list[T]:
    """The entries with that value; a value no entry has is an error, not an empty list."""
    entries = list(entries)
    if wanted is None:
        return entries
    kept = [entry for entry in entries if of(entry).casefold() == wanted.casefold()]
    if not kept:
        legal = sorted({of(entry) for entry in entries})
        near = nearest(wanted, legal)
        said = legal if len(legal) <= MOST_NAMED or not near else f"one of {len(legal)} values"
        raise UnknownName("no entry has this value", where=flag, given=wanted, legal=said, near=near)
    return kept
