"""Pages printed by the program and kept in the repository: help of every command, every formula.

Rewritten by `python -m pytest tests/test_pages.py --update-golden`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cli import commands

from gpucalc import __version__
from gpucalc.__main__ import main
from gpucalc.formula import FORMULAS

ROOT = Path(__file__).parents[1]
Capture = pytest.CaptureFixture[str]
Compare = Callable[[str, str], None]

COMMANDS = """\
# Commands

What `--help` says of each command, printed by the program.
"""


def test_the_help_of_every_command(
    committed: Compare, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names, sections = [], []
    for words in commands():
        assert main([*words, "--help"]) == 0
        name = " ".join(("gpucalc", *words))
        names.append(f"[{name}](#{name.replace(' ', '-')})")
        sections.append(f"## {name}\n\n```text\n{capsys.readouterr().out.rstrip()}\n```\n")
    committed("gpucalc/commands/README.md", "\n".join([COMMANDS, " · ".join(names), "", *sections]).rstrip())


def test_no_summary_of_a_command_is_cut_short() -> None:
    page = (ROOT / "gpucalc/commands/README.md").read_text("utf-8")
    assert [line for line in page.splitlines() if line.startswith("  ") and line.endswith("...")] == []


def test_every_formula(committed: Compare, capsys: Capture) -> None:
    assert main(["formulas", "--markdown"]) == 0
    committed("gpucalc/formulas/README.md", capsys.readouterr().out.rstrip("\n"))


def test_links_of_the_reference_lead_somewhere() -> None:
    page = (ROOT / "gpucalc/formulas/README.md").read_text("utf-8")
    headings = re.findall(r"^#+ (\w+)$", page, re.MULTILINE)
    assert len(headings) == len({*headings})  # an anchor is one place
    assert {*re.findall(r"\]\(#(\w+)\)", page)} <= {*headings}
    for path in {*re.findall(r"\]\((\.\./[^)]+)\)", page)}:
        assert (ROOT / "gpucalc/formulas" / path).is_file(), path


def test_the_reference_has_every_formula_with_its_expression(capsys: Capture) -> None:
    assert main(["formulas", "--json"]) == 0
    found = {item["name"]: item for item in json.loads(capsys.readouterr().out)["formulas"]}
    ours = {name: one for name, one in FORMULAS.items() if one.function.__module__.startswith("gpucalc.")}
    assert set(found) == set(ours)
    assert {name: item["expression"] for name, item in found.items()} == {
        name: one.expression for name, one in ours.items()
    }
    assert [name for name, item in found.items() if not item["used_by"] and not item["claims"]] == []


def test_one_formula_in_full(capsys: Capture) -> None:
    assert main(["formulas", "gather_bus_factor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["expression"] == "(ranks - 1) / ranks"
    assert found["parameters"] == [{"name": "ranks", "unit": None}]
    assert found["unit"] == "count"
    assert "formulas/comm.py" not in found["used_by"]
    assert main(["formulas", "collective_s"]) == 0
    out = capsys.readouterr().out
    assert "message_bytes (bytes)" in out
    assert "plan/links.py" in out


@pytest.mark.parametrize(
    ("words", "near"),
    [(["formulas", "colective_s"], "collective_s"), (["formulas", "--module", "com"], "comm")],
)
def test_a_mistyped_name_is_refused(words: list[str], near: str, capsys: Capture) -> None:
    assert main(words) == 2
    assert f"did you mean {near}" in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("words", ["formulas", "formulas --module comm", "formulas all_to_all_s"])
def test_tables_keep_to_the_width(
    words: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(words.split()) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= width


def test_the_changelog_has_an_entry_for_this_version() -> None:
    text = (ROOT / "gpucalc/CHANGELOG.md").read_text("utf-8")
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    released = re.findall(r"^## \[([\d.]+)\] - (\d{4}-\d{2}-\d{2})$", text, re.MULTILINE)
    assert released[0][0] == stated == __version__
    assert [day for _, day in released] == sorted((day for _, day in released), reverse=True)
    assert text.index("## [Unreleased]") < text.index(f"## [{stated}]")
    assert {*re.findall(r"^### (\w+)$", text, re.MULTILINE)} <= {
        "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security",
    }  # fmt: skip


def test_the_changelog_names_every_command_of_the_first_release() -> None:
    text = (ROOT / "gpucalc/CHANGELOG.md").read_text("utf-8")
    assert [words[0] for words in commands() if len(words) == 1 and f"`{words[0]}`" not in text] == []
