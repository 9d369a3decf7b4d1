"""The README is true: its commands run with the exit codes it says, its outputs and tables are today's."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from followed import Shown, Typed, steps
from test_cli import commands
from test_layers import LAYERS

from gpucalc.__main__ import main
from gpucalc.catalog import open_catalog
from gpucalc.errors import ExitCode
from gpucalc.jobs import resolve
from gpucalc.planner import plan_job
from gpucalc.spec.yamlio import load_yaml
from gpucalc.validate import Bounds
from gpucalc.validate_serving import BOUNDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FILES = {step.name: step.text for step in steps(README) if isinstance(step, Shown)}
LINES = [step for step in steps(README) if isinstance(step, Typed)]


def calls(line: str) -> list[list[str]]:
    """The words of every call of gpucalc on a command line."""
    parts = (shlex.split(part, comments=True) for part in line.split("&&"))
    return [words[1:] for words in parts if words and words[0] == "gpucalc"]


@pytest.mark.parametrize("words", [words for words in commands() if words], ids=" ".join)
def test_every_command_is_documented(words: tuple[str, ...]) -> None:
    named = words[:-1] if words[-1] == "list" else words
    assert any(given[: len(named)] == list(named) for step in LINES for given in calls(step.line))


@pytest.mark.parametrize("step", [step for step in LINES if calls(step.line)], ids=lambda step: step.line)
def test_every_documented_command_runs(
    step: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for words in calls(step.line):
        if words[0] in ("trace", "probe"):
            pytest.importorskip("torch")
        code = main(words)
        out, err = capsys.readouterr()
        says_more = words[0] in ("import", "trace")  # what is being done
        assert (err == "") != says_more
        assert code == step.exits
        assert out or "-o" in words


def test_files_stand_before_the_commands_that_need_them() -> None:
    there: set[str] = set()
    for step in steps(README):
        if isinstance(step, Shown):
            there.add(step.name)
            continue
        for words in calls(step.line) if isinstance(step, Typed) else ():
            there |= {words[place + 1] for place, word in enumerate(words[:-1]) if word in ("-o", "--output")}
            assert {word for word in words if word in FILES} <= there, step.line


def test_the_set_up_commands_name_what_is_there() -> None:
    assert "python -m pip install . && gpucalc plan" in README
    assert '-c tests/constraints.txt -e ".[test,probe]" && python -m pytest' in README
    assert "torch==2.13.0" in (ROOT / "tests" / "constraints.txt").read_text(encoding="utf-8").splitlines()


def test_links_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^\w -]", "", title.casefold()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif "://" not in target:
            assert (ROOT / target).is_file(), target


# -- what is rewritten by --update-golden -----------------------------------------------------------


def rewritten(mark: str, inside: Callable[[re.Match[str]], str], *, end: str) -> str:
    """The README with what stands between a mark and its end written anew."""
    pattern = re.compile(rf"({mark})(.*?)({end})", re.DOTALL)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert pattern.search(text), mark
    return pattern.sub(lambda found: f"{found[1]}{inside(found)}{found[found.lastindex or 0]}", text)


def printed(line: str) -> str:
    """What a command writes on a terminal of 80 columns."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setenv("COLUMNS", "80")
        patch.setenv("NO_COLOR", "1")
        (words,) = calls(line)
        assert main(words) == ExitCode.ANSWERED
    return out.getvalue()


def test_the_outputs_are_what_is_printed(committed: Callable[[str, str], None]) -> None:
    def output(found: re.Match[str]) -> str:
        text = printed(found[2])
        if found[3]:
            text = text[: text.index(f"\n{found[3]}")]
        return f"\n\n```text\n{text.rstrip()}\n```\n\n"

    mark = r"<!-- output of (gpucalc [^\n]*?)(?:, until ([^\n]*?))? -->"
    committed("README.md", rewritten(mark, output, end="<!-- end -->").rstrip("\n"))


def accuracy_table() -> str:
    """The recorded errors as the README shows them."""
    recorded = load_yaml(ROOT / "catalogs/measurements/accuracy.yaml").data
    rows = [
        "| quantity | framework | values | groups | median error | nine in ten within |",
        "|---|---|---|---|---|---|",
    ]
    for quantity, frameworks in recorded.items():
        for framework, of in frameworks.items():
            least = 1 if of["p90_abs"] < 0.01 else 0  # decimals, so that little does not read as nothing
            errors = f"{100 * of['median_abs']:.1f} % | {100 * of['p90_abs']:.{least}f} %"
            rows.append(f"| {quantity} | {framework} | {of['rows']} | {of['groups']} | {errors} |")
    return "\n".join(rows)


def test_the_accuracy_table_is_the_recorded_one(committed: Callable[[str, str], None]) -> None:
    table = f"\n{accuracy_table()}\n\n"
    committed(
        "README.md", rewritten(r"<!-- accuracy[^\n]*-->\n", lambda _: table, end="<!-- end -->").rstrip("\n")
    )


def test_the_layers_are_those_that_are_held(committed: Callable[[str, str], None]) -> None:
    rows: list[str] = []
    for names in reversed(LAYERS):
        words = sorted(names - {"gpucalc"} if "formula" in names else names)
        rows += textwrap.wrap("  ".join(words), 90, break_on_hyphens=False)
    text = "\n```text\n" + "\n".join(rows) + "\n```\n\n"
    committed("README.md", rewritten("<!-- layers -->\n", lambda _: text, end="<!-- end -->").rstrip("\n"))


def test_the_promises_are_the_bounds_that_validate_holds() -> None:
    bounds, served = Bounds(), {name: bound.median for name, bound in BOUNDS.items()}
    assert served["weights"] == served["kv_tokens"]
    promised = (
        f"within {bounds.peak_memory_median:.0%} of a training run's memory and"
        f" {bounds.throughput_median:.0%} of its throughput,"
        f" within {served['weights']:.0%} of a deployment's weights and cache and"
        f" {served['decode_speed']:.0%} of its decode speed"
    )
    assert promised.replace("%", " %") in " ".join(README.split())


def comparison_row() -> str:
    """Our step times of the two compared jobs, and their errors."""
    catalog = open_catalog(None)
    cells = []
    for name in ("gpt3-175b-full", "gpt3-175b-selective"):
        job = resolve(name, catalog)
        plan = plan_job(job, catalog, advice=False)
        assert plan.time is not None
        measured = load_yaml(catalog.path_of("jobs", name)).data["measured"]["step_time_s"]
        cells.append(f"{plan.time.value:.2f} ({100 * (plan.time.value / measured - 1):+.0f} %)")
    return f"| gpucalc | {' | '.join(cells)} |"


def test_the_comparison_has_todays_estimates(committed: Callable[[str, str], None]) -> None:
    measured = r"\| measured \| 18.13 \| 13.75 \|\n"
    row = comparison_row() + "\n"
    committed("README.md", rewritten(measured, lambda _: row, end=r"\| Calculon").rstrip("\n"))


def test_the_pipeline_follows_the_page() -> None:
    assert "python tests/newcomer.py README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
