"""Networks known by their totals, run forward alone: memory by hand, rates, and what does not apply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpucalc.catalog import Catalog
from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.formulas.compute import network_rate_per_s
from gpucalc.formulas.serving_memory import network_live_bytes
from gpucalc.jobs import resolve, resolve_data
from gpucalc.plan.answer import Plan
from gpucalc.planner import plan_job

CATALOG = Catalog([Path(__file__).parents[1] / "catalogs"])
NETWORK: dict[str, Any] = {
    "name": "net", "kind": "cnn", "family": "traced", "params_total": 25_000_000, "image_size": 224,
    "gflops_forward": 8.0, "saved_elements": 20e6, "traffic_elements": 60e6, "layers": 200,
    "native_dtype": "float32", "live_elements": 3e6,
    "trace": {"inputs": ["1x3x224x224"], "torch": "2.13.0", "buffers": 50_000,
              "saved_bytes_per_sample": 80e6, "check_batch": 7,
              "check_error": 0.0},
}  # fmt: skip


def served(model: Any = NETWORK, gpus: str = "1xA100-SXM-80GB", **run: Any) -> Plan:
    job = {"model": model, "gpus": gpus, "run": {"task": "serve", "framework": "hf", **run}}
    return plan_job(resolve_data(job, CATALOG, where="job"), CATALOG)


def test_formulas_by_hand() -> None:
    assert network_live_bytes(images=8, live_elements=3e6, element_bytes=2) == 48e6
    assert network_rate_per_s(images=32, cards=4, seconds=0.5) == 256


def test_memory_is_weights_statistics_activations_and_the_context() -> None:
    answer = served(concurrency=64, dtype="bf16")
    parts = {line.name: line.value for line in answer.memory.children}
    assert parts == {
        "weights": 50_000_000,
        "buffers": 100_000,
        "activation_peak": 64 * 3e6 * 2,
        "cuda_context": 512 * 2**20,
    }
    wide = served(concurrency=64, dtype="fp32")
    assert wide.memory.child("weights").value == 100_000_000
    assert wide.memory.child("activation_peak").value == 64 * 12e6


def test_a_pass_is_a_training_step_without_its_backward_half() -> None:
    answer = served(concurrency=64)
    assert answer.time is not None
    assert answer.throughput is not None
    assert answer.throughput.value == pytest.approx(64 / answer.time.value)
    train = {"task": "train", "framework": "ddp", "micro_batch": 64, "precision": "bf16-pure"}
    job = {"model": NETWORK, "gpus": "1xA100-SXM-80GB", "run": train}
    step = plan_job(resolve_data(job, CATALOG, where="job"), CATALOG, advice=False).time
    assert step is not None
    assert answer.time.value < step.value / 2
    assert answer.time.child("forward").value == pytest.approx(step.child("forward").value, rel=1e-9)


def test_every_card_answers_for_itself() -> None:
    one, four = served(concurrency=8), served(gpus="4xA100-SXM-80GB", concurrency=8)
    assert one.throughput is not None
    assert four.throughput is not None
    assert four.throughput.value == pytest.approx(4 * one.throughput.value)
    assert four.memory.value == one.memory.value


def test_a_batch_too_large_has_no_speed() -> None:
    answer = served(concurrency=100_000)
    assert answer.verdict.level.value == "does_not_fit"
    assert answer.time is None
    assert answer.cost is None


def test_without_a_trace_training_bounds_the_activations_and_it_is_said() -> None:
    answer = served({key: value for key, value in NETWORK.items() if key != "live_elements"}, concurrency=2)
    assert any("as all that training would keep" in note for note in answer.notes)
    assert answer.memory.child("activation_peak").kind.value == "assumed"


@pytest.mark.parametrize(
    ("run", "words"),
    [({"framework": "vllm"}, "hf"), ({"tp": 2}, r"run\.tp"), ({"isl": 5}, r"run\.isl"),
     ({"dtype": "fp8"}, "dtype")],
)  # fmt: skip
def test_what_only_language_models_have_is_refused(run: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        served(**run)


def test_parameters_alone_are_not_enough() -> None:
    bare = {
        key: value
        for key, value in NETWORK.items()
        if key not in ("trace", "saved_elements", "live_elements")
    }
    with pytest.raises(UnsupportedModel, match="what lives in a forward pass is not known"):
        served(bare)


def test_the_bare_sentence_works() -> None:
    job = resolve("resnet-50", CATALOG, gpus="1xA100-SXM-80GB", task="serve")
    answer = plan_job(job, CATALOG)
    assert answer.verdict.level.value == "fits"
    said = {item.key for item in answer.assumptions}
    assert {"run.framework", "run.concurrency", "run.dtype"} <= said
    assert not said & {"run.kv_dtype", "run.isl", "run.max_model_len"}
