"""Commands of pipelines: check, diff, oom, schema."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpucalc.commands.base import CatalogDir, Gpus, Json, Sets, Task, app, draw, emit, emit_json
from gpucalc.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType


Outputs = Annotated[
    list[Path] | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="File of the --format of the same rank; - is the screen."
    ),
]


@app.command("check")
def check_command(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Job files, each with a job or several under jobs:."),
    ],
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="table, json, junit, sarif, github, gitlab or markdown; repeatable.",
        ),
    ] = None,
    outputs: Outputs = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--baseline", metavar="FILE", help="An earlier --format json: what it lists fails only if worse."
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 on warnings too.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the counts alone.")] = False,
    catalog: CatalogDir = None,
) -> None:
    """Hold jobs to what they expect; exit 1 when one fails."""
    from gpucalc.catalog import open_catalog
    from gpucalc.check import check
    from gpucalc.check_findings import read_baseline
    from gpucalc.report import files as report_files
    from gpucalc.report import formats as writers

    places = _report_places(formats, outputs, "table", writers.FORMATS)
    report_files.look([path for _, path in places if path is not None])
    known = read_baseline(baseline) if baseline is not None else None
    report = check(files, open_catalog(catalog), baseline=known)

    _deliver(places, lambda name: writers.WRITERS[name](report), lambda: writers.table(report, quiet=quiet))
    raise typer.Exit(report.exit_code(strict=strict))


@app.command("diff")
def diff_command(
    old: Annotated[str, typer.Argument(metavar="OLD", help="JOB, REVISION:FILE of git, or a plan's JSON.")],
    new: Annotated[
        str | None, typer.Argument(metavar="NEW", help="The same; OLD with the flags when left out.")
    ] = None,
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="JOB", help="Plan JOB with the catalogue folders OLD and NEW."),
    ] = None,
    gpus: Annotated[str | None, typer.Option("--gpus", metavar="SPEC", help="GPUs of NEW.")] = None,
    task: Annotated[
        str | None, typer.Option("--task", metavar="train|serve", help="Task of NEW when it is only a model.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key of NEW; repeatable.")
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", metavar="NAME", help="table, json or markdown; repeatable."),
    ] = None,
    outputs: Outputs = None,
    every: Annotated[bool, typer.Option("--all", help="List lines that hardly moved too.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 when the verdict, speed or cost is worse.")
    ] = False,
    catalog: CatalogDir = None,
) -> None:
    """Show every line that moved between two plans, the verdict first."""
    from gpucalc import diff
    from gpucalc.catalog import open_catalog
    from gpucalc.errors import InputError
    from gpucalc.report import answers
    from gpucalc.report import files as report_files

    places = _report_places(formats, outputs, "table", ("table", "json", "markdown"))
    report_files.look([path for _, path in places if path is not None])
    known = open_catalog(catalog)
    other, changes = new if new is not None else old, tuple(sets or ())
    if job is not None:
        sides = [diff.with_calibration(folder, job, known) for folder in (old, other)]
    elif new is None and not (gpus or task or changes):
        raise InputError("is missing", where="NEW", legal="a second plan, or --gpus or --set")
    else:
        sides = [diff.side(old, known), diff.side(other, known, gpus=gpus, task=task, sets=changes)]
    found = diff.compare(*sides)

    def text(name: str) -> str:
        if name == "json":
            from gpucalc.report import json

            return json.text(answers.difference_document(found), indent=2)
        return answers.difference_markdown(found, every=every)

    _deliver(places, text, lambda: answers.difference_table(found, every=every))
    if strict and found.regressions:
        raise typer.Exit(ExitCode.NO)


@app.command("oom")
def oom_command(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="A log with the message or what is in use; - reads it here."),
    ],
    job: Annotated[
        str | None,
        typer.Option(
            "--job", metavar="JOB", help="The job that failed: names the tensor, finds what would fit."
        ),
    ] = None,
    gpus: Gpus = None,
    task: Task = None,
    sets: Sets = None,
    catalog: CatalogDir = None,
    as_json: Json = False,
) -> None:
    """Read an out-of-memory message: which tensor, what would fit."""
    from gpucalc.catalog import open_catalog
    from gpucalc.errors import InputError
    from gpucalc.jobs import resolve
    from gpucalc.oom import diagnose
    from gpucalc.oom_message import MAX_TEXT
    from gpucalc.report import answers
    from gpucalc.spec.yamlio import read_text

    if job is None and (gpus is not None or sets or task is not None):
        raise InputError("goes with a job", where="--gpus, --set or --task", legal="--job JOB")
    if file == "-":
        text = sys.stdin.buffer.read(MAX_TEXT + 1).decode("utf-8", "replace")
    else:
        text = read_text(file, max_bytes=MAX_TEXT)
    known = open_catalog(catalog)
    resolved = resolve(job, known, gpus=gpus, task=task, sets=sets or ()) if job is not None else None
    where = "standard input" if file == "-" else file
    found = diagnose(text, where=where, job=resolved, catalog=known)
    if as_json:
        emit_json(answers.diagnosis_document(found))
    else:
        draw(answers.diagnosis_table(found))


@app.command("schema")
def schema_command(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="job, model, gpu, system, server, calibration, plan or check."),
    ],
) -> None:
    """Print the JSON Schema of a file or a document."""
    import json

    from gpucalc.errors import UnknownName, nearest
    from gpucalc.report.schemas import NAMES, schema

    if name not in NAMES:
        near = nearest(name, NAMES)
        raise UnknownName("no schema of that name", where="NAME", given=name, legal=NAMES, near=near)
    emit(json.dumps(schema(name), indent=2))


def _deliver(
    places: list[tuple[str, Path | None]], text: Callable[[str], str], table: Callable[[], RenderableType]
) -> None:
    """Each format to its file, then one to the screen: the table, where no other is asked for."""
    from gpucalc.report import files as report_files
    from gpucalc.report.screen import render

    def written(name: str) -> str:
        return render(table(), color=False) if name == "table" else text(name)

    report_files.write({path: written(name) for name, path in places if path is not None})
    shown = next((name for name, path in places if path is None), "table")
    if shown == "table":
        draw(table())
    else:
        emit(text(shown))


def _report_places(
    formats: list[str] | None, outputs: list[Path] | None, default: str, legal: Sequence[str]
) -> list[tuple[str, Path | None]]:
    """Which format goes to which file: the first to the first, and one left over to the screen."""
    from gpucalc.errors import InputError, UnknownName, nearest

    names, paths = formats or [default], outputs or []
    for name in names:
        if name not in legal:
            near = nearest(name, legal)
            raise UnknownName("unknown format", where="--format", given=name, legal=legal, near=near)
    if len(paths) > len(names):
        raise InputError("has no --format of its rank", where="-o", given=str(paths[len(names)]))
    places = [None if str(path) == "-" else path for path in paths]
    found = list(zip(names, [*places, *[None] * (len(names) - len(places))], strict=True))
    if sum(path is None for _, path in found) > 1:
        raise InputError(
            "only one format goes to the screen", where="--format", legal="an -o FILE for each of the others"
        )
    return found
