"""Which foreign format a file is in, decided by what it holds, and the reader of that format.

A file of ours is never taken for a foreign one. What is read here becomes keys of a job; a
`config.json` and weights files describe models and are read elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from gpucalc.errors import InputError, UnknownName, nearest
from gpucalc.importers.words import ImportedJob, fold

# One of these keys marks a format; tried in this order, since some trainers take others' keys as well.
_MARKS: dict[str, frozenset[str]] = {
    "accelerate": frozenset({"distributed_type", "compute_environment"}),
    "deepspeed": frozenset({"zero_optimization", "train_micro_batch_size_per_gpu"}),
    "axolotl": frozenset({"base_model", "sequence_len"}),
    "llama-factory": frozenset({"finetuning_type", "cutoff_len"}),
    "torchtitan": frozenset({"activation_checkpoint", "parallelism"}),
    "megatron": frozenset({"tensor_model_parallel_size", "pipeline_model_parallel_size", "num_query_groups"}),
    "transformers": frozenset({"per_device_train_batch_size", "num_train_epochs"}),
    "sglang": frozenset({"mem_fraction_static", "tp_size", "chunked_prefill_size"}),
    "vllm": frozenset({"tensor_parallel_size", "gpu_memory_utilization", "max_num_seqs", "enforce_eager",
                   "max_num_batched_tokens", "kv_cache_dtype"}),
}  # fmt: skip
FORMATS = (*_MARKS, "torchtune", "llama-server")
_LINE_PROGRAMS = {
    "vllm": ("vllm", "vllm.entrypoints.openai.api_server", "vllm-openai"),
    "sglang": ("sglang.launch_server", "sglang"),
    "llama-server": ("llama-server", "llama-cli", "llama-bench"),
}
# Servers known by name whose lines have no reader: better a plain word than another server's reading.
_UNREAD = (
    "trtllm-serve", "text-generation-launcher", "lmdeploy", "ollama", "mlc_llm", "tritonserver",
    "mistralrs-server", "koboldcpp", "ktransformers", "dynamo",
)  # fmt: skip
_SCRIPTS = (".sh", ".bash", ".txt", ".args", ".slurm", ".sbatch", ".cmd")


def is_line(text: str) -> bool:
    """Whether an argument is a command line and not a path."""
    from gpucalc.importers.launchers import NAMES

    words = text.split()
    known = {name for names in _LINE_PROGRAMS.values() for name in names} | NAMES | set(_UNREAD)
    last = {word.strip("\"'").rsplit("/", 1)[-1].partition(":")[0] for word in words}
    return len(words) > 1 and (bool(last & known) or any(word.startswith("--") for word in words))


def is_script(path: Path) -> bool:
    """Whether a file holds command lines by its name."""
    return path.suffix.lower() in _SCRIPTS


def format_of(data: Mapping[Any, Any]) -> str | None:
    """The foreign format of parsed keys, None when they are not in any."""
    keys = {fold(str(key)) for key in data}
    if {"run", "expect", "measured"} & keys:
        return None  # ours
    if {"model_type", "hidden_size"} <= keys:
        return None  # a model's own configuration, which may keep words of the trainer it came from
    if _is_torchtune(data):
        return "torchtune"
    for name, marks in _MARKS.items():
        if marks & keys:
            return name
    nested = {fold(str(key)) for value in data.values() if isinstance(value, Mapping) for key in value}
    megatron = {"tensor_model_parallel_size", "pipeline_model_parallel_size"}
    if megatron & nested:
        return "megatron"
    if {"train_batch_size"} & keys and {"fp16", "bf16", "optimizer"} & keys:
        return "deepspeed"
    return None


def _is_torchtune(data: Mapping[Any, Any]) -> bool:
    model = data.get("model")
    return isinstance(model, Mapping) and "_component_" in model


def read_data(data: Mapping[Any, Any], where: str, format: str | None = None) -> ImportedJob:
    """A job out of parsed JSON, YAML or TOML. Raises InputError."""
    kind = _checked(format) or format_of(data)
    if kind is None:
        raise InputError("is in no format that is known", where=where, legal=", ".join(FORMATS))
    return _reader(kind)(data, where)


def read_line(text: str, where: str, format: str | None = None) -> ImportedJob:
    """A job out of a command line or launch script; nothing of it is run. Raises InputError."""
    from gpucalc.importers import servers
    from gpucalc.importers.launchers import configured
    from gpucalc.importers.shell import commands, parse_flags

    found = commands(text, where)
    wanted = _checked(format)
    for kind, names in _LINE_PROGRAMS.items():
        for command in found:
            if (wanted is None and command.starts(*names)) or wanted == kind:
                read = {
                    "vllm": servers.vllm_line,
                    "sglang": servers.sglang_line,
                    "llama-server": servers.llama_line,
                }
                start = command.place(*names) or 0  # what starts the program has flags of its own
                return read[kind](command.words[start:], where)
    for command in found if wanted is None else ():
        if command.starts(*_UNREAD):
            given = command.words[command.place(*_UNREAD) or 0]
            raise InputError(
                "its command line has no reader", where=where, given=given, legal=", ".join(FORMATS)
            )
    for command in found:
        if wanted is None or wanted in ("llama-factory", "axolotl", "torchtune", "torchtitan"):
            job = configured(command, where, _reader)
            if job is not None:
                return job
    best: dict[str, Any] = {}
    for command in found:
        flags, _ = parse_flags(command.words)
        if len(flags) > len(best):
            best = flags
    if not best:
        raise InputError("holds no command line with flags", where=where)
    settled = wanted or format_of(best) or ("transformers" if "model_name_or_path" in best else None)
    if settled is None and {"num_layers", "hidden_size"} <= best.keys():
        settled = "megatron"
    if settled is None:
        raise InputError(
            "is a command line of no trainer or server that is known", where=where, legal=", ".join(FORMATS)
        )
    return _reader(settled)(best, where)


def read_toml(text: str, where: str, format: str | None = None) -> ImportedJob:
    """A job out of TOML. Raises InputError."""
    import tomllib  # only when a TOML file is given

    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"not TOML: {error}", where=where) from None
    if _checked(format) is None and format_of(data) is None and "training" in data:
        format = "torchtitan"
    return read_data(data, where, format)


# Where each format is read: a module of this package, the function in it, and whether it reads files
# named in what it is given, beside it.
_READERS = {
    "deepspeed": ("trainers.deepspeed", "deepspeed", False),
    "accelerate": ("trainers.accelerate", "accelerate", False),
    "transformers": ("trainers.arguments", "transformers", True),
    "llama-factory": ("trainers.llamafactory", "llamafactory", True),
    "axolotl": ("trainers.axolotl", "axolotl", True),
    "torchtune": ("trainers.torchtune", "torchtune", False),
    "torchtitan": ("trainers.torchtitan", "torchtitan", False),
    "megatron": ("megatron", "megatron", False),
    "vllm": ("servers", "vllm", False),
    "sglang": ("servers", "sglang", False),
}


def _reader(kind: str) -> Callable[[Mapping[Any, Any], str], ImportedJob]:
    if kind not in _READERS:
        raise InputError(f"{kind} has command lines alone", legal="a command line")
    module, name, beside = _READERS[kind]
    read: Any = getattr(import_module(f"gpucalc.importers.{module}"), name)
    if beside:
        return lambda data, where: read(data, where, _folder(where))
    found: Callable[[Mapping[Any, Any], str], ImportedJob] = read
    return found


def _folder(where: str) -> Path | None:
    return Path(where).parent if where else None


def _checked(format: str | None) -> str | None:
    if format is None or format in FORMATS:
        return format
    raise UnknownName(
        "unknown format", where="--format", given=format, legal=FORMATS, near=nearest(format, FORMATS)
    )
