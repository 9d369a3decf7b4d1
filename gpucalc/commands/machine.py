"""Commands about a machine: probe, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpucalc.commands.base import CatalogDir, Json, Sets, Task, app, draw, emit, emit_json, job_names
from gpucalc.errors import ExitCode

if TYPE_CHECKING:
    from gpucalc.catalog import Catalog
    from gpucalc.probe.command import Options
    from gpucalc.probe.stages import Asked


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
    stages: Annotated[
        str | None,
        typer.Option(
            "--stages",
            metavar="JOB",
            help="Train JOB's model cut to what fits: on one card, on all, then for long; against its plan.",
            autocompletion=job_names,
        ),
    ] = None,
    soak: Annotated[
        str | None,
        typer.Option(
            "--soak",
            metavar="TIME",
            help="Length of the last stage, or 0; 72h, with --quick 10s, if not said.",
        ),
    ] = None,
    inject: Annotated[
        str | None,
        typer.Option(
            "--inject", metavar="FAULT", help="kill-rank or slow-rank, =N for which: is it noticed?"
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="cuda|cpu", help="What is measured.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points; under a minute on a CPU.")] = False,
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", help="Processes; all visible GPUs, or 2 on a CPU.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="A lost rank is reported within this.")
    ] = 30.0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Calibration, or record of stages to go on with."
        ),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option("--gpus", metavar="SPEC", help="GPUs JOB is for; those at hand if not.")
    ] = None,
    sets: Sets = None,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", help="Plan JOB with constants measured here before."),
    ] = None,
    catalog: CatalogDir = None,
    as_json: Json = False,
) -> None:
    """Measure this machine, or try a job on it.

    What is measured is for plan --calibration; --stages tries a job.
    """
    from gpucalc.catalog import open_catalog
    from gpucalc.commands import progress
    from gpucalc.errors import CannotMeasure, InputError
    from gpucalc.probe import command
    from gpucalc.report import probe

    known = open_catalog(catalog)
    asked = {"matmul": matmul, "copy": copy, "comm": comm}
    about_job = {"--gpus": gpus, "--set": sets, "--soak": soak, "--calibration": calibration}
    if stages is None and (flag := next((f for f, given in about_job.items() if given is not None), None)):
        raise InputError("says something of a job", where=flag, legal="with --stages JOB")
    if take_inventory:
        if any(asked.values()) or stages is not None or inject is not None or device != "cuda":
            raise InputError("stands alone: it reads the driver of NVIDIA GPUs", where="--inventory")
        found = command.attached(known)
        if as_json:
            emit_json({"inventory": found.document()})
        else:
            draw(probe.inventory(found))
        return

    if stages is not None:
        if any(asked.values()):
            raise InputError("stands alone: it measures a job, not constants", where="--stages")
        if calibration is not None:
            from gpucalc.calibration import CalibratedCatalog
            from gpucalc.catalog import roots

            known = CalibratedCatalog(roots(catalog), calibration)
        options = command.Options(("stages",), device, quick, ranks, timeout, output, inject)
        length = soak or ("10s" if quick else "72h")
        _tried(options, command.asked(stages, length, gpus, sets), known, as_json=as_json)
        return
    tasks = tuple(name for name, wanted in asked.items() if wanted) or command.TASKS
    options = command.Options(tasks, device, quick, ranks, timeout, output, inject)
    watched = progress.wanted()

    def told(point: dict[str, Any]) -> None:
        if watched and (words := probe.progress(point)):
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


def _tried(options: Options, asked: Asked, known: Catalog, *, as_json: bool) -> None:
    """The stages of a job; exit 1 where the machine failed them, 4 where they ended early."""
    from gpucalc.commands import progress
    from gpucalc.errors import CannotMeasure
    from gpucalc.probe import command
    from gpucalc.report import stages

    with progress.shown("soak, seconds") as bar:

        def told(point: dict[str, Any]) -> None:
            if bar is None:
                return
            if point["kind"] == "window":
                bar(int(point["elapsed_s"]), int(asked.soak_s))
            elif words := stages.progress(point):
                typer.echo(words, err=True)

        result = command.rehearse(options, asked, known, told=told)
    if result is None:
        return
    if as_json:
        emit_json({"file": str(result.path), "failure": result.failure, "stages": result.summary.document()})
    else:
        draw(stages.summary(result.summary))
        emit(f"record in {result.path}; the same command with -o {result.path} goes on with it")
    if result.failure:
        raise CannotMeasure(f"{result.failure}; what was measured until then is in {result.path}")
    if result.summary.verdict == "failed":
        raise typer.Exit(ExitCode.NO)


@app.command("doctor")
def doctor_command(
    job: Annotated[
        str | None,
        typer.Argument(metavar="JOB", help="A job the machine has to carry.", autocompletion=job_names),
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
    """Find what is wrong with a machine or a launch script.

    This machine or a described one; exit 1 on an error.
    """
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
