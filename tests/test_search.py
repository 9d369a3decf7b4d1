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
from gpucalc.plan.evaluate import ErrorTable, Subject
from gpucalc.plan.resolve import settle
from gpucalc.search import columns, one_by_one
from gpucalc.search.found import Candidate, Found
from gpucalc.search.space import AUTO_KEYS, Space
from gpucalc.search.worth import Scale
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.job import TrainRun
from gpucalc.spec.model import ModelSpec

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


def worth(one: Candidate) -> tuple[Any, ...]:
    return one.tier, pytest.approx(one.step_s, rel=1e-9), pytest.approx(one.needed_bytes, rel=1e-9)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
    assert worth(found.best[0]) == (oracle.best[0].tier, oracle.best[0].step_s, oracle.best[0].needed_bytes)
    assert len(found.best) == len(oracle.best)
    for mine, other in zip(found.best, oracle.best, strict=True):
        assert mine.step_s == pytest.approx(other.step_s, rel=1e-9)
    assert [one.needed_bytes for one in found.front] == pytest.approx(
        [one.needed_bytes for one in oracle.front], rel=1e-9
    )
