"""The search: every legal layout, once, by the same numbers as a plan, and the best of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpucalc.builders.build import build_graph
from gpucalc.catalog import open_catalog
from gpucalc.counts import count
from gpucalc.errors import Infeasible, InputError
from gpucalc.plan.answer import Level
from gpucalc.plan.evaluate import ErrorTable, Subject, Terms, evaluate
from gpucalc.plan.resolve import resolve_layout, settle
from gpucalc.search import best_run, columns, explore, one_by_one
from gpucalc.search.found import Found
from gpucalc.search.space import AUTO_KEYS, Space
from gpucalc.search.worth import Scale
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.model import ModelSpec
from gpucalc.spec.train_run import TrainRun

CATALOG = open_catalog()
BASE = {"layers": 8, "hidden": 2048, "heads": 16, "kv_heads": 4, "ffn": 5632, "vocab": 32_000}
SPECS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", **BASE},
    "gpt2": {"architecture": "gpt2", **BASE, "kv_heads": 16, "ffn": 8192, "layers": 6},
    "mixtral": {"architecture": "mixtral", **BASE, "moe": {"experts": 8, "top_k": 2, "expert_ffn": 2816}},
    "deepseek": {
        "architecture": "deepseek_v3", **BASE, "kv_heads": 16,
        "moe": {"experts": 16, "top_k": 4, "expert_ffn": 704, "shared_expert_ffn": 704, "dense_layers": 1},
        "mla": {"q_lora": 256, "kv_lora": 128, "qk_nope": 64, "qk_rope": 32, "v_head": 64},
    },
}  # fmt: skip
FRAMEWORKS = ("ddp", "hf", "fsdp", "deepspeed", "megatron", "torchtitan")


def subject_of(key: str) -> Subject:
    spec = ModelSpec.read({"name": key, **SPECS[key]})
    graph = build_graph(spec)
    return Subject(spec, graph, count(graph))


SUBJECTS = {key: subject_of(key) for key in SPECS}
CLUSTERS: dict[tuple[str, int], Cluster] = {
    (card, gpus): CATALOG.cluster([(None, gpus, card)])
    for card, gpus in (("v100-sxm2-16gb", 4), ("a100-sxm-40gb", 8), ("h100-sxm-80gb", 16), ("l40s", 6))
}


def run_of(framework: str, *, fixed: dict[str, Any] | None = None) -> TrainRun:
    """A run that leaves every key of its framework to the search, less those given."""
    stated: dict[str, Any] = {"framework": framework, "precision": "fp16", "seq_len": 2048}
    stated |= {"global_batch": 32, **(fixed or {})}
    for key in AUTO_KEYS:
        if key not in stated:
            try:
                TrainRun.read({**stated, key: "auto"})
            except InputError:
                continue
            stated[key] = "auto"
    return settle(TrainRun.read(stated))[0]


def both(key: str, run: TrainRun, cluster: Cluster) -> tuple[Found, Found]:
    """What columns find, and what weighing layouts one by one does."""
    subject = SUBJECTS[key]
    space = Space(subject.graph, run, cluster)
    scale = Scale(subject, cluster, ErrorTable())
    return columns.search(space, scale, keep=16), one_by_one(space, scale, keep=16)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    key=st.sampled_from(sorted(SPECS)),
    framework=st.sampled_from(FRAMEWORKS),
    where=st.sampled_from(sorted(CLUSTERS)),
    batch=st.sampled_from([None, 24, 32, 96]),
    seq_len=st.sampled_from([512, 1536, 8192]),
    data=st.data(),
)
def test_columns_find_what_layouts_one_by_one_do(
    key: str, framework: str, where: tuple[str, int], batch: int | None, seq_len: int, data: st.DataObject
) -> None:
    fixed: dict[str, Any] = {"global_batch": batch, "seq_len": seq_len}
    if framework in ("megatron", "torchtitan", "deepspeed"):  # else a quarter of a minute
        fixed |= data.draw(st.sampled_from([{"cp": 1, "offload": "none"}, {"pp": 1}, {"tp": 2, "ep": 1}]))
        fixed["micro_batch"] = data.draw(st.sampled_from([1, 2, "auto"]))
    try:
        found, oracle = both(key, run_of(framework, fixed=fixed), CLUSTERS[where])
    except Infeasible:
        return
    assert (found.legal, found.fitting) == (oracle.legal, oracle.fitting)
    if not oracle.best:
        assert not found.best
        return
    best = oracle.best[0]
    assert found.best[0].tier == best.tier
    # Of layouts that take the same time, rounding decides which comes first.
    alike = [one.needed_bytes for one in oracle.best if one.step_s == pytest.approx(best.step_s, rel=1e-9)]
    assert any(found.best[0].needed_bytes == pytest.approx(needed, rel=1e-9) for needed in alike)
    assert len(found.best) == len(oracle.best)
    for mine, other in zip(found.best, oracle.best, strict=True):
        assert mine.step_s == pytest.approx(other.step_s, rel=1e-9)
    # Of the front's points that differ by rounding alone, either may stand for both.
    assert [one.needed_bytes for one in found.front] == pytest.approx(
        [one.needed_bytes for one in oracle.front], rel=1e-6
    )


def test_blocks_cut_to_single_layouts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("megatron", fixed={"micro_batch": 1, "offload": "none", "recompute": "none"})
    subject, cluster = SUBJECTS["llama"], CLUSTERS["a100-sxm-40gb", 8]
    space, scale = Space(subject.graph, run, cluster), Scale(subject, cluster, ErrorTable())
    whole = columns.search(space, scale, keep=8)
    monkeypatch.setattr(columns, "CELLS_AT_A_TIME", 1)
    parts = columns.search(space, scale, keep=8)
    assert (whole.legal, whole.fitting) == (parts.legal, parts.fitting)
    assert [one.step_s for one in whole.best] == pytest.approx([one.step_s for one in parts.best])


def test_every_legal_layout_is_a_candidate_once() -> None:
    subject, cluster = SUBJECTS["mixtral"], CLUSTERS["h100-sxm-80gb", 16]
    run = run_of("megatron", fixed={"micro_batch": 2, "offload": "none", "recompute": "none"})
    space = Space(subject.graph, run, cluster)
    seen = set()
    for values in space.candidates():
        layout, _ = resolve_layout(space.settled(values), subject.graph, gpus=16)
        assert layout.world == 16
        assert layout not in seen
        seen.add(layout)
    assert len(seen) > 100


def values_of(run: TrainRun, key: str, gpus: tuple[str, int], values: str) -> set[Any]:
    space = Space(SUBJECTS[key].graph, run, CLUSTERS[gpus])
    return {one[values] for one in space.candidates()}


def test_tensor_parallelism_stays_in_the_domain_unless_it_is_allowed() -> None:
    where = ("h100-sxm-80gb", 16)
    assert max(values_of(run_of("megatron"), "llama", where, "tp")) == 8
    across = run_of("megatron", fixed={"tp_across_nodes": True})
    assert max(values_of(across, "llama", where, "tp")) == 16
    given = run_of("megatron", fixed={"tp": 16})
    assert values_of(given, "llama", where, "tp") == {16}


def test_a_framework_is_not_asked_for_what_it_cannot_do() -> None:
    where = ("a100-sxm-40gb", 8)
    experts = run_of("megatron", fixed={"pp": 1})
    for one in Space(SUBJECTS["mixtral"].graph, experts, CLUSTERS[where]).candidates():
        assert one["sequence_parallel"] or one["tp"] == 1
        assert one["etp"] in (1, one["tp"])
    offloaded = run_of("megatron", fixed={"offload": "activations-cpu"})
    assert values_of(offloaded, "llama", where, "pp") == {1}
    assert values_of(offloaded, "llama", where, "recompute") == {"none"}
    piped = run_of("deepspeed", fixed={"pp": 2})
    assert values_of(piped, "llama", where, "zero_stage") == {0, 1}
    assert values_of(run_of("megatron"), "llama", where, "schedule") == {"1f1b"}
    assert values_of(run_of("torchtitan"), "llama", where, "schedule") == {
        "1f1b", "zero-bubble", "dualpipe-v",
    }  # fmt: skip


def offered(run: TrainRun, key: str, gpus: tuple[str, int], *names: str) -> set[tuple[Any, ...]]:
    """The combinations of some keys among a space's layouts."""
    space = Space(SUBJECTS[key].graph, run, CLUSTERS[gpus])
    return {tuple(one[name] for name in names) for one in space.candidates()}


def test_offload_goes_with_the_stages_that_know_it() -> None:
    where = ("a100-sxm-40gb", 8)
    found = offered(run_of("deepspeed", fixed={"pp": 1}), "llama", where, "offload", "zero_stage")
    assert found == {
        *(("none", stage) for stage in range(4)), ("optimizer-cpu", 1), ("optimizer+gradients-cpu", 2),
        ("optimizer+gradients-cpu", 3), ("params+optimizer-cpu", 3), ("optimizer-nvme", 3),
        ("params+optimizer-nvme", 3),
    }  # fmt: skip
    replicated = {"none", "activations-cpu"}
    found = offered(run_of("fsdp"), "llama", where, "offload", "zero_stage")
    assert {offload for offload, stage in found if stage == 0} == replicated
    assert {offload for offload, stage in found if stage} == replicated | {"params+optimizer-cpu"}


def test_captured_graphs_rule_out_what_moves_beneath_them() -> None:
    where = ("h100-sxm-80gb", 16)
    free = run_of("megatron", fixed={"pp": 1})
    names = ("recompute", "offload", "zero_stage")
    every = offered(free, "llama", where, *names)
    assert {("full", "none", 3), ("none", "activations-cpu", 3), ("full", "none", 1)} <= every
    parts = offered(free.model_copy(update={"cuda_graphs": ("attn",)}), "llama", where, *names)
    assert {one[0] for one in parts} == {"none", "selective"}
    assert {one[1] for one in parts} == {"none", "optimizer-cpu"}
    assert {one[2] for one in parts} == {0, 1}
    whole = offered(free.model_copy(update={"cuda_graphs": ("full",)}), "llama", where, *names)
    assert {one[0] for one in whole} == {"none", "selective", "full"}


def test_gradients_leave_a_single_card_where_none_are_accumulated() -> None:
    alone = CATALOG.cluster([(None, 1, "h100-sxm-80gb")])
    space = Space(SUBJECTS["llama"].graph, run_of("hf", fixed={"global_batch": 4}), alone)
    freed = {one["micro_batch"] for one in space.candidates() if one["offload"] == "optimizer+gradients-cpu"}
    kept = {one["micro_batch"] for one in space.candidates() if one["offload"] == "optimizer-cpu"}
    assert (freed, kept) == ({4}, {1, 2, 4})


def test_copies_of_sharded_state_are_searched() -> None:
    where = ("h100-sxm-80gb", 16)
    found = offered(run_of("fsdp"), "llama", where, "dp_shard", "zero_stage")
    assert found == {(16, 0), *((shard, stage) for shard in (2, 4, 8, 16) for stage in (2, 3))}
    stated = run_of("fsdp", fixed={"dp_shard": 8})
    assert values_of(stated, "llama", where, "dp_shard") == {8}
    old = run_of("fsdp", fixed={"year": 2022})
    assert values_of(old, "llama", where, "dp_shard") == {16}
    # One rank of a copy divides nothing unless context parallel ranks share it.
    titan = offered(run_of("torchtitan", fixed={"pp": 1, "tp": 1}), "llama", where, "dp_shard", "cp", "dp")
    assert (1, 2, 8) in titan
    assert (1, 1, 16) not in titan
    for one in Space(SUBJECTS["mixtral"].graph, run_of("torchtitan"), CLUSTERS[where]).candidates():
        assert one["tp"] * one["cp"] * one["dp_shard"] % (one["ep"] * one["etp"]) == 0


def test_what_only_goes_without_other_degrees_is_searched_without() -> None:
    where = ("h100-sxm-80gb", 16)
    plain = offered(run_of("torchtitan"), "mixtral", where, "zero_stage", "tp", "pp", "cp", "ep", "dp_shard")
    assert {one[1:] for one in plain if one[0] == 0} == {(1, 1, 1, 1, 16)}
    own_fsdp = offered(run_of("megatron"), "llama", where, "zero_stage", "pp", "offload")
    assert {one[1:] for one in own_fsdp if one[0] > 1} == {(1, "none"), (1, "activations-cpu")}
    assert {one[0] for one in own_fsdp} == {0, 1, 2, 3}
    muon = run_of("megatron", fixed={"optimizer": "muon"})
    assert values_of(muon, "llama", where, "zero_stage") == {0, 1}


def test_hybrid_sharding_wins_where_the_network_is_slow() -> None:
    """Gathering inside a node alone: what a slow network between nodes asks for, where memory allows it."""
    subject = SUBJECTS["llama"]
    slow = CATALOG.cluster([(8, 8, "a100-sxm-40gb")], "gcp-a2-highgpu-8g")
    run = run_of("fsdp", fixed={"micro_batch": 1, "global_batch": 64, "zero_stage": 3, "recompute": "none"})
    best = explore(subject, Space(subject.graph, run, slow), slow).best
    assert best[0].values["dp_shard"] == 8
    whole = [one for one in best if one.values["dp_shard"] == 64]
    assert all(one.step_s > best[0].step_s for one in whole)


def again(key: str, **fixed: Any) -> set[tuple[str, tuple[str, ...] | None]]:
    """What Megatron-Core is asked to make again, with modules."""
    run = run_of("megatron", fixed={"offload": "none", "pp": 1, **fixed})
    found = offered(run, key, ("a100-sxm-40gb", 8), "recompute", "recompute_modules")
    return {(word, modules) for word, modules in found}


def test_a_layers_parts_are_made_again_one_by_one() -> None:
    whole: set[tuple[str, tuple[str, ...] | None]] = {("none", None), ("full", None)}
    assert again("llama") == whole | {
        ("selective", ("layernorm",)), ("selective", ("layernorm", "mlp")),
    }  # fmt: skip
    assert again("mixtral") == whole | {
        ("selective", ("layernorm", "moe_act")), ("selective", ("layernorm", "moe")),
    }  # fmt: skip
    latent = ("layernorm", "mla_up_proj")
    assert again("deepseek") == whole | {
        ("selective", (*latent, "moe_act")), ("selective", (*latent, "mlp", "moe")),
    }  # fmt: skip
    # Scores of attention are there to be freed where no fused kernel works them out.
    assert ("selective", ("core_attn", "layernorm")) in again("llama", attention="eager")
    # A second trip of tokens to their experts cannot be hidden beside another micro-batch.
    assert again("mixtral", ep_overlap=True) == {("none", None), ("selective", ("layernorm", "moe_act"))}
    assert again("llama", recompute_modules=["mlp"]) == whole | {("selective", None)}
    assert again("llama", year=2024) == whole | {("selective", None)}


def test_parts_made_again_are_planned_as_they_were_weighed() -> None:
    subject, cluster = SUBJECTS["mixtral"], CLUSTERS["a100-sxm-40gb", 8]
    run = run_of("megatron", fixed={"offload": "none", "pp": 1, "zero_stage": 1, "micro_batch": 2})
    space = Space(subject.graph, run, cluster)
    found = columns.search(space, Scale(subject, cluster, ErrorTable()), keep=400).best
    one = next(one for one in found if one.values["recompute_modules"] == ("layernorm", "moe_act"))
    plan = evaluate(subject, space.settled(one.values), cluster, Terms("one", "8xA100-SXM-40GB"))
    assert plan.recipe.recompute_modules == ("layernorm", "moe_act")
    assert plan.verdict.needed.value == pytest.approx(one.needed_bytes)
    assert plan.time is not None
    assert plan.time.value == pytest.approx(one.step_s)
    # The least memory costs most, and a part of a layer lies between none and all of it.
    alike = {
        other.values["recompute_modules"] or other.values["recompute"]: other
        for other in found
        if {**one.values, "recompute": 0, "recompute_modules": 0}
        == {**other.values, "recompute": 0, "recompute_modules": 0}
    }
    order = ["none", ("layernorm", "moe_act"), ("layernorm", "moe"), "full"]
    held = [alike[name].needed_bytes for name in order if name in alike]
    spent = [alike[name].step_s for name in order if name in alike]
    assert len(held) > 2
    assert held == sorted(held, reverse=True)
    assert spent == sorted(spent)


def test_of_layouts_that_take_the_same_time_the_one_that_offloads_nothing_is_first() -> None:
    subject, cluster = SUBJECTS["llama"], CLUSTERS["h100-sxm-80gb", 16]
    run = run_of("fsdp", fixed={"recompute": "full", "zero_stage": 2, "micro_batch": 2})
    best = explore(subject, Space(subject.graph, run, cluster), cluster).best
    alike = [one.values["offload"] for one in best if one.step_s == pytest.approx(best[0].step_s, rel=1e-9)]
    assert len(alike) > 1  # offloaded activations travel beside computation
    assert alike[0] == "none"


def test_old_software_is_not_given_what_came_later() -> None:
    where = ("a100-sxm-40gb", 8)
    old = run_of("megatron", fixed={"year": 2020})
    for key, values in (("vpp", {1}), ("cp", {1}), ("recompute", {"none", "full"}), ("zero_stage", {0})):
        assert values_of(old, "gpt2", where, key) == values, key
    assert values_of(old, "gpt2", where, "sequence_parallel") == {False}
    assert max(values_of(run_of("megatron", fixed={"year": 2022}), "gpt2", where, "vpp")) > 1


def test_what_was_chosen_is_told_with_its_reason_once() -> None:
    subject, cluster = SUBJECTS["llama"], CLUSTERS["a100-sxm-40gb", 8]
    run, chosen = best_run(subject, run_of("megatron"), cluster)
    assert all(getattr(run, key) != "auto" for key in AUTO_KEYS)
    reasons = {item.key: item.why for item in chosen}
    assert "the fastest of" in reasons["run.tp"]
    assert reasons["run.pp"] == "searched with run.tp"
    assert run.reshard_after_forward is not None


def test_a_chosen_layout_is_planned_as_it_was_weighed() -> None:
    subject, cluster = SUBJECTS["deepseek"], CLUSTERS["h100-sxm-80gb", 16]
    run = run_of("megatron", fixed={"offload": "none", "recompute": "none", "pipeline_split": "uneven"})
    space = Space(subject.graph, run, cluster)
    best = explore(subject, space, cluster).best[0]
    plan = evaluate(subject, space.settled(best.values), cluster, Terms("best", "16xH100-SXM"))
    assert plan.verdict.level is Level.FITS
    assert plan.verdict.needed.value == pytest.approx(best.needed_bytes)
    assert plan.time is not None
    assert plan.time.value == pytest.approx(best.step_s)


def test_where_nothing_is_legal_the_first_broken_rule_is_told() -> None:
    run = run_of("megatron", fixed={"tp": 3})
    with pytest.raises(Infeasible, match="tp"):
        best_run(SUBJECTS["llama"], run, CLUSTERS["a100-sxm-40gb", 8])


def test_where_nothing_fits_the_least_memory_is_taken() -> None:
    subject, cluster = SUBJECTS["llama"], CLUSTERS["v100-sxm2-16gb", 4]
    fixed = {
        "tp": 1,
        "pp": 1,
        "cp": 1,
        "recompute": "none",
        "offload": "none",
        "zero_stage": 0,
        "seq_len": 65536,
    }
    run = run_of("megatron", fixed=fixed)
    space = Space(subject.graph, run, cluster)
    found = explore(subject, space, cluster)
    assert (found.fitting, found.best[0].fits, found.best[0].values["micro_batch"]) == (0, False, 1)


def test_states_are_not_cut_along_the_sequence() -> None:
    spec = CATALOG.model("mamba2-2.7b")
    graph = build_graph(spec)
    space = Space(graph, run_of("megatron"), CLUSTERS["a100-sxm-40gb", 8])
    assert {one["cp"] for one in space.candidates()} == {1}
