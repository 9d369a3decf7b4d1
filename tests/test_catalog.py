"""The catalogue: every file loads, every number says where it is from, names mean one thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpucalc.catalog import Catalog, roots, shipped
from gpucalc.catalog_names import KINDS, declared_names, fold
from gpucalc.errors import InputError, UnknownName
from gpucalc.spec.base import Spec
from gpucalc.spec.costs import GridSpec, PublishedRun
from gpucalc.spec.figure import Figure
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.hardware import CollectiveSpec, KernelSpec
from gpucalc.spec.system import PriceListSpec, SystemSpec
from gpucalc.spec.yamlio import load_yaml

SPECS: dict[str, type[Spec]] = {
    "gpus": GpuSpec,
    "systems": SystemSpec,
    "kernels": KernelSpec,
    "collectives": CollectiveSpec,
    "prices": PriceListSpec,
    "grids": GridSpec,
    "reliability": PublishedRun,
}
# Whole numbers that count or identify, and are not measurements of anything.
COUNTS = {
    "launch_year",
    "max_nvlink_domain",
    "pcie_gen",
    "pcie_lanes",
    "sm_count",
    "gpus",
    "gpus_per_node",
    "nvlink_domain",
    "count",
}


def files(*kinds: str) -> list[Path]:
    return [path for kind in kinds for path in sorted((shipped() / kind).glob("*.yaml"))]


def bare_numbers(data: Any, key: str = "") -> list[str]:
    """Dotted keys of numbers that are not part of a figure."""
    if isinstance(data, dict):
        if "value" in data and {"unit", "kind", "source"} <= set(data):
            return []
        return [found for name, part in data.items() for found in bare_numbers(part, f"{key}.{name}")]
    if isinstance(data, list):
        return [found for part in data for found in bare_numbers(part, key)]
    if isinstance(data, int | float) and not isinstance(data, bool) and key.rpartition(".")[2] not in COUNTS:
        return [key]
    return []


@pytest.mark.parametrize("kind", SPECS)
def test_every_file_loads_under_its_own_name(catalog: Catalog, kind: str) -> None:
    names = catalog.names(kind)
    assert names
    for name in names:
        spec: Any = catalog.load(kind, name, SPECS[kind])
        assert spec.id == name


def test_every_number_is_a_figure_with_unit_kind_and_source() -> None:
    kinds = ("gpus", "systems", "kernels", "collectives", "prices", "interconnects", "host", "costs", "grids")
    bare = {
        path.name: found
        for path in files(*kinds, "reliability")
        if (found := bare_numbers(load_yaml(path).data))
    }
    assert bare == {}


def test_interconnect_figures_hold(catalog: Catalog) -> None:
    for path in [*files("interconnects"), shipped() / "host" / "rules.yaml"]:
        data = catalog._cite(load_yaml(path).data, path.name, "")
        figures = [Figure.read(part) for part in data.values() if isinstance(part, dict) and "unit" in part]
        assert figures, path.name


def test_every_source_is_used_and_every_reference_stands_alone(catalog: Catalog) -> None:
    texts = [path.read_text() for kind in KINDS for path in files(kind)]
    unused = [key for key in catalog.sources if not any(key in text for text in texts)]
    assert unused == []
    for key, reference in catalog.sources.items():
        assert len(reference) > 15, key


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{value: 40, unit: GiB, kind: datasheet}", "source"),
        ("{value: 40, unit: GiB, kind: datasheet, source: []}", "source"),
        ("{value: 40, unit: GiB, kind: datasheet, source: [hearsay]}", "hearsay"),
        ("{value: 40, unit: GiB, source: [nv_ds]}", "kind"),
        ("{value: 40, unit: GiB, kind: guessed, source: [nv_ds]}", "kind"),
        ("{value: 40, unit: furlongs, kind: datasheet, source: [nv_ds]}", "furlongs"),
        ("{value: 40, unit: GiB, kind: datasheet, source: [nv_ds], references: [trust me]}", "references"),
        ("{value: '40', unit: GiB, kind: datasheet, source: [nv_ds]}", "value"),
        ("{value: 0, unit: GiB, kind: datasheet, source: [nv_ds]}", "memory_label: is not above 0, got 0"),
        ("40", "memory_label"),
    ],
)
def test_a_figure_without_provenance_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    lines = (shipped() / "gpus" / "a100-pcie-40gb.yaml").read_text().splitlines()
    edited = [f"memory_label: {text}" if line.startswith("memory_label:") else line for line in lines]
    (tmp_path / "gpus").mkdir()
    (tmp_path / "gpus" / "mine.yaml").write_text("\n".join(edited))
    with pytest.raises(InputError, match=problem):
        Catalog([tmp_path, shipped()]).gpu("mine")


def test_references_are_resolved(catalog: Catalog) -> None:
    gpu, _ = catalog.gpu("a100-sxm-80gb")
    line = gpu.memory_bandwidth.line("memory_bandwidth")
    assert line.value == 2039e9
    assert line.unit == "bytes/s"
    assert line.source is not None
    assert "NVIDIA datasheet" in line.source


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("A100", "a100-sxm-80gb"),
        ("a100", "a100-sxm-80gb"),
        ("a100-80gb", "a100-sxm-80gb"),
        ("A100 40GB", "a100-sxm-40gb"),
        ("A100-PCIe", "a100-pcie-80gb"),
        ("H100", "h100-sxm-80gb"),
        ("V100", "v100-sxm2-32gb"),
        ("V100-16GB", "v100-sxm2-16gb"),
        ("RTX PRO 6000", "rtx-pro-6000-server"),
        ("GH200", "gh200-96gb"),
    ],
)
def test_a_name_several_variants_share_means_the_documented_one_and_says_so(
    catalog: Catalog, given: str, meant: str
) -> None:
    gpu, assumptions = catalog.gpu(given)
    assert gpu.id == meant
    assert len(assumptions) == 1
    assert given in assumptions[0]
    assert meant in assumptions[0]


def test_the_other_variants_are_named(catalog: Catalog) -> None:
    _, (said,) = catalog.gpu("A100")
    assert all(name in said for name in ("a100-pcie-40gb", "a100-pcie-80gb", "a100-sxm-40gb"))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("h100-sxm-80gb", "h100-sxm-80gb"),
        ("H100-SXM", "h100-sxm-80gb"),
        ("h100 sxm", "h100-sxm-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("RTX4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("4090D", "rtx-4090d"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx-3090ti"),
        ("A6000", "rtx-a6000"),
        ("RTX 6000 Ada", "rtx-6000-ada"),
        ("Tesla T4", "t4"),
        ("L40S", "l40s"),
        ("MI300X", "mi300x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000-ws"),
        ("DGX Spark", "gb10-spark"),
    ],
)
def test_a_name_that_means_one_thing_is_taken_silently(catalog: Catalog, given: str, meant: str) -> None:
    gpu, assumptions = catalog.gpu(given)
    assert (gpu.id, assumptions) == (meant, [])


def test_no_two_files_claim_a_name(catalog: Catalog) -> None:
    for kind in ("gpus", "systems"):
        owner: dict[str, str] = {}
        for stem in catalog.names(kind):
            declared = declared_names(catalog.path_of(kind, stem))
            for name in {fold(n) for n in (stem, *declared["aliases"], *declared["default_for"])}:
                assert owner.setdefault(name, stem) == stem, f"{kind}: {name}"


@pytest.mark.parametrize(
    ("given", "near"), [("rtx-4909", "rtx-4090"), ("A1000", "a100"), ("h10", "h100"), ("mi300z", "mi300x")]
)
def test_an_unknown_name_is_refused_with_near_ones(catalog: Catalog, given: str, near: str) -> None:
    with pytest.raises(UnknownName) as caught:
        catalog.gpu(given)
    assert any(name.startswith(near) for name in caught.value.near)


def test_words_that_fit_several_files_are_refused_with_all_of_them(catalog: Catalog) -> None:
    with pytest.raises(UnknownName, match="fits several") as caught:
        catalog.gpu("sxm-80gb")
    assert "h100-sxm-80gb" in str(caught.value)
    assert "a100-sxm-80gb" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "../sources",
        "gpus/../../sources",
        "/etc/passwd",
        "..",
        ".",
        "a100\x00",
        "\x1b[31m",
        "x" * 300,
        "*",
    ],
)
def test_a_name_never_leaves_the_catalogue(catalog: Catalog, name: str) -> None:
    with pytest.raises(UnknownName):
        catalog.gpu(name)


def test_a_kind_nobody_knows_is_refused(catalog: Catalog) -> None:
    with pytest.raises(UnknownName):
        catalog.names("../gpus")


def test_an_earlier_root_wins_and_brings_its_own_sources(tmp_path: Path) -> None:
    (tmp_path / "gpus").mkdir()
    text = (shipped() / "gpus" / "t4.yaml").read_text()
    start = text.index("memory_bandwidth:")
    end = text.index("\n", start)
    mine = "memory_bandwidth: {value: 298, unit: GB/s, kind: measured, source: [probe]}"
    (tmp_path / "gpus" / "t4.yaml").write_text(text[:start] + mine + text[end:])
    (tmp_path / "sources.yaml").write_text("probe: measured on the machine at hand\n")
    catalog = Catalog([tmp_path, shipped()])
    gpu, _ = catalog.gpu("T4")
    assert gpu.memory_bandwidth.si == 298e9
    assert "at hand" in gpu.memory_bandwidth.cited
    assert catalog.path_of("gpus", "t4") == tmp_path / "gpus" / "t4.yaml"
    assert catalog.revision_of("gpus", "t4") != Catalog([shipped()]).revision_of("gpus", "t4")
    assert catalog.gpu("L4")[0].id == "l4"


def test_root_order(tmp_path: Path) -> None:
    flag, variable, config = (tmp_path / name for name in ("flag", "variable", "config"))
    for folder in (flag, variable, config / "gpucalc"):
        folder.mkdir(parents=True)
    environment = {"GPUCALC_CATALOG": str(variable), "XDG_CONFIG_HOME": str(config)}
    assert roots(flag, environment) == (flag, variable, config / "gpucalc", shipped())
    assert roots(None, {"HOME": str(tmp_path)}) == (shipped(),)
    assert roots(None, {}) == (shipped(),)  # no home folder at all
    with pytest.raises(InputError, match="--catalog"):
        roots(tmp_path / "missing", {})


def test_what_a_gpu_names_exists(catalog: Catalog) -> None:
    for name in catalog.names("gpus"):
        gpu, _ = catalog.gpu(name)
        assert gpu.kernels in catalog.names("kernels")
        assert gpu.collectives in catalog.names("collectives")
        for system in gpu.default_systems:
            assert catalog.system(system).gpu == gpu.id


def test_what_a_system_names_exists(catalog: Catalog) -> None:
    for name in catalog.names("systems"):
        system = catalog.system(name)
        gpu, _ = catalog.gpu(system.gpu)
        assert system.gpus % system.gpus_per_node == 0
        assert system.nvlink_domain <= max(gpu.max_nvlink_domain, 16)
        assert catalog.collective(system.intra_collectives).level == "intra"
        assert catalog.collective(system.inter_collectives or "ethernet").level == "inter"


def test_prices_agree_with_the_systems_they_name(catalog: Catalog) -> None:
    for name in catalog.names("prices"):
        assert catalog.gpu(name)[0].id == name
        for offer in catalog.load("prices", name, PriceListSpec).offers:
            assert offer.usd_per_gpu_hour.unit == "USD/h"
            if offer.system is not None:
                price = catalog.system(offer.system).price
                assert price is not None
                assert price.usd_per_gpu_hour.value == offer.usd_per_gpu_hour.value


def test_price_per_hour_is_price_per_gpu_hour_times_gpus(catalog: Catalog) -> None:
    for name in catalog.names("systems"):
        system = catalog.system(name)
        if system.price is not None and system.price.usd_per_hour is not None:
            each = system.price.usd_per_hour.value / system.gpus
            assert system.price.usd_per_gpu_hour.value == pytest.approx(each, rel=1e-3)
