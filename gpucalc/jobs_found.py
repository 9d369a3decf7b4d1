"""What JOB is: a job's data or a model alone, found by a name, a path or a command line.

JOB is a job file, the name of a shipped job, a model file, a `config.json`, a folder or weights
file, a trainer's or server's own file or command line, or a catalogue model. What a file is, its
content decides. A name that is both a shipped job and a model is the model when GPUs are given with
it, else the job, which names its own; `models/NAME` and `jobs/NAME` say which.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpucalc.errors import InputError, UnknownName, nearest
from gpucalc.spec.yamlio import Document, load_yaml, read_text

if TYPE_CHECKING:
    from gpucalc.catalog import Catalog
    from gpucalc.importers.words import ImportedJob
    from gpucalc.spec.model import ModelSpec, WeightsSpec

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
WEIGHTS = (".safetensors", ".gguf")
_LINES = (".toml", ".sh", ".bash", ".txt", ".args", ".slurm", ".sbatch")
# A file with one of these keys is ours or a published configuration, whatever else it holds.
_OURS = {"run", "expect", "measured", "gpus", "architectures", "transformers_version", "layers", "weight_map"}
_CONFIG_BYTES = 64 * 2**20  # an index of a sharded checkpoint is a few MB


@dataclass(frozen=True, slots=True)
class Found:
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


def find(argument: str, catalog: Catalog, task: str | None, *, alone: bool) -> Found:
    """What JOB is; `alone` when no GPUs were given with it. Raises InputError or UnknownName."""
    if not argument.strip():
        raise InputError("JOB is empty", legal="a file, a shipped job or a catalogue model")
    path = Path(argument)
    if is_there(path):
        return from_path(path)
    if " " in argument.strip():
        from gpucalc.importers import formats

        if formats.is_line(argument):
            return _foreign(formats.read_line(argument, "the command line"), None)
    kind, _, name = argument.partition("/")
    if kind == "models" and name:
        return _from_catalogue(name, catalog)
    if kind == "jobs" and name:
        return from_path(catalog.path_of("jobs", name.removesuffix(".yaml")))
    shipped = _shipped_job(argument.removesuffix(".yaml"), catalog)
    if shipped is not None and (alone or not _is_model(argument, catalog)):
        found = from_path(shipped)
        run = found.data.get("run")
        if task is None or not isinstance(run, Mapping) or run.get("task") == task:
            return found
    try:
        return _from_catalogue(argument, catalog)
    except UnknownName:
        if argument.count("/") == 1 and path.suffix.lower() not in (".yaml", ".yml", ".json", *WEIGHTS):
            return Found(argument, None, {"model": argument}, bare=True, name=argument)
        raise _unknown_job(argument, catalog) from None


def _is_model(name: str, catalog: Catalog) -> bool:
    try:
        catalog.find("models", name)
    except UnknownName:
        return False
    return True


def is_there(path: Path) -> bool:
    """Whether a path leads somewhere; not where it is no path at all."""
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL in it
        return False


def _shipped_job(name: str, catalog: Catalog) -> Path | None:
    stem = name.strip().casefold()
    if not stem.replace("-", "").replace(".", "").replace("_", "").isalnum():
        return None
    paths = (root / "jobs" / f"{stem}.yaml" for root in catalog.roots)
    return next((path for path in paths if is_there(path)), None)


def _from_catalogue(name: str, catalog: Catalog) -> Found:
    stem = catalog.find("models", name).stem
    return Found(where=f"model {stem}", folder=None, data={"model": stem}, bare=True, name=stem)


def _unknown_job(argument: str, catalog: Catalog) -> InputError:
    path = Path(argument)
    names = (*catalog.names("jobs"), *catalog.names("models"))
    near = nearest(path.name.removesuffix(".yaml"), names)
    if path.suffix in (".yaml", ".yml", ".json", *WEIGHTS) or argument.count("/") > 1:
        return InputError("no such file", where=argument, near=_files_like(path) or near)
    return UnknownName(
        "neither a file, nor a shipped job, nor a catalogue model",
        where="JOB",
        given=argument,
        legal="`gpucalc models` lists the models",
        near=near,
    )


def _files_like(path: Path) -> tuple[str, ...]:
    """Files beside one that is not there, with names like its own."""
    try:
        beside = sorted(other.stem for other in path.parent.iterdir() if other.suffix == path.suffix)
    except OSError:
        return ()
    return tuple(str(path.parent / f"{stem}{path.suffix}") for stem in nearest(path.stem, beside))


def from_path(path: Path) -> Found:
    """What a file or folder holds. Raises InputError."""
    if path.is_dir():
        config = path / "config.json"
        if not config.is_file():
            raise InputError("the folder holds no config.json", where=str(path))
        return _with_weights(from_path(config), path)
    suffix = path.suffix.lower()
    if suffix in PICKLES:
        raise InputError(
            "is a pickle, which could run code and is never read",
            where=str(path),
            legal="the config.json beside it",
        )
    if suffix in WEIGHTS or path.name.endswith(".safetensors.index.json"):
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
        return Found(
            where=str(path),
            folder=path.parent,
            data=data,
            document=document,
            name=data.get("name") or path.stem,
        )
    if kind == "model":
        return Found(
            where=str(path), folder=path.parent, data={"model": data}, bare=True, name=_model_name(path, data)
        )
    raise InputError(
        "is neither a job (model:, gpus:, run:), nor a model file, nor a config.json",
        where=str(path),
        given=", ".join(map(str, list(data)[:5])) or "no keys",
    )


def _from_weights(path: Path, suffix: str) -> Found:
    """A model from a weights file: GGUF says what it is, other files need the configuration beside them."""
    from gpucalc.importers import weights

    if suffix == ".gguf":
        if not path.is_file():
            raise InputError("is not a regular file", where=str(path))
        imported, quant = weights.from_gguf(path)
        data = imported.spec.model_dump(mode="python", exclude_none=True, exclude_defaults=True)
        return Found(
            where=str(path),
            folder=path.parent,
            data={"model": data},
            bare=True,
            name=imported.spec.label,
            quant=quant,
            notes=imported.assumed,
        )
    found = from_path(_config_beside(path))
    tensors, notes = weights.read_weights(path)
    return replace(found, weights=weights.measured(tensors, _bits(found)), notes=(*found.notes, *notes))


def _with_weights(found: Found, folder: Path) -> Found:
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


def _bits(found: Found) -> int | None:
    """The bits of what a configuration packs in integers."""
    from gpucalc.importers import weights

    spec = described_model(dict(found.data["model"]), found.where, "", None)[0]
    return weights.packed_bits(spec.quantization)


def _foreign(job: ImportedJob, path: Path | None) -> Found:
    return Found(
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


def described_model(
    data: dict[str, Any], where: str, key: str, name: str | None
) -> tuple[ModelSpec, str, tuple[str, ...]]:
    if _is_config(data):
        from gpucalc.importers import huggingface

        imported = huggingface.from_config(data, where=where, name=name)
        ignored = (f"keys of {where} not used: {', '.join(imported.ignored)}",) if imported.ignored else ()
        return imported.spec, where, (*imported.assumed, *ignored)
    from gpucalc.spec.model import ModelSpec

    return ModelSpec.read(data, where=where, key=key), where, ()
