"""Commands that name a configuration file: the file is read beside the command, which has the last word.

`llamafactory-cli train X.yaml`, `axolotl train X.yml`, `tune run ... --config X.yaml key=value`,
`torchrun -m torchtitan.train --job.config_file X.toml --training.seq_len 4096`, and
`accelerate launch --config_file X.yaml train.py ...`. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpucalc.errors import InputError
from gpucalc.importers.shell import Command, parse_flags
from gpucalc.importers.words import ImportedJob, fold
from gpucalc.spec.yamlio import load_yaml, parse_scalar, read_text

_FILES = (".yaml", ".yml", ".json", ".toml")
# The program, the format of its file, and the flag that names it (None: the first file on the line).
_PROGRAMS: tuple[tuple[str, str, str | None], ...] = (
    ("llamafactory-cli", "llama-factory", None),
    ("axolotl", "axolotl", None),
    ("axolotl.cli.train", "axolotl", None),
    ("tune", "torchtune", "config"),
    ("torchtitan.train", "torchtitan", "job.config_file"),
)
_LAUNCHERS = (
    "nproc_per_node", "nnodes", "num_processes", "num_nodes", "node_rank", "rdzv_backend", "rdzv_endpoint",
    "rdzv_id", "master_addr", "master_port", "local_ranks_filter", "role", "tee", "m",
)  # fmt: skip
NAMES = frozenset(program for program, _, _ in _PROGRAMS)


def program(command: Command) -> tuple[str, str | None, Sequence[str]] | None:
    """The format of the file a command names, the flag that names it, and the words after the program."""
    for name, format, flag in _PROGRAMS:
        place = command.place(name)
        if place is not None:
            return format, flag, command.words[place + 1 :]
    return None


def configured(command: Command, where: str, read: Any) -> ImportedJob | None:
    """The job of a command that names a configuration file, None for one of another kind."""
    found = program(command)
    if found is None:
        return None
    format, flag, words = found
    flags, loose = parse_flags(words)
    if flag is not None:
        given = flags.pop(flag, None) or flags.pop(fold(flag), None)
        first, *rest = given if isinstance(given, list) else [given]  # what follows it are changes
        named, loose = first, [*rest, *loose]
    else:
        named = next((word for word in loose if word.endswith(_FILES)), None)
    changes = {key: value for key, value in flags.items() if fold(key) not in _LAUNCHERS}
    changes |= dict(word.split("=", 1) for word in loose if "=" in word and not word.startswith("="))
    if not isinstance(named, str):
        legal = f"a path that ends in {', '.join(_FILES)}"
        raise InputError(f"names no {format} file", where=where, legal=legal)
    path = beside(named, where)
    if path is None:
        problem = "the configuration is not here"
        if format == "torchtune" and not named.endswith(_FILES):
            problem = "is a configuration inside torchtune, which is not read; `tune cp` writes it out"
        raise InputError(problem, where=where, given=named, legal="the path of a file")
    data = structured(path)
    for key, value in changes.items():
        _set(data, key, parse_scalar(value, where) if isinstance(value, str) else value)
    job: ImportedJob = read(format)(data, str(path))
    started, _ = parse_flags(command.words)
    ranks = job.ranks or _ranks(started)
    return replace(job, where=where, ranks=ranks, assumed=(f"read from {path}", *job.assumed))


def _ranks(flags: Mapping[str, Any]) -> int | None:
    def whole(*names: str) -> int | None:
        given = next((flags[name] for name in names if name in flags), "")
        text = str(given[0] if isinstance(given, list) else given)  # the program's words may follow
        return int(text) if text.isdigit() and 0 < int(text) < 10**6 else None

    each = whole("nproc_per_node", "num_processes")
    return None if each is None else each * (whole("nnodes") or 1)


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key, in whatever spelling of `-` and `_` the file has it."""
    here: dict[str, Any] = data
    *path, last = key.split(".")
    for part in path:
        inner = here.get(part)
        if not isinstance(inner, dict):
            inner = here[part] = {}
        here = inner
    known = {fold(str(name)): name for name in here}
    here[known.get(fold(last), last)] = value


def beside(named: str, where: str) -> Path | None:
    """A file named on a line: as it stands, or beside the script the line is in."""
    for path in (Path(named), Path(where).parent / named):
        try:
            if path.is_file():
                return path
        except (OSError, ValueError):
            continue
    return None


def structured(path: Path) -> dict[str, Any]:
    """The keys of a YAML, JSON or TOML file. Raises InputError."""
    if path.suffix.lower() == ".toml":
        import tomllib

        try:
            return tomllib.loads(read_text(path))
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InputError(f"not TOML: {error}", where=str(path)) from None
    data = load_yaml(path).data
    if not isinstance(data, dict):
        raise InputError("expected keys and values", where=str(path))
    return data


def with_config(flags: Mapping[str, Any], name: str, where: str) -> tuple[dict[str, Any], str | None]:
    """Flags on top of the keys of the file that flag `name` names; what to say where it is not here."""
    named = flags.get(name)
    if not isinstance(named, str):
        return dict(flags), None
    path = beside(named, where)
    if path is None:
        return dict(flags), f"{named} is not here, so what it says is not known"
    merged = {fold(str(key)): value for key, value in structured(path).items()}
    merged |= {key: value for key, value in flags.items() if key != name}
    return merged, None
