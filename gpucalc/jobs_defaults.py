"""What a job takes where nobody said, by its model and GPUs: the framework, the lengths, the load.

What a training run takes by its own keys is in `gpucalc.spec.defaults`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpucalc.spec.defaults import Default, with_defaults
from gpucalc.spec.fleet import FleetSpec
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.train_run import TrainRun

if TYPE_CHECKING:
    from gpucalc.spec.model import ModelSpec

TASKS = ("train", "serve")
_NETWORKS = ("cnn", "detector", "diffusion")  # known by their totals
_IMAGE_MODELS = ("cnn", "detector", "vit", "clip", "diffusion")
_DEFAULT_SEQ_LEN = 4096
_DEFAULT_SERVED_LEN = 8192
_FOUND_CONTEXT = 8 * 2**20  # nothing published reads more tokens at once


def default_framework(
    run: dict[str, Any], fleet: FleetSpec | None, model: ModelSpec, listed: list[Default]
) -> dict[str, Any]:
    """The run with the framework its task, model and GPUs ask for."""
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


def default_run(
    given: Any, task: str, fleet: FleetSpec | None, model: ModelSpec, listed: list[Default]
) -> dict[str, Any]:
    """The documented run of a bare model; keys set by flags stay."""
    run: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    if "task" not in run:
        listed.append(Default("run.task", task, "nobody said; --task serve plans serving"))
        run["task"] = task
    if "framework" not in run and run["task"] in TASKS:
        run = default_framework(run, fleet, model, listed)
    if run["task"] == "train" and "micro_batch" not in run:
        listed.append(Default("run.micro_batch", 1, "the smallest; auto searches the largest that fits"))
        run["micro_batch"] = 1
    return run


def train_defaults(run: TrainRun, model: ModelSpec) -> tuple[TrainRun, tuple[Default, ...]]:
    """The run with every key filled that does not depend on the layout, and what was filled."""
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


def serve_defaults(
    run: ServeRun, model: ModelSpec, engine_length: bool = False
) -> tuple[ServeRun, tuple[Default, ...]]:
    """The same for a deployment; `engine_length`: its engine takes the model's whole context."""
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
