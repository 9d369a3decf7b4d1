"""Commands that read what people already have: import, trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpucalc.commands.base import Hub, Json, app, emit, emit_json

if TYPE_CHECKING:
    pass


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
    """Print another program's file as a job or model file.

    What was understood goes to stderr.
    """
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


@app.command("trace")
def trace_command(
    factory: Annotated[
        str,
        typer.Argument(metavar="MODULE:FACTORY", help="What makes the module, such as networks:resnet50."),
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
    """Run your module on shapes alone; print it as a model file.

    A model file is what plan takes as JOB.
    """
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
