"""The process: what happened becomes an exit code and at most one line on stderr.

Nothing heavy is imported before it is known to be needed: `--version` imports nothing else.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from contextlib import suppress
from typing import NoReturn

from gpucalc import __version__
from gpucalc.errors import ExitCode, GpucalcError, one_line

REPORT_TO = "please report it with this line, the command and the output of --debug"
ANYWHERE = ("--debug", "--no-color")  # flags of the whole program, accepted after the command too
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)  # a disk that takes no more
INTERRUPTED = 130  # 128 + SIGINT, what shells expect of a program stopped from the keyboard


def run() -> NoReturn:
    """The program: one command line, then gone.

    A short process gains nothing from collecting cycles among the classes it has just loaded, from
    looking for pydantic plug-ins, or from taking everything apart at the end; together these are a
    fifth of a plan's time.
    """
    gc.set_threshold(200_000)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us: nobody reads it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # until the end
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by the reader, or from the start
            stream.flush()
    os._exit(code)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given
    words = [item for item in given if item not in ANYWHERE]
    given = [flag for flag in ANYWHERE if flag in given] + (words or ["--help"])
    try:
        if given == ["--version"]:
            print(f"gpucalc {__version__}", flush=True)
            return ExitCode.ANSWERED
        from gpucalc import cli

        program = cli.program(given)
        return int(program(args=given, prog_name="gpucalc", standalone_mode=False) or ExitCode.ANSWERED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # who reads has seen enough
        return ExitCode.ANSWERED
    except SystemExit as leaving:  # how the command line's library leaves a help page nobody reads on
        return ExitCode.ANSWERED if leaving.code in (None, 1) else int(leaving.code)
    except GpucalcError as error:
        return _fail(error, str(error), error.exit_code, debug)
    except OSError as error:
        if not error.filename and error.errno not in _FULL:
            return _internal(error, debug)
        problem = f"{error.filename or 'the output'}: {error.strerror}"
        return _fail(error, problem, ExitCode.USAGE, debug)
    except Exception as error:
        if usage := _usage_problem(error):
            return _fail(error, usage, ExitCode.USAGE, debug)
        return _internal(error, debug)


def _internal(error: Exception, debug: bool) -> int:
    problem = f"internal error: {type(error).__name__}: {error}; {REPORT_TO}"
    return _fail(error, problem, ExitCode.INTERNAL, debug)


def _fail(error: Exception, message: str, code: ExitCode, debug: bool) -> int:
    with suppress(OSError, ValueError):  # nobody can be told
        if debug:
            import traceback

            traceback.print_exception(error)
        print(f"gpucalc: {one_line(message)}", file=sys.stderr, flush=True)
    return code


def _usage_problem(error: Exception) -> str | None:
    """The text of a wrong flag or argument. typer ships its own copy of click, under a private
    name that moves between versions, so its errors are known by what they can do."""
    describe = getattr(error, "format_message", None)
    if describe is None:
        return None
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "gpucalc")
    text = " ".join(str(describe()).split()).rstrip(".")
    refused = getattr(error.__cause__, "errors", None)  # a value of another type, which pydantic refused
    if refused is not None:
        text += f", got {refused()[0]['input']!r}"
    return f"{text}; see {command} --help" if text else f"see {command} --help"


if __name__ == "__main__":
    run()
