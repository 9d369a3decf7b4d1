"""The published schemas: they are schemas, and what is shipped and printed is valid by them."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from gpucalc.__main__ import main
from gpucalc.errors import InputError
from gpucalc.probe.overlay import calibration
from gpucalc.report.schemas import NAMES, schema
from gpucalc.spec.calibration import MeasuredMachine
from gpucalc.spec.server import ServerSpec
from gpucalc.spec.yamlio import load_yaml

CATALOGS = Path(__file__).parents[1] / "catalogs"
Capture = pytest.CaptureFixture[str]


def errors(name: str, item: object) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema(name))
    return [f"{'/'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(item)]


@pytest.mark.parametrize("name", NAMES)
def test_each_is_a_schema_with_a_title(name: str, capsys: Capture) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(name))
    assert main(["schema", name]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed)[:2] == ["$schema", "title"]
    assert printed == json.loads(json.dumps(schema(name)))


def test_an_unknown_name_brings_the_known_ones(capsys: Capture) -> None:
    assert main(["schema", "jobs"]) == 2
    assert "did you mean job?" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "name"), [("gpus", "gpu"), ("systems", "system"), ("models", "model")])
def test_shipped_files_are_valid(kind: str, name: str) -> None:
    for path in sorted((CATALOGS / kind).glob("*.yaml"))[::9]:
        assert errors(name, load_yaml(path).data) == [], path.name


def test_shipped_jobs_are_valid_and_a_slip_is_not() -> None:
    for path in sorted((CATALOGS / "jobs").glob("*.yaml")):
        assert errors("job", load_yaml(path).data) == [], path.name
    job = load_yaml(CATALOGS / "jobs" / "llama-3-8b.yaml").data
    assert errors("job", {**job, "expect": {"fits": True, "warn": {"mfu": ">=40 %"}}}) == []
    assert errors("job", {**job, "expect": {"fit": True}}) != []
    assert errors("job", {**job, "gpu": "8xH100"}) != []


SERVER = {
    "name": "offer 7",
    "gpus": "4xRTX4090",
    "driver": "550.54.15",
    "cards": {"pcie_gen": 4, "pcie_lanes": 8, "bar1": "256 MiB"},
    "placement": [2, 2],
    "psu": "2x1600:redundant:12v=1440",
    "host_ram": "512 GB",
    "environment": {"NCCL_P2P_DISABLE": "1"},
}


def test_a_described_server_is_valid_and_slips_are_not() -> None:
    assert ServerSpec.read(SERVER).gpus == "4xRTX4090"
    assert errors("server", SERVER) == []
    for slip in (
        {"psu": "many"},
        {"psu": "2x1600:spare=1:"},
        {"driver": "new"},
        {"cards": {"lanes": 8}},
        {"sockets": 0},
        {"ram": "512 GB"},
        {"lanes": "64"},
    ):
        assert errors("server", {**SERVER, **slip}) != [], slip
        with pytest.raises(InputError):
            ServerSpec.read({**SERVER, **slip})


def test_a_calibration_is_valid_and_slips_are_not(tmp_path: Path) -> None:
    machine = MeasuredMachine(
        device="cuda", name="H100", gpu="h100-sxm-80gb", gpus=8, torch="2.13.0", backend="nccl"
    )
    points = [
        {"kind": "comm", "op": "all_reduce", "ranks": 8, "bytes": 2**size, "seconds": 1e-5 + 2**size / 3e11,
         "doubts": []}
        for size in range(10, 28)
    ]  # fmt: skip
    path = tmp_path / "calibration.yaml"
    path.write_text(calibration(points, machine, date="2026-11-30").yaml(), encoding="utf-8")
    found = load_yaml(path).data
    assert errors("calibration", found) == []
    for slip in ({"kind": "overlay"}, {"machine": {**found["machine"], "device": "tpu"}}, {"colour": "red"}):
        assert errors("calibration", {**found, **slip}) != [], slip


@pytest.mark.parametrize(
    "words",
    [
        ["llama-3-8b"],
        ["models/llama-3-70b", "--gpus", "2xRTX4090"],
        ["models/llama-3-8b", "--gpus", "1xH100-SXM", "--task", "serve"],
        ["gpt3-175b-full"],
    ],
)
def test_plans_are_valid(words: list[str], capsys: Capture) -> None:
    assert main(["plan", *words, "--json"]) == 0
    assert errors("plan", json.loads(capsys.readouterr().out)) == []


def test_check_reports_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("model: [", "utf-8")
    Path("job.yaml").write_text(
        "model: llama-3-8b\ngpus: 8xh100-sxm-80gb\nrun: {task: train, framework: fsdp}\n"
        "expect: {fits: true, headroom: '>=99 %', cost: '<=1 USD', ttft_ms: '<=1'}\n",
        "utf-8",
    )
    assert main(["check", "bad.yaml", "job.yaml", "--format", "json"]) == 1
    assert errors("check", json.loads(capsys.readouterr().out)) == []
