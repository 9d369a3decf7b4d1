"""Public reports on speed: which way a change goes, what binds, which peak and which bandwidth is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from field_cases import CATALOG, cases, job_of

from gpucalc.builders.build import build_graph
from gpucalc.counts import count
from gpucalc.formulas import compute as f
from gpucalc.jobs import resolve_data
from gpucalc.measured_collectives import bus_factor, estimate_s
from gpucalc.plan.algorithms import all_reduce_by_algorithm
from gpucalc.plan.answer import Plan
from gpucalc.planner import plan_job
from gpucalc.spec.figure import Figure, FigureKind
from gpucalc.spec.fleet import parse_fleet
from gpucalc.spec.hardware import Cluster

CASES = cases("field_speed.yaml")


def of(kind: str) -> list[Any]:
    """The cases of a kind, as test parameters."""
    return [pytest.param(case, id=case["id"]) for case in CASES if case["kind"] == kind]


def cluster_of(gpus: str, case: Mapping[str, Any]) -> Cluster:
    """The report's machine: the default server with the links the report names."""
    cluster = CATALOG.cluster(parse_fleet(gpus))
    if "intra" in case:
        cluster = replace(cluster, intra=CATALOG.collective(case["intra"]), nvlink_domain=1)
        if cluster.intra.link != "pcie":
            cluster = replace(cluster, nvlink_domain=cluster.gpus_per_node)
    words = case.get("inter")
    if words is not None and cluster.inter is not None:
        source = ("the report's own words",)
        rate = Figure(value=words["gbit_per_s"], unit="Gbit/s", kind=FigureKind.DATASHEET, source=source)
        kind = CATALOG.collective(words["collectives"])
        inter = kind.on_network(rate, cluster.island, cluster.intra, cards=words.get("cards", 1))
        cluster = replace(cluster, inter=inter, nic_bandwidth_per_node=rate.line("nic"))
    return cluster


def plan_of(case: Mapping[str, Any], changes: Mapping[str, Any]) -> Plan:
    """A plan with its speed, whether or not it fits."""
    job = resolve_data(job_of(case, {"set": changes}), CATALOG, where=case["id"])
    cluster = cluster_of(str(job.fleet), case)
    return plan_job(job, CATALOG, cluster=cluster, advice=False, always_time=True)


def rate(plan: Plan, name: str) -> float:
    assert plan.throughput is not None
    return float(plan.throughput.child(name).value)


@pytest.mark.parametrize("case", of("compare"))
def test_a_change_goes_the_way_it_went(case: dict[str, Any]) -> None:
    before, after = plan_of(case, {}), plan_of(case, case["set"])
    assert before.throughput is not None
    assert after.throughput is not None
    ratio = after.throughput.value / before.throughput.value
    low, high = case["ratio"]
    assert low <= ratio <= high
    if "binds" in case:
        assert after.binds == case["binds"]


@pytest.mark.parametrize("case", of("collective"))
def test_a_bandwidth_is_told_normal_or_not(case: dict[str, Any]) -> None:
    for check in case["checks"]:
        cluster = cluster_of(case["gpus"], {**case, **check})
        size, ranks = float(check["bytes"]), check["ranks"]
        if "algorithm" in check:
            seconds = float(all_reduce_by_algorithm(cluster, size, ranks)[check["algorithm"]].value)
        else:
            seconds = estimate_s(cluster, "all_reduce", size, ranks)
        found = size * bus_factor("all_reduce", ranks) / seconds / 1e9
        low, high = check["gb_per_s"]
        assert low <= found <= high, f"{ranks} ranks"


@pytest.mark.parametrize("case", of("peak"))
def test_the_peak_is_the_dense_one_of_the_variant(case: dict[str, Any]) -> None:
    for check in case["checks"]:
        gpu, _ = CATALOG.gpu(check["gpu"])
        peak = gpu.peak(check["precision"])
        assert peak is not None
        assert peak.value / 1e12 == pytest.approx(check["tflops"], rel=check["within"])


@pytest.mark.parametrize("case", of("rates"))
def test_rates_fall_as_the_reports_do(case: dict[str, Any]) -> None:
    plans = [plan_of(case, check.get("set", {})) for check in case["checks"]]
    rates = [rate(plan, "tokens_per_s_per_gpu") for plan in plans]
    assert rates == sorted(rates, reverse=True)
    for found, check in zip(rates, case["checks"], strict=True):
        assert found == pytest.approx(check["tokens_per_s_per_gpu"], rel=check.get("within", case["within"]))


def test_context_parallel_ranges_that_are_not_balanced_by_hand() -> None:
    # four ranges of eight pairs in all: the last has (2 - 1/4) x 2
    assert f.unbalanced_pairs(pairs=8, cp=4) == 3.5
    assert f.unbalanced_pairs(pairs=8, cp=1) == 8


@pytest.mark.parametrize("case", of("rates"))
def test_their_flops_count_attention(case: dict[str, Any]) -> None:
    """6 N + 12 L h s FLOPs a token, attention in full, gives the published rates."""
    spec = CATALOG.model(case["job"]["model"])
    for check in case["checks"]:
        seq_len = check.get("set", {}).get("run.seq_len", case["job"]["run"]["seq_len"])
        flops = token_flops(spec, seq_len) * check["tokens_per_s_per_gpu"]
        assert flops / 1e12 == pytest.approx(check["tflops"], rel=0.01)


@pytest.mark.parametrize("case", of("utilisation"))
def test_utilisation_is_reproduced(case: dict[str, Any]) -> None:
    gpu, _ = CATALOG.gpu(case["gpu"])
    peak = gpu.peak("bf16")
    assert peak is not None
    flops = token_flops(CATALOG.model(case["model"]), case["seq_len"]) * case["tokens_per_s_per_gpu"]
    assert flops / peak.value == pytest.approx(case["mfu"], abs=0.005)


def token_flops(spec: Any, seq_len: int) -> float:
    """FLOPs a token, 6 N + 12 L h s: every parameter, attention not halved for causality."""
    total = float(count(build_graph(spec)).total.value)
    return 6 * total + 12 * spec.layers * spec.hidden * seq_len
