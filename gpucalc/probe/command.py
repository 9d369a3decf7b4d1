"""What `gpucalc probe` does, from its flags to a calibration file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.errors import CannotMeasure, ExitCode, GpucalcError, InputError, UnknownName
from gpucalc.probe import overlay, stages
from gpucalc.probe.guard import Guard, leave, unhurried
from gpucalc.probe.inject import Fault
from gpucalc.probe.inventory import Card, Inventory, inventory
from gpucalc.probe.launch import Outcome, failure, launch
from gpucalc.probe.nvml import INSTEAD, library
from gpucalc.probe.place import Place, place
from gpucalc.probe.worker import Config, cpu_name, points
from gpucalc.size_targets import parse_duration
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
    inject: str | None = None

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
        if self.inject is not None:
            if not {"comm", "stages"} & set(self.tasks):
                legal = "with --comm or --stages"
                raise InputError("needs ranks that meet", where="--inject", given=self.inject, legal=legal)
            Fault.parse(self.inject, self.ranks or MOST_RANKS)


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
    where, cards = _at_hand(options, catalog, environment)
    if where is None:
        ranks = _ranks(options, cards)
        outcome = _noticed(options, _started_here(options, ranks, told))
        return _written(options, catalog, cards, ranks, 1, outcome)

    def written(outcome: Outcome) -> Result:
        return _written(options, catalog, cards, where.ranks, where.nodes, outcome)

    def kept(outcome: Outcome) -> str:
        return str(written(outcome).path)

    with unhurried():
        outcome = _noticed(options, _started_elsewhere(options, where, told, kept))
        if where.rank == 0:
            return written(outcome)
    if outcome.failure:
        raise CannotMeasure(outcome.failure)
    return None


def _written(
    options: Options,
    catalog: Catalog,
    cards: Inventory | None,
    ranks: int,
    nodes: int | None,
    outcome: Outcome,
) -> Result:
    """What was measured as a calibration, in its file. Raises CannotMeasure when nothing was."""
    software = next((point for point in outcome.points if point["kind"] == "software"), None)
    if software is None:
        raise CannotMeasure(outcome.failure or "nothing was measured")
    card = _card(cards, software["name"]) if cards else None
    machine = MeasuredMachine(
        device="cuda" if cards else "cpu",
        name=software["name"],
        gpu=card.entry if card and not card.value("mig") else None,  # a part of a card is none of them
        gpus=ranks if cards else 0,
        driver=cards.driver.value if cards else None,
        cuda=software.get("cuda"),
        torch=software["torch"],
        nccl=software.get("nccl"),
        backend=software["backend"],
    )
    link = _link(catalog, machine.gpu, ranks) if nodes == 1 else None
    found = overlay.calibration(
        [point for point in outcome.points if point["kind"] not in ("software", "failure")],
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


def asked(job: str, soak: str, gpus: str | None, sets: Sequence[str] | None) -> stages.Asked:
    """The flags of --stages. Raises InputError."""
    length = 0.0 if soak.strip() == "0" else parse_duration(soak, "--soak")
    return stages.Asked(job, length, gpus, tuple(sets or ()))


def rehearse(
    options: Options,
    asked: stages.Asked,
    catalog: Catalog,
    *,
    told: Told = lambda _: None,
    environment: Mapping[str, str] | None = None,
) -> stages.Tried | None:
    """The stages of a job on this machine, or what their record still lacks. None on a rank beside the first.

    Raises CannotMeasure without the device or torch, InputError for a job that cannot be tried.
    """
    where, cards = _at_hand(options, catalog, environment)
    ranks = where.ranks if where is not None else _ranks(options, cards)
    tried = stages.prepared(asked, catalog, cards, ranks=ranks, nodes=where.nodes if where else 1)
    name = str(cards.cards[cards.visible[0]].entry) if cards else cpu_name()
    head = stages.header(tried, asked, device=options.device, ranks=ranks, card=name)

    def start(config: Config, added: Told, kept: Callable[[Outcome], str]) -> Outcome:
        if where is None:
            return _noticed(options, launch(config, on_point=added))

        def measured(say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
            return points(config, where.rank, where.local_rank, say)

        return _noticed(options, _in_place(measured, where, options, added, kept))

    with unhurried() if where is not None else nullcontext():
        return stages.run(
            asked,
            head,
            options.output or stages.fresh_name(tried.job, options.device),
            start,
            _config(options, ("stages",), ranks, where),
            told=told,
            writes=where is None or where.rank == 0,
        )


def _at_hand(
    options: Options, catalog: Catalog, environment: Mapping[str, str] | None
) -> tuple[Place | None, Inventory | None]:
    """This process among ranks somebody started, and the cards. Raises CannotMeasure."""
    meets = {"comm", "stages"} & set(options.tasks)
    where = place(os.environ if environment is None else environment) if meets else None
    cards = attached(catalog) if options.device == "cuda" else None
    if cards is not None and not cards.visible:
        raise CannotMeasure(f"{'; '.join(cards.notes) or 'no GPU is visible'}; {INSTEAD}")
    if find_spec("torch") is None:
        raise CannotMeasure("torch is missing: pip install 'gpucalc[probe]'; --inventory and plans need none")
    return where, cards


def _config(options: Options, tasks: tuple[str, ...], ranks: int, where: Place | None) -> Config:
    rendezvous = where.rendezvous if where is not None else ""
    return Config(
        options.device, tasks, options.quick, ranks, rendezvous, options.timeout_s, "", options.inject
    )


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
    if options.inject is not None:
        Fault.parse(options.inject, ranks)
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
            config = _config(options, tasks, count, None)
            if "comm" not in tasks:
                config = replace(config, inject=None)
            outcome = launch(config, on_point=told)
            found += outcome.points
            failures += [outcome.failure] if outcome.failure else []
    return Outcome(tuple(found), "; ".join(failures) or None)


Kept = Callable[[Outcome], str]  # writes what there is, and says where


def _started_elsewhere(options: Options, where: Place, told: Told, kept: Kept) -> Outcome:
    """This rank's part of a program torchrun, srun or mpirun started: collectives first, all together."""
    config = _config(options, ("comm",), where.ranks, where)

    def everything(say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        yield from points(config, where.rank, where.local_rank, say)
        alone = tuple(task for task in options.tasks if task != "comm")
        if where.rank == 0 and alone:
            single = replace(config, tasks=alone, inject=None)
            yield from points(single, where.rank, where.local_rank, say)

    return _in_place(everything, where, options, told, kept)


def _in_place(
    measured: Callable[[Callable[[str], None]], Iterator[dict[str, Any]]],
    where: Place,
    options: Options,
    told: Told,
    kept: Kept,
) -> Outcome:
    """One rank's part, in this process. The first rank keeps what came before a failure."""
    found: list[dict[str, Any]] = []

    def give_up(why: str) -> None:
        words = why
        if where.rank == 0:
            with suppress(GpucalcError):
                words = f"{why}; what was measured until then is in {kept(Outcome(tuple(found), why))}"
        leave(words, ExitCode.CANNOT_MEASURE)

    with Guard(where, options.timeout_s, give_up) as guard:
        try:
            for point in measured(guard.say):
                found.append(point)
                if where.rank == 0:
                    told(point)
        except GpucalcError:
            raise
        except Exception as error:  # a lost peer, whatever the backend calls it
            # Libraries begin with where in their source they are, and end with advice.
            words = re.sub(r"^\[\S+:\d+\] ", "", str(error).split("\n")[0]).split(". ")[0]
            named = guard.behind() or f"rank {where.rank} of {where.ranks} lost the others"
            return Outcome(tuple(found), f"{named}; rank {where.rank} during {guard.what}: {words}")
    return Outcome(tuple(found), failure(found))


def _noticed(options: Options, outcome: Outcome) -> Outcome:
    """The outcome; a fault that was made and that nobody noticed is a failure too."""
    if options.inject is None or outcome.failure is not None:
        return outcome
    why = "nothing was noticed until the end; --stages may need a longer --soak"
    return replace(outcome, failure=f"--inject {options.inject}: {why}")


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
