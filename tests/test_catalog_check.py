"""`gpucalc catalog check`: the shipped catalogue passes, and every kind of mistake is found at its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpucalc.__main__ import main
from gpucalc.catalog import shipped
from gpucalc.catalog_check import Report, check_files
from gpucalc.catalog_names import KINDS
from gpucalc.errors import InputError
from gpucalc.spec.checks import Severity

Capture = pytest.CaptureFixture[str]
SHIPPED = shipped()


def edited(folder: Path, name: str, *changes: tuple[str, str], to: str | None = None) -> Path:
    """A copy of a shipped file with words replaced, in a folder of its kind."""
    text = (SHIPPED / f"{name}.yaml").read_text("utf-8")
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = folder / f"{to or name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def checked(*paths: Path) -> Report:
    return check_files(paths, [SHIPPED])


def said(report: Report, severity: Severity = Severity.ERROR) -> list[tuple[str, str]]:
    return [(finding.key, finding.message) for finding in report.of(severity)]


def test_the_shipped_catalogue_has_nothing_wrong() -> None:
    report = check_files([], [SHIPPED])
    assert [finding.text for finding in (*report.of(Severity.ERROR), *report.of(Severity.WARNING))] == []
    assert {Path(file).parent for file in report.files} >= {SHIPPED / "gpus", SHIPPED / "models", SHIPPED}
    assert len(report.files) == len({*report.files}) > 800


def test_a_new_entry_of_every_named_kind_passes(tmp_path: Path) -> None:
    edited(
        tmp_path,
        "gpus/l40s",
        ("id: l40s", "id: l40s-mine"),
        ("default_systems: [srv-l40s-8]", ""),
        to="gpus/l40s-mine",
    )
    edited(tmp_path, "models/gpt2", ("id: gpt2", "id: my-gpt"), to="models/my-gpt")
    path = tmp_path / "models/my-gpt.yaml"
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith(("aliases", "hf"))]
    path.write_text("\n".join(lines), "utf-8")
    assert said(checked(tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "key", "words"),
    [
        ("gpus/l40s", "unit: GB/s", "unit: GBps", "memory_bandwidth.unit", "unknown unit GBps"),
        ("gpus/l40s", "{value: 350, unit: W", "{value: 350, unit: GB", "tdp.unit", "legal: W, kW"),
        (
            "gpus/l40s",
            "864, unit: GB/s, kind: datasheet",
            "864, unit: GB/s, kind: heard",
            "memory_bandwidth.kind",
            "heard",
        ),
        ("gpus/l40s", "source: [smi]", "source: [smy]", "memory_total.source.0", "did you mean smi"),
        ("gpus/l40s", "source: [smi]", "source: []", "memory_total.source", "needs a list of keys"),
        ("gpus/l40s", "tdp:", "tpd:", "tpd", "did you mean tdp"),
        (
            "gpus/l40s",
            "vendor: NVIDIA",
            "vendor: NVIDIA\naliases: [L40]",
            "aliases",
            "L40 is a name of l40 already",
        ),
        ("gpus/l40s", "kernels: l40s", "kernels: l41s\narch2: x", "arch2", "no such key"),
        ("gpus/l40s", "collectives: pcie4-no-p2p", "collectives: ib", "collectives", "ib joins inter"),
        ("gpus/l40s", "srv-l40s-8", "dgx-h100", "default_systems.0", "dgx-h100 holds h100-sxm-80gb"),
        ("systems/dgx-h100", "gpu: h100-sxm-80gb", "gpu: h101", "gpu", "unknown GPU"),
        ("systems/dgx-h100", "gpus_per_node: 8", "gpus_per_node: 3", "gpus_per_node", "8 GPUs do not divide"),
        (
            "systems/dgx-h100",
            "400, unit: Gbit/s",
            "400, unit: W",
            "nic.bandwidth.unit",
            "legal: GB/s, Gbit/s",
        ),
        ("prices/t4", "USD/h", "count", "offers.0.usd_per_gpu_hour.unit", "legal: USD/h"),
        ("prices/l4", "aws-g6.xlarge", "dgx-h100", "offers.0.system", "holds h100-sxm-80gb"),
        ("models/gpt2", "layers: 12", "layers: 13", "params_total", ": a shape or a trait is wrong"),
        ("models/gpt2", "layers: 12", "layers: twelve", "layers", "must be a whole number"),
        ("kernels/l40s", "applies_to: [l40s]", "applies_to: [l40t]", "applies_to.0", "unknown GPU"),
        ("collectives/ib", "level: inter", "level: outer", "level", "did you mean inter"),
        ("engines/vllm", "unit: B\n", "unit: bit\n", "eras.0.sampler_bytes_per_logit.unit", "unknown unit"),
        ("interconnects/pcie5", "unit: GB/s", "unit: W", "one_way.unit", "legal: GB/s"),
        ("jobs/llama-3-8b", "seq_len: ", "seq_length: ", "run.seq_length", "did you mean seq_len"),
        (
            "claims/gpus",
            "formula: times_as_much",
            "formula: times_so_much",
            "claims.1.computed.0.formula",
            "unknown formula",
        ),
        (
            "checks/monitor",
            "source: [smi_man]",
            "source: [smi_men]",
            "commands.0.source.0",
            "did you mean smi_man",
        ),
        ("host/rules", "unit: ratio", "unit: rate", "node_power_over_gpu_tdp", "unknown unit"),
    ],
)
def test_a_mistake_is_found_at_its_key(
    name: str, old: str, new: str, key: str, words: str, tmp_path: Path
) -> None:
    path = edited(tmp_path, name, (old, new))
    report = checked(path)
    found = [finding for finding in report.findings if finding.key.startswith(key)]
    assert found, said(report)
    assert any(words in finding.message for finding in found)
    assert not report.passes()
    text = path.read_text("utf-8").splitlines()
    last = key.split(".")[-1] if not key.split(".")[-1].isdigit() else key.split(".")[-2]
    if name.startswith(("gpus", "systems")):  # written one key a line: the line is the key's own
        assert any(part in text[found[0].line - 1] for part in (last, key.split(".")[0]))


@pytest.mark.parametrize(
    ("name", "old", "new", "key", "words"),
    [
        ("gpus/l40s", "bf16: {value: 362.05", "bf16: {value: 724.1", "peaks.bf16", "with sparsity?"),
        (
            "gpus/l40s",
            "{value: 46068, unit: MiB",
            "{value: 56068, unit: MiB",
            "memory_total",
            "times memory_label",
        ),
        ("gpus/l40s", "tf32: {value: 183", "tf32: {value: 366", "peaks.tf32", "one is with sparsity"),
        (
            "gpus/a100-sxm-80gb",
            "value: 2039",
            "value: 203.9",
            "memory_bandwidth",
            "FLOPs of 16-bit products per byte",
        ),
        ("prices/t4", "0.35", "350", "offers.0.usd_per_gpu_hour", "price of the whole machine"),
        (
            "systems/dgx-h100",
            "{value: 2048, unit: GB,",
            "{value: 2048, unit: B,",
            "host_ram",
            "for a whole system",
        ),
    ],
)
def test_what_no_device_does_is_a_warning(
    name: str, old: str, new: str, key: str, words: str, tmp_path: Path
) -> None:
    report = checked(edited(tmp_path, name, (old, new)))
    assert said(report) == []
    assert any(k == key and words in message for k, message in said(report, Severity.WARNING))
    assert report.passes()
    assert not report.passes(strict=True)


def test_names_and_files_that_nothing_would_find(tmp_path: Path) -> None:
    edited(tmp_path, "gpus/l40s", to="gpus/l41")
    edited(tmp_path, "gpus/l4", ("id: l4", "id: L5"), to="gpus/L5")
    (tmp_path / "gpus" / "t4.yml").write_text("id: t4\n", "utf-8")
    edited(tmp_path, "checks/nccl", ("id: nccl", "id: rccl"), to="checks/rccl")
    texts = [finding.text for finding in checked(tmp_path).findings]
    assert any("found as l41: both must be the same, got l40s" in text for text in texts)
    assert any("must be lower case: l5.yaml" in text for text in texts)
    assert any("t4.yml" in text and "end in .yaml" in text for text in texts)
    assert any("rccl" in text and "never read: checks are nccl, torch" in text for text in texts)


def test_sources_stand_for_something(tmp_path: Path) -> None:
    edited(tmp_path, "gpus/t4", ("source: [smi]", "source: [bench]"))
    assert "unknown source" in said(checked(tmp_path))[0][1]
    (tmp_path / "sources.yaml").write_text("bench: ours\n", "utf-8")
    assert said(checked(tmp_path)) == [("bench", "needs words that say where the figures can be looked up")]
    (tmp_path / "sources.yaml").write_text("bench: our own benchmark of 2026-11-30\n", "utf-8")
    assert said(checked(tmp_path)) == []


def test_measured_rows_have_a_name_a_source_and_a_figure(tmp_path: Path) -> None:
    file = tmp_path / "runs.yaml"
    file.write_text(
        "- {id: a, measured: {mfu: 0.4}, source: {repo: x/y}}\n- {id: a, source: {repo: x/y}}\n"
        "- {measured: {mfu: 1}}\n",
        "utf-8",
    )
    assert [(finding.line, finding.key) for finding in checked(file).findings] == [
        (2, "1"), (2, "1.id"), (3, "2"), (3, "2"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [
        "gpus/t4",
        "systems/dgx-h100",
        "prices/t4",
        "kernels/t4",
        "collectives/ib",
        "models/gpt2",
        "jobs/llama-3-8b",
        "engines/vllm",
        "interconnects/pcie5",
        "claims/gpus",
    ],
)
def test_a_file_anywhere_is_known_by_its_keys(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"{kind.partition('/')[2]}.yaml"
    path.write_text((SHIPPED / f"{kind}.yaml").read_text("utf-8"), "utf-8")
    assert said(checked(path)) == []


def test_what_is_no_catalogue_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.yaml").write_text("a: 1\n", "utf-8")
    with pytest.raises(InputError, match="cannot tell what this file describes"):
        checked(tmp_path / "notes.yaml")
    with pytest.raises(InputError, match="holds no catalogue files"):
        checked(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        checked(tmp_path / "none.yaml")


def test_a_broken_neighbour_is_its_own_finding(tmp_path: Path) -> None:
    edited(tmp_path, "gpus/l40s")
    edited(tmp_path, "gpus/l4", ("id: l4", "id: l4\nid: l4"))
    (only,) = checked(tmp_path).findings
    assert only.text.startswith(f"{tmp_path}/gpus/l4.yaml:2: error: ")


def test_every_kind_of_file_is_looked_at() -> None:
    report = check_files([], [SHIPPED])
    assert {Path(file).relative_to(SHIPPED).parts[0] for file in report.files} == {*KINDS, "sources.yaml"}


def test_the_command_says_it_in_lines_and_in_json(tmp_path: Path, capsys: Capture) -> None:
    path = edited(tmp_path, "gpus/t4", ("unit: W", "unit: GB"))
    assert main(["catalog", "check", str(path)]) == 1
    out, err = capsys.readouterr()
    line, beside, counts = out.splitlines()
    assert line.startswith(f"{path}:")
    assert "error: tdp.unit: " in line
    assert "warning: tdp: " in beside
    assert counts == "1 file: 1 error, 1 warning"
    assert err == ""
    assert main(["catalog", "check", str(path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["counts"] == {"errors": 1, "warnings": 1, "notes": 0}
    assert document["findings"][0]["key"] == "tdp.unit"
    assert main(["catalog", "check", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err.endswith("none.yaml: no such file\n")


def test_a_warning_counts_with_strict(tmp_path: Path, capsys: Capture) -> None:
    path = str(edited(tmp_path, "prices/t4", ("0.35", "350")))
    assert main(["catalog", "check", path]) == 0
    assert main(["catalog", "check", path, "--strict"]) == 1
    capsys.readouterr()


@pytest.mark.parametrize("width", [80, 120])
def test_the_folders_are_listed_in_order(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    edited(tmp_path, "gpus/t4")
    assert main(["catalog", "--catalog", str(tmp_path), "--json"]) == 0
    first, *_, last = json.loads(capsys.readouterr().out)["folders"]
    assert first == {"path": str(tmp_path), "files": {"gpus": 1}}
    assert last["path"] == str(SHIPPED)
    assert main(["catalog", "--catalog", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert out.index("1 gpus") < out.index("(shipped)")


@pytest.mark.parametrize("source", ["[[nv_ds]]", "[{a: 1}]", "[null]", "[1]", "nv_ds", "{}"])
def test_a_source_that_is_no_key_is_an_error(source: str, tmp_path: Path) -> None:
    report = checked(edited(tmp_path, "gpus/t4", ("source: [smi]", f"source: {source}")))
    assert any(key.startswith("memory_total.source") for key, _ in said(report))


@pytest.mark.parametrize("key", ["hidden", "ffn", "vocab", "heads", "max_context"])
@pytest.mark.parametrize("size", ["1e9", "1e308", "0", "-1"])
def test_a_shape_no_model_has_is_refused(key: str, size: str, tmp_path: Path) -> None:
    path = edited(tmp_path, "models/gpt2")
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith(f"{key}:")]
    path.write_text("\n".join([*lines, f"{key}: {size}"]), "utf-8")
    (found,) = said(checked(path))
    assert found[0] == key
    assert "must be at" in found[1]
