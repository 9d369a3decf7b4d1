"""Published deployments: rows as sources write them, what a figure counts, verdicts, the promise over all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_up import changed

from gpucalc.catalog import Catalog
from gpucalc.errors import InputError
from gpucalc.estimate_serving import Memory
from gpucalc.measured import Row, Skip, read_rows
from gpucalc.measured_deployments import NEAREST_ENGINE, Deployment, ServingNormaliser
from gpucalc.measured_serving import Logged, Rate, meaningless, rates_of, undecided
from gpucalc.points import Point, statistics
from gpucalc.spec.serve_run import ServeRun
from gpucalc.units import GIB
from gpucalc.validate import Report, validate
from gpucalc.validate_serving import QUANTITIES, Start, compare_serving, promises_broken, start_counts

CATALOGS = Path(__file__).parent.parent / "catalogs"


@pytest.fixture(scope="module")
def normaliser(catalog: Catalog) -> ServingNormaliser:
    return ServingNormaliser.of(catalog)


def row(**changes: Any) -> Row:
    """A complete row; a dotted key changes one value, None removes it."""
    data: dict[str, Any] = {
        "id": "made-up",
        "quality": "A",
        "model": "llama-3.1-8b",
        "checkpoint": "meta-llama/Llama-3.1-8B-Instruct",
        "gpus": "1xh100-sxm-80gb",
        "hardware": {"gpu": "NVIDIA H100 80GB", "gpus": 1, "gpu_mem_total_gib": 79.19},
        "run": {
            "task": "serve",
            "framework": "vllm",
            "version": "0.19.0",
            "dtype": "bfloat16",
            "tp": 1,
            "max_model_len": 8192,
            "gpu_memory_utilization": 0.9,
        },
        "measured": {"weights_gib_per_gpu": 15.0, "oom": False},
        "source": {"repo": "made/up", "issue_or_path": "README.md"},
        "notes": "",
    }
    return changed(data, changes)


def deployed(normaliser: ServingNormaliser, **changes: Any) -> Deployment:
    found = normaliser.deployment_of(row(**changes))
    assert isinstance(found, Deployment), found
    return found


def run_of(normaliser: ServingNormaliser, **changes: Any) -> ServeRun:
    run = deployed(normaliser, **changes).job.run
    assert isinstance(run, ServeRun)
    return run


def rate_of(normaliser: ServingNormaliser, **changes: Any) -> dict[str, Rate | Skip]:
    one = row(**changes)
    return dict(rates_of(one, normaliser.run_of(one), normaliser.conventions))


# -- rows to deployments --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "quant"),
    [
        ("fp8", "fp8"),
        ("fp8 w8a8 dynamic (compressed-tensors)", "fp8"),
        ("int8 w8a8 (compressed-tensors)", "w8a8-int8"),
        ("w4a16", "gptq-int4"),
        ("gptq int4 g128", "gptq-int4"),
        ("gptq int8", "gptq-int8"),
        ("awq int4 g128", "awq"),
        ("awq (moe_wna16 marlin)", "awq"),
        ("int4 g32 weight-only", "int4"),
        ("int8 (eetq)", "int8"),
        ("mxfp4", "mxfp4"),
        ("nvfp4", "nvfp4"),
        ("exl2 4.0bpw", "int4"),
        ("int4 (native)", None),  # as published
        ("bf16", None),
    ],
)
def test_number_formats_as_sources_word_them(
    normaliser: ServingNormaliser, words: str, quant: str | None
) -> None:
    assert run_of(normaliser, **{"run.quant": words}).quant == quant


@pytest.mark.parametrize("words", ["mixed ~3.9 bpw", "exl2 5.0bpw", "something new"])
def test_a_format_nobody_plans_is_a_reason(normaliser: ServingNormaliser, words: str) -> None:
    found = normaliser.deployment_of(row(**{"run.quant": words}))
    assert isinstance(found, Skip)
    assert "run.quant" in found.reason


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"run.framework": "llamacpp", "run.quant": "q4_k_m"}, "quant", "q4_k_m"),
        ({"run.framework": "llamacpp", "run.kv_dtype": "q4_0 (K)"}, "kv_dtype", "q4_0"),
        ({"run.kv_dtype": "fp8"}, "kv_dtype", "fp8"),
        ({"run.dtype": "float16"}, "dtype", "fp16"),
        ({"run.framework": "sglang"}, "mem_fraction_static", 0.9),  # its word for the share of the card
        ({"run.framework": "sglang"}, "gpu_memory_utilization", None),
        ({"run.version": "transformers 4.46.0, flash-attn 2.5.8"}, "version", "4.46.0"),
        ({"run.version": "b8171", "run.framework": "llamacpp"}, "version", "b8171"),
        ({"run.version": "May 2024", "run.framework": "llamacpp"}, "version", "b2900"),
        ({"run.version": "vllm"}, "version", None),
        ({"run.max_model_len": None}, "max_model_len", 131072),  # the model's own
        ({"measured.block_size": 128}, "block_size", 128),
        ({"notes": "decode-context-parallel 8: same pool", "run.tp": 8, "gpus": "8xh200-sxm-141gb"},
         "decode_context_parallel", 8),
        ({"run.framework": "hf", "gpus": "2xa100-sxm-80gb"}, "pp", 2),
        ({"run.framework": "trtllm", "run.quant": "fp8"}, "kv_dtype", "fp8"),  # a documented default
        ({"run.framework": "tgi", "run.version": "TGI (Dec 2023)"}, "framework", "vllm"),
        ({"run.framework": "tgi", "run.version": "TGI (Dec 2023)"}, "version", "0.2.6"),
    ],
)  # fmt: skip
def test_fields_as_sources_write_them(
    normaliser: ServingNormaliser, changes: dict[str, Any], field: str, value: Any
) -> None:
    assert getattr(run_of(normaliser, **changes), field) == value


@pytest.mark.parametrize(
    ("path", "version"), [("issue #10517", "0.6.4"), ("PR #2031", "0.2.3"), ("issue #21348", "0.9.2")]
)
def test_an_issue_s_number_tells_the_release_of_its_time(
    normaliser: ServingNormaliser, path: str, version: str
) -> None:
    source = {"repo": "vllm-project/vllm", "issue_or_path": path}
    found = deployed(normaliser, source=source, **{"run.version": None})
    assert isinstance(found.job.run, ServeRun)
    assert found.job.run.version == version
    assert any(version in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("RedHatAI/Qwen2.5-7B-Instruct-quantized.w8a8", "qwen2.5-7b"),
        ("RedHatAI/Qwen2.5-7B-Instruct-fp8-dynamic", "qwen2.5-7b"),
        ("neuralmagic/Meta-Llama-3.1-70B-Instruct-quantized.w8a8", "llama-3.1-70b"),
        ("DeepSeek-R1 AWQ (671B MoE, int4)", "deepseek-r1"),
        ("DeepSeek-R1 671B GGUF", "deepseek-r1"),
        ("moonshotai/Kimi-Dev-72B", "qwen2.5-72b"),
        ("nobody/knows-1t", None),
    ],
)
def test_checkpoints_are_found_under_the_words_of_their_storage(
    normaliser: ServingNormaliser, name: str, stem: str | None
) -> None:
    assert normaliser.find_model(name) == stem


def test_a_model_given_by_its_shape_and_size(normaliser: ServingNormaliser) -> None:
    # 7.24e9 parameters less 2 x 32000 x 4096 of tables and 32 x 2 x 4096 x 128 x 40 of attention leave
    # 5.635e9 for 3 x 4096 x 32 rows: 14,331, in steps of 64.
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 32000}
    found = deployed(normaliser, model={"name": "unheard-of", "params_b": 7.24, **shape}, checkpoint=None)
    assert isinstance(found.job.model, dict)
    assert found.job.model["ffn"] == 14336
    assert any("7.24" in note for note in found.notes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"run.framework": None}, "run.framework"),
        ({"run.framework": "mystery"}, "mystery"),
        ({"model": "no-such-model", "checkpoint": None}, "no-such-model"),
        ({"model": {"name": "unheard-of", "layers": 3}, "checkpoint": None}, "model.hidden"),
        ({"model": {"name": "unheard-of", "attention": "hybrid ssm"}, "checkpoint": None}, "mixed layers"),
        ({"gpus": None, "hardware": {}, "run.tp": None}, "gpus not stated"),
        ({"gpus": "8xh100-sxm-80gb", "run.tp": None}, "run.tp"),
        ({"gpus": "8xh100-sxm-80gb", "run.tp": 4}, "4 is not 8 GPUs"),
        ({"notes": "partly off-loaded: 18 GiB file"}, "host memory"),
        ({"run.tp": "two"}, "run.tp is 'two'"),
        ({"run.max_model_len": 0}, "run.max_model_len is 0"),
    ],
)
def test_a_lacking_row_is_skipped_by_the_field_it_lacks(
    normaliser: ServingNormaliser, changes: dict[str, Any], named: str
) -> None:
    found = normaliser.deployment_of(row(**changes))
    assert isinstance(found, Skip)
    assert named in found.reason


def test_a_gpu_without_a_name_is_known_by_the_memory_its_log_reports(normaliser: ServingNormaliser) -> None:
    found = deployed(normaliser, gpus=None, hardware={"gpus": 2, "gpu_mem_total_gib": 23.58}, **{"run.tp": 2})
    assert found.known == "memory"
    assert found.job.gpus in ("2xrtx-3090", "2xrtx-4090")  # both have 24 GB
    found = deployed(normaliser, gpus=None, hardware={"gpus": 1})
    assert found.known == "tensors"


def test_a_marketed_size_is_no_log(normaliser: ServingNormaliser) -> None:
    assert deployed(normaliser).gpu_memory_bytes == 79.19 * GIB
    assert deployed(normaliser, **{"hardware.gpu_mem_total_gib": 24}).gpu_memory_bytes is None


def test_engines_beyond_the_contract_say_what_they_are_taken_for(normaliser: ServingNormaliser) -> None:
    for engine, nearest in NEAREST_ENGINE.items():
        found = deployed(normaliser, **{"run.framework": engine, "run.version": None})
        jobs = (found.job, found.decode_job, found.prompt_job)
        taken = (nearest.memory, nearest.decode, nearest.prompt)
        assert tuple(job.run.framework for job in jobs) == taken
        assert any(note.startswith(f"{engine} estimated as") for note in found.notes)


# -- what a figure counts -------------------------------------------------------------------------

SPEED = {"run.isl": 1024, "run.osl": 512, "run.concurrency": 1}


@pytest.mark.parametrize(
    ("changes", "quantity", "kind", "isl"),
    [
        ({"measured": {"decode_tps": 80.0}}, "decode_speed", "request", 1024),
        ({"measured": {"decode_tps": 80.0, "prefill_tps": 9e3}}, "decode_speed", "decode", 1024),
        ({"measured": {"total_tps": 800.0}}, "decode_speed", "all", 1024),
        ({"measured": {"decode_tps": 800.0}, "run.concurrency": 16}, "batched_speed", "request", 1024),
        ({"measured": {"decode_tps": 80.0}, "run.framework": "llamacpp"}, "decode_speed", "decode", 1),
        ({"measured": {"decode_tps": 80.0}, "run.framework": "autoawq"}, "decode_speed", "decode", 1024),
        ({"measured": {"decode_tps": 80.0}, "source.repo": "QwenLM/Qwen3"}, "decode_speed", "all", 1024),
    ],
)
def test_what_a_speed_counts(
    normaliser: ServingNormaliser, changes: dict[str, Any], quantity: str, kind: str, isl: int
) -> None:
    found = rate_of(normaliser, **(SPEED | changes))[quantity]
    assert isinstance(found, Rate)
    assert (found.kind, found.isl, found.osl) == (kind, isl, 512)


def test_prefill_is_a_rate_whichever_way_it_is_stated(normaliser: ServingNormaliser) -> None:
    found = rate_of(normaliser, **SPEED, measured={"ttft_ms": 100.0})["prefill"]
    assert isinstance(found, Rate)
    assert found.value == pytest.approx(10_240)  # 1,024 tokens in 0.1 s
    found = rate_of(normaliser, **SPEED, measured={"prefill_tps": 5000.0, "ttft_ms": 100.0})["prefill"]
    assert isinstance(found, Rate)
    assert found.value == 5000.0
    assert rate_of(normaliser, **{**SPEED, "run.concurrency": 8}, measured={"ttft_ms": 100.0}) == {}


@pytest.mark.parametrize(
    ("changes", "quantity", "reason"),
    [
        ({"measured": {"decode_tps": 80.0}}, "batched_speed", "run.isl"),
        ({"measured": {"decode_tps": 80.0}, "run.isl": 1, "run.concurrency": 1}, "decode_speed", "run.osl"),
        ({"measured": {"decode_tps": 80.0}, "notes": "2 requests/s; more"}, "batched_speed", "request rate"),
        (
            {**SPEED, "measured": {"prefill_tps": 9.0}, "notes": "DOUBTFUL prefill: slow"},
            "prefill",
            "doubtful",
        ),
        (
            {**SPEED, "measured": {"prefill_tps": 9.0}, "notes": "pp512 7, pp4096 8.00, pp8192 8.20"},
            "prefill",
            "twice the prompt was faster",
        ),
        (
            {**SPEED, "measured": {"prefill_tps": 9.0}, "notes": "GEMV kernel; more"},
            "prefill",
            "packed for products with one row",
        ),
    ],
)
def test_speeds_that_cannot_be_compared_say_why(
    normaliser: ServingNormaliser, changes: dict[str, Any], quantity: str, reason: str
) -> None:
    found = rate_of(normaliser, **changes)[quantity]
    assert isinstance(found, Skip)
    assert reason in found.reason


def test_longer_prompts_that_are_slower_count(normaliser: ServingNormaliser) -> None:
    notes = "pp512 7, pp4096 8.00, pp8192 8.10"
    found = rate_of(normaliser, **SPEED, measured={"prefill_tps": 9.0}, notes=notes)["prefill"]
    assert isinstance(found, Rate)


def test_an_offline_maximum_queues_the_whole_data_set(normaliser: ServingNormaliser) -> None:
    changes = {"run.framework": "trtllm", "run.isl": 20000, "run.osl": 2000, "run.max_model_len": None}
    notes = "total output tokens/s, infinite request rate (offline maximum)"
    found = rate_of(normaliser, notes=notes, measured={"decode_tps": 500.0}, **changes)["batched_speed"]
    assert isinstance(found, Rate)
    assert found.concurrency == 1000


def test_logged_memory_is_in_bytes_and_blocks_are_tokens() -> None:
    found = Logged.of(row(measured={"weights_gib_per_gpu": 2, "gpu_blocks": 10, "block_size": 16}))
    assert (found.weights, found.kv_tokens, found.non_torch) == (2 * GIB, 160, None)
    found = Logged.of(row(measured={"kv_cache_gib_per_gpu": -0.3, "kv_tokens": 5, "total_mem_gib": 1}))
    assert (found.kv_cache, found.kv_tokens, found.total_memory) == (None, 5, GIB)


def test_totals_count_what_their_meter_sees(normaliser: ServingNormaliser) -> None:
    assert normaliser.meter_of(row(**{"source.repo": "QwenLM/Qwen2.5"})) == "allocated"
    assert normaliser.meter_of(row(**{"source.repo": "QwenLM/Qwen3"})) == "held"
    assert normaliser.meter_of(row()) == "device"


def test_settings_that_a_row_does_not_give_leave_the_pool_undecided() -> None:
    assert undecided(row()) is None
    assert undecided(row(notes="default utilization", **{"run.gpu_memory_utilization": None})) is None
    assert "gpu_memory_utilization" in str(undecided(row(**{"run.gpu_memory_utilization": None})))
    assert "max_num_seqs" in str(undecided(row(notes="value of max_num_seqs not shown")))
    assert "doubtful" in str(undecided(row(notes="DOUBTFUL: printed utilization 0.9 cannot give it")))
    assert undecided(row(**{"run.framework": "llamacpp", "run.gpu_memory_utilization": None})) is None
    assert meaningless(row(notes="only the weights figure is meaningful"), "weights") is None
    assert meaningless(row(notes="only the weights figure is meaningful"), "kv_tokens") is not None


# -- the comparison -------------------------------------------------------------------------------


class Fixed:
    """An estimator that always says the same."""

    def memory(self, *_: object) -> Memory:
        return Memory(
            weights=16 * GIB, activation_peak=2 * GIB, kv_cache=50 * GIB, kv_tokens=400.0,
            kv_tokens_given=410.0, totals={"held": 1.0, "allocated": 2.0, "device": 3.0}, needed=70 * GIB,
            capacity=71 * GIB, uncertain=0.5 * GIB, refusal=None, arch="hopper",
        )  # fmt: skip

    def speed(self, _: Deployment, rate: Rate, __: Logged) -> tuple[float, str]:
        if rate.concurrency > 100:
            raise InputError("too many", key="run.concurrency")
        return 100.0, "hopper"


def test_every_figure_is_a_point_or_a_reason(normaliser: ServingNormaliser) -> None:
    rows = [
        row(id="log", measured={"weights_gib_per_gpu": 15, "activation_peak_gib": 2, "kv_tokens": 400,
                                "kv_cache_gib_per_gpu": 40, "oom": False}),
        row(id="speed", measured={"decode_tps": 80.0, "ttft_ms": 64.0}, **SPEED),
        row(id="load", measured={"decode_tps": 80.0}, **{**SPEED, "run.concurrency": 200}),
        row(id="lacks", measured={"weights_gib_per_gpu": 15, "oom": True}, **{"run.framework": None}),
        row(id="refused", measured={"oom": True}),
    ]  # fmt: skip
    found = compare_serving(rows, normaliser, Fixed(), QUANTITIES)
    assert {(p.id, p.quantity): round(p.ratio, 3) for p in found.points} == {
        ("log", "weights"): 1.067,
        ("log", "activation_peak"): 1.0,
        ("log", "kv_cache"): 1.25,
        ("log", "kv_tokens"): 1.025,
        ("log", "kv_tokens_predicted"): 1.0,
        ("speed", "decode_speed"): 1.25,
        ("speed", "prefill"): 0.006,
    }
    assert [(s.id, s.quantity) for s in found.skipped] == [
        ("load", "batched_speed"), ("lacks", "weights"), ("lacks", "verdict"),
    ]  # fmt: skip
    assert [(s.id, s.refused, s.said_refused, s.right) for s in found.starts] == [
        ("log", False, False, True),
        ("refused", True, False, False),
    ]
    only = compare_serving(rows, normaliser, Fixed(), ("weights",))
    assert [p.quantity for p in only.points] == ["weights"]
    assert only.starts == ()


def start(refused: bool, needed: float, why: str | None = None, uncertain: float = 0.0) -> Start:
    return Start("x", "g", "vllm", refused, why, needed, 80.0, uncertain)


def test_verdicts_by_hand() -> None:
    starts = [
        start(True, 90.0),  # right
        start(True, 70.0, "no memory is left for the cache"),  # right: refused in the engine's own terms
        start(True, 70.0),  # said to start
        start(False, 70.0),  # right
        start(False, 81.0),  # said to be refused
        start(False, 81.0, uncertain=2.0),  # too close to tell: agrees with either
    ]
    assert start_counts(starts) == {
        "rows": 6, "right": 4, "refused": 3, "refused_right": 2, "refused_right_share": 0.666667,
        "marginal": 1, "says_refused_ran": 1,
    }  # fmt: skip
    assert promises_broken({"verdict": statistics([])}, starts) == [
        "verdict: right on 67% of the failed starts, below 90%"
    ]


def point(ratio: float, quantity: str = "weights", group: str = "a") -> Point:
    return Point(
        id=f"{group}{ratio}", quantity=quantity, measured=100.0, estimated=100.0 * ratio, unit="bytes",
        group=group, framework="vllm", stack="", gpu="h100", arch="hopper", model="m", quality="A", meter="",
    )  # fmt: skip


def test_broken_promises_are_named() -> None:
    assert promises_broken({"weights": statistics([point(1.005)] * 20)}, ()) == []
    many = [point(1.0)] * 18 + [point(1.2)] * 2  # the 95th percentile is the larger error
    assert promises_broken({"weights": statistics(many)}, ()) == [
        "weights: 95th percentile of the error 20.0% is above 4%"
    ]


def test_high_percentiles_by_hand() -> None:
    found = statistics([point(1 + i / 100) for i in range(1, 21)])  # errors 1 % to 20 %
    assert found.p90_abs == pytest.approx(0.185)  # 18 of 20 reached exactly: halfway to the next
    assert found.p95_abs == pytest.approx(0.195)
    assert found.document()["p95_abs_rows"] == pytest.approx(0.195)


# -- the published deployments --------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(catalog: Catalog) -> Report:
    return validate(catalog=catalog, quantities=QUANTITIES)


def test_a_file_may_mix_training_and_serving(catalog: Catalog, tmp_path: Path) -> None:
    training = read_rows([CATALOGS / "measurements" / "train" / "litgpt.yaml"])[0]
    file = tmp_path / "rows.yaml"
    file.write_text(json.dumps([dict(training.data), dict(row().data)]))
    found = validate([file], catalog=catalog)
    assert found.rows == 2
    assert {p.quantity for p in found.points} >= {"peak_memory", "weights"}
    document = json.loads(json.dumps(found.document()))
    assert document["summary"]["weights"]["rows"] == 1
    assert document["summary"]["weights"]["by_framework"]["vllm"]["rows"] == 1
    assert document["summary"]["verdict"]["rows"] == 1
    assert document["starts"][0]["estimated_refused"] is False
    only = validate([file], catalog=catalog, where={"framework": "vllm"})
    assert {p.id for p in only.points} == {"made-up"}


def test_every_published_row_is_compared_or_has_a_reason(published: Report) -> None:
    assert published.rows == 469
    assert all(one.reason for one in published.skipped)
    seen = {p.id for p in published.points} | {s.id for s in published.starts}
    assert seen | {s.id for s in published.skipped} == {
        one.id for one in read_rows([CATALOGS / "measurements" / "inference"])
    }


@pytest.mark.parametrize(
    ("quantity", "median", "field", "limit"),
    [
        ("weights", 0.01, "p95_abs", 0.04),
        ("kv_tokens", 0.01, "p90_abs", 0.04),
        ("kv_tokens_predicted", 0.03, "p90_abs", 0.08),
        ("decode_speed", 0.12, "p90_abs", 0.30),
        ("batched_speed", 0.20, "p90_abs", 0.45),
    ],
)
def test_the_promise_holds_over_published_deployments(
    published: Report, quantity: str, median: float, field: str, limit: float
) -> None:
    found = published.summary(quantity)
    assert found.median_abs is not None
    assert found.median_abs <= median
    assert getattr(found, field) <= limit
    assert getattr(found, f"{field}_rows") <= limit


def test_refused_starts_are_refused(published: Report) -> None:
    counts = start_counts(published.starts)
    assert counts["refused"] >= 20
    assert counts["refused_right"] >= 0.9 * counts["refused"]
    assert counts["says_refused_ran"] <= 0.02 * counts["rows"]


def test_every_convention_says_where_it_is_documented(normaliser: ServingNormaliser) -> None:
    known = normaliser.conventions
    assert known.defaults
    assert known.meters
    assert known.rates
    for convention in (*known.defaults, *known.meters, *known.rates):
        assert convention.why
        assert convention.source
        assert convention.when
    assert all(releases.source for releases in normaliser.releases)
