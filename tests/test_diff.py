"""Differences: from jobs, kept plans, revisions and calibrations; what is a regression; how it is said."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from gpucalc.__main__ import main
from gpucalc.catalog import Catalog
from gpucalc.diff import Side, compare, of_plan, side
from gpucalc.jobs import resolve
from gpucalc.planner import plan_job
from gpucalc.report import answers
from gpucalc.report.screen import render

ROOT = Path(__file__).parents[1]
CATALOG = Catalog([ROOT / "catalogs"])
Capture = pytest.CaptureFixture[str]


def made(level: str = "fits", **lines: float) -> Side:
    needed = lines.pop("needed", 10.0)
    return Side(
        label=level,
        level=level,
        verdict={"needed_bytes": needed, "capacity_bytes": 100.0, "phase": "loss", "binds": "weights"},
        choices={"gpus": "8xH100"},
        lines={path.replace("__", "."): (value, "bytes") for path, value in lines.items()},
    )


def test_every_line_that_moved_is_listed_with_how_much() -> None:
    found = compare(made(memory=10, memory__a=4, memory__b=6), made(memory=12, memory__a=6, memory__c=6))
    assert [(m.path, m.old, m.new, m.delta, m.ratio) for m in found.moves] == [
        ("memory", 10, 12, 2, 1.2),
        ("memory.a", 4, 6, 2, 1.5),
        ("memory.b", 6, None, None, None),
        ("memory.c", None, 6, None, None),
    ]


def test_nothing_moved() -> None:
    found = compare(made(memory=10), made(memory=10 * (1 + 1e-12)))
    assert found.same
    assert not found.regressions


@pytest.mark.parametrize(
    ("old", "new", "worse"),
    [
        (made("fits"), made("marginal"), True),
        (made("marginal"), made("fits"), False),
        (made(throughput=100), made(throughput=98), True),
        (made(throughput=100), made(throughput=99.5), False),
        (made(throughput=100), made(throughput=120), False),
        (made(cost__rental_per_million_tokens=1), made(cost__rental_per_million_tokens=1.1), True),
        (made(throughput__ttft=1), made(throughput__ttft=1.1), True),
        (made("does_not_fit", throughput=100), made("fits", throughput=50), False),
        (made(memory=10), made(memory=20), False),
    ],
)
def test_a_regression_is_a_worse_verdict_speed_or_cost(old: Side, new: Side, worse: bool) -> None:
    assert bool(compare(old, new).regressions) is worse


def test_a_kept_plan_equals_the_plan_it_was_kept_from(tmp_path: Path, capsys: Capture) -> None:
    for job in ("llama-3-8b", "mixtral-8x7b"):
        assert main(["plan", job, "--json"]) == 0
        path = tmp_path / f"{job}.json"
        path.write_text(capsys.readouterr().out, "utf-8")
        found = compare(side(str(path), CATALOG), side(job, CATALOG))
        assert found.same, (found.choices, found.moves[:3], found.verdict_changed)


def test_a_kept_plan_of_serving_too(tmp_path: Path, capsys: Capture) -> None:
    words = ["models/llama-3-8b", "--gpus", "1xh100-sxm-80gb", "--task", "serve"]
    assert main(["plan", *words, "--json"]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out, "utf-8")
    job = resolve("models/llama-3-8b", CATALOG, gpus="1xh100-sxm-80gb", task="serve")
    found = compare(side(str(tmp_path / "plan.json"), CATALOG), of_plan("now", plan_job(job, CATALOG)))
    assert found.same, (found.choices, found.moves[:3])


def test_the_verdict_comes_first(capsys: Capture) -> None:
    assert main(["diff", "llama-3-8b", "--set", "run.recompute=none"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("verdict: fits -> does not fit; needs ")
    assert "worse: the verdict went from fits to does not fit" in lines
    assert any(line.split()[:3] == ["recipe.recompute", "full", "none"] for line in lines)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["llama-2-7b-zero3", "llama-2-7b-zero2", "--strict"], 1),
        (["llama-2-7b-zero3", "llama-2-7b-zero2"], 0),
        (["llama-2-7b-zero2", "llama-2-7b-zero3", "--strict"], 0),
        (["llama-3-8b", "llama-3-8b", "--strict"], 0),
        (["llama-3-8b"], 2),
        (["llama-3-8b", "nowhere.yaml"], 2),
        (["llama-3-8b", "HEAD:nowhere.yaml"], 2),
        (["llama-3-8b", "--output=x:y"], 2),
        (["llama-3-8b", "llama-3-8b", "--job", "llama-3-8b"], 2),
    ],
)
def test_exit_codes(words: list[str], code: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["diff", *words]) == code
    assert capsys.readouterr().err.count("\n") == (1 if code == 2 else 0)


def test_a_revision_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "jobs").mkdir()
    job = tmp_path / "jobs" / "pretrain.yaml"
    text = "model: llama-3-8b\ngpus: 8xh100-sxm-80gb\nrun: {task: train, framework: fsdp, seq_len: 4096}\n"
    job.write_text(text, "utf-8")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    job.write_text(text.replace("4096", "8192"), "utf-8")
    monkeypatch.chdir(tmp_path / "jobs")
    assert main(["diff", "HEAD:pretrain.yaml", "pretrain.yaml", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"key": "recipe.seq_len", "old": 4096, "new": 8192} in document["choices"]
    monkeypatch.chdir(tmp_path)
    assert main(["diff", "HEAD:jobs/pretrain.yaml", "jobs/pretrain.yaml"]) == 0


def test_a_revision_cannot_be_a_flag_of_git(tmp_path: Path, capsys: Capture) -> None:
    assert main(["diff", "llama-3-8b", f"--output={tmp_path}/x:y"]) == 2
    assert main(["diff", "--", f"--output={tmp_path}/x:y", "llama-3-8b"]) == 2
    assert not list(tmp_path.iterdir())
    capsys.readouterr()


def test_two_calibrations(tmp_path: Path, capsys: Capture) -> None:
    text = (ROOT / "catalogs/gpus/h100-sxm-80gb.yaml").read_text("utf-8")
    slower = re.sub(r"(memory_bandwidth: \{value: )[\d.]+", r"\g<1>1000", text, count=1)
    assert slower != text
    for name, body in (("old", text), ("new", slower)):
        (tmp_path / name / "gpus").mkdir(parents=True)
        (tmp_path / name / "gpus" / "h100-sxm-80gb.yaml").write_text(body, "utf-8")
    folders = [str(tmp_path / "old"), str(tmp_path / "new")]
    assert main(["diff", *folders, "--job", "llama-3-8b", "--strict", "--format", "json"]) == 1
    moved = {line["path"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert moved["step"]["new"] > moved["step"]["old"]
    assert not any(path.startswith("memory") for path in moved)


def test_the_document_has_units_and_is_one_of_ours(capsys: Capture) -> None:
    assert main(["diff", "llama-3-8b", "--set", "run.micro_batch=2", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert next(iter(document)) == "schema_version"
    assert all(line["unit"] for line in document["lines"])


def test_markdown_is_a_comment(capsys: Capture) -> None:
    assert main(["diff", "llama-3-8b", "--set", "run.recompute=none", "--format", "markdown"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("### :warning: gpucalc: ")
    assert text.count("<details>") == text.count("</details>") == 1
    assert len(text.encode()) < 65_536


def test_markdown_stays_below_the_limit_of_a_comment() -> None:
    old = made(**{f"memory__line_{index}": float(index + 1) for index in range(5000)})
    new = made(**{f"memory__line_{index}": float(2 * index + 3) for index in range(5000)})
    text = answers.difference_markdown(compare(old, new), every=True)
    assert len(text.encode()) < 65_536
    assert "more lines are left out" in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_keeps_to_the_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    found = compare(side("llama-2-7b-zero2", CATALOG), side("llama-2-7b-zero3", CATALOG))
    text = render(answers.difference_table(found), color=False)
    assert max(map(len, text.splitlines())) <= width
    assert "throughput" in text


def test_equal_names_side_by_side_are_told_apart() -> None:
    from gpucalc.diff import _add

    found: dict[str, tuple[object, str]] = {}
    _add(found, "a.b", 1, "s")
    _add(found, "a.b", 2, "s")
    assert found == {"a.b": (1.0, "s"), "a.b#2": (2.0, "s")}
