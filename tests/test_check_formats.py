"""Each report format held to its public schema, its escaping, its size limits and a golden file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from gpucalc.check_findings import Finding, Report, Status
from gpucalc.report import formats
from gpucalc.report.screen import render

SCHEMAS = Path(__file__).parent / "data" / "formats"
Golden = Callable[[str, str], None]

MISS = Finding(
    rule="step_s",
    status=Status.FAIL,
    job="pretrain-8b",
    cell="gpus=8xH100-SXM, seq_len=8192",
    file="jobs/pretrain.yaml",
    line=14,
    message="step_s: 22.4 s is not <= 20 s",
    value=22.39791,
    limit=20.0,
    comparison="<= 20 s",
    unit="s",
    equation="step = 5.814303 (forward) + 11.50288 (backward) + 5.080728 (rest) = 22.39791 s",
    fingerprint="0" * 31 + "1",
)
PASSED = replace(
    MISS,
    rule="fits",
    status=Status.PASS,
    line=12,
    message="fits: needs 35.91 GiB per GPU at loss, has 79.10 GiB; expected: fits",
    value="fits",
    limit="fits",
    comparison="true",
    unit="verdict",
    equation="needed_with_error = 38_557_141_550 * (1 + 0.05) = 40_484_998_627 bytes <= 84_932_978_278 bytes",
    fingerprint="0" * 31 + "2",
)
WARNED = replace(
    MISS,
    rule="headroom",
    status=Status.WARN,
    line=16,
    message="headroom: 54.6 % is not >= 60 %",
    value=54.6,
    limit=60.0,
    comparison=">= 60 %",
    unit="%",
    equation="headroom = (84_932_978_278 - 38_557_141_550) / 84_932_978_278 = 0.5460286 fraction",
    fingerprint="0" * 31 + "3",
)
KNOWN = replace(MISS, rule="mfu", line=15, known=True, fingerprint="0" * 31 + "4")
BROKEN = replace(
    MISS,
    rule="job",
    job='odd: name, 100 % <b> & "quoted" @all | `x`',
    cell="",
    file="jobs/ä b.yaml",
    line=1,
    message="model: unknown model, got 'lama'; did you mean\\x1b[31m llama?",
    value=None,
    limit=None,
    comparison="",
    unit="",
    equation=None,
    fingerprint="0" * 31 + "5",
)
REPORT = Report((PASSED, MISS, WARNED, KNOWN, BROKEN))
EMPTY = Report(())
MANY = Report(
    tuple(replace(MISS, line=index + 1, fingerprint=f"{index:032x}") for index in range(2000))
    + tuple(replace(WARNED, line=index + 1, fingerprint=f"f{index:031x}") for index in range(15))
)
REPORTS = {"report": REPORT, "empty": EMPTY, "many": MANY}


@pytest.mark.parametrize("name", sorted(formats.WRITERS))
def test_each_format_has_a_golden_file(name: str, golden: Golden) -> None:
    golden(f"check-{name}.txt", formats.WRITERS[name](REPORT))


def test_the_table_has_a_golden_file(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    golden("check-table.txt", render(formats.table(REPORT), color=False))


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SCHEMAS / name).read_text("utf-8"))
    return found


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_sarif_is_valid(report: Report) -> None:
    log = json.loads(formats.sarif(report))
    validator = jsonschema.Draft4Validator(schema("sarif-2.1.0.json"))
    validator.check_schema(validator.schema)
    assert [error.message for error in validator.iter_errors(log)] == []
    run = log["runs"][0]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(set(rules)) == len(rules)
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        place = result["locations"][0]["physicalLocation"]
        assert not place["artifactLocation"]["uri"].startswith(("/", "."))
        assert " " not in place["artifactLocation"]["uri"]
    marks = [json.dumps(result["partialFingerprints"]) for result in run["results"]]
    assert len(set(marks)) == len(marks)


def test_sarif_leaves_out_what_passed_and_notes_what_is_known() -> None:
    results = json.loads(formats.sarif(REPORT))["runs"][0]["results"]
    assert [(r["ruleId"], r["level"], r["baselineState"]) for r in results] == [
        ("step_s", "error", "new"),
        ("headroom", "warning", "new"),
        ("mfu", "note", "unchanged"),
        ("job", "error", "new"),
    ]


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_gitlab_is_valid(report: Report) -> None:
    issues = json.loads(formats.gitlab(report))
    validator = jsonschema.Draft7Validator(schema("gitlab-code-quality.json"))
    validator.check_schema(validator.schema)
    assert [error.message for error in validator.iter_errors(issues)] == []
    assert len({issue["fingerprint"] for issue in issues}) == len(issues)


def held_to(element: ElementTree.Element, elements: dict[str, Any], path: str = "") -> None:
    """The element and all below it against the table of what JUnit knows."""
    path = f"{path}/{element.tag}"
    known = elements[element.tag]
    assert set(element.attrib) <= set(known["attributes"]), path
    needed = {name for name, required in known["attributes"].items() if required}
    assert needed <= set(element.attrib), path
    for child in element:
        assert child.tag in known["children"], f"{path}/{child.tag}"
        held_to(child, elements, path)


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_junit_is_valid(report: Report) -> None:
    root = ElementTree.fromstring(formats.junit(report))
    held_to(root, schema("junit-10.json"))
    assert root.tag == "testsuites"
    cases = root.findall(".//testcase")
    assert int(root.attrib["tests"]) == len(cases) == len(report.findings)
    for suite in root:
        assert int(suite.attrib["tests"]) == len(suite.findall("testcase"))
        for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite.attrib[attribute]) == len(suite.findall(f"testcase/{tag}"))


def test_junit_tells_a_miss_from_an_unreadable_job_and_from_a_known_one() -> None:
    root = ElementTree.fromstring(formats.junit(REPORT))
    tags = [[child.tag for child in case] for case in root.iter("testcase")]
    assert tags == [["system-out"], ["failure"], ["system-out"], ["skipped"], ["error"]]
    failure = root.find(".//failure")
    assert failure is not None
    assert failure.text is not None
    assert "jobs/pretrain.yaml:14" in failure.text
    assert MISS.equation is not None
    assert MISS.equation in failure.text


COMMAND = re.compile(r"::(error|warning) ([^:\r\n]*)::([^\r\n]*)")


def parsed(line: str) -> tuple[str, dict[str, str], str]:
    """A workflow command as GitHub's runner reads it."""
    match = COMMAND.fullmatch(line)
    assert match is not None, line

    def plain(text: str, codes: str) -> str:
        for character in codes + "%":
            text = text.replace(f"%{ord(character):02X}", character)
        return text

    pairs = (pair.split("=", 1) for pair in match[2].split(","))
    return match[1], {key: plain(value, "\r\n:,") for key, value in pairs}, plain(match[3], "\r\n")


def test_annotations_come_back_as_they_were_written() -> None:
    lines = formats.github(REPORT).splitlines()
    found = [parsed(line) for line in lines[:-1]]
    assert [level for level, _, _ in found] == ["error", "error", "warning"]
    broken = found[1]
    assert broken[1] == {"file": "jobs/ä b.yaml", "line": "1", "title": "gpucalc job"}
    assert broken[2] == f"{BROKEN.subject}: {BROKEN.message}"
    assert lines[-1] == "5 checks of 2 plans: 1 passed, 1 warned, 2 failed, 1 known from the baseline"


def test_github_shows_ten_annotations_of_a_level_so_the_tenth_stands_for_the_rest() -> None:
    found = [parsed(line) for line in formats.github(MANY).splitlines()[:-1]]
    levels = [level for level, _, _ in found]
    assert (levels.count("error"), levels.count("warning")) == (10, 10)
    assert found[9][2].startswith("1991 more: jobs/pretrain.yaml:10 step_s")
    assert max(len(line) for line in formats.github(MANY).splitlines()) < 4096 + 200


def test_a_file_cannot_write_commands_of_its_own() -> None:
    sly = Report((replace(MISS, job="x\n::set-output name=a::b", message="100%0A::error::no"),))
    assert formats.github(sly).count("\n") == 1


def test_markdown_stays_below_the_limits_of_comments_and_summaries() -> None:
    text = formats.markdown(MANY)
    assert len(text.encode()) < 65_536
    assert re.search(r"\d+ more rows are left out", text)


def test_markdown_cells_hold_no_markup_of_their_own() -> None:
    text = formats.markdown(REPORT)
    row = next(line for line in text.splitlines() if "odd" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 6
    assert "<b>" not in row
    assert "@all" not in row
    assert "&#64;all" in row


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_json_is_one_document_and_a_baseline(report: Report, tmp_path: Path) -> None:
    from gpucalc.check_findings import read_baseline

    text = formats.as_json(report)
    assert next(iter(json.loads(text))) == "schema_version"
    (tmp_path / "base.json").write_text(text, "utf-8")
    missed = {f.fingerprint for f in report.findings if f.status is not Status.PASS}
    assert set(read_baseline(tmp_path / "base.json")) == missed


def test_json_and_the_text_formats_import_no_drawing_library() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from gpucalc.report import formats; from gpucalc.check_findings import Report;"
        "[writer(Report(())) for writer in formats.WRITERS.values()];"
        "assert not {'rich', 'numpy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
