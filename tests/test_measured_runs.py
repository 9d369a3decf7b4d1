"""Published training runs as their sources write them: what is read from each, and what it lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_up import row

from gpucalc.catalog import Catalog
from gpucalc.measured import Convention, Conventions, Skip
from gpucalc.measured_runs import Network, Normaliser, Ready
from gpucalc.spec.train_run import TrainRun

CATALOGS = Path(__file__).parent.parent / "catalogs"


@pytest.fixture(scope="module")
def normaliser(catalog: Catalog) -> Normaliser:
    return Normaliser(catalog)


def run_of(normaliser: Normaliser, **changes: Any) -> tuple[TrainRun, tuple[str, ...]]:
    ready = normaliser.job_of(row(**changes))
    assert isinstance(ready, Ready), ready
    assert isinstance(ready.job.run, TrainRun)
    return ready.job.run, ready.notes


def test_a_complete_row_needs_nothing(normaliser: Normaliser) -> None:
    run, notes = run_of(normaliser)
    assert notes == ()
    assert (run.micro_batch, run.grad_accum, run.dp, run.global_batch) == (2, 2, 8, 32)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"run.dp": None}, "dp", 8),
        ({"run.grad_accum": None}, "grad_accum", 2),
        ({"run.micro_batch": None}, "micro_batch", 2),
        ({"run.global_batch": None}, "global_batch", 32),
        ({"run.micro_batch": None, "run.grad_accum": None, "run.global_batch": 8}, "micro_batch", 1),
        ({"run.zero_stage": "fsdp-full-shard"}, "zero_stage", 3),
        ({"run.zero_stage": "fsdp-shard-grad-op"}, "zero_stage", 2),
        ({"run.framework": "hf", "run.zero_stage": "fsdp-full-shard"}, "framework", "fsdp"),
        ({"run.framework": "tensorflow2", "run.zero_stage": 0}, "framework", "ddp"),
        ({"run.framework": "mxnet", "run.zero_stage": 0}, "framework", "ddp"),
        ({"run.framework": "internevo", "run.zero_stage": 1}, "framework", "deepspeed"),
        ({"run.precision_detail": "bf16-true (weights and grads bf16)"}, "precision", "bf16-pure"),
        ({"run.precision_detail": "bf16; FSDP mixed_precision=PURE"}, "precision", "bf16"),
        ({"run.optimizer": "AdamW8bit"}, "optimizer", "adamw-8bit"),
        ({"run.recompute": "selective-op"}, "recompute", "selective-op"),
        ({"run.offload": "cpu (DeepSpeed)"}, "offload", "params+optimizer-cpu"),
        ({"run.quantization": "bnb.nf4-dq"}, "method", "qlora"),
        ({"run.method": "adapter", "run.lora": {"trainable": 1229760}}, "method", "lora"),
    ],
)
def test_fields_as_sources_write_them(
    normaliser: Normaliser, changes: dict[str, Any], field: str, value: Any
) -> None:
    run, _ = run_of(normaliser, **changes)
    assert getattr(run, field) == value


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gpus": None, "hardware.gpus": None, "run.dp": None}, "gpus"),
        ({"model": None}, "model"),
        ({"model": "no-such-model"}, "no-such-model"),
        ({"model": {"name": "nobody-knows-1t", "params": 1e12}}, "model.layers"),
        ({"run.framework": None}, "run.framework"),
        ({"run.precision": None}, "run.precision"),
        ({"run.seq_len": None}, "run.seq_len"),
        ({"run.micro_batch": None, "run.grad_accum": None}, "run.micro_batch"),
        ({"run.dp": 3}, "run.dp"),
        ({"run.tp": 3, "run.dp": None}, "does not divide"),
    ],
)
def test_a_lacking_row_is_skipped_by_the_field_it_lacks(
    normaliser: Normaliser, changes: dict[str, Any], named: str
) -> None:
    found = normaliser.job_of(row(**changes))
    assert isinstance(found, Skip)
    assert named in found.reason


def test_without_a_named_gpu_only_memory_is_compared(normaliser: Normaliser) -> None:
    found = normaliser.job_of(row(gpus=None))
    assert isinstance(found, Ready)
    assert found.memory_only == "gpus not stated"


def test_a_factor_that_does_not_multiply_out_is_said(normaliser: Normaliser) -> None:
    run, notes = run_of(normaliser, **{"run.global_batch": 126})
    assert run.global_batch == 32
    assert any("126" in note for note in notes)


def test_an_inline_model_that_is_a_catalogue_model_is_that_model(normaliser: Normaliser) -> None:
    ready = normaliser.job_of(row(model={"name": "llama-2-7b", "layers": 32, "hidden": 4096}))
    assert isinstance(ready, Ready)
    assert ready.job.model == "llama-2-7b"


def test_words_in_brackets_are_not_part_of_a_model_name(normaliser: Normaliser) -> None:
    ready = normaliser.job_of(row(model={"name": "llama-3-8b (size not named in the README)"}))
    assert isinstance(ready, Ready)
    assert ready.job.model == "llama-3-8b"


def test_a_truncated_model_keeps_the_rest_of_its_shape(normaliser: Normaliser) -> None:
    ready = normaliser.job_of(row(model={"name": "llama-2-7b (4 layers)", "layers": 4}))
    assert isinstance(ready, Ready)
    assert isinstance(ready.job.model, dict)
    assert (ready.job.model["layers"], ready.job.model["hidden"]) == (4, 4096)


def test_another_image_size_scales_a_traced_network(normaliser: Normaliser) -> None:
    changes = {"model": {"name": "resnet50-v1.5", "image_size": 448}, "run.seq_len": None}
    ready = normaliser.job_of(row(**changes))
    assert isinstance(ready, Ready)
    assert isinstance(ready.job.model, dict)
    assert ready.job.model["gflops_forward"] == pytest.approx(4 * 8.178368512, rel=1e-6)
    assert any("224" in note and "448" in note for note in ready.notes)


def test_a_documented_default_fills_only_what_is_not_said(catalog: Catalog) -> None:
    rule = Convention(
        {"run.stack": "stack*", "run.seq_len": None},
        {"run.seq_len": 384},
        "its script says so",
        "a repository",
    )
    with_rule = Normaliser(catalog, Conventions(defaults=(rule,)))
    run, notes = run_of(with_rule, **{"run.stack": "Stack 2", "run.seq_len": None})
    assert run.seq_len == 384
    assert any("its script says so" in note and "a repository" in note for note in notes)
    run, notes = run_of(with_rule, **{"run.stack": "Stack 2"})
    assert (run.seq_len, notes) == (4096, ())


def test_the_source_s_nodes_decide_where_gpus_sit(normaliser: Normaliser) -> None:
    changes = {"gpus": "16xv100-sxm2-32gb", "hardware.nodes": 1, "run.dp": 16, "run.global_batch": 64}
    ready = normaliser.job_of(row(**{**changes, "run.precision": "fp16"}))
    assert isinstance(ready, Ready)
    assert ready.job.system == "dgx2"


@pytest.mark.parametrize(
    ("words", "gbit", "per_gpu", "kind"),
    [
        ("1600 Gbps node-node RoCE", 1600, False, "roce"),
        ("400 Gb/s RDMA per GPU", 400, True, "ib"),
        ("8x50 GB/s InfiniBand", 3200, False, "ib"),
        ("8x HDR200 IB (Selene)", 1600, False, "ib"),
        ("400 Gbps", 400, False, "ib"),
        ("25 Gbit/s Ethernet", 25, False, "ethernet"),
    ],
)
def test_networks_as_sources_word_them(words: str, gbit: float, per_gpu: bool, kind: str) -> None:
    assert Network.of(words) == Network(gbit, per_gpu, kind)


def test_a_network_without_a_rate_is_not_guessed() -> None:
    assert Network.of("NVLink pairs") is None


def test_a_stack_s_own_meaning_replaces_a_word(catalog: Catalog) -> None:
    rule = Convention(
        {"run.stack": "s", "run.recompute": "selective"}, {"run.recompute": "full"}, "w", "r", replaces=True
    )
    run, _ = run_of(
        Normaliser(catalog, Conventions(defaults=(rule,))), **{"run.stack": "s", "run.recompute": "selective"}
    )
    assert run.recompute == "full"
