"""Published collectives: rows as sources state them, the path of a plan, the promised error by size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpucalc.catalog import Catalog
from gpucalc.errors import InputError
from gpucalc.measured import COLLECTIVES, Row, Skip, read_rows, shipped
from gpucalc.measured_collectives import (
    LARGE,
    SMALL,
    CollectivePlanner,
    Comparison,
    bus_factor,
    estimate_s,
    setup_s,
)
from gpucalc.plan.links import Links
from gpucalc.spec.fleet import FleetPart
from gpucalc.units import GB, MIB
from gpucalc.validate import Report, validate

CATALOGS = Path(__file__).parent.parent / "catalogs"


@pytest.fixture(scope="module")
def planner(catalog: Catalog) -> CollectivePlanner:
    return CollectivePlanner(catalog)


@pytest.fixture(scope="module")
def published(catalog: Catalog) -> Report:
    return validate(catalog=catalog, quantities=("collective",))


def row(**changes: Any) -> Row:
    data: dict[str, Any] = {
        "id": "made-up",
        "group": "made up",
        "op": "all_reduce",
        "gpu": "h100-sxm-80gb",
        "ranks": 8,
        "nodes": 1,
        "system": "dgx-h100",
        "points": [{"bytes": 512 * MIB, "time_us": 2111.1}],
    }
    data |= changes
    return Row({key: value for key, value in data.items() if value is not None}, "test")


def one(planner: CollectivePlanner, **changes: Any) -> Comparison:
    found = planner.compare(row(**changes))
    assert isinstance(found, list), found
    return found[0]


def test_bus_bandwidth_by_hand(planner: CollectivePlanner) -> None:
    # 2 x 7/8 x 512 MiB in 2111.1 us
    found = one(planner)
    assert found.measured == pytest.approx(1.75 * 512 * MIB / 2111.1e-6 / 1e9)
    # alpha 6.3 + 1.51 x 6 = 15.36 us, transfer 1913.4 us, ramp 2 x 0.54 x sqrt(15.36 x 1913.4)
    transfer = 1.75 * 512 * MIB / 491e9
    time = 15.36e-6 + 2 * 0.54 * (15.36e-6 * transfer) ** 0.5 + transfer
    assert found.estimated == pytest.approx(1.75 * 512 * MIB / time / 1e9)
    assert (found.size, found.link, found.meter) == (LARGE, "nvswitch3", "time")


def test_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("alltoall", 4) == bus_factor("all_gather", 4) == 0.75
    assert bus_factor("send_recv", 2) == 1


def test_the_split_is_at_one_million_bytes(planner: CollectivePlanner) -> None:
    below, at = 999_999, 1_000_000
    sizes = [{"bytes": size, "busbw_gb_s": 1} for size in (below, at)]
    found = planner.compare(row(points=sizes))
    assert isinstance(found, list)
    assert [each.size for each in found] == [SMALL, LARGE]


def test_the_estimate_is_that_of_a_plan(catalog: Catalog, planner: CollectivePlanner) -> None:
    cluster = catalog.cluster([FleetPart(2, 8, "h100-sxm-80gb")], "dgx-h100")
    line = Links(cluster).collective("all_reduce", "all_reduce", 64.0 * MIB, ranks=16, stride=1)
    assert estimate_s(cluster, "all_reduce", 64.0 * MIB, 16) == line.value
    found = one(planner, ranks=16, nodes=2, points=[{"bytes": 64 * MIB, "busbw_gb_s": 269.8}])
    assert found.link == "ib"
    assert found.estimated == pytest.approx(bus_factor("all_reduce", 16) * 64 * MIB / line.value / GB)


def test_a_row_names_its_own_links(planner: CollectivePlanner) -> None:
    point = [{"bytes": 128 * MIB, "busbw_gb_s": 20}]
    four = {"gpu": "rtx-4090", "system": "srv-4090x8", "points": point}
    assert one(planner, **four).link == "pcie4-no-p2p"
    patched = one(planner, intra="pcie4-p2p", **four)
    assert patched.link == "pcie4-p2p"
    assert patched.estimated > one(planner, **four).estimated
    slow = {"collectives": "roce", "cards": 8, "gbit_per_s": 100}
    two = {"ranks": 32, "nodes": 4, "points": point}
    assert one(planner, network=slow, **two).estimated < one(planner, **two).estimated / 2


def test_a_peak_and_a_latency_without_a_size_say_what_was_taken(planner: CollectivePlanner) -> None:
    peak = one(planner, points=None, peak_busbw_gb_s=475)
    assert "8G" in peak.notes[0]
    assert peak.estimated == pytest.approx(482, rel=0.02)
    latency = one(planner, points=None, latency_us=15.6)
    assert latency.size == SMALL
    assert latency.estimated / latency.measured == pytest.approx(15.6 / 15.36, rel=0.01)


def test_host_time_of_the_measuring_program_is_counted_and_said(planner: CollectivePlanner) -> None:
    assert setup_s(None) == 0
    assert setup_s("torch") == pytest.approx(25e-6)
    found = one(planner, setup="torch", points=[{"bytes": 8, "time_us": 40.36}])
    assert found.estimated / found.measured == pytest.approx(1, rel=0.01)
    assert "25 us" in found.notes[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"unhealthy": "bad cables"}, "bad cables"),
        ({"ranks": None}, "ranks not stated"),
        ({"gpu": None}, "gpu not stated"),
        ({"op": "gossip"}, "gossip"),
        ({"algorithm": "tree"}, "no such algorithm"),
        ({"algorithm": "ring", "op": "all_gather"}, "no such algorithm"),
        ({"setup": "abacus"}, "abacus"),
        ({"nodes": 2, "ranks": 16, "system": None}, "network between the nodes"),
        ({"nodes": 3}, "do not divide"),
        ({"system": "dgx-a100-80"}, "not estimated"),
    ],
)
def test_rows_that_cannot_be_compared_say_why(
    planner: CollectivePlanner, changes: dict[str, Any], reason: str
) -> None:
    found = planner.compare(row(**changes))
    assert isinstance(found, Skip)
    assert reason in found.reason


def test_a_misspelt_key_is_refused(planner: CollectivePlanner) -> None:
    with pytest.raises(InputError, match="busbw"):
        planner.compare(row(busbw=400))


def test_a_file_of_collectives_is_judged_alone(catalog: Catalog, tmp_path: Path) -> None:
    file = tmp_path / "rows.yaml"
    file.write_text(json.dumps([dict(row().data), dict(row(id="ill", unhealthy="bad").data)]))
    found = validate([file], catalog=catalog)
    assert (found.rows, found.rows_skipped) == (2, 1)
    assert [point.id for point in found.points] == ["made-up/512M"]
    assert validate([file], catalog=catalog, quantities=("throughput",)).rows == 0


# -- links ----------------------------------------------------------------------------------------


def test_two_nodes_beat_their_network_only_with_a_card_for_each_gpu(catalog: Catalog) -> None:
    def rate(system: str, count: int) -> float:
        inter = catalog.cluster([(None, count, "a100-sxm-80gb")], system).inter
        assert inter is not None
        return inter.terms("all_reduce", count // 8).bus_bytes_per_s / GB

    assert rate("dgx-a100-80", 16) == pytest.approx(242)  # 1.8 x 200, bound by NVLink
    assert rate("hgx-a100-8-4nic", 16) == pytest.approx(94)  # measured 86 to 91
    assert rate("hgx-a100-8-4nic", 24) == pytest.approx(94)  # measured 95.5


def test_a_rack_leaves_through_few_cards_and_takes_a_hop_for_each_gpu(catalog: Catalog) -> None:
    cluster = catalog.cluster([(None, 20 * 72, "gb200")], "gb200-nvl72")
    line = Links(cluster).collective("all_reduce", "all_reduce", 16.0 * 2**30, ranks=1440, stride=1)
    assert line.inputs["bus_bytes_per_s"].value == pytest.approx(0.94 * 8 * 50e9)
    # 33.6 + 14.2 (log2 20 - 1) + 2.5 x 64
    assert line.inputs["alpha_s"].value == pytest.approx((33.6 + 14.2 * 3.3219 + 160) * 1e-6, rel=1e-4)


def test_an_exchange_over_two_nodes_is_bound_by_the_card(catalog: Catalog) -> None:
    cluster = catalog.cluster([(None, 16, "h100-sxm-80gb")], "dgx-h100")
    time = estimate_s(cluster, "alltoall", 2.0**30, 16)
    # Half of 1 GiB leaves each GPU over 0.94 x 50 GB/s; ramp 1 and latency add 8 %.
    assert time == pytest.approx(0.5 * 2**30 / 47e9, rel=0.1)


# -- the published collectives --------------------------------------------------------------------


def test_every_row_is_compared_or_has_a_reason(published: Report, catalog: Catalog) -> None:
    rows = read_rows(shipped(catalog, COLLECTIVES))
    assert published.rows == len(rows) == 189
    assert len({each.id for each in rows}) == len(rows)
    assert len(published.points) == 1569
    assert published.rows_skipped == 25
    for skipped in published.skipped:
        assert "not a healthy machine" in skipped.reason or "not stated" in skipped.reason, skipped


def test_the_promise_by_size(published: Report) -> None:
    assert published.broken() == ()
    by_size = published.breakdown("collective", "size")
    for size, over_values, over_sources in ((LARGE, 0.075, 0.10), (SMALL, 0.10, 0.17)):
        found = by_size[size]
        assert found.mean_abs_rows is not None
        assert found.mean_abs is not None
        assert found.mean_abs_rows <= over_values
        assert found.mean_abs <= over_sources


def test_the_promise_for_each_operation_and_size(published: Report) -> None:
    errors: dict[tuple[str, str], list[float]] = {}
    for point in published.points:
        errors.setdefault((point.op, point.size), []).append(abs(point.error))
    assert {op for op, _ in errors} == {"all_reduce", "all_gather", "reduce_scatter", "alltoall", "send_recv"}
    for (op, size), found in errors.items():
        assert sum(found) / len(found) <= (0.10 if size == LARGE else 0.20), (op, size)


def test_a_broken_promise_is_named(published: Report) -> None:
    from gpucalc.validate import Bounds

    strict = Bounds(collective_large_mean=0.01, collective_small_mean=0.01)
    broken = published.broken(strict)
    assert [text.split(":")[0] for text in broken] == ["collective >= 1 MB", "collective < 1 MB"]


def test_the_report_shows_the_split(published: Report) -> None:
    document = published.document()
    by_size = document["summary"]["collective"]["by_size"]
    assert set(by_size) == {LARGE, SMALL}
    assert {"mean_abs", "mean_abs_rows"} <= set(by_size[LARGE])
    assert {"op", "link", "size"} <= set(document["points"][0])
