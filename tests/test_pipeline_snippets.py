"""The README's pipeline snippets: they parse, hold what their services need, and their commands run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_readme import FILES, README

from gpucalc.__main__ import main
from gpucalc.report.formats import FORMATS

Capture = pytest.CaptureFixture[str]


def snippet(name: str) -> Any:
    return yaml.safe_load(FILES[name])


def commands_in(item: Any) -> list[str]:
    """Every command of a snippet that calls the program."""
    if isinstance(item, dict):
        return [found for part in item.values() for found in commands_in(part)]
    if isinstance(item, list):
        return [found for part in item for found in commands_in(part)]
    return [item] if isinstance(item, str) and item.startswith("gpucalc ") else []


JENKINS = re.findall(r"```groovy\n(.*?)```", README, re.DOTALL)[0]
COMMANDS = [
    *commands_in(snippet("github-actions.yml")),
    *commands_in(snippet("gitlab-ci.yml")),
    *[f"{line} checks.yaml" for line in commands_in(snippet("pre-commit-config.yaml"))],
    *re.findall(r"sh '(gpucalc [^']*)'", JENKINS),
]


def test_there_is_one_command_for_each_service() -> None:
    assert len(COMMANDS) == 4


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run_and_write_the_files_the_services_read(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checks.yaml").write_text(FILES["checks.yaml"], "utf-8")
    main(["check", "checks.yaml", "--format", "json", "-o", "baseline.json"])
    capsys.readouterr()
    words = shlex.split(command)
    assert main(words[1:]) in (0, 1)
    assert capsys.readouterr().err == ""
    written = [words[place + 1] for place, word in enumerate(words) if word == "-o"]
    assert all((tmp_path / name).stat().st_size for name in written if name != "-")
    named = [words[place + 1] for place, word in enumerate(words) if word == "--format"]
    assert set(named) <= set(FORMATS)


def test_github_actions() -> None:
    (job,) = snippet("github-actions.yml")["jobs"].values()
    assert job["runs-on"]
    steps = job["steps"]
    assert all(("uses" in step) != ("run" in step) for step in steps)
    late = [step for step in steps if step.get("if") == "always()"]
    assert late[0]["run"] == 'cat summary.md >> "$GITHUB_STEP_SUMMARY"'
    assert late[1]["with"]["sarif_file"] == "gpucalc.sarif"


def test_gitlab() -> None:
    (job,) = snippet("gitlab-ci.yml").values()
    assert job["artifacts"]["when"] == "always"
    assert job["artifacts"]["reports"] == {"codequality": "codequality.json", "junit": "junit.xml"}


def test_pre_commit() -> None:
    (repository,) = snippet("pre-commit-config.yaml")["repos"]
    (hook,) = repository["hooks"]
    assert {"id", "name", "entry", "language"} <= set(hook)
    assert re.search(hook["files"], "jobs/pretrain.yaml")
    assert not re.search(hook["files"], "catalogs/models/llama-3-8b.yaml")


def test_jenkins_keeps_the_report_of_a_failed_stage() -> None:
    assert JENKINS.count("{") == JENKINS.count("}")
    assert re.search(r"post \{ always \{ junit 'junit\.xml' \} \}", JENKINS)
