"""From what a user typed for JOB to a job with every default said, and the model it is about.

`jobs_found` says what JOB is, `jobs_model` which model it names, `jobs_changes` what the flags change
and `jobs_defaults` what nobody said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpucalc.errors import InputError, UnknownName, nearest
from gpucalc.jobs_changes import Change, apply_changes, read_change
from gpucalc.jobs_defaults import TASKS, default_framework, default_run, serve_defaults, train_defaults
from gpucalc.jobs_found import Found, find
from gpucalc.jobs_model import draft_of, model_of
from gpucalc.spec.base import keys_of
from gpucalc.spec.defaults import Default
from gpucalc.spec.fleet import GRAMMAR, FleetSpec, parse_fleet
from gpucalc.spec.job import Job
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.train_run import TrainRun

if TYPE_CHECKING:
    from gpucalc.catalog import Catalog
    from gpucalc.importers.words import ImportedJob
    from gpucalc.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class ResolvedJob:
    """A job ready to be planned: nothing that does not depend on the layout is left unset.

    `defaults` are the values nobody stated; `notes` what an importer understood, assumed or
    ignored; `where` and `model_where` say which files or catalogue entries were read.
    """

    name: str
    job: Job
    model: ModelSpec
    defaults: tuple[Default, ...]
    notes: tuple[str, ...]
    where: str
    model_where: str
    draft: ModelSpec | None = None  # the model that drafts for it

    @property
    def fleet(self) -> FleetSpec:
        """The GPUs. Raises InputError when none are named."""
        return self.job.fleet

    @property
    def run(self) -> TrainRun | ServeRun:
        """The run."""
        return self.job.run


def resolve(
    argument: str | Path | Mapping[str, Any],
    catalog: Catalog,
    *,
    gpus: str | None = None,
    task: str | None = None,
    sets: Iterable[str] = (),
    model: str | None = None,
    hub: bool = False,
    need_gpus: bool = True,
) -> ResolvedJob:
    """The job that `argument` and the flags describe. Raises InputError.

    `argument` may be a job's own keys, in place of a file that holds them.
    `gpus`, `model`, `task`, `sets` and `hub` are the flags of those names; `need_gpus=False` lets a
    job without GPUs through (a search over the catalogue brings its own).
    """
    if task is not None and task not in TASKS:
        raise UnknownName("unknown task", where="--task", given=task, legal=TASKS, near=nearest(task, TASKS))
    if gpus is not None:
        parse_fleet(gpus, where="--gpus")
    if isinstance(argument, Mapping):
        found = Found("job", None, dict(argument))
    else:
        found = find(str(argument), catalog, task, alone=gpus is None)
    if hub:
        found = replace(found, hub=True)
    changes = [read_change(text) for text in sets]
    if model is not None:
        if found.bare:
            raise InputError("JOB is a model already", where="--model", given=model, legal="a job")
        found.data["model"] = model
        found = replace(found, flagged=True)
    return _complete(found, catalog, gpus, task, changes, need_gpus)


def resolve_data(
    data: Mapping[str, Any],
    catalog: Catalog,
    *,
    where: str,
    folder: Path | None = None,
    need_gpus: bool = True,
) -> ResolvedJob:
    """The same for a job already parsed (a measured run, a check, a list of jobs)."""
    return _complete(Found(where, folder, dict(data)), catalog, None, None, [], need_gpus)


def _complete(
    found: Found,
    catalog: Catalog,
    gpus: str | None,
    task: str | None,
    changes: Sequence[Change],
    need_gpus: bool,
) -> ResolvedJob:
    data = deepcopy(found.data)
    by_name = isinstance(data.get("model"), str) and not any(change.key == "model" for change in changes)
    of_model = [change for change in changes if by_name and change.key.startswith("model.")]
    apply_changes(data, [change for change in changes if change not in of_model])
    if gpus is not None:
        named = any(change.key == "system" for change in changes)
        if data.get("gpus") != gpus and not named:  # the job's server is that of the job's GPUs
            data.pop("system", None)
        data["gpus"] = gpus
    if any(change.key == "model" for change in changes):
        found = replace(found, flagged=True)
    model, model_where, notes = model_of(data.get("model"), found, catalog, of_model)
    if found.foreign is not None:
        notes = (*_settled(found.foreign, data, changes), *notes)

    fleet = _fleet(data.get("gpus"), found)
    ranks = found.foreign.ranks if found.foreign is not None else None
    if fleet is None and need_gpus:
        for key in data:
            if key not in keys_of(Job):  # it may be `gpus`, mistyped
                line = found.document.line(key) if found.document is not None else None
                where = found.where if line is None else f"{found.where}:{line}"
                near = nearest(str(key), keys_of(Job))
                raise UnknownName("no such key", where=where, key=str(key), legal=keys_of(Job), near=near)
        hint = f"--gpus {ranks}xNAME: it starts {ranks} processes" if ranks else f"--gpus {GRAMMAR}"
        raise InputError("no GPUs given", where=found.where, key="gpus", legal=hint)
    if fleet is not None and ranks is not None and fleet.count != ranks:
        notes = (*notes, f"{found.where} starts {ranks} processes; planned for {fleet.count} GPUs")
    listed: list[Default] = []
    if found.bare or "run" not in data:
        if found.quant is not None and "run" not in data and task in (None, "serve"):
            listed.append(Default("run.task", "serve", "GGUF files are for serving"))
            listed.append(Default("run.framework", "llamacpp", "the engine GGUF files are made for"))
            data["run"] = {"task": "serve", "framework": "llamacpp", "quant": found.quant}
        data["run"] = default_run(data.get("run"), task or "train", fleet, model, listed)
    elif isinstance(data["run"], dict):
        _check_task(data["run"], task)
        if "framework" not in data["run"] and data["run"].get("task") in TASKS:
            data["run"] = default_framework(data["run"], fleet, model, listed)
    job = _read_job(data, found, changes)
    _known_hardware(job, fleet, found, catalog, ["gpus"] if gpus is not None else [], changes)
    run, filled = (
        train_defaults(job.run, model)
        if isinstance(job.run, TrainRun)
        else serve_defaults(job.run, model, found.foreign is not None and found.foreign.engine_length)
    )
    draft = None
    if isinstance(run, ServeRun) and run.draft_model is not None:
        draft, said = draft_of(run.draft_model, found, catalog, changes)
        notes = (*notes, *said)
    return ResolvedJob(
        name=job.name or found.name or model.label,
        job=job.model_copy(update={"run": run}),
        model=model,
        defaults=(*listed, *(default for default in filled if default.key not in {d.key for d in listed})),
        notes=notes,
        where=found.where,
        model_where=model_where,
        draft=draft,
    )


def _settled(foreign: ImportedJob, data: Mapping[str, Any], changes: Sequence[Change]) -> tuple[str, ...]:
    """What is said of a foreign file, without the questions that flags have answered."""
    answered = [f"--set {change.key}=" for change in changes]
    if data.get("gpus") is not None:
        answered.append("--set gpus=")
    return tuple(
        note
        for note in foreign.notes
        if note not in foreign.asked or not any(answer in note for answer in answered)
    )


def _fleet(text: Any, found: Found) -> FleetSpec | None:
    return None if text is None else parse_fleet(text, where=found.where, key="gpus")


def _check_task(run: dict[str, Any], task: str | None) -> None:
    if task is not None and run.get("task", task) != task:
        raise InputError(
            f"the job is a {run['task']} run; its keys mean nothing to {task}",
            where="--task",
            given=task,
            legal=f"a {task} job, or the model alone: its default run is planned",
        )


def _read_job(data: dict[str, Any], found: Found, changes: Sequence[Change]) -> Job:
    try:
        return Job.read(data, where=found.where)
    except InputError as error:
        key = error.key or ""
        by_flag = [change for change in changes if key == change.key or key.startswith(f"{change.key}.")]
        line = found.document.line(key) if found.document is not None and not by_flag else None
        if by_flag:
            raise _moved(error, found.where, "--set") from None
        if line is not None:
            raise _moved(error, found.where, f"{found.where}:{line}") from None
        raise


def _known_hardware(
    job: Job,
    fleet: FleetSpec | None,
    found: Found,
    catalog: Catalog,
    flags: Sequence[str],
    changes: Sequence[Change],
) -> None:
    """Refuses GPUs and a system that the catalogue lacks, with the place that names them."""
    named = [("gpus", "gpus", part.gpu) for part in (fleet.parts if fleet is not None else ())]
    named += [("systems", "system", job.system)] if job.system is not None else []
    for kind, key, name in named:
        try:
            catalog.find(kind, name)
        except UnknownName as error:
            line = found.document.line(key) if found.document is not None else None
            where = found.where if line is None else f"{found.where}:{line}"
            by_flag = f"--{key}" if key in flags else "--set" if key in [c.key for c in changes] else None
            raise UnknownName(
                error.problem,
                where=by_flag or where,
                key=None if by_flag == f"--{key}" else key,
                given=error.given,
                legal=error.legal,
                near=error.near,
            ) from None


def _moved(error: InputError, old: str, new: str) -> InputError:
    """The same error at a place known more closely."""
    error.args = (new + str(error).removeprefix(old),)
    error.where = new
    return error
