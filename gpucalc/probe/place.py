"""Where a process stands among the ranks: what torchrun, srun, mpirun, Ray or Kubernetes tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpucalc.errors import InputError

# rank, ranks, rank on this node; ranks on this node and nodes, where the starter tells them. torchrun's
# names are also those of Kubernetes' training operator, whose pods are ranks, and of Ray. Slurm's are those
# of a step: a batch script has a rank and tasks too, and is one process. An indexed Kubernetes job tells a
# pod its place alone: the rest is the manifest's.
_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_STEP_NUM_NODES"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "",
    ),
    ("JOB_COMPLETION_INDEX", "WORLD_SIZE", "", "", ""),
)
_PORTS = 10_000  # Slurm job numbers are spread over so many ports, from 20000 up


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of a program somebody else started. `rendezvous` is a torch init method."""

    rank: int
    ranks: int
    local_rank: int
    rendezvous: str
    nodes: int | None  # None where the starter does not say


def place(environment: Mapping[str, str]) -> Place | None:
    """This process among its ranks, None when nobody started several.

    Raises InputError for numbers that are none, and when the first node's address is not known.
    """
    for names in _NAMES:
        if not all(name in environment for name in names[:2]):
            continue
        rank, ranks, local, each, nodes = (_number(environment, name) for name in names)
        if ranks < 2:
            continue
        if rank >= ranks:
            raise InputError(f"is not below {names[1]}={ranks}", where=names[0], given=rank)
        told = nodes or (-(-ranks // each) if each else None)
        return Place(rank, ranks, local, _rendezvous(environment), told)
    return None


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0")
    if not (text.isascii() and text.isdigit()):
        raise InputError("is not a rank or a number of ranks", where=name, given=text)
    return int(text)


def _rendezvous(environment: Mapping[str, str]) -> str:
    if environment.get("MASTER_ADDR") and environment.get("MASTER_PORT"):
        return "env://"  # torchrun keeps the store itself, and torch knows how to find it
    address = environment.get("MASTER_ADDR") or _first_node(environment.get("SLURM_STEP_NODELIST", ""))
    if not address:
        raise InputError("is not set: the ranks do not know where to meet", where="MASTER_ADDR")
    port = environment.get("MASTER_PORT") or str(20_000 + _number(environment, "SLURM_JOB_ID") % _PORTS)
    host = f"[{address}]" if ":" in address else address
    return f"tcp://{host}:{port}"


def _first_node(nodes: str) -> str:
    """gpu01 of Slurm's gpu[01-04,07],login."""
    stem, bracket, rest = nodes.partition("[")
    if not bracket or "," in stem:
        return nodes.split(",")[0]
    return stem + rest.partition("]")[0].replace("-", ",").split(",")[0]
