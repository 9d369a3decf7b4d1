"""Published collectives beside their estimates: nccl-tests curves, and single figures of reports.

A row is one operation over one group of GPUs, at one or many message sizes. It names its GPU, ranks and
nodes, the catalogue's server where one is known, and the collective class or network where the run's
differ from the server's. The estimate takes the path of a plan: cluster, links, formula; a run that
forced an algorithm is held against that algorithm. What is compared is bus bandwidth; a row stated as a
time is turned into it, so that latencies count too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.errors import InputError
from gpucalc.formulas import comm
from gpucalc.measured import Row, Skip, is_number, on_stated_network
from gpucalc.plan.algorithms import all_reduce_by_algorithm
from gpucalc.plan.links import Links
from gpucalc.spec.fleet import FleetPart
from gpucalc.spec.hardware import Cluster
from gpucalc.units import GB

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "send_recv")
LARGE_BYTES = 10**6  # what the summaries split at
LARGE, SMALL = ">= 1 MB", "< 1 MB"
# Host time of the measuring program, which no plan pays: training queues collectives ahead of the GPU.
# A timed torch.distributed call takes 25 us beyond nccl-tests (from 32 KB on A100, H200 and B200 alike).
SETUPS = {"torch": 25e-6}
# A peak or a latency published without its size: where sweeps commonly end and begin.
_SWEEP_END_BYTES = 8 * 2**30
_SWEEP_START_BYTES = 8
_KEYS = frozenset(
    {
        *("id", "group", "op", "gpu", "ranks", "nodes", "system", "intra", "network", "algorithm", "setup"),
        *("hardware", "software", "unhealthy", "points", "peak_busbw_gb_s", "latency_us", "source", "notes"),
    }
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Bus bandwidth of one message size, measured and estimated, in GB/s."""

    id: str
    measured: float
    estimated: float
    size: str
    op: str
    link: str  # the collective class that decides
    gpu: str
    arch: str
    software: str
    meter: str
    notes: tuple[str, ...] = ()


def is_collective(row: Row) -> bool:
    """Whether a row measured a collective, not a training run."""
    return "op" in row.data


class CollectivePlanner:
    """Estimates rows; clusters are built once per distinct machine."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._clusters: dict[str, Cluster] = {}

    def compare(self, row: Row) -> list[Comparison] | Skip:
        """Every size of a row beside its estimate, or why it is left out. Raises InputError."""
        unknown = sorted(set(row.data) - _KEYS)
        if unknown:
            raise InputError("unknown key", where=row.where, key=unknown[0], legal=sorted(_KEYS))
        reason = _unusable(row.data)
        if reason is not None:
            return Skip(reason)
        try:
            cluster = self._cluster(row.data)
            return [self._one(row, cluster, reading) for reading in _readings(row)]
        except InputError as error:
            return Skip(f"not estimated: {error}")

    def _one(self, row: Row, cluster: Cluster, reading: _Reading) -> Comparison:
        data = row.data
        op, ranks = str(data["op"]), int(data["ranks"])
        time_s = self._time_s(cluster, data, reading.bytes) + setup_s(data.get("setup"))
        moved = reading.bytes * bus_factor(op, ranks)
        measured = reading.busbw_gb_s
        if measured is None:
            assert reading.time_us is not None
            measured = moved / (reading.time_us * 1e-6) / GB
        pool = cluster.pools[0]
        inter = cluster.inter if ranks > Links(cluster).island else None
        return Comparison(
            id=f"{row.id}/{reading.name}",
            measured=measured,
            estimated=moved / time_s / GB,
            size=LARGE if reading.bytes >= LARGE_BYTES else SMALL,
            op=op,
            link=(inter or cluster.intra).id,
            gpu=pool.gpu.id,
            arch=pool.gpu.arch,
            software=str(data.get("software") or "not stated"),
            meter=reading.meter,
            notes=reading.notes + _said_of(data.get("setup")),
        )

    def _time_s(self, cluster: Cluster, data: Mapping[str, Any], size: int) -> float:
        op, ranks, algorithm = str(data["op"]), int(data["ranks"]), data.get("algorithm")
        if algorithm is None:
            return estimate_s(cluster, op, size, ranks)
        known = all_reduce_by_algorithm(cluster, size, ranks) if op == "all_reduce" else {}
        if algorithm not in known:
            raise InputError("no such algorithm here", given=algorithm, legal=tuple(known))
        return float(known[algorithm].value)

    def _cluster(self, data: Mapping[str, Any]) -> Cluster:
        key = repr([data.get(name) for name in ("gpu", "ranks", "nodes", "system", "intra", "network")])
        if key not in self._clusters:
            ranks, nodes = int(data["ranks"]), int(data["nodes"])
            if ranks % nodes:
                raise InputError("ranks do not divide over the nodes", given=f"{ranks} over {nodes}")
            part = FleetPart(nodes, ranks // nodes, str(data["gpu"]))
            cluster = self.catalog.cluster([part], data.get("system"))
            self._clusters[key] = self._rewired(cluster, data)
        return self._clusters[key]

    def _rewired(self, cluster: Cluster, data: Mapping[str, Any]) -> Cluster:
        """The cluster with the links the row names in place of the server's."""
        if data.get("intra") is not None:
            intra = self.catalog.collective(str(data["intra"])).on_gpu(cluster.pools[0].gpu)
            cluster = replace(cluster, intra=intra)
        network = data.get("network")
        if network is not None and cluster.inter is not None:
            cards = int(network["cards"])
            kind = self.catalog.collective(str(network["collectives"]))
            cluster = on_stated_network(cluster, kind, cards * network["gbit_per_s"], cards=cards)
        return cluster


def estimate_s(cluster: Cluster, op: str, message_bytes: float, ranks: int) -> float:
    """Seconds of one operation over the first `ranks` GPUs of a cluster, as plans count it."""
    links = Links(cluster)
    if op == "send_recv":
        return float(links.send(op, message_bytes, world=ranks).value)
    if op == "alltoall":
        return float(links.all_to_all(op, message_bytes, ranks=ranks, stride=1).value)
    return float(links.collective(op, op, message_bytes, ranks=ranks, stride=1).value)


def setup_s(setup: str | None) -> float:
    """Host time the measuring program adds to every call."""
    return 0.0 if setup is None else SETUPS[setup]


def _said_of(setup: str | None) -> tuple[str, ...]:
    if setup is None:
        return ()
    return (f"measured through {setup}: {setup_s(setup) * 1e6:g} us of host time are added",)


def bus_factor(op: str, ranks: int) -> float:
    """Bytes over the busiest link per byte of the message, as nccl-tests counts them."""
    if op == "send_recv":
        return 1.0
    factor = comm.all_reduce_bus_factor if op == "all_reduce" else comm.gather_bus_factor
    return float(factor(ranks=ranks))


def _unusable(data: Mapping[str, Any]) -> str | None:
    if data.get("unhealthy"):
        return f"not a healthy machine: {data['unhealthy']}"
    for key in ("gpu", "ranks", "nodes"):
        if data.get(key) is None:
            return f"{key} not stated"
    if data["nodes"] > 1 and data.get("system") is None and data.get("network") is None:
        return "the network between the nodes is not stated"
    if data.get("op") not in OPERATIONS:
        return f"op {data.get('op')!r} is not estimated"
    if data.get("setup") is not None and data["setup"] not in SETUPS:
        return f"setup {data['setup']!r} is not known"
    return None


@dataclass(frozen=True, slots=True)
class _Reading:
    """One figure of a row: its size, and its time or its bus bandwidth."""

    name: str
    bytes: int
    time_us: float | None
    busbw_gb_s: float | None
    meter: str
    notes: tuple[str, ...] = ()


def _readings(row: Row) -> Iterator[_Reading]:
    for point in row.data.get("points") or ():
        size, time = point.get("bytes"), point.get("time_us")
        if not isinstance(size, int) or not (is_number(time) or is_number(point.get("busbw_gb_s"))):
            raise InputError("a point needs bytes and time_us or busbw_gb_s", where=row.where, given=point)
        # Bus bandwidth is printed to a few digits: of small messages the time says more.
        if is_number(time):
            yield _Reading(_shown(size), size, float(time), None, "time")
        else:
            yield _Reading(_shown(size), size, None, float(point["busbw_gb_s"]), "busbw")
    if is_number(row.data.get("peak_busbw_gb_s")):
        said = f"the peak of a sweep: estimated at {_shown(_SWEEP_END_BYTES)}"
        peak = float(row.data["peak_busbw_gb_s"])
        yield _Reading("peak", _SWEEP_END_BYTES, None, peak, "peak busbw", (said,))
    if is_number(row.data.get("latency_us")):
        said = f"the latency of a small message: estimated at {_SWEEP_START_BYTES} bytes"
        latency = float(row.data["latency_us"])
        yield _Reading("latency", _SWEEP_START_BYTES, latency, None, "latency", (said,))


def _shown(size: int) -> str:
    """A message size as nccl-tests users write it: 512M is 512 x 2^20 bytes."""
    for power, letter in ((30, "G"), (20, "M"), (10, "K")):
        if size >= 1 << power:
            return f"{size / (1 << power):g}{letter}"
    return str(size)
