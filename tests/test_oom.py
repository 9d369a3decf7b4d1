"""Out-of-memory messages of public reports: the tensor, the phase, the reading, and what would fit."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpucalc.__main__ import main
from gpucalc.catalog import Catalog
from gpucalc.errors import InputError
from gpucalc.jobs import ResolvedJob, resolve_data
from gpucalc.oom import Diagnosis, diagnose
from gpucalc.oom_changes import CHANGES
from gpucalc.oom_message import read_message
from gpucalc.plan.answer import Level
from gpucalc.planner import plan_job
from gpucalc.spec.yamlio import load_yaml

ROOT = Path(__file__).parent
CATALOG = Catalog([ROOT.parent / "catalogs"])
CASES: list[dict[str, Any]] = load_yaml(ROOT / "data" / "oom_messages.yaml", mapping=False).data
Capture = pytest.CaptureFixture[str]


def job_of(case: Mapping[str, Any]) -> ResolvedJob | None:
    return resolve_data(case["job"], CATALOG, where=case["id"]) if "job" in case else None


def diagnosis(case: Mapping[str, Any]) -> Diagnosis:
    return diagnose(case["message"], job=job_of(case), catalog=CATALOG)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_published_messages_are_read_and_named(case: dict[str, Any]) -> None:
    found = diagnosis(case)
    assert found.message.engine == case.get("engine", found.message.engine)
    exact = [match.name for match in found.matches if match.exact]
    if case.get("tensor") is not None:
        assert case["tensor"] in exact[0]
    else:
        assert exact == []
    if "job" not in case or case["phase"] is not None:
        assert found.phase == case["phase"]
    assert case["says"] in "; ".join(found.reading)
    if "change" in case:
        assert any(case["change"] in change.title for change in found.changes)


@pytest.mark.parametrize("case", [case for case in CASES if "job" in case], ids=lambda case: case["id"])
def test_what_would_fit_has_its_numbers_and_can_be_planned(case: dict[str, Any]) -> None:
    found = diagnosis(case)
    assert 1 <= len(found.changes) <= CHANGES
    for change in found.changes:
        assert change.level is not Level.DOES_NOT_FIT
        assert 0 < change.needed_bytes < change.capacity_bytes * 1.15
        data = {key: value for key, value in case["job"].items() if key != "run"}
        data["run"] = dict(case["job"]["run"])
        for key, value in change.changes.items():
            if key.startswith("run."):
                data["run"][key.removeprefix("run.")] = value
            else:
                data[key] = value
        data["run"] = {key: value for key, value in data["run"].items() if value is not None}
        plan = plan_job(resolve_data(data, CATALOG, where="change"), CATALOG, advice=False)
        assert plan.verdict.level is not Level.DOES_NOT_FIT


def test_equations_give_the_size() -> None:
    match = diagnosis(CASES[0]).matches[0]
    assert match.equation == "copy = 7_000_559_616 * 4 / 1 = 28_002_238_464 bytes"
    assert match.bytes == 28_002_238_464


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ("optimizer.step()\n  _multi_tensor_adam(", "step"),
        ("loss.backward()\n  run_backward(", "backward"),
        ("in forward\n  F.cross_entropy(", "loss"),
        ("AutoModelForCausalLM.from_pretrained(", "load"),
        ("File stage_1_and_2.py, line 5, in __init__\n single_partition_of_fp32_groups", "init"),
        ("in forward\n  self.mlp(x)", "forward"),
        ("nothing known", None),
    ],
)
def test_the_traceback_tells_the_phase(frames: str, phase: str | None) -> None:
    text = f"Traceback (most recent call last):\n{frames}\nCUDA out of memory. Tried to allocate 1.00 GiB."
    assert read_message(text).phase == phase


@pytest.mark.parametrize(
    ("printed", "size"),
    [("512 bytes", 512), ("781.59 MiB", 781.59 * 2**20), ("2.26 GiB", 2.26 * 2**30), ("1.00 KiB", 1024)],
)
def test_sizes_are_read_with_the_digits_they_show(printed: str, size: float) -> None:
    tried = read_message(f"CUDA out of memory. Tried to allocate {printed} (GPU 0").tried
    assert tried is not None
    assert tried.bytes == pytest.approx(size)


@pytest.mark.parametrize("text", ["", "all is well", "KeyError: 'x'"])
def test_what_is_no_such_message_is_an_input_error(text: str) -> None:
    with pytest.raises(InputError, match="no out-of-memory message"):
        read_message(text)


def test_the_command_reads_a_pipe_and_prints_json(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    class Piped:
        buffer = io.BytesIO(CASES[0]["message"].encode())

    monkeypatch.setattr(sys, "stdin", Piped)
    assert main(["oom", "-", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert next(iter(document)) == "schema_version"
    assert document["message"]["tried_bytes"] == pytest.approx(26.08 * 2**30, rel=1e-9)


def test_flags_of_a_job_need_one(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(CASES[0]["message"], "utf-8")
    assert main(["oom", str(tmp_path / "log"), "--gpus", "8xH100"]) == 2
    assert "goes with a job" in capsys.readouterr().err


def test_terminal_escapes_of_a_log_are_not_printed(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\x1b[31m" + CASES[0]["message"] + "\x1b]0;title\x07", "utf-8")
    assert main(["oom", str(tmp_path / "log")]) == 0
    assert "\x1b" not in capsys.readouterr().out


# -- what is in use, where nothing failed ---------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "engine", "gib"),
    [
        ("MA 12.93 GB         Max_MA 13.0 GB         CA 13.2 GB         Max_CA 13 GB", "deepspeed", 13.0),
        ("max memory allocated: 9.5 GiB", "torch", 9.5),
        ("|  9004MiB / 40960MiB |\n| 13312MiB / 40960MiB |", "nvidia-smi", 13.0),
        (" 2.5 GiB\n", "stated", 2.5),
    ],
)
def test_what_is_in_use_is_read_where_nothing_failed(text: str, engine: str, gib: float) -> None:
    found = read_message(text)
    used = found.allocated or found.in_use
    assert used is not None
    assert (found.engine, found.failed, used.bytes / 2**30) == (engine, False, gib)


@pytest.mark.parametrize(
    ("run", "held", "said"),
    [
        ({"zero_stage": 3, "recompute": "full"}, "120 GiB", "optimizer states that were not partitioned"),
        ({"zero_stage": 1, "recompute": "full"}, "82 GiB", "activations that are all kept"),
        ({"zero_stage": 2, "offload": "optimizer-cpu"}, "86 GiB", "states that stayed on the GPU"),
    ],
)
def test_more_than_the_plan_is_set_beside_a_division_undone(
    run: dict[str, Any], held: str, said: str
) -> None:
    keys = {"task": "train", "framework": "deepspeed", "micro_batch": 4, "seq_len": 2048, **run}
    data = {"model": "gpt-j-6b", "gpus": "8xh100-sxm-80gb", "run": keys}
    found = diagnose(held, job=resolve_data(data, CATALOG, where="job"), catalog=CATALOG)
    assert said in "; ".join(found.reading)
    assert found.changes == ()


def test_as_much_as_the_plan_has_is_no_finding(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1 GiB")))
    assert main(["oom", "-", "--job", "gpt-j-6b", "--gpus", "8xh100-sxm-80gb"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("memory in use, nothing failed")
    assert "partitioned" not in out
