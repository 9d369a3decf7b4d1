"""Fleets of unlike cards: shares by hand, the same answer in any order, what must never happen, the words."""

from __future__ import annotations

import json
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpucalc.__main__ import main
from gpucalc.catalog import open_catalog
from gpucalc.errors import InputError
from gpucalc.formulas.rules_machine import batch_share, equal_split_efficiency
from gpucalc.jobs import resolve
from gpucalc.mixed.stages import by_weight
from gpucalc.plan.answer import Level, Plan, Split
from gpucalc.plan.evaluate import Subject
from gpucalc.plan.resolve import resolve_layout, resolve_recipe
from gpucalc.plan.time import step_time
from gpucalc.plan.unlike import shared_step, staged_step
from gpucalc.planner import plan_job

CATALOG = open_catalog()
Capture = pytest.CaptureFixture[str]
SAME_HOST = "network.one_host=true"
LLAMA = ("models/llama-3-8b", "4xA100+4xRTX3090", SAME_HOST, "run.recompute=full", "run.fused_loss=true")


def planned(name: str, gpus: str, *sets: str) -> Plan:
    return plan_job(resolve(name, CATALOG, gpus=gpus, sets=sets), CATALOG)


def ways(plan: Plan) -> dict[str, Split]:
    return {
        split.how if split.left_out is None else f"without {split.left_out}": split for split in plan.splits
    }


@pytest.fixture(scope="module")
def llama() -> Plan:
    return planned(*LLAMA)


# -- by hand --------------------------------------------------------------------------------------


def test_a_batch_of_64_over_an_a100_and_a_3090_splits_52_to_12() -> None:
    a100, geforce = (CATALOG.gpu(name)[0].peak("bf16") for name in ("a100-sxm-80gb", "rtx-3090"))
    assert a100 is not None
    assert geforce is not None
    assert round(a100.value / 1e12) == 312
    assert round(geforce.value / 1e12) == 71
    share = batch_share(batch=64, own_rate=312, other_rate=71)
    assert share == pytest.approx(52.14, abs=0.005)
    assert (round(share), 64 - round(share)) == (52, 12)
    # In equal halves the pair runs at 2 x 71 / 383 of its joint rate.
    assert equal_split_efficiency(first_rate=312, second_rate=71) == pytest.approx(0.371, abs=0.0005)


def test_the_note_of_a_mixed_plan_gives_that_share(llama: Plan) -> None:
    said = next(note for note in llama.notes if "a batch of 64" in note)
    assert "52 : 12 by peak rates" in said
    assert "by the times worked out here" in said


@pytest.mark.parametrize(
    ("layers", "weights", "sizes"),
    [
        (32, [4.0, 4.0], (16, 16)),
        (32, [3.0, 1.0], (24, 8)),
        (61, [312.0, 71.0], (50, 11)),  # 61 x 312 / 383 = 49.7
        (24, [1.0, 1.0, 1000.0], (1, 1, 22)),
    ],
)
def test_layersby_weight(layers: int, weights: list[float], sizes: tuple[int, ...]) -> None:
    assert by_weight(layers, weights) == sizes


@settings(max_examples=100, deadline=None)
@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=8), layers=st.integers(8, 130))
def test_layersby_weight_are_all_dealt_out(weights: list[float], layers: int) -> None:
    sizes = by_weight(layers, weights)
    assert sum(sizes) == layers
    assert min(sizes) >= 1


# -- steps ----------------------------------------------------------------------------------------


def test_shares_alike_are_the_plain_step_and_stages_of_one_kind_too() -> None:
    job = resolve("llama-3-8b", CATALOG, gpus="4xA100+4xRTX3090")
    subject, cluster = Subject.of(job.model), CATALOG.cluster(job.fleet)
    run = job.run.model_copy(update={"global_batch": 16})
    layout, _ = resolve_layout(run, subject.graph, gpus=8)  # type: ignore[arg-type]
    recipe = resolve_recipe(run, subject.graph)  # type: ignore[arg-type]
    shared = shared_step(subject.graph, [layout, layout], recipe, cluster)
    assert shared.value == step_time(subject.graph, layout, recipe, cluster, simulated=True).value
    job = resolve("llama-3-70b", CATALOG, sets=("run.vpp=1",))
    subject, cluster = Subject.of(job.model), CATALOG.cluster(job.fleet, "dgx-h100")
    layout, _ = resolve_layout(job.run, subject.graph, gpus=64)  # type: ignore[arg-type]
    recipe = resolve_recipe(job.run, subject.graph)  # type: ignore[arg-type]
    staged, each = staged_step(subject.graph, layout, recipe, cluster, [0] * 8)
    assert staged.value == pytest.approx(
        step_time(subject.graph, layout, recipe, cluster, simulated=True).value
    )
    assert len(each) == 8


# -- what the ways say ----------------------------------------------------------------------------


def test_the_ways_of_llama_on_a100_and_3090(llama: Plan) -> None:
    found = ways(llama)
    assert set(found) == {"equal", "proportional", "pipeline", "without rtx-3090", "without a100-sxm-80gb"}
    equal, shares, pipeline = (found[name] for name in ("equal", "proportional", "pipeline"))
    assert equal.tokens_per_s is not None
    assert shares.tokens_per_s is not None
    assert pipeline.tokens_per_s is not None
    assert shares.tokens_per_s > 1.5 * equal.tokens_per_s  # the 3090s set the pace of equal shares
    # The faster card takes more samples, and more layers.
    sizes = {part.gpu: part.micro_batch * part.micro_batches for part in shares.parts}
    assert sizes["a100-sxm-80gb"] > 2 * sizes["rtx-3090"]
    layers = {part.gpu: sum(part.layers) for part in pipeline.parts}
    assert sum(layers.values()) == 32
    assert layers["a100-sxm-80gb"] > 2 * layers["rtx-3090"]
    assert found["without a100-sxm-80gb"].level is Level.DOES_NOT_FIT
    assert "times its memory" in found["without a100-sxm-80gb"].why
    winners = [split for split in llama.splits if split.wins]
    assert winners == [llama.splits[0]]


def test_a_step_is_never_shorter_than_its_busiest_card(llama: Plan) -> None:
    for split in llama.splits:
        for part in split.parts:
            if split.step_s is not None and part.busy_s is not None:
                assert part.busy_s <= split.step_s * (1 + 1e-9)


def test_a_slow_link_between_the_kinds_favours_leaving_one_out() -> None:
    apart = ways(planned(LLAMA[0], LLAMA[1], *LLAMA[3:]))
    together = ways(planned(*LLAMA))
    assert apart["pipeline"].tokens_per_s < together["pipeline"].tokens_per_s  # type: ignore[operator]
    assert apart["without rtx-3090"].tokens_per_s == together["without rtx-3090"].tokens_per_s


def test_each_kind_has_the_precision_it_can_do() -> None:
    plan = planned("models/bert-large-uncased", "2xV100+2xA100", SAME_HOST)
    assert plan.recipe.precision == "fp16"
    found = ways(plan)
    assert found["equal"].precision == "fp16"
    assert found["without v100-sxm2-32gb"].precision == "bf16"
    assert found["without a100-sxm-80gb"].precision == "fp16"
    with pytest.raises(InputError, match="no bf16 rate") as error:
        planned("models/bert-large-uncased", "2xV100+2xA100", "run.precision=bf16")
    assert "fp16" in str(error.value)
    assert "int8" not in str(error.value)  # no run's precision
    asked = ways(planned("models/bert-large-uncased", "2xV100+2xA100", "run.precision=fp16"))
    assert {split.precision for split in asked.values()} == {"fp16"}


def test_a_stated_batch_is_kept_to_the_sample() -> None:
    plan = planned(
        "models/resnet-50", "1xA100+1xRTX3090", SAME_HOST, "run.global_batch=64", "run.framework=ddp"
    )
    for split in plan.splits:
        if split.parts:
            assert split.global_batch == 64
            assert sum(part.gpus * part.micro_batch * part.micro_batches for part in split.parts) == 64
    assert ways(plan)["proportional"].parts


def test_a_pipeline_keeps_the_jobs_tensor_parallelism() -> None:
    sets = ("run.framework=megatron", "run.tp=2", "run.recompute=full")
    plan = planned("models/llama-3-8b", "8xH100-SXM+8xA100", *sets)
    pipeline = ways(plan)["pipeline"]
    assert pipeline.parts
    for part in pipeline.parts:
        assert len(part.layers) * 2 <= part.gpus
    odd = ways(
        planned("models/llama-3-8b", "2xH100-SXM+3xL40S", "run.framework=megatron", "run.recompute=full")
    )
    assert odd["pipeline"].parts
    assert odd["pipeline"].global_batch


def test_resnet_shares_are_those_of_published_single_card_rates() -> None:
    # Lambda's ResNet-50 in FP16: A100 SXM 1582, RTX 3090 905 images/s; a batch of 64 divides 40.7 : 23.3, and
    # equal halves use 72.8 % of the pair.
    share = batch_share(batch=64, own_rate=1582, other_rate=905)
    assert share == pytest.approx(40.71, abs=0.005)
    found = ways(planned("models/resnet-50", "1xA100+1xRTX3090", SAME_HOST, "run.global_batch=64"))
    sizes = {part.gpu: part.micro_batch * part.micro_batches for part in found["proportional"].parts}
    assert sizes["a100-sxm-80gb"] == pytest.approx(share, abs=3)
    equal, shares = found["equal"].tokens_per_s, found["proportional"].tokens_per_s
    assert equal is not None
    assert shares is not None
    assert equal / shares == pytest.approx(0.728, abs=0.1)


def test_networks_that_are_no_stack_and_adapters_have_no_pipeline() -> None:
    assert "no stack of layers" in ways(planned("models/resnet-50", "1xA100+1xRTX3090"))["pipeline"].why
    adapters = planned("models/llama-3-8b", "2xA100+2xRTX3090", "run.method=lora", "run.recompute=full")
    assert "adapters" in ways(adapters)["pipeline"].why


def test_of_three_kinds_each_can_be_left_out() -> None:
    plan = planned("models/gpt2", "1xA100+1xRTX3090+1xV100", SAME_HOST)
    left = {split.left_out for split in plan.splits if split.left_out is not None}
    assert left == {"a100-sxm-80gb", "rtx-3090", "v100-sxm2-32gb"}
    for split in plan.splits:
        if split.left_out is not None:
            assert len(split.parts) == 2
            assert split.left_out not in split.fleet


def test_a_fleet_of_one_kind_has_no_ways() -> None:
    assert planned("models/llama-3-8b", "8xA100").splits == ()
    with pytest.raises(InputError, match="unlike cards"):
        planned("models/llama-3-8b", "8xA100", SAME_HOST)


# -- what must never happen -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "sets"),
    [(("2xA100", "2xRTX3090"), ()), (("2xA100", "2xV100"), (SAME_HOST,)), (("1xA100", "1xL40S"), ())],
    ids=["apart", "one host", "of two generations"],
)
def test_the_order_of_the_kinds_changes_nothing(parts: tuple[str, ...], sets: tuple[str, ...]) -> None:
    found = [
        [
            (split.how, split.left_out, split.global_batch, split.step_s, split.level, split.wins)
            for split in planned("models/bert-large-uncased", "+".join(order), *sets).splits
        ]
        for order in permutations(parts)
    ]
    assert all(one == found[0] for one in found)


@settings(max_examples=6, deadline=None)
@given(
    first=st.sampled_from(["1xA100", "2xA100", "2xH100"]),
    second=st.sampled_from(["1xRTX3090", "2xL40S", "2xV100"]),
    stage=st.sampled_from([0, 1, 2, 3]),
)
def test_the_best_way_is_at_least_as_fast_as_any_other_that_fits(first: str, second: str, stage: int) -> None:
    sets = (SAME_HOST, "run.framework=deepspeed", f"run.zero_stage={stage}", "run.seq_len=512")
    plan = planned("models/gpt2", f"{first}+{second}", *sets)
    best = plan.splits[0]
    for split in plan.splits:
        if split.level is Level.FITS and best.level is Level.FITS:
            assert (split.tokens_per_s or 0) <= (best.tokens_per_s or 0)
        if split.how == "equal" and best.level is Level.FITS and split.level is Level.FITS:
            shares = ways(plan)["proportional"]
            # Equal shares are among the shares tried.
            assert (shares.tokens_per_s or 0) >= (split.tokens_per_s or 0) * (1 - 1e-9)


# -- the words ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_keeps_its_width(width: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["plan", LLAMA[0], "--gpus", LLAMA[1], "--set", SAME_HOST]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    for words in ("How to use unlike cards", "pipeline", "proportional", "leave out rtx-3090", "of best"):
        assert words in out


def test_the_document_has_every_way(capsys: Capture) -> None:
    assert main(["plan", LLAMA[0], "--gpus", LLAMA[1], "--set", SAME_HOST, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["splits"]) == 5
    assert sum(split["wins"] for split in document["splits"]) == 1
    pipeline = next(split for split in document["splits"] if split["how"] == "pipeline")
    assert sum(sum(part["layers"]) for part in pipeline["parts"]) == 32


def test_a_kind_alone_takes_a_batch_its_cards_share_where_nobody_states_one() -> None:
    job = resolve("models/llama-3-8b", CATALOG, gpus="3xA100-SXM-80GB+2xRTX3090", sets=("run.seq_len=2048",))
    alone = {split.left_out: split for split in plan_job(job, CATALOG).splits if split.left_out}
    kept = alone["rtx-3090"]
    assert kept.global_batch == 39  # of 40, which three cards do not share
    assert kept.step_s is not None
