"""The bar of long commands: seen by a watcher at a terminal after a second, by nobody else."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from gpucalc.catalog import open_catalog
from gpucalc.commands import progress
from gpucalc.jobs import resolve
from gpucalc.size import size
from gpucalc.size_fleets import kinds
from gpucalc.size_targets import Targets
from gpucalc.validate import validate

# A second's work without waiting for it: the bar's patience is the one thing made shorter.
PROGRAM = """
import sys
from gpucalc.commands import progress
progress.PATIENCE_S = {patience}
progress.PER_SECOND = 1e9
with progress.shown("fleets") as told:
    for done in range(1, 4):
        if told is not None:
            told(done, 3)
print("answer", told is not None, "rich" in sys.modules)
"""


def at_terminal(patience: float, **environment: str | None) -> tuple[str, str]:
    """Standard output, and what a terminal on standard error was sent."""
    near, far = pty.openpty()
    known = {k: v for k, v in os.environ.items() if k not in ("CI", "NO_COLOR")} | {"TERM": "xterm-256color"}
    for name, value in environment.items():
        known.pop(name, None)
        if value is not None:
            known[name] = value
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(patience=patience)],
        stdout=subprocess.PIPE, stderr=far, stdin=subprocess.DEVNULL, env=known, text=True, check=True,
    )  # fmt: skip
    os.close(far)
    seen = b""
    try:
        while part := os.read(near, 65536):
            seen += part
    except OSError:  # the far end is closed and all is read
        pass
    os.close(near)
    return done.stdout, seen.decode()


def test_a_watcher_sees_what_is_done() -> None:
    out, seen = at_terminal(0.0)
    assert out == "answer True True\n"
    assert "fleets" in seen
    assert "2/3" in seen
    assert seen.endswith("\x1b[2K")  # gone at the end
    assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h") == 1  # the cursor is back


def test_what_ends_within_a_second_shows_nothing() -> None:
    assert at_terminal(3600.0) == ("answer True False\n", "")


def test_without_colour_there_is_a_bar_without_colour() -> None:
    _, seen = at_terminal(0.0, NO_COLOR="1")
    assert "2/3" in seen
    assert "\x1b[3" not in seen  # no foreground colour


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("TERM", None), ("TERM", ""), ("CI", "true")])
def test_logs_and_simple_terminals_get_no_bar(name: str, value: str | None) -> None:
    assert at_terminal(0.0, **{name: value}) == ("answer False False\n", "")


@pytest.mark.parametrize("stream", [io.StringIO(), None], ids=["pipe", "no stream"])
def test_pipes_get_no_bar(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.shown("runs") as told:
        assert told is None


def test_the_bar_is_taken_away_when_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(progress, "wanted", lambda: True)
    monkeypatch.setattr(progress._Bar, "close", lambda self: closed.append(self.what))
    with pytest.raises(KeyboardInterrupt), progress.shown("runs"):
        raise KeyboardInterrupt
    assert closed == ["runs"]


def test_validate_tells_of_every_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.yaml"
    file.write_text("- {id: a, measured: {}}\n- {id: b, measured: {}}\n", "utf-8")
    told: list[tuple[int, int]] = []
    validate([file], catalog=open_catalog(None), progress=lambda done, of: told.append((done, of)))
    assert told == [(1, 2), (2, 2)]


def test_size_tells_of_every_fleet_looked_at() -> None:
    catalog = open_catalog(None)
    job = resolve("models/llama-3.2-1b", catalog, task="train", need_gpus=False)
    told: list[tuple[int, int]] = []
    offered = kinds(catalog, gpus=["rtx-3090"], most=4)
    size(job, catalog, offered, Targets(), progress=lambda done, of: told.append((done, of)))
    fleets = sum(len(kind.counts) for kind in offered)
    assert told == [(done, fleets) for done in range(fleets)]
