"""What is said of pip-audit's answer: an advisory stops a change, a silent index does not."""

from __future__ import annotations

import json
from pathlib import Path

import advisories
import pytest

CLEAN = {"name": "rich", "version": "15.0.0", "vulns": []}
SILENT = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited"}
FOUND = {
    "name": "pyyaml",
    "version": "5.3",
    "vulns": [
        {"id": "PYSEC-2020-96", "fix_versions": ["5.3.1"], "aliases": ["CVE-2020-1747"]},
        {"id": "PYSEC-2021-142", "fix_versions": [], "aliases": []},
    ],
}


@pytest.mark.parametrize(
    ("pins", "code", "said"),
    [
        ([CLEAN], 0, "advisories: 0 in the 1 pins checked\n"),
        (
            [CLEAN, SILENT],
            0,
            "advisories: 0 in the 1 pins checked; 1 not checked, the index knew nothing of them: torch\n",
        ),
        (
            [SILENT],
            0,
            "advisories: 0 in the 0 pins checked; 1 not checked, the index knew nothing of them: torch\n",
        ),
        (
            [CLEAN, FOUND],
            1,
            "advisories: 2 in the 2 pins checked\n"
            "pyyaml 5.3: PYSEC-2020-96, CVE-2020-1747; mended in 5.3.1\n"
            "pyyaml 5.3: PYSEC-2021-142; mended in no version yet\n",
        ),
    ],
)
def test_only_an_advisory_is_an_error(
    pins: list[object], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = tmp_path / "audit.json"
    answer.write_text(json.dumps({"dependencies": pins, "fixes": []}), "utf-8")
    assert advisories.main(str(answer)) == code
    assert capsys.readouterr().out == said


def test_no_answer_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert advisories.main(str(tmp_path / "audit.json")) == 0
    assert capsys.readouterr().out == "advisories: not checked, no index answered\n"
