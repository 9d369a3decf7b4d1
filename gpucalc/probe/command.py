"""What `gpucalc probe` does, from its flags to a calibration file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.errors import CannotMeasure, GpucalcError, InputError, UnknownName
from gpucalc.probe import overlay
from gpucalc.probe.inventory import Card, Inventory, inventory
from gpucalc.probe.launch import Outcome, launch
from gpucalc.probe.nvml import INSTEAD, library
from gpucalc.probe.place import Place, place
from gpucalc.probe.worker import Config, points
from gpucalc.spec.calibration import CalibrationSpec, MeasuredMachine
from gpucalc.spec.hardware import CollectiveSpec

TASKS = ("matmul", "copy", "comm")
DEVICES = ("cuda", "cpu")
CPU_RANKS = 2
MOST_RANKS = 64
SHORTEST_S, LONGEST_S = 10.0, 3600.0  # less would take the longest single step for a rank that stopped
Told = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Options:
    """The flags. Raises InputError for what cannot be measured anywhere."""

    tasks: tuple[str, ...] = TASKS
    device: str = "cuda"
    quick: bool = False
    ranks: int | None = None
    timeout_s: float = 30.0
    output: Path | None = None

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise UnknownName("unknown device", where="--device", given=self.device, legal=DEVICES)
        if self.ranks is not None and not 1 <= self.ranks <= MOST_RANKS:
            legal = f"1 to {MOST_RANKS}"
            raise InputError("is no number of ranks here", where="--ranks", given=self.ranks, legal=legal)
        if not SHORTEST_S <= self.timeout_s <= LONGEST_S:
            legal = f"{SHORTEST_S:g} to {LONGEST_S:g} seconds"
            raise InputError("is no time to wait", where="--timeout", given=self.timeout_s, legal=legal)
        if self.output is not None and not self.output.parent.is_dir():
            raise InputError("is in no folder", where="--output", given=str(self.output))


@dataclass(frozen=True, slots=True)
class Result:
    """A calibration and its file; `failure` is what ended the measurement early."""

    calibration: CalibrationSpec
    path: Path
    failure: str | None


def attached(catalog: Catalog) -> Inventory:
    """The cards of this machine. Raises CannotMeasure without driver or GPU."""
    return inventory(library(), catalog)


def measure(
    options: Options,
    catalog: Catalog,
    *,
    told: Told = lambda _: None,
    environment: Mapping[str, str] | None = None,
) -> Result | None:
    """Measure, fit, and write the file. None on a rank that is not the first of a program of several.

    Raises CannotMeasure without the device or torch; a measurement that ends early is a Result.
    """
    where = place(os.environ if environment is None else environment) if "comm" in options.tasks else None
    cards = attached(catalog) if options.device == "cuda" else None
    if cards is not None and not cards.visible:
        raise CannotMeasure(f"{'; '.join(cards.notes) or 'no GPU is visible'}; {INSTEAD}")
    if find_spec("torch") is None:
        raise CannotMeasure("torch is missing: pip install 'gpucalc[probe]'; --inventory and plans need none")
    nodes: int | None = 1
    if where is None:
        ranks = _ranks(options, cards)
        outcome = _started_here(options, ranks, told)
    else:
        ranks, nodes = where.ranks, where.nodes
        outcome = _started_elsewhere(options, where, told)
        if where.rank:
            if outcome.failure:
                raise CannotMeasure(outcome.failure)
            return None
    software = next((point for point in outcome.points if point["kind"] == "software"), None)
    if software is None:
        raise CannotMeasure(outcome.failure or "nothing was measured")
    card = _card(cards, software["name"]) if cards else None
    machine = MeasuredMachine(
        device="cuda" if cards else "cpu",
        name=software["name"],
        gpu=card.entry if card else None,
        gpus=ranks if cards else 0,
        driver=cards.driver.value if cards else None,
        cuda=software.get("cuda"),
        torch=software["torch"],
        nccl=software.get("nccl"),
        backend=software["backend"],
    )
    link = _link(catalog, machine.gpu, ranks) if nodes == 1 else None
    found = overlay.calibration(
        [point for point in outcome.points if point["kind"] != "software"],
        machine,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        nodes=nodes,
        busy=software["busy"],
        incomplete=outcome.failure,
        ramp_of=lambda op: _ramp(link, op),
    )
    path = options.output or _fresh_name(machine)
    path.write_text(found.yaml(), encoding="utf-8")
    return Result(found, path, outcome.failure)


def _card(cards: Inventory, name: str) -> Card:
    """The card torch calls its first: CUDA may number the cards in another order than the driver."""
    seen = [cards.cards[index] for index in cards.visible]
    return next((card for card in seen if card.value("name") == name), seen[0])


def _ranks(options: Options, cards: Inventory | None) -> int:
    """How many processes exchange: all visible GPUs, or two on a CPU."""
    most = len(cards.visible) if cards else MOST_RANKS
    ranks = options.ranks or (most if cards else CPU_RANKS)
    if ranks > most:
        raise InputError("is more than the visible GPUs", where="--ranks", given=ranks, legal=f"1 to {most}")
    if ranks == 1 and options.tasks == ("comm",):
        raise CannotMeasure("collectives need two GPUs, one is visible; --matmul and --copy need one")
    return ranks


def _started_here(options: Options, ranks: int, told: Told) -> Outcome:
    """The single-device tasks in one process, then the collectives in one per rank."""
    alone = tuple(task for task in options.tasks if task != "comm")
    found: list[dict[str, Any]] = []
    failures: list[str] = []
    for tasks, count in ((alone, 1), (("comm",), ranks)):
        if tasks and set(tasks) <= set(options.tasks) and (count > 1 or tasks != ("comm",)):
            config = Config(options.device, tasks, options.quick, count, "", options.timeout_s, "")
            outcome = launch(config, on_point=told)
            found += outcome.points
            failures += [outcome.failure] if outcome.failure else []
    return Outcome(tuple(found), "; ".join(failures) or None)


def _started_elsewhere(options: Options, where: Place, told: Told) -> Outcome:
    """This rank's part of a program torchrun, srun or mpirun started: collectives first, all together."""
    found: list[dict[str, Any]] = []

    def config(*tasks: str) -> Config:
        return Config(
            options.device, tasks, options.quick, where.ranks, where.rendezvous, options.timeout_s, ""
        )

    def everything() -> Iterator[dict[str, Any]]:
        yield from points(config("comm"), where.rank, where.local_rank)
        alone = [task for task in options.tasks if task != "comm"]
        if where.rank == 0 and alone:
            yield from points(config(*alone), where.rank, where.local_rank)

    try:
        for point in everything():
            found.append(point)
            if where.rank == 0:
                told(point)
    except GpucalcError:
        raise
    except Exception as error:  # a lost peer, whatever the backend calls it
        last = f" after {found[-1].get('op', 'the start')}" if found else ""
        words = str(error).split("\n")[0]
        return Outcome(tuple(found), f"rank {where.rank} of {where.ranks} lost the others{last}: {words}")
    return Outcome(tuple(found), None)


def _link(catalog: Catalog, gpu: str | None, ranks: int) -> CollectiveSpec | None:
    """The catalogue's links between so many of these GPUs in one host."""
    if gpu is None or ranks < 2:
        return None
    try:
        return catalog.cluster([(None, ranks, gpu)]).intra
    except GpucalcError:  # more GPUs than the catalogue's hosts hold: the ramp is then fitted
        return None


def _ramp(link: CollectiveSpec | None, op: str) -> float | None:
    if link is None or (op != "all_reduce" and op not in link.ops):
        return None
    return link.ramp.si if op == "all_reduce" else link.ops[op].ramp.si


def _fresh_name(machine: MeasuredMachine) -> Path:
    """A name no earlier measurement has."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path(f"calibration-{machine.gpu or machine.device}-{stamp}.yaml")
