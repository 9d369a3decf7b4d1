"""From what a user typed for JOB to a job with every default said, and the model it is about.

JOB is a job file, the name of a shipped job, a model file, a `config.json`, a folder or weights
file, a trainer's or server's own file or command line, or a catalogue model. What a file is, its
content decides. A name that is both a shipped job and a model is the model when GPUs are given with
it, else the job, which names its own; `models/NAME` and `jobs/NAME` say which.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpucalc.errors import InputError, UnknownName, nearest
from gpucalc.spec.base import keys_of
from gpucalc.spec.defaults import Default, with_defaults
from gpucalc.spec.fleet import GRAMMAR, FleetSpec, parse_fleet
from gpucalc.spec.job import Job
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.train_run import TrainRun
from gpucalc.spec.yamlio import Document, load_yaml, parse_scalar, read_text

if TYPE_CHECKING:
    from gpucalc.catalog import Catalog
    from gpucalc.importers.words import ImportedJob
    from gpucalc.spec.model import ModelSpec, WeightsSpec

TASKS = ("train", "serve")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_WEIGHTS = (".safetensors", ".gguf")
_LINES = (".toml", ".sh", ".bash", ".txt", ".args", ".slurm", ".sbatch")
# A file with one of these keys is ours or a published configuration, whatever else it holds.
_OURS = {"run", "expect", "measured", "gpus", "architectures", "transformers_version", "layers", "weight_map"}
_CONFIG_BYTES = 64 * 2**20  # an index of a sharded checkpoint is a few MB
_NETWORKS = ("cnn", "detector", "diffusion")  # known by their totals
_IMAGE_MODELS = ("cnn", "detector", "vit", "clip", "diffusion")
_DEFAULT_SEQ_LEN = 4096
_DEFAULT_SERVED_LEN = 8192
_FOUND_CONTEXT = 8 * 2**20  # nothing published reads more tokens at once


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

    @property
    def fleet(self) -> FleetSpec:
        """The GPUs. Raises InputError when none are named."""
        return self.job.fleet

    @property
    def run(self) -> TrainRun | ServeRun:
        """The run."""
        return self.job.run


@dataclass(frozen=True, slots=True)
class _Found:
    """What JOB turned out to be: a job's data, or a model alone."""

    where: str
    folder: Path | None  # relative paths in the file start here
    data: dict[str, Any]
    document: Document | None = None
    bare: bool = False  # only a model: the run is the default one
    name: str | None = None
    foreign: ImportedJob | None = None  # out of another program's file
    weights: WeightsSpec | None = None  # of the files beside a configuration
    quant: str | None = None  # a GGUF file's
    flagged: bool = False  # the model is the user's own word, not the file's
    hub: bool = False  # whether the network may be asked
    notes: tuple[str, ...] = ()


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
        found = _Found("job", None, dict(argument))
    else:
        found = _find(str(argument), catalog, task, alone=gpus is None)
    if hub:
        found = replace(found, hub=True)
    changes = [_change(text) for text in sets]
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
    return _complete(_Found(where, folder, dict(data)), catalog, None, None, [], need_gpus)


# -- what JOB is ----------------------------------------------------------------------------------


def _find(argument: str, catalog: Catalog, task: str | None, *, alone: bool) -> _Found:
    if not argument.strip():
        raise InputError("JOB is empty", legal="a file, a shipped job or a catalogue model")
    path = Path(argument)
    if _is_there(path):
        return _from_path(path)
    if " " in argument.strip():
        from gpucalc.importers import formats

        if formats.is_line(argument):
            return _foreign(formats.read_line(argument, "the command line"), None)
    kind, _, name = argument.partition("/")
    if kind == "models" and name:
        return _from_catalogue(name, catalog)
    if kind == "jobs" and name:
        return _shipped(catalog.path_of("jobs", name.removesuffix(".yaml")))
    shipped = _shipped_job(argument.removesuffix(".yaml"), catalog)
    if shipped is not None and (alone or not _is_model(argument, catalog)):
        found = _shipped(shipped)
        run = found.data.get("run")
        if task is None or not isinstance(run, Mapping) or run.get("task") == task:
            return found
    try:
        return _from_catalogue(argument, catalog)
    except UnknownName:
        if argument.count("/") == 1 and path.suffix.lower() not in (".yaml", ".yml", ".json", *_WEIGHTS):
            return _Found(argument, None, {"model": argument}, bare=True, name=argument)
        raise _unknown_job(argument, catalog) from None


def _is_model(name: str, catalog: Catalog) -> bool:
    try:
        catalog.find("models", name)
    except UnknownName:
        return False
    return True


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL in it
        return False


def _shipped_job(name: str, catalog: Catalog) -> Path | None:
    stem = name.strip().casefold()
    if not stem.replace("-", "").replace(".", "").replace("_", "").isalnum():
        return None
    paths = (root / "jobs" / f"{stem}.yaml" for root in catalog.roots)
    return next((path for path in paths if _is_there(path)), None)


def _shipped(path: Path) -> _Found:
    return _from_path(path)


def _from_catalogue(name: str, catalog: Catalog) -> _Found:
    stem = catalog.find("models", name).stem
    return _Found(where=f"model {stem}", folder=None, data={"model": stem}, bare=True, name=stem)


def _unknown_job(argument: str, catalog: Catalog) -> InputError:
    looks_like_path = "/" in argument or Path(argument).suffix in (".yaml", ".yml", ".json", *_WEIGHTS)
    names = (*catalog.names("jobs"), *catalog.names("models"))
    near = nearest(Path(argument).name.removesuffix(".yaml"), names)
    if looks_like_path and argument.count("/") != 1:
        return InputError("no such file", where=argument, near=near)
    return UnknownName(
        "neither a file, nor a shipped job, nor a catalogue model",
        where="JOB",
        given=argument,
        legal="`gpucalc models` lists the models",
        near=near,
    )


def _from_path(path: Path) -> _Found:
    if path.is_dir():
        config = path / "config.json"
        if not config.is_file():
            raise InputError("the folder holds no config.json", where=str(path))
        return _with_weights(_from_path(config), path)
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        raise InputError(
            "is a pickle, which could run code and is never read",
            where=str(path),
            legal="the config.json beside it",
        )
    if suffix in _WEIGHTS or path.name.endswith(".safetensors.index.json"):
        return _from_weights(path, suffix)
    if suffix in _LINES:
        from gpucalc.importers import formats

        read = formats.read_toml if suffix == ".toml" else formats.read_line
        return _foreign(read(read_text(path), str(path)), path)
    document = _read(path)
    data = document.data
    if not _OURS & data.keys():
        from gpucalc.importers import formats

        foreign = formats.format_of(data)
        if foreign is not None:
            return _foreign(formats.read_data(data, str(path), foreign), path)
    kind = _kind_of(data)
    if kind == "job":
        return _Found(
            where=str(path),
            folder=path.parent,
            data=data,
            document=document,
            name=data.get("name") or path.stem,
        )
    if kind == "model":
        return _Found(
            where=str(path), folder=path.parent, data={"model": data}, bare=True, name=_model_name(path, data)
        )
    raise InputError(
        "is neither a job (model:, gpus:, run:), nor a model file, nor a config.json",
        where=str(path),
        given=", ".join(map(str, list(data)[:5])) or "no keys",
    )


def _from_weights(path: Path, suffix: str) -> _Found:
    """A model from a weights file: GGUF says what it is, other files need the configuration beside them."""
    from gpucalc.importers import weights

    if suffix == ".gguf":
        if not path.is_file():
            raise InputError("is not a regular file", where=str(path))
        imported, quant = weights.from_gguf(path)
        data = imported.spec.model_dump(mode="python", exclude_none=True, exclude_defaults=True)
        return _Found(
            where=str(path),
            folder=path.parent,
            data={"model": data},
            bare=True,
            name=imported.spec.label,
            quant=quant,
            notes=imported.assumed,
        )
    found = _from_path(_config_beside(path))
    tensors, notes = weights.read_weights(path)
    return replace(found, weights=weights.measured(tensors, _bits(found)), notes=(*found.notes, *notes))


def _with_weights(found: _Found, folder: Path) -> _Found:
    """The folder's configuration with the bytes of its weights, where those are all there."""
    from gpucalc.importers import weights

    path = weights.beside(folder)
    if path is None:
        return found
    try:
        tensors, notes = weights.read_weights(path)
    except InputError as error:
        return replace(found, notes=(f"weights beside it are not counted: {error}",))
    return replace(found, weights=weights.measured(tensors, _bits(found)), notes=notes)


def _bits(found: _Found) -> int | None:
    """The bits of what a configuration packs in integers."""
    from gpucalc.importers import weights

    spec = _described_model(dict(found.data["model"]), found.where, "", None)[0]
    return weights.packed_bits(spec.quantization)


def _foreign(job: ImportedJob, path: Path | None) -> _Found:
    return _Found(
        where=job.where,
        folder=path.parent if path is not None else None,
        data=deepcopy(job.data),
        name=path.stem if path is not None else job.format,
        foreign=job,
    )


def _config_beside(path: Path) -> Path:
    if not path.is_file():
        raise InputError("is not a regular file", where=str(path))
    config = path.parent / "config.json"
    if not config.is_file():
        raise InputError(
            "weights alone do not say the architecture", where=str(path), legal="config.json beside it"
        )
    return config


def _read(path: Path) -> Document:
    """YAML, or JSON for a file that says so: JSON may hold tabs, which YAML refuses."""
    if path.suffix.lower() != ".json":
        return load_yaml(path)
    from gpucalc.spec.jsonio import load_json  # only when a JSON file is given

    return load_json(path, max_bytes=_CONFIG_BYTES)


def _kind_of(data: Mapping[str, Any]) -> str | None:
    if _is_config(data):
        return "model"
    if {"run", "gpus", "model", "expect"} & data.keys():
        return "job"
    return "model" if {"layers", "hidden", "family", "kind"} & data.keys() else None


def _is_config(data: Mapping[str, Any]) -> bool:
    """Whether a mapping is a Hugging Face `config.json`."""
    return bool({"model_type", "architectures", "transformers_version", "hidden_size"} & data.keys())


def _model_name(path: Path, data: Mapping[str, Any]) -> str:
    name = data.get("id") or data.get("name") or data.get("_name_or_path")
    if isinstance(name, str) and name.strip():
        return name
    return path.resolve().parent.name if path.name == "config.json" else path.stem


# -- the job, with flags and defaults ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Change:
    key: str
    value: Any
    text: str


def _change(text: str) -> _Change:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InputError("is not KEY=VALUE", where="--set", given=text, legal="such as run.seq_len=4096")
    first = key.split(".", 1)[0]
    if first not in keys_of(Job):
        runs = {**TrainRun.model_fields, **ServeRun.model_fields}
        near = (
            (f"run.{key}",) if first in runs else nearest(key, [*keys_of(Job), *(f"run.{k}" for k in runs)])
        )
        raise UnknownName("no such key", where="--set", key=key, legal=keys_of(Job), near=near)
    return _Change(key, parse_scalar(value, "--set"), text)


def _apply(data: dict[str, Any], changes: Sequence[_Change]) -> None:
    for change in changes:
        *groups, last = change.key.split(".")
        inside = data
        for depth, group in enumerate(groups, start=1):
            part = inside.setdefault(group, {})
            if not isinstance(part, dict):
                raise InputError(
                    f"{'.'.join(groups[:depth])} is a single value here",
                    where="--set",
                    key=change.key,
                    given=part,
                )
            inside = part
        if change.value is None:
            inside.pop(last, None)
        else:
            inside[last] = change.value


def _complete(
    found: _Found,
    catalog: Catalog,
    gpus: str | None,
    task: str | None,
    changes: Sequence[_Change],
    need_gpus: bool,
) -> ResolvedJob:
    data = deepcopy(found.data)
    by_name = isinstance(data.get("model"), str) and not any(change.key == "model" for change in changes)
    of_model = [change for change in changes if by_name and change.key.startswith("model.")]
    _apply(data, [change for change in changes if change not in of_model])
    if gpus is not None:
        if data.get("gpus") != gpus:  # the job's server is that of the job's GPUs
            data.pop("system", None)
        data["gpus"] = gpus
    if any(change.key == "model" for change in changes):
        found = replace(found, flagged=True)
    model, model_where, notes = _model(data.get("model"), found, catalog, of_model)
    if found.foreign is not None:
        notes = (*_settled(found.foreign, data, changes), *notes)

    fleet = _fleet(data.get("gpus"), found)
    ranks = found.foreign.ranks if found.foreign is not None else None
    if fleet is None and need_gpus:
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
        data["run"] = _default_run(data.get("run"), task or "train", fleet, model, listed)
    elif isinstance(data["run"], dict):
        _check_task(data["run"], task)
        if "framework" not in data["run"] and data["run"].get("task") in TASKS:
            data["run"] = _default_framework(data["run"], fleet, model, listed)
    job = _read_job(data, found, changes)
    run, filled = (
        _train_defaults(job.run, model)
        if isinstance(job.run, TrainRun)
        else _serve_defaults(job.run, model, found.foreign is not None and found.foreign.engine_length)
    )
    return ResolvedJob(
        name=job.name or found.name or model.label,
        job=job.model_copy(update={"run": run}),
        model=model,
        defaults=(*listed, *(default for default in filled if default.key not in {d.key for d in listed})),
        notes=notes,
        where=found.where,
        model_where=model_where,
    )


def _settled(foreign: ImportedJob, data: Mapping[str, Any], changes: Sequence[_Change]) -> tuple[str, ...]:
    """What is said of a foreign file, without the questions that flags have answered."""
    answered = [f"--set {change.key}=" for change in changes]
    if data.get("gpus") is not None:
        answered.append("--set gpus=")
    return tuple(
        note
        for note in foreign.notes
        if note not in foreign.asked or not any(answer in note for answer in answered)
    )


def _fleet(text: Any, found: _Found) -> FleetSpec | None:
    return None if text is None else parse_fleet(text, where=found.where, key="gpus")


def _check_task(run: dict[str, Any], task: str | None) -> None:
    if task is not None and run.get("task", task) != task:
        raise InputError(
            f"the job is a {run['task']} run; its keys mean nothing to {task}",
            where="--task",
            given=task,
            legal=f"a {task} job, or the model alone: its default run is planned",
        )


def _read_job(data: dict[str, Any], found: _Found, changes: Sequence[_Change]) -> Job:
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


def _moved(error: InputError, old: str, new: str) -> InputError:
    """The same error at a place known more closely."""
    error.args = (new + str(error).removeprefix(old),)
    error.where = new
    return error


# -- the model ------------------------------------------------------------------------------------


def _model(
    words: Any, found: _Found, catalog: Catalog, changes: Sequence[_Change]
) -> tuple[ModelSpec, str, tuple[str, ...]]:
    model, where, notes, weights = _named_model(words, found, catalog)
    if weights is not None:
        model = model.model_copy(update={"weights": weights})
    if changes:
        data = model.model_dump(mode="python", exclude_unset=True)
        _apply(data, [_Change(c.key.removeprefix("model."), c.value, c.text) for c in changes])
        model = type(model).read(data, where="--set", key="model")
        where = f"{where}, changed by --set"
    return model, where, notes


def _named_model(
    words: Any, found: _Found, catalog: Catalog
) -> tuple[ModelSpec, str, tuple[str, ...], WeightsSpec | None]:
    if isinstance(words, Mapping) and words:
        key = "" if found.bare else "model"
        spec, where, notes = _described_model(
            dict(words), found.where, key, found.name if found.bare else None
        )
        return spec, where, (*found.notes, *notes), found.weights
    if words is None:
        legal = "a catalogue id, a path, or keys" if found.foreign is None else "--model NAME, a name or path"
        raise InputError("is missing", where=found.where, key="model", legal=legal)
    if not isinstance(words, str) or not words.strip():
        raise InputError(
            "is not a model",
            where=found.where,
            key="model",
            given=words,
            legal="a catalogue id, a path, or keys",
        )
    path = _model_path(words, found.folder)
    if path is not None and not found.flagged and _climbs_out(words, found.folder):
        raise InputError(
            "a job's model may not lie above the job's folder and the current one",
            where=found.where,
            key="model",
            given=words,
            legal="a path below either; --model for any other",
        )
    if path is None:
        try:
            return (*_catalogue_model(words, catalog), None)
        except UnknownName as error:
            inner, said = _published(words, found, catalog, error.near)
            inner = replace(inner, notes=(said, *inner.notes))
    else:
        inner = _from_path(path)
    if not inner.bare:
        raise InputError("is a job, not a model", where=found.where, key="model", given=words)
    model = inner.data["model"]
    if isinstance(model, str):  # a catalogue entry, by the name its publisher gives it
        return (*_catalogue_model(model, catalog)[:2], inner.notes, None)
    spec, where, notes = _described_model(model, inner.where, "", inner.name)
    return spec, where, (*inner.notes, *notes), inner.weights


def _published(words: str, found: _Found, catalog: Catalog, near: tuple[str, ...]) -> tuple[_Found, str]:
    """A name of the hub: the local cache, the hub when asked, else the catalogue's entry of that name."""
    from gpucalc.importers import hub

    if not hub.is_name(words):
        raise UnknownName(
            "unknown model: neither a file nor in the catalogue",
            where=found.where,
            key="model",
            given=words,
            near=near,
        )
    snapshot = hub.cached(words)
    if snapshot is None and found.hub:
        snapshot = hub.fetch(words)
    if snapshot is not None:
        inner = _from_path(snapshot)
        return replace(inner, name=words), f"{words}: revision {snapshot.name[:12]} of the Hugging Face cache"
    name = words.partition("@")[0].rsplit("/", 1)[-1]
    try:
        stem = catalog.find("models", name).stem
    except UnknownName as error:
        raise hub.unreadable(
            words, "neither in the catalogue nor in the local Hugging Face cache", error.near
        ) from None
    data = {"model": stem}
    return _Found(found.where, None, data, bare=True, name=stem), f"{words} is taken as {stem}"


def _model_path(words: str, folder: Path | None) -> Path | None:
    """The file or folder a model name stands for: beside the job first, then where the user is."""
    plain = "/" not in words and "\\" not in words and not words.startswith((".", "~"))
    if plain and Path(words).suffix.lower() not in (".json", ".yaml", ".yml", *_WEIGHTS, *_PICKLES):
        return None  # a catalogue id
    candidates = [Path(words).expanduser()]
    if folder is not None and not candidates[0].is_absolute():
        candidates.insert(0, folder / candidates[0])
    return next((path for path in candidates if _is_there(path)), None)


def _climbs_out(words: str, folder: Path | None) -> bool:
    """Whether a path with `..` leaves both the job's folder and where the user is: files come from others."""
    if ".." not in Path(words).parts:
        return False
    here = Path.cwd()
    base = here if folder is None else here / folder
    target = os.path.normpath(base / words)
    return not any(Path(target).is_relative_to(os.path.normpath(root)) for root in (here, base))


def _catalogue_model(words: str, catalog: Catalog) -> tuple[ModelSpec, str, tuple[str, ...]]:
    named = catalog.find("models", words.removesuffix(".yaml"))
    return catalog.model(named.stem), str(named.path), named.assumptions


def _described_model(
    data: dict[str, Any], where: str, key: str, name: str | None
) -> tuple[ModelSpec, str, tuple[str, ...]]:
    if _is_config(data):
        from gpucalc.importers import huggingface

        imported = huggingface.from_config(data, where=where, name=name)
        ignored = (f"keys of {where} not used: {', '.join(imported.ignored)}",) if imported.ignored else ()
        return imported.spec, where, (*imported.assumed, *ignored)
    from gpucalc.spec.model import ModelSpec

    return ModelSpec.read(data, where=where, key=key), where, ()


# -- defaults -------------------------------------------------------------------------------------


def _default_framework(
    run: dict[str, Any], fleet: FleetSpec | None, model: ModelSpec, listed: list[Default]
) -> dict[str, Any]:
    if run["task"] == "serve" and model.kind in _NETWORKS:
        listed.append(Default("run.framework", "hf", "a network without tokens: PyTorch runs it forward"))
    elif run["task"] == "serve":
        listed.append(Default("run.framework", "vllm", "the engine with the most published measurements"))
    elif model.kind in _IMAGE_MODELS:
        listed.append(Default("run.framework", "ddp", "image networks are small enough to be replicated"))
    elif fleet is None or fleet.count > 1:
        listed.append(Default("run.framework", "fsdp", "shards everything, part of PyTorch"))
    else:
        listed.append(Default("run.framework", "hf", "one GPU needs no parallel framework"))
    return {**run, "framework": listed[-1].value}


def _default_run(
    given: Any, task: str, fleet: FleetSpec | None, model: ModelSpec, listed: list[Default]
) -> dict[str, Any]:
    """The documented run of a bare model; keys set by flags stay."""
    run: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    if "task" not in run:
        listed.append(Default("run.task", task, "nobody said; --task serve plans serving"))
        run["task"] = task
    if "framework" not in run and run["task"] in TASKS:
        run = _default_framework(run, fleet, model, listed)
    if run["task"] == "train" and "micro_batch" not in run:
        listed.append(Default("run.micro_batch", 1, "the smallest; auto searches the largest that fits"))
        run["micro_batch"] = 1
    return run


def _train_defaults(run: TrainRun, model: ModelSpec) -> tuple[TrainRun, tuple[Default, ...]]:
    run, filled = with_defaults(run)
    chosen: dict[str, Any] = {}
    listed = [default for default in filled if default.key != "run.ep" or model.moe is not None]
    if run.seq_len is None and model.kind not in _IMAGE_MODELS:
        chosen["seq_len"] = min(_DEFAULT_SEQ_LEN, model.max_context or _DEFAULT_SEQ_LEN)
        why = (
            "the model's longest context"
            if chosen["seq_len"] < _DEFAULT_SEQ_LEN
            else "a usual training length"
        )
        listed.insert(0, Default("run.seq_len", chosen["seq_len"], why))
    return run.model_copy(update=chosen), tuple(listed)


def _serve_defaults(
    run: ServeRun, model: ModelSpec, engine_length: bool = False
) -> tuple[ServeRun, tuple[Default, ...]]:
    chosen: dict[str, Any] = {}
    listed: list[Default] = []

    def choose(key: str, value: Any, why: str) -> None:
        if key not in run.model_fields_set:
            chosen[key] = value
            listed.append(Default(f"run.{key}", value, why))

    if model.kind in _NETWORKS:
        choose("dtype", run.dtype, "weights and activations in 16 bit, as models are published")
        choose("concurrency", 1, "one sample at a time; more are a batch on every GPU")
        return run.model_copy(update=chosen), tuple(listed)
    longest = model.max_context or _FOUND_CONTEXT
    asked = (run.isl or 0) + (run.osl or 0)
    usual = longest if engine_length else min(_DEFAULT_SERVED_LEN, longest)
    length = run.max_model_len or max(usual, min(asked, longest))
    choose("dtype", run.dtype, "weights and activations in 16 bit, as models are published")
    choose("kv_dtype", run.kv_dtype, "the cache in the same type as the activations")
    choose("tp", "auto", "the fewest GPUs per replica that hold the model")
    choose(
        "max_model_len", length, "long enough for most requests" if length < longest else "the model's limit"
    )
    isl = run.isl or min(1024, length // 2 or 1, max(length - (run.osl or 0), 1))
    choose("isl", isl, "a usual prompt in published benchmarks")
    choose("osl", max(1, min(256, length // 2, length - isl)), "a usual answer in published benchmarks")
    if run.framework in ("llamacpp", "hf"):
        choose("concurrency", 1, "one request at a time, this engine's own default")
    elif run.request_rate is None:
        choose("concurrency", 16, "a small service")
    return run.model_copy(update=chosen), tuple(listed)
