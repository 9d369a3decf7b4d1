"""Which fleets a question of size is asked over: GPU kinds and systems of the catalogue, or a user's own.

A cloud instance is taken whole, so its fleets are multiples of it; other servers are filled with 1, 2,
4, ... GPUs and then taken by whole nodes. The sizes of a kind are a ladder of doublings cut off at what
there is: raising a limit only adds fleets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpucalc.catalog import Catalog, entries_with
from gpucalc.errors import InputError, UnknownName
from gpucalc.line import Kind as LineKind
from gpucalc.line import Line
from gpucalc.spec.available import Available
from gpucalc.spec.costs import NetworkKeys
from gpucalc.spec.fleet import MAX_GPUS, FleetPart
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.system import SystemSpec
from gpucalc.spec.yamlio import load_yaml

MOST_GPUS = 64  # of one fleet, where nobody states a limit


@dataclass(frozen=True, slots=True)
class Kind:
    """GPUs of one kind in one kind of server, and how many can be had."""

    gpu: GpuSpec
    system: str | None  # None: the GPU's default server
    unit: int  # GPUs taken at a time
    per_node: int | None  # GPUs under one operating system; None: whatever the catalogue assumes
    most: int
    usd_per_gpu_hour: float | None = None  # the user's own
    rented: bool = False  # costs what its provider asks, not what other providers do
    own: bool = False  # stands in the user's own file

    @property
    def counts(self) -> tuple[int, ...]:
        """The sizes looked at, ascending."""
        found: list[int] = []
        count = self.unit
        while count <= self.most:
            if self.per_node is not None and count > self.per_node and count % self.per_node:
                count = self.per_node * -(-count // self.per_node)  # past a node only whole ones
                continue
            found.append(count)
            count *= 2
        return tuple(found)

    @property
    def card(self) -> str:
        """The card that fleets of this kind are of."""
        return self.gpu.id

    def fleet(self, count: int) -> str:
        """The words that plan so many."""
        return f"{count}x{self.gpu.id}"

    def cards(self, count: int) -> str:
        """The same for a reader."""
        return f"{count} x {self.gpu.id}"

    def cluster(self, catalog: Catalog, count: int, network: NetworkKeys | None = None) -> Cluster:
        """The machine so many are, in the job's network."""
        found = catalog.cluster([FleetPart(None, count, self.gpu.id)], self.system, network=network)
        if self.rented and (found.system is None or found.system.price is None):
            return replace(found, price_per_gpu_hour=None)
        if self.usd_per_gpu_hour is None:
            return found
        own = Line(
            "price_per_gpu_hour", self.usd_per_gpu_hour, "USD/h", LineKind.EXACT, source="the fleet file"
        )
        return replace(found, price_per_gpu_hour=own)


@dataclass(frozen=True, slots=True)
class Joined:
    """Unlike cards of a user's own taken together: so many of each kind, in its default server."""

    parts: tuple[tuple[Kind, int], ...]
    system: None = None

    @property
    def gpus(self) -> int:
        """All of them."""
        return sum(count for _, count in self.parts)

    @property
    def whole(self) -> bool:
        """Whether these are the largest fleets of both kinds."""
        return all(count == kind.counts[-1] for kind, count in self.parts)

    @property
    def card(self) -> str:
        """The cards that such fleets are of."""
        return "+".join(kind.card for kind, _ in self.parts)

    def fleet(self, count: int) -> str:
        """The words that plan all of them."""
        assert count == self.gpus
        return "+".join(kind.fleet(number) for kind, number in self.parts)

    def cards(self, count: int) -> str:
        """The same for a reader."""
        assert count == self.gpus
        return " + ".join(kind.cards(number) for kind, number in self.parts)


def kinds(
    catalog: Catalog,
    *,
    vendor: str | None = None,
    cloud: str | None = None,
    arch: str | None = None,
    gpus: Sequence[str] = (),
    fleet: str | Path | None = None,
    most: int = MOST_GPUS,
    unpriced: bool = False,
) -> tuple[Kind, ...]:
    """The kinds the filters leave. Raises InputError for a name nothing has, or when nothing is left.

    Without a cloud: every GPU in its default server, and every system that has a price of its own. GPUs
    nobody offers at a known price are left out unless asked for: by `unpriced`, or by any name.
    """
    if not 1 <= most <= MAX_GPUS:
        raise InputError("must be a number of GPUs", where="--max-gpus", given=most, legal=f"1 to {MAX_GPUS}")
    if fleet is not None:
        if cloud is not None:
            raise InputError("a fleet file says what there is", where="--cloud", legal="--cloud or --fleet")
        found = _own(catalog, fleet, most)
    else:
        found = _catalogue(catalog, cloud, most)
    named = fleet is not None or cloud is not None or vendor is not None or arch is not None or gpus
    wanted = {_gpu(catalog, name) for name in gpus}
    for flag, value, of in (
        ("--vendor", vendor, lambda kind: kind.gpu.vendor),
        ("--arch", arch, lambda kind: kind.gpu.arch),
    ):
        found = entries_with(found, flag, value, of)
    if wanted:
        found = [kind for kind in found if kind.gpu.id in wanted]
    if not (unpriced or named):
        found = [kind for kind in found if kind.system is not None or catalog.prices(kind.gpu) is not None]
    if not found:
        raise InputError("no GPU is left", where="--gpu", given=", ".join(gpus), legal="fewer filters")
    return tuple(found)


def _gpu(catalog: Catalog, name: str) -> str:
    try:
        return catalog.gpu(name)[0].id
    except UnknownName as error:
        raise UnknownName(
            error.problem, where="--gpu", given=name, legal=error.legal, near=error.near
        ) from None


def _catalogue(catalog: Catalog, cloud: str | None, most: int) -> list[Kind]:
    systems = [catalog.system(name) for name in catalog.names("systems")]
    if cloud is not None:
        chosen = entries_with(systems, "--cloud", cloud, lambda system: system.provider)
        return [_rented(catalog, system, most) for system in chosen]
    cards = [catalog.gpu(name)[0] for name in catalog.names("gpus")]
    alone = [Kind(gpu, None, 1, None, most) for gpu in cards]
    return [*alone, *(_rented(catalog, system, most) for system in systems if system.price is not None)]


def _rented(catalog: Catalog, system: SystemSpec, most: int) -> Kind:
    gpu = catalog.gpu(system.gpu)[0]
    return Kind(gpu, system.id, system.gpus, system.gpus_per_node, most, rented=True)


def _own(catalog: Catalog, path: str | Path, most: int) -> list[Kind]:
    where = str(path)
    read = Available.read(load_yaml(path).data, where=where)
    found: list[Kind] = []
    for index, entry in enumerate(read.available):
        part = entry.part
        try:
            gpu, _ = catalog.gpu(part.gpu)
            system = None if entry.system is None else catalog.system(entry.system)
        except UnknownName as error:
            key = f"available.{index}"
            raise UnknownName(
                error.problem, where=where, key=key, given=error.given, legal=error.legal, near=error.near
            ) from None
        limit = min(most, part.total)
        price = entry.usd_per_gpu_hour
        per_node = part.count if part.nodes is not None else None
        if system is None:
            found.append(Kind(gpu, None, 1, per_node, limit, price, own=True))
        elif system.gpu != gpu.id:
            raise InputError(
                f"{system.id} holds {system.gpu}",
                where=where,
                key=f"available.{index}.system",
                given=f"{entry.system} with {gpu.id}",
            )
        else:
            found.append(Kind(gpu, system.id, 1, system.gpus_per_node, limit, price, own=True))
    return found
