"""A Hugging Face config.json, or a folder holding one, as a model description.

Only the text is read: no import, no network, nothing executed. Every key is understood, known to
change no shape, or reported as ignored; a key that matters and is missing is an error. An
architecture without a drawing is drawn as a llama-shaped decoder when every key that could change
that is absent, with what was assumed said; anything else is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.families import FAMILIES, canonical
from gpucalc.importers.config.reader import Reader
from gpucalc.importers.config.shapes import fields_of
from gpucalc.importers.config.unknown import (
    may_be_a_shape,
    refuse_unless_plain,
    refuse_unread_layers,
    text_alone,
)
from gpucalc.spec.model import ModelSpec

MAX_BYTES = 4 * 2**20  # a config.json is a few kB


@dataclass(frozen=True, slots=True)
class Imported:
    """What came out of a file, and what was made of its keys."""

    spec: ModelSpec
    understood: tuple[str, ...]
    assumed: tuple[str, ...]
    ignored: tuple[str, ...]


def read_config(path: str | Path, *, text_only: bool = False) -> Imported:
    """The description in a config.json or in a model folder. Raises InputError, UnsupportedModel."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    name = file.parent.name if file.name == "config.json" else file.stem
    return from_config(read_json(file), where=str(file), name=name or None, text_only=text_only)


def read_json(file: Path) -> Any:
    """The value in a small JSON file; a key given twice is an error. Raises InputError."""
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise InputError("too large for a config.json", where=str(file), given=f"{size} bytes")
        return json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except FileNotFoundError:
        raise InputError(f"no {file.name} there", where=str(file)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", where=str(file)) from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"not JSON: {error}", where=str(file)) from None
    except _Twice as error:
        raise InputError("the key is given twice", where=str(file), key=str(error)) from None


class _Twice(Exception):
    """A key that a JSON object holds twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(next(name for name in names if names.count(name) > 1))
    return data


def from_config(
    config: Any, *, where: str = "config.json", name: str | None = None, text_only: bool = False
) -> Imported:
    """The description in a parsed config.json. Raises InputError, UnsupportedModel.

    `text_only`: the language model of a multimodal one, the towers beside it left out.
    """
    if not isinstance(config, Mapping):
        raise InputError("expected a JSON object", where=where, given=config)
    left_out: list[str] = []
    if text_only:
        config, left_out = text_alone(config, where)
    model_type = config.get("model_type")
    classes = config.get("architectures")
    if not isinstance(model_type, str) or not model_type:
        if not isinstance(classes, list) or not classes or not isinstance(classes[0], str):
            raise InputError("missing, so the architecture is unknown", where=where, key="model_type")
        model_type = classes[0]
    key = canonical(_CONFIG_NAMES.get(model_type.lower(), model_type))
    family = FAMILIES.get(key)
    generic = family is None
    if family is not None and family.refused:
        raise UnsupportedModel(family.refused, where=where, key="model_type", given=model_type)
    if family is not None and family.form == "totals":
        raise UnsupportedModel(
            "a convolutional network is described by its totals; a trace of the module measures them",
            where=where,
            key="model_type",
            given=model_type,
        )
    if generic:
        refuse_unless_plain(config, model_type, where)
        key = "llama"
    reader = Reader(config, where, model_type if generic else key)
    reader.assumed += left_out
    if generic:
        reader.assumed.append(
            f"{model_type} is not a known architecture: drawn as a decoder of the llama shape (RMS norms,"
            " rotary positions, gated feed-forward), so counts are approximate"
        )
    fields = fields_of(reader, key)
    leftovers = reader.leftovers()
    refuse_unread_layers(reader, fields.get("layers"))
    if generic:
        shapes = [word for word in leftovers if may_be_a_shape(config, word)]
        if shapes:
            raise UnsupportedModel(
                f"not a known architecture, and {', '.join(shapes[:5])} may change its shape",
                where=where,
                key="model_type",
                given=model_type,
            )
    named = config.get("_name_or_path")
    spec = ModelSpec.read(
        {
            "name": (named if isinstance(named, str) and named else None) or name or model_type,
            "family": key,
            **({"architecture": model_type} if canonical(model_type) == key else {}),
            **{field: value for field, value in fields.items() if value is not None},
        },
        where=where,
    )
    return Imported(spec, tuple(dict.fromkeys(reader.understood)), tuple(reader.assumed), tuple(leftovers))


# Names that a config.json uses for another row than a model file's family of that name.
_CONFIG_NAMES = {"mimo": "qwen2", "deepseek": "deepseek_moe"}
