"""The command that compares plans with what was measured: validate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpucalc.commands.base import CatalogDir, Json, app, draw, emit_json
from gpucalc.errors import ExitCode


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
    from gpucalc.commands.progress import shown
    from gpucalc.validate import PARTS, QUANTITIES, parse_where, validate

    if by is not None and by not in PARTS:
        from gpucalc.errors import UnknownName, nearest

        raise UnknownName("unknown part", where="--by", given=by, legal=PARTS, near=nearest(by, PARTS))
    known = open_catalog(catalog)
    with shown("measurements") as progress:
        report = validate(
            files or (),
            catalog=known,
            quantities=tuple(quantity or QUANTITIES),
            where=parse_where(where or ()),
            errors=error_table(known),
            progress=progress,
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
