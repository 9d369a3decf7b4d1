"""`gpucalc validate`: statistics by hand, the comparison, the promise over published runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_up import row

from gpucalc.catalog import Catalog
from gpucalc.errors import InputError, UnknownName
from gpucalc.estimate_training import Estimate
from gpucalc.measured import TRAINING, Convention, Conventions, Row, Skip, read_rows, shipped
from gpucalc.measured_runs import Normaliser, Ready, conventions_of
from gpucalc.points import Point, Skipped, statistics, weighted_quantile
from gpucalc.spec.train_run import TrainRun
from gpucalc.units import GB, GIB
from gpucalc.validate import Bounds, Report, parse_where, validate
from gpucalc.validate_training import QUANTITIES, FitCase, Reading, compare_training, fit_counts, speed_of

CATALOGS = Path(__file__).parent.parent / "catalogs"


@pytest.fixture(scope="module")
def normaliser(catalog: Catalog) -> Normaliser:
    return Normaliser(catalog)


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


def test_what_a_releases_own_recipe_says_is_taken(catalog: Catalog) -> None:
    # NVIDIA-NeMo/Megatron-Bridge@v0.5.0, v0.2.2: scripts/performance/configs/qwen, gpt_oss
    rows = {one.id: one for one in read_rows(p for p in shipped(catalog, TRAINING) if p.stem == "mbridge")}
    normaliser = Normaliser(catalog, conventions_of(catalog))

    def run(name: str) -> TrainRun:
        ready = normaliser.job_of(rows[f"mbridge-{name}-pretrain"])
        assert isinstance(ready, Ready)
        assert isinstance(ready.job.run, TrainRun)
        return ready.job.run

    new = run("26.06-qwen3-235b-a22b-gb200-256g-mxfp8-tp1pp8")
    assert (new.cuda_graphs, new.ep_overlap, new.recompute) == (("full",), True, "none")
    old = run("26.04-qwen3-235b-a22b-gb200-256g-mxfp8-tp1pp8")
    assert (old.cuda_graphs, old.ep_overlap) == (("attn", "moe_router", "moe_preprocess"), False)
    bare = run("26.02-qwen3-235b-a22b-b200-256g-mxfp8-tp1pp8")
    assert (bare.cuda_graphs, bare.moe_dispatcher, bare.fp8_params) == (None, "alltoall", True)
    again = run("25.11-gpt-oss-120b-gb200-64g-bf16-tp1pp1")
    assert (again.recompute_modules, again.fp8_params) == (("layernorm", "moe_act"), False)
