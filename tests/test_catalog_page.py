"""catalogs/README.md is true: its files pass the check, its commands run in order, its lists are whole."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from followed import Shown, Typed, steps

from gpucalc.catalog_names import KINDS
from gpucalc.spec.figure import FigureKind
from gpucalc.units import CATALOGUE_UNITS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "catalogs/README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader has it: the catalogue beside the files that the page shows."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "catalogs").symlink_to(ROOT / "catalogs")
    (folder / "bin").mkdir()
    program = folder / "bin" / "gpucalc"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m gpucalc "$@"\n', "utf-8")
    program.chmod(0o755)
    return folder


@pytest.mark.skipif(shutil.which("bash") is None, reason="the page's commands are typed into a shell")
def test_the_page_can_be_followed_from_top_to_bottom(checkout: Path) -> None:
    environment = {**os.environ, "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "COLUMNS": "100"}
    typed = 0
    for step in steps(PAGE):
        if isinstance(step, Shown):
            path = checkout / step.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.text, "utf-8")
            continue
        assert isinstance(step, Typed)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", step.line],
            cwd=checkout, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == step.exits, f"{step.line}\n{done.stdout}{done.stderr}"
        assert done.stderr == "", step.line
        if "catalog check" in step.line:
            assert done.stdout.rstrip().endswith(("nothing wrong", " note")), done.stdout
        typed += 1
    assert typed == sum(isinstance(step, Typed) for step in steps(PAGE)) >= 15


def table_of(heading: str) -> list[str]:
    """The first column of the table under a heading's text."""
    text = PAGE[PAGE.index(heading) :]
    rows = text[text.index("|---") :].splitlines()[1:]
    return [row.split("`")[1] for row in rows[: next(i for i, row in enumerate(rows) if not row)]]


def test_every_kind_of_file_and_of_figure_is_explained() -> None:
    assert sorted(table_of("| folder |")) == sorted(KINDS)
    assert table_of("| kind |") == [kind.value for kind in FigureKind]


def test_the_units_are_those_that_are_read() -> None:
    listed = re.search(r"another one is refused:\n(.*?)\.\nGB is", PAGE, re.DOTALL)
    assert listed is not None
    assert set(re.split(r",\s+", listed[1])) == set(CATALOGUE_UNITS)
