"""One job over sizes: growth of the batch, efficiency, sizes that cannot run, and the command's words."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from gpucalc.__main__ import main
from gpucalc.catalog import open_catalog
from gpucalc.errors import InputError
from gpucalc.formulas import compute as f
from gpucalc.jobs import ResolvedJob, resolve
from gpucalc.plan.evaluate import Subject
from gpucalc.plan.resolve import resolve_layout, resolve_recipe
from gpucalc.plan.time import step_time
from gpucalc.scale import parse_sizes, scale

CATALOG = open_catalog()
Capture = pytest.CaptureFixture[str]


def job_of(name: str, *sets: str, gpus: str | None = None) -> ResolvedJob:
    return resolve(name, CATALOG, gpus=gpus, sets=sets)


def test_efficiency_by_hand() -> None:
    assert f.scaling_efficiency(rate_per_gpu=900.0, smallest_per_gpu=1000.0) == 0.9


def test_weak_scaling_keeps_each_gpus_batch_and_strong_the_whole() -> None:
    found = scale(job_of("llama-3-8b"), CATALOG, (8, 16, 32))
    assert found.strong is not None
    weak = [size.plan.layout for size in found.weak if size.plan]
    strong = [size.plan.layout for size in found.strong if size.plan]
    assert [layout.global_batch for layout in weak] == [128, 256, 512]
    assert {layout.micro_batch * layout.micro_batches for layout in weak} == {16}
    assert [layout.global_batch for layout in strong] == [128, 128, 128]
    assert [layout.dp for layout in strong] == [8, 16, 32]


def test_efficiency_starts_at_one_and_falls_over_the_network() -> None:
    found = scale(job_of("resnet-50", gpus="1xA100"), CATALOG, (1, 8, 64, 512))
    shares = [size.efficiency.value for size in found.weak if size.efficiency]
    assert len(shares) == 4
    assert shares[0] == 1.0
    assert shares == sorted(shares, reverse=True)
    assert found.strong is None  # the default run states no global batch


@pytest.mark.parametrize(
    ("name", "gpus", "sets", "sizes"),
    [
        ("llama-3-70b", None, (), (64, 512, 4096, 16_384, 98_304)),
        (
            "llama-3-70b",
            None,
            ("network.oversubscription=7", "network.pod_gpus=3072"),
            (64, 4096, 16_384, 98_304),
        ),
        # A rack is one NVLink domain: ten of them go over the network for the first time.
        (
            "models/llama-3.1-405b",
            "72xGB200",
            ("run.framework=megatron", "run.tp=8", "run.pp=9", "run.grad_accum=32", "run.micro_batch=1"),
            (72, 720, 7200, 36_000, 100_080),
        ),
    ],
    ids=["fat tree", "oversubscribed", "NVL72"],
)
def test_efficiency_and_goodput_fall_up_to_100_000_gpus(
    name: str, gpus: str | None, sets: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    found = scale(job_of(name, *sets, gpus=gpus), CATALOG, sizes)
    shares = [size.efficiency.value for size in found.weak if size.efficiency]
    assert len(shares) == len(sizes)
    # More ranks share the optimizer's step of the same state: that much, no more, may be gained.
    assert all(later <= 1.005 * earlier for earlier, later in pairwise(shares))
    assert shares[-1] > 0.8
    kept = [size.goodput for size in found.weak if size.goodput is not None]
    assert kept == sorted(kept, reverse=True)
    assert 0.4 < kept[-1] < 0.9  # an interruption every half hour
    assert all(size.plan is not None and size.plan.binds == "compute" for size in found.weak)


def test_oversubscription_costs_only_what_leaves_a_pod() -> None:
    plain, narrow = (
        scale(job_of("llama-3-70b", *sets), CATALOG, (2048, 16_384))
        for sets in ((), ("network.oversubscription=64", "network.pod_gpus=2048"))
    )
    inside, across = (
        [size.plan.time.value for size in found.weak if size.plan and size.plan.time]
        for found in (plain, narrow)
    )
    assert inside[0] == across[0]
    assert across[1] > inside[1]


def test_columns_of_layouts_cross_pods_as_single_ones_do() -> None:
    job = job_of("jobs/deepseek-v3", "network.oversubscription=8", "network.pod_gpus=256")
    subject, recipe = Subject.of(job.model), resolve_recipe(job.run, Subject.of(job.model).graph)  # type: ignore[arg-type]
    cluster = CATALOG.cluster(job.fleet, job.job.system, network=job.job.network)
    layout, _ = resolve_layout(job.run, subject.graph, gpus=1024)  # type: ignore[arg-type]
    tp, ep = np.array([1.0, 2.0, 4.0, 8.0]), np.array([32.0, 64.0, 16.0, 8.0])
    together = step_time(
        subject.graph, replace(layout, tp=tp, dp=128 / tp, shard=128 / tp, ep=ep), recipe, cluster
    )
    for index, (ranks, experts) in enumerate(zip(tp, ep, strict=True)):
        dp = int(128 / ranks)
        one = replace(layout, tp=int(ranks), dp=dp, shard=dp, ep=int(experts))
        alone = step_time(subject.graph, one, recipe, cluster)
        assert together.value[index] == pytest.approx(float(alone.value), rel=1e-12)


def test_what_nobody_said_of_a_large_network_is_listed() -> None:
    found = scale(job_of("llama-3-70b"), CATALOG, (64, 4096))
    keys = [{item.key for item in size.plan.assumptions} for size in found.weak if size.plan]
    assert "network.oversubscription" not in keys[0]
    assert "network.oversubscription" in keys[1]
    stated = scale(job_of("llama-3-70b", "network.oversubscription=3"), CATALOG, (4096,)).weak[0]
    assert stated.plan is not None
    assert {item.key for item in stated.plan.assumptions} & {"network.pod_gpus"}


def test_sizes_that_do_not_run_say_why() -> None:
    found = scale(job_of("llama-3-70b"), CATALOG, (8, 64, 1024))
    assert found.weak[0].why_not == ("not a multiple of tp 4 x pp 8 = 32",)
    assert found.strong is not None
    assert "interleaved" in found.strong[2].why_not[0]
    small = scale(job_of("models/llama-3-8b", gpus="2xRTX4090"), CATALOG, (1, 2))
    assert [size.runs for size in small.weak] == [False, False]
    assert not small.runs
    assert "step_s" not in small.weak[0].document()


@pytest.mark.parametrize("text", ["", ",", "0", "-1", "1,x", "1.5", "9" * 12, ",".join(["1"] * 33)])
def test_sizes_are_whole_numbers(text: str) -> None:
    with pytest.raises(InputError, match="--scale"):
        parse_sizes(text)


def test_sizes_are_sorted_and_told_once() -> None:
    assert parse_sizes("8, 2,4,2") == (2, 4, 8)


def test_a_mixed_fleet_is_refused() -> None:
    with pytest.raises(InputError, match="one GPU kind"):
        scale(job_of("llama-3-8b", gpus="4xA100+4xH100"), CATALOG, (1,))


def test_the_command_prints_a_table_and_a_document(capsys: Capture) -> None:
    assert main(["plan", "llama-3-8b", "--scale", "1,8,16"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 120
    for words in ("weak scaling", "strong scaling", "tokens/s", "efficiency", "bound by", "does not fit"):
        assert words in out
    assert main(["plan", "llama-3-8b", "--scale", "1,8,16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert [size["gpus"] for size in document["weak"]] == [1, 8, 16]
    assert document["weak"][1]["efficiency_fraction"] == 1.0
    assert document["strong"][2]["tokens_per_s"] > 0


def test_strict_asks_whether_any_size_runs(capsys: Capture) -> None:
    assert main(["plan", "models/llama-3-8b", "--gpus", "RTX4090", "--scale", "1", "--strict"]) == 1
    assert "does not fit" in capsys.readouterr().out
