"""`gpucalc validate`: statistics by hand, rows as sources write them, the promise over published runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpucalc.catalog import Catalog
from gpucalc.errors import InputError, UnknownName
from gpucalc.estimate_training import Estimate
from gpucalc.measured import Convention, Conventions, Row, Skip, read_rows
from gpucalc.measured_runs import Network, Normaliser, Ready, conventions_of
from gpucalc.points import Point, Skipped, statistics, weighted_quantile
from gpucalc.spec.train_run import TrainRun
from gpucalc.units import GB, GIB
from gpucalc.validate import Bounds, Report, parse_where, validate
from gpucalc.validate_training import QUANTITIES, FitCase, Reading, compare_training, fit_counts, speed_of

CATALOGS = Path(__file__).parent.parent / "catalogs"


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog([CATALOGS])


@pytest.fixture(scope="module")
def normaliser(catalog: Catalog) -> Normaliser:
    return Normaliser(catalog)


def row(**changes: Any) -> Row:
    """A complete row; a dotted key changes one value, None removes it."""
    data: dict[str, Any] = {
        "id": "made-up",
        "quality": "A",
        "model": "llama-2-7b",
        "gpus": "8xa100-sxm-80gb",
        "hardware": {"nodes": 1},
        "run": {
            "task": "train",
            "framework": "fsdp",
            "precision": "bf16",
            "seq_len": 4096,
            "micro_batch": 2,
            "global_batch": 32,
            "grad_accum": 2,
            "dp": 8,
            "zero_stage": 3,
            "recompute": "full",
            "optimizer": "adamw",
        },
        "measured": {"tokens_per_s_per_gpu": 3000, "oom": False},
        "group": "made up",
    }
    for key, value in changes.items():
        *groups, last = key.split(".")
        inside = data
        for group in groups:
            inside = inside.setdefault(group, {})
        if value is None:
            inside.pop(last, None)
        else:
            inside[last] = value
    return Row(data, "test")


def run_of(normaliser: Normaliser, **changes: Any) -> tuple[TrainRun, tuple[str, ...]]:
    ready = normaliser.job_of(row(**changes))
    assert isinstance(ready, Ready), ready
    assert isinstance(ready.job.run, TrainRun)
    return ready.job.run, ready.notes


def point(ratio: float, group: str = "a", quantity: str = "throughput", **more: Any) -> Point:
    facts: dict[str, Any] = {
        "id": f"{group}-{ratio}",
        "unit": "tokens/s/GPU",
        "framework": "fsdp",
        "stack": "fsdp",
        "gpu": "a100",
        "arch": "ampere",
        "model": "m",
        "quality": "A",
        "meter": "",
    }
    return Point(quantity=quantity, measured=100.0, estimated=100.0 * ratio, group=group, **(facts | more))


# -- statistics -----------------------------------------------------------------------------------


def test_quantile_by_hand() -> None:
    # Cumulated weights 1, 2, 4 of 4: half of the weight is reached exactly at 20, so halfway to 30.
    assert weighted_quantile([30.0, 10.0, 20.0], [2.0, 1.0, 1.0], 0.5) == 25.0
    assert weighted_quantile([30.0, 10.0, 20.0], [1.0, 1.0, 1.0], 0.5) == 20.0
    assert weighted_quantile([1.0, 2.0, 3.0, 4.0], [1.0] * 4, 0.5) == 2.5
    assert weighted_quantile([1.0, 2.0, 3.0, 4.0], [1.0] * 4, 0.9) == 4.0
    assert weighted_quantile([7.0], [0.1], 0.9) == 7.0


def test_groups_weigh_the_same() -> None:
    # Group a has one row off by 40 %, group b four rows off by 10 %: over rows the median is 10 %, over
    # groups half of the weight lies at 10 % and half at 40 %, so the median is halfway.
    points = [point(1.4, "a"), *[point(0.9, "b") for _ in range(4)]]
    found = statistics(points)
    assert (found.rows, found.groups) == (5, 2)
    assert found.median_abs == pytest.approx(0.25)
    assert found.median_abs_rows == pytest.approx(0.10)
    assert found.p90_abs == pytest.approx(0.40)
    assert found.signed_median == pytest.approx((0.4 - 0.1) / 2)
    assert found.signed_median_rows == pytest.approx(-0.10)


def test_nothing_compared_has_no_median() -> None:
    found = statistics([], skipped=3)
    assert found.median_abs is None
    assert found.skipped == 3


def test_ratio_is_estimated_over_measured() -> None:
    assert point(1.25).ratio == 1.25
    assert point(1.25).error == 0.25


def test_fit_verdicts_by_hand() -> None:
    cases = (
        FitCase("1", "g", True, 70.0, 80.0),  # right
        FitCase("2", "g", True, 90.0, 80.0),  # ran, though too large is said
        FitCase("3", "g", False, 90.0, 80.0),  # right
        FitCase("4", "g", False, 70.0, 80.0),  # ran out, though fits is said, with an eighth to spare
        FitCase("5", "g", False, 76.0, 80.0, 0.10),  # too close to tell: 76 + 10 % is more than 80
        FitCase("6", "g", True, 84.0, 80.0, 0.05),  # 84 - 5 % is less
        FitCase("7", "g", False, 76.0, 80.0, 0.05),  # fits is said, with a twentieth to spare
    )
    assert fit_counts(cases) == {
        "rows": 7,
        "right": 4,
        "marginal": 2,
        "says_fits_ran_out": 2,
        "says_too_large_ran": 1,
        "ran_out": 4,
        "says_room_ran_out": 1,
    }


def test_a_verdict_needs_what_it_rests_on(normaliser: Normaliser) -> None:
    ran = {"oom": False}
    rows = [
        row(id="whole", measured=ran),
        row(id="recompute", measured=ran, **{"run.recompute": None}),
        row(id="usual", measured=ran, **{"run.optimizer": None, "run.framework": "torchtitan"}),
        row(id="optimizer", measured=ran, **{"run.optimizer": None, "run.framework": "fsdp"}),
        row(id="stage", measured=ran, **{"run.zero_stage": None, "run.framework": "deepspeed"}),
    ]
    report = compare_training(rows, normaliser=normaliser, estimator=fixed, quantities=("peak_memory",))
    assert [case.id for case in report.fits] == ["whole", "usual"]
    assert [(one.id, one.quantity, one.reason) for one in report.undecided] == [
        ("recompute", "fits", "run.recompute not stated"),
        ("optimizer", "fits", "run.optimizer not stated"),
        ("stage", "fits", "run.zero_stage not stated"),
    ]
    assert report.skipped == ()


def test_broken_promises_are_named() -> None:
    report = Report(
        10, (point(1.5), point(1.01, quantity="peak_memory")), (Skipped("x", "throughput", "why", "g"),), ()
    )
    assert report.broken(Bounds(skipped=0.5)) == ("throughput: median error 50.0% is above 10%",)
    assert any("1 of 10 rows skipped" in text for text in report.broken(Bounds(skipped=0.05)))


# -- what a row measured --------------------------------------------------------------------------

ESTIMATE = Estimate(
    allocated_bytes=40 * GIB,
    reserved_bytes=42 * GIB,
    device_bytes=43 * GIB,
    capacity_bytes=79 * GIB,
    arch="ampere",
    gpus=8,
    step_s=2.0,
    samples=32.0,
    tokens=131_072.0,
    model_flops=16e15,
    causal_model_flops=15e15,
    hardware_flops=20e15,
    peak_flops_per_s=312e12,
)


@pytest.mark.parametrize(
    ("measured", "unit", "estimated"),
    [
        ({"tokens_per_s_per_gpu": 8000, "tflops_per_gpu": 100}, "tokens/s/GPU", 131_072 / 2 / 8),
        ({"samples_per_s": 20, "step_time_s": 1.6}, "samples/s", 16.0),
        ({"step_time_s": 4.0, "tflops_per_gpu": 100}, "steps/s", 0.5),
        ({"tflops_per_gpu": 900, "tflops_kind": "model"}, "TFLOP/s/GPU", 1000.0),
        ({"tflops_per_gpu": 900, "tflops_kind": "model-causal"}, "TFLOP/s/GPU", 937.5),
        ({"tflops_per_gpu": 900, "tflops_kind": "hardware"}, "TFLOP/s/GPU", 1250.0),
        ({"mfu": 0.5}, "fraction of peak", 1e15 / 312e12),
    ],
)
def test_one_speed_per_row(measured: dict[str, Any], unit: str, estimated: float) -> None:
    found = speed_of(row(measured=measured))
    assert isinstance(found, Reading)
    assert found.unit == unit
    assert found.of(ESTIMATE) == pytest.approx(estimated)


def test_a_slower_step_is_a_lower_speed() -> None:
    found = speed_of(row(measured={"step_time_s": 4.0}))
    assert isinstance(found, Reading)
    assert found.of(ESTIMATE) / found.value == pytest.approx(
        2.0
    )  # 2 s estimated, 4 s measured: twice as fast


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        ({"microbatch_iter_time_s": 0.14}, "microbatch_iter_time_s"),
        ({"tflops_per_gpu": 100}, "tflops_kind"),
        ({"wall_hours": 12}, "run.tokens"),
    ],
)
def test_speeds_that_cannot_be_compared_say_why(measured: dict[str, Any], reason: str) -> None:
    found = speed_of(row(measured=measured))
    assert isinstance(found, Skip)
    assert reason in found.reason


def test_a_row_without_speed_is_no_point_and_no_skip() -> None:
    assert speed_of(row(measured={"oom": False})) is None


METERS = Conventions(
    meters=(
        Convention(
            {"run.framework": "torchtitan"}, {"meter": "reserved", "gb_is": "GiB"}, "its log", "source"
        ),
    )
)


@pytest.mark.parametrize(
    ("changes", "kind", "size"),
    [
        ({"measured": {"peak_mem_gib": 10}, "notes": "torch max_memory_allocated"}, "allocated", 10 * GIB),
        ({"measured": {"peak_mem_gb": 10}, "notes": "peak reserved"}, "reserved", 10 * GB),
        ({"measured": {"peak_mem_gb": 10}, "notes": "read off nvidia-smi"}, "device", 10 * GB),
        ({"measured": {"peak_mem_gib": 10, "peak_reserved_gib": 11}}, "allocated", 10 * GIB),
        ({"measured": {"peak_mem_gb": 10}, "run.framework": "torchtitan"}, "reserved", 10 * GIB),
        ({"measured": {"peak_mem_gb": 10}}, "device", 10 * GB),
    ],
)
def test_the_meter_is_told_by_words_then_by_stack(
    catalog: Catalog, changes: dict[str, Any], kind: str, size: float
) -> None:
    meter = Normaliser(catalog, METERS).meter_of(row(**changes))
    assert meter is not None
    assert (meter.kind, meter.bytes) == (kind, size)


def test_totals_over_gpus_are_not_a_peak(normaliser: Normaliser) -> None:
    assert normaliser.meter_of(row(measured={"peak_mem_total_gb": 100})) is None


# -- rows to jobs ---------------------------------------------------------------------------------


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


# -- the comparison -------------------------------------------------------------------------------


def fixed(ready: Ready, speed: bool) -> Estimate:
    """An estimator that always says the same."""
    assert isinstance(ready.job.run, TrainRun)
    return ESTIMATE if speed else Estimate(*(40.0, 42.0, 43.0, 79.0), arch="ampere", gpus=8)


def reported(rows: list[Row], normaliser: Normaliser) -> Report:
    """The report of rows whose estimates are all the same."""
    found = compare_training(rows, normaliser=normaliser, estimator=fixed)
    return Report(len(rows), found.points, found.skipped, found.fits, undecided=found.undecided)


def test_comparison_makes_points_and_skips(normaliser: Normaliser) -> None:
    rows = [
        row(id="speed", measured={"tokens_per_s_per_gpu": 4096, "oom": False}),
        row(id="both", measured={"tokens_per_s_per_gpu": 8192, "peak_mem_gib": 43, "oom": False}),
        row(id="lacks", measured={"tokens_per_s_per_gpu": 1}, gpus=None),
        row(id="ran-out", measured={"oom": True}),
    ]
    report = reported(rows, normaliser)
    assert [(p.id, p.quantity, round(p.ratio, 3)) for p in report.points] == [
        ("speed", "throughput", 2.0),
        ("both", "peak_memory", 1.0),
        ("both", "throughput", 1.0),
    ]
    assert [(s.id, s.quantity, s.reason) for s in report.skipped] == [
        ("lacks", "throughput", "gpus not stated")
    ]
    assert [(case.id, case.fitted) for case in report.fits] == [
        ("speed", True),
        ("both", True),
        ("ran-out", False),
    ]
    assert report.rows_skipped == 1


def test_the_document_has_the_agreed_shape(normaliser: Normaliser) -> None:
    report = reported([row(), row(id="no", gpus=None)], normaliser)
    document = json.loads(json.dumps(report.document()))
    assert document["schema_version"] == 1
    for quantity in ("peak_memory", "throughput"):
        assert {
            "rows", "groups", "median_abs", "p90_abs", "signed_median", "skipped", "median_abs_rows",
            "by_framework", "by_arch", "by_group",
        } <= document["summary"][quantity].keys()  # fmt: skip
    assert {"id", "quantity", "measured", "estimated", "ratio", "unit", "group"} <= document["points"][
        0
    ].keys()
    assert document["skipped"] == [
        {"id": "no", "quantity": "throughput", "reason": "gpus not stated", "group": "made up"}
    ]


def test_one_quantity_can_be_asked_for(normaliser: Normaliser) -> None:
    both = row(measured={"tokens_per_s_per_gpu": 8192, "peak_mem_gib": 43})
    report = compare_training([both], normaliser=normaliser, estimator=fixed, quantities=("peak_memory",))
    assert [p.quantity for p in report.points] == ["peak_memory"]


def test_filters(catalog: Catalog, tmp_path: Path) -> None:
    file = tmp_path / "rows.yaml"
    rows = [dict(row(id="a", group="one").data), dict(row(id="b", group="two").data)]
    file.write_text(json.dumps(rows))  # JSON is YAML
    found = validate([file], catalog=catalog, where={"group": "t*"}, estimator=fixed)
    assert [p.id for p in found.points] == ["b"]
    with pytest.raises(UnknownName, match="no run has this value, got 'megatron'"):
        validate([file], catalog=catalog, where={"run.framework": "megatron"}, estimator=fixed)
    with pytest.raises(UnknownName, match=r"no run has this key, got 'run\.framwork'"):
        validate([file], catalog=catalog, where={"run.framwork": "fsdp"}, estimator=fixed)
    with pytest.raises(InputError, match="quantity"):
        validate([file], catalog=catalog, quantities=("speed",))


def test_where_flags() -> None:
    assert parse_where(["group=lfoundry", "quality = A"]) == {"group": "lfoundry", "quality": "A"}
    with pytest.raises(InputError, match="KEY=VALUE"):
        parse_where(["group"])


def test_a_file_that_is_no_list_of_runs_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.yaml"
    file.write_text("model: llama-2-7b\n")
    with pytest.raises(InputError, match="list of measured runs"):
        read_rows([file])
    file.write_text("- 1\n")
    with pytest.raises(InputError, match="measured run"):
        read_rows([file])


def test_a_folder_stands_for_its_files(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.yaml").write_text(json.dumps([{"id": name}]))
    assert [r.id for r in read_rows([tmp_path])] == ["a", "b"]


def test_an_estimate_that_cannot_be_made_is_a_reason(normaliser: Normaliser) -> None:
    def refuses(*_: object) -> Estimate:
        raise InputError("cannot run", key="run.tp")

    report = compare_training([row()], normaliser=normaliser, estimator=refuses)
    assert report.points == ()
    assert "cannot run" in report.skipped[0].reason


# -- the published runs ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(catalog: Catalog) -> Report:
    return validate(catalog=catalog, quantities=(*QUANTITIES, "collective"))


def test_every_published_row_is_compared_or_has_a_reason(published: Report) -> None:
    assert published.rows == 1285 + 189  # training runs and collectives
    assert all(one.reason for one in published.skipped)
    assert published.rows_skipped <= 0.20 * published.rows


def test_rows_that_state_what_is_needed_are_compared(published: Report) -> None:
    """Nothing a row states in full may be lost to our own limits."""
    skipped = {one.id: one.reason for one in published.skipped}
    needed = ("framework", "precision", "seq_len", "micro_batch")
    shape = ("layers", "hidden", "heads", "ffn", "vocab")
    lost = {}
    for one in read_rows([CATALOGS / "measurements" / "train"]):
        model = one.data.get("model")
        stated = isinstance(model, str) or (
            isinstance(model, dict) and all(model.get(key) is not None for key in shape)
        )
        complete = one.data.get("gpus") is not None and all(one.run.get(key) is not None for key in needed)
        # Some sources list layouts that cannot be: more expert ranks than a stage has, or a wrong product.
        inconsistent = "INCONSISTENT" in str(one.data.get("notes")) or "does not divide" in skipped.get(
            one.id, ""
        )
        if (
            stated
            and complete
            and not inconsistent
            and one.id in skipped
            and "measured." not in skipped[one.id]
            and "by the row's own notes" not in skipped[one.id]
        ):
            lost[one.id] = skipped[one.id]
    assert lost == {}


# What is promised over groups of equal weight; lower them when the estimates get better, never raise them.
PROMISED = Bounds()


def test_the_promise_holds_over_all_published_runs(published: Report) -> None:
    assert published.broken(PROMISED) == ()


def test_every_convention_says_where_it_is_documented(catalog: Catalog) -> None:
    found = conventions_of(catalog)
    assert found.defaults
    assert found.meters
    for convention in (*found.defaults, *found.meters):
        assert convention.why
        assert ":" in convention.source or "," in convention.source or " " in convention.source
        assert convention.when
