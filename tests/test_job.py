"""What a job may say, and how everything else is refused: file, key, value, legal values, nearest name."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from gpucalc.errors import InputError, UnknownName
from gpucalc.spec.base import Spec
from gpucalc.spec.defaults import with_defaults
from gpucalc.spec.job import Job
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.train_run import Lora, TrainRun

TRAIN: dict[str, Any] = {"task": "train", "framework": "fsdp", "precision": "bf16", "seq_len": 8192}
SERVE: dict[str, Any] = {"task": "serve", "framework": "vllm"}


def read(run: dict[str, Any], **top: Any) -> Job:
    return Job.read({"model": "llama-3-8b", "gpus": "8xH100", "run": run, **top}, where="job.yaml")


def problem(run: dict[str, Any], **top: Any) -> str:
    with pytest.raises(InputError) as caught:
        read(run, **top)
    message = str(caught.value)
    assert message.startswith("job.yaml: ")
    assert message.isprintable()
    assert caught.value.exit_code == 2
    assert "pydantic" not in message
    assert "validation" not in message
    return message


def test_a_job_reads() -> None:
    job = read({**TRAIN, "global_batch": 128, "tp": 1, "recompute": "full"}, expect={"fits": True})
    assert isinstance(job.run, TrainRun)
    assert job.run.global_batch == 128
    assert job.run.micro_batch == "auto"
    assert job.fleet.count == 8
    with pytest.raises(ValidationError):
        job.run.tp = 2  # type: ignore[misc]


def test_the_task_picks_the_run() -> None:
    assert isinstance(read({**SERVE, "isl": 1024}).run, ServeRun)


@pytest.mark.parametrize("key", ["seq_len", "micro_batch", "global_batch", "tokens", "dp", "grad_accum"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "must not be zero, got 0"),
        (-1, "must be positive, got -1"),
        (float("nan"), "must be a number, not NaN, got nan"),
        (float("inf"), "is out of range, got inf"),
        (1e30, "is out of range, got 1e+30"),
        (10**30, "is out of range"),
        (1.5, "is out of range, got 1.5"),
        ("8", "must be a number, not text, got '8'"),
        (True, "must be a number, got True"),
        ([8], "must be a number"),
    ],
)
def test_sizes_are_positive_whole_and_sane(key: str, value: object, words: str) -> None:
    message = problem({**TRAIN, key: value})
    assert f"run.{key}: {words}" in message
    assert "legal: a whole number from 1 to " in message


@pytest.mark.parametrize(
    ("words", "tokens"), [("15T", 15 * 10**12), ("1.5 b", 1_500_000_000), ("300M", 3 * 10**8)]
)
def test_a_token_budget_may_end_in_its_thousands(words: str, tokens: int) -> None:
    assert TrainRun.read({**TRAIN, "tokens": words}).tokens == tokens
    assert "15T" in problem({**TRAIN, "tokens": "15X"})


def test_a_number_may_be_written_with_an_exponent() -> None:
    run = read({**TRAIN, "tokens": 1e9, "seq_len": 1e4}).run
    assert isinstance(run, TrainRun)
    assert (run.tokens, run.seq_len) == (10**9, 10_000)
    assert type(run.tokens) is int


@pytest.mark.parametrize("word", ["no", "yes", "on", "off"])
def test_a_word_is_not_a_boolean(word: str) -> None:
    assert f"run.compile: must be true or false (`{word}` is text" in problem({**TRAIN, "compile": word})
    assert "run.compile: must be true or false, got 1" in problem({**TRAIN, "compile": 1})


def test_an_unknown_key_is_named_with_its_neighbours() -> None:
    message = problem({**TRAIN, "presicion": "bf16"})
    assert "run.presicion: no such key" in message
    assert "did you mean precision" in message
    with pytest.raises(UnknownName) as caught:
        Job.read({"model": "m", "gpuz": "8xH100", "run": TRAIN}, where="job.yaml")
    assert caught.value.key == "gpuz"
    assert caught.value.near == ("gpus",)
    assert "did you mean rank?" in problem({**TRAIN, "method": "lora", "lora": {"rnk": 8}})


def test_a_key_of_the_other_task_is_refused_as_such() -> None:
    message = problem({**TRAIN, "max_model_len": 4096})
    assert "run.max_model_len: is a key of serving runs, not of training" in message
    assert "run.optimizer: is a key of training runs, not of serving" in problem(
        {**SERVE, "optimizer": "adam"}
    )


@pytest.mark.parametrize(
    ("key", "value", "near"),
    [
        ("framework", "fdsp", "fsdp"),
        ("framework", "megatorn", "megatron"),
        ("precision", "bf61", "bf16"),
        ("optimizer", "adamq", "adam"),
        ("recompute", "selectiv", "selective"),
        ("method", "lroa", "lora"),
        ("attention", "flesh", "flash"),
        ("offload", "optimizer-cpus", "optimizer-cpu"),
    ],
)
def test_a_mistyped_choice_is_refused_with_the_nearest(key: str, value: str, near: str) -> None:
    message = problem({**TRAIN, key: value})
    assert f"run.{key}: is not a legal value, got '{value}'; legal: " in message
    assert f"did you mean {near}" in message


def test_a_missing_or_unknown_task_lists_both() -> None:
    assert "run.task: is missing; legal: train, serve" in problem({"framework": "fsdp"})
    assert "run.task: is not a legal value, got 'serv'; legal: train, serve; did you mean serve?" in problem(
        {**TRAIN, "task": "serv"}
    )
    assert "run.framework: is missing; legal: ddp, fsdp" in problem({"task": "train"})


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (
            {"framework": "ddp", "tp": 2},
            "run.tp: does not apply to ddp, got 2; legal: with framework megatron",
        ),
        ({"framework": "fsdp", "pp": "auto"}, "run.pp: does not apply to fsdp"),
        ({"framework": "ddp", "vpp": 2}, "run.vpp: does not apply to ddp"),
        ({"framework": "ddp", "zero_stage": 3}, "run.zero_stage: ddp has no such sharding stage, got 3"),
        ({"framework": "fsdp", "zero_stage": 1}, "run.zero_stage: fsdp has no such sharding stage"),
        ({"framework": "deepspeed", "zero_stage": 4}, "run.zero_stage: is not a sharding stage, got 4"),
        ({"framework": "megatron", "gradient_as_bucket_view": True}, "does not apply to megatron"),
        ({"framework": "fsdp", "offload": "optimizer-nvme"}, "run.offload: does not apply to fsdp"),
        ({"framework": "ddp", "offload": "cpu"}, "keeps every parameter on every GPU"),
        ({"attention": "flash", "flash_attention": False}, "contradicts attention: flash"),
        ({"zero_stage": 2, "reshard_after_forward": True}, "contradicts zero_stage: 2"),
        ({"lora": {"rank": 8}}, "run.lora: needs a method that uses it"),
        ({"quantization": "nf4"}, "run.quantization: a quantised base cannot be trained in full"),
        ({"quantization_block": 128}, "run.quantization_block: a quantised base cannot be trained in full"),
        (
            {"method": "qlora", "quantization": "int8", "quantization_block": 128},
            "run.quantization_block: does not apply to quantization: int8",
        ),
        ({"method": "lora", "lora": {"rank": 0}}, "run.lora.rank: must not be zero"),
        ({"method": "lora", "lora": 5}, "run.lora: must be a group of keys, got 5"),
    ],
)
def test_keys_that_mean_nothing_here_are_refused(run: dict[str, Any], words: str) -> None:
    assert words in problem({**TRAIN, **run})


def test_values_that_switch_nothing_on_are_legal_anywhere() -> None:
    read(
        {**TRAIN, "framework": "ddp", "tp": 1, "pp": 1, "vpp": 1, "zero_stage": 0, "sequence_parallel": False}
    )


def test_every_problem_is_named_at_once_and_the_legal_keys_once() -> None:
    message = problem({**TRAIN, "seq_len": 0, "tp": -1, "foo": 3, "bar": 2}, gpus="8 H100")
    for words in ("gpus: write 8xH100", "run.seq_len: must not be zero", "run.tp: must be positive"):
        assert words in message
    assert "run.foo: no such key" in message
    assert "run.bar: no such key" in message
    assert message.count("legal: task, framework") == 1


@pytest.mark.parametrize(
    ("top", "words"),
    [
        ({"gpus": "0xH100"}, "gpus: a count must be at least 1"),
        ({"gpus": 8}, "gpus: is not a GPU list, got 8"),
        ({"model": ""}, "model: is not a model, got ''"),
        ({"model": {}}, "model: is empty"),
        ({"model": 3}, "model: is not a model, got 3"),
        ({"run": 5}, "run: must be a group of keys, got 5"),
        ({"run": None}, "run: must be a group of keys"),
        ({"expect": [1]}, "expect: must be a group of keys"),
        ({"name": 3}, "name: must be text, got 3; legal: the same in quotes"),
    ],
)
def test_the_top_level(top: dict[str, Any], words: str) -> None:
    assert words in problem(**{"run": TRAIN, **top})


def test_no_gpus_is_an_error_when_they_are_needed() -> None:
    with pytest.raises(InputError, match="no GPUs given"):
        _ = Job.read({"model": "m", "run": TRAIN}).fleet


@pytest.mark.parametrize(
    ("key", "given", "kept"),
    [
        ("precision", "bfloat16", "bf16"),
        ("precision", "BF16-Mixed", "bf16"),
        ("precision", "bf16_pure", "bf16-pure"),
        ("optimizer", "AdamW8bit", "adamw-8bit"),
        ("optimizer", "adamw_torch_fused", "adamw-fused"),
        ("offload", "cpu", "params+optimizer-cpu"),
        ("zero_stage", "full-shard", 3),
        ("zero_stage", "fsdp-shard-grad-op", 2),
    ],
)
def test_other_spellings_become_one(key: str, given: str, kept: object) -> None:
    assert getattr(read({**TRAIN, key: given}).run, key) == kept


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"gpu_memory_utilization": 90}, "is out of range, got 90; legal: a fraction above 0, at most 1"),
        ({"gpu_memory_utilization": 0}, "must not be zero"),
        ({"ttft_ms": -5}, "must be positive"),
        ({"mem_fraction_static": 0.8}, "does not apply to vllm"),
        ({"framework": "llamacpp", "gpu_memory_utilization": 0.9}, "does not apply to llamacpp"),
        ({"quant": "awk"}, "did you mean awq"),
        ({"kv_dtype": "fp7"}, "run.kv_dtype: is not a legal value"),
        ({"isl": 0}, "run.isl: must not be zero"),
    ],
)
def test_serving_runs_are_checked_alike(run: dict[str, Any], words: str) -> None:
    assert words in problem({**SERVE, **run})


@pytest.mark.parametrize(
    ("given", "kept"),
    [("q4_k_m", "q4_k_m"), ("Q8_0", "q8_0"), ("iq1_s", "iq1_s"), ("AWQ", "awq"), ("fp8", "fp8")],
)
def test_quantisations_of_weights(given: str, kept: str) -> None:
    run = read({**SERVE, "quant": given}).run
    assert isinstance(run, ServeRun)
    assert run.quant == kept


def test_defaults_are_filled_and_listed_with_reasons() -> None:
    run, defaults = with_defaults(TrainRun(framework="fsdp", seq_len=4096, micro_batch=1))
    listed = {default.key: default.value for default in defaults}
    assert listed["run.zero_stage"] == 3
    assert listed["run.optimizer"] == "adamw"
    assert listed["run.attention"] == "sdpa"
    assert all(default.why for default in defaults)
    assert (run.zero_stage, run.attention, run.reshard_after_forward, run.etp) == (3, "sdpa", True, 1)
    again, none = with_defaults(run)
    assert again == run
    assert none == ()


def test_what_is_said_in_other_words_is_no_default() -> None:
    run, defaults = with_defaults(
        TrainRun(framework="fsdp", reshard_after_forward=False, flash_attention=True, seq_len=128)
    )
    assert (run.zero_stage, run.attention) == (2, "flash")
    assert not {"run.zero_stage", "run.attention"} & {default.key for default in defaults}


def test_defaults_follow_the_framework() -> None:
    megatron, listed = with_defaults(TrainRun(framework="megatron", tp=8, ep=4))
    assert (megatron.zero_stage, megatron.sequence_parallel, megatron.attention) == (1, True, "flash")
    assert megatron.etp == 8
    assert "run.sequence_parallel" in {default.key for default in listed}
    assert with_defaults(TrainRun(framework="ddp"))[0].zero_stage == 0
    lora, _ = with_defaults(TrainRun(framework="hf", method="qlora"))
    assert lora.lora == Lora()
    assert lora.quantization == "nf4"


GRAPHS = {"framework": "megatron", "seq_len": 64, "micro_batch": 1}


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"cuda_graphs": ["full", "attn"]}, "all or nothing"),
        ({"cuda_graphs": ["moe_preprocess"]}, "captured with moe_router"),
        ({"cuda_graphs": ["moe", "moe_router"]}, "part of moe"),
        ({"cuda_graphs": ["attn"], "recompute": "full"}, "whole layers are recomputed"),
        (
            {"cuda_graphs": "moe_router", "recompute": "selective", "recompute_modules": ["moe"]},
            "captured router",
        ),
        ({"cuda_graphs": "attn", "offload": "activations-cpu"}, "does not go with cuda_graphs"),
        ({"cuda_graphs": "attn", "framework": "torchtitan"}, "does not apply to torchtitan"),
        ({"cuda_graphs": "attention"}, "not a legal value"),
    ],
)
def test_what_cannot_be_captured_is_refused(run: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        TrainRun.read({**GRAPHS, **run})


def test_captured_graphs_are_words_and_none_until_asked_for() -> None:
    assert TrainRun.read({**GRAPHS, "cuda_graphs": "attn, moe-router"}).cuda_graphs == ("attn", "moe_router")
    assert TrainRun.read({**GRAPHS, "cuda_graphs": "full_iteration"}).cuda_graphs == ("full",)
    assert TrainRun.read({**GRAPHS, "cuda_graphs": "full", "recompute": "full"}).recompute == "full"
    # Nothing captured is legal in every framework, and goes with every offload.
    assert TrainRun.read({**GRAPHS, "framework": "fsdp", "cuda_graphs": "none"}).cuda_graphs == ("none",)
    TrainRun.read({**GRAPHS, "cuda_graphs": "none", "offload": "activations-cpu"})
    run, listed = with_defaults(TrainRun.read(GRAPHS))
    assert run.cuda_graphs == ("none",)
    assert "run.cuda_graphs" in {item.key for item in listed}
    fsdp = with_defaults(TrainRun.read({**GRAPHS, "framework": "fsdp"}))[1]
    assert "run.cuda_graphs" not in {item.key for item in fsdp}


def test_numbers_text_and_booleans_are_never_reinterpreted() -> None:
    class Inner(Spec):
        count: int

    class Outer(Spec):
        number: float = 1.0
        flag: bool = False
        names: tuple[str, ...] = ()
        inner: Inner | None = None

    assert Outer.read({"number": 3, "names": ["a"], "inner": {"count": 1e3}}).inner == Inner(count=1000)
    for data, words in (
        ({"number": "3"}, "number: must be a number, got '3'"),
        ({"number": True}, "number: must be a number, got True"),
        ({"number": float("nan")}, "number: must be a finite number"),
        ({"flag": "true"}, "flag: must be true or false"),
        ({"names": "a"}, "names: must be a list"),
        ({"names": [1]}, "names.0: must be text, got 1"),
        ({"inner": {"count": "1"}}, "inner.count: must be a whole number, got '1'"),
        ({"inner": {}}, "inner.count: is missing"),
    ):
        with pytest.raises(InputError) as caught:
            Outer.read(data, where="f.yaml")
        assert f"f.yaml: {words}" in str(caught.value)


def test_a_message_from_a_file_cannot_reach_the_terminal() -> None:
    message = problem({**TRAIN, "\x1b[31mred": 1, "precision": "\x1b[2J"})
    assert "\x1b" not in message


def test_the_schema_is_json() -> None:
    schema = json.loads(json.dumps(Job.model_json_schema()))
    assert schema["additionalProperties"] is False
    assert schema["properties"]["run"]["discriminator"]["propertyName"] == "task"


def test_importing_the_spec_is_cheap() -> None:
    heavy = ("numpy", "torch", "rich", "difflib", "gpucalc.spec.problems")
    code = f"import sys, gpucalc.spec.job\nprint([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
