"""Hardware figures against hand-checked values, and the machines fleets resolve to."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpucalc.catalog import Catalog, shipped
from gpucalc.errors import InputError, UnknownName
from gpucalc.line import Kind
from gpucalc.spec.figure import FigureKind
from gpucalc.spec.fleet import parse_fleet
from gpucalc.spec.hardware import Cluster
from gpucalc.units import GB, GIB


def cluster(catalog: Catalog, fleet: str, system: str | None = None) -> Cluster:
    return catalog.cluster(parse_fleet(fleet), system)


# -- one GPU --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "driver_bytes", "usable_gib"),
    [
        ("a100-sxm-80gb", 85_899_345_920, 79.15),  # 81920 MiB: the label is binary
        ("h100-sxm-80gb", 85_520_809_984, 79.10),  # 81559 MiB
        ("rtx-4090", 25_757_220_864, 23.64),  # 24564 MiB
        ("b200-sxm", 192_265_846_784, 178.35),  # 183359 MiB: 192 decimal, 179 binary
        ("t4", 16_106_127_360, 14.56),  # the current driver; older ones leave 14.74
    ],
)
def test_memory(catalog: Catalog, name: str, driver_bytes: int, usable_gib: float) -> None:
    gpu, _ = catalog.gpu(name)
    assert gpu.memory_total is not None
    assert gpu.memory_total.si == driver_bytes
    usable = gpu.usable_memory()
    assert usable.value == pytest.approx(usable_gib * GIB)
    assert usable.kind is Kind.MEASURED
    assert usable.value < driver_bytes


def test_memory_of_a_gpu_nobody_reported_is_its_label(catalog: Catalog) -> None:
    gpu, _ = catalog.gpu("b100-192gb")
    usable = gpu.usable_memory()
    assert usable.value == 192 * GB  # Blackwell labels are decimal
    assert usable.kind is Kind.ASSUMED


def test_usable_memory_never_exceeds_the_driver_total(catalog: Catalog) -> None:
    for name in catalog.names("gpus"):
        gpu, _ = catalog.gpu(name)
        ceiling = gpu.memory_total or gpu.memory_label
        assert gpu.usable_memory().value <= ceiling.si, name


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("rtx-3090", "fp16", 71.2),  # fp32 accumulate: half of the printed 142
        ("rtx-3090", "bf16", 71.2),
        ("rtx-3090", "fp16_fp16acc", 142.3),
        ("rtx-4090", "bf16", 165.2),
        ("rtx-4090", "fp8", 330.3),
        ("l40", "bf16", 181.05),
        ("a100-sxm-80gb", "bf16", 312),
        ("a100-sxm-80gb", "tf32", 156),
        ("a100-sxm-80gb", "fp32", 19.5),
        ("h100-sxm-80gb", "bf16-pure", 989.4),
        ("h100-sxm-80gb", "mxfp8", 1979),
        ("b200-sxm", "nvfp4", 9000),
    ],
)
def test_peaks_are_dense_with_fp32_accumulation(
    catalog: Catalog, name: str, precision: str, tflops: float
) -> None:
    peak = catalog.gpu(name)[0].peak(precision)
    assert peak is not None
    assert peak.value == pytest.approx(tflops * 1e12)
    assert peak.unit == "FLOP/s"


@pytest.mark.parametrize(("name", "precision"), [("v100", "bf16"), ("a100", "fp8"), ("h100", "nvfp4")])
def test_a_precision_the_hardware_lacks_is_none(catalog: Catalog, name: str, precision: str) -> None:
    assert catalog.gpu(name)[0].peak(precision) is None


def test_a_precision_nobody_knows_is_refused(catalog: Catalog) -> None:
    with pytest.raises(UnknownName):
        catalog.gpu("a100")[0].peak("fp17")


def test_figures_stand_in_a_sane_order(catalog: Catalog) -> None:
    for name in catalog.names("gpus"):
        gpu, _ = catalog.gpu(name)
        peaks = {key: figure.si for key, figure in gpu.peaks.items()}
        if "fp16" in peaks and "fp16_fp16acc" in peaks:
            assert peaks["fp16"] <= peaks["fp16_fp16acc"], name
        if "bf16" in peaks and "fp8" in peaks:
            assert peaks["bf16"] <= peaks["fp8"], name
        if "fp8" in peaks and "fp4" in peaks:
            assert peaks["fp8"] < peaks["fp4"], name
        assert 20 * GB < gpu.memory_bandwidth.si < 50_000 * GB


# -- kernels --------------------------------------------------------------------------------------


def test_every_gpu_has_kernel_rates_for_the_precisions_it_has(catalog: Catalog) -> None:
    for name in catalog.names("gpus"):
        gpu, _ = catalog.gpu(name)
        rates = catalog.kernels_for(gpu).gemm
        for precision in set(gpu.peaks) & {"bf16", "fp16", "tf32", "fp32", "fp8", "fp4", "int8"}:
            assert precision in rates, f"{name} {precision}"


def test_kernel_constants_are_those_fitted(catalog: Catalog) -> None:
    rate = catalog.kernels_for(catalog.gpu("h100")[0]).gemm["bf16"]
    assert (rate.mfu_max.value, rate.hbm_efficiency.value, rate.p.value) == (0.782, 0.815, 2.59)
    assert rate.overhead.si == pytest.approx(2.94e-6)
    assert rate.mfu_max.kind is FigureKind.MEASURED


def test_constants_fitted_against_another_peak_are_restated(catalog: Catalog) -> None:
    # The fit took 503 TFLOP/s; the catalogue holds 467.8 for the Server Edition.
    gpu, _ = catalog.gpu("rtx-pro-6000-server")
    rate = catalog.kernels_for(gpu).gemm["bf16"]
    assert rate.mfu_max.value * gpu.peaks["bf16"].value == pytest.approx(0.787 * 503, rel=1e-3)


def test_rates_of_a_relative_are_assumed_and_said(catalog: Catalog) -> None:
    gpu, _ = catalog.gpu("rtx-3070")
    rate = catalog.kernels_for(gpu).gemm["bf16"]
    assert rate.mfu_max.kind is FigureKind.ASSUMED
    assert rate.error is not None
    assert rate.error.value > 0.2
    said = cluster(catalog, "1xRTX3070").assumptions
    assert any("carried over" in sentence and "RTX 3090" in sentence for sentence in said)


# -- collectives ----------------------------------------------------------------------------------


def test_every_intra_class_answers_for_every_operation(catalog: Catalog) -> None:
    for name in catalog.names("collectives"):
        spec = catalog.collective(name)
        if spec.level == "intra":
            spec = spec.on_gpu(catalog.gpu("mi250x")[0])
            for op in ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "send_recv"):
                for size in (2, 3, 4, 8):
                    terms = spec.terms(op, size)
                    assert 1e-6 < terms.alpha_s < 1e-3, (name, op)
                    assert 5 * GB < terms.bus_bytes_per_s < 1000 * GB, (name, op)


def test_collective_constants_by_hand(catalog: Catalog) -> None:
    spec = catalog.collective("nvswitch3")
    terms = spec.terms("all_reduce", 8)
    assert terms.alpha_s == pytest.approx((6.3 + 1.51 * 6) * 1e-6)
    assert terms.bus_bytes_per_s == 491 * GB  # reduced in the switch
    assert spec.terms("all_reduce", 4).bus_bytes_per_s == 370 * GB
    gather = spec.terms("all_gather", 4)
    assert gather.alpha_s == pytest.approx((0.54 * (6.3 + 1.51 * 2) + 1.9) * 1e-6)
    assert gather.bus_bytes_per_s == pytest.approx(0.96 * 370 * GB)
    # The ring's, not the switch's.
    assert spec.terms("all_gather", 8).bus_bytes_per_s == pytest.approx(1.03 * 370 * GB)


def test_an_operation_nobody_measured_is_refused(catalog: Catalog) -> None:
    with pytest.raises(InputError, match="no such operation"):
        catalog.collective("nvswitch3").terms("gossip", 8)


# -- clusters -------------------------------------------------------------------------------------


def test_eight_h100(catalog: Catalog) -> None:
    one = cluster(catalog, "8xH100")
    assert (one.count, one.nodes, one.gpus_per_node, one.nvlink_domain) == (8, 1, 8, 8)
    assert one.intra.id == "nvswitch3"
    assert one.inter is None
    assert one.system is not None
    assert one.system.id == "dgx-h100"
    assert one.node_power is not None
    assert one.node_power.value == 10_200
    assert one.price_per_gpu_hour is not None
    assert one.price_per_gpu_hour.value == pytest.approx((3.95 + 3.99) / 2)  # the median of six offers
    said = " / ".join(one.assumptions)
    assert "dgx-h100" in said
    assert "2026" in said


def test_a_price_names_its_sources_in_the_order_of_the_offers(tmp_path: Path) -> None:
    keys = [f"shop_{letter}" for letter in "hfbdgace"]
    (tmp_path / "prices").mkdir()
    (tmp_path / "sources.yaml").write_text("".join(f"{key}: Price list of {key}\n" for key in keys))
    offers = "".join(
        f"- {{provider: {key}, date: '2026-09', usd_per_gpu_hour: {{value: 1, unit: USD/h, kind: datasheet,"
        f" source: [{key}]}}}}\n"
        for key in keys
    )
    (tmp_path / "prices" / "l4.yaml").write_text(f"id: l4\noffers:\n{offers}")
    price = cluster(Catalog([tmp_path, shipped()]), "1xl4").price_per_gpu_hour
    assert price is not None
    assert price.source == "; ".join(f"{key}: Price list of {key}" for key in keys)


def test_sixteen_h100_cross_infiniband(catalog: Catalog) -> None:
    two = cluster(catalog, "16xH100")
    assert (two.nodes, two.gpus_per_node) == (2, 8)
    assert two.nic_bandwidth_per_node is not None
    assert two.nic_bandwidth_per_node.value == 8 * 400e9 / 8
    assert two.inter is not None
    assert two.inter.id == "ib"
    # Two nodes: 1.8 x 400 = 720 GB/s, bound by the 491 inside. More: 0.94 x 400.
    assert two.inter.terms("all_reduce", 2).bus_bytes_per_s == 491 * GB
    assert two.inter.terms("all_reduce", 4).bus_bytes_per_s == pytest.approx(376 * GB)
    assert two.inter.terms("all_reduce", 4).alpha_s == pytest.approx((33.6 + 14.2) * 1e-6)
    # All to all over two nodes: 8 of the 15 parts a GPU sends leave over its 50 GB/s card.
    assert two.inter.terms("alltoall", 2).bus_bytes_per_s == pytest.approx(0.94 * 50 * GB * 15 / 8)
    assert two.inter.terms("send_recv", 2).bus_bytes_per_s == pytest.approx(0.94 * 50 * GB)
    assert cluster(catalog, "2x8xH100").nodes == 2


def test_a_node_count_spreads_the_gpus(catalog: Catalog) -> None:
    spread = cluster(catalog, "2x4xA100")
    assert (spread.count, spread.nodes, spread.gpus_per_node, spread.nvlink_domain) == (8, 2, 4, 4)
    with pytest.raises(InputError, match="8 GPUs per node"):
        cluster(catalog, "1x16xA100")


def test_geforce_has_neither_nvlink_nor_peer_to_peer(catalog: Catalog) -> None:
    four = cluster(catalog, "4xRTX3090")
    assert (four.nodes, four.nvlink_domain, four.intra.id) == (1, 1, "pcie4-no-p2p")
    assert not four.intra.peer_to_peer
    assert four.system is not None
    assert four.system.id == "ws-3090x4"
    assert any("no NVLink bridges" in sentence for sentence in four.assumptions)
    assert four.price_per_gpu_hour is None
    assert cluster(catalog, "8xRTX3090").nodes == 1
    bridged = cluster(catalog, "2xRTX3090", "ws-3090x2-nvlink")
    assert (bridged.nvlink_domain, bridged.intra.id) == (2, "nvlink-bridge")


def test_a_mixed_fleet_is_bound_by_its_slower_half(catalog: Catalog) -> None:
    mixed = cluster(catalog, "4xA100+4xRTX3090")
    assert [pool.gpu.id for pool in mixed.pools] == ["a100-sxm-80gb", "rtx-3090"]
    assert [pool.intra.id for pool in mixed.pools] == ["nvswitch2", "pcie4-no-p2p"]
    assert (mixed.count, mixed.nodes, mixed.nvlink_domain) == (8, 2, 1)
    assert mixed.intra.id == "pcie4-no-p2p"
    assert mixed.inter is not None
    assert mixed.nic_bandwidth_per_node is not None
    assert mixed.nic_bandwidth_per_node.value == 1.25 * GB
    assert mixed.system is None
    with pytest.raises(InputError, match="one GPU kind"):
        cluster(catalog, "4xA100+4xRTX3090", "dgx-a100-80")


def test_a_rack_is_one_domain_over_many_nodes(catalog: Catalog) -> None:
    rack = cluster(catalog, "72xGB200")
    assert (rack.nodes, rack.gpus_per_node, rack.nvlink_domain, rack.island) == (18, 4, 72, 72)
    assert rack.inter is None
    assert rack.intra.terms("all_reduce", 72).bus_bytes_per_s == 1020 * GB
    assert rack.nic_bandwidth_per_node is not None
    assert rack.nic_bandwidth_per_node.value == 4 * 50 * GB
    two = cluster(catalog, "144xGB200")
    assert two.inter is not None
    # Two racks: bound by what one rack does inside; measured 815 GB/s at 16 GB.
    assert 700 * GB < two.inter.terms("all_reduce", 2).bus_bytes_per_s <= 1020 * GB


def test_a_system_by_name(catalog: Catalog) -> None:
    aws = cluster(catalog, "32xA100-40GB", "aws-p4d.24xlarge")
    assert aws.inter is not None
    assert aws.inter.id == "efa-v1"
    assert aws.inter.terms("all_reduce", 4).bus_bytes_per_s == pytest.approx(0.6 * 50 * GB)  # measured 29.6
    assert aws.price_per_gpu_hour is not None
    assert aws.price_per_gpu_hour.value == 2.745
    with pytest.raises(InputError, match="a100-sxm-40gb"):
        cluster(catalog, "8xH100", "aws-p4d.24xlarge")
    with pytest.raises(UnknownName):
        cluster(catalog, "8xH100", "dgx-h1000")


def test_a_gpu_without_a_known_server_gets_an_assumed_one_and_says_so(catalog: Catalog) -> None:
    host = cluster(catalog, "16xRTX-A6000")
    assert (host.nodes, host.gpus_per_node, host.system) == (2, 8, None)
    assert host.nic_bandwidth_per_node is not None
    assert host.nic_bandwidth_per_node.kind is Kind.ASSUMED
    assert any("no server is known" in sentence for sentence in host.assumptions)


def test_every_gpu_makes_a_cluster_of_one_and_of_sixteen(catalog: Catalog) -> None:
    for name in catalog.names("gpus"):
        for count in (1, 16):
            made = catalog.cluster([(None, count, name)])
            assert made.count == count
            assert made.gpus_per_node * made.nodes >= count
            if made.inter is not None:
                assert made.inter.resolved


def test_every_system_makes_a_cluster(catalog: Catalog) -> None:
    for name in catalog.names("systems"):
        system = catalog.system(name)
        made = catalog.cluster([(None, 2 * system.gpus, system.gpu)], name)
        assert made.system is not None
        assert made.nodes == 2 * system.gpus // system.gpus_per_node
