"""A Hugging Face config.json, or a folder holding one, as a model description.

Only the text is read: no import, no network, nothing executed. Every key is understood, known to
change no shape, or reported as ignored; a key that matters and is missing is an error. An
architecture without a drawing is drawn as a llama-shaped decoder when every key that could change
that is absent, with what was assumed said; anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.families import FAMILIES, canonical
from gpucalc.importers.config.reader import TEXT_KEYS, Reader
from gpucalc.importers.config.shapes import fields_of
from gpucalc.importers.config.towers import WRAPPERS
from gpucalc.importers.config.unknown import (
    may_be_a_shape,
    refuse_unless_plain,
    refuse_unread_layers,
    text_alone,
)
from gpucalc.spec.jsonio import load_json
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
    data = load_json(file, max_bytes=MAX_BYTES).data
    return from_config(data, where=str(file), name=name or None, text_only=text_only)


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
    tower: str | None = None
    if key in WRAPPERS:
        tower, key = WRAPPERS[key]
        key = _text_family(config, key)
    family = FAMILIES.get(key)
    generic = family is None
    if family is not None and family.refused:
        raise UnsupportedModel(family.refused, where=where, key="model_type", given=model_type)
    if family is not None and family.form == "totals" and key not in ("resnet", "convnext", "swin"):
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
    fields = fields_of(reader, key, tower)
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


def _text_family(config: Mapping[str, Any], key: str) -> str:
    """The family of the text model in a multimodal one, `key` where it is not named."""
    inner: Mapping[str, Any] = next(
        (config[name] for name in TEXT_KEYS if isinstance(config.get(name), Mapping)), {}
    )
    named = inner.get("model_type")
    return canonical(_CONFIG_NAMES.get(named.lower(), named)) if isinstance(named, str) and named else key


# Names that a config.json uses for another row than a model file's family of that name.
_CONFIG_NAMES = {"mimo": "qwen2", "deepseek": "deepseek_moe"}
