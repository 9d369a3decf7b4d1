"""The pictures of the README: made by the program, the same as the program makes them now."""

from __future__ import annotations

import re
import xml.etree.ElementTree as Xml
from collections.abc import Callable
from pathlib import Path

import fake
import pytest
from rich.text import Text

from gpucalc.__main__ import main
from gpucalc.report import table, terminal

ROOT = Path(__file__).parents[1]
PICTURES = {"plan": "plan models/llama-3-8b --gpus 1xRTX4090"}


@pytest.mark.parametrize("name", PICTURES)
def test_the_readme_shows_what_the_program_prints(
    name: str, committed: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PICTURES[name].split(), "--svg", "-"]) == 0
    text = capsys.readouterr().out.rstrip("\n")
    committed(f".github/{name}.svg", text)
    assert f"(.github/{name}.svg)" in (ROOT / "README.md").read_text("utf-8")


def test_a_picture_asks_for_nothing_and_says_what_it_shows() -> None:
    text = terminal.picture(table.plan(fake.plan()), 'gpucalc plan "a & b" {x} %s')
    root = Xml.fromstring(text)
    assert root.get("role") == "img"
    assert root.get("aria-label") == 'Terminal: gpucalc plan "a & b" {x} %s'
    links = re.findall(r"https?://[^\"' )<]+", text)
    assert set(links) == {"http://www.w3.org/2000/svg"}
    assert "FITS" in "".join(root.itertext())


def test_markup_in_a_report_stays_text() -> None:
    root = Xml.fromstring(terminal.picture(Text("<script>alert(1)</script> & </text>"), "x"))
    assert not [item for item in root.iter() if item.tag.endswith("script")]
    assert "<script>alert(1)</script>" in "".join(root.itertext()).replace("\xa0", " ")
