"""The command line: words, flags and exit codes.

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

    from gpucalc.calibration import CalibratedCatalog
    from gpucalc.catalog import Catalog
    from gpucalc.counts import Counts
    from gpucalc.documents import Estimate
    from gpucalc.plan.answer import Plan
    from gpucalc.spec.model import ModelSpec


class _ListFirst(TyperGroup):
    """A group whose `list` command may be left out: `gpucalc gpus --arch hopper`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] != "--help"):
            args = ["list", *args]
        return super().parse_args(ctx, args)


def _group(help_text: str) -> typer.Typer:
    # Coloured help would cost 80 ms on every --help; errors are worded in __main__.
    return typer.Typer(cls=_ListFirst, rich_markup_mode=None, pretty_exceptions_enable=False, help=help_text)


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Does a model fit these GPUs, how fast will it run, what binds, and what would help.",
    epilog="Exit codes: 0 answered, 1 the answer is no (--strict, checks), 2 usage or bad input, "
    "3 internal error, 4 cannot measure.",
)
gpus_app = _group("List, show and compare GPUs, every figure with its source.")
models_app = _group("List, show and compare models, with parameters counted.")
systems_app = _group("List, show and compare servers and cloud instances.")
app.add_typer(gpus_app, name="gpus")
app.add_typer(models_app, name="models")
app.add_typer(systems_app, name="systems")


def _names(kind: str) -> Callable[[str], list[str]]:
    """Completes catalogue names from file stems; opens no file."""

    def complete(incomplete: str) -> list[str]:
        from gpucalc.catalog import open_catalog

        return [name for name in open_catalog().names(kind) if name.startswith(incomplete)]

    return complete


def _jobs(incomplete: str) -> list[str]:
    return [*_names("jobs")(incomplete), *_names("models")(incomplete)]


def program(words: Sequence[str]) -> typer.Typer:
    """The command line these words need: building the commands they do not call costs 5 ms."""
    called = next((word for word in words if not word.startswith("-")), None)
    commands = [command for command in app.registered_commands if command.name == called]
    groups = [group for group in app.registered_groups if group.name == called]
    if not commands and not groups:
        return app
    narrow = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
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
        autocompletion=_jobs,
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
        autocompletion=_names("models"),
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


@app.command("plan")
def plan_command(
    job: JobName,
    gpus: Gpus = None,
    model: ModelFlag = None,
    task: Task = None,
    sets: Sets = None,
    hub: Hub = False,
    catalog: CatalogDir = None,
    as_json: Json = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 when the plan does not fit.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the verdict alone.")] = False,
    scale: Annotated[
        str | None,
        typer.Option(
            "--scale", metavar="N,N,...", help="Rate, efficiency and cost on these numbers of GPUs instead."
        ),
    ] = None,
    rules: Annotated[
        bool, typer.Option("--rules", help="Show every planning document's rule that applies, beside ours.")
    ] = False,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", help="Plan with the constants gpucalc probe measured."),
    ] = None,
) -> None:
    """Does JOB fit, how fast is it, what binds, what would help."""
    from gpucalc.plan.answer import Level

    if scale is not None:
        if calibration is not None:
            from gpucalc.errors import InputError

            raise InputError("goes with one plan", where="--calibration", legal="without --scale")
        _scaled(job, scale, gpus, task, sets, catalog, as_json=as_json, strict=strict)
        return

    measured: CalibratedCatalog | None = None
    if calibration is not None:
        from gpucalc.calibration import CalibratedCatalog
        from gpucalc.catalog import roots

        measured = CalibratedCatalog(roots(catalog), calibration)
    answer, origin = _planned(
        job, gpus, task, sets, catalog, model=model, hub=hub, advice=not quiet, known=measured
    )
    if measured is not None:
        origin = {**origin, "calibration": measured.document()}
    told: tuple[Estimate, ...] = ()
    if rules:
        from gpucalc.catalog import open_catalog
        from gpucalc.documents import estimates
        from gpucalc.spec.fleet import parse_fleet

        told = estimates(answer, open_catalog(catalog).cluster(parse_fleet(answer.fleet)))
    if as_json:
        from gpucalc.report import json

        emit_json(json.plan(answer, origin, told))
    else:
        from gpucalc.report import table

        draw(table.verdict(answer.verdict) if quiet else table.plan(answer, told))
        if measured is not None and not quiet:
            emit("\n".join(("", *measured.words())))
    if strict and answer.verdict.level is Level.DOES_NOT_FIT:
        raise typer.Exit(ExitCode.NO)


def _scaled(
    job: str,
    sizes: str,
    gpus: str | None,
    task: str | None,
    sets: list[str] | None,
    catalog: Path | None,
    *,
    as_json: bool,
    strict: bool,
) -> None:
    from gpucalc.catalog import open_catalog
    from gpucalc.jobs import resolve
    from gpucalc.planner import provenance
    from gpucalc.scale import parse_sizes
    from gpucalc.scale import scale as scaled

    counts = parse_sizes(sizes)
    known = open_catalog(catalog)
    planned = resolve(job, known, gpus=gpus, task=task, sets=sets or ())
    found = scaled(planned, known, counts)
    if as_json:
        emit_json({**found.document(), "provenance": provenance(planned, known)})
    else:
        from gpucalc.report import scaling

        draw(scaling.report(found))
    if strict and not found.runs:
        raise typer.Exit(ExitCode.NO)


@app.command("size")
def size_command(
    job: JobName,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="N", help="Tokens to train on, such as 15T or 2e9.")
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="TIME", help="Time they may take, such as 36h or 30 days.")
    ] = None,
    throughput: Annotated[
        str | None, typer.Option("--throughput", metavar="N", help="Tokens per second, trained or put out.")
    ] = None,
    requests: Annotated[
        float | None, typer.Option("--requests", metavar="N", help="Requests per second to serve.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", metavar="USD", help="At most this much for all the tokens.")
    ] = None,
    max_price: Annotated[
        float | None, typer.Option("--max-price", metavar="USD", help="At most this much an hour.")
    ] = None,
    vendor: Annotated[str | None, typer.Option(metavar="NAME", help="Only this vendor's GPUs.")] = None,
    cloud: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only systems of this provider, such as AWS.")
    ] = None,
    arch: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this architecture, such as hopper.")
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this GPU; repeatable.", autocompletion=_names("gpus")),
    ] = None,
    fleet: Annotated[
        Path | None, typer.Option("--fleet", metavar="FILE", help="Only what this file says is available.")
    ] = None,
    max_gpus: Annotated[
        int, typer.Option("--max-gpus", metavar="N", help="The largest fleet looked at.")
    ] = 64,
    unpriced: Annotated[
        bool, typer.Option("--unpriced", help="Also GPUs of which no price is known.")
    ] = False,
    task: Task = None,
    model: ModelFlag = None,
    sets: Sets = None,
    catalog: CatalogDir = None,
    as_json: Json = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 when no fleet meets it.")] = False,
    every: Annotated[bool, typer.Option("--all", help="List every fleet that was planned.")] = False,
) -> None:
    """The cheapest, fastest and smallest fleets that meet JOB's targets; its own GPUs do not count."""
    from gpucalc.catalog import open_catalog
    from gpucalc.jobs import resolve
    from gpucalc.planner import provenance
    from gpucalc.report import size as report
    from gpucalc.size import size
    from gpucalc.size_fleets import kinds
    from gpucalc.size_targets import parse_targets

    known = open_catalog(catalog)
    resolved = resolve(job, known, model=model, task=task, sets=sets or (), need_gpus=False)
    targets = parse_targets(
        resolved,
        tokens=tokens,
        by=by,
        throughput=throughput,
        requests=requests,
        budget=budget,
        max_price=max_price,
    )
    offered = kinds(
        known,
        vendor=vendor,
        cloud=cloud,
        arch=arch,
        gpus=gpu or (),
        fleet=fleet,
        most=max_gpus,
        unpriced=unpriced,
    )
    found = size(resolved, known, offered, targets)
    if as_json:
        emit_json({**report.document(found), "provenance": provenance(resolved, known)})
    else:
        draw(report.report(found, every=every))
    if strict and not found.meeting:
        raise typer.Exit(ExitCode.NO)


@app.command("explain")
def explain_command(
    job: JobName,
    line: Annotated[
        str, typer.Argument(metavar="LINE", help="Dotted path of a line of the plan, or the end of one.")
    ],
    gpus: Gpus = None,
    model: ModelFlag = None,
    task: Task = None,
    sets: Sets = None,
    catalog: CatalogDir = None,
    as_json: Json = False,
) -> None:
    """Show one number of JOB's plan as formula, values and source."""
    from gpucalc.explain import explain

    answer, _ = _planned(job, gpus, task, sets, catalog, model=model, advice=False)
    verdict = answer.verdict
    found = explain(answer.root, line, prefer=(f"stage_{verdict.stage}", verdict.phase))
    if as_json:
        from gpucalc.report import json

        emit_json(json.explanation(found))
    else:
        from gpucalc.report import table

        draw(table.explanation(found))


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
    outputs: Annotated[
        list[Path] | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="File of the --format of the same rank; - is the screen."
        ),
    ] = None,
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
    """Hold the expect: of jobs against their plans; exit 1 when one fails."""
    from gpucalc.catalog import open_catalog
    from gpucalc.check import check, read_baseline
    from gpucalc.report import files as report_files
    from gpucalc.report import formats as writers

    places = _report_places(formats, outputs, "table", writers.FORMATS)
    report_files.look([path for _, path in places if path is not None])
    known = read_baseline(baseline) if baseline is not None else None
    report = check(files, open_catalog(catalog), baseline=known)

    def text(name: str) -> str:
        if name != "table":
            return writers.WRITERS[name](report)
        from gpucalc.report.screen import render

        return render(writers.table(report, quiet=quiet), color=False)

    report_files.write({path: text(name) for name, path in places if path is not None})
    shown = next((name for name, path in places if path is None), "table")
    if shown == "table":
        draw(writers.table(report, quiet=quiet))
    else:
        emit(text(shown))
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
    outputs: Annotated[
        list[Path] | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="File of the --format of the same rank; - is the screen."
        ),
    ] = None,
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
        if name == "markdown":
            return answers.difference_markdown(found, every=every)
        from gpucalc.report.screen import render

        return render(answers.difference_table(found, every=every), color=False)

    report_files.write({path: text(name) for name, path in places if path is not None})
    shown = next((name for name, path in places if path is None), "table")
    if shown == "table":
        draw(answers.difference_table(found, every=every))
    else:
        emit(text(shown))
    if strict and found.regressions:
        raise typer.Exit(ExitCode.NO)


@app.command("oom")
def oom_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A log with the message; - reads it here.")],
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
    """Read an out-of-memory message: which tensor that was, what would fit."""
    from gpucalc.catalog import open_catalog
    from gpucalc.errors import InputError
    from gpucalc.jobs import resolve
    from gpucalc.oom import MAX_TEXT, diagnose
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
    found = diagnose(text, job=resolved, catalog=known)
    if as_json:
        emit_json(answers.diagnosis_document(found))
    else:
        draw(answers.diagnosis_table(found))


@app.command("schema")
def schema_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="job, model, gpu, system, plan or check.")],
) -> None:
    """Print the JSON Schema of a file or a document, for editors and programs."""
    import json

    from gpucalc.errors import UnknownName, nearest
    from gpucalc.report.schemas import NAMES, schema

    if name not in NAMES:
        near = nearest(name, NAMES)
        raise UnknownName("no schema of that name", where="NAME", given=name, legal=NAMES, near=near)
    emit(json.dumps(schema(name), indent=2))


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


@app.command("validate")
def validate_command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="Measured runs; the shipped ones when none is named."),
    ] = None,
    quantity: Annotated[
        list[str] | None,
        typer.Option(
            "--quantity",
            metavar="NAME",
            help="peak_memory, throughput, collective, or of deployments weights, kv_tokens, decode_speed,"
            " batched_speed, prefill, verdict and more; all when not said.",
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where", metavar="KEY=VALUE", help="Only runs with this value, such as framework=fsdp."
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="PART",
            help="Errors by group, framework, arch, gpu, model, quant, op, link or size.",
        ),
    ] = None,
    points: Annotated[bool, typer.Option("--points", help="One row per measured value.")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Write the errors into the catalogue, where plans read them.")
    ] = False,
    catalog: CatalogDir = None,
    as_json: Json = False,
) -> None:
    """Plan every published measurement and show the error of each."""
    from gpucalc.accuracy import error_table
    from gpucalc.catalog import open_catalog
    from gpucalc.validate import PARTS, QUANTITIES, parse_where, validate

    if by is not None and by not in PARTS:
        from gpucalc.errors import UnknownName

        raise UnknownName("unknown part", where="--by", given=by, legal=PARTS)
    known = open_catalog(catalog)
    report = validate(
        files or (),
        catalog=known,
        quantities=tuple(quantity or QUANTITIES),
        where=parse_where(where or ()),
        errors=error_table(known),
    )
    broken = report.broken()
    if record:
        from gpucalc.accuracy import write

        typer.echo(f"recorded in {write(report, known)}", err=True)
    if as_json:
        emit_json({**report.document(), "broken": list(broken)})
    else:
        from gpucalc.report import validation

        draw(validation.report(report, broken, by=by, points=points))
    if broken:
        raise typer.Exit(ExitCode.NO)


@app.command("import")
def import_command(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A trainer's or server's file or command line, a config.json, a model folder, a .gguf or"
            " .safetensors file, org/name of the local Hugging Face cache, or - for standard input.",
        ),
    ],
    format: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="The file's format, where it is not clear.")
    ] = None,
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Of a multimodal model, the language model alone.")
    ] = False,
    hub: Hub = False,
    as_json: Json = False,
) -> None:
    """Print another program's file as a job or model file; what was understood goes to stderr."""
    from gpucalc.importers.load import load

    loaded = load(file, format=format, text_only=text_only, use_hub=hub)
    lists = {
        "understood": loaded.understood,
        "assumed": loaded.assumed,
        "asked for": loaded.asked,
        "ignored": loaded.ignored,
    }
    if as_json:
        body = {name.replace(" ", "_"): list(items) for name, items in lists.items()}
        emit_json({"kind": loaded.kind, "format": loaded.format, loaded.kind: loaded.data, **body})
        return
    for name, items in lists.items():
        apart = ", " if name in ("understood", "ignored") else "; "
        typer.echo(f"{name}: {apart.join(items) or 'nothing'}", err=True)
    emit(loaded.yaml().rstrip())


@app.command("claims")
def claims_command(
    name: Annotated[
        str | None, typer.Argument(metavar="ID", help="One claim in full; all of them when left out.")
    ] = None,
    verdict: Annotated[
        str | None,
        typer.Option(
            "--verdict",
            metavar="NAME",
            help="Only sound, approximate, contradictory, wrong or unverifiable ones.",
        ),
    ] = None,
    document: Annotated[
        str | None,
        typer.Option(
            "--document", metavar="NAME", help="Only one document's, by number or words of its title."
        ),
    ] = None,
    topic: Annotated[
        str | None,
        typer.Option("--topic", metavar="NAME", help="Only one topic's.", autocompletion=_names("claims")),
    ] = None,
    catalog: CatalogDir = None,
    as_json: Json = False,
) -> None:
    """Show what planning documents claim, our own number and a verdict."""
    from gpucalc.catalog import open_catalog
    from gpucalc.claims import claim, claims
    from gpucalc.report import claims as claims_report

    known = open_catalog(catalog)
    filters = {"verdict": verdict, "document": document, "topic": topic}
    found = (claim(known, name),) if name is not None else claims(known, **filters)
    if as_json:
        emit_json(claims_report.document(found))
    else:
        draw(claims_report.detail(found[0]) if name is not None else claims_report.report(found))


@app.command("trace")
def trace_command(
    factory: Annotated[
        str, typer.Argument(metavar="MODULE:FACTORY", help="What makes the module, such as networks:resnet50.")
    ],
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input",
            metavar="SHAPE",
            help="[name=][dtype:]1x3x224x224 of an argument of forward, batch first; repeatable.",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Option("--arg", metavar="KEY=VALUE", help="An argument of the factory; repeatable."),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")] = "float32",
    name: Annotated[str | None, typer.Option("--name", help="Name in the model file.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the model file here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run your module's code on shapes alone, and print it as a model file that plan takes."""
    from gpucalc.importers.load import model_yaml
    from gpucalc.trace import parse_argument, parse_input, trace

    shapes = [parse_input(text) for text in inputs]
    given = dict(parse_argument(text) for text in arguments or ())
    typer.echo(f"this imports {factory.partition(':')[0]} and runs its code on this machine", err=True)
    spec = trace(factory, shapes, arguments=given, dtype=dtype, name=name)
    if output is not None:
        output.write_text(model_yaml(spec), encoding="utf-8")
    if as_json:
        emit_json({"model": spec.model_dump(mode="json", exclude_none=True, exclude_defaults=True)})
    elif output is None:
        emit(model_yaml(spec).rstrip())


@app.command("probe")
def probe_command(
    take_inventory: Annotated[
        bool, typer.Option("--inventory", help="What the driver tells of every GPU; nothing is measured.")
    ] = False,
    matmul: Annotated[bool, typer.Option("--matmul", help="Products by element type and shape.")] = False,
    copy: Annotated[bool, typer.Option("--copy", help="Copies on it, to the host, to a peer.")] = False,
    comm: Annotated[
        bool, typer.Option("--comm", help="Collectives, one process per GPU; also under torchrun or srun.")
    ] = False,
    device: Annotated[str, typer.Option("--device", metavar="cuda|cpu", help="What is measured.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points; under a minute on a CPU.")] = False,
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", help="Processes; all visible GPUs, or 2 on a CPU.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="A lost rank is reported within this.")
    ] = 30.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Calibration; named by date if not.")
    ] = None,
    catalog: CatalogDir = None,
    as_json: Json = False,
) -> None:
    """Measure this machine, for plan --calibration."""
    from gpucalc.catalog import open_catalog
    from gpucalc.errors import CannotMeasure, InputError
    from gpucalc.probe import command
    from gpucalc.report import probe

    known = open_catalog(catalog)
    asked = {"matmul": matmul, "copy": copy, "comm": comm}
    if take_inventory:
        if any(asked.values()) or device != "cuda":
            raise InputError("stands alone: it reads the driver of NVIDIA GPUs", where="--inventory")
        found = command.attached(known)
        if as_json:
            emit_json({"inventory": found.document()})
        else:
            draw(probe.inventory(found))
        return
    tasks = tuple(name for name, wanted in asked.items() if wanted) or command.TASKS
    options = command.Options(tasks, device, quick, ranks, timeout, output)

    def told(point: dict[str, Any]) -> None:
        if words := probe.progress(point):
            typer.echo(words, err=True)

    result = command.measure(options, known, told=told)
    if result is None:  # not the first rank of a program of several
        return
    if as_json:
        body = result.calibration.model_dump(mode="json", exclude_none=True)
        emit_json({"file": str(result.path), "failure": result.failure, "calibration": body})
    else:
        draw(probe.calibration(result.calibration))
        emit(f"written to {result.path}: plan --calibration {result.path}")
    if result.failure:
        raise CannotMeasure(f"{result.failure}; what was measured until then is in {result.path}")


@app.command("doctor")
def doctor_command(
    job: Annotated[
        str | None,
        typer.Argument(metavar="JOB", help="A job the machine has to carry.", autocompletion=_jobs),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="FILE", help="A described server, or a system of the catalogue."),
    ] = None,
    psu: Annotated[
        str | None,
        typer.Option("--psu", metavar="2x1600", help="Power supplies; also 2x1600:redundant:12v=1440."),
    ] = None,
    inlet: Annotated[
        float | None, typer.Option("--inlet", metavar="C", help="Hottest intake temperature.")
    ] = None,
    monitor: Annotated[
        bool, typer.Option("--monitor", help="Print commands to run beside a job on this machine instead.")
    ] = False,
    lint: Annotated[
        str | None,
        typer.Option(
            "--lint", metavar="FILE", help="Look at a launch script or the output of env; - reads it here."
        ),
    ] = None,
    task: Task = None,
    sets: Sets = None,
    catalog: CatalogDir = None,
    as_json: Json = False,
) -> None:
    """Is this machine or a described one fit, or what is wrong with a launch script; exit 1 on an error."""
    from gpucalc.catalog import open_catalog
    from gpucalc.doctor import command
    from gpucalc.doctor.box import Attached

    known = open_catalog(catalog)

    def attached() -> Attached:
        from gpucalc.probe import command as probe

        return probe.attached(known)

    flags = command.Flags(job, system, psu, inlet, monitor, lint, task, tuple(sets or ()))
    answer = command.answer(flags, known, attached)
    if as_json:
        emit_json(answer.document())
    else:
        from gpucalc.report import doctor

        draw(doctor.drawn(answer))
    if answer.severe:
        raise typer.Exit(ExitCode.NO)


def _planned(
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
    from gpucalc.catalog import open_catalog
    from gpucalc.jobs import resolve
    from gpucalc.planner import plan_job, provenance

    known = known or open_catalog(catalog)
    found = resolve(job, known, gpus=gpus, model=model, hub=hub, task=task, sets=sets or ())
    return plan_job(found, known, advice=advice), provenance(found, known)


_NAME = "Catalogue name or alias, case and punctuation free."
GpuName = Annotated[str, typer.Argument(metavar="NAME", help=_NAME, autocompletion=_names("gpus"))]
SystemName = Annotated[str, typer.Argument(metavar="NAME", help=_NAME, autocompletion=_names("systems"))]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Catalogue name or alias, or a path to a config.json or its folder.",
        autocompletion=_names("models"),
    ),
]


@gpus_app.command("list")
def gpus_list(
    vendor: Annotated[str | None, typer.Option(help="Only this vendor.")] = None,
    arch: Annotated[str | None, typer.Option(help="Only this architecture, such as hopper.")] = None,
    min_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="At least this much, such as 40GB.")
    ] = None,
    catalog: CatalogDir = None,
    as_json: Json = False,
) -> None:
    """List the GPUs of the catalogue."""
    from gpucalc.catalog import open_catalog

    at_least = _size(min_memory, "--min-memory")
    entries = [open_catalog(catalog).gpu(name)[0] for name in open_catalog(catalog).names("gpus")]
    entries = _only(entries, "--vendor", vendor, lambda gpu: gpu.vendor)
    entries = _only(entries, "--arch", arch, lambda gpu: gpu.arch)
    entries = [gpu for gpu in entries if gpu.memory_label.si >= at_least]
    _entries(entries, "gpus", as_json)


@gpus_app.command("show")
def gpus_show(name: GpuName, catalog: CatalogDir = None, as_json: Json = False) -> None:
    """Show every figure of a GPU with its unit, kind and source."""
    _entry("gpus", name, catalog, as_json)


@gpus_app.command("compare")
def gpus_compare(a: GpuName, b: GpuName, catalog: CatalogDir = None, as_json: Json = False) -> None:
    """Show two GPUs side by side."""
    _comparison("gpus", a, b, catalog, as_json)


@systems_app.command("list")
def systems_list(
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="Only systems of this GPU.")] = None,
    provider: Annotated[str | None, typer.Option(help="Only this provider.")] = None,
    catalog: CatalogDir = None,
    as_json: Json = False,
) -> None:
    """List the systems of the catalogue."""
    from gpucalc.catalog import open_catalog

    known = open_catalog(catalog)
    entries = [known.system(name) for name in known.names("systems")]
    if gpu is not None:
        wanted = known.gpu(gpu)[0].id
        entries = [system for system in entries if system.gpu == wanted]
    entries = _only(entries, "--provider", provider, lambda system: system.provider)
    _entries(entries, "systems", as_json)


@systems_app.command("show")
def systems_show(name: SystemName, catalog: CatalogDir = None, as_json: Json = False) -> None:
    """Show every figure of a system with its unit, kind and source."""
    _entry("systems", name, catalog, as_json)


@systems_app.command("compare")
def systems_compare(a: SystemName, b: SystemName, catalog: CatalogDir = None, as_json: Json = False) -> None:
    """Show two systems side by side."""
    _comparison("systems", a, b, catalog, as_json)


@models_app.command("list")
def models_list(
    family: Annotated[str | None, typer.Option(help="Only this family, such as llama.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only this kind, such as moe_decoder.")] = None,
    catalog: CatalogDir = None,
    as_json: Json = False,
) -> None:
    """List the models of the catalogue, with parameters counted from the architecture."""
    from gpucalc.catalog import open_catalog

    known = open_catalog(catalog)
    specs = [known.model(name) for name in known.names("models")]
    specs = _only(specs, "--family", family, lambda spec: spec.family or "")
    specs = _only(specs, "--kind", kind, lambda spec: spec.kind or "")
    described = [_described(spec) for spec in specs]
    if as_json:
        emit_json({"models": described})
    else:
        from gpucalc.report import catalogue

        draw(catalogue.models(described))


@models_app.command("show")
def models_show(name: ModelName, catalog: CatalogDir = None, as_json: Json = False) -> None:
    """Show a model's architecture and its parameters, counted part by part."""
    from gpucalc.report import json

    spec, where, notes = _model(name, catalog)
    counts = _counted(spec)
    known = json.facts(spec)
    stated = {key: known.pop(key) for key in list(known) if "params" in key or key == "published"}
    if as_json:
        body = {**_described(spec), "architecture": known, "stated_by_source": stated}
        emit_json({**body, "lines": [json.line(counts.total)], "notes": list(notes), "file": where})
    else:
        from gpucalc.report import catalogue

        draw(catalogue.model(spec, counts.total, counts.active, known, stated, notes, where))


@models_app.command("compare")
def models_compare(a: ModelName, b: ModelName, catalog: CatalogDir = None, as_json: Json = False) -> None:
    """Show two models side by side."""
    from gpucalc.report import json

    specs = [_model(name, catalog)[0] for name in (a, b)]
    first, second = ({**_described(spec), **_shapes(json.facts(spec))} for spec in specs)
    if as_json:
        emit_json({"a": first, "b": second})
    else:
        from gpucalc.report import catalogue

        draw(catalogue.facts_comparison(first, second, (specs[0].label, specs[1].label)))


def _model(name: str, folder: Path | None) -> tuple[ModelSpec, str, tuple[str, ...]]:
    from gpucalc.catalog import open_catalog
    from gpucalc.jobs import resolve

    known = open_catalog(folder)
    wanted = name if Path(name).exists() else f"models/{name}"
    found = resolve(wanted, known, need_gpus=False)
    return found.model, found.model_where, found.notes


def _counted(spec: ModelSpec) -> Counts:
    from gpucalc.builders.build import build_graph
    from gpucalc.counts import count

    return count(build_graph(spec))


def _shapes(known: dict[str, Any]) -> dict[str, Any]:
    """What the architecture is, without names and what sources state about it."""
    said = ("aliases", "hf", "published", "config_source", "count_status", "released", "max_context")
    return {key: fact for key, fact in known.items() if key not in said and "params" not in key}


def _described(spec: ModelSpec) -> dict[str, Any]:
    """A model in a row; counts are None for an architecture whose arithmetic is not known."""
    from gpucalc.errors import UnsupportedModel
    from gpucalc.report.json import plain

    try:
        counts = _counted(spec)
        total, active = plain(counts.total.value), plain(counts.active.value)
    except UnsupportedModel:
        total = active = None
    return {
        "id": spec.label,
        "family": spec.family,
        "kind": spec.kind,
        "params_total": total,
        "params_active": active,
        "max_context_tokens": spec.max_context,
    }


def _entries(entries: list[Any], kind: str, as_json: bool) -> None:
    from gpucalc.report import json

    if as_json:
        emit_json(json.entries(kind, entries))
    else:
        from gpucalc.report import catalogue

        draw(catalogue.gpus(entries) if kind == "gpus" else catalogue.systems(entries))


def _entry(kind: str, name: str, folder: Path | None, as_json: bool) -> None:
    from gpucalc.catalog import open_catalog
    from gpucalc.report import json

    known = open_catalog(folder)
    spec = known.gpu(name)[0] if kind == "gpus" else known.system(name)
    origin = f"{known.path_of(kind, name)}, revision {known.revision_of(kind, name)}"
    if as_json:
        emit_json(json.entry(spec, file=origin))
    else:
        from gpucalc.report import catalogue

        draw(catalogue.entry(spec, json.facts(spec), origin))


def _comparison(kind: str, a: str, b: str, folder: Path | None, as_json: bool) -> None:
    from gpucalc.catalog import open_catalog
    from gpucalc.report import json

    known = open_catalog(folder)
    first, second = ((known.gpu(name)[0] if kind == "gpus" else known.system(name)) for name in (a, b))
    if as_json:
        emit_json(json.comparison(first, second))
    else:
        from gpucalc.report import catalogue

        draw(catalogue.comparison(first, second))


def _only(entries: list[Any], flag: str, wanted: str | None, of: Callable[[Any], str]) -> list[Any]:
    """The entries with that value; a value no entry has is an error, not an empty list."""
    if wanted is None:
        return entries
    kept = [entry for entry in entries if of(entry).casefold() == wanted.casefold()]
    if not kept:
        from gpucalc.errors import UnknownName, nearest

        legal = sorted({of(entry) for entry in entries})
        near = nearest(wanted, legal)
        raise UnknownName("no entry has this value", where=flag, given=wanted, legal=legal, near=near)
    return kept


def _size(text: str | None, flag: str) -> float:
    from gpucalc.errors import InputError
    from gpucalc.units import parse_bytes

    if text is None:
        return 0.0
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise InputError(str(error), where=flag) from None


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
