"""Any file or command line of another program as a job or model file of ours, and what was made of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpucalc.errors import InputError
from gpucalc.importers import formats, hub, huggingface, weights
from gpucalc.importers.huggingface import Imported
from gpucalc.importers.words import ImportedJob
from gpucalc.spec.jsonio import load_json
from gpucalc.spec.model import ModelSpec
from gpucalc.spec.yamlio import load_yaml, read_text

MAX_LINE = 2**20


@dataclass(frozen=True, slots=True)
class Loaded:
    """A job or a model in our words. `data` is what a file of ours would hold."""

    kind: str  # job | model
    format: str
    where: str
    data: dict[str, Any]
    understood: tuple[str, ...]
    assumed: tuple[str, ...]
    asked: tuple[str, ...]
    ignored: tuple[str, ...]

    def yaml(self) -> str:
        """The file, with what is still open as comments."""
        notes = [f"from {self.where} ({self.format})", *(f"open: {text}" for text in self.asked)]
        head = "".join(f"# {' '.join(note.split())}\n" for note in notes)
        return head + _dump(self.data)


def model_yaml(spec: ModelSpec) -> str:
    """A model as a file of ours."""
    return _dump(spec.model_dump(mode="json", exclude_none=True, exclude_defaults=True))


def _dump(data: dict[str, Any]) -> str:
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)


def load(
    argument: str,
    *,
    format: str | None = None,
    text_only: bool = False,
    use_hub: bool = False,
) -> Loaded:
    """What a file, folder, command line, `-` (standard input) or org/name describes. Raises InputError."""
    if argument == "-":
        text = sys.stdin.read(MAX_LINE + 1)
        if len(text) > MAX_LINE:
            raise InputError("is too large", where="standard input")
        return _job(_text(text, "standard input", format))
    path = Path(argument)
    there = _is_there(path)
    if not there and formats.is_line(argument):
        return _job(formats.read_line(argument, "the command line", format))
    if not there and hub.is_name(argument):
        snapshot = hub.cached(argument)
        if snapshot is None and use_hub:
            snapshot = hub.fetch(argument)
        if snapshot is None:
            raise hub.unreadable(argument, "not in the local Hugging Face cache")
        path = snapshot
    elif not there:
        raise InputError("no such file", where=argument)
    if path.is_dir():
        return _model(path / "config.json", text_only, path)
    name = path.name.lower()
    if name.endswith(".gguf"):
        imported, _ = weights.from_gguf(path)
        return _described(imported, "gguf", str(path))
    if name.endswith((".safetensors", weights.INDEX)):
        return _model(path.parent / "config.json", text_only, path)
    if path.suffix.lower() == ".py":
        raise InputError(
            "is Python, which is never run", where=str(path), legal="the flags it is started with"
        )
    if path.suffix.lower() == ".toml":
        return _job(formats.read_toml(read_text(path), str(path), format))
    if formats.is_script(path):
        return _job(formats.read_line(read_text(path), str(path), format))
    data = (load_json if path.suffix.lower() == ".json" else load_yaml)(path).data
    if format is None and formats.format_of(data) is None and {"model_type", "architectures"} & data.keys():
        return _model(path, text_only, None)
    return _job(formats.read_data(data, str(path), format))


def _text(text: str, where: str, format: str | None) -> ImportedJob:
    """Text that came without a name: JSON, YAML, TOML or command lines, by what it is."""
    from gpucalc.spec.yamlio import parse_yaml

    try:
        data = parse_yaml(text, where, mapping=True).data
    except InputError:
        if text.lstrip().startswith("[") and "=" in text:
            return formats.read_toml(text, where, format)
        return formats.read_line(text, where, format)
    return formats.read_data(data, where, format)


def _job(job: ImportedJob) -> Loaded:
    asked = job.asked
    if "model" not in job.data:
        asked = ("the file names no model; settle it with --model NAME", *asked)
    count = (
        f" {job.ranks}xNAME: it starts {job.ranks} process{'' if job.ranks == 1 else 'es'}"
        if job.ranks
        else ""
    )
    asked = (*asked, f"the file names no GPUs; settle it with --gpus{count}")
    return Loaded("job", job.format, job.where, job.data, job.understood, job.assumed, asked, job.ignored)


def _model(config: Path, text_only: bool, held: Path | None) -> Loaded:
    imported = huggingface.read_config(config, text_only=text_only)
    notes: tuple[str, ...] = ()
    files = held
    if held is not None and held.is_dir():
        files = weights.beside(held)
    if files is not None:
        tensors, notes = weights.read_weights(files)
        spec = imported.spec.model_copy(update={"weights": weights.measured(tensors)})
        imported = Imported(spec, imported.understood, imported.assumed, imported.ignored)
    return _described(imported, "config.json", str(config), notes)


def _described(imported: Imported, format: str, where: str, notes: tuple[str, ...] = ()) -> Loaded:
    data = imported.spec.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return Loaded(
        "model", format, where, data, imported.understood, (*imported.assumed, *notes), (), imported.ignored
    )


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
