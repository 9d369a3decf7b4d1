"""The page of a plan: its numbers are the document's, nothing outside it is asked for, nothing breaks it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pages
import pytest

import gpucalc
from gpucalc.__main__ import main
from gpucalc.line import Line
from gpucalc.report.html.ledger import DEPTHS, Ledger
from gpucalc.report.html.page import LARGEST
from gpucalc.report.html.page import page as made
from gpucalc.report.html.time import blocks, step_of
from gpucalc.report.svg.axes import Axis, linear, logarithmic

NAMES = [*pages.JOBS, "hostile"]


def text_of(name: str) -> str:
    return pages.hostile() if name == "hostile" else pages.html(name)


def lines_of(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    def walk(line: dict[str, Any], tree: str) -> Iterator[tuple[str, dict[str, Any]]]:
        yield tree, line
        for child in line.get("children", []):
            yield from walk(child, tree)

    for line in document["lines"]:
        yield from walk(line, line["name"])


def close(one: object, other: object) -> bool:
    return (
        isinstance(one, float) and isinstance(other, int | float) and math.isclose(one, other, rel_tol=1e-12)
    )


@pytest.mark.parametrize("name", pages.JOBS)
def test_every_headline_of_the_document_is_on_the_page(name: str) -> None:
    document = pages.answer(name).document()
    rows = pages.read(pages.html(name)).rows
    told = {tree["name"]: tree for tree in document["lines"]}
    for tree, section in (("throughput", "throughput"), ("cost", "cost"), ("cache", "cache")):
        for line in told.get(tree, {}).get("children", []):
            shown = [
                value for where, row, value in rows if where == section and row.rstrip("*") == line["name"]
            ]
            assert any(close(value, line["value"]) for value in shown), line["name"]
    verdict = document["verdict"]
    memory = [value for where, _, value in rows if where == "memory"]
    for key in ("needed_bytes", "capacity_bytes"):
        assert any(close(value, verdict[key]) for value in memory), key
    if "step" in told:
        parts = [value for where, _, value in rows if where == "time"]
        for line in (told["step"], *told["step"]["children"]):
            if line["value"] > told["step"]["value"] * 0.001:
                assert any(close(value, line["value"]) for value in parts), line["name"]


@pytest.mark.parametrize("name", pages.JOBS)
def test_every_row_is_a_line_of_the_document(name: str) -> None:
    """Where a line is repeated the page shows what all its repeats come to: a whole multiple."""
    document = pages.answer(name).document()
    known: dict[str, list[float]] = {}
    for _, line in lines_of(document):
        if isinstance(line["value"], int | float):
            known.setdefault(line["name"], []).append(float(line["value"]))
    checked = 0
    for section, row, value in pages.read(pages.html(name)).rows:
        named = row.rstrip("*").rsplit(", ", 1)[-1].removeprefix("peak: ").removeprefix("decides: ")
        if section not in ("memory", "time", "throughput", "cost", "cache") or named not in known:
            continue
        checked += 1
        assert isinstance(value, float)
        found = known[named]
        ratios = [value / held for held in found if held]
        assert value == 0 or any(abs(ratio - round(ratio)) < 1e-9 * ratio for ratio in ratios), (row, value)
    assert checked > 5


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_unique_and_links_lead_somewhere(name: str) -> None:
    tags = pages.read(text_of(name)).tags
    ids = [given["id"] for _, given in tags if "id" in given]
    assert len(ids) == len(set(ids))
    targets = {href[1:] for tag, given in tags if tag == "a" and (href := given.get("href") or "#")}
    assert targets <= set(ids)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_fetched_and_nothing_runs(name: str) -> None:
    found = pages.read(text_of(name))
    for tag, given in found.tags:
        assert tag not in (
            "script",
            "link",
            "img",
            "iframe",
            "object",
            "embed",
            "base",
            "form",
            "image",
            "use",
        )
        assert not [key for key in given if key.startswith("on") or key in ("src", "srcset", "style")]
        assert (given.get("href") or "#").startswith("#")
    assert "url(" not in found.styles
    assert "@import" not in found.styles
    policy = [given["content"] for tag, given in found.tags if given.get("http-equiv")]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_hostile_names_stay_text() -> None:
    text = pages.hostile()
    assert "<script>" not in text
    assert "<img" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    title = text.split("<title>", 1)[1].split("</title>", 1)[0]
    assert len(title) < 400


@pytest.mark.parametrize(
    "job",
    ["deepseek-v3", "mixtral-8x7b", "gpt3-175b-selective", "serve-deepseek-v4-flash", "serve-llama-3.3-70b"],
)
def test_the_largest_pages_stay_small(job: str) -> None:
    assert len(gpucalc.plan(job).html().encode()) <= LARGEST


def test_a_plan_of_many_numbers_is_explained_less_deep() -> None:
    """A pipeline of unlike stages, each with trees of its own."""
    answer = pages.answer("pipeline")
    stages = [line for line in answer.memory.children if line.unit == "bytes"]

    def aged(line: Line, factor: float) -> Line:
        below = tuple(aged(child, factor) for child in line.children)
        return replace(line, value=line.value * factor, children=below)

    many = tuple(
        replace(aged(stages[n % len(stages)], 1 + n / 1000), name=f"stage_{n}") for n in range(1, 64)
    )
    wide = replace(answer, memory=replace(answer.memory, children=(stages[0], *many)))
    text = made(wide)
    assert len(text.encode()) <= LARGEST
    assert "gpucalc explain JOB LINE" in text
    assert Ledger(DEPTHS[-1]).depth == 0


@pytest.mark.parametrize("name", pages.JOBS)
def test_every_picture_is_named_and_stands_beside_a_table(name: str) -> None:
    tags = pages.read(pages.html(name)).tags
    pictures = [given for tag, given in tags if tag == "svg" and given.get("role") == "img"]
    assert pictures
    assert all(given.get("aria-label") for given in pictures)
    section, drawn, tabled = "", set(), set()
    for tag, given in tags:
        section = given.get("id") or section if tag == "section" else section
        if tag == "svg" and given.get("role") == "img":
            drawn.add(section)
        if tag == "table":
            tabled.add(section)
    assert drawn <= tabled


def test_what_is_drawn_depends_on_what_is_known() -> None:
    def sections(name: str) -> set[str]:
        found = pages.read(pages.html(name)).tags
        return {given["id"] or "" for tag, given in found if tag == "section"}

    always = {
        "verdict",
        "memory",
        "topology",
        "documents",
        "assumptions",
        "formulas",
        "sources",
        "provenance",
    }
    assert all(always <= sections(name) for name in pages.JOBS)
    speed = {"time", "throughput", "cost"}
    assert speed | {"roofline", "scaling"} <= sections("fits")
    assert not speed & sections("too-large")
    assert "search" in sections("searched")
    assert "search" not in sections("fits")
    assert "unlike" in sections("mixed")
    assert speed | {"cache", "loads", "launch", "roofline"} <= sections("serving")


# -- the drawings' arithmetic ---------------------------------------------------------------------


def test_bars_are_as_long_as_their_parts() -> None:
    text = pages.html("too-large")
    answer = pages.answer("too-large")
    limit, needed = answer.verdict.capacity.value, answer.verdict.needed.value
    memory = text.split('id="memory"', 1)[1].split("</svg>", 1)[0]
    at = float(re.search(r'<line x1="([\d.]+)%"[^>]*class="limit"', memory)[1])  # type: ignore[index]
    over = [
        float(x) + float(width)
        for x, width in re.findall(r'<rect x="([\d.]+)%"[^>]*width="([\d.]+)%"[^>]*class="over"', memory)
    ]
    assert at / max(over) == pytest.approx(limit / needed, rel=1e-3)


def test_scales() -> None:
    axis = Axis(0.0, 200.0)
    assert axis.at(50) == 0.25
    assert axis.at(500) == 1.0
    assert axis.ticks(4) == (0.0, 50.0, 100.0, 150.0, 200.0)
    assert Axis(0.0, 80 * 2**30).ticks(4, 2**30) == (0, 20 * 2**30, 40 * 2**30, 60 * 2**30, 80 * 2**30)
    log = logarithmic([1.0, 100.0], room=1.0)
    assert log.at(10) == pytest.approx(0.5)
    assert log.ticks() == (1.0, 3.0, 10.0, 30.0, 100.0)
    assert linear([50.0]).at(50.0) == pytest.approx(1 / 1.08)


def test_roofline_places_a_block_by_its_flops_and_bytes() -> None:
    step = step_of(pages.answer("fits"))
    found = {name: block for block in blocks(step) for name in block.names}
    up = found["forward up"]
    # 2 x 8192 tokens x 4096 x 14336 FLOPs; weights and activations once each, two bytes an element
    assert up.flops == 2 * 8192 * 4096 * 14336
    assert up.bytes == 2 * (4096 * 14336 + 8192 * (4096 + 14336))
    assert up.intensity == pytest.approx(up.flops / up.bytes)
    assert up.rate < up.peak
    assert sum(block.total_s for block in blocks(step)) < step.value


def test_the_front_of_a_search_holds_what_none_beats() -> None:
    answer = pages.answer("searched")
    found = answer.search()
    assert found is not None
    text = pages.html("searched").split('id="search"', 1)[1].split("</section>", 1)[0]
    assert f"{found.legal:,} legal layouts, {found.fitting:,} of them fit" in text
    shown = {one.needed_bytes for one in (*found.front, *found.options)}
    listed = [cells[0] for cells, _ in opening_rows("searched", "search")]
    assert sorted(map(round, listed)) == sorted(map(round, shown))
    assert text.count('class="s0 mark strong"') == 1  # this plan's own layout
    assert found.options[0].keys["tp"] == answer.layout.tp


def opening_rows(name: str, section: str) -> list[tuple[list[float], dict[str, tuple[float, str]]]]:
    """Rows of a section's table that open: the numbers of their cells, and what each opens into, by name:
    the number and the markup that says how it came about."""
    text = pages.html(name).split(f'<section id="{section}"', 1)[1].split("</section>", 1)[0]
    found = []
    for row in text.split("<tbody", 1)[1].split("<tr ")[1:]:
        head, *cells = row.split('<td class="n"')
        numbers = [float(value) for cell in cells for value in re.findall(r'<data value="([^"]+)">', cell)]
        below = re.split(r'<div class="how"><ul>', head, maxsplit=1)[1]
        told = re.findall(r'<li>(?:<details><summary>)?<b>([\w: ]+)</b> <data value="([^"]+)">', below)
        parts = re.split(r"<li>(?:<details><summary>)?<b>[\w: ]+</b> <data value=", below)[1:]
        opened: dict[str, tuple[float, str]] = {}
        for (label, value), part in zip(told, parts, strict=True):
            opened.setdefault(label, (float(value), part))
        found.append((numbers, opened))
    return found


@pytest.mark.parametrize("name", ["serving", "serving-experts"])
def test_every_load_opens_into_the_document_s_numbers(name: str) -> None:
    loads = pages.answer(name).document()["loads"]
    rows = opening_rows(name, "loads")
    assert len(rows) == len(loads) > 2
    for (numbers, opened), load in zip(rows, loads, strict=True):
        told = [load[key] for key in ("tokens_per_s_per_user", "tokens_per_s_per_gpu", "ttft_s", "tpot_s")]
        assert numbers == told
        names = ("tokens_per_s_per_user", "tokens_per_s_per_gpu", "ttft", "tpot")
        assert [opened[key][0] for key in names] == told
        assert opened["queue"][0] == load["queue_s"]
        assert all("#f-" in opened[key][1] or "shown above" in opened[key][1] for key in names)


@pytest.mark.parametrize("name", ["fits", "too-large", "mixed"])
def test_every_change_opens_into_the_document_s_numbers(name: str) -> None:
    actions = pages.answer(name).document()["actions"]
    rows = opening_rows(name, "help")
    assert len(rows) == len(actions) > 2
    for (numbers, opened), action in zip(rows, actions, strict=True):
        told = [action[key] for key in ("needed_bytes", "step_s", "tokens_per_s") if action[key] is not None]
        assert numbers == told
        assert next(value for label, (value, _) in opened.items() if label.startswith("needs")) == told[0]
        if action["step_s"] is not None:
            assert told[1] in [value for value, _ in opened.values()]
            assert opened["tokens_per_s"][0] == told[2]


def test_every_layout_opens_into_the_search_s_numbers() -> None:
    found = pages.answer("searched").search()
    assert found is not None
    told = {round(one.needed_bytes): one for one in (*found.front, *found.options)}
    rows = opening_rows("searched", "search")
    assert len(rows) == len(told)
    for numbers, opened in rows:
        option = told[round(numbers[0])]
        needs = next(value for label, (value, _) in opened.items() if label.startswith("needs: "))
        assert needs == pytest.approx(option.needed_bytes, rel=1e-12)
        if option.step_s is not None:
            assert numbers[1] == option.step_s
            assert opened["step"][0] == pytest.approx(option.step_s, rel=1e-12)
            assert opened["tokens_per_s"][0] == pytest.approx(numbers[2], rel=1e-12)


def test_colours_can_be_told_from_what_they_stand_on() -> None:
    """WCAG 2.2 AA, in both modes: 4.5 for words, also those in a mark, and 3 for marks."""
    css = (Path(gpucalc.__file__).parent / "report/html/style.css").read_text("utf-8")
    found = re.findall(r"--([\w-]+): (#[0-9a-f]{6})", css)
    half = len(found) // 2
    assert [name for name, _ in found[:half]] == [name for name, _ in found[half:]]
    for colours in (dict(found[:half]), dict(found[half:])):
        for word in ("ink", "soft", "link", "fits", "marginal", "no"):
            for ground in ("bg", "card", "faint"):
                assert contrast(colours[word], colours[ground]) >= 4.5, (word, ground)
        for word in ("fits", "marginal", "no"):
            assert contrast(colours[word], colours[f"{word}-bg"]) >= 4.5, word
        for mark in (*(f"s{number}" for number in range(8)), "g0", "g1", "g2", "rest"):
            assert contrast(colours[mark], colours["card"]) >= 3, mark
        for number in range(8):
            assert contrast(colours["on"], colours[f"s{number}"]) >= 4.5, number


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours written as #rrggbb."""

    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, bright = sorted((light(one), light(other)))
    return (bright + 0.05) / (dark + 0.05)


# -- the command ----------------------------------------------------------------------------------


def test_files_are_written_beside_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, svg = tmp_path / "plan.html", tmp_path / "plan.svg"
    assert main(["plan", "llama-3-8b", "--json", "--html", str(html), "--svg", str(svg)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith('{"schema_version"')
    assert err == ""
    assert html.read_text("utf-8").startswith("<!doctype html>")
    assert svg.read_text("utf-8").startswith("<svg ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "plan.svg"]


@pytest.mark.parametrize(
    "how", [["--search"], ["--rank", "gpus"], ["--gpus", "8xH100-SXM", "--rank", "gpus"]]
)
def test_a_search_is_drawn_on_the_page_of_the_layout_it_found(
    how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "best.html"
    words = ["plan", "llama-3-8b", *how, "--json", "--html", str(page)]
    assert main(words) == 0
    best = json.loads(capsys.readouterr().out)
    found = pages.read(page.read_text("utf-8"))
    assert "search" in {given.get("id") for tag, given in found.tags if tag == "section"}
    memory = [value for where, _, value in found.rows if where == "memory"]
    assert any(close(value, best["verdict"]["needed_bytes"]) for value in memory)


def test_standard_output_holds_the_page_in_place_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "bert-large", "--html", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--html", "-", "--json"], "--html: standard output holds one document"),
        (["--html", "-", "--svg", "-"], "--svg: standard output holds one document"),
        (["--html", "."], ".: --html: is a folder, not a file"),
        (["--svg", "none/x.svg"], "none/x.svg: --svg: the folder is missing"),
        (["--html", "x", "--svg", "x"], "--html or --svg: is named twice"),
        (["--html", "x", "--scale", "1,2"], "--html: does not go with --scale"),
    ],
)
def test_what_cannot_be_written_is_refused_before_planning(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "bert-large", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_page_whose_plan_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    page.write_text("before", "utf-8")
    assert main(["plan", "llama-3-8b", "--set", "run.tp=3", "--html", str(page)]) == 2
    assert capsys.readouterr().out == ""
    assert page.read_text("utf-8") == "before"
    assert list(tmp_path.iterdir()) == [page]


def test_strict_answers_no_after_the_page_is_written(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    words = ["plan", "models/llama-3-8b", "--gpus", "1xRTX4090", "--strict", "-q", "--html", str(page)]
    assert main(words) == 1
    assert "Does not fit" in page.read_text("utf-8")
