"""Findings in the formats pipelines read: one small writer each, from the one Finding type.

No writer puts a time, a machine or a user's folder into its text: equal inputs give equal files,
which can be committed and compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gpucalc.check_findings import RULES, Finding, Report, Status
from gpucalc.errors import one_line
from gpucalc.report.json import SCHEMA_VERSION, plain

if TYPE_CHECKING:
    from rich.console import RenderableType

ANNOTATIONS = 10  # of one level that GitHub shows for a step
MARKDOWN_BYTES = 60_000  # GitHub refuses comments above 65,536 characters and job summaries above 1 MiB
MESSAGE_BYTES = 4_000  # of one annotation; GitHub cuts at 4,096 characters


def document(report: Report) -> dict[str, Any]:
    """The report for programs and for `--baseline`."""
    return {
        "summary": {
            "findings": len(report.findings),
            "passed": len(report.of(Status.PASS)),
            "warned": len(report.of(Status.WARN)),
            "failed": len(report.of(Status.FAIL)),
            "known": len(report.known),
        },
        "findings": [_finding(finding) for finding in report.findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "status": finding.status.value,
        "known": finding.known,
        "file": finding.file,
        "line": finding.line,
        "job": finding.job,
        "cell": finding.cell,
        "message": finding.message,
        "value": plain(finding.value),
        "comparison": finding.comparison,
        "limit": plain(finding.limit),
        "unit": finding.unit,
        "equation": finding.equation,
        "fingerprint": finding.fingerprint,
    }


def as_json(report: Report) -> str:
    """The report as one JSON document."""
    return json.dumps({"schema_version": SCHEMA_VERSION, **document(report)}, indent=2, allow_nan=False)


def junit(report: Report) -> str:
    """JUnit XML: a suite for each file, a case for each finding.

    A miss is a failure, an unreadable job an error, a miss known from the baseline is skipped, a
    warning passes and says so in the case's output: JUnit knows no warnings.
    """
    from xml.etree import ElementTree as Xml  # only for this format

    suites = Xml.Element("testsuites", _counts(report.findings))
    for file in dict.fromkeys(finding.file for finding in report.findings):
        held = tuple(finding for finding in report.findings if finding.file == file)
        skipped = str(sum(f.known for f in held))
        suite = Xml.SubElement(suites, "testsuite", {"name": file, **_counts(held), "skipped": skipped})
        for finding in held:
            words = {"name": f"{finding.subject}: {finding.title}", "classname": file.replace(".", "_")}
            case = Xml.SubElement(suite, "testcase", words)
            text = f"{finding.file}:{finding.line}: {finding.message}"
            text += f"\n{finding.equation}" if finding.equation else ""
            if finding.known:
                Xml.SubElement(case, "skipped", {"message": f"known from the baseline: {finding.message}"})
            elif finding.status is Status.FAIL:
                tag = "failure" if finding.comparison else "error"
                what = {"type": finding.rule, "message": finding.message}
                Xml.SubElement(case, tag, what).text = text
            else:
                warned = "warning: " if finding.status is Status.WARN else ""
                Xml.SubElement(case, "system-out").text = warned + text
    Xml.indent(suites)
    body: str = Xml.tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}'


def _counts(findings: tuple[Finding, ...]) -> dict[str, str]:
    failed = [finding for finding in findings if finding.failed]
    errors = sum(1 for finding in failed if not finding.comparison)
    return {"tests": str(len(findings)), "failures": str(len(failed) - errors), "errors": str(errors)}


_SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def sarif(report: Report) -> str:
    """SARIF 2.1.0 for code scanning: misses and warnings; what passed is no result."""
    from gpucalc import __version__

    missed = [finding for finding in report.findings if finding.status is not Status.PASS]
    rules = list(RULES)
    driver = {
        "name": "gpucalc",
        "semanticVersion": __version__,
        "rules": [
            {
                "id": rule.id,
                "shortDescription": {"text": rule.title},
                "help": {"text": rule.help},
                "defaultConfiguration": {"level": "error"},
            }
            for rule in RULES.values()
        ],
    }
    results = [
        {
            "ruleId": finding.rule,
            "ruleIndex": rules.index(finding.rule),
            "level": _sarif_level(finding),
            "message": {"text": _message(finding)},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": _uri(finding.file)},
                        "region": {"startLine": finding.line},
                    }
                }
            ],
            "partialFingerprints": {"gpucalcCheck/v1": finding.fingerprint},
            "baselineState": "unchanged" if finding.known else "new",
        }
        for finding in missed
    ]
    log = {
        "$schema": _SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "utf16CodeUnits", "results": results}],
    }
    return json.dumps(log, indent=2, allow_nan=False)


def _sarif_level(finding: Finding) -> str:
    if finding.known:
        return "note"
    return "error" if finding.status is Status.FAIL else "warning"


def _uri(file: str) -> str:
    path = quote(file)
    return f"file://{path}" if file.startswith("/") else path


def gitlab(report: Report) -> str:
    """GitLab's code quality report: an array of misses and warnings."""
    issues = [
        {
            "description": _message(finding),
            "check_name": finding.rule,
            "fingerprint": finding.fingerprint,
            "severity": _severity(finding),
            "location": {"path": finding.file, "lines": {"begin": finding.line}},
        }
        for finding in report.findings
        if finding.status is not Status.PASS
    ]
    return json.dumps(issues, indent=2, allow_nan=False)


def _severity(finding: Finding) -> str:
    if finding.known:
        return "info"
    return "major" if finding.status is Status.FAIL else "minor"


def _message(finding: Finding) -> str:
    equation = f". {finding.equation}" if finding.equation else ""
    return f"{finding.subject}: {finding.message}{equation}"


def github(report: Report) -> str:
    """GitHub workflow commands: annotations on the job files' lines.

    GitHub shows ten of each level for a step, so the last one stands for all that are left.
    """
    lines: list[str] = []
    for level, status in (("error", Status.FAIL), ("warning", Status.WARN)):
        findings = report.of(status)
        shown = findings if len(findings) <= ANNOTATIONS else findings[: ANNOTATIONS - 1]
        for finding in shown:
            where = {"file": finding.file, "line": finding.line, "title": f"gpucalc {finding.title}"}
            lines.append(_command(level, where, _message(finding)))
        if left := len(findings) - len(shown):
            places = ", ".join(f"{f.file}:{f.line} {f.rule}" for f in findings[len(shown) :])
            lines.append(_command(level, {"title": f"gpucalc: {left} more"}, f"{left} more: {places}"))
    lines.append(report.summary)
    return "\n".join(lines)


def _command(level: str, properties: Mapping[str, object], message: str) -> str:
    words = ",".join(f"{key}={_escaped(str(value), ':,')}" for key, value in properties.items())
    return f"::{level} {words}::{_escaped(message[:MESSAGE_BYTES])}"


def _escaped(text: str, also: str = "") -> str:
    """Percent codes for what ends a workflow command, or a property of one."""
    for character in "%\r\n" + also:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def markdown(report: Report) -> str:
    """A comment for a merge request or a job summary: what missed in full, what passed counted."""
    head = f"### gpucalc: {_verdict(report)}\n\n{report.summary}\n"
    order = (Status.FAIL, Status.WARN, Status.PASS)
    rows = sorted(report.findings, key=lambda f: (f.known, order.index(f.status)))
    table = "\n| | job | check | value | where |\n|---|---|---|---|---|\n"
    length, kept = len((head + table).encode()), []
    for finding in rows:
        row = _row(finding)
        length += len(row.encode())
        if length > MARKDOWN_BYTES:
            break
        kept.append(row)
    left = len(rows) - len(kept)
    more = (
        f"\n{left} more {'row is' if left == 1 else 'rows are'} left out; see the JSON report.\n"
        if left
        else ""
    )
    equations = _equations([f for f in rows if f.failed], MARKDOWN_BYTES - length)
    return (head + table + "".join(kept) + more + equations).rstrip("\n")


def _verdict(report: Report) -> str:
    if any(finding.failed for finding in report.findings):
        return "failed"
    return "passed with warnings" if report.of(Status.WARN) else "passed"


_MARKS = {Status.PASS: ":white_check_mark:", Status.WARN: ":warning:", Status.FAIL: ":x:"}


def _row(finding: Finding) -> str:
    mark = ":small_blue_diamond: known" if finding.known else _MARKS[finding.status]
    subject, title, message = (
        inside_text(finding.subject),
        inside_code(finding.title),
        inside_text(finding.message),
    )
    return f"| {mark} | {subject} | `{title}` | {message} | `{inside_code(finding.file)}:{finding.line}` |\n"


def _equations(missed: list[Finding], room: int) -> str:
    lines: list[str] = []
    for finding in missed:
        if finding.equation:
            equation = inside_code(finding.equation)
            line = f"- {inside_text(finding.subject)}, `{finding.rule}`: `{equation}`\n"
            room -= len(line.encode())
            if room < 100:
                break
            lines.append(line)
    return "\n<details><summary>Equations</summary>\n\n" + "".join(lines) + "\n</details>\n" if lines else ""


def inside_code(text: str) -> str:
    """Text inside a code span of a table cell."""
    return one_line(text).replace("`", "'").replace("|", "\\|")


def inside_text(text: str) -> str:
    """Text of a table cell: nothing in it is markup, a mention or a link."""
    text = one_line(text)
    for character in "\\`*_[]|~":
        text = text.replace(character, "\\" + character)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "&#64;")


def table(report: Report, *, quiet: bool = False) -> RenderableType:
    """The report for a terminal: each job with its checks, the equation of what missed."""
    from rich.console import Group
    from rich.style import Style
    from rich.text import Text

    from gpucalc.report.screen import QUIET, clean, heading, indent

    styles = {Status.PASS: "green", Status.WARN: "yellow", Status.FAIL: "red"}
    summary = Text(report.summary, style=Style(bold=True))
    if quiet:
        return summary
    parts: list[RenderableType] = []
    for subject in dict.fromkeys((f.file, f.subject) for f in report.findings):
        parts.append(heading(f"{subject[1]}  {subject[0]}"))
        for finding in report.findings:
            if (finding.file, finding.subject) != subject:
                continue
            word = "known" if finding.known else finding.status.value
            mark = (f"{word:<5} ", Style(color="blue" if finding.known else styles[finding.status]))
            parts.append(indent(Text.assemble(mark, clean(finding.message))))
            if finding.status is not Status.PASS:
                parts.append(indent(Text(f"{finding.file}:{finding.line}", style=QUIET), 8))
                if finding.equation:
                    parts.append(indent(Text(clean(finding.equation), style=QUIET), 8))
    return Group(*parts, Text(), summary)


WRITERS: dict[str, Callable[[Report], str]] = {
    "json": as_json,
    "junit": junit,
    "sarif": sarif,
    "github": github,
    "gitlab": gitlab,
    "markdown": markdown,
}
FORMATS = ("table", *WRITERS)
