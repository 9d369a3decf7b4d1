"""The process as scripts see it: exit codes, streams, flags and help pages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from gpucalc import __version__, cli
from gpucalc.__main__ import main
from gpucalc.errors import CannotMeasure, ExitCode, Infeasible, InputError

Capture = pytest.CaptureFixture[str]


def test_exit_codes_are_frozen() -> None:
    assert {code.name: code.value for code in ExitCode} == {
        "ANSWERED": 0,
        "NO": 1,
        "USAGE": 2,
        "INTERNAL": 3,
        "CANNOT_MEASURE": 4,
    }


def raising(error: BaseException) -> Callable[..., None]:
    def run(**_: object) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InputError("must be positive", where="job.yaml", key="run.tp", given=-1), 2, "job.yaml: run.tp: "),
        (Infeasible(["tp 3 does not divide 32 heads"]), 2, "tp 3 does not divide 32 heads"),
        (CannotMeasure("no device"), 4, "no device"),
        (PermissionError(13, "Permission denied", "job.yaml"), 2, "job.yaml: Permission denied"),
        (OSError(36, "File name too long", "xxx"), 2, "xxx: File name too long"),
        (OSError(5, "Input/output error"), 2, "the output: Input/output error"),
        (OSError(12, "Cannot allocate memory"), 3, "internal error: OSError"),
        (ZeroDivisionError("division by zero"), 3, "internal error: ZeroDivisionError"),
        (KeyboardInterrupt(), 130, ""),
    ],
)  # fmt: skip
def test_an_error_is_one_line_on_stderr_and_a_code(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(cli, "program", lambda _: raising(error))
    assert main(["plan", "x"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == (1 if words else 0)


@pytest.mark.parametrize("words", [[], ["--no-color"]])
def test_no_command_at_all_is_answered_with_the_help(words: list[str], capsys: Capture) -> None:
    assert main(words) == ExitCode.ANSWERED
    out, err = capsys.readouterr()
    assert main(["--help"]) == ExitCode.ANSWERED
    assert (out, err) == (capsys.readouterr().out, "")
    assert len(out.splitlines()) > 20


def test_debug_adds_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(cli, "program", lambda _: raising(ZeroDivisionError("division by zero")))
    assert main(["plan", "x", "--debug"]) == 3
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["plan"], ["plan", "x", "--gpu", "8xH100"], ["plam", "x"], ["gpus", "--colour"], ["gpus", "show"]],
)
def test_wrong_words_are_usage_errors_on_one_line(arguments: list[str], capsys: Capture) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "--help" in err


def test_version_is_said_without_importing_anything_else() -> None:
    code = (
        "import sys; sys.argv = ['gpucalc', '--version']; from gpucalc.__main__ import main; main();"
        "print(*sorted(sys.modules))"
    )
    said, modules = _python("-c", code).stdout.splitlines()
    assert said == f"gpucalc {__version__}"
    assert not {"typer", "pydantic", "yaml", "gpucalc.cli"} & set(modules.split())


def test_a_reader_that_stops_early_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "gpucalc", "gpus"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_ascii_terminal_gets_ascii() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpucalc", "plan", "llama-3-8b"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert done.stdout.isascii()
    assert b"##" in done.stdout


def test_names_are_completed_from_the_catalogue() -> None:
    environment = {**os.environ, "_GPUCALC_COMPLETE": "complete_bash", "COMP_WORDS": "gpucalc gpus show h100"}
    done = subprocess.run(
        [sys.executable, "-m", "gpucalc"],
        env={**environment, "COMP_CWORD": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "h100-sxm-80gb" in done.stdout.split()


def commands(app: typer.Typer = cli.app, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command and group of the program, by the words that call it."""
    found = [path]
    for command in app.registered_commands:
        found.append((*path, str(command.name)))
    for group in app.registered_groups:
        assert group.typer_instance is not None
        found += commands(group.typer_instance, (*path, str(group.name)))
    return found


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words) or "gpucalc")
def test_help_keeps_to_the_width(
    words: tuple[str, ...], width: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([*words, "--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= width


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)


def test_adapters_are_refused_where_no_layer_is_known(capsys: Capture) -> None:
    words = ["plan", "models/resnet-50", "--gpus", "1xL4", "--set", "run.method=lora"]
    assert main(words) == 2
    assert "run.method: adapters wrap the matrices of layers" in capsys.readouterr().err


def test_a_home_nobody_has_is_a_path_that_is_not_there(tmp_path: Path, capsys: Capture) -> None:
    job = tmp_path / "job.yaml"
    job.write_text('{model: "~nobody-here/model.yaml", gpus: 1xL4, run: {task: train}}', encoding="utf-8")
    assert main(["plan", str(job)]) == 2
    assert "~nobody-here/model.yaml" in capsys.readouterr().err
