"""Commands that show what is known, and check it: gpus, systems, models, catalog, claims, formulas."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpucalc.commands.base import (
    CatalogDir,
    Json,
    app,
    catalog_app,
    draw,
    emit,
    emit_json,
    gpus_app,
    models_app,
    names_of,
    systems_app,
)
from gpucalc.errors import ExitCode

if TYPE_CHECKING:
    from gpucalc.counts import Counts
    from gpucalc.spec.model import ModelSpec


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
        typer.Option("--topic", metavar="NAME", help="Only one topic's.", autocompletion=names_of("claims")),
    ] = None,
    catalog: CatalogDir = None,
    as_json: Json = False,
) -> None:
    """Show what planning documents claim, beside our numbers."""
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


@app.command("formulas")
def formulas_command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One formula in full; all of them when left out.")
    ] = None,
    module: Annotated[
        str | None, typer.Option("--module", metavar="NAME", help="Only one module's, such as comm.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference as a page.")] = False,
    catalog: CatalogDir = None,
    as_json: Json = False,
) -> None:
    """Show the formulas: expression, units, source, and who uses them."""
    from gpucalc.catalog import open_catalog
    from gpucalc.reference import entry, reference
    from gpucalc.report import reference as report

    known = open_catalog(catalog)
    if name is not None:
        found = entry(known, name)
        if as_json:
            emit_json(found.document())
        else:
            draw(report.detail(found))
        return
    modules = reference(known, module=module)
    if as_json:
        emit_json({"formulas": [item.document() for one in modules for item in one.entries]})
    elif markdown:
        emit(report.markdown(modules))
    else:
        draw(report.table(modules))


_NAME = "Catalogue name or alias, case and punctuation free."
GpuName = Annotated[str, typer.Argument(metavar="NAME", help=_NAME, autocompletion=names_of("gpus"))]
SystemName = Annotated[str, typer.Argument(metavar="NAME", help=_NAME, autocompletion=names_of("systems"))]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Catalogue name or alias, or a path to a config.json or its folder.",
        autocompletion=names_of("models"),
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
    from gpucalc.catalog import entries_with, open_catalog

    at_least = _size(min_memory, "--min-memory")
    entries = [open_catalog(catalog).gpu(name)[0] for name in open_catalog(catalog).names("gpus")]
    entries = entries_with(entries, "--vendor", vendor, lambda gpu: gpu.vendor)
    entries = entries_with(entries, "--arch", arch, lambda gpu: gpu.arch)
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
    from gpucalc.catalog import entries_with, open_catalog

    known = open_catalog(catalog)
    entries = [known.system(name) for name in known.names("systems")]
    if gpu is not None:
        wanted = known.gpu(gpu)[0].id
        entries = [system for system in entries if system.gpu == wanted]
    entries = entries_with(entries, "--provider", provider, lambda system: system.provider)
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
    """List the models of the catalogue, their parameters counted."""
    from gpucalc.catalog import entries_with, open_catalog

    known = open_catalog(catalog)
    specs = [known.model(name) for name in known.names("models")]
    specs = entries_with(specs, "--family", family, lambda spec: spec.family or "")
    specs = entries_with(specs, "--kind", kind, lambda spec: spec.kind or "")
    described = [_described(spec) for spec in specs]
    if as_json:
        emit_json({"models": described})
    else:
        from gpucalc.report import catalogue

        draw(catalogue.models(described))


@models_app.command("show")
def models_show(name: ModelName, catalog: CatalogDir = None, as_json: Json = False) -> None:
    """Show a model's architecture and its parameters by part."""
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


@catalog_app.command("list")
def catalog_list(catalog: CatalogDir = None, as_json: Json = False) -> None:
    """List the folders that are searched, in their order."""
    from gpucalc.catalog import roots, shipped
    from gpucalc.catalog_files import kinds_of

    folders = kinds_of(roots(catalog))
    if as_json:
        emit_json({"folders": [{"path": str(path), "files": kinds} for path, kinds in folders.items()]})
    else:
        from gpucalc.report import catalogue

        draw(catalogue.folders(folders, shipped()))


@catalog_app.command("check")
def catalog_check(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATH...", help="Files and folders; all that are searched when none is named."
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 on warnings too.")] = False,
    catalog: CatalogDir = None,
    as_json: Json = False,
) -> None:
    """Check catalogue files; exit 1 on an error."""
    from gpucalc.catalog import roots
    from gpucalc.catalog_check import check_files
    from gpucalc.commands.progress import shown

    with shown("catalogue files") as progress:
        report = check_files(paths or (), roots(catalog), progress=progress)
    if as_json:
        emit_json(report.document())
    else:
        # One line each, however long: editors and programs find the place in it.
        emit("\n".join([*(finding.text for finding in report.findings), report.summary]))
    if not report.passes(strict=strict):
        raise typer.Exit(ExitCode.NO)


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


def _size(text: str | None, flag: str) -> float:
    from gpucalc.errors import InputError
    from gpucalc.units import SIZES, parse_bytes

    if text is None:
        return 0.0
    try:
        return parse_bytes(text)
    except ValueError:
        raise InputError("is not a size", where=flag, given=text, legal=SIZES) from None
