"""The README's commands are real: each one runs, and every command of the program is among them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from test_cli import commands

from gpucalc.__main__ import main
from gpucalc.errors import ExitCode
from gpucalc.spec.yamlio import load_yaml

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def lines() -> list[str]:
    """Every command line of the README's shell blocks that calls gpucalc."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    parts = [part.strip() for block in blocks for line in block.splitlines() for part in line.split("&&")]
    return [part for part in parts if part.startswith("gpucalc ")]


@pytest.mark.parametrize("words", [words for words in commands() if words], ids=" ".join)
def test_every_command_is_documented(words: tuple[str, ...]) -> None:
    named = words[:-1] if words[-1] == "list" else words
    assert any(line.split()[1:][: len(named)] == list(named) for line in lines())


def files() -> dict[str, str]:
    """The files the README shows: blocks whose first line is `# NAME`."""
    blocks = re.findall(r"```\w+\n(?:# )([\w.-]+\.\w+)\n(.*?)```", README, re.DOTALL)
    return dict(blocks)


@pytest.mark.parametrize("line", lines())
def test_every_documented_command_runs(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.yaml").write_text(
        (ROOT / "catalogs/models/llama-3-8b.yaml").read_text("utf-8"), "utf-8"
    )
    for name, text in files().items():
        (tmp_path / name).write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    if "--baseline" in line:  # what the command before it on its line wrote
        main(shlex.split("check checks.yaml --format json -o baseline.json --quiet"))
        capsys.readouterr()
    if line.startswith(("gpucalc trace", "gpucalc probe")):
        pytest.importorskip("torch")
    code = main(shlex.split(line)[1:])
    out, err = capsys.readouterr()
    says_more = line.startswith(("gpucalc import", "gpucalc trace", "gpucalc probe"))  # what is being done
    assert (err == "") != says_more
    assert code in (ExitCode.ANSWERED, ExitCode.NO)
    assert out or "-o " in line


def test_the_set_up_commands_name_what_is_there() -> None:
    assert "python -m pip install . && gpucalc plan" in README
    assert '-c tests/constraints.txt -e ".[test,probe]" && python -m pytest' in README
    assert "torch==2.13.0" in (ROOT / "tests" / "constraints.txt").read_text(encoding="utf-8").splitlines()


def accuracy_table() -> str:
    """The recorded errors as the README shows them."""
    recorded = load_yaml(ROOT / "catalogs/measurements/accuracy.yaml").data
    rows = [
        "| quantity | framework | values | groups | median error | nine in ten within |",
        "|---|---|---|---|---|---|",
    ]
    for quantity, frameworks in recorded.items():
        for framework, of in frameworks.items():
            errors = f"{100 * of['median_abs']:.1f} % | {100 * of['p90_abs']:.0f} %"
            rows.append(f"| {quantity} | {framework} | {of['rows']} | {of['groups']} | {errors} |")
    return "\n".join(rows)


def test_the_accuracy_table_is_the_recorded_one(request: pytest.FixtureRequest) -> None:
    path = ROOT / "README.md"
    marked = re.compile(r"(<!-- accuracy[^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
    text = path.read_text(encoding="utf-8")
    wanted = marked.sub(lambda found: f"{found[1]}\n{accuracy_table()}\n\n{found[2]}", text)
    if request.config.getoption("--update-golden"):
        path.write_text(wanted, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == wanted, "accuracy.yaml changed; see --update-golden"
