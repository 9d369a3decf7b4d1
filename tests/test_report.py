"""What the reports say, held by golden files at two widths; and what they must never do."""

from __future__ import annotations

import json as stdlib_json
from collections.abc import Callable

import fake
import pytest

from gpucalc.explain import explain
from gpucalc.plan.answer import Level
from gpucalc.report import json, table
from gpucalc.report.screen import bar, quantity, render

Golden = Callable[[str, str], None]


@pytest.fixture(params=[80, 120])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    columns: int = request.param
    monkeypatch.setenv("COLUMNS", str(columns))
    return columns


@pytest.mark.parametrize("level", list(Level))
def test_plan_table(level: Level, width: int, golden: Golden) -> None:
    text = render(table.plan(fake.plan(level)), color=False)
    assert max(map(len, text.splitlines())) <= width
    golden(f"plan-{level.value}-{width}.txt", text)


def test_explanation_table(width: int, golden: Golden) -> None:
    found = explain(fake.plan().root, "optimizer_states", prefer=("stage_0", "backward"))
    golden(f"explain-{width}.txt", render(table.explanation(found), color=False))


def test_plan_document(golden: Golden) -> None:
    document = json.plan(fake.plan(), {"catalogue": {"gpus/h100-sxm": "0123456789ab"}})
    golden("plan.json", json.text(document, indent=2))


def test_the_document_starts_with_its_schema_version() -> None:
    text = json.text(json.plan(fake.plan(), {}))
    assert next(iter(stdlib_json.loads(text))) == "schema_version"


def test_every_number_in_the_document_has_a_unit() -> None:
    def check(item: object, key: str) -> None:
        if isinstance(item, dict):
            if "value" in item and "name" in item:
                assert item["unit"], f"{key}: {item['name']}"
            for name, part in item.items():
                check(part, f"{key}.{name}")
        elif isinstance(item, list):
            for part in item:
                check(part, key)

    check(json.plan(fake.plan(), {}), "plan")


def test_speed_is_not_shown_for_a_plan_that_cannot_run() -> None:
    text = render(table.plan(fake.plan(Level.DOES_NOT_FIT)), color=False)
    assert "tokens_per_s" not in text
    assert "Time" not in text


def test_terminal_escapes_from_a_file_are_shown_not_obeyed() -> None:
    text = render(table.plan(fake.plan()), color=False)
    assert "\x1b" not in text
    assert r"\x1b[31mcolour" in text


def test_infinity_is_refused_rather_than_written_as_no_json() -> None:
    with pytest.raises(ValueError, match="JSON"):
        json.text({"speed_tokens_per_s": float("inf")})


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (80 * 2**30, "bytes", "80.00 GiB"),
        (3.35e12, "bytes/s", "3,350 GB/s"),
        (989.4e12, "FLOP/s", "989.4 TFLOP/s"),
        (0.415, "fraction", "41.5 %"),
        (12, "count", "12"),
        (2.94e-6, "s", "2.94 us"),
        (52_428.8, "tokens/s", "52,429 tokens/s"),
    ],
)
def test_quantities_in_the_unit_a_reader_expects(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_a_bar_marks_the_limit_inside_and_at_its_end() -> None:
    assert bar(0.5, 8, limit=1.0).plain == "████    │"
    assert bar(1.0, 8, limit=0.5).plain == "████│███"
    assert bar(0.0, 8).plain == ""
    assert bar(1e-9, 8).plain == "▏"
