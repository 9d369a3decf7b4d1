"""What `gpucalc doctor` answers, from its flags: one report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic_core import PydanticCustomError

from gpucalc.catalog import Catalog
from gpucalc.doctor import box as boxes
from gpucalc.doctor import host
from gpucalc.doctor.box import Attached, Box
from gpucalc.doctor.examine import examine
from gpucalc.doctor.finding import Report
from gpucalc.doctor.lint import MAX_TEXT, lint
from gpucalc.doctor.monitor import Monitor, monitor
from gpucalc.errors import CannotMeasure, InputError, UnknownName
from gpucalc.plan.answer import Plan
from gpucalc.spec.server import PSU_GRAMMAR, ServerSpec
from gpucalc.spec.yamlio import load_yaml, read_text

INSTEAD = "--system FILE judges a described server, --lint FILE a launch script"
# Variables of the process that doctor looks at; the rest of the environment is nobody's business.
_LOOKED_AT = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "OMP_NUM_THREADS")
LEAST_HELD = 100 * 2**20  # bytes on a card that are worth a word; an idle driver keeps a few MiB


@dataclass(frozen=True, slots=True)
class Flags:
    """What was asked."""

    job: str | None = None
    system: str | None = None
    psu: str | None = None
    inlet: float | None = None
    monitor: bool = False
    lint: str | None = None
    task: str | None = None
    sets: tuple[str, ...] = ()


def answer(flags: Flags, catalog: Catalog, attached: Callable[[], Attached]) -> Report | Monitor:
    """The report, or the commands to run beside a job. Raises InputError, CannotMeasure."""
    if flags.lint is not None:
        if flags != Flags(lint=flags.lint):
            raise InputError("goes alone", where="--lint", legal="a launch script, without machine or job")
        return lint_file(flags.lint, catalog)
    if flags.job is None and (flags.task is not None or flags.sets):
        raise InputError("goes with a job", where="--task or --set", legal="gpucalc doctor JOB")
    box = server(flags.system, catalog) if flags.system is not None else this_machine(attached, catalog)
    box = with_flags(box, psu=flags.psu, inlet=flags.inlet)
    if flags.monitor:
        if not box.nvidia:
            raise InputError("knows NVIDIA cards alone", where="--monitor", given=box.cards[0].name)
        return monitor(box, catalog)
    plan = None
    if flags.job is not None:
        plan = plan_on(flags.job, box, catalog, task=flags.task, sets=flags.sets)
    return examine(box, catalog, plan)


def lint_file(file: str, catalog: Catalog) -> Report:
    """The findings in a file, or in what is piped in where its name is `-`."""
    if file != "-":
        return lint(read_text(file, max_bytes=MAX_TEXT), catalog, where=file)
    raw = sys.stdin.buffer.read(MAX_TEXT + 1)
    if len(raw) > MAX_TEXT:
        raise InputError("is too large to be a script", where="standard input", legal=f"{MAX_TEXT} bytes")
    if b"\0" in raw:
        raise InputError("is not text", where="standard input")
    return lint(raw.decode("utf-8", "replace"), catalog, where="standard input")


def server(name: str, catalog: Catalog) -> Box:
    """The machine of a description's file, or of a system of the catalogue. Raises InputError."""
    if Path(name).exists() or "/" in name or name.endswith((".yaml", ".yml")):
        described = ServerSpec.read(load_yaml(name).data, where=name)
        return boxes.described(described, catalog, where=name)
    try:
        catalog.find("systems", name)
    except UnknownName as error:
        raise UnknownName(
            "neither a file nor a system of the catalogue", where="--system", given=name, near=error.near
        ) from None
    return boxes.described(ServerSpec(system=name), catalog, where=name)


def this_machine(found: Callable[[], Attached], catalog: Catalog) -> Box:
    """The machine at hand. Raises CannotMeasure without a GPU, saying what can still be done."""
    try:
        record = found()
    except CannotMeasure as error:
        problem = str(error).partition("; `gpucalc probe")[0]
        raise CannotMeasure(f"{problem}; {INSTEAD}") from None
    environment = {name: value for name, value in os.environ.items() if name.startswith(_LOOKED_AT)}
    return boxes.attached(record, catalog, environment=environment, host=host.facts())


def with_flags(box: Box, *, psu: str | None, inlet: float | None) -> Box:
    """The machine with what flags say of it."""
    if psu is not None:
        try:
            box = replace(box, supply=boxes.supply(psu))
        except PydanticCustomError as error:
            problem = str((error.context or {}).get("problem", "not a power supply"))
            raise InputError(problem, where="--psu", given=psu, legal=PSU_GRAMMAR) from None
    if inlet is not None:
        if not -20 <= inlet <= 80:
            raise InputError("is no intake temperature in C", where="--inlet", given=inlet, legal="-20 to 80")
        box = replace(box, inlet_c=inlet)
    return box


def plan_on(job: str, box: Box, catalog: Catalog, *, task: str | None, sets: Sequence[str]) -> Plan:
    """The job planned on the machine's cards. Raises InputError."""
    from gpucalc.jobs import resolve
    from gpucalc.planner import plan_job
    from gpucalc.spec.train_run import TrainRun
    from gpucalc.units import GB, GIB

    unknown = [card.name for card in box.cards if card.spec is None]
    if unknown:
        raise InputError("has cards the catalogue does not know", where=box.subject, given=unknown[0])
    names = [card.spec.id for card in box.cards if card.spec is not None]
    fleet = "+".join(f"{names.count(name)}x{name}" for name in dict.fromkeys(names))
    found = resolve(job, catalog, gpus=fleet, task=task, sets=sets)
    told, known = list(sets), box.host_ram_bytes
    if isinstance(found.run, TrainRun) and found.run.host_ram_gb is None and known is not None:
        # The plan's own host would be that of a reference server of these cards.
        told.append(f"run.host_ram_gb={known / GB:g}")
    held = max((card.in_use_bytes or 0.0 for card in box.cards), default=0.0)
    if held >= LEAST_HELD and found.run.memory_in_use_gib is None:
        told.append(f"run.memory_in_use_gib={held / GIB:.2f}")
    if len(told) > len(sets):
        found = resolve(job, catalog, gpus=fleet, task=task, sets=told)
    return plan_job(found, catalog, advice=False)
