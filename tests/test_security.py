"""Files from strangers: nothing in them runs, leaves its place, or speaks to a terminal, page or pipeline."""

from __future__ import annotations

import ast
import html
import json
import re
import socket
import xml.dom.minidom
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_layers import MODULES, PACKAGE, imported

from gpucalc.__main__ import main

Capture = pytest.CaptureFixture[str]

# What a name may hold at worst: terminal escapes, markup of every output, commands of pipelines,
# characters that turn the reading order, and line ends.
HOSTILE = (
    "\x1b]0;owned\x07\x1b[31m<script>alert(1)</script><img src=x onerror=alert(1)>&amp;]]>--> ::error::x"
    " | `t` [a](http://x) @team %0A\r\n::warning::y\u202e\u200b\x9b31m\x00"
).replace("\x00", "")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job whose every free text is hostile."""
    text = json.dumps(HOSTILE)
    path = tmp_path / "job.yaml"
    path.write_text(
        f"name: {text}\n"
        f"model: {{name: {text}, family: llama, layers: 4, hidden: 256, heads: 4, ffn: 512, vocab: 1000}}\n"
        "gpus: 1xL4\nrun: {task: train, framework: ddp, seq_len: 128, micro_batch: 1, global_batch: 8}\n"
        "expect: {fits: false}\n",
        "utf-8",
    )
    return path


def said(words: list[str], capsys: Capture) -> str:
    """Everything the program prints for it."""
    assert main(words) in (0, 1, 2)
    out, err = capsys.readouterr()
    return out + err


# -- what is shown ----------------------------------------------------------------------------------


def shown(job: Path) -> dict[str, list[str]]:
    other = str(job)
    return {
        "plan": ["plan", other],
        "plan of columns": ["plan", other, "--rules"],
        "explain": ["explain", other, "weights"],
        "size": ["size", other, "--gpu", "L4", "--max-gpus", "2"],
        "diff": ["diff", other, "--gpus", "1xT4"],
        "oom": ["oom", other, "--job", other],
        "check": ["check", other],
        "check for people": ["check", other, "--format", "markdown"],
        "check for GitHub": ["check", other, "--format", "github"],
        "difference for people": ["diff", other, "--gpus", "1xT4", "--format", "markdown"],
        "model": ["models", "show", other],
        "name": ["plan", HOSTILE],
        "GPU": ["gpus", "show", HOSTILE],
        "fleet": ["plan", "llama-3-8b", "--gpus", HOSTILE],
        "key": ["plan", "llama-3-8b", "--set", HOSTILE],
        "value": ["plan", "llama-3-8b", "--set", f"run.framework={HOSTILE}"],
        "flag": ["plan", f"--{HOSTILE}"],
        "command": [HOSTILE],
        "claim": ["claims", HOSTILE],
        "schema": ["schema", HOSTILE],
        "formula": ["formulas", HOSTILE],
        "script": ["doctor", "--lint", other],
        "command line": ["plan", f"vllm serve {HOSTILE}"],
    }


@pytest.mark.parametrize("what", shown(Path("job.yaml")))
def test_no_control_character_reaches_a_terminal(what: str, job: Path, capsys: Capture) -> None:
    assert CONTROL.findall(said(shown(job)[what], capsys)) == []


def test_annotations_are_one_command_a_line(job: Path, capsys: Capture) -> None:
    lines = said(["check", str(job), "--format", "github"], capsys).splitlines()
    assert [line.startswith("::") for line in lines] == [True, False]  # and the counts
    head, data = lines[0][2:].split("::", 1)
    assert head.startswith("error file=")
    assert "%0A" not in data.replace("%250A", "")  # a written %0A is no line end
    assert "::warning" not in head


def test_markdown_is_text(job: Path, capsys: Capture) -> None:
    for words in (
        ["check", str(job), "--format", "markdown"],
        ["diff", str(job), "--gpus", "1xT4", "--format", "markdown"],
    ):
        text = said(words, capsys)
        assert "<script" not in text
        assert "<img" not in text
        prose = re.sub(r"`[^`\n]*`", "", text)
        assert "[a](http" not in prose
        assert "@team" not in prose


def test_documents_keep_their_form(job: Path, capsys: Capture) -> None:
    for form in ("json", "sarif", "gitlab"):
        document = json.loads(said(["check", str(job), "--format", form], capsys))
        assert document
    junit = said(["check", str(job), "--format", "junit"], capsys)
    cases = xml.dom.minidom.parseString(junit.encode()).getElementsByTagName("testcase")
    assert len(cases) == 1
    assert "<script>alert(1)</script>" in cases[0].getAttribute("name")
    assert json.loads(said(["plan", str(job), "--json"], capsys))["name"] == HOSTILE


@pytest.mark.parametrize("form", ["html", "svg"])
def test_pages_and_pictures_hold_no_markup_of_the_job(form: str, job: Path, capsys: Capture) -> None:
    page = job.with_name(f"plan.{form}")
    said(["plan", str(job), f"--{form}", str(page)], capsys)
    text = page.read_text("utf-8")
    assert "<img" not in text
    assert "<script" not in text
    assert "onerror=alert" not in re.sub(r">[^<]*<|\"[^\"]*\"", "", text)
    assert CONTROL.findall(text) == []
    assert "script>alert(1)</script>" in html.unescape(text)  # as words


# -- where a name may lead --------------------------------------------------------------------------

OUTSIDE = ["../secret.yaml", "sub/../../secret.yaml", "../../../../../../etc/passwd"]


@pytest.mark.parametrize("model", OUTSIDE)
@pytest.mark.parametrize("command", ["plan", "check"])
def test_a_jobs_model_does_not_climb_out_of_its_folder(
    model: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    folder = tmp_path / "jobs"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "secret.yaml").write_text("token: hunter2\nlayers: 3\n", "utf-8")
    (folder / "job.yaml").write_text(
        f"model: {model}\ngpus: 1xL4\nrun: {{task: train, framework: ddp, seq_len: 128}}\n", "utf-8"
    )
    monkeypatch.chdir(folder)
    assert main([command, "job.yaml"]) == 2
    out, err = capsys.readouterr()
    assert "may not lie above" in out + err
    assert "hunter2" not in out + err
    assert "token" not in out + err


def test_a_model_beside_the_jobs_folder_is_found_from_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models/net.yaml").write_text(
        "{name: net, family: llama, layers: 4, hidden: 256, heads: 4, ffn: 512, vocab: 1000}", "utf-8"
    )
    (tmp_path / "jobs/job.yaml").write_text(
        "model: ../models/net.yaml\ngpus: 1xL4\nrun: {task: train, framework: ddp, seq_len: 128}\n", "utf-8"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "jobs/job.yaml", "--quiet"]) == 0
    monkeypatch.chdir(tmp_path / "jobs")
    assert main(["plan", "job.yaml", "--quiet"]) == 2
    assert "--model for any other" in capsys.readouterr().err
    assert main(["plan", "job.yaml", "--model", "../models/net.yaml", "--quiet"]) == 0  # the user's own word
    assert main(["plan", "job.yaml", "--set", "model=../models/net.yaml", "--quiet"]) == 0


NAMES = [
    ["plan", "models/../../secret"],
    ["plan", "jobs/../../secret"],
    ["gpus", "show", "../secret"],
    ["systems", "show", "../secret"],
    ["models", "show", "models/../../secret"],
    ["plan", "llama-3-8b", "--gpus", "8x../secret"],
    ["plan", "llama-3-8b", "--set", "system=../../secret"],
    ["plan", "llama-3-8b", "--set", "costs.grid=../secret"],
    ["claims", "--topic", "../secret"],
    ["schema", "../secret"],
    ["size", "models/llama-3-8b", "--gpu", "../secret", "--task", "train"],
    ["doctor", "--system", "systems/../../secret"],
]


@pytest.mark.parametrize("words", NAMES, ids=" ".join)
def test_a_name_of_the_catalogue_stays_in_it(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    catalog = tmp_path / "catalog"
    for kind in ("gpus", "systems", "models", "jobs", "claims", "grids"):
        (catalog / kind).mkdir(parents=True)
    for place in (catalog, tmp_path):
        (place / "secret.yaml").write_text("token: hunter2\n", "utf-8")
    monkeypatch.setenv("GPUCALC_CATALOG", str(catalog))
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "token" not in err
    assert err.count("\n") == 1


# -- what never happens -----------------------------------------------------------------------------

# Calls that run text or load code from data, whatever they are reached through.
RUNS = {"eval", "exec", "compile", "__import__", "system", "popen", "unsafe_load", "full_load", "execfile"}
# Modules whose loading of data can run code, or that reach a network, and the one place that may.
NETWORK = {"urllib.request", "http", "requests", "httpx", "aiohttp", "ftplib", "smtplib", "socket", "ssl"}
PICKLES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
PLACES = {"huggingface_hub": {"importers/hub.py"}}


def called(path: Path) -> Iterator[tuple[int, str]]:
    """Every call of a file by the last word of what is called, methods of objects of ours left out."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = node.func
            if isinstance(name, ast.Name):
                yield node.lineno, name.id
            elif isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name):
                yield node.lineno, name.attr if name.value.id in ("os", "yaml", "builtins") else ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_runs_text_loads_pickles_or_opens_a_connection(path: Path) -> None:
    where = path.relative_to(PACKAGE).as_posix()
    assert [(line, name) for line, name in called(path) if name in RUNS] == []
    for line, name in imported(path):
        first = name.split(".")[0]
        assert first not in PICKLES, f"{where}:{line}"
        assert name not in NETWORK, f"{where}:{line}"
        assert first not in NETWORK, f"{where}:{line}"
        assert where in PLACES.get(first, {where}), f"{where}:{line}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_shell_reads_what_is_started(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "shell":
            assert isinstance(node.value, ast.Constant), node.lineno
            assert node.value.value is False, node.lineno


def test_answers_open_no_connection(job: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    for words in (
        ["plan", str(job)],
        ["plan", "meta-llama/Llama-3.1-8B", "--gpus", "1xH100"],
        ["plan", "nobody/unknown-model", "--gpus", "1xH100"],
        ["size", str(job), "--gpu", "L4", "--max-gpus", "1"],
        ["check", str(job)],
        ["validate", "--quantity", "weights"],
        ["catalog", "check", str(job)],
    ):
        assert main(words) in (0, 1, 2)
    capsys.readouterr()


@pytest.mark.parametrize("name", ["weights.bin", "model.pt", "model.pkl", "model.ckpt"])
def test_a_pickle_is_refused_unread(name: str, tmp_path: Path, capsys: Capture) -> None:
    trap = tmp_path / "ran"
    code = f"cos\nsystem\n(S'touch {trap}'\ntR."
    (tmp_path / name).write_bytes(code.encode())
    assert main(["plan", str(tmp_path / name), "--gpus", "1xL4"]) == 2
    assert not trap.exists()
    assert capsys.readouterr().err.count("\n") == 1


def test_yaml_builds_no_objects(tmp_path: Path, capsys: Capture) -> None:
    trap = tmp_path / "ran"
    for tag in ("python/object/apply:os.system", "python/object/new:os.system", "python/name:os.system"):
        (tmp_path / "job.yaml").write_text(f"model: !!{tag} ['touch {trap}']\n", "utf-8")
        assert main(["plan", str(tmp_path / "job.yaml")]) == 2
        assert not trap.exists()
    capsys.readouterr()


def test_scripts_are_read_and_never_run(tmp_path: Path, capsys: Capture) -> None:
    trap = tmp_path / "ran"
    script = tmp_path / "launch.sh"
    script.write_text(
        f"X=$(touch {trap})\nY=`touch {trap}`\nvllm serve $X --tensor-parallel-size $((`touch {trap}`))\n",
        "utf-8",
    )
    for words in (
        ["doctor", "--lint", str(script)],
        ["plan", str(script), "--gpus", "1xL4"],
        ["import", str(script)],
    ):
        assert main(words) in (0, 1, 2)
    assert not trap.exists()
    capsys.readouterr()
