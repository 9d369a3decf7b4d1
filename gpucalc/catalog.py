"""The catalogue: GPUs, systems, kernels, collectives, prices and models, one file each, by name.

A name is a file stem or an alias, case and punctuation free. The file of a stem is opened
directly; aliases are looked for only on a miss, by scanning the first lines of the files of
that kind. Roots are searched in order and the first that has the file wins: `--catalog`,
`$GPUCALC_CATALOG`, the user's folder, the shipped catalogue.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpucalc.errors import InputError, UnknownName, nearest
from gpucalc.line import Kind, Line
from gpucalc.spec.base import Spec
from gpucalc.spec.costs import NetworkKeys
from gpucalc.spec.figure import Figure, FigureKind
from gpucalc.spec.fleet import FleetPart, FleetSpec
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.hardware import Cluster, CollectiveSpec, KernelSpec, Pool
from gpucalc.spec.system import PriceListSpec, SystemSpec
from gpucalc.spec.yamlio import load_yaml, read_text
from gpucalc.units import gb_per_s

if TYPE_CHECKING:
    from gpucalc.spec.model import ModelSpec

ENVIRONMENT = "GPUCALC_CATALOG"
KINDS = (
    "gpus",
    "systems",
    "models",
    "jobs",
    "kernels",
    "collectives",
    "prices",
    "costs",
    "grids",
    "reliability",
    "interconnects",
    "host",
    "engines",
    "measurements",
    "claims",
    "checks",
)
_ONE = {
    "gpus": "GPU",
    "systems": "system",
    "models": "model",
    "jobs": "job",
    "kernels": "kernel rates",
    "collectives": "collective class",
    "prices": "price list",
    "interconnects": "interconnect",
    "grids": "grid",
    "reliability": "published run",
}
# A host nobody described: what a PCIe server usually is. Said in the answer whenever it is used.
_PCIE_HOST_GPUS = 8
_OLDEST_PCIE = 3
# Two tiers of 64-port switches join so many GPUs of one network card each without a bottleneck: 64 x 64 / 2.
POD_GPUS = 2048
PRICE_OF = "price of"  # how an assumption about a published price begins
_HOST_NETWORK_GBIT_S = 100.0

_STEM = re.compile(r"[a-z0-9][a-z0-9._+-]*", re.IGNORECASE)
_VENDOR = re.compile(r"nvidia|geforce|tesla|quadro|amd|instinct|radeon|intel|(?<![a-z])gpu(?![a-z])")
_PUNCTUATION = re.compile(r"(?!(?<=[0-9])\.(?=[0-9]))[^a-z0-9]")
_NAMES = re.compile(r"^(aliases|default_for):[ \t]*(.*)$", re.MULTILINE)
_ABOUT = re.compile(r"^ +about: \[(.*)\]", re.MULTILINE)

S = TypeVar("S", bound=Spec)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Named:
    """A catalogue file found by a name."""

    stem: str
    path: Path
    assumptions: tuple[str, ...] = ()


class Catalog:
    """Catalogue folders in the order they are searched. Each file is read at most once."""

    def __init__(self, roots: Iterable[str | Path]) -> None:
        self.roots = tuple(Path(root) for root in roots)
        self._specs: dict[tuple[str, str], Any] = {}
        self._sources: dict[str, str] | None = None
        self._index: dict[str, dict[str, str]] = {}
        self._aliases: dict[tuple[str, str], Named | None] = {}
        self._declared: dict[Path, dict[str, list[str]]] = {}
        self._files: dict[str, dict[str, Path]] = {}
        self._about: frozenset[str] | None = None

    # -- names --------------------------------------------------------------------------------

    def names(self, kind: str) -> tuple[str, ...]:
        """Every file stem of a kind, over all roots, sorted."""
        return tuple(sorted(self._stems(kind)))

    def path_of(self, kind: str, name: str) -> Path:
        """The file a name stands for. Raises UnknownName."""
        return self.find(kind, name).path

    def claimed(self, entities: Iterable[str]) -> bool:
        """Whether any claim is about one of these entries (`models/ID`); no file is parsed for it."""
        if self._about is None:
            texts = (read_text(path) for path in self._stems("claims").values())
            listed = [part for text in texts for found in _ABOUT.findall(text) for part in found.split(",")]
            self._about = frozenset(part.strip() for part in listed)
        return not self._about.isdisjoint(entities)

    def revision_of(self, kind: str, name: str) -> str:
        """Twelve hex digits that change with the file's content."""
        import hashlib  # only when a report asks

        return hashlib.sha256(self.path_of(kind, name).read_bytes()).hexdigest()[:12]

    def find(self, kind: str, name: str) -> Named:
        """The file a name stands for, and what had to be assumed to choose it. Raises UnknownName."""
        where = _ONE.get(kind, kind)
        if not _is_name(name):
            raise UnknownName(f"not a {where} name", given=name)
        found = self.look_up(kind, name)
        if found is None:
            raise self._unknown(kind, name, where)
        return found

    def look_up(self, kind: str, name: str) -> Named | None:
        """The same, None for a name that stands for no file or fits several."""
        if not _is_name(name):
            return None
        stem = name.strip().casefold()
        if _STEM.fullmatch(stem):
            for root in self.roots:
                path = root / kind / f"{stem}.yaml"
                if path.is_file():
                    return Named(stem, path)
        if (kind, stem) not in self._aliases:  # many jobs name the same few
            self._aliases[kind, stem] = self._by_alias(kind, name)
        return self._aliases[kind, stem]

    def stem_of(self, kind: str, name: str) -> str | None:
        """The file stem of a name or alias, with or without its owner, None where there is none.

        For many names: reads every file once.
        """
        if kind not in self._index:
            index: dict[str, str] = {}
            for stem, path in self._stems(kind).items():
                for alias in self._names_in(path)["aliases"]:
                    index.setdefault(_fold(alias), stem)
                    index.setdefault(_fold(alias.rpartition("/")[2]), stem)
            self._index[kind] = index | {_fold(stem): stem for stem in self._stems(kind)}
        return self._index[kind].get(_fold(name))

    def clashes(self, kind: str, stem: str) -> dict[str, str]:
        """Names of a file that another file of its kind has too, and that file's stem."""
        key = f"names of {kind}"
        if key not in self._index:
            owners: dict[str, str] = {}
            for other, path in self._stems(kind).items():
                for name in _all_names(other, path).values():
                    owners[name] = f"{owners[name]} {other}" if name in owners else other
            self._index[key] = owners
        path = self._stems(kind)[stem]
        shared = {name: self._index[key][folded] for name, folded in _all_names(stem, path).items()}
        return {
            name: next(other for other in owners.split() if other != stem)
            for name, owners in shared.items()
            if " " in owners
        }

    def _by_alias(self, kind: str, name: str) -> Named | None:
        if kind not in self._files:
            self._files[kind] = self._stems(kind)
        stems = self._files[kind]
        wanted = _fold(name)
        folded = {_fold(stem): stem for stem in stems}
        if wanted and wanted in folded:
            return Named(folded[wanted], stems[folded[wanted]])
        for stem, path in stems.items():
            names = self._names_in(path)
            if any(_fold(alias) == wanted for alias in names["aliases"]):
                return Named(stem, path)
            if any(_fold(alias) == wanted for alias in names["default_for"]):
                others = [other for other in sorted(stems) if other != stem and _matches(name, other)]
                also = f" (also known: {', '.join(others)})" if others else ""
                said = f"{name.strip()} is taken as {stem}{also}"
                return Named(stem, path, (said,))
        return None

    def _unknown(self, kind: str, name: str, where: str) -> UnknownName:
        """The error for a name, with the files it fits or comes near to."""
        stems = self._stems(kind)
        matching = tuple(stem for stem in sorted(stems) if _matches(name, stem))
        if len(matching) > 1:
            return UnknownName(f"the {where} name fits several", given=name, legal=matching)
        known = {
            alias: stem
            for stem, path in stems.items()
            for aliases in self._names_in(path).values()
            for alias in aliases
        }
        close = matching or tuple(
            dict.fromkeys(known.get(found, found) for found in nearest(name, [*stems, *known]))
        )
        return UnknownName(f"unknown {where}", given=name, near=close)

    def _names_in(self, path: Path) -> dict[str, list[str]]:
        """The aliases a file declares; each file is looked into once."""
        if path not in self._declared:
            self._declared[path] = _declared_names(path)
        return self._declared[path]

    def _stems(self, kind: str) -> dict[str, Path]:
        if kind not in KINDS:
            raise UnknownName("unknown kind of catalogue file", given=kind, legal=KINDS)
        found: dict[str, Path] = {}
        for root in self.roots:
            try:
                entries = list(os.scandir(root / kind))
            except (FileNotFoundError, NotADirectoryError):
                continue
            for entry in entries:
                stem, dot, suffix = entry.name.rpartition(".")
                if dot and suffix == "yaml" and _STEM.fullmatch(stem):
                    found.setdefault(stem, Path(entry.path))
        return found

    def used(self) -> dict[str, str]:
        """The revision of every file read so far, by kind and stem: what the answers rest on."""
        read = sorted((kind, stem) for kind, stem in self._specs if kind in KINDS)
        return {f"{kind}/{stem}": self.revision_of(kind, stem) for kind, stem in read}

    # -- files --------------------------------------------------------------------------------

    @property
    def sources(self) -> dict[str, str]:
        """Source keys and the public references they stand for; an earlier root's word wins."""
        if self._sources is None:
            merged: dict[str, str] = {}
            for root in reversed(self.roots):
                path = root / "sources.yaml"
                if path.is_file():
                    merged.update(load_yaml(path).data)
            self._sources = merged
        return self._sources

    def load(self, kind: str, name: str, spec: type[S]) -> S:
        """The spec in the file of that name, its figures' sources resolved."""
        return self._load(kind, self.find(kind, name), spec)

    def _load(self, kind: str, found: Named, spec: type[S]) -> S:
        key = (kind, found.stem)
        if key not in self._specs:
            data = load_yaml(found.path).data
            self._specs[key] = spec.read(self._cite(data, str(found.path), ""), where=str(found.path))
        loaded = self._specs[key]
        assert isinstance(loaded, spec)
        return loaded

    def _cite(self, data: Any, where: str, key: str) -> Any:
        """The data with the full references put beside each figure's source keys."""
        if isinstance(data, dict):
            inside = {
                name: self._cite(part, where, f"{key}.{name}" if key else str(name))
                for name, part in data.items()
            }
            if "unit" in data and "value" in data:
                if "references" in data:
                    raise InputError("unknown key", where=where, key=f"{key}.references")
                inside["references"] = self._references(data.get("source"), where, key)
            return inside
        if isinstance(data, list):
            return [self._cite(part, where, f"{key}.{index}") for index, part in enumerate(data)]
        return data

    def _references(self, keys: Any, where: str, key: str) -> list[str]:
        if not isinstance(keys, list) or not keys:
            raise InputError("a figure needs a list of sources", where=where, key=f"{key}.source", given=keys)
        for name in keys:
            if not isinstance(name, str) or name not in self.sources:
                raise UnknownName(
                    "unknown source",
                    where=where,
                    key=f"{key}.source",
                    given=name,
                    near=nearest(str(name), self.sources),
                )
        return [f"{name}: {self.sources[name]}" for name in keys]

    # -- entities -----------------------------------------------------------------------------

    def gpu(self, name: str) -> tuple[GpuSpec, list[str]]:
        """A GPU, and what had to be assumed to choose it."""
        found = self.find("gpus", name)
        return self._load("gpus", found, GpuSpec), list(found.assumptions)

    def system(self, name: str) -> SystemSpec:
        """A server, instance type or rack."""
        return self.load("systems", name, SystemSpec)

    def model(self, name: str) -> ModelSpec:
        """A model architecture."""
        from gpucalc.spec.model import ModelSpec  # the largest spec: only for those who ask

        return self.load("models", name, ModelSpec)

    def collective(self, name: str) -> CollectiveSpec:
        """A collective class."""
        return self.load("collectives", name, CollectiveSpec)

    def kernels_for(self, gpu: GpuSpec) -> KernelSpec:
        """Kernel rates of a GPU; marked as assumed when they were measured on a relative."""
        key = ("kernels of", gpu.id)
        if key not in self._specs:
            spec = self._kernels(gpu)
            self._specs[key] = spec if gpu.id in spec.applies_to else spec.carried_over()
        kernels: KernelSpec = self._specs[key]
        return kernels

    def links_for(self, kind: CollectiveSpec, gpu: GpuSpec) -> CollectiveSpec:
        """The collective class of a host's links as this GPU has them."""
        return kind.on_gpu(gpu)

    def _kernels(self, gpu: GpuSpec) -> KernelSpec:
        for stem in (gpu.id, gpu.kernels, gpu.arch):
            if stem is not None and any((root / "kernels" / f"{stem}.yaml").is_file() for root in self.roots):
                return self.load("kernels", stem, KernelSpec)
        for stem in self.names("kernels"):
            spec = self.load("kernels", stem, KernelSpec)
            if gpu.arch in spec.transfers_to:
                return spec
        raise UnknownName("no kernel rates serve this GPU", given=gpu.id, legal=self.names("kernels"))

    def prices(self, gpu: GpuSpec) -> PriceListSpec | None:
        """What the GPU costs by the hour, or None when no offer is known."""
        if any((root / "prices" / f"{gpu.id}.yaml").is_file() for root in self.roots):
            return self.load("prices", gpu.id, PriceListSpec)
        return None

    # -- clusters -----------------------------------------------------------------------------

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
        given = fleet.parts if isinstance(fleet, FleetSpec) else fleet
        parts = [part if isinstance(part, FleetPart) else FleetPart(*part) for part in given]
        if not parts:
            raise InputError("a fleet needs at least one GPU")
        if system is not None and len(parts) > 1:
            raise InputError(
                "a system can be named for a fleet of one GPU kind only", key="system", given=system
            )
        network = network or NetworkKeys()
        if network.one_host and len(parts) < 2:
            raise InputError("says how unlike cards are joined", key="network.one_host", given=True)
        assumptions: list[str] = []
        built = [self._pool(part, system, assumptions) for part in parts]
        pools = tuple(pool for pool, _ in built)
        hosts = [host for _, host in built]
        if network.one_host:
            return self._one_host(pools, hosts, assumptions)
        nodes = sum(pool.nodes for pool in pools)
        slowest = min(pools, key=lambda pool: _reach(pool))
        nics = [host.nic_per_node for host in hosts]
        nic = min(nics, key=lambda figure: figure.si)
        joining = hosts[nics.index(nic)].inter
        if len(pools) > 1:
            assumptions.append(
                "each GPU kind sits in nodes of its own; they are joined by the slowest of their networks, "
                f"{joining.name} at {gb_per_s(nic.si)} per node"
            )
        islands = sum(math.ceil(pool.count / pool.island) for pool in pools)
        inter = None
        if islands > 1:
            nodes_of_island = slowest.island / slowest.gpus_per_node
            cards = hosts[nics.index(nic)].cards_per_node * nodes_of_island
            per_island = _scaled(nic, nodes_of_island)
            inter = joining.on_network(per_island, slowest.island, slowest.intra, cards=cards)
        one = pools[0] if len(pools) == 1 else None
        return Cluster(
            pools=pools,
            count=sum(pool.count for pool in pools),
            gpus_per_node=min(pool.gpus_per_node for pool in pools),
            nodes=nodes,
            nvlink_domain=min(pool.nvlink_domain for pool in pools),
            intra=slowest.intra,
            inter=inter,
            nic_bandwidth_per_node=nic.line("nic_bandwidth_per_node"),
            host_ram=_smallest([host.host_ram for host in hosts]),
            node_power=hosts[0].power if one else None,
            price_per_gpu_hour=one.price_per_gpu_hour if one else _mean_price(pools),
            system=one.system if one else None,
            assumptions=tuple(dict.fromkeys(assumptions)),
            oversubscription=network.oversubscription or 1.0,
            pod_gpus=network.pod_gpus or POD_GPUS,
        )

    def _one_host(
        self, pools: tuple[Pool, ...], hosts: Sequence[_Host], assumptions: list[str]
    ) -> Cluster:
        """Unlike cards under one operating system: kinds reach each other through the host's memory."""
        generation = min(pool.gpu.pcie_gen or _OLDEST_PCIE for pool in pools)
        intra = self.collective(f"pcie{min(max(generation, 3), 5)}-no-p2p")
        count = sum(pool.count for pool in pools)
        assumptions[:] = [text for text in assumptions if "is assumed to sit in" not in text]
        assumptions.append(f"the GPU kinds share one host and reach each other over {intra.name}")
        return Cluster(
            pools=tuple(replace(pool, nodes=1, gpus_per_node=pool.count) for pool in pools),
            count=count,
            gpus_per_node=count,
            nodes=1,
            nvlink_domain=1,
            intra=intra,
            inter=None,
            nic_bandwidth_per_node=None,
            host_ram=_smallest([host.host_ram for host in hosts]),
            node_power=None,
            price_per_gpu_hour=_mean_price(pools),
            system=None,
            assumptions=tuple(dict.fromkeys(assumptions)),
        )

    def _pool(self, part: FleetPart, system: str | None, assumptions: list[str]) -> tuple[Pool, _Host]:
        nodes_given, count = part.nodes, part.count
        if count < 1 or (nodes_given is not None and nodes_given < 1):
            raise InputError("a fleet needs at least one GPU of each kind", key="gpus", given=str(part))
        gpu, said = self.gpu(part.gpu)
        assumptions += said
        spec = self._kernels(gpu)
        if gpu.id not in spec.applies_to:
            assumptions.append(
                f"kernel rates of {spec.name} are carried over to {gpu.name}, not measured on it"
            )
        host = self._host(gpu, system, count, assumptions)
        total = part.total
        nodes = nodes_given if nodes_given is not None else math.ceil(count / host.gpus_per_node)
        per_node = math.ceil(total / nodes)
        if nodes_given is not None and per_node > host.gpus_per_node:
            raise InputError(
                f"{host.name} has {host.gpus_per_node} GPUs per node",
                key="gpus",
                given=f"{nodes_given}x{count}x{gpu.id}",
                near=(f"{math.ceil(total / host.gpus_per_node)}x{host.gpus_per_node}x{gpu.id}",),
            )
        bridged = gpu.nvlink_kind is not None and "bridge" in gpu.nvlink_kind
        if bridged and host.nvlink_domain == 1 and total > 1:
            assumptions.append(f"no NVLink bridges between the {gpu.name} cards: traffic goes over PCIe")
        pool = Pool(
            gpu=gpu,
            count=total,
            kernels=self.kernels_for(gpu),
            nodes=nodes,
            gpus_per_node=per_node,
            nvlink_domain=min(host.nvlink_domain, total if host.spans_nodes else per_node),
            intra=self.links_for(host.intra, gpu),
            system=host.system,
            price_per_gpu_hour=self._price(gpu, host, assumptions),
        )
        return pool, host

    def _host(self, gpu: GpuSpec, system: str | None, per_node: int, assumptions: list[str]) -> _Host:
        if system is not None:
            found = self.find("systems", system)
            assumptions += found.assumptions
            spec = self._load("systems", found, SystemSpec)
            if spec.gpu != gpu.id:
                raise InputError(
                    f"{spec.id} holds {spec.gpu}",
                    key="system",
                    given=f"{system} with {gpu.id}",
                    legal=[spec.gpu],
                )
            return self._described(spec)
        if gpu.default_systems:
            servers = [self.system(name) for name in gpu.default_systems]
            spec = next((one for one in servers if one.gpus_per_node >= per_node), servers[-1])
            assumptions.append(f"{gpu.name} is assumed to sit in {spec.id} ({spec.intra_node})")
            return self._described(spec)
        return self._undescribed(gpu, assumptions)

    def _described(self, spec: SystemSpec) -> _Host:
        intra = self.collective(spec.intra_collectives)
        share = spec.gpus_per_node / spec.gpus
        nic = spec.nic
        per_node = (
            _scaled(
                nic.bandwidth,
                nic.count * share,
                f"{nic.count} x {nic.kind} in {spec.gpus // spec.gpus_per_node} nodes",
            )
            if nic is not None
            else _HOST_NETWORK
        )
        return _Host(
            name=spec.id,
            system=spec,
            gpus_per_node=spec.gpus_per_node,
            nvlink_domain=spec.nvlink_domain if intra.link != "pcie" else 1,
            intra=intra,
            inter=self.collective(spec.inter_collectives or "ethernet"),
            nic_per_node=per_node,
            cards_per_node=nic.count * share if nic is not None else 1,
            host_ram=_scaled(spec.host_ram, share).line("host_ram") if spec.host_ram else None,
            power=_scaled(spec.max_power, share).line("node_power") if spec.max_power else None,
        )

    def _undescribed(self, gpu: GpuSpec, assumptions: list[str]) -> _Host:
        intra = self.collective(gpu.collectives or "pcie4-no-p2p")
        if intra.link != "pcie":
            per_node = min(gpu.max_nvlink_domain, _PCIE_HOST_GPUS)
        elif gpu.pcie_gen is None or gpu.form_factor == "SoC":  # the chip is the host
            per_node = 1
        else:
            per_node = _PCIE_HOST_GPUS
        assumptions.append(
            f"no server is known for {gpu.name}: {per_node} GPUs per node over {intra.name} and one "
            f"{_HOST_NETWORK_GBIT_S:g} Gbit/s Ethernet card are assumed"
        )
        return _Host(
            name="the assumed host",
            system=None,
            gpus_per_node=per_node,
            nvlink_domain=gpu.max_nvlink_domain if intra.link != "pcie" else 1,
            intra=intra,
            inter=self.collective("ethernet"),
            nic_per_node=_HOST_NETWORK,
            cards_per_node=1,
            host_ram=None,
            power=None,
        )

    def _price(self, gpu: GpuSpec, host: _Host, assumptions: list[str]) -> Line | None:
        if host.system is not None and host.system.price is not None:
            price = host.system.price
            line = price.usd_per_gpu_hour.line("price_per_gpu_hour")
            note = f"{host.system.id}, {price.terms or 'list'}, {price.date}"
            assumptions.append(f"{PRICE_OF} {gpu.name}: {line.value:.2f} USD per GPU hour ({note})")
            return _noted(line, note)
        offers = self.prices(gpu)
        if offers is None:
            return None
        figures = [offer.usd_per_gpu_hour for offer in offers.offers]
        middle = _median([figure.si for figure in figures])
        who = ", ".join(sorted({offer.provider or offer.system or "?" for offer in offers.offers}))
        dates = sorted({offer.date for offer in offers.offers})
        days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        count = f"median of {len(figures)} published offers" if len(figures) > 1 else "one published offer"
        note = f"{count} ({who}; {days})"
        assumptions.append(f"{PRICE_OF} {gpu.name}: {middle:.2f} USD per GPU hour, {note}")
        return Line(
            "price_per_gpu_hour",
            middle,
            "USD/h",
            Kind.ASSUMED,
            source="; ".join({f.cited for f in figures}),
            note=note,
        )


@dataclass(frozen=True, slots=True)
class _Host:
    """Where a pool's GPUs sit: a described system, or an assumed one."""

    name: str
    system: SystemSpec | None
    gpus_per_node: int
    nvlink_domain: int
    intra: CollectiveSpec
    inter: CollectiveSpec
    nic_per_node: Figure
    cards_per_node: float
    host_ram: Line | None
    power: Line | None

    @property
    def spans_nodes(self) -> bool:
        """Whether its NVLink domain reaches past one operating system, as in a rack-scale system."""
        return self.nvlink_domain > self.gpus_per_node


_HOST_NETWORK = Figure.model_construct(
    value=_HOST_NETWORK_GBIT_S / 8,
    unit="GB/s",
    kind=FigureKind.ASSUMED,
    source=("assumption",),
    references=("assumption: one 100 Gbit/s Ethernet card in a host nobody described",),
    note=None,
)


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


def _fold(name: str) -> str:
    """A name without case, punctuation and vendor words: `NVIDIA GeForce RTX 4090` is `rtx4090`.

    A point between digits stays: opt-1.3b is not opt-13b.
    """
    return _PUNCTUATION.sub("", _VENDOR.sub("", name.casefold()))


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name.strip()) and name.isprintable() and len(name) <= 200


def _tokens(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.casefold()))


def _matches(name: str, stem: str) -> bool:
    """Whether the words of a name all occur in a stem: `a100 80gb` in `a100-pcie-80gb`."""
    words = _tokens(name)
    return bool(words) and words <= _tokens(stem)


def _declared_names(path: Path) -> dict[str, list[str]]:
    """The aliases a file declares, without parsing it: both keys are written in flow style."""
    text = read_text(path)
    names: dict[str, list[str]] = {"aliases": [], "default_for": []}
    for key, rest in _NAMES.findall(text):
        rest = rest.partition(" #")[0].strip()
        if rest.startswith("[") and rest.endswith("]"):
            names[key] = [part.strip().strip("'\"") for part in rest[1:-1].split(",") if part.strip()]
        else:  # written some other legal way: let the parser read it
            names[key] = [str(part) for part in load_yaml(path).data.get(key) or ()]
    return names


def _all_names(stem: str, path: Path) -> dict[str, str]:
    """Everything a file may be called, as written and as compared; each once."""
    declared = _declared_names(path)
    names = {_fold(name): name for name in (*declared["aliases"], *declared["default_for"], stem)}
    return {name: folded for folded, name in names.items()}


def _scaled(figure: Figure, factor: float, note: str | None = None) -> Figure:
    if factor == 1:
        return figure
    return figure.model_copy(update={"value": figure.value * factor, "note": note or figure.note})


def _reach(pool: Pool) -> float:
    return pool.intra.terms("all_reduce", max(pool.gpus_per_node, 2)).bus_bytes_per_s


def entries_with(entries: Iterable[T], flag: str, wanted: str | None, of: Callable[[T], str]) -> list[T]:
    """The entries with that value; a value no entry has is an error, not an empty list."""
    entries = list(entries)
    if wanted is None:
        return entries
    kept = [entry for entry in entries if of(entry).casefold() == wanted.casefold()]
    if not kept:
        legal = sorted({of(entry) for entry in entries})
        near = nearest(wanted, legal)
        raise UnknownName("no entry has this value", where=flag, given=wanted, legal=legal, near=near)
    return kept


def _smallest(lines: Sequence[Line | None]) -> Line | None:
    known = [line for line in lines if line is not None]
    return min(known, key=lambda line: line.value) if len(known) == len(lines) else None


def _mean_price(pools: Sequence[Pool]) -> Line | None:
    known = [(pool.price_per_gpu_hour, pool.count) for pool in pools if pool.price_per_gpu_hour is not None]
    if len(known) != len(pools):
        return None
    mean = sum(line.value * count for line, count in known) / sum(count for _, count in known)
    source = "; ".join(dict.fromkeys(line.source or "" for line, _ in known))
    return Line(
        "price_per_gpu_hour", mean, "USD/h", Kind.ASSUMED, source=source, note="mean over the GPU kinds"
    )


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _noted(line: Line, note: str) -> Line:
    return Line(line.name, line.value, line.unit, line.kind, source=line.source, note=note)
