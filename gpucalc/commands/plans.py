"""Commands that plan: plan, size, explain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpucalc.commands.base import (
    CatalogDir,
    Gpus,
    Hub,
    JobName,
    Json,
    ModelFlag,
    Sets,
    Task,
    app,
    draw,
    emit,
    emit_json,
    names_of,
    planned,
)
from gpucalc.errors import ExitCode, UnknownName

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import RenderableType

    from gpucalc.calibration import CalibratedCatalog
    from gpucalc.documents import Estimate


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
    search: Annotated[
        bool,
        typer.Option("--search", help="Search every layout instead, save for keys that --set holds."),
    ] = False,
    rank: Annotated[
        str | None,
        typer.Option(
            "--rank", metavar="time|cost|energy|gpus", help="What --search looks for; smaller fleets too."
        ),
    ] = None,
    rules: Annotated[
        bool, typer.Option("--rules", help="Show every planning document's rule that applies, beside ours.")
    ] = False,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", help="Plan with the constants gpucalc probe measured."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write the plan as a page that needs no network."),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE", help="Also write the report as a picture of a terminal."),
    ] = None,
) -> None:
    """Does JOB fit, how fast is it, what binds, what would help."""
    from gpucalc.plan.answer import Level

    files = {flag: path for flag, path in (("--html", html), ("--svg", svg)) if path is not None}
    of_one = {"--calibration": calibration is not None, "--rules": rules, "--quiet": quiet}
    if scale is not None:
        searching = {"--search": search, "--rank": rank is not None}
        _only_alone("--scale", {**dict.fromkeys(files, True), **of_one, **searching})
        _scaled(job, scale, gpus, task, sets, catalog, model=model, hub=hub, as_json=as_json, strict=strict)
        return

    if search or rank is not None:
        _only_alone("--search" if search else "--rank", of_one)
        printed = _files_wanted(files, as_json)
        _searched(
            job, gpus, task, sets, catalog, model=model, hub=hub, rank=rank, as_json=as_json, strict=strict,
            files=files, printed=printed,
        )  # fmt: skip
        return

    printed = _files_wanted(files, as_json)
    measured: CalibratedCatalog | None = None
    if calibration is not None:
        from gpucalc.calibration import CalibratedCatalog
        from gpucalc.catalog import roots

        measured = CalibratedCatalog(roots(catalog), calibration)
    advice = not quiet or html is not None
    answer, origin = planned(
        job, gpus, task, sets, catalog, model=model, hub=hub, advice=advice, known=measured
    )
    if measured is not None:
        origin = {**origin, "calibration": measured.document()}
    told: tuple[Estimate, ...] = ()
    if rules:
        from gpucalc.api import warned
        from gpucalc.documents import estimates

        cluster = answer.cluster
        told = estimates(answer, cluster)
        answer = warned(answer, [f"gpus/{pool.gpu.id}" for pool in cluster.pools])
    if files:
        from gpucalc.report import table

        shown = table.verdict(answer.verdict) if quiet else table.plan(answer, told)
        _write(
            files,
            _command(job, gpus, task, sets),
            page=lambda: answer.html(rules=told, origin=origin),
            report=shown,
        )
    if as_json:
        from gpucalc.report import json

        emit_json(json.plan(answer, origin, told))
    elif not printed:  # a file that is standard output stands in place of the report
        from gpucalc.report import table

        draw(table.verdict(answer.verdict) if quiet else table.plan(answer, told))
        if measured is not None and not quiet:
            draw(table.calibrated(measured.words()))
    if strict and answer.verdict.level is Level.DOES_NOT_FIT:
        raise typer.Exit(ExitCode.NO)


def _only_alone(flag: str, others: Mapping[str, bool]) -> None:
    """Refuses flags of a single plan beside one that answers with many."""
    given = [other for other, is_given in others.items() if is_given]
    if given:
        from gpucalc.errors import InputError

        raise InputError(f"does not go with {flag}", where=given[0])


def _files_wanted(files: Mapping[str, Path], as_json: bool) -> bool:
    """Whether a file is standard output. Refuses what cannot be written before anything is planned."""
    if not files:
        return False
    from gpucalc.report.files import look

    here = [flag for flag, path in files.items() if str(path) == "-"]
    if len(here) + (as_json and bool(here)) > 1:
        from gpucalc.errors import InputError

        raise InputError("standard output holds one document", where=here[-1], given="-", legal="a file")
    kept = {flag: path for flag, path in files.items() if flag not in here}
    look(list(kept.values()), " or ".join(kept))
    return bool(here)


def _write(
    files: Mapping[str, Path], command: str, *, page: Callable[[], str], report: RenderableType
) -> None:
    """Make every file, then write them all: the page, and the report as a picture under its command."""
    from gpucalc.report.files import write

    texts: dict[str, str] = {}
    if "--html" in files:
        texts["--html"] = page()
    if "--svg" in files:
        from gpucalc.report import terminal

        texts["--svg"] = terminal.picture(report, command)
    write({path: texts[flag] for flag, path in files.items() if str(path) != "-"})
    for flag, path in files.items():
        if str(path) == "-":
            emit(texts[flag])


def _command(job: str, gpus: str | None, task: str | None, sets: Sequence[str] | None) -> str:
    """The command line that planned this, as the title of its picture."""
    from shlex import join

    words = ["gpucalc", "plan", job]
    words += [word for flag, value in (("--gpus", gpus), ("--task", task)) if value for word in (flag, value)]
    words += [word for item in sets or () for word in ("--set", item)]
    return join(words)


def _searched(
    job: str,
    gpus: str | None,
    task: str | None,
    sets: list[str] | None,
    catalog: Path | None,
    *,
    model: str | None,
    hub: bool,
    rank: str | None,
    as_json: bool,
    strict: bool,
    files: Mapping[str, Path],
    printed: bool,
) -> None:
    from gpucalc.catalog import open_catalog
    from gpucalc.commands import progress
    from gpucalc.jobs import resolve
    from gpucalc.layouts import best_layouts
    from gpucalc.planner import provenance

    known = open_catalog(catalog)
    resolved = resolve(job, known, gpus=gpus, model=model, hub=hub, task=task, sets=sets or ())
    held = [text.partition("=")[0].strip() for text in sets or ()]
    with progress.shown("layouts") as told:
        found = best_layouts(resolved, known, held=held, rank=rank or "time", progress=told)
    fleet, kept = gpus, list(sets or ())
    if found.best.gpus != resolved.fleet.count:  # a smaller fleet won
        if gpus is not None:
            fleet = found.best.fleet
        else:  # --gpus could make JOB another: the model of that name
            kept.append(f"gpus={found.best.fleet}")
        if any(default.key == "run.framework" for default in resolved.defaults):  # chosen by the fleet
            kept.append(f"run.framework={found.best.recipe.framework}")
    command = _command(job, fleet, task, kept)  # plans, with the settings found, the best layout
    if files:
        from gpucalc.report import layouts

        def page() -> str:
            best = [f"run.{key}={value}" for key, value in found.settings().items()]
            answer, origin = planned(
                job, fleet, task, [*kept, *best], None, model=model, hub=hub, advice=True, known=known
            )
            return answer.html(origin=origin, search=found)

        title = _command(job, gpus, task, sets) + (" --search" if rank is None else f" --rank {rank}")
        _write(files, title, page=page, report=layouts.report(found, command))
    if as_json:
        from gpucalc.report import json

        emit_json({**json.plan(found.best, provenance(resolved, known)), "search": found.document()})
    elif not printed:
        from gpucalc.report import layouts

        draw(layouts.report(found, command))
    if strict and not found.fitting:
        raise typer.Exit(ExitCode.NO)


def _scaled(
    job: str,
    sizes: str,
    gpus: str | None,
    task: str | None,
    sets: list[str] | None,
    catalog: Path | None,
    *,
    model: str | None,
    hub: bool,
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
    planned = resolve(job, known, gpus=gpus, model=model, hub=hub, task=task, sets=sets or ())
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
        typer.Option(metavar="NAME", help="Only this GPU; repeatable.", autocompletion=names_of("gpus")),
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
    sort: Annotated[
        str, typer.Option("--sort", metavar="KEY", help="Order of the list: price, speed, gpus or energy.")
    ] = "price",
) -> None:
    """Find the fleets that meet JOB's targets.

    The cheapest, the fastest, the smallest and the one of least energy; JOB's own GPUs do not count.
    """
    from gpucalc.catalog import open_catalog
    from gpucalc.commands.progress import shown
    from gpucalc.jobs import resolve
    from gpucalc.planner import provenance
    from gpucalc.report import size as report
    from gpucalc.size import size
    from gpucalc.size_fleets import kinds
    from gpucalc.size_offers import ORDERS
    from gpucalc.size_targets import parse_targets

    if sort not in ORDERS:
        raise UnknownName("unknown order", where="--sort", given=sort, legal=tuple(ORDERS))
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
    with shown("fleets") as progress:
        found = size(resolved, known, offered, targets, progress=progress)
    if as_json:
        emit_json({**report.document(found), "provenance": provenance(resolved, known)})
    else:
        draw(report.report(found, every=every, order=sort))
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

    answer, _ = planned(job, gpus, task, sets, catalog, model=model, advice=False)
    verdict = answer.verdict
    found = explain(answer.root, line, prefer=(f"stage_{verdict.stage}", verdict.phase))
    if as_json:
        from gpucalc.report import json

        emit_json(json.explanation(found))
    else:
        from gpucalc.report import table

        draw(table.explanation(found))
