"""What every command shares: the program, its options, and how answers are written.

Only typer and the standard library are imported on top; a command imports what it needs, so
that `--help` and `plan --json` stay quick. Answers go to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from gpucalc.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import RenderableType

    from gpucalc.api import Plan
    from gpucalc.catalog import Catalog


HELP = {"help_option_names": ["-h", "--help"]}


class _ListFirst(TyperGroup):
    """A group whose `list` command may be left out: `gpucalc gpus --arch hopper`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in HELP["help_option_names"]):
            args = ["list", *args]
        return super().parse_args(ctx, args)


def _group(help_text: str) -> typer.Typer:
    # Coloured help would cost 80 ms on every --help; errors are worded in __main__.
    return typer.Typer(cls=_ListFirst, rich_markup_mode=None, pretty_exceptions_enable=False, help=help_text)


app = typer.Typer(
    no_args_is_help=True,
    context_settings=HELP,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Does a model fit these GPUs, how fast will it run, what binds, and what would help.",
    epilog="Exit codes: 0 answered, 1 the answer is no (--strict, checks), 2 usage or bad input, "
    "3 internal error, 4 cannot measure.",
)
gpus_app = _group("List, show and compare GPUs, every figure with its source.")
models_app = _group("List, show and compare models, with parameters counted.")
systems_app = _group("List, show and compare servers and cloud instances.")
catalog_app = _group("Check catalogue files; list the folders they lie in.")
app.add_typer(gpus_app, name="gpus")
app.add_typer(models_app, name="models")
app.add_typer(systems_app, name="systems")
app.add_typer(catalog_app, name="catalog")


def names_of(kind: str) -> Callable[[str], list[str]]:
    """Completes catalogue names from file stems; opens no file."""

    def complete(incomplete: str) -> list[str]:
        from gpucalc.catalog import open_catalog

        return [name for name in open_catalog().names(kind) if name.startswith(incomplete)]

    return complete


def job_names(incomplete: str) -> list[str]:
    return [*names_of("jobs")(incomplete), *names_of("models")(incomplete)]


def program(words: Sequence[str]) -> typer.Typer:
    """The command line these words need: building the commands they do not call costs 5 ms."""
    called = next((word for word in words if not word.startswith("-")), None)
    commands = [command for command in app.registered_commands if command.name == called]
    groups = [group for group in app.registered_groups if group.name == called]
    if not commands and not groups:
        return app
    narrow = typer.Typer(context_settings=HELP, rich_markup_mode=None, pretty_exceptions_enable=False)
    narrow.registered_callback = app.registered_callback
    narrow.registered_commands, narrow.registered_groups = commands, groups
    return narrow


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
CatalogDir = Annotated[
    Path | None,
    typer.Option(
        "--catalog", metavar="DIR", help="Catalogue searched before $GPUCALC_CATALOG and the shipped one."
    ),
]
JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Job file, shipped job, model file, config.json, folder or catalogue model.",
        autocompletion=job_names,
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus", metavar="SPEC", help="GPUs, such as 8xH100-SXM or 2x8xA100+4xL40S; wins over the job."
    ),
]
Task = Annotated[
    str | None,
    typer.Option("--task", metavar="train|serve", help="Which default run to plan when JOB is only a model."),
]
ModelFlag = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Model of the job; for files that name none.",
        autocompletion=names_of("models"),
    ),
]
Hub = Annotated[
    bool, typer.Option("--hub", help="Fetch a config.json from the Hugging Face hub (needs gpucalc[hub]).")
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key of the job; repeatable.")
]


@app.callback()
def _everywhere(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="No colour; also $NO_COLOR. May stand anywhere.")
    ] = False,
    debug: Annotated[  # noqa: ARG001  # read in __main__, before anything can fail
        bool, typer.Option("--debug", help="Print a traceback with an error. May stand anywhere.")
    ] = False,
) -> None:
    if version:
        from gpucalc import __version__

        emit(f"gpucalc {__version__}")
        raise typer.Exit(ExitCode.ANSWERED)
    if no_color:
        os.environ["NO_COLOR"] = "1"


def planned(
    job: str,
    gpus: str | None,
    task: str | None,
    sets: list[str] | None,
    catalog: Path | None,
    *,
    model: str | None = None,
    hub: bool = False,
    advice: bool,
    known: Catalog | None = None,
) -> tuple[Plan, Mapping[str, Any]]:
    from gpucalc import api
    from gpucalc.catalog import open_catalog
    from gpucalc.jobs import resolve
    from gpucalc.planner import provenance

    known = known or open_catalog(catalog)
    found = resolve(job, known, gpus=gpus, model=model, hub=hub, task=task, sets=sets or ())
    return api.planned(found, known, advice=advice), provenance(found, known)


def emit_json(body: Mapping[str, Any]) -> None:
    """Print one document: indented for a reader at a terminal, on one line for a program."""
    from gpucalc.report import json

    emit(json.text(body, indent=2 if sys.stdout.isatty() else None))


def draw(item: RenderableType) -> None:
    """Print a table."""
    from gpucalc.report.screen import render

    emit(render(item))


# Drawing characters for terminals that know ASCII only.
_ASCII = {ord(a): b for a, b in zip("▏▎▍▌▋▊▉█│", ":::::###|", strict=True)} | {ord("±"): "+-"}


def emit(text: str) -> None:
    """Print the answer. A reader that stops early (`| head`) changes neither the exit code nor stderr."""
    try:
        try:
            print(text, flush=True)
        except UnicodeEncodeError:
            known = sys.stdout.encoding
            print(text.translate(_ASCII).encode(known, "replace").decode(known), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None
