"""The pipeline simulation: by hand, against the closed form on even stages, and its laws on uneven ones."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpucalc.builders.build import build_graph
from gpucalc.catalog import open_catalog
from gpucalc.errors import Infeasible
from gpucalc.formulas import pipeline as f
from gpucalc.plan.layout import Layout
from gpucalc.plan.pipeline_sim import simulate
from gpucalc.plan.resolve import resolve_layout, resolve_recipe, settle
from gpucalc.plan.stages import chunk_layers, stages
from gpucalc.plan.time import step_time
from gpucalc.spec.train_run import TrainRun

SCHEDULES = [
    row
    for row in csv.DictReader((Path(__file__).parent / "data" / "pp_schedules.csv").read_text().splitlines())
    if row["kind"] != "gpipe"
]
CATALOG = open_catalog()


@pytest.mark.parametrize("row", SCHEDULES, ids=lambda r: f"{r['kind']}-p{r['p']}-m{r['m']}-v{r['v']}")
def test_schedules_simulated_elsewhere(row: dict[str, str]) -> None:
    pp, m, v = int(row["p"]), int(row["m"]), int(row["v"])
    vpp = v if row["kind"] == "inter" else 1
    found = simulate([1.0] * pp * vpp, [2.0] * pp * vpp, pp=pp, vpp=vpp, micro_batches=m)
    assert found.bubble_s / found.slowest_s == pytest.approx(float(row["overhead"]), abs=1e-5)


def test_two_uneven_stages_by_hand() -> None:
    # Rank 1 works from 1 to 13 without a pause; rank 0 then does its last backward.
    found = simulate([1.0, 2.0], [2.0, 4.0], pp=2, vpp=1, micro_batches=2)
    assert found.total_s == 15.0
    assert found.busy_s == (6.0, 12.0)
    assert found.bubble_s == 3.0


def test_a_heavy_last_stage_costs_less_than_the_closed_form_says() -> None:
    # Only the last of four stages is slow: filling and draining pass three quick ones.
    found = simulate([1.0, 1.0, 1.0, 2.0], [2.0, 2.0, 2.0, 4.0], pp=4, vpp=1, micro_batches=16)
    assert found.slowest_s == 96.0
    assert found.bubble_s == 9.0
    assert f.bubble_s(ideal_s=96.0, overhead=f.bubble_overhead(pp=4, vpp=1, micro_batches=16)) == 18.0


@settings(max_examples=60, deadline=None)
@given(
    pp=st.sampled_from([2, 3, 4, 8]),
    vpp=st.integers(1, 4),
    rounds=st.integers(1, 40),
    forward=st.floats(0.1, 10),
    backward=st.floats(0.1, 10),
)
def test_even_stages_equal_the_closed_form(
    pp: int, vpp: int, rounds: int, forward: float, backward: float
) -> None:
    m = rounds * pp
    chunks = pp * vpp
    found = simulate([forward] * chunks, [backward] * chunks, pp=pp, vpp=vpp, micro_batches=m)
    closed = f.bubble_s(
        ideal_s=m * vpp * (forward + backward),
        overhead=f.bubble_overhead(pp=pp, vpp=vpp, micro_batches=m),
    )
    assert found.total_s == pytest.approx(found.slowest_s + closed, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), pp=st.sampled_from([2, 4]), vpp=st.integers(1, 3), rounds=st.integers(1, 6))
def test_uneven_stages_lie_between_their_bounds(data: Any, pp: int, vpp: int, rounds: int) -> None:
    times = st.lists(st.floats(0.5, 2.0), min_size=pp * vpp, max_size=pp * vpp)
    ahead, back = data.draw(times), data.draw(times)
    m = rounds * pp
    found = simulate(ahead, back, pp=pp, vpp=vpp, micro_batches=m)
    assert found.total_s >= max(found.slowest_s, sum(ahead) + sum(back)) - 1e-9
    even = simulate([max(ahead)] * pp * vpp, [max(back)] * pp * vpp, pp=pp, vpp=vpp, micro_batches=m)
    assert found.total_s <= even.total_s + 1e-9


def test_long_schedules_are_continued_at_the_slowest_pace() -> None:
    ahead = [1.0, 1.1, 0.9, 1.2, 1.0, 1.3, 0.8, 1.0]
    back = [2 * one for one in ahead]
    short = simulate(ahead, back, pp=8, vpp=1, micro_batches=64)
    long = simulate(ahead, back, pp=8, vpp=1, micro_batches=6400)
    assert long.bubble_s == pytest.approx(short.bubble_s, rel=1e-9)


def _step(model: str, *, simulated: bool, **degrees: Any) -> tuple[float, float]:
    graph = build_graph(CATALOG.model(model))
    run = TrainRun.model_validate(
        {"task": "train", "framework": "megatron", "precision": "bf16", "seq_len": 4096}
    )
    recipe = resolve_recipe(settle(run)[0], graph)
    base: dict[str, Any] = {
        "tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "etp": 1, "dp": 1, "shard": 1, "zero_stage": 0,
        "micro_batch": 1, "micro_batches": 32, "sequence_parallel": False, "schedule": "1f1b",
    }  # fmt: skip
    layout = Layout(**(base | degrees))
    step = step_time(
        graph, layout, recipe, CATALOG.cluster([(None, layout.world, "h100")]), simulated=simulated
    )
    return step.value, step.child("bubble").value


def test_plans_simulate_what_searches_close() -> None:
    # The head makes the last stage of Llama 3 slowest, so the others' time bounds filling and draining.
    closed, simulated = (_step("llama-3-8b", simulated=how, pp=4) for how in (False, True))
    assert simulated[1] < closed[1]
    assert simulated[0] == pytest.approx(closed[0], rel=0.05)


@pytest.mark.parametrize(("pp", "vpp"), [(4, 1), (4, 2), (5, 3)])
def test_chunks_hold_what_their_ranks_hold(pp: int, vpp: int) -> None:
    graph = build_graph(CATALOG.model("deepseek-v3"))
    chunks = chunk_layers(graph, pp=pp, vpp=vpp)
    assert sum(sum(chunk.values()) for chunk in chunks) == len(graph.trunk.layers)
    for stage in stages(graph, pp=pp, vpp=vpp):
        own = [chunk for index, chunk in enumerate(chunks) if index % pp == stage.index]
        assert stage.depth == sum(sum(chunk.values()) for chunk in own)


def test_zero_bubble_waits_less_than_1f1b() -> None:
    plain = _step("llama-3-70b", simulated=True, pp=8, micro_batches=16)
    split = _step("llama-3-70b", simulated=True, pp=8, micro_batches=16, schedule="zero-bubble")
    assert 0 < split[1] < 0.7 * plain[1]
    assert plain[0] - split[0] == pytest.approx(plain[1] - split[1])


def test_zero_bubble_has_one_chunk_per_rank() -> None:
    run = {
        "task": "train",
        "framework": "megatron",
        "seq_len": 4096,
        "pp": 4,
        "vpp": 2,
        "schedule": "zero-bubble",
    }
    settled, _ = settle(TrainRun.model_validate({**run, "micro_batch": 1, "global_batch": 8}))
    graph = build_graph(CATALOG.model("llama-3-8b"))
    with pytest.raises(Infeasible, match="one chunk of layers per rank"):
        resolve_layout(settled, graph, gpus=4)


def test_dual_pipe_gives_every_rank_a_stage_from_each_end() -> None:
    graph = build_graph(CATALOG.model("llama-3-70b"))
    plain = stages(graph, pp=8, vpp=1)
    dual = stages(graph, pp=8, vpp=1, schedule="dualpipe")
    for rank, stage in enumerate(dual):
        assert stage.params.total == plain[rank].params.total + plain[7 - rank].params.total
        assert (stage.first, stage.last) == ((True, True) if rank in (0, 7) else (False, False))
    folded = stages(graph, pp=4, vpp=1, schedule="dualpipe-v")
    assert sum(stage.params.total for stage in folded) == sum(stage.params.total for stage in plain)
    assert [stage.params.total for stage in folded] == [stage.params.total for stage in dual[:4]]
    assert [(stage.first, stage.last) for stage in folded] == [(True, True)] + 3 * [(False, False)]


@pytest.mark.parametrize("schedule", ["dualpipe", "zb-h2", "zero-bubble"])
def test_split_schedules_do_the_same_work(schedule: str) -> None:
    plain = _step("llama-3-70b", simulated=False, pp=8, micro_batches=32)
    split = _step("llama-3-70b", simulated=False, pp=8, micro_batches=32, schedule=schedule)
    assert split[1] < plain[1]
    busy = [step - bubble for step, bubble in (plain, split)]
    # DualPipe's ranks step two stages and pair the first with the last, so the head is no longer one stage's.
    assert busy[1] == pytest.approx(busy[0], rel=0.15 if schedule == "dualpipe" else 1e-9)


def _legal(**keys: Any) -> None:
    run = {"task": "train", "framework": "torchtitan", "seq_len": 4096, "micro_batch": 1, **keys}
    settled, _ = settle(TrainRun.model_validate(run))
    resolve_layout(settled, build_graph(CATALOG.model("llama-3-8b")), gpus=keys["pp"])


def test_what_dual_pipe_asks_of_a_layout() -> None:
    _legal(pp=4, schedule="dualpipe")  # 8 micro-batches, as the fewest it takes
    _legal(pp=16, schedule="DualPipeV", global_batch=32)
    for keys, words in (
        ({"pp": 3}, "pp 3 is odd"),
        ({"pp": 4, "global_batch": 4}, "2 x pp 4 = 8 micro-batches"),
        ({"pp": 4, "global_batch": 9}, "9 is odd"),
        ({"pp": 4, "vpp": 2}, "nearest: 1"),
        ({"pp": 32, "schedule": "dualpipe-v"}, "cuts 32 layers into 2 x pp 32 stages: use pp 16"),
    ):
        with pytest.raises(Infeasible, match=words):
            _legal(**({"schedule": "dualpipe"} | keys))
